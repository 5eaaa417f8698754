// SPDX-License-Identifier: Apache-2.0
// A predicted time of a launch, from its counters. A roofline, not a simulation of time: the launch takes as long as
// the busiest of four resources, each used at its full rate.
//
//   dram     bytes of the distinct 32-byte sectors touched / DRAM bandwidth (each sector is fetched once: the
//            caches are taken to be perfect; what an earlier launch left in the L2 is not taken into account)
//   issue    warp instructions / one per cycle and sub-partition (four of an SM)
//   mma      floating-point operations of mma / 2,048 per cycle and SM, which block-scaled 8-bit operands were measured
//            to reach on SM120 cards. 16-bit operands take two or four times as long (512 to 1,024, by card; unknown
//            of a GB10) and 4-bit ones half as long; the counter does not tell them apart.
//   shared   shared-memory wavefronts / one per cycle and SM
//
// The last three are stretched by the share of SMs that the grid leaves idle in its last wave. Launch latency, memory
// latency, dependencies between instructions and the clock's behaviour under load are not modelled: the prediction
// is a lower bound to hold measurements against, and no measurement.
#pragma once

#include <cstdint>

#include "gpu_limits.h"
#include "report.h"

namespace vsm::model {

struct Launch {
  uint64_t blocks = 1;
  int blocks_per_sm = 1;
};

struct Prediction {
  double dram = 0, issue = 0, mma = 0, shared = 0;  // seconds of each resource
  double seconds = 0;  // the largest; 0 where the device is not modelled
  const char* bound = "none";  // its name
};

/// Only compute capability 12.1 is modelled.
Prediction predict(const Limits& limits, const Launch& launch, const Counters& counters);

}  // namespace vsm::model
