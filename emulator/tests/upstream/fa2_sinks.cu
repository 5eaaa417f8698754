// SPDX-License-Identifier: Apache-2.0
// Runs upstream's FA2 attention over a paged KV cache with attention sinks: its planner, its kernel, its merge of
// parts.
//   fa2_sinks window_left fixed_split batch q_heads kv_heads pages page_size input output
// `fixed_split`: pages of a part of the KV cache, 0: the planner's choice. `input` holds, as int32, the offsets of each
// sequence in q's rows and in the page table (batch + 1 each), the tokens in the last page of each and the page table;
// sinks [q_heads] float32; q [row][q_head][HEAD_DIM_QK] bf16; the K and the V cache
// [page][token][kv_head][HEAD_DIM_QK]. `output` gets [row][q_head][HEAD_DIM_VO] bf16. It prints the query tile and
// whether the KV cache was split. TILE is the query tile that it is compiled for.
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "batch_prefill_config.inc"
#include "input_file.h"

namespace {

constexpr size_t WORKSPACE_BYTES = 16 << 20;

}  // namespace

int main(int, char** arguments) {
  const int window_left = std::atoi(arguments[1]), fixed_split = std::atoi(arguments[2]);
  const uint32_t batch = std::atoi(arguments[3]), q_heads = std::atoi(arguments[4]), kv_heads = std::atoi(arguments[5]);
  const uint32_t pages = std::atoi(arguments[6]), page_size = std::atoi(arguments[7]);
  Input input(arguments[8]);
  IdType* const q_offsets = input.host<IdType>(batch + 1);
  IdType* const page_offsets = input.host<IdType>(batch + 1);
  const auto last_page_tokens = input.device<IdType>(batch);
  const auto page_table = input.device<IdType>(page_offsets[batch]);
  const uint32_t rows = q_offsets[batch];
  const size_t cache_elements = size_t{pages} * page_size * kv_heads * HEAD_DIM_QK;

  PagedParams params{};
  params.sink = input.device<float>(q_heads);
  params.sm_scale = 1 / std::sqrt(double{HEAD_DIM_QK});
  params.q = input.device<DTypeQ>(size_t{rows} * q_heads * HEAD_DIM_QK);
  const auto k = input.device<DTypeKV>(cache_elements);
  const auto v = input.device<DTypeKV>(cache_elements);
  const int64_t strides[] = {int64_t{page_size} * kv_heads * HEAD_DIM_QK, int64_t{kv_heads} * HEAD_DIM_QK, HEAD_DIM_QK,
                             1};
  params.paged_kv =
      paged_kv_t<DTypeKV, IdType>(kv_heads, page_size, HEAD_DIM_VO, batch, QKVLayout::kNHD, k, v, strides, strides,
                                  page_table, Input::to_device(page_offsets, batch + 1), last_page_tokens);
  params.q_indptr = Input::to_device(q_offsets, batch + 1);
  const size_t output_bytes = sizeof(DTypeO) * rows * q_heads * HEAD_DIM_VO;
  params.o = static_cast<DTypeO*>(allocate(output_bytes));
  params.num_qo_heads = q_heads;
  params.group_size = uint_fastdiv(q_heads / kv_heads);
  params.q_stride_n = q_heads * HEAD_DIM_QK;
  params.q_stride_h = HEAD_DIM_QK;
  params.window_left = window_left;

  void* const partial = allocate(WORKSPACE_BYTES);
  void* const plan = allocate(WORKSPACE_BYTES);
  std::vector<char> plan_on_host(WORKSPACE_BYTES);
  PrefillPlanInfo info;
  check(PrefillPlan<IdType>(partial, WORKSPACE_BYTES, plan, plan_on_host.data(), WORKSPACE_BYTES, info, q_offsets,
                            page_offsets, rows, batch, q_heads, kv_heads, HEAD_DIM_QK, HEAD_DIM_VO, page_size,
                            /*enable_cuda_graph=*/false, sizeof(DTypeO), window_left, fixed_split,
                            /*disable_split_kv=*/false, /*num_colocated_ctas=*/0, /*uniform_q_len=*/0,
                            /*stream=*/nullptr, sizeof(DTypeKV)));
  const auto planned = [&](int64_t offset) { return GetPtrFromBaseOffset<IdType>(plan, offset); };
  params.request_indices = planned(info.request_indices_offset);
  params.qo_tile_indices = planned(info.qo_tile_indices_offset);
  params.kv_tile_indices = planned(info.kv_tile_indices_offset);
  params.o_indptr = planned(info.o_indptr_offset);
  params.kv_chunk_size_ptr = planned(info.kv_chunk_size_ptr_offset);
  params.padded_batch_size = info.padded_batch_size;
  params.max_total_num_rows = info.total_num_rows;
  DTypeO* partial_output = nullptr;
  float* partial_sums = nullptr;
  if (info.split_kv) {
    params.merge_indptr = planned(info.merge_indptr_offset);
    partial_output = GetPtrFromBaseOffset<DTypeO>(partial, info.v_offset);
    partial_sums = GetPtrFromBaseOffset<float>(partial, info.s_offset);
  }
  std::printf("%d %d\n", static_cast<int>(info.cta_tile_q), static_cast<int>(info.split_kv));
  if (info.cta_tile_q != TILE) return 4;
  check((BatchPrefillWithPagedKVCacheDispatched</*SAME_KV_STRIDES=*/false, TILE, HEAD_DIM_QK, HEAD_DIM_VO,
                                                POS_ENCODING_MODE, USE_FP16_QK_REDUCTION, MaskMode::kCausal,
                                                AttentionSink, PagedParams>(params, partial_output, partial_sums,
                                                                            /*enable_pdl=*/true, /*stream=*/nullptr)));
  check(cudaDeviceSynchronize());
  std::vector<char> result(output_bytes);
  check(cudaMemcpy(result.data(), params.o, output_bytes, cudaMemcpyDeviceToHost));
  std::ofstream(arguments[9], std::ios::binary).write(result.data(), static_cast<std::streamsize>(output_bytes));
  return 0;
}
