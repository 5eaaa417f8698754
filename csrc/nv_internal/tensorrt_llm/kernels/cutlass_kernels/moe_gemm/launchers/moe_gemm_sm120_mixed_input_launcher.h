// SPDX-License-Identifier: Apache-2.0
//
// The MXFP4 MoE layer on the host: plain CUDA, no framework. A launch allocates nothing and waits for nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../sm12x_arch_config.h"

namespace flashinfer::sm12x {

struct MoeShape {
  int num_tokens;
  int hidden;
  int inter;
  int num_experts;  // on this rank
  int top_k;
  MoeMode mode;
  bool as_bf16;  // room for MXFP8 activations as bfloat16
};

struct MoeArguments {
  MoeShape shape;
  const void* input;
  ScalarType input_type;    // kBf16Input: kBf16 or kF16
  const uint8_t* input_sf;  // kMxfp8Input
  bool swizzled_input_sf;
  const int32_t* ids;            // [tokens, top_k] global expert ids
  const float* routing_weights;  // null: 1
  int first_expert;
  ExpertWeights fc1, fc2;
  ActivationOfExperts activation;
  void* output;
  ScalarType output_type;

  // Only a fused MoE kernel takes these. `router` replaces ids and weights. `barrier`: two counters of the caller's,
  // [0] zero before and after each launch; null: the workspace's, which a launch in front makes zero.
  L2Prefetch next;
  RouterLogits router;
  unsigned* barrier;
  uint8_t* workspace;
  size_t workspace_bytes;
  const Instance* fc1_instance;
  const Instance* fc2_instance;

  int fc1_parts() const { return activation.gated ? 2 : 1; }
  int fc1_rows() const { return fc1_parts() * shape.inter; }
};

// Enough for fewer tokens, too, and for any number of the device's SMs.
size_t moe_workspace_bytes(const MoeShape& shape, int device_sms);
Status run_moe(const MoeArguments& arguments, const LaunchOptions& options);

}  // namespace flashinfer::sm12x
