// SPDX-License-Identifier: Apache-2.0
//
// MMA policies: how 16 weight rows meet 8 tokens over one 32-element scale block. A policy is a set of fragment types and
// static functions; the kernel around it is the same for all, and so is what it computes:
//
//   accumulator[row][token] += 2^(row scale) * 2^(token scale) * sum over 32 of weight * token
//
// lane = 4 * g + t throughout; a fragment's accumulators are rows g, g, g + 8, g + 8 at tokens 2t, 2t + 1, 2t, 2t + 1.
#pragma once

#include <cstdint>

#include "../ptx/convert.cuh"
#include "../ptx/mma.cuh"
#include "expand.cuh"
#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/sm12x_arch_config.h"

namespace flashinfer::sm12x::mma {

// SM12x, MXFP8 x MXFP4: scales go into the MMA, weights need four instructions a word.
template <Activation kActivation_>
struct BlockScaledPolicy {
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kScalesInMma = true;
  static constexpr float kAccumulatorScale = 1.0f;

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

  // Lanes with odd t supply row g + 8 (scale_vec::1X, thread-id 0).
  static __device__ __forceinline__ RowScales row_scales(const uint32_t* words, int row, int row_plus_8, int lane) {
    return {words[(lane & 1) ? row_plus_8 : row]};
  }
  // `words` of the eight tokens of a step.
  static __device__ __forceinline__ TokenScales token_scales(const uint32_t* words, int lane) {
    return {words[lane >> 2]};
  }
  static __device__ __forceinline__ Weights expand(uint32_t row, uint32_t row_plus_8) {
    Weights w;
    expand_to_containers(row, w.a[0], w.a[2]);
    expand_to_containers(row_plus_8, w.a[1], w.a[3]);
    return w;
  }
  // `tokens` points at K element 0 of the 32-block of this lane's token g.
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* tokens, int lane) {
    const uint2 k = *reinterpret_cast<const uint2*>(tokens + 8 * (lane & 3));
    return {{__byte_perm(k.x, k.y, 0x6420), __byte_perm(k.x, k.y, 0x7531)}};
  }
  template <int kBlock>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowScales& row, const TokenScales& token) {
    ptx::mma_block_scaled_16832<kBlock, kActivation == Activation::kE5m2>(accumulator, w.a, x.b, row.word, token.word);
  }
};

// Scales as float32 factors, for policies that apply them to the partial sums of a 32-block. All lanes of a quad need
// those of the same rows, and all quads those of the same tokens: a warp converts each once and shares it (mainloop.cuh).
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

// SM89/SM90, MXFP8 x MXFP4. Their mma.sync has no native FP8 on Hopper (ptxas converts both operands to half), so this
// policy expands to half itself, which is exact for e2m1, e4m3 and e5m2 and cheaper.
template <Activation kActivation_>
struct HalfPolicy {
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kScalesInMma = false;
  static constexpr float kAccumulatorScale = kHalfExpansion;

  struct Weights {
    uint32_t a[2][4];
  };
  struct Tokens {
    uint32_t b[2][2];
  };

  static __device__ __forceinline__ Weights expand(uint32_t row, uint32_t row_plus_8) {
    uint32_t low[4], high[4];
    expand_to_halves(row, low);
    expand_to_halves(row_plus_8, high);
    return {{{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}}};
  }
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* tokens, int lane) {
    const uint2 k = *reinterpret_cast<const uint2*>(tokens + 8 * (lane & 3));
    const uint32_t first = __byte_perm(k.x, k.y, 0x5140);  // elements 0, 4, 1, 5
    const uint32_t second = __byte_perm(k.x, k.y, 0x7362);  // elements 2, 6, 3, 7
    return {{{to_halves(first), to_halves(second)}, {to_halves(first >> 16), to_halves(second >> 16)}}};
  }
  template <int kBlock>
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
    if constexpr (kActivation == Activation::kE5m2) {
      return __byte_perm(pair, 0, 0x1404);  // an e5m2 byte is the upper byte of the half with the same value
    } else {
      return ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(pair));
    }
  }
};

// bf16 x MXFP4 (W4A16), on every architecture.
struct Bf16Policy {
  static constexpr Activation kActivation = Activation::kBf16;
  static constexpr bool kScalesInMma = false;
  static constexpr float kAccumulatorScale = 1.0f;

  struct Weights {
    uint32_t a[2][4];
  };
  struct Tokens {
    uint32_t b[2][2];
  };

  static __device__ __forceinline__ Weights expand(uint32_t row, uint32_t row_plus_8) {
    uint32_t low[4], high[4];
    expand_to_bf16(row, kTwoTo126Pair, low);
    expand_to_bf16(row_plus_8, kTwoTo126Pair, high);
    return {{{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}}};
  }
  // Words of two elements: (0, 1), (2, 3), (4, 5), (6, 7); wanted are (0, 4), (1, 5) and (2, 6), (3, 7).
  static __device__ __forceinline__ Tokens load_tokens(const uint8_t* tokens, int lane) {
    const uint4 k = *reinterpret_cast<const uint4*>(tokens + 16 * (lane & 3));
    return {{{__byte_perm(k.x, k.z, 0x5410), __byte_perm(k.x, k.z, 0x7632)},
             {__byte_perm(k.y, k.w, 0x5410), __byte_perm(k.y, k.w, 0x7632)}}};
  }
  template <int kBlock>
  static __device__ __forceinline__ void multiply(float (&accumulator)[4], const Weights& w, const Tokens& x,
                                                  const RowFactors& row, const TokenFactors&) {
    constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float partial[4];
    ptx::mma_16816<true>(partial, w.a[0], x.b[0], kZero);
    ptx::mma_16816<true>(partial, w.a[1], x.b[1], partial);
    accumulate_scaled(accumulator, partial, row.row, row.row_plus_8);
  }
};

// The policy of this compilation pass: the only place where architectures differ.
template <Activation kActivation>
struct PolicyOf {
#if defined(FLASHINFER_SM12X_BLOCK_SCALED_MMA)
  using type = BlockScaledPolicy<kActivation>;
#else
  using type = HalfPolicy<kActivation>;
#endif
};
template <>
struct PolicyOf<Activation::kBf16> {
  using type = Bf16Policy;
};
template <Activation kActivation>
using Policy = typename PolicyOf<kActivation>::type;

}  // namespace flashinfer::sm12x::mma
