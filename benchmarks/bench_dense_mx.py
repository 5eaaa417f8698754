# SPDX-License-Identifier: Apache-2.0
"""Time gpt-oss-120b's dense layers (QKV, O, LM head) in each format, beside their floor and what others have.

    python benchmarks/bench_dense_mx.py                    # without a GPU: the predicted GB10 table
    python benchmarks/bench_dense_mx.py --layers lm_head --tokens 1,8 --peers marlin

The floors are plain streaming reads of the weights and scales in each format. cuBLAS multiplies the same weight in
bfloat16; Marlin is vLLM's W4A16 kernel, installed or in the folder that --vllm names; HUMMING, where it is installed,
takes each format of the weight with bf16 tokens and with e4m3 ones (fp8: one scale a token; on SM12x MXFP8). Every
number is the median of replays of a CUDA graph, each after a write of 256 MB so that L2 holds nothing of the layer. All
are compared with float64 on some rows of the weight before they are timed: ours against its error bound, and the exit
status is 1 where it disagrees; peers against a tolerance: one that disagrees or fails is marked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import emulate
import timing
import torch
from peers import LIBRARY, find_peers, in_vllm
from timing import (
    Entry,
    Row,
    allow,
    layer_parser,
    measured,
    names,
    once,
    parse_layers,
    relative_error,
    render,
    report,
)
from timing import share_of_bound as share_of

from flashinfer.gemm.sm12x_dense import dense_block_scaled
from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS, BlockScaledWeight, quantize_rows
from flashinfer.testing.dense_reference import WEIGHTS
from flashinfer.testing.error_bounds import affine_error, dot_error
from flashinfer.testing.moe_layers import DENSE_LAYERS, DENSE_VARIANTS
from flashinfer.testing.mxfp_formats import Operand
from flashinfer.testing.tensor_core_sums import operand
from flashinfer.testing.virtual_device import in_own_process
from flashinfer_sm12x.doctor.probe.mma import accumulation_on
from flashinfer_sm12x.doctor.probe.timing import StreamingRead

TITLE = "dense layers of gpt-oss-120b"
TOKENS, PREDICTED_TOKENS = (1, 2, 4, 8, 16, 32, 64), (1, 8, 16, 64, 512, 2048, 8192)
CHECKED_ROWS = 512
BF16_TOLERANCE = 1e-2
# bf16: the result and up to three sums over parts of K are rounded, each by at most 2**-9 of its value. fp8: tokens are
# rounded, too, by 2**-4; with independent weights a product has the same relative error.
HUMMING_TOLERANCE = {"bf16": 4 * 2.0**-9, "fp8": 2.0**-4 + 4 * 2.0**-9}
SEED = 0

Bind = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""A layer with its weights: takes tokens, gives a call that returns the layer's output."""


@dataclasses.dataclass
class Inputs:
    """A layer: its weight in bf16, by format with linear scales, its bias, and batches of tokens."""

    wide: torch.Tensor
    weights: dict[str, BlockScaledWeight]
    bias: torch.Tensor
    batches: list[torch.Tensor]

    @classmethod
    def random(cls, n: int, k: int, tokens: Sequence[int], device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).bfloat16()

        wide = normal(n, k)
        weights = {format_: quantize_rows(wide, format_) for format_ in WEIGHT_FORMATS}  # type: ignore[arg-type]
        return cls(wide, weights, normal(n), [normal(count, k) for count in tokens])

    def checked(self, weights: str) -> tuple[torch.Tensor, Operand | None, torch.Tensor]:
        """Indices of the first and last rows of the weight, and those rows: as an operand, and their values."""
        n = len(self.wide)
        rows = torch.cat([torch.arange(CHECKED_ROWS // 2), torch.arange(n - CHECKED_ROWS // 2, n)]).to(self.wide.device)
        if weights == "bf16":
            return rows, None, self.wide[rows].double()
        values, scales, factor = self.weights[weights]
        raw = values.view(torch.uint8)[rows].view(values.dtype)
        w = WEIGHTS[weights].operand(raw, scales[rows])
        return rows, w, w.values if factor is None else w.values * factor.double()


def share_of_bound(out: torch.Tensor, inputs: Inputs, x: torch.Tensor, weights: str, activation: str) -> float:
    """The share of its bound that an element of the checked rows of the weight uses."""
    rows, w, _ = inputs.checked(weights)
    assert w is not None
    tokens, given = operand(x, activation), inputs.weights[weights].global_scale
    factor = 1.0 if given is None else given.double()
    product = tokens.values @ w.values.T
    result = product * factor + inputs.bias[rows].double()
    bound = affine_error(product, dot_error(tokens, w, accumulation_on(out.device)), factor, result)
    return share_of(out[:, rows], result, bound)


def measure(
    layers: Sequence[str], tokens: Sequence[int], repeats: int, device: str = "cuda"
) -> list[tuple[Inputs, list[Row]]]:
    """The floors and ours, layer by layer; and on what."""
    read = StreamingRead()
    found = []
    for name in layers:
        inputs = Inputs.random(*DENSE_LAYERS[name], tokens, device)
        given = {form: each._replace(scales=mx_cpu.swizzle_128x4(each.scales)) for form, each in inputs.weights.items()}
        floors = {
            f"read {form}": read.time_tensors([each.values.view(torch.uint8), each.scales], repeats)[0]
            for form, each in given.items()
        }
        rows = []
        for x in inputs.batches:
            row = Row({"layer": name, "tokens": len(x)}, floors)
            out = torch.full((len(x), len(inputs.bias)), torch.nan, dtype=torch.bfloat16, device=device)
            for weights, activation in DENSE_VARIANTS:
                values, scales, factor = given[weights]
                call = functools.partial(
                    dense_block_scaled, x, values, scales, inputs.bias, weight_format=weights, activation=activation,
                    alpha=factor, out=out, constant_weights=True,
                )  # fmt: skip
                call()
                used = share_of_bound(out, inputs, x, weights, activation)
                row.ours[f"{weights} {activation}"] = measured(call, used, repeats)
            rows.append(row)
        found.append((inputs, rows))
    return found


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another implementation: the format of the weight that it is compared with, its tolerance, and how it is had."""

    name: str
    weights: str
    tolerance: float
    prepare: Callable[[Inputs], Bind]


def cublas(inputs: Inputs) -> Bind:
    """The weight in bfloat16."""
    return lambda x: functools.partial(torch.addmm, inputs.bias, x, inputs.wide.T)


def marlin(library: Path, inputs: Inputs) -> Bind:
    """vLLM's dense W4A16 kernel, with MXFP4 weights."""
    from peers.marlin import BLOCKS_PER_SM, FLOAT4_E2M1, permute_bias, permute_scales, repack

    torch.ops.load_library(library)
    packed, linear, _ = inputs.weights["mxfp4"]
    n, k = packed.shape[0], 2 * packed.shape[1]
    weight = torch.cat([repack(part) for part in packed.split(8192)], dim=1)
    scales = permute_scales(linear.unsqueeze(0))[0].view(torch.float8_e8m0fnu)
    bias = permute_bias(inputs.bias.unsqueeze(0))[0]
    locks = BLOCKS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
    given = (weight, bias, scales, None, None, None, torch.zeros(locks, dtype=torch.int32, device="cuda"), FLOAT4_E2M1)
    return lambda x: lambda: torch.ops._C.marlin_gemm(x, None, *given, x.shape[0], n, k, False, True, False)


def humming(weights: str, activation: str, inputs: Inputs) -> Bind:
    """HUMMING's GEMM."""
    from peers.humming import Gemm

    gemm = Gemm(*inputs.weights[weights][:2], inputs.bias, activation, map(len, inputs.batches))

    def bind(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        out = torch.full((len(x), len(inputs.bias)), torch.nan, dtype=torch.bfloat16, device=x.device)

        def run() -> torch.Tensor:
            gemm(x, out)
            return out

        return run

    return bind


def load_marlin(vllm: Path | None) -> list[Peer]:
    return [Peer("Marlin W4A16", "mxfp4", BF16_TOLERANCE, functools.partial(marlin, in_vllm(LIBRARY, vllm)))]


def load_humming(_: Path | None) -> list[Peer]:
    import peers.humming  # noqa: F401

    return [
        Peer(f"HUMMING {weights} {tokens}", weights, limit, functools.partial(humming, weights, tokens))
        for weights in ("mxfp4", "mxfp8")
        for tokens, limit in HUMMING_TOLERANCE.items()
    ]


PEERS = {"marlin": load_marlin, "humming": load_humming}
"""Peers in addition to cuBLAS, by name."""


def peer_attempts(
    peers: Sequence[Peer], layers: Sequence[tuple[Inputs, list[Row]]], repeats: int
) -> Iterator[tuple[Row, str, Callable[[], Entry]]]:
    """Measurements of the peers, on the same layers and batches."""

    def attempt(peer: Peer, bind: Callable[[], Bind], inputs: Inputs, x: torch.Tensor) -> Entry:
        rows, _, values = inputs.checked(peer.weights)
        call = bind()(x)
        reference = x.double() @ values.T + inputs.bias[rows].double()
        return measured(call, relative_error(call()[:, rows], reference) / peer.tolerance, repeats)

    for peer in peers:
        for inputs, rows in layers:
            bind = once(functools.partial(peer.prepare, inputs))
            for x, row in zip(inputs.batches, rows, strict=True):
                yield row, peer.name, functools.partial(attempt, peer, bind, inputs, x)


def main(argv: list[str] | None = None) -> int:
    parser = layer_parser(__doc__, PEERS)
    parser.add_argument("--layers", type=names, default=list(DENSE_LAYERS), help=f"of {', '.join(DENSE_LAYERS)}")
    arguments = parse_layers(parser, argv)
    allow(parser, arguments, layers=DENSE_LAYERS, peers=PEERS)
    path = arguments.out / "dense.json"
    if arguments.render is not None:
        return render(arguments.render, path, TITLE)
    if arguments.predict or not torch.cuda.is_available():
        return int(in_own_process(emulate.predict_dense, arguments.layers, arguments.tokens or PREDICTED_TOKENS))
    os.environ["FLASHINFER_SM12X_MOE"] = "1"  # a Hopper runs this family too
    found = find_peers(PEERS, arguments.peers, arguments.vllm)
    peers = [Peer("cuBLAS bf16", "bf16", BF16_TOLERANCE, cublas), *itertools.chain(*found)]
    layers = measure(arguments.layers, arguments.tokens or TOKENS, arguments.repeats)
    rows = [row for _, of_layer in layers for row in of_layer]
    status = report(rows, peer_attempts(peers, layers, arguments.repeats), path, TITLE)
    used: Any = [entry.used for row in rows for entry in row.ours.values()]
    print(f"at most {max(used):.3f} of a bound")
    return status


if __name__ == "__main__":
    timing.run(main)
