// SPDX-License-Identifier: Apache-2.0
//
// The gated activations of one output: gpt-oss' SwiGLU, which clamps the gate before its SiLU, and SwigluStep, which
// clamps the SiLU itself.
#pragma once

#include <cmath>

#include "../ptx/convert.cuh"
#include "../rows/scalar.cuh"

namespace flashinfer::sm12x {

// By FlashInfer's numbers (ActivationType).
enum class Activation : int {
  kSwiglu = 3,  // gate sigmoid(alpha gate) (up + beta), the gate at most the limit
  kSwigluBias = 5,  // the same
  kSwigluStep = 7,  // silu(gate) up, the SiLU at most the limit
};

constexpr bool is_known(Activation activation) {
  switch (activation) {
    case Activation::kSwiglu:
    case Activation::kSwigluBias:
    case Activation::kSwigluStep: return true;
  }
  return false;
}

// Of each local expert; null: 1, 0 and infinity. kSwigluStep has a limit alone; null: kDefaultStepLimit.
struct SwigluOfExperts {
  const float *alpha, *beta, *limit;
  Activation activation;
};

constexpr float kDefaultStepLimit = 7.0f;

struct Swiglu {
  float alpha, beta, limit;
  bool step;

  static __device__ __forceinline__ Swiglu of_expert(const SwigluOfExperts& experts, int expert) {
    const bool step = experts.activation == Activation::kSwigluStep;
    return {load_or(experts.alpha, expert, 1.0f), load_or(experts.beta, expert, 0.0f),
            load_or(experts.limit, expert, step ? kDefaultStepLimit : INFINITY), step};
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

}  // namespace flashinfer::sm12x
