# SPDX-License-Identifier: Apache-2.0
"""Dense layers with weights in MXFP4 or MXFP8 on SM12x's own kernels and on the CPU: choice of kernel, launch.

Few tokens are one stream of weights (``include/flashinfer/sm12x/impls/dense_layer.cuh``), more are a GEMM
(``grouped_gemm.cuh``): of quantized tokens by SM12x's block-scaled MMA, else of bfloat16, which holds every value of these
formats exactly. For very many, there, weights are widened to bfloat16 some rows at a time, and cuBLAS multiplies them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch

from .. import sm12x_probes
from ..jit.sm12x.instances import DENSE_INSTANCES, DenseInstance, Operand
from ..quantization import mx_cpu
from ..quantization.mx_cpu import BLOCK_SIZE
from ..sm12x_arguments import describe, require_alignment
from ..testing import virtual_device
from ..utils import device_support_pdl
from .sm12x_dense_validation import (
    BF16,
    MXFP4_SWIZZLED,
    MXFP8_LINEAR,
    MXFP8_SWIZZLED,
    QUANTIZE_BF16,
    QUANTIZE_BF16_TO_MXFP4,
    QUANTIZE_F16,
    QUANTIZE_F16_TO_MXFP4,
    Activation,
    validate,
)

OPERATOR = "flashinfer::sm12x_dense_mx"
WIDENED_BYTES = 64 << 20
"""Of dequantized weights that a call with many tokens, or one on the CPU, holds at a time."""

WIDENED_ROWS = 2048
"""Tokens that such a call multiplies at a time: their float32 products are as large as the weights."""


class Operands(NamedTuple):
    """A call's tensors, in the order in which the kernels' module takes them."""

    out: torch.Tensor
    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None

    @property
    def k(self) -> int:
        """Elements of a row."""
        return self.weight.shape[1] * (2 if self.weight.dtype is torch.uint8 else 1)


class RowTopK(NamedTuple):
    """Where the largest outputs of each row go, in the order in which the kernels' module takes it."""

    values: torch.Tensor
    """float32 ``[m, top_k]``."""
    indices: torch.Tensor
    """int64 ``[m, top_k]``."""
    first_index: int
    """That of a row's first output."""

    def compute_on_cpu(self, logits: torch.Tensor) -> None:
        """As the kernels: of equal numbers the first, NaN before all others."""
        numbers = logits.float() + 0.0  # -0 is 0
        bits = torch.where(numbers.isnan(), 0x7FFFFFFF, numbers.view(torch.int32)).long()
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        ranks = ordered * 2**32 - torch.arange(logits.shape[1])  # they differ
        places = ranks.topk(self.indices.shape[1]).indices
        self.values.copy_(numbers.gather(1, places))
        self.indices.copy_(places + self.first_index)


def _dispatch() -> Any:
    from ..fused_moe import sm12x_dispatch

    return sm12x_dispatch


def weights_of(weight: torch.Tensor) -> Literal["mxfp4", "mxfp8"]:
    """The format of a weight: packed bytes are MXFP4, e4m3 is MXFP8."""
    return "mxfp8" if weight.dtype is torch.float8_e4m3fn else "mxfp4"


# Where one way overtakes another: measured on an H200 for gpt-oss's layers (docs/dense.md), a prediction on SM12x.
SECOND_PASS_BYTES = 12 << 20
"""Weights that are streamed twice, for two tiles of tokens, rather than multiplied by a GEMM: L2 still has them."""
FEW_TILES = {"bf16": 264, "mxfp8": 48, "mxfp4": 48}
"""Tiles of the output, of 128 rows and the fewest tokens, up to which small tiles are faster: measured on an H200, with two
for each SM; one for each SM of a GB10, none of which is cut then (a prediction)."""
GEMM_TILE_COST = {"bf16": {32: 1.0, 48: 1.2, 64: 1.45}, "mxfp8": {64: 1.0, 128: 1.8}, "mxfp4": {64: 1.0, 128: 1.8}}
"""Time of a tile of so many tokens, where there are many, by what it multiplies: measured for bf16, predicted for the others."""
WIDENED_TOKENS = {False: 256, True: 4096}
"""From so many tokens on cuBLAS multiplies widened weights: on Hopper, whose cuBLAS has wgmma, and on SM12x. Quantized tokens
stay with SM12x's block-scaled MMA, whose rate is two to eight times that of bfloat16."""
WIDENED_IN_PIECES_TOKENS = {"mxfp4": 1024, "mxfp8": 512}
"""The same on Hopper where the weight is widened in pieces (``WIDENED_BYTES``), as an LM head is: measured."""


def choose(
    weights: str, num_tokens: int, n: int, k: int, on_sm12x: bool = True, operand: Operand = "bf16"
) -> DenseInstance | None:
    """The instance for ``num_tokens`` rows and a weight ``[n, k]``; None: cuBLAS is to multiply widened weights.

    ``operand`` is as what a GEMM multiplies the tokens.
    """
    in_pieces = not on_sm12x and 2 * n * k > WIDENED_BYTES
    if operand == "bf16" and num_tokens >= (
        WIDENED_IN_PIECES_TOKENS[weights] if in_pieces else WIDENED_TOKENS[on_sm12x]
    ):
        return None
    rows = [row for row in DENSE_INSTANCES if row.weights == weights and row.longest_k >= k]
    passes = 2 if n * k // (2 if weights == "mxfp4" else 1) <= SECOND_PASS_BYTES else 1
    streams = [row for row in rows if row.streamed and passes * row.token_tile >= num_tokens]
    if streams:
        return min(streams, key=lambda row: (-(-num_tokens // row.token_tile), row.token_tile, row.words))
    gemms = [row for row in rows if not row.streamed and row.operand == operand]
    smallest = min(gemms, key=lambda row: row.token_tile)
    if -(-n // 128) * -(-num_tokens // smallest.token_tile) <= FEW_TILES[operand]:
        return smallest
    return min(gemms, key=lambda row: -(-num_tokens // row.token_tile) * GEMM_TILE_COST[operand][row.token_tile])


@functools.cache
def _mma_is_used(operand: Operand) -> bool:
    """Whether this machine's MMA of ``operand`` adds up widely enough; read once, as modules are built once."""
    from ..jit.sm12x.modules import multiplies_in_half

    return operand == "bf16" or not multiplies_in_half({"mxfp8": "mxf8f6f4", "mxfp4": "mxf4"}[operand])


def gemm_operand(weights: str, token_format: int, on_sm12x: bool) -> Operand:
    """As what a GEMM multiplies tokens of this format: bf16 unless the device has a block-scaled MMA that is used."""
    if not on_sm12x:
        return "bf16"
    return [operand for operand in gemm_operands(weights, token_format) if _mma_is_used(operand)][-1]


def gemm_operands(weights: str, token_format: int) -> tuple[Operand, ...]:
    """As what GEMMs can multiply tokens of this format without rounding; what is chosen on SM12x last."""
    if token_format == BF16:
        return ("bf16",)
    if token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4):
        return ("bf16", "mxfp4")
    if token_format == MXFP4_SWIZZLED and weights == "mxfp4":
        return ("bf16", "mxfp8", "mxfp4")
    return ("bf16", "mxfp8")


def instance(tactic: int | str | None, weights: str, k: int, token_format: int = QUANTIZE_BF16) -> DenseInstance:
    """The instance that ``tactic`` names, by number or name.

    Raises
    ------
    ValueError
        There is none of that name for these weights, this K and such tokens; the message lists them.
    """
    allowed = [
        row
        for row in DENSE_INSTANCES
        if row.weights == weights and row.longest_k >= k and row.operand in gemm_operands(weights, token_format)
    ]
    for row in allowed:
        if str(tactic) in (str(row.index), row.name):
            return row
    names = ", ".join(f"{row.index} ({row.name})" for row in allowed) or "none, since K is too long"
    tokens = "bfloat16" if token_format == BF16 else "MXFP4" if token_format >= MXFP4_SWIZZLED else "MXFP8"
    raise ValueError(f"tactic is {tactic!r}; for {weights} weights with k = {k} and {tokens} tokens it may be {names}")


def dense_mx(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = "bf16",
    x_scale: torch.Tensor | None = None,
    swizzled_x_scale: bool = True,
    alpha: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> torch.Tensor:
    """``alpha * x @ weight.T + bias + residual`` with a weight in MXFP4 or MXFP8.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) these are this fork's kernels; CPU tensors
    are computed on the CPU. Results are the same on every run.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]``: bfloat16 (or float16 where it is rounded inside); float8_e4m3fn with ``x_scale`` (MXFP8); uint8
        ``[m, k / 2]``, two e2m1 a byte, with ``x_scale`` (MXFP4).
    weight : torch.Tensor
        ``[n, k]`` float8_e4m3fn (MXFP8), or ``[n, k / 2]`` uint8, two e2m1 a byte, the even element in the low nibble
        (MXFP4).
    weight_scale : torch.Tensor
        UE8M0 bytes in 128x4 layout: ``pad128(n) * pad4(k / 32)`` of them, of any shape.
    bias : torch.Tensor, optional
        ``[n]`` bfloat16, float16 or float32.
    activation : str
        ``"bf16"``: x is multiplied as it is (W4A16, W8A16). ``"mxfp8"``: it is rounded to MXFP8 first, inside (W4A8,
        W8A8). ``"mxfp4"``, of MXFP4 weights: it is rounded to MXFP4 (W4A4), by ``mxfp4_quantize``'s rule, where a block with
        a NaN is NaN; SM12x's MMA has twice the rate then. Without meaning with ``x_scale``.
    x_scale : torch.Tensor, optional
        UE8M0 bytes of ``x``: 128x4 (``pad128(m) * pad4(k / 32)``), or linear ``[m, k / 32]``. On a GPU they start at a
        multiple of 4 bytes, unless they are linear and k is no multiple of 128.
    swizzled_x_scale : bool
        Which of the two.
    alpha : torch.Tensor, optional
        One float32, a factor of the product.
    residual : torch.Tensor, optional
        ``[m, n]`` of the output's dtype, added.
    out : torch.Tensor, optional
        ``[m, n]``; may be ``residual`` itself, and else may not overlap it or ``x``.
    out_dtype : torch.dtype, optional
        bfloat16 (default), float16 or float32; that of ``out`` if given.
    constant_weights : bool
        Nothing in front of this call on its stream writes ``weight`` or ``weight_scale``, so that they may be read while
        it still runs, as a model's weights may.
    enable_pdl : bool, optional
        Launch as a programmatic dependent; by default where the device can.
    tactic : int or str, optional
        Forces an instance by number or name (``jit.sm12x.instances.DENSE_INSTANCES``); by default the one that upstream's
        autotuner found, inside ``autotune(True)`` or before, else the planner's.

    Returns
    -------
    torch.Tensor
        ``out``.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    NotImplementedError
        The GPU has no kernels of this family.

    Notes
    -----
    Products are exact; sums are those of the device's tensor cores, of float32 on the CPU. e4m3 values whose scale is
    below ``2^-124`` may lose their last bits. ``k`` is a multiple of 32; ``n`` may be anything.
    """
    if torch.compiler.is_compiling():
        if out is not None and out_dtype not in (None, out.dtype):
            raise ValueError(f"out is {describe(out)}; with out_dtype={out_dtype} it must have that dtype")
        if out is None:
            out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or torch.bfloat16, device=x.device)
        torch.ops.flashinfer.sm12x_dense_mx(
            out,
            x,
            weight,
            weight_scale,
            bias,
            activation,
            x_scale,
            swizzled_x_scale,
            alpha,
            residual,
            constant_weights,
            enable_pdl,
            None if tactic is None else str(tactic),
        )
        return out
    dtype, token_format = validate(
        x, weight, weight_scale, bias, activation, x_scale, swizzled_x_scale, alpha, residual, out, out_dtype
    )
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    operands = Operands(out, x, x_scale, weight, weight_scale, alpha, bias, residual)
    row = instance_for(operands, token_format, tactic)
    if out.numel() != 0:
        run(row, operands, token_format, constant_weights, enable_pdl)
    return out


def instance_for(operands: Operands, token_format: int, tactic: int | str | None) -> DenseInstance | None:
    """What computes a validated call; None: cuBLAS on widened weights, or the CPU.

    Raises
    ------
    ValueError
        As :func:`instance`.
    """
    x, weights = operands.x, weights_of(operands.weight)
    virtual = x.device.type == "cpu" and virtual_device.active() is not None
    row = None if tactic is None else instance(tactic, weights, operands.k, token_format)
    if x.device.type == "cpu" and not virtual:
        return None
    if row is not None:
        return row
    on_sm12x = virtual or _dispatch().is_block_scaled(x.device)
    operand = gemm_operand(weights, token_format, on_sm12x)
    planned = choose(weights, x.shape[0], operands.weight.shape[0], operands.k, on_sm12x, operand)
    tuner = None if virtual else sm12x_probes.TUNER_HOLDER._instance
    if tuner is None:
        return planned
    from .sm12x_dense_tuning import tuned_instance

    return tuned_instance(tuner, operands, token_format, on_sm12x, planned)


def run(
    row: DenseInstance | None,
    operands: Operands,
    token_format: int,
    constant_weights: bool,
    enable_pdl: bool | None,
    top_k: RowTopK | None = None,
) -> None:
    """Compute a validated call of at least one output by what :func:`instance_for` gave, and the largest of each row."""
    device, k = operands.x.device, operands.k
    virtual = virtual_device.active() if device.type == "cpu" else None
    if device.type == "cpu" and row is None:  # a virtual device has no cuBLAS
        _compute_on_cpu(operands, token_format)
        if top_k is not None:
            top_k.compute_on_cpu(operands.out)
        return
    require_alignment({"x": operands.x, "weight": operands.weight, "weight_scale": operands.weight_scale})
    if row is not None and row.operand != "bf16" and (token_format != MXFP8_LINEAR or k % 128 == 0):
        require_alignment({"x_scale": operands.x_scale}, 4)  # read in words of four
    if virtual is not None and row is not None:
        from ..testing import virtual_operators

        pdl = enable_pdl is not False
        virtual_operators.run_dense(virtual, operands, token_format, row.index, constant_weights, pdl, top_k)
    elif _dispatch().one_device() or torch.cuda.current_device() == device.index:
        _launch(row, operands, token_format, constant_weights, enable_pdl, top_k)
    else:
        with torch.cuda.device(device):
            _launch(row, operands, token_format, constant_weights, enable_pdl, top_k)


@functools.lru_cache(maxsize=4096)
def _workspace_bytes(num_tokens: int, k: int, tactic: int, token_format: int, _device_index: int) -> int:
    return int(_dispatch().dense_module().sm12x_dense_gemm_workspace_size(num_tokens, k, tactic, token_format))


@functools.lru_cache(maxsize=4096)
def _ranks_bytes(num_tokens: int, n: int, top_k: int, _device_index: int) -> int:
    return int(_dispatch().dense_module().sm12x_row_top_k_workspace_size(num_tokens, n, top_k))


def _launch(
    row: DenseInstance | None,
    operands: Operands,
    token_format: int,
    constant_weights: bool,
    enable_pdl: bool | None,
    top_k: RowTopK | None,
) -> None:
    """Call the kernel module on the current device."""
    x, workspace = operands.x, None
    module = _dispatch().dense_module()
    pdl = device_support_pdl(x.device) if enable_pdl is None else enable_pdl
    largest: tuple[Any, ...] = ()
    if top_k is not None:
        size = _ranks_bytes(x.shape[0], operands.weight.shape[0], top_k.indices.shape[1], x.device.index)
        largest = (*top_k, torch.empty(size, dtype=torch.uint8, device=x.device))
    if row is None:
        _multiply_widened(operands, token_format)
        if top_k is not None:
            module.sm12x_row_top_k_run(*largest, operands.out, pdl)
        return
    if not row.streamed:
        size = _workspace_bytes(x.shape[0], operands.k, row.index, token_format, x.device.index)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    compute = module.sm12x_dense_run if top_k is None else module.sm12x_dense_top_k_run
    compute(*largest, *operands, workspace, token_format, row.index, constant_weights, pdl)


def _token_values(operands: Operands, token_format: int) -> torch.Tensor:
    """What the kernels multiply, as float32."""
    x, x_scale, blocks = operands.x, operands.x_scale, operands.k // BLOCK_SIZE
    if token_format == BF16:
        return x.float()
    if token_format in (QUANTIZE_BF16, QUANTIZE_F16):
        return mx_cpu.dequantize_mxfp8_linear(*mx_cpu.quantize_mxfp8_linear(x))
    if token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4):
        return mx_cpu.dequantize_mxfp4_linear(*mx_cpu.quantize_mxfp4_linear(x))
    assert x_scale is not None
    if token_format == MXFP8_LINEAR:
        return mx_cpu.dequantize_mxfp8_linear(x, x_scale.view(torch.uint8).reshape(x.shape[0], blocks))
    scales = mx_cpu.unswizzle_128x4(x_scale, x.shape[0], blocks)
    if token_format == MXFP8_SWIZZLED:
        return mx_cpu.dequantize_mxfp8_linear(x, scales)
    return mx_cpu.dequantize_mxfp4_linear(x, scales)


def _finish(operands: Operands, rows: slice, columns: slice, product: torch.Tensor) -> None:
    """A part of the output from its float32 product."""
    if operands.alpha is not None:
        product = product * operands.alpha
    if operands.bias is not None:
        product = product + operands.bias[columns].float()
    if operands.residual is not None:
        product = product + operands.residual[rows, columns].float()
    operands.out[rows, columns] = product


def _compute_on_cpu(operands: Operands, token_format: int) -> None:
    weight, k = operands.weight, operands.k
    scales = mx_cpu.unswizzle_128x4(operands.weight_scale, weight.shape[0], k // BLOCK_SIZE)
    dequantize = mx_cpu.dequantize_mxfp4_linear if weight.dtype is torch.uint8 else mx_cpu.dequantize_mxfp8_linear
    tokens = _token_values(operands, token_format)
    chunk = max(1, WIDENED_BYTES // (4 * k))
    for first in range(0, weight.shape[0], chunk):
        part = slice(first, first + chunk)
        _finish(operands, slice(None), part, tokens @ dequantize(weight[part], scales[part]).T)


def _multiply_widened(operands: Operands, token_format: int) -> None:
    """Many tokens on a GPU: both operands as bfloat16, some rows of weights at a time, by cuBLAS."""
    x, weight, k = operands.x, operands.weight, operands.k
    n, weight_format = weight.shape[0], MXFP4_SWIZZLED if weight.dtype is torch.uint8 else MXFP8_SWIZZLED
    module = _dispatch().dense_module()
    tokens = x
    if token_format != BF16:
        tokens = torch.empty((x.shape[0], k), dtype=torch.bfloat16, device=x.device)
        module.sm12x_widen_rows(tokens, x, operands.x_scale, token_format)
    chunk = max(128, WIDENED_BYTES // (2 * k) // 128 * 128)  # whole chunks of scales
    widened = torch.empty((min(n, chunk), k), dtype=torch.bfloat16, device=x.device)
    scales = operands.weight_scale.view(torch.uint8).reshape(
        -1, mx_cpu.swizzled_size(1, k // BLOCK_SIZE)
    )  # of 128 rows
    for first in range(0, n, chunk):
        part = slice(first, min(n, first + chunk))
        some = widened[: part.stop - first]
        module.sm12x_widen_rows(some, weight[part], scales[first // 128 :], weight_format)
        for row in range(0, x.shape[0], WIDENED_ROWS):
            rows = slice(row, row + WIDENED_ROWS)
            _finish(operands, rows, part, torch.mm(tokens[rows], some.T, out_dtype=torch.float32))


@torch.library.custom_op(OPERATOR, mutates_args=("out",))
def _operator(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    x_scale: torch.Tensor | None,
    swizzled_x_scale: bool,
    alpha: torch.Tensor | None,
    residual: torch.Tensor | None,
    constant_weights: bool,
    enable_pdl: bool | None,
    tactic: str | None,
) -> None:
    dense_mx(
        x,
        weight,
        weight_scale,
        bias,
        activation=activation,  # type: ignore[arg-type]
        x_scale=x_scale,
        swizzled_x_scale=swizzled_x_scale,
        alpha=alpha,
        residual=residual,
        out=out,
        out_dtype=out.dtype,
        constant_weights=constant_weights,
        enable_pdl=enable_pdl,
        tactic=tactic,
    )


@_operator.register_fake
def _operator_fake(*_arguments: Any, **_named: Any) -> None:
    """Nothing is returned: ``out`` is an argument, so its shape is known to whoever traces."""
