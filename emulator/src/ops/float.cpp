// SPDX-License-Identifier: Apache-2.0
// Floating point arithmetic: PTX ISA 9.0, 9.7.3 (f32, f64), 9.7.4 (f16, bf16), mixed packed forms included.
#include <algorithm>
#include <functional>

#include "ops/families.h"
#include "ops/fast_float.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

// Details of a form, packed into Inst::form.
enum : uint32_t {
  kRoundMask = 7,
  kFtz = 1u << 3,
  kSat = 1u << 4,
  kRelu = 1u << 5,
  kNan = 1u << 6,
  kXorSign = 1u << 7,
  kAbs = 1u << 8,
  kKindShift = 16,
};
enum class Op : uint32_t {
  kAdd,  // the first four in the order of FastOp
  kSub,
  kMul,
  kFma,
  kDiv,
  kMin,
  kMax,
  kAbs,
  kNeg,
  kRcp,
  kSqrt,
  kRsqrt,
  kSin,
  kCos,
  kLg2,
  kEx2,
  kTanh,
  kCopySign
};

Rounding rounding(uint32_t form) { return static_cast<Rounding>(form & kRoundMask); }
Op kind(uint32_t form) { return static_cast<Op>(form >> kKindShift & 31); }

// a / b and sqrt(a) in double, rounded to odd, for the directed roundings of f32 results.
double quotient_to_odd(double a, double b) {
  const double q = a / b;
  if (!std::isfinite(q) || q == 0 || (double_to_bits(q) & 1)) return q;
  const double rest = std::fma(-q, b, a);  // exact; its sign says on which side of q the quotient lies
  if (rest == 0) return q;
  const bool above = (rest > 0) == (b > 0);
  return bits_to_double((above == (q > 0)) ? double_to_bits(q) + 1 : double_to_bits(q) - 1);
}
double root_to_odd(double a) {
  const double s = std::sqrt(a);
  if (!std::isfinite(s) || s == 0 || (double_to_bits(s) & 1)) return s;
  const double rest = std::fma(-s, s, a);
  if (rest == 0) return s;
  return bits_to_double(rest > 0 ? double_to_bits(s) + 1 : double_to_bits(s) - 1);
}

// min and max order -0 below +0; a NaN loses against a number unless .NaN is given.
template <class F>
F extreme(F a, F b, bool maximum, bool propagate) {
  const bool na = a != a, nb = b != b;
  if (na || nb) {
    if (propagate || (na && nb)) return std::numeric_limits<F>::quiet_NaN();
    return na ? b : a;
  }
  if (a == b) return std::signbit(a) == maximum ? b : a;
  return (a < b) == maximum ? b : a;
}

// IEEE 754, 6.3: an exact zero sum of unlike signs is -0 when rounding down.
double directed_sum(double a, double b, Rounding r) {
  const double s = add_to_odd(a, b);
  return s == 0 && r == Rounding::kDown && (std::signbit(a) || std::signbit(b)) ? -0.0 : s;
}

float apply32(uint32_t form, float a, float b, float c) {
  const bool ftz = form & kFtz;
  if (ftz) {
    a = flush(a);
    b = flush(b);
    c = flush(c);
  }
  const Rounding r = rounding(form);
  const bool nearest = r == Rounding::kNearestEven;
  float d = 0;
  switch (kind(form)) {
    case Op::kAdd: d = nearest ? a + b : round_to_float(directed_sum(a, b, r), r); break;
    case Op::kSub: d = nearest ? a - b : round_to_float(directed_sum(a, -double{b}, r), r); break;
    case Op::kMul:
      d = nearest ? a * b : round_to_float(double{a} * b, r);
      // Hardware flushes by the exact product: one below 2^-126 that would round up to it is flushed too.
      if (ftz && std::fabs(double{a} * b) < 0x1p-126) d = static_cast<float>(std::copysign(0.0, double{a} * b));
      break;
    case Op::kFma: d = nearest ? std::fma(a, b, c) : round_to_float(directed_sum(double{a} * b, c, r), r); break;
    case Op::kDiv: d = nearest ? a / b : round_to_float(quotient_to_odd(a, b), r); break;
    case Op::kRcp: d = nearest ? 1.0f / a : round_to_float(quotient_to_odd(1.0, a), r); break;
    case Op::kSqrt: d = nearest ? std::sqrt(a) : round_to_float(root_to_odd(a), r); break;
    case Op::kMin:
    case Op::kMax: {
      const bool sign = std::signbit(a) != std::signbit(b);
      if (form & kAbs) {
        a = std::fabs(a);
        b = std::fabs(b);
      }
      d = extreme(a, b, kind(form) == Op::kMax, form & kNan);
      if ((form & kXorSign) && d == d) d = sign ? -d : d;
      break;
    }
    case Op::kAbs: return bits_to_float(float_to_bits(a) & 0x7fffffffu);
    case Op::kNeg: return bits_to_float(float_to_bits(a) ^ 0x80000000u);
    case Op::kRsqrt: d = static_cast<float>(1.0 / std::sqrt(double{a})); break;
    case Op::kSin: d = static_cast<float>(std::sin(double{a})); break;
    case Op::kCos: d = static_cast<float>(std::cos(double{a})); break;
    case Op::kLg2: d = static_cast<float>(std::log2(double{a})); break;
    case Op::kEx2: d = static_cast<float>(std::exp2(double{a})); break;
    case Op::kTanh: d = static_cast<float>(std::tanh(double{a})); break;
    case Op::kCopySign: return bits_to_float((float_to_bits(b) & 0x7fffffffu) | (float_to_bits(a) & 0x80000000u));
  }
  if (ftz) d = flush(d);
  if (form & kSat) d = saturate(d);
  return canonical(d);
}

double apply64(uint32_t form, double a, double b, double c) {
  switch (kind(form)) {
    case Op::kAdd: return a + b;
    case Op::kSub: return a - b;
    case Op::kMul: return a * b;
    case Op::kFma: return std::fma(a, b, c);
    case Op::kDiv: return a / b;
    case Op::kRcp: return 1.0 / a;
    case Op::kSqrt: return std::sqrt(a);
    case Op::kRsqrt: return 1.0 / std::sqrt(a);
    case Op::kMin: return extreme(a, b, false, false);
    case Op::kMax: return extreme(a, b, true, false);
    case Op::kAbs: return bits_to_double(double_to_bits(a) & ~(uint64_t{1} << 63));
    case Op::kNeg: return bits_to_double(double_to_bits(a) ^ (uint64_t{1} << 63));
    case Op::kCopySign: return std::copysign(b, a);
    default: return 0;
  }
}

// f16 and bf16: exact (or rounded to odd) in double, rounded once.
template <bool kBfloat>
uint16_t apply16(uint32_t form, uint16_t xa, uint16_t xb, uint16_t xc) {
  auto widen = [&](uint16_t v) -> double {
    if (!kBfloat && (form & kFtz) && (v & 0x7c00) == 0) v &= 0x8000;
    return kBfloat ? bfloat_to_float(v) : half_to_float(v);
  };
  auto narrow = [](double v) { return kBfloat ? round_to_bfloat(v) : round_to_half(v); };
  if (kind(form) == Op::kAbs) return xa & 0x7fff;
  if (kind(form) == Op::kNeg) return xa ^ 0x8000;
  double a = widen(xa), b = widen(xb);
  const double c = widen(xc);
  double v = 0;
  switch (kind(form)) {
    case Op::kAdd: v = add_to_odd(a, b); break;
    case Op::kSub: v = add_to_odd(a, -b); break;
    case Op::kMul: v = a * b; break;
    case Op::kFma: v = add_to_odd(a * b, c); break;
    case Op::kMin:
    case Op::kMax: {
      const bool sign = std::signbit(a) != std::signbit(b);
      if (form & kAbs) {
        a = std::fabs(a);
        b = std::fabs(b);
      }
      v = extreme(a, b, kind(form) == Op::kMax, form & kNan);
      if ((form & kXorSign) && v == v) v = sign ? -v : v;
      break;
    }
    case Op::kEx2: v = std::exp2(a); break;
    case Op::kTanh: v = std::tanh(a); break;
    default: break;
  }
  uint16_t d = narrow(v);
  if (!kBfloat && (form & kFtz) && (d & 0x7c00) == 0) d &= 0x8000;
  if ((form & kSat) || (form & kRelu)) {
    const double w = kBfloat ? bfloat_to_float(d) : half_to_float(d);
    if (w != w) return form & kSat ? 0 : 0x7fff;
    if (w <= 0) return 0;
    if ((form & kSat) && w > 1) return kBfloat ? 0x3f80 : 0x3c00;
  }
  return d;
}

// Handlers: kCount sources.
void run_f32(Warp& w, const Inst& in, uint32_t mask) {
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
  for_lanes(mask, [&](int i) {
    d[i] = float_to_bits(apply32(in.form, bits_to_float(a[i]), bits_to_float(b[i]), bits_to_float(c[i])));
  });
}
void run_f32x2(Warp& w, const Inst& in, uint32_t mask) {
  uint64_t* d = w.out<uint64_t>(in.op[0]);
  const uint64_t *a = w.in<uint64_t>(in.op[1]), *b = w.in<uint64_t>(in.op[2]), *c = w.in<uint64_t>(in.op[3]);
  for_lanes(mask, [&](int i) {
    uint64_t r = 0;
    for (int s = 0; s < 64; s += 32) {
      auto half = [&](uint64_t v) { return bits_to_float(static_cast<uint32_t>(v >> s)); };
      r |= uint64_t{float_to_bits(apply32(in.form, half(a[i]), half(b[i]), half(c[i])))} << s;
    }
    d[i] = r;
  });
}
void run_f64(Warp& w, const Inst& in, uint32_t mask) {
  uint64_t* d = w.out<uint64_t>(in.op[0]);
  const uint64_t *a = w.in<uint64_t>(in.op[1]), *b = w.in<uint64_t>(in.op[2]), *c = w.in<uint64_t>(in.op[3]);
  for_lanes(mask, [&](int i) {
    d[i] = double_to_bits(apply64(in.form, bits_to_double(a[i]), bits_to_double(b[i]), bits_to_double(c[i])));
  });
}
template <bool kBfloat, bool kPacked>
void run_16(Warp& w, const Inst& in, uint32_t mask) {
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
  auto low = [](uint32_t v) { return static_cast<uint16_t>(v); };
  auto high = [](uint32_t v) { return static_cast<uint16_t>(v >> 16); };
  for_lanes(mask, [&](int i) {
    uint32_t r = apply16<kBfloat>(in.form, low(a[i]), low(b[i]), low(c[i]));
    if (kPacked) r |= static_cast<uint32_t>(apply16<kBfloat>(in.form, high(a[i]), high(b[i]), high(c[i]))) << 16;
    d[i] = r;
  });
}

bool is_16(Type t) { return t == Type::kF16 || t == Type::kF16x2 || t == Type::kBF16 || t == Type::kBF16x2; }

// Operands d, a {, b {, c}} of type t; absent sources repeat the first.
void operands(Form& f, Type t, size_t sources) {
  f.expect(sources + 1);
  f.out(0, t);
  for (size_t i = 1; i <= 3; ++i) f.in(i <= sources ? i : 1, t);
}

void emit(Form& f, Type t, Op op, uint32_t flags) {
  f.inst.form = flags | static_cast<uint32_t>(op) << kKindShift;
  Handler h = nullptr;
  switch (t) {
    case Type::kF32: h = &run_f32; break;
    case Type::kF32x2: h = &run_f32x2; break;
    case Type::kF64: h = &run_f64; break;
    case Type::kF16: h = &run_16<false, false>; break;
    case Type::kF16x2: h = &run_16<false, true>; break;
    case Type::kBF16: h = &run_16<true, false>; break;
    case Type::kBF16x2: h = &run_16<true, true>; break;
    default: f.fail(std::string("type .") + exec::to_string(t) + " is not possible here");
  }
  if (flags == 0 && op <= Op::kFma) {
    if (const Handler fast = fast_float(t, static_cast<FastOp>(op))) h = fast;
  }
  f.emit(h, is_16(t) ? OpClass::kHalf : OpClass::kFloat);
}

// .rnd .ftz .sat as the type allows them.
uint32_t arithmetic_flags(Form& f, Type t) {
  bool given = false;
  const Rounding r = take_rounding(f, &given);
  if ((t == Type::kF64 || is_16(t)) && r != Rounding::kNearestEven)
    f.fail(std::string("only .rn is modelled for .") + exec::to_string(t));
  uint32_t flags = static_cast<uint32_t>(r);
  if (f.take("ftz")) {
    if (t == Type::kF64 || t == Type::kBF16 || t == Type::kBF16x2)
      f.fail(std::string(".ftz is not possible for .") + exec::to_string(t));
    flags |= kFtz;
  }
  if (f.take("sat")) {
    if (t == Type::kF64 || t == Type::kF32x2 || t == Type::kBF16 || t == Type::kBF16x2)
      f.fail(std::string(".sat is not possible for .") + exec::to_string(t));
    flags |= kSat;
  }
  return flags;
}

}  // namespace

uint32_t exact_bf16(uint32_t form, bool packed, uint32_t a, uint32_t b, uint32_t c) {
  auto half = [&](int shift) {
    return uint32_t{apply16<true>(form, static_cast<uint16_t>(a >> shift), static_cast<uint16_t>(b >> shift),
                                  static_cast<uint16_t>(c >> shift))}
           << shift;
  };
  return packed ? half(16) | half(0) : half(0);
}

void float_binary(Form& f) {
  const Type t = f.take_type();
  const uint32_t flags = arithmetic_flags(f, t);
  operands(f, t, 2);
  emit(f, t, f.name() == "add" ? Op::kAdd : f.name() == "sub" ? Op::kSub : Op::kMul, flags);
}

void float_fma(Form& f) {
  const Type t = f.take_type();
  uint32_t flags = arithmetic_flags(f, t);
  if (f.take("relu")) {
    if (!is_16(t)) f.fail(".relu needs f16 or bf16");
    flags |= kRelu;
  }
  operands(f, t, 3);
  emit(f, t, Op::kFma, flags);
}

void float_div(Form& f) {
  const bool loose = f.take("approx") || f.take("full");
  const Type t = f.take_type();
  if (t != Type::kF32 && (t != Type::kF64 || loose)) f.fail("that type is not possible here");
  const uint32_t flags = arithmetic_flags(f, t);
  if (flags & kSat) f.fail(".sat is not possible here");
  operands(f, t, 2);
  emit(f, t, Op::kDiv, flags);
}

void float_unary(Form& f) {
  const Type t = f.take_type();
  uint32_t flags = 0;
  if (f.take("ftz")) flags |= kFtz;
  operands(f, t, 1);
  emit(f, t, f.name() == "abs" ? Op::kAbs : Op::kNeg, flags);
}

void float_min_max(Form& f) {
  const Type t = f.take_type();
  uint32_t flags = 0;
  if (f.take("ftz")) flags |= kFtz;
  if (f.take("NaN")) flags |= kNan;
  if (f.take("xorsign")) flags |= kXorSign;
  if (f.take("abs")) flags |= kAbs;
  if (bool(flags & kXorSign) != bool(flags & kAbs)) f.fail(".xorsign and .abs go together");
  if (t == Type::kF64 && flags) f.fail("f64 takes no modifiers here");
  operands(f, t, 2);
  emit(f, t, f.name() == "min" ? Op::kMin : Op::kMax, flags);
}

namespace {

// rcp sqrt rsqrt sin cos lg2 ex2 tanh
void function(Form& f) {
  const std::string n = f.name();
  const Op op = n == "rcp"     ? Op::kRcp
                : n == "sqrt"  ? Op::kSqrt
                : n == "rsqrt" ? Op::kRsqrt
                : n == "sin"   ? Op::kSin
                : n == "cos"   ? Op::kCos
                : n == "lg2"   ? Op::kLg2
                : n == "ex2"   ? Op::kEx2
                               : Op::kTanh;
  const bool approx = f.take("approx");
  const Type t = f.take_type();
  if (t == Type::kF64) {
    const bool ftz = f.take("ftz");
    if (op != Op::kRcp && op != Op::kSqrt && op != Op::kRsqrt) f.fail("f64 is not possible here");
    uint32_t flags = 0;
    if (!approx) flags = arithmetic_flags(f, t);
    operands(f, t, 1);
    if (approx && ftz && op != Op::kSqrt) {
      // 9.7.3.14, 9.7.3.17: approximations of 20 mantissa bits whose low word is zero; subnormals are flushed.
      f.inst.form = static_cast<uint32_t>(op) << kKindShift;
      return f.emit(
          [](Warp& w, const Inst& in, uint32_t mask) {
            uint64_t* d = w.out<uint64_t>(in.op[0]);
            const uint64_t* a = w.in<uint64_t>(in.op[1]);
            for_lanes(mask, [&](int i) {
              auto zero_subnormal = [](uint64_t v) { return (v >> 52 & 0x7ff) == 0 ? v & (uint64_t{1} << 63) : v; };
              const uint64_t r = double_to_bits(apply64(in.form, bits_to_double(zero_subnormal(a[i])), 0, 0));
              d[i] = zero_subnormal(r) & 0xffffffff00000000ull;
            });
          },
          OpClass::kFloat);
    }
    if (approx || ftz) f.fail("that form is not modelled");
    return emit(f, t, op, flags);
  }
  if (is_16(t)) {
    if ((op != Op::kEx2 && op != Op::kTanh) || !approx) f.fail("that form is not modelled");
    f.take("ftz");  // ex2 of bf16 always flushes; f16 results down to 2^-24 are kept
    operands(f, t, 1);
    return emit(f, t, op, 0);
  }
  if (t != Type::kF32) f.fail("that type is not possible here");
  uint32_t flags = 0;
  if (op == Op::kRcp || op == Op::kSqrt) {
    if (!approx) flags = arithmetic_flags(f, t);
  } else if (!approx) {
    f.fail(".approx is missing");
  }
  if (f.take("ftz")) flags |= kFtz;
  operands(f, t, 1);
  f.inst.form = flags | static_cast<uint32_t>(op) << kKindShift;
  f.emit(&run_f32, OpClass::kFloat);
}

void copysign(Form& f) {
  const Type t = f.take_type();
  if (t != Type::kF32 && t != Type::kF64) f.fail("needs .f32 or .f64");
  operands(f, t, 2);
  emit(f, t, Op::kCopySign, 0);
}

void testp(Form& f) {
  const std::string what = f.take_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  const Type t = f.take_type();
  if (what.empty() || (t != Type::kF32 && t != Type::kF64)) f.fail("that form is not modelled");
  f.expect(2);
  f.out_pred(0);
  f.in(1, t);
  auto pick = [&](auto tag) -> Handler {
    using T = typename decltype(tag)::type;
    if (what == "finite") return predicate_lanes<T>([](T a) { return std::isfinite(a); });
    if (what == "infinite") return predicate_lanes<T>([](T a) { return std::isinf(a); });
    if (what == "number") return predicate_lanes<T>([](T a) { return a == a; });
    if (what == "notanumber") return predicate_lanes<T>([](T a) { return a != a; });
    if (what == "normal") return predicate_lanes<T>([](T a) { return std::isnormal(a) || a == 0; });
    return predicate_lanes<T>([](T a) { return std::fpclassify(a) == FP_SUBNORMAL; });
  };
  f.emit(t == Type::kF32 ? pick(Tag<float>()) : pick(Tag<double>()), OpClass::kFloat);
}

}  // namespace

void add_float(FormTable& t) {
  for (const char* n : {"rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"}) t[n] = function;
  t["copysign"] = copysign;
  t["testp"] = testp;
}

}  // namespace vsm::ops
