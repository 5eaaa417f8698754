// SPDX-License-Identifier: Apache-2.0
// Branches, exit, traps, calls of the device runtime, and hints: PTX ISA 9.0, 9.7.12 and 9.7.19.
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::exec {
void branch_table(Warp&, const Inst&, uint32_t);
}

namespace vsm::ops {
namespace {

void bra(Form& f) {
  f.take("uni");
  f.expect(1);
  f.emit([](Warp& w, const Inst& in, uint32_t mask) { w.branch(in, mask, in.target); }, OpClass::kControl);
}

void brx(Form& f) {
  f.take("idx");
  f.take("uni");
  f.expect(2);
  f.in(0, Type::kU32);
  f.emit(&exec::branch_table, OpClass::kControl);
}

void exit_run(Warp& w, const Inst&, uint32_t mask) { w.exit_lanes(mask); }
void leave(Form& f) {
  f.take("uni");
  f.expect(0);
  f.emit(&exit_run, OpClass::kControl);
}

void trap(Form& f) {
  f.expect(0);
  f.emit([](Warp& w, const Inst& in,
            uint32_t mask) { w.fail(ReportKind::kTrap, in, __builtin_ctz(mask), in.form ? "brkpt" : "trap"); },
         OpClass::kControl);
}

void nothing(Warp&, const Inst&, uint32_t) {}

// brkpt stops under a debugger and is ignored without one.
void ignore_statement(Form& f) { f.emit(&nothing, OpClass::kControl); }

void nanosleep(Form& f) {
  f.take("u32");
  f.expect(1);
  f.in(0, Type::kU32);
  f.emit([](Warp& w, const Inst&, uint32_t) { w.yield = true; }, OpClass::kControl);
}

// C string that the generic address in a parameter points to.
std::string text_at(Warp& w, const Inst& in, const Operand& param, int lane) {
  uint64_t address;
  std::memcpy(&address, w.access(in, lane, Space::kLocal, w.value(param, lane), 8, exec::Access::kLoad), 8);
  std::string s;
  while (address && s.size() < 400) {
    const char c = static_cast<char>(*w.access(in, lane, Space::kGeneric, address + s.size(), 1, exec::Access::kLoad));
    if (c == 0) break;
    s += c;
  }
  return s;
}

void assert_run(Warp& w, const Inst& in, uint32_t mask) {
  const int lane = __builtin_ctz(mask);
  uint32_t line = 0;
  std::memcpy(&line, w.access(in, lane, Space::kLocal, w.value(in.op[2], lane), 4, exec::Access::kLoad), 4);
  w.fail(ReportKind::kTrap, in, lane,
         "device assertion `" + text_at(w, in, in.op[0], lane) + "` failed at " + text_at(w, in, in.op[1], lane) + ":" +
             std::to_string(line) + " in " + text_at(w, in, in.op[3], lane));
}

// vprintf(format, arguments): nothing is printed; the number of arguments it would report is returned as 0.
void vprintf_run(Warp& w, const Inst& in, uint32_t mask) {
  if (in.count == 0) return;
  for_lanes(mask, [&](int i) {
    std::memset(w.access(in, i, Space::kLocal, w.value(in.op[0], i), 4, exec::Access::kStore), 0, 4);
  });
}

void call(Form& f) {
  f.take("uni");
  const std::string& target = f.operand(0).symbol;
  const ptx::Statement& st = f.statement();
  auto param = [&](const std::string& name) {
    ptx::AstOperand o;
    o.kind = ptx::AstOperand::Kind::kSymbol;
    o.symbol = name;
    f.in(o, Type::kB64);
  };
  if (target == "__assertfail") {
    if (st.call_arguments.size() != 5) f.fail("__assertfail takes 5 arguments");
    for (size_t i = 0; i < 4; ++i) param(st.call_arguments[i]);
    return f.emit(&assert_run, OpClass::kControl);
  }
  if (st.call_returns.size() == 1) param(st.call_returns[0]);
  f.emit(&vprintf_run, OpClass::kControl);
}

// setmaxnreg moves registers between warps; there is no pool to run out of here, only the rule on the count.
void setmaxnreg(Form& f) {
  if (!f.take("inc") && !f.take("dec")) f.fail(".inc or .dec is missing");
  f.take("sync");
  f.take("aligned");
  f.take("u32");
  f.expect(1);
  const int64_t n = f.immediate(0);
  if (n < 24 || n > 256 || n % 8) f.fail("the register count must be a multiple of 8 from 24 to 256");
  f.emit([](Warp& w, const Inst& in, uint32_t mask) { (void)w.converge(in, &mask); }, OpClass::kControl);
}

// Launches run one after another, so whatever a grid depends on is complete and visible; that it waits for it where it
// must is checked (exec/grid_order.h).
void griddepcontrol(Form& f) {
  const std::string which = f.take_one({"wait", "launch_dependents"});
  if (which.empty()) f.fail(".wait or .launch_dependents is missing");
  f.expect(0);
  if (which == "wait") {
    return f.emit([](Warp& w, const Inst&, uint32_t) { w.block->grid_wait(w); }, OpClass::kControl);
  }
  f.note_launches_dependents();
  f.emit([](Warp& w, const Inst&, uint32_t) { w.block->grid_trigger(w); }, OpClass::kControl);
}

}  // namespace

void add_control(FormTable& t) {
  t["bra"] = bra;
  t["brx"] = brx;
  t["ret"] = t["exit"] = leave;
  t["trap"] = trap;
  t["brkpt"] = ignore_statement;
  t["pmevent"] = [](Form& f) {
    f.take("mask");
    f.expect(1);
    f.emit(&nothing, OpClass::kControl);
  };
  t["nanosleep"] = nanosleep;
  t["call"] = call;
  t["setmaxnreg"] = setmaxnreg;
  t["griddepcontrol"] = griddepcontrol;
}

}  // namespace vsm::ops
