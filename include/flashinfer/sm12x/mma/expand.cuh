// SPDX-License-Identifier: Apache-2.0
//
// Weights of a 32-bit word, eight e2m1 or four e4m3, expanded in registers. Nibble i of a word is K element 8t + i of a
// row's 32-block, t the lane's place in its quad. The order of K inside a block is free as long as both operands agree,
// so each expansion takes the order that costs least, and the token side (policy.cuh) follows it.
#pragma once

#include <cstdint>

#include "../ptx/convert.cuh"
#include "../types.h"

namespace flashinfer::sm12x::mma {

// 00xxxx00 containers, as kind::mxf8f6f4 reads e2m1: elements 0, 2, 4, 6 and 1, 3, 5, 7. Four instructions.
__device__ __forceinline__ void expand_to_containers(uint32_t nibbles, uint32_t& even, uint32_t& odd) {
  even = (nibbles & 0x0F0F0F0Fu) << 2;
  odd = (nibbles >> 2) & 0x3C3C3C3Cu;
}

// The same values as e4m3, elements 0 to 3 and 4 to 7: a magnitude picks one of eight bytes.
__device__ __forceinline__ uint2 expand_to_e4m3(uint32_t nibbles) {
  constexpr uint32_t kUpToOneAndAHalf = 0x3C383000u, kTwoToSix = 0x4C484440u;
  const uint32_t magnitudes = nibbles & 0x77777777u;
  const uint32_t even = (nibbles & 0x08080808u) << 4, odd = nibbles & 0x80808080u;  // signs
  return make_uint2(__byte_perm(kUpToOneAndAHalf, kTwoToSix, magnitudes) | __byte_perm(even, odd, 0x5140),
                    __byte_perm(kUpToOneAndAHalf, kTwoToSix, magnitudes >> 16) | __byte_perm(even, odd, 0x7362));
}

// Halves equal to the value times 2^-14: the three magnitude bits of e2m1 are the low exponent bits and the top
// mantissa bit of e5m2, whose byte is the upper byte of a half; e2m1's subnormal 0.5 is a half's subnormal too. pair[0]
// = elements 0, 4; pair[1] = 2, 6; pair[2] = 1, 5; pair[3] = 3, 7. Eleven instructions.
constexpr float kHalfExpansion = 16384.0f;  // 2^14 undoes it

__device__ __forceinline__ void expand_to_halves(uint32_t nibbles, uint32_t (&pair)[4]) {
  const uint32_t even = ((nibbles << 4) & 0x80808080u) | ((nibbles << 1) & 0x0E0E0E0Eu);
  const uint32_t odd = (nibbles & 0x80808080u) | ((nibbles >> 3) & 0x0E0E0E0Eu);
  pair[0] = __byte_perm(even, 0, 0x2404);  // bytes (0, even[0], 0, even[2])
  pair[1] = even & 0xFF00FF00u;
  pair[2] = __byte_perm(odd, 0, 0x2404);
  pair[3] = odd & 0xFF00FF00u;
}

// What an expansion of e2m1 to bfloat16 saves. A streamed GEMM, whose twelve warps share K, is bound by the number of
// its instructions. In the GEMM of tiles a Hopper's integer pipe, half an instruction a cycle, counts as much, and more
// where tiles are narrow and blocks many. Left shifts can be multiplies, which go elsewhere; rotations cannot.
enum class Saves { kInstructions, kIntegerPipe };

// bfloat16: sign and magnitude bits put in place are the value times 2^-126, and `factor`, a pair of bfloat16 that
// holds 2^126 times a block scale, makes the scaled value of it; exact wherever that is a bfloat16. A sign belongs six
// bits further above its magnitude than in a nibble. Once a word has four nibbles' signs that far from their
// magnitudes, each pair takes a shift and a mask, one of them the mask alone. pair[i] = elements i, i + 4. Fourteen
// instructions, nine of them on the integer pipe; or fifteen, with seven there.
constexpr uint32_t kTwoTo126Pair = 0x7E807E80u;

template <Saves kSaves>
__device__ __forceinline__ void expand_to_bf16(uint32_t nibbles, uint32_t factor, uint32_t (&pair)[4]) {
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
  for (int i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], factor);
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
__device__ __forceinline__ void expand_e4m3_to_bf16(uint32_t bytes, uint32_t factor, uint32_t (&pair)[2]) {
  const uint32_t even = bytes << 8;
  pair[0] = ((even >> 4) & 0x07F007F0u) | (even & 0x80008000u);
  pair[1] = ((bytes >> 4) & 0x07F007F0u) | (bytes & 0x80008000u);
#pragma unroll
  for (int i = 0; i < 2; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], factor);
}

// How an expansion whose values come out times 2^-kBias takes block scales s: 2^kBias undoes it, and 2^kBias * 2^(s -
// 127), as a pair of bfloat16, scales the values besides. That is for s up to kLargestFoldedScale, above which it would
// overflow.
template <uint32_t kBias>
struct FoldedScale {
  static constexpr uint32_t kUndo = (kBias + 127u) * 0x00800080u;
  static constexpr uint32_t kLargestFoldedScale = 254u - kBias;
  static __device__ __forceinline__ uint32_t folded_factor(uint32_t s) { return (s + kBias) * 0x00800080u; }
  // Of byte `kByte` of four scales.
  template <int kByte>
  static __device__ __forceinline__ uint32_t folded_factor_of(uint32_t scales) {
    return scale_of<kByte>(scales) * 128u + kBias * 0x00800080u;
  }
};

// A lane's block of 32 weights, eight at a time as bfloat16 pairs. `nan` collects what is_nan() looks at.
template <Element kWeights, Saves kSaves>
struct Expansion;

template <Saves kSaves>
struct Expansion<Element::kE2m1, kSaves> : FoldedScale<126> {
  static constexpr bool kHasNan = false;
  static __device__ __forceinline__ bool is_nan(uint32_t) { return false; }
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, uint32_t factor, uint32_t (&pair)[4],
                                               uint32_t&) {
    expand_to_bf16<kSaves>(block[q], factor, pair);
  }
};

template <Saves kSaves>
struct Expansion<Element::kE4m3, kSaves> : FoldedScale<120> {
  static constexpr bool kHasNan = true;
  // A magnitude of 0x7F is NaN: one more carries into the sign's place.
  static __device__ __forceinline__ bool is_nan(uint32_t collected) { return (collected & 0x80808080u) != 0; }
  static __device__ __forceinline__ void eight(const uint32_t* block, int q, uint32_t factor, uint32_t (&pair)[4],
                                               uint32_t& nan) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t bytes = block[2 * q + half];
      nan |= (bytes & 0x7F7F7F7Fu) + 0x01010101u;
      uint32_t two[2];
      expand_e4m3_to_bf16(bytes, factor, two);
      pair[2 * half] = two[0];
      pair[2 * half + 1] = two[1];
    }
  }
};

// Nonzero if one of four scales exceeds what MXFP4's expansion folds: its top bit is set, and another one.
__device__ __forceinline__ uint32_t exceeds_folded_scale(uint32_t scales) {
  static_assert(FoldedScale<126>::kLargestFoldedScale == 0x80);
  return scales & ((scales & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) & 0x80808080u;
}

}  // namespace flashinfer::sm12x::mma
