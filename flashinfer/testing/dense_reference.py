# SPDX-License-Identifier: Apache-2.0
"""``dense_block_scaled`` in float64, with the bound on any float32 implementation of it, and inputs for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .error_bounds import FLOAT32_ROUNDOFF, TENSOR_CORE, Accumulation, affine_error, dot_error
from .mxfp_formats import (
    BLOCK,
    NVFP4_BLOCK,
    NVFP4_NAN_SCALE,
    Operand,
    quantize_mxfp4,
    quantize_mxfp6,
    quantize_mxfp8,
    quantize_mxint8,
    quantize_nvfp4,
    swizzle_scales,
    swizzled_place,
    unswizzle_scales,
    with_nan_padding,
    with_not_numbers,
)

TOKENS = ("bf16", "quantize_bf16", "quantize_f16", "mxfp8", "mxfp8_linear", "mxfp4", "bf16_to_mxfp4", "f16_to_mxfp4")
"""Formats of tokens, as the kernels number them; those that are quantized inside are bf16 and f16, to MXFP8 or
MXFP4."""


class Weights(NamedTuple):
    """A format of weights."""

    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    operand: Callable[[torch.Tensor, torch.Tensor], Operand]
    elements_per_scale: int = BLOCK


WEIGHTS = {
    "mxfp4": Weights(quantize_mxfp4, Operand.of_mxfp4),
    "mxfp8": Weights(quantize_mxfp8, Operand.of_mxfp8),
    "mxfp6": Weights(quantize_mxfp6, Operand.of_mxfp6),
    "mxint8": Weights(quantize_mxint8, Operand.of_mxint8),
    "nvfp4": Weights(quantize_nvfp4, Operand.of_nvfp4, NVFP4_BLOCK),
}

TOKENS_OF = {"bf16": "bf16", "mxfp8": "quantize_bf16", "mxfp4": "mxfp4"}
"""Tokens that an instance takes, by its operand."""


@dataclasses.dataclass(frozen=True)
class DenseCase:
    """A call: sizes, formats, and what in addition to the product it has.

    ``tokens`` is one of :data:`TOKENS`, ``weights`` of :data:`WEIGHTS`.
    """

    num_tokens: int
    n: int
    k: int
    weights: str = "mxfp4"
    tokens: str = "bf16"
    bias: torch.dtype | None = None
    alpha: bool = False
    residual: bool = False
    out_dtype: torch.dtype = torch.bfloat16


@dataclasses.dataclass
class DenseInputs:
    """Arguments of ``dense_block_scaled``; tests may change what they hold, the reference reads them."""

    tokens: str
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    named: dict[str, Any]

    def multiplied(self) -> Operand:
        """The tokens as they are multiplied."""
        x, scales = self.arguments[0], self.named.get("x_scale")
        if self.tokens == "bf16":
            return Operand.of_bf16(x)
        if self.tokens.startswith("quantize_"):
            return Operand.of_mxfp8(*quantize_mxfp8(x.float(), saturates=True))
        if self.tokens.endswith("_to_mxfp4"):
            return Operand.of_mxfp4(*quantize_mxfp4(x.float(), saturates=True))
        assert scales is not None
        blocks = x.shape[1] // (BLOCK // 2 if self.tokens == "mxfp4" else BLOCK)
        linear = scales if self.tokens == "mxfp8_linear" else unswizzle_scales(scales, len(x), blocks)
        return (Operand.of_mxfp4 if self.tokens == "mxfp4" else Operand.of_mxfp8)(x, linear)

    def weights(self) -> Operand:
        """The weights."""
        x, weight, scales = self.arguments
        form, k = WEIGHTS[self.named["weight_format"]], x.shape[1] * (2 if x.dtype is torch.uint8 else 1)
        return form.operand(weight, unswizzle_scales(scales, len(weight), k // form.elements_per_scale))


def _random_matrix(rows: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values whose blocks differ in size by up to 2^8, some of them zero."""
    values = torch.randn(rows, k // BLOCK, BLOCK, generator=generator)
    exponents = torch.randint(-5, 4, (rows, k // BLOCK, 1), generator=generator)
    zero = torch.rand(rows, k // BLOCK, 1, generator=generator) < 0.05
    return (torch.where(zero, 0.0, values) * 2.0**exponents).reshape(rows, k)


def make_dense_inputs(case: DenseCase, seed: int) -> DenseInputs:
    """Random arguments for a case; 128x4 scales, and MXFP6's rows, have random bytes in their padding, which nobody may
    use."""
    generator = torch.Generator().manual_seed(seed)

    def swizzled(linear: torch.Tensor) -> torch.Tensor:
        scales = swizzle_scales(linear)
        used = swizzle_scales(torch.ones_like(linear)).bool()
        noise = torch.randint(0, 256, scales.shape, dtype=torch.uint8, generator=generator)
        return torch.where(used, scales, noise)

    weight, linear = WEIGHTS[case.weights].quantize(_random_matrix(case.n, case.k, generator))
    if case.weights == "mxfp6" and case.k // BLOCK % 2:
        weight[:, -8:] = torch.randint(0, 256, (case.n, 8), dtype=torch.uint8, generator=generator)
    named: dict[str, Any] = {"weight_format": case.weights, "out_dtype": case.out_dtype}
    tokens = x = _random_matrix(case.num_tokens, case.k, generator)
    if case.tokens in ("bf16", "quantize_bf16", "bf16_to_mxfp4"):
        tokens = x.bfloat16()
    elif case.tokens in ("quantize_f16", "f16_to_mxfp4"):
        tokens = x.half()
    else:
        tokens, scales = (quantize_mxfp4 if case.tokens == "mxfp4" else quantize_mxfp8)(x)
        named["x_scale"] = scales if case.tokens == "mxfp8_linear" else swizzled(scales)
    if case.tokens.startswith("mxfp8"):
        named["swizzled_x_scale"] = case.tokens == "mxfp8"
    elif case.tokens.startswith("quantize_"):
        named["activation"] = "mxfp8"
    elif case.tokens.endswith("_to_mxfp4"):
        named["activation"] = "mxfp4"
    if case.bias is not None:
        named["bias"] = torch.randn(case.n, generator=generator).to(case.bias)
    if case.alpha:
        named["alpha"] = torch.rand(1, generator=generator) + 0.5
    if case.residual:
        named["residual"] = torch.randn(case.num_tokens, case.n, generator=generator).to(case.out_dtype)
    return DenseInputs(case.tokens, (tokens, weight, swizzled(linear)), named)


def dense_inputs_with_not_numbers(case: DenseCase, seed: int) -> Iterator[tuple[str, DenseInputs]]:
    """Arguments for a case as they are, and with one element of an operand that is NaN or infinite, for each operand;
    with a name.  Scales of no row and of no block are NaN in all of them.
    """
    inputs = make_dense_inputs(case, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    m, n, k = case.num_tokens, case.n, case.k
    token, column, element = (int(torch.randint(count, (), generator=generator)) for count in (m, n, k))
    block, of_weight = element // BLOCK, WEIGHTS[case.weights].elements_per_scale
    x, weight, weight_scale = inputs.arguments
    weight_scale = with_nan_padding(weight_scale, n, k // of_weight)
    x_scale = inputs.named.get("x_scale")
    if x_scale is not None and inputs.named.get("swizzled_x_scale", True):
        x_scale = with_nan_padding(x_scale, m, k // BLOCK)
        scale_place = swizzled_place(x_scale, m, k // BLOCK, (token, block))
    else:
        scale_place = (token, block)
    operands: dict[str, torch.Tensor | None] = {
        **{name: inputs.named.get(name) for name in ("bias", "alpha", "residual")},
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
    }
    places: dict[str, tuple[int, ...]] = {
        "x": (token, element),
        "x_scale": scale_place,
        "weight": (column, element),
        "weight_scale": swizzled_place(weight_scale, n, k // of_weight, (column, element // of_weight)),
        "bias": (column,),
        "alpha": (0,),
        "residual": (token, column),
    }

    def made(operands: dict[str, Any]) -> DenseInputs:
        named = inputs.named | {name: value for name, value in operands.items() if name in inputs.named}
        return DenseInputs(case.tokens, (operands["x"], operands["weight"], operands["weight_scale"]), named)

    yield "numbers", made(operands)
    for name, value in operands.items():
        integers = value is not None and value.dtype in (torch.uint8, torch.int8)
        if value is None or (integers and not name.endswith("_scale")):  # each of them is a number
            continue
        scales = (NVFP4_NAN_SCALE, 0xFF) if name == "weight_scale" and case.weights == "nvfp4" else ()
        for what, changed in with_not_numbers(value, places[name], scales):
            yield f"{what} in {name}", made({**operands, name: changed})


def dense_reference(inputs: DenseInputs, accumulation: Accumulation = TENSOR_CORE) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 ``[m, n]`` and its bound, as :func:`~flashinfer.testing.moe_reference` returns them."""
    x, w = inputs.multiplied(), inputs.weights()
    product = x.values @ w.values.T
    error = dot_error(x, w, accumulation)
    factor = inputs.named.get("alpha")
    scale = 1.0 if factor is None else factor.double()
    bias = inputs.named.get("bias")
    result = product * scale + (0.0 if bias is None else bias.double())
    bound = error if factor is None and bias is None else affine_error(product, error, scale, result)
    if inputs.named.get("residual") is not None:
        result = result + inputs.named["residual"].double()
        bound = bound + FLOAT32_ROUNDOFF * (result.abs() + bound)
    # Beyond float32, as infinity is that the caller rounded to MXFP8 or MXFP4, a value is infinite there: what it gives
    # with a weight of zero, and an infinite alpha with an error of zero, the contract does not fix.
    free = torch.isnan(bound) & ~torch.isnan(result) | _overflows(x.values).unsqueeze(1) | _overflows(w.values)
    return result, torch.where(free, torch.inf, bound)


def make_norm_inputs(inputs: DenseInputs, seed: int, adds: bool = True, eps: float = 1e-5) -> dict[str, Any]:
    """Random arguments that ``rmsnorm_dense_block_scaled`` takes beside those of :func:`make_dense_inputs`, by name."""
    generator = torch.Generator().manual_seed(seed)
    x = inputs.arguments[0]
    named: dict[str, Any] = {"norm_weight": torch.randn(x.shape[1], generator=generator).bfloat16(), "eps": eps}
    if adds:
        named["residual"] = (4 * torch.randn(x.shape, generator=generator)).bfloat16()
    return named


def normed_dense_reference(
    inputs: DenseInputs,
    norm: dict[str, Any],
    total: torch.Tensor,
    factor_last: bool,
    accumulation: Accumulation = TENSOR_CORE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm_dense_block_scaled`` in float64 and its bound, of rows that add up to ``total``.

    ``factor_last``: what is rounded to bfloat16 is the sum times the norm's weight, as in a split-K kernel, which
    multiplies with a row's factor afterwards; else the factor is in it, and both neighbours of the rounded number are
    allowed where float32 cannot tell them apart.
    """
    rows, scale, k = total.double(), norm["norm_weight"].double(), total.shape[1]
    factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm["eps"])
    # The mean has (k + 2) roundings, halved by the root; rsqrt has two units in the last place; then come products.
    factor_error = (k / 2 + 9) * FLOAT32_ROUNDOFF
    normed = rows * scale if factor_last else rows * scale * factor
    tokens, w = normed.bfloat16(), inputs.weights()
    x = Operand.of_bf16(tokens)
    product, error = x.values @ w.values.T, dot_error(x, w, accumulation)
    if not factor_last:
        nearest = factor_error * normed.abs()
        apart = torch.maximum(*((normed + side).bfloat16().double() - x.values for side in (nearest, -nearest)))
        least = torch.minimum(*((normed + side).bfloat16().double() - x.values for side in (nearest, -nearest)))
        error = error + torch.maximum(apart, -least) @ w.values.abs().T
        factor, factor_error = torch.ones_like(factor), 0.0
    alpha, bias = inputs.named.get("alpha"), inputs.named.get("bias")
    whole = factor * (1.0 if alpha is None else alpha.double())
    result = product * whole + (0.0 if bias is None else bias.double())
    relative = factor_error + FLOAT32_ROUNDOFF  # of alpha times the factor
    error = error * (1 + relative) + relative * product.abs()
    return result, affine_error(product, error, whole, result)


def _overflows(rows: torch.Tensor) -> torch.Tensor:
    """Whether a row has a finite number that exceeds float32."""
    return (torch.isfinite(rows) & torch.isinf(rows.float())).any(-1)
