// SPDX-License-Identifier: Apache-2.0
#include "exec/arrival_checker.h"

#include <algorithm>

#include "exec/machine.h"

namespace vsm::exec {
namespace {

constexpr const char* kArrivalText =
    "an arrival after accesses to shared memory, with no block-level fence of this thread in between: GB10 may let it "
    "overtake them";
constexpr const char* kSignalText =
    "tells other blocks of writes to global memory, with no device-level fence of this thread in between: GB10 may let "
    "it overtake them";

}  // namespace

void ArrivalChecker::meet(uint32_t lanes) {
  uint64_t last_touch = 0, last_copy = 0, last_written = 0;
  for_lanes(lanes, [&](int i) {
    last_touch = std::max(last_touch, touched[static_cast<size_t>(i)]);
    last_copy = std::max(last_copy, copied[static_cast<size_t>(i)]);
    last_written = std::max(last_written, wrote[static_cast<size_t>(i)]);
  });
  access(touched, lanes, last_touch);
  access(copied, lanes, last_copy);
  access(wrote, lanes, last_written);
}

void ArrivalChecker::fence(uint32_t lanes, bool device, uint64_t step, const Clock& clock) {
  access(block_fence, lanes, step);
  if (!device) return;
  access(device_fence, lanes, step);
  for_lanes(lanes, [&](int i) { std::copy_n(clock.t, kMaxWarps, covered[static_cast<size_t>(i)].begin()); });
}

bool Warp::unfenced_shared(int lane, bool copies) const {
  const auto i = static_cast<size_t>(lane);
  return arrivals->touched[i] > arrivals->block_fence[i] || (copies && arrivals->copied[i] > arrivals->block_fence[i]);
}

bool Warp::unfenced_global(int lane) const {
  const auto i = static_cast<size_t>(lane);
  if (arrivals->wrote[i] > arrivals->device_fence[i]) return true;
  return std::any_of(block->warps.begin(), block->warps.end(), [&](const Warp& other) {
    const uint32_t write = other.arrivals->last_write;
    const auto v = static_cast<size_t>(other.id);
    return other.id != id && write != 0 && clock.t[v] >= write && arrivals->covered[i][v] < write;
  });
}

void Warp::check_arrival(const Inst& in, int lane, uint32_t address) {
  if (unfenced_shared(lane, in.cls != OpClass::kAsyncCopy))
    report(ReportKind::kMissingArrivalFence, in, lane, kArrivalText, "shared", address);
}

void Warp::check_signal(const Inst& in, int lane, Space space, uint64_t address, bool release, bool block_scope) {
  Launch& l = *block->launch;
  if (release) arrivals->signal = steps + 1;
  if (space == Space::kGeneric) space = address >> 56 == kSharedWindow >> 56 ? Space::kShared : Space::kGlobal;
  if (space == Space::kShared) {
    if (!unfenced_shared(lane, true)) return;
    if (release) return report(ReportKind::kMissingArrivalFence, in, lane, kArrivalText, "shared", address);
    block->unfenced_signals[address & 0xffffffff] = {
        static_cast<uint64_t>(id),
        make_report(ReportKind::kMissingArrivalFence, in, lane, kArrivalText, "shared", address)};
  } else if (space == Space::kGlobal && !block_scope && unfenced_global(lane)) {
    if (release) return report(ReportKind::kMissingArrivalFence, in, lane, kSignalText, "global", address);
    Report r = make_report(ReportKind::kMissingArrivalFence, in, lane, kSignalText, "global", address);
    const std::lock_guard<std::mutex> lock(l.mutex);
    l.unfenced_signals[address] = {block->linear, std::move(r)};
  }
}

void Warp::look_at_signal(Space space, uint64_t address) {
  if (space == Space::kGeneric) space = address >> 56 == kSharedWindow >> 56 ? Space::kShared : Space::kGlobal;
  const bool shared = space == Space::kShared;
  auto take = [&](UnfencedSignals& signals, uint64_t place, uint64_t self) {
    const auto found = signals.find(place);
    if (found == signals.end() || found->second.first == self) return;
    block->launch->file(found->second.second);
    signals.erase(found);
  };
  if (shared) return take(block->unfenced_signals, address & 0xffffffff, static_cast<uint64_t>(id));
  const std::lock_guard<std::mutex> lock(block->launch->mutex);
  take(block->launch->unfenced_signals, address, block->linear);
}

}  // namespace vsm::exec
