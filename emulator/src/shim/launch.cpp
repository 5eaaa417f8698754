// SPDX-License-Identifier: Apache-2.0
// Launches: what the driver refuses, the packing of arguments, and what becomes of a fault.
// The codes are those that a real driver gave for the same calls (tests/shim/golden).
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "occupancy.h"
#include "shim/control.h"
#include "shim/runtime.h"

namespace vsm::shim {
namespace {

constexpr size_t kMaxRecords = 65536;

std::string dims(const abi::Dim3& d) {
  return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

uint64_t volume(const abi::Dim3& d) { return uint64_t{d.x} * d.y * d.z; }

bool within(const abi::Dim3& d, const uint32_t most[3]) {
  return d.x >= 1 && d.y >= 1 && d.z >= 1 && d.x <= most[0] && d.y <= most[1] && d.z <= most[2];
}

/// A kernel's name for people: demangled, without template arguments and parameters (a CUTLASS kernel's fill a page).
std::string readable(const std::string& mangled) {
  int status = 0;
  char* demangled = ::abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  const std::string full = status == 0 && demangled ? demangled : mangled;
  std::free(demangled);
  constexpr const char* kUnnamed = "(anonymous namespace)";
  std::string name;
  int depth = 0;
  for (size_t i = 0; i < full.size(); ++i) {
    if (depth == 0 && full.compare(i, std::strlen(kUnnamed), kUnnamed) == 0) {
      name += kUnnamed;
      i += std::strlen(kUnnamed) - 1;
      continue;
    }
    if (full[i] == '(' && depth == 0) break;
    if (full[i] == '<' && depth++ == 0) name += "<...>";
    if (depth == 0) name += full[i];
    if (full[i] == '>') --depth;
  }
  const size_t type = name.rfind(' ');  // a template's return type comes first
  const bool unnamed_after = type != std::string::npos && name.compare(type, 11, " namespace)") == 0;
  return type == std::string::npos || unnamed_after ? name : name.substr(type + 1);
}

/// Where and what, without the kernel's name.
std::string describe(const Report& report) {
  std::string text = std::string(to_string(report.kind)) + " at PTX line " + std::to_string(report.line);
  if (!report.instruction.empty()) text += " `" + report.instruction + "`";
  text += ", block (" + std::to_string(report.block[0]) + "," + std::to_string(report.block[1]) + "," +
          std::to_string(report.block[2]) + ")";
  if (report.warp >= 0) text += ", warp " + std::to_string(report.warp);
  if (report.lane >= 0) text += ", lane " + std::to_string(report.lane);
  return text + ": " + report.text;
}

/// Dynamic shared memory that a launch of this kernel may ask for.
uint32_t dynamic_limit(const Limits& limits, const Kernel& kernel, const KernelInfo& info) {
  if (kernel.max_dynamic >= 0) return static_cast<uint32_t>(kernel.max_dynamic);
  return limits.shared_per_block_default > info.static_shared ? limits.shared_per_block_default - info.static_shared
                                                              : 0;
}

/// The CUDA error of a launch that did not end well.
int error_of(const LaunchResult& result) {
  switch (result.status) {
    case LaunchStatus::kOk: return abi::kSuccess;
    case LaunchStatus::kRefused: return abi::kInvalidValue;
    case LaunchStatus::kTrap: return abi::kLaunchFailure;
    case LaunchStatus::kDeadlock:
    case LaunchStatus::kStepLimit: return abi::kLaunchTimeout;
    case LaunchStatus::kFault: break;
  }
  for (const Report& report : result.reports) {
    switch (report.kind) {
      case ReportKind::kOutOfBounds:
      case ReportKind::kReadOnlyWrite: return abi::kIllegalAddress;
      case ReportKind::kMisaligned: return abi::kMisalignedAddress;
      case ReportKind::kBadDescriptor: return abi::kIllegalInstruction;
      case ReportKind::kUnsupported: return abi::kNotSupported;
      default: break;
    }
  }
  return abi::kLaunchFailure;
}

}  // namespace

int Runtime::check(const LaunchRequest& request) {
  const Kernel& kernel = *request.kernel;
  const KernelInfo& info = this->info(kernel);
  auto refuse = [&](int error, const std::string& text) {
    explain("launch of " + readable(info.name) + " refused: " + text);
    return error;
  };
  if (!within(request.grid, limits_.max_grid)) return refuse(abi::kInvalidValue, "grid " + dims(request.grid));
  const uint64_t threads = volume(request.block);
  if (!within(request.block, limits_.max_block) || threads > limits_.max_threads_per_block) {
    return refuse(abi::kInvalidValue, "block " + dims(request.block) + "; at most " +
                                          std::to_string(limits_.max_threads_per_block) + " threads");
  }
  const uint64_t bound =
      uint64_t{info.maxntid[0]} * (info.maxntid[1] ? info.maxntid[1] : 1) * (info.maxntid[2] ? info.maxntid[2] : 1);
  if (bound && threads > bound) {
    return refuse(abi::kInvalidValue,
                  std::to_string(threads) + " threads; its launch bounds allow " + std::to_string(bound));
  }
  if (info.reqntid[0] &&
      (request.block.x != info.reqntid[0] || request.block.y != (info.reqntid[1] ? info.reqntid[1] : 1) ||
       request.block.z != (info.reqntid[2] ? info.reqntid[2] : 1))) {
    return refuse(abi::kInvalidValue, "block " + dims(request.block) + " is not the one that .reqntid requires");
  }
  const uint32_t most = dynamic_limit(limits_, kernel, info);
  if (request.dynamic_shared > most) {
    return refuse(abi::kInvalidValue, std::to_string(request.dynamic_shared) + " bytes of dynamic shared memory; " +
                                          std::to_string(most) + " are granted beside " +
                                          std::to_string(info.static_shared) +
                                          " static ones (cudaFuncSetAttribute raises it to " +
                                          std::to_string(limits_.shared_per_block_optin - info.static_shared) + ")");
  }
  if (kernel.registers && !registers_fit(limits_, static_cast<uint32_t>(threads), kernel.registers)) {
    return refuse(abi::kLaunchOutOfResources, std::to_string(threads) + " threads of " +
                                                  std::to_string(kernel.registers) + " registers; a block has " +
                                                  std::to_string(limits_.registers_per_block));
  }
  const abi::Dim3& cluster = request.cluster;
  if (volume(cluster) != 1) {
    return refuse(abi::kInvalidClusterSize,
                  "cluster " + dims(cluster) + "; the virtual device forms clusters of one block");
  }
  if (request.cooperative) {
    const int blocks = blocks_per_sm(limits_, static_cast<uint32_t>(threads), kernel.registers,
                                     uint64_t{info.static_shared} + request.dynamic_shared, kernel.barriers);
    const uint64_t resident = uint64_t(blocks) * limits_.num_sms;
    if (volume(request.grid) > resident) {
      return refuse(abi::kCooperativeLaunchTooLarge, "a cooperative grid of " + std::to_string(volume(request.grid)) +
                                                         " blocks; " + std::to_string(resident) +
                                                         " are resident at a time");
    }
  }
  return abi::kSuccess;
}

int Runtime::decode(const Kernel& kernel) {
  try {
    kernel.binary->program->code(kernel.index);
    return abi::kSuccess;
  } catch (const PtxError& error) {
    explain(error.what());
    return abi::kInvalidPtx;
  }
}

int Runtime::launch(const LaunchRequest& request, void** arguments) {
  Kernel& kernel = *request.kernel;
  if (int error = load(*kernel.binary)) return error;
  if (kernel.index < 0) {
    explain("the PTX has no kernel " + kernel.name);
    return abi::kInvalidDeviceFunction;
  }
  if (request.stream->capture_invalid) return abi::kStreamCaptureInvalidated;
  int error = decode(kernel);
  if (error == abi::kSuccess) error = check(request);
  if (error != abi::kSuccess) {
    if (request.stream->capture) request.stream->capture_invalid = true;
    return error;
  }
  const KernelInfo& info = this->info(kernel);
  std::vector<uint8_t> params(info.param_bytes);
  for (size_t i = 0; i < info.params.size(); ++i) {
    if (!arguments || !arguments[i]) {
      explain("launch of " + info.name + ": argument " + std::to_string(i) + " is null");
      return abi::kInvalidValue;
    }
    std::memcpy(params.data() + info.params[i].offset, arguments[i], info.params[i].size);
  }
  return submit(request.stream, [this, request, params = std::move(params)] { return run(request, params); });
}

int Runtime::run(const LaunchRequest& request, const std::vector<uint8_t>& params) {
  const Kernel& kernel = *request.kernel;
  const KernelInfo& info = this->info(kernel);
  LaunchConfig config;
  const abi::Dim3 shape[2] = {request.grid, request.block};
  for (int i = 0; i < 2; ++i) {
    uint32_t* target = i == 0 ? config.grid : config.block;
    target[0] = shape[i].x, target[1] = shape[i].y, target[2] = shape[i].z;
  }
  config.dynamic_shared = static_cast<uint32_t>(request.dynamic_shared);
  config.max_dynamic_shared = dynamic_limit(limits_, kernel, info);
  config.registers = kernel.registers;
  config.barriers = kernel.barriers;
  config.watch = settings_.watch;
  config.stream = request.stream->id;
  config.programmatic = request.programmatic;
  config.cooperative = request.cooperative;
  config.max_warp_instructions = settings_.max_warp_instructions;
  config.weak_memory = settings_.weak_memory;
  config.late_copies = settings_.late_copies;
  config.accumulation_bits = settings_.accumulation_bits;

  LaunchRecord record;
  record.kernel = info.name;
  record.grid = request.grid;
  record.block = request.block;
  record.static_shared = info.static_shared;
  record.dynamic_shared = config.dynamic_shared;
  record.registers = kernel.registers;
  record.programmatic = request.programmatic;
  record.cooperative = request.cooperative;
  record.blocks_per_sm = blocks_per_sm(limits_, static_cast<uint32_t>(volume(request.block)), kernel.registers,
                                       uint64_t{info.static_shared} + config.dynamic_shared, kernel.barriers);
  record.result = device().launch(kernel.binary->module, kernel.index, config, params.data(), params.size());
  model::Launch shape_of_launch;
  shape_of_launch.blocks = volume(request.grid);
  shape_of_launch.blocks_per_sm = record.blocks_per_sm;
  record.predicted = model::predict(limits_, shape_of_launch, record.result.counters);
  clock_seconds_ += record.predicted.seconds;

  int error = error_of(record.result);
  const bool reported = !record.result.reports.empty();
  const std::string text = reported ? describe(record.result.reports.front()) : record.result.message;
  if (error == abi::kSuccess && settings_.strict && !record.result.reports.empty()) error = abi::kLaunchFailure;
  if (!text.empty()) explain(readable(info.name) + ": " + text);
  // A launch that was refused never started; everything else leaves the context as it is for good.
  if (error != abi::kSuccess && record.result.status != LaunchStatus::kRefused) sticky_ = error;
  this->record(std::move(record));
  return error;
}

void Runtime::record(LaunchRecord record) {
  if (!settings_.trace_path.empty()) {
    if (std::FILE* file = std::fopen(settings_.trace_path.c_str(), "a")) {
      std::fprintf(file, "%s\n", to_json(record).c_str());
      std::fclose(file);
    }
  }
  if (records_.size() == kMaxRecords) {
    records_.pop_front();
    ++launches_dropped_;
  }
  records_.push_back(std::move(record));
}

}  // namespace vsm::shim
