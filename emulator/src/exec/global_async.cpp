// SPDX-License-Identifier: Apache-2.0
#include "exec/global_async.h"

#include <algorithm>

#include "exec/machine.h"

namespace vsm::exec {
namespace {

constexpr uint64_t kBulk = 1;

uint64_t who(const Warp& w) { return (w.block->linear + 1) << 8 | static_cast<uint64_t>(w.id) << 1; }

// The block's position: one more with each instruction, so that 0 is before all of them.
uint64_t now(const Warp& w) { return w.block->counters.warp_instructions + 1; }

void join(Progress& mine, const Progress& other) {
  mine.signalled = std::max(mine.signalled, other.signalled);
  mine.fenced = std::max(mine.fenced, other.fenced);
}

}  // namespace

GlobalAsync::Page* GlobalAsync::page(const Warp& w, uint64_t number, bool make) {
  KnownBlocks& known = w.block->known;
  if (known.page_number == number) return static_cast<Page*>(known.page);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pages_.find(number);
  if (found == pages_.end() && !make) return nullptr;
  Page* p = found == pages_.end() ? (pages_[number] = std::make_unique<Page>()).get() : found->second.get();
  known.page_number = number;
  known.page = p;
  return p;
}

void GlobalAsync::put(const Warp& w, uint64_t address, uint32_t bytes, uint64_t who, uint64_t when) {
  uint64_t seen = low_.load(std::memory_order_relaxed);
  while (address < seen && !low_.compare_exchange_weak(seen, address, std::memory_order_relaxed)) {}
  seen = high_.load(std::memory_order_relaxed);
  while (address + bytes > seen && !high_.compare_exchange_weak(seen, address + bytes, std::memory_order_relaxed)) {}
  Page* p = nullptr;
  uint64_t held = ~uint64_t{0};
  for (uint64_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
    if (g / 64 != held) p = page(w, held = g / 64, true);
    Event& e = (*p)[g % 64];
    e.when.store(when, std::memory_order_relaxed);
    e.who.store(who, std::memory_order_release);
  }
}

void GlobalAsync::wrote(const Warp& w, uint64_t address, uint32_t bytes) {
  if (loads_ || overlaps(address, bytes)) put(w, address, bytes, who(w), now(w) << 32 | w.clock.t[w.id]);
}

void GlobalAsync::check(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, const PendingCopy* copy) {
  const Clock& clock = copy ? copy->clock : w.clock;
  Page* p = nullptr;
  uint64_t held = ~uint64_t{0};
  const KnownBlocks& known = w.block->known;
  for (uint64_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
    if (g / 64 != held) p = page(w, held = g / 64, false);
    if (!p) continue;
    const uint64_t writer = (*p)[g % 64].who.load(std::memory_order_acquire);
    const uint64_t when = (*p)[g % 64].when.load(std::memory_order_relaxed);
    if (writer == 0 || (!copy && !(writer & kBulk))) continue;
    const uint64_t block = (writer >> 8) - 1;
    const int warp = static_cast<int>(writer >> 1 & 127);
    const bool own = block == w.block->linear;
    Progress progress;
    if (!own) {
      const auto found = known.blocks.find(block);
      if (found == known.blocks.end()) continue;
      progress = found->second;
    }
    if (writer & kBulk) {
      Store s;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        s = bulk_stores_[when];
      }
      const bool done = own ? s.done && (s.warp == w.id || clock.t[s.warp] >= s.done_clock)
                            : s.issued >= progress.signalled || (s.done && s.done < progress.signalled);
      if (done) continue;
      return w.report(
          ReportKind::kMissingWait, in, lane,
          "reads global memory that the bulk copy of PTX line " + std::to_string(s.line) +
              (own ? "" : " in block " + std::to_string(block)) +
              " writes, not ordered behind a cp.async.bulk.wait_group for it (.read waits for the source only)",
          "global", g * 16);
    }
    const auto written = static_cast<uint32_t>(when);
    const bool fenced =
        own ? known.fenced.t[warp] >= written : when >> 32 >= progress.signalled || when >> 32 < progress.fenced;
    if (fenced) continue;
    return w.report(ReportKind::kMissingFence, in, lane,
                    "the async proxy reads what warp " + std::to_string(warp) +
                        (own ? "" : " of block " + std::to_string(block)) +
                        " wrote through the generic proxy, with no fence.proxy.async for global memory in between",
                    "global", g * 16);
  }
}

void GlobalAsync::bulk_load(Warp& w, const PendingCopy& c, uint64_t address, uint32_t bytes) {
  if (overlaps(address, bytes)) check(w, *c.inst, c.lane, address, bytes, &c);
}

uint32_t GlobalAsync::begin_store(const Warp& w, const PendingCopy& c) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bulk_stores_.push_back({w.block->linear, now(w), 0, c.warp, c.lane, c.group, c.inst->line, 0});
  const auto number = static_cast<uint32_t>(bulk_stores_.size() - 1);
  w.block->open_stores[c.warp * 32 + c.lane].push_back(number);
  return number;
}

void GlobalAsync::bulk_store(const Warp& w, uint32_t store, uint64_t address, uint32_t bytes) {
  put(w, address, bytes, who(w) | kBulk, store);
}

void GlobalAsync::waited(const Warp& w, int lane, uint32_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint32_t>& open = w.block->open_stores[w.id * 32 + lane];
  open.erase(std::remove_if(open.begin(), open.end(),
                            [&](uint32_t number) {
                              Store& s = bulk_stores_[number];
                              if (s.group >= group) return false;
                              s.done = now(w);
                              s.done_clock = w.clock.t[w.id];
                              return true;
                            }),
             open.end());
}

void GlobalAsync::fence(Warp& w, bool proxy) {
  KnownBlocks& known = w.block->known;
  if (!proxy) {
    known.device_fence = true;
    return;
  }
  known.fenced.join_warps(w.clock);
  known.proxy_fence = now(w);
  for (auto& [block, progress] : known.blocks) progress.fenced = progress.signalled;
}

void GlobalAsync::signal(const Warp& w, uint64_t address, bool release) {
  const KnownBlocks& known = w.block->known;
  if (!release && !known.device_fence) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  Signal& s = signals_[address];
  ++s.version;
  join(s.blocks[w.block->linear], {now(w), known.proxy_fence});
  for (const auto& [block, progress] : known.blocks) join(s.blocks[block], progress);
}

void GlobalAsync::look(const Warp& w, uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = signals_.find(address);
  if (found == signals_.end()) return;
  KnownBlocks& known = w.block->known;
  uint64_t& version = known.versions[address];
  if (version == found->second.version) return;
  version = found->second.version;
  for (const auto& [block, progress] : found->second.blocks) {
    if (block != w.block->linear) join(known.blocks[block], progress);
  }
}

}  // namespace vsm::exec
