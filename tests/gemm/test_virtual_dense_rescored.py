# SPDX-License-Identifier: Apache-2.0
"""Rescored LM heads, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rescored_cases import UNUSUAL, Head, make_head, unusual_head
from virtual_devices import ALL_CHECKERS, virtual_fixture

from flashinfer.gemm import dense_block_scaled, dense_block_scaled_rescored, dense_block_scaled_rescored_top_k
from flashinfer.gemm.sm12x_dense_launch import BF16
from flashinfer.gemm.sm12x_dense_rescored import rescores
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x.instances import DENSE_INSTANCES
from flashinfer.testing import check_within_bound
from flashinfer.testing.rescored_reference import rescored_reference, rescored_rows
from flashinfer.testing.row_top_k_reference import largest_of_rows
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

DENSE = {row.name: row.index for row in DENSE_INSTANCES}

device = virtual_fixture(watch=ALL_CHECKERS)


def launched(device: VirtualDevice) -> list[str]:
    assert all(launch.clean for launch in device.launches), device.launches
    kernels = "dense_layer_kernel", "grouped_gemm_kernel", "rescore_kernel", "chunk_top_k_kernel", "row_top_k_kernel"
    return [name for launch in device.launches for name in kernels if name in launch.kernel]


def check(head: Head, groups: int, rescored: int, **named: Any) -> None:
    """The rows that must be rescored keep the bound of their fine rows' sums, all others are the coarse layer's; the
    largest are those of these logits."""
    print(head, groups, rescored, named)
    coarse = dense_block_scaled(head.x, *head.coarse, head.bias, **head.named, **named)
    out = torch.full_like(coarse, torch.nan)
    assert rescores(*out.shape, head.named["weight_format"], head.fine_format, groups, rescored)
    arguments = head.x, *head.coarse, *head.fine, head.bias
    chosen = {"groups": groups, "rescored": rescored, "fine_format": head.fine_format}
    returned = dense_block_scaled_rescored(*arguments, **head.named, **chosen, **named, out=out)
    assert returned is out
    reference = rescored_reference(coarse, head.x, head.operand(), head.bias, groups, rescored)
    used = check_within_bound(out, *reference, str(head))
    print(f"{used:.1%} of the bound")
    for top_k in (1, 8):
        logits = torch.full_like(coarse, torch.nan)
        top = {"top_k": top_k, "first_index": 10 * top_k}
        found = dense_block_scaled_rescored_top_k(*arguments, **head.named, **chosen, **named, **top, logits=logits)
        assert torch.equal(logits, out)
        values, indices = largest_of_rows(out, top_k)
        assert torch.equal(found.values, values)
        assert torch.equal(found.indices, indices + 10 * top_k)


# Rows of the last tile that are there; groups of one tile, with fewer rows than are rescored, or than are the largest;
# more groups than tiles; one group; K of one scale block, of three in flight by each lane and one more, and one that
# leaves lanes without any.
@pytest.mark.parametrize(
    ("m", "n", "k", "groups", "rescored"),
    [
        (1, 700, 32, 5, 16),
        (3, 16 * 70 + 1, 96, 24, 7),
        (2, 1100, 3104, 11, 16),
        (8, 2000, 128, 3, 16),
        (1, 6144, 64, 1, 16),
        (1, 40, 160, 2, 13),
        (1, 9, 64, 48, 3),
        (1, 17, 64, 2, 3),
        (19, 4000, 96, 6, 16),
        (40, 4000, 96, 4, 11),
    ],
)
def test_sizes(device: VirtualDevice, m: int, n: int, k: int, groups: int, rescored: int) -> None:
    check(make_head(m, n, k, seed=m + n), groups, rescored)
    layer = "dense_layer_kernel" if m < 33 else "grouped_gemm_kernel"
    with_top_k = [layer, "rescore_kernel", "row_top_k_kernel"]
    assert launched(device) == [layer, layer, "rescore_kernel", *with_top_k, *with_top_k]


@pytest.mark.parametrize("fine", [pytest.param("bf16", id="bf16 rows"), pytest.param("mxint8", id="8-bit rows")])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_formats(device: VirtualDevice, weights: str, out_dtype: torch.dtype, fine: str) -> None:
    """With alpha, of the coarse product alone, and a bias of both."""
    bias = {torch.bfloat16: torch.float32, torch.float16: torch.bfloat16, torch.float32: torch.float16}[out_dtype]
    head = make_head(4, 2048, 288, 7, weights, fine, bias, out_dtype)
    check(head, 12, 9)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_ties_and_what_is_no_number(device: VirtualDevice, kind: str, out_dtype: torch.dtype) -> None:
    head, coarse = unusual_head(kind, 3, 3000, out_dtype)
    out = torch.full((3, 3000), 9.0, dtype=out_dtype)
    arguments = head.x, *head.coarse, *head.fine, head.bias
    dense_block_scaled_rescored(*arguments, **head.named, groups=4, rescored=16, out=out)
    chosen = rescored_rows(coarse, 4, 16)
    expected = torch.where(chosen, head.expected_fine(), coarse)
    assert torch.equal(out.nan_to_num(9e9), expected.nan_to_num(9e9))
    found = dense_block_scaled_rescored_top_k(*arguments, **head.named, groups=4, rescored=16, top_k=8)
    values, indices = largest_of_rows(expected, 8)
    assert torch.equal(found.indices, indices)
    assert torch.equal(found.values.nan_to_num(9e9), values.nan_to_num(9e9))


@pytest.mark.parametrize("order", ["falling", "one thread", "one warp", "one of a subset", "rising"])
def test_where_the_largest_lie(device: VirtualDevice, order: str) -> None:
    """All of a group's largest in one thread's share, in one warp's, one in each subset, at its beginning or its
    end."""
    n, groups, threads = 12 * 512 * 2, 2, 512
    at = torch.arange(n // groups)
    key = {
        "falling": -at,
        "rising": at,
        "one thread": torch.where(at % threads == 77, 5000 + at, -at),
        "one of a subset": torch.where((at < threads) & (at % 32 < 4), 9000 - at, -at),
        "one warp": torch.where(at % threads // 32 == 3, 5000 + at, -at),
    }[order]
    rank = key.argsort().argsort().float()  # of a group's rows; as float32 they differ
    bias = torch.empty(n)
    for group in range(groups):
        bias[(at // 16 * groups + group) * 16 + at % 16] = rank - (n // groups) / 2 + group
    head = make_head(2, n, 64, 3, out_dtype=torch.float32)._replace(bias=bias)
    head.coarse[0].zero_()  # the bias is the logit
    check(head, groups, 16)


def test_weak_memory() -> None:
    for seed in (1, 2):
        with virtual_device("sm_121a", watch=ALL_CHECKERS, weak_memory=seed) as device:
            check(make_head(3, 2000, 96, seed), 8, 10)
            assert all(launch.clean for launch in device.launches)


def test_the_fine_weight_alone_where_it_has_fewer_bytes(device: VirtualDevice) -> None:
    head = make_head(9, 1000, 64, 5)
    assert not rescores(9, 1000, "mxfp4", "bf16", 10, 16)
    out = dense_block_scaled_rescored(head.x, *head.coarse, *head.fine, head.bias, **head.named, groups=10)
    assert launched(device) == []
    exact = head.x.double() @ head.fine[0].double().T
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)


def test_a_rescoring_after_another(device: VirtualDevice) -> None:
    """Programmatic dependent launches into the same logits, each after its layer."""
    heads = [make_head(2, 1500, 96, seed) for seed in (1, 2)]
    module = device.module(gen_dense_module, "mxfp4")
    outs = [torch.full((2, 1500), torch.nan, dtype=torch.bfloat16) for _ in heads]

    def launch(*_tensors: torch.Tensor) -> None:
        for head, out in zip(heads, outs, strict=True):
            layer = out, head.x, None, *head.coarse, head.named["alpha"], None, None, None
            module.sm12x_dense_run(*layer, BF16, DENSE["dense_mxfp4_m8_w2"], None, True, True)
            module.sm12x_rescore_run(out, head.x, *head.fine, None, 6, 16, None, None, 0, None, True)

    reads = [tensor for head in heads for tensor in (head.x, *head.coarse, head.named["alpha"], head.fine[0])]
    device.call(launch, *reads, *outs, writes=outs)
    assert launched(device) == ["dense_layer_kernel", "rescore_kernel"] * 2
    assert all(each.programmatic for each in device.launches[1:])
    for head, out in zip(heads, outs, strict=True):
        arguments = head.x, *head.coarse, *head.fine
        assert torch.equal(out, dense_block_scaled_rescored(*arguments, **head.named, groups=6))
