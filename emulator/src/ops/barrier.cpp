// SPDX-License-Identifier: Apache-2.0
// bar / barrier: PTX ISA 9.0, 9.7.13.1; barrier.cluster of a cluster of one block.
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

using exec::Block;
using exec::NamedBarrier;

// form: kind (0 sync, 1 arrive, 2 red.popc, 3 red.and, 4 red.or), has thread count, is aligned
enum : uint32_t { kHasCount = 1u << 8, kAligned = 1u << 9 };

// The barrier is complete: op 3 takes the result of a reduction.
void pass(Warp& w, const Inst& in, uint32_t mask) {
  exec::Fragment& f = w.frag();
  f.past_barrier = false;
  // What preceded it is performed relative to all threads that take part, so to all that could wait for an arrival.
  if (w.arrivals && !(in.form & kHasCount)) w.arrivals->fence(mask, false, w.steps + 1, w.clock);
  const uint32_t kind = in.form & 255;
  if (kind == 2) for_lanes(mask, [&](int i) { w.out<uint32_t>(in.op[3])[i] = f.barrier_result; });
  if (kind >= 3) w.set_pred(in.op[3], mask, f.barrier_result ? ~0u : 0);
}

void reduce(NamedBarrier& b, uint32_t kind, uint32_t predicate, uint32_t mask) {
  const uint32_t p = predicate & mask;
  if (kind == 2) b.reduction += static_cast<uint32_t>(__builtin_popcount(p));
  else if (kind == 3) b.reduction = b.reduction && p == mask;
  else b.reduction = b.reduction || p != 0;
}

// "causes executing thread to wait for all non-exited threads from its warp and marks warps' arrival at barrier": lanes
// that come in several fragments wait for each other first, then all of them for the barrier. Only .aligned (bar.* is)
// needs them at the same instruction.
void barrier_run(Warp& w, const Inst& in, uint32_t mask) {
  if (w.frag().at_barrier) return w.wait("barrier");
  if (w.frag().past_barrier) return pass(w, in, mask);
  Block& block = *w.block;
  const int lane = __builtin_ctz(mask);
  const uint64_t id = w.value(in.op[0], lane);
  if (id > 15)
    w.fail(ReportKind::kBarrierMisuse, in, lane, "barrier " + std::to_string(id) + " does not exist; there are 16");
  NamedBarrier& b = block.barriers[id];
  const uint32_t kind = in.form & 255;
  const bool counted = in.form & kHasCount, aligned = in.form & kAligned;
  const uint64_t threads = counted ? w.value(in.op[1], lane) : block.live_threads_rounded();
  const uint64_t key = aligned ? w.here() : (counted ? threads : 0) << 32 | 0xfffff000u | id << 4 | kind;
  if (!w.assemble(&mask, w.live, key, aligned)) return;
  if (counted && (threads == 0 || threads % 32)) {
    w.fail(ReportKind::kBarrierMisuse, in, lane,
           "the thread count " + std::to_string(threads) + " is not a positive multiple of 32");
  }
  if (b.arrived == 0) {
    b.expected = static_cast<uint32_t>(threads);
    b.all = !counted;
    b.reduction = kind == 3;
    b.arriving = exec::Clock();
  } else if ((b.all ? block.live_threads_rounded() : b.expected) != threads) {  // warps may have exited since
    w.fail(ReportKind::kBarrierMisuse, in, lane,
           "barrier " + std::to_string(id) + " is used with " + std::to_string(threads) +
               " threads while others wait at it for " + std::to_string(b.expected));
  }
  mask &= w.frag().mask;
  if (kind >= 2) reduce(b, kind, w.pred(in.op[2]), mask);
  for (exec::Fragment& f : w.fragments) {
    if (f.gathers != key) continue;
    if (kind >= 2) reduce(b, kind, w.pred(w.code[f.pc].op[2]), w.active(f));
    f.gathers = 0;
    f.at_barrier = kind != 1;
    f.barrier = static_cast<uint8_t>(id);
    f.waiting_for = "barrier";
    if (kind != 1) continue;
    f.blocked = false;
    ++f.pc;
  }
  w.frag().at_barrier = kind != 1;
  w.frag().barrier = static_cast<uint8_t>(id);
  b.arrived += 32;
  w.release(b.arriving, w.live);
  ++block.effects;
  if (b.arrived > (b.all ? block.live_threads_rounded() : b.expected)) {
    w.fail(ReportKind::kBarrierMisuse, in, lane,
           "more threads arrive at barrier " + std::to_string(id) + " than it expects");
  }
  block.check_barrier_release(static_cast<int>(id));
  if (kind == 1) return;
  if (w.frag().at_barrier) return w.wait("barrier");
  pass(w, in, mask);
}

// 9.7.13.3: of a cluster of one block. form: 1 arrive, 0 wait.
void cluster_run(Warp& w, const Inst& in, uint32_t mask) {
  Block& block = *w.block;
  NamedBarrier& b = block.barriers[exec::kClusterBarrier];
  // Fragments of the warp that come apart wait for the barrier first, then for each other.
  if (!in.form && w.cluster_arrived && b.generation == w.cluster_generation) return w.wait("cluster barrier");
  if (!w.converge(in, &mask)) return;
  if (in.form) {
    if (w.cluster_arrived) w.fail(ReportKind::kBarrierMisuse, in, -1, "barrier.cluster.arrive twice without a wait");
    w.cluster_arrived = true;
    w.cluster_generation = b.generation;
    b.all = true;
    b.arrived += 32;
    w.release(b.arriving, mask);
    ++block.effects;
    return block.check_barrier_release(exec::kClusterBarrier);
  }
  if (!w.cluster_arrived) w.fail(ReportKind::kBarrierMisuse, in, -1, "barrier.cluster.wait without an arrive");
  w.cluster_arrived = false;
  w.acquire(b.completed, mask);
}

void bar(Form& f) {
  if (f.take("cluster")) {
    const std::string kind = f.take_one({"arrive", "wait"});
    if (kind.empty()) f.fail(".arrive or .wait is missing");
    const bool arrive = kind == "arrive";
    f.take_one({"release", "relaxed", "acquire"});
    f.take("aligned");
    f.expect(0);
    f.inst.form = arrive;
    return f.emit(&cluster_run, OpClass::kBarrier);
  }
  if (f.take("warp")) {
    f.take("sync");
    return warp_sync(f);
  }
  f.take("cta");
  const bool aligned = f.take("aligned") || f.name() == "bar";
  const std::string kind = f.take_one({"sync", "arrive", "red"});
  if (kind.empty()) f.fail(".sync, .arrive or .red is missing");
  uint32_t form = (kind == "arrive" ? 1u : 0u) | (aligned ? uint32_t{kAligned} : 0u);
  if (kind == "red") {
    const std::string op = f.take_one({"popc", "and", "or"});
    f.take("u32");
    f.take("pred");
    f.expect(3, 4);
    const bool counted = f.count() == 4;
    form |= op == "popc" ? 2u : op == "and" ? 3u : 4u;
    f.in(1, Type::kB32);
    counted ? f.in(2, Type::kB32) : f.in_constant(0, 32);
    f.in_pred(f.count() - 1);
    op == "popc" ? f.out(0, Type::kB32) : f.out_pred(0);
    if (counted) form |= kHasCount;
  } else {
    f.expect(1, 2);
    f.in(0, Type::kB32);
    f.count() == 2 ? f.in(1, Type::kB32) : f.in_constant(0, 32);
    if (f.count() == 2) form |= kHasCount;
    if (kind == "arrive" && f.count() != 2) f.fail(".arrive needs a thread count");
  }
  f.inst.form = form;
  f.emit(&barrier_run, OpClass::kBarrier);
}

}  // namespace

void add_barrier(FormTable& t) { t["bar"] = t["barrier"] = bar; }

}  // namespace vsm::ops
