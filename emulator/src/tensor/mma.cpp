// SPDX-License-Identifier: Apache-2.0
// mma.sync: operand forms, fragments to matrices, the product (PTX ISA 9.0, 9.7.14.3 and 9.7.14.5).
//
// Model of the arithmetic. Every product of two elements (and their block scales) is exact in float64. A row times a
// column is summed in float64 in the order k = 0, 1, ..., then C is added and the result rounded once, to nearest
// even, to the type of D. Whenever the products sum exactly in 53 bits (always for e2m1, e2m3, e3m2 and e4m3 pairs)
// D is therefore the correctly rounded value of the exact C + A*B. Hardware's order and intermediate width are
// unspecified (ISA 9.7.14.5.14): it may differ by a few units in the last place of the largest addend's float32.
// Sums of limited width, as published models of H100 and B200 have them, stand in "sums of limited width" below.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>

#include "../numerics/narrow.h"
#include "tensor.h"
#include "vector_clones.h"

namespace vsm::tensor {
namespace {

constexpr int kLanes = 32, kM = 16, kN = 8, kMaxK = 64;

/// Eight columns of one row.
typedef double Row __attribute__((vector_size(8 * sizeof(double))));
typedef uint64_t Bits __attribute__((vector_size(sizeof(Row))));

struct Tile {
  alignas(64) double a[kM][kMaxK];
  alignas(64) Row b[kMaxK];  // b[k][n]
};

bool is_8bit_float(Type t) { return t == Type::kE4M3 || t == Type::kE5M2; }
bool is_f8f6f4(Type t) { return is_8bit_float(t) || t == Type::kE3M2 || t == Type::kE2M3 || t == Type::kE2M1; }
bool is_int8(Type t) { return t == Type::kS8 || t == Type::kU8; }
bool is_int4(Type t) { return t == Type::kS4 || t == Type::kU4; }
bool is_integer(const MmaOp& op) { return op.d == Type::kS32; }

/// Bits that one element takes in a register; 0 for types that no form has.
int element_bits(const MmaOp& op, Type type) {
  switch (type) {
    case Type::kF16:
    case Type::kBF16: return 16;
    case Type::kTF32: return 32;
    case Type::kE4M3:
    case Type::kE5M2:
    case Type::kE3M2:
    case Type::kE2M3:
    case Type::kS8:
    case Type::kU8: return 8;
    case Type::kE2M1: return op.kind == MmaKind::kMxF4 || op.kind == MmaKind::kMxF4NvF4 ? 4 : 8;
    case Type::kS4:
    case Type::kU4: return 4;
    default: return 0;
  }
}

bool plain_form(const MmaOp& op) {
  const bool half_or_float = op.d == Type::kF16 || op.d == Type::kF32;
  if (op.a == Type::kF16) return op.b == Type::kF16 && half_or_float && (op.k == 8 || op.k == 16);
  if (op.a == Type::kBF16) return op.b == Type::kBF16 && op.d == Type::kF32 && (op.k == 8 || op.k == 16);
  if (op.a == Type::kTF32) return op.b == Type::kTF32 && op.d == Type::kF32 && (op.k == 4 || op.k == 8);
  if (is_8bit_float(op.a)) return is_8bit_float(op.b) && half_or_float && (op.k == 16 || op.k == 32);
  if (is_int8(op.a)) return is_int8(op.b) && op.d == Type::kS32 && (op.k == 16 || op.k == 32);
  if (is_int4(op.a)) return is_int4(op.b) && op.d == Type::kS32 && (op.k == 32 || op.k == 64);
  return false;
}

bool form_exists(const MmaOp& op) {
  if (op.m != kM || op.n != kN || op.c != op.d) return false;
  if (op.satfinite && !is_integer(op)) return false;
  const bool scaled = op.kind != MmaKind::kPlain && op.kind != MmaKind::kF8F6F4;
  if (!scaled && (op.scale != Type::kNone || op.scale_vec != 0)) return false;
  if (scaled && op.d != Type::kF32) return false;
  switch (op.kind) {
    case MmaKind::kPlain: return plain_form(op);
    case MmaKind::kF8F6F4:
      return op.k == 32 && is_f8f6f4(op.a) && is_f8f6f4(op.b) && (op.d == Type::kF16 || op.d == Type::kF32);
    case MmaKind::kMxF8F6F4:
      return op.k == 32 && is_f8f6f4(op.a) && is_f8f6f4(op.b) && op.scale == Type::kUE8M0 && op.scale_vec == 1;
    case MmaKind::kMxF4:
      return op.k == 64 && op.a == Type::kE2M1 && op.b == Type::kE2M1 && op.scale == Type::kUE8M0 && op.scale_vec == 2;
    case MmaKind::kMxF4NvF4:
      return op.k == 64 && op.a == Type::kE2M1 && op.b == Type::kE2M1 &&
             ((op.scale == Type::kUE8M0 && op.scale_vec == 2) || (op.scale == Type::kUE4M3 && op.scale_vec == 4));
  }
  return false;
}

// --- fragments to matrices -----------------------------------------------------------------------------------------
// All forms place elements alike (9.7.14.5.7 to .11). With E elements in a 32-bit register, lane = 4*group + thread:
//   A, register r, element i: row group + 8*(r & 1), column E*thread + i + 4*E*(r >> 1)
//   B, register r, element i: row E*thread + i + 4*E*r, column group
//   C, element i:             row group + 8*(i >> 1), column 2*thread + (i & 1)

struct FromTable {
  const double* values;
  double operator()(uint32_t code) const { return values[code & 0xffu]; }
};
struct FromHalf {
  double operator()(uint32_t bits) const { return half_to_float(static_cast<uint16_t>(bits)); }
};
struct FromBfloat {
  double operator()(uint32_t bits) const { return bfloat_to_float(static_cast<uint16_t>(bits)); }
};
/// The tensor cores take the upper 19 bits of a tf32 register.
struct FromTf32 {
  double operator()(uint32_t bits) const { return bits_to_float(bits & ~0x1fffu); }
};
struct FromS8 {
  double operator()(uint32_t bits) const { return static_cast<int8_t>(bits); }
};
struct FromU8 {
  double operator()(uint32_t bits) const { return static_cast<uint8_t>(bits); }
};
struct FromS4 {
  double operator()(uint32_t bits) const { return static_cast<int8_t>(bits << 4) >> 4; }
};
struct FromU4 {
  double operator()(uint32_t bits) const { return bits & 0xfu; }
};

// So a register is an 8 x 4E matrix, row after row, in the memory that holds its lanes: of A as it is, of B transposed.

constexpr int kMostElements = 8 * kLanes;  // of a register: 4 bits each

template <int kBits, class Decode>
void decode_codes(Decode decode, const uint32_t* lanes, double* out) {
  constexpr uint32_t kMask = kBits == 32 ? ~0u : (1u << (kBits % 32)) - 1u;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 32 / kBits; ++i) *out++ = decode((lanes[lane] >> (i * kBits % 32)) & kMask);
  }
}

VSM_VECTOR_CLONES
void decode_bfloats(const uint32_t* lanes, double* out) {
  uint16_t codes[2 * kLanes];
  std::memcpy(codes, lanes, sizeof codes);
  for (int i = 0; i < 2 * kLanes; ++i) out[i] = bits_to_float(static_cast<uint32_t>(codes[i]) << 16);
}

VSM_VECTOR_CLONES
void decode_bytes(const double* values, const uint32_t* lanes, double* out) {
  uint8_t codes[4 * kLanes];
  std::memcpy(codes, lanes, sizeof codes);
  for (int i = 0; i < 4 * kLanes; ++i) out[i] = values[codes[i]];
}

template <int kColumns>
void transpose(const double* elements, Row* out) {
  for (int k = 0; k < kColumns; ++k) {
    Row row;
    for (int n = 0; n < kN; ++n) row[n] = elements[kColumns * n + k];
    out[k] = row;
  }
}

template <int kBits, class Decode>
void decode_as(bool is_a, Decode decode, RegIn reg, int registers, Tile& tile) {
  constexpr int kColumns = 4 * (32 / kBits);
  alignas(64) double elements[kMostElements];
  for (int r = 0; r < registers; ++r) {
    if constexpr (std::is_same_v<Decode, FromBfloat>) decode_bfloats(reg[r], elements);
    else if constexpr (std::is_same_v<Decode, FromTable> && kBits == 8) decode_bytes(decode.values, reg[r], elements);
    else decode_codes<kBits>(decode, reg[r], elements);
    for (int i = 0; i < 8 && is_a; ++i)
      std::memcpy(&tile.a[8 * (r & 1) + i][kColumns * (r >> 1)], elements + kColumns * i, kColumns * sizeof(double));
    if (!is_a) transpose<kColumns>(elements, &tile.b[kColumns * r]);
  }
}

void decode_operand(const MmaOp& op, bool is_a, RegIn reg, int registers, Tile& tile) {
  const Type type = is_a ? op.a : op.b;
  switch (type) {
    case Type::kF16: return decode_as<16>(is_a, FromHalf{}, reg, registers, tile);
    case Type::kBF16: return decode_as<16>(is_a, FromBfloat{}, reg, registers, tile);
    case Type::kTF32: return decode_as<32>(is_a, FromTf32{}, reg, registers, tile);
    case Type::kE4M3: return decode_as<8>(is_a, FromTable{numerics::kE4M3Values.data()}, reg, registers, tile);
    case Type::kE5M2: return decode_as<8>(is_a, FromTable{numerics::kE5M2Values.data()}, reg, registers, tile);
    case Type::kE3M2: return decode_as<8>(is_a, FromTable{numerics::kE3M2Values.data()}, reg, registers, tile);
    case Type::kE2M3: return decode_as<8>(is_a, FromTable{numerics::kE2M3Values.data()}, reg, registers, tile);
    case Type::kE2M1:
      if (element_bits(op, type) == 4)
        return decode_as<4>(is_a, FromTable{numerics::kE2M1Values.data()}, reg, registers, tile);
      return decode_as<8>(is_a, FromTable{numerics::kE2M1ContainerValues.data()}, reg, registers, tile);
    case Type::kS8: return decode_as<8>(is_a, FromS8{}, reg, registers, tile);
    case Type::kU8: return decode_as<8>(is_a, FromU8{}, reg, registers, tile);
    case Type::kS4: return decode_as<4>(is_a, FromS4{}, reg, registers, tile);
    case Type::kU4: return decode_as<4>(is_a, FromU4{}, reg, registers, tile);
    default: assert(!"no such operand type");
  }
}

// --- block scales (9.7.14.3) ---------------------------------------------------------------------------------------
// scale_A of row m: lane 4*(m % 8) + 2*thread_id + m / 8, that is, the pair of lanes that thread_id picks of the quad
// whose first and third A registers hold row m. scale_B of column n: lane 4*n + thread_id. Chunk j of scale_vec is
// byte byte_id + j of that lane's register.

double scale_value(const MmaOp& op, const MmaScale& scale, int lane, int chunk) {
  const uint32_t byte = (scale.data[lane] >> (8 * (scale.byte_id + chunk))) & 0xffu;
  return op.scale == Type::kUE8M0 ? numerics::kUE8M0Values[byte] : numerics::kUE4M3Values[byte];
}

/// Multiplies the decoded elements by their scales: exact in float64 for every form.
void apply_scales(const MmaOp& op, const MmaScale& scale_a, const MmaScale& scale_b, Tile& tile) {
  const int chunk_size = op.k / op.scale_vec;
  for (int chunk = 0; chunk < op.scale_vec; ++chunk) {
    for (int m = 0; m < kM; ++m) {
      const double factor = scale_value(op, scale_a, 4 * (m % 8) + 2 * scale_a.thread_id + m / 8, chunk);
      for (int k = 0; k < chunk_size; ++k) tile.a[m][chunk * chunk_size + k] *= factor;
    }
    Row factors;
    for (int n = 0; n < kN; ++n) factors[n] = scale_value(op, scale_b, 4 * n + scale_b.thread_id, chunk);
    for (int k = 0; k < chunk_size; ++k) tile.b[chunk * chunk_size + k] *= factors;
  }
}

// --- sums of limited width -----------------------------------------------------------------------------------------
// F. A. Khattak, M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), whose models agree bit for bit
// with the GPUs that they ran on. A step takes some products and C. All of them are aligned to the largest exponent E
// among them, the exponent of a product being the sum of its factors' (so that its significand lies below 4); what then
// lies below 2^(E - F) is cut off, F being the width. The rest is added exactly, and the sum cut to the significand of
// float32, or to F fraction bits if these are fewer. What D of one step is, is C of the next.
//
// No such model is published for block scales. Here a scale's exponent counts as part of its elements'.

/// 2^e of each element of a tile, e being its exponent as it is encoded: that of a subnormal number is its format's least
/// one. 0 where the element is 0. With block scales, times 2^e of these.
struct Powers {
  alignas(64) double a[kM][kMaxK];
  alignas(64) Row b[kMaxK];
};

int least_exponent(Type type) {
  switch (type) {
    case Type::kF16:
    case Type::kE5M2: return -14;
    case Type::kE4M3:
    case Type::kUE4M3: return -6;
    case Type::kE3M2: return -2;
    case Type::kE2M3:
    case Type::kE2M1: return 0;
    case Type::kUE8M0: return -127;
    default: return -126;  // bf16, tf32
  }
}

/// 2^exponent, which must be that of a normal float64.
double power_of_two(int exponent) { return bits_to_double(static_cast<uint64_t>(exponent + 1023) << 52); }

/// Of a finite value, none of a subnormal float64; 0 of 0.
double power_below(double value, double least) {
  const double power = bits_to_double(double_to_bits(value) & (uint64_t{0x7ff} << 52));
  return value == 0 ? 0.0 : std::max(power, least);
}

/// Before the scales are applied.
void element_powers(const MmaOp& op, const Tile& tile, Powers& powers) {
  const double least_a = power_of_two(least_exponent(op.a)), least_b = power_of_two(least_exponent(op.b));
  for (int m = 0; m < kM; ++m)
    for (int k = 0; k < op.k; ++k) powers.a[m][k] = power_below(tile.a[m][k], least_a);
  for (int k = 0; k < op.k; ++k)
    for (int n = 0; n < kN; ++n) powers.b[k][n] = power_below(tile.b[k][n], least_b);
}

void apply_scale_powers(const MmaOp& op, const MmaScale& scale_a, const MmaScale& scale_b, Powers& powers) {
  const double least = power_of_two(least_exponent(op.scale));
  for (int k = 0; k < op.k; ++k) {
    const int chunk = k / (op.k / op.scale_vec);
    for (int m = 0; m < kM; ++m)
      powers.a[m][k] *=
          power_below(scale_value(op, scale_a, 4 * (m % 8) + 2 * scale_a.thread_id + m / 8, chunk), least);
    for (int n = 0; n < kN; ++n)
      powers.b[k][n] *= power_below(scale_value(op, scale_b, 4 * n + scale_b.thread_id, chunk), least);
  }
}

constexpr int kFloatFraction = 23;
constexpr double kLeastAlignment = 0x1p-133;  // E is not below this exponent in the published models

/// Products that a step adds to C.
int step_products(const MmaOp& op) { return op.a == Type::kTF32 ? 8 : element_bits(op, op.a) == 16 ? 16 : 32; }

constexpr int kRows = 4;  // taken together: enough independent sums to hide an addition's latency

// By reference: how a function takes a vector depends on the machine that it is compiled for.
inline __attribute__((always_inline)) void raise_to(Row& a, const Row& least) { a = a < least ? least : a; }
inline __attribute__((always_inline)) void truncate(Row& a) {
  for (int n = 0; n < kN; ++n) a[n] = std::trunc(a[n]);
}
/// power_below of each value, with float32's least exponent for a subnormal one and `of_zero` for 0.
inline __attribute__((always_inline)) void take_float_power(Row& a, double of_zero) {
  const Row none = {};
  Row power = (Row)((Bits)a & (uint64_t{0x7ff} << 52));
  raise_to(power, none + 0x1p-126);
  a = a == 0.0 ? none + of_zero : power;
}

/// sums[r] += the products `begin` to `end` along K of row r of A and the columns of B, cut to `width` bits; and to
/// `fraction` bits of the sum, unless that is 0. Of kRows rows.
VSM_VECTOR_CLONES
void add_step(const double (*a)[kMaxK], const double (*a_powers)[kMaxK], const Row* b, const Row* b_powers, int begin,
              int end, int width, int fraction, Row* sums) {
  const Row none = {};
  Row largest[kRows], all[kRows], up[kRows], aligned[kRows];
  for (int r = 0; r < kRows; ++r) {
    largest[r] = all[r] = sums[r];
    take_float_power(largest[r], kLeastAlignment);
  }
  for (int k = begin; k < end; ++k) {
    for (int r = 0; r < kRows; ++r) {
      raise_to(largest[r], a_powers[r][k] * b_powers[k]);
      all[r] += a[r][k] * b[k];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    raise_to(largest[r], none + kLeastAlignment);
    up[r] = power_of_two(width) / largest[r];
    aligned[r] = sums[r] * up[r];
    truncate(aligned[r]);
    aligned[r] += 0.0;  // not -0
  }
  for (int k = begin; k < end; ++k) {
    for (int r = 0; r < kRows; ++r) {
      Row product = a[r][k] * b[k] * up[r];
      truncate(product);
      aligned[r] += product;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    Row sum = aligned[r] / up[r];
    if (fraction) {
      Row unit = sum;
      take_float_power(unit, 0x1p-126);
      unit /= power_of_two(fraction);
      sum /= unit;
      truncate(sum);
      sum *= unit;
    }
    // Infinity and NaN are as they come: nothing of them is cut.
    const Row infinite = all[r] - all[r];
    const Row limited = sum >= 0x1p128 ? none + HUGE_VAL : sum <= -0x1p128 ? none - HUGE_VAL : sum;
    sums[r] = infinite != 0.0 ? all[r] : limited;
  }
}

/// sums += A B, step by step.
void multiply_limited(const MmaOp& op, const Tile& tile, const Powers& powers, int width, Row* sums) {
  const int products = std::min<int>(op.k, step_products(op));
  const int fraction = op.d == Type::kF32 ? std::min(width, kFloatFraction) : 0;
  for (int m = 0; m < kM; m += kRows)
    for (int k = 0; k < op.k; k += products)
      add_step(&tile.a[m], &powers.a[m], tile.b, powers.b, k, k + products, width, fraction, &sums[m]);
}

// --- product -------------------------------------------------------------------------------------------------------
VSM_VECTOR_CLONES
void multiply(const double (*a)[kMaxK], const Row* b, int depth, Row* product) {
  for (int m = 0; m < kM; m += kRows) {
    Row s0{}, s1{}, s2{}, s3{};
    for (int k = 0; k < depth; ++k) {
      s0 += a[m][k] * b[k];
      s1 += a[m + 1][k] * b[k];
      s2 += a[m + 2][k] * b[k];
      s3 += a[m + 3][k] * b[k];
    }
    product[m] = s0, product[m + 1] = s1, product[m + 2] = s2, product[m + 3] = s3;
  }
}

/// products[m] += addends[m], rounded to odd: rounding once more, to at most 51 bits, then gives the correctly
/// rounded sum.
VSM_VECTOR_CLONES
void add_round_to_odd(Row* products, const Row* addends) {
  for (int m = 0; m < kM; ++m) {
    const Row x = products[m], y = addends[m];
    const Row sum = x + y;
    const Row y_part = sum - x;
    const Row rest = (x - (sum - y_part)) + (y - y_part);  // exact (Knuth); NaN where `sum` is not finite
    // In integers, for compilers make a poor job of vector comparisons. Each of these is 0 or 1 in a lane.
    Bits bits, rest_bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    std::memcpy(&rest_bits, &rest, sizeof(rest_bits));
    const Bits magnitude = rest_bits & (~uint64_t{0} >> 1);
    const Bits inexact = (magnitude | (0 - magnitude)) >> 63;
    const Bits even = (bits & 1) ^ 1;
    const Bits finite = ((((bits >> 52) & 0x7ff) + 1) >> 11) ^ 1;
    const Bits inward = (rest_bits ^ bits) >> 63;
    // Where `sum` is even and inexact, its odd neighbour on the side of `rest` lies one away from or toward zero.
    const Bits move = inexact & even & finite;
    bits += move - ((move & inward) << 1);
    std::memcpy(&products[m], &bits, sizeof(bits));
  }
}

/// float64 to float16, one rounding to nearest even; `x` must be exact or come from add_round_to_odd.
uint32_t double_to_half(double x) {
  // Through float32 by rounding to odd, whose 24 bits exceed twice float16's 11.
  float f = static_cast<float>(x);
  const double back = f;
  if (back != x && back == back) {
    uint32_t bits = float_to_bits(f);
    const bool away = x > 0 ? back > x : back < x;
    if (away) --bits;
    f = bits_to_float(bits | 1u);
  }
  return float_to_half(f);
}

uint32_t float_result(float f) { return f != f ? 0x7fffffffu : float_to_bits(f); }

int32_t integer_result(bool satfinite, int32_t c, double product) {
  const int64_t sum = static_cast<int64_t>(c) + static_cast<int64_t>(product);
  if (satfinite) return static_cast<int32_t>(sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum);
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(sum)));
}

// Two registers of C or D are an 8 x 8 matrix, the first one its even columns.
VSM_VECTOR_CLONES
void interleave_f32(const uint32_t* even, const uint32_t* odd, double* out) {
  for (int i = 0; i < kLanes; ++i) {
    out[2 * i] = bits_to_float(even[i]);
    out[2 * i + 1] = bits_to_float(odd[i]);
  }
}
VSM_VECTOR_CLONES
void separate_f32(const double* in, uint32_t* even, uint32_t* odd) {
  for (int i = 0; i < kLanes; ++i) {
    even[i] = float_result(static_cast<float>(in[2 * i]));
    odd[i] = float_result(static_cast<float>(in[2 * i + 1]));
  }
}

void load_f32(RegIn c, Row* addends) {
  double flat[8 * kN];
  for (int half = 0; half < 2; ++half) {
    interleave_f32(c[2 * half], c[2 * half + 1], flat);
    std::memcpy(&addends[8 * half], flat, sizeof flat);
  }
}

void store_f32(const Row* product, RegOut d) {
  double flat[8 * kN];
  for (int half = 0; half < 2; ++half) {
    std::memcpy(flat, &product[8 * half], sizeof flat);
    separate_f32(flat, d[2 * half], d[2 * half + 1]);
  }
}

void load_f16(RegIn c, Row* addends) {
  for (int r = 0; r < 2; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) {
      Row& row = addends[lane / 4 + 8 * r];
      row[2 * (lane % 4)] = half_to_float(static_cast<uint16_t>(c[r][lane]));
      row[2 * (lane % 4) + 1] = half_to_float(static_cast<uint16_t>(c[r][lane] >> 16));
    }
  }
}

void store_f16(const Row* product, RegOut d) {
  for (int r = 0; r < 2; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Row& row = product[lane / 4 + 8 * r];
      const int column = 2 * (lane % 4);
      d[r][lane] = double_to_half(row[column + 1]) << 16 | double_to_half(row[column]);
    }
  }
}

void store_s32(bool satfinite, const Row* product, RegIn c, RegOut d) {
  for (int r = 0; r < 4; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double sum = product[lane / 4 + 8 * (r >> 1)][2 * (lane % 4) + (r & 1)];
      d[r][lane] = static_cast<uint32_t>(integer_result(satfinite, static_cast<int32_t>(c[r][lane]), sum));
    }
  }
}

}  // namespace

bool mma_registers(const MmaOp& op, int* a, int* b, int* c, int* d) {
  if (!form_exists(op)) return false;
  const int bits = element_bits(op, op.a);
  *a = kM * op.k * bits / (32 * kLanes);
  *b = kN * op.k * bits / (32 * kLanes);
  *c = *d = op.d == Type::kF16 ? 2 : 4;
  return true;
}

const char* mma_check_scale(const MmaOp& op, const MmaScale& scale_a, const MmaScale& scale_b) {
  const MmaScale* const scales[2] = {&scale_a, &scale_b};
  for (const MmaScale* s : scales) {
    if (op.scale_vec == 1 && s->byte_id > 3) return "a byte-id must be 0, 1, 2 or 3 with .scale_vec::1X";
    if (op.scale_vec == 2 && s->byte_id != 0 && s->byte_id != 2) return "a byte-id must be 0 or 2 with .scale_vec::2X";
    if (op.scale_vec == 4 && s->byte_id != 0) return "a byte-id must be 0 with .scale_vec::4X";
  }
  if (scale_a.thread_id > 1) return "thread-id-a must be 0 or 1";
  if (scale_b.thread_id > 3) return "thread-id-b must be 0, 1, 2 or 3";
  return "";
}

int AccumulationBits::of(const MmaOp& op) const {
  switch (op.kind) {
    case MmaKind::kMxF8F6F4: return mxf8f6f4;
    case MmaKind::kMxF4:
    case MmaKind::kMxF4NvF4: return mxf4;
    case MmaKind::kF8F6F4: return f8;
    case MmaKind::kPlain: break;
  }
  switch (op.a) {
    case Type::kBF16: return bf16;
    case Type::kF16: return f16;
    case Type::kTF32: return tf32;
    default: return f8;
  }
}

bool AccumulationBits::parse(const std::string& text) {
  const std::pair<const char*, uint8_t*> kinds[] = {{"bf16", &bf16}, {"f16", &f16},           {"tf32", &tf32},
                                                    {"f8", &f8},     {"mxf8f6f4", &mxf8f6f4}, {"mxf4", &mxf4}};
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    const std::string kind = equals == std::string::npos ? "" : part.substr(0, equals);
    const std::string number = equals == std::string::npos ? part : part.substr(equals + 1);
    if (number.empty() || number.size() > 2 || number.find_first_not_of("0123456789") != std::string::npos)
      return false;
    const int bits = std::stoi(number);
    bool found = false;
    for (const auto& [name, value] : kinds) {
      if (!kind.empty() && kind != name) continue;
      *value = static_cast<uint8_t>(bits);
      found = true;
    }
    if (!found || bits > kMaxAccumulationBits) return false;
  }
  return true;
}

uint8_t AccumulationBits::largest() const { return std::max({bf16, f16, tf32, f8, mxf8f6f4, mxf4}); }

void mma(const MmaOp& op, RegOut d, RegIn a, RegIn b, RegIn c, const MmaScale& scale_a, const MmaScale& scale_b,
         int accumulation_bits) {
  int registers_a = 0, registers_b = 0, registers_c = 0, registers_d = 0;
  const bool known = mma_registers(op, &registers_a, &registers_b, &registers_c, &registers_d);
  assert(known && "mma_registers() refuses this form");
  if (!known) return;
  Tile tile;
  decode_operand(op, true, a, registers_a, tile);
  decode_operand(op, false, b, registers_b, tile);
  const bool limited = accumulation_bits != 0 && !is_integer(op);
  Powers powers;
  if (limited) element_powers(op, tile, powers);
  // One scale for all of K is a power of two, and may as well multiply the sums.
  const bool scale_sums = op.scale_vec == 1 && !limited;
  if (op.scale_vec && !scale_sums) apply_scales(op, scale_a, scale_b, tile);
  Row product[kM];
  if (limited) {
    if (op.scale_vec) apply_scale_powers(op, scale_a, scale_b, powers);
    op.d == Type::kF32 ? load_f32(c, product) : load_f16(c, product);
    multiply_limited(op, tile, powers, accumulation_bits, product);
    return op.d == Type::kF32 ? store_f32(product, d) : store_f16(product, d);
  }
  multiply(tile.a, tile.b, op.k, product);
  if (scale_sums) {
    Row factors;
    for (int n = 0; n < kN; ++n) factors[n] = scale_value(op, scale_b, 4 * n + scale_b.thread_id, 0);
    for (int m = 0; m < kM; ++m)
      product[m] = product[m] * factors * scale_value(op, scale_a, 4 * (m % 8) + 2 * scale_a.thread_id + m / 8, 0);
  }
  Row addends[kM];
  switch (op.d) {
    case Type::kF32:
      load_f32(c, addends);
      add_round_to_odd(product, addends);
      return store_f32(product, d);
    case Type::kF16:
      load_f16(c, addends);
      add_round_to_odd(product, addends);
      return store_f16(product, d);
    default: return store_s32(op.satfinite, product, c, d);
  }
}

}  // namespace vsm::tensor
