# SPDX-License-Identifier: Apache-2.0
"""Dense layers with block-scaled weights on SM12x's own kernels and on the CPU: the operator and its contract.

Few tokens are one split-K GEMM (``include/flashinfer/sm12x/split_k/dense.cuh``), more are a GEMM
(``tile/gemm.cuh``): of quantized tokens by SM12x's block-scaled MMA where it takes the weights, else of bfloat16, which
holds every value of these formats exactly. For very many, there, weights are dequantized to bfloat16 some rows at a
time, and cuBLAS multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch

from ..quantization.block_scaled import LAYOUTS, WEIGHT_FORMATS, WeightFormat
from ..sm12x import tune
from ..sm12x.backend import Backend, kernels
from ..sm12x.checks import (
    BLOCK_SIZE,
    ELEMENT,
    SCALE_WORD,
    describe,
    place_of,
    require_activation_bytes,
    require_apart,
    require_choice,
    require_computing_device,
    require_k_alignment,
    require_output_dtype,
    require_rank,
    require_read_ahead,
    require_scales,
    require_switches,
    require_tensor,
    require_tensor_type,
)
from ..sm12x.devices import require_served
from ..sm12x.instances import Format, Instance
from ..sm12x.operator import OutputOperator
from .sm12x_dense_launch import (
    BF16,
    MXFP4_SWIZZLED,
    MXFP8_LINEAR,
    MXFP8_SWIZZLED,
    QUANTIZE_BF16,
    QUANTIZE_BF16_TO_MXFP4,
    QUANTIZE_F16,
    QUANTIZE_F16_TO_MXFP4,
    DenseCall,
    RowTopK,
    instance,
    launch,
    planned_instance,
)
from .sm12x_dense_tuning import tuned_instance

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = get_args(Format)
_UNQUANTIZED: dict[tuple[str, torch.dtype], int] = {
    ("bf16", torch.bfloat16): BF16,
    ("mxfp8", torch.bfloat16): QUANTIZE_BF16,
    ("mxfp8", torch.float16): QUANTIZE_F16,
    ("mxfp4", torch.bfloat16): QUANTIZE_BF16_TO_MXFP4,
    ("mxfp4", torch.float16): QUANTIZE_F16_TO_MXFP4,
}
ARGUMENT_NAMES = {
    "dense_block_scaled": {},
    "dense_block_scaled_top_k": {"out": "logits"},
    "dense_block_scaled_rescored": {},
    "dense_block_scaled_rescored_top_k": {"out": "logits"},
    "rmsnorm_dense_block_scaled": {},
    "mm": {"x": "a", "weight": "b", "x_scale": "a_descale", "weight_scale": "b_descale"},
}
"""The function that was called -> those of its arguments' names that differ from the names here."""


def require_token_format(call: DenseCall, name: str) -> int:
    """The format of a call's tokens, an argument of that name, by their dtype, ``activation`` and ``x_scale``."""
    x, activation = call.x, call.activation
    if call.x_scale is None:
        if (activation, x.dtype) in _UNQUANTIZED:
            if activation == "mxfp4" and call.weight_format != "mxfp4":
                raise ValueError(f"activation is 'mxfp4'; with {call.weight_format} weights it may be bf16, mxfp8")
            return _UNQUANTIZED[activation, x.dtype]
        allowed = "bfloat16" if activation == "bf16" else "bfloat16 or float16"
        raise ValueError(f"{name} is {describe(x)}; with activation={activation!r} and no x_scale it must be {allowed}")
    if x.dtype is torch.float8_e4m3fn:
        return MXFP8_SWIZZLED if call.swizzled_x_scale else MXFP8_LINEAR
    if x.dtype is torch.uint8 and call.swizzled_x_scale:
        return MXFP4_SWIZZLED
    scale = ARGUMENT_NAMES[call.caller].get("x_scale", "x_scale")
    raise ValueError(
        f"{name} is {describe(x)}; with {scale} it must be float8_e4m3fn (MXFP8), or uint8 (MXFP4, with 128x4 scales)"
    )


def validate(call: DenseCall) -> tuple[torch.dtype, int]:
    """Check a call's metadata and addresses; its output's dtype, and the format of its tokens.

    Raises
    ------
    TypeError, ValueError
        Naming the first argument that does not fit, what it was and what it may be.
    """
    names = ARGUMENT_NAMES[call.caller]
    x_name = names.get("x", "x")
    require_rank(x_name, call.x, 2)
    require_rank(names.get("weight", "weight"), call.weight, 2)
    require_computing_device(x_name, call.x)
    require_choice("activation", call.activation, ACTIVATIONS)
    token_format = require_token_format(call, x_name)
    k = require_weight(call, call.x.device, names)
    out_dtype = require_options(call)
    require_tokens(call, k, call.x.device, out_dtype, token_format, names)
    return out_dtype, token_format


def require_options(call: DenseCall) -> torch.dtype:
    """Check what of a call is no tensor, but for ``activation``; the output's dtype."""
    out_dtype = call.out_dtype
    if out_dtype is None:
        out_dtype = call.out.dtype if isinstance(call.out, torch.Tensor) else torch.bfloat16
    require_switches(call, "swizzled_x_scale", "constant_weights")
    return require_output_dtype("out_dtype", out_dtype, OUTPUT_DTYPES)


def require_weight(call: DenseCall, device: torch.device, names: Mapping[str, str]) -> int:
    """Check what of a call is the layer's: the weight, which has two dimensions, its scales, bias and alpha; its k."""
    name, weight, layout = names.get("weight", "weight"), call.weight, LAYOUTS[call.weight_format]
    n, packed = weight.shape
    require_tensor(name, weight, [(n, packed)], (layout.dtype,), device, f"weight_format={call.weight_format!r}")
    k = _row_elements(name, call)
    scale_name = names.get("weight_scale", "weight_scale")
    require_scales(scale_name, call.weight_scale, n, k, device, formats=layout.scales)
    if call.bias is not None:
        require_tensor("bias", call.bias, [(n,)], OUTPUT_DTYPES, device, alignment=ELEMENT)
    if call.alpha is not None:
        require_tensor("alpha", call.alpha, [(), (1,)], (torch.float32,), device, alignment=ELEMENT)
    return k


def require_tokens(
    call: DenseCall, k: int, device: torch.device, out_dtype: torch.dtype, token_format: int, names: Mapping[str, str]
) -> None:
    """Check the tensors of a call that are not the layer's, whose weight has rows of ``k`` on ``device``; ``x`` is
    2-D."""
    x, x_scale = call.x, call.x_scale
    require_activation_bytes("the number of tokens", x.shape[0], 2 * k)  # as bfloat16
    columns = k // 2 if token_format == MXFP4_SWIZZLED else k
    if x.shape[1] != columns or place_of(x, device) is None:
        shapes, what = [(x.shape[0], columns)], f"k as {names.get('weight', 'weight')}'s"
        require_tensor(names.get("x", "x"), x, shapes, [x.dtype], device, what)
    if x_scale is not None:
        linear = token_format == MXFP8_LINEAR
        # Rows that are no whole words of scales are read by bytes.
        alignment = ELEMENT if linear and k % (SCALE_WORD * BLOCK_SIZE) else SCALE_WORD
        require_scales(names.get("x_scale", "x_scale"), x_scale, x.shape[0], k, device, not linear, alignment)
    for name, tensor in (("residual", call.residual), ("out", call.out)):
        if tensor is not None:
            shape = x.shape[0], call.weight.shape[0]
            require_tensor(names.get(name, name), tensor, [shape], (out_dtype,), device, alignment=ELEMENT)
    if call.next_weights is not None:
        require_read_ahead(call.next_weights, device)
    if call.out is not None:
        require_apart(call, {"out": ("residual",)}, names)


def _row_elements(name: str, call: DenseCall) -> int:
    """Elements of a row of the weight."""
    k = call.k
    if k == 0 and call.weight_format == "mxfp6":
        raise ValueError(
            f"{name} is {describe(call.weight)}; a row of mxfp6 is 24 bytes for each 32 elements, up to a multiple "
            "of 16"
        )
    return require_k_alignment("k", k)


def dense_block_scaled(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_format: WeightFormat,
    activation: Format = "bf16",
    x_scale: torch.Tensor | None = None,
    swizzled_x_scale: bool = True,
    alpha: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    next_weights: torch.Tensor | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> torch.Tensor:
    """``alpha * x @ weight.T + bias + residual`` with a block-scaled weight, as ``quantize_weight`` makes it.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) these are this fork's kernels; CPU
    tensors are computed on the CPU. Results are the same on every run.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]``: bfloat16 (or float16 where it is rounded inside); float8_e4m3fn with ``x_scale`` (MXFP8); uint8
        ``[m, k / 2]``, two e2m1 a byte, with ``x_scale`` (MXFP4).
    weight : torch.Tensor
        ``[n, ...]``, rows of ``weight_format``:

        ==========  ================
                    ======================================================================================
        mxfp4       uint8 k / 2       two e2m1 a byte, the even element in the low nibble
        nvfp4       uint8 k / 2       the same
        mxfp6       uint8 24 k / 32   e2m3, up to a multiple of 16 bytes; in ``include/flashinfer/sm12x/types.h``'s
                    order
        mxint8      int8 k            64ths, -128 is -2
        mxfp8       float8_e4m3fn k
        ==========  ================
                    ======================================================================================
    weight_scale : torch.Tensor
        Scales in 128x4 layout, of any shape: ``pad128(n) * pad4(k / 32)`` UE8M0 bytes (uint8 or float8_e8m0fnu); for
        nvfp4 ``pad128(n) * pad4(k / 16)`` E4M3 bytes (uint8 or float8_e4m3fn), whose sign bits are ignored. A scale of
        255 (E4M3: 0x7F) is NaN and makes every output of its weight row NaN. If a weight, ``2^(s - 127)`` times an
        element, exceeds float32, its outputs are infinite, NaN or right, depending on the backend.
    bias : torch.Tensor, optional
        ``[n]`` bfloat16, float16 or float32.
    weight_format : str
        The format of ``weight``, one of ``quantization.block_scaled.WEIGHT_FORMATS``; it is not inferred from the
        bytes.
    activation : str
        ``"bf16"``: x is multiplied unrounded (W4A16, W8A16). ``"mxfp8"``: the call first rounds x to MXFP8 (W4A8,
        W8A8); no gain with nvfp4 and mxint8 weights, which SM12x's block-scaled MMA does not take. ``"mxfp4"``, with
        MXFP4 weights only: the call rounds x to MXFP4 (W4A4) by the rule of ``mxfp4_quantize``, by which a block with a
        NaN becomes NaN; SM12x's MMA then has twice the rate. Ignored when ``x_scale`` is given. Rounding saturates
        within float32: an infinite element counts as 448 x 2^119 (MXFP8) or 6 x 2^125 (MXFP4).
    x_scale : torch.Tensor, optional
        UE8M0 bytes of ``x``: 128x4 (``pad128(m) * pad4(k / 32)``), or linear ``[m, k / 32]``. They start at a
        multiple of 4 bytes, unless they are linear and k is no multiple of 128. An element beyond float32, as
        ``mxfp8_quantize`` makes of infinity, spoils its row's outputs as such a weight does its column's.
    swizzled_x_scale : bool
        True: ``x_scale`` has the 128x4 layout; False: it is linear.
    alpha : torch.Tensor, optional
        One float32 that multiplies the product: NVFP4's global scale.
    residual : torch.Tensor, optional
        ``[m, n]`` of the output's dtype, added.
    out : torch.Tensor, optional
        ``[m, n]``; may be ``residual`` itself, and else shares memory with no argument.
    out_dtype : torch.dtype, optional
        bfloat16 (default), float16 or float32; that of ``out`` if given.
    next_weights : torch.Tensor, optional
        A tensor that a later launch reads in any case, such as the next layer's weight: contiguous, of any shape and
        dtype. If this layer is a split-K kernel, it prefetches the tensor's beginning (up to a twelfth of L2) into
        L2 once all of its own weights are requested. Results do not change; otherwise, and on the CPU, it has no
        effect.
    constant_weights : bool
        True: no earlier work on the call's stream writes ``weight`` or ``weight_scale``, so the kernel may read them
        while that work still runs. This holds for a model's weights.
    enable_pdl : bool, optional
        Launch as a programmatic dependent; by default where the device can.
    tactic : int or str, optional
        Forces an instance by number or name (``sm12x.instances.DENSE_INSTANCES``); by default the one that upstream's
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
    require_choice("weight_format", weight_format, WEIGHT_FORMATS)
    forced = None if tactic is None else str(tactic)
    return compute(
        DenseCall(
            out=out,
            x=x,
            x_scale=x_scale,
            weight=weight,
            weight_scale=weight_scale,
            alpha=alpha,
            bias=bias,
            residual=residual,
            out_dtype=out_dtype,
            weight_format=weight_format,
            activation=activation,
            swizzled_x_scale=swizzled_x_scale,
            next_weights=next_weights,
            constant_weights=constant_weights,
            enable_pdl=enable_pdl,
            tactic=forced,
            top_k=0,
            first_index=0,
            caller="dense_block_scaled",
        )
    )


FORMATS_BY_DTYPE: dict[torch.dtype, WeightFormat] = {torch.uint8: "mxfp4", torch.float8_e4m3fn: "mxfp8"}
"""The weight format that the older functions, which take no ``weight_format``, assume for each dtype."""


def format_of(weight: Any) -> WeightFormat:
    """The format that :data:`FORMATS_BY_DTYPE` gives the weight's dtype.

    Raises
    ------
    TypeError, ValueError
        Not a tensor; another dtype.
    """
    allowed = " or ".join(map(str, FORMATS_BY_DTYPE))
    require_tensor_type("weight", weight, f"a tensor of {allowed}")
    if weight.dtype not in FORMATS_BY_DTYPE:
        raise ValueError(f"weight is {describe(weight)}; it must be {allowed}, or name its weight_format")
    return FORMATS_BY_DTYPE[weight.dtype]


def dense_mx(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None, **named: Any
) -> torch.Tensor:
    """:func:`dense_block_scaled` of a weight whose dtype names its format: uint8 is MXFP4, float8_e4m3fn MXFP8."""
    return dense_block_scaled(x, weight, weight_scale, bias, weight_format=format_of(weight), **named)


def _run(call: DenseCall, checked: tuple[torch.dtype, int]) -> None:
    dtype, token_format = checked
    run(call if call.out_dtype is dtype else call._replace(out_dtype=dtype), token_format)


compute = OutputOperator("sm12x_dense_mx", DenseCall, validate, _run, DenseCall.new_output, ("out",))


def instance_for(backend: Backend | None, call: DenseCall, token_format: int) -> Instance | None:
    """The instance that computes a valid call; None: cuBLAS on dequantized weights, or the CPU, computes it.

    Raises
    ------
    ValueError
        The errors of :func:`instance`.
    """
    row = None if call.tactic is None else instance(call.tactic, call.weight_format, call.k, token_format)
    if backend is None or row is not None:
        return None if backend is None else row
    planned = planned_instance(backend, call, token_format)
    if not backend.is_cuda or tune.is_idle():
        return planned
    return tuned_instance(backend, call, token_format, planned)


def run(call: DenseCall, token_format: int, top_k: RowTopK | None = None) -> None:
    """Compute a valid call, and the largest of each row; if only these are wanted, outputs need no memory.

    Raises
    ------
    NotImplementedError
        The GPU has no kernels of this family.
    ValueError
        The errors of :func:`instance`.
    """
    require_served("dense_block_scaled", call.x.device)
    run_served(call, token_format, top_k)


def run_served(call: DenseCall, token_format: int, top_k: RowTopK | None = None) -> None:
    """:func:`run` where it is known that this fork serves the device."""
    backend = kernels(call.x.device)
    row = instance_for(backend, call, token_format)
    if call.out is None and not (call.top_k == 1 and row is not None and row.split_k):
        call = call.with_output(call.new_output())
    if call.x.shape[0] and call.weight.shape[0]:
        launch(backend, row, call, token_format, top_k)
