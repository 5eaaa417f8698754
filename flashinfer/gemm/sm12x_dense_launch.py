# SPDX-License-Identifier: Apache-2.0
"""A call of the dense layer behind its checks: the instance that the planner gives it, and its launch."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch

from ..jit.sm12x.modules import computes_in_fp16, gen_dense_module
from ..quantization import mx_cpu
from ..quantization.block_scaled import LAYOUTS
from ..sm12x.backend import Backend, plain_torch, workspace_size
from ..sm12x.checks import BLOCK_SIZE
from ..sm12x.device_class import GB10, DeviceClass
from ..sm12x.instances import DENSE_INSTANCES, FORMATS, Format, Instance

DEQUANTIZED_BYTES = 64 << 20
"""Bytes of dequantized weights that a call with many tokens, or one on the CPU, holds at a time."""

DEQUANTIZED_ROWS = 2048
"""Tokens that such a call multiplies at a time: their float32 products are as large as the weights."""

# Formats of token rows, as the kernels number them (TokenFormat in types.h).
BF16, QUANTIZE_BF16, QUANTIZE_F16, MXFP8_SWIZZLED, MXFP8_LINEAR, MXFP4_SWIZZLED = range(6)
QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4 = 6, 7
FineFormat = Literal["bf16", "mxint8"]
_ROWS_OF_WEIGHTS = {"mxfp4": MXFP4_SWIZZLED, "mxfp8": MXFP8_SWIZZLED, "mxfp6": 8, "mxint8": 9, "nvfp4": 10}


class DenseCall(NamedTuple):
    """The arguments of one call, named as in :func:`dense_block_scaled`; its tensors in the order of the kernels'
    module."""

    out: torch.Tensor | None
    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    weight_format: str = "mxfp4"
    activation: str = "bf16"
    swizzled_x_scale: bool = True
    next_weights: torch.Tensor | None = None
    constant_weights: bool = False
    enable_pdl: bool | None = None
    tactic: str | None = None
    top_k: int = 0  # of dense_block_scaled
    first_index: int = 0
    caller: str = "dense_block_scaled"  # of ARGUMENT_NAMES

    @property
    def k(self) -> int:
        """Elements of a row; 0 where none of the format is as wide."""
        return LAYOUTS[self.weight_format].k(self.weight.shape[1])

    def with_output(self, out: torch.Tensor) -> DenseCall:
        """The same call with memory for its output."""
        return DenseCall._make((out, *self[1:]))

    def new_output(self) -> torch.Tensor:
        """Memory for all outputs of a valid call, or of one that is traced."""
        # The extents as arguments of their own: in a tuple they take 0.7 us longer.
        dtype = self.out_dtype or torch.bfloat16
        return torch.empty(self.x.shape[0], self.weight.shape[0], dtype=dtype, device=self.x.device)


_BEHIND_TENSORS = DenseCall._fields.index("out_dtype")


class RowTopK(NamedTuple):
    """The tensors that get the largest outputs of each row, in the order of the kernels' arguments."""

    values: torch.Tensor
    """float32 ``[m, top_k]``."""
    indices: torch.Tensor
    """int64 ``[m, top_k]``."""
    first_index: int
    """The index of a row's first output."""

    def compute_on_cpu(self, logits: torch.Tensor) -> None:
        """Select as the kernels do: the first of equal numbers, and NaN above all others."""
        places = ranks_of(logits).topk(self.indices.shape[1]).indices
        self.values.copy_(logits.float().gather(1, places) + 0.0)  # -0 is 0
        self.indices.copy_(places + self.first_index)


def ranks_of(logits: torch.Tensor) -> torch.Tensor:
    """int64 that order the numbers of each row, all different: the first of equal numbers and NaN are the largest."""
    numbers = logits.float() + 0.0  # -0 is 0
    bits = torch.where(numbers.isnan(), 0x7FFFFFFF, numbers.view(torch.int32)).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered * 2**32 - torch.arange(logits.shape[1], device=logits.device)


# Thresholds at which another kernel becomes faster: measured on an H200 for gpt-oss's layers, predicted for SM12x.
SECOND_PASS_BYTES = 12 << 20
"""Up to this size a split-K kernel reads weights twice, for two tiles of tokens, in place of a GEMM: L2 still holds
them."""
GEMM_TILE_COST = {"bf16": {32: 1.0, 48: 1.2, 64: 1.45}, "mxfp8": {64: 1.0, 128: 1.8}, "mxfp4": {64: 1.0, 128: 1.8}}
"""Relative time of a tile by its tokens, among many tiles, for each compute_dtype type: measured for bf16, predicted
for the others."""


def choose(
    weights: str,
    num_tokens: int,
    n: int,
    k: int,
    device: DeviceClass = GB10,
    compute_dtype: Format = "bf16",
    sm_count: int = GB10.sm_count,
) -> Instance | None:
    """The instance for ``num_tokens`` rows and a weight ``[n, k]``; None: cuBLAS is to multiply dequantized weights.

    ``compute_dtype``: the type in which a GEMM multiplies the tokens. ``sm_count``: the device's multiprocessors.
    Quantized tokens never go to cuBLAS: block-scaled MMAs have two to eight times the rate of bfloat16 ones.
    """
    in_pieces = device.cublas_tokens_in_pieces if 2 * n * k > DEQUANTIZED_BYTES else {}
    if compute_dtype == "bf16" and num_tokens >= in_pieces.get(weights, device.cublas_tokens):
        return None
    return choose_instance(weights, num_tokens, n, k, compute_dtype, sm_count, device.dense_tiles_per_sm)


def choose_instance(
    weights: str, num_tokens: int, n: int, k: int, compute_dtype: Format, sm_count: int, tiles_per_sm: int = 1
) -> Instance:
    """The instance for ``num_tokens`` rows and a weight ``[n, k]``; a GEMM multiplies the tokens as ``compute_dtype``.

    ``tiles_per_sm``: a GEMM's N tile stays small while the output has at most so many tiles of 128 weight rows per
    SM. 1: take the smallest N tile whose tiles all run at once, so that none is shared between blocks. More: try
    the smallest N tile only.
    """
    rows = [row for row in DENSE_INSTANCES if row.weights == weights and row.longest_k >= k]
    passes = 2 if n * k * FORMATS[weights].bits // 8 <= SECOND_PASS_BYTES else 1
    split_k = [row for row in rows if row.split_k and passes * row.block_n >= num_tokens]
    if split_k:
        return min(split_k, key=lambda row: (-(-num_tokens // row.block_n), row.block_n, row.block_k))
    gemms = [row for row in rows if not row.split_k and row.compute_dtype == compute_dtype]
    gemms.sort(key=lambda row: row.block_n)
    for row in gemms if tiles_per_sm == 1 else gemms[:1]:
        if -(-n // 128) * -(-num_tokens // row.block_n) <= tiles_per_sm * sm_count:
            return row
    return min(gemms, key=lambda row: -(-num_tokens // row.block_n) * GEMM_TILE_COST[compute_dtype][row.block_n])


@functools.cache
def _mma_is_used(compute_dtype: Format, device: DeviceClass) -> bool:
    """Whether GEMMs multiply ``compute_dtype`` by an MMA of its own: the device has it and its sums are wide enough.

    Cached, because modules are built once.
    """
    kind = FORMATS[compute_dtype].mma
    return kind is None or (kind in device.mma_kinds and not computes_in_fp16(kind))


def gemm_compute_dtype(weights: str, token_format: int, device: DeviceClass) -> Format:
    """Operand type of the GEMM for this token format: bf16 unless the device has a block-scaled MMA that is used."""
    if token_format == BF16:
        return "bf16"
    return [
        compute_dtype
        for compute_dtype in gemm_compute_dtypes(weights, token_format)
        if _mma_is_used(compute_dtype, device)
    ][-1]


@functools.cache
def gemm_compute_dtypes(weights: str, token_format: int) -> tuple[Format, ...]:
    """Operand types with which GEMMs multiply tokens of this format without rounding; SM12x chooses the last."""
    exact: tuple[Format, ...] = ("bf16", "mxfp8")
    if token_format == BF16:
        exact = ("bf16",)
    elif token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4):
        exact = ("bf16", "mxfp4")
    elif token_format == MXFP4_SWIZZLED:
        exact = ("bf16", "mxfp8", "mxfp4")
    built = {row.compute_dtype for row in DENSE_INSTANCES if row.weights == weights and not row.split_k}
    return tuple(compute_dtype for compute_dtype in exact if compute_dtype in built)


def planned_instance(backend: Backend, call: DenseCall, token_format: int) -> Instance | None:
    """The planner's choice for a valid call; None as in :func:`choose`."""
    tokens, shape = call.x.shape[0], call.weight.shape
    return _planned(call.weight_format, token_format, tokens, shape, backend.device_class, backend.sm_count)


@functools.lru_cache(maxsize=4096)
def _planned(
    weights: str, token_format: int, tokens: int, shape: torch.Size, device: DeviceClass, sm_count: int
) -> Instance | None:
    k = LAYOUTS[weights].k(shape[1])  # here, since a call that is known needs none
    return choose(weights, tokens, shape[0], k, device, gemm_compute_dtype(weights, token_format, device), sm_count)


def instance(tactic: int | str | None, weights: str, k: int, token_format: int = QUANTIZE_BF16) -> Instance:
    """The instance that ``tactic`` names, by number or name.

    Raises
    ------
    ValueError
        No instance of that name takes these weights, this K and these tokens; the message lists those that do.
    """
    allowed = [
        row
        for row in DENSE_INSTANCES
        if row.weights == weights
        and row.longest_k >= k
        and row.compute_dtype in gemm_compute_dtypes(weights, token_format)
    ]
    for row in allowed:
        if str(tactic) in (str(row.index), row.name):
            return row
    names = ", ".join(f"{row.index} ({row.name})" for row in allowed) or "none, since K is too long"
    tokens = "bfloat16" if token_format == BF16 else "MXFP4" if token_format >= MXFP4_SWIZZLED else "MXFP8"
    raise ValueError(f"tactic is {tactic!r}; for {weights} weights with k = {k} and {tokens} tokens it may be {names}")


def dense_module(backend: Backend, weights: str) -> Any:
    """The loaded module of the layers whose weights have a format; built on first use."""
    return backend.module(gen_dense_module, weights)


def row_ranks(backend: Backend, module: Any, m: int, n: int, top_k: RowTopK, least: int = 0) -> torch.Tensor:
    """Workspace of ``least`` bytes or more, in which the largest of ``m`` rows of ``n`` outputs are found."""
    size = workspace_size(backend, module, "sm12x_row_top_k_workspace_size", m, n, top_k.indices.shape[1])
    return backend.empty(max(size, least))


def launch(
    backend: Backend | None, row: Instance | None, call: DenseCall, token_format: int, top_k: RowTopK | None = None
) -> None:
    """Compute a valid call of at least one output by ``row``; None: by cuBLAS, or on the CPU, which a virtual device
    is."""
    if backend is None or (row is None and not backend.is_cuda):
        with plain_torch(call.x.device):
            _compute_on_cpu(call, token_format)
            if top_k is not None and call.out is not None:
                top_k.compute_on_cpu(call.out)
        return
    module, pdl = dense_module(backend, call.weight_format), backend.pdl(call.enable_pdl)
    m, n = call.x.shape[0], call.weight.shape[0]
    out = call.out
    if out is None:  # nothing of it is written; its dtype is read
        out = torch.empty((0, n), dtype=call.out_dtype, device=call.x.device)
    writes = [out]
    largest: tuple[Any, ...] = ()
    if top_k is not None:
        largest = (*top_k, row_ranks(backend, module, m, n, top_k))
        writes += [top_k.values, top_k.indices, largest[-1]]
    if row is None:
        with plain_torch(call.x.device):
            backend.call(_multiply_dequantized, module, call, token_format, writes=writes)
        if top_k is not None:
            backend.call(module.sm12x_row_top_k_run, *largest, out, pdl, writes=writes)
        return
    workspace = None
    if not row.split_k:
        sizes = m, call.k, row.index, token_format
        workspace = backend.empty(workspace_size(backend, module, "sm12x_dense_gemm_workspace_size", *sizes))
        writes.append(workspace)
    function = module.sm12x_dense_run if top_k is None else module.sm12x_dense_top_k_run
    tensors = (out, *call[1:_BEHIND_TENSORS])
    ahead = (
        (call.next_weights,) if top_k is None else ()
    )  # nothing is known to follow where a step's results are chosen
    choice = (token_format, row.index, *ahead, call.constant_weights, pdl)
    backend.call(function, *largest, *tensors, workspace, *choice, writes=writes)


def _token_values(call: DenseCall, token_format: int) -> torch.Tensor:
    """The token values that the kernels multiply, as float32."""
    x, x_scale, blocks = call.x, call.x_scale, call.k // BLOCK_SIZE
    if token_format == BF16:
        return x.float()
    if token_format in (QUANTIZE_BF16, QUANTIZE_F16):
        return mx_cpu.round_to_mxfp8(x)
    if token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4):
        return mx_cpu.round_to_mxfp4(x)
    assert x_scale is not None
    if token_format == MXFP8_LINEAR:
        return mx_cpu.dequantize_mxfp8_linear(x, x_scale.view(torch.uint8).reshape(x.shape[0], blocks))
    scales = mx_cpu.unswizzle_128x4(x_scale, x.shape[0], blocks)
    if token_format == MXFP8_SWIZZLED:
        return mx_cpu.dequantize_mxfp8_linear(x, scales)
    return mx_cpu.dequantize_mxfp4_linear(x, scales)


def _finish(call: DenseCall, rows: slice, columns: slice, product: torch.Tensor) -> None:
    """A part of the output from its float32 product."""
    if call.alpha is not None:
        product = product * call.alpha
    if call.bias is not None:
        product = product + call.bias[columns].float()
    if call.residual is not None:
        product = product + call.residual[rows, columns].float()
    assert call.out is not None
    call.out[rows, columns] = product


def _compute_on_cpu(call: DenseCall, token_format: int) -> None:
    weight, k, layout = call.weight, call.k, LAYOUTS[call.weight_format]
    scales = mx_cpu.unswizzle_128x4(call.weight_scale, weight.shape[0], k // layout.scales.block)
    tokens = _token_values(call, token_format)
    chunk = max(1, DEQUANTIZED_BYTES // (4 * k))
    for first in range(0, weight.shape[0], chunk):
        part = slice(first, first + chunk)
        _finish(call, slice(None), part, tokens @ layout.dequantize(weight[part], scales[part]).T)


def _multiply_dequantized(module: Any, call: DenseCall, token_format: int) -> None:
    """Many tokens on a GPU: both operands as bfloat16, some rows of weights at a time, by cuBLAS."""
    x, weight, k = call.x, call.weight, call.k
    n, rows_format = weight.shape[0], _ROWS_OF_WEIGHTS[call.weight_format]
    tokens = x
    if token_format != BF16:
        tokens = torch.empty((x.shape[0], k), dtype=torch.bfloat16, device=x.device)
        module.sm12x_dequantize_rows(tokens, x, call.x_scale, token_format)
    chunk = max(128, DEQUANTIZED_BYTES // (2 * k) // 128 * 128)  # whole chunks of scales
    dequantized = torch.empty((min(n, chunk), k), dtype=torch.bfloat16, device=x.device)
    blocks = k // LAYOUTS[call.weight_format].scales.block
    scales = call.weight_scale.view(torch.uint8).reshape(-1, mx_cpu.swizzled_size(1, blocks))  # of 128 rows
    for first in range(0, n, chunk):
        part = slice(first, min(n, first + chunk))
        some = dequantized[: part.stop - first]
        module.sm12x_dequantize_rows(some, weight[part], scales[first // 128 :], rows_format)
        for row in range(0, x.shape[0], DEQUANTIZED_ROWS):
            rows = slice(row, row + DEQUANTIZED_ROWS)
            _finish(call, rows, part, torch.mm(tokens[rows], some.T, out_dtype=torch.float32))
