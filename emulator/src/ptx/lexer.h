// SPDX-License-Identifier: Apache-2.0
// Tokens of PTX text (PTX ISA 9.0, chapter 4 "Syntax").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace vsm::ptx {

enum class TokenKind { kWord, kInteger, kFloat, kString, kPunctuation, kEnd };

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;       // kWord, kString, kPunctuation
  uint64_t bits = 0;      // kInteger: value; kFloat: bits
  int float_bits = 0;     // kFloat: 32 or 64
  int line = 0;
  bool space_before = false;
};

/// Throws PtxError at a character or number that PTX does not know.
std::vector<Token> tokenize(std::string_view text, const std::string& module);

}  // namespace vsm::ptx
