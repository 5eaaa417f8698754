# SPDX-License-Identifier: Apache-2.0
"""Sweep of ``cutlass_fused_moe``, the grouped GEMM and ``dense_block_scaled`` over formats, instances and shapes, on a
GPU.

Needs no pytest, so that it can run under ``compute-sanitizer``::

    FLASHINFER_SM12X_MOE=1 python tests/moe/gpu_sweep.py
    FLASHINFER_SM12X_MOE=1 compute-sanitizer --tool memcheck python tests/moe/gpu_sweep.py --quick --reference cpu

Every case runs into poisoned output and workspace, is compared with the float64 reference within its bound, repeated
bit for bit, and replayed from a CUDA graph; every instance that fits the mode is forced (``profile_ids``, ``tactic``).
The last line is a summary; the exit status is 1 when a case failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

import moe_harness
import torch
from moe_harness import check_case, same_bits, tactics_to_force
from rescored_cases import make_head

from flashinfer.fused_moe import cutlass_fused_moe, moe_step, router_top_k
from flashinfer.fused_moe.sm12x_operator import FEW_ROUTED_ROWS
from flashinfer.fused_moe.sm12x_router import choose_experts
from flashinfer.gemm import (
    dense_block_scaled_rescored,
    dense_block_scaled_rescored_top_k,
    rmsnorm_dense_block_scaled,
    sm12x_group_gemm,
)
from flashinfer.gemm.sm12x_dense import dense_block_scaled
from flashinfer.gemm.sm12x_dense_launch import gemm_compute_dtypes
from flashinfer.gemm.sm12x_dense_norm import most_tokens
from flashinfer.gemm.sm12x_dense_rescored import MAX_GROUP_ROWS, MAX_K, MAX_RESCORED
from flashinfer.sm12x.devices import require_device_class, serves_cuda
from flashinfer.sm12x.instances import (
    DENSE_INSTANCES,
    FUSED_MOE_ROUTED_ROWS,
    GEMM_INSTANCES,
    IN_KERNEL_ROUTED_ROWS,
    INSTANCES,
    MAX_EXPERTS,
    SM12X,
)
from flashinfer.sm12x.models import MOE_LAYERS, NVFP4_LAYERS
from flashinfer.testing import (
    DenseCase,
    MoECase,
    check_within_bound,
    dense_reference,
    group_gemm_reference,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    make_norm_inputs,
    normed_dense_reference,
)
from flashinfer.testing.dense_reference import TOKENS, WEIGHTS
from flashinfer.testing.moe_inputs import uneven_rows
from flashinfer.testing.moe_layers import case_of
from flashinfer.testing.rescored_reference import rescored_reference
from flashinfer.testing.row_top_k_reference import largest_of_rows
from flashinfer_sm12x.doctor.probe.mma import accumulation_on
from flashinfer_sm12x.doctor.probe.timing import captured

KINDS = ((0, "mxfp4"), (1, "mxfp4"), (2, "mxfp4"), (2, "nvfp4"))
"""Modes and formats of experts."""
# 720 (gpt-oss over four ranks) is no multiple of 32: its weights are padded with zeros, as callers must.
INTER_SIZES = (736, 1440, 2880, 2944)
EXPERT_COUNTS = (8, 32, 128, 256)
NEMOTRON = {name: layer for name, layer in NVFP4_LAYERS.items() if layer.activation == "relu2"}
"""Layers without gate rows."""
ROWS = {row.profile_id: row for row in INSTANCES}
"""The instances by the number that ``profile_ids`` has."""
Work = tuple[str, MoECase, list[list[int] | None]]


def tactics_of(case: MoECase, extra: bool) -> list[list[int] | None]:
    """The default, and each instance for both GEMMs; those of Hopper alone only on one, with ``extra``."""
    device = torch.device("cuda", torch.cuda.current_device())
    block_scaled = not extra or require_device_class(device.index).mma_kinds
    return tactics_to_force(case, device, SM12X if block_scaled else INSTANCES)


def model_cases(quick: bool, extra: bool) -> list[Work]:
    """gpt-oss layers, every instance forced; those of other models by the planner's choice, with their activations."""
    work: list[Work] = []
    few, many = (1, 8, 300), (1, 2, 4, 8, 17, 64, 300)
    forced = ("gpt-oss-20b",) if quick else ("gpt-oss-20b", "gpt-oss-120b")
    for num_tokens in many:  # outermost: a run that is cut short has seen each layer
        for name, layer in (MOE_LAYERS | NEMOTRON).items():
            every = name in forced
            if num_tokens not in (many if every and not quick else few):
                continue
            for mode, weights in KINDS:
                case = case_of(layer, num_tokens, mode, weights=weights)
                work.append(("models", case, tactics_of(case, extra) if every else [None]))
    return work


def instance_cases(extra: bool) -> list[Work]:
    """Small odd shapes, every instance forced, on data whose FC1 is exact, and mixed pairs of instances."""
    work: list[Work] = []
    for num_tokens in (1, 7, 40, 150):
        for data, relu2 in (("normal", False), ("lattice", False), ("lattice", True)):
            for mode, weights in KINDS:  # innermost: a run that is cut short has seen each
                sizes = num_tokens, 416, 352, 8, 3, mode
                case = MoECase(*sizes, data=data, relu2=relu2, output_dtype=torch.float16, weights=weights)  # type: ignore[arg-type]
                pairs = tactics_of(case, extra)
                forced = [pair[0] for pair in pairs if pair and not ROWS[pair[0]].split_k]
                for kept in ("mxfp8", "mxfp8_as_bf16", "bf16"):
                    alike = [number for number in forced if ROWS[number].compute == kept]
                    pairs += [[a, b] for a, b in zip(alike, [*alike[1:], *alike[:1]], strict=True)]
                pairs += [[forced[0], -1], [-1, forced[-1]]]
                work.append(("instances", case, pairs))
    return work


def most_pairs_cases(extra: bool) -> list[Work]:
    """The most experts and pairs that a fused MoE kernel sorts, every stream forced."""
    work: list[Work] = []
    top_k = 24
    for relu2 in (False, True):
        for mode, weights in KINDS:
            sizes = FUSED_MOE_ROUTED_ROWS // top_k, 416, 352, MAX_EXPERTS, top_k, mode
            case = MoECase(*sizes, relu2=relu2, weights=weights)  # type: ignore[arg-type]
            streams = [pair for pair in tactics_of(case, extra) if pair is None or ROWS[pair[0]].split_k]
            work.append(("most_pairs", case, streams))
    return work


def routing_cases(quick: bool, extra: bool) -> list[Work]:
    """Uneven routings, around the tiles of 8 to 128 tokens, at the numbers of pairs where kernels route in another way
    and at the most of a stream; every instance forced."""
    work: list[Work] = []
    sizes = (
        (FEW_ROUTED_ROWS, 6),
        (FEW_ROUTED_ROWS + 1, 40),
        (IN_KERNEL_ROUTED_ROWS, 40),
        (IN_KERNEL_ROUTED_ROWS + 1, 40),
    )
    for pairs, experts in (*sizes, (FUSED_MOE_ROUTED_ROWS, 96), (FUSED_MOE_ROUTED_ROWS, MAX_EXPERTS), (2200, 5)):
        for tile in (16, 64) if quick else (8, 16, 24, 32, 40, 64, 128):
            for number, rows in enumerate(uneven_rows(pairs, experts, tile).values()):
                top_k = 2 if pairs % 2 == 0 and max(rows) <= pairs // 2 else 1
                one = KINDS[(number + tile // 8) % len(KINDS)]
                for mode, weights in [one] if quick or pairs == FUSED_MOE_ROUTED_ROWS else KINDS:
                    case = MoECase(
                        pairs // top_k,
                        416,
                        352,
                        experts,
                        top_k,
                        mode,
                        routing=rows,
                        relu2=number % 4 == 3,
                        weights=weights,
                    )
                    work.append(("routings", case, tactics_of(case, extra)))
    return work


def random_case(rng: random.Random, quick: bool) -> MoECase:
    """An odd shape: sizes, routing, shards, layouts and dtypes drawn independently."""
    mode, weights = rng.choice(KINDS)
    ep_size = rng.choice((1, 1, 1, 2, 4))
    experts = rng.choice(EXPERT_COUNTS[:2] if quick else EXPERT_COUNTS)
    inter = rng.choice((96, 352, 736) if quick else INTER_SIZES)
    hidden = rng.choice((160, 736) if quick else (736, 1440, 2880, 2944))
    output_dtype = rng.choice((torch.bfloat16, torch.float16))
    return MoECase(
        num_tokens=rng.randint(1, 300),
        hidden=hidden,
        inter=inter,
        num_experts=experts,
        top_k=rng.randint(1, 8),
        mode=mode,
        data=rng.choice(("normal", "lattice")),
        routing=rng.choice(("uniform", "uniform", "one_expert", "few_experts")),
        swizzled_input_sf=rng.random() < 0.5,
        biases=rng.random() < 0.7,
        swiglu_parameters=rng.random() < 0.7,
        global_scales=rng.random() < 0.5,
        input_dtype=rng.choice((torch.bfloat16, torch.float16)) if mode == 1 else torch.bfloat16,
        output_dtype=output_dtype,
        bias_dtype=rng.choice((torch.bfloat16, output_dtype)),
        ep_size=ep_size,
        ep_rank=rng.randrange(ep_size),
        weights=weights,
        relu2=rng.random() < 0.2,
    )


def random_cases(rng: random.Random, count: int, quick: bool, extra: bool) -> list[Work]:
    """``count`` random shapes, each with the default and one forced instance."""
    work: list[Work] = []
    for _ in range(count):
        case = random_case(rng, quick)
        forced = [pair for pair in tactics_of(case, extra) if pair]
        work.append(("random", case, [None, rng.choice(forced)]))
    return work


def group_gemm_cases(rng: random.Random, count: int, seed: int) -> int:
    """The grouped GEMM with random groups, every instance forced; returns the number of runs, raises on a violation."""
    device = torch.device("cuda", torch.cuda.current_device())
    runs = 0
    for number in range(count):
        sizes = [rng.choice((0, 1, 3, 8, rng.randint(1, 300))) for _ in range(rng.choice((1, 3, 8, 32)))]
        if not any(sizes):
            sizes[0] = 5
        n, k = rng.choice((8, 120, 720, 1440, 2880)), rng.choice((32, 96, 736, 2880))
        dtype = rng.choice((torch.float8_e4m3fn, torch.float8_e5m2))
        data = rng.choice(("normal", "lattice"))
        inputs = make_group_gemm_inputs(sizes, n, k, seed + number, device, dtype, data)  # type: ignore[arg-type]
        reference, bound = group_gemm_reference(**inputs, accumulation=accumulation_on(device))
        for row in (None, *GEMM_INSTANCES):
            tactic = None if row is None else row.index
            label = f"group gemm sizes {sizes}, n {n}, k {k}, {dtype}, {data}, tactic {tactic}, seed {seed + number}"
            results = []
            for _ in range(2):
                out = torch.full((sum(sizes), n), torch.nan, dtype=torch.float16, device=device)
                options = {"out": out, "out_dtype": None, "tiles": [1, 128, 128, 128], "swap_ab": True}
                sm12x_group_gemm.group_gemm(sm12x_group_gemm.GroupGemmCall(**inputs, **options, tactic=tactic))
                results.append(out)
            check_within_bound(results[0], reference, bound, label)
            assert same_bits(*results), f"{label}: a second run differs"
            runs += 1
    return runs


def random_dense_case(rng: random.Random, quick: bool) -> DenseCase:
    """A dense layer of an odd shape: sizes, formats and epilogue drawn independently.

    ``quick`` is for the sanitizers: it has too few tokens for cuBLAS, whose kernels they would report.
    """
    weights = rng.choice(tuple(WEIGHTS))
    return DenseCase(
        num_tokens=rng.choice((1, 3, 8, 16, 17, rng.randint(1, 255 if quick else 300))),
        n=rng.choice((1, 40, 200, 736, rng.randint(1, 1000)) if quick else (1, 40, 2880, 5120, rng.randint(1, 3000))),
        k=rng.choice((32, 96, 2880, 4096, 4608, 32 * rng.randint(1, 160))),
        weights=weights,
        tokens=rng.choice([tokens for tokens in TOKENS if weights == "mxfp4" or "to_mxfp4" not in tokens]),
        bias=rng.choice((None, torch.bfloat16, torch.float16, torch.float32)),
        alpha=rng.random() < 0.3,
        residual=rng.random() < 0.5,
        out_dtype=rng.choice((torch.bfloat16, torch.float16, torch.float32)),
    )


def dense_cases(rng: random.Random, count: int, options: argparse.Namespace) -> tuple[int, float]:
    """Random dense layers, every instance that takes them; the number of runs and the share of the bound used."""
    begin = time.time()
    device = torch.device("cuda", torch.cuda.current_device())
    runs, worst = 0, 0.0
    for number in range(count):
        if time.time() - begin > options.time_limit:
            print(f"time limit: {count - number} dense layers not run")
            break
        case, seed = random_dense_case(rng, options.quick), options.seed + number
        inputs = make_dense_inputs(case, seed)
        arguments = [tensor.to(device) for tensor in inputs.arguments]
        named = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in inputs.named.items()}
        if options.reference == "device":
            inputs.arguments, inputs.named = tuple(arguments), named
        expected = None if options.reference == "none" else dense_reference(inputs, accumulation_on(device))
        out = torch.empty((case.num_tokens, case.n), dtype=case.out_dtype, device=device)
        operands = gemm_compute_dtypes(case.weights, TOKENS.index(case.tokens))
        rows = [row for row in DENSE_INSTANCES if row.weights == case.weights and row.longest_k >= case.k]
        for row in (None, *(row for row in rows if row.compute_dtype in operands)):
            call = functools.partial(
                dense_block_scaled,
                *arguments,
                **named,
                out=out,
                tactic=row.index if row else None,
                constant_weights=True,
            )
            label = f"{case}, tactic {row.name if row else 'default'}, seed {seed}"
            results = []
            for capture in (False, False, True):
                run = captured(call).replay if capture else call
                if not options.no_poison:
                    out.fill_(torch.nan)
                run()
                results.append(out.clone())
            if expected:
                result = results[0].to(expected[0].device)
                worst = max(worst, check_within_bound(result, *expected, label))
            assert all(same_bits(results[0], result) for result in results[1:]), f"{label}: another run differs"
            runs += 1
    return runs, worst


@mock.patch("flashinfer.gemm.sm12x_dense_rescored.rescores", return_value=True)
def rescored_cases(
    rng: random.Random, count: int, options: argparse.Namespace, _rescores: mock.Mock
) -> tuple[int, float]:
    """Random LM heads, all rescored, also where the fine weight would compute all logits sooner; the number of runs and
    the share of the bound used."""
    device = torch.device("cuda", torch.cuda.current_device())
    runs, worst = 0, 0.0
    for number in range(count):
        m, groups = rng.choice((1, 2, 5, 8, 16, 31, 64)), rng.choice((1, 5, 48, 48, 100))
        rescored = rng.randint(1, MAX_RESCORED)
        weights, fine = rng.choice(("nvfp4", "mxfp4")), rng.choice(("bf16", "bf16", "mxint8"))
        k = rng.choice((32, 64, 32 * rng.randint(1, 12), 2048, 2880, 4096, MAX_K))
        n = rng.randint(8, min((1 << 20 if options.quick else 1 << 23) // k, MAX_GROUP_ROWS * groups))
        bias = rng.choice((None, torch.bfloat16, torch.float32))
        out_dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
        head = make_head(m, n, k, options.seed + number, weights, fine, bias, out_dtype)
        label = f"rescored {head}, {groups} groups of {rescored}, {out_dtype}, seed {options.seed + number}"
        there = head.to(device)
        coarse = dense_block_scaled(there.x, *there.coarse, there.bias, **there.named)
        arguments = there.x, *there.coarse, *there.fine, there.bias
        named = {**there.named, "fine_format": fine, "groups": groups, "rescored": rescored, "constant_weights": True}
        out = torch.empty_like(coarse)
        results = []
        for capture in (False, False, True):
            call = functools.partial(dense_block_scaled_rescored, *arguments, **named, out=out)
            run = captured(call).replay if capture else call
            out.fill_(torch.nan)
            run()
            results.append(out.clone())
        where = device if options.reference == "device" else torch.device("cpu")
        if options.reference != "none":
            on = there if where == device else head
            expected = rescored_reference(
                coarse.to(where), on.x, on.operand(), on.bias, groups, rescored, accumulation_on(device)
            )
            worst = max(worst, check_within_bound(results[0].to(where), *expected, label))
        assert all(same_bits(results[0], result) for result in results[1:]), f"{label}: another run differs"
        top_k = rng.choice((1, 1, 3, 8))
        found = dense_block_scaled_rescored_top_k(*arguments, **named, top_k=top_k)
        values, indices = largest_of_rows(results[0], top_k)
        assert torch.equal(found.indices, indices), f"{label}: other rows are the largest"
        assert torch.equal(found.values, values), f"{label}: other values are the largest"
        runs += 4
    return runs, worst


def step_cases(rng: random.Random, count: int, options: argparse.Namespace) -> int:
    """What a decode step adds, random: experts chosen by logits, kept counters, norms, and what is read ahead; the
    number of runs, raises on a violation.
    """
    begin, runs = time.time(), 0
    device = torch.device("cuda", torch.cuda.current_device())
    barrier = torch.zeros(2, dtype=torch.int32, device=device)  # of all calls
    for number in range(count):
        if time.time() - begin > options.time_limit:
            print(f"time limit: {count - number} steps not run")
            break
        seed = options.seed + number
        print("seed", seed)
        generator = torch.Generator(device).manual_seed(seed)
        case = dataclasses.replace(
            random_case(rng, options.quick), num_tokens=rng.choice((1, 1, 2, 4, 8, rng.randint(9, 40)))
        )
        following = torch.zeros(rng.choice((0, 8, 4112, 1 << 20, 60 << 20)), dtype=torch.uint8, device=device)
        arguments = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in make_moe_inputs(case, seed).arguments().items()
        }
        arguments["quant_scales"] = [scale.to(device) for scale in arguments["quant_scales"]]
        del arguments["token_selected_experts"], arguments["token_final_scales"]
        logits = torch.randn(case.num_tokens, case.num_experts, device=device, generator=generator).bfloat16().float()
        padding = torch.rand(case.num_tokens, device=device, generator=generator) < 0.2
        # The router's own choice: these logits are its products with the unit matrix.
        unit = torch.eye(case.num_experts, dtype=torch.bfloat16, device=device)
        routed = router_top_k(logits.bfloat16(), unit, case.top_k, is_padding=padding)
        scales, ids = routed.topk_weights, routed.topk_ids
        if case.num_tokens * case.top_k > FEW_ROUTED_ROWS:  # chosen before the layer, by torch's softmax
            scales, chosen = choose_experts(logits, case.top_k, padding)
            assert torch.equal(chosen, ids), f"a step's {case}, seed {seed}: other experts"
        wanted = cutlass_fused_moe(token_selected_experts=ids, token_final_scales=scales, **arguments)
        call = functools.partial(
            moe_step,
            router_logits=logits,
            top_k=case.top_k,
            is_padding=padding,
            barrier=barrier,
            next_weights=following,
            **arguments,
        )
        results = [call(), call()]
        graph = captured(lambda call=call, results=results: results.append(call()))
        results[-1].fill_(torch.nan)  # the capture's
        graph.replay()
        assert all(same_bits(wanted, result) for result in results), f"a step's {case}, seed {seed}: other bits"
        runs += len(results)
        assert int(barrier[0]) == 0, f"a step's {case}, seed {seed}: the counter is {barrier.tolist()}"

        dense = dataclasses.replace(
            random_dense_case(rng, options.quick), num_tokens=rng.randint(1, 8), tokens="bf16", residual=False
        )
        inputs = make_dense_inputs(dense, seed)
        norm = make_norm_inputs(inputs, seed, adds=rng.random() < 0.8, eps=rng.choice((1e-6, 1e-5, 1.0)))
        on_gpu = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in {
                **dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)),
                **inputs.named,
                **norm,
            }.items()
        }
        out, total = rmsnorm_dense_block_scaled(**on_gpu, next_weights=following, constant_weights=True)
        again = rmsnorm_dense_block_scaled(**on_gpu)
        label = f"{dense} behind a norm, seed {seed}"
        assert same_bits(out, again.output), f"{label}: other bits"
        one_launch = most_tokens(dense.weights, dense.k) > 0
        expected = normed_dense_reference(inputs, norm, total.cpu(), one_launch, accumulation_on(device))
        check_within_bound(out.cpu(), *expected, label)
        runs += 1
    return runs


def ahead_cases(options: argparse.Namespace) -> int:
    """Layers of each model at one and four tokens, and dense layers of their K, with and without the next weights: the
    same bits, also from a graph; every stream forced. The number of runs, raises on a violation."""
    begin, runs = time.time(), 0
    device = torch.device("cuda", torch.cuda.current_device())
    most = torch.cuda.get_device_properties(device).L2_cache_size // 12
    following = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (48, 123_456, most + 160)]
    layers = MOE_LAYERS | NVFP4_LAYERS
    for name, layer in layers.items():
        for mode, weights in KINDS:
            if time.time() - begin > options.time_limit:
                print(f"time limit: {name} and what follows not run")
                return runs
            case = case_of(layer, 4 if mode else 1, mode, weights=weights, num_experts=4 * layer.top_k)
            inputs = make_moe_inputs(case, options.seed, device)
            for pair in tactics_of(case, options.extra_instances):
                if pair and not ROWS[pair[0]].split_k:
                    continue
                call = functools.partial(moe_step, **inputs.arguments(), profile_ids=pair)
                plain = call()
                for tensor in following:
                    graph_output: list[torch.Tensor] = []
                    graph = captured(lambda: graph_output.append(call(next_weights=tensor)))  # noqa: B023
                    graph.replay()
                    for result in (call(next_weights=tensor), graph_output[-1]):
                        assert same_bits(plain, result), f"{name}, {case}, profile_ids {pair}: other bits"
                        runs += 1
    for k in sorted({layer.hidden for layer in layers.values()}):
        for row in (row for row in DENSE_INSTANCES if row.split_k and row.longest_k >= k):
            dense = make_dense_inputs(DenseCase(row.block_n, 5120, k, row.weights), options.seed)
            tensors = [tensor.to(device) for tensor in dense.arguments]
            named = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in dense.named.items()}
            run = functools.partial(dense_block_scaled, *tensors, **named, tactic=row.name)
            for tensor in following:
                assert same_bits(run(), run(next_weights=tensor)), f"{row.name}, K {k}: other bits"
                runs += 1
    return runs


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes and few cases")
    parser.add_argument("--only", help="run only the group of cases of this name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", choices=("device", "cpu", "none"), default="device")
    parser.add_argument("--extra-instances", action="store_true", help="build Hopper's own instances too")
    parser.add_argument("--no-poison", action="store_true", help="leave output and workspace as allocated (initcheck)")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which each group stops")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; 0 when every case held."""
    options = parse(argv)
    moe_harness.POISON = not options.no_poison
    if not torch.cuda.is_available():
        print("gpu_sweep needs a CUDA device")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if not serves_cuda(device.index):
        print(f"{torch.cuda.get_device_name(device)} does not run this kernel family: set FLASHINFER_SM12X_MOE=1")
        return 2
    rng = random.Random(options.seed)
    count = 20 if options.quick else 200
    work = instance_cases(options.extra_instances)
    work += most_pairs_cases(options.extra_instances)
    work += routing_cases(options.quick, options.extra_instances)
    work += random_cases(rng, count, options.quick, options.extra_instances)
    work += model_cases(options.quick, options.extra_instances)
    if options.only:
        work = [entry for entry in work if entry[0] == options.only]

    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, seed {options.seed}, {len(work)} cases")
    print(f"tensor cores keep {accumulation_on(device).sum_bits} fraction bits of their sums, as measured")
    ran, checks, failures = Counter[str](), Counter[str](), 0
    worst, begin = 0.0, time.time()
    for number, (group, case, tactics) in enumerate(work):
        if time.time() - begin > options.time_limit:
            print(f"time limit: {len(work) - number} cases not run")
            break
        try:
            outcomes = check_case(case, options.seed + number, device, tactics, options.reference)
        except Exception as error:
            failures += 1
            print(f"FAILED {group} {dataclasses.asdict(case)} seed {options.seed + number}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            continue
        for tactic, outcome in zip(tactics, outcomes, strict=True):
            ran[f"mode {case.mode}, {case.weights}"] += 1
            ran["forced" if tactic else "default tactic"] += 1
            checks.update(outcome.checks)
            worst = max(worst, 0.0 if outcome.used != outcome.used else outcome.used)
        if number % 20 == 19:
            print(f"  {number + 1}/{len(work)} cases, {time.time() - begin:.0f} s, {failures} failed", flush=True)
        torch.cuda.empty_cache()
    gemm_runs = dense_runs = head_runs = 0
    if options.only in (None, "group_gemm"):
        try:
            gemm_runs = group_gemm_cases(rng, 5 if options.quick else 40, options.seed)
        except Exception as error:
            failures += 1
            print(f"FAILED {error}", flush=True)
    if options.only in (None, "rescored"):
        try:
            head_runs, used = rescored_cases(rng, 20 if options.quick else 150, options)
            worst = max(worst, used)
        except Exception as error:
            failures += 1
            print(f"FAILED {error}", flush=True)
    if options.only in (None, "dense"):
        try:
            dense_runs, used = dense_cases(rng, 15 if options.quick else 60, options)
            worst = max(worst, used)
        except Exception as error:
            failures += 1
            print(f"FAILED {error}", flush=True)
    step_runs = 0
    if options.only in (None, "steps"):
        try:
            step_runs = step_cases(rng, 15 if options.quick else 100, options)
        except Exception as error:
            failures += 1
            print(f"FAILED {error}", flush=True)
    if options.only in (None, "ahead"):
        try:
            step_runs += ahead_cases(options)
        except Exception as error:
            failures += 1
            print(f"FAILED {error}", flush=True)
    print(
        f"SUMMARY {'ok' if not failures else 'FAILED'}: {sum(checks.values())} checks {dict(checks)}, runs "
        f"{dict(ran)}, {gemm_runs} grouped GEMMs, {dense_runs} dense layers, {head_runs} of rescored heads, "
        f"{step_runs} parts of steps, {failures} cases failed, at most {worst:.3f} of a bound used, "
        f"{time.time() - begin:.0f} s, seed {options.seed}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
