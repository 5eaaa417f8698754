// SPDX-License-Identifier: Apache-2.0
#include "capi.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "device.h"

using namespace vsm;

struct vsm_device {
  explicit vsm_device(const Limits& limits, int threads) : device(limits, threads) {}
  Device device;
};

namespace {

thread_local std::string last_error;

LoadedModule* module_of(vsm_module* m) { return reinterpret_cast<LoadedModule*>(m); }

void quote(std::string& out, const std::string& text) {
  out += '"';
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u >= 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", u);
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
}

void field(std::string& out, const char* name, uint64_t value) {
  out += std::string("\"") + name + "\":" + std::to_string(value) + ",";
}

const char* status_name(LaunchStatus s) {
  static const char* const kNames[] = {"ok", "refused", "fault", "trap", "deadlock", "step limit"};
  return kNames[static_cast<int>(s)];
}

std::string counters_json(const Counters& c) {
  std::string s = "{";
  field(s, "warp_instructions", c.warp_instructions);
  field(s, "thread_instructions", c.thread_instructions);
  s += "\"by_class\":{";
  for (int i = 0; i < static_cast<int>(OpClass::kCount); ++i)
    field(s, to_string(static_cast<OpClass>(i)), c.by_class[i]);
  s.back() = '}';
  s += ",";
  field(s, "mma_flops", c.mma_flops);
  field(s, "global_load_bytes", c.global_load_bytes);
  field(s, "global_store_bytes", c.global_store_bytes);
  field(s, "global_sectors", c.global_sectors);
  field(s, "async_load_bytes", c.async_load_bytes);
  field(s, "async_store_bytes", c.async_store_bytes);
  field(s, "prefetched_bytes", c.prefetched_bytes);
  field(s, "global_distinct_bytes", c.global_distinct_bytes);
  field(s, "shared_accesses", c.shared_accesses);
  field(s, "shared_wavefronts", c.shared_wavefronts);
  field(s, "shared_bank_conflicts", c.shared_bank_conflicts);
  field(s, "barrier_waits", c.barrier_waits);
  field(s, "blocks", c.blocks);
  s.back() = '}';
  return s;
}

std::string result_json(const LaunchResult& r) {
  std::string s = "{\"status\":";
  quote(s, status_name(r.status));
  s += ",\"message\":";
  quote(s, r.message);
  char seconds[64];
  std::snprintf(seconds, sizeof seconds, ",\"host_seconds\":%.9f", r.host_seconds);
  s += seconds;
  s += ",\"counters\":" + counters_json(r.counters) + ",\"reports\":[";
  for (size_t i = 0; i < r.reports.size(); ++i) {
    const Report& p = r.reports[i];
    s += i ? ",{\"kind\":" : "{\"kind\":";
    quote(s, to_string(p.kind));
    s += ",\"kernel\":";
    quote(s, p.kernel);
    s += ",\"line\":" + std::to_string(p.line) + ",\"instruction\":";
    quote(s, p.instruction);
    s += ",\"block\":[" + std::to_string(p.block[0]) + "," + std::to_string(p.block[1]) + "," +
         std::to_string(p.block[2]) + "]";
    s += ",\"warp\":" + std::to_string(p.warp) + ",\"lane\":" + std::to_string(p.lane) +
         ",\"address\":" + std::to_string(p.address) + ",\"space\":";
    quote(s, p.space);
    s += ",\"text\":";
    quote(s, p.text);
    s += ",\"summary\":";
    quote(s, p.str());
    s += "}";
  }
  return s + "]}";
}

}  // namespace

extern "C" {

const char* vsm_last_error(void) { return last_error.c_str(); }

vsm_device* vsm_device_create(const char* architecture, int host_threads) {
  const std::string name = architecture ? architecture : "";
  last_error.clear();
  if (name == "sm_121a" || name == "sm_120a" || name == "sm_120f" || name == "sm_121f") {
    Limits limits;
    if (name.compare(0, 6, "sm_120") == 0) limits.compute_minor = 0;
    return new vsm_device(limits, host_threads);
  }
  if (name == "sm_90a") return new vsm_device(hopper_limits(), host_threads);
  last_error = "architecture '" + name + "' is not modelled; sm_120a, sm_121a and sm_90a are";
  return nullptr;
}

void vsm_device_destroy(vsm_device* d) { delete d; }

uint64_t vsm_allocate(vsm_device* d, uint64_t bytes) {
  try {
    return d->device.allocate(bytes);
  } catch (const std::exception&) {
    last_error = "cannot allocate " + std::to_string(bytes) + " bytes";
    return 0;
  }
}
int vsm_release(vsm_device* d, uint64_t address) { return d->device.release(address) ? 0 : -1; }
void vsm_register_memory(vsm_device* d, uint64_t address, uint64_t bytes, int read_only) {
  d->device.register_memory(reinterpret_cast<const void*>(address), bytes, read_only != 0);
}
int vsm_unregister_memory(vsm_device* d, uint64_t address) {
  return d->device.unregister_memory(reinterpret_cast<const void*>(address)) ? 0 : -1;
}
void vsm_mark_initialized(vsm_device* d, uint64_t address, uint64_t bytes) {
  d->device.mark_initialized(address, bytes);
}
void vsm_discard(vsm_device* d, uint64_t address, uint64_t bytes) { d->device.discard(address, bytes); }

vsm_module* vsm_module_load(vsm_device* d, const char* ptx, size_t bytes, const char* name) {
  last_error.clear();
  try {
    return reinterpret_cast<vsm_module*>(
        d->device.load(Program::parse(std::string_view(ptx, bytes), name ? name : "module")));
  } catch (const std::exception& e) {
    last_error = e.what();
    return nullptr;
  }
}
void vsm_module_unload(vsm_device* d, vsm_module* m) { d->device.unload(module_of(m)); }

int vsm_module_kernel(vsm_device* d, vsm_module* m, const char* name) {
  return d->device.program(module_of(m)).find_kernel(name);
}
uint64_t vsm_module_variable(vsm_device* d, vsm_module* m, const char* name, uint64_t* size) {
  return d->device.variable(module_of(m), name, size);
}

uint32_t vsm_kernel_param_bytes(vsm_device* d, vsm_module* m, int kernel) {
  const auto& kernels = d->device.program(module_of(m)).kernels();
  return kernel >= 0 && static_cast<size_t>(kernel) < kernels.size() ? kernels[static_cast<size_t>(kernel)].param_bytes
                                                                     : 0;
}

int vsm_run(vsm_device* d, vsm_module* m, int kernel, const vsm_launch* l, const void* params, size_t param_bytes,
            char** json) {
  LaunchConfig c;
  for (int i = 0; i < 3; ++i) {
    c.grid[i] = l->grid[i];
    c.block[i] = l->block[i];
  }
  c.dynamic_shared = l->dynamic_shared;
  c.registers = l->registers;
  c.max_dynamic_shared = l->max_dynamic_shared;
  c.watch = l->watch;
  c.max_reports = l->max_reports;
  c.max_warp_instructions = l->max_warp_instructions;
  c.programmatic = l->programmatic != 0;
  c.cooperative = l->cooperative != 0;
  static_assert(sizeof(c.accumulation_bits) == sizeof(l->accumulation_bits));
  std::memcpy(&c.accumulation_bits, l->accumulation_bits, sizeof(c.accumulation_bits));
  c.stream = l->stream;
  c.weak_memory = l->weak_memory;
  const LaunchResult r = d->device.launch(module_of(m), kernel, c, params, param_bytes);
  if (json) {
    const std::string text = result_json(r);
    *json = static_cast<char*>(std::malloc(text.size() + 1));
    if (*json) std::memcpy(*json, text.c_str(), text.size() + 1);
  }
  return static_cast<int>(r.status);
}

void vsm_free(char* p) { std::free(p); }

}  // extern "C"
