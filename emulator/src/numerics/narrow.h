// SPDX-License-Identifier: Apache-2.0
// The floating-point formats of 4, 6 and 8 bits: exact decoding, and encoding with the rounding of PTX `cvt`.
//
// Sources: OCP Microscaling Formats v1.0 (e4m3, e5m2, e3m2, e2m3, e2m1, e8m0); PTX ISA 9.0, 5.2.3 "Alternate
// Floating-Point Data Formats" and 9.7.9.21 "cvt".
#pragma once

#include <array>
#include <cstdint>

#include "../formats.h"

namespace vsm::numerics {

/// A sign-magnitude format of at most 8 bits. The magnitude code is `exponent << mantissa_bits | mantissa`.
struct NarrowFormat {
  int exponent_bits;
  int mantissa_bits;
  uint8_t max_code;   // magnitude code of the largest finite value
  uint8_t nan_code;   // canonical NaN; 0 where the format has none
  bool has_infinity;  // e5m2 alone: codes above max_code are infinity, then NaN

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int bits() const { return 1 + exponent_bits + mantissa_bits; }
  constexpr uint8_t sign_bit() const { return static_cast<uint8_t>(1 << (exponent_bits + mantissa_bits)); }
};

inline constexpr NarrowFormat kE4M3{4, 3, 0x7e, 0x7f, false};
inline constexpr NarrowFormat kE5M2{5, 2, 0x7b, 0x7f, true};
inline constexpr NarrowFormat kE3M2{3, 2, 0x1f, 0, false};
inline constexpr NarrowFormat kE2M3{2, 3, 0x1f, 0, false};
inline constexpr NarrowFormat kE2M1{2, 1, 0x07, 0, false};

namespace detail {

constexpr double power_of_two(int exponent) {
  double value = 1;
  for (int i = 0; i < exponent; ++i) value *= 2;
  for (int i = 0; i > exponent; --i) value *= 0.5;
  return value;
}

constexpr double decode(const NarrowFormat& f, unsigned code) {
  const unsigned magnitude = code & (f.sign_bit() - 1u);
  const double sign = (code & f.sign_bit()) ? -1.0 : 1.0;
  if (magnitude > f.max_code) {
    if (f.has_infinity && magnitude == f.max_code + 1u) return sign * __builtin_huge_val();
    return __builtin_nan("");
  }
  const int exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  const unsigned mantissa = magnitude & ((1u << f.mantissa_bits) - 1u);
  const unsigned significand = exponent ? mantissa | (1u << f.mantissa_bits) : mantissa;
  return sign * significand * power_of_two((exponent ? exponent : 1) - f.bias() - f.mantissa_bits);
}

using Table = std::array<double, 256>;

/// Values of all 256 bytes whose element lies at bits [low, low + format bits); the other bits are padding.
constexpr Table byte_table(const NarrowFormat& f, int low) {
  Table table{};
  for (unsigned byte = 0; byte < 256; ++byte) table[byte] = decode(f, (byte >> low) & (2u * f.sign_bit() - 1u));
  return table;
}

constexpr Table ue8m0_table() {
  Table table{};
  for (int byte = 0; byte < 255; ++byte) table[byte] = power_of_two(byte - 127);
  table[255] = __builtin_nan("");
  return table;
}

/// Unsigned e4m3: seven bits; PTX leaves bit 7 out of the value.
constexpr Table ue4m3_table() {
  Table table{};
  for (unsigned byte = 0; byte < 256; ++byte) table[byte] = decode(kE4M3, byte & 0x7fu);
  return table;
}

}  // namespace detail

// Exact values, indexed by byte. e3m2, e2m3: the low six bits count. e2m1: the low four.
inline constexpr detail::Table kE4M3Values = detail::byte_table(kE4M3, 0);
inline constexpr detail::Table kE5M2Values = detail::byte_table(kE5M2, 0);
inline constexpr detail::Table kE3M2Values = detail::byte_table(kE3M2, 0);
inline constexpr detail::Table kE2M3Values = detail::byte_table(kE2M3, 0);
inline constexpr detail::Table kE2M1Values = detail::byte_table(kE2M1, 0);
/// e2m1 in the 8-bit container of kind::f8f6f4 and kind::mxf8f6f4: `00xxxx00` (PTX ISA 9.7.14.5.14).
inline constexpr detail::Table kE2M1ContainerValues = detail::byte_table(kE2M1, 2);
inline constexpr detail::Table kUE8M0Values = detail::ue8m0_table();
inline constexpr detail::Table kUE4M3Values = detail::ue4m3_table();

/// `x` in format `f`, saturated to its largest finite value (PTX makes .satfinite mandatory here).
/// NaN gives the canonical NaN, or the positive maximum where the format has no NaN; .relu makes negatives +0.
inline uint8_t encode(const NarrowFormat& f, float x, Rounding mode, bool relu) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t a = bits & 0x7fffffffu;
  const bool sign = (bits >> 31) != 0;
  if (a > 0x7f800000u) return f.nan_code ? f.nan_code : f.max_code;
  if (sign && relu) return 0;
  const uint8_t sign_code = sign ? f.sign_bit() : 0;
  if (a == 0x7f800000u) return sign_code | f.max_code;
  if (a == 0) return sign_code;

  // |x| = significand * 2^(exponent - 23). A code counts units of 2^(unit), the spacing of the values around |x|.
  const int biased = static_cast<int>(a >> 23);
  const uint32_t significand = biased ? (a & 0x7fffffu) | 0x800000u : a & 0x7fffffu;
  const int exponent = (biased ? biased : 1) - 127;
  const int least = 1 - f.bias();
  const int unit = (exponent > least ? exponent : least) - f.mantissa_bits;
  const int shift = unit - (exponent - 23);  // 23 - mantissa_bits at least
  // Past 40 places every value is a nonzero rest below one half; keep the shift within round_off's range.
  uint64_t code = shift > 40 ? round_off(1, 2, mode, sign) : round_off(significand, shift, mode, sign);
  // The hidden bit of a normal significand is worth one step of the exponent field.
  if (exponent > least) code += static_cast<uint64_t>(exponent - least) << f.mantissa_bits;
  return sign_code | static_cast<uint8_t>(code > f.max_code ? f.max_code : code);
}

/// ue8m0: the power of two below (kZero) or above (kUp) |x|. The sign is dropped, the format has none.
/// Past 2^127, and for infinity, the result is 0xfe with .satfinite and the NaN 0xff without.
inline uint8_t encode_ue8m0(float x, Rounding mode, bool satfinite) {
  const uint32_t a = float_to_bits(x) & 0x7fffffffu;
  if (a > 0x7f800000u) return 0xff;
  uint32_t code = a >> 23;
  // Code 0 is 2^-127, half of the smallest normal float32: only what exceeds it rounds up to code 1.
  const bool above = code ? (a & 0x7fffffu) != 0 : a > 0x400000u;
  if (mode == Rounding::kUp && above && code < 255) ++code;
  if (code == 255 && satfinite) code = 254;
  return static_cast<uint8_t>(code);
}

}  // namespace vsm::numerics
