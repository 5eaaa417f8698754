// SPDX-License-Identifier: Apache-2.0
// Tensor instructions as pure functions on a warp's registers (PTX ISA 9.0, 9.7.14 and 9.7.9 cvt).
//
// A register of a warp is `uint32_t[32]`, one element per lane. Operands with several registers are arrays of
// pointers to such registers: `a[i][lane]`. `d` may alias `c`, never `a` or `b`.
#pragma once

#include <cstdint>
#include <string>

namespace vsm::tensor {

using RegIn = const uint32_t* const*;  // reg[i][lane]
using RegOut = uint32_t* const*;

enum class Type : uint8_t {
  kF16,
  kBF16,
  kTF32,
  kF32,
  kF64,
  kE4M3,
  kE5M2,
  kE3M2,
  kE2M3,
  kE2M1,
  kUE8M0,
  kUE4M3,
  kS8,
  kU8,
  kS4,
  kU4,
  kS32,
  kB1,
  kNone
};

enum class MmaKind : uint8_t { kPlain, kF8F6F4, kMxF8F6F4, kMxF4, kMxF4NvF4 };

struct MmaOp {
  MmaKind kind = MmaKind::kPlain;
  uint8_t m = 16, n = 8, k = 16;
  Type a = Type::kF16, b = Type::kF16, c = Type::kF32, d = Type::kF32;
  Type scale = Type::kNone;      // kUE8M0 / kUE4M3 with .block_scale
  uint8_t scale_vec = 0;         // 1, 2 or 4 with .block_scale
  bool satfinite = false;
};

/// Number of 32-bit registers of each operand; false if the ISA has no such form (or it is not modelled).
bool mma_registers(const MmaOp& op, int* a, int* b, int* c, int* d);

/// Scale operands of a block_scale form: the 32-bit register, and the {byte-id, thread-id} selectors.
struct MmaScale {
  const uint32_t* data = nullptr;  // [32]
  uint16_t byte_id = 0;
  uint16_t thread_id = 0;
};

/// Empty if the selectors are legal for `op`, else why not.
const char* mma_check_scale(const MmaOp& op, const MmaScale& scale_a, const MmaScale& scale_b);

inline constexpr int kMaxAccumulationBits = 30;

/// Fraction bits that `mma` keeps of its sums, by what it multiplies; 0: all, rounded once.
struct AccumulationBits {
  uint8_t bf16 = 0, f16 = 0, tf32 = 0;
  uint8_t f8 = 0;        // e4m3 and e5m2, and kind::f8f6f4
  uint8_t mxf8f6f4 = 0;
  uint8_t mxf4 = 0;      // kind::mxf4nvf4 as well

  int of(const MmaOp& op) const;
  uint8_t largest() const;
  /// One number for all, or "bf16=21,mxf8f6f4=20": those that are named, the others as they are. False if it is neither.
  bool parse(const std::string& text);
};

/// accumulation_bits: the sum's, at most kMaxAccumulationBits (AccumulationBits; mma.cpp has the model).
void mma(const MmaOp& op, RegOut d, RegIn a, RegIn b, RegIn c, const MmaScale& scale_a = {},
         const MmaScale& scale_b = {}, int accumulation_bits = 0);

// --- ldmatrix / stmatrix / movmatrix -----------------------------------------------------------------------------
enum class MatrixShape : uint8_t { kM8N8, kM16N16, kM8N16, kM16N8 };
enum class MatrixType : uint8_t { kB16, kB8, kB8x16_B6x16_P32, kB8x16_B4x16_P64 };

struct MatrixOp {
  MatrixShape shape = MatrixShape::kM8N8;
  MatrixType type = MatrixType::kB16;
  uint8_t num = 1;     // .x1 .x2 .x4
  bool trans = false;
};

/// Registers of the operand; false if the ISA has no such form.
bool ldmatrix_registers(const MatrixOp& op, int* registers);
bool stmatrix_registers(const MatrixOp& op, int* registers);
/// Rows the instruction reads or writes in memory, 16 bytes each at a 16-byte-aligned address; row i's address is
/// given by lane matrix_row_lane(op, i). (stmatrix m16n8.b8: 8 rows a matrix, each a column of the 16x8 matrix.)
int matrix_rows(const MatrixOp& op);
int matrix_row_bytes(const MatrixOp& op);
int matrix_row_lane(const MatrixOp& op, int row);
/// Bytes at the front of a row that matter: 16, but 8 and 12 for b4x16_p64 and b6x16_p32, the rest being padding.
int matrix_row_data_bytes(const MatrixOp& op);
/// `rows` holds matrix_rows(op) rows of matrix_row_bytes(op) bytes, in order.
void ldmatrix(const MatrixOp& op, RegOut d, const uint8_t* rows);
void stmatrix(const MatrixOp& op, RegIn s, uint8_t* rows);
/// movmatrix.sync.aligned.m8n8.trans.b16
void movmatrix_trans(uint32_t* d, const uint32_t* s);

// --- cvt of the narrow formats -----------------------------------------------------------------------------------
enum class Round : uint8_t { kRN, kRZ, kRM, kRP, kRNA, kRS };

/// Whether sm_121a has cvt.<round>{.satfinite}{.relu} from packed pairs of `src` (kF32: two registers) to packed
/// pairs of `dst`, one of the two a narrow format. Stochastic rounding (kRS) is not there. The functions below
/// assume a form that this accepts.
bool cvt_narrow_supported(Type dst, Type src, Round round, bool satfinite, bool relu);

/// cvt.<round>.satfinite{.relu}.<dst>x2.f32 d, hi, lo. kE2M1 gives 8 bits, the others 16.
/// dst: kE4M3 kE5M2 kE2M3 kE3M2 kE2M1 (kRN) and kUE8M0 (kRZ, kRP; satfinite optional).
uint32_t cvt_f32x2_to_narrow(Type dst, Round round, bool satfinite, bool relu, float hi, float lo);
/// Source packed f16x2 (to e4m3x2, e5m2x2) or bf16x2 (to ue8m0x2).
uint32_t cvt_f16x2_to_narrow(Type dst, Type src, Round round, bool satfinite, bool relu, uint32_t packed);
/// cvt.rn{.relu}.f16x2.<src>x2, cvt.rn.bf16x2.ue8m0x2: `dst` kF16 or kBF16.
uint32_t cvt_narrow_to_f16x2(Type src, Type dst, bool relu, uint32_t packed);
/// cvt.<round>{.relu}{.satfinite}.<dst>.f32 of one element: `dst` kF16, kBF16 (16 bits) or kTF32 (32 bits, the
/// low 13 zero). NaN gives the canonical 0x7fff (tf32: 0x7fffe000).
uint32_t cvt_f32_to(Type dst, Round round, bool satfinite, bool relu, float x);
/// One element (not packed) to its exact float32 value; not kF64, kS32. kE2M1: the low four bits.
float to_float(Type type, uint32_t bits);

}  // namespace vsm::tensor
