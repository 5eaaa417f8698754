# SPDX-License-Identifier: Apache-2.0
"""Kernels whose blocks see each other's writes late, and the layer on workspaces that earlier calls have used.

In the emulator's weak-memory mode other blocks see a block's writes only when the program orders them, or earlier at
random by a seed. The kernels are correct there and no checker reports; a planted fault in how blocks hand over results
is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from virtual_devices import ALL_CHECKERS
from virtual_group_gemm import launch_group_gemm
from virtual_moe import run_moe

from flashinfer.decode import decode_attention
from flashinfer.fused_moe import router_top_k
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.gemm import dense_block_scaled, dense_block_scaled_top_k
from flashinfer.sm12x.instances import GEMM_INSTANCES, INSTANCES
from flashinfer.testing import (
    TENSOR_CORE,
    DenseCase,
    MoECase,
    check_within_bound,
    dense_reference,
    group_gemm_reference,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.decode_reference import check_decoded, make_decode_case
from flashinfer.testing.router_reference import check_routed, make_router_inputs
from flashinfer.testing.row_top_k_reference import largest_of_rows
from flashinfer.testing.virtual_device import VirtualDevice, VirtualDeviceError, virtual_device

SEEDS = (1, 2, 3)
# Units of both GEMMs of a pair are cut between blocks; every block of a fused MoE kernel has some of each.
SIZES = {"num_tokens": 6, "hidden": 512, "inter": 512, "num_experts": 4, "top_k": 2}
RELAXED_ARRIVAL = "red.relaxed.gpu.global.add.u32"
# Each fault takes two changes: without its fence the arrival is still a release, and a relaxed one is ordered by the
# fence.
FAULTS_OF_FUSED_MOE = {
    "relaxed arrivals": {"red.release.gpu.global.add.u32": RELAXED_ARRIVAL, "membar.gl;": "", "fence.acq_rel.gpu;": ""},
    "arrivals at block scope": {
        "red.release.gpu.global.add.u32": "red.release.cta.global.add.u32",
        "membar.gl;": "",
        "fence.acq_rel.gpu;": "",
    },
    "relaxed polls": {"ld.acquire.gpu.global.u32": "ld.relaxed.gpu.global.u32"},
}
FAULTS_OF_PAIR = {
    "no fences": {"membar.gl;": "", "fence.acq_rel.gpu;": ""},
    "fences at block scope": {"membar.gl;": "membar.cta;", "fence.acq_rel.gpu;": "fence.acq_rel.cta;"},
}
KINDS = pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "pair"])


def tactics_of(mode: Mode, streamed: bool) -> list[int]:
    return [next(row.index for row in INSTANCES if row.activation == mode.activation and row.split_k == streamed)] * 2


def check_kernels(device: VirtualDevice, streamed: bool) -> None:
    names = [launch.kernel for launch in device.launches]
    assert sum("fused_moe_kernel" in name for name in names) == (1 if streamed else 0), names
    assert sum("grouped_gemm_kernel" in name for name in names) == (0 if streamed else 2), names


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", [Mode.MXFP8_INPUT, Mode.W4A16], ids=["MXFP8", "W4A16"])
@KINDS
def test_the_layer_where_writes_come_late(streamed: bool, mode: Mode, seed: int) -> None:
    inputs = make_moe_inputs(MoECase(**SIZES, mode=int(mode)), seed)
    with virtual_device(watch=ALL_CHECKERS, weak_memory=seed) as device:
        output = run_moe(device, inputs, int(mode), tactics_of(mode, streamed))
        check_kernels(device, streamed)
        assert all(launch.clean for launch in device.launches), device.launches
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"seed {seed}")


def run_prologue(device: VirtualDevice, seed: int) -> None:
    """Tokens are rounded and sorted by launches of their own; more entries than a GEMM's warp routes."""
    inputs = make_moe_inputs(MoECase(132, 160, 96, 4, 2, int(Mode.BF16_INPUT)), seed)
    output = run_moe(device, inputs, int(Mode.BF16_INPUT), tactics_of(Mode.BF16_INPUT, False))
    assert device.launches[0].grid[0] > 2
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))


def run_group_gemm(device: VirtualDevice, seed: int) -> None:
    inputs = make_group_gemm_inputs([6, 0, 9], 192, 512, seed)
    out = launch_group_gemm(device, inputs, GEMM_INSTANCES[0].index)
    assert device.launches[-1].counters.by_class["atomic"] > 0  # units are cut
    check_within_bound(out, *group_gemm_reference(**inputs, accumulation=TENSOR_CORE))


def run_dense(tactic: str, top_k: int = 0) -> Callable[[VirtualDevice, int], None]:
    def run(device: VirtualDevice, seed: int) -> None:
        inputs = make_dense_inputs(DenseCase(20, 2500 if top_k else 200, 416, bias=torch.bfloat16), seed)
        if top_k:
            logits = torch.full((20, 2500), torch.nan, dtype=torch.bfloat16)
            named = {key: value for key, value in inputs.named.items() if key != "out_dtype"}
            found = dense_block_scaled_top_k(*inputs.arguments, **named, top_k=top_k, logits=logits, tactic=tactic)
            values, indices = largest_of_rows(logits, top_k)
            assert torch.equal(found.values, values)
            assert torch.equal(found.indices, indices)
        else:
            logits = dense_block_scaled(*inputs.arguments, **inputs.named, tactic=tactic)
            cut = device.launches[-1].counters.by_class["atomic"] > 0
            assert cut == tactic.endswith("gemm")
        check_within_bound(logits, *dense_reference(inputs))

    return run


def run_router(device: VirtualDevice, seed: int) -> None:
    arguments = make_router_inputs(70, 264, 70, 4, seed, adds=True, norms=True, bias=True)
    check_routed(router_top_k(**arguments), arguments)


def run_decode(q_len: int) -> Callable[[VirtualDevice, int], None]:
    def run(device: VirtualDevice, seed: int) -> None:
        case = make_decode_case([700, 260], 1, seed, q_len=q_len)
        check_decoded(decode_attention(**case.arguments), case)
        assert device.launches[-1].counters.by_class["atomic"] > 0  # sequences are split

    return run


# Within a launch, blocks of the prologue, of a split-K dense kernel, of the searches and of the router hand nothing
# over: there, what is told is whether one of them writes or reads what is another's.
FAMILIES = {
    "prologue": run_prologue,
    "grouped GEMM": run_group_gemm,
    "split-K dense kernel": run_dense("dense_mxfp4_m8_w2"),
    "dense GEMM": run_dense("dense_mxfp4_m32_gemm"),
    "largest of a stream": run_dense("dense_mxfp4_m8_w2", 1),
    "largest of logits": run_dense("dense_mxfp4_m32_gemm", 2),
    "router": run_router,
    "decode": run_decode(1),
    "decode, several tokens": run_decode(5),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_where_writes_come_late(family: str, seed: int) -> None:
    print("seed", seed)
    with virtual_device(watch=ALL_CHECKERS, weak_memory=seed) as device:
        FAMILIES[family](device, seed)
        assert all(launch.clean for launch in device.launches), device.launches


@pytest.mark.parametrize("mode", [Mode.MXFP8_INPUT, Mode.W4A16], ids=["MXFP8", "W4A16"])
def test_sums_over_slots_where_no_unit_is_cut(mode: Mode) -> None:
    """Adding up the parts of a unit orders more than itself: here nothing but the sums orders what they read."""
    inputs = make_moe_inputs(MoECase(6, 160, 96, 4, 2, int(mode)), 6)
    with virtual_device(watch=ALL_CHECKERS, weak_memory=1) as device:
        output = run_moe(device, inputs, int(mode), tactics_of(mode, False))
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))


@pytest.mark.parametrize("mode", [Mode.MXFP8_INPUT, Mode.W4A16], ids=["MXFP8", "W4A16"])
def test_blocks_that_leave_parts_of_two_units(mode: Mode) -> None:
    """One unit began before the block's share, and one goes on after it: each part has a place of its own."""
    inputs = make_moe_inputs(MoECase(6, 384, 1600, 2, 2, int(mode)), 7)
    with virtual_device(watch=ALL_CHECKERS, weak_memory=1) as device:
        output = run_moe(device, inputs, int(mode), tactics_of(mode, False))
        fc1 = next(launch for launch in device.launches if "grouped_gemm_kernel" in launch.kernel)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))
    k_tiles, blocks = 384 // 128, fc1.grid[0]
    length, longer = divmod(2 * (1600 // 64) * k_tiles, blocks)
    cuts = [block * length + min(block, longer) for block in range(blocks + 1)]
    assert any(a % k_tiles and b % k_tiles and a // k_tiles < b // k_tiles for a, b in pairwise(cuts))


@pytest.mark.parametrize(
    ("streamed", "fault"),
    [(True, fault) for fault in FAULTS_OF_FUSED_MOE] + [(False, fault) for fault in FAULTS_OF_PAIR],
    ids=lambda value: value if isinstance(value, str) else ("streamed" if value else "pair"),
)
def test_a_fault_in_how_blocks_synchronize_is_loud(streamed: bool, fault: str) -> None:
    mode = Mode.MXFP8_INPUT
    planted = (FAULTS_OF_FUSED_MOE if streamed else FAULTS_OF_PAIR)[fault]
    inputs = make_moe_inputs(MoECase(**SIZES, mode=int(mode)), 4)
    for seed in SEEDS:
        with virtual_device(weak_memory=seed, planted=planted) as device:
            with pytest.raises(VirtualDeviceError, match=r"race in .*global address .* bytes that block .* wrote"):
                run_moe(device, inputs, int(mode), tactics_of(mode, streamed))
            assert device.planted > 0
            check_kernels(device, streamed)
    with virtual_device(planted=planted) as device:  # nobody sees it otherwise
        run_moe(device, inputs, int(mode), tactics_of(mode, streamed))


def test_more_arrivals_than_blocks_stop_the_layer() -> None:
    """They are another launch's, on the same workspace at the same time. Here every block counts as two."""
    mode = Mode.MXFP8_INPUT
    inputs = make_moe_inputs(MoECase(**SIZES, mode=int(mode)), 5)
    twice = {"], 1;": "], 2;"}  # only atomics add a literal one
    with virtual_device(planted=twice) as device:
        with pytest.raises(VirtualDeviceError, match=r"fused_moe_kernel.*`trap;`"):
            run_moe(device, inputs, int(mode), tactics_of(mode, True))
        assert device.planted > 0
        assert [launch.status for launch in device.launches] == ["ok", "trap"]


@pytest.mark.parametrize("mode", [Mode.MXFP8_INPUT, Mode.W4A16], ids=["MXFP8", "W4A16"])
@KINDS
def test_one_workspace_for_calls_of_all_shapes(streamed: bool, mode: Mode) -> None:
    """Each shape has its counters in another place, where the call before left arbitrary data. ``discard`` makes that
    data random, and a checker reports any read of it.
    """
    tactics = tactics_of(mode, streamed)
    shapes = [(9, 256, 128, 4, 2), (2, 512, 96, 3, 1), (9, 256, 128, 4, 2)]
    with virtual_device() as device:
        workspace = device.empty(1 << 24)
        for discards in (False, True):
            for i, (tokens, hidden, inter, experts, top_k) in enumerate(shapes):
                if discards:
                    device.discard(workspace, seed=i)
                inputs = make_moe_inputs(MoECase(tokens, hidden, inter, experts, top_k, int(mode)), 50 + i)
                output = run_moe(device, inputs, int(mode), tactics, workspace)
                check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{shapes[i]}")
        assert all(launch.clean for launch in device.launches), device.launches
