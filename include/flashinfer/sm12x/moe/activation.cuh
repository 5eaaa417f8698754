// SPDX-License-Identifier: Apache-2.0
//
// The activations of one output. Of an up row and its gate row: gpt-oss' SwiGLU, which clamps the gate before its SiLU,
// and SwigluStep, which clamps the SiLU itself. Of an up row alone: ReLU-squared.
#pragma once

#include <cmath>

#include "../ptx/convert.cuh"
#include "../rows/scalar.cuh"

namespace flashinfer::sm12x {

// Constants of each local expert; null: 1, 0 and infinity. With `step` a limit alone; null: kDefaultStepLimit.
struct ActivationOfExperts {
  const float *alpha, *beta, *limit;
  bool step;
  bool gated;  // FC1 has gate rows behind its up rows

  // By the number of flashinfer.ActivationType. False: it is none of these.
  bool set_activation(int64_t activation_type) {
    step = activation_type == 7;  // SwigluStep
    gated = activation_type != 6;  // Relu2
    return activation_type == 3 || activation_type == 5 || step || !gated;  // Swiglu, SwigluBias: the same
  }
};

constexpr float kDefaultStepLimit = 7.0f;

struct Activation {
  float alpha, beta, limit;
  bool step;

  static __device__ __forceinline__ Activation of_expert(const ActivationOfExperts& experts, int expert) {
    return {load_or(experts.alpha, expert, 1.0f), load_or(experts.beta, expert, 0.0f),
            load_or(experts.limit, expert, experts.step ? kDefaultStepLimit : INFINITY), experts.step};
  }

  // NaN passes the clamps, as a value and as the limit.
  __device__ __forceinline__ float operator()(float up, float gate) const {
    if (!step) gate = ptx::min_or_nan(gate, limit);
    up = ptx::min_or_nan(up, limit);
    up = ptx::max_or_nan(up, -limit);
    float silu = gate * (1.0f / (1.0f + expf(-alpha * gate)));
    if (step) silu = ptx::min_or_nan(silu, limit);
    return silu * (up + beta);
  }
};

// NaN passes.
__device__ __forceinline__ float relu_squared(float up) {
  up = ptx::max_or_nan(up, 0.0f);
  return up * up;
}

}  // namespace flashinfer::sm12x
