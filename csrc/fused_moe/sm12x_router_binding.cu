// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI face of the router (flashinfer/fused_moe/sm12x_router.py). Python has validated shapes, dtypes and alignment;
// this file only repeats checks that prevent reads and writes out of bounds.
#include "flashinfer/sm12x/router.cuh"
#include "sm12x_binding_utils.h"

namespace flashinfer::sm12x {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

namespace {

template <class T>
T* checked_or_null(const Optional<TensorView>& tensor, int64_t elements, const char* name) {
  TVM_FFI_CHECK(!tensor.has_value() || tensor.value().numel() == elements, ValueError)
      << name << " must have " << elements << " elements";
  return data_or_null<T>(tensor);
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
  TVM_FFI_CHECK(k > 0 && k % kRouterVector == 0 && k <= kRouterMaxK, ValueError) << "k is " << k;
  TVM_FFI_CHECK(weight.numel() == static_cast<int64_t>(experts) * k, ValueError) << "weight must be [experts, k]";
  TVM_FFI_CHECK(experts <= kRouterMaxExperts && top_k <= 32 && top_k <= experts, ValueError)
      << experts << " experts, top " << top_k;
  TVM_FFI_CHECK(logits.numel() == static_cast<int64_t>(tokens) * experts, ValueError) << "logits is too small";
  TVM_FFI_CHECK(top_k_ids.numel() == static_cast<int64_t>(tokens) * top_k && top_k_weights.numel() == top_k_ids.numel(),
                ValueError)
      << "top_k_weights and top_k_ids must be [tokens, top_k]";
  RouterParams params = {};
  params.hidden = data<const __nv_bfloat16>(hidden);
  params.residual = checked_or_null<const __nv_bfloat16>(residual, elements, "residual");
  params.norm_weight = checked_or_null<const __nv_bfloat16>(norm_weight, k, "norm_weight");
  params.weight = data<const __nv_bfloat16>(weight);
  params.bias = checked_or_null<const __nv_bfloat16>(bias, experts, "bias");
  params.sum = checked_or_null<__nv_bfloat16>(sum, elements, "sum");
  params.normed = checked_or_null<__nv_bfloat16>(normed, elements, "normed");
  TVM_FFI_CHECK((params.sum != nullptr) == (params.residual != nullptr), ValueError) << "sum goes with residual";
  TVM_FFI_CHECK((params.normed != nullptr) == (params.norm_weight != nullptr), ValueError)
      << "normed goes with norm_weight";
  params.logits = data<float>(logits);
  params.top_k_weights = data<float>(top_k_weights);
  params.top_k_ids = data<int32_t>(top_k_ids);
  params.is_padding = checked_or_null<const bool>(is_padding, tokens, "is_padding");
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
