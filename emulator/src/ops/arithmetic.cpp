// SPDX-License-Identifier: Apache-2.0
// Opcodes that integer and floating point types share, and extended-precision integer arithmetic (9.7.2).
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

bool any_float(const Form& f) {
  for (const char* t : {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}) {
    if (f.has(t)) return true;
  }
  return false;
}

// CC.CF is predicate slot 1 of every kernel.
constexpr uint32_t kCarrySlot = 1;

template <class T, bool kSubtract, bool kCarryIn, bool kCarryOut>
void extended(Warp& w, const Inst& in, uint32_t mask) {
  Word<T>* d = w.out<Word<T>>(in.op[0]);
  const Word<T>*a = w.in<Word<T>>(in.op[1]), *b = w.in<Word<T>>(in.op[2]);
  const uint32_t carry = w.preds[kCarrySlot];
  uint32_t out = 0;
  for_lanes(mask, [&](int i) {
    const unsigned __int128 c = kCarryIn ? (carry >> i & 1) : 0;
    const unsigned __int128 x = a[i], y = b[i];
    const unsigned __int128 r = kSubtract ? x - y - c : x + y + c;
    d[i] = static_cast<T>(r);
    out |= static_cast<uint32_t>(kSubtract ? x < y + c : (r >> (sizeof(T) * 8)) != 0) << i;
  });
  if (kCarryOut) w.preds[kCarrySlot] = (carry & ~mask) | (out & mask);
}

template <class T, bool kCarryIn, bool kCarryOut>
void extended_mad(Warp& w, const Inst& in, uint32_t mask) {
  Word<T>* d = w.out<Word<T>>(in.op[0]);
  const Word<T>*a = w.in<Word<T>>(in.op[1]), *b = w.in<Word<T>>(in.op[2]), *c = w.in<Word<T>>(in.op[3]);
  const uint32_t carry = w.preds[kCarrySlot];
  uint32_t out = 0;
  for_lanes(mask, [&](int i) {
    const unsigned __int128 product =
        in.form & 2 ? static_cast<unsigned __int128>(static_cast<__int128>(static_cast<std::make_signed_t<T>>(a[i])) *
                                                     static_cast<std::make_signed_t<T>>(b[i]))
                    : static_cast<unsigned __int128>(a[i]) * b[i];
    const T part = static_cast<T>(in.form & 1 ? product >> (sizeof(T) * 8) : product);
    const unsigned __int128 r = static_cast<unsigned __int128>(part) + c[i] + (kCarryIn ? (carry >> i & 1) : 0);
    d[i] = static_cast<T>(r);
    out |= static_cast<uint32_t>((r >> (sizeof(T) * 8)) != 0) << i;
  });
  if (kCarryOut) w.preds[kCarrySlot] = (carry & ~mask) | (out & mask);
}

void add_sub_carry(Form& f, bool carry_in) {
  const bool subtract = f.name()[0] == 's';
  const bool carry_out = f.take("cc");
  const Type t = f.take_type();
  if (!exec::is_integer(t) || exec::type_bits(t) < 32) f.fail("needs a 32- or 64-bit integer type");
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  auto pick = [&](auto tag) -> Handler {
    using T = typename decltype(tag)::type;
    if (carry_in) {
      if (carry_out) return subtract ? &extended<T, true, true, true> : &extended<T, false, true, true>;
      return subtract ? &extended<T, true, true, false> : &extended<T, false, true, false>;
    }
    return subtract ? &extended<T, true, false, true> : &extended<T, false, false, true>;
  };
  f.emit(exec::type_bits(t) == 32 ? pick(Tag<uint32_t>()) : pick(Tag<uint64_t>()), OpClass::kInteger);
}

void mad_carry(Form& f, bool carry_in) {
  const std::string part = f.take_one({"lo", "hi"});
  if (part.empty()) f.fail(".lo or .hi is missing");
  const bool carry_out = f.take("cc");
  const Type t = f.take_type();
  if (!exec::is_integer(t) || exec::type_bits(t) < 32) f.fail("needs a 32- or 64-bit integer type");
  f.expect(4);
  f.out(0, t);
  for (size_t i = 1; i < 4; ++i) f.in(i, t);
  f.inst.form = (part == "hi" ? 1u : 0u) | (exec::is_signed(t) ? 2u : 0u);
  auto pick = [&](auto tag) -> Handler {
    using T = typename decltype(tag)::type;
    if (carry_in) return carry_out ? &extended_mad<T, true, true> : &extended_mad<T, true, false>;
    return &extended_mad<T, false, true>;
  };
  f.emit(exec::type_bits(t) == 32 ? pick(Tag<uint32_t>()) : pick(Tag<uint64_t>()), OpClass::kInteger);
}

void add_or_sub(Form& f) {
  if (any_float(f)) return float_binary(f);
  if (f.has("cc")) return add_sub_carry(f, false);
  integer_add_sub(f);
}
void mul(Form& f) {
  if (any_float(f)) return float_binary(f);
  integer_mul(f);
}
void mad(Form& f) {
  if (any_float(f)) return float_fma(f);  // mad.f32 is fma on every target since sm_20
  if (f.has("cc")) return mad_carry(f, false);
  integer_mul(f);
}
void div(Form& f) {
  if (any_float(f)) return float_div(f);
  integer_div_rem(f);
}
void rem(Form& f) { integer_div_rem(f); }
void unary(Form& f) {
  if (any_float(f)) return float_unary(f);
  integer_unary(f);
}
void min_max(Form& f) {
  if (any_float(f)) return float_min_max(f);
  integer_min_max(f);
}

}  // namespace

void add_arithmetic(FormTable& t) {
  t["add"] = t["sub"] = add_or_sub;
  t["mul"] = mul;
  t["mad"] = mad;
  t["fma"] = float_fma;
  t["div"] = div;
  t["rem"] = rem;
  t["abs"] = t["neg"] = unary;
  t["min"] = t["max"] = min_max;
  t["addc"] = t["subc"] = [](Form& f) { add_sub_carry(f, true); };
  t["madc"] = [](Form& f) { mad_carry(f, true); };
}

}  // namespace vsm::ops
