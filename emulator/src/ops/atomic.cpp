// SPDX-License-Identifier: Apache-2.0
// atom and red: PTX ISA 9.0, 9.7.13.5 and 9.7.13.6. Global memory is shared with other host threads: a compare and
// swap loop on the containing word makes each of them atomic.
#include <atomic>

#include "ops/families.h"
#include "ops/memory_ops.h"

namespace vsm::ops {
namespace {

using exec::Access;

enum class AtomicOp : uint32_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor, kExch, kCas };

struct Atomic {
  AtomicOp op = AtomicOp::kAdd;
  Type type = Type::kB32;
  Space space = Space::kGeneric;
  uint32_t bytes = 4;
  uint32_t count = 1;     // vector elements
  bool returns = true;
  Pattern read, write;    // what its read and its write are
};

template <class T>
T apply_integer(AtomicOp op, T old, T b, T c) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case AtomicOp::kAdd: return static_cast<T>(static_cast<U>(old) + static_cast<U>(b));
    case AtomicOp::kMin: return std::min(old, b);
    case AtomicOp::kMax: return std::max(old, b);
    case AtomicOp::kInc: return old >= b ? T(0) : static_cast<T>(old + 1);
    case AtomicOp::kDec: return old == 0 || old > b ? b : static_cast<T>(old - 1);
    case AtomicOp::kAnd: return old & b;
    case AtomicOp::kOr: return old | b;
    case AtomicOp::kXor: return old ^ b;
    case AtomicOp::kExch: return b;
    case AtomicOp::kCas: return old == b ? c : old;
  }
  return old;
}

uint16_t apply_half(AtomicOp op, bool bfloat, uint16_t old, uint16_t b) {
  const double x = bfloat ? bfloat_to_float(old) : half_to_float(old),
               y = bfloat ? bfloat_to_float(b) : half_to_float(b);
  double v = 0;
  if (op == AtomicOp::kAdd) v = add_to_odd(x, y);
  else if (x != x || y != y) v = x != x ? y : x;
  else v = (op == AtomicOp::kMin) == (x < y) ? x : y;
  return bfloat ? round_to_bfloat(v) : round_to_half(v);
}

uint64_t apply(const Atomic& a, uint64_t old, uint64_t b, uint64_t c) {
  const auto w = [](uint64_t v) { return static_cast<uint32_t>(v); };
  switch (a.type) {
    case Type::kF32: return float_to_bits(canonical(flush(flush(bits_to_float(w(old))) + flush(bits_to_float(w(b))))));
    case Type::kF64: return double_to_bits(bits_to_double(old) + bits_to_double(b));
    case Type::kF16:
    case Type::kBF16:
      return apply_half(a.op, a.type == Type::kBF16, static_cast<uint16_t>(old), static_cast<uint16_t>(b));
    case Type::kF16x2:
    case Type::kBF16x2: {
      const bool bf = a.type == Type::kBF16x2;
      return apply_half(a.op, bf, static_cast<uint16_t>(old), static_cast<uint16_t>(b)) |
             static_cast<uint32_t>(
                 apply_half(a.op, bf, static_cast<uint16_t>(old >> 16), static_cast<uint16_t>(b >> 16)))
                 << 16;
    }
    case Type::kS32:
      return w(static_cast<uint64_t>(
          apply_integer<int32_t>(a.op, static_cast<int32_t>(old), static_cast<int32_t>(b), static_cast<int32_t>(c))));
    case Type::kS64:
      return static_cast<uint64_t>(
          apply_integer<int64_t>(a.op, static_cast<int64_t>(old), static_cast<int64_t>(b), static_cast<int64_t>(c)));
    default:
      if (a.bytes == 8) return apply_integer<uint64_t>(a.op, old, b, c);
      if (a.bytes == 2)
        return apply_integer<uint16_t>(a.op, static_cast<uint16_t>(old), static_cast<uint16_t>(b),
                                       static_cast<uint16_t>(c));
      return apply_integer<uint32_t>(a.op, w(old), w(b), w(c));
  }
}

template <class T>
uint64_t exchange(const Atomic& a, uint8_t* p, uint64_t b, uint64_t c) {
  T* place = reinterpret_cast<T*>(p);
  T old = __atomic_load_n(place, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(place, &old, static_cast<T>(apply(a, old, b, c)), false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {}
  return old;
}

// op: d..., base, b..., c
void atomic_run(Warp& w, const Inst& in, uint32_t mask) {
  const auto& a = *static_cast<const Atomic*>(in.ext);
  const uint32_t results = a.returns ? a.count : 0;
  const Operand& base = in.op[results];
  const Operand* b = in.op + results + 1;
  const Operand& c = b[a.count];
  exec::WeakMemory* weak = w.block->launch->weak.get();
  uint64_t addresses[32];
  for_lanes(mask, [&](int i) {
    const uint64_t address = effective(w, in, base, i);
    addresses[i] = address;
    if (w.arrivals) w.check_signal(in, i, a.space, address, a.write.ordering, a.write.block);
    uint8_t* p = w.access(in, i, a.space, address, a.bytes * a.count, Access::kAtomic);
    before_write(w, a.space, address, i, a.write);
    if (weak && is_global(a.space, address)) weak->before_publishing(w.block->linear, address, a.bytes * a.count);
    uint64_t old[8];
    for (uint32_t k = 0; k < a.count; ++k) {
      uint8_t* q = p + k * a.bytes;
      const uint64_t x = w.value(b[k], i), y = a.op == AtomicOp::kCas ? w.value(c, i) : 0;
      old[k] = a.bytes == 8   ? exchange<uint64_t>(a, q, x, y)
               : a.bytes == 4 ? exchange<uint32_t>(a, q, x, y)
                              : exchange<uint16_t>(a, q, x, y);
    }
    after_read(w, a.space, address, i, a.read);
    for (uint32_t k = 0; k < results; ++k) {
      if (!in.op[k].sink) w.set_value(in.op[k], i, old[k]);
    }
  });
  ++w.block->effects;
  w.count_access(in, a.space, addresses, mask, a.bytes * a.count, true);
}

// 16-byte exchange and compare-and-swap, under one lock. op: d, base, b, c
void atomic128_run(Warp& w, const Inst& in, uint32_t mask) {
  static std::mutex lock;
  const auto& a = *static_cast<const Atomic*>(in.ext);
  exec::WeakMemory* weak = w.block->launch->weak.get();
  for_lanes(mask, [&](int i) {
    const uint64_t address = effective(w, in, in.op[1], i);
    if (w.arrivals) w.check_signal(in, i, a.space, address, a.write.ordering, a.write.block);
    uint8_t* p = w.access(in, i, a.space, address, 16, Access::kAtomic);
    before_write(w, a.space, address, i, a.write);
    if (weak && is_global(a.space, address)) weak->before_publishing(w.block->linear, address, a.bytes * a.count);
    const uint64_t *b = w.in<uint64_t>(in.op[2]), *c = w.in<uint64_t>(in.op[a.op == AtomicOp::kCas ? 3 : 2]);
    const std::lock_guard<std::mutex> guard(lock);
    uint64_t old[2];
    std::memcpy(old, p, 16);
    if (a.op == AtomicOp::kExch || (old[0] == b[i] && old[1] == b[32 + i])) {
      std::memcpy(p, &c[i], 8);
      std::memcpy(p + 8, &c[32 + i], 8);
    }
    after_read(w, a.space, address, i, a.read);
    uint64_t* d = w.out<uint64_t>(in.op[0]);
    d[i] = old[0];
    d[32 + i] = old[1];
  });
  ++w.block->effects;
}

void atomic(Form& f) {
  Atomic a;
  a.returns = f.name() == "atom";
  if (f.take("async")) f.fail("red.async is not modelled");
  const MemoryQualifiers q = take_memory_qualifiers(f);
  a.space = q.space;
  a.read = {q.acquire, q.block};
  a.write = {q.release, q.block};
  if (a.space != Space::kGeneric && a.space != Space::kGlobal && a.space != Space::kShared)
    f.fail("atomics work on global and shared memory");
  static const std::pair<const char*, AtomicOp> kOps[] = {
      {"add", AtomicOp::kAdd},   {"min", AtomicOp::kMin}, {"max", AtomicOp::kMax}, {"inc", AtomicOp::kInc},
      {"dec", AtomicOp::kDec},   {"and", AtomicOp::kAnd}, {"or", AtomicOp::kOr},   {"xor", AtomicOp::kXor},
      {"exch", AtomicOp::kExch}, {"cas", AtomicOp::kCas}};
  bool found = false;
  for (const auto& op : kOps) {
    if (!found && f.take(op.first)) {
      a.op = op.second;
      found = true;
    }
  }
  if (!found) f.fail("the operation is missing");
  f.take("noftz");
  const std::string vector = f.take_one({"v2", "v4", "v8"});
  a.count = vector.empty() ? 1 : static_cast<uint32_t>(vector[1] - '0');
  a.type = f.take_type();
  a.bytes = static_cast<uint32_t>(exec::type_bits(a.type)) / 8;
  const bool is_float = exec::is_float(a.type), half = is_float && a.type != Type::kF32 && a.type != Type::kF64;
  const bool add = a.op == AtomicOp::kAdd, min_max = a.op == AtomicOp::kMin || a.op == AtomicOp::kMax;
  if (is_float && !add && !(half && min_max && a.count > 1))
    f.fail("that operation is not possible on ." + std::string(exec::to_string(a.type)));
  if (!is_float && (add || min_max) && !exec::is_integer(a.type)) f.fail("that operation needs an integer type");
  if ((a.op == AtomicOp::kInc || a.op == AtomicOp::kDec) && a.type != Type::kU32) f.fail(".inc and .dec need .u32");
  if (a.count > 1 && (!is_float || q.space == Space::kShared || a.bytes * a.count > 16))
    f.fail("that vector is not possible here");
  if (a.bytes < 4 && !half && !(a.op == AtomicOp::kCas && a.type == Type::kB16))
    f.fail("that type is not possible here");
  const size_t results = a.returns ? 1 : 0;
  const size_t sources = a.op == AtomicOp::kCas ? 2 : 1;
  f.expect(results + 1 + sources + (q.cache_hint ? 1 : 0));
  auto vector_operand = [&](size_t i, bool out) {
    const auto list = f.elements(i);
    if (list.size() != a.count) f.fail("wrong number of registers in a vector");
    for (const ptx::AstOperand& e : list) out ? f.out(e, a.type) : f.in(e, a.type);
  };
  if (a.returns) vector_operand(0, true);
  f.address(results, a.space);
  vector_operand(results + 1, false);
  if (sources == 2) f.in(results + 2, a.type);
  else f.in_constant(0, 64);
  f.inst.ext = f.keep(a);
  if (a.bytes == 16) {
    if (!a.returns || (a.op != AtomicOp::kExch && a.op != AtomicOp::kCas))
      f.fail("that operation is not possible on .b128");
    return f.emit(&atomic128_run, OpClass::kAtomic);
  }
  f.emit(&atomic_run, OpClass::kAtomic);
}

}  // namespace

void add_atomic(FormTable& t) { t["atom"] = t["red"] = atomic; }

}  // namespace vsm::ops
