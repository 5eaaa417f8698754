// SPDX-License-Identifier: Apache-2.0
//
// Rows in microscaling formats as bfloat16, which holds each of their values exactly.
#pragma once

#include "../launch.h"
#include "load.cuh"

namespace flashinfer::sm12x {

constexpr int kDequantizeThreads = 256;

struct DequantizeRowsParams {
  TokenRows rows;
  int64_t num_rows;
  uint4* out;  // [num_rows, k] bfloat16
};

// Rows of any of the formats to bfloat16 [num_rows, k]: for more tokens than a split-K kernel is made for, which a
// GEMM of bfloat16 multiplies. A thread takes a block at a time.
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeRowsParams p) {
  const int blocks = p.rows.k / kScaleBlock;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kDequantizeThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDequantizeThreads + threadIdx.x; i < p.num_rows * blocks;
       i += stride) {
    uint4 eights[4];
    RowLoader{p.rows, i / blocks, static_cast<int>(i % blocks), true}.load(eights);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4& k = eights[q];  // (0, 4), (1, 5), (2, 6), (3, 7)
      p.out[4 * i + q] = make_uint4(__byte_perm(k.x, k.y, 0x5410), __byte_perm(k.z, k.w, 0x5410),
                                    __byte_perm(k.x, k.y, 0x7632), __byte_perm(k.z, k.w, 0x7632));
    }
  }
}

inline Status run_dequantize_rows(const TokenRows& rows, int64_t num_rows, void* out, const LaunchOptions& options) {
  const int64_t blocks = num_rows * (rows.k / kScaleBlock);
  if (blocks == 0) return {};
  const DequantizeRowsParams params = {rows, num_rows, static_cast<uint4*>(out)};
  return {launch_over(dequantize_rows_kernel, params, blocks, kDequantizeThreads, options), "dequantizing of rows"};
}

}  // namespace flashinfer::sm12x
