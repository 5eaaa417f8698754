// SPDX-License-Identifier: Apache-2.0
// PTX text to ModuleAst. Gives names their scope; gives opcodes no meaning.
#include <algorithm>
#include <cstring>

#include "formats.h"
#include "ptx/ast.h"
#include "ptx/lexer.h"

namespace vsm::ptx {
namespace {

uint32_t type_bytes(const std::string& type) {
  static const std::map<std::string, uint32_t> kBytes = {
      {".b8", 1},   {".u8", 1},  {".s8", 1},  {".b16", 2}, {".u16", 2},  {".s16", 2},   {".f16", 2},
      {".bf16", 2}, {".b32", 4}, {".u32", 4}, {".s32", 4}, {".f32", 4},  {".f16x2", 4}, {".bf16x2", 4},
      {".b64", 8},  {".u64", 8}, {".s64", 8}, {".f64", 8}, {".b128", 16}};
  const auto it = kBytes.find(type);
  return it == kBytes.end() ? 0 : it->second;
}

struct Scope {
  int parent = -1;
  std::map<std::string, int> registers;
  std::map<std::string, std::string> variables;  // name -> unique name
  std::map<std::string, std::string> labels;     // name -> unique name
};

class Parser {
 public:
  Parser(std::string_view text, const std::string& name) : tokens_(tokenize(text, name)) {
    module_.name = name;
    split_lines(text);
  }

  ModuleAst run() {
    while (peek().kind != TokenKind::kEnd) module_item();
    if (module_.target.empty()) fail("the module has no .target");
    return std::move(module_);
  }

 private:
  // --- tokens ---------------------------------------------------------------------------------------------------
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(pos_ + ahead, tokens_.size() - 1)]; }
  const Token& next() {
    const Token& t = peek();
    if (pos_ + 1 < tokens_.size()) ++pos_;
    return t;
  }
  bool is(const char* text) const {
    const Token& t = peek();
    return (t.kind == TokenKind::kPunctuation || t.kind == TokenKind::kWord) && t.text == text;
  }
  bool accept(const char* text) {
    if (!is(text)) return false;
    next();
    return true;
  }
  void expect(const char* text) {
    if (!accept(text)) fail(std::string("expected '") + text + "' but found '" + shown(peek()) + "'");
  }
  std::string word(const char* what) {
    if (peek().kind != TokenKind::kWord) fail(std::string("expected ") + what + " but found '" + shown(peek()) + "'");
    return next().text;
  }
  int64_t integer() {
    const bool minus = accept("-");
    if (peek().kind != TokenKind::kInteger) fail("expected an integer but found '" + shown(peek()) + "'");
    const uint64_t v = next().bits;
    return static_cast<int64_t>(minus ? 0 - v : v);
  }
  static std::string shown(const Token& t) {
    if (t.kind == TokenKind::kEnd) return "end of text";
    if (t.kind == TokenKind::kInteger || t.kind == TokenKind::kFloat) return "number";
    return t.text;
  }
  [[noreturn]] void fail(const std::string& what) const { fail_at(peek().line, what); }
  [[noreturn]] void fail_at(int line, const std::string& what) const { throw PtxError(line, where(line) + what); }
  std::string where(int line) const {
    return module_.name + ":" + std::to_string(line) + ": " + (function_ ? "in " + function_->name + ": " : "");
  }
  void split_lines(std::string_view text) {
    size_t begin = 0;
    while (begin <= text.size()) {
      size_t end = text.find('\n', begin);
      if (end == std::string_view::npos) end = text.size();
      std::string_view line = text.substr(begin, std::min<size_t>(end - begin, 240));
      const size_t first = line.find_first_not_of(" \t\r");
      module_.lines.emplace_back(first == std::string_view::npos ? "" : line.substr(first));
      begin = end + 1;
    }
  }
  void skip_to_semicolon() {
    while (!is(";")) {
      if (peek().kind == TokenKind::kEnd) fail("expected ';'");
      next();
    }
    next();
  }
  // .loc and .file end with their line.
  void skip_line() {
    const int line = peek().line;
    while (peek().line == line && peek().kind != TokenKind::kEnd) next();
  }
  /// From '{' to behind the '}' that closes it; false if nothing does.
  bool skip_braces() {
    if (!accept("{")) return false;
    for (int depth = 1; depth > 0;) {
      if (peek().kind == TokenKind::kEnd) return false;
      if (is("{")) ++depth;
      if (is("}")) --depth;
      next();
    }
    return true;
  }
  void skip_block() {
    if (!skip_braces()) fail("expected a block in braces");
  }

  // --- module scope ---------------------------------------------------------------------------------------------
  void module_item() {
    if (accept(".version")) {
      next();  // 9.0 reads as a decimal float
      return;
    }
    if (accept(".target")) {
      module_.target = word("a target");
      while (accept(",")) word("a target option");
      return;
    }
    if (accept(".address_size")) {
      if (integer() != 64) fail("only .address_size 64 is modelled");
      return;
    }
    if (is(".file") || is(".loc")) return skip_line();
    if (accept(".section")) {
      word("a section name");
      return skip_block();
    }
    if (accept(".pragma")) return skip_to_semicolon();
    if (accept(";")) return;
    bool is_extern = false;
    while (is(".visible") || is(".extern") || is(".weak") || is(".common")) is_extern |= next().text == ".extern";
    if (accept(".entry")) return function(true);
    if (accept(".func")) return function(false);
    if (is(".global") || is(".const") || is(".shared")) {
      const std::string space = next().text.substr(1);
      variables(space, is_extern, module_.variables, nullptr);
      return;
    }
    fail("unknown directive '" + shown(peek()) + "' at module scope");
  }

  // After the space: {.align n} .type name{[n]...}{= init} {, ...} ;
  void variables(const std::string& space, bool is_extern, std::vector<Variable>& out, Scope* scope) {
    uint32_t align = 0;
    std::string type;
    while (peek().kind == TokenKind::kWord && peek().text[0] == '.') {
      const std::string w = next().text;
      if (w == ".align") {
        align = static_cast<uint32_t>(integer());
        if (align == 0 || (align & (align - 1))) fail(".align must be a power of two");
      } else if (w == ".v2" || w == ".v4" || w == ".v8") {
        fail("vector variables are not modelled");
      } else if (w == ".attribute") {
        fail(".attribute is not modelled");
      } else if (w == ".ptr") {  // .ptr{.space}{.align n} of kernel parameters says nothing about layout
        while (is(".global") || is(".const") || is(".local") || is(".shared")) next();
        if (accept(".align")) integer();
      } else {
        type = w;
        if (!type_bytes(type)) fail("unknown type '" + type + "'");
      }
    }
    if (type.empty()) fail("variable without a type");
    do {
      Variable v;
      v.line = peek().line;
      v.name = word("a variable name");
      v.space = space;
      v.is_extern = is_extern;
      v.align = align ? align : type_bytes(type);
      const uint32_t element = type_bytes(type);
      uint64_t count = 1;
      bool open = false;
      while (accept("[")) {
        if (accept("]")) {
          open = true;
          count = 0;
        } else {
          const int64_t n = integer();
          if (n < 0 || (n > 0 && count > (uint64_t{1} << 40) / static_cast<uint64_t>(n)))
            fail("array of that size is not possible");
          count *= static_cast<uint64_t>(n);
          expect("]");
        }
      }
      if (accept("=")) {
        initializer(type, element, v);
        if (open) count = v.init.size() / element;
      }
      v.size = count * element;
      if (v.init.size() > v.size) fail_at(v.line, "initializer of '" + v.name + "' is larger than the variable");
      if (!v.init.empty()) v.init.resize(v.size);
      v.unique = v.name;
      if (scope) {
        v.unique += "." + std::to_string(unique_++);
        if (!scope->variables.emplace(v.name, v.unique).second) fail_at(v.line, "'" + v.name + "' is declared twice");
      } else {
        const bool twice = std::any_of(out.begin(), out.end(), [&](const Variable& o) { return o.name == v.name; });
        if (twice) fail_at(v.line, "'" + v.name + "' is declared twice");
      }
      out.push_back(std::move(v));
    } while (accept(","));
    expect(";");
  }

  void initializer(const std::string& type, uint32_t element, Variable& v) {
    const Depth depth(*this);
    if (accept("{")) {
      if (accept("}")) return;
      do initializer(type, element, v);
      while (accept(","));
      expect("}");
      return;
    }
    const size_t at = v.init.size();
    v.init.resize(at + element);
    uint64_t bits = 0;
    if (peek().kind == TokenKind::kWord) {
      const bool generic = accept("generic");
      if (generic) expect("(");
      VariableInfo::Relocation r;
      r.offset = static_cast<uint32_t>(at);
      r.symbol = word("a symbol");
      if (generic) expect(")");
      r.addend = accept("+") ? integer() : 0;
      if (element != 8) fail("a symbol's address does not fit " + type);
      v.relocations.push_back(std::move(r));
    } else if (peek().kind == TokenKind::kFloat || (is("-") && peek(1).kind == TokenKind::kFloat)) {
      const bool minus = accept("-");
      const Token& t = next();
      double d = t.float_bits == 32 ? bits_to_float(static_cast<uint32_t>(t.bits)) : bits_to_double(t.bits);
      if (minus) d = -d;
      if (type == ".f64" || (element == 8 && t.float_bits == 64)) bits = double_to_bits(d);
      else if (element == 4) bits = t.float_bits == 32 && !minus ? t.bits : float_to_bits(static_cast<float>(d));
      else fail("a float does not fit " + type);
    } else {
      bits = static_cast<uint64_t>(integer());
    }
    std::memcpy(v.init.data() + at, &bits, element);
  }

  // --- functions ------------------------------------------------------------------------------------------------
  void function(bool is_entry) {
    Function f;
    f.is_entry = is_entry;
    f.line = peek().line;
    scopes_.assign(1, Scope());
    scope_ = 0;
    function_ = &f;
    if (!is_entry && is("(")) parameters(f.returns);
    f.name = word("a function name");
    if (is("(")) parameters(f.params);
    function_directives(f);
    if (accept(";")) {
      function_ = nullptr;
      merge_function(std::move(f));
      return;
    }
    const size_t begin = pos_;
    f.has_body = true;
    try {
      expect("{");
      body(f);
      resolve_labels(f);
    } catch (const PtxError& error) {
      if (f.error.empty()) f.error = error.what(), f.error_line = error.line();
      scope_of_.clear();
      pos_ = begin;
      if (!skip_braces()) throw;  // where the body ends is not known: neither is what comes behind
    }
    function_ = nullptr;
    merge_function(std::move(f));
  }

  // A body replaces its earlier declaration.
  void merge_function(Function f) {
    for (Function& other : module_.functions) {
      if (other.name != f.name) continue;
      if (other.has_body && f.has_body) fail_at(f.line, "function '" + f.name + "' is defined twice");
      if (f.has_body) other = std::move(f);
      return;
    }
    module_.functions.push_back(std::move(f));
  }

  void parameters(std::vector<Variable>& out) {
    expect("(");
    if (accept(")")) return;
    do {
      if (accept(".reg")) fail("register parameters are not modelled");
      expect(".param");
      uint32_t align = 0;
      std::string type;
      while (peek().kind == TokenKind::kWord && peek().text[0] == '.') {
        const std::string w = next().text;
        if (w == ".align") {
          align = static_cast<uint32_t>(integer());
        } else if (w == ".ptr") {
          while (is(".global") || is(".const") || is(".local") || is(".shared")) next();
          if (accept(".align")) integer();
        } else if (type_bytes(w)) {
          type = w;
        } else {
          fail("unknown parameter attribute '" + w + "'");
        }
      }
      if (type.empty()) fail("parameter without a type");
      Variable v;
      v.line = peek().line;
      v.name = word("a parameter name");
      v.space = "param";
      v.align = align ? align : type_bytes(type);
      v.size = type_bytes(type);
      if (accept("[")) {
        if (accept("]")) fail("unsized parameters are not modelled");
        v.size *= static_cast<uint64_t>(integer());
        expect("]");
      }
      v.unique = v.name;
      scopes_[0].variables[v.name] = v.unique;
      out.push_back(std::move(v));
    } while (accept(","));
    expect(")");
  }

  void dimensions(uint32_t out[3]) {
    out[0] = static_cast<uint32_t>(integer());
    out[1] = out[2] = 1;
    for (int i = 1; i < 3 && accept(","); ++i) out[i] = static_cast<uint32_t>(integer());
  }

  void function_directives(Function& f) {
    for (;;) {
      if (accept(".maxntid")) dimensions(f.maxntid);
      else if (accept(".reqntid")) dimensions(f.reqntid);
      else if (accept(".minnctapersm")) f.minnctapersm = static_cast<uint32_t>(integer());
      else if (accept(".maxnreg")) f.maxnreg = static_cast<uint32_t>(integer());
      else if (accept(".noreturn") || accept(".blocksareclusters") || accept(".explicitcluster")) continue;
      else if (accept(".pragma")) skip_to_semicolon();
      else if (accept(".reqnctapercluster") || accept(".maxclusterrank")) {
        uint32_t cluster[3];
        dimensions(cluster);
        if (cluster[0] * cluster[1] * cluster[2] != 1) {
          f.error_line = peek().line;
          f.error = where(f.error_line) + "clusters of more than one block are not modelled";
        }
      } else {
        return;
      }
    }
  }

  void body(Function& f) {
    int depth = 1;
    while (depth > 0) {
      if (peek().kind == TokenKind::kEnd) fail("expected '}'");
      if (accept("{")) {
        ++depth;
        Scope s;
        s.parent = scope_;
        scopes_.push_back(std::move(s));
        scope_ = static_cast<int>(scopes_.size()) - 1;
      } else if (accept("}")) {
        --depth;
        scope_ = scopes_[scope_].parent;
      } else if (peek().kind == TokenKind::kWord && peek(1).kind == TokenKind::kPunctuation && peek(1).text == ":") {
        label(f);
      } else if (peek().kind == TokenKind::kWord && peek().text[0] == '.') {
        directive(f);
      } else if (!accept(";")) {
        statement(f);
      }
    }
  }

  void label(Function& f) {
    const std::string name = next().text;
    next();
    if (accept(".branchtargets")) {
      std::vector<std::string>& list = f.branch_targets[name];
      do list.push_back(word("a label"));
      while (accept(","));
      expect(";");
      return;
    }
    if (is(".calltargets") || is(".callprototype")) fail("indirect calls are not modelled");
    const std::string unique = name + "." + std::to_string(scope_);
    if (!scopes_[scope_].labels.emplace(name, unique).second) fail("label '" + name + "' is defined twice");
    f.labels[unique] = static_cast<int>(f.statements.size());
  }

  void directive(Function& f) {
    if (is(".loc") || is(".file")) return skip_line();
    if (accept(".pragma")) return skip_to_semicolon();
    if (accept(".section")) {
      word("a section name");
      return skip_block();
    }
    if (accept(".reg")) return registers(f);
    for (const char* space : {".local", ".shared", ".param"}) {
      if (accept(space)) return variables(space + 1, false, f.variables, &scopes_[scope_]);
    }
    if (accept(".extern")) fail("extern variables inside a function are not modelled");
    fail("unknown directive '" + shown(peek()) + "' in a function");
  }

  void registers(Function& f) {
    const std::string type = word("a register type");
    const uint32_t bits = type == ".pred" ? 1 : type_bytes(type) * 8;
    if (bits == 0) fail("unknown register type '" + type + "'");
    auto declare = [&](const std::string& name) {
      const int id = static_cast<int>(f.registers.size());
      f.registers.push_back({name, static_cast<uint16_t>(bits)});
      if (!scopes_[scope_].registers.emplace(name, id).second) fail("register '" + name + "' is declared twice");
    };
    do {
      const std::string name = word("a register name");
      if (accept("<")) {
        const int64_t n = integer();
        expect(">");
        if (n < 0 || n > 1000000) fail("that many registers are not possible");
        for (int64_t i = 0; i < n; ++i) declare(name + std::to_string(i));
      } else {
        declare(name);
      }
    } while (accept(","));
    expect(";");
  }

  int find_register(const std::string& name) const {
    for (int s = scope_; s >= 0; s = scopes_[s].parent) {
      const auto it = scopes_[s].registers.find(name);
      if (it != scopes_[s].registers.end()) return it->second;
    }
    return -1;
  }
  const std::string* find_variable(const std::string& name) const {
    for (int s = scope_; s >= 0; s = scopes_[s].parent) {
      const auto it = scopes_[s].variables.find(name);
      if (it != scopes_[s].variables.end()) return &it->second;
    }
    return nullptr;
  }

  void statement(Function& f) {
    Statement st;
    st.line = peek().line;
    if (accept("@")) {
      st.guard_negated = accept("!");
      const std::string p = word("a predicate");
      st.guard = find_register(p);
      if (st.guard < 0) fail("register '" + p + "' is not declared");
      if (f.registers[st.guard].bits != 1) fail("guard '" + p + "' is not a predicate");
      st.line = peek().line;
    }
    const std::string opcode = word("an instruction");
    for (size_t begin = 0; begin <= opcode.size();) {
      size_t end = opcode.find('.', begin);
      if (end == std::string::npos) end = opcode.size();
      st.opcode.push_back(opcode.substr(begin, end - begin));
      begin = end + 1;
    }
    if (st.opcode[0] == "call") {
      call(st);
    } else if (!is(";")) {
      do st.operands.push_back(operand());
      while (accept(","));
    }
    expect(";");
    auto is_symbol = [&](size_t i) {
      return i < st.operands.size() && st.operands[i].kind == AstOperand::Kind::kSymbol;
    };
    if (st.opcode[0] == "bra" && !(st.operands.size() == 1 && is_symbol(0))) fail_at(st.line, "bra needs one label");
    if (st.opcode[0] == "brx" && !(st.operands.size() == 2 && is_symbol(1)))
      fail_at(st.line, "brx needs an index and a branch table");
    f.statements.push_back(std::move(st));
    scope_of_.push_back(scope_);
  }

  void call(Statement& st) {
    auto list = [&](std::vector<std::string>& out) {
      expect("(");
      if (accept(")")) return;
      do {
        const std::string name = word("a call parameter");
        const std::string* unique = find_variable(name);
        if (!unique) fail("call parameter '" + name + "' is not declared");
        out.push_back(*unique);
      } while (accept(","));
      expect(")");
    };
    if (is("(")) {
      list(st.call_returns);
      expect(",");
    }
    const std::string target = word("a function");
    if (find_register(target) >= 0) fail("indirect calls are not modelled");
    AstOperand o;
    o.kind = AstOperand::Kind::kSymbol;
    o.symbol = target;
    st.operands.push_back(std::move(o));
    if (accept(",")) {
      if (!is("(")) fail("indirect calls are not modelled");
      list(st.call_arguments);
      if (accept(",")) fail("indirect calls are not modelled");
    }
  }

  /// Vectors and initializers nest; nothing that a compiler writes nests deeply.
  struct Depth {
    explicit Depth(Parser& p) : parser(p) {
      if (++parser.depth_ > 16) parser.fail("nested too deeply");
    }
    ~Depth() { --parser.depth_; }
    Parser& parser;
  };

  AstOperand operand() {
    const Depth depth(*this);
    AstOperand o;
    if (accept("{")) {
      o.kind = AstOperand::Kind::kVector;
      do o.sub.push_back(operand());
      while (accept(","));
      expect("}");
      return o;
    }
    if (accept("[")) return address();
    if (accept("!")) {
      o = name_operand();
      if (o.kind != AstOperand::Kind::kRegister) fail("'!' needs a predicate register");
      o.negated = true;
      return o;
    }
    const TokenKind kind = peek().kind;
    if (is("-") || is("~") || kind == TokenKind::kInteger || kind == TokenKind::kFloat) return immediate();
    if (kind == TokenKind::kString) fail("unexpected string");
    o = name_operand();
    if (accept("|")) {
      AstOperand pair;
      pair.kind = AstOperand::Kind::kPair;
      pair.sub.push_back(std::move(o));
      pair.sub.push_back(operand());
      return pair;
    }
    return o;
  }

  AstOperand immediate() {
    AstOperand o;
    o.kind = AstOperand::Kind::kImmediate;
    const bool minus = accept("-");
    const Token& t = next();
    if (t.kind == TokenKind::kFloat) {
      o.float_bits = static_cast<uint8_t>(t.float_bits);
      o.bits = t.bits;
      if (minus) o.bits ^= t.float_bits == 32 ? 0x80000000ull : 0x8000000000000000ull;
    } else if (t.kind == TokenKind::kInteger) {
      o.bits = minus ? 0 - t.bits : t.bits;
    } else {
      fail("expected a number but found '" + shown(t) + "'");
    }
    return o;
  }

  AstOperand name_operand() {
    AstOperand o;
    const std::string name = word("an operand");
    if (name == "_") return o;
    o.reg = find_register(name);
    if (o.reg >= 0) {
      o.kind = AstOperand::Kind::kRegister;
      return o;
    }
    if (name == "WARP_SZ") {
      o.kind = AstOperand::Kind::kImmediate;
      o.bits = kWarpSizeImmediate;
      return o;
    }
    if (name[0] == '%') {
      o.kind = AstOperand::Kind::kSpecial;
      o.symbol = name;
      return o;
    }
    o.kind = AstOperand::Kind::kSymbol;
    const std::string* unique = find_variable(name);
    o.symbol = unique ? *unique : name;
    if (accept("+")) o.offset = integer();
    return o;
  }

  // After '[': base {+ offset} {, {coordinates}} ]
  AstOperand address() {
    AstOperand o;
    o.kind = AstOperand::Kind::kAddress;
    o.sub.push_back(peek().kind == TokenKind::kInteger ? immediate() : name_operand());
    AstOperand& base = o.sub[0];
    if (base.kind == AstOperand::Kind::kSink || base.kind == AstOperand::Kind::kSpecial) fail("that is not an address");
    o.offset = base.offset;
    base.offset = 0;
    if (accept("+")) o.offset += integer();
    else if (is("-")) o.offset += integer();
    if (accept(",")) {
      if (!is("{")) fail("expected coordinates in braces");
      o.sub.push_back(operand());
    }
    expect("]");
    return o;
  }

  // Labels may be used before they are defined: give each use its unique name now.
  void resolve_labels(Function& f) {
    auto find = [&](int scope, const std::string& name) -> const std::string* {
      for (int s = scope; s >= 0; s = scopes_[s].parent) {
        const auto it = scopes_[s].labels.find(name);
        if (it != scopes_[s].labels.end()) return &it->second;
      }
      return nullptr;
    };
    for (size_t i = 0; i < f.statements.size(); ++i) {
      Statement& st = f.statements[i];
      if (st.opcode[0] != "bra" || st.operands.empty()) continue;
      const std::string* unique = find(scope_of_[i], st.operands[0].symbol);
      if (!unique) fail_at(st.line, "label '" + st.operands[0].symbol + "' is not defined");
      st.operands[0].symbol = *unique;
    }
    for (auto& table : f.branch_targets) {
      for (std::string& target : table.second) {
        const std::string* unique = find(0, target);
        if (!unique) fail_at(f.line, "label '" + target + "' is not defined");
        target = *unique;
      }
    }
    scope_of_.clear();
  }

  static constexpr uint64_t kWarpSizeImmediate = 32;

  std::vector<Token> tokens_;
  size_t pos_ = 0;
  ModuleAst module_;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  int scope_ = 0;
  int unique_ = 0;
  int depth_ = 0;
  std::vector<int> scope_of_;  // of each statement of the current function
};

}  // namespace

ModuleAst parse_module(std::string_view text, const std::string& name) { return Parser(text, name).run(); }

}  // namespace vsm::ptx
