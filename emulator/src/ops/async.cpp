// SPDX-License-Identifier: Apache-2.0
// cp.async, cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk: PTX ISA 9.0, 9.7.9.25 to 9.7.9.27.
#include "ops/families.h"
#include "ops/lanes.h"
#include "tma/tma.h"

namespace vsm::ops {
namespace {

using exec::PendingCopy;

uint64_t address_of(const Warp& w, const Operand& base, int64_t offset, int lane) {
  return w.value(base, lane) + static_cast<uint64_t>(offset);
}

uint32_t shared_of(Warp& w, const Inst& in, int lane, uint64_t a, uint32_t alignment, const char* what) {
  if (a >> 56 == exec::kSharedWindow >> 56) a -= exec::kSharedWindow;
  if (a >> 32)
    w.fail(ReportKind::kOutOfBounds, in, lane, std::string(what) + " is not an address of shared memory", "shared", a);
  if (a % alignment)
    w.fail(ReportKind::kMisaligned, in, lane,
           std::string(what) + " must be " + std::to_string(alignment) + "-byte aligned", "shared", a);
  return static_cast<uint32_t>(a);
}

// What a form of cp.async.bulk{.tensor} is; offsets of its addresses.
struct Bulk {
  bool tensor = false, to_shared = true, from_shared = false, has_barrier = false, prefetch = false;
  int dims = 0;
  int reduce = -1;
  tma::ElementType reduce_type = tma::ElementType::kU32;
  int64_t shared_offset = 0, global_offset = 0, barrier_offset = 0, target_offset = 0;
  // operand indices
  size_t shared = 0, global = 0, size = 0, barrier = 0, coords = 0, target = 0, byte_mask = 0;
  bool masked = false;  // .cp_mask
};

// --- cp.async -------------------------------------------------------------------------------------------------------

// op: dst, src, size of the source. form: bytes; imm: offset of dst; target: offset of src
void cp_async_run(Warp& w, const Inst& in, uint32_t mask) {
  const auto& b = *static_cast<const Bulk*>(in.ext);
  uint64_t addresses[32];
  for_lanes(mask, [&](int i) {
    PendingCopy c;
    c.kind = PendingCopy::Kind::kCpAsync;
    c.warp = w.id;
    c.lane = i;
    c.inst = &in;
    c.bytes = in.form;
    const uint64_t wanted = w.value(in.op[2], i);
    if (wanted > c.bytes)
      w.fail(ReportKind::kUndefined, in, i,
             "the source size " + std::to_string(wanted) + " is above the copy size " + std::to_string(c.bytes));
    c.source_bytes = static_cast<uint32_t>(wanted);
    c.shared = shared_of(w, in, i, address_of(w, in.op[0], b.shared_offset, i), c.bytes, "the destination");
    c.global = address_of(w, in.op[1], b.global_offset, i);
    if (c.global % c.bytes)
      w.fail(ReportKind::kMisaligned, in, i, "the source must be " + std::to_string(c.bytes) + "-byte aligned",
             "global", c.global);
    w.access(in, i, Space::kShared, c.shared, c.bytes, exec::Access::kStore);
    // Not yet: the bytes count as written when the copy is done.
    for (uint32_t k = 0; k < c.bytes; ++k)
      w.block->shared.shadow[c.shared + k] &= static_cast<uint8_t>(~exec::SharedMemory::kWritten);
    c.group = w.cp_groups[i];
    w.unwaited |= 1u << i;
    w.unwaited_copy[i] = &in;
    w.unwaited_group[i] = c.group;
    addresses[i] = c.global;
    w.block->issue(std::move(c));
  });
  w.count_access(in, Space::kGlobal, addresses, mask, in.form, false);
}

void cp_async(Form& f) {
  if (f.take("commit_group")) {
    f.expect(0);
    return f.emit([](Warp& w, const Inst&, uint32_t m) { for_lanes(m, [&](int i) { ++w.cp_groups[i]; }); },
                  OpClass::kAsyncCopy);
  }
  const bool all = f.take("wait_all");
  if (all || f.take("wait_group")) {
    f.expect(all ? 0 : 1);
    f.inst.form = all ? 0 : static_cast<uint32_t>(f.immediate(0));
    f.inst.imm = all;
    return f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          uint32_t group[32] = {};
          for_lanes(m, [&](int i) {
            group[i] = in.imm ? ~0u : w.cp_groups[i] > in.form ? w.cp_groups[i] - in.form : 0;
            if (w.unwaited_group[i] < group[i]) w.unwaited &= ~(1u << i);
          });
          w.block->finish_cp_async(w.id, m, group);
        },
        OpClass::kAsyncCopy);
  }
  if (f.take("mbarrier")) {
    f.take("arrive");
    f.inst.form = f.take("noinc");
    const bool shared = !f.take_one({"shared", "shared::cta"}).empty();
    f.take("b64");
    f.expect(1);
    f.address(0, shared ? Space::kShared : Space::kGeneric);
    return f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          w.unwaited &= ~m;
          for_lanes(m, [&](int i) {
            PendingCopy c;
            c.kind = PendingCopy::Kind::kCpAsyncArrive;
            c.warp = w.id;
            c.lane = i;
            c.inst = &in;
            c.barrier = shared_of(w, in, i, address_of(w, in.op[0], in.imm, i), 8, "the mbarrier");
            exec::MBarrier& b = w.block->mbarrier_used(w, in, i, c.barrier);
            if (!in.form) ++b.pending;
            if (w.arrivals) w.check_arrival(in, i, c.barrier);
            w.block->issue(std::move(c));
          });
        },
        OpClass::kAsyncCopy);
  }
  const std::string cache = f.take_one({"ca", "cg"});
  const bool spaces = !f.take_one({"shared", "shared::cta"}).empty() && f.take("global");
  if (cache.empty() || !spaces) f.fail("that form is not modelled");
  bool hint = false;
  for (std::string h = f.take_prefix("L2::"); !h.empty(); h = f.take_prefix("L2::")) hint |= h == "L2::cache_hint";
  f.expect(hint ? 4 : 3, hint ? 5 : 4);
  const int64_t bytes = f.immediate(2);
  if (!(bytes == 16 || (cache == "ca" && (bytes == 4 || bytes == 8))))
    f.fail("a copy of " + std::to_string(bytes) + " bytes is not possible");
  Bulk b;
  f.address(0, Space::kShared);
  b.shared_offset = f.inst.imm;
  f.address(1, Space::kGlobal);
  b.global_offset = f.inst.imm;
  const bool sized = f.count() == (hint ? 5u : 4u);
  if (sized && f.register_bits(f.operand(3)) == 1) f.fail("ignore-src is not modelled");
  sized ? f.in(3, Type::kU32) : f.in_constant(static_cast<uint64_t>(bytes), 32);
  f.inst.form = static_cast<uint32_t>(bytes);
  f.inst.ext = f.keep(b);
  f.emit(&cp_async_run, OpClass::kAsyncCopy);
}

// --- bulk and tensor copies -----------------------------------------------------------------------------------------

void bulk_run(Warp& w, const Inst& in, uint32_t mask) {
  const auto& b = *static_cast<const Bulk*>(in.ext);
  for_lanes(mask, [&](int i) {
    PendingCopy c;
    c.kind = b.tensor ? PendingCopy::Kind::kTensor : PendingCopy::Kind::kBulk;
    c.warp = w.id;
    c.lane = i;
    c.inst = &in;
    c.to_shared = b.to_shared;
    c.reduce = b.reduce;
    c.reduce_type = static_cast<int>(b.reduce_type);
    c.group = w.bulk_groups[i];
    if (b.tensor) {
      const uint64_t map = address_of(w, in.op[b.global], b.global_offset, i);
      if (map % 64) w.fail(ReportKind::kMisaligned, in, i, "a tensor map must be 64-byte aligned", "global", map);
      for (uint32_t k = 0; k < 128; k += 16)
        std::memcpy(c.tensor + k, w.access(in, i, Space::kGeneric, map + k, 16, exec::Access::kLoad), 16);
      for (int k = 0; k < b.dims; ++k)
        c.coords[k] = static_cast<int32_t>(w.value(in.op[b.coords + static_cast<size_t>(k)], i));
      tma::Descriptor d;
      if (!tma::decode(c.tensor, &d))
        w.fail(ReportKind::kBadDescriptor, in, i, "the 128 bytes are not a tensor map", "global", map);
      const std::string broken = tma::check(d);
      if (!broken.empty())
        w.fail(ReportKind::kBadDescriptor, in, i, "the tensor map breaks a rule: " + broken, "global", map);
      if (static_cast<int>(d.rank) != b.dims) {
        w.fail(
            ReportKind::kBadDescriptor, in, i,
            "a copy of " + std::to_string(b.dims) + " dimensions with a tensor map of rank " + std::to_string(d.rank),
            "global", map);
      }
      c.bytes = tma::box_bytes(d);
      if (b.prefetch) return;
      c.shared = shared_of(w, in, i, address_of(w, in.op[b.shared], b.shared_offset, i), 16, "the shared address");
    } else {
      c.bytes = static_cast<uint32_t>(w.value(in.op[b.size], i));
      c.global = b.from_shared ? 0 : address_of(w, in.op[b.global], b.global_offset, i);
      if (c.bytes % 16)
        w.fail(ReportKind::kMisaligned, in, i, "the size " + std::to_string(c.bytes) + " is not a multiple of 16");
      if (c.global % 16)
        w.fail(ReportKind::kMisaligned, in, i, "the global address must be 16-byte aligned", "global", c.global);
      if (b.prefetch) {
        if (c.bytes == 0) return;
        w.check_prefetch(in, i, c.global, c.bytes);
        w.counters().prefetched_bytes += c.bytes;
        return;
      }
      c.shared = shared_of(w, in, i, address_of(w, in.op[b.shared], b.shared_offset, i), 16, "the shared address");
      c.shared_to_shared = b.from_shared;
      if (b.from_shared)
        c.shared_target =
            shared_of(w, in, i, address_of(w, in.op[b.target], b.target_offset, i), 16, "the destination");
    }
    if (b.has_barrier) {
      c.has_barrier = true;
      c.barrier = shared_of(w, in, i, address_of(w, in.op[b.barrier], b.barrier_offset, i), 8, "the mbarrier");
      w.block->mbarrier(w, in, i, c.barrier);
    }
    if (b.masked) c.byte_mask = static_cast<uint16_t>(w.value(in.op[b.byte_mask], i));
    if (!b.tensor && c.bytes == 0) return;
    w.block->issue(std::move(c));
  });
}

size_t take_address(Form& f, size_t i, Space space, int64_t* offset) {
  const size_t index = f.address(i, space);
  *offset = f.inst.imm;
  return index;
}

Space shared_or_generic(Form& f, size_t i) {
  // Shared addresses of these forms are .u32 shared addresses or 64-bit generic ones.
  const ptx::AstOperand& o = f.operand(i);
  return o.kind == ptx::AstOperand::Kind::kAddress && f.register_bits(o.sub[0]) == 64 ? Space::kGeneric
                                                                                      : Space::kShared;
}

tma::Reduce reduction(Form& f) {
  static const std::pair<const char*, tma::Reduce> kOps[] = {
      {"add", tma::Reduce::kAdd}, {"min", tma::Reduce::kMin}, {"max", tma::Reduce::kMax}, {"inc", tma::Reduce::kInc},
      {"dec", tma::Reduce::kDec}, {"and", tma::Reduce::kAnd}, {"or", tma::Reduce::kOr},   {"xor", tma::Reduce::kXor}};
  for (const auto& op : kOps) {
    if (f.take(op.first)) return op.second;
  }
  f.fail("the reduction is missing");
}

tma::ElementType element_type(Form& f) {
  const bool noftz = f.take("noftz");
  const Type t = f.take_type();
  if (noftz != (t == Type::kF16 || t == Type::kBF16)) f.fail(".noftz goes with f16 and bf16");
  switch (t) {
    case Type::kF16: return tma::ElementType::kF16;
    case Type::kBF16: return tma::ElementType::kBF16;
    case Type::kF32: return tma::ElementType::kF32;
    case Type::kF64: return tma::ElementType::kF64;
    case Type::kU32:
    case Type::kB32: return tma::ElementType::kU32;
    case Type::kS32: return tma::ElementType::kS32;
    case Type::kU64:
    case Type::kB64: return tma::ElementType::kU64;
    case Type::kS64: return tma::ElementType::kS64;
    default: f.fail("that type is not possible here");
  }
}

void bulk_copy(Form& f, bool reduce) {
  if (f.take("commit_group")) {
    f.expect(0);
    return f.emit([](Warp& w, const Inst&, uint32_t m) { for_lanes(m, [&](int i) { ++w.bulk_groups[i]; }); },
                  OpClass::kAsyncCopy);
  }
  if (f.take("wait_group")) {
    f.inst.imm = f.take("read");
    f.expect(1);
    f.inst.form = static_cast<uint32_t>(f.immediate(0));
    return f.emit(
        [](Warp& w, const Inst& in, uint32_t m) {
          bool waits = false;
          for_lanes(m, [&](int i) {
            const uint32_t committed = w.bulk_groups[i];
            waits |= committed > in.form && w.block->bulk_pending(w.id, i, committed - in.form);
          });
          if (waits) return w.wait("bulk copies");
          if (!w.block->async) return;
          for_lanes(m, [&](int i) {
            if (w.bulk_groups[i] <= in.form) return;
            const uint32_t group = w.bulk_groups[i] - in.form;
            w.block->async->waited(w, i, group);
            if (!in.imm && w.block->launch->global_async) w.block->launch->global_async->waited(w, i, group);
          });
        },
        OpClass::kAsyncCopy);
  }
  Bulk b;
  b.prefetch = f.take("prefetch");
  b.tensor = f.take("tensor");
  if (b.prefetch) f.take("L2");
  if (b.tensor) {
    const std::string dims = f.take_one({"1d", "2d", "3d", "4d", "5d"});
    if (dims.empty()) f.fail("the dimension is missing");
    b.dims = dims[0] - '0';
    f.take("tile");
  }
  for (const char* no : {"multicast::cluster", "cta_group::1", "cta_group::2", "ignore_oob"}) {
    if (f.take(no)) f.fail("'." + std::string(no) + "' is not modelled");
  }
  // Destination first, then source.
  const std::string first = f.rest();
  const bool group = f.take("bulk_group");
  b.has_barrier = f.take("mbarrier::complete_tx::bytes");
  const bool hint = f.take("L2::cache_hint");
  b.masked = f.take("cp_mask");
  const bool cta = f.take("shared::cta"), cluster = f.take("shared::cluster"), global = f.take("global");
  if (reduce) {
    b.reduce = static_cast<int>(reduction(f));
    if (!b.tensor) b.reduce_type = element_type(f);
  }
  size_t n = 0;
  auto coordinates = [&](const ptx::AstOperand& map) {
    if (map.sub.size() != 2 || static_cast<int>(map.sub[1].sub.size()) != b.dims)
      f.fail("needs " + std::to_string(b.dims) + " coordinates");
    bool once = true;
    for (const ptx::AstOperand& e : map.sub[1].sub) {
      const size_t index = f.in(e, Type::kB32);
      if (once) b.coords = index;
      once = false;
    }
  };
  if (b.prefetch) {
    if (!global) f.fail(".global is missing");
    b.global = take_address(f, 0, b.tensor ? Space::kGeneric : Space::kGlobal, &b.global_offset);
    b.tensor ? coordinates(f.operand(0)) : void(b.size = f.in(1, Type::kU32));
    n = b.tensor ? 1 : 2;
  } else if (!global) {  // shared::cluster from shared::cta
    if (!cta || !cluster || !b.has_barrier || b.tensor || reduce) f.fail("that form is not modelled");
    b.from_shared = true;
    b.target = take_address(f, 0, shared_or_generic(f, 0), &b.target_offset);
    b.shared = take_address(f, 1, shared_or_generic(f, 1), &b.shared_offset);
    b.size = f.in(2, Type::kU32);
    b.barrier = take_address(f, 3, shared_or_generic(f, 3), &b.barrier_offset);
    n = 4;
  } else if (first == "global" || (reduce && first.compare(0, 6, "shared") != 0)) {  // store
    if (!group || b.has_barrier) f.fail("a copy to global memory needs .bulk_group");
    b.to_shared = false;
    b.global = take_address(f, 0, b.tensor ? Space::kGeneric : Space::kGlobal, &b.global_offset);
    if (b.tensor) coordinates(f.operand(0));
    b.shared = take_address(f, 1, shared_or_generic(f, 1), &b.shared_offset);
    n = 2;
    if (!b.tensor) b.size = f.in(n++, Type::kU32);
  } else {  // load
    if (!b.has_barrier || group || reduce) f.fail("a copy into shared memory needs .mbarrier::complete_tx::bytes");
    b.shared = take_address(f, 0, shared_or_generic(f, 0), &b.shared_offset);
    b.global = take_address(f, 1, b.tensor ? Space::kGeneric : Space::kGlobal, &b.global_offset);
    if (b.tensor) coordinates(f.operand(1));
    n = 2;
    if (!b.tensor) b.size = f.in(n++, Type::kU32);
    b.barrier = take_address(f, n, shared_or_generic(f, n), &b.barrier_offset);
    ++n;
  }
  if (hint) f.in(n++, Type::kB64);
  if (b.masked) {
    if (b.tensor || b.to_shared || b.from_shared || b.prefetch || reduce)
      f.fail("'.cp_mask' is for copies to global memory");
    b.byte_mask = f.in(n++, Type::kB16);
  }
  f.expect(n);
  f.inst.form = b.from_shared || b.prefetch ? 0 : b.to_shared ? exec::kBulkLoad : exec::kBulkStore;
  f.inst.ext = f.keep(b);
  f.emit(&bulk_run, OpClass::kAsyncCopy);
}

void cp(Form& f) {
  if (f.take("reduce")) {
    if (!f.take("async") || !f.take("bulk")) f.fail("that form is not modelled");
    return bulk_copy(f, true);
  }
  if (!f.take("async")) f.fail("that form is not modelled");
  if (f.take("bulk")) return bulk_copy(f, false);
  cp_async(f);
}

// --- tensormap ------------------------------------------------------------------------------------------------------

// op: base, value. form: ordinal; ext: field name
void replace_run(Warp& w, const Inst& in, uint32_t mask) {
  const std::string& field = *static_cast<const std::string*>(in.ext);
  for_lanes(mask, [&](int i) {
    const uint64_t a = address_of(w, in.op[0], in.imm, i);
    const Space space = in.op[0].bits == 32 || (in.form >> 8 & 1) ? Space::kShared : Space::kGeneric;
    uint64_t where = a;
    if (space == Space::kShared && a >> 56 == exec::kSharedWindow >> 56) where -= exec::kSharedWindow;
    if (where % 128) w.fail(ReportKind::kMisaligned, in, i, "the tensor map must be 128-byte aligned here", "", a);
    uint8_t* p = w.access(in, i, space, where, 128, exec::Access::kLoad);
    w.access(in, i, space, where, 128, exec::Access::kStore);
    const std::string error = tma::replace(p, field.c_str(), in.form & 255, w.value(in.op[1], i));
    if (!error.empty()) w.fail(ReportKind::kBadDescriptor, in, i, error, "", a);
  });
  ++w.block->effects;
}

void cp_fenceproxy_run(Warp& w, const Inst& in, uint32_t mask) {
  if (!w.converge(in, &mask)) return;
  const int lane = __builtin_ctz(mask);
  const auto& offsets = *static_cast<const std::pair<int64_t, int64_t>*>(in.ext);
  const uint64_t to = address_of(w, in.op[0], offsets.first, lane);
  uint64_t from = address_of(w, in.op[1], offsets.second, lane);
  if (from >> 56 == exec::kSharedWindow >> 56) from -= exec::kSharedWindow;
  const uint8_t* s = w.access(in, lane, Space::kShared, from, 128, exec::Access::kLoad);
  std::memcpy(w.access(in, lane, Space::kGlobal, to, 128, exec::Access::kStore), s, 128);
  ++w.block->effects;
}

void tensormap(Form& f) {
  if (f.take("cp_fenceproxy")) {
    if (!f.take("global") || !f.take("shared::cta") || !f.take("tensormap::generic"))
      f.fail("that form is not modelled");
    f.take("release");
    f.take_one({"cta", "cluster", "gpu", "sys"});
    f.take("sync");
    f.take("aligned");
    f.expect(3);
    if (f.immediate(2) != 128) f.fail("the size must be 128");
    std::pair<int64_t, int64_t> offsets;
    take_address(f, 0, Space::kGlobal, &offsets.first);
    take_address(f, 1, shared_or_generic(f, 1), &offsets.second);
    f.inst.ext = f.keep(offsets);
    return f.emit(&cp_fenceproxy_run, OpClass::kAsyncCopy);
  }
  if (!f.take("replace") || !f.take("tile")) f.fail("that form is not modelled");
  const std::string field =
      f.take_one({"global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
                  "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"});
  const std::string space = f.take_one({"global", "shared::cta"});
  if (field.empty() || !f.take("b1024")) f.fail("that form is not modelled");
  const Type t = f.take_type();
  const bool ordinal =
      field == "box_dim" || field == "global_dim" || field == "global_stride" || field == "element_stride";
  f.expect(ordinal ? 3 : 2);
  f.address(0, space == "shared::cta" ? Space::kShared : space == "global" ? Space::kGlobal : Space::kGeneric);
  const int64_t which = ordinal ? f.immediate(1) : 0;
  if (which < 0 || which > 4) f.fail("the ordinal must be 0 to 4");
  f.in(ordinal ? 2 : 1, t);
  f.inst.form = static_cast<uint32_t>(which) | (space == "shared::cta" ? 256u : 0);
  f.inst.ext = f.keep(field);
  f.emit(&replace_run, OpClass::kAsyncCopy);
}

}  // namespace

void add_async(FormTable& t) {
  t["cp"] = cp;
  t["tensormap"] = tensormap;
}

}  // namespace vsm::ops
