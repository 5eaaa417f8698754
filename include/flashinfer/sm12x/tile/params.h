// SPDX-License-Identifier: Apache-2.0
//
// Parameters of a launch of the grouped GEMM. Filled by the launcher, read by the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "../moe/activation.cuh"
#include "../types.h"

namespace flashinfer::sm12x {

// One weight matrix of every expert, with its scales and biases.
struct ExpertWeights {
  const uint8_t* weights;
  const uint8_t* scales;  // 128x4, expert after expert
  const float* global_scale;  // [experts] or null
  const void* bias;  // [experts, rows] or null
  ScalarType bias_type;
};

struct Fc1Epilogue {
  const float* global_scale;  // [E] or null: 1
  const void* bias;           // [E, rows] or null
  ScalarType bias_type;
  ActivationOfExperts activation;
  uint8_t* intermediate;         // [routed_rows, inter] e4m3, or packed bf16 (rows/load.cuh), in permuted order
  uint8_t* intermediate_scales;  // [routed_rows, 4 * scale_words(inter)] UE8M0, e4m3 only
};

struct Fc2Epilogue {
  const float* global_scale;  // [E] or null: 1
  const void* bias;           // [E, rows] or null
  ScalarType bias_type;
  const float* routing_weights;  // [routed_rows] or null: 1
  float* partial_outputs;          // [routed_rows, rows], by routed row
  int* token_arrivals;           // [tokens, M tiles]
  void* output;                  // [tokens, rows]
  ScalarType output_type;
};

struct StoreEpilogue {
  void* output;  // [cum_m, rows]
  ScalarType output_type;
  const float* alpha;    // one, or null: 1
  const void* bias;      // [rows] or null
  ScalarType bias_type;
  const void* residual;  // [cum_m, rows] of output_type, or null: added
};

template <Role kRole>
struct GroupedGemmParams {
  CUtensorMap weights;           // bytes [E][rows][row_bytes]; of MXFP6 boxes of its first plane
  CUtensorMap second_plane;      // MXFP6 only
  const uint8_t* weight_scales;  // 128x4, expert after expert
  int64_t weight_scale_pitch;    // bytes from one expert's scales to the next
  int rows;                      // weight rows of an expert (FC1: up rows, then gate rows if there are any)
  int k;

  const uint8_t* tokens;  // [*, k] e4m3, e5m2 or packed e2m1; or packed bf16, `num_routed_rows` rows by expert
  const uint32_t* token_scales;  // scale words: four UE8M0 scales each
  int token_scale_pitch;  // scale words of a row, or 0: 128x4 layout
  const int32_t* ids;  // [routed_rows] global expert ids
  int num_routed_rows;
  int top_k;
  int first_expert;
  int num_experts;
  const int32_t* offsets;  // [E + 1] from the prologue (or the caller); null: the kernel routes, kStore has one group
  const int32_t* order;  // [routed_rows] likewise

  float4* partials;  // [grid][2][kBlockM * kBlockN / 4]
  int* split_arrivals;  // [grid], zeroed by the launch in front
  std::conditional_t<kRole == Role::kFc1, Fc1Epilogue,
                     std::conditional_t<kRole == Role::kFc2, Fc2Epilogue, StoreEpilogue>>
      epilogue;
};

}  // namespace flashinfer::sm12x
