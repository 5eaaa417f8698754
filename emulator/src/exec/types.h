// SPDX-License-Identifier: Apache-2.0
// PTX fundamental types (PTX ISA 9.0, 5.2) as the decoder names them.
#pragma once

#include <cstdint>
#include <string>

namespace vsm::exec {

enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kB32,
  kU32,
  kS32,
  kB64,
  kU64,
  kS64,
  kB128,
  kF16,
  kF16x2,
  kBF16,
  kBF16x2,
  kF32,
  kF32x2,
  kF64,
  kTF32,
  kE4M3x2,
  kE5M2x2,
  kE2M3x2,
  kE3M2x2,
  kE2M1x2,
  kUE8M0x2
};

/// kNone if `name` (without its dot) is no type.
Type parse_type(const std::string& name);
const char* to_string(Type t);
int type_bits(Type t);
bool is_signed(Type t);   // kS8..kS64
bool is_integer(Type t);  // kU*, kS*
bool is_bits(Type t);     // kB*
bool is_float(Type t);    // all floating point types, packed ones included

}  // namespace vsm::exec
