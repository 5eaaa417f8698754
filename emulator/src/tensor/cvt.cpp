// SPDX-License-Identifier: Apache-2.0
// cvt between float32, float16, bfloat16, tf32 and the narrow formats (PTX ISA 9.0, 9.7.9.21).
#include <cassert>

#include "../numerics/narrow.h"
#include "tensor.h"

namespace vsm::tensor {
namespace {

const numerics::NarrowFormat* narrow_format(Type type) {
  switch (type) {
    case Type::kE4M3: return &numerics::kE4M3;
    case Type::kE5M2: return &numerics::kE5M2;
    case Type::kE3M2: return &numerics::kE3M2;
    case Type::kE2M3: return &numerics::kE2M3;
    case Type::kE2M1: return &numerics::kE2M1;
    default: return nullptr;
  }
}

/// Bits between the two elements of a packed pair: e2m1x2 is 8 bits, the 6-bit types are padded to 8.
int pair_stride(Type type) { return type == Type::kE2M1 ? 4 : 8; }

Rounding rounding_of(Round round) {
  switch (round) {
    case Round::kRN: return Rounding::kNearestEven;
    case Round::kRZ: return Rounding::kZero;
    case Round::kRM: return Rounding::kDown;
    case Round::kRP: return Rounding::kUp;
    case Round::kRNA: return Rounding::kNearestAway;
    case Round::kRS: break;
  }
  assert(!"stochastic rounding is not modelled");
  return Rounding::kNearestEven;
}

uint32_t narrow_bits(Type dst, Round round, bool satfinite, bool relu, float x) {
  if (dst == Type::kUE8M0) return numerics::encode_ue8m0(x, rounding_of(round), satfinite);
  const numerics::NarrowFormat* format = narrow_format(dst);
  assert(format);
  return numerics::encode(*format, x, rounding_of(round), relu);
}

uint32_t tf32_bits(float x, Rounding mode) {
  const uint32_t u = float_to_bits(x);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7fffe000u;
  // Rounding may carry into the exponent, up to infinity; rounding toward zero cannot.
  return (u & 0x80000000u) | static_cast<uint32_t>(round_off(a, 13, mode, (u >> 31) != 0) << 13);
}

}  // namespace

bool cvt_narrow_supported(Type dst, Type src, Round round, bool satfinite, bool relu) {
  if (dst == Type::kUE8M0) {
    return (src == Type::kF32 || src == Type::kBF16) && (round == Round::kRZ || round == Round::kRP) && !relu;
  }
  if (src == Type::kUE8M0) return dst == Type::kBF16 && round == Round::kRN && !satfinite && !relu;
  if (narrow_format(src)) return dst == Type::kF16 && round == Round::kRN && !satfinite;
  if (!narrow_format(dst) || round != Round::kRN || !satfinite) return false;
  const bool eight_bits = dst == Type::kE4M3 || dst == Type::kE5M2;
  return src == Type::kF32 || (src == Type::kF16 && eight_bits);
}

uint32_t cvt_f32x2_to_narrow(Type dst, Round round, bool satfinite, bool relu, float hi, float lo) {
  return narrow_bits(dst, round, satfinite, relu, hi) << pair_stride(dst) |
         narrow_bits(dst, round, satfinite, relu, lo);
}

uint32_t cvt_f16x2_to_narrow(Type dst, Type src, Round round, bool satfinite, bool relu, uint32_t packed) {
  assert(src == Type::kF16 || src == Type::kBF16);
  return cvt_f32x2_to_narrow(dst, round, satfinite, relu, to_float(src, packed >> 16), to_float(src, packed & 0xffffu));
}

uint32_t cvt_narrow_to_f16x2(Type src, Type dst, bool relu, uint32_t packed) {
  const uint32_t mask = src == Type::kE2M1 ? 0xfu : 0xffu;
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const float x = to_float(src, (packed >> (half * pair_stride(src))) & mask);
    result |= cvt_f32_to(dst, Round::kRN, false, relu, x) << (16 * half);
  }
  return result;
}

uint32_t cvt_f32_to(Type dst, Round round, bool satfinite, bool relu, float x) {
  assert(dst == Type::kF16 || dst == Type::kBF16 || dst == Type::kTF32);
  const uint32_t sign = float_to_bits(x) >> 31;
  const bool nan = x != x;
  if (relu && sign && !nan) return 0;
  const Rounding mode = rounding_of(round);
  uint32_t bits, infinity;
  int sign_shift;
  switch (dst) {
    case Type::kF16: bits = float_to_half(x, mode), infinity = 0x7c00u, sign_shift = 15; break;
    case Type::kBF16: bits = float_to_bfloat(x, mode), infinity = 0x7f80u, sign_shift = 15; break;
    default: bits = tf32_bits(x, mode), infinity = 0x7f800000u, sign_shift = 31; break;
  }
  const uint32_t magnitude = bits & ((1u << sign_shift) - 1u);
  if (satfinite && magnitude == infinity) {
    const uint32_t step = dst == Type::kTF32 ? 1u << 13 : 1u;
    bits = (sign << sign_shift) | (infinity - step);
  }
  return bits;
}

float to_float(Type type, uint32_t bits) {
  switch (type) {
    case Type::kF16: return half_to_float(static_cast<uint16_t>(bits));
    case Type::kBF16: return bfloat_to_float(static_cast<uint16_t>(bits));
    case Type::kTF32: return bits_to_float(bits & ~0x1fffu);
    case Type::kF32: return bits_to_float(bits);
    case Type::kE4M3: return static_cast<float>(numerics::kE4M3Values[bits & 0xffu]);
    case Type::kE5M2: return static_cast<float>(numerics::kE5M2Values[bits & 0xffu]);
    case Type::kE3M2: return static_cast<float>(numerics::kE3M2Values[bits & 0x3fu]);
    case Type::kE2M3: return static_cast<float>(numerics::kE2M3Values[bits & 0x3fu]);
    case Type::kE2M1: return static_cast<float>(numerics::kE2M1Values[bits & 0xfu]);
    case Type::kUE8M0: return static_cast<float>(numerics::kUE8M0Values[bits & 0xffu]);
    case Type::kUE4M3: return static_cast<float>(numerics::kUE4M3Values[bits & 0xffu]);
    case Type::kS8: return static_cast<float>(static_cast<int8_t>(bits));
    case Type::kU8: return static_cast<float>(bits & 0xffu);
    case Type::kS4: return static_cast<float>(static_cast<int8_t>(bits << 4) >> 4);
    case Type::kU4: return static_cast<float>(bits & 0xfu);
    case Type::kB1: return static_cast<float>(bits & 1u);
    case Type::kS32:
    case Type::kF64:
    case Type::kNone: break;
  }
  assert(!"no exact float32 value of one element");
  return bits_to_float(0x7fffffffu);
}

}  // namespace vsm::tensor
