// SPDX-License-Identifier: Apache-2.0
// What the programs that run a grouped GEMM of upstream's share: the problem from the command line, random bytes on the
// device, the verdict.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace driver {

inline constexpr size_t kWorkspace = 32u << 20;

struct Problem {
  int n = 0, k = 0, groups = 0, tokens = 0;
  std::vector<int> indptr = {0};  // first row of each group
};

/// `program n k rows...`: one count of rows for each group.
inline Problem read(int count, char** arguments) {
  Problem p;
  if (count < 4) std::exit(1);
  p.n = std::atoi(arguments[1]);
  p.k = std::atoi(arguments[2]);
  for (int i = 3; i < count; ++i) p.indptr.push_back(p.indptr.back() + std::atoi(arguments[i]));
  p.groups = count - 3;
  p.tokens = p.indptr.back();
  return p;
}

/// Random e4m3 that are no NaN.
inline std::vector<uint8_t> random_e4m3(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& v : bytes) do
      v = static_cast<uint8_t>(std::rand());
    while ((v & 127) == 127);
  return bytes;
}

inline double e4m3(uint8_t v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const double m = exponent ? std::ldexp(1 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa / 8.0, -6);
  return v & 128 ? -m : m;
}

template <class T, class U>
T* on_device(const std::vector<U>& values) {
  void* p = nullptr;
  const size_t bytes = values.size() * sizeof(U);
  if (cudaMalloc(&p, bytes) != cudaSuccess) std::abort();
  if (cudaMemcpy(p, values.data(), bytes, cudaMemcpyHostToDevice) != cudaSuccess) std::abort();
  return static_cast<T*>(p);
}

/// Device memory that nothing wrote.
template <class T>
T* device_bytes(size_t bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, bytes) != cudaSuccess) std::abort();
  return static_cast<T*>(p);
}

/// Compares the bf16 `out` with `terms(group, row, column, sum, magnitude)`: the sum of the exact products and of their
/// magnitudes. `roundings`: of float32, each at most at the size of the terms' sum. Prints "bad <n> of <elements>".
inline int verdict(const Problem& p, cudaError_t status, const void* out, double roundings,
                   const std::function<void(int, int, int, double*, double*)>& terms) {
  if (status != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) {
    std::printf("failed: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 2;
  }
  std::vector<uint16_t> got(size_t(p.tokens) * p.n);
  if (cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost) != cudaSuccess) return 2;
  int bad = 0;
  for (int g = 0; g < p.groups; ++g) {
    for (int m = p.indptr[g]; m < p.indptr[g + 1]; ++m) {
      for (int j = 0; j < p.n; ++j) {
        double sum = 0, magnitude = 0;
        terms(g, m, j, &sum, &magnitude);
        float value;
        const uint32_t bits = uint32_t{got[size_t(m) * p.n + j]} << 16;
        std::memcpy(&value, &bits, 4);
        // Half a unit of bf16, and the float32 roundings.
        if (!(std::fabs(value - sum) <= std::fabs(sum) / 256 + magnitude * roundings * 0x1p-24)) ++bad;
      }
    }
  }
  std::printf("bad %d of %d\n", bad, p.tokens * p.n);
  return bad != 0;
}

}  // namespace driver
