# SPDX-License-Identifier: Apache-2.0
"""Sizes at which something changes its way, one fewer and one more, on the virtual SM121 against the float64 reference.

Nothing lists them: planners are asked where their choice changes, kernels and launchers are searched for what they
compare numbers of tokens and of routed rows with, and the instance tables have tiles and the longest K. Small
layers; what is read or written out of bounds the virtual device reports.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from virtual_devices import virtual_fixture
from virtual_moe import run_moe

from flashinfer._layer import fork_root
from flashinfer.fused_moe.sm12x_planner import plan_moe
from flashinfer.gemm import dense_block_scaled
from flashinfer.gemm.sm12x_dense_launch import choose
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS
from flashinfer.sm12x.device_class import GB10
from flashinfer.sm12x.instances import (
    DENSE_INSTANCES,
    FUSED_MOE_ROUTED_ROWS,
    IN_KERNEL_ROUTED_ROWS,
    INSTANCES,
    MAIN_MODULE,
    MAX_EXPERTS,
    NVFP4,
    Format,
    Instance,
)
from flashinfer.testing import (
    TENSOR_CORE,
    DenseCase,
    MoECase,
    check_within_bound,
    dense_reference,
    make_dense_inputs,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.virtual_device import VirtualDevice

device = virtual_fixture()
MODES = {0: "MXFP8 input", 1: "bf16 input", 2: "W4A16"}
HIDDEN, INTER = 96, 64
ROWS = (*MAIN_MODULE, *NVFP4)
EACH_KIND = list(
    {(row.split_k, row.compute, row.weights): row for row in sorted(ROWS, key=lambda row: -row.block_n)}.values()
)
"""The narrowest of what routes, packs and adds up in ways of its own."""
FORMS: dict[Format, str] = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4": "mxfp4"}
"""The token format of a case, by what a GEMM multiplies."""


def around(sizes: Iterable[int]) -> list[int]:
    """Each, one fewer and one more."""
    return sorted({max(size + change, 1) for size in sizes for change in (-1, 0, 1)})


def changes_of(choice: Callable[[int], Any], sizes: range) -> list[int]:
    """The last sizes before ``choice`` is another one."""
    return [size for size, more in zip(sizes, sizes[1:], strict=False) if choice(size) != choice(more)]


def compared_with() -> set[int]:
    """Numbers that kernels and launchers compare numbers of tokens and pairs with."""
    root = fork_root()
    files = [
        path
        for folder in ("include/flashinfer/sm12x", "csrc")
        for path in (root / folder).rglob("*")
        if path.suffix in (".cuh", ".h", ".cu") and "probe" not in path.parts
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text))
    found = re.findall(r"(?:routed_rows|tokens) (?:<|<=|>|>=) (k\w+|\d+)\b", text)
    return {int(constants.get(number, number)) for number in found} - {0}


def check(device: VirtualDevice, case: MoECase, tactic: int | None, seed: int) -> None:
    if tactic is not None:
        case = dataclasses.replace(case, weights=INSTANCES[tactic].weights)
    inputs = make_moe_inputs(case, seed)
    output = run_moe(device, inputs, case.mode, None if tactic is None else [tactic] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{case}, tactic {tactic}, seed {seed}")
    assert all(launch.clean for launch in device.launches), (case, tactic, device.launches)


def mode_of(row: Instance) -> int:
    return 2 if row.activation == "bf16" else 0


@pytest.mark.parametrize(("mode", "weights"), [*((mode, "mxfp4") for mode in MODES), (2, "nvfp4")])
def test_tokens_at_which_the_planner_changes_a_layers_tactic(device: VirtualDevice, mode: int, weights: str) -> None:
    experts = 2

    def planned(tokens: int) -> tuple[int, int]:
        return plan_moe(tokens, 1, experts, HIDDEN, INTER, mode, weights=weights)

    switches = changes_of(planned, range(1, 600))
    assert len(switches) >= (4 if weights == "mxfp4" else 3), switches
    print("seeds", switches)
    for tokens in around(switches):
        case = MoECase(tokens, HIDDEN, INTER, experts, 1, mode, biases=tokens % 2 == 0, weights=weights)
        check(device, case, None, tokens)


@pytest.mark.parametrize("row", EACH_KIND, ids=lambda row: row.name)
def test_pairs_that_kernels_compare_with_a_number(device: VirtualDevice, row: Instance) -> None:
    """Few experts for the many, so that each has several tiles; many for the few."""
    numbers = compared_with()
    assert {32, IN_KERNEL_ROUTED_ROWS, FUSED_MOE_ROUTED_ROWS} <= numbers, numbers
    for pairs in around(numbers):
        case = MoECase(pairs, HIDDEN, INTER, 5 if pairs > 64 else 40, 1, mode_of(row))
        check(device, case, row.index if row.takes(pairs, HIDDEN, INTER) else None, pairs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_of_an_expert_around_a_tile(device: VirtualDevice, row: Instance) -> None:
    """The rows are around the N tile, two of them, and the eight tokens of an MMA."""
    for rows in around({8, row.block_n, 2 * row.block_n}):
        case = MoECase(rows, HIDDEN, INTER, 2, 1, mode_of(row), routing="one_expert", global_scales=rows % 2 == 0)
        check(device, case, row.index, rows)


@pytest.mark.parametrize("row", EACH_KIND, ids=lambda row: row.name)
def test_experts_around_the_lanes_of_a_warp(device: VirtualDevice, row: Instance) -> None:
    for experts in around({32, 64, MAX_EXPERTS - 1}):
        check(device, MoECase(9, 64, 32, experts, 2, mode_of(row), biases=False), row.index, experts)


def operands(form: str) -> list[Format]:
    """The types in which GEMMs multiply tokens by such weights."""
    return sorted({row.compute_dtype for row in DENSE_INSTANCES if row.weights == form and not row.split_k})


def check_dense(device: VirtualDevice, case: DenseCase, chosen: Instance | None, seed: int) -> None:
    before = len(device.launches)
    inputs = make_dense_inputs(case, seed)
    out = torch.full((case.num_tokens, case.n), torch.nan, dtype=torch.bfloat16)
    dense_block_scaled(*inputs.arguments, **inputs.named, out=out)
    check_within_bound(out, *dense_reference(inputs), f"{case}, seed {seed}")
    launches = device.launches[before:]
    assert all(launch.clean for launch in launches), (case, launches)
    if chosen is not None:
        kernel = "dense_layer_kernel" if chosen.split_k else "grouped_gemm_kernel"
        assert [kernel in launch.kernel for launch in launches].count(True) == 1
        tile = chosen.block_n
        assert any(f"Li{tile}E" in launch.kernel for launch in launches if kernel in launch.kernel), (chosen, launches)


@pytest.mark.parametrize(
    ("form", "operand"), [(form, operand) for form in WEIGHT_FORMATS for operand in operands(form)], ids=str
)
def test_tokens_at_which_a_dense_layer_changes_its_kernel(device: VirtualDevice, form: str, operand: Format) -> None:
    n, k = 136, 96

    def chosen(tokens: int) -> Instance | None:
        return choose(form, tokens, n, k, GB10, operand)

    switches = changes_of(chosen, range(1, 200))
    assert len(switches) >= 2, switches
    print("seeds", switches)
    for tokens in around({*switches, *(2 * row.block_n for row in DENSE_INSTANCES if row.weights == form)}):
        check_dense(device, DenseCase(tokens, n, k, form, FORMS[operand]), chosen(tokens), tokens)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_tokens_at_which_the_weights_are_dequantized(device: VirtualDevice, form: str) -> None:
    """Beyond the switch the CPU computes here, where a GPU would use cuBLAS; below it a GEMM runs many tiles."""
    n, k = 8, 32
    switches = changes_of(lambda m: choose(form, m, n, k) is None, range(1, 5000))
    assert len(switches) == 1
    for tokens in around(switches):
        check_dense(device, DenseCase(tokens, n, k, form, "bf16"), choose(form, tokens, n, k), tokens)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_k_at_which_a_dense_layer_changes_its_kernel(device: VirtualDevice, form: str) -> None:
    """Two warps of words for each K, three, none; by 32 elements."""
    for tokens in (3, 12):

        def chosen(blocks: int, tokens: int = tokens) -> Instance | None:
            return choose(form, tokens, 24, 32 * blocks)

        switches = changes_of(chosen, range(1, 160))
        assert switches
        for blocks in around(switches):
            check_dense(device, DenseCase(tokens, 24, 32 * blocks, form, "bf16"), chosen(blocks), blocks)


@pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)
def test_a_stream_ends_where_its_table_says(row: Instance) -> None:
    """The table tells which sizes an instance takes: by pairs and by K."""
    longest = row.longest_k
    assert row.takes(FUSED_MOE_ROUTED_ROWS, longest, 32)
    assert row.takes(FUSED_MOE_ROUTED_ROWS + 1, 32, 32) == (not row.split_k)
    assert not row.split_k or (not row.takes(1, longest + 32, 32) and not row.takes(1, 32, longest + 32))
