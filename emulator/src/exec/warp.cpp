// SPDX-License-Identifier: Apache-2.0
// A warp: fragments of lanes that run together, how they part and where they meet again.
#include <algorithm>

#include "exec/machine.h"

namespace vsm::exec {

namespace {

void write_special(Warp& w, const Code::SpecialSlot& s) {
  const Block& b = *w.block;
  const Launch& l = *b.launch;
  const LaunchConfig& c = *l.config;
  const uint32_t shared = l.shared_bytes - l.limits->shared_reserved;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t linear = static_cast<uint32_t>(w.id) * 32 + lane;
    uint64_t v = 0;
    switch (s.which) {
      case Special::kTidX: v = linear % c.block[0]; break;
      case Special::kTidY: v = linear / c.block[0] % c.block[1]; break;
      case Special::kTidZ: v = linear / c.block[0] / c.block[1]; break;
      case Special::kNtidX: v = c.block[0]; break;
      case Special::kNtidY: v = c.block[1]; break;
      case Special::kNtidZ: v = c.block[2]; break;
      case Special::kCtaidX: v = b.id[0]; break;
      case Special::kCtaidY: v = b.id[1]; break;
      case Special::kCtaidZ: v = b.id[2]; break;
      case Special::kNctaidX: v = c.grid[0]; break;
      case Special::kNctaidY: v = c.grid[1]; break;
      case Special::kNctaidZ: v = c.grid[2]; break;
      case Special::kLaneid: v = lane; break;
      case Special::kWarpid: v = static_cast<uint32_t>(w.id); break;
      case Special::kNwarpid: v = l.limits->max_threads_per_sm / 32; break;
      case Special::kSmid: v = b.linear % static_cast<uint64_t>(l.limits->num_sms); break;
      case Special::kNsmid: v = static_cast<uint32_t>(l.limits->num_sms); break;
      case Special::kGridid: v = 1; break;
      case Special::kLanemaskEq: v = 1u << lane; break;
      case Special::kLanemaskLe: v = (2ull << lane) - 1; break;
      case Special::kLanemaskLt: v = (1ull << lane) - 1; break;
      case Special::kLanemaskGe: v = ~((1u << lane) - 1) & 0xffffffffu; break;
      case Special::kLanemaskGt: v = ~((2ull << lane) - 1) & 0xffffffffu; break;
      case Special::kZero: v = 0; break;
      case Special::kOne: v = 1; break;
      case Special::kDynamicSmem: v = c.dynamic_shared; break;
      case Special::kTotalSmem: v = shared; break;
      case Special::kReservedSmem: v = l.limits->shared_reserved; break;
      case Special::kGridWorkspaceLow: v = l.grid_workspace & 0xffffffffu; break;
      case Special::kGridWorkspaceHigh: v = l.grid_workspace >> 32; break;
      case Special::kParamBase: v = reinterpret_cast<uint64_t>(l.params); break;
    }
    Operand o;
    o.slot = s.slot;
    o.bits = s.bits;
    w.set_value(o, static_cast<int>(lane), v + s.addend);
  }
}

}  // namespace

void Warp::start(Block* b, int warp_id) {
  block = b;
  id = warp_id;
  const Launch& l = *b->launch;
  const Code& c = *l.code;
  code = c.insts.data();
  storage.assign(size_t{c.register_slots} * 32, 0);
  pred_storage.assign(c.predicates, 0);
  regs = storage.data();
  preds = pred_storage.data();
  files[0] = regs;
  files[1] = l.constants;
  local_bytes = c.local_bytes;
  local.assign(size_t{local_bytes} * 32, 0xA5);
  const uint32_t threads = l.config->block[0] * l.config->block[1] * l.config->block[2];
  const uint32_t first = static_cast<uint32_t>(id) * 32;
  existing = threads - first >= 32 ? ~0u : (1u << (threads - first)) - 1;
  live = existing;
  fragments.assign(1, Fragment());
  fragments[0].mask = live;
  current = 0;
  meetings.clear();
  free_meetings_.clear();
  steps = 0;
  cluster_arrived = false;
  std::fill_n(cp_groups, 32, 0u);
  unwaited = 0;
  std::fill_n(bulk_groups, 32, 0u);
  clock = Clock();
  clock.t[id] = 1;
  arrivals = l.config->watch & kWatchArrivals ? std::make_unique<ArrivalChecker>() : nullptr;
  for (const Code::SpecialSlot& s : c.specials) write_special(*this, s);
}

Counters& Warp::counters() { return block->counters; }

void Warp::release(Clock& into, uint32_t mask) {
  into.join_warps(clock);
  ++clock.t[id];
  if (block->order) block->order->release(id, mask, into.threads);
}

void Warp::acquire(const Clock& from, uint32_t mask) {
  clock.join_warps(from);
  if (block->order) block->order->acquire(id, mask, from.threads);
}

bool Warp::run(int budget) {
  yield = false;
  bool progress = false;
  size_t stalled = 0;
  while (budget > 0 && !fragments.empty() && !yield) {
    if (stalled >= fragments.size()) break;
    if (current >= fragments.size()) current = 0;
    const bool any = run_fragment(budget);
    progress |= any;
    if (current < fragments.size() && fragments[current].blocked) {
      stalled = any ? 1 : stalled + 1;
      ++current;
    } else {
      stalled = 0;
    }
  }
  if (!progress && part_from_meetings()) progress = true;
  if (!fragments.empty())
    current = budget > 0 && !yield ? current % fragments.size() : (current + 1) % fragments.size();
  return progress;
}

// Runs the current fragment until it blocks, parts, meets or ends.
bool Warp::run_fragment(int& budget) {
  bool any = false;
  Counters& n = block->counters;
  fragments[current].blocked = false;
  fragments[current].gathers = 0;
  changed_ = false;
  bool waited = fragments[current].waiting_for[0] != '\0';
  while (budget > 0) {
    Fragment& f = fragments[current];
    if (f.pc == f.meeting_pc) {
      arrive_at_meeting(current);
      return any;
    }
    const Inst& in = code[f.pc];
    uint32_t mask = f.mask;
    if (in.guard >= 0) mask &= in.guard_negated ? ~preds[in.guard] : preds[in.guard];
    ++f.pc;
    if (mask) in.fn(*this, in, mask);
    if (!changed_ && fragments[current].blocked) return any;
    any = true;
    if (waited && !changed_) fragments[current].waiting_for = "";
    waited = false;
    --budget;
    ++steps;
    ++n.warp_instructions;
    n.thread_instructions += static_cast<uint64_t>(__builtin_popcount(mask));
    ++n.by_class[static_cast<int>(in.cls)];
    if (changed_) return any;
    if (yield) return any;
  }
  return any;
}

void Warp::remove_fragment(size_t index) {
  fragments.erase(fragments.begin() + static_cast<long>(index));
  if (index < current) --current;
  changed_ = true;
}

int Warp::new_meeting(const Meeting& m) {
  if (free_meetings_.empty()) {
    meetings.push_back(m);
    return static_cast<int>(meetings.size()) - 1;
  }
  const int id_ = free_meetings_.back();
  free_meetings_.pop_back();
  meetings[id_] = m;
  return id_;
}

void Warp::arrive_at_meeting(size_t index) {
  const int m = fragments[index].meeting;
  meetings[m].arrived |= fragments[index].mask;
  remove_fragment(index);
  if (meetings[m].arrived == meetings[m].expected) release_meeting(m);
}

void Warp::release_meeting(int m) {
  const Meeting done = meetings[m];
  free_meetings_.push_back(m);
  Fragment f;
  f.pc = done.pc;
  f.mask = done.arrived;
  f.meeting = done.parent;
  f.meeting_pc = done.parent >= 0 ? meetings[done.parent].pc : ~0u;
  fragments.push_back(f);
  current = fragments.size() - 1;
  changed_ = true;
  if (f.pc == f.meeting_pc) arrive_at_meeting(current);
}

void Warp::branch(const Inst& in, uint32_t taken, uint32_t target) {
  Fragment& f = frag();
  const uint32_t rest = f.mask & ~taken;
  if (rest == 0) {
    f.pc = target;
    return;
  }
  split({{rest, f.pc}, {taken, target}}, in.reconverge);
}

// Parts the current fragment: (mask, pc) of each piece.
void Warp::split(const std::vector<std::pair<uint32_t, uint32_t>>& parts, int reconverge) {
  const Fragment whole = frag();
  int m = whole.meeting;
  if (reconverge >= 0 && (m < 0 || meetings[m].pc != static_cast<uint32_t>(reconverge))) {
    Meeting meeting;
    meeting.pc = static_cast<uint32_t>(reconverge);
    meeting.expected = whole.mask;
    meeting.parent = m;
    m = new_meeting(meeting);
  }
  remove_fragment(current);
  std::vector<Fragment> arrived;
  const size_t first = fragments.size();
  for (const auto& part : parts) {
    Fragment f;
    f.mask = part.first;
    f.pc = part.second;
    f.meeting = m;
    f.meeting_pc = m >= 0 ? meetings[m].pc : ~0u;
    if (f.pc == f.meeting_pc) meetings[m].arrived |= f.mask;
    else fragments.push_back(f);
  }
  current = first;
  if (m >= 0 && meetings[m].arrived == meetings[m].expected) release_meeting(m);
}

void branch_table(Warp& w, const Inst& in, uint32_t mask) {
  const auto& targets = *static_cast<const std::vector<uint32_t>*>(in.ext);
  std::vector<std::pair<uint32_t, uint32_t>> parts;
  const uint32_t rest = w.frag().mask & ~mask;
  if (rest) parts.push_back({rest, w.frag().pc});
  for_lanes(mask, [&](int lane) {
    const uint64_t index = w.value(in.op[0], lane);
    if (index >= targets.size()) {
      w.fail(ReportKind::kUndefined, in, lane,
             "branch index " + std::to_string(index) + " is not below the table's " + std::to_string(targets.size()) +
                 " targets");
    }
    const uint32_t pc = targets[index];
    for (auto& part : parts) {
      if (part.second == pc) {
        part.first |= 1u << lane;
        return;
      }
    }
    parts.push_back({1u << lane, pc});
  });
  if (parts.size() == 1) w.frag().pc = parts[0].second;
  else w.split(parts, in.reconverge);
}

void Warp::exit_lanes(uint32_t mask) {
  Fragment& f = frag();
  for (int i = 0; mask & unwaited && i < 32; ++i) {
    if (!(mask & unwaited & 1u << i)) continue;
    report(ReportKind::kUndefined, *unwaited_copy[i], i,
           "the thread ended without waiting for this copy into shared memory", "shared");
  }
  live &= ~mask;
  f.mask &= ~mask;
  ++block->effects;
  const int first = f.meeting;
  for (int m = first; m >= 0; m = meetings[m].parent) meetings[m].expected &= ~mask;
  if (f.mask == 0) remove_fragment(current);
  changed_ = true;
  if (live == 0) {
    for (int b = 0; b <= kClusterBarrier; ++b) {
      if (block->barriers[b].all) block->check_barrier_release(b);
    }
  }
  // A meeting may have waited for these lanes only. Releasing it may release its parent in turn.
  for (int m = first; m >= 0;) {
    const int parent = meetings[m].parent;
    if (meetings[m].expected == 0) {
      free_meetings_.push_back(m);
    } else {
      if (meetings[m].arrived == meetings[m].expected) release_meeting(m);
      break;
    }
    m = parent;
  }
}

void Warp::wait(const char* what, uint64_t address, bool may_time_out) {
  Fragment& f = frag();
  if (!f.blocked && f.waiting_for != what) ++block->counters.barrier_waits;
  f.blocked = true;
  f.may_time_out = may_time_out;
  f.gathers = 0;
  f.members = 0;
  f.waiting_for = what;
  f.waiting_address = address;
  --f.pc;
}

bool Warp::assemble(uint32_t* mask, uint32_t needed, uint64_t key, bool aligned) {
  needed &= live;  // lanes that have exited are not waited for
  if ((needed & ~*mask) == 0) {
    if (arrivals) arrivals->meet(*mask);
    return true;
  }
  uint32_t there = *mask;
  for (size_t i = 0; i < fragments.size(); ++i) {
    if (i != current && fragments[i].gathers == key) there |= active(fragments[i]);
  }
  if (needed & ~there) {
    wait("other lanes of the warp");
    frag().gathers = key;
    if (!aligned) frag().members = needed & ~there;
    return false;
  }
  *mask = there;
  if (arrivals) arrivals->meet(there);
  for (size_t i = fragments.size(); i-- > 0;) {
    const Fragment f = fragments[i];
    if (i == current || f.gathers != key || f.pc + 1 != frag().pc || f.meeting != frag().meeting) continue;
    frag().mask |= f.mask;
    fragments.erase(fragments.begin() + static_cast<long>(i));
    if (i < current) --current;
  }
  return true;
}

bool Warp::gather(uint32_t* mask, uint32_t needed, uint64_t key, bool aligned) {
  if (!assemble(mask, needed, key, aligned)) return false;
  for (Fragment& f : fragments) {
    if (f.gathers != key) continue;
    f.blocked = false;
    f.gathers = 0;
    ++f.pc;
  }
  return true;
}

void Warp::part_by(const uint32_t* values, uint32_t mask) {
  const uint32_t next = frag().pc;
  std::vector<std::pair<uint32_t, uint32_t>> parts;
  if (frag().mask & ~mask) parts.push_back({frag().mask & ~mask, next});
  for (uint32_t rest = mask; rest;) {
    const uint32_t value = values[__builtin_ctz(rest)];
    uint32_t same = 0;
    for_lanes(rest, [&](int i) { same |= static_cast<uint32_t>(values[i] == value) << i; });
    parts.push_back({same, next - 1});
    rest &= ~same;
  }
  split(parts, -1);
}

bool Warp::part_from_meetings() {
  uint32_t wanted = 0;
  for (const Fragment& f : fragments) wanted |= f.blocked ? f.members : 0;
  if (wanted == 0) return false;
  bool any = false;
  for (const Fragment& f : std::vector<Fragment>(fragments)) {
    for (int m = f.meeting; m >= 0; m = meetings[m].parent) {
      Meeting& meeting = meetings[m];
      if ((meeting.arrived & wanted) == 0) continue;
      Fragment alone;
      alone.pc = meeting.pc;
      alone.mask = meeting.arrived;
      alone.meeting = meeting.parent;
      alone.meeting_pc = meeting.parent >= 0 ? meetings[meeting.parent].pc : ~0u;
      meeting.expected &= ~meeting.arrived;
      meeting.arrived = 0;
      fragments.push_back(alone);
      any = true;
    }
  }
  return any;
}

Report Warp::make_report(ReportKind kind, const Inst& in, int lane, const std::string& text, const char* space,
                         uint64_t address) const {
  const Launch& l = *block->launch;
  Report r;
  r.kind = kind;
  r.kernel = l.code->info.name;
  r.line = static_cast<int>(in.line);
  if (in.line >= 1 && in.line <= l.text->lines.size()) r.instruction = l.text->lines[in.line - 1];
  std::copy(block->id, block->id + 3, r.block);
  r.warp = id;
  r.lane = lane;
  r.address = address;
  r.space = space;
  r.text = text;
  return r;
}

void Launch::file(Report r) {
  if (++seen[{static_cast<int>(r.kind), static_cast<uint32_t>(r.line)}] > 1) return;
  if (full(r.kind)) return;
  ++filed[static_cast<int>(r.kind)];
  result.reports.push_back(std::move(r));
  if (config->stop_at_first_report) throw Stop{LaunchStatus::kFault};
}

void Warp::report(ReportKind kind, const Inst& in, int lane, const std::string& text, const char* space,
                  uint64_t address) {
  Launch& l = *block->launch;
  const std::lock_guard<std::mutex> lock(l.mutex);
  const auto found = l.seen.find({static_cast<int>(kind), in.line});
  if (found != l.seen.end() || l.full(kind)) return;
  l.file(make_report(kind, in, lane, text, space, address));
}

void Warp::fail(ReportKind kind, const Inst& in, int lane, const std::string& text, const char* space,
                uint64_t address) {
  report(kind, in, lane, text, space, address);
  throw Stop{kind == ReportKind::kTrap ? LaunchStatus::kTrap : LaunchStatus::kFault};
}

}  // namespace vsm::exec
