// SPDX-License-Identifier: Apache-2.0
// What is ordered before what among the threads of a block: a vector clock for each thread, for the modes that need it
// (race_checker.h, weak_memory.h). Base causality order, PTX ISA 9.0, 8.9.5, as far as it runs through the block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vsm::exec {

/// For each thread of the block, the version up to which its accesses are ordered before; behind the last thread's, the
/// time of WeakMemory of the last acquire that is ordered before. Empty: nothing is.
using ThreadClock = std::vector<uint32_t>;

void join(ThreadClock& into, const ThreadClock& from);

class ThreadOrder {
 public:
  void start(int warps);
  /// Of what a warp's threads access now; a release ends it.
  uint32_t version(int warp) const { return versions_[static_cast<size_t>(warp)]; }
  size_t threads() const { return size_ - 1; }
  const uint32_t* clock(int warp, int lane) const { return &clocks_[index(warp, lane) * size_]; }

  /// What these lanes did so far, and what is ordered before that, goes into `into`.
  void release(int warp, uint32_t mask, ThreadClock& into);
  /// ... and is ordered before what these lanes do from now on.
  void acquire(int warp, uint32_t mask, const ThreadClock& from);
  /// bar.warp.sync: of the instructions among lanes the only one that orders their memory accesses (9.7.13.2).
  void synchronize(int warp, uint32_t mask);
  /// With a relaxed write behind it, or a relaxed read before it, a fence makes a release or acquire pattern (8.8).
  /// `wide`: its scope is wider than the block.
  void fence(int warp, uint32_t mask, bool wide);
  void relaxed_write(int warp, int lane, ThreadClock& into);
  void relaxed_read(int warp, int lane, const ThreadClock& from);
  /// The version of the thread's accesses that its last fence released; 0: none.
  uint32_t fenced(int warp, int lane) const {
    const size_t thread = index(warp, lane);
    return fences_[thread].empty() ? 0 : fences_[thread][thread];
  }
  /// What the thread's last wide fence released: to other blocks, with a relaxed write behind it.
  const ThreadClock& wide_fence(int warp, int lane) const { return wide_fences_[index(warp, lane)]; }
  /// A thread's acquire at a scope wider than the block, or a relaxed read that the next wide fence makes one.
  void acquired_at(int warp, int lane, uint32_t time);
  void read_at(int warp, int lane, uint32_t time) { read_at_[index(warp, lane)] = time; }

 private:
  static size_t index(int warp, int lane) { return static_cast<size_t>(warp * 32 + lane); }
  uint32_t* at(int warp, int lane) { return &clocks_[index(warp, lane) * size_]; }
  size_t size_ = 0;  // of a clock
  std::vector<uint32_t> versions_;
  std::vector<uint32_t> clocks_;
  // Per thread:
  std::vector<ThreadClock> fences_, wide_fences_;  // what its last fence released, and its last wide one
  std::vector<ThreadClock> pending_;               // what its relaxed reads found, for the next fence
  std::vector<uint32_t> read_at_;                  // the time of its last relaxed read at a wide scope
};

}  // namespace vsm::exec
