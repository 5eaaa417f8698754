# SPDX-License-Identifier: Apache-2.0
"""Block-scaled MMAs that add up in 13 bits, and MXFP8 in half-precision MMAs, the way that stays right then."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from virtual_group_gemm import launch_group_gemm
from virtual_moe import run_moe

from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.gemm.sm12x_dense import dense_block_scaled
from flashinfer.jit import core
from flashinfer.jit.sm12x import modules
from flashinfer.quantization import mx_cpu
from flashinfer.sm12x.instances import DENSE_INSTANCES, GEMM_INSTANCES, Instance
from flashinfer.testing import (
    SM120_SUM_BITS,
    TENSOR_CORE,
    Accumulation,
    BoundViolation,
    DenseCase,
    DenseInputs,
    MoECase,
    check_within_bound,
    dense_reference,
    group_gemm_reference,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.virtual_device import virtual_device

HOPPER = 13  # fraction bits that its wgmma of FP8 keeps of a sum, by published models
EIGHT_BITS = SM120_SUM_BITS | dict.fromkeys(("f8", "mxf8f6f4", "mxf4"), HOPPER)
NARROW = Accumulation(HOPPER)
EXTREMES = [
    min(GEMM_INSTANCES, key=lambda row: row.block_n),
    max(GEMM_INSTANCES, key=lambda row: row.block_n),
    max(GEMM_INSTANCES, key=lambda row: (row.block_k, row.block_n)),
]
DENSE = [row for row in DENSE_INSTANCES if row.compute_dtype != "bf16" and row.block_n == 64]
CASE = MoECase(num_tokens=12, hidden=2880, inter=96, num_experts=3, top_k=2, mode=int(Mode.MXFP8_INPUT))


def run_group_gemm() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Operands of a long K, of one sign and one scale, whose sums lose most, and a float16 result: it hides less."""
    rows, n, k, seed = [5, 0, 12], 24 * 128, 2048, 91  # units for all SMs: K is not split
    print("seed", seed)
    call = make_group_gemm_inputs(rows, n, k, seed)
    call["a"].view(torch.uint8).bitwise_and_(0x7F)
    call["b"].bitwise_and_(0x77)
    call["a_scale"].fill_(124), call["b_scale"].fill_(124)
    out = torch.full((sum(rows), n), float("nan"), dtype=torch.float16)
    with virtual_device("sm_121a", accumulation_bits=EIGHT_BITS) as device:
        launch_group_gemm(device, call, GEMM_INSTANCES[0].index, out)
    return call, out


def test_a_grouped_gemm_on_the_virtual_sm121() -> None:
    call, out = run_group_gemm()
    used = check_within_bound(out, *group_gemm_reference(**call, accumulation=NARROW))
    print(f"{used:.1%} of the bound")
    with pytest.raises(BoundViolation, match="outside their bound"):
        check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE))


def test_a_pair_of_gemms_on_the_virtual_sm121() -> None:
    case, seed = MoECase(6, 4096, 96, num_experts=3, top_k=2, mode=0), 92
    print("seed", seed)
    inputs = make_moe_inputs(case, seed)
    outputs = []
    for bits in (0, EIGHT_BITS):
        with virtual_device("sm_121a", accumulation_bits=bits) as device:
            outputs.append(run_moe(device, inputs, case.mode, [GEMM_INSTANCES[0].index] * 2))
    exact, narrow = outputs
    check_within_bound(exact, *moe_reference(inputs, TENSOR_CORE))
    used = check_within_bound(narrow, *moe_reference(inputs, NARROW))
    print(
        f"{used:.1%} of the bound; {float((narrow != exact).double().mean()):.1%} of the results differ from exact "
        "sums'"
    )
    assert (narrow != exact).double().mean() > 0.1


def run_dense(row: Instance) -> tuple[torch.Tensor, DenseInputs]:
    """A dense layer's outputs with Hopper's sums for 8-bit MMAs, and its inputs: no negative operands, scales of 1."""
    inputs = make_dense_inputs(
        DenseCase(5, 48 * 128, 2048, row.weights, row.compute_dtype, out_dtype=torch.float32), 93
    )
    tokens, weight, scales = inputs.arguments
    for operand in (tokens, weight):
        operand.view(torch.uint8).bitwise_and_(0x77 if operand.dtype == torch.uint8 else 0x7F)
    scales.fill_(127), inputs.named["x_scale"].fill_(127)
    out = torch.full((5, 48 * 128), torch.nan, dtype=torch.float32)
    with virtual_device("sm_121a", accumulation_bits=EIGHT_BITS) as device:
        dense_block_scaled(*inputs.arguments, **inputs.named, out=out, tactic=row.name)
        assert all(launch.clean for launch in device.launches)
    return out, inputs


@pytest.mark.parametrize("row", DENSE, ids=lambda row: row.name)
def test_a_dense_gemm_on_the_virtual_sm121(row: Instance) -> None:
    out, inputs = run_dense(row)
    used = check_within_bound(out, *dense_reference(inputs, NARROW))
    print(f"{used:.1%} of the bound")
    with pytest.raises(BoundViolation, match="outside their bound"):
        check_within_bound(out, *dense_reference(inputs))


@pytest.fixture
def in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that multiply in half precision, of the instances that the tests run: compiling all takes minutes."""
    monkeypatch.setenv(modules.HALF_MMA_VARIABLE, "1")
    monkeypatch.setattr(modules, "MOE_MODULES", {"mxfp4": EXTREMES})
    monkeypatch.setattr(modules, "GEMM_INSTANCES", GEMM_INSTANCES[:1])
    monkeypatch.setattr(modules, "DENSE_INSTANCES", DENSE)


@pytest.mark.usefixtures("in_half")
@pytest.mark.parametrize("row", EXTREMES, ids=lambda row: row.name)
def test_pairs_of_gemms_keep_the_bound_in_half_whatever_the_fp8_mma_adds_up_in(row: Instance) -> None:
    inputs = make_moe_inputs(CASE, seed=7)
    with virtual_device("sm_121a", accumulation_bits=EIGHT_BITS) as device:
        output = run_moe(device, inputs, CASE.mode, [row.index, row.index])
        assert all(launch.clean for launch in device.launches)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))


@pytest.mark.usefixtures("in_half")
def test_the_grouped_gemm_keeps_the_bound_of_half() -> None:
    call, out = run_group_gemm()
    check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE))


@pytest.mark.usefixtures("in_half")
@pytest.mark.parametrize("row", DENSE, ids=lambda row: row.name)
def test_dense_gemms_keep_the_bound_of_half(row: Instance) -> None:
    out, inputs = run_dense(row)
    check_within_bound(out, *dense_reference(inputs))


def multiply_one(row: Instance, x: float, weight: float, exponent: int, elements: int) -> tuple[float, float]:
    """A token and a row of weights of so many elements ``x`` and ``weight``, scaled by 2^exponent and its inverse."""
    tokens, weights = (torch.zeros(1, 32) for _ in range(2))
    tokens[:, :elements], weights[:, :elements] = x, weight

    def quantized(values: torch.Tensor, form: str) -> torch.Tensor:
        if form == "mxfp8":
            return values.to(torch.float8_e4m3fn)
        if form == "mxfp6":
            return mx_cpu.pack_e2m3(torch.where(values == 0, 0, torch.where(values == 7.5, 31, 1)).to(torch.uint8))
        nibbles = torch.where(values == 0, 0, torch.where(values == 6, 7, 1)).to(torch.uint8)
        return nibbles[:, ::2] | nibbles[:, 1::2] << 4

    scales, x_scales = (torch.full((512,), 127 + e, dtype=torch.uint8) for e in (-exponent, exponent))
    operands = quantized(tokens, row.compute_dtype), quantized(weights, row.weights), scales
    with virtual_device("sm_121a") as device:
        named = {"weight_format": row.weights, "x_scale": x_scales, "out_dtype": torch.float32}
        found = dense_block_scaled(*operands, **named, tactic=row.name)
        assert all(launch.clean for launch in device.launches)
    return float(found), x * weight * elements


@pytest.mark.usefixtures("in_half")
@pytest.mark.parametrize("row", DENSE, ids=lambda row: row.name)
def test_token_scales_that_half_precision_takes(row: Instance) -> None:
    """Those with which any block's sum is a float32 (docs/kernels.md), and that one more step in the exponent is too
    much."""
    largest = {"mxfp4": 6.0, "mxfp6": 7.5, "mxfp8": 448.0}
    smallest = {"mxfp4": 0.5, "mxfp6": 0.125, "mxfp8": 2.0**-9}
    lowest, highest = {
        ("mxfp8", "mxfp4"): (-125, 125),
        ("mxfp8", "mxfp6"): (-123, 125),
        ("mxfp8", "mxfp8"): (-127, 105),
        ("mxfp4", "mxfp4"): (-119, 127),
    }[row.compute_dtype, row.weights]
    found, exact = multiply_one(row, largest[row.compute_dtype], largest[row.weights], highest, 32)
    assert found == exact
    if highest < 127:
        assert multiply_one(row, largest[row.compute_dtype], largest[row.weights], highest + 1, 32)[0] == torch.inf
    found, exact = multiply_one(row, smallest[row.compute_dtype], smallest[row.weights], lowest, 1)
    assert found == exact
    if lowest > -127:
        assert multiply_one(row, smallest[row.compute_dtype], smallest[row.weights], lowest - 1, 1)[0] != exact


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(modules.HALF_MMA_VARIABLE, raising=False)
    monkeypatch.setattr(modules.jit_env, "FLASHINFER_WORKSPACE_DIR", tmp_path)
    monkeypatch.setattr(modules.jit_env, "FLASHINFER_GEN_SRC_DIR", tmp_path / "generated")
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(12, "1a")})
    return tmp_path


def test_a_probe_of_the_gpu_chooses_and_the_switch_overrules_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "-DFLASHINFER_SM12X_HALF_MXF8F6F4=1"
    assert modules.gen_fused_moe_module().name == "fused_moe_120"
    for bits, half in ((25, False), (22, False), (21, False), (20, False), (19, True), (13, True)):
        (workspace / modules.PROBE_FILE).write_text(json.dumps({"mma_sum_bits": {"mxf8f6f4": bits}}))
        for spec in (modules.gen_fused_moe_module(), modules.gen_group_gemm_module()):
            assert spec.name.endswith("_half_mxf8f6f4") == half == (flag in spec.extra_cuda_cflags)
    for value, half in (("0", False), ("1", True)):
        monkeypatch.setenv(modules.HALF_MMA_VARIABLE, value)
        assert modules.computes_in_fp16() == half
    monkeypatch.setenv(modules.HALF_MMA_VARIABLE, "yes")
    with pytest.raises(ValueError, match="FLASHINFER_SM12X_HALF_MMA is 'yes'; it may be 0, 1 or unset"):
        modules.gen_fused_moe_module()


@pytest.mark.parametrize("narrow", ["mxf8f6f4", "mxf4"])
def test_only_the_kind_that_is_narrow_is_multiplied_in_half(
    narrow: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = {kind: HOPPER if kind == narrow else 20 for kind in ("mxf8f6f4", "mxf4")}
    (workspace / modules.PROBE_FILE).write_text(json.dumps({"mma_sum_bits": bits}))
    operands = {row.name: row.compute_dtype for row in DENSE if row.weights == "mxfp4"}
    assert set(operands.values()) == {"mxfp8", "mxfp4"}
    steps = {step.source.stem: step for step in modules.gen_dense_module("mxfp4").plan.steps}
    for name, operand in operands.items():
        compiler, flags = steps[name].compiler, [flag for flag in steps[name].flags if not flag.startswith("-gencode")]
        ptx = workspace / f"{name}.ptx"
        command = [compiler, *flags, "-arch=compute_121a", "-ptx", str(steps[name].source), "-o", str(ptx)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kinds = set(re.findall(r"kind::(\w+)", ptx.read_text()))
        kind = {"mxfp8": "mxf8f6f4", "mxfp4": "mxf4"}[operand]
        assert kinds == (set() if kind == narrow else {kind}), (name, kinds)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"mma_sum_bits": 13}', '{"mma_sum_bits": []}', '{"mma_sum_bits": {"mxf8f6f4": 0}}']
)
def test_a_probes_file_that_is_none_is_named(text: str, workspace: Path) -> None:
    (workspace / modules.PROBE_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{modules.PROBE_FILE}.*[Rr]emove it, or probe again"):
        modules.computes_in_fp16()
