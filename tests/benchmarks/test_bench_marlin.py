# SPDX-License-Identifier: Apache-2.0
"""Marlin's driver, on operators in torch that find weights, scales and biases as the kernel's lanes do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peers import TOLERANCE, marlin
from timing import relative_error

from flashinfer.sm12x.models import MoELayer
from flashinfer.testing import MoEInputs, moe_layers, moe_reference


def marlin_weights(words: torch.Tensor, scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Values ``[K, N]`` of one expert's weights in Marlin's order, found lane by lane."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    lanes = words.view(k // 16, n // 64, 32, 4).long() & 0xFFFFFFFF
    tile_k, tile_n, lane, group = torch.meshgrid(*map(torch.arange, lanes.shape), indexing="ij")
    matrix = torch.empty(k, n, dtype=torch.float64)
    for position, (down, right) in enumerate((o + 8 * b, 8 * r) for o in (0, 1) for r in (0, 1) for b in (0, 1)):
        code = lanes >> (4 * position) & 15
        at = (16 * tile_k + 2 * (lane % 4) + down, 64 * tile_n + 16 * group + right + lane // 4)
        matrix[at] = values[code & 7] * torch.where(code >= 8, -1.0, 1.0)
    column = torch.arange(n)
    within = column % 64
    within = within - within % 4 + torch.tensor([0, 2, 1, 3])[within % 4]
    linear = torch.empty(k // 32, n, dtype=torch.float64)
    linear[:, column // 64 * 64 + 8 * (within % 8) + within // 8] = torch.exp2(scales.double() - 127)
    return matrix * linear.repeat_interleave(32, dim=0)


class TorchOperators:
    """What vLLM's operators do, in torch, as their names and its calls of them say."""

    def moe_align_block_size(
        self, ids: torch.Tensor, experts: int, block: int, order: torch.Tensor, owners: torch.Tensor,
        used: torch.Tensor, expert_map: None, scatter: None,
    ) -> None:  # fmt: skip
        order.fill_(ids.numel())
        owners.fill_(-7)
        position = 0
        for expert in range(experts):
            rows = (ids.flatten() == expert).nonzero().flatten()
            order[position : position + len(rows)] = rows.int()
            blocks = -(-len(rows) // block)
            owners[position // block : position // block + blocks] = expert
            position += blocks * block
        used.fill_(position)

    def moe_wna16_marlin_gemm(self, *given: Any) -> None:
        assert len(given) == marlin.GEMM_ARGUMENTS
        a, c, weights, bias, scales, *absent, locks, order, owners, used, factors = given[:13]
        block, top_k, weighted, kind, size_m, size_n, size_k, *flags = given[13:]
        assert absent == [None, None, None]
        assert (kind, size_m, flags) == (marlin.FLOAT4_E2M1, a.shape[0], [False, True, False, -1, -1, -1])
        assert a.shape[1] == size_k
        assert c.shape == (a.shape[0] * top_k, size_n)
        assert not locks.any()
        c.fill_(torch.nan)
        group = torch.arange(size_n)
        place = group // 32 * 32 + 8 * (group % 8 // 2) + 2 * (group % 32 // 8) + group % 2
        for first in range(0, int(used), block):
            expert = int(owners[first // block])
            rows = order[first : first + block]
            rows = rows[rows < c.shape[0]].long()
            matrix = marlin_weights(weights[expert], scales[expert].view(torch.uint8), size_n, size_k)
            product = a[rows // top_k].double() @ matrix + bias[expert].double()[place]
            c[rows] = (product * factors.flatten()[rows].unsqueeze(1) if weighted else product).to(c.dtype)

    def moe_sum(self, parts: torch.Tensor, output: torch.Tensor, ids: None, expert_map: None) -> None:
        output.copy_(parts.float().sum(dim=1))


def swiglu(hidden: torch.Tensor, activated: torch.Tensor, alpha: float, limit: float) -> None:
    gate, up = hidden.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated.copy_(gate * torch.sigmoid(alpha * gate) * (up + 1))


def assert_computes(call: Callable[[], torch.Tensor], inputs: MoEInputs) -> None:
    """A peer's layer gives the reference's output, in its second call too."""
    reference, _ = moe_reference(inputs)
    for _ in range(2):
        output = call()
        assert output.shape == reference.shape
        assert relative_error(output, reference) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_driver_computes_the_layer(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden and intermediate size are no multiples of what Marlin wants, so both are padded."""
    monkeypatch.setitem(moe_layers.MODELS, "tiny", MoELayer(160, 96, 8, 3))
    properties = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    batch = moe_layers.route(moe_layers.make_layer("tiny", tokens, tokens, "cpu"), tokens, tokens)
    layer = marlin._Layer(TorchOperators(), swiglu, batch.inputs)
    assert (layer.hidden, layer.inter) == (256, 128)
    assert layer.fc1.packed.shape == (8, 256 // 16, 2 * 2 * 128)
    assert layer.fc2.packed.shape == (8, 128 // 16, 2 * 256)
    assert_computes(layer.bind(batch), batch.inputs)
