// SPDX-License-Identifier: Apache-2.0
// Copies that complete later: cp.async, bulk and tensor copies. They finish some scheduler rounds after they were
// issued, in an order of their own, so a program that does not wait for them reads what was there before.
#include <algorithm>

#include "exec/machine.h"
#include "tma/tma.h"

namespace vsm::exec {
namespace {

// The ranges of shared memory that a copy reads (stores) or writes (loads).
struct Piece {
  uint64_t global;
  uint32_t shared;
  uint32_t bytes;
  bool fill;
};

std::vector<Piece> pieces(Warp& w, const PendingCopy& c, tma::Descriptor* d) {
  if (c.kind == PendingCopy::Kind::kBulk && c.byte_mask != 0xffff) {
    std::vector<Piece> out;
    for (uint32_t i = 0; i < c.bytes; ++i) {
      if (!(c.byte_mask >> i % 16 & 1)) continue;
      if (!out.empty() && out.back().shared + out.back().bytes == c.shared + i) ++out.back().bytes;
      else out.push_back({c.global + i, c.shared + i, 1, false});
    }
    return out;
  }
  if (c.kind != PendingCopy::Kind::kTensor) return {{c.global, c.shared, c.bytes, false}};
  if (!tma::decode(c.tensor, d))
    w.fail(ReportKind::kBadDescriptor, *c.inst, c.lane, "the 128 bytes are not a tensor map");
  std::vector<tma::Run> runs;
  const std::string error = tma::tile_runs(*d, c.coords, c.shared, !c.to_shared, &runs);
  if (!error.empty()) w.fail(ReportKind::kBadDescriptor, *c.inst, c.lane, error, "shared", c.shared);
  std::vector<Piece> out;
  for (const tma::Run& r : runs) {
    if (r.kind != tma::Run::Kind::kSkip) out.push_back({r.global, r.shared, r.bytes, r.kind == tma::Run::Kind::kFill});
  }
  return out;
}

void check_shared(Warp& w, const PendingCopy& c, uint32_t address, uint32_t bytes) {
  const Block& b = *w.block;
  if (address < b.launch->limits->shared_reserved || address > b.shared.size || bytes > b.shared.size - address) {
    w.fail(ReportKind::kOutOfBounds, *c.inst, c.lane,
           "the copy of " + std::to_string(bytes) + " bytes leaves the block's shared memory", "shared", address);
  }
  for (uint32_t i = 0; i < bytes; ++i) {
    if (b.shared.shadow[address + i] & SharedMemory::kMBarrier) {
      w.fail(ReportKind::kBarrierMisuse, *c.inst, c.lane, "the copy touches a live mbarrier object", "shared",
             address + i);
    }
  }
}

const Region& check_global(Warp& w, const PendingCopy& c, uint64_t address, uint32_t bytes, bool store) {
  const Launch& l = *w.block->launch;
  const Region* r = l.memory->lookup(address, bytes, w.block->cache);
  if (!r) {
    w.fail(ReportKind::kOutOfBounds, *c.inst, c.lane,
           "the copy " + std::string(store ? "writes " : "reads ") + std::to_string(bytes) +
               " bytes of global memory: " + l.memory->describe(address),
           "global", address);
  }
  if (store && r->read_only)
    w.fail(ReportKind::kReadOnlyWrite, *c.inst, c.lane, "the copy writes read-only memory", "global", address);
  if (!store && (l.config->watch & kWatchUninitialized) && r->written && !region_written(*r, address, bytes)) {
    w.report(ReportKind::kUninitialized, *c.inst, c.lane, "the copy reads global memory that nothing wrote", "global",
             address);
  }
  region_touch(*r, address, bytes);
  // As of when the copy was issued: it may be done any time after that.
  if (w.block->checks_grids)
    w.block->note_grid_access(w, *c.inst, c.lane, address, bytes, !store || c.reduce >= 0, store, c.clock);
  return *r;
}

// As the issuing thread may see it, since it issued the copy.
void read_global(Warp& w, const PendingCopy& c, uint64_t address, uint32_t bytes, uint8_t* to) {
  Block& b = *w.block;
  if (!b.launch->weak) {
    std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
    return;
  }
  WeakMemory::Thread t = b.weak_thread(w, c.lane);
  t.acquired = c.clock.threads.back();
  b.report_unordered(w, *c.inst, c.lane, "the copy's load", address,
                     b.launch->weak->read(t, address, bytes, to, false));
}

// What the async proxy reads or overwrites has been fenced if the generic proxy wrote it.
void check_fenced(Warp& w, const PendingCopy& c, const Clock& fenced, const char* touches, uint32_t address,
                  uint32_t bytes) {
  const SharedMemory& m = w.block->shared;
  if (m.generic_writes.empty() || c.kind == PendingCopy::Kind::kCpAsync) return;
  for (uint32_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) {
    const SharedMemory::Event& e = m.generic_writes[g];
    if (e.clock == 0 || fenced.t[e.warp] >= e.clock) continue;
    w.report(ReportKind::kMissingFence, *c.inst, c.lane,
             "the async proxy " + std::string(touches) + " what warp " + std::to_string(e.warp) +
                 " wrote through the generic proxy, with no fence.proxy.async in between",
             "shared", g * 16);
    break;
  }
}

// Whoever issued the copy, as of then.
Accessor accessor(const Warp& w, const PendingCopy& c) {
  return {w.id, c.lane, c.clock.threads[static_cast<size_t>(w.id * 32 + c.lane)], c.clock.threads.data(), c.step};
}

// What a copy out of shared memory may read: written, and fenced if written by the generic proxy.
void check_source(Warp& w, const PendingCopy& c, uint32_t address, uint32_t bytes) {
  Block& b = *w.block;
  SharedMemory& m = b.shared;
  if ((b.launch->config->watch & kWatchUninitialized) && !m.written(address, bytes)) {
    w.report(ReportKind::kUninitialized, *c.inst, c.lane, "the copy reads shared memory that nothing wrote", "shared",
             address);
  }
  check_fenced(w, c, b.fenced, "reads", address, bytes);
  if (!b.races) return;
  Block::report_race(w, *c.inst, c.lane, "the copy's load", b.races->look(accessor(w, c), address, bytes));
}

// A copy into shared memory must not overtake reads and writes of other warps that nothing orders before it.
void note_async_write(Warp& w, const PendingCopy& c, uint32_t address, uint32_t bytes) {
  SharedMemory& m = w.block->shared;
  check_fenced(w, c, c.fenced, "overwrites", address, bytes);
  m.mark_written(address, bytes);
  if (!m.generic_writes.empty()) {
    for (uint32_t g = address / 16; g <= (address + bytes - 1) / 16; ++g) m.generic_writes[g] = SharedMemory::Event();
  }
  Block& b = *w.block;
  if (!b.races) return;
  Block::report_race(w, *c.inst, c.lane, "the copy's store", b.races->store(accessor(w, c), address, bytes, false));
}

// Takes the copies that satisfy `wanted` out of the queue, in the order of issue.
template <class Wanted>
std::vector<PendingCopy> take(std::deque<PendingCopy>* queue, Wanted wanted) {
  std::vector<PendingCopy> taken;
  size_t kept = 0;
  for (size_t i = 0; i < queue->size(); ++i) {
    PendingCopy& c = (*queue)[i];
    if (wanted(c)) taken.push_back(std::move(c));
    else if (kept++ != i) (*queue)[kept - 1] = std::move(c);
  }
  queue->resize(kept);
  return taken;
}

}  // namespace

void Block::issue(PendingCopy copy) {
  // 1 to 4 rounds, from the block's own sequence: the same in every run.
  rng = rng * 6364136223846793005ull + 1442695040888963407ull;
  copy.delay = 1 + (rng >> 62);
  if (launch->config->late_copies && (rng >> 32) % 50 == 0) copy.delay += launch->config->late_copies;
  Warp& w = warps[static_cast<size_t>(copy.warp)];
  copy.clock = w.clock;
  copy.fenced = fenced;
  copy.step = w.steps;
  if (order) order->release(copy.warp, 1u << copy.lane, copy.clock.threads);
  const bool bulk = copy.kind == PendingCopy::Kind::kBulk || copy.kind == PendingCopy::Kind::kTensor;
  const bool watched = bulk && (launch->config->watch & kWatchFences);
  if (watched && !async) async = std::make_unique<AsyncChecker>(shared.size);
  const bool reads = !copy.to_shared || copy.shared_to_shared;
  std::vector<Piece> parts;
  tma::Descriptor d;
  if (reads || watched) parts = pieces(w, copy, &d);
  if (reads) {
    uint32_t begin = ~0u, end = 0;
    for (const Piece& p : parts) {
      check_shared(w, copy, p.shared, p.bytes);
      check_source(w, copy, p.shared, p.bytes);
      begin = std::min(begin, p.shared);
      end = std::max(end, p.shared + p.bytes);
    }
    if (watched && !copy.shared_to_shared && begin < end) async->read(copy, begin, end);
  }
  if (watched && copy.to_shared) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges;
    for (const Piece& p : parts) {
      const uint32_t to = copy.shared_to_shared ? copy.shared_target : p.shared;
      if (to <= shared.size && p.bytes <= shared.size - to) ranges.push_back({to, p.bytes});  // else: when it lands
    }
    async->fill(w, copy, ranges);
  }
  if (GlobalAsync* global = watched && !copy.shared_to_shared ? launch->global_async.get() : nullptr) {
    const uint32_t number = copy.to_shared ? 0 : global->begin_store(w, copy);
    for (const Piece& p : parts) {
      if (p.fill) continue;
      if (copy.to_shared) global->bulk_load(w, copy, p.global, p.bytes);
      else global->bulk_store(w, number, p.global, p.bytes);
    }
  }
  if (watched && copy.has_barrier) {
    const MBarrier& b = mbarrier_used(w, *copy.inst, copy.lane, copy.barrier);
    if (fenced.t[b.init_warp] < b.init_clock && published.t[b.init_warp] < b.init_clock) {
      w.report(ReportKind::kMissingFence, *copy.inst, copy.lane,
               "the async proxy is to signal an mbarrier that warp " + std::to_string(b.init_warp) +
                   " initialized, with no fence.mbarrier_init or fence.proxy.async in between",
               "shared", copy.barrier);
    }
  }
  ++w.clock.t[w.id];
  ++effects;
  cp_async_pending += copy.kind == PendingCopy::Kind::kCpAsync;
  pending.push_back(std::move(copy));
}

bool Block::advance_async(bool force) {
  if (pending.empty()) return false;
  // What is due leaves the queue before any of it is finished: that may take others out of the queue.
  const std::vector<PendingCopy> due = take(&pending, [](PendingCopy& c) { return c.delay == 0 || --c.delay == 0; });
  for (const PendingCopy& copy : due) finish(copy);
  bool any = !due.empty();
  if (!any && force && !pending.empty()) {
    const PendingCopy copy = std::move(pending.front());
    pending.pop_front();
    finish(copy);
    any = true;
  }
  if (any) ++effects;
  return any;
}

void Block::finish(const PendingCopy& c) {
  Warp& w = warps[static_cast<size_t>(c.warp)];
  uint8_t* base = shared.bytes.data();
  if (c.kind == PendingCopy::Kind::kCpAsyncArrive) {
    uint32_t all[32];
    std::fill_n(all, 32, ~0u);
    finish_cp_async(c.warp, 1u << c.lane, all);
    MBarrier& b = mbarrier(w, *c.inst, c.lane, c.barrier);
    if (b.pending == 0)
      w.fail(ReportKind::kBarrierMisuse, *c.inst, c.lane, "one arrival more than the phase expects", "shared",
             c.barrier);
    --b.pending;
    b.arriving.join(c.clock);
    mbarrier_complete_if_due(b);
    return;
  }
  if (c.kind == PendingCopy::Kind::kCpAsync) {
    --cp_async_pending;
    if (c.source_bytes) {
      check_global(w, c, c.global, c.source_bytes, false);
      read_global(w, c, c.global, c.source_bytes, base + c.shared);
    }
    std::memset(base + c.shared + c.source_bytes, 0, c.bytes - c.source_bytes);
    note_async_write(w, c, c.shared, c.bytes);
    return;
  }
  tma::Descriptor d;
  for (const Piece& p : pieces(w, c, &d)) {
    check_shared(w, c, p.shared, p.bytes);
    if (c.kind == PendingCopy::Kind::kCancel) {
      std::memcpy(base + p.shared, c.response, sizeof c.response);
      note_async_write(w, c, p.shared, p.bytes);
    } else if (c.shared_to_shared) {
      check_shared(w, c, c.shared_target, p.bytes);
      std::memmove(base + c.shared_target, base + p.shared, p.bytes);
      note_async_write(w, c, c.shared_target, p.bytes);
      if (async) async->landed(mbarrier(w, *c.inst, c.lane, c.barrier), c.shared_target, p.bytes);
    } else if (c.to_shared) {
      if (p.fill) {
        tma::fill(d, base + p.shared, p.bytes);
      } else {
        check_global(w, c, p.global, p.bytes, false);
        read_global(w, c, p.global, p.bytes, base + p.shared);
        if (c.kind == PendingCopy::Kind::kTensor) tma::convert_elements(d.type, base + p.shared, p.bytes);
        counters.async_load_bytes += p.bytes;
      }
      note_async_write(w, c, p.shared, p.bytes);
      if (async) async->landed(mbarrier(w, *c.inst, c.lane, c.barrier), p.shared, p.bytes);
    } else {
      const Region& r = check_global(w, c, p.global, p.bytes, true);
      uint8_t* to = reinterpret_cast<uint8_t*>(p.global);
      if (launch->weak) launch->weak->before_publishing(linear, p.global, p.bytes);
      if (c.reduce >= 0) {
        const std::lock_guard<std::mutex> lock(launch->reduce_mutex);
        const auto type = c.kind == PendingCopy::Kind::kTensor ? d.type : static_cast<tma::ElementType>(c.reduce_type);
        if (!tma::reduce_elements(type, static_cast<tma::Reduce>(c.reduce), to, base + p.shared, p.bytes)) {
          w.fail(ReportKind::kBadDescriptor, *c.inst, c.lane, "that reduction is not possible on the element type");
        }
      } else {
        std::memcpy(to, base + p.shared, p.bytes);
      }
      region_mark_written(r, p.global, p.bytes);
      counters.async_store_bytes += p.bytes;
    }
  }
  if (!c.has_barrier) return;
  MBarrier& b = mbarrier(w, *c.inst, c.lane, c.barrier);
  b.arriving.join(c.clock);
  mbarrier_tx(w, *c.inst, c.lane, c.barrier, -static_cast<int64_t>(c.bytes));
}

void Block::finish_cp_async(int warp, uint32_t mask, const uint32_t* group) {
  if (cp_async_pending == 0) return;
  const std::vector<PendingCopy> due = take(&pending, [&](const PendingCopy& c) {
    return c.kind == PendingCopy::Kind::kCpAsync && c.warp == warp && (mask >> c.lane & 1) && c.group < group[c.lane];
  });
  for (const PendingCopy& copy : due) finish(copy);
  effects += due.size();
}

bool Block::bulk_pending(int warp, int lane, uint32_t group) const {
  return std::any_of(pending.begin(), pending.end(), [&](const PendingCopy& c) {
    return (c.kind == PendingCopy::Kind::kBulk || c.kind == PendingCopy::Kind::kTensor) && !c.has_barrier &&
           c.warp == warp && c.lane == lane && c.group < group;
  });
}

// All warps have exited: nothing may still read or write the block's shared memory.
void Block::check_end() {
  for (const PendingCopy& c : pending) {
    warps[static_cast<size_t>(c.warp)].report(ReportKind::kUndefined, *c.inst, c.lane,
                                              std::string("the block ended while a copy ") +
                                                  (c.to_shared ? "into" : "out of") +
                                                  " its shared memory was not waited for",
                                              "shared", c.shared);
  }
}

}  // namespace vsm::exec
