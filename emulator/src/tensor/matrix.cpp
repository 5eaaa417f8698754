// SPDX-License-Identifier: Apache-2.0
// ldmatrix, stmatrix, movmatrix: which byte of memory goes to which lane (PTX ISA 9.0, 9.7.14.5.15 to .17).
//
// A matrix is read or written as rows of 16 bytes, each at the address that one lane gives. Matrix j's rows are
// those of lanes j*R .. j*R + R-1, R = 8 (16 for m16n16, whose x1 and x2 forms so use 16 and 32 addresses).
#include <cassert>
#include <cstring>

#include "tensor.h"

namespace vsm::tensor {
namespace {

constexpr int kLanes = 32, kRowBytes = 16;

bool valid_count(const MatrixOp& op) { return op.num == 1 || op.num == 2 || op.num == 4; }

bool packed_sub_byte(MatrixType type) {
  return type == MatrixType::kB8x16_B6x16_P32 || type == MatrixType::kB8x16_B4x16_P64;
}

int rows_per_matrix(const MatrixOp& op) { return op.shape == MatrixShape::kM16N16 ? 16 : 8; }

/// Element `column` of a row of 8-bit elements, or of packed ones, which ldmatrix widens with zeros.
uint32_t row_element(MatrixType type, const uint8_t* row, int column) {
  if (type == MatrixType::kB8) return row[column];
  const int bits = type == MatrixType::kB8x16_B6x16_P32 ? 6 : 4;
  const int first = column * bits;
  const uint32_t pair = row[first / 8] | static_cast<uint32_t>(row[first / 8 + 1]) << 8;  // never past byte 12
  return (pair >> (first % 8)) & ((1u << bits) - 1u);
}

uint32_t load_u16(const uint8_t* p) { return p[0] | static_cast<uint32_t>(p[1]) << 8; }
void store_u16(uint8_t* p, uint32_t value) {
  p[0] = static_cast<uint8_t>(value);
  p[1] = static_cast<uint8_t>(value >> 8);
}

}  // namespace

bool ldmatrix_registers(const MatrixOp& op, int* registers) {
  if (!valid_count(op)) return false;
  switch (op.shape) {
    case MatrixShape::kM8N8:
      if (op.type != MatrixType::kB16) return false;
      *registers = op.num;
      return true;
    case MatrixShape::kM8N16:
      if (!packed_sub_byte(op.type) || op.trans) return false;
      *registers = op.num;
      return true;
    case MatrixShape::kM16N16:
      if (op.type == MatrixType::kB16 || !op.trans || op.num > 2) return false;
      *registers = 2 * op.num;
      return true;
    case MatrixShape::kM16N8: return false;
  }
  return false;
}

bool stmatrix_registers(const MatrixOp& op, int* registers) {
  if (!valid_count(op)) return false;
  const bool halves = op.shape == MatrixShape::kM8N8 && op.type == MatrixType::kB16;
  const bool bytes = op.shape == MatrixShape::kM16N8 && op.type == MatrixType::kB8 && op.trans;
  if (!halves && !bytes) return false;
  *registers = op.num;
  return true;
}

int matrix_rows(const MatrixOp& op) { return rows_per_matrix(op) * op.num; }
int matrix_row_bytes(const MatrixOp&) { return kRowBytes; }
int matrix_row_lane(const MatrixOp&, int row) { return row; }

int matrix_row_data_bytes(const MatrixOp& op) {
  switch (op.type) {
    case MatrixType::kB8x16_B6x16_P32: return 12;
    case MatrixType::kB8x16_B4x16_P64: return 8;
    default: return kRowBytes;
  }
}

void ldmatrix(const MatrixOp& op, RegOut d, const uint8_t* rows) {
  const auto row = [&](int matrix, int r) { return rows + kRowBytes * (matrix * rows_per_matrix(op) + r); };
  for (int matrix = 0; matrix < op.num; ++matrix) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane / 4, thread = lane % 4;
      if (op.shape == MatrixShape::kM8N8) {
        // Two neighbours of a row; with .trans, of a column.
        const uint32_t lo =
            op.trans ? load_u16(row(matrix, 2 * thread) + 2 * group) : load_u16(row(matrix, group) + 4 * thread);
        const uint32_t hi = op.trans ? load_u16(row(matrix, 2 * thread + 1) + 2 * group)
                                     : load_u16(row(matrix, group) + 4 * thread + 2);
        d[matrix][lane] = hi << 16 | lo;
      } else if (op.shape == MatrixShape::kM8N16) {
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) word |= row_element(op.type, row(matrix, group), 4 * thread + i) << (8 * i);
        d[matrix][lane] = word;
      } else {
        // Transposed: four neighbours of column `group` in the first register, of column `group + 8` in the second.
        for (int half = 0; half < 2; ++half) {
          uint32_t word = 0;
          for (int i = 0; i < 4; ++i)
            word |= row_element(op.type, row(matrix, 4 * thread + i), group + 8 * half) << (8 * i);
          d[2 * matrix + half][lane] = word;
        }
      }
    }
  }
}

void stmatrix(const MatrixOp& op, RegIn s, uint8_t* rows) {
  for (int matrix = 0; matrix < op.num; ++matrix) {
    uint8_t* const base = rows + kRowBytes * 8 * matrix;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane / 4, thread = lane % 4;
      const uint32_t word = s[matrix][lane];
      if (op.shape == MatrixShape::kM16N8) {
        // A row of memory is a column of the 16x8 matrix; elements 0, 1 are columns 2*thread, +1 of row `group`,
        // elements 2, 3 those of row `group + 8`.
        for (int i = 0; i < 4; ++i) {
          base[kRowBytes * (2 * thread + (i & 1)) + group + 8 * (i >> 1)] = static_cast<uint8_t>(word >> (8 * i));
        }
        continue;
      }
      for (int i = 0; i < 2; ++i) {
        const int r = op.trans ? 2 * thread + i : group, column = op.trans ? group : 2 * thread + i;
        store_u16(base + kRowBytes * r + 2 * column, word >> (16 * i));
      }
    }
  }
}

void movmatrix_trans(uint32_t* d, const uint32_t* s) {
  uint32_t result[kLanes];  // `d` may be `s`
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane / 4;
    result[lane] = 0;
    for (int i = 0; i < 2; ++i) {
      const int column = 2 * (lane % 4) + i;
      // Element (column, row) of the source: lane 4*column + row/2, half row%2.
      result[lane] |= ((s[4 * column + row / 2] >> (16 * (row % 2))) & 0xffffu) << (16 * i);
    }
  }
  std::memcpy(d, result, sizeof(result));
}

}  // namespace vsm::tensor
