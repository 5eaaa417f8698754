# SPDX-License-Identifier: Apache-2.0
"""What MXFP8 and MXFP4 cost a dense layer in accuracy, by the rule for its scales and by how its weights are spread.

    python benchmarks/format_error.py

The error is the root mean square of ``x @ w.T`` against the same product of bf16 weights and tokens, relative to that
product's own. Tokens are normal. On the CPU, in seconds.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tabulate import tabulate

from flashinfer.quantization import mx_cpu

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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2880, help="a multiple of 32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.k % mx_cpu.BLOCK_SIZE:
        parser.error(f"--k is {arguments.k}; it must be a multiple of {mx_cpu.BLOCK_SIZE}")
    rows = errors((arguments.rows, arguments.k), arguments.tokens, arguments.seed)
    headers = ["weights' values", "format, scales", *(f"{name} tokens" for name in TOKENS)]
    print(tabulate(rows, headers, tablefmt="github", floatfmt=".1%"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
