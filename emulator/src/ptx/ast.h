// SPDX-License-Identifier: Apache-2.0
// PTX text as written: directives and statements, before any meaning is given to an opcode.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "program.h"

namespace vsm::ptx {

/// A register declared in some scope. Names may repeat in nested scopes; ids do not.
struct RegisterDecl {
  std::string name;
  uint16_t bits = 32;  // 1 for .pred, else 8..128
};

struct AstOperand {
  enum class Kind : uint8_t { kRegister, kImmediate, kSymbol, kSpecial, kAddress, kVector, kPair, kSink };
  Kind kind = Kind::kSink;
  int reg = -1;               // kRegister
  bool negated = false;       // !p
  uint64_t bits = 0;          // kImmediate: integer value (two's complement) or the bits of a float literal
  uint8_t float_bits = 0;     // kImmediate: 32 or 64 for a float literal
  std::string symbol;         // kSymbol (variable, label, parameter, function) or kSpecial ("%tid.x")
  int64_t offset = 0;         // kSymbol / kAddress: added
  std::vector<AstOperand> sub;  // kAddress: base {, coordinate vector}; kVector: elements; kPair: both halves
};

struct Statement {
  int line = 0;
  int guard = -1;  // register id
  bool guard_negated = false;
  std::vector<std::string> opcode;  // split at dots: {"ld", "global", "v4", "u32"}
  std::vector<AstOperand> operands;
  // call only: return parameters, arguments, and the target's name in operands[0]
  std::vector<std::string> call_returns, call_arguments;
};

/// A variable or parameter in any space. `unique` is its name after scoping.
struct Variable {
  std::string name;
  std::string unique;
  std::string space;  // "shared", "local", "param", "global", "const"
  uint64_t size = 0;
  uint32_t align = 1;
  bool is_extern = false;
  std::vector<uint8_t> init;
  std::vector<VariableInfo::Relocation> relocations;
  int line = 0;
};

struct Function {
  std::string name;
  int line = 0;
  bool is_entry = false;
  bool has_body = false;
  std::vector<Variable> returns;  // .func only
  std::vector<Variable> params;
  std::vector<Variable> variables;  // shared, local and param variables of the body
  std::vector<RegisterDecl> registers;
  std::vector<Statement> statements;
  std::map<std::string, int> labels;  // unique label -> index of the statement it precedes
  std::map<std::string, std::vector<std::string>> branch_targets;
  uint32_t reqntid[3] = {0, 0, 0}, maxntid[3] = {0, 0, 0};
  uint32_t minnctapersm = 0, maxnreg = 0;
  std::string error;  // why its body cannot be run; empty if it parsed
  int error_line = 0;
};

struct ModuleAst {
  std::string name, target, version;
  std::vector<Variable> variables;  // module scope: global, const, shared
  std::vector<Function> functions;
  std::vector<std::string> lines;  // the text, for reports
};

/// Throws PtxError.
ModuleAst parse_module(std::string_view text, const std::string& name);

}  // namespace vsm::ptx
