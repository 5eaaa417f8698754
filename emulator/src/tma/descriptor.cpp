// SPDX-License-Identifier: Apache-2.0
// The tensor map: its image in memory, the driver's rules for it, tensormap.replace.
#include <cstring>

#include "layout.h"

namespace vsm::tma {
namespace {

/// The 128 bytes. The real layout is not documented; this one carries a mark at each end, so that memory which no
/// encoder wrote, or a map copied in part, is told from a tensor map.
struct Image {
  uint64_t front_mark;
  uint64_t address;
  uint64_t dims[5];
  uint64_t strides[4];
  uint16_t box[5];
  uint8_t element_strides[5];
  uint8_t rank, type, interleave, swizzle, fill, l2_promotion;
  uint8_t reserved[11];
  uint64_t back_mark;
};
static_assert(sizeof(Image) == 128, "a tensor map is 128 bytes");

constexpr uint64_t kFrontMark = 0x70616d6f736e6574;  // "tensomap"
constexpr uint64_t kBackMark = 0x646e65207370616d;   // "maps end"

std::string rule(const char* text) { return text; }
std::string rule(const std::string& what, uint64_t value, const std::string& must) {
  return what + " is " + std::to_string(value) + ", must be " + must;
}
std::string indexed(const char* name, uint32_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

std::string check_enums(const Descriptor& d) {
  if (static_cast<unsigned>(d.type) > 15) return rule("tensorDataType", static_cast<unsigned>(d.type), "0 to 15");
  if (static_cast<unsigned>(d.interleave) > 2) return rule("interleave", static_cast<unsigned>(d.interleave), "0 to 2");
  if (static_cast<unsigned>(d.swizzle) > 6) return rule("swizzle", static_cast<unsigned>(d.swizzle), "0 to 6");
  if (d.l2_promotion > 3) return rule("l2Promotion", d.l2_promotion, "0 to 3");
  if (static_cast<unsigned>(d.fill) > 1) return rule("oobFill", static_cast<unsigned>(d.fill), "0 or 1");
  if (d.rank < 1 || d.rank > 5) return rule("tensorRank", d.rank, "1 to 5");
  return {};
}

std::string check_global(const Descriptor& d) {
  const bool wide = d.interleave == Interleave::k32B || is_padded(d.type);
  const uint32_t alignment = wide ? 32 : 16;
  if (d.address == 0) return rule("globalAddress is null");
  if (d.address % alignment) return rule("globalAddress", d.address, "a multiple of " + std::to_string(alignment));
  for (uint32_t i = 0; i < d.rank; ++i) {
    if (d.dims[i] == 0 || d.dims[i] > uint64_t{1} << 32) return rule(indexed("globalDim", i), d.dims[i], "1 to 2^32");
  }
  if (is_padded(d.type) && d.dims[0] % 128)
    return rule("globalDim[0]", d.dims[0], "a multiple of 128 with this packed type");
  if (d.type == ElementType::k16U4Align8B && d.dims[0] % 2)
    return rule("globalDim[0]", d.dims[0], "a multiple of 2 with this packed type");
  for (uint32_t i = 0; i + 1 < d.rank; ++i) {
    if (d.strides[i] % alignment)
      return rule(indexed("globalStrides", i), d.strides[i], "a multiple of " + std::to_string(alignment));
    if (d.strides[i] >= uint64_t{1} << 40) return rule(indexed("globalStrides", i), d.strides[i], "less than 2^40");
  }
  return {};
}

std::string check_box(const Descriptor& d) {
  for (uint32_t i = 0; i < d.rank; ++i) {
    if (d.box[i] == 0 || d.box[i] > 256) return rule(indexed("boxDim", i), d.box[i], "1 to 256");
    if (d.element_strides[i] == 0 || d.element_strides[i] > 8)
      return rule(indexed("elementStrides", i), d.element_strides[i], "1 to 8");
  }
  if (is_padded(d.type) && d.box[0] != 128) return rule("boxDim[0]", d.box[0], "128 with this packed type");
  const Group group = group_of(d.type);
  const uint32_t bits = d.box[0] * group.global_bytes * 8 / group.elements;
  if (d.interleave == Interleave::kNone && bits % 128) {
    return rule("boxDim[0] times the element size", bits / 8, "a multiple of 16 bytes");
  }
  return {};
}

std::string check_modes(const Descriptor& d) {
  if (d.interleave != Interleave::kNone && d.rank < 3)
    return rule("tensorRank", d.rank, "at least 3 with an interleaved layout");
  if (d.interleave == Interleave::k32B && d.swizzle != Swizzle::k32B)
    return rule("an interleave of 32B needs the 32B swizzle");
  if (d.interleave == Interleave::kNone && d.swizzle != Swizzle::kNone) {
    const Group group = group_of(d.type);
    const uint32_t row = d.box[0] * group.global_bytes / group.elements;
    if (row > swizzle_span(d.swizzle)) {
      return rule("boxDim[0] times the element size", row,
                  "at most the swizzle's " + std::to_string(swizzle_span(d.swizzle)) + " bytes");
    }
  }
  if (d.fill == Fill::kNan && !is_float(d.type)) return rule("the NaN fill needs a floating-point type");
  if (is_padded(d.type)) {
    if (d.interleave != Interleave::kNone) return rule("this packed type cannot be interleaved");
    const bool fits = d.swizzle == Swizzle::kNone || d.swizzle == Swizzle::k128B ||
                      d.swizzle == Swizzle::k128BAtom32B ||
                      (d.type == ElementType::k16U6Align16B && d.swizzle == Swizzle::k128BAtom64B);
    if (!fits)
      return rule("swizzle", static_cast<unsigned>(d.swizzle), "none, 128B or 128B_ATOM_32B with this packed type");
  }
  return {};
}

/// Element types in the numbering of tensormap.replace (PTX ISA 9.0, table 33), which is not the driver's.
constexpr ElementType kReplaceTypes[16] = {
    ElementType::kU8,      ElementType::kU16,         ElementType::kU32,          ElementType::kS32,
    ElementType::kU64,     ElementType::kS64,         ElementType::kF16,          ElementType::kF32,
    ElementType::kF32Ftz,  ElementType::kF64,         ElementType::kBF16,         ElementType::kTF32,
    ElementType::kTF32Ftz, ElementType::k16U4Align8B, ElementType::k16U4Align16B, ElementType::k16U6Align16B};

std::string replace_swizzle_mode(Descriptor* d, uint64_t value) {
  if (value == 4) return rule("the 96B swizzle is not on sm_121a");
  if (value > 4) return rule(".swizzle_mode", value, "0 to 3");
  d->swizzle = static_cast<Swizzle>(value);
  return {};
}

std::string replace_swizzle_atomicity(Descriptor* d, uint64_t value) {
  if (value > 3) return rule(".swizzle_atomicity", value, "0 to 3");
  if (swizzle_span(d->swizzle) != 128) {
    return value == 0 ? std::string() : rule(".swizzle_atomicity", value, "0 (16B) unless the swizzle is 128B");
  }
  d->swizzle = value == 0 ? Swizzle::k128B : static_cast<Swizzle>(static_cast<int>(Swizzle::k128BAtom32B) + value - 1);
  return {};
}

std::string replace_field(Descriptor* d, const std::string& field, uint32_t ordinal, uint64_t value) {
  const bool per_dimension =
      field == "box_dim" || field == "global_dim" || field == "global_stride" || field == "element_stride";
  if (per_dimension && ordinal > (field == "global_stride" ? 3u : 4u))
    return rule("the ordinal of ." + field, ordinal, "a dimension of the map");
  if (field == "global_address") return d->address = value, std::string();
  if (field == "global_stride") return d->strides[ordinal] = value, std::string();
  value &= 0xffffffffu;  // .b32
  if (field == "rank")
    return value > 4 ? rule(".rank", value, "0 to 4 (the rank less one)")
                     : (d->rank = static_cast<uint32_t>(value) + 1, std::string());
  if (field == "global_dim") return d->dims[ordinal] = value, std::string();
  if (field == "box_dim")
    return value > 256 ? rule(".box_dim", value, "1 to 256")
                       : (d->box[ordinal] = static_cast<uint32_t>(value), std::string());
  if (field == "element_stride")
    return value > 8 ? rule(".element_stride", value, "1 to 8")
                     : (d->element_strides[ordinal] = static_cast<uint32_t>(value), std::string());
  if (field == "elemtype")
    return value > 15 ? rule(".elemtype", value, "0 to 15") : (d->type = kReplaceTypes[value], std::string());
  if (field == "interleave_layout")
    return value > 2 ? rule(".interleave_layout", value, "0 to 2")
                     : (d->interleave = static_cast<Interleave>(value), std::string());
  if (field == "swizzle_mode") return replace_swizzle_mode(d, value);
  if (field == "swizzle_atomicity") return replace_swizzle_atomicity(d, value);
  if (field == "fill_mode")
    return value > 1 ? rule(".fill_mode", value, "0 or 1") : (d->fill = static_cast<Fill>(value), std::string());
  return "a tensor map has no field ." + field;
}

}  // namespace

void encode(const Descriptor& d, uint8_t image[128]) {
  Image out = {};
  out.front_mark = kFrontMark;
  out.back_mark = kBackMark;
  out.address = d.address;
  for (int i = 0; i < 5; ++i) {
    out.dims[i] = d.dims[i];
    out.box[i] = static_cast<uint16_t>(d.box[i]);
    out.element_strides[i] = static_cast<uint8_t>(d.element_strides[i]);
  }
  for (int i = 0; i < 4; ++i) out.strides[i] = d.strides[i];
  out.rank = static_cast<uint8_t>(d.rank);
  out.type = static_cast<uint8_t>(d.type);
  out.interleave = static_cast<uint8_t>(d.interleave);
  out.swizzle = static_cast<uint8_t>(d.swizzle);
  out.fill = static_cast<uint8_t>(d.fill);
  out.l2_promotion = d.l2_promotion;
  std::memcpy(image, &out, sizeof(out));
}

bool decode(const uint8_t image[128], Descriptor* d) {
  Image in;
  std::memcpy(&in, image, sizeof(in));
  if (in.front_mark != kFrontMark || in.back_mark != kBackMark) return false;
  Descriptor out;
  out.address = in.address;
  for (int i = 0; i < 5; ++i) {
    out.dims[i] = in.dims[i];
    out.box[i] = in.box[i];
    out.element_strides[i] = in.element_strides[i];
  }
  for (int i = 0; i < 4; ++i) out.strides[i] = in.strides[i];
  out.rank = in.rank;
  out.type = static_cast<ElementType>(in.type);
  out.interleave = static_cast<Interleave>(in.interleave);
  out.swizzle = static_cast<Swizzle>(in.swizzle);
  out.fill = static_cast<Fill>(in.fill);
  out.l2_promotion = in.l2_promotion;
  if (!check_enums(out).empty()) return false;
  *d = out;
  return true;
}

std::string check(const Descriptor& d) {
  for (const auto& rules : {check_enums, check_global, check_box, check_modes}) {
    std::string broken = rules(d);
    if (!broken.empty()) return broken;
  }
  return {};
}

std::string replace(uint8_t image[128], const char* field, uint32_t ordinal, uint64_t value) {
  Descriptor d;
  if (!decode(image, &d)) return "the 128 bytes at the address are not a tensor map";
  std::string broken = replace_field(&d, field, ordinal, value);
  if (broken.empty()) encode(d, image);
  return broken;
}

}  // namespace vsm::tma
