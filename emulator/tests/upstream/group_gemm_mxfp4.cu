// SPDX-License-Identifier: Apache-2.0
// Runs upstream's stock SM120 MXFP4 grouped GEMM (from the installed wheel's headers) on random data and compares it with
// float64. TILE_N and SWAP_AB pick the instance. Prints "bad <n> of <elements>"; exits 0 if there is none.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh>
#include <vector>

using namespace flashinfer;
using namespace flashinfer::group_gemm;

namespace flashinfer {
namespace group_gemm {
INSTANTIATE_GROUP_GEMM_MXFP4_GROUPWISE_SM120(128, TILE_N, 128, SWAP_AB, cutlass::float_e4m3_t, cutlass::float_e2m1_t,
                                             cutlass::float_ue8m0_t, cutlass::float_ue8m0_t, cutlass::bfloat16_t,
                                             float_e4m3_t, float_e2m1_t, float_ue8m0_t, float_ue8m0_t, bfloat16_t)
}
}  // namespace flashinfer

namespace {

double e4m3(uint8_t v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const double m = exponent ? std::ldexp(1 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa / 8.0, -6);
  return v & 128 ? -m : m;
}

double e2m1(uint8_t v) {
  static const double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return v & 8 ? -kValues[v & 7] : kValues[v & 7];
}

// Byte of (row, block of 32) in the 128x4 scale layout, `blocks` padded to 4.
size_t scale_at(size_t row, size_t block, size_t blocks) {
  return row / 128 * (blocks / 4) * 512 + block / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

template <class T>
T* on_device(const std::vector<uint8_t>& bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, bytes.size()) != cudaSuccess) std::abort();
  if (cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice) != cudaSuccess) std::abort();
  return static_cast<T*>(p);
}

}  // namespace

int main() {
  const std::vector<int> indptr = {0, 40, 40, 168};  // ragged, one group empty
  const int groups = 3, tokens = 168, n = 192, k = 384;
  const size_t blocks = k / 32;
  std::srand(1);
  std::vector<uint8_t> a(size_t{tokens} * k), b(size_t{groups} * n * k / 2);
  std::vector<uint8_t> a_scale((tokens + groups * 128) * blocks), b_scale(groups * 256 * blocks);
  for (uint8_t& v : a) do
      v = static_cast<uint8_t>(std::rand());
    while ((v & 127) == 127);
  for (uint8_t& v : b) v = static_cast<uint8_t>(std::rand());
  for (auto* scales : {&a_scale, &b_scale}) {
    for (uint8_t& v : *scales) v = static_cast<uint8_t>(124 + std::rand() % 7);
  }
  std::vector<uint8_t> starts(indptr.size() * 4);
  std::memcpy(starts.data(), indptr.data(), starts.size());
  auto* out = on_device<cutlass::bfloat16_t>(std::vector<uint8_t>(size_t{tokens} * n * 2));
  constexpr size_t kWorkspace = 32u << 20;
  void *integers = nullptr, *floats = nullptr;
  if (cudaMalloc(&integers, kWorkspace) != cudaSuccess || cudaMalloc(&floats, kWorkspace) != cudaSuccess) return 2;
  const cudaError_t status =
      CutlassMXFP4GroupwiseScaledGroupGEMMSM120<128, TILE_N, 128, SWAP_AB, cutlass::float_e4m3_t, cutlass::float_e2m1_t,
                                                cutlass::float_ue8m0_t, cutlass::float_ue8m0_t, cutlass::bfloat16_t>(
          integers, kWorkspace, floats, kWorkspace, on_device<cutlass::float_e4m3_t>(a),
          on_device<cutlass::float_e2m1_t>(b), on_device<cutlass::float_ue8m0_t>(a_scale),
          on_device<cutlass::float_ue8m0_t>(b_scale), out, on_device<int>(starts), n, k, groups, nullptr, 0);
  if (status != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) {
    std::printf("failed: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 2;
  }
  std::vector<uint16_t> got(size_t{tokens} * n);
  if (cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost) != cudaSuccess) return 2;
  int bad = 0;
  for (int g = 0; g < groups; ++g) {
    const size_t first_scale = static_cast<size_t>((indptr[g] + g * 127) / 128 * 128) * blocks;
    for (int m = indptr[g]; m < indptr[g + 1]; ++m) {
      for (int j = 0; j < n; ++j) {
        double sum = 0, magnitude = 0;
        for (int i = 0; i < k; ++i) {
          const uint8_t pair = b[(size_t(g) * n + j) * k / 2 + i / 2];
          const int exponent = a_scale[first_scale + scale_at(m - indptr[g], i / 32, blocks)] +
                               b_scale[size_t(g) * 256 * blocks + scale_at(j, i / 32, blocks)] - 254;
          const double product = std::ldexp(e4m3(a[size_t(m) * k + i]) * e2m1(i & 1 ? pair >> 4 : pair & 15), exponent);
          sum += product;
          magnitude += std::fabs(product);
        }
        float value;
        const uint32_t bits = uint32_t{got[size_t(m) * n + j]} << 16;
        std::memcpy(&value, &bits, 4);
        // Half a unit of bf16, and one float32 rounding for each of the k/32 MMAs at the size of the terms' sum.
        if (!(std::fabs(value - sum) <= std::fabs(sum) / 256 + magnitude * (k / 32 + 1) * 0x1p-24)) ++bad;
      }
    }
  }
  std::printf("bad %d of %d\n", bad, tokens * n);
  return bad != 0;
}
