// SPDX-License-Identifier: Apache-2.0
//
// A token's experts by its router's logits: the largest, and the softmax over them. The router's own launch and the
// fused MoE kernel share it, so that both choose alike.
#pragma once

#include "../rows/rank.cuh"

namespace flashinfer::sm12x {

// One warp; lane `i` gets the i-th of the chosen. NaN comes first, so that the ids are valid whatever the logits are.
__device__ __forceinline__ void choose_experts(const float* logits, int num_experts, int top_k, int lane, int* id,
                                               float* weight) {
  constexpr int kPerLane = kRouterMaxExperts / 32;
  const int per_lane = (num_experts + 31) / 32;
  uint64_t ranks[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i >= per_lane) break;
    const int expert = lane + 32 * i;
    ranks[i] = expert < num_experts ? rank_of(logits[expert], expert) : 0;
  }
  float largest = 0.0f, own = 0.0f, total = 0.0f;  // own: of the chosen expert that this lane gets
  int own_id = 0;
  for (int place = 0; place < top_k; ++place) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i >= per_lane) break;
      best = max(best, ranks[i]);
    }
    best = largest_of_lanes(best);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i >= per_lane) break;
      ranks[i] = ranks[i] == best ? 0 : ranks[i];
    }
    const float logit = rank_number(best);
    if (place == 0) largest = logit;
    const float share = logit == largest ? 1.0f : expf(logit - largest);  // 1 for equal infinities, too
    total += share;
    if (lane == place) {
      own = share;
      own_id = rank_place(best);
    }
  }
  *id = own_id;
  *weight = own / total;
}

}  // namespace flashinfer::sm12x
