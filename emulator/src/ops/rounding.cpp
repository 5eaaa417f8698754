// SPDX-License-Identifier: Apache-2.0
// One rounding at the end: results are formed exactly (or rounded to odd) in double, then rounded to the target.
#include "ops/lanes.h"

namespace vsm::ops {

double add_to_odd(double a, double b) {
  const double s = a + b;
  if (!std::isfinite(s)) return s;
  const double bb = s - a;
  const double error = (a - (s - bb)) + (b - bb);  // Knuth's two-sum: exact
  const uint64_t bits = double_to_bits(s);
  if (error == 0 || (bits & 1)) return s;
  // The sum is inexact and even: step to the odd neighbour on the error's side.
  const bool outward = (error > 0) == (s > 0);
  return bits_to_double(outward ? bits + 1 : bits - 1);
}

namespace {

// |d| to `fraction` stored mantissa bits and exponents from `min_exponent` (of the least normal); returns the encoding
// without sign; `infinity` is the code of infinity.
uint64_t encode(double d, int fraction, int min_exponent, uint64_t infinity, Rounding mode) {
  const uint64_t bits = double_to_bits(d);
  const bool sign = bits >> 63;
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  uint64_t mantissa = bits & 0xfffffffffffffull;
  if (exponent == 0x7ff) return infinity;
  if (exponent == 0 && mantissa == 0) return 0;
  int e = exponent ? exponent - 1023 : -1022;
  if (exponent) mantissa |= uint64_t{1} << 52;
  int shift = 52 - fraction;
  uint64_t base = 0;
  if (e >= min_exponent) {
    base = static_cast<uint64_t>(e - min_exponent) << fraction;  // the implicit one adds the exponent's first step
  } else {
    shift += min_exponent - e;
  }
  if (shift > 60) {
    mantissa = 1;
    shift = 2;
  }
  const uint64_t result = base + round_off(mantissa, shift, mode, sign);
  if (result < infinity) return result;
  const bool away = mode == Rounding::kNearestEven || mode == Rounding::kNearestAway ||
                    (mode == Rounding::kUp && !sign) || (mode == Rounding::kDown && sign);
  return away ? infinity : infinity - 1;
}

}  // namespace

float round_to_float(double d, Rounding mode) {
  if (d != d) return bits_to_float(0x7fffffffu);
  if (mode == Rounding::kNearestEven) return static_cast<float>(d);
  return bits_to_float(static_cast<uint32_t>(encode(d, 23, -126, 0x7f800000u, mode)) |
                       (std::signbit(d) ? 0x80000000u : 0));
}
uint16_t round_to_half(double d, Rounding mode) {
  if (d != d) return 0x7fff;
  return static_cast<uint16_t>(encode(d, 10, -14, 0x7c00u, mode) | (std::signbit(d) ? 0x8000u : 0));
}
uint16_t round_to_bfloat(double d, Rounding mode) {
  if (d != d) return 0x7fff;
  return static_cast<uint16_t>(encode(d, 7, -126, 0x7f80u, mode) | (std::signbit(d) ? 0x8000u : 0));
}

Rounding take_rounding(Form& f, bool* given) {
  const std::string r = f.take_one({"rn", "rz", "rm", "rp"});
  if (given) *given = !r.empty();
  if (r == "rz") return Rounding::kZero;
  if (r == "rm") return Rounding::kDown;
  if (r == "rp") return Rounding::kUp;
  return Rounding::kNearestEven;
}

}  // namespace vsm::ops
