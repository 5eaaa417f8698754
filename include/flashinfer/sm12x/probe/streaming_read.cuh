// SPDX-License-Identifier: Apache-2.0
//
// The floor of a layer that is bound by memory: how long a plain kernel of 16-byte streaming loads takes to read the
// same bytes. One block reads one piece of at most 32 KB, four independent loads a thread, and each warp writes the sum
// of its words: 64 bytes written for 32 KB read, and a result that proves that all were read.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../types.h"

namespace flashinfer::sm12x::probe {

constexpr int kReadThreads = 512;
constexpr int kReadWarps = 16;
static_assert(32 * kReadWarps == kReadThreads);
constexpr int kReadLoads = 4;  // a thread, all in flight at once
constexpr int kReadVectors = kReadThreads * kReadLoads;

static_assert(kReadVectors * sizeof(uint4) == 32 << 10, "a piece is 32 KB");

struct StreamingReadParams {
  const uint4* const* pieces;  // [blocks], 16-byte aligned
  const int32_t* vectors;  // [blocks], of 16 bytes each, at most kReadVectors
  uint32_t* sums;  // [blocks, kReadWarps], modulo 2^32
};

__global__ void __launch_bounds__(kReadThreads) streaming_read_kernel(const StreamingReadParams params) {
  const uint4* piece = params.pieces[blockIdx.x];
  const int count = params.vectors[blockIdx.x];
  uint4 loaded[kReadLoads];
#pragma unroll
  for (int i = 0; i < kReadLoads; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kReadThreads;
    loaded[i] = at < count ? __ldcs(piece + at) : make_uint4(0, 0, 0, 0);
  }
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kReadLoads; ++i) sum += loaded[i].x + loaded[i].y + loaded[i].z + loaded[i].w;
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % 32 == 0) params.sums[blockIdx.x * kReadWarps + threadIdx.x / 32] = sum;
}

}  // namespace flashinfer::sm12x::probe
