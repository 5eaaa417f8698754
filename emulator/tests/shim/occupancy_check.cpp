// SPDX-License-Identifier: Apache-2.0
//
// The shim's occupancy against the toolkit's own calculator (cuda_occupancy.h) over a grid of launches. Prints the
// first difference and fails.
#include <cuda_occupancy.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "occupancy.h"

namespace {

cudaOccDeviceProp properties_of(const vsm::Limits& limits) {
  cudaOccDeviceProp p;
  p.computeMajor = limits.compute_major;
  p.computeMinor = limits.compute_minor;
  p.maxThreadsPerBlock = static_cast<int>(limits.max_threads_per_block);
  p.maxThreadsPerMultiprocessor = static_cast<int>(limits.max_threads_per_sm);
  p.regsPerBlock = static_cast<int>(limits.registers_per_block);
  p.regsPerMultiprocessor = static_cast<int>(limits.registers_per_sm);
  p.warpSize = vsm::kWarpSize;
  p.sharedMemPerBlock = limits.shared_per_block_default;
  p.sharedMemPerMultiprocessor = limits.shared_per_sm;
  p.numSms = limits.num_sms;
  p.sharedMemPerBlockOptin = limits.shared_per_block_optin;
  p.reservedSharedMemPerBlock = limits.shared_reserved;
  return p;
}

long compare(const vsm::Limits& limits, const char* name) {
  const cudaOccDeviceProp properties = properties_of(limits);
  cudaOccDeviceState state;
  state.cacheConfig = CACHE_PREFER_SHARED;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  long compared = 0;
  for (int threads = 1; threads <= 1024; threads += threads < 64 ? 21 : 31) {
    for (int registers = 8; registers <= 255; registers += 3) {
      for (size_t shared : {size_t{0}, size_t{1}, size_t{8192}, size_t{32768}, size_t{49152}, size_t{50000},
                            size_t{limits.shared_per_block_optin}}) {
        for (int barriers : {1, 2, 3, 5, 11, 12, 13, 16}) {
          cudaOccFuncAttributes attributes;
          attributes.maxThreadsPerBlock = 1024;
          attributes.numRegs = registers;
          attributes.sharedSizeBytes = 0;
          attributes.maxDynamicSharedSizeBytes = shared;
          attributes.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
          attributes.numBlockBarriers = barriers;
          cudaOccResult result;
          if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &properties, &attributes, &state, threads, shared))
            return -1;
          const int ours = vsm::blocks_per_sm(limits, static_cast<uint32_t>(threads), static_cast<uint32_t>(registers),
                                              shared, static_cast<uint32_t>(barriers));
          if (ours != result.activeBlocksPerMultiprocessor) {
            std::printf("%s: %d threads, %d registers, %zu bytes, %d barriers: %d here, %d by cuda_occupancy.h\n", name,
                        threads, registers, shared, barriers, ours, result.activeBlocksPerMultiprocessor);
            return -1;
          }
          ++compared;
        }
      }
    }
  }
  return compared;
}

}  // namespace

int main() {
  const long gb10 = compare(vsm::Limits(), "GB10");
  const long h200 = compare(vsm::hopper_limits(), "H200");
  std::printf("%ld %ld\n", gb10, h200);
  return gb10 > 0 && h200 > 0 ? 0 : 1;
}
