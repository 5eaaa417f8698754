# SPDX-License-Identifier: Apache-2.0
"""The error of a dense layer in MXFP8 and MXFP4, by the rule for its scales and by the distribution of its weights.

    python benchmarks/format_error.py
    python benchmarks/format_error.py --sums   # the error by the width of the tensor cores' sums
    python benchmarks/format_error.py --activations   # a MoE layer, by activation and mode

The error is the root mean square difference of ``x @ w.T`` from the same product of bf16 weights and tokens, relative
to that product's own root mean square. Tokens are normal. With ``--activations`` it is the error of
``cutlass_fused_moe`` against a float64 layer of the same MXFP4 weights that rounds nothing. Runs on the CPU in seconds;
``--sums`` takes a minute.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tabulate import tabulate

import flashinfer
from flashinfer.fused_moe.sm12x_cpu import activate
from flashinfer.fused_moe.sm12x_validation import ACTIVATIONS
from flashinfer.quantization import mx_cpu
from flashinfer.sm12x.models import Activation, MoELayer
from flashinfer.testing import Accumulation, MoEInputs, make_moe_inputs
from flashinfer.testing.error_bounds import dot_error
from flashinfer.testing.moe_layers import MODE_NAMES, Batch, case_of
from flashinfer.testing.tensor_core_sums import add_up, operand

WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mxfp8, amax": lambda w: mx_cpu.dequantize_mxfp8_linear(*mx_cpu.quantize_mxfp8_linear(w)),
    "mxfp8, mse": lambda w: mx_cpu.dequantize_mxfp8_linear(*mx_cpu.quantize_mxfp8_linear(w, "mse")),
    "mxfp4, amax": lambda w: mx_cpu.dequantize_mxfp4_linear(*mx_cpu.quantize_mxfp4_linear(w)),
    "mxfp4, mse": lambda w: mx_cpu.dequantize_mxfp4_linear(*mx_cpu.quantize_mxfp4_linear(w, "mse")),
}
TOKENS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda x: x,
    "mxfp8": WEIGHTS["mxfp8, amax"],
    "mxfp4": WEIGHTS["mxfp4, amax"],
}


def student_t(shape: tuple[int, int], freedom: int, generator: torch.Generator) -> torch.Tensor:
    """Heavy tails: a normal over the root of a mean of ``freedom`` squares of normals."""
    squares = torch.stack([torch.randn(shape, generator=generator).square() for _ in range(freedom)])
    return torch.randn(shape, generator=generator) / squares.mean(0).sqrt()


def matrices(shape: tuple[int, int], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as bf16 values, by the name of their distribution."""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator)
    yield "normal", normal(shape).bfloat16().float()
    yield "Student's t, 4 degrees of freedom", student_t(shape, 4, generator).bfloat16().float()
    yield "Student's t, 3", student_t(shape, 3, generator).bfloat16().float()
    yield "columns of log-normal sizes", (normal(shape) * normal((1, shape[1])).exp()).bfloat16().float()


def errors(shape: tuple[int, int], num_tokens: int, seed: int) -> list[list[Any]]:
    """Rows of the table: distribution, format of the weights, and the error with each format of tokens."""
    x = torch.randn(num_tokens, shape[1], generator=torch.Generator().manual_seed(seed + 1)).bfloat16().float()
    rows = []
    for name, w in matrices(shape, seed):
        exact = x @ w.T
        for weights, rounded in WEIGHTS.items():
            products = {tokens: of(x) @ rounded(w).T for tokens, of in TOKENS.items()}
            rows.append([name, weights, *(float((p - exact).norm() / exact.norm()) for p in products.values())])
    return rows


SEED = 0
SUMS = {"mxfp8": 32, "bf16": 16}  # tokens, and elements of an MMA; weights are MXFP4
LAYER_K, LONG_K = 2880, 32768


def lost_of_one_sign(tokens: str, k: int, bits: int, generator: torch.Generator) -> float:
    """Mean loss of sums of positive products, over half a unit in bf16's last place."""
    x, w = (
        operand(torch.randn(rows, k, generator=generator).abs(), form) for rows, form in ((8, tokens), (24, "mxfp4"))
    )
    exact = x.values @ w.values.T
    return float(((exact - add_up(x, w, bits, SUMS[tokens])) / exact).mean()) / 2.0**-9


def sums_errors(widths: Iterable[int], seed: int) -> Iterator[list[Any]]:
    """Rows of the table of ``--sums``: what tensor cores of that width lose, as multiples of what rounding to bf16
    does."""
    for bits in widths:
        generator = torch.Generator().manual_seed(seed)
        row: list[Any] = [bits]
        for tokens, elements in SUMS.items():
            x = operand(torch.randn(8, LAYER_K, generator=generator), tokens)
            w = operand(torch.randn(24, LAYER_K, generator=generator), "mxfp4")
            exact = x.values @ w.values.T
            rounding = exact.bfloat16().double() - exact
            row.append(float((add_up(x, w, bits, elements) - exact).norm() / rounding.norm()))
            row.append(lost_of_one_sign(tokens, LAYER_K, bits, generator))
            row.append(float(dot_error(x, w, Accumulation(bits)).mean() / exact.abs().mean() / 2.0**-9))
        yield row + [lost_of_one_sign(tokens, LONG_K, bits, generator) for tokens in SUMS]


COLUMNS: dict[str, Activation] = {
    "Swiglu": "plain",
    "Swiglu, limit": "clamp",
    "Swiglu, alpha, beta, limit, biases": "gpt-oss",
    "SwigluStep": "step",
    "Relu2": "relu2",
}


def exact_layer(inputs: MoEInputs) -> torch.Tensor:
    """A MoE layer of bf16 tokens in float64, nothing rounded in between."""

    def matrix(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows, k = weights.shape[0], 2 * weights.shape[1]
        blocks = k // mx_cpu.BLOCK_SIZE
        return mx_cpu.dequantize_mxfp4_linear(weights, mx_cpu.unswizzle_128x4(scales, rows, blocks)).double()

    output = torch.zeros(inputs.input.shape, dtype=torch.float64)
    for expert in range(inputs.fc1_weights.shape[0]):
        token, slot = (inputs.token_selected_experts == expert).nonzero(as_tuple=True)
        inner = inputs.input[token].double() @ matrix(inputs.fc1_weights[expert], inputs.fc1_scales[expert]).T
        if inputs.fc1_bias is not None:
            inner += inputs.fc1_bias[expert]
        act = activate(ACTIVATIONS[inputs.activation_type], inputs, expert, inner)
        of_expert = act @ matrix(inputs.fc2_weights[expert], inputs.fc2_scales[expert]).T
        if inputs.fc2_bias is not None:
            of_expert += inputs.fc2_bias[expert]
        output.index_add_(0, token, of_expert * inputs.token_final_scales[token, slot, None])
    return output


def activation_errors(seed: int) -> Iterator[list[Any]]:
    """Rows of the table of ``--activations``: an activation, and the error in each mode."""
    for name, activation in COLUMNS.items():
        inputs = make_moe_inputs(case_of(MoELayer(1024, 512, 8, 2, activation), 64, 2), seed)
        exact, batch = exact_layer(inputs), Batch(inputs, torch.empty(0))
        results = (flashinfer.cutlass_fused_moe(**batch.of_mode(mode).arguments()) for mode in MODE_NAMES)
        yield [name, *(float((result.double() - exact).norm() / exact.norm()) for result in results)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", action="store_true", help="the table of the widths of sums")
    parser.add_argument("--activations", action="store_true", help="the table of a MoE layer's activations")
    arguments = parser.parse_args(argv)
    if arguments.activations:
        headers = ["activation", *MODE_NAMES.values()]
        print(tabulate(activation_errors(SEED), headers, tablefmt="github", floatfmt=".2%"))
        return 0
    if arguments.sums:
        short = [f"{what}{tokens}" for tokens in SUMS for what in (f"random, {LAYER_K:,}, ", "one sign, ", "worst, ")]
        headers = ["F", *short, *(f"one sign, {LONG_K:,}, {tokens}" for tokens in SUMS)]
        print(tabulate(sums_errors(range(13, 26), SEED), headers, tablefmt="github", floatfmt=".2g"))
        return 0
    rows = errors((2048, LAYER_K), 64, SEED)
    headers = ["weights' values", "format, scales", *(f"{name} tokens" for name in TOKENS)]
    print(tabulate(rows, headers, tablefmt="github", floatfmt=".1%"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
