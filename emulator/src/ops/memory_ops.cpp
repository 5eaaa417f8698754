// SPDX-License-Identifier: Apache-2.0
// ld, st, prefetch and their kin: PTX ISA 9.0, 9.7.9.8 to 9.7.9.18.
#include "ops/memory_ops.h"

#include <atomic>

#include "ops/families.h"

namespace vsm::ops {

using exec::Access;
using exec::Block;
using exec::GlobalAsync;
using exec::WeakMemory;

MemoryQualifiers take_memory_qualifiers(Form& f) {
  MemoryQualifiers q;
  const std::string order = f.take_one({"weak", "relaxed", "volatile", "acquire", "release", "acq_rel", "sc", "mmio"});
  if (order == "mmio") f.fail("'.mmio' is not modelled");
  q.weak = order.empty() || order == "weak";
  q.is_volatile = order == "volatile";
  q.acquire = order == "acquire" || order == "acq_rel" || order == "sc";
  q.release = order == "release" || order == "acq_rel" || order == "sc";
  const std::string scope = f.take_one({"cta", "cluster", "gpu", "sys"});
  q.block = scope == "cta" || scope == "cluster";
  const std::string space = f.take_one(
      {"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "param::func", "const"});
  if (space == "global") q.space = Space::kGlobal;
  else if (space.compare(0, 6, "shared") == 0) q.space = Space::kShared;
  else if (space == "local") q.space = Space::kLocal;
  else if (space.compare(0, 5, "param") == 0) q.space = Space::kParam;
  else if (space == "const") q.space = Space::kConst;
  q.nc = f.take("nc");
  f.take_one({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  while (!f.take_prefix("L1::").empty()) {}
  for (std::string hint = f.take_prefix("L2::"); !hint.empty(); hint = f.take_prefix("L2::"))
    q.cache_hint |= hint == "L2::cache_hint";
  return q;
}

namespace {

// Shared-space address of an access, or -1.
int64_t shared_address(Space space, uint64_t address) {
  if (space == Space::kShared) return static_cast<int64_t>(address & 0xffffffff);
  if (space == Space::kGeneric && address >> 56 == exec::kSharedWindow >> 56)
    return static_cast<int64_t>(address - exec::kSharedWindow);
  return -1;
}

}  // namespace

void after_read(Warp& w, Space space, uint64_t address, int lane, Pattern pattern) {
  std::atomic_thread_fence(std::memory_order_acquire);
  Block& b = *w.block;
  const int64_t shared = shared_address(space, address);
  if (GlobalAsync* global = b.launch->global_async.get(); global && shared < 0) global->look(w, address);
  if (shared < 0 && !b.order) return;
  if (const WeakMemory* weak = b.launch->weak.get(); weak && !pattern.block) {
    if (pattern.ordering) b.order->acquired_at(w.id, lane, weak->now());
    else b.order->read_at(w.id, lane, weak->now());
  }
  const auto it = b.sync_variables.find(shared < 0 ? address : static_cast<uint64_t>(shared));
  if (it == b.sync_variables.end()) return;
  w.clock.join_warps(it->second);
  if (!b.order) return;
  if (pattern.ordering) b.order->acquire(w.id, 1u << lane, it->second.threads);
  else b.order->relaxed_read(w.id, lane, it->second.threads);
}

void before_write(Warp& w, Space space, uint64_t address, int lane, Pattern pattern) {
  std::atomic_thread_fence(std::memory_order_release);
  Block& b = *w.block;
  const int64_t shared = shared_address(space, address);
  if (GlobalAsync* global = b.launch->global_async.get(); global && shared < 0)
    global->signal(w, address, pattern.ordering);
  if (shared < 0 && !b.order) return;
  exec::Clock& clock = b.sync_variables[shared < 0 ? address : static_cast<uint64_t>(shared)];
  if (pattern.ordering) {
    w.release(clock, 1u << lane);
  } else {
    clock.join_warps(w.clock);
    ++w.clock.t[w.id];
    if (b.order) b.order->relaxed_write(w.id, lane, clock.threads);
  }
  if (WeakMemory* weak = b.launch->weak.get(); weak && !pattern.block) {
    const exec::ThreadClock& fenced = b.order->wide_fence(w.id, lane);
    if (pattern.ordering) weak->publish(b.linear, b.order->clock(w.id, lane));
    else if (!fenced.empty()) weak->publish(b.linear, fenced.data());
  }
}

namespace {

// form: element bytes (0-7), elements (8-15), space (16-19), flags
constexpr uint32_t kSigned = 1u << 20, kStrong = 1u << 21, kWide128 = 1u << 22, kOrdering = 1u << 23,
                   kBlockScope = 1u << 24, kVolatile = 1u << 25;

exec::Manner manner_of(uint32_t form) {
  if (form & kVolatile) return exec::Manner::kVolatile;
  return form & kStrong ? exec::Manner::kStrong : exec::Manner::kWeak;
}
Pattern pattern_of(uint32_t form) { return {(form & kOrdering) != 0, (form & kBlockScope) != 0}; }

Space space_of(uint32_t form) { return static_cast<Space>(form >> 16 & 15); }

uint64_t read_element(const uint8_t* p, uint32_t bytes) {
  switch (bytes) {
    case 1: return *p;
    case 2: {
      uint16_t v;
      std::memcpy(&v, p, 2);
      return v;
    }
    case 4: {
      uint32_t v;
      std::memcpy(&v, p, 4);
      return v;
    }
    default: {
      uint64_t v;
      std::memcpy(&v, p, 8);
      return v;
    }
  }
}

// op: elements..., base
void load_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t bytes = in.form & 255, count = in.form >> 8 & 255;
  const Space space = space_of(in.form);
  const Operand& base = in.op[count];
  const bool weak = w.block->launch->weak != nullptr;
  uint64_t addresses[32];
  uint8_t seen[32];
  for_lanes(mask, [&](int i) {
    const uint64_t a = effective(w, in, base, i);
    addresses[i] = a;
    const uint8_t* p = w.access(in, i, space, a, bytes * count, Access::kLoad, manner_of(in.form));
    if (weak && is_global(space, a)) {
      w.block->weak_read(w, in, i, a, bytes * count, seen, in.form & kStrong);
      p = seen;
    }
    for (uint32_t k = 0; k < count; ++k) {
      if (in.op[k].sink) continue;
      if (in.form & kWide128) {
        uint64_t* d = w.out<uint64_t>(in.op[k]);
        d[i] = read_element(p, 8);
        d[32 + i] = read_element(p + 8, 8);
        continue;
      }
      uint64_t v = read_element(p + k * bytes, bytes);
      if (in.form & kSigned) v = static_cast<uint64_t>(static_cast<int64_t>(v << (64 - 8 * bytes)) >> (64 - 8 * bytes));
      w.set_value(in.op[k], i, v);
    }
    if (in.form & kStrong) after_read(w, space, a, i, pattern_of(in.form));
    if ((in.form & kStrong) && w.arrivals) w.look_at_signal(space, a);
  });
  w.count_access(in, space, addresses, mask, bytes * count, false);
}

// op: elements..., base
void store_run(Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t bytes = in.form & 255, count = in.form >> 8 & 255;
  const Space space = space_of(in.form);
  const Operand& base = in.op[count];
  WeakMemory* weak = w.block->launch->weak.get();
  uint64_t addresses[32];
  uint8_t waits[32];
  for_lanes(mask, [&](int i) {
    const uint64_t a = effective(w, in, base, i);
    addresses[i] = a;
    if (in.form & kStrong) before_write(w, space, a, i, pattern_of(in.form));
    if ((in.form & kStrong) && w.arrivals)
      w.check_signal(in, i, space, a, (in.form & kOrdering) != 0, (in.form & kBlockScope) != 0);
    uint8_t* p = w.access(in, i, space, a, bytes * count, Access::kStore, manner_of(in.form));
    const bool apart = weak && is_global(space, a);
    if (apart && (in.form & kStrong)) weak->before_publishing(w.block->linear, a, bytes * count);
    const bool buffered = apart && !(in.form & kStrong);
    if (buffered) p = waits;
    for (uint32_t k = 0; k < count; ++k) {
      if (in.form & kWide128) {
        const uint64_t* s = w.in<uint64_t>(in.op[k]);
        std::memcpy(p, &s[i], 8);
        std::memcpy(p + 8, &s[32 + i], 8);
        continue;
      }
      const uint64_t v = w.value(in.op[k], i);
      std::memcpy(p + k * bytes, &v, bytes);  // little-endian host
    }
    if (buffered) w.block->weak_write(w, in, i, a, bytes * count, waits);
  });
  ++w.block->effects;
  w.count_access(in, space, addresses, mask, bytes * count, true);
}

OpClass access_class(Space s, bool store) {
  if (s == Space::kShared) return store ? OpClass::kStoreShared : OpClass::kLoadShared;
  if (s == Space::kGlobal || s == Space::kGeneric) return store ? OpClass::kStoreGlobal : OpClass::kLoadGlobal;
  return OpClass::kLoadStoreOther;
}

void load_or_store(Form& f) {
  const bool store = f.name() == "st";
  const MemoryQualifiers q = take_memory_qualifiers(f);
  const std::string vector = f.take_one({"v2", "v4", "v8"});
  const size_t count = vector.empty() ? 1 : static_cast<size_t>(vector[1] - '0');
  const Type t = f.take_type();
  const int bits = exec::type_bits(t);
  if (bits < 8 || t == Type::kF16x2 || t == Type::kBF16x2)
    f.fail(std::string("type .") + exec::to_string(t) + " is not possible here");
  if (bits / 8 * static_cast<int>(count) > 32) f.fail("an access of more than 32 bytes is not possible");
  if (bits == 128 && count != 1) f.fail("vectors of .b128 are not modelled");
  f.expect(q.cache_hint ? 3 : 2);
  Space space = q.space;
  const std::vector<ptx::AstOperand> list = f.elements(store ? 1 : 0);
  if (list.size() != count)
    f.fail("has " + std::to_string(list.size()) + " registers; the form takes " + std::to_string(count));
  for (const ptx::AstOperand& e : list) store ? f.in_wide(e, t) : f.out_wide(e, t);
  f.address(store ? 0 : 1, space);
  // .param of a function body is the thread's own memory, like .local; that of an entry is the parameter buffer.
  if (space == Space::kParam) {
    const ptx::AstOperand& base = f.operand(store ? 0 : 1).sub[0];
    const bool own = base.kind == ptx::AstOperand::Kind::kSymbol && f.symbol_space(base.symbol) == "local";
    if (own) space = Space::kLocal;
    if (store && !own) f.fail("parameters of an entry cannot be written");
  }
  if (space == Space::kConst && store) f.fail(".const memory cannot be written");
  if (q.cache_hint) f.in(2, Type::kB64);
  f.inst.form = static_cast<uint32_t>(bits / 8) | static_cast<uint32_t>(count) << 8 |
                static_cast<uint32_t>(space) << 16 | (exec::is_signed(t) && bits < 64 ? kSigned : 0) |
                (q.weak ? 0 : kStrong) | (q.is_volatile ? kVolatile : 0) | (q.acquire || q.release ? kOrdering : 0) |
                (q.block ? kBlockScope : 0) | (bits == 128 ? kWide128 : 0);
  f.emit(store ? &store_run : &load_run,
         q.space == Space::kParam || q.space == Space::kConst ? OpClass::kLoadStoreOther : access_class(space, store));
}

void nothing(Warp&, const Inst&, uint32_t) {}

void prefetch_run(Warp& w, const Inst& in, uint32_t mask) {
  for_lanes(mask, [&](int i) { w.check_prefetch(in, i, effective(w, in, in.op[0], i), 1); });
}

// prefetch, discard, applypriority: caches are not modelled. The address must still be one; that of a prefetch of
// .global must be one of memory that is there.
void cache_control(Form& f) {
  const bool global = f.take_one({"global", "local", "param", "const"}) == "global";
  while (!f.take_prefix("L1").empty() || !f.take_prefix("L2").empty() || f.take("tensormap")) {}
  f.expect(1, 2);
  f.address(0, Space::kGeneric);
  f.emit(global && f.name() == "prefetch" ? &prefetch_run : &nothing, OpClass::kSpecial);
}

// form of a fence
constexpr uint32_t kProxyAsync = 1, kBlockLevel = 2, kDeviceLevel = 4, kMBarrierInit = 8, kProxyGlobal = 16,
                   kPartial = 32;  // acquires only, or is for part of memory

// fence / membar. op: address of a tensor map, if any
void fence_run(Warp& w, const Inst& in, uint32_t mask) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Block& b = *w.block;
  GlobalAsync* global = b.launch->global_async.get();
  if (in.form & (kBlockLevel | kDeviceLevel)) {
    const bool device = (in.form & kDeviceLevel) != 0;
    if (b.order) b.order->fence(w.id, mask, device);
    if (!(in.form & kPartial)) {
      if (w.arrivals) w.arrivals->fence(mask, device, w.steps + 1, w.clock);
      if (global && device) global->fence(w, false);
    }
  }
  if (global && (in.form & kProxyGlobal)) global->fence(w, true);
  if (!(in.form & (kProxyAsync | kProxyGlobal | kMBarrierInit))) return;
  // Writes that this warp made, or that reached it through a barrier, are now visible to the async proxy.
  // fence.mbarrier_init is for the executing thread's own mbarrier.init alone (9.7.13.4).
  if (in.form & kProxyAsync) b.fenced.join_warps(w.clock);
  if (in.form & kMBarrierInit) b.published.t[w.id] = w.clock.t[w.id];
  ++w.clock.t[w.id];
}

void fence(Form& f) {
  auto proxy_of = [](const std::string& space) {
    return space.empty() ? kProxyAsync | kProxyGlobal : space == "global" ? kProxyGlobal : kProxyAsync;
  };
  auto emit = [&](uint32_t form) {
    f.inst.form = form;
    f.emit(&fence_run, OpClass::kBarrier);
  };
  if (f.name() == "membar") {
    if (f.take("proxy")) {
      const uint32_t form = f.take("async") ? proxy_of(f.take_one({"global", "shared::cta", "shared::cluster"})) : 0;
      if (!form) f.take("alias");
      f.expect(0);
      return emit(form);
    }
    const std::string level = f.take_one({"cta", "gl", "sys"});
    if (level.empty()) f.fail(".cta, .gl or .sys is missing");
    f.expect(0);
    return emit(level == "cta" ? kBlockLevel : kDeviceLevel);
  }
  if (f.take("mbarrier_init")) {
    f.take("release");
    f.take("cluster");
    f.expect(0);
    return emit(kMBarrierInit);
  }
  uint32_t form = 0;
  const bool proxy = f.take("proxy");
  if (proxy) {
    if (f.take("async")) {
      form = proxy_of(f.take_one({"global", "shared::cta", "shared::cluster", "shared"}));
    } else if (!f.take("tensormap::generic") && !f.take("alias") && !f.take("async::generic")) {
      f.fail("that proxy is not modelled");
    }
  }
  const std::string order = f.take_one({"sc", "acq_rel", "acquire", "release"});
  const std::string scope = f.take_one({"cta", "cluster", "gpu", "sys"});
  const bool restricted = f.take("sync_restrict::shared::cta") || f.take("sync_restrict::shared::cluster");
  if (!proxy) {
    form = (scope == "cta" || scope == "cluster" ? kBlockLevel : kDeviceLevel) |
           (restricted || order == "acquire" ? kPartial : 0);
  }
  f.expect(0, 2);
  if (f.count() > 0) {
    f.address(0, Space::kGeneric);
    if (f.count() == 2 && f.immediate(1) != 128) f.fail("the size must be 128");
  }
  emit(form);
}

}  // namespace

void add_memory(FormTable& t) {
  t["ld"] = t["st"] = load_or_store;
  t["ldu"] = load_or_store;
  t["prefetch"] = t["prefetchu"] = t["discard"] = t["applypriority"] = cache_control;
  t["fence"] = t["membar"] = fence;
}

}  // namespace vsm::ops
