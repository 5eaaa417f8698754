// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <cstdio>

namespace vsm {

const char* to_string(ReportKind kind) {
  switch (kind) {
    case ReportKind::kOutOfBounds: return "out of bounds";
    case ReportKind::kMisaligned: return "misaligned";
    case ReportKind::kUninitialized: return "uninitialized read";
    case ReportKind::kReadOnlyWrite: return "write to read-only memory";
    case ReportKind::kBarrierMisuse: return "barrier misuse";
    case ReportKind::kDeadlock: return "deadlock";
    case ReportKind::kStepLimit: return "step limit";
    case ReportKind::kMissingFence: return "missing proxy fence";
    case ReportKind::kMissingWait: return "missing wait";
    case ReportKind::kMissingArrivalFence: return "missing arrival fence";
    case ReportKind::kMissingGridWait: return "missing grid wait";
    case ReportKind::kRace: return "race";
    case ReportKind::kTrap: return "trap";
    case ReportKind::kBadDescriptor: return "bad tensor map";
    case ReportKind::kUndefined: return "undefined behaviour";
    case ReportKind::kUnsupported: return "unsupported";
  }
  return "";
}

const char* to_string(OpClass c) {
  static const char* const kNames[] = {
      "integer", "float",       "half",         "convert",     "move",         "predicate",        "control",
      "warp",    "load_global", "store_global", "load_shared", "store_shared", "load_store_other", "atomic",
      "mma",     "matrix_move", "async_copy",   "barrier",     "special"};
  return c < OpClass::kCount ? kNames[static_cast<int>(c)] : "";
}

std::string Report::str() const {
  std::string s = std::string(to_string(kind)) + " in " + kernel + ", PTX line " + std::to_string(line);
  if (!instruction.empty()) s += " `" + instruction + "`";
  s += ", block (" + std::to_string(block[0]) + "," + std::to_string(block[1]) + "," + std::to_string(block[2]) + ")";
  if (warp >= 0) s += ", warp " + std::to_string(warp);
  if (lane >= 0) s += ", lane " + std::to_string(lane);
  if (!space.empty()) {
    char a[40];
    std::snprintf(a, sizeof a, " address 0x%llx", static_cast<unsigned long long>(address));
    s += ", " + space + a;
  }
  return s + ": " + text;
}

void Counters::add(const Counters& o) {
  warp_instructions += o.warp_instructions;
  thread_instructions += o.thread_instructions;
  for (int i = 0; i < static_cast<int>(OpClass::kCount); ++i) by_class[i] += o.by_class[i];
  mma_flops += o.mma_flops;
  global_load_bytes += o.global_load_bytes;
  global_store_bytes += o.global_store_bytes;
  global_sectors += o.global_sectors;
  async_load_bytes += o.async_load_bytes;
  async_store_bytes += o.async_store_bytes;
  prefetched_bytes += o.prefetched_bytes;
  global_distinct_bytes += o.global_distinct_bytes;
  shared_accesses += o.shared_accesses;
  shared_wavefronts += o.shared_wavefronts;
  shared_bank_conflicts += o.shared_bank_conflicts;
  barrier_waits += o.barrier_waits;
  blocks += o.blocks;
}

}  // namespace vsm
