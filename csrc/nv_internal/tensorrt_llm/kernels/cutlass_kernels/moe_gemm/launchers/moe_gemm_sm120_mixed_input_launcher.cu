// SPDX-License-Identifier: Apache-2.0
//
// A layer is three launches, prologue, FC1 and FC2, or four, tokens being arranged behind the prologue; or two, tokens
// arranged and the streamed layer. Everything their parameters need is computed here from sizes alone.
#include "moe_gemm_sm120_mixed_input_launcher.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "flashinfer/sm12x/impls/arrange_rows.cuh"
#include "flashinfer/sm12x/impls/moe_arrange.cuh"
#include "flashinfer/sm12x/impls/moe_prologue.cuh"

namespace flashinfer::sm12x {

namespace {

constexpr int kMaxBlocksPerSm = 16;  // more than any instance's occupancy
constexpr size_t kPartialBytesPerSm = size_t{256} << 10;  // two parts of a tile for every resident block

using Registry = std::array<std::atomic<const GemmInstance*>, kMaxInstances>;

Registry& registry() {
  static Registry instance = {};  // first used by the static initialisers of the rendered sources
  return instance;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Hands out consecutive, aligned pieces of the workspace; with a null base it only counts.
class Arena {
 public:
  explicit Arena(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(size_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += aligned(count * sizeof(T));
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

struct SplitBuffers {
  float4* partials;
  int* arrivals;  // FC1's blocks, then FC2's
  int blocks;  // of one launch at most
};

SplitBuffers take_split_buffers(Arena& arena, int device_sms) {
  SplitBuffers split;
  split.blocks = device_sms * kMaxBlocksPerSm;
  split.partials = arena.take<float4>(device_sms * kPartialBytesPerSm / sizeof(float4));
  split.arrivals = arena.take<int>(2 * static_cast<size_t>(split.blocks));
  return split;
}

struct MoeWorkspace {
  uint8_t* act;
  uint8_t* act_scales;
  uint8_t* tokens;
  uint8_t* token_scales;
  int32_t* offsets;
  int32_t* order;
  int32_t* positions;
  float* contributions;
  int* token_arrivals;
  SplitBuffers split;
  size_t bytes;
};

size_t arranged_bytes(size_t rows, int k) { return rows * scale_words(k) * kArrangedRowBytes; }

// Grows with the number of tokens, so that a workspace for many serves fewer.
MoeWorkspace lay_out(const MoeShape& s, int device_sms, uint8_t* base) {
  Arena arena(base);
  const size_t entries = static_cast<size_t>(s.num_tokens) * s.top_k;
  MoeWorkspace w = {};
  // Room for whatever tactic comes: act is e4m3, arranged bfloat16 (W4A16, or a device that widens), or a streamed layer's
  // float32; tokens are e4m3, or arranged, for a pair of GEMMs one row for each entry.
  const bool widens = s.widens || s.mode == MoeMode::kBf16Activations;
  const size_t streamed_tokens = std::min<size_t>(s.num_tokens, kStreamEntries / s.top_k);
  const size_t act_bytes = s.inter * std::max(entries, streamed_tokens * s.top_k * sizeof(float));
  w.act = arena.take<uint8_t>(std::max(act_bytes, widens ? arranged_bytes(entries, s.inter) : 0));
  w.act_scales = arena.take<uint8_t>(entries * kScaleChunkBlocks * scale_words(s.inter));
  const size_t quantized_bytes = s.mode == MoeMode::kQuantizeInput ? static_cast<size_t>(s.num_tokens) * s.hidden : 0;
  const size_t arranged_rows = widens ? entries : streamed_tokens;
  w.tokens = arena.take<uint8_t>(std::max(quantized_bytes, arranged_bytes(arranged_rows, s.hidden)));
  w.token_scales =
      arena.take<uint8_t>(s.mode == MoeMode::kBf16Activations
                              ? 0
                              : static_cast<size_t>(s.num_tokens) * kScaleChunkBlocks * scale_words(s.hidden));
  w.offsets = arena.take<int32_t>(s.num_experts + 1);
  w.order = arena.take<int32_t>(entries);
  w.positions = arena.take<int32_t>(widens ? entries : 0);
  w.contributions = arena.take<float>(entries * s.hidden);
  w.token_arrivals = arena.take<int>(static_cast<size_t>(s.num_tokens) * ceil_div(s.hidden, kRowTile));
  w.split = take_split_buffers(arena, device_sms);
  w.bytes = arena.used();
  return w;
}

// Packed weights as a 3-D tensor of bytes [experts][rows][bytes of a row]; a box is 64 rows of one k-tile.
Status encode_weights(const uint8_t* weights, WeightFormat format, int experts, int rows, int k, int k_tile,
                      CUtensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return {cudaErrorSymbolNotFound, "the driver has no cuTensorMapEncodeTiled"};
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(weight_row_bytes(format, k));
  const int span = weight_row_bytes(format, k_tile);
  const cuuint64_t sizes[3] = {row_bytes, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(experts)};
  const cuuint64_t strides[2] = {row_bytes, row_bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(span), kRowHalf, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(weights), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, span == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {cudaErrorInvalidValue, "cuTensorMapEncodeTiled refused the weights"};
  return {};
}

// Where rows with scales are gathered from, kernels count 16-byte pieces in 32 bits.
Status check_activations(int64_t rows, int k) {
  if (rows * k / 16 > int64_t{UINT32_MAX}) return {cudaErrorInvalidValue, "activations of 64 GiB and more"};
  return {};
}

// Resident blocks of all SMs, at most as many as the split buffers serve.
Status grid_blocks(const GemmInstance& instance, Role role, int num_experts, const LaunchOptions& options,
                   int* blocks) {
  int per_sm = 0;
  if (const cudaError_t error = instance.blocks_per_sm(role, options, num_experts, &per_sm); error != cudaSuccess) {
    return {error, "this device does not grant the instance's shared memory"};
  }
  if (per_sm == 0) return {cudaErrorLaunchOutOfResources, "the instance does not fit an SM of this device"};
  const size_t parts = 2 * sizeof(float) * kRowTile * instance.token_tile;
  const int served = static_cast<int>(kPartialBytesPerSm / parts);
  *blocks = options.sm_count * std::min({per_sm, served, kMaxBlocksPerSm});
  return {};
}

Status launch_prologue(const PrologueParams& params, const LaunchOptions& options) {
  const bool sorts = params.offsets != nullptr;
  const int workers = std::min(std::max(params.num_tokens, 1), 4 * options.sm_count);
  const int sort_bytes = static_cast<int>(sizeof(int)) * ((kPrologueWarps + 1) * params.num_experts + 1);
  return {launch_kernel(moe_prologue_kernel, params, workers + (sorts ? 1 : 0), kPrologueThreads,
                        sorts ? sort_bytes : 0, options),
          "prologue"};
}

Status launch_arrange(const ArrangeParams& params, const LaunchOptions& options) {
  const int64_t row_eighths = 4 * kScaleChunkBlocks * scale_words(params.input.k);
  const int64_t wanted = (params.num_tokens * row_eighths + kArrangeThreads - 1) / kArrangeThreads;
  const int blocks = static_cast<int>(std::min<int64_t>(wanted, 8 * options.sm_count));
  return {launch_kernel(moe_arrange_kernel, params, blocks, kArrangeThreads, 0, options), "arranging of tokens"};
}

// What FC1 and FC2 share.
template <Role kRole>
Status fill_common(GroupedGemmParams<kRole>& g, const GemmInstance& instance, const uint8_t* weights,
                   const uint8_t* scales, int experts, int rows, int k, const SplitBuffers& split) {
  g.weight_scales = scales;
  g.weight_scale_pitch = swizzled_scale_bytes(rows, k);
  g.rows = rows;
  g.k = k;
  g.num_experts = experts;
  g.partials = split.partials;
  g.split_arrivals = split.arrivals + (kRole == Role::kFc2 ? split.blocks : 0);
  return encode_weights(weights, instance.weights, experts, rows, k, instance.k_tile, &g.weights);
}

TokenRows input_rows(const MoeArguments& a) {
  TokenFormat format = TokenFormat::kBf16;
  if (a.shape.mode == MoeMode::kQuantizeInput) {
    format = a.input_type == ScalarType::kF16 ? TokenFormat::kQuantizeF16 : TokenFormat::kQuantizeBf16;
  } else if (a.shape.mode == MoeMode::kMxfp8Input) {
    format = a.swizzled_input_sf ? TokenFormat::kMxfp8Swizzled : TokenFormat::kMxfp8Linear;
  }
  return {a.input, a.input_sf, format, a.shape.hidden};
}

// The stream of one GEMM of the layer; no groups: K is too long for the instance.
StreamedGemmPlan plan_stream(const GemmInstance& instance, Role role, int out, int k) {
  const StreamedInstance& s = instance.streamed;
  const bool fc1 = role == Role::kFc1;
  return {WeightFormat::kMxfp4, s.words, s.mma_warps, instance.token_tile, fc1 ? 2 : 1, out, k, 1, false};
}

Status run_streamed_moe(const MoeArguments& a, const LaunchOptions& options) {
  const MoeShape& s = a.shape;
  const StreamedInstance& instance = a.fc1_instance->streamed;
  const int entries = s.num_tokens * s.top_k;
  if (entries > kStreamEntries) {
    return {cudaErrorInvalidValue, "a streamed tactic takes at most 1024 (token, slot) pairs"};
  }
  if (!takes_sms(*a.fc1_instance, options)) {
    return {cudaErrorInvalidValue, "a streamed tactic needs all SMs of the device, and this stream has fewer"};
  }
  const MoeWorkspace w = lay_out(s, options.device_sms, a.workspace);
  if (w.bytes > a.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};

  StreamedLayerParams p = {};
  for (const void* bias : {a.fc1_bias, a.fc2_bias}) {
    if (reinterpret_cast<uintptr_t>(bias) % 16 != 0) {
      return {cudaErrorMisalignedAddress, "biases must start at a multiple of 16 bytes"};
    }
  }
  const StreamedGemmPlan plans[2] = {plan_stream(*a.fc1_instance, Role::kFc1, s.inter, s.hidden),
                                     plan_stream(*a.fc1_instance, Role::kFc2, s.hidden, s.inter)};
  for (int i = 0; i < 2; ++i) {
    p.gemm[i] = plans[i].make();
    if (p.gemm[i].groups == 0) return {cudaErrorInvalidValue, "K is too long for this streamed tactic"};
    p.stage_bytes = std::max(p.stage_bytes, plans[i].stage_bytes(p.gemm[i]));
  }
  p.stages = std::min((options.shared_bytes - instance.fixed_bytes) / p.stage_bytes, kMaxStreamStages);
  if (p.stages < 2 || p.stages * p.stage_bytes < StreamStorage::kRouting) {
    return {cudaErrorInvalidValue, "two stages of this streamed tactic do not fit shared memory"};
  }

  const int shared_bytes = p.stages * p.stage_bytes + instance.fixed_bytes;
  if (const cudaError_t error = instance.prepare(options)) {
    return {error, "this device does not grant the streamed tactic's shared memory"};
  }

  if (Status r = encode_scales(a.fc1_scales, s.num_experts, &p.gemm[0]); r.error) return r;
  if (Status r = encode_scales(a.fc2_scales, s.num_experts, &p.gemm[1]); r.error) return r;
  p.gemm[0].weights = a.fc1_weights;
  p.gemm[0].global_scale = a.fc1_global;
  p.gemm[0].bias = a.fc1_bias;
  p.gemm[0].bias_type = a.fc1_bias_type;
  p.gemm[1].weights = a.fc2_weights;
  p.gemm[1].global_scale = a.fc2_global;
  p.gemm[1].bias = a.fc2_bias;
  p.gemm[1].bias_type = a.fc2_bias_type;

  p.tokens = w.tokens;
  p.ids = a.ids;
  p.routing_weights = a.routing_weights;
  p.num_tokens = s.num_tokens;
  p.num_entries = entries;
  p.top_k = s.top_k;
  p.first_expert = a.first_expert;
  p.num_experts = s.num_experts;
  p.alpha = a.alpha;
  p.beta = a.beta;
  p.limit = a.limit;
  p.act = reinterpret_cast<float*>(w.act);
  p.contributions = w.contributions;
  p.blocks_done = reinterpret_cast<unsigned*>(w.split.arrivals);
  p.output = a.output;
  p.output_type = a.output_type;

  ArrangeParams arrange = {};
  arrange.input = input_rows(a);
  arrange.num_tokens = s.num_tokens;
  arrange.top_k = 1;
  arrange.tokens = w.tokens;
  arrange.counters = p.blocks_done;
  arrange.num_counters = 2;
  arrange.prefetch = a.ids;
  arrange.prefetch_bytes = entries * static_cast<int>(sizeof(int32_t));
  if (Status r = launch_arrange(arrange, options); r.error) return r;
  return {instance.launch(p, shared_bytes, options), "streamed layer"};
}

}  // namespace

const GemmInstance* find_instance(int index) {
  return index >= 0 && index < kMaxInstances ? registry()[index].load(std::memory_order_acquire) : nullptr;
}

void register_instance(const GemmInstance* instance) {
  registry()[instance->index].store(instance, std::memory_order_release);
}

bool takes_sms(const GemmInstance& instance, const LaunchOptions& options) {
  return instance.streamed.launch == nullptr || options.sm_count >= options.device_sms;
}

size_t moe_workspace_bytes(const MoeShape& shape, int device_sms) { return lay_out(shape, device_sms, nullptr).bytes; }

size_t group_gemm_workspace_bytes(int device_sms) {
  Arena arena(nullptr);
  take_split_buffers(arena, device_sms);
  return arena.used();
}

Status run_moe(const MoeArguments& a, const LaunchOptions& options) {
  if (a.fc1_instance->streamed.launch != nullptr || a.fc2_instance->streamed.launch != nullptr) {
    if (a.fc1_instance != a.fc2_instance) {
      return {cudaErrorInvalidValue, "a streamed tactic computes both GEMMs: FC1 and FC2 must name the same"};
    }
    return run_streamed_moe(a, options);
  }
  const MoeShape& s = a.shape;
  const int entries = s.num_tokens * s.top_k;
  const MoeWorkspace w = lay_out(s, options.device_sms, a.workspace);
  if (w.bytes > a.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};
  if (Status r = check_activations(entries, std::max(s.hidden, s.inter)); r.error) return r;
  if (a.fc1_instance->operand != a.fc2_instance->operand) {
    return {cudaErrorInvalidValue, "FC1 and FC2 must keep activations in the same type"};
  }
  const bool mxfp8 = a.fc1_instance->operand != Activation::kBf16;
  const bool kernels_route = mxfp8 && entries <= kInKernelEntries;
  const bool repack = mxfp8 && s.mode == MoeMode::kMxfp8Input && !a.swizzled_input_sf &&
                      s.hidden / kScaleBlock % kScaleChunkBlocks != 0;

  int fc1_blocks = 0, fc2_blocks = 0;
  if (Status r = grid_blocks(*a.fc1_instance, Role::kFc1, s.num_experts, options, &fc1_blocks); r.error) return r;
  if (Status r = grid_blocks(*a.fc2_instance, Role::kFc2, s.num_experts, options, &fc2_blocks); r.error) return r;

  GroupedGemmParams<Role::kFc1> fc1 = {};
  GroupedGemmParams<Role::kFc2> fc2 = {};
  if (Status r =
          fill_common(fc1, *a.fc1_instance, a.fc1_weights, a.fc1_scales, s.num_experts, 2 * s.inter, s.hidden, w.split);
      r.error) {
    return r;
  }
  if (Status r =
          fill_common(fc2, *a.fc2_instance, a.fc2_weights, a.fc2_scales, s.num_experts, s.hidden, s.inter, w.split);
      r.error) {
    return r;
  }

  PrologueParams prologue = {};
  prologue.num_tokens = s.num_tokens;
  prologue.hidden = s.hidden;
  prologue.quantized = w.tokens;
  prologue.quantized_scales = w.token_scales;
  if (mxfp8 && s.mode == MoeMode::kQuantizeInput) {
    prologue.input_kind = a.input_type == ScalarType::kBf16 ? TokenInput::kQuantizeBf16 : TokenInput::kQuantizeF16;
    prologue.input = a.input;
  } else if (repack) {
    prologue.input_kind = TokenInput::kRepackScales;
    prologue.input = a.input_sf;
  }
  prologue.ids = a.ids;
  prologue.num_entries = entries;
  prologue.top_k = s.top_k;
  prologue.first_expert = a.first_expert;
  prologue.num_experts = s.num_experts;
  prologue.offsets = kernels_route ? nullptr : w.offsets;
  prologue.order = kernels_route ? nullptr : w.order;
  prologue.positions = mxfp8 ? nullptr : w.positions;
  prologue.split_arrivals = w.split.arrivals;
  prologue.num_split_arrivals = 2 * w.split.blocks;
  prologue.token_arrivals = w.token_arrivals;
  prologue.row_tiles = ceil_div(s.hidden, kRowTile);
  prologue.output = a.output;
  prologue.output_type = a.output_type;

  auto route = [&](auto& gemm) {
    gemm.ids = a.ids;
    gemm.num_entries = entries;
    gemm.top_k = s.top_k;
    gemm.first_expert = a.first_expert;
    gemm.offsets = prologue.offsets;
    gemm.order = prologue.order;
  };
  route(fc1);
  route(fc2);

  const bool own_rows = !mxfp8 || s.mode == MoeMode::kQuantizeInput;
  fc1.tokens = own_rows ? w.tokens : static_cast<const uint8_t*>(a.input);
  if (mxfp8) {
    const bool own_scales = own_rows || repack;
    fc1.token_scales = reinterpret_cast<const uint32_t*>(own_scales ? w.token_scales : a.input_sf);
    fc1.token_scale_pitch = !own_scales && a.swizzled_input_sf ? 0 : scale_words(s.hidden);
  }
  fc1.epilogue = {a.fc1_global, a.fc1_bias, a.fc1_bias_type, a.alpha, a.beta, a.limit, w.act, w.act_scales};

  fc2.tokens = w.act;
  if (mxfp8) {
    fc2.token_scales = reinterpret_cast<const uint32_t*>(w.act_scales);
    fc2.token_scale_pitch = scale_words(s.inter);
  }
  fc2.epilogue = {a.fc2_global,    a.fc2_bias,       a.fc2_bias_type, a.routing_weights,
                  w.contributions, w.token_arrivals, a.output,        a.output_type};

  if (Status r = launch_prologue(prologue, options); r.error) return r;
  if (!mxfp8) {
    ArrangeParams arrange = {};
    arrange.input = input_rows(a);
    arrange.positions = w.positions;
    arrange.num_tokens = s.num_tokens;
    arrange.top_k = s.top_k;
    arrange.tokens = w.tokens;
    if (Status r = launch_arrange(arrange, options); r.error) return r;
  }
  if (const cudaError_t error = a.fc1_instance->fc1(fc1, fc1_blocks, options)) return {error, "FC1"};
  if (const cudaError_t error = a.fc2_instance->fc2(fc2, fc2_blocks, options)) return {error, "FC2"};
  return {};
}

Status run_group_gemm(const GroupGemmArguments& a, const LaunchOptions& options) {
  Arena arena(a.workspace);
  const SplitBuffers split = take_split_buffers(arena, options.device_sms);
  if (arena.used() > a.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};
  if (Status r = check_activations(a.cum_m, a.k); r.error) return r;
  int blocks = 0;
  if (Status r = grid_blocks(*a.instance, Role::kStore, a.num_groups, options, &blocks); r.error) return r;

  GroupedGemmParams<Role::kStore> gemm = {};
  if (Status r = fill_common(gemm, *a.instance, a.b, a.b_scales, a.num_groups, a.n, a.k, split); r.error) return r;
  gemm.tokens = static_cast<const uint8_t*>(a.a);
  gemm.token_scales = reinterpret_cast<const uint32_t*>(a.a_scales);
  gemm.token_scale_pitch = 0;
  gemm.top_k = 1;
  gemm.num_entries = a.cum_m;
  gemm.offsets = a.m_indptr;
  gemm.epilogue.output = a.output;
  gemm.epilogue.output_type = a.output_type;

  PrologueParams prologue = {};
  prologue.split_arrivals = split.arrivals;
  prologue.num_split_arrivals = split.blocks;
  if (Status r = launch_prologue(prologue, options); r.error) return r;
  return {a.instance->store(gemm, blocks, options), "grouped GEMM"};
}

namespace {

// What the prologue makes of rows of a format, so that they are rows of the operand with scales in words, and whether that
// needs memory.
struct AsOperand {
  TokenInput made;
  bool values, scales;
};

AsOperand as_operand(Activation operand, TokenFormat format, int k) {
  switch (format) {
    case TokenFormat::kQuantizeBf16: return {TokenInput::kQuantizeBf16, true, true};
    case TokenFormat::kQuantizeF16: return {TokenInput::kQuantizeF16, true, true};
    case TokenFormat::kQuantizeBf16ToMxfp4: return {TokenInput::kQuantizeBf16ToMxfp4, true, true};
    case TokenFormat::kQuantizeF16ToMxfp4: return {TokenInput::kQuantizeF16ToMxfp4, true, true};
    case TokenFormat::kMxfp4Swizzled:
      if (operand != Activation::kE2m1) return {TokenInput::kWidenMxfp4, true, false};
      break;
    case TokenFormat::kMxfp8Linear:
      if (k % kScaleChunkElements != 0) return {TokenInput::kRepackScales, false, true};
      break;  // whole words
    default: break;
  }
  return {TokenInput::kAsIs, false, false};
}

struct DenseGemmWorkspace {
  uint8_t* tokens;        // arranged bfloat16, or e4m3, or packed e2m1
  uint8_t* token_scales;  // words of four
  SplitBuffers split;
  size_t bytes;
};

DenseGemmWorkspace lay_out_dense(const GemmInstance& instance, int num_tokens, int k, TokenFormat format,
                                 int device_sms, uint8_t* base) {
  Arena arena(base);
  DenseGemmWorkspace w = {};
  if (instance.operand == Activation::kBf16) {
    w.tokens = arena.take<uint8_t>(arranged_bytes(num_tokens, k));
  } else {
    const AsOperand rows = as_operand(instance.operand, format, k);
    const size_t tokens = static_cast<size_t>(num_tokens);
    if (rows.values) w.tokens = arena.take<uint8_t>(tokens * (k / kScaleBlock) * block_bytes(instance.operand));
    if (rows.scales) w.token_scales = arena.take<uint8_t>(tokens * kScaleChunkBlocks * scale_words(k));
  }
  w.split = take_split_buffers(arena, device_sms);
  w.bytes = arena.used();
  return w;
}

Status launch_arrange_rows(const DenseGemmArguments& a, const DenseGemmWorkspace& w, const LaunchOptions& options,
                           GroupedGemmParams<Role::kStore>* gemm) {
  gemm->tokens = w.tokens;
  const ArrangeRowsParams arrange = {a.tokens, a.num_tokens,     a.instance->weights,
                                     w.tokens, w.split.arrivals, w.split.blocks};
  const int64_t wanted =
      (static_cast<int64_t>(a.num_tokens) * kScaleChunkBlocks * scale_words(a.k) + kArrangeRowsThreads - 1) /
      kArrangeRowsThreads;
  const int blocks = static_cast<int>(std::min<int64_t>(wanted, 8 * options.sm_count));
  return {launch_kernel(arrange_rows_kernel, arrange, blocks, kArrangeRowsThreads, 0, options), "arranging of rows"};
}

// Rows of the operand's format are read where they are; others are made into such.
Status launch_rows_as_operand(const DenseGemmArguments& a, const DenseGemmWorkspace& w, const LaunchOptions& options,
                              GroupedGemmParams<Role::kStore>* gemm) {
  const TokenFormat format = a.tokens.format;
  const bool to_mxfp4 = are_mxfp4(format) && !have_scales(format);
  if (a.instance->operand == Activation::kE2m1 && !are_mxfp4(format)) {
    return {cudaErrorInvalidValue,
            "this dense tactic multiplies MXFP4 tokens: they must come so or be rounded to MXFP4"};
  }
  if (a.instance->operand != Activation::kE2m1 && (format == TokenFormat::kBf16 || to_mxfp4)) {
    return {cudaErrorInvalidValue,
            "this dense tactic multiplies MXFP8 tokens: they must come quantized or be rounded to MXFP8"};
  }
  const AsOperand rows = as_operand(a.instance->operand, format, a.k);
  const uint8_t* scales = a.tokens.scales;
  PrologueParams prologue = {};
  prologue.num_tokens = a.num_tokens;
  prologue.hidden = a.k;
  prologue.input_kind = rows.made;
  prologue.input = rows.made == TokenInput::kRepackScales ? scales : a.tokens.data;
  prologue.quantized = w.tokens;
  prologue.quantized_scales = w.token_scales;
  prologue.split_arrivals = w.split.arrivals;
  prologue.num_split_arrivals = w.split.blocks;

  const bool swizzled =
      a.tokens.format == TokenFormat::kMxfp8Swizzled || a.tokens.format == TokenFormat::kMxfp4Swizzled;
  if (!rows.scales && reinterpret_cast<uintptr_t>(scales) % sizeof(uint32_t) != 0) {
    return {cudaErrorMisalignedAddress, "scales of tokens must start at a multiple of 4 bytes"};
  }
  gemm->tokens = rows.values ? w.tokens : static_cast<const uint8_t*>(a.tokens.data);
  gemm->token_scales = reinterpret_cast<const uint32_t*>(rows.scales ? w.token_scales : scales);
  gemm->token_scale_pitch = swizzled ? 0 : scale_words(a.k);
  return launch_prologue(prologue, options);
}

// Blocks of a dense GEMM. A unit for each, where that leaves an SM12x busy enough to draw what its memory gives: parts of
// units that are cut are written and read again, up to a third as many bytes as a small layer's weights. Two blocks in five
// SMs keep 0.7 MB of a GB10's weights on their way, three times what its latency asks for; wide tiles have arithmetic
// besides, which needs more of the SMs. `blocks` fill the device.
int dense_blocks(const DenseGemmArguments& a, const LaunchOptions& options, int blocks) {
  const int64_t units = static_cast<int64_t>(ceil_div(a.n, kRowTile)) * ceil_div(a.num_tokens, a.instance->token_tile);
  const int busy_percent = a.instance->token_tile <= 64 ? 40 : 75;
  const bool whole = options.sm12x && units <= blocks && 100 * units >= busy_percent * int64_t{options.sm_count};
  return whole ? static_cast<int>(units) : blocks;
}

}  // namespace

size_t dense_gemm_workspace_bytes(const GemmInstance& instance, int num_tokens, int k, TokenFormat format,
                                  int device_sms) {
  return lay_out_dense(instance, num_tokens, k, format, device_sms, nullptr).bytes;
}

Status run_dense_gemm(const DenseGemmArguments& a, const LaunchOptions& options) {
  const DenseGemmWorkspace w =
      lay_out_dense(*a.instance, a.num_tokens, a.k, a.tokens.format, options.device_sms, a.workspace);
  if (w.bytes > a.workspace_bytes) return {cudaErrorInvalidValue, "the workspace is too small"};
  if (Status r = check_activations(a.num_tokens, 2 * a.k); r.error) return r;
  int blocks = 0;
  if (Status r = grid_blocks(*a.instance, Role::kStore, 1, options, &blocks); r.error) return r;

  GroupedGemmParams<Role::kStore> gemm = {};
  if (Status r = fill_common(gemm, *a.instance, a.weights, a.weight_scales, 1, a.n, a.k, w.split); r.error) return r;
  gemm.top_k = 1;
  gemm.num_entries = a.num_tokens;
  gemm.epilogue = a.epilogue;
  // Launched also where rows need nothing: it zeroes the counters, and since it waits for the launch in front before it lets
  // the GEMM begin, the GEMM may read weights at once, whoever wrote them.
  const auto launch_rows = a.instance->operand == Activation::kBf16 ? launch_arrange_rows : launch_rows_as_operand;
  if (Status r = launch_rows(a, w, options, &gemm); r.error) return r;
  return {a.instance->store(gemm, dense_blocks(a, options, blocks), options), "dense GEMM"};
}

}  // namespace flashinfer::sm12x
