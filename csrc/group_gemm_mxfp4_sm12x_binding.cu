// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI bindings of the grouped GEMM, group_gemm_mxfp4_nt_groupwise.
#include "flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh"
#include "sm12x_binding_utils.h"

namespace flashinfer::sm12x {

using tvm::ffi::TensorView;

int64_t group_gemm_workspace_size() {
  return static_cast<int64_t>(gemm::group_gemm_workspace_bytes(multiprocessors(current_device())));
}

void group_gemm_run(TensorView out, TensorView a, TensorView a_sf, TensorView b, TensorView b_sf, TensorView m_indptr,
                    TensorView workspace, int64_t tactic, bool enable_pdl) {
  const DLDataType type = a.dtype();
  TVM_FFI_CHECK(type.code == kDLFloat8_e4m3fn || type.code == kDLFloat8_e5m2, ValueError)
      << "a must be float8_e4m3fn or float8_e5m2";
  gemm::GroupGemmArguments g = {};
  g.cum_m = checked_int(a.size(0), "the number of rows of a");
  g.k = checked_int(a.size(1), "k");
  g.n = checked_int(b.size(1), "n");
  g.num_groups = checked_int(b.size(0), "the number of groups");
  TVM_FFI_CHECK(
      2 * b.size(2) == g.k && out.size(0) == g.cum_m && out.size(1) == g.n && m_indptr.size(0) == g.num_groups + 1,
      ValueError)
      << "a, b, out and m_indptr disagree about their sizes";
  TVM_FFI_CHECK(g.k % kScaleBlock == 0, ValueError) << "k is " << g.k << "; it must be a multiple of 32";
  TVM_FFI_CHECK(g.num_groups <= kMaxLocalExperts, ValueError)
      << g.num_groups << " groups; the kernels take at most " << kMaxLocalExperts;
  TVM_FFI_CHECK(reinterpret_cast<uintptr_t>(a_sf.data_ptr()) % sizeof(uint32_t) == 0, ValueError)
      << "a_scale must start at a multiple of 4 bytes";  // copied in words
  if (g.cum_m == 0) return;
  g.a = a.data_ptr();
  g.a_scales = data<const uint8_t>(a_sf);
  g.b = data<const uint8_t>(b);
  g.b_scales = data<const uint8_t>(b_sf);
  g.m_indptr = data<const int32_t>(m_indptr);
  g.output = out.data_ptr();
  g.output_type = scalar_type(out, "out");
  g.workspace = data<uint8_t>(workspace);
  g.workspace_bytes = static_cast<size_t>(workspace.numel());
  const Element element = type.code == kDLFloat8_e5m2 ? Element::kE5m2 : Element::kE4m3;
  check_status(
      gemm::group_gemm_mxfp4_groupwise_sm120(g, element, static_cast<int>(tactic), launch_options(a, enable_pdl)));
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_group_gemm_workspace_size, flashinfer::sm12x::group_gemm_workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_group_gemm_run, flashinfer::sm12x::group_gemm_run);
