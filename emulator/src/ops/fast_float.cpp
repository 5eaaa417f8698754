// SPDX-License-Identifier: Apache-2.0
// The forms that kernels are made of: add, sub, mul and fma of f32, bf16 and bf16x2 without modifiers, over whole warps.
//
// bf16 through f32. Let s be the exact result and r its rounding to f32. Rounding is monotone, and whatever lies halfway
// between two neighbouring bf16 values, subnormal ones included, is an f32 value. So r lies on the same side of each such
// midpoint as s does, or on the midpoint; unless r is a midpoint, rounding r to bf16 rounds s. Where it is one:
// - add, sub: r is s. Let 2^q be the last place of the smaller operand b: s is a multiple of it, and |b| < 2^(q+8). If s
//   takes more than 24 bits, the larger operand exceeds 2^(q+23), so that b is below 2^-8 of its last place: s and r lie next
//   to a bf16 value, and a quarter of such a place is between that and any midpoint.
// - mul: s has 16 significant bits, so r is s unless r is subnormal in f32.
// - fma, and products that small: nothing is known. Such lanes are formed again, exactly.
#include "ops/fast_float.h"

#include "vector_clones.h"

namespace vsm::ops {
namespace {

constexpr int kLanes = 32;
using Lanes32 = uint32_t[kLanes];

struct Add {
  static constexpr bool kExact = true;
  static float apply(float a, float b, float) { return a + b; }
};
struct Sub {
  static constexpr bool kExact = true;
  static float apply(float a, float b, float) { return a - b; }
};
struct Mul {
  static constexpr bool kExact = false;
  static constexpr uint32_t kUnsureBelow = 0x01000000;  // 2^-125
  static float apply(float a, float b, float) { return a * b; }
};
struct Fma {
  static constexpr bool kExact = false;
  static constexpr uint32_t kUnsureBelow = ~0u;
  static float apply(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};

template <class Op>
__attribute__((always_inline)) inline void f32(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  for (int i = 0; i < kLanes; ++i) {
    const float r = Op::apply(bits_to_float(a[i]), bits_to_float(b[i]), bits_to_float(c[i]));
    d[i] = r == r ? float_to_bits(r) : 0x7fffffffu;
  }
}

/// To nearest even; NaN is the canonical one.
inline uint32_t to_bfloat(uint32_t r) {
  const uint32_t rounded = (r + 0x7fffu + (r >> 16 & 1)) >> 16;
  return (r & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
}

template <class Op>
inline uint32_t unsure(uint32_t r) {
  if constexpr (Op::kExact) return 0;
  else return (r & 0xffffu) == 0x8000u && (r & 0x7fffffffu) < Op::kUnsureBelow;
}

inline uint32_t subnormal(uint32_t half) { return (half & 0x7f80u) == 0 && (half & 0x7fu) != 0; }

/// A subnormal bf16 number times 2^64, and another one times 2^-64, which must stay normal.
inline uint32_t scaled_up(uint32_t half) {
  const float magnitude = static_cast<float>(static_cast<int32_t>(half & 0x7fu)) * 0x1p-69f;
  return float_to_bits(magnitude) | (half & 0x8000u) << 16;
}
inline uint32_t scaled_down(uint32_t half) { return (half << 16) - (64u << 23); }
inline uint32_t can_be_scaled_down(uint32_t half) { return (half >> 7 & 0xffu) > 66 && (half >> 7 & 0xffu) != 0xff; }

/// One half of every word, which `shift` brings to the low bits: its f32 results. Arithmetic on subnormal operands takes a
/// processor hundreds of cycles, and kernels that expand e2m1 do it all the time: a product's factors are scaled first.
template <class Op>
__attribute__((always_inline)) inline void results(uint32_t* r, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                                                   int shift) {
  uint32_t any = 0, other = Op::kExact;
  alignas(64) uint32_t x[kLanes], y[kLanes], z[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t p = a[i] >> shift & 0xffffu, q = b[i] >> shift & 0xffffu;
    z[i] = c[i] >> shift << 16;
    const uint32_t first = subnormal(p), second = subnormal(q);
    any |= first | second;
    other |= (first & (can_be_scaled_down(q) ^ 1)) | (second & (can_be_scaled_down(p) ^ 1));
    x[i] = first ? scaled_up(p) : second ? scaled_down(p) : p << 16;
    y[i] = second ? scaled_up(q) : first ? scaled_down(q) : q << 16;
  }
  if (any & other) {
    for (int i = 0; i < kLanes; ++i) x[i] = a[i] >> shift << 16, y[i] = b[i] >> shift << 16;
  }
  for (int i = 0; i < kLanes; ++i)
    r[i] = float_to_bits(Op::apply(bits_to_float(x[i]), bits_to_float(y[i]), bits_to_float(z[i])));
}

/// Nonzero if a lane is unsure: `again` says which.
template <class Op, bool kPacked>
__attribute__((always_inline)) inline uint32_t bf16(uint32_t* d, const uint32_t* a, const uint32_t* b,
                                                    const uint32_t* c, uint32_t* again) {
  alignas(64) uint32_t low[kLanes], high[kLanes];
  results<Op>(low, a, b, c, 0);
  if (kPacked) results<Op>(high, a, b, c, 16);
  uint32_t any = 0;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t result = to_bfloat(low[i]), doubt = unsure<Op>(low[i]);
    if (kPacked) {
      result |= to_bfloat(high[i]) << 16;
      doubt |= unsure<Op>(high[i]);
    }
    d[i] = result;
    again[i] = doubt;
    any |= doubt;
  }
  return any;
}

// Functions of their own, for a clone cannot be made of a template.
#define VSM_FAST(Op)                                                                                           \
  VSM_VECTOR_CLONES void f32_##Op(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {      \
    f32<Op>(d, a, b, c);                                                                                       \
  }                                                                                                            \
  VSM_VECTOR_CLONES uint32_t bf16_##Op(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c,   \
                                       uint32_t* again) {                                                      \
    return bf16<Op, false>(d, a, b, c, again);                                                                 \
  }                                                                                                            \
  VSM_VECTOR_CLONES uint32_t bf16x2_##Op(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, \
                                         uint32_t* again) {                                                    \
    return bf16<Op, true>(d, a, b, c, again);                                                                  \
  }
VSM_FAST(Add)
VSM_FAST(Sub)
VSM_FAST(Mul)
VSM_FAST(Fma)
#undef VSM_FAST

void store(uint32_t* d, const Lanes32& result, uint32_t mask) {
  if (mask == ~0u) std::memcpy(d, result, sizeof result);
  else for_lanes(mask, [&](int i) { d[i] = result[i]; });
}

using F32 = void (*)(uint32_t*, const uint32_t*, const uint32_t*, const uint32_t*);
template <F32 kLoop>
void run_f32(Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) Lanes32 result;
  kLoop(result, w.in<uint32_t>(in.op[1]), w.in<uint32_t>(in.op[2]), w.in<uint32_t>(in.op[3]));
  store(w.out<uint32_t>(in.op[0]), result, mask);
}

using Bf16 = uint32_t (*)(uint32_t*, const uint32_t*, const uint32_t*, const uint32_t*, uint32_t*);
template <Bf16 kLoop, bool kPacked>
void run_bf16(Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) Lanes32 result, again;
  const uint32_t *a = w.in<uint32_t>(in.op[1]), *b = w.in<uint32_t>(in.op[2]), *c = w.in<uint32_t>(in.op[3]);
  if (kLoop(result, a, b, c, again)) {
    for (int i = 0; i < kLanes; ++i) {
      if (again[i]) result[i] = exact_bf16(in.form, kPacked, a[i], b[i], c[i]);
    }
  }
  store(w.out<uint32_t>(in.op[0]), result, mask);
}

}  // namespace

Handler fast_float(Type type, FastOp op) {
  const auto index = static_cast<size_t>(op);
  switch (type) {
    case Type::kF32: {
      constexpr Handler kRun[] = {run_f32<f32_Add>, run_f32<f32_Sub>, run_f32<f32_Mul>, run_f32<f32_Fma>};
      return kRun[index];
    }
    case Type::kBF16: {
      constexpr Handler kRun[] = {run_bf16<bf16_Add, false>, run_bf16<bf16_Sub, false>, run_bf16<bf16_Mul, false>,
                                  run_bf16<bf16_Fma, false>};
      return kRun[index];
    }
    case Type::kBF16x2: {
      constexpr Handler kRun[] = {run_bf16<bf16x2_Add, true>, run_bf16<bf16x2_Sub, true>, run_bf16<bf16x2_Mul, true>,
                                  run_bf16<bf16x2_Fma, true>};
      return kRun[index];
    }
    default: return nullptr;
  }
}

}  // namespace vsm::ops
