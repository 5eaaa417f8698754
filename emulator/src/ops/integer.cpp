// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic, logic and shifts: PTX ISA 9.0, 9.7.1, 9.7.2 and 9.7.8.
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
using Int128 = __int128;

// d = f(a, b) where all three have the instruction's type.
#define VSM_BINARY(expression)                \
  with_integer(t, [](auto tag) {              \
    using T = typename decltype(tag)::type;   \
    return lanes<T, T, T>([](T a, T b) -> T { \
      using U [[maybe_unused]] = Unsigned<T>; \
      return static_cast<T>(expression);      \
    });                                       \
  })

void integer_type(Form& f, Type t) {
  if (!exec::is_integer(t)) f.fail(std::string("type .") + exec::to_string(t) + " is not possible here");
}

void finish(Form& f, Handler h) {
  if (!h) f.fail("that type is not modelled here");
  f.emit(h, OpClass::kInteger);
}

int64_t saturate32(int64_t v) { return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v; }

// min/max of the packed 16-bit integer forms
uint32_t packed(uint32_t a, uint32_t b, bool sign, bool maximum) {
  uint32_t d = 0;
  for (int s = 0; s < 32; s += 16) {
    const uint16_t x = static_cast<uint16_t>(a >> s), y = static_cast<uint16_t>(b >> s);
    const bool less = sign ? static_cast<int16_t>(x) < static_cast<int16_t>(y) : x < y;
    d |= static_cast<uint32_t>(less != maximum ? x : y) << s;
  }
  return d;
}

// --- carries: the condition code is a predicate of its own (CC.CF), kept in a register of the kernel ---------------

}  // namespace

bool integer_add_sub(Form& f) {
  const bool add = f.name() == "add";
  const bool sat = f.take("sat");
  if (f.rest() == "u16x2" || f.rest() == "s16x2") {
    const bool sign = f.rest() == "s16x2";
    f.take(sign ? "s16x2" : "u16x2");
    f.expect(3);
    if (!add || sat) f.fail("that form is not modelled");
    f.out(0, Type::kB32);
    f.in(1, Type::kB32);
    f.in(2, Type::kB32);
    finish(f, lanes<uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b) {
             return ((a & 0xffff0000u) + (b & 0xffff0000u)) | ((a + b) & 0xffffu);
           }));
    return true;
  }
  const Type t = f.take_type();
  integer_type(f, t);
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  if (sat) {
    if (t != Type::kS32) f.fail(".sat needs .s32");
    finish(f, add ? lanes<int32_t, int32_t, int32_t>(
                        [](int32_t a, int32_t b) { return static_cast<int32_t>(saturate32(int64_t{a} + b)); })
                  : lanes<int32_t, int32_t, int32_t>(
                        [](int32_t a, int32_t b) { return static_cast<int32_t>(saturate32(int64_t{a} - b)); }));
    return true;
  }
  finish(f, add ? VSM_BINARY(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)))
                : VSM_BINARY(static_cast<U>(static_cast<U>(a) - static_cast<U>(b))));
  return true;
}

namespace {

template <class T, class W>
T high(T a, T b) {
  return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> (sizeof(T) * 8));
}

// mul / mad / mul24 ...: .lo .hi .wide
template <class T>
using Twice =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, Int128, unsigned __int128>>>;

Type wide_type(Type t) {
  switch (t) {
    case Type::kU16: return Type::kU32;
    case Type::kS16: return Type::kS32;
    case Type::kU32: return Type::kU64;
    case Type::kS32: return Type::kS64;
    default: return Type::kNone;
  }
}

template <class T>
Handler wide_handler(bool mad) {
  using D = Twice<T>;
  if (mad) {
    return lanes<D, T, T, D>([](T a, T b, D c) -> D {
      using U = Unsigned<D>;
      return static_cast<D>(static_cast<U>(static_cast<D>(a) * static_cast<D>(b)) + static_cast<U>(c));
    });
  }
  return lanes<D, T, T>([](T a, T b) -> D { return static_cast<D>(a) * static_cast<D>(b); });
}

}  // namespace

bool integer_mul(Form& f) {
  const bool mad = f.name() == "mad";
  const std::string part = f.take_one({"lo", "hi", "wide"});
  if (part.empty()) f.fail(".lo, .hi or .wide is missing");
  const bool sat = f.take("sat");
  const Type t = f.take_type();
  integer_type(f, t);
  f.expect(mad ? 4 : 3);
  if (part == "wide") {
    const Type d = wide_type(t);
    if (d == Type::kNone || sat) f.fail("that form is not modelled");
    f.out(0, d);
    f.in(1, t);
    f.in(2, t);
    if (mad) f.in(3, d);
    finish(f, t == Type::kU16   ? wide_handler<uint16_t>(mad)
              : t == Type::kS16 ? wide_handler<int16_t>(mad)
              : t == Type::kU32 ? wide_handler<uint32_t>(mad)
                                : wide_handler<int32_t>(mad));
    return true;
  }
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  if (mad) f.in(3, t);
  if (sat && !(mad && part == "hi" && t == Type::kS32)) f.fail(".sat needs mad.hi.s32");
  if (sat) {
    finish(f, lanes<int32_t, int32_t, int32_t, int32_t>([](int32_t a, int32_t b, int32_t c) {
             return static_cast<int32_t>(saturate32(((int64_t{a} * b) >> 32) + c));
           }));
  } else if (part == "lo") {
    finish(f, mad ? with_integer(t,
                                 [](auto tag) {
                                   using T = typename decltype(tag)::type;
                                   return lanes<T, T, T, T>([](T a, T b, T c) -> T {
                                     return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) +
                                                           static_cast<uint64_t>(c));
                                   });
                                 })
                  : VSM_BINARY(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)));
  } else {
    finish(f, mad ? with_integer(t,
                                 [](auto tag) {
                                   using T = typename decltype(tag)::type;
                                   return lanes<T, T, T, T>([](T a, T b, T c) -> T {
                                     return static_cast<T>(static_cast<Unsigned<T>>(high<T, Twice<T>>(a, b)) +
                                                           static_cast<Unsigned<T>>(c));
                                   });
                                 })
                  : with_integer(t, [](auto tag) {
                      using T = typename decltype(tag)::type;
                      return lanes<T, T, T>([](T a, T b) -> T { return high<T, Twice<T>>(a, b); });
                    }));
  }
  return true;
}

namespace {

void mul24(Form& f) {
  const bool mad = f.name() == "mad24";
  const std::string part = f.take_one({"lo", "hi"});
  const Type t = f.take_type();
  if (part.empty() || (t != Type::kU32 && t != Type::kS32)) f.fail("that form is not modelled");
  f.expect(mad ? 4 : 3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  if (mad) f.in(3, t);
  else f.in_constant(0, 32);
  const bool lo = part == "lo";
  auto low_u = [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>(uint64_t{a & 0xffffff} * (b & 0xffffff)) + c;
  };
  auto high_u = [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((uint64_t{a & 0xffffff} * (b & 0xffffff)) >> 16) + c;
  };
  auto low_s = [](int32_t a, int32_t b, uint32_t c) {
    return static_cast<uint32_t>(int64_t{static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8} *
                                 (static_cast<int32_t>(static_cast<uint32_t>(b) << 8) >> 8)) +
           c;
  };
  auto high_s = [](int32_t a, int32_t b, uint32_t c) {
    return static_cast<uint32_t>((int64_t{static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8} *
                                  (static_cast<int32_t>(static_cast<uint32_t>(b) << 8) >> 8)) >>
                                 16) +
           c;
  };
  if (t == Type::kU32)
    finish(f, lo ? lanes<uint32_t, uint32_t, uint32_t, uint32_t>(low_u)
                 : lanes<uint32_t, uint32_t, uint32_t, uint32_t>(high_u));
  else
    finish(f, lo ? lanes<uint32_t, int32_t, int32_t, uint32_t>(low_s)
                 : lanes<uint32_t, int32_t, int32_t, uint32_t>(high_s));
}

void sad(Form& f) {
  const Type t = f.take_type();
  integer_type(f, t);
  f.expect(4);
  f.out(0, t);
  for (size_t i = 1; i < 4; ++i) f.in(i, t);
  finish(f, with_integer(t, [](auto tag) {
           using T = typename decltype(tag)::type;
           return lanes<T, T, T, T>([](T a, T b, T c) -> T {
             using U = Unsigned<T>;
             const U difference = a < b ? static_cast<U>(static_cast<U>(b) - static_cast<U>(a))
                                        : static_cast<U>(static_cast<U>(a) - static_cast<U>(b));
             return static_cast<T>(static_cast<U>(difference + static_cast<U>(c)));
           });
         }));
}

// 9.7.1.8, 9.7.1.9: division by zero yields an unspecified value; it is reported, since no program may use it.
template <class T, bool kRemainder>
void divide(Warp& w, const Inst& in, uint32_t mask) {
  Word<T>* d = w.out<Word<T>>(in.op[0]);
  const Word<T>* a = w.in<Word<T>>(in.op[1]);
  const Word<T>* b = w.in<Word<T>>(in.op[2]);
  for_lanes(mask, [&](int i) {
    const T x = unpack<T>(a[i]), y = unpack<T>(b[i]);
    if (y == 0) {
      w.report(ReportKind::kUndefined, in, i, "integer division by zero");
      d[i] = pack<T>(static_cast<T>(kRemainder ? x : static_cast<T>(-1)));
    } else if (std::is_signed_v<T> && y == static_cast<T>(-1)) {
      d[i] = kRemainder ? 0 : pack<T>(static_cast<T>(0 - static_cast<Unsigned<T>>(x)));
    } else {
      d[i] = pack<T>(static_cast<T>(kRemainder ? x % y : x / y));
    }
  });
}

}  // namespace

bool integer_div_rem(Form& f) {
  const bool rem = f.name() == "rem";
  const Type t = f.take_type();
  integer_type(f, t);
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  finish(f, with_integer(t, [&](auto tag) -> Handler {
           using T = typename decltype(tag)::type;
           return rem ? &divide<T, true> : &divide<T, false>;
         }));
  return true;
}

bool integer_unary(Form& f) {
  const std::string op = f.name();
  const Type t = f.take_type();
  if (!exec::is_signed(t) || t == Type::kS8) f.fail("needs a signed integer type");
  f.expect(2);
  f.out(0, t);
  f.in(1, t);
  finish(f, with_integer(t, [&](auto tag) -> Handler {
           using T = typename decltype(tag)::type;
           if (op == "neg")
             return lanes<T, T>([](T a) -> T { return static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(a)); });
           return lanes<T, T>(
               [](T a) -> T { return a < 0 ? static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(a)) : a; });
         }));
  return true;
}

bool integer_min_max(Form& f) {
  const bool maximum = f.name() == "max";
  for (const bool sign : {false, true}) {
    if (!f.take(sign ? "s16x2" : "u16x2")) continue;
    if (f.take("relu")) f.fail("'.relu' is not modelled");
    f.expect(3);
    f.out(0, Type::kB32);
    f.in(1, Type::kB32);
    f.in(2, Type::kB32);
    finish(f, sign ? (maximum ? lanes<uint32_t, uint32_t, uint32_t>(
                                    [](uint32_t a, uint32_t b) { return packed(a, b, true, true); })
                              : lanes<uint32_t, uint32_t, uint32_t>(
                                    [](uint32_t a, uint32_t b) { return packed(a, b, true, false); }))
                   : (maximum ? lanes<uint32_t, uint32_t, uint32_t>(
                                    [](uint32_t a, uint32_t b) { return packed(a, b, false, true); })
                              : lanes<uint32_t, uint32_t, uint32_t>(
                                    [](uint32_t a, uint32_t b) { return packed(a, b, false, false); })));
    return true;
  }
  const bool relu = f.take("relu");
  const Type t = f.take_type();
  integer_type(f, t);
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  if (relu) {
    if (t != Type::kS32) f.fail(".relu needs .s32");
    finish(f, maximum
                  ? lanes<int32_t, int32_t, int32_t>([](int32_t a, int32_t b) { return std::max(std::max(a, b), 0); })
                  : lanes<int32_t, int32_t, int32_t>([](int32_t a, int32_t b) { return std::max(std::min(a, b), 0); }));
    return true;
  }
  finish(f, maximum ? VSM_BINARY(a < b ? b : a) : VSM_BINARY(b < a ? b : a));
  return true;
}

namespace {

void logic(Form& f) {
  const std::string op = f.name();
  const Type t = f.take_type();
  if (t == Type::kPred) {
    f.expect(3);
    f.out_pred(0);
    f.in_pred(1);
    f.in_pred(2);
    if (op == "and")
      return f.emit(
          [](Warp& w, const Inst& in, uint32_t m) { w.set_pred(in.op[0], m, w.pred(in.op[1]) & w.pred(in.op[2])); },
          OpClass::kPredicate);
    if (op == "or")
      return f.emit(
          [](Warp& w, const Inst& in, uint32_t m) { w.set_pred(in.op[0], m, w.pred(in.op[1]) | w.pred(in.op[2])); },
          OpClass::kPredicate);
    return f.emit(
        [](Warp& w, const Inst& in, uint32_t m) { w.set_pred(in.op[0], m, w.pred(in.op[1]) ^ w.pred(in.op[2])); },
        OpClass::kPredicate);
  }
  if (!exec::is_bits(t)) f.fail("needs a .b type or .pred");
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  finish(f, op == "and" ? VSM_BINARY(a & b) : op == "or" ? VSM_BINARY(a | b) : VSM_BINARY(a ^ b));
}

void logic_not(Form& f) {
  const bool cnot = f.name() == "cnot";
  const Type t = f.take_type();
  f.expect(2);
  if (t == Type::kPred && !cnot) {
    f.out_pred(0);
    f.in_pred(1);
    return f.emit([](Warp& w, const Inst& in, uint32_t m) { w.set_pred(in.op[0], m, ~w.pred(in.op[1])); },
                  OpClass::kPredicate);
  }
  if (!exec::is_bits(t)) f.fail("needs a .b type or .pred");
  f.out(0, t);
  f.in(1, t);
  finish(f, with_bits(t, [&](auto tag) -> Handler {
           using T = typename decltype(tag)::type;
           if (cnot) return lanes<T, T>([](T a) -> T { return a == 0; });
           return lanes<T, T>([](T a) -> T { return static_cast<T>(~a); });
         }));
}

void lop3(Form& f) {
  f.take("b32");
  const bool with_or = f.take("or"), with_and = f.take("and");
  if (with_or || with_and) f.fail("lop3 with a predicate is not modelled");
  f.expect(5);
  f.out(0, Type::kB32);
  for (size_t i = 1; i < 4; ++i) f.in(i, Type::kB32);
  const int64_t table = f.immediate(4);
  if (table < 0 || table > 255) f.fail("the look-up table must be 0 to 255");
  f.inst.form = static_cast<uint32_t>(table);
  f.emit(
      [](Warp& w, const Inst& in, uint32_t mask) {
        uint32_t* d = w.out<uint32_t>(in.op[0]);
        const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
        for_lanes(mask, [&](int i) {
          uint32_t r = 0;
          for (uint32_t k = 0; k < 8; ++k) {
            if (in.form >> k & 1) r |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
          }
          d[i] = r;
        });
      },
      OpClass::kInteger);
}

// 9.7.8.7, 9.7.8.8: the amount is .u32 and clamped to the width (shift out everything).
void shift(Form& f) {
  const bool left = f.name() == "shl";
  const Type t = f.take_type();
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, Type::kU32);
  finish(f, with_integer(t, [&](auto tag) -> Handler {
           using T = typename decltype(tag)::type;
           constexpr uint32_t kBits = sizeof(T) * 8;
           if (left)
             return lanes<T, T, uint32_t>([](T a, uint32_t n) -> T {
               return n >= kBits ? T(0) : static_cast<T>(static_cast<Unsigned<T>>(a) << n);
             });
           return lanes<T, T, uint32_t>([](T a, uint32_t n) -> T {
             if (n >= kBits) return a < 0 ? static_cast<T>(-1) : T(0);
             return static_cast<T>(a >> n);
           });
         }));
}

void funnel_shift(Form& f) {
  const std::string side = f.take_one({"l", "r"}), mode = f.take_one({"wrap", "clamp"});
  f.take("b32");
  if (side.empty() || mode.empty()) f.fail(".l or .r, and .wrap or .clamp, are needed");
  f.expect(4);
  f.out(0, Type::kB32);
  f.in(1, Type::kB32);
  f.in(2, Type::kB32);
  f.in(3, Type::kU32);
  using U = uint32_t;
  if (side == "l") {
    finish(f, mode == "wrap" ? lanes<U, U, U, U>([](U a, U b, U c) {
             return static_cast<U>(((uint64_t{b} << 32 | a) << (c & 31)) >> 32);
           })
                             : lanes<U, U, U, U>([](U a, U b, U c) {
                                 return static_cast<U>(((uint64_t{b} << 32 | a) << std::min(c, 32u)) >> 32);
                               }));
  } else {
    finish(f, mode == "wrap"
                  ? lanes<U, U, U, U>([](U a, U b, U c) { return static_cast<U>((uint64_t{b} << 32 | a) >> (c & 31)); })
                  : lanes<U, U, U, U>(
                        [](U a, U b, U c) { return static_cast<U>((uint64_t{b} << 32 | a) >> std::min(c, 32u)); }));
  }
}

void bit_count(Form& f) {
  const std::string op = f.name();
  const Type t = f.take_type();
  if (t != Type::kB32 && t != Type::kB64) f.fail("needs .b32 or .b64");
  f.expect(2);
  const bool reverse = op == "brev";
  f.out(0, reverse ? t : Type::kU32);
  f.in(1, t);
  const bool wide = t == Type::kB64;
  if (op == "popc")
    finish(f, wide
                  ? lanes<uint32_t, uint64_t>([](uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(a)); })
                  : lanes<uint32_t, uint32_t>([](uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); }));
  else if (op == "clz")
    finish(
        f,
        wide ? lanes<uint32_t, uint64_t>([](uint64_t a) { return a ? static_cast<uint32_t>(__builtin_clzll(a)) : 64u; })
             : lanes<uint32_t, uint32_t>([](uint32_t a) { return a ? static_cast<uint32_t>(__builtin_clz(a)) : 32u; }));
  else
    finish(f, with_bits(t, [](auto tag) -> Handler {
             using T = typename decltype(tag)::type;
             return lanes<T, T>([](T a) -> T {
               T r = 0;
               for (size_t i = 0; i < sizeof(T) * 8; ++i) r = static_cast<T>(r << 1 | (a >> i & 1));
               return r;
             });
           }));
}

// 9.7.1.18: position of the highest bit that differs from the sign; 0xffffffff if none.
void bfind(Form& f) {
  const bool amount = f.take("shiftamt");
  const Type t = f.take_type();
  if (t != Type::kU32 && t != Type::kS32 && t != Type::kU64 && t != Type::kS64)
    f.fail("needs a 32- or 64-bit integer type");
  f.expect(2);
  f.out(0, Type::kU32);
  f.in(1, t);
  auto make = [&](auto tag) -> Handler {
    using T = typename decltype(tag)::type;
    constexpr int kBits = sizeof(T) * 8;
    if (amount)
      return lanes<uint32_t, T>([](T a) -> uint32_t {
        const uint64_t v = a < 0 ? static_cast<Unsigned<T>>(~a) : static_cast<Unsigned<T>>(a);
        return v ? static_cast<uint32_t>(__builtin_clzll(v) - (64 - kBits)) : 0xffffffffu;
      });
    return lanes<uint32_t, T>([](T a) -> uint32_t {
      const uint64_t v = a < 0 ? static_cast<Unsigned<T>>(~a) : static_cast<Unsigned<T>>(a);
      return v ? static_cast<uint32_t>(63 - __builtin_clzll(v)) : 0xffffffffu;
    });
  };
  finish(f, with_integer(t, make));
}

// 9.7.1.16: n-th set (n > 0: upwards, n < 0: downwards) bit from `base`; n == 0: base itself if set.
uint32_t find_nth(uint32_t mask, uint32_t base, int32_t n) {
  if (n == 0) return base < 32 && (mask >> base & 1) ? base : 0xffffffffu;
  const int step = n > 0 ? 1 : -1;
  int64_t left = n > 0 ? n : -int64_t{n};
  for (int64_t i = base; i >= 0 && i < 32; i += step) {
    if ((mask >> i & 1) && --left == 0) return static_cast<uint32_t>(i);
  }
  return 0xffffffffu;
}

void fns(Form& f) {
  f.take("b32");
  f.expect(4);
  f.out(0, Type::kB32);
  f.in(1, Type::kB32);
  f.in(2, Type::kB32);
  f.in(3, Type::kB32);
  finish(f, lanes<uint32_t, uint32_t, uint32_t, int32_t>(
                [](uint32_t a, uint32_t b, int32_t n) { return find_nth(a, b, n); }));
}

// 9.7.1.19
void bfe(Form& f) {
  const Type t = f.take_type();
  if (t != Type::kU32 && t != Type::kS32 && t != Type::kU64 && t != Type::kS64)
    f.fail("needs a 32- or 64-bit integer type");
  f.expect(4);
  f.out(0, t);
  f.in(1, t);
  f.in(2, Type::kU32);
  f.in(3, Type::kU32);
  finish(f, with_integer(t, [](auto tag) -> Handler {
           using T = typename decltype(tag)::type;
           return lanes<T, T, uint32_t, uint32_t>([](T a, uint32_t b, uint32_t c) -> T {
             constexpr uint32_t kTop = sizeof(T) * 8 - 1;
             const uint32_t pos = b & 0xff, len = c & 0xff;
             const bool sign =
                 std::is_signed_v<T> && len != 0 && (static_cast<Unsigned<T>>(a) >> std::min(pos + len - 1, kTop) & 1);
             Unsigned<T> d = 0;
             for (uint32_t i = 0; i <= kTop; ++i) {
               const bool bit = i < len && pos + i <= kTop ? (static_cast<Unsigned<T>>(a) >> (pos + i) & 1) : sign;
               d |= static_cast<Unsigned<T>>(static_cast<Unsigned<T>>(bit) << i);
             }
             return static_cast<T>(d);
           });
         }));
}

// 9.7.1.20
void bfi(Form& f) {
  const Type t = f.take_type();
  if (t != Type::kB32 && t != Type::kB64) f.fail("needs .b32 or .b64");
  f.expect(5);
  f.out(0, t);
  f.in(1, t);
  f.in(2, t);
  f.in(3, Type::kU32);
  f.in(4, Type::kU32);
  finish(f, with_bits(t, [](auto tag) -> Handler {
           using T = typename decltype(tag)::type;
           return lanes<T, T, T, uint32_t, uint32_t>([](T a, T b, uint32_t c, uint32_t n) -> T {
             constexpr uint32_t kTop = sizeof(T) * 8 - 1;
             const uint32_t pos = c & 0xff, len = n & 0xff;
             T d = b;
             for (uint32_t i = 0; i < len && pos + i <= kTop; ++i) {
               const T bit = static_cast<T>(T(1) << (pos + i));
               d = static_cast<T>((a >> i & 1) ? (d | bit) : (d & ~bit));
             }
             return d;
           });
         }));
}

// 9.7.1.23
void szext_bmsk(Form& f) {
  const bool mask = f.name() == "bmsk";
  const std::string mode = f.take_one({"clamp", "wrap"});
  const Type t = f.take_type();
  if (mode.empty() || exec::type_bits(t) != 32) f.fail("that form is not modelled");
  f.expect(3);
  f.out(0, Type::kB32);
  f.in(1, Type::kB32);
  f.in(2, Type::kB32);
  f.inst.form = (mode == "wrap" ? 1u : 0u) | (exec::is_signed(t) ? 2u : 0u);
  if (mask) {
    f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          uint32_t* d = w.out<uint32_t>(in.op[0]);
          const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]);
          for_lanes(m, [&](int i) {
            const bool wrap = in.form & 1;
            const uint32_t begin = wrap ? a[i] & 31 : std::min(a[i], 32u),
                           count = wrap ? b[i] & 31 : std::min(b[i], 32u);
            d[i] = static_cast<uint32_t>((((uint64_t{1} << count) - 1) << begin) & 0xffffffffu);
          });
        },
        OpClass::kInteger);
  } else {
    f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          uint32_t* d = w.out<uint32_t>(in.op[0]);
          const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]);
          for_lanes(m, [&](int i) {
            const uint32_t n = in.form & 1 ? b[i] & 31 : std::min(b[i], 32u);
            uint32_t v = n >= 32 ? a[i] : a[i] & ((1u << n) - 1);
            if ((in.form & 2) && n > 0 && n < 32 && (a[i] >> (n - 1) & 1)) v |= ~0u << n;
            d[i] = v;
          });
        },
        OpClass::kInteger);
  }
}

// 9.7.1.21, 9.7.1.22
void dot(Form& f) {
  const bool four = f.name() == "dp4a";
  const std::string half = four ? "" : f.take_one({"lo", "hi"});
  if (!four && half.empty()) f.fail(".lo or .hi is missing");
  const Type a = f.take_type(), b = f.take_type();
  f.expect(4);
  f.out(0, Type::kB32);
  for (size_t i = 1; i < 4; ++i) f.in(i, Type::kB32);
  f.inst.form = (exec::is_signed(a) ? 1u : 0) | (exec::is_signed(b) ? 2u : 0) | (half == "hi" ? 4u : 0);
  if (four) {
    f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          uint32_t* d = w.out<uint32_t>(in.op[0]);
          const uint32_t *x = w.in<uint32_t>(in.op[1]), *y = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
          for_lanes(m, [&](int i) {
            uint32_t sum = c[i];
            for (int k = 0; k < 32; k += 8) {
              const int32_t p = in.form & 1 ? static_cast<int8_t>(x[i] >> k) : static_cast<uint8_t>(x[i] >> k);
              const int32_t q = in.form & 2 ? static_cast<int8_t>(y[i] >> k) : static_cast<uint8_t>(y[i] >> k);
              sum += static_cast<uint32_t>(p * q);
            }
            d[i] = sum;
          });
        },
        OpClass::kInteger);
  } else {
    f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          uint32_t* d = w.out<uint32_t>(in.op[0]);
          const uint32_t *x = w.in<uint32_t>(in.op[1]), *y = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
          for_lanes(m, [&](int i) {
            uint32_t sum = c[i];
            for (int k = 0; k < 2; ++k) {
              const int32_t p =
                  in.form & 1 ? static_cast<int16_t>(x[i] >> (16 * k)) : static_cast<uint16_t>(x[i] >> (16 * k));
              const uint32_t byte = y[i] >> (8 * k + (in.form & 4 ? 16 : 0));
              const int32_t q = in.form & 2 ? static_cast<int8_t>(byte) : static_cast<uint8_t>(byte);
              sum += static_cast<uint32_t>(p * q);
            }
            d[i] = sum;
          });
        },
        OpClass::kInteger);
  }
}

// 9.7.9.7: bytes of {b, a} picked by nibbles of c; bit 3 of a nibble replicates the sign.
void prmt(Form& f) {
  f.take("b32");
  const std::string mode = f.take_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
  f.expect(4);
  f.out(0, Type::kB32);
  for (size_t i = 1; i < 4; ++i) f.in(i, Type::kB32);
  f.inst.form = mode == "f4e"    ? 1
                : mode == "b4e"  ? 2
                : mode == "rc8"  ? 3
                : mode == "ecl"  ? 4
                : mode == "ecr"  ? 5
                : mode == "rc16" ? 6
                                 : 0;
  f.emit(
      [](Warp& w, const Inst& in, uint32_t m) {
        uint32_t* d = w.out<uint32_t>(in.op[0]);
        const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
        for_lanes(m, [&](int i) {
          const uint64_t bytes = uint64_t{b[i]} << 32 | a[i];
          const uint32_t n = c[i] & 3;
          uint32_t r = 0;
          for (uint32_t k = 0; k < 4; ++k) {
            uint32_t select = 0;
            switch (in.form) {
              case 0: select = c[i] >> (4 * k) & 15; break;
              case 1: select = n + k; break;
              case 2: select = (n + 8 - k) & 7; break;
              case 3: select = n; break;
              case 4: select = std::max(n, k); break;
              case 5: select = std::min(n, k); break;
              case 6: select = (n & 1) * 2 + (k & 1); break;
            }
            uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (select & 7))) & 0xff;
            if (in.form == 0 && (select & 8)) byte = byte & 0x80 ? 0xff : 0;
            r |= byte << (8 * k);
          }
          d[i] = r;
        });
      },
      OpClass::kInteger);
}

}  // namespace

void add_integer(FormTable& t) {
  t["mul24"] = t["mad24"] = mul24;
  t["sad"] = sad;
  t["and"] = t["or"] = t["xor"] = logic;
  t["not"] = t["cnot"] = logic_not;
  t["lop3"] = lop3;
  t["shl"] = t["shr"] = shift;
  t["shf"] = funnel_shift;
  t["popc"] = t["clz"] = t["brev"] = bit_count;
  t["bfind"] = bfind;
  t["fns"] = fns;
  t["bfe"] = bfe;
  t["bfi"] = bfi;
  t["szext"] = t["bmsk"] = szext_bmsk;
  t["dp4a"] = t["dp2a"] = dot;
  t["prmt"] = prmt;
}

}  // namespace vsm::ops
