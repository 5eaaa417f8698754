// SPDX-License-Identifier: Apache-2.0
// Lanes of a warp among themselves: shfl, vote, match, redux, elect, bar.warp.sync. PTX ISA 9.0, 9.7.9.6, 9.7.13.
#include <algorithm>

#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

// Waits until every lane that the member masks name is at this instruction, with the same mask, or, where `anywhere`,
// at any of its kind. Each lane must name itself.
bool members(Warp& w, const Inst& in, const Operand& o, uint32_t* mask, bool anywhere = false) {
  const uint32_t* member = w.in<uint32_t>(o);
  const uint32_t first = member[__builtin_ctz(*mask)];
  uint32_t needed = 0, same = ~0u;
  for_lanes(*mask, [&](int i) {
    if (!(member[i] >> i & 1)) w.fail(ReportKind::kUndefined, in, i, "the lane is not in its own member mask");
    needed |= member[i];
    same &= member[i] == first ? ~0u : 0;
  });
  if (!same && (needed & w.live & ~*mask)) {  // each group by itself: one may be complete, or the other wait for it
    w.part_by(member, *mask);
    return false;
  }
  return w.gather(mask, needed, uint64_t{needed} << 32 | (anywhere ? 0 : w.here()));
}

// 9.7.9.6 "shfl.sync". op: d, p, a, b, c, member
void shfl_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!members(w, in, in.op[5], &mask)) return;
  const uint32_t *a = w.in<uint32_t>(in.op[2]), *b = w.in<uint32_t>(in.op[3]), *c = w.in<uint32_t>(in.op[4]);
  uint32_t result[32], inside = 0;
  for_lanes(mask, [&](int lane) {
    const int segment = static_cast<int>(c[lane] >> 8 & 31), clamp = static_cast<int>(c[lane] & 31);
    const int value = static_cast<int>(b[lane] & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int source = lane;
    bool p = false;
    switch (in.form) {
      case 0:
        source = lane - value;
        p = source >= most;
        break;               // up
      case 1:
        source = lane + value;
        p = source <= most;
        break;               // down
      case 2:
        source = lane ^ value;
        p = source <= most;
        break;               // bfly
      default:
        source = least | (value & ~segment);
        p = source <= most;
        break;  // idx
    }
    if (!p) source = lane;
    if (!(mask >> source & 1))
      w.report(ReportKind::kUndefined, in, lane,
               "shfl.sync reads lane " + std::to_string(source) + ", which does not take part");
    result[lane] = a[source];
    inside |= static_cast<uint32_t>(p) << lane;
  });
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  for_lanes(mask, [&](int i) { d[i] = result[i]; });
  w.set_pred(in.op[1], mask, inside);
}

void shfl(Form& f) {
  if (!f.take("sync")) f.fail("shfl without .sync does not exist on this target");
  const std::string mode = f.take_one({"up", "down", "bfly", "idx"});
  f.take("b32");
  f.expect(5);
  const ptx::AstOperand& d = f.operand(0);
  if (d.kind == ptx::AstOperand::Kind::kPair) {
    f.out(d.sub[0], Type::kB32);
    f.out_pred(d.sub[1]);
  } else {
    f.out(d, Type::kB32);
    f.out_pred(ptx::AstOperand());
  }
  for (size_t i = 1; i < 5; ++i) f.in(i, Type::kB32);
  f.inst.form = mode == "up" ? 0 : mode == "down" ? 1 : mode == "bfly" ? 2 : 3;
  if (mode.empty()) f.fail(".up, .down, .bfly or .idx is missing");
  f.emit(&shfl_run, OpClass::kWarp);
}

// 9.7.13.10. op: d, p, member
void vote_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!members(w, in, in.op[2], &mask)) return;
  const uint32_t p = w.pred(in.op[1]);
  const uint32_t* member = w.in<uint32_t>(in.op[2]);
  uint32_t ballots[32], result = 0;
  for_lanes(mask, [&](int i) {
    const uint32_t m = member[i] & mask;
    ballots[i] = p & m;
    const bool r = in.form == 0 ? (p & m) == m : in.form == 1 ? (p & m) != 0 : (p & m) == m || (p & m) == 0;
    result |= static_cast<uint32_t>(r) << i;
  });
  if (in.form == 3) {
    uint32_t* d = w.out<uint32_t>(in.op[0]);
    for_lanes(mask, [&](int i) { d[i] = ballots[i]; });
  } else {
    w.set_pred(in.op[0], mask, result);
  }
}

void vote(Form& f) {
  if (!f.take("sync")) f.fail("vote without .sync does not exist on this target");
  const std::string mode = f.take_one({"all", "any", "uni", "ballot"});
  if (mode.empty()) f.fail(".all, .any, .uni or .ballot is missing");
  f.take("pred");
  f.take("b32");
  f.expect(3);
  mode == "ballot" ? f.out(0, Type::kB32) : f.out_pred(0);
  f.in_pred(1);
  f.in(2, Type::kB32);
  f.inst.form = mode == "all" ? 0 : mode == "any" ? 1 : mode == "uni" ? 2 : 3;
  f.emit(&vote_run, OpClass::kWarp);
}

// 9.7.13.11. op: d, p, a, member
void match_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!members(w, in, in.op[3], &mask)) return;
  const uint32_t* member = w.in<uint32_t>(in.op[3]);
  uint32_t found[32], all = 0;
  for_lanes(mask, [&](int i) {
    uint32_t same = 0;
    for (int j = 0; j < 32; ++j) {
      if ((member[i] & mask) >> j & 1 && w.value(in.op[2], j) == w.value(in.op[2], i)) same |= 1u << j;
    }
    const bool every = same == (member[i] & mask);
    found[i] = in.form ? (every ? member[i] : 0) : same;
    all |= static_cast<uint32_t>(every) << i;
  });
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  for_lanes(mask, [&](int i) { d[i] = found[i]; });
  if (in.form) w.set_pred(in.op[1], mask, all);
}

void match(Form& f) {
  const std::string mode = f.take_one({"any", "all"});
  if (!f.take("sync") || mode.empty()) f.fail(".any or .all, and .sync, are needed");
  const Type t = f.take_type();
  if (t != Type::kB32 && t != Type::kB64) f.fail("needs .b32 or .b64");
  f.expect(3);
  const ptx::AstOperand& d = f.operand(0);
  const bool pair = d.kind == ptx::AstOperand::Kind::kPair;
  if (pair && mode == "any") f.fail(".any has no predicate");
  f.out(pair ? d.sub[0] : d, Type::kB32);
  f.out_pred(pair ? d.sub[1] : ptx::AstOperand());
  f.in(1, t);
  f.in(2, Type::kB32);
  f.inst.form = mode == "all";
  f.emit(&match_run, OpClass::kWarp);
}

// 9.7.13.13. op: d, a, member
void redux_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!members(w, in, in.op[2], &mask)) return;
  const uint32_t *a = w.in<uint32_t>(in.op[1]), *member = w.in<uint32_t>(in.op[2]);
  uint32_t result[32];
  for_lanes(mask, [&](int i) {
    bool first = true;
    uint32_t r = 0;
    for (int j = 0; j < 32; ++j) {
      if (!((member[i] & mask) >> j & 1)) continue;
      const uint32_t v = a[j];
      if (first) {
        r = v;
      } else {
        switch (in.form) {
          case 0: r += v; break;
          case 1: r = std::min(r, v); break;
          case 2: r = std::max(r, v); break;
          case 3: r = static_cast<uint32_t>(std::min(static_cast<int32_t>(r), static_cast<int32_t>(v))); break;
          case 4: r = static_cast<uint32_t>(std::max(static_cast<int32_t>(r), static_cast<int32_t>(v))); break;
          case 5: r &= v; break;
          case 6: r |= v; break;
          default: r ^= v; break;
        }
      }
      first = false;
    }
    result[i] = r;
  });
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  for_lanes(mask, [&](int i) { d[i] = result[i]; });
}

void redux(Form& f) {
  f.take("sync");
  const std::string op = f.take_one({"add", "min", "max", "and", "or", "xor"});
  const Type t = f.take_type();
  f.expect(3);
  f.out(0, t);
  f.in(1, t);
  f.in(2, Type::kB32);
  const bool logic = op == "and" || op == "or" || op == "xor";
  if (op.empty() || (logic ? t != Type::kB32 : t != Type::kU32 && t != Type::kS32)) f.fail("that form is not modelled");
  const uint32_t sign = t == Type::kS32 ? 2 : 0;
  f.inst.form = op == "add"   ? 0
                : op == "min" ? 1 + sign
                : op == "max" ? 2 + sign
                : op == "and" ? 5
                : op == "or"  ? 6
                              : 7;
  f.emit(&redux_run, OpClass::kWarp);
}

// 9.7.13.14: some lane of the member mask; the same one each time for the same mask. op: d, p, member
void elect_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!members(w, in, in.op[2], &mask)) return;
  const uint32_t* member = w.in<uint32_t>(in.op[2]);
  uint32_t* d = w.out<uint32_t>(in.op[0]);
  uint32_t leaders = 0;
  uint32_t leader[32];
  for_lanes(mask, [&](int i) {
    leader[i] = static_cast<uint32_t>(__builtin_ctz(member[i] & mask));
    leaders |= static_cast<uint32_t>(leader[i] == static_cast<uint32_t>(i)) << i;
  });
  for_lanes(mask, [&](int i) { d[i] = leader[i]; });
  w.set_pred(in.op[1], mask, leaders);
}

void elect(Form& f) {
  f.take("sync");
  f.expect(2);
  const ptx::AstOperand& d = f.operand(0);
  if (d.kind != ptx::AstOperand::Kind::kPair) f.fail("the destination is d|p");
  f.out(d.sub[0], Type::kB32);
  f.out_pred(d.sub[1]);
  f.in(1, Type::kB32);
  f.emit(&elect_run, OpClass::kWarp);
}

}  // namespace

void warp_sync(Form& f) {
  f.expect(1);
  f.in(0, Type::kB32);
  // 9.7.13.2: it waits for the lanes of the mask to execute a bar.warp.sync with that mask, wherever they do.
  f.emit(
      [](Warp& w, const Inst& in, uint32_t mask) {
        const uint32_t here = mask;
        if (!members(w, in, in.op[0], &mask, true) || !w.block->order) return;
        const uint32_t* member = w.in<uint32_t>(in.op[0]);
        for (uint32_t rest = here; rest;) {  // several groups may be complete at once: each is ordered by itself
          const uint32_t group = member[__builtin_ctz(rest)] & mask;
          w.block->order->synchronize(w.id, group);
          rest &= ~group;
        }
      },
      OpClass::kWarp);
}

void add_warp(FormTable& t) {
  t["shfl"] = shfl;
  t["vote"] = vote;
  t["match"] = match;
  t["redux"] = redux;
  t["elect"] = elect;
}

}  // namespace vsm::ops
