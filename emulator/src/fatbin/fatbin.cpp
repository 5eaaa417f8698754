// SPDX-License-Identifier: Apache-2.0
#include "fatbin/fatbin.h"

#include <cstring>

namespace vsm::fatbin {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kFatbinMagic = 0xba55ed50;
// Flag bits of an image whose payload is compressed: LZ4 and zstd.
constexpr uint64_t kCompressedFlags = 0x2000 | 0x8000;
// Attributes and record formats of .nv.info.
constexpr uint8_t kFormatByte = 2;
constexpr uint8_t kFormatSized = 4;
constexpr uint8_t kAttributeRegisterCount = 0x2f;
constexpr uint8_t kAttributeMinimumStack = 0x12;
constexpr uint8_t kAttributeBarriers = 0x4c;
constexpr uint32_t kReservedShared = 1024;

/// Reads at an offset of a byte range; throws where the range ends too early.
class Reader {
 public:
  Reader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}

  template <typename T>
  T at(uint64_t offset) const {
    T value;
    std::string_view part = slice(offset, sizeof(T));
    std::memcpy(&value, part.data(), sizeof(T));
    return value;
  }

  std::string_view slice(uint64_t offset, uint64_t size) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) {
      throw FatbinError(std::string(what_) + " ends at byte " + std::to_string(bytes_.size()) + ", but bytes " +
                        std::to_string(offset) + " to " + std::to_string(offset + size) + " are referred to");
    }
    return bytes_.substr(offset, size);
  }

  std::string_view text(uint64_t offset) const {
    std::string_view rest = slice(offset, bytes_.size() - (offset > bytes_.size() ? bytes_.size() : offset));
    size_t end = rest.find('\0');
    if (end == std::string_view::npos) throw FatbinError(std::string(what_) + " has a name without an end");
    return rest.substr(0, end);
  }

  uint64_t size() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
  const char* what_;
};

Image read_image(const Reader& reader, uint64_t offset, uint64_t* next) {
  const uint16_t kind = reader.at<uint16_t>(offset);
  const uint32_t header = reader.at<uint32_t>(offset + 4);
  const uint64_t stored = reader.at<uint64_t>(offset + 8);
  if (header < 64) throw FatbinError("a fat binary's image has a header of " + std::to_string(header) + " bytes");
  Image image;
  if (kind != static_cast<uint16_t>(ImageKind::kPtx) && kind != static_cast<uint16_t>(ImageKind::kCubin)) {
    throw FatbinError("a fat binary's image is of kind " + std::to_string(kind) + ", neither PTX (1) nor a cubin (2)");
  }
  image.kind = static_cast<ImageKind>(kind);
  image.arch = reader.at<uint32_t>(offset + 28);
  image.compressed = (reader.at<uint64_t>(offset + 40) & kCompressedFlags) != 0;
  image.payload = reader.slice(offset + header, stored);
  if (image.kind == ImageKind::kPtx && !image.compressed) {
    image.payload = image.payload.substr(0, image.payload.find('\0'));
  }
  *next = offset + header + stored;
  return image;
}

struct Section {
  std::string_view name;
  std::string_view bytes;  // empty for a section that takes no room in the file
  uint64_t size = 0;
  uint32_t link = 0;
  uint32_t type = 0;
};

constexpr uint32_t kSectionNoBits = 8;
constexpr uint32_t kSectionSymbols = 2;

std::vector<Section> sections_of(const Reader& elf) {
  if (elf.slice(0, 4) != std::string_view("\x7f"
                                          "ELF",
                                          4) ||
      elf.at<uint8_t>(4) != 2) {
    throw FatbinError("a cubin is not a 64-bit ELF file");
  }
  const uint64_t table = elf.at<uint64_t>(0x28);
  const uint16_t entry = elf.at<uint16_t>(0x3a);
  const uint16_t count = elf.at<uint16_t>(0x3c);
  const uint16_t names_index = elf.at<uint16_t>(0x3e);
  if (entry < 64 || names_index >= count) throw FatbinError("a cubin's section table is malformed");
  const uint64_t names = elf.at<uint64_t>(table + uint64_t{names_index} * entry + 0x18);
  std::vector<Section> sections;
  for (uint16_t i = 0; i < count; ++i) {
    const uint64_t header = table + uint64_t{i} * entry;
    Section section;
    section.name = elf.text(names + elf.at<uint32_t>(header));
    section.type = elf.at<uint32_t>(header + 4);
    section.size = elf.at<uint64_t>(header + 0x20);
    section.link = elf.at<uint32_t>(header + 0x28);
    if (section.type != kSectionNoBits) section.bytes = elf.slice(elf.at<uint64_t>(header + 0x18), section.size);
    sections.push_back(section);
  }
  return sections;
}

/// Names of the symbols, by index.
std::vector<std::string> symbol_names(const std::vector<Section>& sections) {
  std::vector<std::string> names;
  for (const Section& section : sections) {
    if (section.type != kSectionSymbols) continue;
    if (section.link >= sections.size()) throw FatbinError("a cubin's symbol table has no string table");
    Reader symbols(section.bytes, "a cubin's symbol table");
    Reader strings(sections[section.link].bytes, "a cubin's string table");
    for (uint64_t offset = 0; offset + 24 <= symbols.size(); offset += 24) {
      names.emplace_back(strings.text(symbols.at<uint32_t>(offset)));
    }
  }
  return names;
}

/// Calls `pair(attribute, symbol, value)` for each record of a .nv.info section that holds a pair of words, and
/// `byte(attribute, value)` for each that holds a byte.
template <typename Pair, typename Byte>
void visit_info(std::string_view bytes, Pair pair, Byte byte) {
  Reader info(bytes, ".nv.info");
  uint64_t offset = 0;
  while (offset + 4 <= info.size()) {
    const uint8_t format = info.at<uint8_t>(offset);
    const uint8_t attribute = info.at<uint8_t>(offset + 1);
    const uint16_t size = info.at<uint16_t>(offset + 2);
    offset += 4;
    if (format == kFormatByte) byte(attribute, static_cast<uint8_t>(size));
    if (format != kFormatSized) continue;  // its value is in the four bytes just read
    if (size == 8) pair(attribute, info.at<uint32_t>(offset), info.at<uint32_t>(offset + 4));
    offset += size;
  }
}

/// The kernel whose section this is: what stands behind `prefix` in its name; null for other sections.
KernelResources* of_kernel(std::map<std::string, KernelResources>& resources, const Section& section,
                           std::string_view prefix) {
  if (section.name.substr(0, prefix.size()) != prefix) return nullptr;
  const auto found = resources.find(std::string(section.name.substr(prefix.size())));
  return found == resources.end() ? nullptr : &found->second;
}

}  // namespace

std::vector<Image> images_of(std::string_view bytes) {
  Reader reader(bytes, "a fat binary");
  if (reader.at<uint32_t>(0) != kFatbinMagic) throw FatbinError("a fat binary does not begin with its mark 0xba55ed50");
  const uint16_t header = reader.at<uint16_t>(6);
  const uint64_t end = header + reader.at<uint64_t>(8);
  Reader body(reader.slice(0, end), "a fat binary");
  std::vector<Image> images;
  for (uint64_t offset = header; offset < end;) images.push_back(read_image(body, offset, &offset));
  return images;
}

std::vector<Image> images_of_wrapper(const void* wrapper) {
  uint32_t magic;
  std::memcpy(&magic, wrapper, sizeof(magic));
  if (magic != kWrapperMagic)
    throw FatbinError("the struct given to __cudaRegisterFatBinary lacks its mark 0x466243b1");
  const char* data;
  std::memcpy(&data, static_cast<const char*>(wrapper) + 8, sizeof(data));
  uint16_t header;
  uint64_t body;
  std::memcpy(&header, data + 6, sizeof(header));
  std::memcpy(&body, data + 8, sizeof(body));
  return images_of(std::string_view(data, header + body));
}

std::map<std::string, KernelResources> kernel_resources(std::string_view cubin) {
  const std::vector<Section> sections = sections_of(Reader(cubin, "a cubin"));
  const std::vector<std::string> names = symbol_names(sections);
  std::map<std::string, KernelResources> resources;
  for (const Section& section : sections) {
    if (section.name != ".nv.info") continue;
    const auto pair = [&](uint8_t attribute, uint32_t symbol, uint32_t value) {
      if (symbol >= names.size()) throw FatbinError(".nv.info refers to a symbol that is not there");
      if (attribute == kAttributeRegisterCount) resources[names[symbol]].registers = value;
      if (attribute == kAttributeMinimumStack) resources[names[symbol]].stack = value;
    };
    visit_info(section.bytes, pair, [](uint8_t, uint8_t) {});
  }
  for (const Section& section : sections) {
    if (KernelResources* kernel = of_kernel(resources, section, ".nv.shared.")) {
      kernel->static_shared =
          static_cast<uint32_t>(section.size > kReservedShared ? section.size - kReservedShared : 0);
    }
    if (KernelResources* kernel = of_kernel(resources, section, ".nv.info.")) {
      const auto byte = [&](uint8_t attribute, uint8_t value) {
        if (attribute == kAttributeBarriers) kernel->barriers = value;
      };
      visit_info(section.bytes, [](uint8_t, uint32_t, uint32_t) {}, byte);
    }
  }
  return resources;
}

}  // namespace vsm::fatbin
