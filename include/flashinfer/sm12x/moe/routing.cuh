// SPDX-License-Identifier: Apache-2.0
//
// From expert ids to token lists: a stable counting sort of the routed rows by local expert. The same warp-wide
// steps serve four sorts, which differ in where routed rows and places are kept:
//
//   route_with_one_warp  GEMM kernels, few routed rows: in registers, no launch of its own
//   sort_routed_rows     prologue.cuh, any number: a count of each of sixteen warps
//   route_many           split_k/moe_scheduler.cuh: routed rows in shared memory; tiles of tokens come of the same pass
//   route_few            split_k/moe_scheduler.cuh, up to 32 routed rows, one a lane: latency that is not overlapped
//                        with loads
//
// Stable and free of floating point, hence the same order on every run.
#pragma once

#include <cstdint>

#include "../types.h"

namespace flashinfer::sm12x {

// Local number of a global expert id, or -1 where the expert lives on another rank, or does not exist: -1 marks
// padding.
__device__ __forceinline__ int local_expert(int id, int first_expert, int num_experts) {
  const unsigned local = static_cast<unsigned>(id) - static_cast<unsigned>(first_expert);
  return local < static_cast<unsigned>(num_experts) ? static_cast<int>(local) : -1;
}

// Adds up to 32 routed rows to `counts` and returns this lane's place among the routed rows of its expert counted
// so far. `expert` is -1 for lanes without a local routed row. All lanes call.
__device__ __forceinline__ int count_routed_rows(int expert, int* counts, int lane) {
  const unsigned peers = __match_any_sync(kAllLanes, expert);
  const unsigned before = peers & ((1u << lane) - 1u);
  int base = 0;
  if (expert >= 0) base = counts[expert];
  __syncwarp();
  if (expert >= 0 && before == 0) counts[expert] = base + __popc(peers);
  __syncwarp();
  return base + __popc(before);
}

// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int inclusive_scan(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// offsets[0..n] = exclusive prefix sums of counts[0..n); in place is fine. One warp; returns the total.
__device__ __forceinline__ int exclusive_offsets(const int* counts, int* offsets, int n, int lane) {
  int carry = 0;
  for (int base = 0; base < n; base += 32) {
    const int i = base + lane;
    const int value = i < n ? counts[i] : 0;
    const int sum = inclusive_scan(value, lane);
    __syncwarp();
    if (i < n) offsets[i] = carry + sum - value;
    carry += __shfl_sync(kAllLanes, sum, 31);
  }
  if (lane == 0) offsets[n] = carry;
  __syncwarp();
  return carry;
}

// Routes at most kInKernelRoutedRows routed rows with one warp: offsets[0..num_experts] and, at its place in permuted
// order, each routed row's number.
__device__ __forceinline__ void route_with_one_warp(const int32_t* ids, int num_routed_rows, int first_expert,
                                                    int num_experts, int* offsets, uint16_t* order, int lane) {
  constexpr int kChunks = kInKernelRoutedRows / 32;
  for (int e = lane; e < num_experts; e += 32) offsets[e] = 0;
  __syncwarp();
  int expert[kChunks], place[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = 32 * c + lane;
    expert[c] = i < num_routed_rows ? local_expert(ids[i], first_expert, num_experts) : -1;
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (32 * c < num_routed_rows) place[c] = count_routed_rows(expert[c], offsets, lane);
  }
  exclusive_offsets(offsets, offsets, num_experts, lane);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (32 * c < num_routed_rows && expert[c] >= 0) {
      order[offsets[expert[c]] + place[c]] = static_cast<uint16_t>(32 * c + lane);
    }
  }
  __syncwarp();
}

}  // namespace flashinfer::sm12x
