// SPDX-License-Identifier: Apache-2.0
// Runs upstream's stock SM120 MXFP4 grouped GEMM (from the installed wheel's headers) on random data and compares it with
// float64: `program n k rows...`. TILE_N and SWAP_AB pick the instance. Prints "bad <n> of <elements>"; exits 0 if there
// is none.
#include <flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh>

#include "group_gemm_driver.h"

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

double e2m1(uint8_t v) {
  static const double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return v & 8 ? -kValues[v & 7] : kValues[v & 7];
}

// Byte of (row, block of 32) in the 128x4 scale layout, `blocks` padded to 4.
size_t scale_at(size_t row, size_t block, size_t blocks) {
  return row / 128 * (blocks / 4) * 512 + block / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

}  // namespace

int main(int count, char** arguments) {
  const driver::Problem p = driver::read(count, arguments);
  const size_t blocks = (p.k / 32 + 3) / 4 * 4, n_rows = (p.n + 127) / 128 * 128;
  std::srand(1);
  const std::vector<uint8_t> a = driver::random_e4m3(size_t(p.tokens) * p.k);
  std::vector<uint8_t> b(size_t(p.groups) * p.n * p.k / 2);
  std::vector<uint8_t> a_scale((p.tokens + p.groups * 128) * blocks), b_scale(p.groups * n_rows * blocks);
  for (uint8_t& v : b) v = static_cast<uint8_t>(std::rand());
  for (auto* scales : {&a_scale, &b_scale}) {
    for (uint8_t& v : *scales) v = static_cast<uint8_t>(124 + std::rand() % 7);
  }
  auto* out = driver::device_bytes<cutlass::bfloat16_t>(size_t(p.tokens) * p.n * 2);
  const cudaError_t status =
      CutlassMXFP4GroupwiseScaledGroupGEMMSM120<128, TILE_N, 128, SWAP_AB, cutlass::float_e4m3_t, cutlass::float_e2m1_t,
                                                cutlass::float_ue8m0_t, cutlass::float_ue8m0_t, cutlass::bfloat16_t>(
          driver::device_bytes<void>(driver::kWorkspace), driver::kWorkspace,
          driver::device_bytes<void>(driver::kWorkspace), driver::kWorkspace,
          driver::on_device<cutlass::float_e4m3_t>(a), driver::on_device<cutlass::float_e2m1_t>(b),
          driver::on_device<cutlass::float_ue8m0_t>(a_scale), driver::on_device<cutlass::float_ue8m0_t>(b_scale), out,
          driver::on_device<int>(p.indptr), p.n, p.k, p.groups, nullptr, 0);
  // A float32 rounding for each of the k / 32 MMAs, and one for the sum of them.
  return driver::verdict(p, status, out, p.k / 32 + 1, [&](int g, int m, int j, double* sum, double* magnitude) {
    const size_t first_scale = static_cast<size_t>((p.indptr[g] + g * 127) / 128 * 128) * blocks;
    for (int i = 0; i < p.k; ++i) {
      const uint8_t pair = b[((size_t(g) * p.n + j) * p.k + i) / 2];
      const int exponent = a_scale[first_scale + scale_at(m - p.indptr[g], i / 32, blocks)] +
                           b_scale[size_t(g) * n_rows * blocks + scale_at(j, i / 32, blocks)] - 254;
      const double product =
          std::ldexp(driver::e4m3(a[size_t(m) * p.k + i]) * e2m1(i & 1 ? pair >> 4 : pair & 15), exponent);
      *sum += product;
      *magnitude += std::fabs(product);
    }
  });
}
