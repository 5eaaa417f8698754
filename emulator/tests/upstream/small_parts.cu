// SPDX-License-Identifier: Apache-2.0
// Runs upstream's small kernels of a decode step, one token of each of some sequences: RMSNorm with the residual added, rope
// from a table of cosines and sines, and the append to a paged KV cache.
//   small_parts sequences hidden q_heads kv_heads pages page_size input output
// `input` holds, as bf16, x and residual [sequence][hidden] and weight [hidden]; q [sequence][q_head][64] and k and v
// [sequence][kv_head][64]; as float32 the table [position][64], cosines first; as int32 each sequence's position, the offsets
// of each in the page table (sequences + 1), the tokens in the last page of each with the new one, and the page table; as bf16
// the K and the V cache [page][kv_head][token][64]. `output` gets x, residual, q, k, K cache and V cache.
#include <flashinfer/norm.cuh>
#include <flashinfer/page.cuh>
#include <flashinfer/pos_enc.cuh>

#include <cstdint>
#include <fstream>

#include "input_file.h"

namespace {

constexpr uint32_t kHead = 64;

template <class T>
void write(std::ofstream& file, const T* device, size_t count) {
  std::vector<T> values(count);
  check(cudaMemcpy(values.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(count * sizeof(T)));
}

}  // namespace

int main(int, char** arguments) {
  const uint32_t sequences = std::atoi(arguments[1]), hidden = std::atoi(arguments[2]);
  const uint32_t q_heads = std::atoi(arguments[3]), kv_heads = std::atoi(arguments[4]);
  const uint32_t pages = std::atoi(arguments[5]), page_size = std::atoi(arguments[6]);
  Input input(arguments[7]);
  using Bf16 = __nv_bfloat16;
  const size_t row = size_t{sequences} * hidden, queries = size_t{sequences} * q_heads * kHead;
  const size_t keys = size_t{sequences} * kv_heads * kHead, cache = size_t{pages} * page_size * kv_heads * kHead;
  const auto x = input.device<Bf16>(row), residual = input.device<Bf16>(row), weight = input.device<Bf16>(hidden);
  const auto q = input.device<Bf16>(queries), k = input.device<Bf16>(keys), v = input.device<Bf16>(keys);
  const auto table = input.device<float>(size_t{pages} * page_size * kHead);
  const auto positions = input.device<int32_t>(sequences);
  int32_t* const offsets = input.host<int32_t>(sequences + 1);
  const auto last_page_tokens = input.device<int32_t>(sequences);
  const auto page_table = input.device<int32_t>(offsets[sequences]);
  const auto k_cache = input.device<Bf16>(cache), v_cache = input.device<Bf16>(cache);

  check(flashinfer::norm::FusedAddRMSNorm(x, residual, weight, sequences, hidden, hidden, hidden, 1e-5f));
  const size_t q_pitch = size_t{q_heads} * kHead, k_pitch = size_t{kv_heads} * kHead;
  check(flashinfer::BatchQKApplyRotaryPosIdsCosSinCache(q, k, q, k, table, positions, sequences, q_heads, kv_heads,
                                                        kHead, kHead, q_pitch, kHead, k_pitch, kHead, q_pitch, kHead,
                                                        k_pitch, kHead, /*interleave=*/false));
  const flashinfer::paged_kv_t<Bf16, int32_t> paged(kv_heads, page_size, kHead, sequences, flashinfer::QKVLayout::kHND,
                                                    k_cache, v_cache, page_table,
                                                    Input::to_device(offsets, sequences + 1), last_page_tokens);
  check(flashinfer::AppendPagedKVCacheDecode(paged, k, v));
  check(cudaDeviceSynchronize());

  std::ofstream output(arguments[8], std::ios::binary);
  write(output, x, row);
  write(output, residual, row);
  write(output, q, queries);
  write(output, k, keys);
  write(output, k_cache, cache);
  write(output, v_cache, cache);
  return 0;
}
