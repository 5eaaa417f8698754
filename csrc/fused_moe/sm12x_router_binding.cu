// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI face of the router (flashinfer/fused_moe/sm12x_router.py). Python has validated shapes, dtypes and alignment;
// what is checked here again is only what would otherwise read or write out of bounds.
#include "flashinfer/sm12x/router.cuh"
#include "sm12x_binding_utils.h"

namespace flashinfer::sm12x {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

namespace {

const __nv_bfloat16* rows_or_null(const Optional<TensorView>& tensor, int64_t elements, const char* name) {
  if (!tensor.has_value()) return nullptr;
  TVM_FFI_CHECK(tensor.value().numel() == elements, ValueError) << name << " must have " << elements << " elements";
  return static_cast<const __nv_bfloat16*>(tensor.value().data_ptr());
}

}  // namespace

void router_run(TensorView top_k_weights, TensorView top_k_ids, TensorView logits, Optional<TensorView> normed,
                Optional<TensorView> sum, TensorView hidden, TensorView weight, Optional<TensorView> bias,
                Optional<TensorView> residual, Optional<TensorView> norm_weight, Optional<TensorView> is_padding,
                double epsilon, bool rounds_logits, bool constant_weights, bool enable_pdl) {
  const int tokens = checked_int(hidden.size(0), "the number of tokens"), k = checked_int(hidden.size(1), "k");
  const int experts = checked_int(weight.size(0), "the number of experts");
  const int top_k = checked_int(top_k_ids.size(1), "top_k");
  const int64_t elements = hidden.numel();
  TVM_FFI_CHECK(k > 0 && k % kRouterChunk == 0 && k <= kRouterMaxK, ValueError) << "k is " << k;
  TVM_FFI_CHECK(weight.numel() == static_cast<int64_t>(experts) * k, ValueError) << "weight must be [experts, k]";
  TVM_FFI_CHECK(experts <= kRouterMaxExperts && top_k <= 32 && top_k <= experts, ValueError)
      << experts << " experts, top " << top_k;
  TVM_FFI_CHECK(logits.numel() == static_cast<int64_t>(tokens) * experts, ValueError) << "logits is too small";
  TVM_FFI_CHECK(top_k_ids.numel() == static_cast<int64_t>(tokens) * top_k && top_k_weights.numel() == top_k_ids.numel(),
                ValueError)
      << "top_k_weights and top_k_ids must be [tokens, top_k]";
  RouterParams params = {};
  params.hidden = static_cast<const __nv_bfloat16*>(hidden.data_ptr());
  params.residual = rows_or_null(residual, elements, "residual");
  params.norm_weight = rows_or_null(norm_weight, k, "norm_weight");
  params.weight = static_cast<const __nv_bfloat16*>(weight.data_ptr());
  params.bias = rows_or_null(bias, experts, "bias");
  params.sum = const_cast<__nv_bfloat16*>(rows_or_null(sum, elements, "sum"));
  params.normed = const_cast<__nv_bfloat16*>(rows_or_null(normed, elements, "normed"));
  TVM_FFI_CHECK((params.sum != nullptr) == (params.residual != nullptr), ValueError) << "sum goes with residual";
  TVM_FFI_CHECK((params.normed != nullptr) == (params.norm_weight != nullptr), ValueError)
      << "normed goes with norm_weight";
  params.logits = static_cast<float*>(logits.data_ptr());
  params.top_k_weights = static_cast<float*>(top_k_weights.data_ptr());
  params.top_k_ids = static_cast<int32_t*>(top_k_ids.data_ptr());
  if (is_padding.has_value()) {
    TVM_FFI_CHECK(is_padding.value().numel() == tokens, ValueError) << "is_padding must have " << tokens << " elements";
    params.is_padding = static_cast<const bool*>(is_padding.value().data_ptr());
  }
  params.epsilon = static_cast<float>(epsilon);
  params.rounds_logits = rounds_logits;
  params.num_tokens = tokens;
  params.k = k;
  params.num_experts = experts;
  params.top_k = top_k;
  params.constant_weights = constant_weights;
  check_status(run_router(params, launch_options(hidden, enable_pdl)));
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_router_run, flashinfer::sm12x::router_run);
