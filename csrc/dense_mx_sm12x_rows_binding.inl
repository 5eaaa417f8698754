// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI bindings of a dense layer with a norm in front, of the largest outputs of each row, of rescored logits, and of
// rows dequantized to bfloat16. Included at the end of the dense layer's binding alone.
#include "flashinfer/sm12x/rows/dequantize.cuh"
#include "flashinfer/sm12x/rows/rescore.cuh"
#include "flashinfer/sm12x/rows/top_k.cuh"

namespace flashinfer::sm12x {

// Whether a dense layer by this tactic leaves ranks of its outputs itself, so that their largest need no logits.
bool leaves_ranks(int tactic, int top_k) {
  const Instance* instance = find_instance(tactic);
  return top_k == 1 && instance != nullptr && instance->split_k_dense != nullptr;
}

// Bytes of workspace to find the largest of so many rows, by either method.
int64_t row_top_k_workspace_size(int64_t num_rows, int64_t n, int64_t top_k) {
  const int64_t of_chunks = (n + kTopKChunk - 1) / kTopKChunk * top_k;
  const int64_t of_blocks = static_cast<int64_t>(kEpilogueWarps) * multiprocessors(current_device());
  return static_cast<int64_t>(sizeof(uint64_t)) * num_rows * std::max(of_chunks, of_blocks);
}

RowTopKParams row_top_k(TensorView values, TensorView indices, int64_t first_index, TensorView ranks, int64_t n) {
  RowTopKParams p = {};
  p.num_rows = checked_int(indices.size(0), "the number of rows");
  p.n = checked_int(n, "n");
  p.top_k = checked_int(indices.size(1), "top_k");
  TVM_FFI_CHECK(p.top_k > 0 && p.top_k <= kMaxRowTopK && p.top_k <= p.n, ValueError)
      << "top " << p.top_k << " of " << n;
  TVM_FFI_CHECK(values.numel() == indices.numel(), ValueError) << "values and indices must be [rows, top_k]";
  TVM_FFI_CHECK(ranks.numel() >= row_top_k_workspace_size(p.num_rows, n, p.top_k), ValueError) << "ranks is too small";
  p.ranks = data<uint64_t>(ranks);
  p.first_index = first_index;
  p.values = data<float>(values);
  p.indices = data<int64_t>(indices);
  return p;
}

// The largest of each row of logits, of at least one.
void row_top_k_run(TensorView values, TensorView indices, int64_t first_index, TensorView ranks, TensorView logits,
                   bool enable_pdl) {
  RowTopKParams p = row_top_k(values, indices, first_index, ranks, logits.size(1));
  TVM_FFI_CHECK(p.num_rows > 0 && logits.size(0) == p.num_rows, ValueError) << "logits must have as many rows";
  p.logits = logits.data_ptr();
  p.type = scalar_type(logits, "logits");
  check_status(run_row_top_k(p, launch_options(logits, enable_pdl)));
}

// A dense layer, and the largest outputs of each row. With a tactic that leaves ranks, `out` may have no rows: then it
// only gives the outputs' type.
void dense_top_k_run(TensorView values, TensorView indices, int64_t first_index, TensorView ranks, TensorView out,
                     TensorView tokens, Optional<TensorView> token_scales, TensorView weights, TensorView weight_scales,
                     Optional<TensorView> alpha, Optional<TensorView> bias, Optional<TensorView> residual,
                     Optional<TensorView> workspace, int64_t token_format, int64_t tactic, bool weights_first,
                     bool enable_pdl) {
  RowTopKParams p = row_top_k(values, indices, first_index, ranks, weights.size(0));
  TVM_FFI_CHECK(p.num_rows > 0 && tokens.size(0) == p.num_rows, ValueError) << "indices must have a row for each token";
  const bool fused = leaves_ranks(checked_int(tactic, "tactic"), p.top_k);
  run_dense(out, tokens, token_scales, weights, weight_scales, alpha, bias, residual, workspace, token_format, tactic,
            weights_first, enable_pdl, {{}, {}, fused ? p.ranks : nullptr, &p.count});
  if (!fused) return row_top_k_run(values, indices, first_index, ranks, out, enable_pdl);
  check_status(run_top_k_of_ranks(p, launch_options(tokens, enable_pdl)));
}

// Rescores logits that a dense layer has written, from bfloat16 rows or, with scales, MXINT8's; with `values`, then finds the largest of each row.
void rescore_run(TensorView logits, TensorView tokens, TensorView fine, Optional<TensorView> fine_scales,
                 Optional<TensorView> bias, int64_t groups, int64_t rescored, Optional<TensorView> values,
                 Optional<TensorView> indices, int64_t first_index, Optional<TensorView> ranks, bool enable_pdl) {
  RescoreParams p = {};
  p.num_tokens = checked_int(logits.size(0), "the number of tokens");
  p.n = checked_int(logits.size(1), "n");
  p.groups = checked_int(groups, "groups");
  p.rescored = checked_int(rescored, "rescored");
  p.k = checked_int(tokens.size(1), "k");
  TVM_FFI_CHECK(p.num_tokens > 0 && p.n > 0 && tokens.size(0) == p.num_tokens && fine.size(0) == p.n, ValueError)
      << "logits must be [tokens, n], of at least one token and one row of the fine weight";
  TVM_FFI_CHECK(p.groups > 0 && p.rescored > 0 && p.rescored <= kMaxRescored, ValueError)
      << "groups is " << groups << ", rescored " << rescored << "; they must be positive, rescored at most "
      << kMaxRescored;
  TVM_FFI_CHECK(p.n < 1 << 27 && group_rows(p.n, p.groups) <= kMaxGroupRows &&
                    int64_t{p.groups} * p.num_tokens < (int64_t{1} << 31),
                ValueError)
      << "groups is " << groups << " of " << p.n << " rows; there are less than 2^27, in a group at most "
      << kMaxGroupRows << ", in a launch 2^31 - 1 blocks";
  TVM_FFI_CHECK(p.k <= kMaxRescoredK, ValueError) << "k is " << p.k << "; it must be at most " << kMaxRescoredK;
  const TokenFormat format = fine_scales.has_value() ? TokenFormat::kMxint8Swizzled : TokenFormat::kBf16;
  const TokenRows rows = dense_rows(fine, fine_scales, static_cast<int64_t>(format), p.k);
  p.tokens = data<const uint4>(tokens);
  p.fine = static_cast<const uint8_t*>(rows.data);
  p.fine_scales = rows.scales;
  p.logits = logits.data_ptr();
  p.type = scalar_type(logits, "logits");
  p.bias = data_or_null<const void>(bias);
  if (bias.has_value()) {
    TVM_FFI_CHECK(bias.value().numel() == p.n, ValueError) << "bias must have n elements";
    p.bias_type = scalar_type(bias.value(), "bias");
  }
  const LaunchOptions options = launch_options(tokens, enable_pdl);
  if (!values.has_value()) return check_status(run_rescore(p, options));
  TVM_FFI_CHECK(indices.has_value() && ranks.has_value(), ValueError) << "values come with indices and ranks";
  RowTopKParams search = row_top_k(values.value(), indices.value(), first_index, ranks.value(), p.n);
  TVM_FFI_CHECK(search.num_rows == p.num_tokens, ValueError) << "indices must have a row for each token";
  search.count = p.groups * search.top_k;
  TVM_FFI_CHECK(ranks.value().numel() >= int64_t{8} * p.num_tokens * search.count, ValueError) << "ranks is too small";
  p.ranks = search.ranks;
  p.top_k = search.top_k;
  check_status(run_rescore(p, options));
  check_status(run_top_k_of_ranks(search, options));
}

// A dense layer behind an RMSNorm of its bfloat16 tokens, of a split-K tactic: at most eight.
void dense_normed_run(Optional<TensorView> sum, Optional<TensorView> addend, TensorView norm_weight, double epsilon,
                      TensorView out, TensorView tokens, TensorView weights, TensorView weight_scales,
                      Optional<TensorView> alpha, Optional<TensorView> bias, int64_t tactic,
                      Optional<TensorView> next_weights, bool weights_first, bool enable_pdl) {
  TVM_FFI_CHECK(norm_weight.numel() == tokens.size(1), ValueError) << "norm_weight must have k elements";
  const auto has_rows = [&](const Optional<TensorView>& rows) { return rows.value().numel() == tokens.numel(); };
  TVM_FFI_CHECK(sum.has_value() == addend.has_value() && (!sum.has_value() || (has_rows(sum) && has_rows(addend))),
                ValueError)
      << "residual and what it adds up to must be [tokens, k], both or neither";
  const RowNorm norm = {norm_weight.data_ptr(), data_or_null<const void>(addend), data_or_null<void>(sum),
                        static_cast<float>(epsilon)};
  run_dense(out, tokens, {}, weights, weight_scales, alpha, bias, {}, {}, static_cast<int64_t>(TokenFormat::kBf16),
            tactic, weights_first, enable_pdl, {norm, next_weights, nullptr, nullptr});
}

void dequantize_rows(TensorView out, TensorView rows, Optional<TensorView> scales, int64_t format) {
  const DLDataType type = out.dtype();
  TVM_FFI_CHECK(type.code == kDLBfloat && type.bits == 16 && out.size(0) == rows.size(0), ValueError)
      << "out must be bfloat16, with as many rows";
  const TokenRows view = dense_rows(rows, scales, format, checked_int(out.size(1), "k"));
  check_status(run_dequantize_rows(view, rows.size(0), out.data_ptr(), launch_options(rows, false)));
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_dense_normed_run, flashinfer::sm12x::dense_normed_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_dense_top_k_run, flashinfer::sm12x::dense_top_k_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_rescore_run, flashinfer::sm12x::rescore_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_row_top_k_run, flashinfer::sm12x::row_top_k_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_row_top_k_workspace_size, flashinfer::sm12x::row_top_k_workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_dequantize_rows, flashinfer::sm12x::dequantize_rows);
