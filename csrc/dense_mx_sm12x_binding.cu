// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI bindings of the dense layers with weights in microscaling formats. Python has validated shapes, dtypes and
// layouts; this file only repeats checks that prevent reads and writes out of bounds.
#include "flashinfer/gemm/dense_mx_sm120.cuh"
#include "sm12x_binding_utils.h"

namespace flashinfer::sm12x {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Rows as the kernels read them; `k` elements each.
TokenRows dense_rows(const TensorView& values, const Optional<TensorView>& scales, int64_t format, int k) {
  TVM_FFI_CHECK(format >= 0 && format < kTokenFormats, ValueError)
      << "the format is " << format << "; it may be 0 to " << kTokenFormats - 1;
  TokenRows rows = {values.data_ptr(), nullptr, static_cast<TokenFormat>(format), k};
  TVM_FFI_CHECK(k > 0 && k % kScaleBlock == 0, ValueError) << "k is " << k << "; it must be a multiple of 32";
  const Element element = element_of(rows.format);
  const int64_t width = have_scales(rows.format) ? row_bytes(element, k) : k;
  TVM_FFI_CHECK(values.size(1) == width, ValueError) << "a row is " << values.size(1) << " wide, not " << width;
  if (!have_scales(rows.format)) return rows;
  TVM_FFI_CHECK(scales.has_value(), ValueError) << "quantized rows need their scales";
  const int count = checked_int(values.size(0), "the number of rows");
  const int64_t needed = rows.format == TokenFormat::kMxfp8Linear ? static_cast<int64_t>(count) * (k / kScaleBlock)
                                                                  : swizzled_scale_bytes(element, count, k);
  TVM_FFI_CHECK(scales.value().numel() >= needed, ValueError)
      << "there are " << scales.value().numel() << " scales; " << needed << " are needed";
  rows.scales = data<const uint8_t>(scales.value());
  return rows;
}

// Options of a split-K kernel beside its operands. A GEMM takes no norm and ignores the others.
struct DenseExtras {
  RowNorm norm;
  Optional<TensorView> next_weights;
  uint64_t* ranks;  // null, or where a split-K kernel leaves ranks of its largest outputs; then `out` may have no rows
  int* ranks_of_token;  // how many for a token
};

// `workspace`: for a GEMM only; a split-K kernel takes none.
void run_dense(TensorView out, TensorView tokens, Optional<TensorView> token_scales, TensorView weights,
               TensorView weight_scales, Optional<TensorView> alpha, Optional<TensorView> bias,
               Optional<TensorView> residual, Optional<TensorView> workspace, int64_t token_format, int64_t tactic,
               bool weights_first, bool enable_pdl, const DenseExtras& extras) {
  const Instance* instance = find_instance(checked_int(tactic, "tactic"));
  TVM_FFI_CHECK(instance != nullptr, ValueError) << "tactic " << tactic << " of the dense layer does not exist";
  const int m = checked_int(tokens.size(0), "the number of tokens"), n = checked_int(weights.size(0), "n");
  const int k = row_elements(instance->weights, checked_int(weights.size(1), "the bytes of a row"));
  const TokenRows rows = dense_rows(tokens, token_scales, token_format, k);
  const bool stores = extras.ranks == nullptr || out.size(0) != 0;
  TVM_FFI_CHECK((out.size(0) == m || !stores) && out.size(1) == n, ValueError)
      << "out must be [" << m << ", " << n << "]";
  TVM_FFI_CHECK(weights.size(1) == row_bytes(instance->weights, k), ValueError)
      << "a row of weights is " << weights.size(1) << " bytes, not " << row_bytes(instance->weights, k);
  TVM_FFI_CHECK(weight_scales.numel() >= swizzled_scale_bytes(instance->weights, n, k), ValueError)
      << "weight_scales is too small";
  if (m == 0 || n == 0) return;
  DenseArguments a = {instance, m, n, k, rows};
  a.weights = data<const uint8_t>(weights);
  a.weight_scales = data<const uint8_t>(weight_scales);
  StoreEpilogue& epilogue = a.epilogue;
  epilogue.output = stores ? out.data_ptr() : nullptr;
  epilogue.output_type = scalar_type(out, "out");
  epilogue.alpha = data_or_null<const float>(alpha);
  epilogue.bias = data_or_null<const void>(bias);
  if (bias.has_value()) {
    TVM_FFI_CHECK(bias.value().numel() == n, ValueError) << "bias must have n elements";
    epilogue.bias_type = scalar_type(bias.value(), "bias");
  }
  epilogue.residual = data_or_null<const void>(residual);
  if (residual.has_value()) {
    TVM_FFI_CHECK(residual.value().numel() == static_cast<int64_t>(m) * n &&
                      scalar_type(residual.value(), "residual") == epilogue.output_type,
                  ValueError)
        << "residual must have the shape and dtype of out";
  }
  const LaunchOptions options = launch_options(tokens, enable_pdl);
  if (instance->split_k_dense != nullptr) {
    a.weights_first = weights_first;
    a.ranks = extras.ranks;
    a.norm = extras.norm;
    a.next = l2_prefetch_of(extras.next_weights, options);
    int left = 0;
    check_status(run_split_k_dense(a, options, &left));
    if (extras.ranks != nullptr) *extras.ranks_of_token = left;
    return;
  }
  TVM_FFI_CHECK(extras.norm.weight == nullptr, ValueError) << "tactic " << tactic << " has no norm in front of it";
  TVM_FFI_CHECK(workspace.has_value(), ValueError) << "tactic " << tactic << " needs a workspace";
  a.workspace = data<uint8_t>(workspace.value());
  a.workspace_bytes = static_cast<size_t>(workspace.value().numel());
  check_status(run_dense_gemm(a, options));
}

void dense_run(TensorView out, TensorView tokens, Optional<TensorView> token_scales, TensorView weights,
               TensorView weight_scales, Optional<TensorView> alpha, Optional<TensorView> bias,
               Optional<TensorView> residual, Optional<TensorView> workspace, int64_t token_format, int64_t tactic,
               Optional<TensorView> next_weights, bool weights_first, bool enable_pdl) {
  run_dense(out, tokens, token_scales, weights, weight_scales, alpha, bias, residual, workspace, token_format, tactic,
            weights_first, enable_pdl, {{}, next_weights, nullptr, nullptr});
}

int64_t dense_gemm_workspace_size(int64_t num_tokens, int64_t k, int64_t tactic, int64_t token_format) {
  const Instance* gemm = find_instance(checked_int(tactic, "tactic"));
  TVM_FFI_CHECK(gemm != nullptr && gemm->store != nullptr, ValueError)
      << "tactic " << tactic << " of the dense layer is no GEMM";
  return static_cast<int64_t>(dense_gemm_workspace_bytes(*gemm, checked_int(num_tokens, "the number of tokens"),
                                                         checked_int(k, "k"), static_cast<TokenFormat>(token_format),
                                                         multiprocessors(current_device())));
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_dense_run, flashinfer::sm12x::dense_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_dense_gemm_workspace_size, flashinfer::sm12x::dense_gemm_workspace_size);

// Entries of the operators that are made of dense layers.
#include "dense_mx_sm12x_rows_binding.inl"
