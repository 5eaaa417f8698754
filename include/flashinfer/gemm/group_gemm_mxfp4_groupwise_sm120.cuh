// SPDX-License-Identifier: Apache-2.0
//
// The public grouped GEMM: for every group g, out[g] = a[g] * b[g]^T with MXFP8 (e4m3 or e5m2) rows a and MXFP4 rows b.
// Plain CUDA, no framework.
#pragma once

#include "../sm12x/host/tile_gemm.cuh"

namespace flashinfer::gemm {

struct GroupGemmArguments {
  int cum_m;
  int n;
  int k;  // a multiple of 32
  int num_groups;
  const void* a;  // [cum_m, k]
  const uint8_t* a_scales;  // 128x4 layout, group g from row (m_indptr[g] + 127 g) rounded down to 128
  const uint8_t* b;  // [groups, n, k / 2]
  const uint8_t* b_scales;  // 128x4 for each group
  const int32_t* m_indptr;  // [groups + 1] on the device
  void* output;  // [cum_m, n]
  sm12x::ScalarType output_type;
  uint8_t* workspace;  // 16-byte aligned
  size_t workspace_bytes;
};

inline size_t group_gemm_workspace_bytes(int device_sms) {
  sm12x::Arena arena(nullptr);
  sm12x::take_split_buffers(arena, device_sms);
  return arena.used();
}

// Runs the instance of tactic `tactic` (instances.py) for rows a of `element` on `options.stream`.
inline sm12x::Status group_gemm_mxfp4_groupwise_sm120(const GroupGemmArguments& g, sm12x::Element element, int tactic,
                                                      const sm12x::LaunchOptions& options) {
  using namespace sm12x;
  const Instance* instance = find_instance(tactic + (element == Element::kE5m2 ? kE5m2Tactics : 0));
  if (instance == nullptr || instance->store == nullptr) {
    return {cudaErrorInvalidValue, "no grouped GEMM instance of that tactic is loaded"};
  }
  Arena arena(g.workspace);
  const SplitBuffers split = take_split_buffers(arena, options.device_sms);
  if (arena.used() > g.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};
  if (Status r = check_activations(g.cum_m, g.k); r.error) return r;
  int blocks = 0;
  if (Status r = grid_blocks(*instance, Role::kStore, g.num_groups, options, &blocks); r.error) return r;

  GroupedGemmParams<Role::kStore> gemm = {};
  if (Status r = fill_gemm(gemm, *instance, g.b, g.b_scales, g.num_groups, g.n, g.k, split); r.error) return r;
  gemm.tokens = static_cast<const uint8_t*>(g.a);
  gemm.token_scales = reinterpret_cast<const uint32_t*>(g.a_scales);
  gemm.token_scale_pitch = 0;
  gemm.top_k = 1;
  gemm.num_routed_rows = g.cum_m;
  gemm.offsets = g.m_indptr;
  gemm.epilogue.output = g.output;
  gemm.epilogue.output_type = g.output_type;

  PrologueParams prologue = {};
  prologue.split_arrivals = split.arrivals;
  prologue.num_split_arrivals = split.blocks;
  if (Status r = launch_prologue(prologue, options); r.error) return r;
  return {instance->store(gemm, blocks, options), "grouped GEMM"};
}

}  // namespace flashinfer::gemm
