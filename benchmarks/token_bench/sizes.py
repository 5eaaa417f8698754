# SPDX-License-Identifier: Apache-2.0
"""What a step of gpt-oss is made of: sizes, formats, and the parts of a step with the bytes that each must move.

Bytes are those that a part reads and writes at least once, tensors of the step's own included (hidden states, logits): what
a kernel that keeps nothing of another part's in registers moves. The two large ones, weights and the KV cache, are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

BF16, FP32, INT32 = 2, 4, 4
SCALE_BLOCK = 32
DENSE_FORMATS = ("bf16", "mxfp8", "mxfp4")
TokenFormat = Literal["bf16", "mxfp8", "mxfp4"]
TOKENS_BESIDE: dict[str, tuple[TokenFormat, ...]] = {
    "bf16": ("bf16",),
    "mxfp8": ("bf16", "mxfp8"),
    "mxfp4": ("bf16", "mxfp8", "mxfp4"),
}
"""Formats to which a dense layer can round its tokens, by that of its weight."""
KV_BYTES = {"bf16": 2, "fp8": 1}
MATRICES = ("QKV", "O", "LM head")

PARTS = (
    "embedding", "norms", "QKV", "rope", "KV write", "attention, full", "attention, window", "O", "router", "top-k", "MoE",
    "all-reduce", "LM head", "argmax",
)  # fmt: skip
"""In a step's order."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's sizes, as one of ``ranks`` GPUs has them: heads, experts' columns and rows of the LM head are shared out."""

    layers: int
    experts: int
    hidden: int = 2880
    inter: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head: int = 64
    top_k: int = 4
    vocab: int = 201_088
    window: int = 128
    ranks: int = 1

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and K of the dense layers' weights."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        return {
            "QKV": (qkv, self.hidden),
            "O": (self.hidden, self.heads * self.head),
            "LM head": (self.vocab, self.hidden),
        }

    def windowed(self, layer: int) -> bool:
        """Whether a layer's attention sees :attr:`window` tokens only: every other one, from the first."""
        return layer % 2 == 0

    def split(self, ranks: int) -> Size:
        """What one of ``ranks`` tensor-parallel GPUs has."""
        return dataclasses.replace(
            self,
            inter=self.inter // ranks,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            vocab=self.vocab // ranks,
            ranks=ranks,
        )


SIZES = {"gpt-oss-120b": Size(36, 128), "gpt-oss-20b": Size(24, 32)}


@dataclasses.dataclass(frozen=True)
class Step:
    """``new`` tokens of each of ``sequences``, whose cache then holds ``context`` tokens, the new ones among them.

    ``kv`` is the cache's format, ``formats`` that of each of :data:`MATRICES`, ``dense_tokens`` that to which they round
    their tokens, of :data:`TOKENS_BESIDE` for each (bf16 beside bf16, always). ``fused_router``: the norm in front of the
    router, the router and the top-k are one part, "router", by this fork's ``router_top_k``. ``fused_attention``: rope and KV
    write are part of the attention, this fork's ``decode_attention``.
    """

    sequences: int
    context: int
    new: int = 1
    kv: str = "bf16"
    formats: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict.fromkeys(MATRICES, "bf16"))
    fused_router: bool = False
    fused_attention: bool = False
    dense_tokens: TokenFormat = "bf16"

    def named(self) -> dict[str, Any]:
        """The fields by their names, as :class:`.results.Measured` has them, too."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def prefill(self) -> bool:
        return self.new > 1


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of work in a step: how often it is done, and the bytes of all of it."""

    name: str
    calls: int
    bytes: float


def matrix_bytes(rows: int, k: int, weights: str) -> int:
    """Values, and scales as they lie in memory; bf16 has none."""
    if weights == "bf16":
        return BF16 * rows * k
    scales = -(-rows // 128) * 128 * (-(-k // SCALE_BLOCK // 4) * 4)
    return rows * k // (2 if weights == "mxfp4" else 1) + scales


def expert_bytes(size: Size) -> int:
    """One expert's weights, scales and biases."""
    biases = BF16 * (2 * size.inter + size.hidden)
    return matrix_bytes(2 * size.inter, size.hidden, "mxfp4") + matrix_bytes(size.hidden, size.inter, "mxfp4") + biases


def mean_experts(size: Size, tokens: int) -> float:
    """How many experts random routing of ``tokens`` touches in a layer, on average."""
    return size.experts * (1 - (1 - size.top_k / size.experts) ** tokens)


def parts_of(size: Size, step: Step, experts: float | None = None) -> list[Part]:
    """A step's parts, in order.

    ``experts`` is how many a layer touches, the mean over the layers; that of random routing when omitted.
    """
    layers, tokens = size.layers, step.tokens
    row = BF16 * size.hidden
    queries, keys = BF16 * size.heads * size.head, BF16 * size.kv_heads * size.head
    kv_row = 2 * size.kv_heads * size.head * KV_BYTES[step.kv]
    windowed = sum(size.windowed(layer) for layer in range(layers))
    touched = mean_experts(size, tokens) if experts is None else experts
    seen = min(step.context, size.window + step.new - 1)

    def dense(name: str, rows_of_tokens: int, bias: bool) -> float:
        n, k = size.matrices[name]
        weights = matrix_bytes(n, k, step.formats[name])
        return weights + BF16 * (n if bias else 0) + BF16 * rows_of_tokens * (n + k)

    def attention(context: int) -> float:
        cache = step.sequences * context * kv_row
        if step.fused_attention:
            # New rows are written instead of read; keys, values and a row of rope's table are read.
            cache += tokens * (2 * keys + BF16 * size.head)
        return cache + tokens * 2 * queries + FP32 * size.heads

    routing = size.top_k * (FP32 + INT32)
    norm, norms = 4 * tokens * row + row, (1 if step.fused_router else 2) * layers + 1
    router = size.experts * (row + BF16)
    # Logits are bf16, or float32 between the two launches of the fork's.
    router += (
        norm + tokens * (2 * FP32 * size.experts + routing)
        if step.fused_router
        else tokens * (row + BF16 * size.experts)
    )
    found = {
        "embedding": (1, tokens * 2 * row),
        # The first one reads no residual, and every one writes what it added up.
        "norms": (norms, norms * norm - 2 * tokens * row),
        "QKV": (layers, layers * dense("QKV", tokens, bias=True)),
        "rope": (layers, layers * tokens * (2 * (queries + keys) + BF16 * size.head)),
        "KV write": (layers, layers * tokens * (2 * keys + kv_row)),
        "attention, full": (layers - windowed, (layers - windowed) * attention(step.context)),
        "attention, window": (windowed, windowed * attention(seen)),
        "O": (layers, layers * dense("O", tokens, bias=True)),
        "router": (layers, layers * router),
        "top-k": (layers, layers * tokens * (BF16 * size.experts + routing)),
        "MoE": (layers, layers * (touched * expert_bytes(size) + tokens * (2 * row + routing))),
        "LM head": (1, dense("LM head", step.sequences, bias=False)),
        "argmax": (1, step.sequences * (BF16 * size.vocab + 2 * INT32)),
    }
    if step.fused_router:
        del found["top-k"]
    if step.fused_attention:
        del found["rope"], found["KV write"]
    if size.ranks > 1:
        # The outputs of O and of the experts, and each rank's best logit.
        found["all-reduce"] = (2 * layers + 1, 2 * layers * 2 * tokens * row)
    return [Part(name, *found[name]) for name in PARTS if name in found]
