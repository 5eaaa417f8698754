// SPDX-License-Identifier: Apache-2.0
// mov, cvta, isspacep, mapa and the special registers that change: PTX ISA 9.0, 9.7.9 and chapter 10.
#include <chrono>

#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

using Kind = ptx::AstOperand::Kind;

template <class T>
Handler copy() {
  return lanes<T, T>([](T a) { return a; });
}

// mov.b32/b64/b128 d, {a, b, ...}: the first element lies lowest.
void pack_run(Warp& w, const Inst& in, uint32_t mask) {
  const int bits = static_cast<int>(in.form);
  for_lanes(mask, [&](int i) {
    uint64_t v = 0;
    for (int k = 1; k < in.count; ++k) v |= w.value(in.op[k], i) << (bits * (k - 1));
    w.set_value(in.op[0], i, v);
  });
}
void unpack_run(Warp& w, const Inst& in, uint32_t mask) {
  const int bits = static_cast<int>(in.form);
  const Operand& s = in.op[in.count - 1];
  for_lanes(mask, [&](int i) {
    const uint64_t v = w.value(s, i);
    const uint64_t part = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    for (int k = 0; k + 1 < in.count; ++k) {
      if (!in.op[k].sink) w.set_value(in.op[k], i, v >> (bits * k) & part);
    }
  });
}
void pack128_run(Warp& w, const Inst& in, uint32_t mask) {
  uint64_t* d = w.out<uint64_t>(in.op[0]);
  for_lanes(mask, [&](int i) {
    d[i] = w.in<uint64_t>(in.op[1])[i];
    d[32 + i] = w.in<uint64_t>(in.op[2])[i];
  });
}
void unpack128_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint64_t* s = w.in<uint64_t>(in.op[2]);
  for_lanes(mask, [&](int i) {
    w.set_value(in.op[0], i, s[i]);
    w.set_value(in.op[1], i, s[32 + i]);
  });
}

// A register named by several elements of a destination would be written twice; sources may repeat.
void mov_vector(Form& f, Type t, bool to_vector) {
  const ptx::AstOperand& v = f.operand(to_vector ? 0 : 1);
  const int count = static_cast<int>(v.sub.size());
  const int bits = exec::type_bits(t) / (count ? count : 1);
  if ((count != 2 && count != 4) || bits < 8)
    f.fail("a vector of " + std::to_string(count) + " elements is not possible here");
  f.inst.form = static_cast<uint32_t>(bits);
  if (!to_vector) f.out(0, t);
  for (const ptx::AstOperand& e : v.sub) to_vector ? f.out(e, bits_type(bits)) : f.in(e, bits_type(bits));
  if (to_vector) f.in(1, t);
  if (t == Type::kB128) return f.emit(to_vector ? &unpack128_run : &pack128_run, OpClass::kMove);
  f.emit(to_vector ? &unpack_run : &pack_run, OpClass::kMove);
}

void clock_run(Warp& w, const Inst& in, uint32_t mask) {
  // A block's own instruction count stands for its cycle counter: it grows, and repeats from run to run.
  const uint64_t cycles = w.block->counters.warp_instructions;
  const uint64_t v = in.form == 1 ? cycles >> 32 : cycles;
  for_lanes(mask, [&](int i) { w.set_value(in.op[0], i, in.op[0].bits == 64 ? v : v & 0xffffffffu); });
}
void globaltimer_run(Warp& w, const Inst& in, uint32_t mask) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const uint64_t ns = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  for_lanes(mask, [&](int i) {
    w.set_value(in.op[0], i, in.form == 1 ? ns >> 32 : in.op[0].bits == 64 ? ns : ns & 0xffffffffu);
  });
}

bool changing_special(Form& f, Type t, const std::string& name) {
  const bool clock = name == "%clock" || name == "%clock_hi" || name == "%clock64";
  const bool timer = name == "%globaltimer" || name == "%globaltimer_lo" || name == "%globaltimer_hi";
  if (!clock && !timer) return false;
  f.out(0, t);
  f.inst.form = name == "%clock_hi" || name == "%globaltimer_hi";
  f.emit(clock ? &clock_run : &globaltimer_run, OpClass::kSpecial);
  return true;
}

void mov(Form& f) {
  const Type t = f.take_type();
  f.expect(2);
  if (t == Type::kPred) {
    f.out_pred(0);
    f.in_pred(1);
    return f.emit([](Warp& w, const Inst& in, uint32_t m) { w.set_pred(in.op[0], m, w.pred(in.op[1])); },
                  OpClass::kPredicate);
  }
  if (f.operand(0).kind == Kind::kVector) return mov_vector(f, t, true);
  if (f.operand(1).kind == Kind::kVector) return mov_vector(f, t, false);
  if (f.operand(1).kind == Kind::kSpecial && changing_special(f, t, f.operand(1).symbol)) return;
  f.out(0, t);
  if (f.operand(1).kind == Kind::kSpecial && exec::type_bits(t) == 64) {
    f.in(1, t);
  } else if (f.operand(1).kind == Kind::kSymbol && exec::type_bits(t) == 32) {
    f.in(1, Type::kB32);
  } else {
    f.in(1, t);
  }
  switch (exec::type_bits(t)) {
    case 16: return f.emit(copy<uint16_t>(), OpClass::kMove);
    case 32: return f.emit(copy<uint32_t>(), OpClass::kMove);
    case 64: return f.emit(copy<uint64_t>(), OpClass::kMove);
    case 128:
      return f.emit(
          [](Warp& w, const Inst& in, uint32_t m) {
            uint64_t* d = w.out<uint64_t>(in.op[0]);
            const uint64_t* s = w.in<uint64_t>(in.op[1]);
            for_lanes(m, [&](int i) {
              d[i] = s[i];
              d[32 + i] = s[32 + i];
            });
          },
          OpClass::kMove);
    default: f.fail("that type is not modelled here");
  }
}

uint64_t window(Form& f, const std::string& space) {
  if (space == "shared" || space == "shared::cta" || space == "shared::cluster") return exec::kSharedWindow;
  if (space == "local") return exec::kLocalWindow;
  if (space == "global" || space == "const" || space == "param" || space == "param::entry") return 0;
  f.fail("a state space is missing");
}

std::string take_space(Form& f) {
  return f.take_one({"shared::cta", "shared::cluster", "shared", "local", "global", "const", "param::entry", "param"});
}

// 9.7.9.20. Addresses of global, const and param memory are generic as they are.
void cvta(Form& f) {
  const bool to = f.take("to");
  const std::string space = take_space(f);
  const Type t = f.take_type();
  f.expect(2);
  const uint64_t base = window(f, space);
  if (t == Type::kU32) f.fail("only 64-bit generic addresses are modelled");
  if (t != Type::kU64) f.fail("needs .u64");
  f.out(0, t);
  f.in(1, t);
  f.in_constant(base, 64);
  f.emit(to ? lanes<uint64_t, uint64_t, uint64_t>([](uint64_t a, uint64_t b) { return a - b; })
            : lanes<uint64_t, uint64_t, uint64_t>([](uint64_t a, uint64_t b) { return a + b; }),
         OpClass::kMove);
}

void isspacep(Form& f) {
  const std::string space = take_space(f);
  f.expect(2);
  f.out_pred(0);
  f.in(1, Type::kB64);
  if (space == "param" || space == "param::entry" || space == "const") f.fail("'." + space + "' is not modelled here");
  const uint64_t base = window(f, space);
  f.in_constant(base >> 56, 64);
  f.emit(predicate_lanes<uint64_t, uint64_t>([](uint64_t a, uint64_t top) { return a >> 56 == top; }),
         OpClass::kPredicate);
}

// 9.7.9.23: the cluster is one block, so only rank 0 exists and the address stays what it is.
void mapa(Form& f) {
  f.take_one({"shared::cluster", "shared"});
  const Type t = f.take_type();
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, Type::kU32);
  if (t != Type::kU32 && t != Type::kU64) f.fail("needs .u32 or .u64");
  f.inst.form = t == Type::kU64;
  f.emit(
      [](Warp& w, const Inst& in, uint32_t mask) {
        const uint32_t* rank = w.in<uint32_t>(in.op[2]);
        for_lanes(mask, [&](int i) {
          if (rank[i] != 0)
            w.fail(ReportKind::kUndefined, in, i,
                   "block rank " + std::to_string(rank[i]) + " in a cluster of one block");
          w.set_value(in.op[0], i, w.value(in.op[1], i));
        });
      },
      OpClass::kMove);
}

void getctarank(Form& f) {
  f.take_one({"shared::cluster", "shared"});
  const Type t = f.take_type();
  f.expect(2);
  f.out(0, Type::kU32);
  f.in(1, t);
  f.emit(
      [](Warp& w, const Inst& in, uint32_t mask) { for_lanes(mask, [&](int i) { w.out<uint32_t>(in.op[0])[i] = 0; }); },
      OpClass::kMove);
}

void activemask(Form& f) {
  f.take("b32");
  f.expect(1);
  f.out(0, Type::kB32);
  f.emit([](Warp& w, const Inst& in,
            uint32_t mask) { for_lanes(mask, [&](int i) { w.out<uint32_t>(in.op[0])[i] = mask; }); },
         OpClass::kWarp);
}

// createpolicy: the value only steers caches, which are not modelled; it is made recognizable.
void createpolicy(Form& f) {
  while (!f.take_prefix("L2::").empty() || f.take("fractional") || f.take("range") || f.take("cvt") ||
         f.take("global") || f.take("L2")) {}
  f.take("b64");
  f.expect(1, 4);
  f.out(0, Type::kB64);
  f.emit([](Warp& w, const Inst& in,
            uint32_t mask) { for_lanes(mask, [&](int i) { w.out<uint64_t>(in.op[0])[i] = 0x14F0000000000000ull; }); },
         OpClass::kMove);
}

}  // namespace

void add_move(FormTable& t) {
  t["mov"] = mov;
  t["cvta"] = cvta;
  t["isspacep"] = isspacep;
  t["mapa"] = mapa;
  t["getctarank"] = getctarank;
  t["activemask"] = activemask;
  t["createpolicy"] = createpolicy;
}

}  // namespace vsm::ops
