// SPDX-License-Identifier: Apache-2.0
#include "exec/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace vsm::exec {
namespace {

using Bits = std::vector<std::atomic<uint64_t>>;

// Calls fn(word, mask) for the words that hold these bits.
template <class F>
void each_word(uint64_t first, uint64_t count, F fn) {
  for (uint64_t i = first; i < first + count;) {
    const uint64_t begin = i % 64, n = std::min<uint64_t>(64 - begin, first + count - i);
    fn(i / 64, (n == 64 ? ~uint64_t{0} : ((uint64_t{1} << n) - 1)) << begin);
    i += n;
  }
}

void set_bits(Bits& bits, uint64_t first, uint64_t count) {
  each_word(first, count, [&](size_t word, uint64_t mask) {
    if ((bits[word].load(std::memory_order_relaxed) & mask) != mask)
      bits[word].fetch_or(mask, std::memory_order_relaxed);
  });
}

bool all_bits(const Bits& bits, uint64_t first, uint64_t count) {
  for (uint64_t i = first; i < first + count;) {
    const uint64_t word = i / 64, begin = i % 64, n = std::min<uint64_t>(64 - begin, first + count - i);
    const uint64_t mask = (n == 64 ? ~uint64_t{0} : ((uint64_t{1} << n) - 1)) << begin;
    if ((bits[word].load(std::memory_order_relaxed) & mask) != mask) return false;
    i += n;
  }
  return true;
}

}  // namespace

const char* to_string(Space s) {
  switch (s) {
    case Space::kGeneric: return "generic";
    case Space::kGlobal: return "global";
    case Space::kShared: return "shared";
    case Space::kLocal: return "local";
    case Space::kParam: return "param";
    case Space::kConst: return "const";
  }
  return "";
}

GlobalMemory::~GlobalMemory() {
  for (auto& r : regions_) {
    if (r.second.owned) std::free(reinterpret_cast<void*>(r.first));
  }
}

uint64_t GlobalMemory::allocate(uint64_t bytes, bool written) {
  if (bytes > (uint64_t{1} << 46)) throw std::bad_alloc();
  const uint64_t padded = (std::max<uint64_t>(bytes, 1) + 511) / 256 * 256;  // at least one byte behind the end
  void* p = std::aligned_alloc(256, padded);
  if (!p) throw std::bad_alloc();
  Region r;
  r.begin = reinterpret_cast<uint64_t>(p);
  r.end = r.begin + bytes;
  r.owned = true;
  if (!written) r.written = std::make_shared<Bits>((bytes + 63) / 64);
  std::unique_lock<std::shared_mutex> lock(mutex_);
  bytes_ += bytes;
  regions_[r.begin] = std::move(r);
  return reinterpret_cast<uint64_t>(p);
}

bool GlobalMemory::release(uint64_t address) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto it = regions_.find(address);
  if (it == regions_.end() || !it->second.owned) return false;
  bytes_ -= it->second.end - it->second.begin;
  regions_.erase(it);
  std::free(reinterpret_cast<void*>(address));
  return true;
}

void GlobalMemory::add(uint64_t address, uint64_t bytes, bool read_only) {
  if (bytes == 0) return;
  std::unique_lock<std::shared_mutex> lock(mutex_);
  Region& r = regions_[address];
  if (r.owned) return;  // already ours
  r.begin = address;
  r.end = std::max(r.end, address + bytes);
  r.read_only = r.uses ? (r.read_only && read_only) : read_only;
  ++r.uses;
}

bool GlobalMemory::remove(uint64_t address) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto it = regions_.find(address);
  if (it == regions_.end() || it->second.owned) return false;
  if (--it->second.uses == 0) regions_.erase(it);
  return true;
}

bool GlobalMemory::find(uint64_t address, Allocation* out) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (auto it = regions_.upper_bound(address); it != regions_.begin();) {
    --it;
    const Region& r = it->second;
    if (address < r.end) {
      *out = {r.begin, r.end - r.begin, r.read_only, r.owned};
      return true;
    }
    if (r.owned) break;  // registered ranges may overlap; owned ones may not
  }
  return false;
}

const Region* GlobalMemory::watched(uint64_t address) const {
  auto it = regions_.upper_bound(address);
  if (it == regions_.begin()) return nullptr;
  --it;
  return address < it->second.end && it->second.written ? &it->second : nullptr;
}

void GlobalMemory::mark_written(uint64_t address, uint64_t bytes) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  if (const Region* r = watched(address)) set_bits(*r->written, address - r->begin, std::min(bytes, r->end - address));
}

void GlobalMemory::mark_unwritten(uint64_t address, uint64_t bytes) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  if (const Region* r = watched(address)) {
    each_word(address - r->begin, std::min(bytes, r->end - address),
              [&](size_t word, uint64_t mask) { (*r->written)[word].fetch_and(~mask, std::memory_order_relaxed); });
  }
}

void GlobalMemory::freeze(bool distinct) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  table_.clear();
  for (const auto& item : regions_) {
    const Region& r = item.second;
    if (!table_.empty() && r.begin < table_.back().end) {
      Region& last = table_.back();
      last.end = std::max(last.end, r.end);
      last.read_only = last.read_only && r.read_only;
      if (!r.written) last.written.reset();
    } else {
      table_.push_back(r);
    }
  }
  if (!distinct) return;
  for (Region& r : table_) r.touched = std::make_shared<Bits>(((r.end - r.begin) / 32 + 2 + 63) / 64);
}

uint64_t GlobalMemory::distinct_bytes() const {
  uint64_t sectors = 0;
  for (const Region& r : table_) {
    if (!r.touched) continue;
    for (const auto& word : *r.touched)
      sectors += static_cast<uint64_t>(__builtin_popcountll(word.load(std::memory_order_relaxed)));
  }
  return sectors * 32;
}

const Region* GlobalMemory::lookup_slow(uint64_t address, uint32_t bytes, RegionCache& cache) const {
  auto it =
      std::upper_bound(table_.begin(), table_.end(), address, [](uint64_t a, const Region& r) { return a < r.begin; });
  if (it == table_.begin()) return nullptr;
  --it;
  if (address >= it->end || bytes > it->end - address) return nullptr;
  cache.entries[cache.next] = &*it;
  cache.next = (cache.next + 1) % 4;
  return &*it;
}

std::string GlobalMemory::describe(uint64_t address) const {
  const Region* best = nullptr;
  uint64_t distance = 0;
  for (const Region& r : table_) {
    const uint64_t d = address >= r.end ? address - r.end : (address < r.begin ? r.begin - address : 0);
    if (!best || d < distance) {
      best = &r;
      distance = d;
    }
  }
  if (!best) return "no global memory is allocated";
  const std::string size = std::to_string(best->end - best->begin);
  if (address < best->begin) return std::to_string(distance) + " bytes before an allocation of " + size + " bytes";
  return std::to_string(distance) + " bytes behind the end of an allocation of " + size + " bytes";
}

bool region_written(const Region& r, uint64_t address, uint32_t bytes) {
  return !r.written || all_bits(*r.written, address - r.begin, bytes);
}

void region_mark_written(const Region& r, uint64_t address, uint32_t bytes) {
  if (r.written) set_bits(*r.written, address - r.begin, bytes);
}

void region_touch(const Region& r, uint64_t address, uint32_t bytes) {
  if (!r.touched || bytes == 0) return;
  const uint64_t base = r.begin / 32;
  const uint64_t first = address / 32 - base, last = (address + bytes - 1) / 32 - base;
  set_bits(*r.touched, first, last - first + 1);
}

void SharedMemory::start(uint32_t new_size, bool fences) {
  size = new_size;
  bytes.assign(size + 16, 0xA5);
  shadow.assign(size, 0);
  if (fences) generic_writes.assign((size + 15) / 16, Event());
  else generic_writes.clear();
}

bool SharedMemory::written(uint32_t address, uint32_t n) const {
  for (uint32_t i = 0; i < n; ++i) {
    if (!(shadow[address + i] & kWritten)) return false;
  }
  return true;
}

void SharedMemory::mark_written(uint32_t address, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) shadow[address + i] |= kWritten;
}

}  // namespace vsm::exec
