# SPDX-License-Identifier: Apache-2.0
"""Dense layers with weights in MXFP4 or MXFP8 on SM12x's own kernels and on the CPU: checks, choice of kernel, launch.

Few tokens are one stream of weights (``include/flashinfer/sm12x/impls/dense_layer.cuh``), more are a GEMM
(``grouped_gemm.cuh``): of MXFP8 tokens by SM12x's block-scaled MMA, else of bfloat16, which holds every value of these
formats exactly. For very many, there, weights are widened to bfloat16 some rows at a time, and cuBLAS multiplies them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch

from ..jit.sm12x.instances import DENSE_INSTANCES, DenseInstance
from ..quantization import mx_cpu
from ..quantization.mx_cpu import BLOCK_SIZE
from ..sm12x_arguments import (
    describe,
    require_alignment,
    require_computing_device,
    require_k_alignment,
    require_tensor,
    require_tensor_type,
)
from ..testing import virtual_device
from ..utils import device_support_pdl

OPERATOR = "flashinfer::sm12x_dense_mx"
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDENED_BYTES = 64 << 20
"""Of dequantized weights that a call with many tokens, or one on the CPU, holds at a time."""

WIDENED_ROWS = 2048
"""Tokens that such a call multiplies at a time: their float32 products are as large as the weights."""

# Formats of token rows, as the kernels number them (DenseTokens in dense_params.cuh).
BF16, QUANTIZE_BF16, QUANTIZE_F16, MXFP8_SWIZZLED, MXFP8_LINEAR, MXFP4_SWIZZLED = range(6)

Activation = Literal["bf16", "mxfp8"]


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


def _dispatch() -> Any:
    from ..fused_moe import sm12x_dispatch

    return sm12x_dispatch


def weights_of(weight: torch.Tensor) -> Literal["mxfp4", "mxfp8"]:
    """The format of a weight: packed bytes are MXFP4, e4m3 is MXFP8."""
    return "mxfp8" if weight.dtype is torch.float8_e4m3fn else "mxfp4"


# Where one way overtakes another: measured on an H200 for gpt-oss's layers (docs/dense.md), a prediction on SM12x.
SECOND_PASS_BYTES = 12 << 20
"""Weights that are streamed twice, for two tiles of tokens, rather than multiplied by a GEMM: L2 still has them."""
FEW_TILES = {"bf16": 264, "mxfp8": 48}
"""Tiles of the output, of 128 rows and the fewest tokens, up to which small tiles are faster: measured on an H200, with two
for each SM; one for each SM of a GB10, none of which is cut then (a prediction)."""
GEMM_TILE_COST = {"bf16": {32: 1.0, 48: 1.2, 64: 1.45}, "mxfp8": {64: 1.0, 128: 1.8}}
"""Time of a tile of so many tokens, where there are many, by what it multiplies; MXFP8's is a prediction."""
WIDENED_TOKENS = {False: 256, True: 4096}
"""From so many tokens on cuBLAS multiplies widened weights: on Hopper, whose cuBLAS has wgmma, and on SM12x. MXFP8 tokens
stay with SM12x's block-scaled MMA, whose rate is twice or four times that of bfloat16."""


def choose(
    weights: str, num_tokens: int, n: int, k: int, on_sm12x: bool = True, operand: Activation = "bf16"
) -> DenseInstance | None:
    """The instance for ``num_tokens`` rows and a weight ``[n, k]``; None: cuBLAS is to multiply widened weights.

    ``operand`` is as what a GEMM multiplies the tokens.
    """
    if operand == "bf16" and num_tokens >= WIDENED_TOKENS[on_sm12x]:
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
def _sums_in_float32() -> bool:
    """Whether this machine's block-scaled MMAs are taken to add up as float32 does; read once, as modules are built once."""
    from ..jit.sm12x.modules import multiplies_in_half

    return not multiplies_in_half()


def gemm_operand(token_format: int, on_sm12x: bool) -> Activation:
    """As what a GEMM multiplies tokens of this format: MXFP8 where the device's MMA takes block scales and sums in float32."""
    return "mxfp8" if token_format != BF16 and on_sm12x and _sums_in_float32() else "bf16"


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
        if row.weights == weights and row.longest_k >= k and (row.operand == "bf16" or token_format != BF16)
    ]
    for row in allowed:
        if str(tactic) in (str(row.index), row.name):
            return row
    names = ", ".join(f"{row.index} ({row.name})" for row in allowed) or "none, since K is too long"
    tokens = "bfloat16" if token_format == BF16 else "quantized"
    raise ValueError(f"tactic is {tactic!r}; for {weights} weights with k = {k} and {tokens} tokens it may be {names}")


def _token_format(x: torch.Tensor, x_scale: Any, activation: Any, swizzled_x_scale: bool) -> int:
    if activation not in ("bf16", "mxfp8"):
        raise ValueError(f"activation is {describe(activation)}; it must be 'bf16' or 'mxfp8'")
    if x_scale is None:
        if x.dtype is torch.bfloat16:
            return BF16 if activation == "bf16" else QUANTIZE_BF16
        if x.dtype is torch.float16 and activation == "mxfp8":
            return QUANTIZE_F16
        allowed = "bfloat16" if activation == "bf16" else "bfloat16 or float16"
        raise ValueError(f"x is {describe(x)}; with activation={activation!r} and no x_scale it must be {allowed}")
    if x.dtype is torch.float8_e4m3fn:
        return MXFP8_SWIZZLED if swizzled_x_scale else MXFP8_LINEAR
    if x.dtype is torch.uint8 and swizzled_x_scale:
        return MXFP4_SWIZZLED
    raise ValueError(
        f"x is {describe(x)}; with x_scale it must be float8_e4m3fn (MXFP8), or uint8 (MXFP4, with 128x4 scales)"
    )


def require_scales(name: str, scales: Any, rows: int, k: int, device: torch.device, swizzled: bool = True) -> None:
    """Raise unless ``scales`` are the bytes of a matrix ``[rows, k]``, of whatever shape holds as many as the layout has.

    Raises
    ------
    TypeError, ValueError
        Not a tensor; another size, device, or not contiguous bytes.
    """
    blocks = k // BLOCK_SIZE
    needed = mx_cpu.swizzled_size(rows, blocks) if swizzled else rows * blocks
    layout = "128x4" if swizzled else "linear"
    expected = f"{needed} contiguous bytes: {layout} scales of {rows} rows and {blocks} blocks of 32, on {device}"
    require_tensor_type(name, scales, expected)
    fits = scales.element_size() == 1 and scales.numel() == needed and scales.device == device
    if not fits or not scales.is_contiguous():
        raise ValueError(f"{name} is {describe(scales)}; it must be {expected}")


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
        ``[m, k]``: bfloat16 (or float16 with ``activation="mxfp8"``); float8_e4m3fn with ``x_scale`` (MXFP8); uint8
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
        W8A8). Without meaning with ``x_scale``.
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
        Forces an instance by number or name (``jit.sm12x.instances.DENSE_INSTANCES``).

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
    Products are exact, sums are float32. e4m3 values whose scale is below ``2^-124`` may lose their last bits. ``k`` is
    a multiple of 32; ``n`` may be anything.
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
    out, token_format = _validate(
        x, weight, weight_scale, bias, activation, x_scale, swizzled_x_scale, alpha, residual, out, out_dtype
    )
    operands = Operands(out, x, x_scale, weight, weight_scale, alpha, bias, residual)
    weights, k = weights_of(weight), operands.k
    on_cpu = x.device.type == "cpu"
    virtual = virtual_device.active() if on_cpu else None
    row: DenseInstance | None
    if tactic is not None:
        row = instance(tactic, weights, k, token_format)
    else:
        on_sm12x = virtual is not None or _dispatch().is_block_scaled(x.device)
        row = choose(weights, x.shape[0], weight.shape[0], k, on_sm12x, gemm_operand(token_format, on_sm12x))
    if out.numel() == 0:
        return out
    if on_cpu and (virtual is None or row is None):  # a virtual device has no cuBLAS
        _compute_on_cpu(operands, token_format)
        return out
    require_alignment({"x": x, "weight": weight, "weight_scale": weight_scale})
    if row is not None and row.operand == "mxfp8" and (token_format != MXFP8_LINEAR or k % 128 == 0):
        require_alignment({"x_scale": x_scale}, 4)  # read in words of four
    if virtual is not None and row is not None:
        from ..testing import virtual_operators

        pdl = enable_pdl is not False
        virtual_operators.run_dense(virtual, operands, token_format, row.index, constant_weights, pdl)
    elif _dispatch().one_device() or torch.cuda.current_device() == x.device.index:
        _launch(row, operands, token_format, constant_weights, enable_pdl)
    else:
        with torch.cuda.device(x.device):
            _launch(row, operands, token_format, constant_weights, enable_pdl)
    return out


@functools.lru_cache(maxsize=4096)
def _workspace_bytes(num_tokens: int, k: int, device_index: int) -> int:
    return int(_dispatch().dense_module().sm12x_dense_gemm_workspace_size(num_tokens, k))


def _launch(
    row: DenseInstance | None,
    operands: Operands,
    token_format: int,
    constant_weights: bool,
    enable_pdl: bool | None,
) -> None:
    """Call the kernel module on the current device."""
    if row is None:
        _multiply_widened(operands, token_format)
        return
    x, workspace = operands.x, None
    if not row.streamed:
        size = _workspace_bytes(x.shape[0], operands.k, x.device.index)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    pdl = device_support_pdl(x.device) if enable_pdl is None else enable_pdl
    _dispatch().dense_module().sm12x_dense_run(*operands, workspace, token_format, row.index, constant_weights, pdl)


def _require_apart(out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise where an output would be written before what it replaces was read."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()

    first, last = span(out)
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is None or (name == "residual" and span(tensor) == (first, last)):
            continue
        start, end = span(tensor)
        if start < last and first < end:
            raise ValueError(f"out overlaps {name}; it must be memory of its own")


def _validate(
    x: Any,
    weight: Any,
    weight_scale: Any,
    bias: Any,
    activation: Any,
    x_scale: Any,
    swizzled_x_scale: bool,
    alpha: Any,
    residual: Any,
    out: Any,
    out_dtype: Any,
) -> tuple[torch.Tensor, int]:
    """Check a call's metadata; the output, allocated if need be, and the tokens' format."""
    for name, tensor in (("x", x), ("weight", weight)):
        require_tensor_type(name, tensor)
        if tensor.ndim != 2:
            raise ValueError(f"{name} is {describe(tensor)}; it must be 2-D")
    require_computing_device("x", x)
    device = x.device
    if not _dispatch().serves(device):
        raise NotImplementedError(
            f"dense_mx has no kernels for {torch.cuda.get_device_name(device)}: they are for compute capability 12.x "
            "(and 9.0 with FLASHINFER_SM12X_MOE=1)"
        )
    token_format = _token_format(x, x_scale, activation, swizzled_x_scale)
    n, packed = weight.shape
    require_tensor("weight", weight, [(n, packed)], [torch.uint8, torch.float8_e4m3fn], device)
    k = require_k_alignment("k", packed * (2 if weight.dtype is torch.uint8 else 1))
    m = x.shape[0]
    require_tensor("x", x, [(m, k // 2 if token_format == MXFP4_SWIZZLED else k)], [x.dtype], device, "k as weight's")
    require_scales("weight_scale", weight_scale, n, k, device)
    if x_scale is not None:
        require_scales("x_scale", x_scale, m, k, device, token_format != MXFP8_LINEAR)
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16
    if out_dtype not in OUTPUT_DTYPES:
        raise ValueError(f"out_dtype is {describe(out_dtype)}; it must be bfloat16, float16 or float32")
    if bias is not None:
        require_tensor("bias", bias, [(n,)], OUTPUT_DTYPES, device)
    if alpha is not None:
        require_tensor("alpha", alpha, [(), (1,)], [torch.float32], device)
    if residual is not None:
        require_tensor("residual", residual, [(m, n)], [out_dtype], device)
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=device)
    else:
        require_tensor("out", out, [(m, n)], [out_dtype], device)
        _require_apart(out, x, residual)
    return out, token_format


def _token_values(operands: Operands, token_format: int) -> torch.Tensor:
    """What the kernels multiply, as float32."""
    x, x_scale, blocks = operands.x, operands.x_scale, operands.k // BLOCK_SIZE
    if token_format == BF16:
        return x.float()
    if token_format in (QUANTIZE_BF16, QUANTIZE_F16):
        return mx_cpu.dequantize_mxfp8_linear(*mx_cpu.quantize_mxfp8_linear(x))
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
