// SPDX-License-Identifier: Apache-2.0
// A block: its warps take turns; waits that can no longer end are reported.
#include <algorithm>

#include "exec/machine.h"

namespace vsm::exec {
namespace {

constexpr int kTurn = 256;            // instructions of one warp before the next has its turn
constexpr uint32_t kMaxFruitless = 64;  // time-outs of waits without any side effect in between

}  // namespace

void Block::start(Launch* l, uint64_t index, GridAccesses* shares) {
  launch = l;
  linear = index;
  const LaunchConfig& c = *l->config;
  id[0] = static_cast<uint32_t>(index % c.grid[0]);
  id[1] = static_cast<uint32_t>(index / c.grid[0] % c.grid[1]);
  id[2] = static_cast<uint32_t>(index / c.grid[0] / c.grid[1]);
  const int count = static_cast<int>(l->warps_per_block);
  shared.start(l->shared_bytes, (c.watch & kWatchFences) != 0);
  order.reset();
  races.reset();
  if ((c.watch & kWatchRaces) || l->weak) {
    order = std::make_unique<ThreadOrder>();
    order->start(count);
  }
  if (c.watch & kWatchRaces) {
    races = std::make_unique<RaceChecker>();
    races->start(l->shared_bytes, count);
  }
  mbarriers.clear();
  for (NamedBarrier& b : barriers) b = NamedBarrier();
  pending.clear();
  cp_async_pending = 0;
  counters = Counters();
  counters.blocks = 1;
  cache = RegionCache();
  fenced = published = Clock();
  async.reset();
  known = KnownBlocks();
  open_stores.clear();
  accesses = shares;
  checks_grids = accesses || l->in_flight;
  triggered = false;
  std::fill_n(grid_waits, kMaxWarps, 0u);
  sync_variables.clear();
  unfenced_signals.clear();
  effects = effects_seen = idle_steps = 0;
  fruitless = 0;
  rng = index;
  end_checked = false;
  warps.resize(l->warps_per_block);
  for (size_t i = 0; i < warps.size(); ++i) warps[i].start(this, static_cast<int>(i));
}

bool Block::finished() const {
  return std::all_of(warps.begin(), warps.end(), [](const Warp& w) { return w.done(); });
}

Block::Slice Block::run(uint64_t budget) {
  const uint64_t effects_before = effects;
  uint64_t executed = 0;
  while (executed < budget) {
    bool any = false, awake = false;  // some warp ran; it did not end its turn by sleeping
    const uint64_t effects_round = effects;
    const uint64_t steps_before = counters.warp_instructions;
    for (Warp& w : warps) {
      if (w.done() || !w.run(kTurn)) continue;
      any = true;
      awake |= !w.yield;
    }
    executed += counters.warp_instructions - steps_before;
    idle_steps = effects == effects_round ? idle_steps + (counters.warp_instructions - steps_before) : 0;
    const bool all_done = finished();
    if (all_done && !end_checked) {
      check_end();
      const bool waited = std::any_of(grid_waits, grid_waits + kMaxWarps, [](uint32_t c) { return c != 0; });
      if (waited && !triggered) launch->waited_before_trigger = true;
      end_checked = true;
    }
    any |= advance_async(!any || all_done);
    if (all_done && pending.empty()) return Slice::kDone;
    // Sleepers poll for what other blocks do: the rest of the slice would be spent on that, and counted.
    if (any && !awake && effects == effects_round && pending.empty()) break;
    if (any) continue;
    if (effects == effects_seen) {
      if (++fruitless > kMaxFruitless) deadlock();
    } else {
      fruitless = 0;
      effects_seen = effects;
    }
    bool timed_out = false;
    for (Warp& w : warps) {
      for (Fragment& f : w.fragments) {
        if (f.blocked && f.may_time_out) timed_out = f.timed_out = true;
      }
    }
    if (!timed_out) deadlock();
  }
  return effects == effects_before ? Slice::kIdle : Slice::kBusy;
}

void Block::deadlock() {
  for (Warp& w : warps) {
    for (const Fragment& f : w.fragments) {
      const Inst& in = w.code[f.pc];
      char address[40] = "";
      if (f.waiting_address)
        std::snprintf(address, sizeof address, " at 0x%llx", static_cast<unsigned long long>(f.waiting_address));
      std::string text = "deadlock: lanes " + lane_list(f.mask) + " wait for " + f.waiting_for + address;
      const auto it = mbarriers.find(static_cast<uint32_t>(f.waiting_address));
      if (f.waiting_address && it != mbarriers.end()) {
        const MBarrier& b = it->second;
        text += " (phase " + std::to_string(b.phase) + ", " + std::to_string(b.pending) + " of " +
                std::to_string(b.expected) + " arrivals and " + std::to_string(b.tx) + " bytes missing)";
      }
      w.report(ReportKind::kDeadlock, in, -1, text, f.waiting_address ? "shared" : "", f.waiting_address);
    }
  }
  throw Stop{LaunchStatus::kDeadlock};
}

uint32_t Block::live_threads_rounded() const {
  uint32_t n = 0;
  for (const Warp& w : warps) n += w.done() ? 0 : 32;
  return n;
}

std::string lane_list(uint32_t mask) {
  if (mask == ~0u) return "0-31";
  std::string s;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    int j = i;
    while (j + 1 < 32 && (mask >> (j + 1) & 1)) ++j;
    s += (s.empty() ? "" : ",") + std::to_string(i) + (j > i ? "-" + std::to_string(j) : "");
    i = j;
  }
  return s.empty() ? "none" : s;
}

// Warps that exit no longer count for a barrier that waits for "all threads".
void Block::check_barrier_release(int barrier) {
  NamedBarrier& b = barriers[barrier];
  if (b.arrived == 0) return;
  const uint32_t expected = b.all ? live_threads_rounded() : b.expected;
  if (b.arrived < expected) return;
  // The waiting threads are restarted now and the barrier can be used again, by other warps too (9.7.13.1).
  for (Warp& w : warps) {
    for (Fragment& f : w.fragments) {
      if (!f.at_barrier || f.barrier != barrier) continue;
      f.at_barrier = false;
      f.past_barrier = true;
      f.barrier_result = b.reduction;
      w.acquire(b.arriving, f.mask);  // all live lanes of the warp take part, each in one of its fragments
    }
  }
  b.arrived = 0;
  b.completed = b.arriving;
  b.arriving = Clock();
  ++b.generation;
  ++effects;
}

}  // namespace vsm::exec
