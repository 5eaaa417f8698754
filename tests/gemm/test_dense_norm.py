# SPDX-License-Identifier: Apache-2.0
"""``rmsnorm_dense_block_scaled`` and ``next_weights`` on the CPU, and on a GPU that serves the family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_calls import on

from flashinfer.fused_moe import cutlass_fused_moe, moe_step
from flashinfer.gemm import dense_block_scaled, rmsnorm_dense_block_scaled
from flashinfer.gemm.sm12x_dense_norm import most_tokens
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS
from flashinfer.testing import (
    ANY_ORDER,
    DenseCase,
    MoECase,
    check_within_bound,
    make_dense_inputs,
    make_moe_inputs,
    make_norm_inputs,
    normed_dense_reference,
)
from flashinfer_sm12x.doctor.probe.mma import accumulation_on


def random_call(device: torch.device, case: DenseCase, seed: int, adds: bool = True) -> tuple[Any, dict[str, Any]]:
    """The reference's inputs, and the arguments of a call."""
    print("seed", seed, case, "adds" if adds else "")
    inputs = make_dense_inputs(case, seed)
    norm = make_norm_inputs(inputs, seed, adds)
    names = "x", "weight", "weight_scale"
    arguments = dict(zip(names, inputs.arguments, strict=True)) | inputs.named | norm
    return (inputs, norm), on(device, arguments)


# One launch, a stream behind a norm of its own, a GEMM; on Hopper 300 tokens are cuBLAS's.
@pytest.mark.parametrize("m", [1, 8, 9, 17, 60, 300])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
def test_random_shapes(device: torch.device, weights: str, m: int, adds: bool) -> None:
    seed = int(torch.randint(2**31, ()))
    k = 32 * (1 + seed % 96)
    case = DenseCase(m, 1 + seed % 700, k, weights, bias=torch.bfloat16 if seed % 2 else None, alpha=weights == "nvfp4")
    reference, arguments = random_call(device, case, seed, adds)
    out, total = rmsnorm_dense_block_scaled(**arguments)
    if adds:
        assert torch.equal(total, (arguments["x"].float() + arguments["residual"].float()).bfloat16())
    else:
        assert total is arguments["x"]
    one_launch = device.type == "cuda" and m <= most_tokens(weights, k)
    accumulation = ANY_ORDER if device.type == "cpu" else accumulation_on(device)
    bound = normed_dense_reference(*reference, total.cpu(), factor_last=one_launch, accumulation=accumulation)
    used = check_within_bound(out.cpu(), *bound, f"{case}, seed {seed}")
    print(f"{used:.1%} of the bound")
    again = rmsnorm_dense_block_scaled(**arguments)
    assert torch.equal(again.output, out)


def test_no_tokens_and_no_outputs(device: torch.device) -> None:
    _, arguments = random_call(device, DenseCase(3, 16, 64), 1)
    none = rmsnorm_dense_block_scaled(**arguments | {"x": arguments["x"][:0], "residual": arguments["residual"][:0]})
    assert (none.output.shape, none.residual.shape) == ((0, 16), (0, 64))
    empty = rmsnorm_dense_block_scaled(
        **arguments | {"weight": arguments["weight"][:0], "weight_scale": arguments["weight_scale"][:0]}
    )
    assert empty.output.shape == (3, 0)
    assert torch.equal(empty.residual, (arguments["x"].float() + arguments["residual"].float()).bfloat16())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x.half(), "x is .*float16.*must be bfloat16"),
        ("norm_weight", lambda w: w[:-1], "norm_weight is .*it must be a contiguous tensor"),
        ("norm_weight", lambda w: w.float(), "norm_weight is .*float32"),
        ("residual", lambda r: r[:1], "residual is .*it must be a contiguous tensor"),
        ("residual", lambda r: r.float(), "residual is .*float32"),
        ("eps", lambda _: -1.0, "eps is -1.0"),
        ("eps", lambda _: float("nan"), "eps is nan"),
        ("next_weights", lambda _: torch.zeros(64, 2).T, "next_weights is .*it must be a contiguous tensor"),
        ("next_weights", lambda _: torch.zeros(65)[1:], "next_weights starts at"),
        ("next_weights", lambda _: torch.zeros(4, device="meta"), "next_weights is .*meta"),
        ("tactic", lambda _: "dense_mxfp4_m8_w9", "tactic is 'dense_mxfp4_m8_w9'"),
        ("weight_format", lambda _: "fp5", "weight_format is 'fp5'"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_arguments(name: str, change: Any, message: str) -> None:
    _, arguments = random_call(torch.device("cpu"), DenseCase(3, 16, 64), 2)
    with pytest.raises(ValueError, match=message):
        rmsnorm_dense_block_scaled(**arguments | {name: change(arguments.get(name))})


@pytest.mark.parametrize("value", [3, "weight"])
def test_next_weights_is_a_tensor(value: Any) -> None:
    _, arguments = random_call(torch.device("cpu"), DenseCase(3, 16, 64), 3)
    with pytest.raises(TypeError, match="next_weights"):
        rmsnorm_dense_block_scaled(**arguments, next_weights=value)


@pytest.mark.parametrize("adds", [False, True])
def test_it_compiles(device: torch.device, adds: bool) -> None:
    _, arguments = random_call(device, DenseCase(5, 72, 320), 4, adds)
    plain = rmsnorm_dense_block_scaled(**arguments)
    compiled = torch.compile(lambda: rmsnorm_dense_block_scaled(**arguments), fullgraph=True)()
    assert torch.equal(compiled.output, plain.output)
    assert torch.equal(compiled.residual, plain.residual)


@pytest.mark.parametrize("m", [1, 16, 40])
def test_a_graph_holds_it(device: torch.device, m: int) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    _, arguments = random_call(device, DenseCase(m, 5120, 2880, bias=torch.bfloat16), 5)
    plain = rmsnorm_dense_block_scaled(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rmsnorm_dense_block_scaled(**arguments, next_weights=arguments["weight"], constant_weights=True)
    captured.output.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured.output, plain.output)
    assert torch.equal(captured.residual, plain.residual)


@pytest.mark.parametrize("bytes_ahead", [0, 8, 48, 1 << 20, 100 << 20])
def test_what_is_read_ahead_changes_nothing(device: torch.device, bytes_ahead: int) -> None:
    """A stream, a GEMM, experts; more than L2 holds, and less than an address is a multiple of."""
    if device.type == "cpu":
        bytes_ahead = min(bytes_ahead, 1 << 20)
    following = torch.zeros(bytes_ahead, dtype=torch.uint8, device=device)
    for m in (1, 40):
        inputs = make_dense_inputs(DenseCase(m, 600, 320), 6)
        arguments = [tensor.to(device) for tensor in inputs.arguments]
        plain = dense_block_scaled(*arguments, **inputs.named)
        assert torch.equal(dense_block_scaled(*arguments, **inputs.named, next_weights=following), plain)
    for case in (MoECase(3, 64, 96, 8, 2, mode=2), MoECase(3, 64, 96, 8, 2, mode=1)):
        call = on(device, make_moe_inputs(case, 7).arguments())
        assert torch.equal(moe_step(next_weights=following, **call), cutlass_fused_moe(**call))
