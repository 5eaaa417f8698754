// SPDX-License-Identifier: Apache-2.0
// A grid that synchronizes with cooperative_groups: every block reads what the next one wrote a round before. And blocks
// that take many named barriers.
#include <cooperative_groups.h>

namespace groups = cooperative_groups;

__global__ void rotate_kernel(unsigned* values, unsigned* valid, int rounds) {
  const groups::grid_group grid = groups::this_grid();
  const auto i = static_cast<unsigned>(grid.thread_rank()), n = static_cast<unsigned>(grid.size());
  if (i == 0) *valid = grid.is_valid();
  for (int round = 0; round < rounds; ++round) {
    const unsigned next = values[(i + 1 + blockDim.x) % n];
    grid.sync();
    values[i] = next + round;
    grid.sync();
  }
}

// Of 32 threads; the barriers below its highest one count, too.
template <int kBarriers>
__global__ void barriers_kernel() {
  asm volatile("bar.sync %0, 32;" ::"n"(kBarriers - 1));
}

// Blocks of such a kernel that an SM holds, and what a cooperative launch of `blocks` says.
template <int kBarriers>
int launch_with_barriers(int blocks, int* per_sm) {
  const auto kernel = reinterpret_cast<const void*>(&barriers_kernel<kBarriers>);
  if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(per_sm, kernel, 32, 0) != cudaSuccess) return -1;
  const cudaError_t error = cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(32), nullptr, 0, nullptr);
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

extern "C" int eleven_barriers(int blocks, int* per_sm) { return launch_with_barriers<11>(blocks, per_sm); }
extern "C" int thirteen_barriers(int blocks, int* per_sm) { return launch_with_barriers<13>(blocks, per_sm); }

extern "C" int rotate(unsigned* values, unsigned* valid, int rounds, int blocks, int threads, int cooperative) {
  void* arguments[] = {&values, &valid, &rounds};
  const auto kernel = reinterpret_cast<const void*>(&rotate_kernel);
  const cudaError_t error =
      cooperative ? cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, nullptr)
                  : cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, nullptr);
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}
