# SPDX-License-Identifier: Apache-2.0
"""Other implementations of the layers, as far as they can be found on this machine.

A peer takes a layer's weights once, into whatever layout it wants, and then gives a callable per batch that goes from
expert ids to the layer's output.  What it allocates while it is captured in a CUDA graph costs it no time.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from timing import reason

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import Batch
from flashinfer.testing.moe_reference import WEIGHTS
from flashinfer.testing.mxfp_formats import unswizzle_scales

T = TypeVar("T")
LIBRARY, MOE_LIBRARY = "_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"
# A peer rounds to bfloat16 after FC1, the activation, FC2 and the sum, and may round the routing weights: five
# roundings, each of at most 2**-8 / 2 of a value, and the activation's slope (at most 1.1) on the first.
TOLERANCE = 6 * 2.0**-9


class Layer(Protocol):
    """A peer with the weights of one layer."""

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        """A call on ``batch`` that returns the layer's output, ``[M, H]``."""
        ...


class Peer(Protocol):
    """An implementation that was found."""

    name: str

    def prepare(self, weights: MoEInputs) -> Layer:
        """Lay the weights of a layer out as this implementation wants them."""
        ...


class Matrix(NamedTuple):
    """A GEMM's weights of all experts: packed e2m1 ``[E, N, K / 2]``, linear scale bytes ``[E, N, K / 32]``, or
    ``K / 16`` of NVFP4, bias ``[E, N]`` or None."""

    packed: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def rows(self, arrange: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Matrix:
        """``arrange(gate, up)`` of FC1's rows, which are ``[up; gate]``."""

        def arranged(part: torch.Tensor) -> torch.Tensor:
            up, gate = part.chunk(2, dim=1)
            return arrange(gate, up)

        packed, scales, bias = self
        return Matrix(arranged(packed), arranged(scales), None if bias is None else arranged(bias))


def gate_first(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """For :meth:`Matrix.rows`: ``[gate; up]``."""
    return torch.cat((gate, up), dim=1)


def require_mxfp4(weights: MoEInputs) -> None:
    """Raise ``RuntimeError`` for a peer that is given other experts than it takes here."""
    if weights.weights != "mxfp4":
        raise RuntimeError(f"experts in {weights.weights}, and this peer is called with MXFP4's here")
    if weights.relu2:
        raise RuntimeError("experts without gate rows, and this peer is called with gpt-oss's activation here")


def matrices(weights: MoEInputs) -> tuple[Matrix, Matrix]:
    """FC1's and FC2's."""

    def matrix(packed: torch.Tensor, swizzled: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        rows, half = packed.shape[1:]
        return Matrix(packed, unswizzle_scales(swizzled, rows, 2 * half // WEIGHTS[weights.weights][1]), bias)

    fc1 = matrix(weights.fc1_weights, weights.fc1_scales, weights.fc1_bias)
    return fc1, matrix(weights.fc2_weights, weights.fc2_scales, weights.fc2_bias)


def in_vllm(file: str, folder: Path | None = None) -> Path:
    """A file of vLLM's package: in ``folder``, else of the one that is installed, found without importing it.

    Raises
    ------
    RuntimeError
        It is not there.
    """
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
        if not places:
            raise RuntimeError("vLLM is not installed; --vllm names its package's folder")
        folder = places[0]
    path = folder / file
    if not path.exists():
        raise RuntimeError(f"{folder} has no {file}")
    return path


def load_marlin(vllm: Path | None) -> Peer:
    """Marlin from vLLM's library."""
    from .marlin import Marlin

    return Marlin(in_vllm(MOE_LIBRARY, vllm))


def load_triton_kernels(vllm: Path | None) -> Peer:
    """triton_kernels: an installed one, else that in vLLM."""
    if importlib.util.find_spec("triton_kernels") is None:
        sys.path.append(str(in_vllm("third_party/triton_kernels/__init__.py", vllm).parents[1]))
    from .triton_kernels import TritonKernels

    return TritonKernels()


def load_humming(vllm: Path | None) -> Peer:
    """HUMMING (humming-kernels) with the operator of vLLM's library that groups rows by expert."""
    from .humming import Humming

    return Humming(in_vllm(MOE_LIBRARY, vllm))


PEERS: dict[str, Callable[[Path | None], Peer]] = {
    "marlin": load_marlin,
    "triton_kernels": load_triton_kernels,
    "humming": load_humming,
}


def find_peers(
    loaders: Mapping[str, Callable[[Path | None], T]], wanted: Sequence[str] | None, vllm: Path | None
) -> list[T]:
    """The peers of ``wanted`` (None: all) that can be loaded. Prints each one's name, and the reason if it cannot.

    Raises
    ------
    SystemExit
        One of ``wanted`` cannot be used: a table without it is not what was asked for.
    """
    found = []
    for name in loaders if wanted is None else wanted:
        try:
            found.append(loaders[name](vllm))
            print(f"{name}: found")
        except Exception as error:  # a library for another torch, no triton, no GPU: in any case the others go on
            if wanted is not None:
                raise SystemExit(f"{name} cannot be measured: {reason(error)}") from error
            print(f"{name}: not measured: {reason(error)}")
    return found
