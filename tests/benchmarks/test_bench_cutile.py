# SPDX-License-Identifier: Apache-2.0
"""The driver of upstream's cuTile kernels, with its own preparation of weights and kernels that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import test_bench_marlin
import torch
from peers import cutile

from flashinfer.sm12x.models import MoELayer
from flashinfer.sm12x.probe.timing import Sample
from flashinfer.testing import moe_layers

EXPERTS, TOP_K = 8, 3
Tactic = tuple[int, int, int]


def matrix(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values ``[N, K]`` of one expert, its scales ``[N / 128, K / 128, 32, 16]`` found one by one."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((weights & 15, weights >> 4), dim=2).flatten(1).long()
    n, group = torch.meshgrid(torch.arange(len(codes)), torch.arange(codes.shape[1] // 32), indexing="ij")
    bits = scales.view(torch.uint8)[n // 128, group // 4, n % 32, n % 128 // 32 * 4 + group % 4]
    factors = torch.exp2(bits.double() - 127).repeat_interleave(32, dim=1)
    return values[codes & 7] * torch.where(codes >= 8, -1.0, 1.0) * factors


class TorchKernels:
    """What upstream's module does, in torch, as its names and its own calls of them say."""

    def __init__(self) -> None:
        self.tactics: list[Tactic] = []

    def GemmConfig(self, *tactic: int) -> tuple[int, ...]:
        return tactic

    def allocate_workspace(
        self, *, num_tokens: int, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, is_gated: bool,
        block_sizes: tuple[int, ...], activation_fp4: bool, scale_block_size: int, scale_dtype: torch.dtype,
        device: torch.device,
    ) -> SimpleNamespace:  # fmt: skip
        assert (num_experts, top_k, is_gated, activation_fp4) == (EXPERTS, TOP_K, True, False)
        assert (scale_block_size, scale_dtype) == (32, torch.float8_e8m0fnu)
        rows = num_tokens * top_k

        def buffer(columns: int) -> torch.Tensor:
            return torch.full((rows + 5, columns), torch.nan, dtype=torch.bfloat16, device=device)

        return SimpleNamespace(
            gemm1_out=buffer(2 * intermediate_size), activation_out=buffer(intermediate_size), gemm2_out=buffer(hidden_size),
            block_sizes=block_sizes,
        )  # fmt: skip

    def _permute(self, ids: torch.Tensor, experts: int, block: int, workspace: SimpleNamespace) -> tuple[Any, ...]:
        assert block in workspace.block_sizes
        slots, owners = [], []
        for expert in range(experts):
            rows = (ids.flatten() == expert).nonzero().flatten()
            blocks = -(-len(rows) // block)
            slots.append(torch.nn.functional.pad(rows, (0, blocks * block - len(rows)), value=ids.numel()))
            owners += blocks * [expert]
        return torch.cat(slots), torch.tensor(owners), torch.tensor(len(owners) * block)

    def _grouped_gemm_w4a16_launch(
        self, x: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, of_experts: torch.Tensor, slots: torch.Tensor,
        owners: torch.Tensor, used: torch.Tensor, y: torch.Tensor, *, top_k: int, block_size: int, config: Tactic,
        scale_block_size: int,
    ) -> None:  # fmt: skip
        assert (of_experts == 1).all()
        assert scale_block_size == 32
        self.tactics.append(config)
        y.fill_(torch.nan)
        for block, expert in enumerate(owners.tolist()):
            rows = slots[block * block_size : (block + 1) * block_size]
            rows = rows[rows < len(y)]
            y[rows] = (x[rows // top_k].double() @ matrix(weights[expert], scales[expert]).T).to(y.dtype)


def swiglu(
    hidden: torch.Tensor, activated: torch.Tensor, alpha: float, limit: float, bias: torch.Tensor, owners: torch.Tensor
) -> None:
    test_bench_marlin.swiglu(hidden.float() + bias.float()[owners.long()], activated, alpha, limit)


def weighted_sum(
    parts: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor
) -> None:
    with_bias = parts.float() + bias.float()[ids.long()]
    output.copy_((with_bias * weights.unsqueeze(2)).sum(dim=1))


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_driver_computes_the_layer_with_the_fastest_tactics(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moe_layers.MODELS, "tiny", MoELayer(160, 96, EXPERTS, TOP_K))
    batch = moe_layers.route(moe_layers.make_layer("tiny", tokens, tokens, "cpu"), tokens, tokens)
    kernels, fast = TorchKernels(), (cutile.CONFIGS[3], cutile.CONFIGS[1])

    def given_clock(run: Callable[[], Any], repeats: int) -> Sample:
        run()
        times = [9.0 - (tactic == best) for tactic, best in zip(kernels.tactics[-2:], fast, strict=True)]
        return Sample(sum(times), 0.0, 0.0)

    monkeypatch.setattr(cutile, "time_graph", given_clock)
    call = cutile._Layer(kernels, swiglu, weighted_sum, batch.inputs).bind(batch)
    test_bench_marlin.assert_computes(call, batch.inputs)
    assert tuple(kernels.tactics[-2:]) == fast


@pytest.mark.parametrize(
    ("rows", "block"), [(1, 16), (1024, 16), (1025, 32), (4096, 32), (4097, 64), (8193, 32), (16384, 32), (32768, 64)]
)
def test_rows_of_a_block_are_upstreams(rows: int, block: int) -> None:
    assert cutile.row_block(rows, 128) == block
