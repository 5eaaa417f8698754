// SPDX-License-Identifier: Apache-2.0
//
// Measures what a launch costs, and whether a programmatic dependent one begins before the grid in front of it ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../ptx/sync.cuh"
#include "clocks.cuh"

namespace flashinfer::sm12x::probe {

constexpr int kOrderThreads = 128;

struct LaunchStepParams {
  int32_t* steps;  // [launches + 1]; the first is given
  int index;
};

// One link of a chain of launches: counts one further than the launch in front of it did, and lets the next one begin
// at once. Only the order of all of them makes the last count right.
__global__ void __launch_bounds__(kOrderThreads) launch_step_kernel(const LaunchStepParams params) {
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  if (blockIdx.x == 0 && threadIdx.x == 0) params.steps[params.index + 1] = params.steps[params.index] + 1;
}

struct LaunchOverlapParams {
  int64_t* times;  // [blocks, 3]: nanoseconds at the first instruction, behind the wait, and at the end
  int64_t cycles;  // that the block spends in between
};

__global__ void __launch_bounds__(kOrderThreads) launch_overlap_kernel(const LaunchOverlapParams params) {
  const int64_t began = nanoseconds(), first_cycle = clock64();
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  const int64_t waited = nanoseconds();
  while (clock64() - first_cycle < params.cycles) {}
  if (threadIdx.x == 0) {
    int64_t* times = params.times + 3 * static_cast<int64_t>(blockIdx.x);
    times[0] = began;
    times[1] = waited;
    times[2] = nanoseconds();
  }
}

}  // namespace flashinfer::sm12x::probe
