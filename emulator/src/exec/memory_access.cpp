// SPDX-License-Identifier: Apache-2.0
// One lane's access to memory: address resolution, checks, shadows. And the counters of a warp-wide access.
#include <algorithm>
#include <array>

#include "exec/machine.h"

namespace vsm::exec {
namespace {

std::string hex(uint64_t v) {
  char buffer[24];
  std::snprintf(buffer, sizeof buffer, "0x%llx", static_cast<unsigned long long>(v));
  return buffer;
}

const char* verb(Access kind) { return kind == Access::kLoad ? "load" : kind == Access::kStore ? "store" : "atomic"; }

uint8_t* shared_access(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, Access kind,
                       Manner manner) {
  Block& b = *w.block;
  SharedMemory& m = b.shared;
  const uint32_t reserved = b.launch->limits->shared_reserved;
  if (address < reserved || address > m.size || bytes > m.size - address) {
    w.fail(ReportKind::kOutOfBounds, in, lane,
           std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes at shared address " + hex(address) +
               "; the block has [" + hex(reserved) + ", " + hex(m.size) + ")",
           "shared", address);
  }
  const uint32_t a = static_cast<uint32_t>(address);
  const uint32_t watch = b.launch->config->watch;
  bool barrier = false;
  for (uint32_t i = 0; i < bytes; ++i) barrier |= (m.shadow[a + i] & SharedMemory::kMBarrier) != 0;
  if (barrier) {
    w.fail(ReportKind::kBarrierMisuse, in, lane, std::string(verb(kind)) + " touches a live mbarrier object", "shared",
           a);
  }
  if (kind != Access::kStore && (watch & kWatchUninitialized) && !m.written(a, bytes)) {
    w.report(ReportKind::kUninitialized, in, lane,
             std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes of shared memory that nothing wrote",
             "shared", a);
  }
  if (kind != Access::kLoad) {
    m.mark_written(a, bytes);
    if (!m.generic_writes.empty()) {
      for (uint32_t g = a / 16; g <= (a + bytes - 1) / 16; ++g) {
        m.generic_writes[g] = {w.clock.t[w.id], static_cast<uint32_t>(w.id)};
      }
    }
  }
  if (b.async && !b.async->clear(w.id, a, bytes, kind != Access::kLoad))
    b.async->check(w, in, lane, a, bytes, kind != Access::kLoad, w.clock);
  if (w.arrivals) {
    ArrivalChecker::Steps& what = in.cls == OpClass::kAsyncCopy ? w.arrivals->copied : w.arrivals->touched;
    // A matrix instruction is the whole warp's, whoever gives the address.
    w.arrivals->access(what, manner == Manner::kWholeWarp ? ~0u : 1u << lane, w.steps + 1);
  }
  if (b.races) b.check_race(w, in, lane, a, bytes, kind, manner);
  return m.bytes.data() + a;
}

uint8_t* local_access(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, Access kind) {
  if (address > w.local_bytes || bytes > w.local_bytes - address) {
    w.fail(ReportKind::kOutOfBounds, in, lane,
           std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes at local address " + hex(address) +
               "; the thread has " + std::to_string(w.local_bytes),
           "local", address);
  }
  return w.local.data() + size_t{w.local_bytes} * static_cast<size_t>(lane) + address;
}

// Also for param and const memory, which are not counted as global traffic.
uint8_t* global_access(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, Access kind, bool count) {
  Block& b = *w.block;
  const Launch& l = *b.launch;
  const Region* r = l.memory->lookup(address, bytes, b.cache);
  if (!r) {
    const uint64_t params = reinterpret_cast<uint64_t>(l.params);
    if (address >= params && address - params <= l.param_bytes && bytes <= l.param_bytes - (address - params)) {
      if (kind != Access::kLoad) {
        w.fail(ReportKind::kReadOnlyWrite, in, lane, std::string(verb(kind)) + " to the kernel's parameters", "param",
               address);
      }
      return reinterpret_cast<uint8_t*>(address);
    }
    w.fail(ReportKind::kOutOfBounds, in, lane,
           std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes at " + hex(address) + ": " +
               l.memory->describe(address),
           "global", address);
  }
  if (kind == Access::kLoad || kind == Access::kAtomic) {
    if ((l.config->watch & kWatchUninitialized) && r->written && !region_written(*r, address, bytes)) {
      w.report(ReportKind::kUninitialized, in, lane,
               std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes of global memory that nothing wrote",
               "global", address);
    }
  }
  if (kind != Access::kLoad) {
    if (r->read_only) {
      w.fail(ReportKind::kReadOnlyWrite, in, lane, std::string(verb(kind)) + " to memory that is read-only", "global",
             address);
    }
    region_mark_written(*r, address, bytes);
    if (w.arrivals && w.arrivals->signal != w.steps + 1) {
      w.arrivals->access(w.arrivals->wrote, 1u << lane, w.steps + 1);
      w.arrivals->last_write = w.clock.t[w.id];
    }
  }
  if (l.global_async) {
    if (kind != Access::kStore) l.global_async->check_load(w, in, lane, address, bytes);
    if (kind != Access::kLoad) l.global_async->wrote(w, address, bytes);
  }
  if (count) region_touch(*r, address, bytes);
  if (b.checks_grids)
    b.note_grid_access(w, in, lane, address, bytes, kind != Access::kStore, kind != Access::kLoad, w.clock);
  return reinterpret_cast<uint8_t*>(address);
}

}  // namespace

uint8_t* Warp::access(const Inst& in, int lane, Space space, uint64_t address, uint32_t bytes, Access kind,
                      Manner manner) {
  if (space == Space::kGeneric) {
    const uint64_t window = address >> 56;
    if (window == kSharedWindow >> 56) {
      space = Space::kShared;
      address -= kSharedWindow;
    } else if (window == kLocalWindow >> 56) {
      space = Space::kLocal;
      address -= kLocalWindow;
    } else {
      space = Space::kGlobal;
    }
  }
  if (address & (bytes - 1)) {  // every access size is a power of two
    fail(ReportKind::kMisaligned, in, lane,
         std::string(verb(kind)) + " of " + std::to_string(bytes) + " bytes at " + hex(address), to_string(space),
         address);
  }
  switch (space) {
    case Space::kShared: return shared_access(*this, in, lane, address, bytes, kind, manner);
    case Space::kLocal: return local_access(*this, in, lane, address, bytes, kind);
    default: return global_access(*this, in, lane, address, bytes, kind, space == Space::kGlobal);
  }
}

void Warp::check_prefetch(const Inst& in, int lane, uint64_t address, uint32_t bytes) {
  const GlobalMemory& memory = *block->launch->memory;
  if (memory.lookup(address, bytes, block->cache)) return;
  fail(ReportKind::kOutOfBounds, in, lane,
       "the prefetch of " + (bytes == 1 ? "a line" : std::to_string(bytes) + " bytes") +
           " of global memory: " + memory.describe(address),
       "global", address);
}

namespace {

// Passes over 32 banks of 4 bytes: lanes that read the same word share it. Accesses of 8 and 16 bytes a lane go in
// halves and quarters of the warp.
uint32_t wavefronts(const uint64_t* addresses, uint32_t mask, uint32_t bytes) {
  const int lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  const uint32_t words = std::max(1u, bytes / 4);
  uint32_t total = 0;
  for (int first = 0; first < 32; first += lanes) {
    uint32_t count[32] = {};
    uint32_t seen[32][32];  // words of a bank; a pass has at most one for each lane
    uint32_t worst = 0;
    for (int lane = first; lane < first + lanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (uint32_t i = 0; i < words; ++i) {
        const uint32_t word = static_cast<uint32_t>(addresses[lane] / 4) + i;
        const uint32_t bank = word % 32;
        bool again = false;
        for (uint32_t k = 0; k < count[bank]; ++k) again |= seen[bank][k] == word;
        if (again) continue;
        seen[bank][count[bank]] = word;
        worst = std::max(worst, ++count[bank]);
      }
    }
    total += worst;
  }
  return total;
}

uint32_t sectors(const uint64_t* addresses, uint32_t mask, uint32_t bytes) {
  std::array<uint64_t, 64> ids;
  size_t n = 0;
  for_lanes(mask, [&](int lane) {
    const uint64_t first = addresses[lane] / 32, last = (addresses[lane] + bytes - 1) / 32;
    for (uint64_t s = first; s <= last && n < ids.size(); ++s) {
      if (n == 0 || ids[n - 1] != s) ids[n++] = s;
    }
  });
  if (!std::is_sorted(ids.begin(), ids.begin() + n)) std::sort(ids.begin(), ids.begin() + n);
  return static_cast<uint32_t>(std::unique(ids.begin(), ids.begin() + n) - ids.begin());
}

}  // namespace

void Warp::count_access(const Inst&, Space space, const uint64_t* addresses, uint32_t mask, uint32_t bytes,
                        bool store) {
  Counters& c = counters();
  if (space == Space::kGeneric) {
    const uint64_t a = addresses[__builtin_ctz(mask)];
    space = a >> 56 == kSharedWindow >> 56  ? Space::kShared
            : a >> 56 == kLocalWindow >> 56 ? Space::kLocal
                                            : Space::kGlobal;
  }
  if (space == Space::kGlobal) {
    (store ? c.global_store_bytes : c.global_load_bytes) +=
        uint64_t{bytes} * static_cast<uint32_t>(__builtin_popcount(mask));
    c.global_sectors += sectors(addresses, mask, bytes);
  } else if (space == Space::kShared) {
    const uint32_t passes = wavefronts(addresses, mask, bytes);
    uint32_t least = 0;  // one for each half or quarter of the warp with an active lane
    const int lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    for (int first = 0; first < 32; first += lanes) {
      const uint32_t part = lanes == 32 ? ~0u : ((1u << lanes) - 1) << first;
      least += (mask & part) != 0;
    }
    ++c.shared_accesses;
    c.shared_wavefronts += passes;
    c.shared_bank_conflicts += passes > least ? passes - least : 0;
  }
}

void Block::check_race(Warp& w, const Inst& in, int lane, uint32_t address, uint32_t bytes, Access kind,
                       Manner manner) {
  const Accessor who = accessor(w, manner == Manner::kWholeWarp ? -1 : lane);
  if (manner == Manner::kVolatile) {
    const RaceFound found = races->hand_over(who, *order, address, bytes, kind == Access::kStore);
    report_race(w, in, lane, std::string("volatile ") + verb(kind), found);
  } else if (kind != Access::kLoad) {
    races->end_hand_over(address, bytes);
  }
  const bool strong = kind == Access::kAtomic || manner == Manner::kStrong || manner == Manner::kVolatile;
  if (kind != Access::kStore) report_race(w, in, lane, verb(kind), races->load(who, address, bytes, strong));
  if (kind != Access::kLoad) report_race(w, in, lane, verb(kind), races->store(who, address, bytes, strong));
}

void Block::report_unordered(Warp& w, const Inst& in, int lane, const char* verb, uint64_t address, uint64_t writer) {
  if (writer == WeakMemory::kNoBlock) return;
  const uint32_t* grid = launch->config->grid;
  w.report(ReportKind::kRace, in, lane,
           std::string(verb) + " of bytes that block (" + std::to_string(writer % grid[0]) + "," +
               std::to_string(writer / grid[0] % grid[1]) + "," + std::to_string(writer / grid[0] / grid[1]) +
               ") wrote, with nothing ordering the two",
           "global", address);
}

void Block::weak_read(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, uint8_t* out, bool strong) {
  const uint64_t writer = launch->weak->read(weak_thread(w, lane), address, bytes, out, strong);
  report_unordered(w, in, lane, verb(Access::kLoad), address, writer);
}

void Block::weak_write(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, const uint8_t* data) {
  const uint64_t writer = launch->weak->write(weak_thread(w, lane), address, bytes, data);
  report_unordered(w, in, lane, verb(Access::kStore), address, writer);
}

void Block::report_race(Warp& w, const Inst& in, int lane, const std::string& verb, const RaceFound& race) {
  if (!race.found) return;
  std::string other = race.lane < 0 ? std::string() : "lane " + std::to_string(race.lane) + " of ";
  other += race.warp == w.id ? "the same warp" : "warp " + std::to_string(race.warp);
  w.report(ReportKind::kRace, in, lane,
           verb + " of a byte that " + other + (race.wrote ? " wrote" : " read") + ", with nothing ordering the two",
           "shared", race.address);
}

}  // namespace vsm::exec
