// SPDX-License-Identifier: Apache-2.0
// A C face of src/tensor and src/tma for the tests (pure_functions.py).
#include <cstdio>
#include <cstring>
#include <vector>

#include "tensor/tensor.h"
#include "tma/tma.h"

using namespace vsm;

namespace {

constexpr int kLanes = 32;

/// Pointers to the registers of an operand laid out [registers][32].
struct Registers {
  uint32_t* pointers[8];
  Registers(const uint32_t* data, int count) {
    for (int i = 0; i < count; ++i) pointers[i] = const_cast<uint32_t*>(data) + kLanes * i;
  }
  operator tensor::RegIn() const { return pointers; }
  tensor::RegOut out() const { return pointers; }
};

/// kind, k, a, b, c, d, scale, scale_vec, satfinite
tensor::MmaOp mma_op(const int32_t* f) {
  tensor::MmaOp op;
  op.kind = static_cast<tensor::MmaKind>(f[0]);
  op.k = static_cast<uint8_t>(f[1]);
  op.a = static_cast<tensor::Type>(f[2]);
  op.b = static_cast<tensor::Type>(f[3]);
  op.c = static_cast<tensor::Type>(f[4]);
  op.d = static_cast<tensor::Type>(f[5]);
  op.scale = static_cast<tensor::Type>(f[6]);
  op.scale_vec = static_cast<uint8_t>(f[7]);
  op.satfinite = f[8] != 0;
  return op;
}

/// shape, type, num, trans
tensor::MatrixOp matrix_op(const int32_t* f) {
  tensor::MatrixOp op;
  op.shape = static_cast<tensor::MatrixShape>(f[0]);
  op.type = static_cast<tensor::MatrixType>(f[1]);
  op.num = static_cast<uint8_t>(f[2]);
  op.trans = f[3] != 0;
  return op;
}

/// address, rank, type, interleave, swizzle, fill, promotion, dims[5], strides[4], box[5], element_strides[5]
tma::Descriptor descriptor(const uint64_t* f) {
  tma::Descriptor d;
  d.address = f[0];
  d.rank = static_cast<uint32_t>(f[1]);
  d.type = static_cast<tma::ElementType>(f[2]);
  d.interleave = static_cast<tma::Interleave>(f[3]);
  d.swizzle = static_cast<tma::Swizzle>(f[4]);
  d.fill = static_cast<tma::Fill>(f[5]);
  d.l2_promotion = static_cast<uint8_t>(f[6]);
  for (int i = 0; i < 5; ++i) d.dims[i] = f[7 + i];
  for (int i = 0; i < 4; ++i) d.strides[i] = f[12 + i];
  for (int i = 0; i < 5; ++i) d.box[i] = static_cast<uint32_t>(f[16 + i]);
  for (int i = 0; i < 5; ++i) d.element_strides[i] = static_cast<uint32_t>(f[21 + i]);
  return d;
}

void flatten(const tma::Descriptor& d, uint64_t* f) {
  f[0] = d.address, f[1] = d.rank, f[2] = static_cast<uint64_t>(d.type), f[3] = static_cast<uint64_t>(d.interleave);
  f[4] = static_cast<uint64_t>(d.swizzle), f[5] = static_cast<uint64_t>(d.fill), f[6] = d.l2_promotion;
  for (int i = 0; i < 5; ++i) f[7 + i] = d.dims[i], f[16 + i] = d.box[i], f[21 + i] = d.element_strides[i];
  for (int i = 0; i < 4; ++i) f[12 + i] = d.strides[i];
}

void copy_text(const std::string& text, char* out, int size) {
  std::snprintf(out, static_cast<size_t>(size), "%s", text.c_str());
}

}  // namespace

extern "C" {

int test_mma_registers(const int32_t* form, int* counts) {
  return tensor::mma_registers(mma_op(form), &counts[0], &counts[1], &counts[2], &counts[3]);
}

const char* test_mma_check_scale(const int32_t* form, const uint16_t* ids) {
  return tensor::mma_check_scale(mma_op(form), {nullptr, ids[0], ids[1]}, {nullptr, ids[2], ids[3]});
}

/// `d` may be `c`. ids: byte-id-a, thread-id-a, byte-id-b, thread-id-b.
void test_mma(const int32_t* form, uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c,
              const uint32_t* scale_a, const uint32_t* scale_b, const uint16_t* ids, int accumulation_bits) {
  int counts[4];
  if (!test_mma_registers(form, counts)) return;
  tensor::mma(mma_op(form), Registers(d, counts[3]).out(), Registers(a, counts[0]), Registers(b, counts[1]),
              Registers(c, counts[2]), {scale_a, ids[0], ids[1]}, {scale_b, ids[2], ids[3]}, accumulation_bits);
}

int test_matrix_registers(const int32_t* form, int store) {
  int count = 0;
  const bool known =
      store ? tensor::stmatrix_registers(matrix_op(form), &count) : tensor::ldmatrix_registers(matrix_op(form), &count);
  return known ? count : 0;
}
/// rows, bytes a row, bytes that matter, then the lane of each row
void test_matrix_rows(const int32_t* form, int* out) {
  const tensor::MatrixOp op = matrix_op(form);
  out[0] = tensor::matrix_rows(op), out[1] = tensor::matrix_row_bytes(op), out[2] = tensor::matrix_row_data_bytes(op);
  for (int i = 0; i < out[0]; ++i) out[3 + i] = tensor::matrix_row_lane(op, i);
}
void test_ldmatrix(const int32_t* form, uint32_t* d, const uint8_t* rows) {
  tensor::ldmatrix(matrix_op(form), Registers(d, test_matrix_registers(form, 0)).out(), rows);
}
void test_stmatrix(const int32_t* form, const uint32_t* s, uint8_t* rows) {
  tensor::stmatrix(matrix_op(form), Registers(s, test_matrix_registers(form, 1)), rows);
}
void test_movmatrix(uint32_t* d, const uint32_t* s) { tensor::movmatrix_trans(d, s); }

int test_cvt_supported(int dst, int src, int round, int satfinite, int relu) {
  return tensor::cvt_narrow_supported(static_cast<tensor::Type>(dst), static_cast<tensor::Type>(src),
                                      static_cast<tensor::Round>(round), satfinite != 0, relu != 0);
}
void test_cvt_f32x2_to_narrow(int dst, int round, int satfinite, int relu, const float* hi, const float* lo,
                              uint32_t* out, int count) {
  for (int i = 0; i < count; ++i) {
    out[i] = tensor::cvt_f32x2_to_narrow(static_cast<tensor::Type>(dst), static_cast<tensor::Round>(round),
                                         satfinite != 0, relu != 0, hi[i], lo[i]);
  }
}
void test_cvt_f16x2_to_narrow(int dst, int src, int round, int satfinite, int relu, const uint32_t* in, uint32_t* out,
                              int count) {
  for (int i = 0; i < count; ++i) {
    out[i] = tensor::cvt_f16x2_to_narrow(static_cast<tensor::Type>(dst), static_cast<tensor::Type>(src),
                                         static_cast<tensor::Round>(round), satfinite != 0, relu != 0, in[i]);
  }
}
void test_cvt_narrow_to_f16x2(int src, int dst, int relu, const uint32_t* in, uint32_t* out, int count) {
  for (int i = 0; i < count; ++i) {
    out[i] =
        tensor::cvt_narrow_to_f16x2(static_cast<tensor::Type>(src), static_cast<tensor::Type>(dst), relu != 0, in[i]);
  }
}
void test_cvt_f32_to(int dst, int round, int satfinite, int relu, const float* in, uint32_t* out, int count) {
  for (int i = 0; i < count; ++i) {
    out[i] = tensor::cvt_f32_to(static_cast<tensor::Type>(dst), static_cast<tensor::Round>(round), satfinite != 0,
                                relu != 0, in[i]);
  }
}
void test_to_float(int type, const uint32_t* bits, float* out, int count) {
  for (int i = 0; i < count; ++i) out[i] = tensor::to_float(static_cast<tensor::Type>(type), bits[i]);
}

void test_tma_check(const uint64_t* form, char* text, int size) { copy_text(tma::check(descriptor(form)), text, size); }
void test_tma_encode(const uint64_t* form, uint8_t* image) { tma::encode(descriptor(form), image); }
int test_tma_decode(const uint8_t* image, uint64_t* form) {
  tma::Descriptor d;
  const bool known = tma::decode(image, &d);
  if (known) flatten(d, form);
  return known;
}
void test_tma_replace(uint8_t* image, const char* field, uint32_t ordinal, uint64_t value, char* text, int size) {
  copy_text(tma::replace(image, field, ordinal, value), text, size);
}
uint32_t test_tma_box_bytes(const uint64_t* form, int shared) {
  return shared ? tma::box_shared_bytes(descriptor(form)) : tma::box_bytes(descriptor(form));
}
uint32_t test_tma_swizzle(int swizzle, uint32_t address) {
  return tma::swizzle_address(static_cast<tma::Swizzle>(swizzle), address);
}
/// runs[i]: global, shared, bytes, kind. Returns how many there are, whatever `capacity` is.
int test_tma_runs(const uint64_t* form, const int32_t* coords, uint32_t shared, int store, uint64_t* runs, int capacity,
                  char* text, int size) {
  std::vector<tma::Run> found;
  copy_text(tma::tile_runs(descriptor(form), coords, shared, store != 0, &found), text, size);
  for (int i = 0; i < static_cast<int>(found.size()) && i < capacity; ++i) {
    const tma::Run& run = found[static_cast<size_t>(i)];
    runs[4 * i] = run.global, runs[4 * i + 1] = run.shared, runs[4 * i + 2] = run.bytes,
             runs[4 * i + 3] = static_cast<uint64_t>(run.kind);
  }
  return static_cast<int>(found.size());
}
void test_tma_fill(const uint64_t* form, uint8_t* dst, uint32_t bytes) { tma::fill(descriptor(form), dst, bytes); }
void test_tma_convert(int type, uint8_t* data, uint32_t bytes) {
  tma::convert_elements(static_cast<tma::ElementType>(type), data, bytes);
}
int test_tma_reduce(int type, int op, uint8_t* dst, const uint8_t* src, uint32_t bytes) {
  return tma::reduce_elements(static_cast<tma::ElementType>(type), static_cast<tma::Reduce>(op), dst, src, bytes);
}

}  // extern "C"
