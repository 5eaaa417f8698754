// SPDX-License-Identifier: Apache-2.0
// What a tensor copy does to elements: out-of-bounds fill, float32 flavours, reductions.
#include <cmath>
#include <cstring>

#include "../formats.h"
#include "layout.h"

namespace vsm::tma {
namespace {

template <class T>
T load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
void store(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof(T));
}

bool flushes(ElementType type) { return type == ElementType::kF32Ftz || type == ElementType::kTF32Ftz; }
bool rounds(ElementType type) { return type == ElementType::kTF32 || type == ElementType::kTF32Ftz; }

uint32_t convert(ElementType type, uint32_t bits) {
  const uint32_t sign = bits & 0x80000000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return rounds(type) ? 0x7fffe000u : bits;
  if (flushes(type) && magnitude < 0x00800000u) magnitude = 0;
  if (rounds(type))
    magnitude = static_cast<uint32_t>(round_off(magnitude, 13, Rounding::kNearestEven, sign != 0) << 13);
  return sign | magnitude;
}

template <class T, class F>
void each(uint8_t* dst, const uint8_t* src, uint32_t bytes, F op) {
  for (uint32_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T))
    store<T>(dst + i, op(load<T>(dst + i), load<T>(src + i)));
}

template <class T>
bool reduce_bits(Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  switch (op) {
    case Reduce::kAnd: each<T>(dst, src, bytes, [](T a, T b) { return static_cast<T>(a & b); }); return true;
    case Reduce::kOr: each<T>(dst, src, bytes, [](T a, T b) { return static_cast<T>(a | b); }); return true;
    case Reduce::kXor: each<T>(dst, src, bytes, [](T a, T b) { return static_cast<T>(a ^ b); }); return true;
    default: return false;
  }
}

template <class T>
bool reduce_min_max(Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  if (op == Reduce::kMin) each<T>(dst, src, bytes, [](T a, T b) { return b < a ? b : a; });
  else if (op == Reduce::kMax) each<T>(dst, src, bytes, [](T a, T b) { return a < b ? b : a; });
  else return false;
  return true;
}

bool reduce_u32(Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  using T = uint32_t;
  switch (op) {
    case Reduce::kAdd: each<T>(dst, src, bytes, [](T a, T b) { return a + b; }); return true;
    case Reduce::kInc: each<T>(dst, src, bytes, [](T a, T b) { return a >= b ? 0 : a + 1; }); return true;
    case Reduce::kDec: each<T>(dst, src, bytes, [](T a, T b) { return a == 0 || a > b ? b : a - 1; }); return true;
    default: return reduce_min_max<T>(op, dst, src, bytes);
  }
}

/// The two 16-bit formats: sums round once, to nearest even; min and max drop a NaN if the other is a number.
bool reduce_16(bool is_bfloat, Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  const auto widen = [=](uint16_t x) { return is_bfloat ? bfloat_to_float(x) : half_to_float(x); };
  if (op == Reduce::kAdd) {
    each<uint16_t>(dst, src, bytes, [&](uint16_t a, uint16_t b) {
      const float x = widen(a), y = widen(b);
      // Two f16 sum exactly in 24 bits but for bf16's wide exponents: rounding that sum to odd makes one rounding of two.
      float sum = x + y;
      const double exact = static_cast<double>(x) + static_cast<double>(y);
      if (static_cast<double>(sum) != exact && std::isfinite(sum)) {
        uint32_t bits = float_to_bits(sum);
        if (std::fabs(static_cast<double>(sum)) > std::fabs(exact)) --bits;
        sum = bits_to_float(bits | 1u);
      }
      return is_bfloat ? float_to_bfloat(sum) : float_to_half(sum);
    });
    return true;
  }
  if (op != Reduce::kMin && op != Reduce::kMax) return false;
  each<uint16_t>(dst, src, bytes, [&](uint16_t a, uint16_t b) -> uint16_t {
    const float x = widen(a), y = widen(b);
    if (x != x) return y != y ? 0x7fff : b;
    if (y != y) return a;
    // -0 is below +0.
    const bool b_smaller = y < x || (y == x && (b & 0x8000u) > (a & 0x8000u));
    return b_smaller == (op == Reduce::kMin) ? b : a;
  });
  return true;
}

/// NaN sums are the canonical NaN. `flush`: subnormal operands and sums become zeros of their sign.
bool reduce_f32(bool flush, Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  if (op != Reduce::kAdd) return false;
  const auto flushed = [=](uint32_t bits) { return flush && (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits; };
  each<uint32_t>(dst, src, bytes, [&](uint32_t a, uint32_t b) {
    const float sum = bits_to_float(flushed(a)) + bits_to_float(flushed(b));
    return sum != sum ? 0x7fffffffu : flushed(float_to_bits(sum));
  });
  return true;
}

}  // namespace

void fill(const Descriptor& d, uint8_t* dst, uint32_t bytes) {
  std::memset(dst, 0, bytes);
  if (d.fill != Fill::kNan) return;
  // The OOB-NaN: the same 16 bits throughout, whatever the type (measured on an H200, golden cases load.*.high).
  for (uint32_t i = 0; i + 2 <= bytes; i += 2) store<uint16_t>(dst + i, 0x7ff7);
}

void convert_elements(ElementType type, uint8_t* data, uint32_t bytes) {
  if (!flushes(type) && !rounds(type)) return;
  for (uint32_t i = 0; i + 4 <= bytes; i += 4) store<uint32_t>(data + i, convert(type, load<uint32_t>(data + i)));
}

bool reduce_elements(ElementType type, Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  switch (type) {
    case ElementType::kU32: return reduce_u32(op, dst, src, bytes) || reduce_bits<uint32_t>(op, dst, src, bytes);
    case ElementType::kS32:
      if (op == Reduce::kAdd) return reduce_u32(op, dst, src, bytes);
      return reduce_min_max<int32_t>(op, dst, src, bytes) || reduce_bits<uint32_t>(op, dst, src, bytes);
    case ElementType::kU64:
      if (op == Reduce::kAdd)
        return each<uint64_t>(dst, src, bytes, [](uint64_t a, uint64_t b) { return a + b; }), true;
      return reduce_min_max<uint64_t>(op, dst, src, bytes) || reduce_bits<uint64_t>(op, dst, src, bytes);
    case ElementType::kS64:
      return reduce_min_max<int64_t>(op, dst, src, bytes);  // bitwise: an illegal instruction on an H200
    case ElementType::kF16: return reduce_16(false, op, dst, src, bytes);
    case ElementType::kBF16: return reduce_16(true, op, dst, src, bytes);
    case ElementType::kF32: return reduce_f32(false, op, dst, src, bytes);
    case ElementType::kF32Ftz: return reduce_f32(true, op, dst, src, bytes);
    default: return false;
  }
}

}  // namespace vsm::tma
