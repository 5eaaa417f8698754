# SPDX-License-Identifier: Apache-2.0
"""``dense_block_scaled`` on the CPU, and on a GPU that serves the family: results within the bound, arguments, graphs,
compilation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_calls import on

from flashinfer.gemm import sm12x_dense_launch
from flashinfer.gemm.sm12x_dense import dense_block_scaled, dense_mx
from flashinfer.gemm.sm12x_dense_launch import (
    BF16,
    DENSE_INSTANCES,
    MXFP4_SWIZZLED,
    QUANTIZE_BF16,
    QUANTIZE_F16_TO_MXFP4,
    choose,
    instance,
)
from flashinfer.jit.sm12x import modules
from flashinfer.sm12x.device_class import CLASSES, GB10, HOPPER, DeviceClass
from flashinfer.sm12x.instances import Format
from flashinfer.testing import DenseCase, DenseInputs, check_within_bound, dense_reference, make_dense_inputs
from flashinfer.testing.dense_reference import TOKENS, TOKENS_OF, WEIGHTS, dense_inputs_with_not_numbers
from flashinfer_sm12x.doctor.probe.mma import accumulation_on


def moved(device: torch.device, inputs: DenseInputs) -> DenseInputs:
    inputs.arguments = tuple(tensor.to(device) for tensor in inputs.arguments)  # type: ignore[assignment]
    inputs.named = on(device, inputs.named)
    return inputs


def check(device: torch.device, case: DenseCase, seed: int, **named: Any) -> None:
    print("seed", seed)
    inputs = moved(device, make_dense_inputs(case, seed))
    out = torch.full((case.num_tokens, case.n), torch.nan, dtype=case.out_dtype, device=device)
    assert dense_block_scaled(*inputs.arguments, **inputs.named, out=out, **named) is out
    check_within_bound(out, *dense_reference(inputs, accumulation_on(device)), f"{case}, seed {seed}")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_formats(device: torch.device, weights: str, tokens: str) -> None:
    if weights != "mxfp4" and tokens.endswith("to_mxfp4"):
        pytest.skip("tokens are rounded to MXFP4 for MXFP4 weights")
    seed = int(torch.randint(2**31, ()))
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    m, n, words = (int(torch.randint(1, high, (), generator=generator)) for high in (70, 400, 40))
    choice = TOKENS.index(tokens)
    case = DenseCase(
        m,
        n,
        32 * words,
        weights,
        tokens,
        bias=(None, torch.bfloat16, torch.float32)[choice % 3],
        alpha=choice % 2 == 0,
        residual=choice % 3 == 1,
        out_dtype=(torch.bfloat16, torch.float16, torch.float32)[choice % 3],
    )
    check(device, case, seed)


@pytest.mark.parametrize("row", DENSE_INSTANCES, ids=lambda row: row.name)
def test_every_instance(device: torch.device, row: Any) -> None:
    k = min(row.longest_k, 4096) - 32
    n = 3000 if device.type == "cuda" else 200  # the CPU has no tiles
    case = DenseCase(row.block_n * 2 - 1, n, k, row.weights, TOKENS_OF[row.compute_dtype], bias=torch.bfloat16)
    check(device, case, 7, tactic=row.index)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_no_number_stays_in_its_row_or_column(device: torch.device, weights: str, tokens: str) -> None:
    if weights != "mxfp4" and tokens.endswith("to_mxfp4"):
        pytest.skip("tokens are rounded to MXFP4 for MXFP4 weights")
    case = DenseCase(5, 40, 96, weights, tokens, torch.float32, True, True, torch.float32)
    for what, inputs in dense_inputs_with_not_numbers(case, 10):
        expected = dense_reference(inputs, accumulation_on(device))
        moved(device, inputs)
        out = torch.full((5, 40), torch.nan, device=device)
        dense_block_scaled(*inputs.arguments, **inputs.named, out=out)
        check_within_bound(out.cpu(), *expected, what)


def test_dequantized_weights_in_several_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in CLASSES:
        monkeypatch.setitem(vars(known), "cublas_tokens", 1)
        monkeypatch.setitem(vars(known), "cublas_tokens_in_pieces", {})
    for rows in (256, 300, 1):  # of bfloat16; of the CPU's float32 half as many
        monkeypatch.setattr(sm12x_dense_launch, "DEQUANTIZED_BYTES", rows * 160 * 2)
        for weights in WEIGHTS:
            check(device, DenseCase(20, 700, 160, weights, "quantize_bf16", torch.bfloat16, True, True), 8)


@pytest.mark.parametrize("form", ["mxfp4", "mxfp8"])
def test_the_older_name_tells_the_format_by_the_dtype(device: torch.device, form: str) -> None:
    inputs = moved(device, make_dense_inputs(DenseCase(3, 64, 96, form), 14))
    expected = dense_block_scaled(*inputs.arguments, weight_format=form)
    assert torch.equal(dense_mx(*inputs.arguments), expected)
    x, weight, scales = inputs.arguments
    with pytest.raises(
        ValueError, match=r"weight is torch.int8 .* must be torch.uint8 or torch.float8_e4m3fn, or name"
    ):
        dense_mx(x, weight.view(torch.int8), scales)


def test_no_tokens(device: torch.device) -> None:
    inputs = moved(device, make_dense_inputs(DenseCase(1, 64, 64), 9))
    x, *weight = inputs.arguments
    assert dense_mx(x[:0], *weight).shape == (0, 64)
    assert dense_mx(x, weight[0][:0], weight[1][:0]).shape == (1, 0)


def test_what_is_chosen() -> None:
    def name(*sizes: Any) -> str:
        row = choose(*sizes)
        return row.name if row else "cuBLAS"

    assert name("mxfp4", 1, 5120, 2880) == "dense_mxfp4_m8_w2"
    assert name("mxfp4", 8, 2880, 4096) == "dense_mxfp4_m8_w3"
    assert name("mxfp8", 16, 201_088, 2880) == "dense_mxfp8_m16_w2"
    assert name("mxfp4", 16, 2880, 4096) == "dense_mxfp4_m8_w3"  # two passes over what L2 holds
    assert name("mxfp4", 17, 201_088, 2880) == "dense_mxfp4_m32_gemm"
    assert name("mxfp4", 64, 201_088, 2880) == "dense_mxfp4_m64_gemm"
    assert name("mxfp8", 48, 201_088, 2880) == "dense_mxfp8_m48_gemm"
    assert name("mxfp4", 1, 5120, 7168) == "dense_mxfp4_m32_gemm"  # K too long for a stream
    for known in CLASSES:
        assert name("mxfp4", known.cublas_tokens, 5120, 2880, known) == "cuBLAS"
        assert name("mxfp4", known.cublas_tokens - 1, 5120, 2880, known) != "cuBLAS"
    assert set(HOPPER.cublas_tokens_in_pieces) == set(WEIGHTS)
    for weights, tokens in HOPPER.cublas_tokens_in_pieces.items():
        assert name(weights, tokens, 201_088, 2880, HOPPER) == "cuBLAS"
        assert name(weights, tokens - 1, 201_088, 2880, HOPPER) != "cuBLAS"
    assert name("mxfp4", 16, 201_088, 2880, GB10, "mxfp8") == "dense_mxfp4_m16_w2"
    assert name("mxfp8", 64, 5120, 2880, GB10, "mxfp8") == "dense_mxfp8_m64_gemm_mxfp8"
    assert name("mxfp8", 128, 2880, 4096, GB10, "mxfp8") == "dense_mxfp8_m64_gemm_mxfp8"  # 46 tiles
    assert name("mxfp8", 128, 5120, 2880, GB10, "mxfp8") == "dense_mxfp8_m128_gemm_mxfp8"  # 40, not 80
    assert name("mxfp4", 8192, 5120, 2880, GB10, "mxfp8") == "dense_mxfp4_m128_gemm_mxfp8"
    assert name("mxfp4", 16, 201_088, 2880, GB10, "mxfp4") == "dense_mxfp4_m16_w2"
    assert name("mxfp4", 64, 5120, 2880, GB10, "mxfp4") == "dense_mxfp4_m64_gemm_mxfp4"
    assert name("mxfp4", 8192, 5120, 2880, GB10, "mxfp4") == "dense_mxfp4_m128_gemm_mxfp4"


@pytest.mark.parametrize(
    ("operand", "device"), [("bf16", GB10), ("bf16", HOPPER), ("mxfp8", GB10)], ids=["GB10", "Hopper", "MXFP8"]
)
@pytest.mark.parametrize("sms", [24, 48, 70, 132, 188])
def test_small_tiles_are_taken_up_to_a_number_for_each_sm(sms: int, operand: Format, device: DeviceClass) -> None:
    """One tile more, and the tiles of the least cost by tokens are taken."""
    smallest, tokens = (32, 64) if operand == "bf16" else (64, 128)
    last = device.dense_tiles_per_sm * sms // 2  # rows of 128 outputs, each with two of the smallest tiles of tokens
    tiles = [
        choose("mxfp4", tokens, 128 * rows, 2880, device, operand, sms).block_n  # type: ignore[union-attr]
        for rows in (last, last + 1)
    ]
    assert tiles == [smallest, 2 * smallest]


def test_tactics_by_name_and_number() -> None:
    for row in DENSE_INSTANCES:
        taken = TOKENS.index(TOKENS_OF[row.compute_dtype])
        assert instance(row.index, row.weights, 32, taken) is instance(row.name, row.weights, 32, taken) is row
    with pytest.raises(
        ValueError,
        match=r"tactic is 3; for mxfp4 weights with k = 64 and MXFP8 tokens it may be 0 \(dense_mxfp4_m8_w2\)",
    ):
        instance(3, "mxfp4", 64)
    with pytest.raises(ValueError, match=r"tactic is 'dense_mxfp4_m8_w2'; for mxfp4 weights with k = 8192"):
        instance("dense_mxfp4_m8_w2", "mxfp4", 8192)
    with pytest.raises(ValueError, match=r"tactic is 10; .* and bfloat16 tokens it may be (?!.*gemm_mxfp8)"):
        instance(10, "mxfp4", 64, BF16)
    with pytest.raises(ValueError, match=r"tactic is 14; .* and MXFP8 tokens it may be .*gemm_mxfp8(?!.*gemm_mxfp4)"):
        instance(14, "mxfp4", 64)


@pytest.mark.parametrize(
    ("narrow", "expected"),
    [
        ([], ["mxfp8", "mxfp4", "mxfp4", "mxfp8", "bf16"]),
        (["mxf4"], ["mxfp8", "mxfp8", "bf16", "mxfp8", "bf16"]),
        (["mxf8f6f4"], ["bf16", "mxfp4", "mxfp4", "bf16", "bf16"]),
        (["mxf4", "mxf8f6f4"], ["bf16"] * 5),
    ],
    ids=["none", "mxf4", "mxf8f6f4", "both"],
)
def test_sums_in_few_bits_turn_that_block_scaled_mma_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, narrow: list[str], expected: list[str]
) -> None:
    monkeypatch.delenv("FLASHINFER_SM12X_HALF_MMA", raising=False)
    monkeypatch.setattr(modules.jit_env, "FLASHINFER_WORKSPACE_DIR", tmp_path)
    bits = {kind: 19 if kind in narrow else 20 for kind in ("mxf8f6f4", "mxf4")}
    (tmp_path / modules.PROBE_FILE).write_text(json.dumps({"mma_sum_bits": bits}))
    monkeypatch.setattr(sm12x_dense_launch, "_mma_is_used", sm12x_dense_launch._mma_is_used.__wrapped__)  # no cache
    calls = [
        ("mxfp4", QUANTIZE_BF16),
        ("mxfp4", MXFP4_SWIZZLED),
        ("mxfp4", QUANTIZE_F16_TO_MXFP4),
        ("mxfp8", MXFP4_SWIZZLED),
        ("mxfp4", BF16),
    ]
    assert [sm12x_dense_launch.gemm_compute_dtype(*call, GB10) for call in calls] == expected
    # Compute capability 9.0
    assert {sm12x_dense_launch.gemm_compute_dtype(*call, HOPPER) for call in calls} == {"bf16"}
    for variable in ("0", "1"):
        monkeypatch.setenv("FLASHINFER_SM12X_HALF_MMA", variable)
        forced = [sm12x_dense_launch.gemm_compute_dtype(*call, GB10) for call in calls]
        assert forced == (["bf16"] * 5 if variable == "1" else ["mxfp8", "mxfp4", "mxfp4", "mxfp8", "bf16"])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_captured_graph_replays(device: torch.device, tokens: int) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    inputs = moved(device, make_dense_inputs(DenseCase(tokens, 640, 2880, bias=torch.bfloat16), 12))
    eager = dense_mx(*inputs.arguments, inputs.named["bias"], constant_weights=True)
    out = torch.full_like(eager, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense_mx(*inputs.arguments, inputs.named["bias"], out=out, constant_weights=True)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager)


@pytest.mark.gpu
def test_launches_behind_each_other_see_each_others_results(device: torch.device) -> None:
    """Programmatic dependent launches: each layer's tokens are the outputs of the one before."""
    if device.type == "cpu":
        pytest.skip("streams are of CUDA")
    inputs = moved(device, make_dense_inputs(DenseCase(4, 512, 512, "mxfp8"), 13))
    x, weight, scale = inputs.arguments
    step = x
    expected = x
    for _ in range(40):
        step = dense_mx(step, weight, scale, constant_weights=True, alpha=torch.full((1,), 0.02, device=device))
    for _ in range(40):
        expected = dense_mx(expected, weight, scale, alpha=torch.full((1,), 0.02, device=device))
        torch.cuda.synchronize()
    assert torch.equal(step, expected)


def test_an_output_may_be_the_residual_and_nothing_else_that_is_read(device: torch.device) -> None:
    inputs = moved(device, make_dense_inputs(DenseCase(3, 64, 64, residual=True), 14))
    expected = dense_block_scaled(*inputs.arguments, **inputs.named)
    residual = inputs.named["residual"]
    assert dense_block_scaled(*inputs.arguments, **inputs.named, out=residual) is residual
    assert torch.equal(residual, expected)
    x = inputs.arguments[0]
    with pytest.raises(ValueError, match="out overlaps x"):
        dense_mx(*inputs.arguments, out=x)
    memory = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="out overlaps residual"):
        dense_mx(*inputs.arguments, residual=memory[:3], out=memory[1:])


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    x, *others = make_dense_inputs(DenseCase(3, 64, 64), 15).arguments

    def total(rows: torch.Tensor) -> torch.Tensor:
        return dense_mx(rows, *others).float().sum()

    for transformed in (
        lambda: torch.func.vmap(total)(x[None].repeat(2, 1, 1)),
        lambda: torch.func.grad(total)(x),
        lambda: torch.func.jvp(total, (x,), (x,)),
    ):
        with pytest.raises(ValueError, match=r"^x has no memory of its own, as under torch.func's vmap, grad and jvp$"):
            transformed()
