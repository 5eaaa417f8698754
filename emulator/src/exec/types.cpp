// SPDX-License-Identifier: Apache-2.0
#include "exec/types.h"

#include <cstring>

namespace vsm::exec {
namespace {

struct Entry {
  Type type;
  const char* name;
  int bits;
};
constexpr Entry kEntries[] = {
    {Type::kNone, "", 0},          {Type::kPred, "pred", 1},       {Type::kB8, "b8", 8},
    {Type::kU8, "u8", 8},          {Type::kS8, "s8", 8},           {Type::kB16, "b16", 16},
    {Type::kU16, "u16", 16},       {Type::kS16, "s16", 16},        {Type::kB32, "b32", 32},
    {Type::kU32, "u32", 32},       {Type::kS32, "s32", 32},        {Type::kB64, "b64", 64},
    {Type::kU64, "u64", 64},       {Type::kS64, "s64", 64},        {Type::kB128, "b128", 128},
    {Type::kF16, "f16", 16},       {Type::kF16x2, "f16x2", 32},    {Type::kBF16, "bf16", 16},
    {Type::kBF16x2, "bf16x2", 32}, {Type::kF32, "f32", 32},        {Type::kF32x2, "f32x2", 64},
    {Type::kF64, "f64", 64},       {Type::kTF32, "tf32", 32},      {Type::kE4M3x2, "e4m3x2", 16},
    {Type::kE5M2x2, "e5m2x2", 16}, {Type::kE2M3x2, "e2m3x2", 16},  {Type::kE3M2x2, "e3m2x2", 16},
    {Type::kE2M1x2, "e2m1x2", 8},  {Type::kUE8M0x2, "ue8m0x2", 16}};

const Entry& entry(Type t) { return kEntries[static_cast<int>(t)]; }

}  // namespace

Type parse_type(const std::string& name) {
  if (name.empty()) return Type::kNone;
  for (const Entry& e : kEntries) {
    if (name == e.name) return e.type;
  }
  return Type::kNone;
}

const char* to_string(Type t) { return entry(t).name; }
int type_bits(Type t) { return entry(t).bits; }
bool is_signed(Type t) { return t == Type::kS8 || t == Type::kS16 || t == Type::kS32 || t == Type::kS64; }
bool is_integer(Type t) {
  return is_signed(t) || t == Type::kU8 || t == Type::kU16 || t == Type::kU32 || t == Type::kU64;
}
bool is_bits(Type t) {
  return t == Type::kB8 || t == Type::kB16 || t == Type::kB32 || t == Type::kB64 || t == Type::kB128;
}
bool is_float(Type t) { return static_cast<int>(t) >= static_cast<int>(Type::kF16); }

}  // namespace vsm::exec
