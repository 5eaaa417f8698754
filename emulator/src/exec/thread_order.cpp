// SPDX-License-Identifier: Apache-2.0
#include "exec/thread_order.h"

#include <algorithm>

namespace vsm::exec {
namespace {

void raise(uint32_t* into, const uint32_t* from, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] = std::max(into[i], from[i]);
}

template <class F>
void each_lane(uint32_t mask, F fn) {
  for (; mask; mask &= mask - 1) fn(__builtin_ctz(mask));
}

}  // namespace

void join(ThreadClock& into, const ThreadClock& from) {
  if (from.empty()) return;
  if (into.empty()) into = from;
  else raise(into.data(), from.data(), from.size());
}

void ThreadOrder::start(int warps) {
  const size_t count = static_cast<size_t>(warps) * 32;
  size_ = count + 1;
  versions_.assign(static_cast<size_t>(warps), 1);
  clocks_.assign(count * size_, 0);
  fences_.assign(count, {});
  wide_fences_.assign(count, {});
  pending_.assign(count, {});
  read_at_.assign(count, 0);
}

void ThreadOrder::release(int warp, uint32_t mask, ThreadClock& into) {
  into.resize(size_);
  uint32_t& version = versions_[static_cast<size_t>(warp)];
  each_lane(mask, [&](int lane) {
    uint32_t* mine = at(warp, lane);
    mine[warp * 32 + lane] = version;
    raise(into.data(), mine, size_);
  });
  ++version;
}

void ThreadOrder::acquire(int warp, uint32_t mask, const ThreadClock& from) {
  if (from.empty()) return;
  each_lane(mask, [&](int lane) { raise(at(warp, lane), from.data(), size_); });
}

void ThreadOrder::synchronize(int warp, uint32_t mask) {
  ThreadClock all;
  release(warp, mask, all);
  acquire(warp, mask, all);
}

void ThreadOrder::fence(int warp, uint32_t mask, bool wide) {
  each_lane(mask, [&](int lane) {
    const size_t thread = index(warp, lane);
    acquire(warp, 1u << lane, pending_[thread]);
    pending_[thread].clear();
    if (wide) acquired_at(warp, lane, read_at_[thread]);
    uint32_t* mine = at(warp, lane);
    mine[thread] = versions_[static_cast<size_t>(warp)];
    fences_[thread].assign(mine, mine + size_);
    if (wide) wide_fences_[thread] = fences_[thread];
  });
  ++versions_[static_cast<size_t>(warp)];
}

void ThreadOrder::relaxed_write(int warp, int lane, ThreadClock& into) { join(into, fences_[index(warp, lane)]); }

void ThreadOrder::relaxed_read(int warp, int lane, const ThreadClock& from) { join(pending_[index(warp, lane)], from); }

void ThreadOrder::acquired_at(int warp, int lane, uint32_t time) {
  uint32_t& last = at(warp, lane)[size_ - 1];
  last = std::max(last, time);
}

}  // namespace vsm::exec
