// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <climits>
#include <thread>

#include "exec/machine.h"
#include "occupancy.h"
#include "ptx/decode.h"
#include "tensor/tensor.h"

namespace vsm {

using namespace exec;

struct LoadedModule {
  std::shared_ptr<const Program> program;
  std::map<std::string, uint64_t> variables;
  std::vector<uint64_t> owned;
  std::vector<std::vector<uint32_t>> constants;  // per kernel, relocated; empty before its first launch

  /// The address of a variable. Throws PtxError.
  uint64_t resolve(const std::string& symbol) const {
    const auto it = variables.find(symbol);
    if (it == variables.end())
      throw PtxError(0, program->name() + ": symbol '" + symbol + "' is not defined in the module");
    return it->second;
  }
  std::vector<uint32_t> relocate(const Code& code) const {
    std::vector<uint32_t> relocated = code.constants;
    for (const Code::SymbolSlot& s : code.symbols) {
      const uint64_t value = resolve(s.symbol) + static_cast<uint64_t>(s.addend);
      for (size_t lane = 0; lane < 32; ++lane) std::memcpy(&relocated[size_t{s.slot} * 32 + lane * 2], &value, 8);
    }
    return relocated;
  }
};

struct DeviceImpl {
  Limits limits;
  int threads = 1;
  GlobalMemory memory;
  std::mutex launch_mutex;
  std::map<uint64_t, GridsInFlight> in_flight;  // by stream; guarded by launch_mutex
  /// The host gives the bytes, or takes them: no launch behind is to blame for touching them.
  void forget(uint64_t address, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(launch_mutex);
    for (auto& stream : in_flight) {
      for (auto& grid : stream.second) {
        grid.accesses->reads.remove(address, bytes);
        grid.accesses->writes.remove(address, bytes);
      }
    }
  }
  mutable std::mutex module_mutex;
  std::map<const LoadedModule*, std::unique_ptr<LoadedModule>> modules;
};

namespace {
/// A launch allocates its blocks' state and frees it. glibc would give these megabytes back to the kernel and fault them in
/// again at the next launch, which was half of a small cooperative one's time. Of all the process; called once.
void keep_freed_memory() {
#ifdef __GLIBC__
  static const int done = mallopt(M_MMAP_THRESHOLD, 32 << 20) + mallopt(M_TRIM_THRESHOLD, INT_MAX);
  static_cast<void>(done);
#endif
}
}  // namespace

Device::Device(const Limits& limits, int host_threads) : impl_(new DeviceImpl) {
  keep_freed_memory();
  impl_->limits = limits;
  impl_->threads = host_threads > 0 ? host_threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}
Device::~Device() = default;

const Limits& Device::limits() const { return impl_->limits; }
uint64_t Device::allocate(uint64_t bytes) { return impl_->memory.allocate(bytes); }
bool Device::release(uint64_t address) {
  Allocation a;
  if (impl_->memory.find(address, &a)) impl_->forget(a.address, a.size);
  return impl_->memory.release(address);
}
void Device::register_memory(const void* address, uint64_t bytes, bool read_only) {
  impl_->forget(reinterpret_cast<uint64_t>(address), bytes);
  impl_->memory.add(reinterpret_cast<uint64_t>(address), bytes, read_only);
}
bool Device::unregister_memory(const void* address) {
  return impl_->memory.remove(reinterpret_cast<uint64_t>(address));
}
bool Device::find(uint64_t address, Allocation* out) const { return impl_->memory.find(address, out); }
void Device::mark_initialized(uint64_t address, uint64_t bytes) {
  impl_->forget(address, bytes);
  impl_->memory.mark_written(address, bytes);
}
void Device::discard(uint64_t address, uint64_t bytes) {
  impl_->forget(address, bytes);
  impl_->memory.mark_unwritten(address, bytes);
}
void Device::settle() {
  std::lock_guard<std::mutex> lock(impl_->launch_mutex);
  impl_->in_flight.clear();
}
uint64_t Device::bytes_allocated() const { return impl_->memory.bytes(); }

LoadedModule* Device::load(std::shared_ptr<const Program> program) {
  auto module = std::make_unique<LoadedModule>();
  module->program = program;
  for (const VariableInfo& v : program->variables()) {
    const uint64_t address = impl_->memory.allocate(v.size, /*written=*/true);
    module->owned.push_back(address);
    module->variables[v.name] = address;
    std::memset(reinterpret_cast<void*>(address), 0, v.size);
    if (!v.init.empty()) std::memcpy(reinterpret_cast<void*>(address), v.init.data(), v.init.size());
  }
  try {
    for (const VariableInfo& v : program->variables()) {
      for (const VariableInfo::Relocation& r : v.relocations) {
        const uint64_t value = module->resolve(r.symbol) + static_cast<uint64_t>(r.addend);
        std::memcpy(reinterpret_cast<void*>(module->variables[v.name] + r.offset), &value, 8);
      }
    }
  } catch (const PtxError&) {
    for (const uint64_t a : module->owned) impl_->memory.release(a);
    throw;
  }
  module->constants.resize(program->kernels().size());
  LoadedModule* raw = module.get();
  std::lock_guard<std::mutex> lock(impl_->module_mutex);
  impl_->modules[raw] = std::move(module);
  return raw;
}

void Device::unload(LoadedModule* module) {
  std::lock_guard<std::mutex> launch_lock(impl_->launch_mutex);
  std::lock_guard<std::mutex> lock(impl_->module_mutex);
  const auto it = impl_->modules.find(module);
  if (it == impl_->modules.end()) return;
  for (const uint64_t a : it->second->owned) impl_->memory.release(a);
  impl_->modules.erase(it);
}

uint64_t Device::variable(const LoadedModule* module, const std::string& name, uint64_t* size) const {
  const auto it = module->variables.find(name);
  if (it == module->variables.end()) return 0;
  for (const VariableInfo& v : module->program->variables()) {
    if (v.name == name && size) *size = v.size;
  }
  return it->second;
}

const Program& Device::program(const LoadedModule* module) const { return *module->program; }

namespace {

// What the driver refuses before anything runs; empty if nothing.
std::string refuse(const Limits& l, const KernelInfo& k, const LaunchConfig& c, size_t param_bytes) {
  auto text = [](const char* what, uint64_t given, uint64_t allowed) {
    return std::string(what) + " is " + std::to_string(given) + "; at most " + std::to_string(allowed) + " is allowed";
  };
  uint64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    if (c.grid[i] == 0 || c.block[i] == 0) return "a grid or block dimension is 0";
    if (c.grid[i] > l.max_grid[i]) return text("a grid dimension", c.grid[i], l.max_grid[i]);
    if (c.block[i] > l.max_block[i]) return text("a block dimension", c.block[i], l.max_block[i]);
    if (c.cluster[i] != 1) return "clusters of more than one block do not exist on this device";
    threads *= c.block[i];
  }
  if (threads > l.max_threads_per_block) return text("threads per block", threads, l.max_threads_per_block);
  if (k.maxntid[0]) {
    const uint64_t most = uint64_t{k.maxntid[0]} * k.maxntid[1] * k.maxntid[2];
    if (threads > most) return text("threads per block (.maxntid)", threads, most);
  }
  if (k.reqntid[0] && (c.block[0] != k.reqntid[0] || c.block[1] != k.reqntid[1] || c.block[2] != k.reqntid[2])) {
    return "the block is not of the .reqntid shape";
  }
  const uint64_t shared = uint64_t{k.static_shared} + c.dynamic_shared;
  if (shared > l.shared_per_block_optin) return text("shared memory per block", shared, l.shared_per_block_optin);
  if (shared > l.shared_per_block_default && c.dynamic_shared > c.max_dynamic_shared) {
    return text("dynamic shared memory without cudaFuncAttributeMaxDynamicSharedMemorySize", c.dynamic_shared,
                std::max<uint64_t>(c.max_dynamic_shared,
                                   l.shared_per_block_default - std::min(l.shared_per_block_default, k.static_shared)));
  }
  if (c.accumulation_bits.largest() > tensor::kMaxAccumulationBits)
    return text("accumulation_bits", c.accumulation_bits.largest(), tensor::kMaxAccumulationBits);
  const uint64_t registers = (uint64_t{c.registers} * 32 + 255) / 256 * 256 * ((threads + 31) / 32);
  if (registers > l.registers_per_block) return text("registers per block", registers, l.registers_per_block);
  if (param_bytes < k.param_bytes)
    return "the parameter buffer has " + std::to_string(param_bytes) + " bytes; the kernel takes " +
           std::to_string(k.param_bytes);
  return "";
}

// A host thread's share of the launch: takes blocks in order. A block that only spins makes room for the next one,
// as resident blocks do on the hardware, so that blocks may wait for one another.
class Worker {
 public:
  Worker(Launch& launch, uint64_t total, size_t resident)
      : l_(launch), total_(total), resident_(std::max<size_t>(1, resident)) {}

  void run() {
    try {
      while (!l_.stop.load(std::memory_order_relaxed) && turn()) {}
    } catch (const Stop& s) { finish_with(s.status, ""); } catch (const std::exception& e) {
      finish_with(LaunchStatus::kFault, e.what());
    }
    std::lock_guard<std::mutex> lock(l_.mutex);
    for (auto& b : active_) l_.result.counters.add(b->counters);
    l_.result.counters.add(done_);
    if (l_.accesses) {
      l_.accesses->reads.merge(accesses_.reads);
      l_.accesses->writes.merge(accesses_.writes);
    }
  }

 private:
  static constexpr uint64_t kSlice = 1 << 16;
  static constexpr uint64_t kIdleLimit = 200 * 1000 * 1000;
  // When all blocks of this thread wait for another thread's: a pause, and what it counts for, so that polling neither takes
  // that thread's time nor fills the counters. Ten seconds of pauses are the limit.
  static constexpr std::chrono::microseconds kPause{100};
  static constexpr uint64_t kPauseSteps = 2000;

  bool admit() {
    const uint64_t index = l_.next_block.fetch_add(1);
    if (index >= total_) return false;
    std::unique_ptr<Block> b;
    if (spare_.empty()) {
      b = std::make_unique<Block>();
    } else {
      b = std::move(spare_.back());
      spare_.pop_back();
    }
    active_.push_back(std::move(b));
    active_.back()->start(&l_, index, l_.accesses ? &accesses_ : nullptr);
    return true;
  }

  // One slice of one block. False when nothing is left.
  bool turn() {
    if (active_.empty() && !admit()) return false;
    if (next_ >= active_.size()) next_ = 0;
    Block& b = *active_[next_];
    const uint64_t steps = b.counters.warp_instructions, effects = b.effects;
    // Not far beyond the bound: a slice of copies can take seconds.
    const uint64_t longest = l_.weak ? 256 + l_.weak->random() % 8192 : kSlice;
    const Block::Slice slice = b.run(std::min(longest, l_.step_limit - std::min(l_.step_limit - 1, l_.steps.load())));
    const uint64_t all =
        l_.steps.fetch_add(b.counters.warp_instructions - steps) + b.counters.warp_instructions - steps;
    if (slice == Block::Slice::kDone) {
      done_.add(b.counters);
      spare_.push_back(std::move(active_[next_]));
      active_.erase(active_.begin() + static_cast<long>(next_));
      l_.effects.fetch_add(1);
      idle_ = 0;
      return true;
    }
    if (b.effects != effects) l_.effects.fetch_add(b.effects - effects);
    if (l_.weak) l_.weak->publish_some(b.linear);
    if (all > l_.step_limit) {
      first_live(b).report(ReportKind::kStepLimit, current(b), -1,
                           "more than " + std::to_string(l_.step_limit) + " warp instructions");
      throw Stop{LaunchStatus::kStepLimit};
    }
    if (slice == Block::Slice::kIdle) {
      const uint64_t effects_now = l_.effects.load();
      idle_ = effects_now == effects_seen_ ? idle_ + b.counters.warp_instructions - steps : 0;
      idle_slices_ = effects_now == effects_seen_ ? idle_slices_ + 1 : 0;
      effects_seen_ = effects_now;
      if (idle_ > kIdleLimit) {
        first_live(b).report(ReportKind::kDeadlock, current(b), -1,
                             "the block only spins and nothing it could wait for happens");
        throw Stop{LaunchStatus::kDeadlock};
      }
      if (active_.size() < resident_ && admit()) {
        next_ = active_.size() - 1;
        return true;
      }
      ++next_;
      if (idle_slices_ >= active_.size()) {
        idle_slices_ = 0;
        idle_ += kPauseSteps;
        std::this_thread::sleep_for(kPause);
      }
    } else if (l_.weak) {  // all blocks that the GPU holds run side by side
      if (active_.size() < resident_) admit();
      ++next_;
    }
    return true;
  }

  static Warp& first_live(Block& b) {
    for (Warp& w : b.warps) {
      if (!w.done() && !w.fragments.empty()) return w;
    }
    return b.warps[0];
  }
  static const Inst& current(Block& b) {
    Warp& w = first_live(b);
    return w.code[w.fragments.empty() ? 0 : w.fragments[0].pc];
  }

  void finish_with(LaunchStatus status, const char* text) {
    std::lock_guard<std::mutex> lock(l_.mutex);
    if (l_.result.status == LaunchStatus::kOk) {
      l_.result.status = status;
      l_.result.message = text;
    }
    l_.stop = true;
  }

  Launch& l_;
  const uint64_t total_;
  const size_t resident_;
  std::vector<std::unique_ptr<Block>> active_, spare_;
  size_t next_ = 0;
  uint64_t idle_ = 0, effects_seen_ = 0;
  size_t idle_slices_ = 0;  // in a row
  Counters done_;
  GridAccesses accesses_;
};

}  // namespace

LaunchResult Device::launch(LoadedModule* module, int kernel, const LaunchConfig& config, const void* params,
                            size_t param_bytes) {
  LaunchResult refused;
  refused.status = LaunchStatus::kRefused;
  if (!module || kernel < 0 || static_cast<size_t>(kernel) >= module->program->kernels().size()) {
    refused.message = "no such kernel";
    return refused;
  }
  const KernelInfo& info = module->program->kernels()[static_cast<size_t>(kernel)];
  refused.message = refuse(impl_->limits, info, config, param_bytes);
  if (!refused.message.empty()) {
    refused.message = info.name + ": " + refused.message;
    return refused;
  }
  std::lock_guard<std::mutex> lock(impl_->launch_mutex);
  const auto begin = std::chrono::steady_clock::now();
  Launch l;
  std::vector<uint32_t>& constants = module->constants[static_cast<size_t>(kernel)];
  try {
    l.code = &module->program->code(kernel);
    if (constants.empty()) constants = module->relocate(*l.code);
  } catch (const PtxError& error) {
    refused.message = error.what();
    return refused;
  }
  const Code& code = *l.code;
  l.constants = constants.data();
  l.text = &module->program->impl().text;
  l.config = &config;
  l.limits = &impl_->limits;
  // 128-byte aligned: a __grid_constant__ tensor map must be 64-byte aligned.
  std::vector<uint8_t> buffer(info.param_bytes + 256, 0);
  uint8_t* aligned = buffer.data() + (128 - reinterpret_cast<uint64_t>(buffer.data()) % 128) % 128;
  if (info.param_bytes) std::memcpy(aligned, params, info.param_bytes);
  l.params = aligned;
  l.param_bytes = info.param_bytes;
  l.memory = &impl_->memory;
  l.shared_bytes = impl_->limits.shared_reserved + code.dynamic_shared_offset() + config.dynamic_shared;
  const uint32_t threads = config.block[0] * config.block[1] * config.block[2];
  l.warps_per_block = (threads + 31) / 32;
  const uint64_t total = uint64_t{config.grid[0]} * config.grid[1] * config.grid[2];
  l.blocks = total;
  const uint64_t shared = uint64_t{info.static_shared} + config.dynamic_shared;
  const int per_sm = std::max(1, blocks_per_sm(impl_->limits, threads, config.registers, shared, config.barriers));
  const uint64_t most = uint64_t(per_sm) * static_cast<uint64_t>(impl_->limits.num_sms);
  if (config.cooperative && total > most) {
    refused.message = info.name + ": a cooperative grid of " + std::to_string(total) + " blocks; " +
                      std::to_string(most) + " are resident at a time";
    return refused;
  }
  // What a driver prepares for cooperative_groups::grid_group: a word with a size, and the barrier's word.
  constexpr uint64_t kGridWorkspaceBytes = 8;
  if (config.cooperative && code.reads_grid_workspace()) {
    l.grid_workspace = impl_->memory.allocate(kGridWorkspaceBytes, /*written=*/true);
    std::memset(reinterpret_cast<void*>(l.grid_workspace), 0, kGridWorkspaceBytes);
  }
  l.step_limit = config.max_warp_instructions ? config.max_warp_instructions : uint64_t{20} * 1000 * 1000 * 1000;
  impl_->memory.freeze((config.watch & kWatchDistinct) != 0);
  GridsInFlight& ahead = impl_->in_flight[config.stream];
  if (!config.programmatic || !(config.watch & kWatchFences)) ahead.clear();
  if (!ahead.empty()) l.in_flight = &ahead;
  if (code.launches_dependents && (config.watch & kWatchFences)) {
    l.accesses = std::make_shared<GridAccesses>();
    l.accesses->kernel = info.name;
  }

  if (config.watch & kWatchFences) {
    uint32_t forms = 0;
    for (const Inst& in : code.insts) forms |= in.cls == OpClass::kAsyncCopy ? in.form : 0;
    if (forms & (kBulkLoad | kBulkStore))
      l.global_async = std::make_unique<GlobalAsync>((forms & kBulkLoad) != 0, (forms & kBulkStore) != 0);
  }

  if (config.weak_memory) l.weak = std::make_unique<WeakMemory>(config.weak_memory, total);
  const size_t workers =
      l.weak ? 1 : static_cast<size_t>(std::min<uint64_t>(static_cast<uint64_t>(impl_->threads), total));
  const size_t resident =
      (static_cast<size_t>(per_sm) * static_cast<size_t>(impl_->limits.num_sms) + workers - 1) / workers;
  std::vector<std::thread> pool;
  for (size_t i = 1; i < workers; ++i) pool.emplace_back([&] { Worker(l, total, resident).run(); });
  Worker(l, total, resident).run();
  for (std::thread& t : pool) t.join();
  if (l.grid_workspace) impl_->memory.release(l.grid_workspace);

  l.weak.reset();  // publishes what still waits
  // Grids behind this one start when it is complete or lets them: those ahead are complete then if it waited for them.
  if (l.waited_before_trigger) {
    ahead.erase(std::remove_if(ahead.begin(), ahead.end(), [](const GridInFlight& g) { return !g.outlives_wait; }),
                ahead.end());
  }
  for (GridInFlight& grid : ahead) grid.outlives_wait |= !l.waited;
  if (l.accesses) ahead.push_back({l.accesses, false});
  constexpr size_t kMostInFlight = 4;
  if (ahead.size() > kMostInFlight) ahead.erase(ahead.begin());

  LaunchResult result = std::move(l.result);
  if (config.watch & kWatchDistinct) result.counters.global_distinct_bytes = impl_->memory.distinct_bytes();
  if (result.status != LaunchStatus::kOk && result.message.empty()) {
    result.message = result.reports.empty() ? "the launch was stopped" : result.reports.back().str();
  }
  result.host_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace vsm
