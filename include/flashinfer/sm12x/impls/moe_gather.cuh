// SPDX-License-Identifier: Apache-2.0
//
// FC1's token rows for bf16 operands: in expert order, one for each (token, slot) pair of a local expert, converted and
// arranged (token_blocks.cuh). Runs behind the prologue, which routes.
#pragma once

#include "../ptx/sync.cuh"
#include "token_blocks.cuh"

namespace flashinfer::sm12x {

struct GatherParams {
  InputRows input;
  const int32_t* positions;  // [tokens, top_k] in expert order, -1: no local expert
  int num_tokens;
  int top_k;
  uint8_t* tokens;  // [scale_words(k)][tokens * top_k][kArrangedRowBytes]
};

constexpr int kGatherThreads = 256;

// A thread converts a block of 32 of a token at a time and writes it wherever the token goes; blocks beyond K, up to a whole
// word, become zeros.
template <Activation kActivation>
__global__ void __launch_bounds__(kGatherThreads) moe_gather_kernel(const __grid_constant__ GatherParams p) {
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  const int row_blocks = kScaleChunkBlocks * scale_words(p.input.k);
  const int64_t blocks = static_cast<int64_t>(p.num_tokens) * row_blocks;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kGatherThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x; i < blocks; i += stride) {
    const int token = static_cast<int>(i / row_blocks);
    const int k_block = static_cast<int>(i - static_cast<int64_t>(token) * row_blocks);
    TokenBlock block = {};
    if (k_block * kScaleBlock < p.input.k) load_input_block<kActivation>(p.input, token, k_block, block);
    for (int slot = 0; slot < p.top_k; ++slot) {
      const int position = p.positions[token * p.top_k + slot];
      if (position < 0) continue;
      uint4* to = reinterpret_cast<uint4*>(p.tokens + arranged_offset(p.num_tokens * p.top_k, position, k_block));
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        to[q] = make_uint4(block[2 * q][0], block[2 * q][1], block[2 * q + 1][0], block[2 * q + 1][1]);
      }
    }
  }
}

}  // namespace flashinfer::sm12x
