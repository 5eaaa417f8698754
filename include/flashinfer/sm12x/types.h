// SPDX-License-Identifier: Apache-2.0
//
// The vocabulary of the family, for host and device: element types, token formats and roles; the sizes of the
// block-scaled formats and the 128x4 layout of their scales; the limits of SM120/SM121. All code of this family that
// depends on the architecture takes it from here.
//
// K is counted in scale blocks of 32 elements and in K blocks of 128, which are four scale blocks.
//
// The 128x4 ("swizzled", SFA/SFB) layout of block scales, seen as 32-bit scale words: a word holds one row's scales of
// one K block, byte i for scale block 4w + i (of NVFP4 half a K block, which has eight scales). Rows are padded to 128,
// scales to 4.
#pragma once

#include <cstdint>

// 1, on the command line: use half-precision MMAs with float32 sums in place of this block-scaled kind on SM12x, too,
// for a GPU whose MMA of that kind (MXFP8 tokens, packed MXFP4 ones) turns out to add up in fewer bits.
#if !defined(FLASHINFER_SM12X_HALF_MXF8F6F4)
#define FLASHINFER_SM12X_HALF_MXF8F6F4 0
#endif
#if !defined(FLASHINFER_SM12X_HALF_MXF4)
#define FLASHINFER_SM12X_HALF_MXF4 0
#endif

// FLASHINFER_SM12X_DEVICE: 1 if this compilation pass makes device code for SM12x. Block-scaled MMA and FP4 conversion
// exist only under an architecture-specific ("a") or family-specific ("f") target: nvcc announces those through the
// macros below.
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

#if defined(__CUDACC__)
#define FLASHINFER_SM12X_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHINFER_SM12X_HOST_DEVICE inline
#endif

namespace flashinfer::sm12x {

// The type of a token or a weight, in memory and as an MMA takes it. MXFP8 is e4m3 (tokens of the grouped GEMM may be
// e5m2), MXFP4 is e2m1, two to a byte, each with a UE8M0 scale for 32 elements. Weights of dense layers besides: MXFP6
// is e2m3 (packed as below), MXINT8 is int8 in 64ths, with such scales, too. NVFP4 is kNvE2m1: e2m1 with an
// E4M3 scale for 16 elements.
enum class Element : int { kE4m3 = 0, kE5m2 = 1, kBf16 = 2, kE2m1 = 3, kE2m3 = 4, kInt8 = 5, kNvE2m1 = 6 };

// Biases and outputs, by the caller's choice.
enum class ScalarType : int { kBf16 = 0, kF16 = 1, kF32 = 2 };

// How the caller gives tokens, and the format that they are rounded to.
enum class TokenFormat : int {
  kBf16 = 0,  // as they are
  kQuantizeBf16 = 1,  // rounded to MXFP8
  kQuantizeF16 = 2,
  kMxfp8Swizzled = 3,  // e4m3, scales in the 128x4 layout
  kMxfp8Linear = 4,  // e4m3, scales [tokens, k / 32]
  kMxfp4Swizzled = 5,  // e2m1, scales in the 128x4 layout; this and what follows of dense layers
  kQuantizeBf16ToMxfp4 = 6,
  kQuantizeF16ToMxfp4 = 7,
  kMxfp6Swizzled = 8,  // this and what follows: rows of weights, to be dequantized
  kMxint8Swizzled = 9,
  kNvfp4Swizzled = 10,  // without their global scale
};

constexpr int kTokenFormats = static_cast<int>(TokenFormat::kNvfp4Swizzled) + 1;

// Whether rows are multiplied as MXFP4's values.
constexpr bool are_mxfp4(TokenFormat format) {
  return format == TokenFormat::kMxfp4Swizzled || format == TokenFormat::kQuantizeBf16ToMxfp4 ||
         format == TokenFormat::kQuantizeF16ToMxfp4;
}
constexpr bool have_scales(TokenFormat format) {
  return format == TokenFormat::kMxfp8Swizzled || format == TokenFormat::kMxfp8Linear ||
         format == TokenFormat::kMxfp4Swizzled || format >= TokenFormat::kMxfp6Swizzled;
}
// The element type of rows that have scales (have_scales).
constexpr Element element_of(TokenFormat format) {
  switch (format) {
    case TokenFormat::kMxfp4Swizzled: return Element::kE2m1;
    case TokenFormat::kMxfp6Swizzled: return Element::kE2m3;
    case TokenFormat::kMxint8Swizzled: return Element::kInt8;
    case TokenFormat::kNvfp4Swizzled: return Element::kNvE2m1;
    default: return Element::kE4m3;
  }
}

struct TokenRows {
  const void* data;  // [rows, k], e2m1 two to a byte
  const uint8_t* scales;  // null unless have_scales(format)
  TokenFormat format;
  int k;
};

constexpr int kRouterMaxExperts = 512;  // columns of a router's logits: the experts of all ranks

// Memory that the next launches read in any case. Blocks prefetch it into L2 once they have requested all of their own
// weights. It changes no result.
struct L2Prefetch {
  const void* data;  // aligned to 16, or null
  int64_t bytes;  // a multiple of 16
};

// The format in which a MoE layer's caller gives activations, and in which they are multiplied.
enum class MoeMode : int { kMxfp8Input = 0, kBf16Input = 1, kW4A16 = 2 };

// The use of a tiled grouped GEMM: where token rows come from and what happens to the accumulators.
enum class Role : int {
  kFc1 = 0,  // token rows in permuted order, MXFP8 through `order`, bf16 packed so; bias, activation, requantization
  kFc2 = 1,  // token rows in permuted order; bias, routing weight, top-k sum
  kStore = 2,  // token rows in group order; plain store
};

FLASHINFER_SM12X_HOST_DEVICE constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

FLASHINFER_SM12X_HOST_DEVICE constexpr int round_up(int value, int multiple) {
  return ceil_div(value, multiple) * multiple;
}

// OCP Microscaling Formats v1.0, section 5.2 and 6.3: one UE8M0 scale for 32 elements along K.
constexpr int kScaleBlock = 32;  // elements
constexpr uint8_t kNanScale = 0xFF;

// A scale chunk: the 128x4 layout keeps the scales of 128 rows x 4 scale blocks in 512 contiguous bytes.
constexpr int kScaleChunkRows = 128;
constexpr int kScaleChunkBlocks = 4;
constexpr int kScaleChunkBytes = kScaleChunkRows * kScaleChunkBlocks;
constexpr int kKBlock = 128;  // elements
static_assert(kScaleChunkBytes == 512 && kKBlock == kScaleChunkBlocks * kScaleBlock, "128x4 scale chunks");

// Bytes of a scale block, 32 elements, and of a K block, 128.
FLASHINFER_SM12X_HOST_DEVICE constexpr int block_bytes(Element element) {
  switch (element) {
    case Element::kBf16: return 2 * kScaleBlock;
    case Element::kE2m1:
    case Element::kNvE2m1: return kScaleBlock / 2;
    case Element::kE2m3: return kScaleBlock * 3 / 4;
    default: return kScaleBlock;
  }
}
FLASHINFER_SM12X_HOST_DEVICE constexpr int k_block_bytes(Element element) {
  return kScaleChunkBlocks * block_bytes(element);
}

// Bulk copies and tensor maps take multiples of 16 bytes: a row of MXFP6 with an odd number of blocks ends in 8 bytes
// that nobody reads.
FLASHINFER_SM12X_HOST_DEVICE constexpr int row_bytes(Element element, int k) {
  return round_up(k / kScaleBlock * block_bytes(element), 16);
}
// Elements of such a row.
FLASHINFER_SM12X_HOST_DEVICE constexpr int row_elements(Element element, int bytes) {
  return bytes / block_bytes(element) * kScaleBlock;
}

// MXFP6: a K block has two planes, 16 bytes of each scale block and then 8 bytes of each, so that loads are aligned.
// The last K block of a row may be shorter. An element is s e1 e0 m2 m1 m0.
//
//   nibbles    e0 m2 m1 m0 of element i in nibble i, as e2m1 lies in MXFP4
//   pairs      s e1: of element 16 h + 8 e + i (e = 0, 1; i < 8), e1 is bit 8 (i / 2) + r and s bit 8 (i / 2) + 7 + r
//              (mod 32) of 32-bit word h, r = 4 e + 2 (i % 2)
//
// Rotated right by r, a word of pairs has in each byte the two bits that one element's nibble lacks: four elements at
// a time.
constexpr int kNibbleBytes = 16, kPairBytes = 8;  // of a scale block

// Whether lane t of a quad takes elements 8t..8t + 7 of a scale block as an MMA's operand ("eights"); other formats
// give it elements 4t..4t + 3 and 16 + 4t..16 + 4t + 3.
FLASHINFER_SM12X_HOST_DEVICE constexpr bool lanes_take_eights(Element weights) {
  return weights == Element::kE2m1 || weights == Element::kNvE2m1 || weights == Element::kE2m3;
}

// Elements that share a scale, and the scale words, of four scales each, of a row with k elements.
FLASHINFER_SM12X_HOST_DEVICE constexpr int elements_per_scale(Element element) {
  return element == Element::kNvE2m1 ? kScaleBlock / 2 : kScaleBlock;
}
FLASHINFER_SM12X_HOST_DEVICE constexpr int scale_words(Element element, int k) {
  return ceil_div(k, kScaleChunkBlocks * elements_per_scale(element));
}
// Scale words of a K block: 1, or 2 of NVFP4.
FLASHINFER_SM12X_HOST_DEVICE constexpr int scale_words_of_k_block(Element element) {
  return scale_words(element, kKBlock);
}

// K blocks of a row with k elements.
FLASHINFER_SM12X_HOST_DEVICE constexpr int k_blocks_of(int k) { return ceil_div(k, kKBlock); }

// Scale words of a row in a format with one scale for 32 elements.
FLASHINFER_SM12X_HOST_DEVICE constexpr int scale_words(int k) { return k_blocks_of(k); }

// Scale word of `row` inside its 128-row chunk.
FLASHINFER_SM12X_HOST_DEVICE constexpr int word_in_chunk(int row) {
  return (row % 32) * 4 + (row % kScaleChunkRows) / 32;
}

// Where a row's scale words lie: word w at `base + w * stride`.
struct ScaleRow {
  int64_t base;
  int stride;
};

FLASHINFER_SM12X_HOST_DEVICE ScaleRow swizzled_scale_row(int64_t row, int words) {
  return {(row / kScaleChunkRows) * words * kScaleChunkRows + word_in_chunk(static_cast<int>(row % kScaleChunkRows)),
          kScaleChunkRows};
}

// Byte of scale number `scale` of a row.
FLASHINFER_SM12X_HOST_DEVICE int64_t swizzled_scale_place(int64_t row, int scale, int words) {
  const ScaleRow at = swizzled_scale_row(row, words);
  const int64_t word = at.base + static_cast<int64_t>(scale / kScaleChunkBlocks) * at.stride;
  return kScaleChunkBlocks * word + scale % kScaleChunkBlocks;
}

FLASHINFER_SM12X_HOST_DEVICE ScaleRow linear_scale_row(int64_t row, int pitch_words) { return {row * pitch_words, 1}; }

// Bytes of one matrix's scales in the 128x4 layout.
FLASHINFER_SM12X_HOST_DEVICE constexpr int64_t swizzled_scale_bytes(Element element, int rows, int k) {
  return static_cast<int64_t>(round_up(rows, kScaleChunkRows)) * scale_words(element, k) * kScaleChunkBlocks;
}

// Weight rows of a tile, in two M64 halves: one TMA box each. FC1 takes one half from its up rows and one from its
// gate rows, if it has these, so that a thread ends up with both operands of SwiGLU.
constexpr int kBlockM = 128;
constexpr int kM64Rows = 64;
static_assert(2 * kM64Rows == kBlockM);

// routed rows that a block routes by itself instead of waiting for the prologue kernel.
constexpr int kInKernelRoutedRows = 256;
constexpr int kMaxLocalExperts = 512;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;  // of a warp

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

// Whether SM12x multiplies tokens of this kind by an MMA that takes both operands' scales.
constexpr bool uses_block_scaled_mma(Element compute_type) {
  if (compute_type == Element::kE2m1) return !FLASHINFER_SM12X_HALF_MXF4;
  return compute_type != Element::kBf16 && !FLASHINFER_SM12X_HALF_MXF8F6F4;
}

}  // namespace flashinfer::sm12x
