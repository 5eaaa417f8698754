// SPDX-License-Identifier: Apache-2.0
#include "ptx/lexer.h"

#include <cctype>
#include <cstdlib>

#include "formats.h"
#include "program.h"

namespace vsm::ptx {
namespace {

bool word_start(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}
bool word_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

class Lexer {
 public:
  Lexer(std::string_view text, const std::string& module) : text_(text), module_(module) {}

  std::vector<Token> run() {
    while (skip_blank()) lex_one();
    Token end;
    end.line = line_;
    tokens_.push_back(end);
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw PtxError(line_, module_ + ":" + std::to_string(line_) + ": " + what);
  }
  char at(size_t i) const { return i < text_.size() ? text_[i] : '\0'; }

  bool skip_blank() {
    space_ = false;
    while (pos_ < text_.size()) {
      const char c = text_[pos_];
      if (c == '\n') ++line_;
      if (c == '\n' || c == ' ' || c == '\t' || c == '\r' || c == '\0') {
        ++pos_;
      } else if (c == '/' && at(pos_ + 1) == '/') {
        while (pos_ < text_.size() && text_[pos_] != '\n') ++pos_;
      } else if (c == '/' && at(pos_ + 1) == '*') {
        const int first = line_;
        pos_ += 2;
        while (pos_ < text_.size() && !(text_[pos_] == '*' && at(pos_ + 1) == '/')) line_ += text_[pos_++] == '\n';
        if (pos_ >= text_.size()) {
          line_ = first;
          fail("comment is not closed");
        }
        pos_ += 2;
      } else {
        return true;
      }
      space_ = true;
    }
    return false;
  }

  void push(TokenKind kind, std::string text) {
    Token t;
    t.kind = kind;
    t.text = std::move(text);
    t.line = line_;
    t.space_before = space_;
    tokens_.push_back(std::move(t));
  }

  void lex_one() {
    const char c = text_[pos_];
    if (std::isdigit(static_cast<unsigned char>(c))) return lex_number();
    if (word_start(c)) return lex_word();
    if (c == '"') return lex_string();
    static const std::string kPunctuation = "{}[](),;:@!<>=+-|*#&~?/^";
    if (kPunctuation.find(c) == std::string::npos) {
      fail(std::string("unexpected character '") + (std::isprint(static_cast<unsigned char>(c)) ? c : '?') + "'");
    }
    push(TokenKind::kPunctuation, std::string(1, c));
    ++pos_;
  }

  // A word runs over "::" (as in .shared::cta) but not over a single ':' (a label's end).
  void lex_word() {
    size_t end = pos_;
    while (end < text_.size()) {
      if (word_char(text_[end])) {
        ++end;
      } else if (text_[end] == ':' && at(end + 1) == ':' && word_char(at(end + 2))) {
        end += 2;
      } else {
        break;
      }
    }
    push(TokenKind::kWord, std::string(text_.substr(pos_, end - pos_)));
    pos_ = end;
  }

  void lex_string() {
    size_t end = pos_ + 1;
    while (end < text_.size() && text_[end] != '"') {
      if (text_[end] == '\n') fail("string is not closed");
      ++end;
    }
    if (end >= text_.size()) fail("string is not closed");
    push(TokenKind::kString, std::string(text_.substr(pos_ + 1, end - pos_ - 1)));
    pos_ = end + 1;
  }

  void push_number(TokenKind kind, uint64_t bits, int float_bits) {
    push(kind, "");
    tokens_.back().bits = bits;
    tokens_.back().float_bits = float_bits;
  }

  // 4.5 "Constants": decimal, 0x, 0 (octal), 0b, 0f/0d hexadecimal floats, decimal floats.
  void lex_number() {
    const char next = static_cast<char>(std::tolower(static_cast<unsigned char>(at(pos_ + 1))));
    if (text_[pos_] == '0' && (next == 'f' || next == 'd')) {
      const int digits = next == 'f' ? 8 : 16;
      push_number(TokenKind::kFloat, radix(pos_ + 2, 16, digits), digits * 4);
      return;
    }
    size_t end = pos_;
    while (std::isdigit(static_cast<unsigned char>(at(end)))) ++end;
    const bool hex_like = text_[pos_] == '0' && (next == 'x' || next == 'b');
    if (!hex_like && (at(end) == '.' || ((at(end) == 'e' || at(end) == 'E')))) {
      const std::string copy(text_.substr(pos_, 64));
      char* stop = nullptr;
      const double value = std::strtod(copy.c_str(), &stop);
      pos_ += static_cast<size_t>(stop - copy.c_str());
      push_number(TokenKind::kFloat, double_to_bits(value), 64);
      return;
    }
    uint64_t value;
    if (hex_like) {
      value = radix(pos_ + 2, next == 'x' ? 16 : 2, 0);
    } else if (text_[pos_] == '0' && end > pos_ + 1) {
      value = radix(pos_, 8, 0);
    } else {
      value = radix(pos_, 10, 0);
    }
    if (at(pos_) == 'U' || at(pos_) == 'u') ++pos_;
    push_number(TokenKind::kInteger, value, 0);
  }

  // Digits from `begin`; exactly `count` of them unless 0. Leaves pos_ behind them.
  uint64_t radix(size_t begin, unsigned base, int count) {
    uint64_t value = 0;
    size_t i = begin;
    for (; i < text_.size(); ++i) {
      const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(text_[i])));
      unsigned digit;
      if (c >= '0' && c <= '9') digit = static_cast<unsigned>(c - '0');
      else if (c >= 'a' && c <= 'f') digit = static_cast<unsigned>(c - 'a' + 10);
      else break;
      if (digit >= base) break;
      if (value > (UINT64_MAX - digit) / base) fail("integer constant does not fit 64 bits");
      value = value * base + digit;
    }
    if (i == begin || (count != 0 && i != begin + static_cast<size_t>(count))) fail("malformed number");
    if (i < text_.size() && word_char(text_[i]) && text_[i] != 'U' && text_[i] != 'u') fail("malformed number");
    pos_ = i;
    return value;
  }

  std::string_view text_;
  const std::string& module_;
  std::vector<Token> tokens_;
  size_t pos_ = 0;
  int line_ = 1;
  bool space_ = false;
};

}  // namespace

std::vector<Token> tokenize(std::string_view text, const std::string& module) { return Lexer(text, module).run(); }

}  // namespace vsm::ptx
