// SPDX-License-Identifier: Apache-2.0
#include "model/model.h"

namespace vsm::model {
namespace {

constexpr double kSchedulersPerSm = 4;
constexpr double kMmaFlopsPerCycle = 2048;  // per SM, 8-bit operands

/// How much longer the SMs work than if the blocks spread evenly over all of them.
double imbalance(const Limits& limits, const Launch& launch) {
  if (launch.blocks == 0) return 1;
  const double even = static_cast<double>(launch.blocks) / limits.num_sms;
  const uint64_t sms = static_cast<uint64_t>(limits.num_sms);
  const uint64_t busiest = (launch.blocks + sms - 1) / sms;
  return static_cast<double>(busiest) / even;
}

}  // namespace

Prediction predict(const Limits& limits, const Launch& launch, const Counters& counters) {
  Prediction p;
  if (limits.compute_major != 12) return p;
  const double cycles = 1e3 * limits.clock_khz * limits.num_sms;  // of all SMs, per second
  const double stretch = imbalance(limits, launch);
  uint64_t bytes = counters.global_distinct_bytes;
  if (bytes == 0) bytes = counters.global_sectors * 32 + counters.async_load_bytes + counters.async_store_bytes;
  p.dram = static_cast<double>(bytes) / static_cast<double>(limits.dram_bytes_per_second);
  p.issue = static_cast<double>(counters.warp_instructions) / (cycles * kSchedulersPerSm) * stretch;
  p.mma = static_cast<double>(counters.mma_flops) / (cycles * kMmaFlopsPerCycle) * stretch;
  p.shared = static_cast<double>(counters.shared_wavefronts) / cycles * stretch;
  const struct {
    const char* name;
    double seconds;
  } terms[] = {{"dram", p.dram}, {"issue", p.issue}, {"mma", p.mma}, {"shared", p.shared}};
  for (const auto& term : terms) {
    if (term.seconds > p.seconds) p.seconds = term.seconds, p.bound = term.name;
  }
  return p;
}

}  // namespace vsm::model
