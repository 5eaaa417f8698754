// SPDX-License-Identifier: Apache-2.0
#include "shim/control.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shim/runtime.h"

namespace vsm::shim {
namespace {

/// Writes one JSON object, field by field.
class Json {
 public:
  explicit Json(std::string* out) : out_(*out) { out_ += '{'; }
  void end() { out_ += '}'; }

  void field(const char* key, uint64_t value) { name(key) += std::to_string(value); }
  void field(const char* key, int value) { name(key) += std::to_string(value); }
  void field(const char* key, bool value) { name(key) += value ? "true" : "false"; }
  void field(const char* key, double value) {
    char text[40];
    std::snprintf(text, sizeof(text), "%.9g", value);
    name(key) += text;
  }
  void field(const char* key, const std::string& value) { quote(name(key), value); }
  void field(const char* key, const char* value) { quote(name(key), value); }
  void field(const char* key, const uint32_t (&v)[3]) {
    name(key) += "[" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + "]";
  }
  void field(const char* key, const abi::Dim3& v) {
    const uint32_t values[3] = {v.x, v.y, v.z};
    field(key, values);
  }
  /// For a value that the caller writes itself.
  std::string& name(const char* key) {
    if (!first_) out_ += ',';
    first_ = false;
    quote(out_, key);
    return out_ += ':';
  }

 private:
  static void quote(std::string& out, const std::string& text) {
    out += '"';
    for (unsigned char c : text) {
      if (c == '"' || c == '\\') {
        (out += '\\') += static_cast<char>(c);
      } else if (c < 0x20) {
        char escape[8];
        std::snprintf(escape, sizeof(escape), "\\u%04x", c);
        out += escape;
      } else {
        out += static_cast<char>(c);
      }
    }
    out += '"';
  }

  std::string& out_;
  bool first_ = true;
};

void append(std::string* out, const Counters& c) {
  Json json(out);
  json.field("warp_instructions", c.warp_instructions);
  json.field("thread_instructions", c.thread_instructions);
  {
    Json classes(&json.name("by_class"));
    for (int i = 0; i < static_cast<int>(OpClass::kCount); ++i) {
      classes.field(to_string(static_cast<OpClass>(i)), c.by_class[i]);
    }
    classes.end();
  }
  json.field("mma_flops", c.mma_flops);
  json.field("global_load_bytes", c.global_load_bytes);
  json.field("global_store_bytes", c.global_store_bytes);
  json.field("global_sectors", c.global_sectors);
  json.field("async_load_bytes", c.async_load_bytes);
  json.field("async_store_bytes", c.async_store_bytes);
  json.field("prefetched_bytes", c.prefetched_bytes);
  json.field("global_distinct_bytes", c.global_distinct_bytes);
  json.field("shared_accesses", c.shared_accesses);
  json.field("shared_wavefronts", c.shared_wavefronts);
  json.field("shared_bank_conflicts", c.shared_bank_conflicts);
  json.field("barrier_waits", c.barrier_waits);
  json.field("blocks", c.blocks);
  json.end();
}

void append(std::string* out, const Report& report) {
  Json json(out);
  json.field("kind", to_string(report.kind));
  json.field("kernel", report.kernel);
  json.field("line", report.line);
  json.field("instruction", report.instruction);
  json.field("block", report.block);
  json.field("warp", report.warp);
  json.field("lane", report.lane);
  json.field("address", report.address);
  json.field("space", report.space);
  json.field("text", report.text);
  json.field("summary", report.str());
  json.end();
}

const char* status_name(LaunchStatus status) {
  switch (status) {
    case LaunchStatus::kOk: return "ok";
    case LaunchStatus::kRefused: return "refused";
    case LaunchStatus::kFault: return "fault";
    case LaunchStatus::kTrap: return "trap";
    case LaunchStatus::kDeadlock: return "deadlock";
    case LaunchStatus::kStepLimit: return "step limit";
  }
  return "unknown";
}

char* duplicate(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

}  // namespace

std::string to_json(const LaunchRecord& record) {
  std::string out;
  Json json(&out);
  json.field("kernel", record.kernel);
  json.field("status", status_name(record.result.status));
  json.field("message", record.result.message);
  json.field("grid", record.grid);
  json.field("block", record.block);
  json.field("static_shared", uint64_t{record.static_shared});
  json.field("dynamic_shared", uint64_t{record.dynamic_shared});
  json.field("registers", uint64_t{record.registers});
  json.field("blocks_per_sm", record.blocks_per_sm);
  json.field("programmatic", record.programmatic);
  json.field("cooperative", record.cooperative);
  json.field("host_seconds", record.result.host_seconds);
  {
    Json predicted(&json.name("predicted"));
    predicted.field("seconds", record.predicted.seconds);
    predicted.field("bound", record.predicted.bound);
    predicted.field("dram", record.predicted.dram);
    predicted.field("issue", record.predicted.issue);
    predicted.field("mma", record.predicted.mma);
    predicted.field("shared", record.predicted.shared);
    predicted.end();
  }
  append(&json.name("counters"), record.result.counters);
  std::string& reports = json.name("reports") += '[';
  for (size_t i = 0; i < record.result.reports.size(); ++i) {
    if (i) reports += ',';
    append(&reports, record.result.reports[i]);
  }
  reports += ']';
  json.end();
  return out;
}

}  // namespace vsm::shim

using vsm::shim::Runtime;
using vsm::shim::Settings;

extern "C" {

int vsm_runtime_configure(const char* architecture, int host_threads, uint32_t watch, uint64_t max_warp_instructions,
                          int strict, int log, const uint8_t* accumulation_bits) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  if (architecture && !runtime.set_architecture(architecture)) return -1;
  Settings& settings = runtime.settings();
  settings.host_threads = host_threads;
  settings.watch = watch;
  settings.max_warp_instructions = max_warp_instructions;
  settings.strict = strict != 0;
  settings.log_to_stderr = log != 0;
  std::memcpy(&settings.accumulation_bits, accumulation_bits, sizeof(settings.accumulation_bits));
  return 0;
}

void vsm_runtime_settings(const char** architecture, int* host_threads, uint32_t* watch,
                          uint64_t* max_warp_instructions, int* strict, int* log, uint8_t* accumulation_bits) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  const Settings& settings = runtime.settings();
  if (architecture) *architecture = settings.architecture.c_str();
  if (host_threads) *host_threads = settings.host_threads;
  if (watch) *watch = settings.watch;
  if (max_warp_instructions) *max_warp_instructions = settings.max_warp_instructions;
  if (strict) *strict = settings.strict;
  if (log) *log = settings.log_to_stderr;
  if (accumulation_bits)
    std::memcpy(accumulation_bits, &settings.accumulation_bits, sizeof(settings.accumulation_bits));
}

int vsm_runtime_multiprocessors(int device, int stream) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  return runtime.set_multiprocessors(device, stream) ? 0 : -1;
}

void vsm_runtime_register(uint64_t address, uint64_t bytes, int read_only) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.device().register_memory(reinterpret_cast<const void*>(address), bytes, read_only != 0);
}

int vsm_runtime_unregister(uint64_t address) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  return runtime.device().unregister_memory(reinterpret_cast<const void*>(address)) ? 0 : -1;
}

void vsm_runtime_discard(uint64_t address, uint64_t bytes) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.device().discard(address, bytes);
}

void vsm_runtime_weak_memory(uint64_t seed) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.settings().weak_memory = seed;
}

void vsm_runtime_late_copies(uint64_t rounds) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.settings().late_copies = rounds;
}

void vsm_runtime_plant(const char* const* from, const char* const* to, int count) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  std::vector<std::pair<std::string, std::string>> replacements;
  for (int i = 0; i < count; ++i) replacements.emplace_back(from[i], to[i]);
  runtime.plant(std::move(replacements));
}

uint64_t vsm_runtime_planted(void) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  return runtime.planted();
}

char* vsm_runtime_take_launches(uint64_t* dropped) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  const uint64_t lost = runtime.take_dropped();
  if (dropped) *dropped = lost;
  std::string out = "[";
  for (const vsm::shim::LaunchRecord& record : runtime.records()) {
    if (out.size() > 1) out += ',';
    out += to_json(record);
  }
  runtime.records().clear();
  return vsm::shim::duplicate(out + "]");
}

void vsm_runtime_free(char* text) { std::free(text); }

char* vsm_runtime_take_message(void) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  char* text = vsm::shim::duplicate(runtime.explanation());
  runtime.clear_explanation();
  return text;
}

double vsm_runtime_clock(void) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  return runtime.clock_seconds();
}

void vsm_runtime_reset(void) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.reset();
  vsm::shim::last_error() = vsm::abi::kSuccess;  // as cudaDeviceReset does: the next caller must not read an old one
}

}  // extern "C"
