// SPDX-License-Identifier: Apache-2.0
#include "ptx/decode.h"

#include <algorithm>
#include <set>

#include "formats.h"
#include "gpu_limits.h"

namespace vsm::ptx {

using namespace exec;

namespace {

struct SpecialName {
  const char* name;
  Special which;
  uint64_t addend;
};
// PTX ISA 9.0, chapter 10. A cluster is one block. Registers whose value changes while a warp runs (%clock,
// %globaltimer, ...) are read by mov itself.
constexpr SpecialName kSpecials[] = {{"%tid.x", Special::kTidX, 0},
                                     {"%tid.y", Special::kTidY, 0},
                                     {"%tid.z", Special::kTidZ, 0},
                                     {"%ntid.x", Special::kNtidX, 0},
                                     {"%ntid.y", Special::kNtidY, 0},
                                     {"%ntid.z", Special::kNtidZ, 0},
                                     {"%ctaid.x", Special::kCtaidX, 0},
                                     {"%ctaid.y", Special::kCtaidY, 0},
                                     {"%ctaid.z", Special::kCtaidZ, 0},
                                     {"%nctaid.x", Special::kNctaidX, 0},
                                     {"%nctaid.y", Special::kNctaidY, 0},
                                     {"%nctaid.z", Special::kNctaidZ, 0},
                                     {"%clusterid.x", Special::kCtaidX, 0},
                                     {"%clusterid.y", Special::kCtaidY, 0},
                                     {"%clusterid.z", Special::kCtaidZ, 0},
                                     {"%nclusterid.x", Special::kNctaidX, 0},
                                     {"%nclusterid.y", Special::kNctaidY, 0},
                                     {"%nclusterid.z", Special::kNctaidZ, 0},
                                     {"%cluster_ctaid.x", Special::kZero, 0},
                                     {"%cluster_ctaid.y", Special::kZero, 0},
                                     {"%cluster_ctaid.z", Special::kZero, 0},
                                     {"%cluster_nctaid.x", Special::kOne, 0},
                                     {"%cluster_nctaid.y", Special::kOne, 0},
                                     {"%cluster_nctaid.z", Special::kOne, 0},
                                     {"%cluster_ctarank", Special::kZero, 0},
                                     {"%cluster_nctarank", Special::kOne, 0},
                                     {"%laneid", Special::kLaneid, 0},
                                     {"%warpid", Special::kWarpid, 0},
                                     {"%nwarpid", Special::kNwarpid, 0},
                                     {"%smid", Special::kSmid, 0},
                                     {"%nsmid", Special::kNsmid, 0},
                                     {"%gridid", Special::kGridid, 0},
                                     {"%lanemask_eq", Special::kLanemaskEq, 0},
                                     {"%lanemask_le", Special::kLanemaskLe, 0},
                                     {"%lanemask_lt", Special::kLanemaskLt, 0},
                                     {"%lanemask_ge", Special::kLanemaskGe, 0},
                                     {"%lanemask_gt", Special::kLanemaskGt, 0},
                                     {"%dynamic_smem_size", Special::kDynamicSmem, 0},
                                     {"%total_smem_size", Special::kTotalSmem, 0},
                                     {"%aggr_smem_size", Special::kTotalSmem, 0},
                                     {"%reserved_smem_offset_begin", Special::kZero, 0},
                                     {"%reserved_smem_offset_end", Special::kReservedSmem, 0},
                                     {"%reserved_smem_offset_cap", Special::kReservedSmem, 0},
                                     // Not in the ISA: where cooperative_groups finds the grid barrier's words.
                                     {"%envreg1", Special::kGridWorkspaceHigh, 0},
                                     {"%envreg2", Special::kGridWorkspaceLow, 0}};

uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

}  // namespace

// --- Form -----------------------------------------------------------------------------------------------------------

Form::Form(Decoder& decoder, const Statement& statement)
    : decoder_(decoder), statement_(statement), modifiers_(statement.opcode.begin() + 1, statement.opcode.end()) {}

void Form::fail(const std::string& what) const {
  std::string opcode;
  for (const std::string& part : statement_.opcode) opcode += (opcode.empty() ? "" : ".") + part;
  decoder_.fail(statement_.line, "`" + opcode + "`: " + what);
}

bool Form::has(const char* m) const { return std::find(modifiers_.begin(), modifiers_.end(), m) != modifiers_.end(); }

bool Form::take(const char* m) {
  const auto it = std::find(modifiers_.begin(), modifiers_.end(), m);
  if (it == modifiers_.end()) return false;
  modifiers_.erase(it);
  return true;
}

std::string Form::take_one(std::initializer_list<const char*> names) {
  for (const char* n : names) {
    if (take(n)) return n;
  }
  return "";
}

std::string Form::take_prefix(const char* prefix) {
  const size_t n = std::strlen(prefix);
  for (auto it = modifiers_.begin(); it != modifiers_.end(); ++it) {
    if (it->compare(0, n, prefix) != 0) continue;
    std::string found = *it;
    modifiers_.erase(it);
    return found;
  }
  return "";
}

Type Form::take_type() {
  for (auto it = modifiers_.begin(); it != modifiers_.end(); ++it) {
    const Type t = parse_type(*it);
    if (t == Type::kNone) continue;
    modifiers_.erase(it);
    return t;
  }
  fail("a type is missing");
}

bool Form::has_type() const {
  return std::any_of(modifiers_.begin(), modifiers_.end(),
                     [](const std::string& m) { return parse_type(m) != Type::kNone; });
}

std::string Form::rest() const { return modifiers_.empty() ? "" : modifiers_.front(); }

void Form::expect(size_t least, size_t most) {
  if (count() >= least && count() <= most) return;
  fail("has " + std::to_string(count()) + " operands; the form takes " + std::to_string(least) +
       (least == most ? "" : " to " + std::to_string(most)));
}

int Form::register_bits(const AstOperand& o) const {
  return o.kind == AstOperand::Kind::kRegister ? decoder_.function_.registers[static_cast<size_t>(o.reg)].bits : 0;
}
bool Form::is_register(const AstOperand& o, int bits) const { return register_bits(o) == bits; }

size_t Form::push(const Operand& o) {
  operands_.push_back(o);
  return operands_.size() - 1;
}

size_t Form::in_constant(uint64_t value, int bits) { return push(decoder_.constant(value, bits)); }
size_t Form::in_special(Special which, int bits, uint64_t addend) {
  return push(decoder_.special(which, bits, addend));
}

size_t Form::in(const AstOperand& o, Type type) {
  const int bits = type_bits(type);
  switch (o.kind) {
    case AstOperand::Kind::kRegister: {
      const int have = register_bits(o);
      if (have != bits) {
        fail("register '" + decoder_.function_.registers[static_cast<size_t>(o.reg)].name + "' has " +
             std::to_string(have) + " bits; the form takes " + std::to_string(bits));
      }
      if (bits == 1) return in_pred(o);
      return push(decoder_.registers_[static_cast<size_t>(o.reg)]);
    }
    case AstOperand::Kind::kImmediate: {
      uint64_t value = o.bits;
      if (o.float_bits) {
        const double d = o.float_bits == 32 ? bits_to_float(static_cast<uint32_t>(o.bits)) : bits_to_double(o.bits);
        if (bits == 32 && (type == Type::kF32 || is_bits(type)))
          value = o.float_bits == 32 ? o.bits : float_to_bits(static_cast<float>(d));
        else if (bits == 64 && (type == Type::kF64 || is_bits(type)))
          value = o.float_bits == 64 ? o.bits : double_to_bits(d);
        else fail("a floating point constant cannot be an operand of type ." + std::string(to_string(type)));
      } else if (is_float(type) && type != Type::kF16x2 && type != Type::kBF16x2 && type != Type::kF16 &&
                 type != Type::kBF16) {
        fail("an integer constant cannot be an operand of type ." + std::string(to_string(type)));
      }
      if (bits < 64) value &= (uint64_t{1} << bits) - 1;
      return in_constant(value, bits);
    }
    case AstOperand::Kind::kSpecial: {
      for (const SpecialName& s : kSpecials) {
        if (o.symbol == s.name) return in_special(s.which, bits < 32 ? 32 : bits, s.addend);
      }
      fail("special register '" + o.symbol + "' is not modelled");
    }
    case AstOperand::Kind::kSymbol: {
      std::string space;
      return push(decoder_.symbol(*this, o.symbol, o.offset, bits, &space));
    }
    default: fail("that kind of operand is not possible here");
  }
}

size_t Form::in_wide(const AstOperand& o, Type type) {
  const int have = register_bits(o);
  if (have == 0 || have == type_bits(type)) {
    if (have == 0 && type_bits(type) == 8) return in(o, Type::kB16);
    return in(o, type);
  }
  if (have == 1 || have < type_bits(type) || type_bits(type) == 128) {
    fail("a register of " + std::to_string(have) + " bits does not hold ." + to_string(type));
  }
  return push(decoder_.registers_[static_cast<size_t>(o.reg)]);
}

size_t Form::out(const AstOperand& o, Type type) {
  if (type == Type::kPred) return out_pred(o);
  Operand sink;
  sink.bits = static_cast<uint8_t>(type_bits(type));
  sink.sink = true;
  if (o.kind == AstOperand::Kind::kSink) return push(sink);
  if (o.kind != AstOperand::Kind::kRegister) fail("the destination must be a register");
  return in(o, type);
}

size_t Form::out_wide(const AstOperand& o, Type type) {
  if (o.kind == AstOperand::Kind::kSink) return out(o, type);
  if (o.kind != AstOperand::Kind::kRegister) fail("the destination must be a register");
  return in_wide(o, type);
}

size_t Form::in_pred(const AstOperand& o) {
  if (o.kind == AstOperand::Kind::kImmediate && !o.float_bits) return in_constant(o.bits ? 0xffffffffu : 0, 32);
  if (!is_register(o, 1)) fail("a predicate register is needed");
  Operand p = decoder_.registers_[static_cast<size_t>(o.reg)];
  p.negated = o.negated;
  return push(p);
}

size_t Form::out_pred(const AstOperand& o) {
  Operand sink;
  sink.bits = 1;
  sink.sink = true;
  if (o.kind == AstOperand::Kind::kSink) return push(sink);
  if (!is_register(o, 1) || o.negated) fail("the destination must be a predicate register");
  return in_pred(o);
}

std::vector<AstOperand> Form::elements(size_t i) const {
  const AstOperand& o = operand(i);
  if (o.kind == AstOperand::Kind::kVector) return o.sub;
  return {o};
}

size_t Form::address(const AstOperand& o, Space space) {
  if (o.kind != AstOperand::Kind::kAddress) fail("an address in brackets is needed");
  const AstOperand& base = o.sub[0];
  inst.imm = o.offset;
  if (base.kind == AstOperand::Kind::kRegister) {
    const int bits = register_bits(base);
    if (bits != 64 && bits != 32) fail("an address register must have 32 or 64 bits");
    if (bits == 32 && space != Space::kShared && space != Space::kLocal && space != Space::kParam) {
      fail("a 32-bit register cannot address ." + std::string(exec::to_string(space)) + " memory");
    }
    return push(decoder_.registers_[static_cast<size_t>(base.reg)]);
  }
  if (base.kind == AstOperand::Kind::kImmediate) return in_constant(base.bits, 64);
  std::string where;
  const Operand p = decoder_.symbol(*this, base.symbol, 0, 64, &where);
  const bool fits = where == exec::to_string(space) ||
                    (space == Space::kGeneric && (where == "global" || where == "const")) ||
                    (space == Space::kGlobal && where == "const") || (space == Space::kParam && where == "local");
  if (!fits) fail("'" + base.symbol + "' is in ." + where + " memory, not ." + exec::to_string(space));
  return push(p);
}

std::string Form::symbol_space(const std::string& name) const {
  const auto it = decoder_.variables_.find(name);
  return it == decoder_.variables_.end() ? "" : it->second.space;
}

int64_t Form::immediate(size_t i) const {
  const AstOperand& o = operand(i);
  if (o.kind != AstOperand::Kind::kImmediate || o.float_bits)
    fail("operand " + std::to_string(i + 1) + " must be an integer constant");
  return static_cast<int64_t>(o.bits);
}

void Form::keep_pointer(std::shared_ptr<void> p) { decoder_.code_->extensions.push_back(std::move(p)); }

void Form::note_launches_dependents() { decoder_.code_->launches_dependents = true; }

void Form::emit(Handler fn, OpClass cls) {
  if (!modifiers_.empty()) fail("modifier '." + modifiers_.front() + "' is not modelled here");
  inst.fn = fn;
  inst.cls = cls;
  inst.line = static_cast<uint32_t>(statement_.line);
  if (statement_.guard >= 0) {
    inst.guard = static_cast<int32_t>(decoder_.registers_[static_cast<size_t>(statement_.guard)].slot);
    inst.guard_negated = statement_.guard_negated;
  }
  decoder_.code_->operands.push_back(std::move(operands_));
  operands_.clear();
  inst.op = decoder_.code_->operands.back().data();
  inst.count = static_cast<uint16_t>(decoder_.code_->operands.back().size());
  decoder_.code_->insts.push_back(inst);
}

// --- Decoder --------------------------------------------------------------------------------------------------------

Decoder::Decoder(const ModuleAst& module, const Function& function)
    : module_(module), function_(inline_calls(module, function)), code_(new Code) {
  KernelInfo& info = code_->info;
  info.name = function_.name;
  info.line = function_.line;
  std::copy(function_.reqntid, function_.reqntid + 3, info.reqntid);
  std::copy(function_.maxntid, function_.maxntid + 3, info.maxntid);
  info.minnctapersm = function_.minnctapersm;
  info.maxnreg = function_.maxnreg;
  place_variables();
}

void Decoder::fail(int line, const std::string& what) const {
  throw PtxError(line, module_.name + ":" + std::to_string(line) + ": in " + function_.name + ": " + what);
}

std::unique_ptr<Code> Decoder::run() {
  place_registers();
  decode_statements();
  resolve_branches();
  return std::move(code_);
}

void Decoder::place_variables() {
  KernelInfo& info = code_->info;
  uint64_t offset = 0;
  for (const Variable& p : function_.params) {
    offset = align_up(offset, p.align);
    info.params.push_back({p.name, static_cast<uint32_t>(offset), static_cast<uint32_t>(p.size), p.align});
    variables_[p.unique] = {"param", offset, false};
    offset += p.size;
  }
  if (offset > 32764)
    fail(function_.line, "the parameters take " + std::to_string(offset) + " bytes; at most 32,764 are possible");
  info.param_bytes = static_cast<uint32_t>(offset);

  // Shared variables of the module count only for the kernels that name them.
  std::set<std::string> named;
  auto visit = [&](const AstOperand& o, auto&& self) -> void {
    if (!o.symbol.empty()) named.insert(o.symbol);
    for (const AstOperand& sub : o.sub) self(sub, self);
  };
  for (const Statement& st : function_.statements) {
    for (const AstOperand& o : st.operands) visit(o, visit);
  }
  uint64_t shared = 0, local = 0;
  const uint64_t reserved = Limits().shared_reserved;
  std::vector<const Variable*> dynamic;
  auto place = [&](const Variable& v) {
    if (v.space == "shared" && v.is_extern) {
      dynamic.push_back(&v);
      info.dynamic_shared_align = std::max(info.dynamic_shared_align, v.align);
    } else if (v.space == "shared") {
      shared = align_up(shared, v.align);
      variables_[v.unique] = {"shared", reserved + shared, false};
      shared += v.size;
    } else if (v.space == "local" || v.space == "param") {  // .param of a body: arguments of calls, a thread's own
      local = align_up(local, v.align);
      variables_[v.unique] = {"local", local, false};
      local += v.size;
    }
  };
  for (const Variable& v : module_.variables) {
    if (v.space == "shared" && named.count(v.name)) place(v);
    if (v.space != "shared") variables_[v.name] = {v.space, 0, false};
  }
  for (const Variable& v : function_.variables) place(v);
  if (shared > (1u << 24) || local > (1u << 24)) fail(function_.line, "shared or local variables of more than 16 MiB");
  info.static_shared = static_cast<uint32_t>(shared);
  info.local_bytes = static_cast<uint32_t>(align_up(local, 16));
  code_->local_bytes = info.local_bytes;
  for (const Variable* v : dynamic) variables_[v->unique] = {"shared", reserved + code_->dynamic_shared_offset(), true};
}

void Decoder::place_registers() {
  registers_.reserve(function_.registers.size());
  for (const RegisterDecl& r : function_.registers) {
    Operand o;
    o.bits = static_cast<uint8_t>(r.bits);
    if (r.bits == 1) {
      o.slot = code_->predicates++;
    } else {
      o.slot = code_->register_slots;
      code_->register_slots += r.bits <= 32 ? 1 : r.bits / 32;
    }
    registers_.push_back(o);
  }
}

Operand Decoder::constant(uint64_t value, int bits) {
  const int stored = bits <= 32 ? 32 : bits;
  auto it = constants_.find({value, stored});
  if (it == constants_.end()) {
    const uint32_t slot = static_cast<uint32_t>(code_->constants.size() / 32);
    for (int lane = 0; lane < 32; ++lane) {
      code_->constants.push_back(static_cast<uint32_t>(value));
      if (stored == 64) code_->constants.push_back(static_cast<uint32_t>(value >> 32));
    }
    it = constants_.emplace(std::make_pair(value, stored), slot).first;
  }
  Operand o;
  o.slot = it->second;
  o.file = 1;
  o.bits = static_cast<uint8_t>(stored);
  return o;
}

Operand Decoder::special(Special which, int bits, uint64_t addend) {
  const auto key = std::make_pair(static_cast<int>(which), std::make_pair(bits, addend));
  auto it = specials_.find(key);
  if (it == specials_.end()) {
    const uint32_t slot = code_->register_slots;
    code_->register_slots += bits == 64 ? 2 : 1;
    code_->specials.push_back({which, slot, static_cast<uint8_t>(bits), addend});
    it = specials_.emplace(key, slot).first;
  }
  Operand o;
  o.slot = it->second;
  o.bits = static_cast<uint8_t>(bits);
  return o;
}

// The address of a variable in its own space.
Operand Decoder::symbol(const Form& form, const std::string& name, int64_t offset, int bits, std::string* space) {
  const auto it = variables_.find(name);
  if (it == variables_.end()) form.fail("'" + name + "' is not declared");
  const Placed& v = it->second;
  *space = v.space;
  if (v.space == "param") return special(Special::kParamBase, 64, v.offset + static_cast<uint64_t>(offset));
  if (v.space == "shared" || v.space == "local") return constant(v.offset + static_cast<uint64_t>(offset), bits);
  if (bits != 64) form.fail("the address of '" + name + "' has 64 bits");
  const uint32_t slot = static_cast<uint32_t>(code_->constants.size() / 32);
  code_->constants.resize(code_->constants.size() + 64, 0);
  code_->symbols.push_back({slot, name, offset});
  Operand o;
  o.slot = slot;
  o.file = 1;
  o.bits = 64;
  return o;
}

void Decoder::decode_statements() {
  const FormTable& table = form_table();
  std::vector<int> first(function_.statements.size() + 1);
  for (size_t i = 0; i < function_.statements.size(); ++i) {
    const Statement& st = function_.statements[i];
    first[i] = static_cast<int>(code_->insts.size());
    Form form(*this, st);
    const auto it = table.find(st.opcode[0]);
    if (it == table.end()) form.fail("this instruction is not modelled");
    it->second(form);
    if (st.opcode[0] == "bra") fixups_.push_back({code_->insts.size() - 1, {st.operands[0].symbol}, false});
    if (st.opcode[0] == "brx") {
      const auto targets = function_.branch_targets.find(st.operands[1].symbol);
      if (targets == function_.branch_targets.end())
        form.fail("branch table '" + st.operands[1].symbol + "' is not defined");
      fixups_.push_back({code_->insts.size() - 1, targets->second, true});
    }
  }
  first.back() = static_cast<int>(code_->insts.size());
  for (auto& label : function_.labels) label.second = first[static_cast<size_t>(label.second)];
  // Running off the end is a return.
  Statement end;
  end.line = function_.statements.empty() ? function_.line : function_.statements.back().line;
  end.opcode = {"ret"};
  Form form(*this, end);
  table.at("ret")(form);
}

void Decoder::resolve_branches() {
  std::vector<Inst>& insts = code_->insts;
  std::vector<std::vector<int>> successors(insts.size());
  std::vector<bool> is_branch(insts.size(), false);
  const Handler exit = insts.back().fn;
  for (const Fixup& f : fixups_) {
    is_branch[f.inst] = true;
    std::vector<uint32_t> targets;
    for (const std::string& l : f.labels) {
      const auto it = function_.labels.find(l);
      if (it == function_.labels.end()) fail(static_cast<int>(insts[f.inst].line), "label '" + l + "' is not defined");
      targets.push_back(static_cast<uint32_t>(it->second));
      successors[f.inst].push_back(it->second);
    }
    if (f.table) {
      auto kept = std::make_shared<std::vector<uint32_t>>(targets);
      insts[f.inst].ext = kept.get();
      code_->extensions.push_back(std::move(kept));
    } else {
      insts[f.inst].target = targets[0];
    }
    if (insts[f.inst].guard >= 0) successors[f.inst].push_back(static_cast<int>(f.inst) + 1);
  }
  for (size_t i = 0; i + 1 < insts.size(); ++i) {
    const bool leaves = insts[i].fn == exit && insts[i].guard < 0;
    if (!is_branch[i] && !leaves) successors[i].push_back(static_cast<int>(i) + 1);
  }
  const std::vector<int> ipdom = post_dominators(successors);
  for (const Fixup& f : fixups_) insts[f.inst].reconverge = ipdom[f.inst];
}

}  // namespace vsm::ptx

// --- Program --------------------------------------------------------------------------------------------------------

namespace vsm {

Program::Program() : impl_(new ProgramImpl) {}
Program::~Program() = default;
const std::string& Program::name() const { return impl_->name; }
const std::string& Program::target() const { return impl_->module.target; }
const std::vector<KernelInfo>& Program::kernels() const { return impl_->kernels; }
const std::vector<VariableInfo>& Program::variables() const { return impl_->variables; }

int Program::find_kernel(std::string_view name) const {
  for (size_t i = 0; i < impl_->kernels.size(); ++i) {
    if (impl_->kernels[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

const exec::Code& Program::code(int kernel) const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  ProgramImpl::Kernel& k = impl_->codes[static_cast<size_t>(kernel)];
  if (k.decoder) {
    try {
      k.code = k.decoder->run();
    } catch (const PtxError& error) {
      k.error = error.what();
      k.error_line = error.line();
    }
    k.decoder.reset();
  }
  if (!k.code) throw PtxError(k.error_line, k.error);
  return *k.code;
}

std::shared_ptr<const Program> Program::parse(std::string_view text, const std::string& module_name) {
  std::shared_ptr<Program> program(new Program);
  ProgramImpl& p = *program->impl_;
  p.name = module_name;
  p.module = ptx::parse_module(text, module_name);
  ptx::ModuleAst& ast = p.module;
  for (const ptx::Variable& v : ast.variables) {
    if (v.space == "shared") continue;
    if (v.is_extern)
      throw PtxError(v.line, module_name + ":" + std::to_string(v.line) + ": extern variable '" + v.name +
                                 "' is not defined in the module");
    VariableInfo info;
    info.name = v.name;
    info.is_const = v.space == "const";
    info.size = v.size;
    info.align = v.align;
    info.init = v.init;
    info.relocations = v.relocations;
    p.variables.push_back(std::move(info));
  }
  for (const ptx::Function& f : ast.functions) {
    if (!f.is_entry || !f.has_body) continue;
    ProgramImpl::Kernel kernel;
    KernelInfo info;
    info.name = f.name;
    info.line = f.line;
    try {
      kernel.decoder = std::make_unique<ptx::Decoder>(ast, f);
      info = kernel.decoder->info();
    } catch (const PtxError& error) {
      kernel.error = error.what();
      kernel.error_line = error.line();
    }
    p.codes.push_back(std::move(kernel));
    p.kernels.push_back(std::move(info));
  }
  ast.functions.clear();
  p.text.name = module_name;
  p.text.lines = std::move(ast.lines);
  return program;
}

}  // namespace vsm
