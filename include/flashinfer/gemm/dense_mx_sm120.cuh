// SPDX-License-Identifier: Apache-2.0
//
// Dense layers with weights in microscaling formats on SM12x (and compute capability 9.0): out = tokens * weights^T,
// for few tokens in one fused MoE kernel, else as a tiled grouped GEMM, as the instance says. Plain CUDA, no framework.
#pragma once

#include <algorithm>

#include "../sm12x/host/tile_gemm.cuh"
#include "../sm12x/rows/pack.cuh"

namespace flashinfer::sm12x {

struct DenseArguments {
  const Instance* instance;
  int num_tokens;
  int n;
  int k;  // a multiple of 32
  TokenRows tokens;
  const uint8_t* weights;  // [n, row_bytes(instance's format, k)]
  const uint8_t* weight_scales;  // 128x4
  StoreEpilogue epilogue;

  // Only a split-K kernel takes these. weights_first: no earlier launch writes weights or scales, so that a
  // dependent launch may read them before that launch ends. ranks: null, or ranks of the largest outputs,
  // [num_tokens][at most kEpilogueWarps x SMs].
  bool weights_first;
  uint64_t* ranks;
  RowNorm norm;
  L2Prefetch next;

  // A GEMM takes these.
  uint8_t* workspace;
  size_t workspace_bytes;
};

// A pipeline's stages: whole work tiles of `g`, so that a stage always holds the same slice. A warp waits only for
// stages of its own slice; if a stage changed slices, the warp would miss a phase and take the parity of an earlier one
// for it.
inline int pipeline_stages(const SplitKGemm& g, int pipeline_bytes, int stage_bytes) {
  return std::min(pipeline_bytes / stage_bytes, kMaxSplitKStages) / g.slices * g.slices;
}

// Slices of a work tile: as few as leave the pipeline five stages or more (one being multiplied, one being finished,
// the others under way), else as many as give it most.
inline SplitKGemm plan_dense(const Instance& instance, int n, int k, int pipeline_bytes, int* stage_bytes) {
  SplitKGemm best = {};
  const int warp_k_blocks = instance.block_k / kKBlock;
  int most = 0;
  for (int slices = 1; slices <= ceil_div(k_blocks_of(k), warp_k_blocks) && most < 5; ++slices) {
    const SplitKGemmPlan plan = {instance.weights, warp_k_blocks, instance.mma_warps, instance.block_n, 1, n, k,
                                 slices,           true};
    const SplitKGemm g = plan.make();
    if (g.groups == 0) continue;
    const int bytes = plan.stage_bytes(g), stages = pipeline_stages(g, pipeline_bytes, bytes);
    if (stages > most) {
      best = g;
      most = stages;
      *stage_bytes = bytes;
    }
  }
  return best;
}

// `ranks_of_token`: how many there are, if any.
inline Status run_split_k_dense(const DenseArguments& a, const LaunchOptions& options, int* ranks_of_token) {
  DenseParams p = {};
  const int pipeline_bytes = options.shared_bytes - DenseStorage::kPipeline;
  p.gemm = plan_dense(*a.instance, a.n, a.k, pipeline_bytes, &p.stage_bytes);
  if (p.gemm.groups == 0) return {cudaErrorInvalidValue, "K is too long for this dense tactic"};
  p.stages = pipeline_stages(p.gemm, pipeline_bytes, p.stage_bytes);
  if (const cudaError_t error = a.instance->prepare(options)) {
    return {error, "this device does not grant the dense tactic's shared memory"};
  }
  if (Status r = encode_scales(a.weight_scales, 1, &p.gemm); r.error) return r;
  p.gemm.weights = a.weights;
  p.tokens = a.tokens;
  p.num_tokens = a.num_tokens;
  p.weights_first = a.weights_first;
  p.epilogue = a.epilogue;
  p.ranks = a.ranks;
  p.norm = a.norm;
  p.next = a.next;
  const bool normable =
      a.num_tokens <= kNarrowTokens && a.instance->block_n == kNarrowTokens && a.tokens.format == TokenFormat::kBf16;
  if (a.norm.weight != nullptr && !normable) {
    return {cudaErrorInvalidValue,
            "a norm in front of a dense tactic takes up to eight bfloat16 tokens, and tiles of eight"};
  }
  const int blocks = std::min(p.gemm.work_tiles, options.sm_count);
  *ranks_of_token = blocks * epilogue_warps_of(p.stages, p.gemm.slices);
  return {a.instance->split_k_dense(p, blocks, p.stages * p.stage_bytes + DenseStorage::kPipeline, options),
          "dense layer"};
}

// Whether the workspace must hold values, and scales, to make rows of a format into rows of the operand with whole
// scale words; neither if the kernel reads the caller's rows.
struct MadeRows {
  bool values, scales;
};

inline MadeRows made_rows(Element operand, TokenFormat format, int k) {
  switch (format) {
    case TokenFormat::kQuantizeBf16:
    case TokenFormat::kQuantizeF16:
    case TokenFormat::kQuantizeBf16ToMxfp4:
    case TokenFormat::kQuantizeF16ToMxfp4: return {true, true};
    case TokenFormat::kMxfp4Swizzled: return {operand != Element::kE2m1, false};
    case TokenFormat::kMxfp8Linear: return {false, k % kKBlock != 0};  // whole scale words need nothing
    default: return {false, false};
  }
}

struct DenseGemmWorkspace {
  uint8_t* tokens;  // packed bfloat16, or e4m3, or packed e2m1
  uint8_t* token_scales;  // scale words
  SplitBuffers split;
  size_t bytes;
};

inline DenseGemmWorkspace lay_out_dense(const Instance& instance, int num_tokens, int k, TokenFormat format,
                                        int device_sms, uint8_t* base) {
  Arena arena(base);
  DenseGemmWorkspace w = {};
  const size_t tokens = static_cast<size_t>(num_tokens);
  if (instance.compute_type == Element::kBf16) {
    w.tokens = arena.take<uint8_t>(packed_bytes(tokens, k));
  } else {
    const MadeRows made = made_rows(instance.compute_type, format, k);
    if (made.values) w.tokens = arena.take<uint8_t>(tokens * (k / kScaleBlock) * block_bytes(instance.compute_type));
    if (made.scales) w.token_scales = arena.take<uint8_t>(tokens * kScaleChunkBlocks * scale_words(k));
  }
  w.split = take_split_buffers(arena, device_sms);
  w.bytes = arena.used();
  return w;
}

inline Status launch_pack_rows(const DenseArguments& a, const DenseGemmWorkspace& w, const LaunchOptions& options,
                               GroupedGemmParams<Role::kStore>* gemm) {
  gemm->tokens = w.tokens;
  const PackRowsParams pack = {a.tokens, a.num_tokens, a.instance->weights, w.tokens, w.split.arrivals, w.split.blocks};
  const int64_t scale_blocks = int64_t{a.num_tokens} * kScaleChunkBlocks * k_blocks_of(a.k);
  return {launch_over(pack_rows_kernel, pack, scale_blocks, kPackRowsThreads, options), "packing of rows"};
}

// Rows of the operand's format are read where they are; others are made into such.
inline Status make_operand_rows(const DenseArguments& a, const DenseGemmWorkspace& w, const LaunchOptions& options,
                                GroupedGemmParams<Role::kStore>* gemm) {
  const TokenFormat format = a.tokens.format;
  const bool to_mxfp4 = are_mxfp4(format) && !have_scales(format);
  if (a.instance->compute_type == Element::kE2m1 && !are_mxfp4(format)) {
    return {cudaErrorInvalidValue,
            "this dense tactic multiplies MXFP4 tokens: they must come so or be rounded to MXFP4"};
  }
  if (a.instance->compute_type != Element::kE2m1 && (format == TokenFormat::kBf16 || to_mxfp4)) {
    return {cudaErrorInvalidValue,
            "this dense tactic multiplies MXFP8 tokens: they must come quantized or be rounded to MXFP8"};
  }
  const MadeRows made = made_rows(a.instance->compute_type, format, a.k);
  const uint8_t* scales = a.tokens.scales;
  PrologueParams prologue = {};
  prologue.num_tokens = a.num_tokens;
  prologue.hidden = a.k;
  prologue.format = made.values || made.scales ? format : TokenFormat::kBf16;
  prologue.input = made.values ? a.tokens.data : scales;
  prologue.quantized = w.tokens;
  prologue.quantized_scales = w.token_scales;
  prologue.split_arrivals = w.split.arrivals;
  prologue.num_split_arrivals = w.split.blocks;

  const bool swizzled = format == TokenFormat::kMxfp8Swizzled || format == TokenFormat::kMxfp4Swizzled;
  if (!made.scales && reinterpret_cast<uintptr_t>(scales) % sizeof(uint32_t) != 0) {
    return {cudaErrorMisalignedAddress, "scales of tokens must start at a multiple of 4 bytes"};
  }
  gemm->tokens = made.values ? w.tokens : static_cast<const uint8_t*>(a.tokens.data);
  gemm->token_scales = reinterpret_cast<const uint32_t*>(made.scales ? w.token_scales : scales);
  gemm->token_scale_pitch = swizzled ? 0 : scale_words(a.k);
  return launch_prologue(prologue, options);
}

// Blocks of a dense GEMM; `blocks` fill the device. On SM12x, one block for each work tile if that keeps memory busy:
// partial sums of work tiles that are cut are written and read again, up to a third of the bytes of a small layer's
// weights. With two blocks for five SMs, 0.7 MB of weights are in flight on a GB10, three times what its latency
// requires. Wide tiles need more SMs, for their arithmetic.
inline int dense_blocks(const DenseArguments& a, const LaunchOptions& options, int blocks) {
  const int64_t work_tiles = static_cast<int64_t>(ceil_div(a.n, kBlockM)) * ceil_div(a.num_tokens, a.instance->block_n);
  const int busy_percent = a.instance->block_n <= 64 ? 40 : 75;
  const bool whole =
      options.sm12x && work_tiles <= blocks && 100 * work_tiles >= busy_percent * int64_t{options.sm_count};
  return whole ? static_cast<int>(work_tiles) : blocks;
}

inline size_t dense_gemm_workspace_bytes(const Instance& instance, int num_tokens, int k, TokenFormat format,
                                         int device_sms) {
  return lay_out_dense(instance, num_tokens, k, format, device_sms, nullptr).bytes;
}

inline Status run_dense_gemm(const DenseArguments& a, const LaunchOptions& options) {
  const DenseGemmWorkspace w =
      lay_out_dense(*a.instance, a.num_tokens, a.k, a.tokens.format, options.device_sms, a.workspace);
  if (w.bytes > a.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};
  if (Status r = check_activations(a.num_tokens, 2 * a.k); r.error) return r;
  int blocks = 0;
  if (Status r = grid_blocks(*a.instance, Role::kStore, 1, options, &blocks); r.error) return r;

  GroupedGemmParams<Role::kStore> gemm = {};
  if (Status r = fill_gemm(gemm, *a.instance, a.weights, a.weight_scales, 1, a.n, a.k, w.split); r.error) return r;
  gemm.top_k = 1;
  gemm.num_routed_rows = a.num_tokens;
  gemm.epilogue = a.epilogue;
  // Launched also where rows need nothing: it zeroes the counters. And it waits for the launch in front before it lets
  // the GEMM begin, so that the GEMM may read weights at once, even if that launch wrote them.
  const auto launch_rows = a.instance->compute_type == Element::kBf16 ? launch_pack_rows : make_operand_rows;
  if (Status r = launch_rows(a, w, options, &gemm); r.error) return r;
  return {a.instance->store(gemm, dense_blocks(a, options, blocks), options), "dense GEMM"};
}

}  // namespace flashinfer::sm12x
