// SPDX-License-Identifier: Apache-2.0
// cvt: PTX ISA 9.0, 9.7.9.21. Ordinary types here, the narrow formats by tensor/.
#include "ops/families.h"
#include "ops/lanes.h"
#include "tensor/tensor.h"

namespace vsm::ops {
namespace {

struct Conversion {
  Type to = Type::kNone, from = Type::kNone;
  Rounding rounding = Rounding::kNearestEven;
  bool ftz = false, sat = false, satfinite = false, relu = false;
  bool integral = false;  // .rni and friends: the rounding is to an integer
};

double read_float(Type t, uint64_t bits) {
  switch (t) {
    case Type::kF16: return half_to_float(static_cast<uint16_t>(bits));
    case Type::kBF16: return bfloat_to_float(static_cast<uint16_t>(bits));
    case Type::kF64: return bits_to_double(bits);
    default: return bits_to_float(static_cast<uint32_t>(bits));
  }
}

uint64_t sign_extend(uint64_t v, int bits) {
  return bits == 64 ? v : static_cast<uint64_t>(static_cast<int64_t>(v << (64 - bits)) >> (64 - bits));
}

double round_integral(double d, Rounding r) {
  switch (r) {
    case Rounding::kNearestEven: return std::nearbyint(d);
    case Rounding::kZero: return std::trunc(d);
    case Rounding::kDown: return std::floor(d);
    case Rounding::kUp: return std::ceil(d);
    case Rounding::kNearestAway: return std::round(d);
  }
  return d;
}

// Integers are clamped to the destination; NaN gives 0 (9.7.9.21: "NaN results in 0" for f32 and narrower; for f64 the
// most negative value is what hardware returns, and the ISA names 0x8000... only there).
uint64_t float_to_integer(const Conversion& c, double d) {
  const int bits = exec::type_bits(c.to);
  const bool sign = exec::is_signed(c.to);
  if (d != d) {
    if (c.from == Type::kF64 || bits == 64) return uint64_t{1} << (bits - 1);
    return 0;
  }
  d = round_integral(d, c.rounding);
  const double top = std::ldexp(1.0, sign ? bits - 1 : bits);
  if (sign) {
    if (d >= top) return (uint64_t{1} << (bits - 1)) - 1;
    if (d < -top) return sign_extend(uint64_t{1} << (bits - 1), bits);
    return static_cast<uint64_t>(static_cast<int64_t>(d));
  }
  if (d <= 0) return 0;
  if (d >= top) return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  return static_cast<uint64_t>(d);
}

// An integer of 64 bits as the nearest odd-rounded double (53 bits are too few for it).
double integer_to_odd(uint64_t magnitude) {
  double d = static_cast<double>(magnitude >> 11);  // exact
  if (magnitude & 0x7ff) d = bits_to_double(double_to_bits(d * 2048.0) | 1);
  else d *= 2048.0;
  return magnitude < (uint64_t{1} << 53) ? static_cast<double>(magnitude) : d;
}

uint64_t write_float(const Conversion& c, double d) {
  switch (c.to) {
    case Type::kF16: return round_to_half(d, c.rounding);
    case Type::kBF16: return round_to_bfloat(d, c.rounding);
    case Type::kF64: return double_to_bits(d);
    default: return float_to_bits(round_to_float(d, c.rounding));
  }
}

tensor::Round tensor_round(Rounding r) {
  switch (r) {
    case Rounding::kZero: return tensor::Round::kRZ;
    case Rounding::kDown: return tensor::Round::kRM;
    case Rounding::kUp: return tensor::Round::kRP;
    case Rounding::kNearestAway: return tensor::Round::kRNA;
    default: return tensor::Round::kRN;
  }
}

uint64_t convert(const Conversion& c, uint64_t v) {
  const bool from_float = exec::is_float(c.from), to_float = exec::is_float(c.to);
  const int from_bits = exec::type_bits(c.from);
  if (from_bits < 64) v &= (uint64_t{1} << from_bits) - 1;
  if (c.to == Type::kTF32) {
    return tensor::cvt_f32_to(tensor::Type::kTF32, tensor_round(c.rounding), c.satfinite, c.relu,
                              bits_to_float(static_cast<uint32_t>(v)));
  }
  if (!from_float && !to_float) {
    if (exec::is_signed(c.from)) v = sign_extend(v, from_bits);
    if (c.sat) {
      const int bits = exec::type_bits(c.to);
      const bool negative = exec::is_signed(c.from) && static_cast<int64_t>(v) < 0;
      if (exec::is_signed(c.to)) {
        const int64_t most = static_cast<int64_t>((uint64_t{1} << (bits - 1)) - 1), least = -most - 1;
        if (negative) return static_cast<int64_t>(v) < least ? static_cast<uint64_t>(least) : v;
        return v > static_cast<uint64_t>(most) ? static_cast<uint64_t>(most) : v;
      }
      if (negative) return 0;
      return bits < 64 && v >> bits ? (uint64_t{1} << bits) - 1 : v;
    }
    return v;
  }
  if (from_float && !to_float) {
    double d = read_float(c.from, v);
    if (c.ftz && c.from == Type::kF32) d = flush(static_cast<float>(d));
    return float_to_integer(c, d);
  }
  double d;
  if (!from_float) {
    const bool negative = exec::is_signed(c.from) && (sign_extend(v, from_bits) >> 63);
    const uint64_t magnitude = negative ? 0 - sign_extend(v, from_bits) : v;
    if (c.to == Type::kF64) {
      d = static_cast<double>(magnitude);  // rounds to nearest
    } else {
      d = integer_to_odd(magnitude);
    }
    if (negative) d = -d;
  } else {
    d = read_float(c.from, v);
    if (c.ftz && c.from == Type::kF32) d = flush(static_cast<float>(d));
    if (c.integral && d == d) d = std::copysign(round_integral(d, c.rounding), d);
  }
  if (c.sat) d = saturate(d);
  if (c.relu && !(d > 0) && d == d) d = 0;
  uint64_t r = write_float(c, d);
  if (c.ftz && c.to == Type::kF32) r = float_to_bits(flush(bits_to_float(static_cast<uint32_t>(r))));
  if (c.satfinite && c.to == Type::kF16 && (r & 0x7fff) == 0x7c00) r = (r & 0x8000) | 0x7bff;
  if (c.satfinite && c.to == Type::kBF16 && (r & 0x7fff) == 0x7f80) r = (r & 0x8000) | 0x7f7f;
  return r;
}

void convert_run(Warp& w, const Inst& in, uint32_t mask) {
  const auto& c = *static_cast<const Conversion*>(in.ext);
  const int bits = in.op[0].bits;
  // 9.4.1: a signed result is sign-extended to a wider register, others zero-extended.
  for_lanes(mask, [&](int i) {
    uint64_t r = convert(c, w.value(in.op[1], i));
    const int to = exec::type_bits(c.to);
    if (to < bits && to < 64)
      r = exec::is_signed(c.to) ? sign_extend(r & ((uint64_t{1} << to) - 1), to) : r & ((uint64_t{1} << to) - 1);
    w.set_value(in.op[0], i, r);
  });
}

// Two f32 (a: high, b: low) to f16x2 / bf16x2.
void pair_run(Warp& w, const Inst& in, uint32_t mask) {
  const auto& c = *static_cast<const Conversion*>(in.ext);
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]);
  for_lanes(mask, [&](int i) { d[i] = static_cast<uint32_t>(convert(c, a[i]) << 16 | convert(c, b[i])); });
}

bool is_narrow(Type t) { return static_cast<int>(t) >= static_cast<int>(Type::kE4M3x2); }

tensor::Type tensor_type(Type t) {
  switch (t) {
    case Type::kE4M3x2: return tensor::Type::kE4M3;
    case Type::kE5M2x2: return tensor::Type::kE5M2;
    case Type::kE2M3x2: return tensor::Type::kE2M3;
    case Type::kE3M2x2: return tensor::Type::kE3M2;
    case Type::kE2M1x2: return tensor::Type::kE2M1;
    case Type::kUE8M0x2: return tensor::Type::kUE8M0;
    case Type::kF16x2: return tensor::Type::kF16;
    case Type::kBF16x2: return tensor::Type::kBF16;
    case Type::kF32: return tensor::Type::kF32;
    default: return tensor::Type::kNone;
  }
}

void narrow_from_f32(Warp& w, const Inst& in, uint32_t mask) {
  const auto& c = *static_cast<const Conversion*>(in.ext);
  for_lanes(mask, [&](int i) {
    w.set_value(in.op[0], i,
                tensor::cvt_f32x2_to_narrow(tensor_type(c.to), tensor_round(c.rounding), c.satfinite, c.relu,
                                            bits_to_float(static_cast<uint32_t>(w.value(in.op[1], i))),
                                            bits_to_float(static_cast<uint32_t>(w.value(in.op[2], i)))));
  });
}
void narrow_from_half(Warp& w, const Inst& in, uint32_t mask) {
  const auto& c = *static_cast<const Conversion*>(in.ext);
  for_lanes(mask, [&](int i) {
    w.set_value(in.op[0], i,
                tensor::cvt_f16x2_to_narrow(tensor_type(c.to), tensor_type(c.from), tensor_round(c.rounding),
                                            c.satfinite, c.relu, static_cast<uint32_t>(w.value(in.op[1], i))));
  });
}
void half_from_narrow(Warp& w, const Inst& in, uint32_t mask) {
  const auto& c = *static_cast<const Conversion*>(in.ext);
  for_lanes(mask, [&](int i) {
    w.set_value(in.op[0], i,
                tensor::cvt_narrow_to_f16x2(tensor_type(c.from), tensor_type(c.to), c.relu,
                                            static_cast<uint32_t>(w.value(in.op[1], i))));
  });
}

void cvt_narrow(Form& f, Conversion c) {
  if (c.ftz || c.sat || c.integral) f.fail("that modifier is not possible with the narrow formats");
  const Type narrow = is_narrow(c.to) ? c.to : c.from;
  const Type container = narrow == Type::kE2M1x2 ? Type::kB8 : Type::kB16;
  if (is_narrow(c.to)) {
    const bool scale = c.to == Type::kUE8M0x2;
    if (scale ? (c.rounding != Rounding::kZero && c.rounding != Rounding::kUp)
              : (c.rounding != Rounding::kNearestEven || !c.satfinite)) {
      f.fail(scale ? "ue8m0x2 needs .rz or .rp" : "the form needs .rn.satfinite");
    }
    if (scale && c.relu) f.fail(".relu is not possible for ue8m0x2");
    const bool from_f32 = c.from == Type::kF32;
    if (!from_f32 && c.from != Type::kF16x2 && c.from != Type::kBF16x2)
      f.fail("the source must be .f32, .f16x2 or .bf16x2");
    if (scale && c.from == Type::kF16x2) f.fail("ue8m0x2 is made of .f32 or .bf16x2");
    if (!scale && c.from == Type::kBF16x2) f.fail("that form is not modelled");
    f.expect(from_f32 ? 3 : 2);
    f.out_wide(f.operand(0), container);
    for (size_t i = 1; i < f.count(); ++i) f.in(i, Type::kB32);
    f.inst.ext = f.keep(c);
    return f.emit(from_f32 ? &narrow_from_f32 : &narrow_from_half, OpClass::kConvert);
  }
  const bool scale = c.from == Type::kUE8M0x2;
  if (c.to != (scale ? Type::kBF16x2 : Type::kF16x2)) f.fail("that destination is not modelled");
  if (c.rounding != Rounding::kNearestEven || c.satfinite || (scale && c.relu)) f.fail("that form is not modelled");
  f.expect(2);
  f.out(0, Type::kB32);
  f.in_wide(f.operand(1), container);
  f.inst.ext = f.keep(c);
  f.emit(&half_from_narrow, OpClass::kConvert);
}

Rounding take_cvt_rounding(Form& f, bool* float_rounding, bool* integral) {
  const std::string i = f.take_one({"rni", "rzi", "rmi", "rpi"});
  if (!i.empty()) {
    *integral = true;
    return i == "rni"   ? Rounding::kNearestEven
           : i == "rzi" ? Rounding::kZero
           : i == "rmi" ? Rounding::kDown
                        : Rounding::kUp;
  }
  if (f.take("rna")) {
    *float_rounding = true;
    return Rounding::kNearestAway;
  }
  return take_rounding(f, float_rounding);
}

void cvt(Form& f) {
  if (f.name() == "cvt" && f.take("pack")) f.fail("cvt.pack is not modelled");
  Conversion c;
  bool given = false;
  c.rounding = take_cvt_rounding(f, &given, &c.integral);
  c.ftz = f.take("ftz");
  c.satfinite = f.take("satfinite");
  c.sat = f.take("sat");
  c.relu = f.take("relu");
  c.to = f.take_type();
  c.from = f.take_type();
  if (is_narrow(c.to) || is_narrow(c.from)) return cvt_narrow(f, c);
  if (c.to == Type::kF16x2 || c.to == Type::kBF16x2) {
    if (c.from != Type::kF32 || !given) f.fail("that form is not modelled");
    c.to = c.to == Type::kF16x2 ? Type::kF16 : Type::kBF16;
    f.expect(3);
    f.out(0, Type::kB32);
    f.in(1, Type::kF32);
    f.in(2, Type::kF32);
    f.inst.ext = f.keep(c);
    return f.emit(&pair_run, OpClass::kConvert);
  }
  if (c.from == Type::kF16x2 || c.from == Type::kBF16x2 || c.from == Type::kTF32 || c.to == Type::kPred ||
      c.from == Type::kPred || exec::is_bits(c.to) || exec::is_bits(c.from) || c.to == Type::kF32x2 ||
      c.from == Type::kF32x2) {
    f.fail("that form is not modelled");
  }
  const bool from_float = exec::is_float(c.from), to_float = exec::is_float(c.to);
  if (c.to == Type::kTF32 && (c.from != Type::kF32 || !given)) f.fail("tf32 is made of .f32 with a rounding");
  if (from_float && !to_float && !c.integral) f.fail("float to integer needs .rni, .rzi, .rmi or .rpi");
  if (!from_float && to_float && !given) f.fail("integer to float needs a rounding");
  if (!from_float && !to_float && (given || c.integral)) f.fail("integer to integer takes no rounding");
  if (c.to == Type::kF64 && !from_float && c.rounding != Rounding::kNearestEven && exec::type_bits(c.from) == 64) {
    f.fail("only .rn is modelled from 64-bit integers to f64");
  }
  if (from_float && to_float && exec::type_bits(c.to) < exec::type_bits(c.from) && !given && !c.integral)
    f.fail("a rounding is missing");
  f.expect(2);
  f.out_wide(f.operand(0), c.to == Type::kTF32 ? Type::kB32 : c.to);
  f.in_wide(f.operand(1), c.from);
  f.inst.ext = f.keep(c);
  f.emit(&convert_run, OpClass::kConvert);
}

}  // namespace

void add_convert(FormTable& t) { t["cvt"] = cvt; }

}  // namespace vsm::ops
