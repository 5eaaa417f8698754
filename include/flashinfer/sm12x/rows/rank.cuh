// SPDX-License-Identifier: Apache-2.0
//
// A number and its place in a row as one integer: of two, the larger one belongs to the larger number, and among equal
// numbers to the place that comes first. Ranks of a row differ, so that the largest do not depend on the order of
// threads.
#pragma once

#include <cstdint>

#include "../types.h"

namespace flashinfer::sm12x {

// 0 is less than that of any. NaN is the largest; -0 is 0.
__device__ __forceinline__ uint64_t rank_of(float number, int place) {
  const uint32_t bits = __float_as_uint(number != number ? __uint_as_float(0x7FFFFFFFu) : number + 0.0f);
  const uint32_t ordered = bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u);
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(place));
}

__device__ __forceinline__ int rank_place(uint64_t rank) {
  return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(rank));
}

__device__ __forceinline__ float rank_number(uint64_t rank) {
  const uint32_t ordered = static_cast<uint32_t>(rank >> 32);
  return __uint_as_float(ordered ^ (ordered >> 31 != 0 ? 0x80000000u : 0xFFFFFFFFu));
}

// The largest of the lanes whose numbers differ in bits `kNearest` to 16; all get it.
template <int kNearest = 1>
__device__ __forceinline__ uint64_t largest_of_lanes(uint64_t rank) {
#pragma unroll
  for (int distance = 16; distance >= kNearest; distance /= 2) {
    rank = max(rank, __shfl_xor_sync(kAllLanes, rank, distance));
  }
  return rank;
}

}  // namespace flashinfer::sm12x
