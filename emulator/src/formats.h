// SPDX-License-Identifier: Apache-2.0
// float16 and bfloat16 to and from float32 with every rounding that PTX names.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace vsm {

enum class Rounding : uint8_t { kNearestEven, kZero, kDown, kUp, kNearestAway };

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline double bits_to_double(uint64_t u) {
  double f;
  std::memcpy(&f, &u, 8);
  return f;
}
inline uint64_t double_to_bits(double f) {
  uint64_t u;
  std::memcpy(&u, &f, 8);
  return u;
}

/// Exact.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal or zero
  return sign ? -value : value;
}

/// Exact.
inline float bfloat_to_float(uint16_t b) { return bits_to_float(static_cast<uint32_t>(b) << 16); }

/// Drops the low `shift` bits of `magnitude` (1..63), rounding. `sign` matters for kDown and kUp only.
inline uint64_t round_off(uint64_t magnitude, int shift, Rounding mode, bool sign) {
  const uint64_t kept = magnitude >> shift;
  const uint64_t rest = magnitude & ((uint64_t{1} << shift) - 1);
  const uint64_t half = uint64_t{1} << (shift - 1);
  bool up = false;
  switch (mode) {
    case Rounding::kNearestEven: up = rest > half || (rest == half && (kept & 1)); break;
    case Rounding::kNearestAway: up = rest >= half; break;
    case Rounding::kZero: break;
    case Rounding::kDown: up = sign && rest != 0; break;
    case Rounding::kUp: up = !sign && rest != 0; break;
  }
  return kept + (up ? 1 : 0);
}

/// PTX cvt to f16: NaN becomes the canonical 0x7fff.
inline uint16_t float_to_half(float f, Rounding mode = Rounding::kNearestEven) {
  const uint32_t u = float_to_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7fff;
  if (a == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  uint64_t result;
  if (a >= 0x38800000u) {  // normal in f16 before rounding
    result = round_off(a - (112u << 23), 13, mode, sign != 0);
  } else {
    const int exponent = static_cast<int>(a >> 23);
    const uint64_t mantissa = exponent ? ((a & 0x7fffffu) | 0x800000u) : (a & 0x7fffffu);
    const int shift = 126 - (exponent ? exponent : 1);  // to units of 2^-24
    result =
        shift > 60 ? (round_off(mantissa ? 1 : 0, 2, mode, sign != 0)) : round_off(mantissa, shift, mode, sign != 0);
  }
  if (result >= 0x7c00u) {  // overflow: infinity or the largest finite value, as the rounding says
    const bool to_infinity = mode == Rounding::kNearestEven || mode == Rounding::kNearestAway ||
                             (mode == Rounding::kUp && !sign) || (mode == Rounding::kDown && sign);
    result = to_infinity ? 0x7c00u : 0x7bffu;
  }
  return static_cast<uint16_t>(sign | result);
}

/// PTX cvt to bf16: NaN becomes the canonical 0x7fff.
inline uint16_t float_to_bfloat(float f, Rounding mode = Rounding::kNearestEven) {
  const uint32_t u = float_to_bits(f);
  const uint32_t a = u & 0x7fffffffu;
  const uint32_t sign = (u >> 16) & 0x8000u;
  if (a > 0x7f800000u) return 0x7fff;
  if (a == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7f80u);
  uint64_t result = round_off(a, 16, mode, sign != 0);
  if (result >= 0x7f80u) {
    const bool to_infinity = mode == Rounding::kNearestEven || mode == Rounding::kNearestAway ||
                             (mode == Rounding::kUp && !sign) || (mode == Rounding::kDown && sign);
    result = to_infinity ? 0x7f80u : 0x7f7fu;
  }
  return static_cast<uint16_t>(sign | result);
}

}  // namespace vsm
