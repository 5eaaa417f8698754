// SPDX-License-Identifier: Apache-2.0
//
// Rows in microscaling formats as bfloat16, which holds each of their values exactly.
#pragma once

#include <algorithm>

#include "../common/launch.h"
#include "row_loader.cuh"

namespace flashinfer::sm12x {

constexpr int kWidenThreads = 256;

// Rows of any of the formats to bfloat16 [num_rows, k]: for more tokens than a stream of weights is made for, which a GEMM of
// bfloat16 multiplies. A thread takes a block at a time.
__global__ void __launch_bounds__(kWidenThreads)
    widen_rows_kernel(const __grid_constant__ TokenRows rows, int64_t num_rows, uint4* __restrict__ out) {
  const int blocks = rows.k / kScaleBlock;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWidenThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWidenThreads + threadIdx.x; i < num_rows * blocks; i += stride) {
    uint4 eights[4];
    RowLoader{rows, i / blocks, static_cast<int>(i % blocks), true}.load(eights);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4& k = eights[q];  // (0, 4), (1, 5), (2, 6), (3, 7)
      out[4 * i + q] = make_uint4(__byte_perm(k.x, k.y, 0x5410), __byte_perm(k.z, k.w, 0x5410),
                                  __byte_perm(k.x, k.y, 0x7632), __byte_perm(k.z, k.w, 0x7632));
    }
  }
}

inline Status run_widen_rows(const TokenRows& rows, int64_t num_rows, void* out, const LaunchOptions& options) {
  const int64_t wanted = (num_rows * (rows.k / kScaleBlock) + kWidenThreads - 1) / kWidenThreads;
  if (wanted == 0) return {};
  const int blocks = static_cast<int>(std::min<int64_t>(wanted, 8 * options.sm_count));
  widen_rows_kernel<<<blocks, kWidenThreads, 0, options.stream>>>(rows, num_rows, static_cast<uint4*>(out));
  return {cudaGetLastError(), "widening of rows"};
}

}  // namespace flashinfer::sm12x
