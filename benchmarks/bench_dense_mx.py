# SPDX-License-Identifier: Apache-2.0
"""Time gpt-oss-120b's dense layers (QKV, O, LM head) in MXFP4 and MXFP8, beside their floor and what others have.

    python benchmarks/bench_dense_mx.py                    # without a GPU: the predicted GB10 tables
    python benchmarks/bench_dense_mx.py --layers lm_head --tokens 1,8 --marlin _C_stable_libtorch.abi3.so

The floor is a plain streaming read of the weights and scales. cuBLAS multiplies the same weight in bfloat16; Marlin is
vLLM's W4A16 kernel, from the library that --marlin names; HUMMING, from the folder that --humming names, takes each
format of the weight with bf16 tokens and with e4m3 ones (fp8: one scale a token; on SM12x MXFP8); llama.cpp, from the
folder that --llama-cpp names, takes float32 tokens, which it rounds to int8, and MXFP4 or Q8_0: int8 with a float16
scale per 32, another format than MXFP8, of 34 bytes where that has 33. Every number is the median of replays of a CUDA
graph, each after a write of 256 MB so that L2 holds nothing of the layer. Ours is compared with float64 on some rows of
the weight before it is timed, and the exit status is 1 where it disagrees; peers with a tolerance: one that disagrees
or fails is marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moe_bench import peers, predict_dense
from moe_bench.measure import context_error, failed
from moe_bench.results import Entry

from flashinfer.gemm.sm12x_dense import dense_mx
from flashinfer.quantization import mx_cpu
from flashinfer.sm12x_gpu_probe.mma import accumulation_on
from flashinfer.sm12x_gpu_probe.timing import StreamingRead, time_graph
from flashinfer.testing import BoundViolation, check_within_bound
from flashinfer.testing.error_bounds import affine_error, dot_error
from flashinfer.testing.moe_layers import DENSE_LAYERS, DENSE_VARIANTS
from flashinfer.testing.mxfp_formats import Operand, dequantize_mxfp4, dequantize_mxfp8
from flashinfer.testing.tensor_core_sums import operand
from flashinfer.testing.virtual_device import in_own_process

CHECKED_ROWS = 512
MARLIN_TOLERANCE = 1e-2
# bf16: roundings of the result, and of up to three sums over parts of K before it, by 2**-9 of a value at most. fp8: tokens
# too, by 2**-4, which independent weights pass on to a product as it is.
HUMMING_TOLERANCE = {"bf16": 4 * 2.0**-9, "fp8": 2.0**-4 + 4 * 2.0**-9}


def quantized(weight: torch.Tensor, weights: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and linear scales, by chunks of rows."""
    one = mx_cpu.quantize_mxfp4_linear if weights == "mxfp4" else mx_cpu.quantize_mxfp8_linear
    values, scales = zip(*(one(rows) for rows in weight.split(16_384)), strict=True)
    return torch.cat([v.view(torch.uint8) for v in values]).view(values[0].dtype), torch.cat(scales)


def checked_rows(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, Operand]:
    """Indices of the first and last rows of the weight, and those rows."""
    rows = torch.cat([torch.arange(CHECKED_ROWS // 2), torch.arange(len(values) - CHECKED_ROWS // 2, len(values))])
    rows = rows.to(values.device)
    raw = values.view(torch.uint8)[rows].view(values.dtype)
    return rows, (Operand.of_mxfp4 if values.dtype is torch.uint8 else Operand.of_mxfp8)(raw, scales[rows])


def disagreement(
    out: torch.Tensor, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, activation: str
) -> float:
    """The share of its bound that an element of the checked rows of the weight uses."""
    rows, w = checked_rows(values, scales)
    tokens = operand(x, activation)
    product = tokens.values @ w.values.T
    result = product + bias[rows].double()
    bound = affine_error(product, dot_error(tokens, w, accumulation_on(out.device)), 1.0, result)
    try:
        return check_within_bound(out[:, rows], result, bound)
    except BoundViolation as error:
        print(f"a result disagrees with the reference: {error}", file=sys.stderr)
        return float("inf")


class Marlin:
    """vLLM's dense W4A16 kernel, with MXFP4 weights."""

    def __init__(self, library: Path, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> None:
        from moe_bench.peer_marlin import FLOAT4_E2M1, permute_bias, permute_scales, repack

        torch.ops.load_library(library)
        n, k = packed.shape[0], 2 * packed.shape[1]
        self.n, self.k, self.format = n, k, FLOAT4_E2M1
        self.weight = torch.cat([repack(part) for part in packed.split(8192)], dim=1)
        self.scales = permute_scales(scales.unsqueeze(0))[0].view(torch.float8_e8m0fnu)
        self.bias = permute_bias(bias.unsqueeze(0))[0]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(4 * sms, dtype=torch.int32, device="cuda")

    def __call__(self, x: torch.Tensor) -> Any:
        call = torch.ops._C.marlin_gemm
        operands = (x, None, self.weight, self.bias, self.scales, None, None, None, self.locks, self.format)
        return call(*operands, x.shape[0], self.n, self.k, False, True, False)


@dataclasses.dataclass
class Inputs:
    """A layer: by format the values and linear scales of its weight; its bias; the batches of tokens that were measured."""

    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor
    batches: list[torch.Tensor]


def measure_humming(inputs: Inputs, repeats: int) -> list[dict[str, Entry]]:
    """HUMMING on each batch, by format of the weight and of the tokens: its time, and its error over its tolerance."""
    from moe_bench.peer_humming import Gemm

    entries: list[dict[str, Entry]] = [{} for _ in inputs.batches]
    for format_, (values, scales) in inputs.weights.items():
        rows, w = checked_rows(values, scales)
        for activation, tolerance in HUMMING_TOLERANCE.items():
            try:
                gemm = Gemm(values, scales, inputs.bias, activation, map(len, inputs.batches))
            except Exception as error:  # the others go on; what is printed says why
                for entry in entries:
                    entry[f"HUMMING {format_} {activation}"] = failed(error)
                continue
            for x, entry in zip(inputs.batches, entries, strict=True):
                reference = x.double() @ w.values.T + inputs.bias[rows].double()
                out = torch.full((len(x), len(inputs.bias)), torch.nan, dtype=torch.bfloat16, device=x.device)
                try:
                    gemm(x, out)
                    used = peers.relative_error(out[:, rows], reference) / tolerance
                    measured = Entry(time_graph(functools.partial(gemm, x, out), repeats), used)
                except Exception as error:
                    measured = failed(error)
                entry[f"HUMMING {format_} {activation}"] = measured
    return entries


def measure_llama_cpp(library: Any, inputs: Inputs, repeats: int) -> list[dict[str, Entry]]:
    """llama.cpp on each batch, by format of the weight: its time, and its error over its tolerance."""
    from moe_bench.peer_llama_cpp import MXFP4, Q8_0, TOKEN_ERROR, Gemm, mxfp4_blocks, q8_0_blocks, q8_0_values

    entries: list[dict[str, Entry]] = [{} for _ in inputs.batches]
    for format_, name in (("mxfp4", "MXFP4"), ("mxfp8", "Q8_0")):
        try:
            values, scales = inputs.weights[format_]
            rows, checked = checked_rows(values, scales)
            w = checked.values
            if name == "MXFP4":
                gemm = Gemm(library, MXFP4, mxfp4_blocks(values, scales), inputs.bias)
            else:  # of what MXFP8 holds, by chunks of rows
                chunks = zip(values.view(torch.uint8).split(16_384), scales.split(16_384), strict=True)
                wide = (dequantize_mxfp8(raw.view(values.dtype), s) for raw, s in chunks)
                blocks = torch.cat([q8_0_blocks(each) for each in wide])
                w = q8_0_values(blocks[rows])
                gemm = Gemm(library, Q8_0, blocks, inputs.bias)
        except Exception as error:
            for entry in entries:
                entry[f"llama.cpp {name}"] = failed(error)
            continue
        for x, entry in zip(inputs.batches, entries, strict=True):
            reference = x.double() @ w.T + inputs.bias[rows].double()
            try:
                call = gemm.bind(x)
                used = peers.relative_error(call()[:, rows], reference) / TOKEN_ERROR
                measured = Entry(time_graph(call, repeats), used)
            except Exception as error:
                measured = failed(error)
            entry[f"llama.cpp {name}"] = measured
    return entries


def add_peer(
    measured: Callable[[Inputs, int], list[dict[str, Entry]]],
    rows: list[dict[str, Any]],
    layers: list[Inputs],
    repeats: int,
) -> bool:
    """Add a peer to the rows, after all of ours, and say whether others can follow.

    A kernel that breaks the CUDA context ends it for everybody.
    """
    remaining = iter(rows)
    for inputs in layers:
        for entries in measured(inputs, repeats):
            next(remaining).setdefault("peers", {}).update(entries)
        if (broken := context_error()) is not None:
            print(f"no peer is measured from here on, the CUDA context is lost: {broken}", file=sys.stderr)
            return False
    return True


def measure_layer(name: str, arguments: argparse.Namespace, read: StreamingRead) -> tuple[list[dict[str, Any]], Inputs]:
    """The floor, ours, cuBLAS and Marlin; and on what."""
    n, k = DENSE_LAYERS[name]
    generator = torch.Generator("cuda").manual_seed(arguments.seed)
    wide = torch.randn(n, k, generator=generator, device="cuda").bfloat16()
    bias = torch.randn(n, generator=generator, device="cuda").bfloat16()
    weights, floors = {}, {}
    for format_ in ("mxfp4", "mxfp8"):
        values, scales = quantized(wide, format_)
        swizzled = mx_cpu.swizzle_128x4(scales)
        weights[format_] = (values, scales, swizzled)
        floors[format_] = read.time_tensors([values.view(torch.uint8), swizzled], arguments.repeats)[0].median
    marlin = Marlin(arguments.marlin, *weights["mxfp4"][:2], bias) if arguments.marlin else None
    rows, batches = [], []
    for tokens in arguments.tokens:
        x = torch.randn(tokens, k, generator=generator, device="cuda").bfloat16()
        row: dict[str, Any] = {"layer": name, "tokens": tokens, "read": floors, "ours": {}, "used": {}}
        out = torch.full((tokens, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        for format_, activation in DENSE_VARIANTS:
            values, scales, swizzled = weights[format_]

            call = functools.partial(
                dense_mx, x, values, swizzled, bias, activation=activation, out=out, constant_weights=True
            )
            call()
            variant = f"{format_} {activation}"
            row["used"][variant] = disagreement(out, x, values, scales, bias, activation)
            row["ours"][variant] = time_graph(call, arguments.repeats).median
        cublas = functools.partial(torch.addmm, bias, x, wide.T, out=out)
        row["cublas"] = time_graph(cublas, arguments.repeats).median
        if marlin is not None:
            reference = torch.addmm(bias.double(), x.double(), dequantize_mxfp4(*weights["mxfp4"][:2]).T[:, :n])
            error = ((marlin(x).double() - reference).norm() / reference.norm()).item()
            row["marlin_error"] = error
            row["marlin"] = time_graph(functools.partial(marlin, x), arguments.repeats).median
            del reference
        rows.append(row)
        batches.append(x)
    return rows, Inputs({name: given[:2] for name, given in weights.items()}, bias, batches)


def peer_cell(entry: Entry | None) -> str:
    """Microseconds, or that there are none."""
    if entry is None or entry.sample is None:
        return "-" if entry is None else "failed"
    return f"wrong ({entry.used:.2g} of its tolerance)" if entry.disagrees else f"{entry.sample.median:.1f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds, as a Markdown table."""
    names = [f"{weights} {activation}" for weights, activation in DENSE_VARIANTS]
    others = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
    head = ["layer", "tokens", "read 4", "read 8", *names, "cuBLAS bf16", "Marlin W4A16", *others]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["layer"], str(row["tokens"]), f"{row['read']['mxfp4']:.1f}", f"{row['read']['mxfp8']:.1f}"]
        cells += [f"{row['ours'][name]:.1f}" for name in names]
        cells.append(f"{row['cublas']:.1f}")
        good = row.get("marlin_error", 1.0) < MARLIN_TOLERANCE
        cells.append(
            f"{row['marlin']:.1f}" if good else "-" if "marlin" not in row else f"wrong ({row['marlin_error']:.2g})"
        )
        cells += [peer_cell(row.get("peers", {}).get(name)) for name in others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=names, default=list(DENSE_LAYERS), help=f"of {', '.join(DENSE_LAYERS)}")
    parser.add_argument("--tokens", type=lambda text: list(map(int, text.split(","))), help="default: 1 to 64")
    parser.add_argument("--predict", action="store_true", help="measure nothing: the predicted GB10 tables")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder of a prediction's JSON")
    parser.add_argument("--marlin", type=Path, help="vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--humming", type=Path, help="folder of the package humming (humming-kernels)")
    parser.add_argument("--llama-cpp", type=Path, help="folder of ggml's libraries (scripts/build_llama_cpp.py)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures there too")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.layers) - set(DENSE_LAYERS):
        parser.error(f"--layers: {sorted(unknown)} are not among {sorted(DENSE_LAYERS)}")
    if arguments.predict or not torch.cuda.is_available():
        given = arguments.layers, arguments.tokens or predict_dense.TOKENS, arguments.out
        return int(in_own_process(predict_dense.main, *given))
    arguments.tokens = arguments.tokens or [1, 2, 4, 8, 16, 32, 64]
    os.environ["FLASHINFER_SM12X_MOE"] = "1"  # a Hopper runs this family too
    if arguments.humming is not None and (why := peers.find_humming(arguments.humming)) is not None:
        raise SystemExit(f"humming cannot be measured: {why}")
    library = None
    if arguments.llama_cpp is not None:
        library, why = peers.load_llama_cpp(arguments.llama_cpp)
        if library is None:
            raise SystemExit(f"llama_cpp cannot be measured: {why}")
    read = StreamingRead()
    measured = [measure_layer(name, arguments, read) for name in arguments.layers]
    rows = [row for of_layer, _ in measured for row in of_layer]
    print(table(rows))
    wanted: list[Callable[[Inputs, int], list[dict[str, Entry]]]] = []
    if arguments.humming is not None:
        wanted.append(measure_humming)
    if library is not None:
        wanted.append(functools.partial(measure_llama_cpp, library))
    for one in wanted:
        goes_on = add_peer(one, rows, [inputs for _, inputs in measured], arguments.repeats)
        print(f"\n{table(rows)}")
        if not goes_on:
            break
    worst = max(used for row in rows for used in row["used"].values())
    for name, note in dict.fromkeys((n, e.note) for row in rows for n, e in row.get("peers", {}).items() if e.note):
        print(f"{name}: {note}")
    print(f"at most {worst:.3f} of a bound; {torch.cuda.get_device_name()}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1, default=dataclasses.asdict))
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
