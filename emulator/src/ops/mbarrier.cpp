// SPDX-License-Identifier: Apache-2.0
// mbarrier: PTX ISA 9.0, 9.7.13.15. The object's 64 bits are opaque; its state lives beside the block.
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::exec {

namespace {
constexpr uint32_t kMaxCount = (1u << 20) - 1;  // 9.7.13.15.2
constexpr int64_t kMaxTx = (1 << 20) - 1;
}  // namespace

MBarrier& Block::mbarrier(Warp& w, const Inst& in, int lane, uint32_t address) {
  const auto it = mbarriers.find(address);
  if (it == mbarriers.end())
    w.fail(ReportKind::kBarrierMisuse, in, lane, "no mbarrier was initialized at that address", "shared", address);
  return it->second;
}

MBarrier& Block::mbarrier_used(Warp& w, const Inst& in, int lane, uint32_t address) {
  MBarrier& b = mbarrier(w, in, lane, address);
  if (w.clock.t[b.init_warp] < b.init_clock && (launch->config->watch & kWatchFences)) {
    w.report(
        ReportKind::kBarrierMisuse, in, lane,
        "uses an mbarrier that warp " + std::to_string(b.init_warp) + " initialized, with nothing ordering the two",
        "shared", address);
  }
  return b;
}

void Block::mbarrier_complete_if_due(MBarrier& b) {
  if (b.pending != 0 || b.tx != 0) return;
  ++b.phase;
  b.pending = b.expected;
  b.completed = b.arriving;
  b.arriving = Clock();
  ++effects;
}

void Block::mbarrier_arrive(Warp& w, const Inst& in, int lane, uint32_t address, uint32_t count, bool drop) {
  MBarrier& b = mbarrier(w, in, lane, address);
  if (count == 0 || count > kMaxCount)
    w.fail(ReportKind::kBarrierMisuse, in, lane, "an arrive count of " + std::to_string(count) + " is not possible",
           "shared", address);
  if (count > b.pending) {
    w.fail(ReportKind::kBarrierMisuse, in, lane,
           std::to_string(count) + " arrivals where the phase expects " + std::to_string(b.pending) + " more of " +
               std::to_string(b.expected),
           "shared", address);
  }
  if (drop) b.expected -= count;
  b.pending -= count;
  w.release(b.arriving, 1u << lane);
  ++effects;
  mbarrier_complete_if_due(b);
}

void Block::mbarrier_tx(Warp& w, const Inst& in, int lane, uint32_t address, int64_t delta) {
  MBarrier& b = mbarrier(w, in, lane, address);
  b.tx += delta;
  if (b.tx > kMaxTx || b.tx < -kMaxTx) {
    w.fail(ReportKind::kBarrierMisuse, in, lane,
           "the transaction count " + std::to_string(b.tx) + " is out of its range of +-1,048,575", "shared", address);
  }
  ++effects;
  mbarrier_complete_if_due(b);
}

}  // namespace vsm::exec

namespace vsm::ops {
namespace {

using exec::Block;
using exec::MBarrier;
using exec::SharedMemory;

uint32_t barrier_address(Warp& w, const Inst& in, const Operand& base, int lane) {
  uint64_t a = w.value(base, lane) + static_cast<uint64_t>(in.imm);
  if (base.bits == 64 && a >> 56 == exec::kSharedWindow >> 56) a -= exec::kSharedWindow;
  if (a % 8) w.fail(ReportKind::kMisaligned, in, lane, "an mbarrier must be 8-byte aligned", "shared", a);
  if (a < w.block->launch->limits->shared_reserved || a + 8 > w.block->shared.size) {
    w.fail(ReportKind::kOutOfBounds, in, lane, "the mbarrier lies outside the block's shared memory", "shared", a);
  }
  return static_cast<uint32_t>(a);
}

// op: base, count
void init_run(Warp& w, const Inst& in, uint32_t mask) {
  Block& block = *w.block;
  const uint32_t* count = w.in<uint32_t>(in.op[1]);
  for_lanes(mask, [&](int i) {
    const uint32_t a = barrier_address(w, in, in.op[0], i);
    if (block.mbarriers.count(a))
      w.fail(ReportKind::kBarrierMisuse, in, i, "an mbarrier already lives there", "shared", a);
    if (count[i] == 0 || count[i] > (1u << 20) - 1)
      w.fail(ReportKind::kBarrierMisuse, in, i, "a count of " + std::to_string(count[i]) + " is not possible", "shared",
             a);
    MBarrier b;
    b.expected = b.pending = count[i];
    b.init_warp = w.id;
    b.init_clock = w.clock.t[w.id];
    block.mbarriers[a] = b;
    for (uint32_t k = 0; k < 8; ++k) block.shared.shadow[a + k] = SharedMemory::kWritten | SharedMemory::kMBarrier;
  });
  ++block.effects;
}

void inval_run(Warp& w, const Inst& in, uint32_t mask) {
  for_lanes(mask, [&](int i) {
    const uint32_t a = barrier_address(w, in, in.op[0], i);
    w.block->mbarrier(w, in, i, a);
    w.block->mbarriers.erase(a);
    for (uint32_t k = 0; k < 8; ++k) w.block->shared.shadow[a + k] = 0;
  });
  ++w.block->effects;
}

// A state token: completed phases, and the pending count before the arrival.
uint64_t token(const MBarrier& b) { return b.phase << 20 | b.pending; }

// op: state, base, count, tx. form: 1 drop, 2 expect_tx, 4 noComplete
void arrive_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t *count = w.in<uint32_t>(in.op[2]), *tx = w.in<uint32_t>(in.op[3]);
  uint64_t* state = w.out<uint64_t>(in.op[0]);
  for_lanes(mask, [&](int i) {
    const uint32_t a = barrier_address(w, in, in.op[1], i);
    MBarrier& b = w.block->mbarrier_used(w, in, i, a);
    if (w.arrivals) w.check_arrival(in, i, a);
    const uint64_t t = token(b);
    if ((in.form & 4) && count[i] >= b.pending)
      w.fail(ReportKind::kBarrierMisuse, in, i, ".noComplete completes the phase", "shared", a);
    if (in.form & 2) {
      b.tx += tx[i];  // the arrival that follows may not see the phase complete in between
      if (b.tx > (1 << 20) - 1)
        w.fail(ReportKind::kBarrierMisuse, in, i,
               "the transaction count " + std::to_string(b.tx) + " is above 1,048,575", "shared", a);
    }
    w.block->mbarrier_arrive(w, in, i, a, count[i], in.form & 1);
    state[i] = t;
  });
}

// op: base, tx. form: 1 complete
void tx_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t* tx = w.in<uint32_t>(in.op[1]);
  for_lanes(mask, [&](int i) {
    const uint32_t a = barrier_address(w, in, in.op[0], i);
    w.block->mbarrier_used(w, in, i, a);
    w.block->mbarrier_tx(w, in, i, a, in.form & 1 ? -int64_t{tx[i]} : int64_t{tx[i]});
  });
}

// op: p, base, state or parity. form: 1 parity, 2 try (may wait)
void wait_run(Warp& w, const Inst& in, uint32_t mask) {
  uint32_t complete = 0;
  uint32_t missing = 0;
  for_lanes(mask, [&](int i) {
    const uint32_t a = barrier_address(w, in, in.op[1], i);
    const MBarrier& b = w.block->mbarrier_used(w, in, i, a);
    bool done;
    if (in.form & 1) {
      done = (b.phase & 1) != (w.value(in.op[2], i) & 1);
    } else {
      const uint64_t phase = w.value(in.op[2], i) >> 20;
      if (phase != b.phase && phase + 1 != b.phase) {
        w.fail(
            ReportKind::kBarrierMisuse, in, i,
            "the state is of phase " + std::to_string(phase) + "; the barrier is in phase " + std::to_string(b.phase),
            "shared", a);
      }
      done = phase != b.phase;
    }
    if (done) {
      w.acquire(b.completed, 1u << i);
      if (w.block->async) w.block->async->seen(w, b);
    } else {
      missing = a;
    }
    complete |= static_cast<uint32_t>(done) << i;
  });
  exec::Fragment& f = w.frag();
  if (complete != mask && (in.form & 2) && !f.timed_out) return w.wait("mbarrier", missing, true);
  f.timed_out = false;
  f.may_time_out = false;
  if (complete != mask) w.yield = true;
  w.set_pred(in.op[0], mask, complete);
}

void take_shared(Form& f) { f.take_one({"shared", "shared::cta", "shared::cluster"}); }

void mbarrier(Form& f) {
  const std::string kind = f.take_one(
      {"init", "inval", "arrive_drop", "arrive", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"});
  const bool expects = kind.compare(0, 6, "arrive") == 0 && f.take("expect_tx");
  const bool parity = f.take("parity");
  f.take_one({"release", "acquire", "relaxed"});
  f.take_one({"cta", "cluster"});
  const bool has_space = f.has("shared") || f.has("shared::cta") || f.has("shared::cluster");
  const Space space = has_space ? Space::kShared : Space::kGeneric;
  take_shared(f);
  const bool no_complete = f.take("noComplete");
  f.take("b64");
  if (kind == "init") {
    f.expect(2);
    f.address(0, space);
    f.in(1, Type::kB32);
    return f.emit(&init_run, OpClass::kBarrier);
  }
  if (kind == "inval") {
    f.expect(1);
    f.address(0, space);
    return f.emit(&inval_run, OpClass::kBarrier);
  }
  if (kind == "arrive" || kind == "arrive_drop") {
    // [state,] [addr] {, count}; .expect_tx: the count is the transaction count
    const bool returns = f.operand(0).kind != ptx::AstOperand::Kind::kAddress;
    const size_t at = returns ? 1 : 0;
    f.expect(at + 1, at + 2);
    f.out(returns ? f.operand(0) : ptx::AstOperand(), Type::kB64);
    f.address(at, space);
    const bool counted = f.count() == at + 2;
    if (expects && !counted) f.fail("the transaction count is missing");
    counted && !expects ? f.in(at + 1, Type::kB32) : f.in_constant(1, 32);
    expects ? f.in(at + 1, Type::kB32) : f.in_constant(0, 32);
    f.inst.form = (kind == "arrive_drop" ? 1u : 0) | (expects ? 2u : 0) | (no_complete ? 4u : 0);
    return f.emit(&arrive_run, OpClass::kBarrier);
  }
  if (kind == "expect_tx" || kind == "complete_tx") {
    f.expect(2);
    f.address(0, space);
    f.in(1, Type::kB32);
    f.inst.form = kind == "complete_tx";
    return f.emit(&tx_run, OpClass::kBarrier);
  }
  if (kind == "test_wait" || kind == "try_wait") {
    f.expect(3, kind == "try_wait" ? 4 : 3);
    f.out_pred(0);
    f.address(1, space);
    f.in(2, parity ? Type::kB32 : Type::kB64);
    if (f.count() == 4) f.in(3, Type::kU32);
    f.inst.form = (parity ? 1u : 0) | (kind == "try_wait" ? 2u : 0);
    return f.emit(&wait_run, OpClass::kBarrier);
  }
  if (kind == "pending_count") {
    f.expect(2);
    f.out(0, Type::kB32);
    f.in(1, Type::kB64);
    return f.emit(lanes<uint32_t, uint64_t>([](uint64_t s) { return static_cast<uint32_t>(s & 0xfffff); }),
                  OpClass::kBarrier);
  }
  f.fail("that operation is not modelled");
}

}  // namespace

void add_mbarrier(FormTable& t) { t["mbarrier"] = mbarrier; }

}  // namespace vsm::ops
