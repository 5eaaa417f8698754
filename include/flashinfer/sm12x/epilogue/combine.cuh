// SPDX-License-Identifier: Apache-2.0
//
// FC2's epilogue: global scale, bias, routing weight, and the sum over a token's experts. Every expert's contribution
// goes to its own row of a float32 buffer; whoever delivers a token's last contribution for a row tile adds them up in
// slot order and rounds once. The order of the sum is that of the slots, whoever comes last.
#pragma once

#include "../impls/mainloop.cuh"
#include "scalar.cuh"
#include "swiglu_quantize.cuh"
#include "top_k_sum.cuh"

namespace flashinfer::sm12x::epilogue {

// What FC2's epilogue knows of a token, loaded while the mainloop runs.
struct OwnToken {
  int entry;  // (token, slot) number
  float weight;
};

// take(token of the tile, row, value) for each of a thread's outputs: its sum, scaled, and the row's bias.
template <class Config, class Params, class Take>
__device__ __forceinline__ void for_each_output(const Params& p, const scheduler::Unit& unit, float scale,
                                                int64_t first_bias, int warp, int lane,
                                                const Accumulators<Config>& accumulators, const Take& take) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = unit.row_tile * kRowTile + half * kRowHalf + 16 * (warp % 4) + lane / 4 + 8 * upper;
      if (row >= p.rows) continue;
      const float bias =
          p.epilogue.bias != nullptr ? load_scalar(p.epilogue.bias, first_bias + row, p.epilogue.bias_type) : 0.0f;
#pragma unroll
      for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int token = Config::kWarpTokens * (warp / 4) + 8 * step + 2 * (lane % 4) + parity;
          if (token >= unit.num_tokens) continue;
          take(token, row, fmaf(accumulators[half][step][2 * upper + parity], scale, bias));
        }
      }
    }
  }
}

template <class Config>
class Fc2Finish {
  using Params = GroupedGemmParams<Role::kFc2>;
  static constexpr int kTogether = Config::kTokenTile <= 16 ? 1 : 4;  // tokens summed at a time

 public:
  // `own` is the thread's own token of the tile (threads below num_tokens).
  static __device__ __forceinline__ void run(const Params& p, const SharedStorage<Config>& shared,
                                             const scheduler::Unit& unit, const OwnToken& own, int warp, int lane,
                                             const Accumulators<Config>& accumulators) {
    const int thread = 32 * warp + lane;
    int* entries = shared.template scratch<int>();
    float* weights = shared.template scratch<float>() + Config::kTokenTile;
    uint32_t* complete = shared.template scratch<uint32_t>() + 2 * Config::kTokenTile;  // a bit for each token
    if (thread < unit.num_tokens) {
      entries[thread] = own.entry;
      weights[thread] = own.weight;
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    contribute(p, unit, entries, weights, warp, lane, accumulators);

    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    const int row_tiles = ceil_div(p.rows, kRowTile);
    bool last = false;
    if (thread < unit.num_tokens) {
      // The prologue starts the count at the number of slots that no local expert serves.
      const int token = own.entry / p.top_k;
      const int64_t counter = static_cast<int64_t>(token) * row_tiles + unit.row_tile;
      const int before = ptx::count_at_gpu_counter(p.epilogue.token_arrivals + counter);
      last = before == p.top_k - 1;
      if (last) __threadfence();  // by who saw the count, in front of the barrier: orders the others' writes for all
    }
    if (32 * warp < Config::kTokenTile) {
      const uint32_t mask = __ballot_sync(kAllLanes, last);
      if (lane == 0) complete[warp] = mask;
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    sum_complete(p, unit, entries, complete, thread);
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);  // the scratch area is free again
  }

 private:
  static __device__ __forceinline__ void contribute(const Params& p, const scheduler::Unit& unit, const int* entries,
                                                    const float* weights, int warp, int lane,
                                                    const Accumulators<Config>& accumulators) {
    const float scale = Config::Policy::kAccumulatorScale * load_or(p.epilogue.global_scale, unit.expert, 1.0f);
    const int64_t first_bias = static_cast<int64_t>(unit.expert) * p.rows;
    for_each_output<Config>(p, unit, scale, first_bias, warp, lane, accumulators, [&](int token, int row, float value) {
      p.epilogue.contributions[static_cast<int64_t>(entries[token]) * p.rows + row] = value * weights[token];
    });
  }

  // Sums of all tokens that are complete.
  static __device__ __forceinline__ void sum_complete(const Params& p, const scheduler::Unit& unit, const int* entries,
                                                      const uint32_t* complete, int thread) {
    const int row = unit.row_tile * kRowTile + thread;
    if (thread >= kRowTile || row >= p.rows) return;
    for (int first = 0; first < unit.num_tokens; first += 32) {
      for (uint32_t left = complete[first / 32]; left != 0;) {
        int tokens[kTogether], count = 0;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          tokens[j] = left != 0 ? entries[first + __ffs(left) - 1] / p.top_k : tokens[0];
          count += left != 0;
          left &= left - 1;
        }
        float sum[kTogether] = {};
        sum_slots(p, p.epilogue.contributions, p.rows, row, tokens, sum);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (j >= count) break;
          store_scalar(p.epilogue.output, static_cast<int64_t>(tokens[j]) * p.rows + row, p.epilogue.output_type,
                       sum[j]);
        }
      }
    }
  }
};

// The grouped GEMM's epilogue, and a dense layer's.
template <class Config>
__device__ __forceinline__ void store_output(const GroupedGemmParams<Role::kStore>& p, const scheduler::Unit& unit,
                                             int warp, int lane, const Accumulators<Config>& accumulators) {
  const StoreEpilogue& e = p.epilogue;
  const float scale = Config::Policy::kAccumulatorScale * load_or(e.alpha, 0, 1.0f);
  for_each_output<Config>(p, unit, scale, 0, warp, lane, accumulators, [&](int token, int row, float value) {
    const int64_t at = static_cast<int64_t>(unit.first_token + token) * p.rows + row;
    if (e.residual != nullptr) value += load_scalar(e.residual, at, e.output_type);
    store_scalar(e.output, at, e.output_type, value);
  });
}

}  // namespace flashinfer::sm12x::epilogue
