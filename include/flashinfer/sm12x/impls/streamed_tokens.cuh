// SPDX-License-Identifier: Apache-2.0
//
// Token rows as MMA fragments in registers. Lane 4g + t holds 32-block t of a 128-element word of token g: a whole scale
// block, so that quantizing to MXFP8 needs no other lane. Eight MMAs multiply a word; number 2q + h takes elements
// 8q + {2h, 2h + 4} and 8q + {2h + 1, 2h + 5} of every lane's block.
#pragma once

#include "streamed_walk.cuh"
#include "token_blocks.cuh"

namespace flashinfer::sm12x {

// FC2: a block of act, which FC1 left in float32, to MXFP8 (W4A8) or bfloat16 (W4A16).
template <class Config>
__device__ __forceinline__ void load_act_block(const StreamedLayerParams& p, int64_t position, int k_block,
                                               TokenBlock& block) {
  const float4* from = reinterpret_cast<const float4*>(p.act + position * p.gemm[1].k + k_block * kScaleBlock);
  auto load_eight = [from](int q, float (&x)[8]) {
    const float4 low = __ldcg(from + 2 * q), high = __ldcg(from + 2 * q + 1);  // other blocks wrote it
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  };
  if constexpr (Config::kActivation == Activation::kBf16) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float x[8];
      load_eight(q, x);
      block[2 * q][0] = ptx::f32x2_to_bf16x2(x[0], x[4]);
      block[2 * q][1] = ptx::f32x2_to_bf16x2(x[1], x[5]);
      block[2 * q + 1][0] = ptx::f32x2_to_bf16x2(x[2], x[6]);
      block[2 * q + 1][1] = ptx::f32x2_to_bf16x2(x[3], x[7]);
    }
  } else {
    // Held, or loaded again where registers are short.
    constexpr bool kHold = Config::kTokenSteps == 1;
    float x[kHold ? 4 : 1][8], amax = 0.0f;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      load_eight(q, x[kHold ? q : 0]);
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[kHold ? q : 0][i]));
    }
    const uint32_t exponent = ptx::mxfp8_scale(amax);
    const float inverse = ptx::mxfp8_inverse_scale(exponent), scale = ptx::ue8m0_to_f32<0>(exponent);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!kHold) load_eight(q, x[0]);
      detail::requantize_eight(x[kHold ? q : 0], inverse, scale, block[2 * q], block[2 * q + 1]);
    }
  }
}

// All tokens of a tile that a warp multiplies with; zero where there is no token, or no K.
//
// This code runs once or twice in a launch, so what it costs is mostly fetching it: words are converted in a loop, through
// which the registers shift, instead of once each in unrolled code.
template <class Config>
class TokenFragments {
  static constexpr int kBlocks = Config::kTokenSteps * Config::kWords;

 public:
  TokenBlock block[Config::kTokenSteps][Config::kWords];

  // The first `count` tokens of a tile; `row_of` tells where token i is among FC1's input or act.
  template <class RowOf>
  __device__ __forceinline__ void load(const StreamedLayerParams& p, int gemm, int group_warp, int lane, int count,
                                       const RowOf& row_of) {
    const int first_block = group_warp * Config::kWords * kScaleChunkBlocks + lane % 4, k = p.gemm[gemm].k;
    TokenBlock* blocks = &block[0][0];
    TokenBlock& last = blocks[kBlocks - 1];
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j + 1 < kBlocks; ++j) {
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          blocks[j][v][0] = blocks[j + 1][v][0];
          blocks[j][v][1] = blocks[j + 1][v][1];
        }
      }
      const int token = 8 * (i / Config::kWords) + lane / 4;
      const int k_block = first_block + i % Config::kWords * kScaleChunkBlocks;
      if (token >= count || k_block * kScaleBlock >= k) {
#pragma unroll
        for (int v = 0; v < 8; ++v) last[v][0] = last[v][1] = 0;
      } else if (gemm == 0) {
        load_input_block<Config::kActivation>(p.input, row_of(token), k_block, last);
      } else {
        load_act_block<Config>(p, row_of(token), k_block, last);
      }
    }
  }
};

}  // namespace flashinfer::sm12x
