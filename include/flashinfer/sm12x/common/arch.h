// SPDX-License-Identifier: Apache-2.0
//
// What an SM120/SM121 is, on the device side. Everything in this family that depends on the architecture reads it
// from here: detection, limits, and the few numbers of the MXFP4/MXFP8 formats that kernels and launchers share.
#pragma once

#include <cstdint>

// Set to 1 on the command line, what a kind of block-scaled MMA would multiply, MXFP8 tokens or packed MXFP4 ones, meets weights
// in half precision on SM12x too, with float32 sums: for a GPU whose MMA of that kind turns out to add up in fewer bits.
#if !defined(FLASHINFER_SM12X_HALF_MXF8F6F4)
#define FLASHINFER_SM12X_HALF_MXF8F6F4 0
#endif
#if !defined(FLASHINFER_SM12X_HALF_MXF4)
#define FLASHINFER_SM12X_HALF_MXF4 0
#endif

// Which device the device code of this compilation pass is for. Block-scaled MMA and FP4 conversion exist only under an
// architecture-specific ("a") or family-specific ("f") target: nvcc announces those through the macros below.
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || defined(__CUDA_ARCH_SPECIFIC__) || \
    defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#define FLASHINFER_SM12X_DEVICE 1
#else
static_assert(sizeof(char) == 0,
              "SM12x needs an architecture-specific target: FLASHINFER_CUDA_ARCH_LIST=12.1a (or 12.1f, 12.0a, 12.0f)");
#endif
#elif __CUDA_ARCH__ < 890
static_assert(sizeof(char) == 0, "the SM12x MXFP4 family needs compute capability 8.9, 9.0 or 12.x");
#endif
#endif

#if !defined(FLASHINFER_SM12X_DEVICE)
#define FLASHINFER_SM12X_DEVICE 0
#endif

namespace flashinfer::sm12x {

// CUDA programming guide, technical specifications of compute capability 12.x.
struct Sm12xLimits {
  static constexpr int kSharedBytesPerSm = 102'400;
  static constexpr int kSharedBytesPerBlock = 101'376;
  static constexpr int kSharedBytesReservedPerBlock = 1'024;
};

// The same of 9.0, on which the kernels are measured.
struct HopperLimits {
  static constexpr int kSharedBytesPerSm = 233'472;
  static constexpr int kSharedBytesReservedPerBlock = 1'024;
};

// OCP Microscaling Formats v1.0, section 5.2 and 6.3: one UE8M0 scale for 32 elements along K.
constexpr int kScaleBlock = 32;
constexpr uint8_t kNanScale = 0xFF;

// The 128x4 layout keeps the scales of 128 rows x 4 K-blocks in 512 contiguous bytes.
constexpr int kScaleChunkRows = 128;
constexpr int kScaleChunkBlocks = 4;
constexpr int kScaleChunkElements = kScaleChunkBlocks * kScaleBlock;
constexpr int kScaleChunkBytes = kScaleChunkRows * kScaleChunkBlocks;

// Weight rows of a tile, in two halves of 64: one TMA box each. FC1 takes one half from the up rows and one from the
// gate rows, so that a thread ends up with both operands of SwiGLU.
constexpr int kRowTile = 128;
constexpr int kRowHalf = kRowTile / 2;

// (token, slot) pairs that a block routes by itself instead of waiting for the prologue kernel.
constexpr int kInKernelEntries = 256;
constexpr int kMaxLocalExperts = 512;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;  // of a warp

// Activations as they lie in memory; e2m1 two to a byte.
enum class Activation : int { kE4m3 = 0, kE5m2 = 1, kBf16 = 2, kE2m1 = 3 };

// Whether SM12x multiplies tokens of this kind by an MMA that takes both operands' scales.
constexpr bool meets_block_scaled_mma(Activation operand) {
  if (operand == Activation::kE2m1) return !FLASHINFER_SM12X_HALF_MXF4;
  return operand != Activation::kBf16 && !FLASHINFER_SM12X_HALF_MXF8F6F4;
}

// Bytes of a block of 32 elements.
constexpr int block_bytes(Activation activation) {
  return activation == Activation::kBf16 ? 2 * kScaleBlock : kScaleBlock / (activation == Activation::kE2m1 ? 2 : 1);
}

static_assert(kScaleChunkBytes == 512 && kScaleChunkElements == 128, "128x4 scale chunks");

}  // namespace flashinfer::sm12x
