// SPDX-License-Identifier: Apache-2.0
//
// The sum over a token's experts: partial outputs in the order of slots. Those of other ranks' experts are
// not read.
#pragma once

#include "../rows/scalar.cuh"
#include "routing.cuh"

namespace flashinfer::sm12x {

// Some columns of some tokens at a time, so that the latencies of their loads overlap.
// `partial_outputs` is [tokens x top_k, hidden], `ids` the routed rows' experts.
template <class Vector, int kTokens, class Params>
__device__ __forceinline__ void sum_slots(const Params& p, const int32_t* ids, const float* partial_outputs, int hidden,
                                          int column, const int (&tokens)[kTokens], Vector (&sum)[kTokens]) {
  constexpr int kSlots = 4;  // slots of a token whose loads are in flight together
  for (int base = 0; base < p.top_k; base += kSlots) {
    Vector value[kTokens][kSlots];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const int routed_row = tokens[j] * p.top_k + base + i;
        const bool local = base + i < p.top_k && local_expert(ids[routed_row], p.first_expert, p.num_experts) >= 0;
        // The address only where it is needed: it costs registers.
        value[j][i] = Vector{};
        if (!local) continue;
        const float* from = partial_outputs + static_cast<int64_t>(routed_row) * hidden + column;
        value[j][i] = __ldcg(reinterpret_cast<const Vector*>(from));
      }
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) add_to(sum[j], value[j][i]);
    }
  }
}

}  // namespace flashinfer::sm12x
