// SPDX-License-Identifier: Apache-2.0
//
// FC2's epilogue: global scale, bias, routing weight, and the sum over a token's experts. Every expert's contribution
// goes to its own row of a float32 buffer; whoever delivers a token's last contribution for a row tile adds them up in
// slot order and rounds once. The order of the sum is that of the slots, whoever comes last.
#pragma once

#include "../impls/mainloop.cuh"
#include "../scheduler/routing.cuh"
#include "scalar.cuh"
#include "swiglu_quantize.cuh"

namespace flashinfer::sm12x::epilogue {

// What FC2's epilogue knows of a token, loaded while the mainloop runs.
struct OwnToken {
  int entry;  // (token, slot) number
  float weight;
};

template <class Config>
class Fc2Finish {
  using Params = GroupedGemmParams<Role::kFc2>;

 public:
  // `own` is the thread's own token of the tile (threads below num_tokens).
  static __device__ __forceinline__ void run(const Params& p, const SharedStorage<Config>& shared,
                                             const scheduler::Unit& unit, const OwnToken& own, int warp, int lane,
                                             const Accumulators<Config>& accumulators) {
    const int thread = 32 * warp + lane;
    int* entries = shared.template scratch<int>();
    float* weights = shared.template scratch<float>() + Config::kTokenTile;
    int* complete = shared.template scratch<int>() + 2 * Config::kTokenTile;
    if (thread < unit.num_tokens) {
      entries[thread] = own.entry;
      weights[thread] = own.weight;
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    contribute(p, unit, entries, weights, warp, lane, accumulators);

    __threadfence();
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    const int row_tiles = ceil_div(p.rows, kRowTile);
    if (thread < unit.num_tokens) {
      // The prologue starts the count at the number of slots that no local expert serves.
      const int token = own.entry / p.top_k;
      const int before =
          atomicAdd(p.epilogue.token_arrivals + static_cast<int64_t>(token) * row_tiles + unit.row_tile, 1);
      complete[thread] = before == p.top_k - 1;
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    __threadfence();
    for (int i = 0; i < unit.num_tokens; ++i) {
      if (complete[i]) sum_slots(p, unit, entries[i] / p.top_k, thread);
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);  // the scratch area is free again
  }

 private:
  static __device__ __forceinline__ void contribute(const Params& p, const scheduler::Unit& unit, const int* entries,
                                                    const float* weights, int warp, int lane,
                                                    const Accumulators<Config>& accumulators) {
    const float scale =
        mma::Policy<Config::kActivation>::kAccumulatorScale * load_or(p.epilogue.global_scale, unit.expert, 1.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int row = unit.row_tile * kRowTile + half * kRowHalf + 16 * (warp % 4) + lane / 4 + 8 * upper;
        if (row >= p.rows) continue;
        const float bias =
            p.epilogue.bias != nullptr
                ? load_scalar(p.epilogue.bias, static_cast<int64_t>(unit.expert) * p.rows + row, p.epilogue.bias_type)
                : 0.0f;
#pragma unroll
        for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const int token = Config::kWarpTokens * (warp / 4) + 8 * step + 2 * (lane % 4) + parity;
            if (token >= unit.num_tokens) continue;
            const float value = fmaf(accumulators[half][step][2 * upper + parity], scale, bias) * weights[token];
            p.epilogue.contributions[static_cast<int64_t>(entries[token]) * p.rows + row] = value;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void sum_slots(const Params& p, const scheduler::Unit& unit, int token,
                                                   int thread) {
    const int row = unit.row_tile * kRowTile + thread;
    if (thread >= kRowTile || row >= p.rows) return;
    constexpr int kBatch = 4;  // slots whose loads are in flight together
    float sum = 0.0f;
    for (int base = 0; base < p.top_k; base += kBatch) {
      bool local[kBatch];
      float value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        local[i] = base + i < p.top_k &&
                   scheduler::local_expert(p.ids[token * p.top_k + base + i], p.first_expert, p.num_experts) >= 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t entry = static_cast<int64_t>(token) * p.top_k + base + i;
        value[i] = local[i] ? __ldcg(p.epilogue.contributions + entry * p.rows + row) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (local[i]) sum += value[i];
      }
    }
    store_scalar(p.epilogue.output, static_cast<int64_t>(token) * p.rows + row, p.epilogue.output_type, sum);
  }
};

// The grouped GEMM's epilogue: the accumulators as they are.
template <class Config>
__device__ __forceinline__ void store_output(const GroupedGemmParams<Role::kStore>& p, const scheduler::Unit& unit,
                                             int warp, int lane, const Accumulators<Config>& accumulators) {
  constexpr float kScale = mma::Policy<Config::kActivation>::kAccumulatorScale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = unit.row_tile * kRowTile + half * kRowHalf + 16 * (warp % 4) + lane / 4 + 8 * upper;
      if (row >= p.rows) continue;
#pragma unroll
      for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int token = Config::kWarpTokens * (warp / 4) + 8 * step + 2 * (lane % 4) + parity;
          if (token >= unit.num_tokens) continue;
          store_scalar(p.epilogue.output, static_cast<int64_t>(unit.first_token + token) * p.rows + row,
                       p.epilogue.output_type, accumulators[half][step][2 * upper + parity] * kScale);
        }
      }
    }
  }
}

}  // namespace flashinfer::sm12x::epilogue
