// SPDX-License-Identifier: Apache-2.0
// clusterlaunchcontrol: a block takes over the work of one that has not started (PTX ISA 9.0, 9.7.13.17). A cluster is one
// block. The response is opaque to programs; here its words are the block's x, y and z, and whether there is one.
#include "ops/families.h"
#include "ops/lanes.h"

namespace vsm::ops {
namespace {

using exec::PendingCopy;

constexpr uint64_t kCanceled = uint64_t{1} << 32;  // of the upper half
constexpr uint32_t kResponseBytes = 16;

uint32_t shared_address(Warp& w, const Inst& in, int lane, uint64_t a, uint32_t alignment, const char* what) {
  if (a >> 56 == exec::kSharedWindow >> 56) a -= exec::kSharedWindow;
  if (a >> 32 || a % alignment) {
    w.fail(a % alignment ? ReportKind::kMisaligned : ReportKind::kOutOfBounds, in, lane,
           std::string(what) + " must be an address of shared memory, aligned to " + std::to_string(alignment),
           "shared", a);
  }
  return static_cast<uint32_t>(a);
}

// op: response, mbarrier. imm: offset of the response; target: offset of the mbarrier
void try_cancel_run(Warp& w, const Inst& in, uint32_t mask) {
  exec::Block& b = *w.block;
  exec::Launch& l = *b.launch;
  for_lanes(mask, [&](int i) {
    PendingCopy c;
    c.kind = PendingCopy::Kind::kCancel;
    c.warp = w.id;
    c.lane = i;
    c.inst = &in;
    c.bytes = kResponseBytes;
    c.shared = shared_address(w, in, i, w.value(in.op[0], i) + static_cast<uint64_t>(in.imm), 16, "the response");
    c.barrier = shared_address(w, in, i, w.value(in.op[1], i) + in.target, 8, "the mbarrier");
    c.has_barrier = true;
    b.mbarrier(w, in, i, c.barrier);
    const uint64_t taken = l.next_block.fetch_add(1);
    if (taken < l.blocks) {
      const uint32_t* grid = l.config->grid;
      c.response[0] = taken % grid[0] | (taken / grid[0] % grid[1]) << 32;
      c.response[1] = taken / grid[0] / grid[1] | kCanceled;
    }
    b.issue(std::move(c));
  });
}

void try_cancel(Form& f) {
  if (!f.take("async")) f.fail("'.async' is missing");
  f.take("shared::cta");
  if (!f.take("mbarrier::complete_tx::bytes")) f.fail("'.mbarrier::complete_tx::bytes' is missing");
  f.take("multicast::cluster::all");  // to the one block of the cluster
  if (!f.take("b128")) f.fail("'.b128' is missing");
  f.expect(2);
  auto address = [&](size_t i) {
    const ptx::AstOperand& o = f.operand(i);
    const bool wide = o.kind == ptx::AstOperand::Kind::kAddress && f.register_bits(o.sub[0]) == 64;
    f.address(i, wide ? Space::kGeneric : Space::kShared);
    return f.inst.imm;
  };
  const int64_t response = address(0);
  f.inst.target = static_cast<uint32_t>(address(1));
  f.inst.imm = response;
  f.emit(&try_cancel_run, OpClass::kAsyncCopy);
}

void query_cancel(Form& f) {
  auto response = [&] {
    if (!f.take("b128")) f.fail("'.b128' is missing");
    f.expect(2);
    f.in(1, Type::kB128);
  };
  if (f.take("is_canceled")) {
    f.take("pred");
    f.out_pred(0);
    response();
    return f.emit(
        [](Warp& w, const Inst& in, uint32_t mask) {
          const uint64_t* s = w.in<uint64_t>(in.op[1]);
          uint32_t result = 0;
          for_lanes(mask, [&](int i) { result |= static_cast<uint32_t>((s[32 + i] & kCanceled) != 0) << i; });
          w.set_pred(in.op[0], mask, result);
        },
        OpClass::kPredicate);
  }
  const std::string part =
      f.take_one({"get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"});
  if (part.empty()) f.fail("that form is not modelled");
  const bool all = part == "get_first_ctaid";
  if (all) f.take("v4");
  f.take("b32");
  const auto list = f.elements(0);
  if (list.size() != (all ? 4u : 1u)) f.fail("the destination has " + std::to_string(all ? 4 : 1) + " registers");
  for (const ptx::AstOperand& e : list) f.out(e, Type::kB32);
  response();
  f.inst.form = all ? 0 : static_cast<uint32_t>(part.back() - 'x');
  f.emit(
      [](Warp& w, const Inst& in, uint32_t mask) {
        const uint64_t* s = w.in<uint64_t>(in.op[in.count - 1]);
        for_lanes(mask, [&](int i) {
          if (!(s[32 + i] & kCanceled))
            w.fail(ReportKind::kUndefined, in, i, "the response is that of a request that failed: it names no block");
          const uint64_t parts[4] = {s[i] & 0xffffffffu, s[i] >> 32, s[32 + i] & 0xffffffffu, 0};
          for (uint32_t k = 0; k + 1 < in.count; ++k) w.set_value(in.op[k], i, parts[in.form + k]);
        });
      },
      OpClass::kMove);
}

void clusterlaunchcontrol(Form& f) {
  if (f.take("try_cancel")) return try_cancel(f);
  if (f.take("query_cancel")) return query_cancel(f);
  f.fail("that form is not modelled");
}

}  // namespace

void add_launch_control(FormTable& t) { t["clusterlaunchcontrol"] = clusterlaunchcontrol; }

}  // namespace vsm::ops
