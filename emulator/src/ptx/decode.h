// SPDX-License-Identifier: Apache-2.0
// From the text's statements to decoded instructions. What an opcode means is told by the families in ops/.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "exec/machine.h"
#include "ptx/ast.h"

namespace vsm::ptx {

class Decoder;

/// One statement while it is decoded. Modifiers are taken one by one; what is left at emit() is an error, so a
/// form that no family knows is never executed as if it were another.
class Form {
 public:
  Form(Decoder& decoder, const Statement& statement);

  // --- modifiers
  bool take(const char* modifier);
  /// The first of these that is present, taken; empty if none is.
  std::string take_one(std::initializer_list<const char*> modifiers);
  /// The next modifier that names a type, in order; fails if there is none.
  exec::Type take_type();
  bool has_type() const;
  bool has(const char* modifier) const;
  /// The first modifier not taken yet; empty if none.
  std::string rest() const;
  std::string take_prefix(const char* prefix);  // the first modifier that starts so

  // --- operands of the text
  size_t count() const { return statement_.operands.size(); }
  const AstOperand& operand(size_t i) const {
    if (i >= count()) fail("operand " + std::to_string(i + 1) + " is missing");
    return statement_.operands[i];
  }
  void expect(size_t least, size_t most);
  void expect(size_t n) { expect(n, n); }
  bool is_register(const AstOperand& o, int bits) const;
  int register_bits(const AstOperand& o) const;  // 0 if it is none

  // --- decoded operands, appended in the order of the calls; each returns its index
  size_t in(const AstOperand& o, exec::Type type);
  size_t in(size_t i, exec::Type type) { return in(operand(i), type); }
  size_t out(const AstOperand& o, exec::Type type);
  size_t out(size_t i, exec::Type type) { return out(operand(i), type); }
  /// Registers at least as wide as the type (ld, st, cvt: 9.4.1 "Operand Size Exceeding Instruction-Type Size").
  size_t in_wide(const AstOperand& o, exec::Type type);
  size_t out_wide(const AstOperand& o, exec::Type type);
  size_t in_pred(const AstOperand& o);
  size_t in_pred(size_t i) { return in_pred(operand(i)); }
  size_t out_pred(const AstOperand& o);
  size_t out_pred(size_t i) { return out_pred(operand(i)); }
  size_t in_constant(uint64_t value, int bits);
  size_t in_special(exec::Special which, int bits, uint64_t addend = 0);
  /// Elements of a vector operand; a single register counts as a vector of one.
  std::vector<AstOperand> elements(size_t i) const;
  /// [base + offset]: the base is appended, the offset goes to inst.imm.
  size_t address(const AstOperand& o, exec::Space space);
  size_t address(size_t i, exec::Space space) { return address(operand(i), space); }
  /// Space of a declared variable, empty if there is none of that name.
  std::string symbol_space(const std::string& name) const;
  /// Integer literal that the form demands.
  int64_t immediate(size_t i) const;

  exec::Inst inst;
  /// Keeps `value` alive as long as the code; for inst.ext.
  template <class T>
  T* keep(T value) {
    auto p = std::make_shared<T>(std::move(value));
    T* raw = p.get();
    keep_pointer(std::move(p));
    return raw;
  }
  void emit(exec::Handler fn, OpClass cls);
  void note_launches_dependents();
  [[noreturn]] void fail(const std::string& what) const;
  const std::string& name() const { return statement_.opcode[0]; }
  Decoder& decoder() { return decoder_; }
  const Statement& statement() const { return statement_; }

 private:
  void keep_pointer(std::shared_ptr<void> p);
  size_t push(const exec::Operand& o);
  Decoder& decoder_;
  const Statement& statement_;
  std::vector<std::string> modifiers_;
  std::vector<exec::Operand> operands_;
};

using DecodeFn = void (*)(Form&);
using FormTable = std::unordered_map<std::string, DecodeFn>;
/// Every opcode that is known (ops/table.cpp).
const FormTable& form_table();

class Decoder {
 public:
  /// Copies called functions in and places the variables. `module` must outlive it, but for its functions.
  Decoder(const ModuleAst& module, const Function& function);
  const KernelInfo& info() const { return code_->info; }
  /// Decodes the instructions. To be called once.
  std::unique_ptr<exec::Code> run();

 private:
  friend class Form;
  struct Placed {
    std::string space;
    uint64_t offset = 0;
    bool dynamic = false;
  };
  void place_variables();
  void place_registers();
  void decode_statements();
  void resolve_branches();
  exec::Operand constant(uint64_t value, int bits);
  exec::Operand special(exec::Special which, int bits, uint64_t addend);
  exec::Operand symbol(const Form& form, const std::string& name, int64_t offset, int bits, std::string* space);
  [[noreturn]] void fail(int line, const std::string& what) const;

  const ModuleAst& module_;
  Function function_;  // calls inlined
  std::unique_ptr<exec::Code> code_;
  std::vector<exec::Operand> registers_;
  std::map<std::string, Placed> variables_;
  std::map<std::pair<uint64_t, int>, uint32_t> constants_;
  std::map<std::pair<int, std::pair<int, uint64_t>>, uint32_t> specials_;
  struct Fixup {
    size_t inst;
    std::vector<std::string> labels;
    bool table;
  };
  std::vector<Fixup> fixups_;
};

/// Copies the bodies of called functions into the caller. Throws PtxError for recursion and unknown functions.
Function inline_calls(const ModuleAst& module, const Function& function);
/// Functions of the CUDA device runtime that stay calls ("__assertfail", "vprintf").
bool is_device_runtime_function(const std::string& name);

/// Immediate post-dominator of each instruction given its successors; -1 where only the exit is common.
std::vector<int> post_dominators(const std::vector<std::vector<int>>& successors);

}  // namespace vsm::ptx

namespace vsm {

struct ProgramImpl {
  struct Kernel {
    std::unique_ptr<ptx::Decoder> decoder;  // until somebody asks for the code
    std::unique_ptr<exec::Code> code;
    std::string error;  // why there is none
    int error_line = 0;
  };
  std::string name;
  ptx::ModuleAst module;  // without its functions
  std::vector<KernelInfo> kernels;
  std::vector<VariableInfo> variables;
  std::mutex mutex;  // guards the codes
  std::vector<Kernel> codes;  // same order as kernels
  exec::ModuleText text;
};

}  // namespace vsm
