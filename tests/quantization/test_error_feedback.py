# SPDX-License-Identifier: Apache-2.0
"""Quantization with error feedback: against the definition, without a factorization; odd Gram matrices; errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashinfer.quantization import error_feedback, mx_cpu
from flashinfer.quantization.block_scaled import (
    LAYOUTS,
    WEIGHT_FORMATS,
    BlockScaledWeight,
    dequantize_rows,
    quantize_rows,
)
from flashinfer.quantization.error_feedback import DAMPING, quantize_with_feedback


def seeded(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def layer(n: int, k: int, generator: torch.Generator, tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs whose columns resemble each other and differ in size."""
    mix = torch.randn(k, k, generator=generator) / math.sqrt(k) + torch.eye(k)
    sizes = torch.exp2(4 * torch.rand(k, generator=generator) - 2)
    inputs = torch.randn(tokens or 4 * k, k, generator=generator) @ mix * sizes
    return torch.randn(n, k, generator=generator) / math.sqrt(k), inputs


def gram_of(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.double().t() @ inputs.double()


def error(weight: torch.Tensor, quantized: BlockScaledWeight, form: Any, inputs: torch.Tensor) -> float:
    """The squared error of a layer's outputs."""
    difference = dequantize_rows(quantized, form, weight.shape[1]).double() - weight.double()
    return float((inputs.double() @ difference.t()).square().sum())


def by_definition(weight: torch.Tensor, gram: torch.Tensor, form: Any) -> torch.Tensor:
    """``[n, k]`` float64: after each rounding the columns that are left are those that minimize the outputs' squared
    error, by the normal equations."""
    k, layout = weight.shape[1], LAYOUTS[form]
    size = layout.scales.block
    damped = gram.double() / gram.diagonal().mean() + DAMPING * torch.eye(k, dtype=torch.float64)
    unit = 1.0 if form != "nvfp4" else float(mx_cpu.nvfp4_global_scale(weight))
    exact, found = weight.double() / unit, torch.zeros(weight.shape, dtype=torch.float64)
    energy = gram.diagonal().view(-1, size).sum(1)
    blocks = sorted(range(k // size), key=lambda b: (-float(energy[b]), b))
    left = [b * size + i for b in blocks for i in range(size)]
    done: list[int] = []

    def best_rest() -> torch.Tensor:
        """The best values of the columns ``left``, given what was rounded before."""
        missing = exact[:, done] - found[:, done]
        return exact[:, left] + missing @ damped[done][:, left] @ torch.linalg.inv(damped[left][:, left])

    while left:
        block = best_rest()[:, :size]
        # The cost of a column's error when the rest makes up for it: the Schur complement of the columns after it.
        costs = []
        for i in range(size):
            behind = left[i + 1 :]
            own = damped[left[i], left[i]]
            if behind:
                across = damped[left[i], behind]
                own = own - across @ torch.linalg.inv(damped[behind][:, behind]) @ across
            costs.append(own)
        rounded = []
        for scales in layout.candidates(block.float()):
            scale = layout.decode_scales(scales, torch.float32).double()[:, None]
            values = layout.elements.round((block / scale).nan_to_num().float()).double() * scale
            rounded.append((scale, ((values - block).square() * torch.stack(costs)).sum(1, keepdim=True)))
        (whole, whole_error), (finer, finer_error) = rounded
        scale = torch.where(finer_error < whole_error, finer, whole)[:, 0]
        for _ in range(size):
            column = best_rest()[:, 0]
            j = left.pop(0)
            found[:, j] = layout.elements.round((column / scale).nan_to_num().float()).double() * scale
            done.append(j)
    return found * unit


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_column_makes_up_for_those_before_it(form: Any, seed: int) -> None:
    weight, inputs = layer(5, 96, seeded(seed))
    gram = gram_of(inputs)
    found = dequantize_rows(quantize_with_feedback(weight, gram, form), form, 96)
    assert torch.equal(found.double(), by_definition(weight, gram, form))


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_outputs_are_nearer_than_those_of_rounded_weights(form: Any) -> None:
    weight, inputs = layer(48, 256, seeded(2))
    fresh = layer(1, 256, seeded(2), 3000)[1]  # other tokens, from the same distribution
    quantized = quantize_with_feedback(weight, gram_of(inputs), form)
    assert error(weight, quantized, form, inputs) < 0.65 * error(weight, quantize_rows(weight, form), form, inputs)
    assert error(weight, quantized, form, fresh) < 0.85 * error(weight, quantize_rows(weight, form), form, fresh)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_inputs_that_have_nothing_in_common_leave_plain_rounding(form: Any) -> None:
    """Each column for itself, so that costs are alike: the better of two scales, as without feedback."""
    weight, _ = layer(40, 160, seeded(3))
    plain = quantize_rows(weight, form, "mse")
    for gram in (torch.eye(160), 2.0**-90 * torch.eye(160), torch.zeros(160, 160)):
        for found, expected in zip(quantize_with_feedback(weight, gram, form), plain, strict=True):
            assert found is expected is None or torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def some_inputs(kind: str, generator: torch.Generator) -> torch.Tensor:
    inputs = layer(1, 128, generator)[1]
    if kind == "one token":
        return inputs[:1]
    if kind == "two equal columns":
        inputs[:, 77] = inputs[:, 3]
    elif kind == "dead inputs":
        inputs[:, torch.rand(128, generator=generator) < 0.4] = 0.0
        inputs[:, 32:64] = 0.0
    elif kind == "sizes from 2^-40 to 2^40":
        inputs *= torch.exp2(torch.linspace(-40, 40, 128))
    elif kind == "one input of 10,000 times the size":
        inputs[:, 9] *= 1e4
    return inputs


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    "kind",
    [
        "one token",
        "two equal columns",
        "dead inputs",
        "sizes from 2^-40 to 2^40",
        "one input of 10,000 times the size",
    ],
)
def test_gram_matrices_that_are_singular_or_close_to_it(form: Any, kind: str) -> None:
    """Weights stay near what they were, and outputs are no worse than those of rounded weights."""
    generator = seeded(4)
    inputs = some_inputs(kind, generator)
    weight = torch.randn(24, 128, generator=generator)
    quantized = quantize_with_feedback(weight, gram_of(inputs), form)
    found = dequantize_rows(quantized, form, 128)
    assert found.isfinite().all()
    assert (found - weight).abs().max() < 4 * weight.abs().max()
    assert error(weight, quantized, form, inputs) <= error(weight, quantize_rows(weight, form), form, inputs)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_the_same_inputs_give_the_same_bytes(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunks of rows are; and a Gram matrix counts up to a factor."""
    weight, inputs = layer(37, 96, seeded(5))
    gram = gram_of(inputs)
    whole = quantize_with_feedback(weight.bfloat16(), gram, form)
    monkeypatch.setattr(error_feedback, "CHUNK_ROWS", 11)
    for other in (gram, gram * 2.0**70):
        for one, two in zip(whole, quantize_with_feedback(weight.bfloat16(), other, form), strict=True):
            assert one is two is None or torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_zeros_stay_zeros(form: Any) -> None:
    gram = gram_of(layer(1, 64, seeded(6))[1])
    assert not dequantize_rows(quantize_with_feedback(torch.zeros(8, 64), gram, form), form, 64).any()
    small = torch.ones(8, 64)
    small[:, 16:32] = 1e-30  # of NVFP4 a scale of 0, which leaves no elements to choose
    quantized = quantize_with_feedback(small, torch.eye(64), form)
    assert form != "nvfp4" or not quantized.values[:, 8:16].any()


def test_what_cannot_be_quantized_is_named() -> None:
    weight, inputs = layer(8, 64, seeded(7))
    gram = gram_of(inputs)
    for bad, value in ((3, math.nan), (17, math.inf)):
        spoiled = weight.clone()
        spoiled[2, bad] = value
        with pytest.raises(ValueError, match=r"^weight holds infinities or NaN$"):
            quantize_with_feedback(spoiled, gram, "mxfp4")
        with pytest.raises(ValueError, match=r"^the layer's inputs hold infinities or NaN$"):
            quantize_with_feedback(weight, gram.index_fill(0, torch.tensor(bad), value), "mxfp4")
    with pytest.raises(ValueError, match=r"^gram is \(64, 63\) on cpu; it must be \[64, 64\] on cpu$"):
        quantize_with_feedback(weight, gram[:, :63], "mxfp4")
    with pytest.raises(ValueError, match=r"^weight_format is 'int4'; "):
        quantize_with_feedback(weight, gram, "int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^weight is .*multiple of 32$"):
        quantize_with_feedback(weight[:, :40], gram[:40, :40], "mxfp4")


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_gpu_gives_the_same_codes(device: torch.device, form: Any) -> None:
    """But for values next to the middle of two: sums that differ by 1e-12 of themselves part one in a million at
    most."""
    weight, inputs = layer(512, 512, seeded(8))
    gram = gram_of(inputs)
    here = quantize_with_feedback(weight, gram, form)
    there = quantize_with_feedback(weight.to(device), gram.to(device), form)
    for one, two in zip(here, there, strict=True):
        if one is not None and two is not None:
            assert int((one.view(torch.uint8) != two.cpu().view(torch.uint8)).sum()) <= 1 + one.numel() // 1_000_000


def test_a_gram_matrix_and_a_damping_that_fit_nothing_are_named() -> None:
    weight, gram = torch.linspace(-1.0, 1.0, 8 * 64).view(8, 64), torch.eye(64)
    for changes, error, text in (
        ({"gram": None}, TypeError, r"^gram is None; it must be \[64, 64\]"),
        ({"gram": gram[0]}, ValueError, r"^gram is .*; it must be \[64, 64\]"),
        ({"gram": gram.int()}, ValueError, "^gram is torch.int32 .*; it must be a square float matrix"),
        ({"damping": -0.1}, ValueError, r"^damping is -0.1; it must be a number in \[0, 1\]"),
        ({"damping": float("nan")}, ValueError, "^damping is nan; it must be"),
        ({"damping": None}, TypeError, "^damping is None; it must be"),
    ):
        with pytest.raises(error, match=text):
            quantize_with_feedback(**{"weight": weight, "gram": gram, "weight_format": "mxfp4", **changes})
