// SPDX-License-Identifier: Apache-2.0
// A PTX module, parsed and decoded.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace vsm {

namespace exec {
struct Code;
}

/// PTX text that this machine does not accept. `what()` names module, line, kernel and the form.
class PtxError : public std::runtime_error {
 public:
  PtxError(int line, const std::string& text) : std::runtime_error(text), line_(line) {}
  int line() const { return line_; }

 private:
  int line_;
};

struct ParamInfo {
  std::string name;
  uint32_t offset = 0;  // in the packed parameter buffer
  uint32_t size = 0;
  uint32_t align = 1;
};

struct KernelInfo {
  std::string name;  // mangled, as in the PTX
  int line = 0;
  std::vector<ParamInfo> params;
  uint32_t param_bytes = 0;
  uint32_t static_shared = 0;         // without the reserved kilobyte
  uint32_t dynamic_shared_align = 16; // strictest .extern .shared alignment
  uint32_t local_bytes = 0;           // per thread
  uint32_t reqntid[3] = {0, 0, 0};    // 0: not given
  uint32_t maxntid[3] = {0, 0, 0};
  uint32_t minnctapersm = 0;
  uint32_t maxnreg = 0;
};

/// A .global or .const variable of the module.
struct VariableInfo {
  struct Relocation {        // the address of `symbol` + addend, stored at `offset`
    uint32_t offset;
    std::string symbol;
    int64_t addend;
  };
  std::string name;
  bool is_const = false;
  uint64_t size = 0;
  uint32_t align = 1;
  std::vector<uint8_t> init;          // empty: zero
  std::vector<Relocation> relocations;
};

struct ProgramImpl;

/// May be shared between threads and devices.
class Program {
 public:
  /// Parses the whole module. Throws PtxError for text that is no module; what is wrong inside a kernel's body is an error
  /// of that kernel (`code`). `module_name` stands in error texts.
  static std::shared_ptr<const Program> parse(std::string_view ptx, const std::string& module_name);

  const std::string& name() const;
  const std::string& target() const;    // "sm_121a"
  const std::vector<KernelInfo>& kernels() const;
  const std::vector<VariableInfo>& variables() const;
  int find_kernel(std::string_view name) const;  // index into kernels(), -1 if absent

  /// The kernel's instructions, decoded at the first call. Throws PtxError, at every call, if this machine does not know
  /// one of them: the module's other kernels run all the same.
  const exec::Code& code(int kernel) const;

  const ProgramImpl& impl() const { return *impl_; }
  ~Program();

 private:
  Program();
  std::unique_ptr<ProgramImpl> impl_;
};

}  // namespace vsm
