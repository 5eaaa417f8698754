// SPDX-License-Identifier: Apache-2.0
// mma.sync, ldmatrix, stmatrix, movmatrix: PTX ISA 9.0, 9.7.14. The arithmetic and the lane mappings are tensor/'s.
#include "ops/families.h"
#include "ops/lanes.h"
#include "tensor/tensor.h"

namespace vsm::ops {
namespace {

struct Mma {
  tensor::MmaOp op;
  int a = 0, b = 0, c = 0, d = 0;
  bool scaled = false;
};

// op: d..., a..., b..., c..., {scale a, byte, thread, scale b, byte, thread}
void mma_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!w.converge(in, &mask)) return;
  if (mask != ~0u)
    w.fail(ReportKind::kUndefined, in, -1, "mma needs all 32 lanes of the warp; active are " + exec::lane_list(mask));
  const auto& m = *static_cast<const Mma*>(in.ext);
  uint32_t* d[16];
  const uint32_t *a[16], *b[16], *c[16];
  const Operand* o = in.op;
  for (int i = 0; i < m.d; ++i) d[i] = w.out<uint32_t>(*o++);
  for (int i = 0; i < m.a; ++i) a[i] = w.in<uint32_t>(*o++);
  for (int i = 0; i < m.b; ++i) b[i] = w.in<uint32_t>(*o++);
  for (int i = 0; i < m.c; ++i) c[i] = w.in<uint32_t>(*o++);
  tensor::MmaScale scale[2];
  for (int i = 0; i < 2 && m.scaled; ++i) {
    scale[i].data = w.in<uint32_t>(o[0]);
    const uint32_t *byte = w.in<uint32_t>(o[1]), *thread = w.in<uint32_t>(o[2]);
    for (int lane = 1; lane < 32; ++lane) {
      if (byte[lane] != byte[0] || thread[lane] != thread[0]) {
        w.fail(ReportKind::kUndefined, in, lane, "the scale selectors differ between lanes of the warp");
      }
    }
    scale[i].byte_id = static_cast<uint16_t>(byte[0]);
    scale[i].thread_id = static_cast<uint16_t>(thread[0]);
    o += 3;
  }
  if (m.scaled) {
    const char* error = tensor::mma_check_scale(m.op, scale[0], scale[1]);
    if (error && error[0]) w.fail(ReportKind::kUndefined, in, -1, error);
  }
  // The destination may be a source of the same instruction.
  uint32_t result[16][32];
  uint32_t* r[16];
  for (int i = 0; i < m.d; ++i) r[i] = result[i];
  tensor::mma(m.op, r, a, b, c, scale[0], scale[1], w.block->launch->config->accumulation_bits.of(m.op));
  for (int i = 0; i < m.d; ++i) std::memcpy(d[i], result[i], sizeof result[i]);
  w.counters().mma_flops += 2ull * m.op.m * m.op.n * m.op.k;
}

tensor::Type take_mma_type(Form& f) {
  static const std::pair<const char*, tensor::Type> kTypes[] = {
      {"f16", tensor::Type::kF16},   {"bf16", tensor::Type::kBF16},   {"tf32", tensor::Type::kTF32},
      {"f32", tensor::Type::kF32},   {"f64", tensor::Type::kF64},     {"e4m3", tensor::Type::kE4M3},
      {"e5m2", tensor::Type::kE5M2}, {"e3m2", tensor::Type::kE3M2},   {"e2m3", tensor::Type::kE2M3},
      {"e2m1", tensor::Type::kE2M1}, {"s8", tensor::Type::kS8},       {"u8", tensor::Type::kU8},
      {"s4", tensor::Type::kS4},     {"u4", tensor::Type::kU4},       {"s32", tensor::Type::kS32},
      {"b1", tensor::Type::kB1},     {"ue8m0", tensor::Type::kUE8M0}, {"ue4m3", tensor::Type::kUE4M3}};
  const std::string next = f.rest();
  for (const auto& t : kTypes) {
    if (next == t.first) {
      f.take(t.first);
      return t.second;
    }
  }
  f.fail("'." + next + "' is no type of a matrix");
}

void mma(Form& f) {
  if (!f.take("sync")) f.fail("only mma.sync is modelled");
  f.take("aligned");
  Mma m;
  const std::string kind = f.take_prefix("kind::");
  if (kind == "kind::f8f6f4") m.op.kind = tensor::MmaKind::kF8F6F4;
  else if (kind == "kind::mxf8f6f4") m.op.kind = tensor::MmaKind::kMxF8F6F4;
  else if (kind == "kind::mxf4") m.op.kind = tensor::MmaKind::kMxF4;
  else if (kind == "kind::mxf4nvf4") m.op.kind = tensor::MmaKind::kMxF4NvF4;
  else if (!kind.empty()) f.fail("'." + kind + "' is not modelled");
  m.scaled = f.take("block_scale");
  const std::string vec = f.take_prefix("scale_vec::");
  m.op.scale_vec = vec.empty() ? 0 : static_cast<uint8_t>(vec[11] - '0');
  if (m.scaled && vec.empty()) m.op.scale_vec = m.op.kind == tensor::MmaKind::kMxF4 ? 2 : 1;
  const std::string shape = f.take_one({"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64", "m16n8k128",
                                        "m16n8k256", "m8n8k4", "m8n8k16", "m8n8k32", "m8n8k128"});
  unsigned sm = 0, sn = 0, sk = 0;
  if (std::sscanf(shape.c_str(), "m%un%uk%u", &sm, &sn, &sk) != 3 || sk > 128) f.fail("the shape is not modelled");
  m.op.m = static_cast<uint8_t>(sm);
  m.op.n = static_cast<uint8_t>(sn);
  m.op.k = static_cast<uint8_t>(sk);
  if (!f.take("row") || !f.take("col")) f.fail("only .row.col is modelled");
  m.op.satfinite = f.take("satfinite");
  m.op.d = take_mma_type(f);
  m.op.a = take_mma_type(f);
  m.op.b = take_mma_type(f);
  m.op.c = take_mma_type(f);
  if (m.scaled) m.op.scale = take_mma_type(f);
  if (!tensor::mma_registers(m.op, &m.a, &m.b, &m.c, &m.d) || m.a > 16 || m.b > 16 || m.c > 16 || m.d > 16)
    f.fail("that combination of shape and types is not modelled");
  f.expect(m.scaled ? 8 : 4, m.scaled ? 10 : 4);
  auto vector = [&](size_t i, int registers, bool out) {
    const auto list = f.elements(i);
    if (static_cast<int>(list.size()) != registers) {
      f.fail("operand " + std::to_string(i + 1) + " has " + std::to_string(list.size()) +
             " registers; the form takes " + std::to_string(registers));
    }
    for (const ptx::AstOperand& e : list) out ? f.out(e, Type::kB32) : f.in(e, Type::kB32);
  };
  vector(0, m.d, true);
  vector(1, m.a, false);
  vector(2, m.b, false);
  vector(3, m.c, false);
  if (m.scaled) {
    // {scale-a}, {byte, thread}, {scale-b}, {byte, thread}
    if (f.count() != 8) f.fail("the scale operands are {a}, {byte, thread}, {b}, {byte, thread}");
    for (const size_t i : {size_t{4}, size_t{6}}) {
      vector(i, 1, false);
      const auto select = f.elements(i + 1);
      if (select.size() != 2) f.fail("the scale selector is {byte-id, thread-id}");
      for (const ptx::AstOperand& e : select) f.in(e, Type::kB16);
    }
  }
  f.inst.ext = f.keep(m);
  f.emit(&mma_run, OpClass::kMma);
}

tensor::MatrixOp take_matrix(Form& f) {
  tensor::MatrixOp m;
  f.take("sync");
  f.take("aligned");
  const std::string shape = f.take_one({"m8n8", "m16n16", "m8n16", "m16n8"});
  m.shape = shape == "m8n8"     ? tensor::MatrixShape::kM8N8
            : shape == "m16n16" ? tensor::MatrixShape::kM16N16
            : shape == "m8n16"  ? tensor::MatrixShape::kM8N16
                                : tensor::MatrixShape::kM16N8;
  const std::string num = f.take_one({"x1", "x2", "x4"});
  if (shape.empty() || num.empty()) f.fail("the shape or the number is missing");
  m.num = static_cast<uint8_t>(num[1] - '0');
  m.trans = f.take("trans");
  const std::string type = f.take_one({"b16", "b8x16.b6x16_p32", "b8"});
  m.type = type == "b16" ? tensor::MatrixType::kB16 : tensor::MatrixType::kB8;
  if (type.empty()) {
    if (!f.take("b8x16")) f.fail("the type is missing");
    if (f.take("b6x16_p32")) m.type = tensor::MatrixType::kB8x16_B6x16_P32;
    else if (f.take("b4x16_p64")) m.type = tensor::MatrixType::kB8x16_B4x16_P64;
    else f.fail("the source type is missing");
  }
  return m;
}

// op: registers..., base. form: registers
void ldmatrix_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!w.converge(in, &mask)) return;
  if (mask != ~0u)
    w.fail(ReportKind::kUndefined, in, -1,
           "ldmatrix needs all 32 lanes of the warp; active are " + exec::lane_list(mask));
  const auto& m = *static_cast<const tensor::MatrixOp*>(in.ext);
  const int rows = tensor::matrix_rows(m), bytes = tensor::matrix_row_bytes(m);
  uint8_t data[32 * 16] = {};
  uint64_t addresses[32];
  const Space space = in.op[in.form].bits == 64 ? Space::kGeneric : Space::kShared;
  for (int r = 0; r < rows; ++r) {
    const int lane = tensor::matrix_row_lane(m, r);
    uint64_t a = w.value(in.op[in.form], lane) + static_cast<uint64_t>(in.imm);
    if (space == Space::kGeneric && a >> 56 == exec::kSharedWindow >> 56) a -= exec::kSharedWindow;
    if (a % 16) w.fail(ReportKind::kMisaligned, in, lane, "a row of a matrix must be 16-byte aligned", "shared", a);
    const int used = tensor::matrix_row_data_bytes(m);  // the rest is padding
    std::memcpy(data + r * bytes,
                w.access(in, lane, Space::kShared, a, static_cast<uint32_t>(used), exec::Access::kLoad,
                         exec::Manner::kWholeWarp),
                static_cast<size_t>(used));
    addresses[r] = a;
  }
  uint32_t result[4][32];
  uint32_t* d[4] = {result[0], result[1], result[2], result[3]};
  tensor::ldmatrix(m, d, data);
  for (uint32_t i = 0; i < in.form; ++i) std::memcpy(w.out<uint32_t>(in.op[i]), result[i], sizeof result[i]);
  w.count_access(in, Space::kShared, addresses, rows == 32 ? ~0u : (1u << rows) - 1, static_cast<uint32_t>(bytes),
                 false);
}

void stmatrix_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!w.converge(in, &mask)) return;
  if (mask != ~0u)
    w.fail(ReportKind::kUndefined, in, -1,
           "stmatrix needs all 32 lanes of the warp; active are " + exec::lane_list(mask));
  const auto& m = *static_cast<const tensor::MatrixOp*>(in.ext);
  const int rows = tensor::matrix_rows(m), bytes = tensor::matrix_row_bytes(m);
  uint8_t data[32 * 16];
  const uint32_t* s[4] = {};
  for (uint32_t i = 0; i < in.form; ++i) s[i] = w.in<uint32_t>(in.op[i]);
  tensor::stmatrix(m, s, data);
  uint64_t addresses[32];
  for (int r = 0; r < rows; ++r) {
    const int lane = tensor::matrix_row_lane(m, r);
    uint64_t a = w.value(in.op[in.form], lane) + static_cast<uint64_t>(in.imm);
    if (in.op[in.form].bits == 64 && a >> 56 == exec::kSharedWindow >> 56) a -= exec::kSharedWindow;
    if (a % 16) w.fail(ReportKind::kMisaligned, in, lane, "a row of a matrix must be 16-byte aligned", "shared", a);
    std::memcpy(w.access(in, lane, Space::kShared, a, static_cast<uint32_t>(bytes), exec::Access::kStore,
                         exec::Manner::kWholeWarp),
                data + r * bytes, static_cast<size_t>(bytes));
    addresses[r] = a;
  }
  ++w.block->effects;
  w.count_access(in, Space::kShared, addresses, rows == 32 ? ~0u : (1u << rows) - 1, static_cast<uint32_t>(bytes),
                 true);
}

void matrix_access(Form& f, bool store) {
  const tensor::MatrixOp m = take_matrix(f);
  f.take_one({"shared", "shared::cta"});
  int registers = 0;
  const bool known = store ? tensor::stmatrix_registers(m, &registers) : tensor::ldmatrix_registers(m, &registers);
  if (!known || registers > 4) f.fail("that combination of shape, number and type does not exist");
  f.expect(2);
  const auto list = f.elements(store ? 1 : 0);
  if (static_cast<int>(list.size()) != registers)
    f.fail("has " + std::to_string(list.size()) + " registers; the form takes " + std::to_string(registers));
  for (const ptx::AstOperand& e : list) store ? f.in(e, Type::kB32) : f.out(e, Type::kB32);
  const ptx::AstOperand& address = f.operand(store ? 0 : 1);
  f.address(address, address.kind == ptx::AstOperand::Kind::kAddress && f.register_bits(address.sub[0]) == 64
                         ? Space::kGeneric
                         : Space::kShared);
  f.inst.form = static_cast<uint32_t>(registers);
  f.inst.ext = f.keep(m);
  f.emit(store ? &stmatrix_run : &ldmatrix_run, OpClass::kMatrixMove);
}

void movmatrix(Form& f) {
  for (const char* m : {"sync", "aligned", "m8n8", "trans", "b16"}) {
    if (!f.take(m)) f.fail(std::string(".") + m + " is missing");
  }
  f.expect(2);
  f.out(0, Type::kB32);
  f.in(1, Type::kB32);
  f.emit(
      [](Warp& w, const Inst& in, uint32_t mask) {
        if (!w.converge(in, &mask)) return;
        if (mask != ~0u) w.fail(ReportKind::kUndefined, in, -1, "movmatrix needs all 32 lanes of the warp");
        uint32_t d[32];
        tensor::movmatrix_trans(d, w.in<uint32_t>(in.op[1]));
        std::memcpy(w.out<uint32_t>(in.op[0]), d, sizeof d);
      },
      OpClass::kMatrixMove);
}

}  // namespace

void add_matrix(FormTable& t) {
  t["mma"] = mma;
  t["ldmatrix"] = [](Form& f) { matrix_access(f, false); };
  t["stmatrix"] = [](Form& f) { matrix_access(f, true); };
  t["movmatrix"] = movmatrix;
}

}  // namespace vsm::ops
