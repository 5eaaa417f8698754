// SPDX-License-Identifier: Apache-2.0
//
// Token rows for bf16 MMAs, dequantized and packed (load.cuh), by a small launch in front of the GEMM:
//
//   pack_rows_kernel  a dense layer's, of any format
//   moe_pack_kernel   a MoE layer's. For the two-kernel path in permuted order, one row for each routed row of a
//                     local expert, behind the prologue, which routes. A fused MoE kernel routes by itself and takes
//                     W4A8's rows in the order of tokens; there this kernel is the prologue, of W4A16 only to zero
//                     counters that no caller keeps
#pragma once

#include "../ptx/sync.cuh"
#include "load.cuh"

namespace flashinfer::sm12x {

struct PackRowsParams {
  TokenRows rows;
  int num_rows;
  Element weights;  // that the rows are multiplied with
  uint8_t* packed;  // [K blocks][num_rows][kPackedRowBytes] (load.cuh)
  int* counters;  // to zero
  int num_counters;
};

constexpr int kPackRowsThreads = 256;

// A thread takes a scale block of any format (moe_pack_kernel: eight elements, since a layer's few tokens go to several
// places each). Scale blocks beyond K, up to a whole K block, become zeros.
__global__ void __launch_bounds__(kPackRowsThreads) pack_rows_kernel(const __grid_constant__ PackRowsParams p) {
  ptx::wait_for_prerequisite_grids();
  ptx::launch_dependent_grids();
  const int blocks = kScaleChunkBlocks * k_blocks_of(p.rows.k);
  const int first = static_cast<int>(blockIdx.x) * kPackRowsThreads + static_cast<int>(threadIdx.x);
  const int stride = static_cast<int>(gridDim.x) * kPackRowsThreads;
  for (int i = first; i < p.num_counters; i += stride) p.counters[i] = 0;
  for (int64_t i = first; i < static_cast<int64_t>(p.num_rows) * blocks; i += stride) {
    const int row = static_cast<int>(i / blocks),
              scale_block = static_cast<int>(i - static_cast<int64_t>(row) * blocks);
    uint4 eights[4];
    RowLoader{p.rows, row, scale_block, scale_block * kScaleBlock < p.rows.k}.load(eights);
    uint4* to = reinterpret_cast<uint4*>(p.packed + packed_offset(p.num_rows, row, scale_block));
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (lanes_take_eights(p.weights)) {
        to[t] = eights[t];  // lane t of an MMA has elements 8t..
      } else {
        // Elements 4t.. and 16 + 4t..: (0, 2), (1, 3) of each four.
        const uint4 &low = eights[t / 2], &high = eights[2 + t / 2];
        const int half = t % 2 == 0 ? 0x5410 : 0x7632;
        to[t] = make_uint4(__byte_perm(low.x, low.z, half), __byte_perm(low.y, low.w, half),
                           __byte_perm(high.x, high.z, half), __byte_perm(high.y, high.w, half));
      }
    }
  }
}

struct PackTokensParams {
  TokenRows input;
  const int32_t* positions;  // [tokens, top_k] in permuted order, -1: no local expert; null: the order of tokens
  int num_tokens;
  int top_k;  // 1 without positions
  uint8_t* tokens;  // [K blocks][tokens * top_k][kPackedRowBytes]

  unsigned* counters;  // to zero
  int num_counters;  // at most kPackTokensThreads
  const void* prefetch;  // memory that the next kernel reads first, brought into L2
  int prefetch_bytes;
};

constexpr int kPackTokensThreads = 256;

// A thread converts eight elements of a token at a time and writes them wherever the token goes; elements beyond K, up
// to a whole K block, become zeros.
__global__ void __launch_bounds__(kPackTokensThreads) moe_pack_kernel(const __grid_constant__ PackTokensParams p) {
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  if (blockIdx.x == 0) {
    for (int i = 128 * threadIdx.x; i < p.prefetch_bytes; i += 128 * kPackTokensThreads) {
      ptx::prefetch_to_l2(static_cast<const uint8_t*>(p.prefetch) + i);
    }
    if (threadIdx.x < p.num_counters) p.counters[threadIdx.x] = 0;
  }
  const int row_eighths = 4 * kScaleChunkBlocks * k_blocks_of(p.input.k);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPackTokensThreads + threadIdx.x;
  const int stride = static_cast<int>(gridDim.x) * kPackTokensThreads;
  const int stride_tokens = stride / row_eighths, stride_eighths = stride - stride_tokens * row_eighths;
  int token = static_cast<int>(first / row_eighths);
  int eighth = static_cast<int>(first - static_cast<int64_t>(token) * row_eighths);
  while (token < p.num_tokens) {
    const int scale_block = eighth / 4;
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (scale_block * kScaleBlock < p.input.k) packed = load_input_eight(p.input, token, eighth);
    for (int slot = 0; slot < p.top_k; ++slot) {
      const int row = p.positions != nullptr ? p.positions[token * p.top_k + slot] : token;
      if (row < 0) continue;
      uint8_t* block = p.tokens + packed_offset(p.num_tokens * p.top_k, row, scale_block);
      reinterpret_cast<uint4*>(block)[eighth % 4] = packed;
    }
    token += stride_tokens;
    eighth += stride_eighths;
    if (eighth >= row_eighths) {
      eighth -= row_eighths;
      ++token;
    }
  }
}

}  // namespace flashinfer::sm12x
