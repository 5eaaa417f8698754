// SPDX-License-Identifier: Apache-2.0
// The device's answers about itself.
#include <cstring>

#include "shim/runtime.h"

using namespace vsm;        // NOLINT: the names below are CUDA's
using namespace vsm::shim;  // NOLINT

namespace {

constexpr int kVersion = 13000;  // of driver and runtime
constexpr int kLastAttribute = 147;

/// DGX Spark's memory: 256 bits of LPDDR5X-8533 (273 GB/s).
constexpr int kMemoryBusBits = 256;
constexpr int kMemoryClockKhz = 4266000;

/// cudaDevAttr* by number. Attributes that say nothing about computing (textures, PCI, RDMA) are 0.
int attribute_value(const Limits& limits, int attribute) {
  switch (attribute) {
    case 1: return static_cast<int>(limits.max_threads_per_block);
    case 2:
    case 3:
    case 4: return static_cast<int>(limits.max_block[attribute - 2]);
    case 5:
    case 6:
    case 7: return static_cast<int>(limits.max_grid[attribute - 5]);
    case 8: return static_cast<int>(limits.shared_per_block_default);
    case 9: return 65536;  // constant memory
    case 10: return kWarpSize;
    case 11: return 2147483647;  // pitch
    case 12: return static_cast<int>(limits.registers_per_block);
    case 13: return static_cast<int>(limits.clock_khz);
    case 16: return limits.num_sms;
    case 18: return limits.compute_major == 12;  // integrated with its host
    case 19: return 1;                           // maps host memory
    case 31: return 1;                           // concurrent kernels
    case 36: return kMemoryClockKhz;
    case 37: return kMemoryBusBits;
    case 38: return static_cast<int>(limits.l2_bytes);
    case 39: return static_cast<int>(limits.max_threads_per_sm);
    case 40: return 1;  // asynchronous engines
    case 41: return 1;  // unified addressing
    case 75: return limits.compute_major;
    case 76: return limits.compute_minor;
    case 78: return 1;  // stream priorities
    case 79:
    case 80: return 1;  // L1 caches global and local memory
    case 81: return static_cast<int>(limits.shared_per_sm);
    case 82: return static_cast<int>(limits.registers_per_sm);
    case 83: return 1;  // managed memory
    case 91: return 1;  // host pointers of registered memory
    case 95: return 1;  // cooperative launch
    case 97: return static_cast<int>(limits.shared_per_block_optin);
    case 99: return 1;  // cudaHostRegister
    case 106: return static_cast<int>(limits.max_blocks_per_sm);
    case 111: return static_cast<int>(limits.shared_reserved);
    case 115: return 1;  // memory pools
    case 120: return 1;  // cluster launch (of one block)
    default: return 0;
  }
}

}  // namespace

extern "C" {

int cudaGetDeviceCount(int* count) {
  return api_always([&](Runtime&) -> int { return count ? (*count = 1, abi::kSuccess) : abi::kInvalidValue; });
}

int cudaGetDevice(int* device) {
  return api_always([&](Runtime&) -> int { return device ? (*device = 0, abi::kSuccess) : abi::kInvalidValue; });
}

int cudaSetDevice(int device) {
  return api_always([&](Runtime&) -> int { return device == 0 ? abi::kSuccess : abi::kInvalidDevice; });
}

int cudaSetDeviceFlags(unsigned) { return abi::kSuccess; }
int cudaInitDevice(int device, unsigned, unsigned) { return cudaSetDevice(device); }

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return api_always([&](Runtime& r) -> int {
    if (!value || attribute < 1 || attribute > kLastAttribute) return abi::kInvalidValue;
    if (device != 0) return abi::kInvalidDevice;
    *value = attribute_value(r.limits(), attribute);
    return abi::kSuccess;
  });
}

int cudaGetDeviceProperties(abi::DeviceProperties* out, int device) {
  return api_always([&](Runtime& r) -> int {
    if (!out) return abi::kInvalidValue;
    if (device != 0) return abi::kInvalidDevice;
    const Limits& limits = r.limits();
    auto value = [&](int attribute) { return attribute_value(limits, attribute); };
    *out = abi::DeviceProperties{};
    std::strncpy(out->name, limits.compute_major == 12 ? "Virtual GB10" : "Virtual H200", sizeof(out->name) - 1);
    out->total_global_mem = 128ull * 1000 * 1000 * 1000;
    out->shared_mem_per_block = limits.shared_per_block_default;
    out->regs_per_block = static_cast<int>(limits.registers_per_block);
    out->warp_size = kWarpSize;
    out->mem_pitch = 2147483647;
    out->max_threads_per_block = static_cast<int>(limits.max_threads_per_block);
    for (int i = 0; i < 3; ++i) {
      out->max_threads_dim[i] = static_cast<int>(limits.max_block[i]);
      out->max_grid_size[i] = static_cast<int>(limits.max_grid[i]);
    }
    out->total_const_mem = 65536;
    out->major = limits.compute_major;
    out->minor = limits.compute_minor;
    out->multi_processor_count = limits.num_sms;
    out->integrated = value(18);
    out->can_map_host_memory = 1;
    out->concurrent_kernels = 1;
    out->async_engine_count = 1;
    out->unified_addressing = 1;
    out->memory_bus_width = kMemoryBusBits;
    out->l2_cache_size = static_cast<int>(limits.l2_bytes);
    out->max_threads_per_multi_processor = static_cast<int>(limits.max_threads_per_sm);
    out->stream_priorities_supported = 1;
    out->global_l1_cache_supported = out->local_l1_cache_supported = 1;
    out->shared_mem_per_multiprocessor = limits.shared_per_sm;
    out->regs_per_multiprocessor = static_cast<int>(limits.registers_per_sm);
    out->managed_memory = 1;
    out->can_use_host_pointer_for_registered_mem = 1;
    out->cooperative_launch = 1;
    out->shared_mem_per_block_optin = limits.shared_per_block_optin;
    out->max_blocks_per_multi_processor = static_cast<int>(limits.max_blocks_per_sm);
    out->reserved_shared_mem_per_block = limits.shared_reserved;
    out->host_register_supported = 1;
    out->memory_pools_supported = 1;
    out->cluster_launch = value(120);
    return abi::kSuccess;
  });
}

int cudaDeviceSynchronize() {
  return api([](Runtime& r) {
    if (int error = r.forbid_in_capture("cudaDeviceSynchronize")) return error;
    r.device().settle();
    return int{abi::kSuccess};
  });
}

int cudaDeviceReset() {
  return api_always([](Runtime& r) -> int {
    r.reset();
    last_error() = abi::kSuccess;
    return abi::kSuccess;
  });
}

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return api([&](Runtime&) -> int {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return abi::kSuccess;
  });
}

int cudaDeviceSetLimit(int, size_t) {
  return api([](Runtime&) -> int { return abi::kSuccess; });
}

int cudaProfilerStart() { return abi::kSuccess; }
int cudaProfilerStop() { return abi::kSuccess; }

int cudaCtxResetPersistingL2Cache() {
  return api([](Runtime&) -> int { return abi::kSuccess; });
}

int cudaDriverGetVersion(int* version) {
  return api_always(
      [&](Runtime&) -> int { return version ? (*version = kVersion, abi::kSuccess) : abi::kInvalidValue; });
}

int cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

}  // extern "C"
