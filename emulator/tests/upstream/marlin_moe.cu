// SPDX-License-Identifier: Apache-2.0
// Runs Marlin's grouped GEMM with MXFP4 weights, from the sglang package, on the blocks of a GPU of 48 SMs:
//   marlin_moe tokens top_k experts n k padded_routes input output
// `input` holds the activations [token][k] bf16; the weights of each expert as Marlin stores them (k / 16 rows of 2 n
// words) and their E8M0 scales [expert][k / 32][n]; the routes by expert (padded_routes of int32, tokens * top_k where
// none), the expert of each block of them (int32), their number (int32), and the routes' weights [token][top_k]
// float32. `output` gets [token][top_k][n] bf16. BLOCK is how many routes are a block; N_TILE and K_TILE are the tile's,
// THREADS the thread block's, BLOCKS_PER_SM how many of these an SM holds.
// The package's headers use these without including them.
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "gemm/marlin_moe/kernel.h"
#include "gemm/marlin_moe/marlin_template.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>
#include "runtime_calls.h"

namespace {

namespace marlin = sglang::device::marlin;
constexpr int BLOCKS = 48 * BLOCKS_PER_SM;
constexpr int RESERVED = 1024;  // of shared memory for each block, where an SM holds several
constexpr auto KERNEL =
    sglang::device::marlin_moe::Marlin<nv_bfloat16, sglang::host::kFE2M1f.id(), sglang::host::kFE8M0fnu.id(), THREADS,
                                       (BLOCK + 15) / 16, N_TILE / 16, K_TILE / 16, /*m_block_size_8=*/BLOCK == 8,
                                       marlin::pipe_stages, /*group_blocks=*/2, /*is_zp_float=*/false, /*kIsEP=*/false,
                                       /*kHasBias=*/false, /*kExpertIdsAreSorted=*/false,
                                       /*kZeroInactiveOutput=*/false, /*kHasInactivePrefixCount=*/false>;

}  // namespace

int main(int, char** arguments) {
  int sizes[6];
  for (int i = 0; i < 6; ++i) sizes[i] = std::atoi(arguments[i + 1]);
  const auto [tokens, top_k, experts, n, k, padded_routes] = sizes;
  std::ifstream file(arguments[7], std::ios::binary);
  const std::vector<char> input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  size_t position = 0;
  const auto next = [&](size_t bytes) {
    if (position + bytes > input.size()) std::exit(3);
    void* const address = allocate(bytes);
    check(cudaMemcpy(address, input.data() + position, bytes, cudaMemcpyHostToDevice));
    position += bytes;
    return address;
  };
  const size_t weights = size_t{1} * experts * n * k;
  const auto activations = static_cast<const int4*>(next(size_t{2} * tokens * k));
  const auto elements = static_cast<const int4*>(next(weights / 2));
  const auto scales = static_cast<const int4*>(next(weights / 32));
  const auto routes = static_cast<const int*>(next(size_t{4} * padded_routes));
  const auto block_experts = static_cast<const int*>(next(size_t{4} * padded_routes / BLOCK));
  const auto route_count = static_cast<const int*>(next(4));
  const auto route_weights = static_cast<const float*>(next(size_t{4} * tokens * top_k));
  const size_t output_bytes = size_t{2} * tokens * top_k * n;
  const auto output = static_cast<int4*>(allocate(output_bytes));
  const auto partial = static_cast<int4*>(allocate(size_t{4} * BLOCKS * 2 * BLOCK * marlin::max_thread_n));
  const auto locks = static_cast<int*>(allocate(4 * 4 * BLOCKS));
  check(cudaMemset(locks, 0, 4 * 4 * BLOCKS));
  int shared = 0;
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  if (BLOCKS_PER_SM > 1) shared = shared / BLOCKS_PER_SM - RESERVED;
  check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  KERNEL<<<BLOCKS, THREADS, shared>>>(
      activations, elements, output, partial, /*b_bias_ptr=*/nullptr, scales, /*scale2_ptr=*/nullptr,
      /*zp_ptr=*/nullptr, /*g_idx=*/nullptr, routes, block_experts, route_count, route_weights, top_k,
      /*mul_topk_weights=*/true, /*is_ep=*/false, /*num_groups=*/k / 32, tokens, n, k, locks, /*has_bias=*/false,
      /*use_atomic_add=*/false, /*use_fp32_reduce=*/true, shared);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  std::vector<char> result(output_bytes);
  check(cudaMemcpy(result.data(), output, output_bytes, cudaMemcpyDeviceToHost));
  std::ofstream(arguments[8], std::ios::binary).write(result.data(), static_cast<std::streamsize>(output_bytes));
  return 0;
}
