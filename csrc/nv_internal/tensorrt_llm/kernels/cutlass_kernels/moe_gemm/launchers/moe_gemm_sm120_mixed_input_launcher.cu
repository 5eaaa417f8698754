// SPDX-License-Identifier: Apache-2.0
//
// A layer is three launches, prologue, FC1 and FC2, or four, tokens being packed behind the prologue. A fused MoE
// kernel is two, of which the first packs W4A8's tokens and zeroes the counters of the second's grid barriers; of W4A16
// with counters that a caller keeps it is one. Everything their parameters need is computed here from sizes alone.
#include "moe_gemm_sm120_mixed_input_launcher.h"

#include <algorithm>

#include "flashinfer/sm12x/host/tile_gemm.cuh"
#include "flashinfer/sm12x/rows/pack.cuh"

namespace flashinfer::sm12x {

namespace {

struct MoeWorkspace {
  uint8_t* intermediate;
  uint8_t* intermediate_scales;
  uint8_t* tokens;
  uint8_t* token_scales;
  int32_t* offsets;
  int32_t* order;
  int32_t* positions;
  float* partial_outputs;
  int* token_arrivals;
  SplitBuffers split;
  size_t bytes;
};

// Grows with the number of tokens, so that a workspace for many serves fewer.
MoeWorkspace lay_out(const MoeShape& s, int device_sms, uint8_t* base) {
  Arena arena(base);
  const size_t routed_rows = static_cast<size_t>(s.num_tokens) * s.top_k;
  MoeWorkspace w = {};
  // Room for whatever tactic comes: intermediate is e4m3, packed bfloat16 (W4A16, or a device that dequantizes), or a
  // fused MoE kernel's float32; tokens are e4m3, or packed, for the two-kernel path as many rows as routed rows.
  const bool as_bf16 = s.as_bf16 || s.mode == MoeMode::kW4A16;
  const size_t fused_moe_tokens = std::min<size_t>(s.num_tokens, kFusedMoeRoutedRows / s.top_k);
  const size_t intermediate_bytes = s.inter * std::max(routed_rows, fused_moe_tokens * s.top_k * sizeof(float));
  w.intermediate = arena.take<uint8_t>(std::max(intermediate_bytes, as_bf16 ? packed_bytes(routed_rows, s.inter) : 0));
  w.intermediate_scales = arena.take<uint8_t>(routed_rows * kScaleChunkBlocks * scale_words(s.inter));
  const size_t quantized_bytes = s.mode == MoeMode::kBf16Input ? static_cast<size_t>(s.num_tokens) * s.hidden : 0;
  const size_t packed_rows = as_bf16 ? routed_rows : fused_moe_tokens;
  w.tokens = arena.take<uint8_t>(std::max(quantized_bytes, packed_bytes(packed_rows, s.hidden)));
  w.token_scales = arena.take<uint8_t>(
      s.mode == MoeMode::kW4A16 ? 0 : static_cast<size_t>(s.num_tokens) * kScaleChunkBlocks * scale_words(s.hidden));
  w.offsets = arena.take<int32_t>(s.num_experts + 1);
  w.order = arena.take<int32_t>(routed_rows);
  w.positions = arena.take<int32_t>(as_bf16 ? routed_rows : 0);
  w.partial_outputs = arena.take<float>(routed_rows * s.hidden);
  w.token_arrivals = arena.take<int>(static_cast<size_t>(s.num_tokens) * ceil_div(s.hidden, kBlockM));
  w.split = take_split_buffers(arena, device_sms);
  w.bytes = arena.used();
  return w;
}

TokenRows input_rows(const MoeArguments& a) {
  TokenFormat format = TokenFormat::kBf16;
  if (a.shape.mode == MoeMode::kBf16Input) {
    format = a.input_type == ScalarType::kF16 ? TokenFormat::kQuantizeF16 : TokenFormat::kQuantizeBf16;
  } else if (a.shape.mode == MoeMode::kMxfp8Input) {
    format = a.swizzled_input_sf ? TokenFormat::kMxfp8Swizzled : TokenFormat::kMxfp8Linear;
  }
  return {a.input, a.input_sf, format, a.shape.hidden};
}

// Tokens for bf16 MMAs; `positions`: of each routed row in permuted order, or null, for the order of tokens.
PackTokensParams pack_params(const MoeArguments& a, const MoeWorkspace& w, const int32_t* positions) {
  PackTokensParams pack = {};
  pack.input = input_rows(a);
  pack.positions = positions;
  pack.num_tokens = a.shape.num_tokens;
  pack.top_k = positions != nullptr ? a.shape.top_k : 1;
  pack.tokens = w.tokens;
  return pack;
}

Status launch_pack_tokens(const PackTokensParams& params, const LaunchOptions& options) {
  const int64_t eighths = int64_t{params.num_tokens} * 4 * kScaleChunkBlocks * k_blocks_of(params.input.k);
  return {launch_over(moe_pack_kernel, params, std::max<int64_t>(eighths, 1), kPackTokensThreads, options),
          "packing of tokens"};
}

Status run_fused_moe(const MoeArguments& a, const MoeWorkspace& w, const LaunchOptions& options) {
  const MoeShape& s = a.shape;
  const Instance& instance = *a.fc1_instance;
  const int routed_rows = s.num_tokens * s.top_k;
  static_assert(kFewRoutedRows == 32 && kRouterMaxExperts == 512 && kFusedMoeRoutedRows == 1536, "texts below say so");
  if (a.fc1_instance != a.fc2_instance) {
    return {cudaErrorInvalidValue, "a fused MoE tactic computes both GEMMs: FC1 and FC2 must name the same"};
  }
  if (a.router.logits != nullptr && (routed_rows > kFewRoutedRows || a.router.num_experts_total > kRouterMaxExperts)) {
    return {cudaErrorInvalidValue,
            "a fused MoE kernel chooses experts of at most 32 routed rows (tokens x top_k), of at most 512"};
  }
  if (routed_rows > kFusedMoeRoutedRows) {
    return {cudaErrorInvalidValue, "a fused MoE tactic takes at most 1536 routed rows (tokens x top_k)"};
  }
  if (!takes_sms(instance, options)) {
    return {cudaErrorInvalidValue, "a fused MoE tactic needs all SMs of the device, and this stream has fewer"};
  }

  FusedMoeParams p = {};
  const ExpertWeights matrices[2] = {a.fc1, a.fc2};
  for (int i = 0; i < 2; ++i) {
    if (reinterpret_cast<uintptr_t>(matrices[i].bias) % 16 != 0) {
      return {cudaErrorMisalignedAddress, "biases must start at a multiple of 16 bytes"};
    }
    const SplitKGemmPlan plan =
        fused_moe_gemm_plan(instance.weights, instance.block_k, instance.mma_warps, instance.block_n,
                            i == 0 ? a.fc1_parts() : 1, i == 0 ? s.inter : s.hidden, i == 0 ? s.hidden : s.inter);
    p.gemm[i] = plan.make();
    if (p.gemm[i].groups == 0) return {cudaErrorInvalidValue, "K is too long for this fused MoE tactic"};
    p.stage_bytes = std::max(p.stage_bytes, plan.stage_bytes(p.gemm[i]));
  }
  p.stages = std::min((options.shared_bytes - FusedMoeStorage::kPipeline) / p.stage_bytes, kMaxSplitKStages);
  if (p.stages < 2 || p.stages * p.stage_bytes < FusedMoeStorage::kRouting) {
    return {cudaErrorInvalidValue, "two stages of this fused MoE tactic do not fit shared memory"};
  }
  const int shared_bytes = p.stages * p.stage_bytes + FusedMoeStorage::kPipeline;
  if (const cudaError_t error = instance.prepare(options)) {
    return {error, "this device does not grant the fused MoE tactic's shared memory"};
  }
  for (int i = 0; i < 2; ++i) {
    if (Status r = encode_scales(matrices[i].scales, s.num_experts, &p.gemm[i]); r.error) return r;
    p.gemm[i].weights = matrices[i].weights;
    p.gemm[i].global_scale = matrices[i].global_scale;
    p.gemm[i].bias = matrices[i].bias;
    p.gemm[i].bias_type = matrices[i].bias_type;
  }

  const bool reads_input = s.mode == MoeMode::kW4A16;
  p.tokens = reads_input ? static_cast<const uint8_t*>(a.input) : w.tokens;
  p.ids = a.ids;
  p.routing_weights = a.routing_weights;
  p.num_tokens = s.num_tokens;
  p.num_routed_rows = routed_rows;
  p.top_k = s.top_k;
  p.first_expert = a.first_expert;
  p.num_experts = s.num_experts;
  p.activation = a.activation;
  p.intermediate = reinterpret_cast<float*>(w.intermediate);
  p.partial_outputs = w.partial_outputs;
  // A fused MoE kernel splits no work tiles between blocks, so the arrivals' counters are free.
  p.barrier_counters = a.barrier != nullptr ? a.barrier : reinterpret_cast<unsigned*>(w.split.arrivals);
  p.output = a.output;
  p.output_type = a.output_type;
  p.next = a.next;
  p.router = a.router;

  PackTokensParams pack = pack_params(a, w, nullptr);
  if (reads_input) pack.num_tokens = 0;
  pack.counters = p.barrier_counters;
  pack.num_counters = a.barrier != nullptr ? 0 : 2;
  pack.prefetch = a.ids;
  pack.prefetch_bytes = a.ids != nullptr ? routed_rows * static_cast<int>(sizeof(int32_t)) : 0;
  if (pack.num_tokens > 0 || pack.num_counters > 0) {
    if (Status r = launch_pack_tokens(pack, options); r.error) return r;
  }
  return {instance.fused_moe(p, shared_bytes, options), "fused MoE kernel"};
}

Status run_two_kernels(const MoeArguments& a, const MoeWorkspace& w, const LaunchOptions& options) {
  const MoeShape& s = a.shape;
  const int routed_rows = s.num_tokens * s.top_k;
  if (Status r = check_activations(routed_rows, std::max(s.hidden, s.inter)); r.error) return r;
  if (a.fc1_instance->compute_type != a.fc2_instance->compute_type) {
    return {cudaErrorInvalidValue, "FC1 and FC2 must keep activations in the same type"};
  }
  const bool mxfp8 = a.fc1_instance->compute_type != Element::kBf16;
  const bool kernels_route = routes_in_kernel(*a.fc1_instance, routed_rows);
  const bool repack = mxfp8 && s.mode == MoeMode::kMxfp8Input && !a.swizzled_input_sf &&
                      s.hidden / kScaleBlock % kScaleChunkBlocks != 0;

  int fc1_blocks = 0, fc2_blocks = 0;
  if (Status r = grid_blocks(*a.fc1_instance, Role::kFc1, s.num_experts, options, &fc1_blocks); r.error) return r;
  if (Status r = grid_blocks(*a.fc2_instance, Role::kFc2, s.num_experts, options, &fc2_blocks); r.error) return r;

  GroupedGemmParams<Role::kFc1> fc1 = {};
  GroupedGemmParams<Role::kFc2> fc2 = {};
  const int experts = s.num_experts;
  Status r = fill_gemm(fc1, *a.fc1_instance, a.fc1.weights, a.fc1.scales, experts, a.fc1_rows(), s.hidden, w.split);
  if (r.error) return r;
  r = fill_gemm(fc2, *a.fc2_instance, a.fc2.weights, a.fc2.scales, experts, s.hidden, s.inter, w.split);
  if (r.error) return r;

  PrologueParams prologue = {};
  prologue.num_tokens = s.num_tokens;
  prologue.hidden = s.hidden;
  prologue.quantized = w.tokens;
  prologue.quantized_scales = w.token_scales;
  if (mxfp8 && s.mode == MoeMode::kBf16Input) {
    prologue.format = input_rows(a).format;
    prologue.input = a.input;
  } else if (repack) {
    prologue.format = TokenFormat::kMxfp8Linear;
    prologue.input = a.input_sf;
  }
  prologue.ids = a.ids;
  prologue.num_routed_rows = routed_rows;
  prologue.top_k = s.top_k;
  prologue.first_expert = a.first_expert;
  prologue.num_experts = s.num_experts;
  prologue.offsets = kernels_route ? nullptr : w.offsets;
  prologue.order = kernels_route ? nullptr : w.order;
  prologue.positions = mxfp8 ? nullptr : w.positions;
  prologue.split_arrivals = w.split.arrivals;
  prologue.num_split_arrivals = 2 * w.split.blocks;
  prologue.token_arrivals = w.token_arrivals;
  prologue.m_tiles = ceil_div(s.hidden, kBlockM);
  prologue.output = a.output;
  prologue.output_type = a.output_type;

  auto route = [&](auto& gemm) {
    gemm.ids = a.ids;
    gemm.num_routed_rows = routed_rows;
    gemm.top_k = s.top_k;
    gemm.first_expert = a.first_expert;
    gemm.offsets = prologue.offsets;
    gemm.order = prologue.order;
  };
  route(fc1);
  route(fc2);

  const bool from_workspace = !mxfp8 || s.mode == MoeMode::kBf16Input;
  fc1.tokens = from_workspace ? w.tokens : static_cast<const uint8_t*>(a.input);
  if (mxfp8) {
    const bool scales_from_workspace = from_workspace || repack;
    fc1.token_scales = reinterpret_cast<const uint32_t*>(scales_from_workspace ? w.token_scales : a.input_sf);
    fc1.token_scale_pitch = !scales_from_workspace && a.swizzled_input_sf ? 0 : scale_words(s.hidden);
  }
  fc1.epilogue = {a.fc1.global_scale, a.fc1.bias, a.fc1.bias_type, a.activation, w.intermediate, w.intermediate_scales};

  fc2.tokens = w.intermediate;
  if (mxfp8) {
    fc2.token_scales = reinterpret_cast<const uint32_t*>(w.intermediate_scales);
    fc2.token_scale_pitch = scale_words(s.inter);
  }
  fc2.epilogue = {a.fc2.global_scale, a.fc2.bias,       a.fc2.bias_type, a.routing_weights,
                  w.partial_outputs,  w.token_arrivals, a.output,        a.output_type};

  r = launch_prologue(prologue, options);
  if (r.error) return r;
  if (!mxfp8) r = launch_pack_tokens(pack_params(a, w, w.positions), options);
  if (r.error) return r;
  if (const cudaError_t error = a.fc1_instance->fc1(fc1, fc1_blocks, options)) return {error, "FC1"};
  if (const cudaError_t error = a.fc2_instance->fc2(fc2, fc2_blocks, options)) return {error, "FC2"};
  return {};
}

}  // namespace

size_t moe_workspace_bytes(const MoeShape& shape, int device_sms) { return lay_out(shape, device_sms, nullptr).bytes; }

Status run_moe(const MoeArguments& a, const LaunchOptions& options) {
  const MoeWorkspace w = lay_out(a.shape, options.device_sms, a.workspace);
  if (w.bytes > a.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};
  const bool fused = a.fc1_instance->is_fused_moe() || a.fc2_instance->is_fused_moe();
  if (!fused && a.ids == nullptr) return {cudaErrorInvalidValue, "the two-kernel path takes expert ids, not logits"};
  return fused ? run_fused_moe(a, w, options) : run_two_kernels(a, w, options);
}

}  // namespace flashinfer::sm12x
