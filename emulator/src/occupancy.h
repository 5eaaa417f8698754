// SPDX-License-Identifier: Apache-2.0
// How many blocks one SM holds, and whether a block fits at all. The granularities are those that the toolkit's
// cuda_occupancy.h gives for compute capability 12 (and 9); tests/shim compares against that header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu_limits.h"

namespace vsm {

inline constexpr uint32_t kRegisterGranularity = 256;  // registers, per warp
inline constexpr uint32_t kSharedGranularity = 128;    // bytes, per block
inline constexpr uint32_t kSubPartitions = 4;          // of an SM; each has a quarter of its registers
inline constexpr uint32_t kMaxRegistersPerThread = 255;

inline uint32_t round_up(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit * unit; }

/// Registers that one warp takes.
inline uint32_t warp_registers(uint32_t registers_per_thread) {
  return round_up(registers_per_thread * kWarpSize, kRegisterGranularity);
}

/// Whether the registers of a block of `threads` fit (the hardware counts its warps in whole rows of sub-partitions).
inline bool registers_fit(const Limits& limits, uint32_t threads, uint32_t registers_per_thread) {
  const uint32_t warps = round_up((threads + kWarpSize - 1) / kWarpSize, kSubPartitions);
  return registers_per_thread <= kMaxRegistersPerThread &&
         uint64_t{warps} * warp_registers(registers_per_thread) <= limits.registers_per_block;
}

/// The most threads, a multiple of 32, that a block of this kernel can have.
inline uint32_t max_threads(const Limits& limits, uint32_t registers_per_thread) {
  uint32_t threads = limits.max_threads_per_block;
  while (threads > 0 && !registers_fit(limits, threads, registers_per_thread)) threads -= kWarpSize;
  return threads;
}

/// Blocks of `threads` threads, `registers_per_thread` registers (0: unknown, not a limit), `shared` bytes of static and
/// dynamic shared memory and `barriers` named barriers (0: none, or unknown) that one SM holds at a time.
inline int blocks_per_sm(const Limits& limits, uint32_t threads, uint32_t registers_per_thread, uint64_t shared,
                         uint32_t barriers) {
  if (threads == 0 || threads > limits.max_threads_per_block) return 0;
  if (!registers_fit(limits, threads, registers_per_thread)) return 0;
  const uint32_t warps = (threads + kWarpSize - 1) / kWarpSize;
  uint64_t blocks = std::min<uint64_t>(limits.max_blocks_per_sm, limits.max_threads_per_sm / kWarpSize / warps);
  if (registers_per_thread > 0) {
    const uint32_t warps_held =
        limits.registers_per_sm / kSubPartitions / warp_registers(registers_per_thread) * kSubPartitions;
    blocks = std::min<uint64_t>(blocks, warps_held / warps);
  }
  if (barriers > 0) blocks = std::min<uint64_t>(blocks, limits.barriers_per_sm / barriers);
  const uint64_t taken =
      (shared + limits.shared_reserved + kSharedGranularity - 1) / kSharedGranularity * kSharedGranularity;
  return static_cast<int>(std::min<uint64_t>(blocks, limits.shared_per_sm / taken));
}

}  // namespace vsm
