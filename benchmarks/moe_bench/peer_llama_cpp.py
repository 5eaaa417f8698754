# SPDX-License-Identifier: Apache-2.0
"""llama.cpp: its library ggml, called over ggml's C interface, with weights in MXFP4 or Q8_0.

Facts of ggml (llama-cpp-python 0.3.36's copy): a tensor's first size runs fastest, so that a row-major ``[N, K]`` has
the sizes K, N.  Weights are blocks of 32 values of K with their scale in front.  MXFP4: the E8M0 byte, then 16 bytes, byte
i with value i below and value i + 16 above.  Q8_0: a scale in float16, then 32 int8, 34 bytes where MXFP8 has 33; it is
ggml's format of 8 bits, MXFP8 it has none.  Tokens and results are float32; a product with such weights rounds tokens
to int8 with one scale per 32 (Q8_1 on a GPU, Q8_0 on a CPU) in each call.  On SM12x llama.cpp would round more than 8 tokens
to FP4 beside MXFP4 weights; ``GGML_CUDA_MMQ_PREC=q8`` keeps int8 there, too, so that what is compared is alike.

Graphs are made as llama.cpp makes them for gpt-oss, in the same order, and go through ggml's scheduler, which places
tensors and lets the backend find what it can fuse.  A GPU runs them on ggml's own stream: a call joins it to torch's by
events, so that a CUDA graph of torch captures ggml's kernels, and its clock is the one of the others.  ggml's own CUDA
graphs, which hold the same launches, are off for that.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, LIMIT, Batch
from flashinfer.testing.mxfp_formats import unswizzle_scales

BLOCK = 32
F32, Q8_0, I32, MXFP4 = 0, 8, 26, 39  # enum ggml_type
WEIGHTS = 1  # enum ggml_backend_buffer_usage
MAX_NODES = 256
# A token's value is rounded by half a step of its block at most, evenly, and a step is 1 / 127 of the largest value,
# which is at most sqrt(32) times the block's root mean square; the step itself is rounded to float16.
TOKEN_ERROR = (BLOCK / 12) ** 0.5 / 127 + 2.0**-11

POINTER_FUNCTIONS: dict[str, list[Any]] = {
    "ggml_new_tensor_3d": [c_void_p, c_int, c_int64, c_int64, c_int64],
    "ggml_reshape_3d": [c_void_p, c_void_p, c_int64, c_int64, c_int64],
    "ggml_view_2d": [c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t],
    "ggml_mul_mat": [c_void_p] * 3,
    "ggml_mul_mat_id": [c_void_p] * 4,
    "ggml_add": [c_void_p] * 3,
    "ggml_add_id": [c_void_p] * 4,
    "ggml_mul": [c_void_p] * 3,
    "ggml_swiglu_oai": [c_void_p, c_void_p, c_void_p, c_float, c_float],
    "ggml_new_graph_custom": [c_void_p, c_size_t, c_bool],
    "ggml_get_data": [c_void_p],
    "ggml_backend_alloc_ctx_tensors": [c_void_p] * 2,
    "ggml_backend_sched_new": [c_void_p, c_void_p, c_int, c_size_t, c_bool, c_bool],
}
OTHER_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p] * 2),
    "ggml_free": (None, [c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_buffer_set_usage": (None, [c_void_p, c_int]),
    "ggml_backend_event_wait": (None, [c_void_p] * 2),
    "ggml_backend_event_record": (None, [c_void_p] * 2),
    "ggml_backend_sched_alloc_graph": (c_bool, [c_void_p] * 2),
    "ggml_backend_sched_get_n_splits": (c_int, [c_void_p]),
    "ggml_backend_sched_graph_compute_async": (c_int, [c_void_p] * 2),
    "ggml_backend_sched_free": (None, [c_void_p]),
}


def mxfp4_blocks(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 in ggml's blocks, bit for bit.

    Parameters
    ----------
    packed : torch.Tensor
        uint8 ``[..., K / 2]``: e2m1 values, the first of two below.
    scales : torch.Tensor
        UE8M0 bytes ``[..., K / 32]``, linear.

    Returns
    -------
    torch.Tensor
        uint8 ``[..., K / 32, 17]``.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(*scales.shape, BLOCK)
    low, high = codes.chunk(2, dim=-1)
    return torch.cat((scales.view(torch.uint8).unsqueeze(-1), low | high << 4), dim=-1)


def q8_0_blocks(values: torch.Tensor) -> torch.Tensor:
    """``values`` ``[..., K]``, rounded to Q8_0, by the step as float16 holds it: uint8 ``[..., K / 32, 34]``."""
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float().masked_fill(scales == 0, 1)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=-1)


def q8_0_values(blocks: torch.Tensor) -> torch.Tensor:
    """What Q8_0's ``blocks`` ``[..., K / 32, 34]`` stand for, float64 ``[..., K]``."""
    scales, codes = blocks[..., :2].contiguous().view(torch.float16), blocks[..., 2:].contiguous().view(torch.int8)
    return (scales.double() * codes.double()).flatten(-2)


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class _Event(ctypes.Structure):
    """``struct ggml_backend_event``, of which a CUDA backend reads the event only."""

    _fields_ = [("device", c_void_p), ("cuda_event", c_void_p)]


class _DeviceBytes:
    """Memory of a GPU, for :func:`torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


class Library:
    """ggml's libraries of a folder, and a backend for ``device``.

    Raises
    ------
    FileNotFoundError
        The folder lacks one of the libraries.
    OSError
        The loader refuses one.
    RuntimeError
        ggml finds no such device.
    """

    def __init__(self, folder: Path, device: str = "cuda") -> None:
        # Read once by ggml, and a capture by it inside torch's would end the process.
        os.environ["GGML_CUDA_DISABLE_GRAPHS"] = "1"
        os.environ["GGML_CUDA_MMQ_PREC"] = "q8"
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        names = ["ggml-base", "ggml-cpu", *(["ggml-cuda"] if on_gpu else [])]
        libraries = [ctypes.CDLL(str(_find(folder, name)), mode=ctypes.RTLD_GLOBAL) for name in names]
        self.ggml = libraries[0]
        for function, arguments in POINTER_FUNCTIONS.items():
            getattr(self.ggml, function).restype, getattr(self.ggml, function).argtypes = c_void_p, arguments
        for function, (result, arguments) in OTHER_FUNCTIONS.items():
            getattr(self.ggml, function).restype, getattr(self.ggml, function).argtypes = result, arguments
        self.ggml.ggml_init.restype, self.ggml.ggml_init.argtypes = c_void_p, [_InitParams]
        libraries[1].ggml_backend_cpu_init.restype = c_void_p
        backends = [libraries[1].ggml_backend_cpu_init()]
        if on_gpu:
            libraries[2].ggml_backend_cuda_init.restype = c_void_p
            libraries[2].ggml_backend_cuda_init.argtypes = [c_int]
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            backends.insert(0, libraries[2].ggml_backend_cuda_init(index))
        if None in backends:
            raise RuntimeError("ggml finds no device for its backend")
        self.backends = (c_void_p * len(backends))(*backends)  # the CPU's comes last

    def view(self, tensor: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The memory of a tensor of ggml's, which has to live on, as one of torch."""
        address, size = self.ggml.ggml_get_data(tensor), self.ggml.ggml_nbytes(tensor)
        if self.device.type == "cuda":
            data = torch.as_tensor(_DeviceBytes(address, size), device=self.device)
            assert data.data_ptr() == address  # no copy
        else:
            data = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        return data.view(dtype).view(shape)


def _release(owner: Any, function: Callable[[int], None], what: int) -> None:
    """Give ``what`` back with its owner, but not while the process ends: CUDA may have ended then."""
    weakref.finalize(owner, function, what).atexit = False


def _find(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"lib{name}.so*"))
    if not found:
        raise FileNotFoundError(f"{folder} has no lib{name}.so")
    return found[0]


class Tensors:
    """Descriptions of tensors; memory for those that are made before :meth:`allocate`."""

    def __init__(self, library: Library) -> None:
        self.library, self.ggml = library, library.ggml
        size = MAX_NODES * self.ggml.ggml_tensor_overhead() + self.ggml.ggml_graph_overhead_custom(MAX_NODES, False)
        self.context = self.ggml.ggml_init(_InitParams(size, None, True))
        self._made: list[tuple[int, torch.dtype, tuple[int, ...]]] = []
        _release(self, self.ggml.ggml_free, self.context)

    def new(self, kind: int, shape: tuple[int, ...], dtype: torch.dtype, *stored: int) -> int:
        """A tensor of row-major ``shape``, at most three sizes; torch sees it as ``stored`` elements of ``dtype``."""
        sizes = [*reversed(shape), 1, 1][:3]
        tensor = int(self.ggml.ggml_new_tensor_3d(self.context, kind, *sizes))
        self._made.append((tensor, dtype, stored or shape))
        return tensor

    def allocate(self, usage: int | None = None) -> list[torch.Tensor]:
        """Memory for all of them: views of it, in the order in which they were made."""
        buffer = self.ggml.ggml_backend_alloc_ctx_tensors(self.context, self.library.backends[0])
        if buffer is None:
            raise MemoryError("ggml has no memory for the tensors")
        _release(self, self.ggml.ggml_backend_buffer_free, buffer)
        if usage is not None:
            self.ggml.ggml_backend_buffer_set_usage(buffer, usage)
        return [self.library.view(tensor, dtype, *stored) for tensor, dtype, stored in self._made]


class Graph:
    """A graph that writes ``result``, float32 ``shape``; calling it runs it and returns that memory.

    Parameters
    ----------
    tensors : Tensors
        Where the graph was made; ``kept`` are the others that its leaves live in.
    nodes : list of int
        What is computed, in the order in which it is to enter the graph; the last is the result.
    """

    def __init__(self, tensors: Tensors, nodes: list[int], shape: tuple[int, ...], *kept: Any) -> None:
        self.library, self.ggml, self._kept = tensors.library, tensors.ggml, (tensors, *kept)
        self.graph = self.ggml.ggml_new_graph_custom(tensors.context, MAX_NODES, False)
        for node in nodes:
            self.ggml.ggml_build_forward_expand(self.graph, node)
        backends = self.library.backends
        self.scheduler = self.ggml.ggml_backend_sched_new(backends, None, len(backends), 4 * MAX_NODES, False, True)
        _release(self, self.ggml.ggml_backend_sched_free, self.scheduler)
        if not self.ggml.ggml_backend_sched_alloc_graph(self.scheduler, self.graph):
            raise MemoryError("ggml has no memory for the graph")
        if (parts := self.ggml.ggml_backend_sched_get_n_splits(self.scheduler)) != 1:
            raise RuntimeError(f"ggml splits the graph over its backends, into {parts} parts")
        self.result = self.library.view(nodes[-1], torch.float32, *shape)
        if self.library.device.type == "cuda":
            self._events = [torch.cuda.Event(), torch.cuda.Event()]
            for event in self._events:
                event.record()  # makes it
            self._begin, self._end = (_Event(None, event.cuda_event) for event in self._events)

    def __call__(self) -> torch.Tensor:
        on_gpu, backend = self.library.device.type == "cuda", self.library.backends[0]
        if on_gpu:
            self._events[0].record()
            self.ggml.ggml_backend_event_wait(backend, ctypes.byref(self._begin))
        status = self.ggml.ggml_backend_sched_graph_compute_async(self.scheduler, self.graph)
        if status != 0:
            raise RuntimeError(f"ggml's graph ends with status {status}")
        if on_gpu:
            self.ggml.ggml_backend_event_record(ctypes.byref(self._end), backend)
            self._events[1].wait()
        return self.result


class Gemm:
    """``[M, K]`` float32 by a weight and a bias, to ``[M, N]`` float32.

    Parameters
    ----------
    library : Library
        Where it runs.
    kind : int
        ``MXFP4`` or ``Q8_0``.
    blocks : torch.Tensor
        uint8 ``[N, K / 32, bytes of a block]``.
    bias : torch.Tensor
        ``[N]``.
    """

    def __init__(self, library: Library, kind: int, blocks: torch.Tensor, bias: torch.Tensor) -> None:
        n, k = blocks.shape[0], BLOCK * blocks.shape[1]
        self.library, self.sizes, self.tensors = library, (n, k), Tensors(library)
        self.weight = self.tensors.new(kind, (n, k), torch.uint8, *blocks.shape)
        self.bias = self.tensors.new(F32, (n,), torch.float32)
        for memory, given in zip(self.tensors.allocate(WEIGHTS), (blocks, bias), strict=True):
            memory.copy_(given)

    def bind(self, x: torch.Tensor) -> Graph:
        """The product with the tokens ``x``, ``[M, K]``, as they are now."""
        n, k = self.sizes
        inputs, tensors = Tensors(self.library), Tensors(self.library)
        given = inputs.new(F32, (len(x), k), torch.float32)
        inputs.allocate()[0].copy_(x)
        product = self.library.ggml.ggml_mul_mat(tensors.context, self.weight, given)
        result = self.library.ggml.ggml_add(tensors.context, product, self.bias)
        return Graph(tensors, [result], (len(x), n), inputs, self)


class LlamaCpp:
    """The library, loaded."""

    name = "llama.cpp"

    def __init__(self, library: Library) -> None:
        self.library = library

    def prepare(self, weights: MoEInputs) -> _Layer:
        return _Layer(self.library, weights)


class _Layer:
    # FC1's tokens are rounded for the gate, on whose slope the activation is at most 1.1 times as steep, and for the
    # linear half, FC2's once.
    tolerance = 3.1 * TOKEN_ERROR

    def __init__(self, library: Library, weights: MoEInputs) -> None:
        self.library, self.tensors = library, Tensors(library)
        experts, hidden, half = weights.fc2_weights.shape
        inter = 2 * half
        assert weights.fc1_bias is not None
        assert weights.fc2_bias is not None

        def matrix(n: int, k: int) -> tuple[int, int]:
            weight = self.tensors.new(MXFP4, (experts, n, k), torch.uint8, experts, n, k // BLOCK, 17)
            return weight, self.tensors.new(F32, (experts, n), torch.float32)

        self.up, self.gate, self.down = matrix(inter, hidden), matrix(inter, hidden), matrix(hidden, inter)
        up, up_bias, gate, gate_bias, down, down_bias = self.tensors.allocate(WEIGHTS)
        for expert in range(experts):
            scales = unswizzle_scales(weights.fc1_scales[expert], 2 * inter, hidden // BLOCK)
            up[expert], gate[expert] = mxfp4_blocks(weights.fc1_weights[expert], scales).chunk(2)
            scales = unswizzle_scales(weights.fc2_scales[expert], hidden, inter // BLOCK)
            down[expert] = mxfp4_blocks(weights.fc2_weights[expert], scales)
        up_bias.copy_(weights.fc1_bias[:, :inter])
        gate_bias.copy_(weights.fc1_bias[:, inter:])
        down_bias.copy_(weights.fc2_bias)

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        given = batch.inputs
        assert given.token_final_scales is not None
        tokens, top_k = given.token_selected_experts.shape
        hidden = given.input.shape[1]
        ggml, inputs, tensors = self.library.ggml, Tensors(self.library), Tensors(self.library)
        context = tensors.context
        x = inputs.new(F32, (tokens, hidden), torch.float32)
        ids = inputs.new(I32, (tokens, top_k), torch.int32)
        weights = inputs.new(F32, (tokens, top_k, 1), torch.float32)
        sources = (given.input, given.token_selected_experts, given.token_final_scales.unsqueeze(-1))
        for memory, source in zip(inputs.allocate(), sources, strict=True):
            memory.copy_(source)

        def multiply(matrix: tuple[int, int], x: int) -> int:
            product = ggml.ggml_mul_mat_id(context, matrix[0], x, ids)
            return int(ggml.ggml_add_id(context, product, matrix[1], ids))

        row = ggml.ggml_reshape_3d(context, x, hidden, 1, tokens)
        up = multiply(self.up, row)
        gate = multiply(self.gate, row)
        activated = ggml.ggml_swiglu_oai(context, gate, up, ALPHA, LIMIT)
        parts = ggml.ggml_mul(context, multiply(self.down, activated), weights)
        size = hidden * torch.float32.itemsize
        of_slots = [
            ggml.ggml_view_2d(context, parts, hidden, tokens, top_k * size, slot * size) for slot in range(top_k)
        ]
        sums = [of_slots[0]]
        for part in of_slots[1:]:
            sums.append(ggml.ggml_add(context, sums[-1], part))
        return Graph(tensors, [parts, *of_slots, *sums[1:]], (tokens, hidden), inputs, self)
