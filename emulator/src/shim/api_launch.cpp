// SPDX-License-Identifier: Apache-2.0
// nvcc's registration hooks, launches, function attributes and occupancy, under CUDA's names.
#include <vector>

#include "occupancy.h"
#include "shim/runtime.h"

using namespace vsm;        // NOLINT: the names below are CUDA's
using namespace vsm::shim;  // NOLINT

namespace {

struct CallConfiguration {
  abi::Dim3 grid, block;
  size_t shared;
  void* stream;
};

std::vector<CallConfiguration>& call_configurations() {
  thread_local std::vector<CallConfiguration> stack;
  return stack;
}

int launch_plain(Runtime& runtime, const void* function, abi::Dim3 grid, abi::Dim3 block, void** arguments,
                 size_t shared, void* stream, bool cooperative) {
  LaunchRequest request;
  if (!function) return abi::kInvalidDeviceFunction;
  request.kernel = runtime.find_kernel(function);
  request.stream = runtime.find_stream(stream);
  // A pointer that is no host function is taken for a cudaKernel_t, and refused as a handle.
  if (!request.kernel || !request.stream) return abi::kInvalidResourceHandle;
  request.grid = grid;
  request.block = block;
  request.dynamic_shared = shared;
  request.cooperative = cooperative;
  return runtime.launch(request, arguments);
}

/// Reads one launch attribute into the request. A CUDA error.
int apply_attribute(Runtime& runtime, const abi::LaunchAttribute& attribute, LaunchRequest* request) {
  switch (attribute.id) {
    case abi::kClusterDimension: {
      const abi::Dim3 cluster = attribute.value.dims;
      const bool empty = cluster.x == 0 || cluster.y == 0 || cluster.z == 0;
      if (empty || request->grid.x % cluster.x || request->grid.y % cluster.y || request->grid.z % cluster.z) {
        runtime.explain("the cluster dimensions are zero or do not divide the grid");
        return abi::kInvalidClusterSize;
      }
      request->cluster = cluster;
      return abi::kSuccess;
    }
    case abi::kCooperative: request->cooperative = attribute.value.number != 0; return abi::kSuccess;
    case abi::kProgrammaticStreamSerialization:
      request->programmatic = attribute.value.number != 0;
      return abi::kSuccess;
    case abi::kProgrammaticEvent:
    case abi::kLaunchCompletionEvent:
      runtime.explain("launch attribute " + std::to_string(attribute.id) + " (an event) is not modelled");
      return abi::kNotSupported;
    default: break;
  }
  // The rest (priority, carveout, access policy, ...) are hints that change no result.
  if (attribute.id >= abi::kIgnore && attribute.id <= abi::kLastLaunchAttribute) return abi::kSuccess;
  runtime.explain("unknown launch attribute " + std::to_string(attribute.id));
  return abi::kInvalidValue;
}

int set_attribute(Runtime& runtime, Kernel& kernel, int attribute, int value) {
  if (int error = runtime.load(*kernel.binary)) return error;
  if (kernel.index < 0) return abi::kInvalidDeviceFunction;
  const KernelInfo& info = runtime.info(kernel);
  switch (attribute) {
    case abi::kMaxDynamicShared: {
      const int64_t most = int64_t{runtime.limits().shared_per_block_optin} - info.static_shared;
      if (value < 0 || value > most) {
        runtime.explain(info.name + ": " + std::to_string(value) + " bytes of dynamic shared memory asked for; 0 to " +
                        std::to_string(most) + " can be granted beside " + std::to_string(info.static_shared) +
                        " static ones");
        return abi::kInvalidValue;
      }
      kernel.max_dynamic = value;
      return abi::kSuccess;
    }
    case abi::kSharedCarveout:
      if (value < -1 || value > 100) return abi::kInvalidValue;
      kernel.carveout = value;
      return abi::kSuccess;
    case abi::kNonPortableCluster:
    case abi::kClusterPolicy: return abi::kSuccess;
    default: return abi::kInvalidValue;
  }
}

int occupancy(Runtime& runtime, int* blocks, const void* function, int threads, size_t dynamic) {
  if (!blocks || threads <= 0) return abi::kInvalidValue;
  Kernel* kernel = runtime.find_kernel(function);
  if (!kernel) return abi::kInvalidDeviceFunction;
  if (int error = runtime.load(*kernel->binary)) return error;
  if (kernel->index < 0) return abi::kInvalidDeviceFunction;
  const KernelInfo& info = runtime.info(*kernel);
  const Limits& limits = runtime.limits();
  const size_t granted = kernel->max_dynamic >= 0 ? static_cast<size_t>(kernel->max_dynamic)
                                                  : limits.shared_per_block_default - info.static_shared;
  *blocks = dynamic > granted ? 0
                              : blocks_per_sm(limits, static_cast<uint32_t>(threads), kernel->registers,
                                              uint64_t{info.static_shared} + dynamic, kernel->barriers);
  return abi::kSuccess;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  return reinterpret_cast<void**>(runtime.add_binary(wrapper));
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.remove_binary(reinterpret_cast<Binary*>(handle));
}

void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.add_kernel(reinterpret_cast<Binary*>(handle), host, name);
}

void __cudaRegisterVar(void** handle, char* host, char*, const char* name, int, size_t, int, int) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  runtime.add_variable(reinterpret_cast<Binary*>(handle), host, name);
}

/// Managed variables would have to live at one address for host and device from start-up: not modelled.
void __cudaRegisterManagedVar(void**, void**, char*, const char* name, int, size_t, int, int) {
  Runtime::get().explain(std::string("__managed__ variable ") + name + " is not modelled: its host pointer stays null");
}

char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(abi::Dim3 grid, abi::Dim3 block, size_t shared, void* stream) {
  call_configurations().push_back({grid, block, shared, stream});
  return 0;
}

int __cudaPopCallConfiguration(abi::Dim3* grid, abi::Dim3* block, size_t* shared, void* stream) {
  std::vector<CallConfiguration>& stack = call_configurations();
  if (stack.empty()) return finish(abi::kIllegalState);
  *grid = stack.back().grid;
  *block = stack.back().block;
  *shared = stack.back().shared;
  *static_cast<void**>(stream) = stack.back().stream;
  stack.pop_back();
  return abi::kSuccess;
}

int cudaGetKernel(void** handle, const void* function) {
  return api([&](Runtime& runtime) -> int {
    if (!handle) return abi::kInvalidValue;
    Kernel* kernel = runtime.find_kernel(function);
    if (!kernel) return abi::kInvalidDeviceFunction;
    *handle = kernel;
    return abi::kSuccess;
  });
}

/// Called while a launch's static variable is made; answers after a fault too.
int __cudaGetKernel(void** handle, const void* function) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  *handle = runtime.find_kernel(function);
  return *handle ? abi::kSuccess : finish(abi::kInvalidDeviceFunction);
}

int cudaLaunchKernel(const void* function, abi::Dim3 grid, abi::Dim3 block, void** arguments, size_t shared,
                     void* stream) {
  return api([&](Runtime& r) { return launch_plain(r, function, grid, block, arguments, shared, stream, false); });
}

int __cudaLaunchKernel(void* kernel, abi::Dim3 grid, abi::Dim3 block, void** arguments, size_t shared, void* stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

int cudaLaunchCooperativeKernel(const void* function, abi::Dim3 grid, abi::Dim3 block, void** arguments, size_t shared,
                                void* stream) {
  return api([&](Runtime& r) { return launch_plain(r, function, grid, block, arguments, shared, stream, true); });
}

int cudaLaunchKernelExC(const abi::LaunchConfig* config, const void* function, void** arguments) {
  return api([&](Runtime& runtime) -> int {
    if (!config || (config->attribute_count && !config->attributes)) return abi::kInvalidValue;
    if (!function) return abi::kInvalidDeviceFunction;
    LaunchRequest request;
    request.kernel = runtime.find_kernel(function);
    request.stream = runtime.find_stream(config->stream);
    if (!request.kernel || !request.stream) return abi::kInvalidResourceHandle;
    request.grid = config->grid;
    request.block = config->block;
    request.dynamic_shared = config->dynamic_shared;
    for (unsigned i = 0; i < config->attribute_count; ++i) {
      if (int error = apply_attribute(runtime, config->attributes[i], &request)) return error;
    }
    return runtime.launch(request, arguments);
  });
}

int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  return api([&](Runtime& runtime) -> int {
    Kernel* kernel = runtime.find_kernel(function);
    return kernel ? set_attribute(runtime, *kernel, attribute, value) : abi::kInvalidDeviceFunction;
  });
}

int cudaKernelSetAttributeForDevice(void* handle, int attribute, int value, int device) {
  return api([&](Runtime& runtime) -> int {
    if (device != 0) return abi::kInvalidDevice;
    if (!runtime.is_kernel_handle(handle)) return abi::kInvalidResourceHandle;
    return set_attribute(runtime, *static_cast<Kernel*>(handle), attribute, value);
  });
}

int cudaFuncSetCacheConfig(const void* function, int) {
  return api([&](Runtime& r) -> int { return r.find_kernel(function) ? abi::kSuccess : abi::kInvalidDeviceFunction; });
}

int cudaFuncGetAttributes(abi::FunctionAttributes* out, const void* function) {
  return api([&](Runtime& runtime) -> int {
    if (!out) return abi::kInvalidValue;
    Kernel* kernel = runtime.find_kernel(function);
    if (!kernel) return abi::kInvalidDeviceFunction;
    if (int error = runtime.load(*kernel->binary)) return error;
    if (kernel->index < 0) return abi::kInvalidDeviceFunction;
    const KernelInfo& info = runtime.info(*kernel);
    const Limits& limits = runtime.limits();
    const uint32_t bound =
        info.maxntid[0] * (info.maxntid[1] ? info.maxntid[1] : 1) * (info.maxntid[2] ? info.maxntid[2] : 1);
    const uint32_t fitting = kernel->registers ? max_threads(limits, kernel->registers) : limits.max_threads_per_block;
    *out = abi::FunctionAttributes{};
    out->shared_bytes = info.static_shared;
    out->local_bytes = info.local_bytes;
    out->max_threads_per_block = static_cast<int>(bound && bound < fitting ? bound : fitting);
    out->registers = static_cast<int>(kernel->registers);
    out->ptx_version = out->binary_version = limits.compute_major * 10 + limits.compute_minor;
    out->max_dynamic_shared_bytes = kernel->max_dynamic >= 0
                                        ? kernel->max_dynamic
                                        : static_cast<int>(limits.shared_per_block_default - info.static_shared);
    out->preferred_shared_carveout = kernel->carveout;
    return abi::kSuccess;
  });
}

int cudaFuncGetName(const char** name, const void* function) {
  return api([&](Runtime& runtime) -> int {
    if (!name) return abi::kInvalidValue;
    Kernel* kernel = runtime.find_kernel(function);
    if (!kernel) return abi::kInvalidDeviceFunction;
    *name = kernel->name.c_str();
    return abi::kSuccess;
  });
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                           size_t dynamic, unsigned flags) {
  return api([&](Runtime& r) -> int {
    return flags > 1 ? abi::kInvalidValue : occupancy(r, blocks, function, threads, dynamic);
  });
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t dynamic) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, dynamic, 0);
}

int cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const abi::LaunchConfig* config) {
  return api([&](Runtime& runtime) -> int {
    if (!clusters || !config) return abi::kInvalidValue;
    LaunchRequest request;
    request.grid = config->grid;
    for (unsigned i = 0; i < config->attribute_count; ++i) {
      if (int error = apply_attribute(runtime, config->attributes[i], &request)) return error;
    }
    if (request.cluster.x * request.cluster.y * request.cluster.z != 1) return abi::kInvalidClusterSize;
    const int threads = static_cast<int>(config->block.x * config->block.y * config->block.z);
    const int error = occupancy(runtime, clusters, function, threads, config->dynamic_shared);
    *clusters *= runtime.limits().num_sms;
    return error;
  });
}

int cudaOccupancyMaxPotentialClusterSize(int* size, const void* function, const abi::LaunchConfig*) {
  return api([&](Runtime& runtime) -> int {
    if (!size) return abi::kInvalidValue;
    if (!runtime.find_kernel(function)) return abi::kInvalidDeviceFunction;
    *size = 1;
    return abi::kSuccess;
  });
}

}  // extern "C"
