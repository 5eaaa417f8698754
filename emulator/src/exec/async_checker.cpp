// SPDX-License-Identifier: Apache-2.0
#include "exec/async_checker.h"

#include <algorithm>

#include "exec/machine.h"

namespace vsm::exec {

bool AsyncChecker::knows(Fill& f, int warp, const Clock& clock) {
  if (f.known >> warp & 1) return true;
  for (int v = 0; v < kMaxWarps; ++v) {
    if (!f.seen[v] || clock.t[v] < f.seen[v]) continue;
    f.known |= 1u << warp;
    return true;
  }
  return false;
}

void AsyncChecker::check(Warp& w, const Inst& in, int lane, uint32_t address, uint32_t bytes, bool store,
                         const Clock& clock) {
  bool filling = false, source = false;
  for (uint32_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
    const uint32_t v = granules_[g];
    source |= (v & kSource) != 0;
    filling |= (v & kInFlight) || ((v & kFill) && !knows(fills_[v & kFill], w.id, clock));
  }
  if (filling) {
    w.report(
        ReportKind::kMissingWait, in, lane,
        std::string(store ? "writes" : "reads") +
            " shared memory that a bulk copy fills, not ordered behind a wait that saw its mbarrier's phase complete",
        "shared", address);
  }
  if (!store || !source) return;
  for (const Read& r : reads_) {
    if (r.begin >= address + bytes || r.end <= address) continue;
    if (r.waited && (r.warp == w.id || clock.t[r.warp] >= r.waited)) continue;
    w.report(ReportKind::kMissingWait, in, lane,
             "overwrites shared memory that the bulk copy of PTX line " + std::to_string(r.line) +
                 " reads, not ordered behind a cp.async.bulk.wait_group for it",
             "shared", address);
    return;
  }
}

void AsyncChecker::release(uint32_t granule) {
  const uint32_t id = granules_[granule] & kFill;
  if (id == 0 || --fills_[id].granules != 0) return;
  fills_[id] = Fill();
  free_.push_back(id);
}

void AsyncChecker::fill(Warp& w, const PendingCopy& c, const std::vector<std::pair<uint32_t, uint32_t>>& ranges) {
  for (const auto& [address, bytes] : ranges) {
    if (!clear(w.id, address, bytes, true)) check(w, *c.inst, c.lane, address, bytes, true, c.clock);
  }
  for (const auto& [address, bytes] : ranges) {
    for (uint32_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
      release(g);
      granules_[g] = (granules_[g] & kSource) | kInFlight;
    }
  }
}

void AsyncChecker::landed(MBarrier& b, uint32_t address, uint32_t bytes) {
  if (b.fills.empty() || b.fills.back().phase != b.phase || fills_[b.fills.back().id].serial != b.fills.back().serial) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(fills_.size()));
      fills_.emplace_back();
    }
    fills_[free_.back()].serial = ++serial_;
    b.fills.push_back({free_.back(), serial_, b.phase});
    free_.pop_back();
    constexpr size_t kMostUnseen = 8;  // phases; nobody waits for one that long past
    if (b.fills.size() > kMostUnseen) b.fills.erase(b.fills.begin());
  }
  const uint32_t id = b.fills.back().id;
  for (uint32_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
    release(g);
    granules_[g] = (granules_[g] & kSource) | id;
    ++fills_[id].granules;
  }
}

void AsyncChecker::seen(const Warp& w, const MBarrier& b) {
  for (const MBarrier::PhaseFill& p : b.fills) {
    Fill& f = fills_[p.id];
    if (p.phase >= b.phase || f.serial != p.serial || f.seen[w.id]) continue;
    f.seen[w.id] = w.clock.t[w.id];
    f.known |= 1u << w.id;
  }
}

void AsyncChecker::read(const PendingCopy& c, uint32_t begin, uint32_t end) {
  // Whoever is behind the wait for this one is behind that for an earlier one of the same thread.
  reads_.erase(std::remove_if(reads_.begin(), reads_.end(),
                              [&](const Read& r) {
                                return r.warp == c.warp && r.lane == c.lane && r.begin >= begin && r.end <= end;
                              }),
               reads_.end());
  reads_.push_back({c.warp, c.lane, c.group, c.inst->line, begin, end, 0});
  for (uint32_t g = begin / 16; g <= (end - 1) / 16; ++g) granules_[g] |= kSource;
}

void AsyncChecker::waited(const Warp& w, int lane, uint32_t group) {
  for (Read& r : reads_) {
    if (r.warp == w.id && r.lane == lane && r.group < group && r.waited == 0) r.waited = w.clock.t[w.id];
  }
}

}  // namespace vsm::exec
