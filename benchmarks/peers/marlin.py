# SPDX-License-Identifier: Apache-2.0
"""Marlin's W4A16 MoE kernel out of vLLM 0.33's compiled operators, driven without vLLM's Python.

Facts of its interface: 4-bit weights lie as int32 ``[E, K / 16, 2 N]``, in tiles of 16 K x 64 N that hold a word for
each lane and each group of 16 columns; scales are E8M0 bytes ``[E, K / 32, N]`` whose columns are permuted in groups of
64 and then of 4; biases are permuted in groups of 32; rows of a call are grouped by expert in blocks that
``moe_align_block_size`` makes.  NVFP4's scales, for 16 of K, are the five exponent and three upper mantissa bits of 2^7
times their value in float16; an expert's global scale, float32, is times 2^119 then, and
FC2's bias is added before it.  Sizes are padded as vLLM pads them: MXFP4's hidden ones to 256 and intermediate ones to
128; NVFP4's intermediate ones to 64, or to 128 where the hidden one is no multiple of 128.

The kernels between the GEMMs, which vLLM has in another library, are Triton kernels of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, LIMIT, Batch
from flashinfer.testing.moe_reference import WEIGHTS

from . import Matrix, matrices

BLOCKS_PER_SM = 4  # of the lock words that the kernel wants per multiprocessor
TOKEN_BLOCKS = (8, 16, 32, 48, 64)
FILL = 0.9  # the smallest token block is taken that an expert's mean share fills no more than this
# Exponent 2 bits, mantissa 1, signed, no infinities and no NaN; as the operators' 64-bit type id packs these fields.
FLOAT4_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
GEMM_ARGUMENTS = 26
GLOBAL_EXPONENT = 119  # of NVFP4's global scales: what the expansion of e2m1 and of the scales leaves out


def pad(value: int, multiple: int) -> int:
    """``value`` rounded up."""
    return -(-value // multiple) * multiple


def padded_sizes(weights: str, hidden: int, inter: int) -> tuple[int, int]:
    """Hidden and intermediate size of the layer that Marlin multiplies."""
    if weights == "mxfp4":
        return pad(hidden, 256), pad(inter, 128)
    return hidden, pad(inter, 64 if hidden % 128 == 0 else 128)


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


def e5m3(scales: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes without signs as Marlin takes NVFP4's scales; of 2^-6 and more."""
    halves = (scales.view(torch.float8_e4m3fn).half() * 2**7).view(torch.int16)
    return (halves.int() >> 7 & 0xFF).to(torch.uint8)


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
    """Buffers that vLLM's ``moe_align_block_size`` fills, int32: rows by expert, owners of blocks, number of rows with
    padding."""
    padded = rows + experts * (block - 1)
    if rows < experts:
        padded = min(rows * block, padded)
    sizes = padded, -(-padded // block), 1
    order, owners, used = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    return order, owners, used


class Marlin:
    """vLLM's library, loaded."""

    name = "Marlin"

    def __init__(self, library: Path) -> None:
        from .triton_parts import relu2, swiglu  # here, so that a machine without triton says so

        self._swiglu, self._relu2 = swiglu, relu2
        torch.ops.load_library(str(library))
        self.operators: Any = torch.ops._moe_C
        for name in ("moe_align_block_size", "moe_wna16_marlin_gemm", "moe_sum"):
            if not hasattr(self.operators, name):
                raise RuntimeError(f"the library has no operator _moe_C::{name}")
        schema = self.operators.moe_wna16_marlin_gemm.default._schema
        if len(schema.arguments) != GEMM_ARGUMENTS:
            raise RuntimeError(f"moe_wna16_marlin_gemm is another version's, not vLLM 0.33's: {schema}")

    def prepare(self, weights: MoEInputs) -> _Layer:
        activate = self._relu2 if weights.relu2 else functools.partial(self._swiglu, alpha=ALPHA, limit=LIMIT)
        return _Layer(self.operators, activate, weights)


def _arranged(matrix: Matrix, weights: str, parts: int, n: int, k: int) -> Matrix:
    """The matrix in Marlin's layout: rows split into ``parts``, last part first, each padded to ``n``; K padded to
    ``k``."""

    def grown(tensor: torch.Tensor, *columns: int) -> torch.Tensor:
        return torch.cat([_grown(part, n, *columns) for part in reversed(tensor.chunk(parts, dim=1))], dim=1)

    packed = torch.stack([repack(expert) for expert in grown(matrix.packed, k // 2)])
    scales = grown(matrix.scales, k // WEIGHTS[weights][1])
    if weights == "nvfp4":
        scales = permute_scales(e5m3(scales)).view(torch.float8_e4m3fn)
    else:
        scales = permute_scales(scales).view(torch.float8_e8m0fnu)
    return Matrix(packed, scales, None if matrix.bias is None else permute_bias(grown(matrix.bias)))


class _Layer:
    def __init__(self, operators: Any, activate: Callable[..., None], weights: MoEInputs) -> None:
        self._operators, self._activate = operators, activate
        self.experts, self.columns, half = weights.fc2_weights.shape
        self.hidden, self.inter = padded_sizes(weights.weights, self.columns, 2 * half)
        self.parts = 1 if weights.relu2 else 2
        device = weights.fc2_weights.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.locks = torch.zeros(processors * BLOCKS_PER_SM, dtype=torch.int32, device=device)
        fc1, fc2 = matrices(weights)
        # [gate; up], each padded by itself, or up alone.
        self.fc1 = _arranged(fc1, weights.weights, self.parts, self.inter, self.hidden)
        self.fc2 = _arranged(fc2, weights.weights, 1, self.hidden, self.inter)
        globals_ = (weights.fc1_global, weights.fc2_global)
        self.fc1_global, self.fc2_global = (None if each is None else each * 2.0**GLOBAL_EXPONENT for each in globals_)
        if self.fc2_global is not None and self.fc2.bias is not None:
            # The kernel of FC2, which applies routing weights, multiplies by the global scale after it has added the
            # bias.
            bias = self.fc2.bias.float() / self.fc2_global[:, None]
            self.fc2 = self.fc2._replace(bias=bias.to(self.fc2.bias.dtype))

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        inputs = batch.inputs
        tokens, top_k = inputs.token_selected_experts.shape
        rows, device = tokens * top_k, inputs.input.device
        block = next((b for b in TOKEN_BLOCKS if rows / self.experts / b < FILL), TOKEN_BLOCKS[-1])
        order, owners, used = routing_buffers(rows, self.experts, block, device)
        x = _grown(inputs.input, self.hidden)
        hidden, activated = x.new_empty(rows, self.parts * self.inter), x.new_empty(rows, self.inter)
        parts, output = x.new_empty(rows, self.hidden), torch.empty_like(x)
        ids, final_scales = inputs.token_selected_experts, inputs.token_final_scales

        def gemm(
            a: torch.Tensor,
            c: torch.Tensor,
            matrix: Matrix,
            of_experts: torch.Tensor | None,
            top_k: int,
            weighted: bool,
        ) -> None:
            self._operators.moe_wna16_marlin_gemm(
                a, c, matrix.packed, matrix.bias, matrix.scales,
                None, of_experts, None,  # no scales of a, global scales, no zero points
                self.locks, order, owners, used, final_scales, block, top_k, weighted, FLOAT4_E2M1,
                a.shape[0], c.shape[1], a.shape[1],
                False, True, False,  # no atomic additions; sums in float32; zero points are no floats
                -1, -1, -1,  # tile and occupancy: its own choice
            )  # fmt: skip

        def run() -> torch.Tensor:
            self._operators.moe_align_block_size(ids, self.experts, block, order, owners, used, None, None)
            gemm(x, hidden, self.fc1, self.fc1_global, top_k, False)
            self._activate(hidden, activated)
            gemm(activated, parts, self.fc2, self.fc2_global, 1, True)
            self._operators.moe_sum(parts.view(tokens, top_k, self.hidden), output, None, None)
            return output[:, : self.columns]

        return run
