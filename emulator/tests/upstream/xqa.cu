// SPDX-License-Identifier: Apache-2.0
// Runs upstream's XQA decode kernel through its own launcher (compiled beside this, from the wheel), on a GPU of 48
// SMs:
//   xqa batch kv_heads max_tokens input output
// `input` holds the lengths (batch of uint32), q [batch][kv_heads * HEAD_GRP_SIZE][HEAD_ELEMS], K and V
// [page][token][kv_head][element], all bf16; pages in order, max_tokens / TOKENS_PER_PAGE of them a sequence.
// `output` gets [batch][head][element].
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <vector>

#include "mha.h"
#include "runtime_calls.h"

namespace {

template <class T>
T* upload(const void* data, size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes));
  if (data) check(cudaMemcpy(p, data, bytes, cudaMemcpyHostToDevice));
  return static_cast<T*>(p);
}

}  // namespace

int main(int, char** arguments) {
  const uint32_t batch = std::atoi(arguments[1]), kv_heads = std::atoi(arguments[2]);
  const uint32_t max_tokens = std::atoi(arguments[3]);
  std::ifstream file(arguments[4], std::ios::binary);
  const std::vector<char> input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t q_bytes = size_t{2} * batch * kv_heads * headGrpSize * HEAD_ELEMS;
  const size_t cache_bytes = size_t{2} * batch * max_tokens * kv_heads * HEAD_ELEMS;
  const char* at = input.data();
  auto* lengths = upload<uint32_t>(at, 4 * batch);
  at += 4 * batch;
  auto* q = upload<InputHead>(at, q_bytes);
  at += q_bytes;
  auto* k = upload<GMemCacheHead>(at, cache_bytes);
  auto* v = upload<GMemCacheHead>(at + cache_bytes, cache_bytes);
  std::vector<KVCachePageIndex> pages(batch * max_tokens / tokensPerPage);
  std::iota(pages.begin(), pages.end(), 0);
  auto* page_list = upload<KVCachePageIndex>(pages.data(), sizeof pages[0] * pages.size());
  const std::vector<uint32_t> zeros(batch * kv_heads);
  auto* semaphores = upload<uint32_t>(zeros.data(), 4 * zeros.size());
  auto* scratch = upload<char>(nullptr, 64 << 20);
  auto* output = upload<OutputHead>(nullptr, q_bytes);
  const uint64_t token_stride = uint64_t{kv_heads} * HEAD_ELEMS;
  launchMHAFlashInfer(48, kv_heads, 0, 1.0f, nullptr, output, q, nullptr, k, v, page_list, max_tokens, lengths, batch,
                      1.0f, nullptr, semaphores, scratch, false, tokensPerPage * token_stride, token_stride, HEAD_ELEMS,
                      nullptr);
  check(cudaDeviceSynchronize());
  std::vector<char> result(q_bytes);
  check(cudaMemcpy(result.data(), output, q_bytes, cudaMemcpyDeviceToHost));
  std::ofstream(arguments[5], std::ios::binary).write(result.data(), static_cast<std::streamsize>(q_bytes));
  return 0;
}
