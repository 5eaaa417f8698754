// SPDX-License-Identifier: Apache-2.0
// Lane loops: handlers made from a function of one lane's values.
#pragma once

#include <cstdint>

#include "exec/machine.h"
#include "formats.h"
#include "ptx/decode.h"

namespace vsm::ops {

using exec::for_lanes;
using exec::Handler;
using exec::Inst;
using exec::Operand;
using exec::Space;
using exec::Type;
using exec::Warp;
using ptx::Form;
using ptx::FormTable;

/// f16 and bf16 values as they lie in registers.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <class T>
using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline T unpack(Word<T> w) {
  if constexpr (std::is_same_v<T, float>) return bits_to_float(w);
  else if constexpr (std::is_same_v<T, double>) return bits_to_double(w);
  else if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) return T{static_cast<uint16_t>(w)};
  else return static_cast<T>(w);
}

template <class T>
inline Word<T> pack(T v) {
  if constexpr (std::is_same_v<T, float>) return float_to_bits(v);
  else if constexpr (std::is_same_v<T, double>) return double_to_bits(v);
  else if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) return v.bits;
  else return static_cast<std::make_unsigned_t<T>>(v);
}

/// The functions below take lambdas without captures: they are rebuilt from their type.
template <class L>
inline const L& stateless() {
  static_assert(std::is_empty_v<L>, "the lambda must not capture");
  static const char place = 0;
  return reinterpret_cast<const L&>(place);
}

/// op[0] = f(op[1], ...), lane by lane.
template <class L, class D, class... S>
struct Lanes {
  template <size_t... I>
  static void apply(Warp& w, const Inst& in, uint32_t mask, std::index_sequence<I...>) {
    const L& f = stateless<L>();
    Word<D>* d = w.out<Word<D>>(in.op[0]);
    const std::tuple<const Word<S>*...> s{w.in<Word<S>>(in.op[I + 1])...};
    for_lanes(mask, [&](int i) { d[i] = pack<D>(f(unpack<S>(std::get<I>(s)[i])...)); });
  }
  static void run(Warp& w, const Inst& in, uint32_t mask) { apply(w, in, mask, std::index_sequence_for<S...>()); }
};
template <class D, class... S, class L>
Handler lanes(L) {
  return &Lanes<L, D, S...>::run;
}

/// Predicate op[0] = f(op[1], ...).
template <class L, class... S>
struct PredicateLanes {
  template <size_t... I>
  static uint32_t value(Warp& w, const Inst& in, uint32_t mask, std::index_sequence<I...>) {
    const L& f = stateless<L>();
    const std::tuple<const Word<S>*...> s{w.in<Word<S>>(in.op[I + 1])...};
    uint32_t result = 0;
    for_lanes(mask, [&](int i) { result |= static_cast<uint32_t>(bool(f(unpack<S>(std::get<I>(s)[i])...))) << i; });
    return result;
  }
  static void run(Warp& w, const Inst& in, uint32_t mask) {
    w.set_pred(in.op[0], mask, value(w, in, mask, std::index_sequence_for<S...>()));
  }
};
template <class... S, class L>
Handler predicate_lanes(L) {
  return &PredicateLanes<L, S...>::run;
}

// --- choosing by type -----------------------------------------------------------------------------------------------
template <class T>
struct Tag {
  using type = T;
};

/// Calls `f(Tag<T>)` for the C++ type of an integer (or .b) type; null if `t` is none. .b types count as unsigned.
template <class F>
Handler with_integer(Type t, F f) {
  switch (t) {
    case Type::kU16:
    case Type::kB16: return f(Tag<uint16_t>());
    case Type::kS16: return f(Tag<int16_t>());
    case Type::kU32:
    case Type::kB32: return f(Tag<uint32_t>());
    case Type::kS32: return f(Tag<int32_t>());
    case Type::kU64:
    case Type::kB64: return f(Tag<uint64_t>());
    case Type::kS64: return f(Tag<int64_t>());
    default: return nullptr;
  }
}
template <class F>
Handler with_bits(Type t, F f) {
  switch (exec::type_bits(t)) {
    case 16: return f(Tag<uint16_t>());
    case 32: return f(Tag<uint32_t>());
    case 64: return f(Tag<uint64_t>());
    default: return nullptr;
  }
}

/// Register width as a .b type.
inline Type bits_type(int bits) {
  return bits == 8    ? Type::kB8
         : bits == 16 ? Type::kB16
         : bits == 32 ? Type::kB32
         : bits == 64 ? Type::kB64
                      : Type::kB128;
}

// --- floating point -------------------------------------------------------------------------------------------------
inline float canonical(float f) { return f != f ? bits_to_float(0x7fffffffu) : f; }
inline double canonical(double f) { return f; }
inline float flush(float f) {
  const uint32_t u = float_to_bits(f);
  return (u & 0x7f800000u) == 0 ? bits_to_float(u & 0x80000000u) : f;
}
inline float saturate(float f) { return f != f ? 0.0f : f < 0.0f ? 0.0f : f > 1.0f ? 1.0f : f == 0.0f ? 0.0f : f; }
inline double saturate(double f) { return f != f ? 0.0 : f <= 0.0 ? 0.0 : f > 1.0 ? 1.0 : f; }

/// Sum of two doubles rounded to odd: rounding it once more to at most 51 bits gives the correctly rounded sum.
double add_to_odd(double a, double b);
float round_to_float(double d, Rounding mode);
uint16_t round_to_half(double d, Rounding mode = Rounding::kNearestEven);
uint16_t round_to_bfloat(double d, Rounding mode = Rounding::kNearestEven);
/// rn (default), rz, rm, rp; takes the modifier.
Rounding take_rounding(Form& f, bool* given = nullptr);

}  // namespace vsm::ops
