// SPDX-License-Identifier: Apache-2.0
// setp, set, selp, slct: PTX ISA 9.0, 9.7.6 and 9.7.7.
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

enum class Compare : uint32_t { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan, kNone };

Compare take_compare(Form& f) {
  static const char* const kNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                       "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  for (uint32_t i = 0; i < 14; ++i) {
    if (f.take(kNames[i])) return static_cast<Compare>(i);
  }
  static const char* const kUnsigned[] = {"lo", "ls", "hi", "hs"};
  static const Compare kSame[] = {Compare::kLt, Compare::kLe, Compare::kGt, Compare::kGe};
  for (int i = 0; i < 4; ++i) {
    if (f.take(kUnsigned[i])) return kSame[i];
  }
  f.fail("a comparison is missing");
}

template <class T>
bool compare(Compare c, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (c) {
    case Compare::kEq: return a == b;
    case Compare::kNe: return a != b && !unordered;
    case Compare::kLt: return a < b;
    case Compare::kLe: return a <= b;
    case Compare::kGt: return a > b;
    case Compare::kGe: return a >= b;
    case Compare::kEqu: return a == b || unordered;
    case Compare::kNeu: return a != b || unordered;
    case Compare::kLtu: return a < b || unordered;
    case Compare::kLeu: return a <= b || unordered;
    case Compare::kGtu: return a > b || unordered;
    case Compare::kGeu: return a >= b || unordered;
    case Compare::kNum: return !unordered;
    case Compare::kNan: return unordered;
    case Compare::kNone: break;
  }
  return false;
}

// form: comparison (4 bits), boolean operation (2 bits: and, or, xor, none = 3), ftz
constexpr uint32_t kBoolShift = 4, kNoBool = 3, kFtz = 1u << 8, kFloatResult = 1u << 9;

template <class T>
T widen(Word<T> v, bool ftz) {
  if constexpr (std::is_same_v<T, float>) return ftz ? flush(bits_to_float(v)) : bits_to_float(v);
  else return unpack<T>(v);
}

template <class T>
uint32_t compare_lanes(Warp& w, const Inst& in, uint32_t mask, const Operand& a, const Operand& b) {
  const auto c = static_cast<Compare>(in.form & 15);
  const bool ftz = in.form & kFtz;
  const Word<T>*x = w.in<Word<T>>(a), *y = w.in<Word<T>>(b);
  uint32_t r = 0;
  for_lanes(mask,
            [&](int i) { r |= static_cast<uint32_t>(compare<T>(c, widen<T>(x[i], ftz), widen<T>(y[i], ftz))) << i; });
  return r;
}

// f16 / bf16 (half 0 or 1 of the register)
template <bool kBfloat>
uint32_t compare_half(Warp& w, const Inst& in, uint32_t mask, const Operand& a, const Operand& b, int shift) {
  const auto c = static_cast<Compare>(in.form & 15);
  const bool ftz = in.form & kFtz;
  const uint32_t *x = w.in<uint32_t>(a), *y = w.in<uint32_t>(b);
  auto value = [&](uint32_t v) {
    uint16_t h = static_cast<uint16_t>(v >> shift);
    if (!kBfloat && ftz && (h & 0x7c00) == 0) h &= 0x8000;
    return kBfloat ? bfloat_to_float(h) : half_to_float(h);
  };
  uint32_t r = 0;
  for_lanes(mask, [&](int i) { r |= static_cast<uint32_t>(compare<float>(c, value(x[i]), value(y[i]))) << i; });
  return r;
}

uint32_t combine(const Warp& w, const Inst& in, uint32_t value, const Operand& c) {
  switch (in.form >> kBoolShift & 3) {
    case 0: return value & w.pred(c);
    case 1: return value | w.pred(c);
    case 2: return value ^ w.pred(c);
    default: return value;
  }
}

// op: p, q, a, b, c
template <class T>
void setp_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t r = compare_lanes<T>(w, in, mask, in.op[2], in.op[3]);
  const uint32_t p = combine(w, in, r, in.op[4]), q = combine(w, in, ~r, in.op[4]);
  w.set_pred(in.op[0], mask, p);
  w.set_pred(in.op[1], mask, q);
}
template <bool kBfloat, bool kPacked>
void setp_half(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t r = compare_half<kBfloat>(w, in, mask, in.op[2], in.op[3], 0);
  const uint32_t other = kPacked ? compare_half<kBfloat>(w, in, mask, in.op[2], in.op[3], 16) : ~r;
  const uint32_t p = combine(w, in, r, in.op[4]), q = combine(w, in, other, in.op[4]);
  w.set_pred(in.op[0], mask, p);
  w.set_pred(in.op[1], mask, q);
}

Handler setp_handler(Type t) {
  switch (t) {
    case Type::kF32: return &setp_run<float>;
    case Type::kF64: return &setp_run<double>;
    case Type::kF16: return &setp_half<false, false>;
    case Type::kF16x2: return &setp_half<false, true>;
    case Type::kBF16: return &setp_half<true, false>;
    case Type::kBF16x2: return &setp_half<true, true>;
    default: return with_integer(t, [](auto tag) -> Handler { return &setp_run<typename decltype(tag)::type>; });
  }
}

void check_compare(Form& f, Compare c, Type t) {
  if (!exec::is_float(t) && c >= Compare::kEqu) f.fail("an unordered comparison needs a floating point type");
  if (exec::is_bits(t) && c != Compare::kEq && c != Compare::kNe)
    f.fail("a .b type can only be compared with .eq and .ne");
}

uint32_t take_bool(Form& f) { return f.take("and") ? 0 : f.take("or") ? 1 : f.take("xor") ? 2 : kNoBool; }

void setp(Form& f) {
  const Compare c = take_compare(f);
  const uint32_t boolean = take_bool(f);
  const bool ftz = f.take("ftz");
  const Type t = f.take_type();
  check_compare(f, c, t);
  f.expect(boolean == kNoBool ? 3 : 4);
  const ptx::AstOperand& d = f.operand(0);
  if (d.kind == ptx::AstOperand::Kind::kPair) {
    f.out_pred(d.sub[0]);
    f.out_pred(d.sub[1]);
  } else {
    f.out_pred(d);
    f.out_pred(ptx::AstOperand());
  }
  f.in(1, t);
  f.in(2, t);
  if (boolean != kNoBool) f.in_pred(3);
  f.inst.form = static_cast<uint32_t>(c) | boolean << kBoolShift | (ftz ? kFtz : 0u);
  const Handler h = setp_handler(t);
  if (!h) f.fail(std::string("type .") + exec::to_string(t) + " is not possible here");
  f.emit(h, OpClass::kPredicate);
}

// set: like setp, with 0 / all ones (integer result) or 0.0 / 1.0 as the result. op: d, a, b, c
template <class T>
void set_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t r = combine(w, in, compare_lanes<T>(w, in, mask, in.op[1], in.op[2]), in.op[3]);
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  const uint32_t yes = in.form & kFloatResult ? 0x3f800000u : 0xffffffffu;
  for_lanes(mask, [&](int i) { d[i] = r >> i & 1 ? yes : 0; });
}

// set.<cmp>.{f16x2,u32,...}.f16x2: both halves.
template <bool kBfloat>
void set_packed(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t lo = compare_half<kBfloat>(w, in, mask, in.op[1], in.op[2], 0);
  const uint32_t hi = compare_half<kBfloat>(w, in, mask, in.op[1], in.op[2], 16);
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  const uint32_t yes = !(in.form & kFloatResult) ? 0xffffu : kBfloat ? 0x3f80u : 0x3c00u;
  for_lanes(mask, [&](int i) { d[i] = (lo >> i & 1 ? yes : 0) | (hi >> i & 1 ? yes << 16 : 0); });
}

void set(Form& f) {
  const Compare c = take_compare(f);
  const uint32_t boolean = take_bool(f);
  const bool ftz = f.take("ftz");
  const Type d = f.take_type(), t = f.take_type();
  check_compare(f, c, t);
  f.inst.form = static_cast<uint32_t>(c) | boolean << kBoolShift | (ftz ? kFtz : 0u);
  f.expect(boolean == kNoBool ? 3 : 4);
  f.out(0, d);
  f.in(1, t);
  f.in(2, t);
  if (boolean != kNoBool) f.in_pred(3);
  if (exec::is_float(d)) f.inst.form |= kFloatResult;
  Handler h = nullptr;
  if (t == Type::kF16x2 || t == Type::kBF16x2) {
    if (boolean != kNoBool || exec::type_bits(d) != 32 || d == Type::kF32) f.fail("that form is not modelled");
    h = t == Type::kF16x2 ? &set_packed<false> : &set_packed<true>;
  } else {
    if (d != Type::kU32 && d != Type::kS32 && d != Type::kF32) f.fail("the result type is not modelled");
    h = t == Type::kF32   ? &set_run<float>
        : t == Type::kF64 ? &set_run<double>
                          : with_integer(t, [](auto tag) -> Handler { return &set_run<typename decltype(tag)::type>; });
  }
  if (!h) f.fail("that type is not modelled here");
  f.emit(h, OpClass::kPredicate);
}

// op: d, a, b, p
template <class T>
void selp_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t p = w.pred(in.op[3]);
  Word<T>* d = w.out<Word<T>>(in.op[0]);
  const Word<T>*a = w.in<Word<T>>(in.op[1]), *b = w.in<Word<T>>(in.op[2]);
  for_lanes(mask, [&](int i) { d[i] = p >> i & 1 ? a[i] : b[i]; });
}

void selp(Form& f) {
  const Type t = f.take_type();
  f.expect(4);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  f.in_pred(3);
  const Handler h = with_bits(t, [](auto tag) -> Handler { return &selp_run<typename decltype(tag)::type>; });
  if (!h) f.fail("that type is not modelled here");
  f.emit(h, OpClass::kPredicate);
}

// slct: a if c >= 0 else b; a NaN selects b.
void slct(Form& f) {
  const bool ftz = f.take("ftz");
  const Type t = f.take_type(), c = f.take_type();
  if (c != Type::kS32 && c != Type::kF32) f.fail("the selector must be .s32 or .f32");
  f.expect(4);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  f.in(3, c);
  f.inst.form = ftz;
  const Handler h = with_bits(t, [&](auto tag) -> Handler {
    using T = typename decltype(tag)::type;
    if (c == Type::kS32) return lanes<T, T, T, int32_t>([](T a, T b, int32_t s) { return s >= 0 ? a : b; });
    return lanes<T, T, T, float>([](T a, T b, float s) { return s >= 0 || (s == s && flush(s) == 0) ? a : b; });
  });
  if (c == Type::kF32 && !ftz) {
    const Handler exact = with_bits(t, [](auto tag) -> Handler {
      using T = typename decltype(tag)::type;
      return lanes<T, T, T, float>([](T a, T b, float s) { return s >= 0 ? a : b; });
    });
    if (!exact) f.fail("that type is not modelled here");
    return f.emit(exact, OpClass::kPredicate);
  }
  if (!h) f.fail("that type is not modelled here");
  f.emit(h, OpClass::kPredicate);
}

}  // namespace

void add_compare(FormTable& t) {
  t["setp"] = setp;
  t["set"] = set;
  t["selp"] = selp;
  t["slct"] = slct;
}

}  // namespace vsm::ops
