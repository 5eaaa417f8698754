// SPDX-License-Identifier: Apache-2.0
// Sizes of tensor-map elements, shared by the files of this folder.
#pragma once

#include <cstdint>

#include "tma.h"

namespace vsm::tma {

/// How elements lie in memory. The packed 4- and 6-bit types move in groups of 16 elements, which are contiguous in
/// global memory and padded to `shared_bytes` in shared memory; for all others a group is one element.
struct Group {
  uint32_t elements;
  uint32_t global_bytes;
  uint32_t shared_bytes;
};

inline Group group_of(ElementType type) {
  switch (type) {
    case ElementType::kU8: return {1, 1, 1};
    case ElementType::kU16:
    case ElementType::kF16:
    case ElementType::kBF16: return {1, 2, 2};
    case ElementType::kU64:
    case ElementType::kS64:
    case ElementType::kF64: return {1, 8, 8};
    case ElementType::k16U4Align8B: return {16, 8, 8};
    case ElementType::k16U4Align16B: return {16, 8, 16};
    case ElementType::k16U6Align16B: return {16, 12, 16};
    default: return {1, 4, 4};
  }
}

inline bool is_packed(ElementType type) { return group_of(type).elements != 1; }
/// 16U4_ALIGN16B and 16U6_ALIGN16B: groups with gaps between them in shared memory.
inline bool is_padded(ElementType type) { return is_packed(type) && type != ElementType::k16U4Align8B; }

inline bool is_float(ElementType type) {
  switch (type) {
    case ElementType::kF16:
    case ElementType::kF32:
    case ElementType::kF64:
    case ElementType::kBF16:
    case ElementType::kF32Ftz:
    case ElementType::kTF32:
    case ElementType::kTF32Ftz: return true;
    default: return false;
  }
}

/// Bytes of a swizzle's span: the box's rows may not be longer. 0 without a swizzle.
inline uint32_t swizzle_span(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone: return 0;
    case Swizzle::k32B: return 32;
    case Swizzle::k64B: return 64;
    default: return 128;
  }
}

/// Steps that a box takes along dimension i: every element_strides[i]-th of box[i] elements.
inline uint32_t box_count(const Descriptor& d, uint32_t i) {
  const uint32_t stride = i == 0 ? 1 : d.element_strides[i];  // dimension 0 has none without interleaving
  return (d.box[i] + stride - 1) / stride;
}

/// Whole groups of 16 along dimension 0 of the box.
inline uint32_t row_groups(const Descriptor& d) {
  const Group group = group_of(d.type);
  return (d.box[0] + group.elements - 1) / group.elements;
}

/// Bytes from one row of the box to the next in shared memory. A swizzle spreads short rows to its full span
/// (measured on an H200, golden cases load.swizzle*; the CUDA programming guide asks for room for the full width).
inline uint32_t row_pitch(const Descriptor& d) {
  const uint32_t row = row_groups(d) * group_of(d.type).shared_bytes;
  const uint32_t span = swizzle_span(d.swizzle);
  return row > span ? row : span;
}

}  // namespace vsm::tma
