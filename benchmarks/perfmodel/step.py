# SPDX-License-Identifier: Apache-2.0
"""A step of gpt-oss on a GB10, predicted as a range, part by part.

Four kinds of parts:

1. This fork's kernels (MoE; QKV, O and LM head in MXFP8 and MXFP4, and the launch that rescores a head's largest
   logits; its router and its decode attention): times follow
   from their counts on the virtual SM121, kept in ``gb10_kernels.csv``. Attention at a context or batch that is not
   kept there is predicted as in 3.
2. Others' experts whose kernels :mod:`.peers` has counted on the same virtual SM121: predicted in the same way.
3. All other kernels, which stream (bf16 GEMMs, attention's cache) or are small (norms, rope, KV write, top-k, argmax,
   embedding): their bytes at DRAM's rate, plus a fixed time per call. They were not run on the virtual device.
4. With two Sparks: an all-reduce after O and after the experts, by published latencies (:func:`all_reduce_us`).

A part's bytes are all its inputs and outputs, counted once, the step's own tensors (hidden states, logits) included:
each part is taken to pass its results through memory. The two large ones, weights and the KV cache, are exact. In a
prompt, bf16 GEMMs and attention may be bound by arithmetic: their FLOPs over the range of the bf16 rate times the share
of it that such kernels reach, :data:`REACHED`. The engine around a step (scheduler, sampling, detokenizer) adds
:data:`ENGINE_US` if asked for. Not modelled: clocks under load, and prefetches of a later launch's weights, by which an
H100's step gains 0.2 %. Programmatic dependent launches are in the fixed times, which were measured with them.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flashinfer.fused_moe.sm12x_operator import CHOOSING_TOKENS
from flashinfer.fused_moe.sm12x_planner import plan_mode
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.gemm.sm12x_dense_norm import MOST_TOKENS as NORM_TOKENS
from flashinfer.gemm.sm12x_dense_rescored import rescores
from flashinfer.sm12x.instances import INSTANCES
from flashinfer.sm12x.models import MODELS, Model, matrix_bytes
from flashinfer_sm12x.files import json_file, written_whole
from flashinfer_sm12x.quantize.choice import GROUPS, RESCORED_ROWS
from flashinfer_sm12x.quantize.manifest import COARSE
from flashinfer_sm12x.variables import RESCORED

from . import gb10
from .devices import GB10, Device
from .gb10 import CYCLES, FIXED_US, LAUNCH_SAVED_US, MIDDLE, MMA_FLOPS_PER_CYCLE, SECOND_LAUNCH_US, Times
from .moe import Work, known_fits, mean_work, planned
from .moe import predict as predict_layer
from .peers import PEERS, Peer
from .routing import UNIFORM, Routing

BF16, FP32, INT32 = 2, 4, 4
DENSE_FORMATS = ("bf16", "mxfp8", "mxint8", "mxfp6", "nvfp4", "mxfp4")
TokenFormat = Literal["bf16", "mxfp8", "mxfp4"]
TOKENS_BESIDE: dict[str, tuple[TokenFormat, ...]] = {
    "bf16": ("bf16",),
    "mxfp8": ("bf16", "mxfp8"),
    "mxint8": ("bf16",),
    "mxfp6": ("bf16", "mxfp8"),
    "nvfp4": ("bf16",),
    "mxfp4": ("bf16", "mxfp8", "mxfp4"),
    RESCORED: ("bf16",),
}
"""Formats to which a dense layer may round its tokens with a gain, by the format of its weight."""
RESCORING = "rescoring"
"""The part of a step, and the kind of a kept kernel, that computes a head's largest logits again."""
RESCORING_US = FIXED_US["dense"]
"""Assumed equal to a dense layer's: it is one launch with a start and a tail, too."""
KV_BYTES = {"bf16": 2, "fp8": 1}
MATRICES = ("QKV", "O", "LM head")

PARTS = (
    "embedding", "norms", "QKV", "rope", "KV write", "attention, full", "attention, window", "O", "router", "top-k",
    "MoE",
    "all-reduce", "LM head", "rescoring", "argmax",
)  # fmt: skip
"""The parts, in the order in which a step runs them."""

OTHERS_EXPERTS = {"gemm": (2, 2), "small": (6, 8)}
"""Launches of others' MoE layer, fast and slow. vLLM's Marlin layer has eight in all on an H200; upstream's CUTLASS
layer quantizes tokens and activations in launches of their own."""
STREAMED = (1.0, 1.1)
"""The time to stream attention's cache, fast and slow, over that of its bytes: this fork's streams take up to 1.12
times a plain read on an H200."""
REACHED = {"gemm": (0.9, 0.7), "experts": (0.79, 0.62), "attention": (0.73, 0.5)}
"""Shares of the MMA rate. gemm: assumed. attention: FlashAttention-2 on an A100 (arXiv 2307.08691). experts: FP8 and
CUTLASS's grouped GEMM on a GB10, 188 and 147 of 238 TFLOPS (NVIDIA's forum, 359960), clocks under load included."""
ENGINE_US = (0.0, 250.0)
"""Microseconds that a serving engine adds to a step, fast and slow. vLLM's with graphs adds none on a GB10 (kernels run
for 24.9 of 25 s, gptoss-spark) and up to 250 on an H200 (docs/log.md)."""
EAGER_US = (0.0, 1600.0)
"""The same without graphs: assumed; 1,600 is what vLLM takes beyond a single kernel that runs the whole model (mirage
#563)."""
CUBLAS_GB_PER_SECOND = 190.0
"""What cuBLAS reads of a layer's bf16 matrix at few tokens, slow: two of 189 and 94 MB take 1.49 ms (gptoss-spark,
SPECULATION page). Fast, and an LM head: DRAM's rate."""
ALL_REDUCE_US: dict[float, tuple[float, float]] = {8: (15.5, 35.2), 48: (23.0, 59.0)}
"""Microseconds, fast and slow, by kilobytes. Fast: one-shot RDMA writes in a CUDA graph, four Sparks (b12x #295). Slow:
NCCL, two Sparks (dgx-spark-playbooks #103), at 48 KB four (b12x #295). A token's hidden state is 5.8 KB."""
GRAPH_NODE_US = 1.3  # Megatron-LM #6064
LAYER_MODEL = "gpt-oss-120b"
"""The doctor's probe runs this model. Dense layers and attention are the same in all models, and kept under its
name."""
FITTED_MODES = {"mxfp8": 0, "bf16": 2}
"""The mode of the kept fits, by the experts' token format; MXFP8 input is less than 1 % from bf16 input."""
KEPT_BATCHES = (1, 4, 16, 64)
NORMED, NORMED_BATCHES = "QKV behind its norm", (1, 4, 8)
"""The kind of a kept kernel, and its batches."""
KERNELS = Path(__file__).with_name("gb10_kernels.csv")
"""``benchmarks/bench_token.py --emulate`` writes it."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step computes ``new`` tokens of each of ``sequences``; its cache then holds ``context`` tokens, the new ones
    included.

    ``kv``: the cache's format. ``formats``: the format of each of :data:`MATRICES`. ``dense_tokens``: the format to
    which these layers round their tokens, one of :data:`TOKENS_BESIDE` (beside bf16 weights always bf16).
    ``expert_tokens``: the same for the experts: "bf16", "mxfp8", or "auto", which chooses by the number of tokens as
    ``cutlass_fused_moe`` does with both flags. ``fused_router``: this fork's ``router_top_k`` computes the norm before
    the router, the router and the top-k, which are then the one part "router". ``fused_attention``: this fork's
    ``decode_attention`` includes rope and the KV write. ``fork``: False if no kernel is this fork's; experts and dense
    layers are then predicted from bytes, FLOPs and launches, unless ``experts`` names counted kernels, one of
    :data:`.peers.PEERS`. ``verified``: the new tokens are a window that verifies a draft, a decode step whose LM head
    computes logits of all of them; else more than one is a prompt.
    """

    sequences: int
    context: int
    new: int = 1
    kv: str = "bf16"
    formats: Mapping[str, str] = dataclasses.field(default_factory=lambda: formats_of("bf16"))
    fused_router: bool = False
    fused_attention: bool = False
    dense_tokens: TokenFormat = "bf16"
    expert_tokens: str = "auto"
    fork: bool = True
    experts: str = ""
    verified: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def logits(self) -> int:
        """Rows of the LM head's output."""
        return self.tokens if self.verified else self.sequences

    def head_format(self, model: Model) -> str:
        """The format of the weight that computes all logits. A rescored head has a coarse one and, from some tokens on,
        the fine one, in bf16."""
        name = self.formats["LM head"]
        if name not in COARSE:
            return name
        coarse: Any = COARSE[name]
        return coarse if rescores(self.logits, model.matrices["LM head"][0], coarse) else "bf16"

    def rescores(self, model: Model) -> bool:
        """Whether the head's largest logits are computed again."""
        return self.formats["LM head"] in COARSE and self.head_format(model) != "bf16"

    @property
    def prefill(self) -> bool:
        return self.new > 1 and not self.verified

    @property
    def decode_step(self) -> bool:
        """Whether the plugin runs it as a decode step, with ``moe_step``: one token per sequence, or a window that
        verifies a draft."""
        return self.fork and self.fused_router and not self.prefill

    @property
    def fused_norm(self) -> bool:
        """Whether QKV's launch computes the norm before it, as ``rmsnorm_dense_block_scaled`` does."""
        quantized = self.formats["QKV"] != "bf16" and self.dense_tokens == "bf16"
        return self.decode_step and quantized and self.tokens <= NORM_TOKENS

    @property
    def related(self) -> int:
        """Tokens of one sequence that may share experts: a draft's; a prompt's are taken to be independent."""
        return self.new if self.verified else 1


def formats_of(weights: str) -> dict[str, str]:
    """QKV, O and LM head in one format."""
    return dict.fromkeys(MATRICES, weights)


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of work in a step: how often it is done, and the bytes of all of it."""

    name: str
    calls: int
    bytes: float


def mean_experts(model: Model, tokens: int) -> float:
    """The mean number of experts in a layer that random routing of ``tokens`` selects."""
    return model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)


def parts_of(model: Model, step: Step, experts: float | None = None) -> list[Part]:
    """A step's parts, in order.

    ``experts``: experts that a layer uses, the mean over the layers; by random routing when omitted.
    """
    layers, tokens = model.layers, step.tokens
    row = BF16 * model.hidden
    queries, keys = BF16 * model.heads * model.head, BF16 * model.kv_heads * model.head
    kv_row = 2 * model.kv_heads * model.head * KV_BYTES[step.kv]
    windowed = sum(model.windowed(layer) for layer in range(layers))
    touched = mean_experts(model, tokens) if experts is None else experts
    seen = min(step.context, model.window + step.new - 1)

    def dense(name: str, rows_of_tokens: int, bias: bool) -> float:
        n, k = model.matrices[name]
        weights = matrix_bytes(n, k, step.head_format(model) if name == "LM head" else step.formats[name])
        return weights + BF16 * (n if bias else 0) + BF16 * rows_of_tokens * (n + k)

    def attention(context: int) -> float:
        cache = step.sequences * context * kv_row
        if step.fused_attention:
            # New rows are written instead of read; keys, values and a row of rope's table are read.
            cache += tokens * (2 * keys + BF16 * model.head)
        return cache + tokens * 2 * queries + FP32 * model.heads

    routing = model.top_k * (FP32 + INT32)
    norm, norms = 4 * tokens * row + row, (not step.fused_norm) * layers + (not step.fused_router) * layers + 1
    # A norm fused into QKV does not write its rows and read them again. The first layer's reads no residual and writes
    # no sum.
    qkv_norm = (layers - 1) * (norm - 2 * tokens * row) + row
    router = model.experts * (row + BF16)
    # Logits are bf16; between the two launches of the fork's router they are float32.
    router += (
        norm + tokens * (2 * FP32 * model.experts + routing)
        if step.fused_router
        else tokens * (row + BF16 * model.experts)
    )
    expert = model.moe.expert_bytes + BF16 * (2 * model.inter + model.hidden)
    found = {
        "embedding": (1, tokens * 2 * row),
        # The first one reads no residual, and every one writes what it added up.
        "norms": (norms, norms * norm - (0 if step.fused_norm else 2) * tokens * row),
        "QKV": (layers, layers * dense("QKV", tokens, bias=True) + step.fused_norm * qkv_norm),
        "rope": (layers, layers * tokens * (2 * (queries + keys) + BF16 * model.head)),
        "KV write": (layers, layers * tokens * (2 * keys + kv_row)),
        "attention, full": (layers - windowed, (layers - windowed) * attention(step.context)),
        "attention, window": (windowed, windowed * attention(seen)),
        "O": (layers, layers * dense("O", tokens, bias=True)),
        "router": (layers, layers * router),
        "top-k": (layers, layers * tokens * (BF16 * model.experts + routing)),
        "MoE": (layers, layers * (touched * expert + tokens * (2 * row + routing))),
        "LM head": (1, dense("LM head", step.logits, bias=False)),
        # The logits are read once more, and of each token its own row and those of the fine weight.
        RESCORING: (1, step.logits * (BF16 * model.vocab + (1 + min(model.vocab, GROUPS * RESCORED_ROWS)) * row)),
        "argmax": (1, step.logits * (BF16 * model.vocab + 2 * INT32)),
    }
    if not step.rescores(model):
        del found[RESCORING]
    if step.fused_router:
        del found["top-k"]
    if step.fused_attention:
        del found["rope"], found["KV write"]
    if model.ranks > 1:
        # The outputs of O and of the experts, and each rank's best logit.
        found["all-reduce"] = (2 * layers + 1, 2 * layers * 2 * tokens * row)
    return [Part(name, *found[name]) for name in PARTS if name in found]


@dataclasses.dataclass(kw_only=True)
class Kernel(Times):
    """One call of "MoE" or a dense layer (``kind``): ``weights`` is its format, ``activation`` its tokens' format.

    ``kind`` may also be a part of a step that this fork's router or decode attention computes. For attention ``tokens``
    are sequences, ``weights`` is the cache's format and ``context`` the full layers' context.
    """

    kind: str
    model: str
    ranks: int
    tokens: int
    weights: str
    activation: str
    context: int = 0


COLUMNS = Kernel.__annotations__ | Times.__annotations__
"""Columns of the file, with their types."""


def write_kernels(kernels: Iterable[Kernel]) -> None:
    """For :func:`kept`: one line each."""
    with written_whole(KERNELS) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        lines.writerows(map(vars, kernels))


Key = tuple[str, str, int, int, str, str, int]
"""A kernel's ``kind``, ``model``, ``ranks``, ``tokens``, ``weights``, ``activation`` and ``context``."""


@functools.cache
def kept() -> dict[Key, Kernel]:
    """Kernels that were emulated, by their keys."""
    types: dict[str, Any] = {"str": str, "int": int, "float": float}
    with KERNELS.open(encoding="utf-8", newline="") as lines:
        kernels = [
            Kernel(**{name: types[COLUMNS[name]](text) for name, text in line.items()})
            for line in csv.DictReader(lines)
        ]
    return {
        (each.kind, each.model, each.ranks, each.tokens, each.weights, each.activation, each.context): each
        for each in kernels
    }


def kept_kernel(
    kind: str, model: str, ranks: int, tokens: int, weights: str, activation: str, context: int = 0
) -> Kernel:
    """A kernel's kept times.

    Raises
    ------
    ValueError
        No times are kept for this number of tokens.
    """
    if kernel := kept().get((kind, model, ranks, tokens, weights, activation, context)):
        return kernel
    others = (kind, model, ranks, weights, activation, context)
    batches = [str(key[3]) for key in kept() if (*key[:3], *key[4:]) == others]
    raise ValueError(
        f"no prediction of {kind} for {tokens} tokens of {model} on {ranks} GPU(s), {weights} and tokens in "
        f"{activation}: {', '.join(batches) or 'none'} only"
    )


@dataclasses.dataclass(frozen=True)
class Given:
    """Inputs of a prediction, fast and slow; ``layers``: microseconds of an MoE layer by its tokens.

    ``engine_us`` is what the engine adds to a step. ``experts``: how many a layer touches, in place of ``routing``;
    only of others' counted experts. ``nccl``: all-reduces are known to be NCCL's.
    """

    device: Device = GB10
    small_us: tuple[float, float] = FIXED_US["small"]
    layers: Mapping[int, float] = dataclasses.field(default_factory=dict)
    routing: tuple[Routing, Routing] = (UNIFORM, UNIFORM)
    engine_us: tuple[float, float] = (0.0, 0.0)
    experts: int = 0
    nccl: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A part of a predicted step: microseconds of all its calls."""

    part: str
    by: str
    calls: int
    bytes: float
    fast: float
    slow: float

    @property
    def middle(self) -> float:
        return (self.fast + self.slow) / 2


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step on one of ``size.ranks`` GB10s."""

    size: Model
    step: Step
    rows: Sequence[Row]

    @property
    def fast(self) -> float:
        return sum(row.fast for row in self.rows)

    @property
    def slow(self) -> float:
        return sum(row.slow for row in self.rows)

    @property
    def bytes(self) -> float:
        """Bytes of memory that one GPU reads and writes."""
        return sum(row.bytes for row in self.rows if row.part != "all-reduce")

    @property
    def floor(self) -> float:
        """Microseconds of its bytes at 233 GB/s."""
        return self.bytes / MIDDLE.dram_gb_per_second / 1e3

    def rate(self, microseconds: float) -> float:
        """Tokens/s of a step that takes so long."""
        return 1e6 * self.step.tokens / microseconds

    @property
    def middle_rate(self) -> float:
        """Tokens/s at the middle of the range of times."""
        return self.rate((self.fast + self.slow) / 2)


def on_device(kernel: Times, scaled: bool, device: Device) -> tuple[float, float]:
    """Microseconds of one call on a device: the kept range, moved by what its busiest resource takes there and on a
    GB10.

    ``scaled``: its MMAs are block-scaled ones, else those of bf16. Blocks are taken to fill the device.
    """

    def busiest(on: Device, end: int) -> float:
        mma = kernel.mma / on.sustained[end] if scaled else kernel.mma * MIDDLE.bf16_flops_per_cycle / on.bf16[end]
        others = max(mma, kernel.issue, kernel.shared) * CYCLES / on.cycles
        return max(kernel.dram * MIDDLE.dram_gb_per_second / on.dram[end], others)

    fast, slow = (busiest(device, end) - busiest(GB10, end) for end in (0, 1))
    return kernel.fast + fast, kernel.slow + slow


def flops_of(size: Model, step: Step, part: str) -> float:
    """Operations of one call of a bf16 GEMM, of others' experts or of attention."""
    if part == "MoE":
        return 2.0 * 3 * size.inter * size.hidden * size.top_k * step.tokens
    if part.startswith("attention"):
        seen = min(step.context, size.window) if part.endswith("window") else step.context
        pairs = step.new * seen - (step.new * (step.new - 1) / 2 if seen == step.context else 0)
        return 4.0 * step.sequences * pairs * size.heads * size.head
    n, k = {**size.matrices, "router": (size.experts, size.hidden)}[part]
    return 2.0 * n * k * (step.logits if part == "LM head" else step.tokens)


def others_experts_us(given: Given, peer: Peer | None = None) -> tuple[float, float]:
    """Microseconds of the launches of others' MoE layer.

    Where its small ones were published as a GB10's, a GEMM after another takes a graph's node to this fork's second
    launch.
    """
    if peer is not None and peer.support_us is not None:
        fast, slow = peer.support_us
        return fast + 2 * GRAPH_NODE_US, slow + 2 * SECOND_LAUNCH_US
    gemms, small = OTHERS_EXPERTS["gemm"], OTHERS_EXPERTS["small"]
    fast, slow = (gemms[end] * FIXED_US["gemm"][end] + small[end] * given.small_us[end] for end in (0, 1))
    return fast, slow


def counted_experts(size: Model, step: Step, given: Given) -> tuple[float, float]:
    """Microseconds of others' experts by the counts of their GEMMs; launches beside these are small.

    Raises
    ------
    ValueError
        They were not emulated so.
    """
    peer, device, ends = PEERS[step.experts], given.device, []
    if peer.operand == "bf16":
        fast, slow = (rate * reached for rate, reached in zip(device.bf16, REACHED["gemm"], strict=True))
        device = dataclasses.replace(device, bf16=(fast, slow))
    handed = peer.handed(size.moe, step.tokens, device.l2_bytes)
    for end in (0, 1):
        work = peer.work(size.moe, step.tokens, given.routing[end], step.related)
        if given.experts:
            work = Work(step.tokens, given.experts, given.experts, step.tokens * size.top_k)
        launches = peer.launches(size.moe, step.tokens, work, keep_pace=end == 0)
        megabytes = sum(launch.counts.bytes for launch in launches) / 1e6
        times = Times(**gb10.times(launches, peer.operand, megabytes, others_experts_us(given, peer)))
        ends.append(on_device(times, peer.operand != "bf16", device)[end] + handed / device.dram[end] / 1e3)
    return ends[0], ends[1]


def others(parts: tuple[Part, Part], size: Model, step: Step, given: Given) -> tuple[float, float]:
    """Microseconds of one call of what is not this fork's, or was not emulated so; ``parts`` by the routing of each
    end."""
    name, device, ends = parts[0].name, given.device, []
    attention, experts = name.startswith("attention"), name == "MoE"
    for end, part in enumerate(parts):
        rate = device.dram[end]
        if end and device.name == GB10.name and name in ("QKV", "O") and step.formats[name] == "bf16":
            rate = min(rate, CUBLAS_GB_PER_SECOND)
        time = part.bytes / part.calls / 1e3 / rate * (STREAMED[end] if attention else 1.0)
        fixed = given.small_us[end]
        if attention or experts or name in (*MATRICES, "router"):
            rate = MMA_FLOPS_PER_CYCLE if experts else device.bf16[end]
            reached = REACHED["attention" if attention else "experts" if experts else "gemm"][end]
            time = max(time, flops_of(size, step, name) / (rate * reached * device.cycles))
            kind = ("decode_attention" if step.fused_attention else "attention") if attention else "gemm"
            fixed = others_experts_us(given)[end] if experts else FIXED_US[kind][end]
        ends.append(time + fixed)
    return ends[0], ends[1]


def all_reduce_us(kilobytes: float, nccl: bool = False) -> tuple[float, float]:
    """Fast and slow, of one all-reduce between two Sparks: linear beyond the smaller of the published sizes.

    ``nccl``: by NCCL, which is the slow one, at both ends.
    """
    (small, least), (large, most) = ALL_REDUCE_US.items()
    more = max(kilobytes - small, 0.0) / (large - small)
    fast, slow = (a + more * (b - a) for a, b in zip(least, most, strict=True))
    return (slow if nccl else fast), slow


def kept_batch(tokens: int, batches: Sequence[int] = KEPT_BATCHES) -> int:
    """Tokens of the kept line that stands for a batch: the next larger one, as kernels pad to tiles."""
    return next((batch for batch in batches if tokens <= batch), tokens)


def of_tokens(one: Kernel, tokens: int, fixed: tuple[float, float]) -> Kernel:
    """A kernel of as many equal blocks a token as one that was counted for one token; ``fixed``: its own
    microseconds."""
    linear = {name: tokens * getattr(one, name) for name in ("megabytes", "dram", "issue", "mma", "shared")}
    fast, slow = (end + tokens * (whole - end) for whole, end in zip((one.fast, one.slow), fixed, strict=True))
    return dataclasses.replace(one, tokens=tokens, **linear, fast=fast, slow=slow)


def sooner(ends: tuple[float, float], microseconds: float) -> tuple[float, float]:
    """Fast and slow, each so much less."""
    return ends[0] - microseconds, ends[1] - microseconds


def kernel_of(model: str, size: Model, step: Step, part: str) -> Kernel | None:
    """This fork's kernel where it computes a part other than the experts; None where others do, and of attention not
    run so.

    Raises
    ------
    ValueError
        It was not emulated so, and is nothing that bytes alone tell.
    """
    if not step.fork:
        return None
    if part == "QKV" and step.fused_norm:
        tokens = kept_batch(step.tokens, NORMED_BATCHES)
        return kept_kernel(NORMED, LAYER_MODEL, size.ranks, tokens, step.formats[part], "bf16")
    if part in MATRICES and (weights := step.head_format(size) if part == "LM head" else step.formats[part]) != "bf16":
        tokens = step.logits if part == "LM head" else step.tokens
        return kept_kernel(part, LAYER_MODEL, size.ranks, kept_batch(tokens), weights, step.dense_tokens)
    if part == RESCORING:
        one = kept_kernel(RESCORING, LAYER_MODEL, size.ranks, 1, "bf16", "bf16")
        return of_tokens(one, step.logits, RESCORING_US)
    if part == "router" and step.fused_router:
        return kept_kernel("router", model, 1, kept_batch(step.tokens), "bf16", "bf16")
    if part.startswith("attention") and step.fused_attention:
        context = 0 if part == "attention, window" and step.context >= size.window else step.context
        return kept().get((part, LAYER_MODEL, size.ranks, step.sequences, step.kv, "bf16", context))
    return None


def touched(size: Model, step: Step, routing: Routing) -> float:
    """The mean number of experts that a layer uses."""
    if routing == UNIFORM:
        return mean_experts(size, step.tokens)
    return mean_work(size.moe, step.tokens, 0, routing, step.related).experts


def fork_experts(model: str, size: Model, step: Step, given: Given) -> tuple[float, float]:
    """Microseconds of this fork's experts: kept ones of uniform routing, else by the fits that are kept.

    Raises
    ------
    ValueError
        There is neither.
    """
    layer, device = size.moe, given.device
    activation = step.expert_tokens
    if activation == "auto":
        activation = plan_mode(Mode.AUTO, step.tokens, layer.top_k, layer.experts).activation
    mode = FITTED_MODES[activation]
    tactics = planned(layer, mode, step.tokens)
    scaled = INSTANCES[tactics[0]].compute_dtype != "bf16"
    fits = known_fits(mode, tactics, (layer.hidden, layer.inter))
    key = ("MoE", model, size.ranks, step.tokens, "mxfp4", activation)
    uniform = given.routing == (UNIFORM, UNIFORM) and not step.verified
    one_launch = step.decode_step and activation == "bf16" and INSTANCES[tactics[0]].split_k
    saved = LAUNCH_SAVED_US["experts"] if one_launch else 0.0
    if not fits or (uniform and (*key, 0) in kept()):
        return sooner(on_device(kept_kernel(*key), scaled, device), saved)
    lines = [predict_layer(layer, mode, step.tokens, tactics, fits, routing, step.related) for routing in given.routing]
    return sooner((on_device(lines[0], scaled, device)[0], on_device(lines[1], scaled, device)[1]), saved)


def row_of(model: str, size: Model, step: Step, parts: tuple[Part, Part], given: Given) -> Row:
    """One part's range; ``parts`` are it by the routing of each end."""
    part, counted = parts[0], "fork, virtual SM121"
    measured = given.layers.get(step.tokens) if (model, size.ranks, step.fork) == (LAYER_MODEL, 1, True) else None
    if part.name == "all-reduce":
        ends, by = all_reduce_us(BF16 * size.hidden * step.tokens / 1e3, given.nccl), "published"
    elif part.name == "MoE" and measured is not None:
        ends, by = (measured, measured), "fork, measured"
    elif part.name == "MoE" and step.fork:
        ends, by = fork_experts(model, size, step, given), counted
    elif (kernel := kernel_of(model, size, step, part.name)) is not None:
        ends, by = on_device(kernel, kernel.activation != "bf16", given.device), counted
        if part.name == "router" and step.decode_step and step.tokens <= CHOOSING_TOKENS:
            ends = sooner(ends, LAUNCH_SAVED_US["top-k"])
    elif part.name == "MoE" and step.experts:
        ends, by = counted_experts(size, step, given), f"{step.experts}, virtual SM121"
    else:
        ends, by = others(parts, size, step, given), "bytes + launch"
    mean_bytes = (parts[0].bytes + parts[1].bytes) / 2
    return Row(part.name, by, part.calls, mean_bytes, part.calls * ends[0], part.calls * ends[1])


def predict(model: str, step: Step, ranks: int = 1, given: Given | None = None) -> Predicted:
    """A step on ``ranks`` devices, Sparks unless ``given`` names others.

    Raises
    ------
    ValueError
        A kernel of this fork's was not emulated for so many tokens.
    """
    size = MODELS[model].split(ranks) if ranks > 1 else MODELS[model]
    given = given or Given()
    fast, slow = (parts_of(size, step, touched(size, step, routing)) for routing in given.routing)
    rows = [row_of(model, size, step, parts, given) for parts in zip(fast, slow, strict=True)]
    if given.engine_us != (0.0, 0.0):
        rows.append(Row("engine", "published", 1, 0.0, *given.engine_us))
    return Predicted(size, step, rows)


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of ``sm12x-doctor --probe``: the file, its fields, and the object ``measured`` among them."""

    path: Path
    fields: Mapping[str, Any]
    measured: Mapping[str, Any]

    def figure(self, *keys: str) -> float | None:
        """A measured number; None if it was not measured.

        Raises
        ------
        ValueError
            It is no positive number.
        """
        found: Any = self.measured
        for key in keys:
            if (found := found.get(key) if isinstance(found, dict) else None) is None:
                return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise ValueError(f"{self.path}: measured.{'.'.join(keys)} is {found!r}; it must be a positive number")
        return found

    def given(self) -> Given:
        """The measurements in place of the ranges.

        The report's MoE layers have MXFP8 input and those here bf16 input; their times differ by less than 1 %.
        """

        def both(value: float | None, otherwise: tuple[float, float]) -> tuple[float, float]:
            return otherwise if value is None else (value, value)

        launch = self.figure("launch", "plain", "graph_us")
        # Only the launch's time is replaced; a small kernel's own time stays.
        small = FIXED_US["small"]
        if launch is not None:
            small = small[0] - GRAPH_NODE_US + launch, small[1] - GRAPH_NODE_US + launch
        of_layers = self.measured.get("layer")
        named = of_layers if isinstance(of_layers, dict) else {}
        counts = {name: re.fullmatch(r"(\d{1,9}) tokens", name) for name in named}
        times = {int(count[1]): self.figure("layer", name, "layer_us") for name, count in counts.items() if count}
        layers = {tokens: time for tokens, time in times.items() if time is not None}
        # The layers read by bulk copies; older reports have the rate of plain loads alone.
        copies = self.figure("dram", "copies_gigabytes_per_second")
        dram = both(self.figure("dram", "gigabytes_per_second") if copies is None else copies, GB10.dram)
        bf16 = both(self.figure("mma", "bf16", "flops_per_clock"), GB10.bf16)
        return Given(dataclasses.replace(GB10, dram=dram, bf16=bf16), small, layers)


def read_report(path: Path) -> Report:
    """Read a report of any GPU.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or is not such a report.
    """
    kind = "a report of sm12x-doctor --probe"
    fields = json_file(path, kind)
    measured = fields.get("measured")
    device = measured.get("device") if isinstance(measured, dict) else None
    if not isinstance(measured, dict) or not isinstance(device, dict):
        raise ValueError(f"{path} is not {kind}: it has no object 'measured' with an object 'device'")
    return Report(path, fields, measured)


def from_report(path: Path) -> Given:
    """Measurements of a GB10's report, in place of the ranges.

    Raises
    ------
    OSError, ValueError
        It cannot be read, is not such a report, or is not a GB10's.
    """
    report = read_report(path)
    device = report.measured["device"]
    if device.get("gb10") is not True:
        raise ValueError(f"{path} is of {device.get('name', 'no GPU')}: what is predicted here is a GB10")
    return report.given()


def assumptions() -> list[str]:
    """The assumptions, a line each."""
    kinds = ("small", "gemm", "router", "attention", "decode_attention")
    fixed = ", ".join(f"{kind} {FIXED_US[kind][0]:g} to {FIXED_US[kind][1]:g}" for kind in kinds)
    return [
        *gb10.assumptions("MoE"),
        f"other kernels: their bytes and a fixed time a call, us: {fixed} (small: 1.67 on a GB10, 2.9 on an H200, a "
        f"graph's node {GRAPH_NODE_US} by Megatron-LM #6064; gemm: cuBLAS's and Marlin's on a GB10; attention: XQA "
        f"takes 10 to 11 on an H200); cuBLAS reads QKV and O in bf16 at {CUBLAS_GB_PER_SECOND:g} GB/s to DRAM's rate",
        f"attention's cache: {STREAMED[0]:g} to {STREAMED[1]:g} times its bytes' time (this fork's streams: up to "
        "1.12 on an H200)",
        f"bf16 GEMMs of a prompt reach {REACHED['gemm'][1]:.0%} to {REACHED['gemm'][0]:.0%} of the bf16 rate "
        f"(assumed), attention {REACHED['attention'][1]:.0%} to {REACHED['attention'][0]:.0%} (FlashAttention-2 on an "
        "A100, arXiv 2307.08691)",
        "an all-reduce between two Sparks: {:g} us (one-shot RDMA writes, 8 KB, four Sparks, b12x #295) to {:g} "
        "(NCCL, 8 KB, two "
        "Sparks, dgx-spark-playbooks #103), of 48 KB {:g} to {:g} (b12x #295)".format(
            *(end for ends in ALL_REDUCE_US.values() for end in ends)
        ),
    ]
