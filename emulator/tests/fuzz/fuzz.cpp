// SPDX-License-Identifier: Apache-2.0
// Random small PTX programs, and damaged text: fuzz SECONDS [SEED] [FILE.ptx...]
//
// Every program is parsed, decoded and launched with a bound on its instructions; it may be refused, faulted or reported,
// and nothing else. Half of the programs are damaged in a few places first; files take part in that half. Meant to be
// built with AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz`). A failure's text tells the program's seed:
// `fuzz 0 SEED` runs that one alone and prints it. Prints counts of what happened. `fuzz forms` names the forms below that
// the front end never takes, and fails if there are any.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "tma/tma.h"

namespace {

using Random = std::mt19937_64;

constexpr uint64_t kBuffer = 4096;  // bytes of global memory that a program may touch
constexpr uint64_t kMostInstructions = 20000;

// Letters stand for operands: R 32-bit, D 64-bit, H 16-bit, Q 128-bit registers, P predicates, I a small number, S a shared
// address, B an mbarrier's, G a global one, L a local one, A a generic one of any of these, T a label, M a tensor map's address, O the
// global address that the parameter gives.
const char* const kForms[] = {
    "add.u32 R, R, R",
    "sub.s32 R, R, I",
    "mul.lo.u32 R, R, R",
    "mul.wide.s32 D, R, R",
    "mad.hi.u32 R, R, R, R",
    "add.cc.u32 R, R, R",
    "addc.u32 R, R, R",
    "add.u64 D, D, D",
    "shl.b32 R, R, R",
    "shr.s32 R, R, I",
    "shf.l.wrap.b32 R, R, R, R",
    "div.s32 R, R, R",
    "rem.u32 R, R, R",
    "div.u64 D, D, D",
    "bfe.s32 R, R, R, R",
    "bfi.b32 R, R, R, R, R",
    "lop3.b32 R, R, R, R, 0x6a",
    "prmt.b32 R, R, R, R",
    "dp4a.u32.s32 R, R, R, R",
    "brev.b32 R, R",
    "popc.b64 R, D",
    "clz.b32 R, R",
    "bfind.s32 R, R",
    "fns.b32 R, R, R, R",
    "bmsk.clamp.b32 R, R, R",
    "szext.wrap.s32 R, R, R",
    "min.s16x2 R, R, R",
    "max.u32 R, R, R",
    "abs.s32 R, R",
    "sad.u32 R, R, R, R",
    "mul24.lo.u32 R, R, R",
    "add.rn.f32 R, R, R",
    "fma.rz.ftz.f32 R, R, R, R",
    "mul.sat.f32 R, R, R",
    "div.rn.f32 R, R, R",
    "div.approx.ftz.f32 R, R, R",
    "sqrt.rp.f32 R, R",
    "rsqrt.approx.f32 R, R",
    "ex2.approx.ftz.f32 R, R",
    "lg2.approx.f32 R, R",
    "sin.approx.f32 R, R",
    "tanh.approx.f32 R, R",
    "min.NaN.f32 R, R, R",
    "max.f32 R, R, R",
    "copysign.f32 R, R, R",
    "testp.subnormal.f32 P, R",
    "add.f64 D, D, D",
    "fma.rn.f64 D, D, D, D",
    "add.rn.f16x2 R, R, R",
    "fma.rn.relu.bf16x2 R, R, R, R",
    "ex2.approx.ftz.bf16x2 R, R",
    "max.NaN.bf16x2 R, R, R",
    "add.rn.f32x2 D, D, D",
    "fma.rn.f32x2 D, D, D, D",
    "cvt.rn.f32.s32 R, R",
    "cvt.rzi.s32.f32 R, R",
    "cvt.rni.sat.u8.f32 R, R",
    "cvt.rn.f16.f32 H, R",
    "cvt.f32.bf16 R, H",
    "cvt.rn.satfinite.e4m3x2.f32 H, R, R",
    "cvt.rn.f16x2.e5m2x2 R, H",
    "cvt.rz.satfinite.ue8m0x2.f32 H, R, R",
    "cvt.rn.bf16x2.ue8m0x2 R, H",
    "cvt.rna.tf32.f32 R, R",
    "cvt.rn.bf16x2.f32 R, R, R",
    "cvt.u64.s32 D, R",
    "cvt.u32.u64 R, D",
    "cvt.sat.s8.s32 R, R",
    "mov.b32 R, R",
    "mov.b64 {R, R}, D",
    "mov.b64 D, {R, R}",
    "mov.b32 {H, H}, R",
    "mov.u32 R, %laneid",
    "mov.u32 R, %clock",
    "mov.u64 D, %globaltimer",
    "mov.u32 R, %smid",
    "mov.u32 R, I",
    "setp.lt.s32 P, R, R",
    "setp.geu.and.f32 P|P, R, R, P",
    "setp.eq.f16x2 P|P, R, R",
    "selp.b32 R, R, R, P",
    "slct.f32.s32 R, R, R, R",
    "set.lt.u32.f32 R, R, R",
    "and.pred P, P, P",
    "xor.pred P, P, P",
    "not.pred P, P",
    "ld.global.u32 R, [G]",
    "ld.global.v2.u32 {R, R}, [G]",
    "ld.global.v4.f32 {R, R, R, R}, [G]",
    "ld.global.nc.u8 R, [G]",
    "ld.global.b128 Q, [G]",
    "st.global.u32 [G], R",
    "st.global.v4.b32 [G], {R, R, R, R}",
    "st.global.u16 [G], H",
    "ld.shared.u32 R, [S]",
    "ld.shared.v4.u32 {R, R, R, R}, [S]",
    "st.shared.u32 [S], R",
    "st.shared.v2.u64 [S], {D, D}",
    "st.shared.u8 [S], R",
    "ld.local.u32 R, [L]",
    "st.local.v2.u32 [L], {R, R}",
    "ld.u32 R, [A]",
    "st.u32 [A], R",
    "ld.acquire.gpu.global.u32 R, [G]",
    "st.release.cta.shared.u32 [S], R",
    "ld.volatile.shared.u32 R, [S]",
    "ld.param.u64 D, [out]",
    "prefetch.global.L2 [G]",
    "atom.global.add.u32 R, [G], R",
    "atom.shared.cas.b32 R, [S], R, R",
    "atom.global.exch.b128 Q, [G], Q",
    "red.global.add.f32 [G], R",
    "red.global.add.noftz.bf16x2 [G], R",
    "atom.shared.inc.u32 R, [S], R",
    "red.shared.or.b64 [S], D",
    "atom.max.s32 R, [A], R",
    "fence.acq_rel.gpu",
    "membar.cta",
    "fence.proxy.async",
    "fence.proxy.async.shared::cta",
    "fence.mbarrier_init.release.cluster",
    "shfl.sync.bfly.b32 R|P, R, R, R, -1",
    "shfl.sync.idx.b32 R, R, I, 31, -1",
    "vote.sync.ballot.b32 R, P, -1",
    "activemask.b32 R",
    "match.any.sync.b32 R, R, -1",
    "match.all.sync.b64 R|P, D, -1",
    "redux.sync.add.u32 R, R, -1",
    "elect.sync R|P, -1",
    "bar.sync 0",
    "bar.sync I, 64",
    "bar.arrive I, 64",
    "bar.red.popc.u32 R, I, P",
    "barrier.sync.aligned I",
    "bar.warp.sync -1",
    "barrier.cluster.arrive.aligned",
    "barrier.cluster.wait.aligned",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "mbarrier.init.shared::cta.b64 [B], I",
    "mbarrier.inval.shared::cta.b64 [B]",
    "mbarrier.arrive.shared::cta.b64 D, [B]",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [B], I",
    "mbarrier.arrive_drop.shared::cta.b64 _, [B]",
    "mbarrier.test_wait.shared::cta.b64 P, [B], D",
    "mbarrier.try_wait.parity.shared::cta.b64 P, [B], I",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [B], I",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [B], I",
    "cp.async.ca.shared.global [S], [G], 4",
    "cp.async.cg.shared.global [S], [G], 16",
    "cp.async.ca.shared.global [S], [G], 8, R",
    "cp.async.commit_group",
    "cp.async.wait_group 1",
    "cp.async.wait_all",
    "cp.async.mbarrier.arrive.noinc.shared.b64 [B]",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [S], [G], I, [B]",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [S], [G], R, [B]",
    "cp.async.bulk.global.shared::cta.bulk_group [G], [S], I",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [S], [S], I, [B]",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [G], [S], I",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.u32 [G], [S], I",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group 0",
    "cp.async.bulk.wait_group.read 1",
    "cp.async.bulk.prefetch.L2.global [G], I",
    "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [S], [M, {R}], [B]",
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [S], [M, {R, R}], [B]",
    "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [M, {R, R, R}], [S]",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [M, {R, R}], [S]",
    "tensormap.replace.tile.global_address.global.b1024.b64 [M], D",
    "tensormap.replace.tile.rank.global.b1024.b32 [M], I",
    "tensormap.replace.tile.box_dim.global.b1024.b32 [M], 0, R",
    "tensormap.replace.tile.global_stride.global.b1024.b64 [M], 1, D",
    "tensormap.replace.tile.swizzle_mode.global.b1024.b32 [M], 3",
    "tensormap.replace.tile.elemtype.global.b1024.b32 [M], 7",
    "fence.proxy.tensormap::generic.acquire.gpu [M], 128",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {R, R, R, R}, [S]",
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {R, R}, [S]",
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {R}, [S]",
    "stmatrix.sync.aligned.m8n8.x2.shared.b16 [S], {R, R}",
    "movmatrix.sync.aligned.m8n8.trans.b16 R, R",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {R, R, R, R}, {R, R, R, R}, {R, R}, {R, R, R, R}",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {R, R, R, R}, {R, R, R, R}, {R, R}, {R, R, R, R}",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {R, R, R, R}, {R, R, R, R}, {R, R}, {R, R, R, R}",
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32 {R, R, R, R}, {R, R, R, R}, {R, R}, {R, R, R, R}",
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0 {R, R, R, R}, "
    "{R, R, R, R}, {R, R}, {R, R, R, R}, {R}, {1, 0}, {R}, {2, 1}",
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {R, R, R, R}, "
    "{R, R, R, R}, {R, R}, {R, R, R, R}, {R}, {0, 0}, {R}, {0, 0}",
    "cvta.to.global.u64 D, D",
    "cvta.shared.u64 D, D",
    "isspacep.shared P, D",
    "mapa.shared::cluster.u32 R, R, 0",
    "nanosleep.u32 I",
    "bra T",
    "exit",
    "ret",
    "trap",
    "setmaxnreg.dec.sync.aligned.u32 24",
    "getctarank.shared::cluster.u32 R, R",
    "brkpt",
    "pmevent I",
};
constexpr size_t kFormCount = sizeof kForms / sizeof *kForms;

uint64_t below(Random& random, uint64_t n) { return random() % n; }

const char* choose(Random& random, std::initializer_list<const char*> of) {
  return of.begin()[below(random, of.size())];
}

std::string numbered(const char* prefix, Random& random, uint64_t n) {
  return prefix + std::to_string(below(random, n));
}

std::string number(Random& random) {
  return choose(random, {"0", "1", "2", "4", "7", "16", "31", "32", "64", "128", "256", "-1", "0x7fffffff",
                         "0xffffffff", "0f3f800000"});
}

// An address that is right nine times in ten: `base` is a register that points into the memory.
std::string address(const char* base, Random& random, uint64_t bytes) {
  if (below(random, 20) == 0) return numbered(base[1] == 's' ? "%r" : "%d", random, 8);
  const uint64_t aligned = below(random, bytes / 16) * 16;
  const uint64_t off = below(random, 20) == 0 ? below(random, 3 * bytes) : aligned;
  return std::string(base) + "+" + std::to_string(off);
}

std::string statement(const char* form, Random& random, uint64_t labels) {
  std::string text;
  // A letter is an operand where it stands alone: not in a word such as "NaN" or "4X", and not in the opcode.
  const char* operands = std::strpbrk(form, " ");
  int depth = 0;
  bool destination = true;  // must be a register
  for (const char* p = form; *p; ++p) {
    depth += (*p == '{') - (*p == '}');
    if (*p == ',' && depth == 0) destination = false;
    const bool alone =
        operands && p > operands && !std::isalnum(p[-1]) && p[-1] != '%' && p[-1] != ':' && !std::isalnum(p[1]);
    if (!alone || !std::isupper(*p)) {
      text += *p;
      continue;
    }
    switch (*p) {
      case 'R': text += destination || below(random, 12) ? numbered("%r", random, 8) : number(random); break;
      case 'D': text += numbered("%d", random, 8); break;
      case 'H': text += numbered("%h", random, 4); break;
      case 'Q': text += numbered("%q", random, 2); break;
      case 'P': text += numbered("%p", random, 4); break;
      case 'I': text += below(random, 4) ? std::to_string(below(random, 17) * 16) : number(random); break;
      case 'S': text += address("%s", random, 2048); break;
      case 'B': text += below(random, 12) ? "bar" : address("%s", random, 2048); break;
      case 'G': text += address("%g", random, kBuffer); break;
      case 'L': text += address("depot", random, 64); break;
      case 'A': text += below(random, 2) ? address("%g", random, kBuffer) : address("%a", random, 2048); break;
      case 'M': text += below(random, 2) ? "%m" : "%g+" + std::to_string(128 * below(random, 8)); break;
      case 'T': text += numbered("T", random, labels); break;
      default: text += *p;
    }
  }
  return text;
}

// `only`: a program of that form alone.
std::string program(Random& random, const char* only = nullptr) {
  const uint64_t length = only ? 1 : 1 + below(random, 40), labels = only ? 1 : 1 + below(random, 4);
  std::string text =
      ".version 9.0\n.target sm_121a\n.address_size 64\n.visible .entry k(.param .u64 out, .param .align 64 .b8 "
      "map[128]) {\n"
      ".reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b16 %h<4>; .reg .b128 %q<2>; .reg .pred %p<4>; .reg .b64 %g, %a, %m; "
      ".reg .b32 %s;\n"
      ".shared .align 128 .b8 area[2048]; .local .align 16 .b8 depot[64];\n"
      ".shared .align 8 .b64 bar;\n"
      "ld.param.u64 %g, [out]; mov.b64 %m, map; cvta.param.u64 %m, %m; mov.u32 %s, area; mov.b64 %a, area; "
      "cvta.shared.u64 %a, %a;\n"
      "mov.u32 %r0, %tid.x; mov.u32 %r1, %laneid; mov.b64 %d0, %g; setp.lt.u32 %p0, %r1, 7; mov.u32 %r2, 0x3f800000;\n"
      "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 4; bar.sync 0;\n";
  for (uint64_t i = 0; i < length; ++i) {
    for (uint64_t label = 0; label < labels; ++label) {
      if (i == label * length / labels) text += "T" + std::to_string(label) + ":\n";
    }
    if (below(random, 6) == 0) text += std::string(below(random, 2) ? "@" : "@!") + numbered("%p", random, 4) + " ";
    text += statement(only ? only : kForms[below(random, kFormCount)], random, labels) + ";\n";
  }
  return text + "ret;\n}\n";
}

std::string damaged(std::string text, Random& random) {
  static const char* const kTokens[] = {"%r0",
                                        "%d1",
                                        "%p",
                                        "0",
                                        "-1",
                                        "[",
                                        "]",
                                        "{",
                                        "}",
                                        ";",
                                        ",",
                                        "(",
                                        ")",
                                        ":",
                                        "@!%p0",
                                        ".u32",
                                        ".b64",
                                        ".shared",
                                        ".global",
                                        ".v4",
                                        ".sync",
                                        ".aligned",
                                        "bra T0",
                                        "st",
                                        "ld",
                                        "+4096",
                                        "0xffffffffffffffff",
                                        "0f7F800000",
                                        "\"",
                                        "/*",
                                        ".reg .b32 %x<4000000000>;",
                                        ".shared .b8 big[99999999];",
                                        ".align 3",
                                        ".param",
                                        ".func",
                                        ".entry",
                                        "%",
                                        "<",
                                        "_",
                                        "|"};
  const uint64_t changes = 1 + below(random, 3);
  for (uint64_t i = 0; i < changes && !text.empty(); ++i) {
    const size_t at = below(random, text.size());
    switch (below(random, 6)) {
      case 0: text.erase(at, 1 + below(random, 8)); break;
      case 1: text[at] = static_cast<char>(below(random, 8) ? 32 + below(random, 95) : random()); break;
      case 2: text.insert(at, std::string(" ") + kTokens[below(random, sizeof kTokens / sizeof *kTokens)] + " "); break;
      case 3: text.resize(at); break;
      case 4: {
        const std::string piece = text.substr(at, below(random, 64));
        text.insert(below(random, text.size()), piece);
        break;
      }
      default: {
        const size_t digit = text.find_first_of("0123456789", at);
        if (digit != std::string::npos) text[digit] = static_cast<char>('0' + below(random, 10));
      }
    }
  }
  return text;
}

int unknown_forms() {
  int unknown = 0;
  Random random(1);
  for (const char* form : kForms) {
    std::string why;
    bool taken = false;
    for (int i = 0; i < 40 && !taken; ++i) {
      try {
        vsm::Program::parse(program(random, form), "form")->code(0);
        taken = true;
      } catch (const vsm::PtxError& error) { why = error.what(); }
    }
    if (taken) continue;
    ++unknown;
    std::printf("%s: %s\n", form, why.c_str());
  }
  return unknown;
}

// The buffer's address, then a tensor map: any 128 bytes, or one that is right but for its size perhaps.
void fill_params(std::vector<uint8_t>& params, uint64_t buffer, Random& random) {
  for (uint8_t& byte : params) byte = static_cast<uint8_t>(random());
  std::memcpy(params.data(), &buffer, 8);
  if (below(random, 4) == 0) return;
  vsm::tma::Descriptor d;
  d.address = buffer + 16 * below(random, 16);
  d.rank = 1 + static_cast<uint32_t>(below(random, 3));
  d.type = static_cast<vsm::tma::ElementType>(below(random, 16));
  d.swizzle = static_cast<vsm::tma::Swizzle>(below(random, 7));
  for (uint32_t i = 0; i < d.rank; ++i) {
    d.dims[i] = 1 + below(random, 64);
    d.box[i] = static_cast<uint32_t>(i ? 1 + below(random, 8) : 16 << below(random, 4));
    if (i) d.strides[i - 1] = 64 << below(random, 4);
  }
  if (vsm::tma::check(d).empty()) vsm::tma::encode(d, params.data() + 64);
}

class Fuzzer {
 public:
  explicit Fuzzer(std::vector<std::string> files) : files_(std::move(files)), device_(vsm::Limits(), 1) {
    buffer_ = device_.allocate(kBuffer);
  }

  void run(uint64_t seed, bool show) {
    Random random(seed);
    std::string text =
        !files_.empty() && below(random, 8) == 0 ? files_[below(random, files_.size())] : program(random);
    if (below(random, 2)) text = damaged(std::move(text), random);
    if (show) std::printf("%s\n", text.c_str());
    vsm::LoadedModule* module = nullptr;
    try {
      const auto parsed = vsm::Program::parse(text, "fuzz");
      for (size_t i = 0; i < parsed->kernels().size(); ++i) parsed->code(static_cast<int>(i));
      module = device_.load(parsed);
    } catch (const vsm::PtxError& error) {
      if (show) std::printf("refused: %s\n", error.what());
      ++counts_["refused"];
      return;
    }
    const auto& kernels = device_.program(module).kernels();
    for (size_t i = 0; i < kernels.size() && i < 4; ++i) launch(module, static_cast<int>(i), random, show);
    device_.unload(module);
  }

  void print() const {
    for (const auto& [what, count] : counts_)
      std::printf("%s %llu\n", what.c_str(), static_cast<unsigned long long>(count));
  }

 private:
  void launch(vsm::LoadedModule* module, int kernel, Random& random, bool show) {
    std::vector<uint8_t> params(std::max<size_t>(256, device_.program(module).kernels()[size_t(kernel)].param_bytes));
    fill_params(params, buffer_, random);
    vsm::LaunchConfig config;
    config.grid[0] = 1 + static_cast<uint32_t>(below(random, 2));
    config.block[0] = static_cast<uint32_t>(below(random, 3) ? 64 : 1 + below(random, 130));
    config.watch = below(random, 4) ? vsm::kWatchDefault | vsm::kWatchRaces : static_cast<uint32_t>(below(random, 16));
    config.max_warp_instructions = kMostInstructions;
    config.programmatic = below(random, 2);
    const vsm::LaunchResult result = device_.launch(module, kernel, config, params.data(), params.size());
    static const char* const kNames[] = {"ok", "launch refused", "fault", "trap", "deadlock", "step limit"};
    ++counts_[std::string(kNames[static_cast<int>(result.status)]) + (result.reports.empty() ? "" : ", reported")];
    if (!show) return;
    std::printf("%s %s\n", kNames[static_cast<int>(result.status)], result.message.c_str());
    for (const vsm::Report& report : result.reports) std::printf("%s\n", report.str().c_str());
  }

  std::vector<std::string> files_;
  vsm::Device device_;
  uint64_t buffer_;
  std::map<std::string, uint64_t> counts_;
};

uint64_t current_seed = 0;

void say_seed(int) {
  std::fprintf(stderr, "the program of seed %llu\n", static_cast<unsigned long long>(current_seed));
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 1;
  if (std::string(arguments[1]) == "forms") return unknown_forms() != 0;
  std::signal(SIGABRT, say_seed);  // the sanitizers', with abort_on_error=1
  const double seconds = std::atof(arguments[1]);
  uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : std::random_device()();
  std::vector<std::string> files;
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i]);
    files.emplace_back((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  Fuzzer fuzzer(std::move(files));
  if (seconds == 0) {
    fuzzer.run(seed, true);
    return 0;
  }
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double slowest = 0;
  uint64_t slowest_seed = 0;
  for (; std::chrono::duration<double>(Clock::now() - start).count() < seconds; ++seed) {
    const auto began = Clock::now();
    current_seed = seed;
    fuzzer.run(seed, false);
    const double took = std::chrono::duration<double>(Clock::now() - began).count();
    if (took > slowest) slowest = took, slowest_seed = seed;
  }
  fuzzer.print();
  std::printf("slowest %.2f s (seed %llu)\n", slowest, static_cast<unsigned long long>(slowest_seed));
  return slowest > 20;  // bounded steps bound the time
}
