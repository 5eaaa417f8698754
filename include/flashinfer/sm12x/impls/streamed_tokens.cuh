// SPDX-License-Identifier: Apache-2.0
//
// Token rows as MMA fragments in registers. Lane 4g + t holds 32-block t of a 128-element word of token g: a whole scale
// block, so that quantizing to MXFP8 needs no other lane. Eight MMAs multiply a word; number 2q + h takes elements
// 8q + {2h, 2h + 4} and 8q + {2h + 1, 2h + 5} of every lane's block, the pairs that expand_to_bf16 makes of a 32-bit word
// of weights.
//
// e4m3 * 2^s is exact in bfloat16, so W4A8 is computed exactly by bf16 MMAs, on SM12x and Hopper by the same instructions.
#pragma once

#include "../ptx/convert.cuh"
#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/sm12x_activation_quantizer.cuh"
#include "streamed_walk.cuh"

namespace flashinfer::sm12x {

// One lane's block: fragment[2q] = elements 8q + (0, 4), (1, 5); fragment[2q + 1] = 8q + (2, 6), (3, 7).
using TokenBlock = uint32_t[8][2];

namespace detail {

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Two e4m3 values times 2^s.
__device__ __forceinline__ uint32_t scaled_pair(uint16_t e4m3, float scale) {
  const uint32_t halves = ptx::e4m3x2_to_f16x2(e4m3);
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
  return bf16_pair(pair.x * scale, pair.y * scale);
}

__device__ __forceinline__ void from_eight_bytes(const uint2& eight, float scale, uint32_t (&even)[2],
                                                 uint32_t (&odd)[2]) {
  const uint32_t first = __byte_perm(eight.x, eight.y, 0x5140);  // elements 0, 4, 1, 5
  const uint32_t second = __byte_perm(eight.x, eight.y, 0x7362);  // elements 2, 6, 3, 7
  even[0] = scaled_pair(static_cast<uint16_t>(first), scale);
  even[1] = scaled_pair(static_cast<uint16_t>(first >> 16), scale);
  odd[0] = scaled_pair(static_cast<uint16_t>(second), scale);
  odd[1] = scaled_pair(static_cast<uint16_t>(second >> 16), scale);
}

// Eight floats to MXFP8 and back.
__device__ __forceinline__ void requantize_eight(const float (&x)[8], float inverse, float scale, uint32_t (&even)[2],
                                                 uint32_t (&odd)[2]) {
  even[0] = scaled_pair(ptx::f32x2_to_e4m3x2(x[0] * inverse, x[4] * inverse), scale);
  even[1] = scaled_pair(ptx::f32x2_to_e4m3x2(x[1] * inverse, x[5] * inverse), scale);
  odd[0] = scaled_pair(ptx::f32x2_to_e4m3x2(x[2] * inverse, x[6] * inverse), scale);
  odd[1] = scaled_pair(ptx::f32x2_to_e4m3x2(x[3] * inverse, x[7] * inverse), scale);
}

template <bool kBf16>
__device__ __forceinline__ void unpack_eight(const uint4& packed, float (&x)[8]) {
  unpack_pair<kBf16>(packed.x, x[0], x[1]);
  unpack_pair<kBf16>(packed.y, x[2], x[3]);
  unpack_pair<kBf16>(packed.z, x[4], x[5]);
  unpack_pair<kBf16>(packed.w, x[6], x[7]);
}

template <bool kBf16>
__device__ __forceinline__ void quantize_block(const uint4 (&packed)[4], TokenBlock& block) {
  float amax = 0.0f, x[8];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    unpack_eight<kBf16>(packed[q], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
  }
  const uint32_t exponent = ptx::mxfp8_scale(amax);
  const float inverse = ptx::mxfp8_inverse_scale(exponent), scale = ptx::ue8m0_to_f32<0>(exponent);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    unpack_eight<kBf16>(packed[q], x);
    requantize_eight(x, inverse, scale, block[2 * q], block[2 * q + 1]);
  }
}

__device__ __forceinline__ void take_bf16_block(const uint4 (&packed)[4], TokenBlock& block) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint4& k = packed[q];
    block[2 * q][0] = __byte_perm(k.x, k.z, 0x5410);
    block[2 * q][1] = __byte_perm(k.x, k.z, 0x7632);
    block[2 * q + 1][0] = __byte_perm(k.y, k.w, 0x5410);
    block[2 * q + 1][1] = __byte_perm(k.y, k.w, 0x7632);
  }
}

}  // namespace detail

// FC1: block `k_block` of token row `token`.
template <class Config>
__device__ __forceinline__ void load_input_block(const StreamedLayerParams& p, int64_t token, int k_block,
                                                 TokenBlock& block) {
  const int k = p.gemm[0].k;
  const int64_t element = token * k + k_block * kScaleBlock;
  const bool sixteen_bit =
      Config::kActivation == Activation::kBf16 || p.source == TokenSource::kBf16 || p.source == TokenSource::kF16;
  if (sixteen_bit) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.input) + element);
    const uint4 packed[4] = {from[0], from[1], from[2], from[3]};
    if constexpr (Config::kActivation == Activation::kBf16) {
      detail::take_bf16_block(packed, block);
    } else if (p.source == TokenSource::kBf16) {
      detail::quantize_block<true>(packed, block);
    } else {
      detail::quantize_block<false>(packed, block);
    }
    return;
  }
  int64_t at = token * (k / kScaleBlock) + k_block;
  if (p.source == TokenSource::kMxfp8Swizzled) {
    const ScaleRow row = swizzled_scale_row(token, scale_words(k));
    at = 4 * (row.base + k_block / kScaleChunkBlocks * row.stride) + k_block % kScaleChunkBlocks;
  }
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.input) + element);
  const uint4 packed[2] = {from[0], from[1]};
  const float factor = ptx::ue8m0_to_f32<0>(p.input_scales[at]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    detail::from_eight_bytes(make_uint2(packed[i].x, packed[i].y), factor, block[4 * i], block[4 * i + 1]);
    detail::from_eight_bytes(make_uint2(packed[i].z, packed[i].w), factor, block[4 * i + 2], block[4 * i + 3]);
  }
}

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
      block[2 * q][0] = detail::bf16_pair(x[0], x[4]);
      block[2 * q][1] = detail::bf16_pair(x[1], x[5]);
      block[2 * q + 1][0] = detail::bf16_pair(x[2], x[6]);
      block[2 * q + 1][1] = detail::bf16_pair(x[3], x[7]);
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
        load_input_block<Config>(p, row_of(token), k_block, last);
      } else {
        load_act_block<Config>(p, row_of(token), k_block, last);
      }
    }
  }
};

}  // namespace flashinfer::sm12x
