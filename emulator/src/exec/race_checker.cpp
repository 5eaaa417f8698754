// SPDX-License-Identifier: Apache-2.0
#include "exec/race_checker.h"

#include <algorithm>

namespace vsm::exec {

void RaceChecker::start(uint32_t bytes, int warps) {
  warps_ = static_cast<size_t>(warps);
  const size_t words = (bytes + 3) / 4;
  writes_.assign(words, Write());
  reads_.assign(words * warps_, Reads());
  split_.assign(words, 0);
  split_writes_.clear();
  split_reads_.clear();
  strong_.clear();
  volatile_.clear();
  older_.clear();
}

void RaceChecker::split(uint32_t word) {
  split_[word] = static_cast<uint32_t>(split_writes_.size() / 4) + 1;
  const Write write = writes_[word];
  split_writes_.insert(split_writes_.end(), 4, write);
  const size_t from = size_t{word} * warps_;
  for (uint64_t byte = 0; byte < 4; ++byte) {
    for (size_t w = 0; w < warps_; ++w) {
      const Reads r = reads_[from + w];
      if (r.older) older_[(uint64_t{word} * 4 + byte) * warps_ + w + (uint64_t{1} << 62)] = older_[from + w];
      split_reads_.push_back(r);
    }
  }
}

// Calls fn(cell) for the cells that hold these bytes: of the strong accesses, or of the others.
template <class F>
void RaceChecker::each_cell(uint32_t address, uint32_t bytes, bool strong, F fn) {
  const uint32_t end = address + bytes;
  if (strong) {
    for (uint32_t a = address; a < end; ++a) {
      StrongCell& c = strong_[a];
      c.reads.resize(warps_);
      fn(Cell{&c.write, c.reads.data(), (uint64_t{a} * warps_) | uint64_t{1} << 63, a});
    }
    return;
  }
  for (uint32_t a = address; a < end;) {
    const uint32_t word = a / 4;
    if (!split_[word] && a % 4 == 0 && end - a >= 4) {
      fn(Cell{&writes_[word], &reads_[size_t{word} * warps_], uint64_t{word} * warps_, a});
      a += 4;
      continue;
    }
    if (!split_[word]) split(word);
    const size_t at = size_t{split_[word] - 1} * 4 + a % 4;
    fn(Cell{&split_writes_[at], &split_reads_[at * warps_], uint64_t{a} * warps_ + (uint64_t{1} << 62), a});
    ++a;
  }
}

// Whether what that lane did at this version comes before what `who` does now.
bool RaceChecker::ordered(const Accessor& who, int warp, int lane, uint32_t version) {
  return (warp == who.warp && lane == who.lane) || who.clock[warp * 32 + lane] >= version;
}

bool RaceChecker::ordered(const Accessor& who, const Write& write, int* lane) {
  if (write.warp == who.warp && who.lane >= 0 && !write.collective && (write.mask >> who.lane & 1)) return true;
  for (uint32_t m = write.mask; m; m &= m - 1) {
    *lane = __builtin_ctz(m);
    if (!ordered(who, write.warp, *lane, write.version)) return false;
  }
  return true;
}

bool RaceChecker::ordered(const Accessor& who, int warp, const Reads& reads, int* lane) {
  for (uint32_t m = reads.mask; m; m &= m - 1) {
    *lane = __builtin_ctz(m);
    if (ordered(who, warp, *lane, reads.version) == (reads.collective != 0)) return reads.collective != 0;
  }
  return reads.collective == 0 || reads.mask == 0;
}

void RaceChecker::check(const Accessor& who, const Cell& cell, bool store, RaceFound* out) {
  const Write& last = *cell.write;
  const bool same_instruction = store && last.warp == who.warp && last.step == who.step;
  int lane = 0;
  if (!same_instruction && !ordered(who, last, &lane)) {
    *out = {true, true, last.warp, lane, cell.address};
    return;
  }
  if (!store) return;
  for (size_t w = 0; w < warps_; ++w) {
    const Reads& r = cell.reads[w];
    bool fine = ordered(who, static_cast<int>(w), r, &lane);
    if (fine && r.older) {
      for (const Reads& o : older_[cell.key + w]) fine = fine && ordered(who, static_cast<int>(w), o, &lane);
    }
    if (fine) continue;
    *out = {true, false, static_cast<int>(w), lane, cell.address};
    return;
  }
}

// Against accesses of the other kind, and of the same unless both are strong.
void RaceChecker::check_all(const Accessor& who, uint32_t address, uint32_t bytes, bool store, bool strong,
                            RaceFound* out) {
  each_cell(address, bytes, false, [&](const Cell& c) {
    if (!out->found) check(who, c, store, out);
  });
  if (strong || strong_.empty()) return;
  for (uint32_t a = address; a < address + bytes && !out->found; ++a) {
    const auto it = strong_.find(a);
    if (it == strong_.end()) continue;
    check(who, Cell{&it->second.write, it->second.reads.data(), (uint64_t{a} * warps_) | uint64_t{1} << 63, a}, store,
          out);
  }
}

void RaceChecker::note_read(const Accessor& who, const Cell& cell) {
  Reads& r = cell.reads[who.warp];
  const uint32_t lanes = who.lane < 0 ? ~0u : 1u << who.lane;
  const bool collective = who.lane < 0;
  if (r.version == who.version && (r.collective != 0) == collective) {
    r.mask |= lanes;
    return;
  }
  // What these lanes read before does not matter any more, nor what is ordered before this read.
  std::vector<Reads> older;
  if (r.older) older.swap(older_[cell.key + static_cast<uint64_t>(who.warp)]);
  older.push_back(r);
  int lane = 0;
  for (Reads& o : older) {
    if (o.collective) o.mask = 0;
    else if (!collective) o.mask &= ~lanes;
  }
  older.erase(
      std::remove_if(older.begin(), older.end(), [&](const Reads& o) { return ordered(who, who.warp, o, &lane); }),
      older.end());
  r.mask = lanes;
  r.version = who.version & 0x3fffffff;
  r.collective = collective;
  r.older = !older.empty();
  if (r.older) older_[cell.key + static_cast<uint64_t>(who.warp)].swap(older);
}

RaceFound RaceChecker::load(const Accessor& who, uint32_t address, uint32_t bytes, bool strong) {
  RaceFound out;
  check_all(who, address, bytes, false, strong, &out);
  each_cell(address, bytes, strong, [&](const Cell& c) { note_read(who, c); });
  return out;
}

RaceFound RaceChecker::store(const Accessor& who, uint32_t address, uint32_t bytes, bool strong) {
  RaceFound out;
  check_all(who, address, bytes, true, strong, &out);
  each_cell(address, bytes, strong, [&](const Cell& c) {
    Write& w = *c.write;
    const bool more = w.version == who.version && w.warp == who.warp && w.step == who.step && who.lane >= 0;
    const uint32_t lanes = who.lane < 0 ? ~0u : 1u << who.lane;
    w = {who.version, static_cast<uint16_t>(who.warp), who.lane < 0, more ? w.mask | lanes : lanes, who.step};
  });
  return out;
}

RaceFound RaceChecker::hand_over(const Accessor& who, const ThreadOrder& order, uint32_t address, uint32_t bytes,
                                 bool store) {
  RaceFound out;
  const int self = who.warp * 32 + who.lane;
  const uint32_t fenced = order.fenced(who.warp, who.lane);
  for (uint32_t a = address; a < address + bytes; ++a) {
    VolatileByte& byte = volatile_[a];
    if (!store) {
      const Visit& w = byte.write;
      if (!out.found && w.thread >= 0 && w.thread != self && who.clock[w.thread] < w.version &&
          who.clock[w.thread] >= w.fenced) {
        out = {true, true, w.thread / 32, w.thread % 32, a};
      }
      const auto mine =
          std::find_if(byte.reads.begin(), byte.reads.end(), [&](const Visit& r) { return r.thread == self; });
      if (mine != byte.reads.end()) mine->version = who.version;
      else byte.reads.push_back({self, who.version, 0});
      continue;
    }
    for (const Visit& r : byte.reads) {
      const bool learns = order.clock(r.thread / 32, r.thread % 32)[self] < fenced;
      if (out.found || r.thread == self || who.clock[r.thread] >= r.version || learns) continue;
      out = {true, false, r.thread / 32, r.thread % 32, a};
    }
    byte = {{self, who.version, fenced}, {}};
  }
  return out;
}

void RaceChecker::end_hand_over(uint32_t address, uint32_t bytes) {
  for (uint32_t a = address; a < address + bytes && !volatile_.empty(); ++a) volatile_.erase(a);
}

RaceFound RaceChecker::look(const Accessor& who, uint32_t address, uint32_t bytes) {
  RaceFound out;
  check_all(who, address, bytes, false, false, &out);
  return out;
}

}  // namespace vsm::exec
