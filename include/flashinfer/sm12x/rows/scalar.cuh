// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores of the element types that callers choose at run time (biases, outputs), and sums of numbers and of
// fours of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../types.h"

namespace flashinfer::sm12x {

__device__ __forceinline__ float load_scalar(const void* data, int64_t index, ScalarType type) {
  switch (type) {
    case ScalarType::kBf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case ScalarType::kF16: return __half2float(static_cast<const __half*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

__device__ __forceinline__ void store_scalar(void* data, int64_t index, ScalarType type, float value) {
  switch (type) {
    case ScalarType::kBf16: static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value); break;
    case ScalarType::kF16: static_cast<__half*>(data)[index] = __float2half_rn(value); break;
    default: static_cast<float*>(data)[index] = value;
  }
}

// `value` as an element of the type holds it.
__device__ __forceinline__ float round_scalar(float value, ScalarType type) {
  switch (type) {
    case ScalarType::kBf16: return __bfloat162float(__float2bfloat16_rn(value));
    case ScalarType::kF16: return __half2float(__float2half_rn(value));
    default: return value;
  }
}

__device__ __forceinline__ float load_or(const float* data, int index, float absent) {
  return data != nullptr ? data[index] : absent;
}

__device__ __forceinline__ void add_to(float& sum, float value) { sum += value; }

__device__ __forceinline__ void add_to(float4& sum, const float4& value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

__device__ __forceinline__ void add_to(float (&sum)[4], const float4& value) {
  sum[0] += value.x;
  sum[1] += value.y;
  sum[2] += value.z;
  sum[3] += value.w;
}

}  // namespace flashinfer::sm12x
