// SPDX-License-Identifier: Apache-2.0
// Calls become copies of the callee's body: parameters are the caller's variables under another name.
#include <algorithm>

#include "ptx/decode.h"

namespace vsm::ptx {
namespace {

class Inliner {
 public:
  Inliner(const ModuleAst& module, const Function& root) : module_(module), root_(root) {}

  Function run() {
    if (!root_.error.empty()) throw PtxError(root_.error_line, root_.error);
    out_ = root_;
    out_.statements.clear();
    out_.labels.clear();
    stack_.push_back(root_.name);
    copy(root_, {}, 0, "", "");
    return std::move(out_);
  }

 private:
  using Names = std::map<std::string, std::string>;

  [[noreturn]] void fail(int line, const std::string& what) const {
    throw PtxError(line, module_.name + ":" + std::to_string(line) + ": in " + root_.name + ": " + what);
  }

  static void rename(AstOperand& o, const Names& names, int first_register) {
    if (o.reg >= 0) o.reg += first_register;
    const auto it = names.find(o.symbol);
    if (it != names.end()) o.symbol = it->second;
    for (AstOperand& sub : o.sub) rename(sub, names, first_register);
  }

  // Appends `f`'s statements. `prefix` makes its labels and variables unique; `end` is where ret goes ("" for the root).
  void copy(const Function& f, Names names, int first_register, const std::string& prefix, const std::string& end) {
    auto label = [&](const std::string& l) { return prefix.empty() ? l : prefix + l; };
    if (!prefix.empty()) {
      for (Variable v : f.variables) {
        names[v.unique] = prefix + v.unique;
        v.unique = prefix + v.unique;
        out_.variables.push_back(std::move(v));
      }
      for (const auto& t : f.branch_targets) {
        std::vector<std::string>& list = out_.branch_targets[prefix + t.first];
        for (const std::string& l : t.second) list.push_back(label(l));
      }
    }
    std::vector<std::vector<std::string>> labels_at(f.statements.size() + 1);
    for (const auto& l : f.labels) labels_at[static_cast<size_t>(l.second)].push_back(l.first);
    for (size_t i = 0; i <= f.statements.size(); ++i) {
      for (const std::string& l : labels_at[i]) out_.labels[label(l)] = static_cast<int>(out_.statements.size());
      if (i == f.statements.size()) break;
      Statement st = f.statements[i];
      if (st.guard >= 0) st.guard += first_register;
      for (AstOperand& o : st.operands) rename(o, names, first_register);
      for (auto* list : {&st.call_returns, &st.call_arguments}) {
        for (std::string& n : *list) {
          const auto it = names.find(n);
          if (it != names.end()) n = it->second;
        }
      }
      if (st.opcode[0] == "bra") st.operands[0].symbol = label(st.operands[0].symbol);
      if (st.opcode[0] == "brx" && st.operands.size() == 2) st.operands[1].symbol = label(st.operands[1].symbol);
      if (st.opcode[0] == "ret" && !end.empty()) {
        st.opcode = {"bra"};
        AstOperand target;
        target.kind = AstOperand::Kind::kSymbol;
        target.symbol = end;
        st.operands = {target};
      }
      if (st.opcode[0] == "call" && !is_device_runtime_function(st.operands[0].symbol)) {
        call(st);
      } else {
        if (out_.statements.size() > 2000000) fail(st.line, "the kernel is too large once its calls are expanded");
        out_.statements.push_back(std::move(st));
      }
    }
  }

  void call(const Statement& st) {
    const std::string& name = st.operands[0].symbol;
    const auto callee = std::find_if(module_.functions.begin(), module_.functions.end(),
                                     [&](const Function& f) { return f.name == name && f.has_body; });
    if (callee == module_.functions.end()) fail(st.line, "call of '" + name + "', which has no body in the module");
    if (!callee->error.empty()) fail(st.line, "call of '" + name + "', which cannot be run: " + callee->error);
    if (std::find(stack_.begin(), stack_.end(), name) != stack_.end())
      fail(st.line, "recursive call of '" + name + "' is not modelled");
    if (callee->params.size() != st.call_arguments.size() || callee->returns.size() != st.call_returns.size()) {
      fail(st.line, "call of '" + name + "' with " + std::to_string(st.call_arguments.size()) + " arguments and " +
                        std::to_string(st.call_returns.size()) + " results; it has " +
                        std::to_string(callee->params.size()) + " and " + std::to_string(callee->returns.size()));
    }
    Names names;
    for (size_t i = 0; i < callee->params.size(); ++i) names[callee->params[i].unique] = st.call_arguments[i];
    for (size_t i = 0; i < callee->returns.size(); ++i) names[callee->returns[i].unique] = st.call_returns[i];
    const std::string prefix = "call" + std::to_string(calls_++) + ":";
    const std::string skip = prefix + "skip", end = prefix + "end";
    if (st.guard >= 0) {  // @p call: jump over the body where p is false
      Statement jump;
      jump.line = st.line;
      jump.guard = st.guard;
      jump.guard_negated = !st.guard_negated;
      jump.opcode = {"bra"};
      AstOperand target;
      target.kind = AstOperand::Kind::kSymbol;
      target.symbol = end;
      jump.operands = {target};
      out_.statements.push_back(std::move(jump));
    }
    const int first = static_cast<int>(out_.registers.size());
    out_.registers.insert(out_.registers.end(), callee->registers.begin(), callee->registers.end());
    stack_.push_back(name);
    copy(*callee, std::move(names), first, prefix, end);
    stack_.pop_back();
    out_.labels[end] = static_cast<int>(out_.statements.size());
  }

  const ModuleAst& module_;
  const Function& root_;
  Function out_;
  std::vector<std::string> stack_;
  int calls_ = 0;
};

}  // namespace

bool is_device_runtime_function(const std::string& name) { return name == "__assertfail" || name == "vprintf"; }

Function inline_calls(const ModuleAst& module, const Function& function) { return Inliner(module, function).run(); }

// Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph with one virtual exit.
std::vector<int> post_dominators(const std::vector<std::vector<int>>& successors) {
  const int n = static_cast<int>(successors.size());
  const int exit = n;
  std::vector<std::vector<int>> predecessors(static_cast<size_t>(n) + 1);
  for (int i = 0; i < n; ++i) {
    if (successors[i].empty()) predecessors[exit].push_back(i);
    for (const int s : successors[i]) predecessors[s].push_back(i);
  }
  // Postorder of the reversed graph from the exit.
  std::vector<int> order(static_cast<size_t>(n) + 1, -1), postorder;
  std::vector<std::pair<int, size_t>> stack{{exit, 0}};
  std::vector<bool> seen(static_cast<size_t>(n) + 1, false);
  seen[exit] = true;
  while (!stack.empty()) {
    auto& top = stack.back();
    const std::vector<int>& next = predecessors[top.first];
    if (top.second < next.size()) {
      const int s = next[top.second++];
      if (!seen[s]) {
        seen[s] = true;
        stack.push_back({s, 0});
      }
    } else {
      order[top.first] = static_cast<int>(postorder.size());
      postorder.push_back(top.first);
      stack.pop_back();
    }
  }
  std::vector<int> dominator(static_cast<size_t>(n) + 1, -1);
  dominator[exit] = exit;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t k = postorder.size(); k-- > 0;) {
      const int node = postorder[k];
      if (node == exit) continue;
      int best = -1;
      auto meet = [&](int s) {
        if (dominator[s] < 0) return;
        if (best < 0) {
          best = s;
          return;
        }
        int a = best, b = s;
        while (a != b) {
          while (order[a] < order[b]) a = dominator[a];
          while (order[b] < order[a]) b = dominator[b];
        }
        best = a;
      };
      if (successors[node].empty()) meet(exit);
      for (const int s : successors[node]) meet(s);
      if (best != dominator[node]) {
        dominator[node] = best;
        changed = true;
      }
    }
  }
  std::vector<int> result(static_cast<size_t>(n), -1);
  for (int i = 0; i < n; ++i) result[i] = dominator[i] == exit ? -1 : dominator[i];
  return result;
}

}  // namespace vsm::ptx
