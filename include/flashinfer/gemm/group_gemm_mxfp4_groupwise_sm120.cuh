// SPDX-License-Identifier: Apache-2.0
//
// The public grouped GEMM: for every group g, out[g] = a[g] * b[g]^T with MXFP8 (e4m3 or e5m2) rows a and MXFP4 rows b.
#pragma once

#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_sm120_mixed_input_launcher.h"

namespace flashinfer::gemm {

// e5m2 instances stand behind the e4m3 ones of the same tile in the table.
constexpr int kE5m2Tactics = 32;

// Runs the instance of tactic `tactic` (flashinfer/jit/sm12x/instances.py) for `activation` on `options.stream`.
// a: [cum_m, k]; a_scales: 128x4 layout, group g from row (m_indptr[g] + 127 g) rounded down to 128; b: [groups, n, k/2];
// b_scales: 128x4 for each group; m_indptr: [groups + 1] on the device; out: [cum_m, n] bf16, fp16 or fp32.
// k is a multiple of 32. The workspace needs sm12x::group_gemm_workspace_bytes bytes, 256-byte aligned.
inline sm12x::Status group_gemm_mxfp4_groupwise_sm120(sm12x::GroupGemmArguments arguments, sm12x::Activation activation,
                                                      int tactic, const sm12x::LaunchOptions& options) {
  arguments.instance = sm12x::find_instance(tactic + (activation == sm12x::Activation::kE5m2 ? kE5m2Tactics : 0));
  if (arguments.instance == nullptr || arguments.instance->store == nullptr) {
    return {cudaErrorInvalidValue, "no grouped GEMM instance of that tactic is loaded"};
  }
  return sm12x::run_group_gemm(arguments, options);
}

}  // namespace flashinfer::gemm
