// SPDX-License-Identifier: Apache-2.0
// What a launch says about itself: checkers' reports and counters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vsm {

enum class ReportKind : uint8_t {
  kOutOfBounds,      // access outside every allocation, or past the end of a space
  kMisaligned,       // address not a multiple of the access size
  kUninitialized,    // read of bytes that nothing wrote
  kReadOnlyWrite,    // store to const / param / read-only memory
  kBarrierMisuse,    // mbarrier or named barrier used against its rules
  kDeadlock,         // every live warp of a block waits
  kStepLimit,        // the launch ran longer than its bound
  kMissingFence,     // generic-proxy write read or overwritten by the async proxy without a proxy fence
  kMissingWait,      // memory of a bulk copy in flight, touched with no wait for it in between
  kMissingArrivalFence,  // an arrival with no fence before it, which GB10 needs
  kMissingGridWait,  // what the grid before may still write or read, touched before griddepcontrol.wait
  kRace,             // two warps touched a byte, one of them writing, nothing ordering them
  kTrap,             // the program executed trap
  kBadDescriptor,    // a tensor map that is not one, or a copy against its rules
  kUndefined,        // behaviour that the ISA leaves undefined
  kUnsupported,      // an instruction form that is not modelled
};
constexpr int kReportKinds = static_cast<int>(ReportKind::kUnsupported) + 1;

/// The kind's name as it stands in a report's text, such as "out of bounds".
const char* to_string(ReportKind kind);

/// One finding of a checker. `lane` is -1 where the whole warp is meant, `warp` -1 for the block.
struct Report {
  ReportKind kind = ReportKind::kUnsupported;
  std::string kernel;
  int line = 0;            // in the PTX text, from 1
  std::string instruction; // the PTX text of that line
  uint32_t block[3] = {0, 0, 0};
  int warp = -1;
  int lane = -1;
  uint64_t address = 0;
  std::string space;       // "global", "shared", ... or empty
  std::string text;        // what happened, in one sentence
  std::string str() const; // all of the above in one line
};

/// Classes that executed warp instructions are counted under.
enum class OpClass : uint8_t {
  kInteger,
  kFloat,
  kHalf,
  kConvert,
  kMove,
  kPredicate,
  kControl,
  kWarp,
  kLoadGlobal,
  kStoreGlobal,
  kLoadShared,
  kStoreShared,
  kLoadStoreOther,
  kAtomic,
  kMma,
  kMatrixMove,
  kAsyncCopy,
  kBarrier,
  kSpecial,
  kCount
};
const char* to_string(OpClass c);

/// Counts of one launch (summable over launches but for `global_distinct_bytes`).
struct Counters {
  uint64_t warp_instructions = 0;
  uint64_t thread_instructions = 0;
  uint64_t by_class[static_cast<int>(OpClass::kCount)] = {};
  uint64_t mma_flops = 0;               // 2*m*n*k per mma
  uint64_t global_load_bytes = 0;       // requested by ld/atom/cp.async, per active lane
  uint64_t global_store_bytes = 0;
  uint64_t global_sectors = 0;          // 32-byte sectors touched, summed over warp accesses
  uint64_t async_load_bytes = 0;        // bulk and tensor copies into shared memory
  uint64_t async_store_bytes = 0;
  // Bulk prefetches alone: a plain one names a cache line, whose size the ISA leaves open, and the lanes of a warp may
  // name one line 32 times. No part of the other counters of bytes: a prefetch is a hint.
  uint64_t prefetched_bytes = 0;
  uint64_t global_distinct_bytes = 0;   // distinct 32-byte sectors read or written x 32
  uint64_t shared_accesses = 0;         // warp-wide accesses
  uint64_t shared_wavefronts = 0;       // passes they need: 32 banks of 4 bytes
  uint64_t shared_bank_conflicts = 0;   // wavefronts beyond the least that the access size allows
  uint64_t barrier_waits = 0;           // times a warp had to wait at a barrier or mbarrier
  uint64_t blocks = 0;
  void add(const Counters& other);
};

enum class LaunchStatus : uint8_t { kOk, kRefused, kFault, kTrap, kDeadlock, kStepLimit };

struct LaunchResult {
  LaunchStatus status = LaunchStatus::kOk;
  std::string message;           // empty when status is kOk
  Counters counters;
  std::vector<Report> reports;   // at most LaunchConfig::max_reports of a kind
  double host_seconds = 0;
  bool clean() const { return status == LaunchStatus::kOk && reports.empty(); }
};

}  // namespace vsm
