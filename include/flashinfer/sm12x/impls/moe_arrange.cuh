// SPDX-License-Identifier: Apache-2.0
//
// A layer's token rows for bf16 MMAs, converted and arranged (token_blocks.cuh). For a pair of GEMMs in expert order, one row
// for each (token, slot) pair of a local expert, behind the prologue, which routes. A streamed layer routes by itself and
// takes rows in the order of tokens; there this kernel is the prologue.
#pragma once

#include "../ptx/copy.cuh"
#include "token_blocks.cuh"

namespace flashinfer::sm12x {

struct ArrangeParams {
  TokenRows input;
  const int32_t* positions;  // [tokens, top_k] in expert order, -1: no local expert; null: the order of tokens
  int num_tokens;
  int top_k;  // 1 without positions
  uint8_t* tokens;  // [scale_words(k)][tokens * top_k][kArrangedRowBytes]

  unsigned* counters;  // to zero
  int num_counters;  // at most kArrangeThreads
  const void* prefetch;  // into L2, what the next kernel reads first
  int prefetch_bytes;
};

constexpr int kArrangeThreads = 256;

// A thread converts eight elements of a token at a time and writes them wherever the token goes; elements beyond K, up to a
// whole word, become zeros.
__global__ void __launch_bounds__(kArrangeThreads) moe_arrange_kernel(const __grid_constant__ ArrangeParams p) {
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  if (blockIdx.x == 0) {
    for (int i = 128 * threadIdx.x; i < p.prefetch_bytes; i += 128 * kArrangeThreads) {
      ptx::prefetch_to_l2(static_cast<const uint8_t*>(p.prefetch) + i);
    }
    if (threadIdx.x < p.num_counters) p.counters[threadIdx.x] = 0;
  }
  const int row_eighths = 4 * kScaleChunkBlocks * scale_words(p.input.k);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kArrangeThreads + threadIdx.x;
  const int stride = static_cast<int>(gridDim.x) * kArrangeThreads;
  const int stride_tokens = stride / row_eighths, stride_eighths = stride - stride_tokens * row_eighths;
  int token = static_cast<int>(first / row_eighths);
  int eighth = static_cast<int>(first - static_cast<int64_t>(token) * row_eighths);
  while (token < p.num_tokens) {
    const int k_block = eighth / 4;
    uint4 arranged = make_uint4(0, 0, 0, 0);
    if (k_block * kScaleBlock < p.input.k) arranged = load_input_eight(p.input, token, eighth);
    for (int slot = 0; slot < p.top_k; ++slot) {
      const int row = p.positions != nullptr ? p.positions[token * p.top_k + slot] : token;
      if (row < 0) continue;
      uint8_t* block = p.tokens + arranged_offset(p.num_tokens * p.top_k, row, k_block);
      reinterpret_cast<uint4*>(block)[eighth % 4] = arranged;
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
