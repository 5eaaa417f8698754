// SPDX-License-Identifier: Apache-2.0
//
// Dense layers with weights in microscaling formats on SM12x (and compute capability 9.0): out = tokens * weights^T. Plain
// CUDA, no framework.
#pragma once

#include <algorithm>
#include <atomic>

#include "../sm12x/common/launch.h"
#include "../sm12x/impls/dense_layer.cuh"

namespace flashinfer::sm12x {

// One compiled shape of the dense layer's blocks. The rendered sources register theirs when the library is loaded.
struct DenseInstance {
  WeightFormat weights;
  int token_tile;
  int words;  // of 128 along K, that a warp takes
  int mma_warps;
  cudaError_t (*prepare)(const LaunchOptions& options);
  cudaError_t (*launch)(const DenseParams& params, int blocks, int shared_bytes, const LaunchOptions& options);
};

constexpr int kMaxDenseInstances = 32;
const DenseInstance* find_dense_instance(int index);
void register_dense_instance(int index, const DenseInstance* instance);

template <WeightFormat kWeights, int kTokenTile, int kWords, int kMmaWarps>
struct DenseLauncher {
  using Shape = StreamShape<kWeights, kTokenTile, kWords, kMmaWarps, true>;

  static cudaError_t prepare(const LaunchOptions& options) {
    return grant_shared_memory(dense_layer_kernel<Shape>, options);
  }
  static cudaError_t launch(const DenseParams& params, int blocks, int shared_bytes, const LaunchOptions& options) {
    return launch_kernel(dense_layer_kernel<Shape>, params, blocks, Shape::kThreads, shared_bytes, options);
  }
  static constexpr DenseInstance describe() { return {kWeights, kTokenTile, kWords, kMmaWarps, prepare, launch}; }
};

struct DenseArguments {
  const DenseInstance* instance;
  int num_tokens;
  int n;
  int k;  // a multiple of 32
  TokenRows tokens;
  const uint8_t* weights;  // [n, k / 2] or [n, k]
  const uint8_t* weight_scales;  // 128x4
  StoreEpilogue epilogue;
  // No launch in front writes weights or scales: with dependent launches they are read before it ends.
  bool weights_first;
  uint64_t* ranks;  // or null: [num_tokens][at most kKeeperWarps x SMs], of the largest outputs
};

// A ring's stages: whole units of `g`, so that a stage always is of the same chunk. A warp waits only for stages of its own
// chunk; of one that changed hands it would miss a phase, and take the parity of the one before for that of the next.
inline int ring_stages(const StreamedGemm& g, int ring_bytes, int stage_bytes) {
  return std::min(ring_bytes / stage_bytes, kMaxStreamStages) / g.chunks * g.chunks;
}

// Chunks of a unit: as few as leave the ring five stages or more (one being multiplied, one being finished, the others under
// way), else as many as give it most.
inline StreamedGemm plan_dense(const DenseInstance& instance, int n, int k, int ring_bytes, int* stage_bytes) {
  StreamedGemm best = {};
  int most = 0;
  for (int chunks = 1; chunks <= ceil_div(scale_words(k), instance.words) && most < 5; ++chunks) {
    const StreamedGemmPlan plan = {
        instance.weights, instance.words, instance.mma_warps, instance.token_tile, 1, n, k, chunks, true};
    const StreamedGemm g = plan.make();
    if (g.groups == 0) continue;
    const int bytes = plan.stage_bytes(g), stages = ring_stages(g, ring_bytes, bytes);
    if (stages > most) {
      best = g;
      most = stages;
      *stage_bytes = bytes;
    }
  }
  return best;
}

// `ranks_of_token`: how many there are, if any.
inline Status run_dense_layer(const DenseArguments& a, const LaunchOptions& options, int* ranks_of_token) {
  DenseParams p = {};
  const int ring_bytes = options.shared_bytes - kDenseFixedBytes;
  p.gemm = plan_dense(*a.instance, a.n, a.k, ring_bytes, &p.stage_bytes);
  if (p.gemm.groups == 0) return {cudaErrorInvalidValue, "K is too long for this dense tactic"};
  p.stages = ring_stages(p.gemm, ring_bytes, p.stage_bytes);
  if (const cudaError_t error = a.instance->prepare(options)) {
    return {error, "this device does not grant the dense tactic's shared memory"};
  }
  if (Status r = encode_scales(a.weight_scales, 1, &p.gemm); r.error) return r;
  p.gemm.weights = a.weights;
  p.tokens = a.tokens;
  p.num_tokens = a.num_tokens;
  p.weights_first = a.weights_first;
  p.epilogue = a.epilogue;
  p.ranks = a.ranks;
  const int blocks = std::min(p.gemm.units, options.sm_count);
  *ranks_of_token = blocks * keepers_of(p.stages, p.gemm.chunks);
  return {a.instance->launch(p, blocks, p.stages * p.stage_bytes + kDenseFixedBytes, options), "dense layer"};
}

}  // namespace flashinfer::sm12x
