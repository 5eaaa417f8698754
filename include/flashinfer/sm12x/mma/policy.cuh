// SPDX-License-Identifier: Apache-2.0
//
// MMA policies: how 16 weight rows are multiplied with 8 tokens over one 32-element scale block. A policy is a set of
// fragment types and static functions; the kernel around it is the same for all, and so is what it computes:
//
//   accumulator[row][token] += 2^(row scale) * 2^(token scale) * sum over 32 of weight * token
//
// lane = 4 * g + t throughout; a fragment's accumulators are rows g, g, g + 8, g + 8 at tokens 2t, 2t + 1, 2t, 2t + 1.
//
// A block is multiplied in kParts parts, each an MMA's worth, so that those of other tokens can come between two that
// add to the same sums; or kBlocks of them, two neighbours, by one MMA.
//
// Lane 4g + t takes kTokenPiece bytes of token g, piece t of its block, and kWeightWords words of 32 bits of each of
// its rows of weights; of MXFP6 a word of nibbles and one of pairs, for its eight elements rotated to the right place.
//
// A policy describes one operand type: how tokens lie in shared memory and which MMA reads them. Tokens are MXFP8,
// MXFP4, or bfloat16, which W4A16 brings and which holds a scaled MXFP8 or MXFP4 value exactly.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/convert.cuh"
#include "../ptx/mma.cuh"
#include "../types.h"
#include "expand.cuh"

namespace flashinfer::sm12x::mma {

enum class Scaling {
  kInMma,  // the MMA takes both scales
  kInSums,  // partial sums of a block are multiplied by both
  kInWeights,  // weights are multiplied by theirs as they are expanded; tokens have none
};

// Whether a lane saw a NaN among the weights of rows g and g + 8, where their format has one (Expansion::is_nan).
struct RowNans {
  uint32_t row = 0, row_plus_8 = 0;
};

// A lane's words of weights of one block.
constexpr int weight_words(Element weights) { return weights == Element::kE2m3 ? 2 : block_bytes(weights) / 16; }

// A lane's two words of 32 bytes of tokens, as weights lie beside them (expand.cuh): elements 8t.. of MXFP8, one piece,
// beside MXFP4 and MXFP6; elements 4t.. and 16 + 4t.. of MXFP8 beside MXFP8; elements 8t.. of two blocks of MXFP4.
template <int kPiece>
__device__ __forceinline__ uint2 load_token_piece(const uint8_t* piece) {
  if constexpr (kPiece == 8) return *reinterpret_cast<const uint2*>(piece);
  const auto* words = reinterpret_cast<const uint32_t*>(piece);
  return make_uint2(words[0], words[4]);
}

// SM12x, MXFP8 x MXFP4, MXFP6 or MXFP8, MXFP4 x MXFP4: scales go into the MMA. MXFP4 weights beside MXFP8 need four
// instructions a word, MXFP6 twelve. Operands of one format need none: a lane has 32-bit words t and 4 + t of 32 bytes
// of each of its rows, a block of MXFP8 or two of MXFP4.
template <Element kOperand, Element kWeights>
struct BlockScaledPolicy {
  static constexpr bool kE2m1 = kOperand == Element::kE2m1;
  static_assert(!kE2m1 || kWeights == Element::kE2m1, "packed e2m1 is multiplied with packed e2m1");
  static constexpr Scaling kScaling = Scaling::kInMma;
  static constexpr int kParts = 1;
  static constexpr int kBlocks = kE2m1 ? 2 : 1;
  static constexpr int kWeightWords = kBlocks * weight_words(kWeights);
  static constexpr int kTokenPiece = !kE2m1 && lanes_take_eights(kWeights) ? 8 : 4;
  static constexpr float kAccumulatorScale = 1.0f;
  static constexpr bool kCollectsNans = false;

  struct RowScales {
    uint32_t word;
  };
  struct TokenScales {
    uint32_t word;
  };
  struct Weights {
    uint32_t a[4];
  };
  struct Tokens {
    uint32_t b[2];
  };

  // Lanes with odd t supply row g + 8 (scale_vec::1X and ::2X, thread-id 0).
  static __device__ __forceinline__ RowScales row_scales(const uint32_t* words, int row, int row_plus_8, int lane) {
    return {words[(lane & 1) ? row_plus_8 : row]};
  }
  // `words` of the eight tokens of a step.
  static __device__ __forceinline__ TokenScales token_scales(const uint32_t* words, int lane) {
    return {words[lane >> 2]};
  }
  template <int, bool>
  static __device__ __forceinline__ Weights expand(const uint32_t (&row)[kWeightWords],
                                                   const uint32_t (&row_plus_8)[kWeightWords], const RowScales&,
                                                   RowNans&) {
    Weights w;
    if constexpr (kWeights == Element::kE2m3) {
      expand_e2m3_to_containers(row[0], row[1], w.a[0], w.a[2]);
      expand_e2m3_to_containers(row_plus_8[0], row_plus_8[1], w.a[1], w.a[3]);
    } else if constexpr (kWeightWords == 2) {
      w = {{row[0], row_plus_8[0], row[1], row_plus_8[1]}};
    } else {
      expand_to_containers(row[0], w.a[0], w.a[2]);
      expand_to_containers(row_plus_8[0], w.a[1], w.a[3]);
    }
    return w;
  }
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* piece) {
    const uint2 k = load_token_piece<kTokenPiece>(piece);
    if constexpr (kTokenPiece == 4) return {{k.x, k.y}};
    return {{__byte_perm(k.x, k.y, 0x6420), __byte_perm(k.x, k.y, 0x7531)}};
  }
  template <int kBlock, int kPart>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowScales& row, const TokenScales& token) {
    ptx::mma_block_scaled<kBlock, kWeights, kOperand>(accumulator, w.a, x.b, row.word, token.word);
  }
};

// Scales as float32 factors, for policies that apply them to the partial sums of a 32-block. All lanes of a quad need
// those of the same rows, and all quads those of the same tokens: a warp converts each once, through shared memory
// (tile/mainloop.cuh).
struct RowFactors {
  float row, row_plus_8;
};
struct TokenFactors {
  float even, odd;  // tokens 2t and 2t + 1
};

__device__ __forceinline__ void accumulate_scaled(float (&accumulator)[4], const float (&partial)[4], float row,
                                                  float row_plus_8) {
  accumulator[0] = fmaf(partial[0], row, accumulator[0]);
  accumulator[1] = fmaf(partial[1], row, accumulator[1]);
  accumulator[2] = fmaf(partial[2], row_plus_8, accumulator[2]);
  accumulator[3] = fmaf(partial[3], row_plus_8, accumulator[3]);
}

// The same pairs on SM89/SM90, and on SM12x where a kind of its block-scaled MMA is not to be used (types.h). Hopper's
// mma.sync has no native FP8 (ptxas converts both operands to half), so this policy expands to half itself, which is
// exact for e2m1, e4m3 and e5m2 and cheaper.
template <Element kOperand, Element kWeights>
struct HalfPolicy {
  static constexpr bool kE2m1 = kOperand == Element::kE2m1;
  static constexpr Scaling kScaling = Scaling::kInSums;
  static constexpr int kParts = 1;
  static constexpr int kBlocks = 1;
  static constexpr int kWeightWords = weight_words(kWeights);
  static constexpr int kTokenPiece = !kE2m1 && lanes_take_eights(kWeights) ? 8 : 4;
  static constexpr float kAccumulatorScale =
      (kWeights == Element::kE4m3 ? 1.0f : kHalfExpansion) * (kE2m1 ? kHalfExpansion : 1.0f);
  static constexpr bool kCollectsNans = false;
  using RowScales = RowFactors;
  using TokenScales = TokenFactors;

  struct Weights {
    uint32_t a[2][4];
  };
  struct Tokens {
    uint32_t b[2][2];
  };

  template <int, bool>
  static __device__ __forceinline__ Weights expand(const uint32_t (&row)[kWeightWords],
                                                   const uint32_t (&row_plus_8)[kWeightWords], const RowScales&,
                                                   RowNans&) {
    uint32_t low[4], high[4];
    to_halves_of_row(row, low);
    to_halves_of_row(row_plus_8, high);
    return {{{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}}};
  }
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* piece) {
    if constexpr (kE2m1) {
      uint32_t pair[4];
      expand_to_halves(*reinterpret_cast<const uint32_t*>(piece), pair);
      return {{{pair[0], pair[1]}, {pair[2], pair[3]}}};
    }
    const uint2 k = load_token_piece<kTokenPiece>(piece);
    if constexpr (kWeights == Element::kE4m3) {
      return {{{to_halves(k.x), to_halves(k.x >> 16)}, {to_halves(k.y), to_halves(k.y >> 16)}}};
    }
    const uint32_t first = __byte_perm(k.x, k.y, 0x5140);  // elements 0, 4, 1, 5
    const uint32_t second = __byte_perm(k.x, k.y, 0x7362);  // elements 2, 6, 3, 7
    return {{{to_halves(first), to_halves(second)}, {to_halves(first >> 16), to_halves(second >> 16)}}};
  }
  template <int kBlock, int kPart>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowFactors& row, const TokenFactors& token) {
    constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float partial[4];
    ptx::mma_16816<false>(partial, w.a[0], x.b[0], kZero);
    ptx::mma_16816<false>(partial, w.a[1], x.b[1], partial);
    partial[0] *= token.even;
    partial[1] *= token.odd;
    partial[2] *= token.even;
    partial[3] *= token.odd;
    accumulate_scaled(accumulator, partial, row.row, row.row_plus_8);
  }

 private:
  static __device__ __forceinline__ uint32_t to_halves(uint32_t pair) {
    if constexpr (kOperand == Element::kE5m2) {
      return __byte_perm(pair, 0, 0x1404);  // an e5m2 byte is the upper byte of the half with the same value
    } else {
      return ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(pair));
    }
  }
  static __device__ __forceinline__ void to_halves_of_row(const uint32_t (&row)[kWeightWords], uint32_t (&pair)[4]) {
    if constexpr (kWeights == Element::kE2m1) {
      expand_to_halves(row[0], pair);
    } else if constexpr (kWeights == Element::kE2m3) {
      expand_e2m3_to_halves(row[0], row[1], pair);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(row[i / 2] >> (16 * (i % 2))));
    }
  }
};

// bf16 x weights of any format, on every architecture: W4A16, W8A16 and so on, and MXFP8 tokens that have been
// dequantized. A scaled weight is exact wherever it is a bfloat16, so that MMAs accumulate final values; NVFP4's times
// a power of two.
//
// A block of MXFP4 is one matrix of ldmatrix, of which the lane gets elements 8t.. of its row; of MXFP8 it is two, of
// which the lane gets elements 4t.. and 16 + 4t... Tokens are packed accordingly (rows/load.cuh, rows/pack.cuh).
template <Element kWeights>
struct Bf16Policy {
  static constexpr Scaling kScaling = Scaling::kInWeights;
  static constexpr int kParts = 2;
  static constexpr int kBlocks = 1;
  static constexpr int kTokenPiece = 16;
  static constexpr int kWeightWords = weight_words(kWeights);
  using BlockExpansion = Expansion<kWeights, Saves::kIntegerPipe>;
  static constexpr float kAccumulatorScale = BlockExpansion::kAccumulatorScale;
  static constexpr bool kCollectsNans = BlockExpansion::kHasNan;

  struct RowScales {
    uint32_t row, row_plus_8;  // words of four; of NVFP4 two blocks', the lane's in bytes 0 and 2
  };
  struct TokenScales {};
  struct Weights {
    uint32_t a[2][4];
  };
  struct Tokens {
    uint32_t b[2][2];
  };

  // kFolded: no scale of the word exceeds kLargestFoldedScale.
  template <int kBlock, bool kFolded>
  static __device__ __forceinline__ Weights expand(const uint32_t (&row)[kWeightWords],
                                                   const uint32_t (&row_plus_8)[kWeightWords], const RowScales& scales,
                                                   RowNans& nans) {
    uint32_t low[4], high[4];
    expand_scaled<kBlock, kFolded>(row, scales.row, low, nans.row);
    expand_scaled<kBlock, kFolded>(row_plus_8, scales.row_plus_8, high, nans.row_plus_8);
    return {{{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}}};
  }
  // The lane's eight elements of a block, in the order of expand().
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* piece) {
    const uint4 k = *reinterpret_cast<const uint4*>(piece);
    return {{{k.x, k.y}, {k.z, k.w}}};
  }
  template <int kBlock, int kPart>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowScales&, const TokenScales&) {
    ptx::mma_16816<true>(accumulator, w.a[kPart], x.b[kPart], accumulator);
  }

 private:
  template <int kBlock, bool kFolded>
  static __device__ __forceinline__ void expand_scaled(const uint32_t (&words)[kWeightWords], uint32_t scales,
                                                       uint32_t (&pair)[4], uint32_t& nan) {
    if constexpr (kWeights == Element::kNvE2m1) {
      const uint32_t scale = scale_of<kBlock % 2 * 2>(scales) & 0x007F007Fu;
      BlockExpansion::eight(words, 0, nv_factors(scale), pair, nan);
    } else if constexpr (kFolded) {
      eight(words, BlockExpansion::template folded_factor_of<kBlock>(scales), pair, nan);
    } else {
      eight(words, BlockExpansion::kUndo, pair, nan);
      const uint32_t scale = scale_pair(scales >> (8 * kBlock) & 0xFFu);
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], scale);
    }
  }

  // The lane's words of a block, by one factor.
  static __device__ __forceinline__ void eight(const uint32_t (&words)[kWeightWords], uint32_t factor,
                                               uint32_t (&pair)[4], uint32_t& nan) {
    if constexpr (kWeights == Element::kE2m3) {
      expand_e2m3_to_bf16<0>(words[0], words[1], factor, pair);
    } else {
      BlockExpansion::eight(words, 0, factor, pair, nan);
    }
  }
};

// The policy of this compilation pass: the only place where the MMA differs between architectures.
template <Element kOperand, Element kWeights>
using Policy =
    std::conditional_t<kOperand == Element::kBf16, Bf16Policy<kWeights>,
                       std::conditional_t<FLASHINFER_SM12X_DEVICE && uses_block_scaled_mma(kOperand),
                                          BlockScaledPolicy<kOperand, kWeights>, HalfPolicy<kOperand, kWeights>>>;

}  // namespace flashinfer::sm12x::mma
