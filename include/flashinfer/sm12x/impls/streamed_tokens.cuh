// SPDX-License-Identifier: Apache-2.0
//
// Token rows as MMA fragments in registers. Lane 4g + t holds 32-block t of a 128-element word of token g: a whole scale
// block, so that quantizing to MXFP8 needs no other lane. Eight MMAs multiply a word; number 2q + h takes elements
// 8q + {2h, 2h + 4} and 8q + {2h + 1, 2h + 5} of every lane's block.
#pragma once

#include "../ptx/copy.cuh"
#include "streamed_walk.cuh"
#include "token_blocks.cuh"

namespace flashinfer::sm12x {

// All tokens of a tile that a warp multiplies with; zero where there is no token, or no K.
template <class Config>
class TokenFragments {
  static constexpr int kSteps = Config::kTokenSteps, kWords = Config::kWords, kBlocks = kSteps * kWords;
  using Blocks = TokenBlock[kSteps][kWords];
  // Where registers are short the values of a block are loaded twice, rather than held until its maximum is known.
  static constexpr bool kHold = kSteps == 1;

 public:
  // FC1: `count` rows of the layer's input; `row_of` tells which of them token i of the tile is.
  template <class RowOf>
  static __device__ __forceinline__ void load_input(Blocks& tokens, const StreamedLayerParams& p, int first_word,
                                                    int lane, int count, const RowOf& row_of) {
    TokenBlock* const blocks = &tokens[0][0];
    auto load = [&](int i, TokenBlock& to) {
      const int token = 8 * (i / kWords) + lane / 4, word = first_word + i % kWords;
      const bool wanted = token < count && word < p.gemm[0].words;
      const int row = wanted ? row_of(token) : 0, k_block = word * kScaleChunkBlocks + lane % 4;
      const uint8_t* from = p.tokens + arranged_offset(p.num_tokens, row, k_block);
#pragma unroll
      for (int q = 0; q < 4; ++q) set_eight(to, q, ptx::load_16_bytes_if(wanted, from + 16 * q));
    };
    if constexpr (kHold) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) load(i, blocks[i]);
    } else {
#pragma unroll 1
      for (int i = 0; i < kBlocks; ++i) {
        shift_blocks<kBlocks>(blocks);
        load(i, blocks[kBlocks - 1]);
      }
    }
  }

  // FC2: `count` rows of act from row `first` on, which FC1 left in float32; to MXFP8 (W4A8) or bfloat16 (W4A16).
  //
  // This code runs once for each tile, so what it costs is mostly fetching it: blocks are converted in a loop, through
  // which the registers shift, instead of once each in unrolled code. While one is converted, the next one's values are on
  // their way, if there are registers to hold them.
  static __device__ __forceinline__ void load_act(Blocks& tokens, const StreamedLayerParams& p, int first_word,
                                                  int lane, int count, int first) {
    const int first_block = first_word * kScaleChunkBlocks + lane % 4, k = p.gemm[1].k;
    TokenBlock* const blocks = &tokens[0][0];
    TokenBlock& last = blocks[kBlocks - 1];
    auto source = [&](int i) -> Source {
      const int token = 8 * (i / kWords) + lane / 4, k_block = first_block + i % kWords * kScaleChunkBlocks;
      const bool wanted = token < count && k_block * kScaleBlock < k;
      return {p.act + (wanted ? static_cast<int64_t>(first + token) * k + k_block * kScaleBlock : 0), wanted};
    };
    float ahead[4][8];
    if constexpr (kHold) {
      const Source from = source(0);
#pragma unroll
      for (int q = 0; q < 4; ++q) from.load_eight(q, ahead[q]);
    }
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
      shift_blocks<kBlocks>(blocks);
      if constexpr (kHold) {
        float values[4][8];
        const Source next = i + 1 < kBlocks ? source(i + 1) : Source{p.act, false};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
          for (int v = 0; v < 8; ++v) values[q][v] = ahead[q][v];
          next.load_eight(q, ahead[q]);
        }
        convert(last, [&](int q, auto& x) {
#pragma unroll
          for (int v = 0; v < 8; ++v) x[v] = values[q][v];
        });
      } else {
        const Source from = source(i);
        convert(last, [&](int q, auto& x) { from.load_eight(q, x); });
      }
    }
  }

 private:
  // A block of act; zeros where it is not wanted.
  struct Source {
    const float* from;
    bool wanted;

    __device__ __forceinline__ void load_eight(int q, float (&x)[8]) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = ptx::load_16_bytes_if(wanted, from + 8 * q + 4 * half);
        x[4 * half] = __uint_as_float(four.x);
        x[4 * half + 1] = __uint_as_float(four.y);
        x[4 * half + 2] = __uint_as_float(four.z);
        x[4 * half + 3] = __uint_as_float(four.w);
      }
    }
  };

  // `eight_of(q, x)` gives elements 8q.. of the block.
  template <class EightOf>
  static __device__ __forceinline__ void convert(TokenBlock& to, const EightOf& eight_of) {
    if constexpr (Config::kActivation == Activation::kBf16) {
      float x[8];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        eight_of(q, x);
        set_eight(to, q,
                  make_uint4(ptx::f32x2_to_bf16x2(x[0], x[4]), ptx::f32x2_to_bf16x2(x[1], x[5]),
                             ptx::f32x2_to_bf16x2(x[2], x[6]), ptx::f32x2_to_bf16x2(x[3], x[7])));
      }
    } else {
      requantize_block(eight_of, [&](int q, const uint4& eight) { set_eight(to, q, eight); });
    }
  }
};

}  // namespace flashinfer::sm12x
