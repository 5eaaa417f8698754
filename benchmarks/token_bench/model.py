# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as a list of operators: weights, caches, and a step from token ids to the next ones.

The layers' weights are distinct tensors, so that a step finds none of them in L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from perfmodel.step import DENSE_FORMATS, Step, TokenFormat
from timing import QUANTIZED_ROWS

from flashinfer.decode import decode_attention
from flashinfer.fused_moe import cutlass_fused_moe, moe_step, router_logits, router_top_k
from flashinfer.fused_moe.sm12x_operator import CHOOSING_TOKENS
from flashinfer.gemm import dense_block_scaled, rmsnorm_dense_block_scaled
from flashinfer.quantization.block_scaled import quantize_weight
from flashinfer.sm12x.models import Model as Size
from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, BETA, LIMIT
from flashinfer.testing.moe_layers import Batch as RoutedBatch

from .operators import EPSILON, PAGE, Batch, Cache, TorchAttention, TorchOperators, rope_table

ROUTER_SCALE = 4.0  # experts' logits lie apart, so that rounding seldom decides which are taken
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class Dense:
    """A dense layer's weight in any of the formats."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, formats: tuple[str, ...]) -> None:
        self.bias = bias
        self.weights: dict[str, tuple[torch.Tensor | None, ...]] = {
            name: (weight,) if name == "bf16" else quantize_weight(weight, name)  # type: ignore[arg-type]
            for name in formats
        }

    def __call__(
        self, x: torch.Tensor, weights: str, tokens: TokenFormat, following: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weights == "bf16":
            return F.linear(x, *self.weights[weights], self.bias)  # type: ignore[arg-type]
        values, scales, factor = self.weights[weights]
        return dense_block_scaled(
            x, values, scales, self.bias, weight_format=weights, alpha=factor, activation=tokens,
            next_weights=following, constant_weights=True,
        )  # type: ignore[arg-type]  # fmt: skip

    def behind_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        weights: str,
        following: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of ``x + residual`` behind the norm, and that sum."""
        values, scales, factor = self.weights[weights]
        return rmsnorm_dense_block_scaled(
            x, norm, values, scales, self.bias, weight_format=weights, alpha=factor, residual=residual, eps=EPSILON,
            next_weights=following, constant_weights=True,
        )  # type: ignore[arg-type]  # fmt: skip

    def rows(self, weights: str) -> torch.Tensor:
        """The weight itself, which a launch in front may read ahead."""
        rows = self.weights[weights][0]
        assert rows is not None
        return rows


class Experts(Protocol):
    """A layer's experts."""

    by: str

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...


def random_experts(size: Size, generator: torch.Generator) -> MoEInputs:
    """A layer's experts, random, as the W4A16 call has them; without tokens and their routing."""
    device, e = generator.device, size.experts
    nothing = torch.empty(0, device=device)

    def matrix(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = torch.randint(0, 256, (e, rows, k // 2), dtype=torch.uint8, device=device, generator=generator)
        # e2m1's codes have a root mean square of 2.9; a row's sum of K products is to be about 1.
        low = 125 - (k.bit_length() + 1) // 2
        shape = (e, -(-rows // 128) * 128, -(-k // 128) * 4)
        scales = torch.randint(low, low + 3, shape, dtype=torch.uint8, device=device, generator=generator)
        return values, scales, normal(e, rows, scale=0.1, generator=generator)

    *fc1, fc1_bias = matrix(2 * size.inter, size.hidden)
    *fc2, fc2_bias = matrix(size.hidden, size.inter)
    alpha, beta, limit = (torch.full((e,), value, device=device) for value in (ALPHA, BETA, LIMIT))
    return MoEInputs(
        nothing, nothing, nothing, *fc1, *fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias, swiglu_alpha=alpha,
        swiglu_beta=beta,
        swiglu_limit=limit,
    )  # fmt: skip


def normal(*shape: int, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Random bf16."""
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    for rows in values.split(QUANTIZED_ROWS):
        rows.copy_(torch.randn(rows.shape, device=generator.device, generator=generator) * scale)
    return values


class ForkExperts:
    """This fork's layer: ``activations`` "a8", MXFP8 inside, or "a16"."""

    def __init__(self, weights: MoEInputs, activations: str) -> None:
        self.by = f"fork cutlass_fused_moe, W4{activations.upper()}"
        if activations == "a8":
            one = torch.ones(len(weights.fc1_weights), device=weights.fc1_weights.device)
            weights = dataclasses.replace(weights, fc1_global=one, fc2_global=one)
        self.weights = weights

    def inputs(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> MoEInputs:
        """The call."""
        return dataclasses.replace(self.weights, input=x, token_selected_experts=ids, token_final_scales=weights)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return cutlass_fused_moe(**self.inputs(x, ids, weights).arguments())

    def step(self, x: torch.Tensor, **routing: Any) -> torch.Tensor:
        """Call ``moe_step``; ``routing`` holds the arguments that choose the experts."""
        arguments = dataclasses.replace(self.weights, input=x).arguments()
        del arguments["token_selected_experts"], arguments["token_final_scales"]
        return moe_step(**arguments, **routing)


class MarlinExperts:
    """vLLM's Marlin (:mod:`peers.marlin`)."""

    by = "vLLM Marlin, W4A16"

    def __init__(self, peer: Any, weights: MoEInputs) -> None:
        self._layer, self._nothing = peer.prepare(weights), weights.input

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inputs = MoEInputs(x, ids, weights, *[self._nothing] * 4)
        return self._layer.bind(RoutedBatch(inputs, weights))()


@dataclasses.dataclass
class Layer:
    """One layer's weights."""

    norms: tuple[torch.Tensor, torch.Tensor]
    qkv: Dense
    sinks: torch.Tensor
    o: Dense
    router: tuple[torch.Tensor, torch.Tensor]
    experts: Experts


class Model:
    """Random weights, and steps on them.

    ``make_experts`` gives a layer's experts. ``mark`` is called with a part's name before each of its calls, and
    ``operators``, ``attention`` and ``prefill_attention`` may be replaced between steps.
    """

    def __init__(
        self,
        size: Size,
        make_experts: Callable[[torch.Generator], Experts],
        formats: tuple[str, ...] = DENSE_FORMATS,
        seed: int = 0,
        device: str = "cpu",
        positions: int = 131_072,
    ) -> None:
        self.size = size
        generator = torch.Generator(device).manual_seed(seed)

        def vector(*shape: int, scale: float = 0.1, offset: float = 0.0) -> torch.Tensor:
            return normal(*shape, scale=scale, generator=generator) + offset

        def dense(name: str, bias: bool = True) -> Dense:
            n, k = size.matrices[name]
            return Dense(vector(n, k, scale=k**-0.5), vector(n) if bias else None, formats)

        def layer() -> Layer:
            router = vector(size.experts, size.hidden, scale=ROUTER_SCALE * size.hidden**-0.5), vector(size.experts)
            norms = vector(size.hidden, offset=1.0), vector(size.hidden, offset=1.0)
            sinks = vector(size.heads, scale=1.0).float()
            return Layer(norms, dense("QKV"), sinks, dense("O"), router, make_experts(generator))

        self.embedding = vector(size.vocab, size.hidden, scale=1.0)
        self.layers = [layer() for _ in range(size.layers)]
        self.norm = vector(size.hidden, offset=1.0)
        self.lm_head = dense("LM head", bias=False)
        self.barrier = torch.zeros(2, dtype=torch.int32, device=device)
        self.rope = rope_table(positions, size.head, device, torch.bfloat16)
        self.operators = TorchOperators()
        self.attention: Any = TorchAttention()
        self.prefill_attention: Any = TorchAttention()
        self.mark: Callable[[str], None] = lambda _: None
        self.chosen: list[torch.Tensor] = []
        self._generator = generator

    def by(self, step: Step) -> dict[str, str]:
        """The library or kernel that computes each part."""
        attention = self._attention(step).by
        attention = "fork decode_attention" if step.fused_attention else attention
        rounded = "" if step.dense_tokens == "bf16" else f", tokens {step.dense_tokens}"
        dense = {name: "cuBLAS" if kind == "bf16" else f"fork, {kind}{rounded}" for name, kind in step.formats.items()}
        return {
            **dict.fromkeys(("embedding", "argmax"), "torch"),
            **self.operators.by,
            **dense,
            "attention, full": attention,
            "attention, window": attention,
            "router": "fork router_top_k" if step.fused_router else "cuBLAS",
            "MoE": self.layers[0].experts.by,
        }

    def batch(self, step: Step) -> Batch:
        """Random tokens at the end of the context, and the pages that they are in."""
        device, sequences = self.embedding.device, step.sequences
        position = torch.arange(step.context - step.new, step.context, device=device)
        pages = -(-step.context // PAGE)
        # A windowed layer needs none of the pages before the window: all of those are page 0.
        old = max(0, step.context - step.new - self.size.window) // PAGE

        def cache(first: int) -> Cache:
            own = torch.arange(sequences * (pages - first), device=device).view(sequences, -1)
            table = F.pad(own, (first, 0)).int()
            slots = table[:, position // PAGE].long() * PAGE + position % PAGE
            return Cache(table, slots.flatten())

        ids = torch.randint(0, self.size.vocab, (step.tokens,), device=device, generator=self._generator)
        return Batch(
            ids,
            position.repeat(sequences),
            torch.full((sequences,), step.context, dtype=torch.int32, device=device),
            torch.arange(0, step.tokens + 1, step.new, dtype=torch.int32, device=device),
            step.new,
            step.context,
            cache(0),
            cache(old),
        )

    def caches(self, step: Step, batch: Batch) -> list[torch.Tensor]:
        """A cache for each layer, ``[P, 2, kv_heads, PAGE, head]``, of random keys and values."""
        found = []
        for index in range(self.size.layers):
            table = (batch.window if self.size.windowed(index) else batch.full).table
            shape = (int(table.max()) + 1, 2, self.size.kv_heads, PAGE, self.size.head)
            kv = torch.empty(shape, dtype=DTYPES[step.kv], device=table.device)
            for pages in kv.split(QUANTIZED_ROWS):
                pages.copy_(torch.randn(pages.shape, device=table.device, generator=self._generator))
            found.append(kv)
        return found

    def step(self, step: Step, batch: Batch, caches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of each sequence's last token, ``[S, vocab]``, or of all new tokens of a window, ``[T, vocab]``, and
        the largest ones' ids."""
        size, mark, operators = self.size, self.mark, self.operators
        attention = self._attention(step)
        queries, keys = size.heads * size.head, size.kv_heads * size.head
        tokens = batch.ids.shape[0]
        self.chosen = []
        mark("embedding")
        x = F.embedding(batch.ids, self.embedding)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            windowed = size.windowed(index)
            cache = batch.window if windowed else batch.full
            following = self._following(step, index)
            if step.fused_norm:
                mark("QKV")
                qkv, residual = layer.qkv.behind_norm(
                    x, residual, layer.norms[0], step.formats["QKV"], following["QKV"]
                )
            else:
                mark("norms")
                x, residual = operators.norm(x, residual, layer.norms[0])
                mark("QKV")
                qkv = layer.qkv(x, step.formats["QKV"], step.dense_tokens, following["QKV"])
            q, k, v = qkv.split((queries, keys, keys), dim=1)
            part, window = ("attention, window", size.window) if windowed else ("attention, full", 0)
            rows = q.view(tokens, size.heads, size.head)
            heads = (tokens, size.kv_heads, size.head)
            if step.fused_attention:
                mark(part)
                x = decode_attention(
                    rows, caches[index], cache.table, batch.lengths, key=k.view(heads), value=v.view(heads),
                    rope_table=self.rope, sinks=layer.sinks, q_len_per_req=batch.new, window_left=window - 1,
                    constant_cache=True,
                )  # fmt: skip
            else:
                mark("rope")
                operators.rope(batch.positions, q, k, self.rope, size.head)
                mark("KV write")
                operators.write(k.view(heads), v.view(heads), caches[index], cache.slots)
                mark(part)
                x = attention(rows, caches[index], cache, batch, layer.sinks, window)
            mark("O")
            x = layer.o(x.view(tokens, queries), step.formats["O"], step.dense_tokens, following["O"])
            experts = layer.experts
            if step.fused_router and isinstance(experts, ForkExperts):
                x, residual = self._route_and_compute(layer, experts, x, residual, following["MoE"])
                continue
            if step.fused_router:
                mark("router")
                routed = router_top_k(x, layer.router[0], size.top_k, **self._router(layer, residual))
                weights, ids, _, x, residual = routed
            else:
                mark("norms")
                x, residual = operators.norm(x, residual, layer.norms[1])
                mark("router")
                logits = F.linear(x, *layer.router)
                mark("top-k")
                weights, ids = operators.top_k(logits, size.top_k)
            self.chosen.append(ids)
            mark("MoE")
            x = experts(x, ids, weights)
        mark("norms")
        x, _ = operators.norm(x, residual, self.norm)
        mark("LM head")
        wanted = x if step.logits == tokens else x[step.new - 1 :: step.new].contiguous()
        logits = self.lm_head(wanted, step.formats["LM head"], step.dense_tokens)
        mark("argmax")
        return logits, logits.argmax(-1)

    def _attention(self, step: Step) -> Any:
        """What attends where ``decode_attention`` does not."""
        return self.attention if step.new == 1 else self.prefill_attention

    def _router(self, layer: Layer, residual: torch.Tensor) -> dict[str, Any]:
        """Arguments that both of the fork's routers take in addition to rows and weight."""
        return {
            "bias": layer.router[1], "residual": residual, "norm_weight": layer.norms[1], "eps": EPSILON,
            "constant_weights": True,
        }  # fmt: skip

    def _route_and_compute(
        self,
        layer: Layer,
        experts: ForkExperts,
        x: torch.Tensor,
        residual: torch.Tensor,
        following: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the fork's router and experts as vLLM's plugin does; return the experts' outputs and the residual to add
        them to."""
        self.mark("router")
        top_k, options = self.size.top_k, self._router(layer, residual)
        decided: Any
        routing: dict[str, Any]
        if len(x) <= CHOOSING_TOKENS:
            decided = router_logits(x, layer.router[0], **options)
            routing = {"router_logits": decided.logits, "top_k": top_k}
        else:
            decided = router_top_k(x, layer.router[0], top_k, **options)
            routing = {"token_selected_experts": decided.topk_ids, "token_final_scales": decided.topk_weights}
        self.chosen.append(decided.logits)
        self.mark("MoE")
        x = experts.step(decided.hidden_states, **routing, barrier=self.barrier, next_weights=following)
        return x, decided.residual

    def _following(self, step: Step, index: int) -> dict[str, torch.Tensor | None]:
        """Tensors that the launch after a part reads in any case, which the part may prefetch (``next_weights``), by
        part."""
        if not step.fused_router:
            return dict.fromkeys(("QKV", "O", "MoE"))
        layer, formats = self.layers[index], step.formats
        last = index + 1 == len(self.layers)
        behind = self.lm_head.rows(formats["LM head"]) if last else self.layers[index + 1].qkv.rows(formats["QKV"])
        return {"QKV": layer.o.rows(formats["O"]), "O": layer.router[0], "MoE": behind}

    def experts_touched(self) -> float:
        """Experts used in the last step, the mean over the layers."""
        return sum(len(each.unique()) for each in self.chosen_experts()) / len(self.chosen)

    def chosen_experts(self) -> list[torch.Tensor]:
        """Ids of each token's experts in the last step, ``[T, top_k]`` of every layer, in any order."""
        return [each.topk(self.size.top_k).indices if each.is_floating_point() else each.long() for each in self.chosen]


def fork_experts(size: Size, activations: str) -> Callable[[torch.Generator], ForkExperts]:
    """For :class:`Model`: this fork's, random."""
    return lambda generator: ForkExperts(random_experts(size, generator), activations)


def marlin_experts(size: Size, peer: Any) -> Callable[[torch.Generator], MarlinExperts]:
    """For :class:`Model`: vLLM's, random."""
    return lambda generator: MarlinExperts(peer, random_experts(size, generator))
