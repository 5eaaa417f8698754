# SPDX-License-Identifier: Apache-2.0
"""Marlin's W4A16 MoE kernel out of vLLM 0.33's compiled operators, driven without vLLM's Python.

Facts of its interface: 4-bit weights lie as int32 ``[E, K / 16, 2 N]``, in tiles of 16 K x 64 N that hold a word for
each lane and each group of 16 columns; scales are E8M0 bytes ``[E, K / 32, N]`` whose columns are permuted in groups of 64
and then of 4; biases are permuted in groups of 32; rows of a call are grouped by expert in blocks that
``moe_align_block_size`` makes.  Hidden sizes are padded to 256 and intermediate ones to 128, as vLLM pads them.

The kernel between the GEMMs, which vLLM has in another library, is a Triton kernel of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, LIMIT, Batch
from flashinfer.testing.mxfp_formats import unswizzle_scales

BLOCK = 32
BLOCKS_PER_SM = 4  # of the lock words that the kernel wants per multiprocessor
TOKEN_BLOCKS = (8, 16, 32, 48, 64)
FILL = 0.9  # the smallest token block is taken that an expert's mean share fills no more than this
# Exponent 2 bits, mantissa 1, signed, no infinities and no NaN; as the operators' 64-bit type id packs these fields.
FLOAT4_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
GEMM_ARGUMENTS = 26


def pad(value: int, multiple: int) -> int:
    """``value`` rounded up."""
    return -(-value // multiple) * multiple


def repack(packed: torch.Tensor) -> torch.Tensor:
    """One expert's packed e2m1 ``[N, K / 2]`` as Marlin's int32 ``[K / 16, 2 N]``; K a multiple of 16, N of 64."""
    rows, half = packed.shape
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1)
    # N = (tile, column group, +8, lane / 4) and K = (tile, +8, lane % 4, +1).
    parts = nibbles.view(rows // 64, 4, 2, 8, half // 8, 2, 4, 2)
    tile_n, group, right, lane4, tile_k, low, lane1, odd = range(8)
    parts = parts.permute(tile_k, tile_n, lane4, lane1, group, odd, right, low).reshape(half // 8, 2 * rows, 8)
    shifts = torch.arange(0, 32, 4, device=packed.device)
    words = (parts.long() << shifts).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def permute_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes of all experts, ``[E, N, K / 32]``, as Marlin's ``[E, K / 32, N]``; N a multiple of 64."""
    columns = scales.transpose(1, 2)
    shape = columns.shape
    # Columns 64 g + 8 j + i come at 64 g + 8 i + j, and the middle two of each four change places.
    swapped = columns.reshape(*shape[:2], -1, 8, 8).transpose(-1, -2)
    swapped = swapped.reshape(*shape[:2], -1, 2, 2).transpose(-1, -2)
    return swapped.reshape(shape).contiguous()


def permute_bias(bias: torch.Tensor) -> torch.Tensor:
    """Biases ``[E, N]`` in Marlin's order; N a multiple of 32."""
    # Columns 32 g + 8 j + 2 i + p come at 32 g + 8 i + 2 j + p.
    return bias.reshape(bias.shape[0], -1, 4, 4, 2).transpose(2, 3).reshape(bias.shape).contiguous()


def _grown(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
    """``tensor`` with its last dimensions grown to ``sizes`` by zeros."""
    grown = tensor.new_zeros((*tensor.shape[: -len(sizes)], *sizes))
    grown[(..., *(slice(size) for size in tensor.shape[-len(sizes) :]))] = tensor
    return grown


def routing_buffers(
    rows: int, experts: int, block: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What vLLM's ``moe_align_block_size`` fills, int32: rows by expert, owners of blocks, number of rows with padding."""
    padded = rows + experts * (block - 1)
    if rows < experts:
        padded = min(rows * block, padded)
    sizes = padded, -(-padded // block), 1
    order, owners, used = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    return order, owners, used


def _two_halves(tensor: torch.Tensor, inter: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[:, :inter], tensor[:, inter : 2 * inter]


class Marlin:
    """vLLM's library, loaded."""

    name = "Marlin"

    def __init__(self, library: Path) -> None:
        from .triton_parts import swiglu  # here, so that a machine without triton says so

        self._swiglu = swiglu
        torch.ops.load_library(str(library))
        self.operators: Any = torch.ops._moe_C
        for name in ("moe_align_block_size", "moe_wna16_marlin_gemm", "moe_sum"):
            if not hasattr(self.operators, name):
                raise RuntimeError(f"the library has no operator _moe_C::{name}")
        schema = self.operators.moe_wna16_marlin_gemm.default._schema
        if len(schema.arguments) != GEMM_ARGUMENTS:
            raise RuntimeError(f"moe_wna16_marlin_gemm is another version's, not vLLM 0.33's: {schema}")

    def prepare(self, weights: MoEInputs) -> _Layer:
        experts, hidden, half = weights.fc2_weights.shape
        layer = _Layer(self.operators, self._swiglu, experts, hidden, 2 * half, weights.input.device)
        layer.load(weights)
        return layer

    def random(self, experts: int, hidden: int, inter: int, generator: torch.Generator) -> _Layer:
        """A layer of random weights, for its time: nothing is converted."""
        layer = _Layer(self.operators, self._swiglu, experts, hidden, inter, generator.device)
        layer.fill(generator)
        return layer


class _Layer:
    def __init__(
        self, operators: Any, swiglu: Callable[..., None], experts: int, hidden: int, inter: int, device: torch.device
    ) -> None:
        self._operators, self._swiglu = operators, swiglu
        self.experts, self.hidden, self.inter = experts, pad(hidden, 256), pad(inter, 128)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.locks = torch.zeros(processors * BLOCKS_PER_SM, dtype=torch.int32, device=device)

    def load(self, weights: MoEInputs) -> None:
        """Lay out ``weights``."""
        experts, hidden, half = weights.fc2_weights.shape
        inter = 2 * half
        assert weights.fc1_bias is not None
        assert weights.fc2_bias is not None
        # FC1's rows as [gate; up], each half padded by itself.
        up, gate = _two_halves(weights.fc1_weights, inter)
        self.fc1 = torch.stack([self._fc1_expert(gate[e], up[e]) for e in range(experts)])
        self.fc2 = torch.stack([repack(_grown(expert, self.hidden, self.inter // 2)) for expert in weights.fc2_weights])
        linear = torch.stack([unswizzle_scales(s, 2 * inter, hidden // BLOCK) for s in weights.fc1_scales])
        up, gate = _two_halves(linear, inter)
        rows = [_grown(part, self.inter, self.hidden // BLOCK) for part in (gate, up)]
        self.fc1_scales = permute_scales(torch.cat(rows, dim=1)).view(torch.float8_e8m0fnu)
        linear = torch.stack([unswizzle_scales(s, hidden, inter // BLOCK) for s in weights.fc2_scales])
        self.fc2_scales = permute_scales(_grown(linear, self.hidden, self.inter // BLOCK)).view(torch.float8_e8m0fnu)
        up, gate = _two_halves(weights.fc1_bias, inter)
        self.fc1_bias = permute_bias(torch.cat([_grown(part, self.inter) for part in (gate, up)], dim=1))
        self.fc2_bias = permute_bias(_grown(weights.fc2_bias, self.hidden))

    def fill(self, generator: torch.Generator) -> None:
        """Random weights; a sum of K products is about 1."""
        device = generator.device

        def matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            shape = (self.experts, k // 16, 2 * n)
            words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator)
            low = 125 - (k.bit_length() + 1) // 2
            shape = (self.experts, k // BLOCK, n)
            scales = torch.randint(low, low + 3, shape, dtype=torch.uint8, device=device, generator=generator)
            bias = 0.1 * torch.randn(self.experts, n, device=device, generator=generator)
            return words, scales.view(torch.float8_e8m0fnu), bias.bfloat16()

        self.fc1, self.fc1_scales, self.fc1_bias = matrix(2 * self.inter, self.hidden)
        self.fc2, self.fc2_scales, self.fc2_bias = matrix(self.hidden, self.inter)

    def _fc1_expert(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return repack(torch.cat([_grown(part, self.inter, self.hidden // 2) for part in (gate, up)]))

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        inputs = batch.inputs
        tokens, top_k = inputs.token_selected_experts.shape
        rows, device = tokens * top_k, inputs.input.device
        block = next((b for b in TOKEN_BLOCKS if rows / self.experts / b < FILL), TOKEN_BLOCKS[-1])
        order, owners, used = routing_buffers(rows, self.experts, block, device)
        x = _grown(inputs.input, self.hidden)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        hidden, activated = empty(rows, 2 * self.inter), empty(rows, self.inter)
        parts, output = empty(rows, self.hidden), empty(tokens, self.hidden)
        ids, final_scales = inputs.token_selected_experts, inputs.token_final_scales

        def gemm(
            a: torch.Tensor, c: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor, top_k: int,
            weighted: bool, n: int, k: int,
        ) -> None:  # fmt: skip
            self._operators.moe_wna16_marlin_gemm(
                a, c, w, bias, scales,
                None, None, None,  # no scales of a, no global scale, no zero points
                self.locks, order, owners, used, final_scales, block, top_k, weighted, FLOAT4_E2M1,
                a.shape[0], n, k,
                False, True, False,  # no atomic additions; sums in float32; zero points are no floats
                -1, -1, -1,  # tile and occupancy: its own choice
            )  # fmt: skip

        def run() -> torch.Tensor:
            self._operators.moe_align_block_size(ids, self.experts, block, order, owners, used, None, None)
            gemm(x, hidden, self.fc1, self.fc1_bias, self.fc1_scales, top_k, False, 2 * self.inter, self.hidden)
            self._swiglu(hidden, activated, ALPHA, LIMIT)
            gemm(activated, parts, self.fc2, self.fc2_bias, self.fc2_scales, 1, True, self.hidden, self.inter)
            self._operators.moe_sum(parts.view(tokens, top_k, self.hidden), output, None, None)
            return output[:, : inputs.fc2_weights.shape[1]]

        return run
