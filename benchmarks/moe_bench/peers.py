# SPDX-License-Identifier: Apache-2.0
"""Other implementations of the layer, as far as they can be found on this machine.

A peer takes the layer's weights once, into whatever layout it wants, and then gives a callable per batch that goes from
expert ids to the layer's output.  What it allocates while it is captured in a CUDA graph costs it no time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import Batch

# A peer rounds to bfloat16 after FC1, the activation, FC2 and the sum, and may round the routing weights: five roundings,
# each of at most 2**-8 / 2 of a value, and the activation's slope (at most 1.1) on the first.
TOLERANCE = 6 * 2.0**-9


class Layer(Protocol):
    """A peer with the weights of one layer.

    One that rounds more than ``TOLERANCE`` allows says its own ``tolerance``.
    """

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        """A call on ``batch`` that returns the layer's output, ``[M, H]``."""
        ...


class Peer(Protocol):
    """An implementation that was found."""

    name: str

    def prepare(self, weights: MoEInputs) -> Layer:
        """Lay the weights of a layer out as this implementation wants them."""
        ...


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return float((output.double() - reference).norm() / reference.norm())


def find_vllm(*inside: str) -> Path | None:
    """A path inside an installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in inside:
            for path in sorted(Path(folder).glob(pattern)):
                return path
    return None


def marlin(given: Path | None) -> tuple[Peer | None, str]:
    """Marlin from vLLM's library: the one given, else that of an installed vLLM; or why not."""
    path = given or find_vllm("_moe_C_stable_libtorch*.so", "_moe_C*.so")
    if path is None:
        return None, "vLLM is not installed; --marlin names its _moe_C_stable_libtorch.abi3.so"
    if not path.is_file():
        return None, f"--marlin: {path} is no file"
    try:
        from .peer_marlin import Marlin

        return Marlin(path), str(path)
    except Exception as error:  # a library for another torch, no triton, no GPU: whatever it is, the others go on
        return None, f"{path}: {_reason(error)}"


def triton_kernels(given: Path | None) -> tuple[Peer | None, str]:
    """triton_kernels: the folder given, else an installed one, else that in vLLM; or why not."""
    if given is not None:
        if given.name != "triton_kernels" or not (given / "__init__.py").is_file():
            return None, f"--triton-kernels: {given} is no folder of the package triton_kernels"
        sys.path.insert(0, str(given.resolve().parent))
    elif importlib.util.find_spec("triton_kernels") is None:
        found = find_vllm("third_party/triton_kernels/__init__.py")
        if found is None:
            return None, "not installed, nor is vLLM; --triton-kernels names the package's folder"
        sys.path.append(str(found.parents[1]))
    try:
        from .peer_triton_kernels import TritonKernels

        return TritonKernels(), str(Path(str(importlib.import_module("triton_kernels").__file__)).parent)
    except Exception as error:
        return None, _reason(error)


def find_humming(given: Path | None) -> str | None:
    """Import HUMMING, from the folder given or where it is installed; or why not."""
    if given is not None:
        if given.name != "humming" or not (given / "forward.py").is_file():
            return f"--humming: {given} is no folder of the package humming"
        sys.path.insert(0, str(given.resolve().parent))
    elif importlib.util.find_spec("humming") is None:
        return "not installed (humming-kernels); --humming names the package's folder"
    if not torch.cuda.is_available():
        return "needs a GPU"
    try:
        importlib.import_module(".peer_humming", __package__)
    except Exception as error:  # no triton, another version: whatever it is, the others go on
        return _reason(error)
    return None


def humming(given: Path | None, library: Path | None) -> tuple[Peer | None, str]:
    """HUMMING with the operator of vLLM's library that groups rows by expert; or why not."""
    if (why := find_humming(given)) is not None:
        return None, why
    library = library or find_vllm("_moe_C_stable_libtorch*.so", "_moe_C*.so")
    if library is None:
        return None, "vLLM, whose moe_align_block_size it needs, is not installed; --marlin names its library"
    try:
        from .peer_humming import Humming

        return Humming(library), str(Path(str(importlib.import_module("humming").__file__)).parent)
    except Exception as error:
        return None, _reason(error)


def load_llama_cpp(given: Path | None) -> tuple[Any, str]:
    """llama.cpp's library from the folder given, on this machine's GPU; or why not."""
    if given is None:
        return None, "--llama-cpp names the folder of its libraries, which scripts/build_llama_cpp.py builds"
    if not list(given.glob("libggml-base.so*")):
        return None, f"--llama-cpp: {given} is no folder with libggml-base.so, libggml-cpu.so and libggml-cuda.so"
    if not torch.cuda.is_available():
        return None, "needs a GPU"
    try:
        from .peer_llama_cpp import Library

        return Library(given), str(given)
    except Exception as error:  # for another CUDA or another C library: whatever it is, the others go on
        return None, _reason(error)


def llama_cpp(given: Path | None) -> tuple[Peer | None, str]:
    """llama.cpp's kernels, on the graph that it makes of the layer; or why not."""
    library, told = load_llama_cpp(given)
    if library is None:
        return None, told
    from .peer_llama_cpp import LlamaCpp

    return LlamaCpp(library), told


def _reason(error: Exception) -> str:
    cause: Any = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
