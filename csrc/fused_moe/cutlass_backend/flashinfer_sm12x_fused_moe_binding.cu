// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI bindings of the SM12x MXFP4 MoE. Python has validated shapes, dtypes and layouts (flashinfer/fused_moe); this
// file only repeats checks that prevent reads and writes out of bounds.
#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_sm120_mixed_input_launcher.h"
#include "sm12x_binding_utils.h"
#include "sm12x_register_instance_binding.h"

namespace flashinfer::sm12x {

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

MoeMode checked_mode(int64_t mode) {
  TVM_FFI_CHECK(mode >= 0 && mode <= 2, ValueError) << "mode is " << mode
                                                    << "; it may be 0 (MXFP8 input), 1 (bf16/fp16 "
                                                       "input, quantized inside) or 2 (W4A16)";
  return static_cast<MoeMode>(mode);
}

const Instance* checked_instance(int64_t tactic, Element activation) {
  const Instance* instance = find_instance(static_cast<int>(tactic));
  TVM_FFI_CHECK(instance != nullptr, ValueError) << "tactic " << tactic << " is not among the instances of this module";
  TVM_FFI_CHECK(instance->activation == activation && (instance->has_two_kernels() || instance->is_fused_moe()),
                ValueError)
      << "tactic " << tactic << " was compiled for other activations than this call has";
  return instance;
}

// Block scales are read by their format's layout, whatever the tensor's shape.
void check_scales(const TensorView& scales, const Instance& instance, int experts, int rows, int k, const char* name) {
  const int64_t needed = experts * swizzled_scale_bytes(instance.weights, rows, k);
  TVM_FFI_CHECK(scales.numel() == needed, ValueError)
      << name << " has " << scales.numel() << " scales; the tactic's weights have " << needed;
}

ExpertWeights expert_weights(const TensorView& weights, const TensorView& scales, const Optional<TensorView>& global,
                             const Optional<TensorView>& bias, const char* name) {
  return {data<const uint8_t>(weights), data<const uint8_t>(scales), data_or_null<const float>(global),
          data_or_null<const void>(bias), bias.has_value() ? scalar_type(bias.value(), name) : ScalarType::kBf16};
}

}  // namespace

int64_t moe_workspace_size(int64_t num_tokens, int64_t hidden, int64_t inter, int64_t num_local_experts, int64_t top_k,
                           int64_t mode, bool as_bf16) {
  TVM_FFI_CHECK(top_k >= 1, ValueError) << "top_k is " << top_k << "; it must be at least 1";
  const MoeShape shape = {checked_int(num_tokens, "num_tokens"),
                          checked_int(hidden, "hidden_size"),
                          checked_int(inter, "intermediate_size"),
                          checked_int(num_local_experts, "num_local_experts"),
                          checked_int(top_k, "top_k"),
                          checked_mode(mode),
                          as_bf16};
  return static_cast<int64_t>(moe_workspace_bytes(shape, multiprocessors(current_device())));
}

// False: nothing was launched, because the tactic needs all SMs of the device and the stream has fewer.
bool moe_run(TensorView output, TensorView input, Optional<TensorView> input_sf, int64_t top_k,
             Optional<TensorView> token_selected_experts, Optional<TensorView> token_final_scales, TensorView fc1_w,
             TensorView fc1_sf, Optional<TensorView> fc1_global, Optional<TensorView> fc1_bias, TensorView fc2_w,
             TensorView fc2_sf, Optional<TensorView> fc2_global, Optional<TensorView> fc2_bias,
             Optional<TensorView> swiglu_alpha, Optional<TensorView> swiglu_beta, Optional<TensorView> swiglu_limit,
             int64_t activation_type, TensorView workspace, int64_t mode, bool swizzled_input_sf, int64_t first_expert,
             int64_t num_experts_total, int64_t tactic_fc1, int64_t tactic_fc2, Optional<TensorView> next_weights,
             Optional<TensorView> router_logits, Optional<TensorView> is_padding, Optional<TensorView> barrier,
             bool enable_pdl) {
  MoeArguments a = {};
  a.shape.mode = checked_mode(mode);
  a.shape.num_tokens = checked_int(input.size(0), "the number of tokens");
  a.shape.hidden = checked_int(fc2_w.size(1), "hidden size");
  a.shape.inter = checked_int(2 * fc2_w.size(2), "intermediate size");
  a.shape.num_experts = checked_int(fc2_w.size(0), "the number of local experts");
  a.shape.top_k = checked_int(top_k, "top_k");
  if (a.shape.num_tokens == 0) return true;

  TVM_FFI_CHECK(a.shape.top_k >= 1, ValueError) << "top_k is " << top_k;
  TVM_FFI_CHECK(token_selected_experts.has_value() != router_logits.has_value(), ValueError)
      << "experts are chosen by token_selected_experts or by router_logits";
  const int64_t tokens = a.shape.num_tokens;
  if (router_logits.has_value()) {
    TVM_FFI_CHECK(router_logits.value().numel() == tokens * num_experts_total, ValueError)
        << "router_logits must be [tokens, experts]";
    TVM_FFI_CHECK(!is_padding.has_value() || is_padding.value().numel() == tokens, ValueError)
        << "is_padding must be [tokens]";
    a.router = {data<const float>(router_logits.value()), data_or_null<const bool>(is_padding),
                checked_int(num_experts_total, "the number of experts")};
  } else {
    TVM_FFI_CHECK(token_selected_experts.value().numel() == tokens * top_k, ValueError)
        << "token_selected_experts must be [tokens, top_k]";
  }
  TVM_FFI_CHECK(!barrier.has_value() || barrier.value().numel() == 2, ValueError) << "barrier must have two elements";
  a.barrier = data_or_null<unsigned>(barrier);
  TVM_FFI_CHECK(a.activation.set_activation(activation_type), ValueError)
      << "activation_type " << activation_type << " is none of these kernels'";
  TVM_FFI_CHECK(input.size(1) == a.shape.hidden && fc1_w.size(1) == a.fc1_rows() &&
                    2 * fc1_w.size(2) == a.shape.hidden && fc1_w.size(0) == a.shape.num_experts,
                ValueError)
      << "input, fc1_expert_weights and fc2_expert_weights disagree about hidden or intermediate size";
  TVM_FFI_CHECK(a.shape.hidden % kScaleBlock == 0 && a.shape.inter % kScaleBlock == 0, ValueError)
      << "hidden size " << a.shape.hidden << " and intermediate size " << a.shape.inter << " must be multiples of 32";
  TVM_FFI_CHECK(a.shape.num_experts <= kMaxLocalExperts, ValueError)
      << a.shape.num_experts << " local experts; the kernels route at most " << kMaxLocalExperts;
  TVM_FFI_CHECK(static_cast<int64_t>(a.shape.num_tokens) * a.shape.top_k <= INT_MAX / 2, ValueError)
      << "too many routed rows (tokens x top_k) for one call";
  TVM_FFI_CHECK(first_expert >= 0 && first_expert + a.shape.num_experts <= num_experts_total, ValueError)
      << "local experts [" << first_expert << ", " << first_expert + a.shape.num_experts << ") of "
      << num_experts_total;

  const Element activation = a.shape.mode == MoeMode::kW4A16 ? Element::kBf16 : Element::kE4m3;
  a.input = input.data_ptr();
  if (a.shape.mode == MoeMode::kBf16Input) a.input_type = scalar_type(input, "input");
  a.input_sf = data_or_null<const uint8_t>(input_sf);
  TVM_FFI_CHECK(a.shape.mode != MoeMode::kMxfp8Input || a.input_sf != nullptr, ValueError)
      << "MXFP8 input needs its scales (input_sf)";
  // Kernels copy scale words; the prologue copies linear rows that are not whole words byte by byte.
  const bool whole_words = swizzled_input_sf || a.shape.hidden / kScaleBlock % kScaleChunkBlocks == 0;
  TVM_FFI_CHECK(!whole_words || reinterpret_cast<uintptr_t>(a.input_sf) % sizeof(uint32_t) == 0, ValueError)
      << "input_sf must start at a multiple of 4 bytes";
  a.swizzled_input_sf = swizzled_input_sf;
  a.ids = data_or_null<const int32_t>(token_selected_experts);
  a.routing_weights = data_or_null<const float>(token_final_scales);
  a.first_expert = static_cast<int>(first_expert);
  a.fc1 = expert_weights(fc1_w, fc1_sf, fc1_global, fc1_bias, "fc1_expert_biases");
  a.fc2 = expert_weights(fc2_w, fc2_sf, fc2_global, fc2_bias, "fc2_expert_biases");
  a.activation.alpha = data_or_null<const float>(swiglu_alpha);
  a.activation.beta = data_or_null<const float>(swiglu_beta);
  a.activation.limit = data_or_null<const float>(swiglu_limit);
  a.output = output.data_ptr();
  a.output_type = scalar_type(output, "output");
  a.workspace = data<uint8_t>(workspace);
  a.workspace_bytes = static_cast<size_t>(workspace.numel());
  a.fc1_instance = checked_instance(tactic_fc1, activation);
  a.fc2_instance = checked_instance(tactic_fc2, activation);
  check_scales(fc1_sf, *a.fc1_instance, a.shape.num_experts, a.fc1_rows(), a.shape.hidden, "fc1_sf");
  check_scales(fc2_sf, *a.fc2_instance, a.shape.num_experts, a.shape.hidden, a.shape.inter, "fc2_sf");
  a.shape.as_bf16 = a.fc1_instance->has_two_kernels() && a.fc1_instance->compute_type == Element::kBf16;

  const LaunchOptions options = launch_options(input, enable_pdl);
  a.next = l2_prefetch_of(next_weights, options);
  if (!takes_sms(*a.fc1_instance, options)) return false;
  check_status(run_moe(a, options));
  return true;
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_moe_workspace_size, flashinfer::sm12x::moe_workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_moe_run, flashinfer::sm12x::moe_run);
