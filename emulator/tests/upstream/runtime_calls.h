// SPDX-License-Identifier: Apache-2.0
// Calls of the CUDA runtime that end the program where they fail.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(2);
}

inline void* allocate(size_t bytes) {
  void* address = nullptr;
  check(cudaMalloc(&address, bytes));
  return address;
}
