// SPDX-License-Identifier: Apache-2.0
#include "exec/grid_order.h"

#include <algorithm>

#include "exec/machine.h"

namespace vsm::exec {
namespace {

// Calls `visit(word, mask)` for the words of a page's bitmap that hold bytes [first, last); true once it answers true.
template <class Visit>
bool each_word(uint64_t first, uint64_t last, Visit visit) {
  while (first < last) {
    const uint64_t begin = first % 64, count = std::min(64 - begin, last - first);
    const uint64_t mask = (count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1) << begin;
    if (visit(first / 64, mask)) return true;
    first += count;
  }
  return false;
}

}  // namespace

void ByteSet::add(uint64_t address, uint64_t bytes) {
  for (const uint64_t end = address + bytes; address < end;) {
    const uint64_t page = address / kPageBytes, stop = std::min(end, (page + 1) * kPageBytes);
    if (page != last_) {
      last_page_ = &pages_[page];  // zeros if new; pages do not move
      last_ = page;
    }
    each_word(address - page * kPageBytes, stop - page * kPageBytes, [&](uint64_t word, uint64_t mask) {
      (*last_page_)[word] |= mask;
      return false;
    });
    address = stop;
  }
}

bool ByteSet::touches(uint64_t address, uint64_t bytes) const {
  for (const uint64_t end = address + bytes; address < end;) {
    const uint64_t page = address / kPageBytes, stop = std::min(end, (page + 1) * kPageBytes);
    const auto found = pages_.find(page);
    if (found != pages_.end() && each_word(address - page * kPageBytes, stop - page * kPageBytes,
                                           [&](uint64_t word, uint64_t mask) { return found->second[word] & mask; })) {
      return true;
    }
    address = stop;
  }
  return false;
}

void ByteSet::remove(uint64_t address, uint64_t bytes) {
  const uint64_t end = address + bytes;
  for (auto& [page, bits] : pages_) {
    const uint64_t begin = page * kPageBytes;
    if (begin >= end || begin + kPageBytes <= address) continue;
    each_word(std::max(address, begin) - begin, std::min(end, begin + kPageBytes) - begin,
              [&bits = bits](uint64_t word, uint64_t mask) {
                bits[word] &= ~mask;
                return false;
              });
  }
}

void ByteSet::merge(const ByteSet& other) {
  for (const auto& [page, bits] : other.pages_) {
    Page& mine = pages_[page];
    for (size_t i = 0; i < bits.size(); ++i) mine[i] |= bits[i];
  }
}

void Block::grid_wait(Warp& w) {
  // The first is what orders: what was issued between it and a later one follows it, too.
  if (!grid_waits[w.id]) grid_waits[w.id] = w.clock.t[w.id];
  launch->waited = true;
}

void Block::grid_trigger(const Warp& w) {
  if (triggered) return;  // it is the block's first that counts
  triggered = true;
  // Once this block waited and then triggered, no grid behind this one can start before those ahead are complete.
  if (follows_grid_wait(w.clock)) launch->waited_before_trigger = true;
}

// Whether whoever has this clock is ordered after some warp's griddepcontrol.wait.
bool Block::follows_grid_wait(const Clock& clock) const {
  for (size_t i = 0; i < warps.size(); ++i) {
    if (grid_waits[i] && clock.t[i] >= grid_waits[i]) return true;
  }
  return false;
}

void Block::note_grid_access(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, bool load, bool store,
                             const Clock& clock) {
  if (accesses) {
    if (load) accesses->reads.add(address, bytes);
    if (store) accesses->writes.add(address, bytes);
  }
  if (!launch->in_flight) return;
  const bool waited = follows_grid_wait(clock);
  for (const GridInFlight& grid : *launch->in_flight) {
    if (waited && !grid.outlives_wait) continue;
    const bool written = grid.accesses->writes.touches(address, bytes);
    if (!written && !(store && grid.accesses->reads.touches(address, bytes))) continue;
    const char* why = waited ? "griddepcontrol.wait does not wait for that one, as the grid between them did not"
                             : "not ordered after griddepcontrol.wait";
    w.report(ReportKind::kMissingGridWait, in, lane,
             std::string(store ? "writes" : "reads") + " what the kernel before it in the stream, " +
                 grid.accesses->kernel + ", " + (written ? "writes" : "reads") + ": " + why +
                 ", so the two may overlap",
             "global", address);
    return;
  }
}

}  // namespace vsm::exec
