// SPDX-License-Identifier: Apache-2.0
//
// Weights dequantized in registers: a 32-bit word of eight e2m1, of four e4m3 or four int8; of e2m3 a word of nibbles
// and one of pairs (types.h). The order of K inside a block is free as long as both operands agree, so each
// dequantization takes the order that costs least, and the token side (policy.cuh) follows it.
//
//   format            to bfloat16, instructions for eight weights
//   MXFP4, NVFP4      14
//   MXFP6             14.5
//   MXINT8            18
//   MXFP8             24, 6 of them look for NaN
#pragma once

#include <cstdint>

#include "../ptx/convert.cuh"
#include "../types.h"

namespace flashinfer::sm12x::mma {

// 00xxxx00 containers, as kind::mxf8f6f4 reads e2m1: elements 0, 2, 4, 6 and 1, 3, 5, 7. Four instructions.
__device__ __forceinline__ void unpack_to_containers(uint32_t nibbles, uint32_t& even, uint32_t& odd) {
  even = (nibbles & 0x0F0F0F0Fu) << 2;
  odd = (nibbles >> 2) & 0x3C3C3C3Cu;
}

// The same values as e4m3, elements 0 to 3 and 4 to 7: a magnitude picks one of eight bytes.
__device__ __forceinline__ uint2 unpack_to_e4m3(uint32_t nibbles) {
  constexpr uint32_t kUpToOneAndAHalf = 0x3C383000u, kTwoToSix = 0x4C484440u;
  const uint32_t magnitudes = nibbles & 0x77777777u;
  const uint32_t even = (nibbles & 0x08080808u) << 4, odd = nibbles & 0x80808080u;  // signs
  return make_uint2(__byte_perm(kUpToOneAndAHalf, kTwoToSix, magnitudes) | __byte_perm(even, odd, 0x5140),
                    __byte_perm(kUpToOneAndAHalf, kTwoToSix, magnitudes >> 16) | __byte_perm(even, odd, 0x7362));
}

// Halves equal to the value times 2^-14: the three magnitude bits of e2m1 are the low exponent bits and the top
// mantissa bit of e5m2, whose byte is the upper byte of a half; e2m1's subnormal 0.5 is a half's subnormal too. pair[0]
// = elements 0, 4; pair[1] = 2, 6; pair[2] = 1, 5; pair[3] = 3, 7. Eleven instructions.
constexpr float kFp16Dequantization = 16384.0f;  // 2^14 undoes it

__device__ __forceinline__ void dequantize_to_fp16(uint32_t nibbles, uint32_t (&pair)[4]) {
  const uint32_t even = ((nibbles << 4) & 0x80808080u) | ((nibbles << 1) & 0x0E0E0E0Eu);
  const uint32_t odd = (nibbles & 0x80808080u) | ((nibbles >> 3) & 0x0E0E0E0Eu);
  pair[0] = __byte_perm(even, 0, 0x2404);  // bytes (0, even[0], 0, even[2])
  pair[1] = even & 0xFF00FF00u;
  pair[2] = __byte_perm(odd, 0, 0x2404);
  pair[3] = odd & 0xFF00FF00u;
}

// The resource that a dequantization of e2m1 to bfloat16 saves. A split-K GEMM, whose twelve warps share K, is bound by
// the number of its instructions. In the tiled grouped GEMM Hopper's integer pipe, half an instruction a cycle, counts
// as much, and more with narrow tiles and many blocks. Left shifts can be multiplies, which go elsewhere; rotations
// cannot.
enum class Saves { kInstructions, kIntegerPipe };

// bfloat16: sign and magnitude bits put in place are the value times 2^-126, and `scale`, a pair of bfloat16 that
// holds 2^126 times a block scale, makes the scaled value of it; exact wherever that is a bfloat16. A sign belongs six
// bits further above its magnitude than in a nibble. Once a word has four nibbles' signs that far from their
// magnitudes, each pair takes a shift and a mask, one of them the mask alone. pair[i] = elements i, i + 4. Fourteen
// instructions, nine of them on the integer pipe; or fifteen, with seven there.
constexpr uint32_t kTwoTo126Pair = 0x7E807E80u;

template <Saves kSaves>
__device__ __forceinline__ void dequantize_to_bf16(uint32_t nibbles, uint32_t scale, uint32_t (&pair)[4]) {
  constexpr uint32_t kInPlace = 0x81C081C0u;
  if constexpr (kSaves == Saves::kInstructions) {
    const uint32_t magnitudes = __funnelshift_r(nibbles, nibbles, 6);
    const uint32_t outer = ptx::select_bits(0x80088008u, nibbles, magnitudes);
    const uint32_t inner = ptx::select_bits(0x08800880u, nibbles, magnitudes);
    pair[0] = __funnelshift_l(outer, outer, 12) & kInPlace;
    pair[1] = __funnelshift_l(inner, inner, 8) & kInPlace;
    pair[2] = inner << 4 & kInPlace;
    pair[3] = outer & kInPlace;
  } else {
    const uint32_t lower = ptx::select_bits(0x00770077u, nibbles, nibbles << 6);
    const uint32_t upper = ptx::select_bits(0x88008800u, nibbles, nibbles >> 6);
    pair[0] = lower << 6 & kInPlace;
    pair[1] = lower << 2 & kInPlace;
    pair[2] = upper << 4 & kInPlace;
    pair[3] = upper & kInPlace;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], scale);
}

// Byte `kByte` of four scales, in both halves.
template <int kByte>
__device__ __forceinline__ uint32_t scale_of(uint32_t scales) {
  return __byte_perm(scales, 0, 0x4040 | kByte << 8 | kByte);
}

// 2^(s - 127) as a pair of bfloat16, NaN for s = 255.
__device__ __forceinline__ uint32_t scale_pair(uint32_t s) {
  const uint32_t bits = s == 0 ? 0x0040u : s == kNanScale ? 0x7FFFu : s << 7;
  return bits * 0x00010001u;
}

// Four e4m3 likewise: sign, exponent and mantissa in place are the value times 2^-120, subnormals included. pair[0] =
// elements 0, 2; pair[1] = 1, 3. Nine instructions.
__device__ __forceinline__ void dequantize_e4m3_to_bf16(uint32_t bytes, uint32_t scale, uint32_t (&pair)[2]) {
  const uint32_t even = bytes << 8;
  pair[0] = ((even >> 4) & 0x07F007F0u) | (even & 0x80008000u);
  pair[1] = ((bytes >> 4) & 0x07F007F0u) | (bytes & 0x80008000u);
#pragma unroll
  for (int i = 0; i < 2; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], scale);
}

// Four int8, in 64ths, times 2^-126: with its sign bit h apart, l the other seven, a byte is l - 128 h. 2^-125 (1 + l /
// 128) is l in the mantissa of a bfloat16, and 2^-125 or, if h is set, 2^-124 from it leaves (l - 128 h) 2^-132: h is
// the lowest bit of that exponent. A fused multiply-add scales and subtracts; it rounds nothing, for the result is a
// bfloat16. pair[0] = elements 0, 2; pair[1] = 1, 3. Nine instructions.
__device__ __forceinline__ void dequantize_int8_to_bf16(uint32_t bytes, uint32_t scale, uint32_t (&pair)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t two = bytes >> (8 * i);
    const uint32_t number = ptx::and_or(two, 0x007F007Fu, 0x01000100u);
    const uint32_t negative_offset = ptx::and_or(two, 0x00800080u, 0x81008100u);
    pair[i] = ptx::bf16x2_fma(number, scale, ptx::bf16x2_multiply(negative_offset, scale));
  }
}

// Eight e2m3, a word of nibbles and one of pairs that is rotated right by kRotation for elements 0, 2, 4 and 6 and by
// two more for the others. In each half of a result the upper byte comes from the pairs, s.......e1, and the lower one
// from the nibbles, e0 m2 m1 m0....: in place they are the value times 2^-126, as e2m1's are. pair[i] = elements i, i +
// 4.
constexpr uint32_t kE2m3InPlace = 0x81F081F0u;

template <int kRotation>
__device__ __forceinline__ void place_e2m3(uint32_t nibbles, uint32_t pairs, uint32_t (&pair)[4]) {
  const uint32_t even = nibbles << 4, signs = __funnelshift_r(pairs, pairs, kRotation);
  const uint32_t odd_signs = __funnelshift_r(pairs, pairs, kRotation + 2);
  pair[0] = __byte_perm(even, signs, 0x6240) & kE2m3InPlace;
  pair[1] = __byte_perm(nibbles, odd_signs, 0x6240) & kE2m3InPlace;
  pair[2] = __byte_perm(even, signs, 0x7351) & kE2m3InPlace;
  pair[3] = __byte_perm(nibbles, odd_signs, 0x7351) & kE2m3InPlace;
}

template <int kRotation>
__device__ __forceinline__ void dequantize_e2m3_to_bf16(uint32_t nibbles, uint32_t pairs, uint32_t scale,
                                                        uint32_t (&pair)[4]) {
  place_e2m3<kRotation>(nibbles, pairs, pair);
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], scale);
}

// In 8-bit containers (00xxxxxx), as kind::mxf8f6f4 reads e2m3: elements 0, 2, 4, 6 and 1, 3, 5, 7. `pairs` is rotated
// for the former.
__device__ __forceinline__ void unpack_e2m3_to_containers(uint32_t nibbles, uint32_t pairs, uint32_t& even,
                                                          uint32_t& odd) {
  auto containers = [](uint32_t magnitudes, uint32_t pairs) {  // s is bit 7 of a byte, e1 bit 0
    const uint32_t upper = ptx::select_bits(0x20202020u, pairs >> 2, pairs << 4);
    return ptx::select_bits(0x0F0F0F0Fu, magnitudes, upper) & 0x3F3F3F3Fu;
  };
  even = containers(nibbles, pairs);
  odd = containers(nibbles >> 4, __funnelshift_r(pairs, pairs, 2));
}

// As halves, times 2^-14 and in the order of dequantize_to_fp16: from where place_e2m3 has them, a magnitude's five
// bits go up by three.
__device__ __forceinline__ void dequantize_e2m3_to_fp16(uint32_t nibbles, uint32_t pairs, uint32_t (&pair)[4]) {
  uint32_t placed[4];
  place_e2m3<0>(nibbles, pairs, placed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = placed[i % 2 * 2 + i / 2];
    pair[i] = ptx::select_bits(0x80008000u, from, from << 3) & 0x8F808F80u;
  }
}

// Two scales of NVFP4, E4M3 whose sign bits nobody reads, in bfloat16: each a pair of the same number, times
// kNvScaleMultiplier; NaN of NaN. The values that e2m1's dequantization makes with such a scale come out times 2^-8:
// 2^126 times the largest scale is no bfloat16.
constexpr float kNvScaleMultiplier = 0x1p118f;
constexpr float kNvDequantization = 256.0f;  // 2^8 undoes it
static_assert(kNvScaleMultiplier * kNvDequantization == 0x1p126f);

struct NvScales {
  uint32_t first, second;
};
__device__ __forceinline__ NvScales nv_scales(uint32_t scales) {
  const uint32_t halves = ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(scales & 0x7F7Fu));
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
  const float first = pair.x * kNvScaleMultiplier, second = pair.y * kNvScaleMultiplier;
  return {ptx::f32x2_to_bf16x2(first, first), ptx::f32x2_to_bf16x2(second, second)};
}

// How a dequantization whose values come out times 2^-kBias takes block scales s: 2^kBias undoes it, and 2^kBias * 2^(s
// - 127), as a pair of bfloat16, scales the values besides. That is for s up to kLargestFoldedScale, above which it
// would overflow.
template <uint32_t kBias>
struct FoldedScale {
  static constexpr float kAccumulatorScale = 1.0f;
  static constexpr uint32_t kUndo = (kBias + 127u) * 0x00800080u;
  static constexpr uint32_t kLargestFoldedScale = 254u - kBias;
  static __device__ __forceinline__ uint32_t folded_scale(uint32_t s) { return (s + kBias) * 0x00800080u; }
  // The scale of byte `kByte` of four scales.
  template <int kByte>
  static __device__ __forceinline__ uint32_t folded_scale_of(uint32_t scales) {
    return scale_of<kByte>(scales) * 128u + kBias * 0x00800080u;
  }
};

// A lane's scale block of weights, eight at a time as bfloat16 pairs. `nan` collects bits for is_nan(). Sums are to be
// multiplied by kAccumulatorScale.
template <Element kWeights, Saves kSaves>
struct Dequantizer;

// The elements have no NaN; a NaN scale makes NaN of them all.
struct WithoutNan {
  static constexpr bool kHasNan = false;
  static __device__ __forceinline__ bool is_nan(uint32_t) { return false; }
};

template <Saves kSaves>
struct Dequantizer<Element::kE2m1, kSaves> : FoldedScale<126>, WithoutNan {
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, uint32_t scale, uint32_t (&pair)[4],
                                               uint32_t&) {
    dequantize_to_bf16<kSaves>(block[q], scale, pair);
  }
};

template <Saves kSaves>
struct Dequantizer<Element::kE4m3, kSaves> : FoldedScale<120> {
  static constexpr bool kHasNan = true;
  // A magnitude of 0x7F is NaN: one more carries into the sign's place.
  static __device__ __forceinline__ bool is_nan(uint32_t collected) { return (collected & 0x80808080u) != 0; }
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, uint32_t scale, uint32_t (&pair)[4],
                                               uint32_t& nan) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t bytes = block[2 * q + half];
      nan |= (bytes & 0x7F7F7F7Fu) + 0x01010101u;
      uint32_t two[2];
      dequantize_e4m3_to_bf16(bytes, scale, two);
      pair[2 * half] = two[0];
      pair[2 * half + 1] = two[1];
    }
  }
};

template <Saves kSaves>
struct Dequantizer<Element::kInt8, kSaves> : FoldedScale<126>, WithoutNan {
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, uint32_t scale, uint32_t (&pair)[4],
                                               uint32_t&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t two[2];
      dequantize_int8_to_bf16(block[2 * q + half], scale, two);
      pair[2 * half] = two[0];
      pair[2 * half + 1] = two[1];
    }
  }
};

// Four words of nibbles, then two of pairs.
template <Saves kSaves>
struct Dequantizer<Element::kE2m3, kSaves> : FoldedScale<126>, WithoutNan {
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, uint32_t scale, uint32_t (&pair)[4],
                                               uint32_t&) {
    const uint32_t pairs = block[4 + q / 2];
    if (q % 2 == 0) {
      dequantize_e2m3_to_bf16<0>(block[q], pairs, scale, pair);
    } else {
      dequantize_e2m3_to_bf16<4>(block[q], pairs, scale, pair);
    }
  }
};

// `scales`: nv_scales of the block's two scales.
template <Saves kSaves>
struct Dequantizer<Element::kNvE2m1, kSaves> : WithoutNan {
  static constexpr float kAccumulatorScale = kNvDequantization;
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, const NvScales& scales,
                                               uint32_t (&pair)[4], uint32_t&) {
    dequantize_to_bf16<kSaves>(block[q], q < 2 ? scales.first : scales.second, pair);
  }
};

// Nonzero if one of four scales exceeds what MXFP4's dequantization folds: its top bit is set, and another one.
__device__ __forceinline__ uint32_t exceeds_folded_scale(uint32_t scales) {
  static_assert(FoldedScale<126>::kLargestFoldedScale == 0x80);
  return scales & ((scales & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) & 0x80808080u;
}

}  // namespace flashinfer::sm12x::mma
