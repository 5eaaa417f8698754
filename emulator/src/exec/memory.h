// SPDX-License-Identifier: Apache-2.0
// Memory of the machine: the allocation table of global memory, a block's shared memory, and their shadows.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "device.h"
#include "exec/thread_order.h"

namespace vsm::exec {

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam, kConst };
const char* to_string(Space s);
enum class Access : uint8_t { kLoad, kStore, kAtomic };
/// Strong ones (PTX ISA 9.0, 8.4) do not race with each other; volatile ones are strong, and may hand over what nothing
/// orders. A matrix instruction accesses memory for the whole warp.
enum class Manner : uint8_t { kWeak, kStrong, kVolatile, kWholeWarp };

inline constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
inline constexpr uint64_t kLocalWindow = uint64_t{1} << 57;

struct ModuleText {
  std::string name;
  std::vector<std::string> lines;
};

/// A range of global memory that kernels may touch.
struct Region {
  uint64_t begin = 0, end = 0;
  bool read_only = false;
  bool owned = false;
  std::shared_ptr<std::vector<std::atomic<uint64_t>>> written;  // a bit per byte; null: all counts as written
  std::shared_ptr<std::vector<std::atomic<uint64_t>>> touched;  // a bit per 32-byte sector, this launch
  uint64_t uses = 0;  // register_memory counts
};

/// Few regions found last, per block.
struct RegionCache {
  const Region* entries[4] = {nullptr, nullptr, nullptr, nullptr};
  int next = 0;
};

class GlobalMemory {
 public:
  ~GlobalMemory();
  uint64_t allocate(uint64_t bytes, bool written = false);
  bool release(uint64_t address);
  void add(uint64_t address, uint64_t bytes, bool read_only);
  bool remove(uint64_t address);
  bool find(uint64_t address, Allocation* out) const;
  void mark_written(uint64_t address, uint64_t bytes);
  void mark_unwritten(uint64_t address, uint64_t bytes);
  uint64_t bytes() const { return bytes_; }

  /// Builds the table that launches look addresses up in. Launches of one device run one after another.
  void freeze(bool distinct);
  /// Distinct bytes touched since freeze(), in whole sectors.
  uint64_t distinct_bytes() const;
  const Region* lookup(uint64_t address, uint32_t bytes, RegionCache& cache) const {
    for (const Region* r : cache.entries) {
      if (r && address >= r->begin && address < r->end && bytes <= r->end - address) return r;
    }
    return lookup_slow(address, bytes, cache);
  }
  /// The region that ends nearest below, or begins nearest above, for an error text.
  std::string describe(uint64_t address) const;

 private:
  const Region* watched(uint64_t address) const;  // the region, if it keeps count of what was written
  const Region* lookup_slow(uint64_t address, uint32_t bytes, RegionCache& cache) const;
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Region> regions_;  // by begin; registered ones may overlap
  std::vector<Region> table_;           // disjoint, sorted
  uint64_t bytes_ = 0;
};

bool region_written(const Region& r, uint64_t address, uint32_t bytes);
void region_mark_written(const Region& r, uint64_t address, uint32_t bytes);
void region_touch(const Region& r, uint64_t address, uint32_t bytes);

inline constexpr int kMaxWarps = 32;  // of a block

/// Vector clock over the warps of a block: what a warp (or a barrier) has synchronized with.
struct Clock {
  uint32_t t[kMaxWarps] = {};
  ThreadClock threads;  // the same by threads, in the modes that need it
  void join_warps(const Clock& o) {
    for (int i = 0; i < kMaxWarps; ++i) t[i] = t[i] > o.t[i] ? t[i] : o.t[i];
  }
  void join(const Clock& o) {
    join_warps(o);
    if (!o.threads.empty()) exec::join(threads, o.threads);
  }
};

/// A block's shared memory with a shadow per byte.
struct SharedMemory {
  static constexpr uint8_t kWritten = 1, kMBarrier = 2;
  struct Event {  // an access: by which warp, at which value of its own clock (0: never)
    uint32_t clock = 0;
    uint32_t warp = 0;
  };
  uint32_t size = 0;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> shadow;
  std::vector<Event> generic_writes;  // per 16 bytes, for kWatchFences

  void start(uint32_t size, bool fences);
  bool written(uint32_t address, uint32_t n) const;
  void mark_written(uint32_t address, uint32_t n);
};

}  // namespace vsm::exec
