// SPDX-License-Identifier: Apache-2.0
// Runs upstream's stock SM120 FP8 grouped GEMM with float32 scales (from the installed wheel's headers) on random data
// and compares it with float64: `program n k rows...`. ROWS_PER_SCALE (1 or 128) and SCALE_MAJOR_K pick the instance;
// with 128 every group but the last has a multiple of 128 rows. Prints "bad <n> of <elements>"; exits 0 if there is none.
#include <flashinfer/gemm/group_gemm_fp8_groupwise_sm120.cuh>

#include "group_gemm_driver.h"

namespace {

constexpr int kBlock = 128;  // of a scale along N and K

std::vector<float> random_scales(size_t count) {
  std::vector<float> scales(count);
  for (float& v : scales) v = std::ldexp(1 + float(std::rand()) / float(RAND_MAX), std::rand() % 7 - 3);
  return scales;
}

// Entry of (row, block) in a matrix of scales, blocks along K.
size_t scale_at(size_t row, size_t block, size_t rows, size_t blocks) {
  return SCALE_MAJOR_K ? row * blocks + block : block * rows + row;
}

}  // namespace

int main(int count, char** arguments) {
  const driver::Problem p = driver::read(count, arguments);
  const size_t k_blocks = (p.k + kBlock - 1) / kBlock, n_blocks = (p.n + kBlock - 1) / kBlock;
  const size_t scale_rows = (p.tokens + ROWS_PER_SCALE - 1) / ROWS_PER_SCALE;
  std::srand(1);
  const std::vector<uint8_t> a = driver::random_e4m3(size_t(p.tokens) * p.k);
  const std::vector<uint8_t> b = driver::random_e4m3(size_t(p.groups) * p.n * p.k);
  const std::vector<float> a_scale = random_scales(scale_rows * k_blocks);
  const std::vector<float> b_scale = random_scales(p.groups * n_blocks * k_blocks);
  auto* out = driver::device_bytes<cutlass::bfloat16_t>(size_t(p.tokens) * p.n * 2);
  const cudaError_t status =
      flashinfer::group_gemm::CutlassFP8GroupwiseScaledGroupGEMMSM120<ROWS_PER_SCALE, kBlock, kBlock, SCALE_MAJOR_K>(
          driver::device_bytes<void>(driver::kWorkspace), driver::kWorkspace,
          driver::device_bytes<void>(driver::kWorkspace), driver::kWorkspace,
          driver::on_device<cutlass::float_e4m3_t>(a), driver::on_device<cutlass::float_e4m3_t>(b),
          driver::on_device<float>(a_scale), driver::on_device<float>(b_scale), out, driver::on_device<int>(p.indptr),
          p.tokens, p.n, p.k, p.groups, nullptr);
  // In a K block: four MMAs, the product of the two scales, its product with the block's sum; then a sum for each block.
  // One more for what these errors do to each other.
  const double roundings = 4 + 1 + 1 + double(k_blocks) + 1;
  return driver::verdict(p, status, out, roundings, [&](int g, int m, int j, double* sum, double* magnitude) {
    for (int i = 0; i < p.k; ++i) {
      const double product = driver::e4m3(a[size_t(m) * p.k + i]) * driver::e4m3(b[(size_t(g) * p.n + j) * p.k + i]) *
                             a_scale[scale_at(m / ROWS_PER_SCALE, i / kBlock, scale_rows, k_blocks)] *
                             b_scale[g * n_blocks * k_blocks + scale_at(j / kBlock, i / kBlock, n_blocks, k_blocks)];
      *sum += product;
      *magnitude += std::fabs(product);
    }
  });
}
