// SPDX-License-Identifier: Apache-2.0
// Shared memory that bulk copies of a block write and read: who may touch it already (kWatchFences).
//
// The copies finish here when they like, but a program may only count on what it has waited for. So what counts is not
// when the bytes move: what a copy fills may be touched by whoever is ordered behind a wait that saw the mbarrier's
// phase complete, in which the copy signalled; what a copy reads may be overwritten behind cp.async.bulk.wait_group,
// with .read or without.
#pragma once

#include <cstdint>
#include <vector>

#include "exec/memory.h"

namespace vsm::exec {

struct Warp;
struct Inst;
struct MBarrier;
struct PendingCopy;

class AsyncChecker {
 public:
  explicit AsyncChecker(uint32_t shared_bytes) : granules_((shared_bytes + 15) / 16), fills_(1) {}

  /// Nothing to say about an access to these bytes by this warp.
  bool clear(int warp, uint32_t address, uint32_t bytes, bool store) const {
    for (uint32_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
      const uint32_t v = granules_[g];
      if (v & (store ? kSource | kInFlight : kInFlight)) return false;
      if ((v & kFill) && !(fills_[v & kFill].known >> warp & 1)) return false;
    }
    return true;
  }
  /// Reports what is wrong with it; `clock` is the accessor's.
  void check(Warp& w, const Inst& in, int lane, uint32_t address, uint32_t bytes, bool store, const Clock& clock);

  /// A copy into shared memory is issued, and has landed; its barrier is then in the phase that it signals.
  void fill(Warp& w, const PendingCopy& c, const std::vector<std::pair<uint32_t, uint32_t>>& ranges);
  void landed(MBarrier& b, uint32_t address, uint32_t bytes);
  /// A warp saw the last phase of the barrier complete.
  void seen(const Warp& w, const MBarrier& b);

  /// A copy out of shared memory is issued; the lane's groups up to `group` are waited for.
  void read(const PendingCopy& c, uint32_t begin, uint32_t end);
  void waited(const Warp& w, int lane, uint32_t group);

 private:
  static constexpr uint32_t kSource = 1u << 31, kInFlight = 1u << 30, kFill = kInFlight - 1;
  struct Fill {  // what landed in one phase of an mbarrier
    uint32_t known = 0;  // warps that are behind a wait for it
    uint32_t seen[kMaxWarps] = {};  // a warp's clock when it saw the phase complete; 0: it has not
    uint32_t granules = 0;
    uint64_t serial = 0;  // entries are used again
  };
  struct Read {
    int warp, lane;
    uint32_t group, line, begin, end;
    uint32_t waited;  // the warp's clock then; 0: not yet
  };
  bool knows(Fill& f, int warp, const Clock& clock);
  void release(uint32_t granule);

  std::vector<uint32_t> granules_;  // of 16 bytes: flags, and a Fill
  std::vector<Fill> fills_;  // the first is none
  std::vector<uint32_t> free_;
  uint64_t serial_ = 0;
  std::vector<Read> reads_;
};

}  // namespace vsm::exec
