# SPDX-License-Identifier: Apache-2.0
"""Random inputs of MXFP4 and NVFP4 MoE layers and of grouped GEMMs, made on the device they are for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from .gemm_reference import padded_group_offsets
from .moe_reference import WEIGHTS, MoEInputs
from .mxfp_formats import (
    BLOCK,
    NVFP4_NAN_SCALE,
    power_of_two,
    quantize_mxfp8,
    swizzle_scales,
    swizzled_place,
    with_nan_padding,
    with_not_numbers,
)

Data = Literal["normal", "lattice"]
Routing = Literal["uniform", "one_expert", "few_experts"]


@dataclasses.dataclass(frozen=True)
class MoECase:
    """A layer to make inputs for.

    Attributes
    ----------
    num_tokens, hidden, inter, num_experts, top_k : int
        Sizes; ``num_experts`` counts all ranks.
    mode : int
        0: W4A8 with a quantized input, 1: W4A8 with a bf16/fp16 input, 2: W4A16.
    weights : str
        Format of the experts; ``"nvfp4"`` only in mode 2.
    data : str
        ``"normal"``: Gaussian activations, any e2m1 weights, scales over five octaves.  ``"lattice"``: small integers
        and scales over two octaves, for which FC1's float32 sums are exact in any order.
    routing : str or tuple
        ``"uniform"``, ``"one_expert"`` (every token chooses the same experts) or ``"few_experts"`` (the last quarter);
        or the number of tokens that each expert gets, as :func:`uneven_rows` gives them: ``num_tokens * top_k`` in all,
        and at most ``num_tokens`` for one.
    swiglu_parameters, swiglu_step, swiglu_limit_alone : bool
        Whether alpha, beta and limit are given; whether the activation is SwigluStep, which has only a limit; whether
        Swiglu has only a limit.
    relu2 : bool
        Whether the activation is Relu2, which has neither gate rows nor parameters.
    """

    num_tokens: int
    hidden: int
    inter: int
    num_experts: int
    top_k: int
    mode: int
    data: Data = "normal"
    routing: Routing | tuple[int, ...] = "uniform"
    swizzled_input_sf: bool = True
    biases: bool = True
    swiglu_parameters: bool = True
    swiglu_step: bool = False
    swiglu_limit_alone: bool = False
    relu2: bool = False
    global_scales: bool = True
    input_dtype: torch.dtype = torch.bfloat16
    output_dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype = torch.bfloat16
    ep_size: int = 1
    ep_rank: int = 0
    weights: str = "mxfp4"


class _Source:
    """Random tensors of one seed on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Uniform over ``[low, high]``."""
        return torch.randint(low, high + 1, shape, device=self.device, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)


def _weights(source: _Source, experts: int, rows: int, k: int, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed weights and 128x4 scales such that a product with unit-variance activations has about unit variance."""
    packed = source.bytes(experts, rows, k // 2)
    # e2m1 codes drawn uniformly have a mean square of 8.56; divide that and K out, to a power of two.
    centre = 127 - round(0.5 * torch.log2(torch.tensor(8.56 * k)).item())
    low, high = (centre - 2, centre + 2) if data == "normal" else (centre, centre + 1)
    linear = source.integers(low, high, experts, rows, -(-k // BLOCK)).to(torch.uint8)
    return packed, swizzle_scales(linear)


def _mxfp4_weights(
    source: _Source, experts: int, rows: int, k: int, data: Data
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return (*_weights(source, experts, rows, k, data), None)


def _nvfp4_weights(
    source: _Source, experts: int, rows: int, k: int, data: Data
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same in NVFP4, with global scales: any numbers, or powers of two for ``"lattice"``."""
    packed = source.bytes(experts, rows, k // 2)
    blocks = experts, rows, -(-k // WEIGHTS["nvfp4"][1])
    if data == "normal":
        linear = source.integers(5 << 3, (9 << 3) - 1, *blocks)  # any mantissa, exponents -2 to 1: 0.25 to 3.75
        spread = source.uniform(experts) + 0.5
    else:
        linear = source.integers(14, 17, *blocks) << 2  # 1, 1.5, 2 and 3
        spread = power_of_two(source.integers(-1, 1, experts)).float()
    centre = power_of_two(torch.tensor([-round(0.5 * torch.log2(torch.tensor(8.56 * k)).item())]))
    return packed, swizzle_scales(linear.to(torch.uint8)), spread * centre.float().to(source.device)


def uneven_rows(pairs: int, experts: int, tile: int) -> dict[str, tuple[int, ...]]:
    """How many of ``pairs`` routed rows each expert gets, in ways that differ in the tiles of ``tile`` tokens
    that they make: full, partly filled and narrow ones in each order, experts without a row, and one with half of
    all."""

    def filled(rows: list[int]) -> tuple[int, ...]:
        """At most ``pairs``, in order; what is left goes to the last expert."""
        taken: list[int] = []
        for count in [*rows, *[0] * experts][:experts]:
            taken.append(min(count, pairs - sum(taken)))
        taken[-1] += pairs - sum(taken)
        return tuple(taken)

    half, others = pairs // 2, max((pairs + 1) // 2 // max(experts - 1, 1), 1)
    ascending = filled(list(range(experts)))
    around = [max(count, 1) for count in (tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1, 8, 9)]
    first = filled([half, *[others] * (experts - 2)])
    return {
        "half on the first": first,
        "half on the last": first[::-1],
        "all on the last": filled([]),
        "ascending": ascending,
        "descending": ascending[::-1],
        "gaps, around a tile": filled([around[e // 2 % len(around)] * (e % 2) for e in range(experts)]),
        "narrow, then full": filled([1 + e % min(8, tile) if e < experts // 2 else tile for e in range(experts)]),
        "one each, the rest on the last": filled([1] * experts),
    }


def _expert_ids(source: _Source, case: MoECase) -> torch.Tensor:
    if isinstance(case.routing, tuple):
        rows = torch.tensor(case.routing, device=source.device)
        assert len(rows) == case.num_experts
        assert int(rows.max()) <= case.num_tokens, "an expert gets a token once"
        ids = torch.arange(len(rows), device=source.device).repeat_interleave(rows)
        ids = ids.view(case.top_k, case.num_tokens).t()  # a token's experts differ
        ids = ids.gather(1, source.uniform(*ids.shape).argsort(dim=1))
        return ids[source.uniform(case.num_tokens).argsort()].to(torch.int32).contiguous()
    scores = source.uniform(case.num_tokens, case.num_experts)
    if case.routing == "one_expert":
        scores = scores[:1].expand(case.num_tokens, -1)
    elif case.routing == "few_experts":
        few = max(case.top_k, case.num_experts // 4)
        scores[:, :-few] = -1.0
    return scores.topk(case.top_k, dim=1).indices.to(torch.int32).contiguous()


def _activations(source: _Source, case: MoECase) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (case.num_tokens, case.hidden)
    if case.data == "lattice":
        values = source.integers(-2, 2, *shape).double()
    else:
        values = source.normal(*shape).double()
        # Blocks of different magnitude, and some that are zero.
        blocks = values.unflatten(1, (-1, BLOCK))
        spread = source.integers(-3, 3, *blocks.shape[:2])
        empty = source.uniform(*blocks.shape[:2]) < 0.02
        blocks.mul_(torch.where(empty, 0.0, power_of_two(spread)).unsqueeze(-1))
    if case.mode != 0:
        return values.to(case.input_dtype), None
    quantized, scales = quantize_mxfp8(values)
    if case.swizzled_input_sf:
        return quantized, swizzle_scales(scales).flatten()
    return quantized, scales


def make_moe_inputs(case: MoECase, seed: int, device: torch.device | str = "cpu") -> MoEInputs:
    """Inputs of ``case``, the same for the same seed and kind of device."""
    source = _Source(seed, torch.device(device))
    assert case.num_experts % case.ep_size == 0
    experts = case.num_experts // case.ep_size
    input, input_sf = _activations(source, case)
    fc1_rows = (1 if case.relu2 else 2) * case.inter
    sizes = (experts, fc1_rows, case.hidden), (experts, case.hidden, case.inter)
    make = _nvfp4_weights if case.weights == "nvfp4" else _mxfp4_weights
    fc1_weights, fc1_scales, fc1_global = make(source, *sizes[0], case.data)
    fc2_weights, fc2_scales, fc2_global = make(source, *sizes[1], case.data)
    inputs = MoEInputs(
        input=input,
        input_sf=input_sf,
        swizzled_input_sf=case.swizzled_input_sf,
        token_selected_experts=_expert_ids(source, case),
        token_final_scales=source.uniform(case.num_tokens, case.top_k) + 0.25,
        fc1_weights=fc1_weights,
        fc1_scales=fc1_scales,
        fc2_weights=fc2_weights,
        fc2_scales=fc2_scales,
        swiglu_step=case.swiglu_step,
        relu2=case.relu2,
        output_dtype=case.output_dtype,
        ep_size=case.ep_size,
        ep_rank=case.ep_rank,
        weights=case.weights,
        fc1_global=fc1_global,
        fc2_global=fc2_global,
    )
    if case.mode != 2:
        scales = source.uniform(2, experts) + 0.5 if case.global_scales else torch.ones((2, experts), device=device)
        inputs.fc1_global, inputs.fc2_global = scales[0], scales[1]
    if case.biases:
        inputs.fc1_bias = source.normal(experts, fc1_rows).to(case.bias_dtype)
        inputs.fc2_bias = source.normal(experts, case.hidden).to(case.bias_dtype)
    if case.swiglu_parameters and not case.relu2:
        if not (case.swiglu_step or case.swiglu_limit_alone):
            inputs.swiglu_alpha = 1.702 + 0.1 * source.normal(experts)
            inputs.swiglu_beta = 1.0 + 0.1 * source.normal(experts)
        inputs.swiglu_limit = (0.5 if case.swiglu_step else 1.5) + 5.5 * source.uniform(experts)
    return inputs


def moe_inputs_with_not_numbers(inputs: MoEInputs, seed: int) -> Iterator[tuple[str, MoEInputs]]:
    """``inputs`` as they are, and with one element of an operand that is NaN or infinite, for each operand; with a
    name.

    The element is one that some token meets.  Scales of no row and of no block are NaN in all of them.
    """
    source = _Source(seed, torch.device("cpu"))
    experts, hidden, half = inputs.fc2_weights.shape
    tokens, inter, fc1_rows = inputs.input.shape[0], 2 * half, inputs.fc1_weights.shape[1]

    def any_of(count: int, first: int = 0) -> int:
        return first + int(source.integers(0, count - 1))

    blocks, of_weights = hidden // BLOCK, WEIGHTS[inputs.weights][1]
    fc1_blocks, fc2_blocks = hidden // of_weights, inter // of_weights
    inputs = dataclasses.replace(
        inputs,
        fc1_scales=with_nan_padding(inputs.fc1_scales, fc1_rows, fc1_blocks),
        fc2_scales=with_nan_padding(inputs.fc2_scales, hidden, fc2_blocks),
    )
    token, slot = any_of(tokens), any_of(inputs.token_selected_experts.shape[1])
    expert = int(inputs.token_selected_experts[token, slot]) - inputs.ep_rank * experts
    assert 0 <= expert < experts

    places: list[tuple[str, str, Any]] = [("input", "input", (token, any_of(hidden)))]
    if inputs.input_sf is not None and not inputs.swizzled_input_sf:
        places.append(("input_sf", "input_sf", (token, any_of(blocks))))
    elif inputs.input_sf is not None:
        scales = with_nan_padding(inputs.input_sf.view(tokens + -tokens % 128, -1), tokens, blocks)
        inputs = dataclasses.replace(inputs, input_sf=scales)
        places.append(("input_sf", "input_sf", swizzled_place(scales, tokens, blocks, (token, any_of(blocks)))))
    for what, name, rows, first, scale_blocks in (
        ("up", "fc1", inter, 0, fc1_blocks),
        *(() if inputs.relu2 else (("gate", "fc1", inter, inter, fc1_blocks),)),
        ("FC2", "fc2", hidden, 0, fc2_blocks),
    ):
        row = any_of(rows, first)
        scales = getattr(inputs, f"{name}_scales")
        place = swizzled_place(
            scales, fc1_rows if name == "fc1" else hidden, scale_blocks, (expert, row, any_of(scale_blocks))
        )
        places += [
            (f"a scale of {what}", f"{name}_scales", place),
            (f"a bias of {what}", f"{name}_bias", (expert, row)),
        ]
    places.append(("token_final_scales", "token_final_scales", (token, slot)))
    names = ("fc1_global", "fc2_global", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    places += [(name, name, (expert,)) for name in names]

    yield "numbers", inputs
    for what, name, place in places:
        if getattr(inputs, name) is None:
            continue
        nans = (NVFP4_NAN_SCALE, 0xFF) if inputs.weights == "nvfp4" and name in ("fc1_scales", "fc2_scales") else ()
        for value, tensor in with_not_numbers(getattr(inputs, name), place, nans):
            if name == "swiglu_limit" and (tensor < 0).any():
                continue  # no limit, and refused where values are looked at
            changed: dict[str, Any] = {name: tensor}
            yield f"{value} as {what}", dataclasses.replace(inputs, **changed)


def make_group_gemm_inputs(
    sizes: Sequence[int],
    n: int,
    k: int,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float8_e4m3fn,
    data: Data = "normal",
) -> dict[str, torch.Tensor]:
    """Operands of ``group_gemm_mxfp4_nt_groupwise`` for groups of ``sizes`` rows, by argument name.

    ``data`` is as in :class:`MoECase`; with ``"lattice"`` every float32 sum is exact, so that the bound is 0.
    """
    source = _Source(seed, torch.device(device))
    cum_m, groups, blocks = sum(sizes), len(sizes), -(-k // BLOCK)
    if data == "lattice":
        values = source.integers(-2, 2, cum_m, k).float()
    else:
        values = source.normal(cum_m, k) * 8
    low, high = (124, 130) if data == "normal" else (126, 128)
    linear = source.integers(low, high, cum_m, blocks).to(torch.uint8)
    ends = [0, *itertools.accumulate(sizes)]
    b, b_scale = _weights(source, groups, n, k, data)
    return {
        "a": values.to(dtype),
        "b": b,
        "a_scale": _scales_of_groups(linear, ends),
        "b_scale": b_scale,
        "m_indptr": torch.tensor(ends, dtype=torch.int32, device=source.device),
    }


def _scales_of_groups(linear: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Each group's scales begin at a multiple of 128 rows that leaves room for every group before it; the rest is 0."""
    blocks = linear.shape[1]
    *starts, rows = padded_group_offsets(torch.tensor(ends))
    scales = linear.new_zeros((rows, blocks + -blocks % 4))
    for start, (first, last) in zip(starts, itertools.pairwise(ends), strict=True):
        swizzled = swizzle_scales(linear[first:last])
        scales[start : start + swizzled.shape[0]] = swizzled
    return scales


def group_gemm_inputs_with_not_numbers(
    call: dict[str, torch.Tensor], seed: int
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The same as :func:`moe_inputs_with_not_numbers` for a call that :func:`make_group_gemm_inputs` made."""
    source = _Source(seed, torch.device("cpu"))
    cum_m, k = call["a"].shape
    groups, n, _ = call["b"].shape
    blocks, ends = k // BLOCK, call["m_indptr"].tolist()
    row, block, column = (int(source.integers(0, count - 1)) for count in (cum_m, blocks, n))
    group = next(index for index in range(groups) if ends[index] <= row < ends[index + 1])
    one = torch.zeros((cum_m, blocks), dtype=torch.uint8)
    one[row, block] = 1
    of_row = _scales_of_groups(one, ends).nonzero()[0].tolist()
    used = _scales_of_groups(torch.ones_like(one), ends).bool().to(call["a"].device)
    call = {
        **call,
        "a_scale": torch.where(used, call["a_scale"], 255),
        "b_scale": with_nan_padding(call["b_scale"], n, blocks),
    }
    yield "numbers", call
    for name, place in (
        ("a", (row, int(source.integers(0, k - 1)))),
        ("a_scale", tuple(of_row)),
        ("b_scale", swizzled_place(call["b_scale"], n, blocks, (group, column, block))),
    ):
        for value, changed in with_not_numbers(call[name], place):
            yield f"{value} in {name}", {**call, name: changed}
