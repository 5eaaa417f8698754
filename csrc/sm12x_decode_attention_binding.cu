// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI face of decode attention (flashinfer/sm12x_decode.py). Python has validated shapes, dtypes, strides and
// alignment; this file only repeats checks that prevent reads and writes out of bounds.
#include "flashinfer/sm12x/decode_attention.cuh"
#include "sm12x_binding_utils.h"

namespace flashinfer::sm12x {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

int64_t decode_workspace_size(int64_t device) {
  return decode_workspace_bytes(multiprocessors(static_cast<int>(device)));
}

// `key_cache` and `value_cache` are [pages, num_kv_heads, page_size, 64], whatever their strides.
void decode_run(TensorView out, TensorView key_cache, TensorView value_cache, TensorView workspace, TensorView query,
                Optional<TensorView> key, Optional<TensorView> value, TensorView block_tables, TensorView seq_lens,
                Optional<TensorView> rope_table, Optional<TensorView> sinks, int64_t q_len, int64_t window_left,
                double score_scale, double key_scale, double value_scale, bool constant_cache, bool enable_pdl) {
  DecodeAttentionParams params = {};
  params.num_sequences = checked_int(seq_lens.size(0), "the number of sequences");
  params.num_kv_heads = checked_int(key_cache.size(1), "the number of KV heads");
  params.q_len = checked_int(q_len, "q_len_per_req");
  TVM_FFI_CHECK(params.q_len > 0 && params.q_len <= kDecodeMaxQLen, ValueError) << "q_len_per_req is " << q_len;
  const int64_t tokens = static_cast<int64_t>(params.num_sequences) * params.q_len;
  const int64_t heads = static_cast<int64_t>(params.num_kv_heads) * kDecodeGroup;
  TVM_FFI_CHECK(query.size(0) == tokens && query.size(1) == heads && query.size(2) == kDecodeHead, ValueError)
      << "query must be [" << tokens << ", " << heads << ", " << kDecodeHead << "]";
  TVM_FFI_CHECK(out.numel() == tokens * heads * kDecodeHead, ValueError) << "out must be as query";
  TVM_FFI_CHECK(key.has_value() == value.has_value(), ValueError) << "key goes with value";
  for (const Optional<TensorView>& rows : {key, value}) {
    TVM_FFI_CHECK(!rows.has_value() || (rows.value().size(0) == tokens && rows.value().size(1) == params.num_kv_heads),
                  ValueError)
        << "key and value must be [" << tokens << ", " << params.num_kv_heads << ", " << kDecodeHead << "]";
  }
  TVM_FFI_CHECK(block_tables.size(0) == params.num_sequences, ValueError) << "block_tables must have a row a sequence";
  TVM_FFI_CHECK(!sinks.has_value() || sinks.value().numel() == heads, ValueError) << "sinks must have " << heads;
  const int64_t page_size = key_cache.size(2);
  TVM_FFI_CHECK(page_size >= kDecodeChunk && (page_size & (page_size - 1)) == 0, ValueError)
      << "pages have " << page_size << " positions; it must be a power of two from " << kDecodeChunk << " on";
  const LaunchOptions options = launch_options(query, enable_pdl);
  TVM_FFI_CHECK(workspace.numel() >= decode_workspace_bytes(options.device_sms), ValueError)
      << "workspace is too small";

  params.query = data<const __nv_bfloat16>(query);
  params.key = data_or_null<const __nv_bfloat16>(key);
  params.value = data_or_null<const __nv_bfloat16>(value);
  params.query_stride = query.stride(0);
  params.key_stride = key.has_value() ? key.value().stride(0) : 0;
  params.value_stride = value.has_value() ? value.value().stride(0) : 0;
  params.key_cache = key_cache.data_ptr();
  params.value_cache = value_cache.data_ptr();
  params.page_stride = key_cache.stride(0);
  params.head_stride = key_cache.stride(1);
  params.position_stride = key_cache.stride(2);
  params.block_tables = data<const int32_t>(block_tables);
  params.table_stride = block_tables.stride(0);
  params.seq_lens = data<const int32_t>(seq_lens);
  params.rope_table = data_or_null<const void>(rope_table);
  params.rope_is_float32 = rope_table.has_value() && rope_table.value().dtype().bits == 32;
  params.sinks = data_or_null<const float>(sinks);
  params.out = data<__nv_bfloat16>(out);
  params.score_scale = static_cast<float>(score_scale);
  params.key_scale = static_cast<float>(key_scale);
  params.value_scale = static_cast<float>(value_scale);
  params.window_left = static_cast<int>(std::clamp<int64_t>(window_left, -1, 1 << 30));  // sums with positions fit
  while (kDecodeChunk << params.page_shift < page_size) ++params.page_shift;
  params.constant_cache = constant_cache;
  check_status(run_decode_attention(params, key_cache.dtype().bits == 8, workspace.data_ptr(), options));
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_decode_run, flashinfer::sm12x::decode_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_decode_workspace_size, flashinfer::sm12x::decode_workspace_size);
