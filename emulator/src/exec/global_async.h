// SPDX-License-Identifier: Apache-2.0
// Global memory between the generic and the async proxy, within a block and across blocks (kWatchFences).
//
// - What the generic proxy wrote, a bulk copy may read behind fence.proxy.async only: somewhere along the chain of
//   barriers, releases and acquires from the write to the copy, in either block (PTX ISA 9.0, 8.9.3, "proxy-preserved
//   base causality order").
// - What a bulk copy writes is there behind cp.async.bulk.wait_group of the thread that issued it. With .read that says
//   only that the source was read.
//
// Within a block, order is that of its warps' clocks. Across blocks it is followed through global addresses: a strong
// write there (releasing, or relaxed behind a device-level fence) takes along how far its block was, in instructions,
// and what it knows of others; a strong read brings that. Where no such chain leads from a write to a read, nothing is
// said here: that is a race, not a missing fence. Kept for launches of kernels with bulk copies, of these for one
// launch.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "exec/memory.h"

namespace vsm::exec {

struct Block;
struct Warp;
struct Inst;
struct PendingCopy;

/// How far into a block others are known to be: its instruction count at the last signal, and at the last proxy fence
/// on the way from there.
struct Progress {
  uint64_t signalled = 0, fenced = 0;
};

/// What one block knows of the others.
struct KnownBlocks {
  std::unordered_map<uint64_t, Progress> blocks;
  std::unordered_map<uint64_t, uint64_t> versions;  // of signals, when last looked at
  uint64_t proxy_fence = 0;  // this block's instruction count at its last one, for global memory
  Clock fenced;  // ... and the writes of its warps that such fences cover
  bool device_fence = false;
  uint64_t page_number = ~uint64_t{0};  // of GlobalAsync, found last
  void* page = nullptr;
};

class GlobalAsync {
 public:
  GlobalAsync(bool loads, bool stores) : loads_(loads), stores_(stores) {}

  void wrote(const Warp& w, uint64_t address, uint32_t bytes);
  void check_load(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes) {
    if (stores_ && overlaps(address, bytes)) check(w, in, lane, address, bytes, nullptr);
  }
  /// A bulk copy is issued.
  void bulk_load(Warp& w, const PendingCopy& c, uint64_t address, uint32_t bytes);
  uint32_t begin_store(const Warp& w, const PendingCopy& c);
  void bulk_store(const Warp& w, uint32_t store, uint64_t address, uint32_t bytes);
  /// cp.async.bulk.wait_group, not .read.
  void waited(const Warp& w, int lane, uint32_t group);

  void fence(Warp& w, bool proxy);
  void signal(const Warp& w, uint64_t address, bool release);
  void look(const Warp& w, uint64_t address);

 private:
  struct Event {  // the last write to 16 bytes
    std::atomic<uint64_t> who{0};  // block + 1, warp, by a bulk copy
    std::atomic<uint64_t> when{
        0};  // the block's instruction count << 32 | the warp's clock, or the number of the store
  };
  using Page = std::array<Event, 64>;
  struct Store {
    uint64_t block, issued, done;  // instruction counts; done 0: not waited for
    int warp, lane;
    uint32_t group, line, done_clock;
  };
  struct Signal {
    uint64_t version = 0;
    std::unordered_map<uint64_t, Progress> blocks;
  };
  bool overlaps(uint64_t address, uint32_t bytes) const {
    return address < high_.load(std::memory_order_relaxed) && address + bytes > low_.load(std::memory_order_relaxed);
  }
  void put(const Warp& w, uint64_t address, uint32_t bytes, uint64_t who, uint64_t when);
  Page* page(const Warp& w, uint64_t number, bool make);
  /// `copy`: that reads, or null: a load.
  void check(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, const PendingCopy* copy);

  const bool loads_, stores_;
  std::atomic<uint64_t> low_{~uint64_t{0}}, high_{0};
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  std::deque<Store> bulk_stores_;
  std::unordered_map<uint64_t, Signal> signals_;
};

}  // namespace vsm::exec
