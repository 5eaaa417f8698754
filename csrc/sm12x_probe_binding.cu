// SPDX-License-Identifier: Apache-2.0
//
// TVM-FFI face of the kernels that measure a GPU (flashinfer_sm12x/doctor/probe): its memory, its MMAs, its launches
// and the order of its arrivals. Sizes are checked here, before any launch.
#include "flashinfer/sm12x/launch.h"
#include "flashinfer/sm12x/probe/arrival_order.cuh"
#include "flashinfer/sm12x/probe/bulk_read.cuh"
#include "flashinfer/sm12x/probe/launch_order.cuh"
#include "flashinfer/sm12x/probe/mma_rate.cuh"
#include "flashinfer/sm12x/probe/streaming_read.cuh"
#include "sm12x_binding_utils.h"

namespace flashinfer::sm12x::probe {

using tvm::ffi::TensorView;

void require_size(const TensorView& tensor, int64_t elements, int bits, const char* name) {
  TVM_FFI_CHECK(tensor.numel() == elements && tensor.dtype().bits == bits, ValueError)
      << name << " has " << tensor.numel() << " elements of " << static_cast<int>(tensor.dtype().bits)
      << " bits; it must have " << elements << " of " << bits;
}

void require_range(int64_t value, int64_t low, int64_t high, const char* name) {
  TVM_FFI_CHECK(low <= value && value <= high, ValueError)
      << name << " is " << value << "; it must be from " << low << " to " << high;
}

void check(cudaError_t error, const char* what) { check_status({error, what}); }

// pieces: int64 [n], addresses; vectors: int32 [n]; sums: int32 [n, 16].
void streaming_read(TensorView pieces, TensorView vectors, TensorView sums) {
  const int64_t blocks = pieces.size(0);
  require_range(blocks, 1, INT_MAX, "the number of pieces");
  require_size(pieces, blocks, 64, "pieces");
  require_size(vectors, blocks, 32, "vectors");
  require_size(sums, blocks * kReadWarps, 32, "sums");
  const StreamingReadParams params = {data<const uint4*>(pieces), data<int32_t>(vectors), data<uint32_t>(sums)};
  check(launch_kernel(streaming_read_kernel, params, static_cast<int>(blocks), kReadThreads, 0,
                      launch_options(pieces, false)),
        "streaming read");
}

// pieces: int64 [n], addresses; vectors: int32 [n]; sums: int32 [blocks, 8].
void bulk_read(TensorView pieces, TensorView vectors, TensorView sums) {
  const int64_t count = pieces.size(0), blocks = sums.size(0);
  require_range(count, 1, INT_MAX, "the number of pieces");
  require_size(pieces, count, 64, "pieces");
  require_size(vectors, count, 32, "vectors");
  LaunchOptions options = launch_options(pieces, false);
  require_range(blocks, 1, options.device_sms, "the number of blocks");
  require_size(sums, blocks * kBulkReadWarps, 32, "sums");
  require_range(kBulkReadSharedBytes, 0, options.shared_bytes, "the shared memory of three stages");
  check(grant_shared_memory(bulk_read_kernel, options), "shared memory");
  const BulkReadParams params = {data<const uint4*>(pieces), data<int32_t>(vectors), data<uint32_t>(sums),
                                 static_cast<int>(count)};
  check(launch_kernel(bulk_read_kernel, params, static_cast<int>(blocks), kBulkReadThreads, kBulkReadSharedBytes,
                      options),
        "bulk read");
}

// a: uint8 [16, 32]; b: uint8 [8, 8, 32]; c: float32 [16, 8]; d: float32 [blocks, warps, 8, 16, 8]; times: int64
// [blocks, 4].
void mma_rate(TensorView a, TensorView b, TensorView c, TensorView d, TensorView times, int64_t kind, int64_t scale_a,
              int64_t scale_b, int64_t iterations) {
  using Kernel = void (*)(MmaRateParams);
  static constexpr Kernel kKernels[kMmaKinds] = {mma_rate_kernel<MmaKind::kBf16>, mma_rate_kernel<MmaKind::kF16>,
                                                 mma_rate_kernel<MmaKind::kMxf8f6f4>, mma_rate_kernel<MmaKind::kMxf4>};
  require_range(kind, 0, kMmaKinds - 1, "kind");
  require_range(iterations, 0, INT_MAX, "iterations");
  const LaunchOptions options = launch_options(a, false);
  TVM_FFI_CHECK(options.sm12x || !needs_sm12x(static_cast<MmaKind>(kind)), ValueError)
      << "kind is " << kind << ", a block-scaled MMA, which needs compute capability 12.x; 0 and 1 run here";
  const int64_t blocks = d.size(0), warps = d.size(1);
  require_range(blocks, 1, INT_MAX, "the number of blocks");
  require_range(warps, 1, kMmaMaxWarps, "the number of warps");
  require_size(a, kMmaRows * 4 * kMmaRowWords, 8, "a");
  require_size(b, kMmaChains * kMmaColumns * 4 * kMmaRowWords, 8, "b");
  require_size(c, kMmaRows * kMmaColumns, 32, "c");
  require_size(d, blocks * warps * kMmaChains * kMmaRows * kMmaColumns, 32, "d");
  require_size(times, blocks * 4, 64, "times");
  const MmaRateParams params = {data<uint32_t>(a),
                                data<uint32_t>(b),
                                data<float>(c),
                                data<float>(d),
                                data<int64_t>(times),
                                static_cast<uint32_t>(scale_a),
                                static_cast<uint32_t>(scale_b),
                                static_cast<int>(iterations)};
  check(launch_kernel(kKernels[kind], params, static_cast<int>(blocks), static_cast<int>(32 * warps), 0, options),
        "MMAs");
}

enum class LaunchKind : int64_t { kPlain, kDependent, kCooperative };

// steps: int32 [launches + 1]; as many launches as that, one behind the other, of `blocks` blocks; of kind 0 (plain),
// 1 (programmatic stream serialization) or 2 (cooperative).
void launch_steps(TensorView steps, int64_t kind, int64_t blocks) {
  require_range(kind, 0, 2, "kind");
  require_range(steps.numel(), 2, INT_MAX, "the number of steps");
  require_size(steps, steps.numel(), 32, "steps");
  const auto how = static_cast<LaunchKind>(kind);
  const LaunchOptions options = launch_options(steps, how == LaunchKind::kDependent);
  require_range(blocks, 1, options.device_sms, "the number of blocks");
  for (int index = 0; index + 1 < steps.numel(); ++index) {
    const LaunchStepParams params = {data<int32_t>(steps), index};
    check(launch_kernel(launch_step_kernel, params, static_cast<int>(blocks), kOrderThreads, 0, options,
                        how == LaunchKind::kCooperative),
          "a chain of launches");
  }
}

// first, second: int64 [blocks, 3], of two launches; the first one works for so many cycles, the second one has so many
// bytes of shared memory and may begin before the first one ends if `dependent`.
void launch_overlap(TensorView first, TensorView second, int64_t cycles, int64_t shared_bytes, bool dependent) {
  const int64_t blocks = first.size(0);
  require_range(cycles, 0, INT_MAX, "cycles");
  LaunchOptions options = launch_options(first, false);
  require_range(blocks, 1, options.device_sms, "the number of blocks");
  require_range(shared_bytes, 0, options.shared_bytes, "shared_bytes");
  require_size(first, 3 * blocks, 64, "first");
  require_size(second, 3 * blocks, 64, "second");
  check(grant_shared_memory(launch_overlap_kernel, options), "shared memory");
  const LaunchOverlapParams busy = {data<int64_t>(first), cycles}, idle = {data<int64_t>(second), 0};
  check(launch_kernel(launch_overlap_kernel, busy, static_cast<int>(blocks), kOrderThreads, 0, options),
        "first launch");
  options.dependent_launch = dependent;
  check(launch_kernel(launch_overlap_kernel, idle, static_cast<int>(blocks), kOrderThreads,
                      static_cast<int>(shared_bytes), options),
        "second launch");
}

// source: int32 [64, 128]; counts: int32 [blocks, 8, 2].
void arrival_order(TensorView source, TensorView counts, int64_t rounds, bool fenced, bool copies) {
  using Kernel = void (*)(ArrivalOrderParams);
  static constexpr Kernel kKernels[2][2] = {
      {arrival_order_kernel<false, Handover::kStores>, arrival_order_kernel<false, Handover::kCopies>},
      {arrival_order_kernel<true, Handover::kStores>, arrival_order_kernel<true, Handover::kCopies>}};
  const int64_t blocks = counts.size(0);
  require_range(blocks, 1, INT_MAX, "the number of blocks");
  require_range(rounds, 0, INT_MAX / kOrderStageWords, "rounds");
  require_size(source, kOrderSourceRounds * kOrderStageWords, 32, "source");
  require_size(counts, blocks * kOrderPairs * 2, 32, "counts");
  const ArrivalOrderParams params = {data<uint32_t>(source), data<uint32_t>(counts), static_cast<int>(rounds)};
  check(launch_kernel(kKernels[fenced][copies], params, static_cast<int>(blocks), 64 * kOrderPairs, 0,
                      launch_options(source, false)),
        "arrivals");
}

}  // namespace flashinfer::sm12x::probe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_probe_streaming_read, flashinfer::sm12x::probe::streaming_read);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_probe_bulk_read, flashinfer::sm12x::probe::bulk_read);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_probe_mma_rate, flashinfer::sm12x::probe::mma_rate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_probe_launch_steps, flashinfer::sm12x::probe::launch_steps);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_probe_launch_overlap, flashinfer::sm12x::probe::launch_overlap);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_probe_arrival_order, flashinfer::sm12x::probe::arrival_order);
