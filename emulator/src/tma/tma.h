// SPDX-License-Identifier: Apache-2.0
// Tensor maps (the 128-byte opaque objects behind cuTensorMapEncode*) and the addresses a tiled copy touches.
// PTX ISA 9.0, 5.5 "Tensors"; CUDA driver API, "Tensor Map Object Management".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vsm::tma {

/// Values are CUtensorMapDataType's.
enum class ElementType : uint8_t {
  kU8 = 0,
  kU16 = 1,
  kU32 = 2,
  kS32 = 3,
  kU64 = 4,
  kS64 = 5,
  kF16 = 6,
  kF32 = 7,
  kF64 = 8,
  kBF16 = 9,
  kF32Ftz = 10,
  kTF32 = 11,
  kTF32Ftz = 12,
  k16U4Align8B = 13,
  k16U4Align16B = 14,
  k16U6Align16B = 15
};
/// Values are CUtensorMapInterleave's / Swizzle's / L2promotion's / FloatOOBfill's.
enum class Interleave : uint8_t { kNone = 0, k16B = 1, k32B = 2 };
enum class Swizzle : uint8_t {
  kNone = 0,
  k32B = 1,
  k64B = 2,
  k128B = 3,
  k128BAtom32B = 4,
  k128BAtom32BFlip8B = 5,
  k128BAtom64B = 6
};
enum class Fill : uint8_t { kZero = 0, kNan = 1 };

/// What a tensor map says. Dimension 0 is the fastest; strides[i] is that of dimension i+1, in bytes.
struct Descriptor {
  uint64_t address = 0;
  uint32_t rank = 1;                          // 1..5
  ElementType type = ElementType::kU8;
  Interleave interleave = Interleave::kNone;
  Swizzle swizzle = Swizzle::kNone;
  Fill fill = Fill::kZero;
  uint8_t l2_promotion = 0;
  uint64_t dims[5] = {1, 1, 1, 1, 1};         // elements
  uint64_t strides[4] = {0, 0, 0, 0};
  uint32_t box[5] = {1, 1, 1, 1, 1};          // elements
  uint32_t element_strides[5] = {1, 1, 1, 1, 1};
};

/// Writes / reads the 128-byte image (this machine's own layout, with a mark that tells it from garbage).
void encode(const Descriptor& d, uint8_t image[128]);
bool decode(const uint8_t image[128], Descriptor* d);

/// The driver's rules for cuTensorMapEncodeTiled: empty if `d` keeps them, else the rule that is broken.
std::string check(const Descriptor& d);

/// tensormap.replace on an image in memory. `field` is the PTX qualifier without its dot ("global_address",
/// "global_dim", "elemtype", ...); `ordinal` is the dimension, 0 where the field has none. Empty if fine.
std::string replace(uint8_t image[128], const char* field, uint32_t ordinal, uint64_t value);

/// Piece of a copy, contiguous in global and in shared memory.
struct Run {
  /// kFill: out of bounds of a load. kSkip: out of bounds of a store, not touched; in a load the padding of the packed
  /// types, whose contents the ISA leaves undefined.
  enum class Kind : uint8_t { kCopy, kFill, kSkip };
  uint64_t global = 0;   // kCopy
  uint32_t shared = 0;   // shared-space address
  uint32_t bytes = 0;
  Kind kind = Kind::kCopy;
};

/// Bytes that a load of one box counts on its mbarrier: the whole box, out-of-bounds elements included, without the
/// padding that the packed types get in shared memory.
uint32_t box_bytes(const Descriptor& d);
/// Bytes that the box takes in shared memory: with the padding, and with each row at its swizzle's full span.
uint32_t box_shared_bytes(const Descriptor& d);

/// The shared address at which a swizzle places the byte that belongs at `address` without it. The pattern hangs on
/// the address itself, so it repeats every 256, 512 or 1,024 bytes of the shared window.
uint32_t swizzle_address(Swizzle swizzle, uint32_t address);

/// The runs of a tiled copy of one box at `coords` (rank of them) to or from shared address `shared`.
/// Empty string, or what rule was broken (alignment of `shared`, ...).
std::string tile_runs(const Descriptor& d, const int32_t* coords, uint32_t shared, bool store, std::vector<Run>* runs);

/// Value of out-of-bounds elements: writes `bytes` bytes of fill.
void fill(const Descriptor& d, uint8_t* dst, uint32_t bytes);

/// Element conversions that a load (not a store) applies on the way (kF32Ftz, kTF32, ...); a no-op for the other types.
void convert_elements(ElementType type, uint8_t* data, uint32_t bytes);

enum class Reduce : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };
/// dst[i] = op(dst[i], src[i]). False if the ISA has no such reduction on the type. Not atomic: the caller locks.
bool reduce_elements(ElementType type, Reduce op, uint8_t* dst, const uint8_t* src, uint32_t bytes);

}  // namespace vsm::tma
