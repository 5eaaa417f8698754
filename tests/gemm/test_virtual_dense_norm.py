# SPDX-License-Identifier: Apache-2.0
"""Dense layers behind an RMSNorm, and what they read ahead, as compiled for ``sm_121a``, on the virtual SM121 with its
checkers on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual_devices import ALL_CHECKERS, virtual_fixture

from flashinfer.gemm import dense_block_scaled, rmsnorm_dense_block_scaled
from flashinfer.gemm.sm12x_dense_norm import norms
from flashinfer.sm12x.instances import DENSE_INSTANCES, Instance
from flashinfer.testing import (
    DenseCase,
    check_within_bound,
    make_dense_inputs,
    make_norm_inputs,
    normed_dense_reference,
)
from flashinfer.testing.virtual_device import VirtualDevice

SMS, L2_BYTES = 48, 24 << 20
STREAMS = [row for row in DENSE_INSTANCES if norms(row)]

device = virtual_fixture(watch=ALL_CHECKERS)


def check(
    device: VirtualDevice, case: DenseCase, seed: int, adds: bool = True, eps: float = 1e-5, **named: Any
) -> None:
    """Assert that the sum is exact, that the layer keeps its bound in one launch, and that no checker reports."""
    print("seed", seed, case, adds, eps, named)
    inputs = make_dense_inputs(case, seed)
    norm = make_norm_inputs(inputs, seed, adds, eps)
    x, *weights = inputs.arguments
    before = len(device.launches)
    out, total = rmsnorm_dense_block_scaled(x, norm["norm_weight"], *weights, **inputs.named, **{
        name: value for name, value in norm.items() if name != "norm_weight"
    }, **named)  # fmt: skip
    if adds:
        assert torch.equal(total, (x.float() + norm["residual"].float()).bfloat16())
    else:
        assert total is x
    used = check_within_bound(
        out, *normed_dense_reference(inputs, norm, total, factor_last=True), f"{case}, seed {seed}"
    )
    print(f"{used:.1%} of the bound")
    assert [launch.kernel.count("dense_layer_kernel") for launch in device.launches[before:]] == [1]
    assert all(launch.clean for launch in device.launches), device.launches


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: row.name)
def test_an_instance(device: VirtualDevice, row: Instance) -> None:
    """K is three blocks shorter than the most that the warps share; tokens fill the tile, or leave one row free."""
    k = row.longest_k - 96
    check(
        device,
        DenseCase(row.block_n, 16 * SMS + 40, k, row.weights, bias=torch.bfloat16, alpha=True),
        1,
        tactic=row.name,
    )
    check(device, DenseCase(row.block_n - 1, 72, k, row.weights), 2, adds=False, tactic=row.name)


# One group of warps and several, slices of a unit, one scale block, parts of a K block; one token and some.
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 5120, 2880), (1, 40, 32), (3, 300, 160), (5, 64, 2048), (8, 130, 416)], ids=str
)
@pytest.mark.parametrize("weights", ["mxfp4", "mxfp8", "mxfp6", "mxint8", "nvfp4"])
def test_shapes(device: VirtualDevice, weights: str, m: int, n: int, k: int) -> None:
    check(
        device, DenseCase(m, n, k, weights, bias=torch.bfloat16, alpha=weights == "nvfp4"), m + n, constant_weights=True
    )


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0, 1e6])
def test_epsilon_and_types_of_outputs(device: VirtualDevice, eps: float, out_dtype: torch.dtype) -> None:
    check(device, DenseCase(7, 72, 320, out_dtype=out_dtype, bias=torch.float32), 3, eps=eps)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("operand", ["x", "residual", "norm_weight"])
def test_what_is_no_number_stays_in_its_row(device: VirtualDevice, operand: str, value: float) -> None:
    case = DenseCase(6, 72, 320)
    inputs = make_dense_inputs(case, 4)
    norm = make_norm_inputs(inputs, 4)
    x, *weights = inputs.arguments
    arguments = {"x": x, **norm}

    def run(changed: dict[str, Any]) -> Any:
        return rmsnorm_dense_block_scaled(changed["x"], changed["norm_weight"], *weights, weight_format="mxfp4",
            residual=changed["residual"], eps=changed["eps"])  # fmt: skip

    before = run(arguments)
    broken = arguments[operand].clone()
    broken[(2, 33) if broken.ndim == 2 else (33,)] = value
    after = run({**arguments, operand: broken})
    rows = torch.arange(6) != 2
    if operand == "norm_weight":
        assert not torch.isfinite(after.output).any(0).all()
    else:
        assert torch.equal(after.output[rows], before.output[rows])
        assert torch.equal(after.residual[rows], before.residual[rows])
        assert torch.isnan(after.output[2]).all()


@pytest.mark.parametrize(("m", "kernel"), [(9, "dense_layer_kernel"), (40, "grouped_gemm_kernel")])
def test_more_tokens_are_normed_in_front(device: VirtualDevice, m: int, kernel: str) -> None:
    case = DenseCase(m, 72, 320, bias=torch.bfloat16)
    inputs = make_dense_inputs(case, 5)
    norm = make_norm_inputs(inputs, 5)
    x, *weights = inputs.arguments
    out, total = rmsnorm_dense_block_scaled(x, norm["norm_weight"], *weights, **inputs.named, residual=norm["residual"])
    check_within_bound(out, *normed_dense_reference(inputs, norm, total, factor_last=False))
    assert kernel in device.launches[-1].kernel


# A few bytes, as many as there are epilogue warps' shares, and no multiple of 16; more than a twelfth of L2.
@pytest.mark.parametrize("bytes_ahead", [0, 8, 16, 4096 + 24, 7 << 20])
@pytest.mark.parametrize(("m", "n"), [(1, 5120), (3, 40), (16, 16 * SMS * 6)])
def test_what_is_read_ahead(device: VirtualDevice, m: int, n: int, bytes_ahead: int) -> None:
    """It changes no bit, and asks for each byte once: of a beginning that L2 has room for, rounded down to 16."""
    inputs = make_dense_inputs(DenseCase(m, n, 160), 6)
    plain = dense_block_scaled(*inputs.arguments, **inputs.named)
    following = torch.zeros(bytes_ahead, dtype=torch.uint8)
    out = dense_block_scaled(*inputs.arguments, **inputs.named, next_weights=following)
    assert torch.equal(out, plain)
    launch = device.launches[-1]
    assert launch.counters.prefetched_bytes == min(bytes_ahead, L2_BYTES // 12) // 16 * 16
