// SPDX-License-Identifier: Apache-2.0
// What GB10 needs beyond the PTX ISA: a fence before each arrival (kWatchArrivals).
//
// By the ISA, mbarrier.arrive releases by default, and red.release does: no fence is missing in front of them. GB10
// does not reliably honour that (flashinfer issue 3658, seen on a DGX Spark and not on SM120). So this checker asks for
// - a fence of at least block level between a warp's accesses to shared memory, loads included, and its next arrival:
//   at an mbarrier in any form, or with a releasing atomic or store on shared memory. cp.async.mbarrier.arrive comes
//   when the thread's copies are done: those alone need no fence before it;
// - a device-level fence between a block's writes to global memory and a release to other blocks.
// A barrier of the whole block is as good as a block-level fence (9.7.13.1: earlier accesses are performed relative to
// all threads that take part). The fence is the arriving thread's own. It covers what that thread did, what lanes did
// with which it met at a .sync instruction since, and what other warps wrote before a barrier that it passed.
//
// A relaxed atomic or a strong store may be a signal or data (a histogram, a counter of work). It counts as a signal
// once somebody else looks at the place with a strong load. An atomic is no such look: a queue's counter tells nobody
// anything.
#pragma once

#include <array>
#include <cstdint>

#include "exec/memory.h"

namespace vsm::exec {

/// One warp's accesses and fences, as of its instruction count.
struct ArrivalChecker {
  using Steps = std::array<uint64_t, 32>;
  Steps touched{};  // shared memory last, by this lane or one that it met since
  Steps copied{};  // likewise, by cp.async: cp.async.mbarrier.arrive itself waits for these
  Steps block_fence{};  // last fence of at least block level
  Steps wrote{};  // global memory, like `touched`
  Steps device_fence{};  // last fence of at least device level
  uint64_t signal = 0;  // the last releasing instruction: what it writes is no data
  uint32_t last_write = 0;  // the warp's clock at its last global write
  std::array<std::array<uint32_t, kMaxWarps>, 32> covered{};  // the warp's clock at each lane's device fence

  void access(Steps& what, uint32_t lanes, uint64_t step) {
    for (uint32_t m = lanes; m; m &= m - 1) what[static_cast<size_t>(__builtin_ctz(m))] = step;
  }
  void meet(uint32_t lanes);
  void fence(uint32_t lanes, bool device, uint64_t step, const Clock& clock);
};

}  // namespace vsm::exec
