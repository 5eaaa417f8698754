#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Verify this GPU's results for gpt-oss's MoE layer, the grouped GEMM and attention with sinks, as one table.

    scripts/verify_gpu.py --quick          # a minute or two in addition to what is compiled for the first time
    scripts/verify_gpu.py
    scripts/verify_gpu.py --only attention --kv fp8       # what --kv-cache-dtype fp8 runs; one KV cache a process
    scripts/verify_gpu.py --virtual        # no GPU: small layers by the compiled kernels on the virtual SM121

Layer and GEMM are compared element by element with a float64 reference and the bound that float32 sums have
(``flashinfer.testing``), twice and bit for bit; on a GPU also from a CUDA graph. Attention is FlashInfer's own, as vLLM
calls it on SM12x (decode by XQA, prefill by FA2, pages in HND order), compared with float64 within the roundings to
bf16 that it makes. *used* is the largest error as a share of its bound; more than 1 is wrong. The last column is the
time of a call with everything in cache, not a benchmark. Exit status 0 if all agree; 1 if not, or if something is
missing, with a line that names it. On Hopper set FLASHINFER_SM12X_MOE=1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import vllm_server

with contextlib.suppress(ImportError):  # --help does without
    import torch

if TYPE_CHECKING:
    from flashinfer.testing import Accumulation
    from flashinfer.testing.verify import Result

HEADS, KV_HEADS, HEAD, PAGE, WINDOW = 64, 8, 64, 16, 128
KV = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="gpt-oss-20b's layer and few sizes")
    parser.add_argument("--virtual", action="store_true", help="on the virtual SM121, in place of a GPU")
    parser.add_argument("--only", choices=("moe", "gemm", "attention"), help="one of the three")
    parser.add_argument("--kv", choices=KV, default="bf16", help="the KV cache of attention")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def missing(given: argparse.Namespace) -> str:
    """A line that tells what this machine lacks, or an empty text."""
    vllm_server.need("torch", "flashinfer")
    if not given.virtual and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is False (--virtual runs the kernels on the virtual SM121)"
    try:
        import flashinfer
    except ImportError as error:
        return str(error)
    if not hasattr(flashinfer, "__fork_version__"):
        return f"'import flashinfer' is {flashinfer.__file__}, not the fork: put its folder first on PYTHONPATH"
    from flashinfer.sm12x.devices import serves_cuda

    if not given.virtual and not serves_cuda(torch.cuda.current_device()):
        return f"{torch.cuda.get_device_name()} is not SM12x; compute capability 9.0 needs FLASHINFER_SM12X_MOE=1"
    return ""


def moe(given: argparse.Namespace, device: torch.device, sums: Accumulation) -> Iterator[Result]:
    from flashinfer.testing.verify import moe_results

    if given.virtual:
        return moe_results([(160, 96, 8)], (1, 5), given.seed, device, sums)
    if given.quick:
        return moe_results([(2880, 2880, 32)], (1, 4, 16, 64), given.seed, device, sums)
    # gpt-oss-20b, -120b, and -120b's shard of two GPUs.
    sizes = [(2880, 2880, 32), (2880, 2880, 128), (2880, 1440, 128)]
    return moe_results(sizes, (1, 2, 4, 5, 8, 16, 33, 64, 256, 1024), given.seed, device, sums)


def gemm(given: argparse.Namespace, device: torch.device, sums: Accumulation) -> Iterator[Result]:
    from flashinfer.testing.verify import gemm_results

    shapes = [([3, 0, 5], 96, 160)] if given.virtual else [([1, 0, 17, 128], 2880, 2880), ([300, 5], 5760, 2880)]
    return gemm_results(shapes, given.seed, device, sums)


def attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """Causal attention with sinks in float64: ``[q, heads, d]`` last tokens of ``[kv, kv heads, d]``, a ``window`` of
    so many tokens or 0 for all."""
    q_len, heads, head = query.shape
    kv_len, kv_heads, _ = key.shape
    q = query.double().view(q_len, kv_heads, heads // kv_heads, head)
    scores = torch.einsum("qhgd,khd->hgqk", q, key.double()) * head**-0.5
    positions = torch.arange(kv_len - q_len, kv_len, device=query.device)[:, None]
    distance = positions - torch.arange(kv_len, device=query.device)
    outside = (distance < 0) | (distance >= (window or kv_len))
    scores.masked_fill_(outside, float("-inf"))
    sink = sinks.double().view(kv_heads, -1, 1, 1).expand(-1, -1, q_len, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hgqk,khd->qhgd", weights, value.double()).reshape(q_len, heads, head)


def attention_bound(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The bound on errors from rounding probabilities to bf16 (2^-9 each, they sum to at most 1) and from float32
    arithmetic, doubled for the running maximum's rescaling. The comparison adds the output's own rounding."""
    return torch.full_like(reference, 2 * 2.0**-9 * float(value.abs().max()))


class Pages:
    """A KV cache of one sequence in pages of HND order, permuted as in a server; ``key`` and ``value`` are what it
    holds, in bf16."""

    def __init__(self, length: int, generator: torch.Generator, stored: torch.dtype) -> None:
        device = generator.device
        count = -(-length // PAGE)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(stored).to(torch.bfloat16)

        self.key, self.value = (normal(length, KV_HEADS, HEAD) for _ in range(2))
        self.order = torch.randperm(count + 3, device=device, generator=generator)[:count].to(torch.int32)
        cache = normal(count + 3, 2, KV_HEADS, PAGE, HEAD)
        for index, tokens in enumerate((self.key, self.value)):
            padded = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, count * PAGE - length))
            cache[self.order.long(), index] = padded.view(count, PAGE, KV_HEADS, HEAD).transpose(1, 2)
        self.cache = cache.to(stored)  # exact


def attention(given: argparse.Namespace, device: torch.device) -> Iterator[Result]:
    import flashinfer

    generator = torch.Generator(device).manual_seed(given.seed)
    sinks = torch.randn(HEADS, device=device, generator=generator)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    stored = getattr(torch, KV[given.kv])
    lengths = (1, 100, 1000) if given.quick else (1, 15, 100, 1000, 8192, 32768)
    if given.kv == "fp8" and torch.cuda.get_device_capability(device)[0] == 9:
        lengths = ()  # Hopper's XQA multiplies e4m3 there: another kernel, of other roundings
    for window in (0, WINDOW):
        for length in lengths:
            pages = Pages(length, generator, stored)
            query = torch.randn((1, HEADS, HEAD), device=device, generator=generator).to(torch.bfloat16)

            decode = functools.partial(
                flashinfer.decode.xqa_batch_decode_with_kv_cache,
                query,
                (pages.cache[:, 0], pages.cache[:, 1]),
                workspace,
                pages.order[None],
                torch.tensor([length], dtype=torch.int32, device=device).view(torch.uint32),
                length,
                bmm1_scale=HEAD**-0.5,
                window_left=window - 1,
                sinks=sinks,
                kv_layout="HND",
            )
            reference = attention_reference(query, pages.key, pages.value, sinks, window)
            what = f"attention, {given.kv} KV, decode at {length}, window {window or 'none'}"
            yield compared(what, decode, reference, pages)
        wrapper = flashinfer.attention.BatchAttentionWithAttentionSinkWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=device),
            "HND",
            backend="fa2",
            kv_data_type=stored,
            head_dim_qk=HEAD,
            head_dim_vo=HEAD,
            window_left=window - 1,
        )
        for tokens in (37, 300) if given.quick else (1, 37, 300, 2048):
            pages = Pages(tokens, generator, stored)
            query = torch.randn((tokens, HEADS, HEAD), device=device, generator=generator).to(torch.bfloat16)

            def ends(last: int) -> torch.Tensor:
                return torch.tensor([0, last], dtype=torch.int32, device=device)

            wrapper.plan(
                ends(tokens),
                ends(len(pages.order)),
                pages.order,
                torch.tensor([(tokens - 1) % PAGE + 1], dtype=torch.int32, device=device),
                HEADS,
                KV_HEADS,
                HEAD,
                PAGE,
                causal=True,
                window_left=window - 1,
                q_data_type=torch.bfloat16,
                kv_data_type=stored,
            )

            prefill = functools.partial(wrapper.run, query, pages.cache, sinks, HEAD**-0.5)
            reference = attention_reference(query, pages.key, pages.value, sinks, window)
            what = f"attention, {given.kv} KV, prefill of {tokens}, window {window or 'none'}"
            yield compared(what, prefill, reference, pages)


def compared(what: str, call: Callable[[], torch.Tensor], reference: torch.Tensor, pages: Pages) -> Result:
    """An operator of upstream's: within its bound."""
    from flashinfer.testing import BoundViolation, check_within_bound
    from flashinfer.testing.verify import Result, timed

    try:
        used = check_within_bound(call(), reference, attention_bound(reference, pages.value), what)
    except BoundViolation as error:
        return Result(what, float("inf"), wrong=str(error))
    return Result(what, used, timed(call))


def main() -> None:
    given = arguments()
    if lacks := missing(given):
        sys.exit(lacks)
    from flashinfer_sm12x.doctor.probe import mma
    from flashinfer_sm12x.doctor.probe.target import find_target

    with contextlib.ExitStack() as stack:
        if given.virtual:
            from flashinfer.testing.virtual_device import virtual_device

            stack.enter_context(virtual_device("sm_121a"))
            device, name = torch.device("cpu"), "virtual SM121"
        else:
            device = torch.device("cuda", torch.cuda.current_device())
            name = f"{torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}"
        sums = mma.accumulation_of(find_target())
        parts: dict[str, Callable[[], Iterator[Result]]] = {
            "moe": functools.partial(moe, given, device, sums),
            "gemm": functools.partial(gemm, given, device, sums),
        }
        if not given.virtual:
            parts["attention"] = functools.partial(attention, given, device)
        name += f"; tensor cores keep {sums.sum_bits} fraction bits of a sum"
        print(
            f"{name}; torch {torch.__version__}; seed {given.seed}\n| what | used | ms |\n|---|---:|---:|", flush=True
        )
        begin, count, wrong = time.monotonic(), 0, []
        for part in [given.only] if given.only else parts:
            if part not in parts:
                sys.exit(f"{part} needs a GPU: its kernels are not this fork's and are not built for the virtual SM121")
            for result in parts[part]():
                count += 1
                spent = "" if result.milliseconds is None else f"{result.milliseconds:.3f}"
                print(f"| {result.what} | {result.used:.3f} | {spent} |", flush=True)
                if result.wrong:
                    wrong.append(f"{result.what}: {result.wrong}")
    if given.virtual and not given.only:
        print("not run: attention with sinks, which needs a GPU")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"all {count} agree ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    vllm_server.run(main)
