// SPDX-License-Identifier: Apache-2.0
// The executor's state: decoded instructions, warps, blocks, launches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "exec/arrival_checker.h"
#include "exec/async_checker.h"
#include "exec/global_async.h"
#include "exec/grid_order.h"
#include "exec/memory.h"
#include "exec/race_checker.h"
#include "exec/types.h"
#include "exec/weak_memory.h"
#include "program.h"
#include "report.h"

namespace vsm::exec {

struct Warp;
struct Block;
struct Inst;

using Handler = void (*)(Warp&, const Inst&, uint32_t mask);

/// Where an operand lies. A register of 32 bits or less is one slot (uint32_t[32], zero-extended), one of 64 bits is
/// two slots (uint64_t[32]), one of 128 bits four (low halves, then high halves). A predicate is a lane mask.
struct Operand {
  uint32_t slot = 0;
  uint8_t file = 0;    // 0: the warp's registers, 1: constants
  uint8_t bits = 32;   // of the register; 1 for predicates
  bool negated = false;
  bool sink = false;   // '_'
};

/// `Inst::form` of bulk copies between global and shared memory, and of no other asynchronous copies.
inline constexpr uint32_t kBulkLoad = 1u << 30, kBulkStore = 1u << 31;

struct Inst {
  Handler fn = nullptr;
  const Operand* op = nullptr;
  uint16_t count = 0;           // operands
  OpClass cls = OpClass::kMove;
  bool guard_negated = false;
  int32_t guard = -1;           // predicate slot
  uint32_t line = 0;
  uint32_t target = 0;          // branch
  int32_t reconverge = -1;      // immediate post-dominator of a branch, -1: none before the exit
  int64_t imm = 0;              // address offset, or what the form needs
  uint32_t form = 0;            // packed details of the form, owned by its handler
  const void* ext = nullptr;    // larger details, owned by Code
};

/// Per-warp values that never change while it runs; written into ordinary registers when it starts.
enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kGridid,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kZero,
  kOne,
  kDynamicSmem,
  kTotalSmem,
  kReservedSmem,
  kGridWorkspaceLow,
  kGridWorkspaceHigh,
  kParamBase
};

/// One decoded kernel.
struct Code {
  KernelInfo info;
  std::vector<Inst> insts;
  std::deque<std::vector<Operand>> operands;       // owns Inst::op
  std::deque<std::shared_ptr<void>> extensions;    // owns Inst::ext
  std::vector<uint32_t> constants;                 // slots of 32 lanes
  struct SpecialSlot {
    Special which;
    uint32_t slot;
    uint8_t bits;
    uint64_t addend;
  };
  std::vector<SpecialSlot> specials;
  struct SymbolSlot {
    uint32_t slot;
    std::string symbol;
    int64_t addend;
  };  // 64-bit constants to be relocated
  std::vector<SymbolSlot> symbols;
  uint32_t register_slots = 4;   // slots 0..3 take what is written to '_'
  uint32_t predicates = 2;       // slot 0 likewise; slot 1 is the carry flag
  uint32_t local_bytes = 0;
  bool launches_dependents = false;  // has a griddepcontrol.launch_dependents
  bool reads_grid_workspace() const {
    return std::any_of(specials.begin(), specials.end(),
                       [](const SpecialSlot& s) { return s.which == Special::kGridWorkspaceLow; });
  }
  uint32_t dynamic_shared_offset() const {  // behind the reserved kilobyte and the static variables
    const uint32_t a = info.dynamic_shared_align;
    return (info.static_shared + a - 1) / a * a;
  }
};

/// Thrown by handlers to end the launch; the report has been filed.
struct Stop {
  LaunchStatus status;
};

/// Signals on an address that may have needed a fence: by which block, or warp, and what to say once another one looks.
using UnfencedSignals = std::unordered_map<uint64_t, std::pair<uint64_t, Report>>;

// --- one launch -------------------------------------------------------------------------------------------------
struct Launch {
  const Code* code = nullptr;
  const uint32_t* constants = nullptr;   // relocated copy of Code::constants
  const ModuleText* text = nullptr;
  const LaunchConfig* config = nullptr;
  const Limits* limits = nullptr;
  const uint8_t* params = nullptr;       // this launch's copy of the parameter buffer
  size_t param_bytes = 0;
  GlobalMemory* memory = nullptr;
  std::unique_ptr<WeakMemory> weak;      // null: what a block writes is there for all at once
  uint32_t shared_bytes = 0;             // window size: reserved + static + dynamic
  uint32_t warps_per_block = 0;
  uint64_t grid_workspace = 0;           // address of a cooperative launch's grid barrier; 0: it is none
  uint64_t blocks = 0;                   // of the grid
  uint64_t step_limit = 0;
  std::atomic<uint64_t> steps{0};
  std::atomic<uint64_t> next_block{0};
  std::atomic<uint64_t> effects{0};      // side effects visible to other blocks
  std::atomic<bool> stop{false};
  const GridsInFlight* in_flight = nullptr;  // what this grid may overlap; null: nothing
  std::shared_ptr<GridAccesses> accesses;    // what it touches itself; null: not recorded. Guarded by the mutex
  std::atomic<bool> waited{false};           // some block executed griddepcontrol.wait
  std::atomic<bool> waited_before_trigger{false};  // some block executed griddepcontrol.wait before it let others start
  std::mutex reduce_mutex;  // bulk reductions to global memory
  std::mutex mutex;  // guards the rest
  LaunchResult result;
  std::map<std::pair<int, uint32_t>, int> seen;  // (kind, line) -> reports of it
  uint32_t filed[kReportKinds] = {};  // by kind: kept in `result`
  UnfencedSignals unfenced_signals;  // global addresses
  std::unique_ptr<GlobalAsync> global_async;  // null: no bulk copies in the kernel, or not watched
  /// Keeps a report, unless it is one too many of its kind. The mutex is held.
  void file(Report report);
  bool full(ReportKind kind) const { return filed[static_cast<int>(kind)] >= config->max_reports; }
};

/// Where lanes that diverged meet again: the immediate post-dominator of the branch they split at.
struct Meeting {
  uint32_t pc = 0;
  uint32_t expected = 0;
  uint32_t arrived = 0;
  int parent = -1;
};

/// Lanes of a warp that run together.
struct Fragment {
  uint32_t pc = 0;
  uint32_t mask = 0;
  int meeting = -1;  // innermost Meeting, -1: none
  uint32_t meeting_pc = ~0u;
  bool blocked = false;  // the instruction at pc has to be tried again
  bool timed_out = false;  // a potentially blocking wait must give up now
  bool may_time_out = false;  // ... and is one that can
  bool at_barrier = false;  // its warp has arrived at this named barrier, which is not complete yet
  bool past_barrier = false;  // ... and is now: only the result is left to be taken
  uint8_t barrier = 0;
  uint32_t barrier_result = 0;
  uint64_t gathers = 0;  // blocked until the lanes are there that gather under the same key; 0: not by that
  uint32_t members = 0;  // lanes that a form which need not be aligned still waits for
  const char* waiting_for = "";
  uint64_t waiting_address = 0;
};

struct PendingCopy;

struct Warp {
  Block* block = nullptr;
  const Inst* code = nullptr;
  const uint32_t* files[2] = {nullptr, nullptr};
  uint32_t* regs = nullptr;
  uint32_t* preds = nullptr;
  int id = 0;
  uint32_t existing = 0;  // lanes that were launched
  uint32_t live = 0;  // lanes that have not exited
  std::vector<Fragment> fragments;
  size_t current = 0;
  std::vector<Meeting> meetings;
  std::vector<uint32_t> storage, pred_storage;
  std::vector<uint8_t> local;
  uint32_t local_bytes = 0;
  bool yield = false;
  uint64_t steps = 0;
  bool cluster_arrived = false;
  uint64_t cluster_generation = 0;
  // cp.async groups: per lane, groups committed so far; bulk groups likewise.
  uint32_t cp_groups[32] = {};
  // The last cp.async of each lane of `unwaited`, and its group: neither a wait nor an mbarrier's arrival covers it.
  uint32_t unwaited = 0;
  const Inst* unwaited_copy[32] = {};
  uint32_t unwaited_group[32] = {};
  uint32_t bulk_groups[32] = {};
  Clock clock;  // by warps; by threads: Block::order
  std::unique_ptr<ArrivalChecker> arrivals;  // null: not watched

  Fragment& frag() { return fragments[current]; }

  template <class T>
  const T* in(const Operand& o) const {
    return reinterpret_cast<const T*>(files[o.file] + size_t{o.slot} * 32);
  }
  template <class T>
  T* out(const Operand& o) const {
    return reinterpret_cast<T*>(regs + size_t{o.slot} * 32);
  }
  uint32_t pred(const Operand& o) const {
    const uint32_t p = o.file ? files[1][size_t{o.slot} * 32] : preds[o.slot];
    return o.negated ? ~p : p;
  }
  void set_pred(const Operand& o, uint32_t mask, uint32_t value) {
    preds[o.slot] = (preds[o.slot] & ~mask) | (value & mask);
  }
  /// Any register of up to 64 bits, zero-extended.
  uint64_t value(const Operand& o, int lane) const {
    return o.bits > 32 ? in<uint64_t>(o)[lane] : in<uint32_t>(o)[lane];
  }
  void set_value(const Operand& o, int lane, uint64_t v) const {
    if (o.bits > 32) out<uint64_t>(o)[lane] = v;
    else if (o.bits == 32) out<uint32_t>(o)[lane] = static_cast<uint32_t>(v);
    else out<uint32_t>(o)[lane] = static_cast<uint32_t>(v & ((1u << o.bits) - 1));
  }

  void start(Block* block, int id);
  /// Runs until it blocks, yields, ends or has executed `budget` instructions. True if it executed any.
  bool run(int budget);
  bool done() const { return live == 0; }

  // --- for handlers -------------------------------------------------------------------------------------------
  void branch(const Inst& in, uint32_t taken, uint32_t target);
  void exit_lanes(uint32_t mask);
  /// The current instruction cannot finish now; it is tried again when the warp is scheduled next.
  void wait(const char* what, uint64_t address = 0, bool may_time_out = false);
  /// For .sync forms: true once all live lanes of `needed` wait under the same key; `mask` then holds them all, and
  /// the fragments with the same way ahead as this one are part of it. Until then the fragment waits.
  bool assemble(uint32_t* mask, uint32_t needed, uint64_t key, bool aligned);
  /// ... and all of them go on behind the instruction.
  bool gather(uint32_t* mask, uint32_t needed, uint64_t key, bool aligned = false);
  /// For .aligned forms: all live lanes of the warp, at this instruction.
  bool converge(const Inst&, uint32_t* mask) { return gather(mask, live, here(), true); }
  /// The key of the current instruction.
  uint64_t here() const { return fragments[current].pc; }
  /// Parts the current fragment at the current instruction by the lanes' values there; each part tries it again.
  void part_by(const uint32_t* values, uint32_t mask);
  /// The lanes of a fragment that its next instruction is for.
  uint32_t active(const Fragment& f) const {
    const Inst& in = code[f.pc];
    return in.guard < 0 ? f.mask : f.mask & (in.guard_negated ? ~preds[in.guard] : preds[in.guard]);
  }
  /// What these lanes did so far, and what is ordered before that, goes into `into`.
  void release(Clock& into, uint32_t mask);
  /// ... and is ordered before what these lanes do from now on.
  void acquire(const Clock& from, uint32_t mask);

  void report(ReportKind kind, const Inst& in, int lane, const std::string& text, const char* space = "",
              uint64_t address = 0);
  Report make_report(ReportKind kind, const Inst& in, int lane, const std::string& text, const char* space,
                     uint64_t address) const;
  [[noreturn]] void fail(ReportKind kind, const Inst& in, int lane, const std::string& text, const char* space = "",
                         uint64_t address = 0);
  Counters& counters();

  // --- arrivals, if watched (arrival_checker.h) -------------------------------------------------------------------
  void check_arrival(const Inst& in, int lane, uint32_t address);
  /// An atomic or a strong store, about to be done.
  void check_signal(const Inst& in, int lane, Space space, uint64_t address, bool release, bool block_scope);
  /// A strong load.
  void look_at_signal(Space space, uint64_t address);
  bool unfenced_shared(int lane, bool copies) const;
  bool unfenced_global(int lane) const;

  // --- memory (memory_access.cpp) -------------------------------------------------------------------------------
  /// Host address of `bytes` bytes, after every check that applies. `space` may be kGeneric.
  uint8_t* access(const Inst& in, int lane, Space space, uint64_t address, uint32_t bytes, Access kind,
                  Manner manner = Manner::kWeak);
  /// A prefetch of `bytes` bytes (1: of whatever line holds the address) must name global memory of one allocation. It
  /// is a hint, so no checker takes it for a read: what it brings in may be overwritten, or not written yet.
  void check_prefetch(const Inst& in, int lane, uint64_t address, uint32_t bytes);
  /// Counters of one warp-wide access: sectors, bank conflicts.
  void count_access(const Inst& in, Space space, const uint64_t* addresses, uint32_t mask, uint32_t bytes, bool store);

 private:
  bool run_fragment(int& budget);
  void split(const std::vector<std::pair<uint32_t, uint32_t>>& parts, int reconverge);
  void arrive_at_meeting(size_t index);
  void release_meeting(int m);
  void remove_fragment(size_t index);
  /// Lanes that wait where others are to join them go on alone if those wait for them at a .sync form: meeting again is
  /// this machine's choice, and the ISA has such a form wait for no lane that has exited. True if any went on.
  bool part_from_meetings();
  int new_meeting(const Meeting& m);
  bool changed_ = false;  // the fragment list is not what it was before the instruction
  std::vector<int> free_meetings_;
  friend void branch_table(Warp&, const Inst&, uint32_t);
};

/// An mbarrier object of shared memory (PTX ISA 9.0, 9.7.13.15).
struct MBarrier {
  uint32_t expected = 0;  // arrivals of each phase
  uint32_t pending = 0;  // arrivals still missing in the current phase
  int64_t tx = 0;
  uint64_t phase = 0;  // completed phases
  Clock arriving;  // what the arrivals of the current phase released
  Clock completed;  // ... and those of the last complete one
  int init_warp = 0;  // who initialized it, at which value of its clock
  uint32_t init_clock = 0;
  struct PhaseFill {  // of AsyncChecker: what landed in a phase
    uint32_t id;
    uint64_t serial, phase;
  };
  std::vector<PhaseFill> fills;
};

struct NamedBarrier {
  uint32_t arrived = 0;  // threads
  uint32_t expected = 0;  // 0: not in use
  bool all = false;  // expected is "all threads of the block"
  uint64_t generation = 0;
  uint32_t reduction = 0;  // popc, or the and/or so far
  Clock arriving, completed;
};

/// One copy of the async proxy (or a cp.async), to be done later.
struct PendingCopy {
  enum class Kind : uint8_t { kCpAsync, kCpAsyncArrive, kBulk, kTensor, kCancel };
  Kind kind = Kind::kBulk;
  int warp = 0;
  int lane = 0;
  const Inst* inst = nullptr;
  uint64_t delay = 0;  // scheduler rounds still to pass
  bool to_shared = true;
  uint64_t global = 0;
  uint32_t shared = 0;
  uint32_t bytes = 0;
  uint32_t source_bytes = 0;  // cp.async with src-size
  uint32_t group = 0;
  uint32_t barrier = 0;  // mbarrier address, or 0
  bool has_barrier = false;
  bool increment = false;  // cp.async.mbarrier.arrive without .noinc
  int reduce = -1;  // tma::Reduce
  int reduce_type = 0;  // tma::ElementType of a bulk reduction
  uint8_t tensor[128] = {};  // image of the tensor map when issued
  int32_t coords[5] = {0, 0, 0, 0, 0};
  Clock clock;  // the issuing warp's
  uint64_t step = 0;  // of the issuing warp
  Clock fenced;  // the block's, as of then
  uint32_t shared_target = 0;  // shared to shared copies
  bool shared_to_shared = false;
  uint16_t byte_mask = 0xffff;  // of each 16 bytes, those that are copied
  uint64_t response[2] = {0, 0};  // kCancel: what clusterlaunchcontrol.try_cancel answers
};

inline constexpr int kClusterBarrier = 16;

struct Block {
  Launch* launch = nullptr;
  uint32_t id[3] = {0, 0, 0};
  uint64_t linear = 0;
  std::vector<Warp> warps;
  SharedMemory shared;
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  NamedBarrier barriers[17];  // the last is the cluster's
  std::deque<PendingCopy> pending;
  size_t cp_async_pending = 0;  // kCpAsync that are not finished: what an arrive has to look for
  Counters counters;
  RegionCache cache;
  GridAccesses* accesses = nullptr;  // the host thread's share of Launch::accesses
  bool checks_grids = false;
  bool triggered = false;  // has executed griddepcontrol.launch_dependents
  uint32_t grid_waits[kMaxWarps] = {};  // each warp's clock at its first griddepcontrol.wait; 0: it has not
  Clock fenced;  // generic writes that a proxy fence has made visible to the async proxy
  Clock published;  // likewise, inits of mbarriers by fence.mbarrier_init
  KnownBlocks known;
  std::unordered_map<int, std::vector<uint32_t>> open_stores;  // by thread: of Launch::global_async, not waited for
  std::unique_ptr<AsyncChecker> async;  // null: no bulk copy so far, or not watched
  std::unordered_map<uint64_t, Clock> sync_variables;  // addresses used by atomics, releases, acquires; global ones
  // if `order` is kept
  std::unique_ptr<ThreadOrder> order;  // null: not kept
  std::unique_ptr<RaceChecker> races;  // null: not watched
  UnfencedSignals unfenced_signals;  // shared addresses
  uint64_t effects = 0;  // side effects so far: the measure of progress
  uint64_t effects_seen = 0;  // at the last time-out of waits
  uint32_t fruitless = 0;  // time-outs since then
  uint64_t rng = 0;
  bool end_checked = false;
  uint64_t idle_steps = 0;  // instructions executed since the last side effect

  void start(Launch* launch, uint64_t linear, GridAccesses* accesses);
  enum class Slice { kDone, kBusy, kIdle };
  /// Runs about `budget` warp instructions, fewer if all warps sleep. kIdle: nothing but spinning since the last slice.
  Slice run(uint64_t budget);
  bool finished() const;
  /// Of an access of this warp to shared memory.
  Accessor accessor(const Warp& w, int lane) const {
    return {w.id, lane, order->version(w.id), order->clock(w.id, lane < 0 ? 0 : lane), w.steps};
  }
  void check_race(Warp& w, const Inst& in, int lane, uint32_t address, uint32_t bytes, Access kind, Manner manner);
  /// A thread of this block for Launch::weak.
  WeakMemory::Thread weak_thread(const Warp& w, int lane) const {
    const uint32_t* clock = order->clock(w.id, lane);
    return {linear, static_cast<uint32_t>(w.id * 32 + lane), order->version(w.id), clock[order->threads()]};
  }
  void weak_read(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, uint8_t* out, bool strong);
  void weak_write(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, const uint8_t* data);
  /// The report of a race with another block's write; `writer` as WeakMemory answers.
  void report_unordered(Warp& w, const Inst& in, int lane, const char* verb, uint64_t address, uint64_t writer);
  /// The report of a race, if there is one.
  static void report_race(Warp& w, const Inst& in, int lane, const std::string& verb, const RaceFound& race);
  /// A global access: recorded for the next grid, checked against those that this one may overlap (grid_order.h).
  void note_grid_access(Warp& w, const Inst& in, int lane, uint64_t address, uint32_t bytes, bool load, bool store,
                        const Clock& clock);
  void grid_wait(Warp& w);
  void grid_trigger(const Warp& w);
  bool follows_grid_wait(const Clock& clock) const;
  uint32_t live_threads_rounded() const;
  void check_barrier_release(int barrier);

  // --- async proxy (async_engine.cpp) ---------------------------------------------------------------------------
  void issue(PendingCopy copy);
  /// Lets one round pass; finishes what is due. True if anything finished.
  bool advance_async(bool force);
  void finish(const PendingCopy& copy);
  /// cp.async of these lanes, groups up to `group[lane]`, done now.
  void finish_cp_async(int warp, uint32_t mask, const uint32_t* group);
  /// True if bulk copies of this lane in groups up to `group` are still to be done.
  bool bulk_pending(int warp, int lane, uint32_t group) const;
  void check_end();

  // --- mbarrier (mbarrier.cpp) ----------------------------------------------------------------------------------
  MBarrier& mbarrier(Warp& w, const Inst& in, int lane, uint32_t address);
  /// The same for one that this warp is about to use: its initialization must be ordered before that.
  MBarrier& mbarrier_used(Warp& w, const Inst& in, int lane, uint32_t address);
  void mbarrier_arrive(Warp& w, const Inst& in, int lane, uint32_t address, uint32_t count, bool drop);
  void mbarrier_tx(Warp& w, const Inst& in, int lane, uint32_t address, int64_t delta);
  void mbarrier_complete_if_due(MBarrier& b);

 private:
  void deadlock();
};

/// "0-3,8,16-31"
std::string lane_list(uint32_t mask);

/// Runs `fn(lane)` for every lane in `mask`.
template <class F>
inline void for_lanes(uint32_t mask, F fn) {
  if (mask == ~0u) {
    for (int i = 0; i < 32; ++i) fn(i);
  } else {
    for (uint32_t m = mask; m; m &= m - 1) fn(__builtin_ctz(m));
  }
}

}  // namespace vsm::exec
