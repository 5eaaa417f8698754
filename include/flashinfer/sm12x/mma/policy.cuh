// SPDX-License-Identifier: Apache-2.0
//
// MMA policies: how 16 weight rows are multiplied with 8 tokens over one 32-element scale block. A policy is a set of
// fragment types and static functions; the kernel around it is the same for all, and so is what it computes:
//
//   accumulator[row][token] += 2^(row scale) * 2^(token scale) * sum over 32 of weight * token
//
// lane = 4 * g + t throughout; a fragment's accumulators are rows g, g, g + 8, g + 8 at tokens 2t, 2t + 1, 2t, 2t + 1.
//
// multiply() is called kCallsPerBlock times for a scale block, so that MMAs of other tokens can come between two that
// add to the same sums; or once for kBlocksPerCall neighbouring blocks.
//
// Lane 4g + t takes kLaneTokenBytes bytes of token g's scale block, from byte kLaneTokenBytes * t on, and kWeightWords
// 32-bit words of each of its weight rows. MXFP6: a word of nibbles, and one of pairs, rotated so that the lane's eight
// elements come first.
//
// A policy describes one operand type: how tokens lie in shared memory and which MMA reads them. Tokens are MXFP8,
// MXFP4, or bfloat16, which W4A16 brings and which holds a scaled MXFP8 or MXFP4 value exactly.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/convert.cuh"
#include "../ptx/mma.cuh"
#include "../types.h"
#include "dequantize.cuh"

namespace flashinfer::sm12x::mma {

enum class Scaling {
  kInMma,  // the MMA takes both scales
  kInSums,  // partial sums of a block are multiplied by both
  kInWeights,  // weights are multiplied by theirs as they are dequantized; tokens have none
};

// Whether a lane saw a NaN among the weights of rows g and g + 8, where their format has one (Dequantizer::is_nan).
struct RowNans {
  uint32_t row = 0, row_plus_8 = 0;
};

// 32-bit registers that one scale block of a weight row takes in each lane.
constexpr int weight_words(Element weights) { return weights == Element::kE2m3 ? 2 : block_bytes(weights) / 16; }

// A lane's two 32-bit words of 32 bytes of a token, in the order of its weights (dequantize.cuh). MXFP8 tokens:
// elements 8t.. with MXFP4 and MXFP6 weights, elements 4t.. and 16 + 4t.. with MXFP8 weights. MXFP4 tokens: elements
// 8t.. of two scale blocks.
template <int kBytes>
__device__ __forceinline__ uint2 load_lane_tokens(const uint8_t* from) {
  if constexpr (kBytes == 8) return *reinterpret_cast<const uint2*>(from);
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  return make_uint2(words[0], words[4]);
}

// SM12x, MXFP8 tokens with MXFP4, MXFP6 or MXFP8 weights, and MXFP4 with MXFP4: the MMA takes the scales. To dequantize
// a 32-bit word of weights for MXFP8 tokens costs four instructions for MXFP4 and twelve for MXFP6. Operands of one
// format are not dequantized: 32 bytes of a row are one scale block of MXFP8 or two of MXFP4, and a lane has words t
// and 4 + t.
template <Element kComputeType, Element kWeights>
struct BlockScaledPolicy {
  static constexpr bool kE2m1 = kComputeType == Element::kE2m1;
  static_assert(!kE2m1 || kWeights == Element::kE2m1, "packed e2m1 is multiplied with packed e2m1");
  static constexpr Scaling kScaling = Scaling::kInMma;
  static constexpr int kCallsPerBlock = 1;
  static constexpr int kBlocksPerCall = kE2m1 ? 2 : 1;
  static constexpr int kWeightWords = kBlocksPerCall * weight_words(kWeights);
  static constexpr int kLaneTokenBytes = !kE2m1 && lanes_take_eights(kWeights) ? 8 : 4;
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
  // `words`: scale words of the eight tokens of a step.
  static __device__ __forceinline__ TokenScales token_scales(const uint32_t* words, int lane) {
    return {words[lane >> 2]};
  }
  template <int, bool>
  static __device__ __forceinline__ Weights dequantize(const uint32_t (&row)[kWeightWords],
                                                       const uint32_t (&row_plus_8)[kWeightWords], const RowScales&,
                                                       RowNans&) {
    Weights w;
    if constexpr (kWeights == Element::kE2m3) {
      unpack_e2m3_to_containers(row[0], row[1], w.a[0], w.a[2]);
      unpack_e2m3_to_containers(row_plus_8[0], row_plus_8[1], w.a[1], w.a[3]);
    } else if constexpr (kWeightWords == 2) {
      w = {{row[0], row_plus_8[0], row[1], row_plus_8[1]}};
    } else {
      unpack_to_containers(row[0], w.a[0], w.a[2]);
      unpack_to_containers(row_plus_8[0], w.a[1], w.a[3]);
    }
    return w;
  }
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* from) {
    const uint2 k = load_lane_tokens<kLaneTokenBytes>(from);
    if constexpr (kLaneTokenBytes == 4) return {{k.x, k.y}};
    return {{__byte_perm(k.x, k.y, 0x6420), __byte_perm(k.x, k.y, 0x7531)}};
  }
  template <int kBlock, int kCall>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowScales& row, const TokenScales& token) {
    ptx::mma_block_scaled<kBlock, kWeights, kComputeType>(accumulator, w.a, x.b, row.word, token.word);
  }
};

// Block scales in float32, for policies that multiply the partial sums of a scale block with them. All lanes of a
// quad need those of the same rows, and all quads those of the same tokens: a warp converts each once, through shared
// memory (tile/mainloop.cuh).
struct FloatRowScales {
  float row, row_plus_8;
};
struct FloatTokenScales {
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
// mma.sync has no native FP8 (ptxas converts both operands to half), so this policy dequantizes to half itself, which
// is exact for e2m1, e4m3 and e5m2 and cheaper.
template <Element kComputeType, Element kWeights>
struct Fp16Policy {
  static constexpr bool kE2m1 = kComputeType == Element::kE2m1;
  static constexpr Scaling kScaling = Scaling::kInSums;
  static constexpr int kCallsPerBlock = 1;
  static constexpr int kBlocksPerCall = 1;
  static constexpr int kWeightWords = weight_words(kWeights);
  static constexpr int kLaneTokenBytes = !kE2m1 && lanes_take_eights(kWeights) ? 8 : 4;
  static constexpr float kAccumulatorScale =
      (kWeights == Element::kE4m3 ? 1.0f : kFp16Dequantization) * (kE2m1 ? kFp16Dequantization : 1.0f);
  static constexpr bool kCollectsNans = false;
  using RowScales = FloatRowScales;
  using TokenScales = FloatTokenScales;

  struct Weights {
    uint32_t a[2][4];
  };
  struct Tokens {
    uint32_t b[2][2];
  };

  template <int, bool>
  static __device__ __forceinline__ Weights dequantize(const uint32_t (&row)[kWeightWords],
                                                       const uint32_t (&row_plus_8)[kWeightWords], const RowScales&,
                                                       RowNans&) {
    uint32_t low[4], high[4];
    row_to_fp16(row, low);
    row_to_fp16(row_plus_8, high);
    return {{{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}}};
  }
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* from) {
    if constexpr (kE2m1) {
      uint32_t pair[4];
      dequantize_to_fp16(*reinterpret_cast<const uint32_t*>(from), pair);
      return {{{pair[0], pair[1]}, {pair[2], pair[3]}}};
    }
    const uint2 k = load_lane_tokens<kLaneTokenBytes>(from);
    if constexpr (kWeights == Element::kE4m3) {
      return {{{to_fp16(k.x), to_fp16(k.x >> 16)}, {to_fp16(k.y), to_fp16(k.y >> 16)}}};
    }
    const uint32_t first = __byte_perm(k.x, k.y, 0x5140);  // elements 0, 4, 1, 5
    const uint32_t second = __byte_perm(k.x, k.y, 0x7362);  // elements 2, 6, 3, 7
    return {{{to_fp16(first), to_fp16(second)}, {to_fp16(first >> 16), to_fp16(second >> 16)}}};
  }
  template <int kBlock, int kCall>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const FloatRowScales& row, const FloatTokenScales& token) {
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
  static __device__ __forceinline__ uint32_t to_fp16(uint32_t pair) {
    if constexpr (kComputeType == Element::kE5m2) {
      return __byte_perm(pair, 0, 0x1404);  // an e5m2 byte is the upper byte of the half with the same value
    } else {
      return ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(pair));
    }
  }
  static __device__ __forceinline__ void row_to_fp16(const uint32_t (&row)[kWeightWords], uint32_t (&pair)[4]) {
    if constexpr (kWeights == Element::kE2m1) {
      dequantize_to_fp16(row[0], pair);
    } else if constexpr (kWeights == Element::kE2m3) {
      dequantize_e2m3_to_fp16(row[0], row[1], pair);
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
// ldmatrix loads a scale block of MXFP4 as one matrix, and the lane gets elements 8t.. of its row. It loads one of
// MXFP8 as two, and the lane gets elements 4t.. and 16 + 4t... Tokens are packed in the same order (rows/load.cuh,
// rows/pack.cuh).
template <Element kWeights>
struct Bf16Policy {
  static constexpr Scaling kScaling = Scaling::kInWeights;
  static constexpr int kCallsPerBlock = 2;
  static constexpr int kBlocksPerCall = 1;
  static constexpr int kLaneTokenBytes = 16;
  static constexpr int kWeightWords = weight_words(kWeights);
  using BlockDequantizer = Dequantizer<kWeights, Saves::kIntegerPipe>;
  static constexpr float kAccumulatorScale = BlockDequantizer::kAccumulatorScale;
  static constexpr bool kCollectsNans = BlockDequantizer::kHasNan;

  struct RowScales {
    uint32_t row, row_plus_8;  // scale words; NVFP4's hold two blocks' scales, the lane's in bytes 0 and 2
  };
  struct TokenScales {};
  struct Weights {
    uint32_t a[2][4];
  };
  struct Tokens {
    uint32_t b[2][2];
  };

  // kFolded: no scale of the K block exceeds kLargestFoldedScale.
  template <int kBlock, bool kFolded>
  static __device__ __forceinline__ Weights dequantize(const uint32_t (&row)[kWeightWords],
                                                       const uint32_t (&row_plus_8)[kWeightWords],
                                                       const RowScales& scales, RowNans& nans) {
    uint32_t low[4], high[4];
    dequantize_scaled<kBlock, kFolded>(row, scales.row, low, nans.row);
    dequantize_scaled<kBlock, kFolded>(row_plus_8, scales.row_plus_8, high, nans.row_plus_8);
    return {{{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}}};
  }
  // The lane's eight elements of a block, in the order of dequantize().
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* from) {
    const uint4 k = *reinterpret_cast<const uint4*>(from);
    return {{{k.x, k.y}, {k.z, k.w}}};
  }
  template <int kBlock, int kCall>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowScales&, const TokenScales&) {
    ptx::mma_16816<true>(accumulator, w.a[kCall], x.b[kCall], accumulator);
  }

 private:
  template <int kBlock, bool kFolded>
  static __device__ __forceinline__ void dequantize_scaled(const uint32_t (&words)[kWeightWords], uint32_t scales,
                                                           uint32_t (&pair)[4], uint32_t& nan) {
    if constexpr (kWeights == Element::kNvE2m1) {
      BlockDequantizer::eight(words, 0, nv_scales(scales >> (kBlock % 2 * 16)), pair, nan);
    } else if constexpr (kFolded) {
      eight(words, BlockDequantizer::template folded_scale_of<kBlock>(scales), pair, nan);
    } else {
      eight(words, BlockDequantizer::kUndo, pair, nan);
      const uint32_t scale = scale_pair(scales >> (8 * kBlock) & 0xFFu);
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], scale);
    }
  }

  // The lane's words of a block, by one scale.
  static __device__ __forceinline__ void eight(const uint32_t (&words)[kWeightWords], uint32_t scale,
                                               uint32_t (&pair)[4], uint32_t& nan) {
    if constexpr (kWeights == Element::kE2m3) {
      dequantize_e2m3_to_bf16<0>(words[0], words[1], scale, pair);
    } else {
      BlockDequantizer::eight(words, 0, scale, pair, nan);
    }
  }
};

// The policy of this compilation pass: the only place where the MMA differs between architectures.
template <Element kComputeType, Element kWeights>
using Policy = std::conditional_t<
    kComputeType == Element::kBf16, Bf16Policy<kWeights>,
    std::conditional_t<FLASHINFER_SM12X_DEVICE && uses_block_scaled_mma(kComputeType),
                       BlockScaledPolicy<kComputeType, kWeights>, Fp16Policy<kComputeType, kWeights>>>;

}  // namespace flashinfer::sm12x::mma
