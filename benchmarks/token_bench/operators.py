# SPDX-License-Identifier: Apache-2.0
"""The small parts of a step (norms, rope, KV write, top-k) and attention, by torch and by vLLM.

torch's run anywhere and are the reference; vLLM's are its compiled operators and its attention backends' kernels. An
operator's ``by`` names it in the tables.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import torch
from peers import LIBRARY, MOE_LIBRARY, in_vllm

PAGE = 16
EPSILON = 1e-5
XQA_WORKSPACE = 512 << 20
TRITON_SEGMENTS = 16
TRITON_DECODE_BLOCKS = 128  # vLLM splits sequences among blocks until a launch has as many


def rope_table(positions: int, head: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """gpt-oss' cosines and sines, ``[positions, head]``: YaRN (arXiv 2309.00071) of 4,096 positions times 32."""
    theta, factor, trained, fast, slow = 150_000.0, 32.0, 4096, 32.0, 1.0
    index = torch.arange(0, head, 2, dtype=torch.float64) / head
    own = theta**-index
    # Dimensions that turn more than `fast` times in the trained context keep their frequency; below `slow` turns it is
    # divided.
    low, high = (head * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    kept = 1 - ((torch.arange(head // 2) - max(low, 0)) / (min(high, head - 1) - max(low, 0))).clamp(0, 1)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * (own * kept + own / factor * (1 - kept))
    size = 0.1 * math.log(factor) + 1
    return torch.cat([angles.cos() * size, angles.sin() * size], dim=1).to(device, dtype)


@dataclasses.dataclass
class Cache:
    """Where a group of layers keeps its keys and values: ``table`` ``[S, pages]`` int32, ``slots`` ``[T]`` int64."""

    table: torch.Tensor
    slots: torch.Tensor


@dataclasses.dataclass
class Batch:
    """A step's tokens: ``new`` of each sequence, whose lengths with them are ``lengths`` ``[S]`` int32.

    ``starts`` ``[S + 1]`` int32 are the rows where sequences begin; ``full`` and ``window`` the caches of the two kinds
    of layers.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    new: int
    context: int
    full: Cache
    window: Cache

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]


class TorchOperators:
    """Each part in torch, on any device."""

    def __init__(self) -> None:
        self.by = dict.fromkeys(("norms", "rope", "KV write", "top-k"), "torch")

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of ``x + residual``, and that sum; both may be overwritten."""
        total = x if residual is None else x + residual
        wide = total.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return (scaled * weight.float()).to(x.dtype), total

    def rope(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, head: int) -> None:
        """Turn the rows of ``q`` and ``k``, ``[T, heads * head]``, in place."""
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
        for x in (q, k):
            first, second = x.view(x.shape[0], -1, head).chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            x.copy_(turned.view(x.shape))

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Put the rows of ``k`` and ``v``, ``[T, kv_heads, head]``, into the pages ``kv``,
        ``[P, 2, kv_heads, PAGE, head]``."""
        pages, at = slots // PAGE, slots % PAGE
        for which, rows in ((0, k), (1, v)):
            kv[pages, which, :, at] = rows.to(kv.dtype)

    def top_k(self, logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Routing weights, float32, and expert ids, int32, ``[T, top_k]``."""
        largest, ids = logits.float().topk(top_k)
        return largest.softmax(dim=1), ids.int()


class VllmOperators(TorchOperators):
    """vLLM's compiled operators.

    Raises
    ------
    RuntimeError, OSError, ImportError
        They cannot be loaded; the message says why.
    """

    def __init__(self, folder: Path | None) -> None:
        for library in (LIBRARY, MOE_LIBRARY):
            torch.ops.load_library(str(in_vllm(library, folder)))
        self._c: Any = torch.ops._C
        self._cache: Any = torch.ops._C_cache_ops
        self._moe: Any = torch.ops._moe_C
        self._one = torch.ones(1, device="cuda")
        self.by = {
            "norms": "vLLM fused_add_rms_norm",
            "rope": "vLLM rotary_embedding",
            "KV write": "vLLM reshape_and_cache_flash",
            "top-k": "vLLM topk_softmax",
        }

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            out = torch.empty_like(x)
            self._c.rms_norm(out, x, weight, EPSILON)
            return out, x
        self._c.fused_add_rms_norm(x, residual, weight, EPSILON)
        return x, residual

    def rope(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, head: int) -> None:
        self._c.rotary_embedding(positions, q, k, head, table, True)

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        name = "auto" if kv.dtype == torch.bfloat16 else "fp8"
        keys, values = kv.transpose(2, 3).unbind(1)
        if name == "fp8":
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        self._cache.reshape_and_cache_flash(k, v, keys, values, slots, name, self._one, self._one)

    def top_k(self, logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
        ids, order = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
        self._moe.topk_softmax(weights, ids, order, logits, True, None, None)
        return weights, ids


class TorchAttention:
    """Attention with sinks over the pages, in float32."""

    by = "torch"

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor, cache: Cache, batch: Batch, sinks: torch.Tensor, window: int
    ) -> torch.Tensor:
        """``[T, heads, head]`` from ``q`` of the same shape; ``window`` 0: all of the context is seen."""
        heads, head = q.shape[1:]
        lengths = batch.lengths.tolist()
        outputs = []
        for sequence, length in enumerate(lengths):
            pages = kv[cache.table[sequence, : -(-length // PAGE)].long()].float()
            keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [kv_heads, length, head]
            rows = q[sequence * batch.new : (sequence + 1) * batch.new].float().view(batch.new, len(keys), -1, head)
            scores = torch.einsum("tgrd,gld->grtl", rows, keys) * head**-0.5
            behind = torch.arange(length - batch.new, length, device=q.device)[:, None] - torch.arange(
                length, device=q.device
            )
            hidden = (behind < 0) | (behind >= (window or length))
            scores.masked_fill_(hidden, -torch.inf)
            sink = sinks.float().view(len(keys), -1, 1, 1).expand(-1, -1, batch.new, 1)
            shares = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
            outputs.append(torch.einsum("grtl,gld->tgrd", shares, values).reshape(batch.new, heads, head))
        return torch.cat(outputs).to(q.dtype)


class XqaAttention:
    """FlashInfer's XQA, what vLLM's FLASHINFER backend decodes with on SM12x; one new token a sequence."""

    by = "FlashInfer XQA"

    def __init__(self) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        self._call = xqa_batch_decode_with_kv_cache
        self._workspace = torch.zeros(XQA_WORKSPACE, dtype=torch.uint8, device="cuda")

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor, cache: Cache, batch: Batch, sinks: torch.Tensor, window: int
    ) -> torch.Tensor:
        if batch.new > 1:
            raise ValueError("XQA decodes: one new token a sequence; --prefill-attention chooses another for prefill")
        return self._call(
            q.contiguous(),
            tuple(kv.unbind(1)),
            self._workspace,
            cache.table,
            batch.lengths,
            batch.context,
            bmm1_scale=q.shape[-1] ** -0.5,
            window_left=window - 1,  # -1: all
            sinks=sinks,
            kv_layout="HND",
        )


def paged(q: torch.Tensor, kv: torch.Tensor, cache: Cache, batch: Batch) -> dict[str, Any]:
    """Arguments that vLLM's paged attention kernels have in common."""
    keys, values = kv.transpose(2, 3).unbind(1)
    return {
        "q": q, "k": keys, "v": values, "cu_seqlens_q": batch.starts, "max_seqlen_q": batch.new,
            "seqused_k": batch.lengths,
        "max_seqlen_k": batch.context, "softmax_scale": q.shape[-1] ** -0.5, "causal": True, "block_table": cache.table,
    }  # fmt: skip


class TritonAttention:
    """vLLM's TRITON_ATTN kernel, which decodes and prefills."""

    by = "vLLM unified_attention (Triton)"

    def __init__(self, heads: int, kv_heads: int, head: int) -> None:
        module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
        self._call = module.unified_attention
        self._modes = {torch.bfloat16: module.KVQuantMode.NONE, torch.float8_e4m3fn: module.KVQuantMode.FP8_PER_TENSOR}
        self._threshold = TRITON_DECODE_BLOCKS // kv_heads

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty((self._threshold, heads, TRITON_SEGMENTS, *shape), device="cuda")

        self._output, self._max, self._sum = empty(head), empty(), empty()
        self._one = torch.ones(1, device="cuda")

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor, cache: Cache, batch: Batch, sinks: torch.Tensor, window: int
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = self._one.expand(batch.sequences, kv.shape[2])
        self._call(
            **paged(q, kv, cache, batch),
            out=out,
            window_size=(window - 1, 0) if window else (-1, -1),
            softcap=0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=self._threshold,
            num_par_softmax_segments=TRITON_SEGMENTS,
            softmax_segm_output=self._output,
            softmax_segm_max=self._max,
            softmax_segm_expsum=self._sum,
            sinks=sinks,
            kv_quant_mode=self._modes[kv.dtype],
        )
        return out


class Fa3Attention:
    """vLLM's FlashAttention 3, its default on Hopper; SM12x has none."""

    by = "vLLM FlashAttention 3"

    def __init__(self) -> None:
        self._call = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
        self._sinks: dict[int, torch.Tensor] = {}

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor, cache: Cache, batch: Batch, sinks: torch.Tensor, window: int
    ) -> torch.Tensor:
        if kv.dtype != q.dtype:
            raise ValueError("FlashAttention 3 is measured with a bf16 cache: with fp8 it wants fp8 queries")
        # It wants them in the queries' type; a model would keep them so.
        if sinks.data_ptr() not in self._sinks:
            self._sinks[sinks.data_ptr()] = sinks.to(q.dtype)
        return self._call(
            **paged(q, kv, cache, batch),
            window_size=[window - 1, 0] if window else [-1, -1],
            fa_version=3,
            s_aux=self._sinks[sinks.data_ptr()],
        )
