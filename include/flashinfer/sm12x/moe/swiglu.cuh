// SPDX-License-Identifier: Apache-2.0
//
// gpt-oss' SwiGLU, of one output.
#pragma once

#include <cmath>

#include "../ptx/convert.cuh"
#include "../rows/scalar.cuh"

namespace flashinfer::sm12x {

// Of each local expert; null: 1, 0, infinity.
struct SwigluOfExperts {
  const float *alpha, *beta, *limit;
};

struct Swiglu {
  float alpha, beta, limit;

  static __device__ __forceinline__ Swiglu of_expert(const SwigluOfExperts& experts, int expert) {
    return {load_or(experts.alpha, expert, 1.0f), load_or(experts.beta, expert, 0.0f),
            load_or(experts.limit, expert, INFINITY)};
  }

  // NaN passes the clamps, as a value and as the limit.
  __device__ __forceinline__ float operator()(float up, float gate) const {
    gate = ptx::min_or_nan(gate, limit);
    up = ptx::min_or_nan(up, limit);
    up = ptx::max_or_nan(up, -limit);
    const float sigmoid = 1.0f / (1.0f + expf(-alpha * gate));
    return gate * sigmoid * (up + beta);
  }
};

}  // namespace flashinfer::sm12x
