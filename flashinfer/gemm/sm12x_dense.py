# SPDX-License-Identifier: Apache-2.0
"""Dense layers with weights in MXFP4 or MXFP8 on SM12x's own kernels and on the CPU: contract, choice of kernel, launch.

Few tokens are one stream of weights (``include/flashinfer/sm12x/stream/dense.cuh``), more are a GEMM
(``tile/gemm.cuh``): of quantized tokens by SM12x's block-scaled MMA, else of bfloat16, which holds every value of these
formats exactly. For very many, there, weights are dequantized to bfloat16 some rows at a time, and cuBLAS multiplies them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args

import torch

from ..jit.sm12x.instances import DENSE_INSTANCES, Format, Instance
from ..jit.sm12x.modules import gen_dense_module, multiplies_in_half
from ..quantization import mx_cpu
from ..sm12x import tune
from ..sm12x.backend import Backend, kernels, plain_torch
from ..sm12x.checks import (
    BLOCK_SIZE,
    ELEMENT,
    SCALE_WORD,
    describe,
    require_apart,
    require_choice,
    require_computing_device,
    require_k_alignment,
    require_output_dtype,
    require_rank,
    require_scales,
    require_switches,
    require_tensor,
)
from ..sm12x.devices import require_served
from ..sm12x.operator import define, is_traced, validated

OPERATOR = "flashinfer::sm12x_dense_mx"
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEQUANTIZED_BYTES = 64 << 20
"""Of dequantized weights that a call with many tokens, or one on the CPU, holds at a time."""

DEQUANTIZED_ROWS = 2048
"""Tokens that such a call multiplies at a time: their float32 products are as large as the weights."""

# Formats of token rows, as the kernels number them (TokenFormat in types.h).
BF16, QUANTIZE_BF16, QUANTIZE_F16, MXFP8_SWIZZLED, MXFP8_LINEAR, MXFP4_SWIZZLED = range(6)
QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4 = 6, 7

_UNQUANTIZED: dict[tuple[str, torch.dtype], int] = {
    ("bf16", torch.bfloat16): BF16,
    ("mxfp8", torch.bfloat16): QUANTIZE_BF16,
    ("mxfp8", torch.float16): QUANTIZE_F16,
    ("mxfp4", torch.bfloat16): QUANTIZE_BF16_TO_MXFP4,
    ("mxfp4", torch.float16): QUANTIZE_F16_TO_MXFP4,
}
_NAMES = {
    "dense_mx": {},
    "dense_mx_top_k": {"out": "logits"},
    "mm": {"x": "a", "weight": "b", "x_scale": "a_descale", "weight_scale": "b_descale"},
}
"""What the arguments of a call are known as to who made it."""


class DenseCall(NamedTuple):
    """The arguments of one call, named as in :func:`dense_mx`; its tensors in the order of the kernels' module."""

    out: torch.Tensor | None
    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out_dtype: torch.dtype | None
    activation: str
    swizzled_x_scale: bool
    constant_weights: bool
    enable_pdl: bool | None
    tactic: str | None
    top_k: int  # 0: of dense_mx
    first_index: int
    caller: str  # of _NAMES

    @property
    def k(self) -> int:
        """Elements of a row."""
        return self.weight.shape[1] * (2 if self.weight.dtype is torch.uint8 else 1)

    def new_output(self) -> torch.Tensor:
        """Memory for all outputs of a valid call, or of one that is traced."""
        shape, dtype = (self.x.shape[0], self.weight.shape[0]), self.out_dtype or torch.bfloat16
        return torch.empty(shape, dtype=dtype, device=self.x.device)


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


def _token_format(call: DenseCall, name: str) -> int:
    x, activation = call.x, call.activation
    require_choice("activation", activation, get_args(Format))
    if call.x_scale is None:
        if (activation, x.dtype) in _UNQUANTIZED:
            return _UNQUANTIZED[activation, x.dtype]
        allowed = "bfloat16" if activation == "bf16" else "bfloat16 or float16"
        raise ValueError(f"{name} is {describe(x)}; with activation={activation!r} and no x_scale it must be {allowed}")
    if x.dtype is torch.float8_e4m3fn:
        return MXFP8_SWIZZLED if call.swizzled_x_scale else MXFP8_LINEAR
    if x.dtype is torch.uint8 and call.swizzled_x_scale:
        return MXFP4_SWIZZLED
    scale = _NAMES[call.caller].get("x_scale", "x_scale")
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
    names = _NAMES[call.caller]
    x, weight, x_scale, out_dtype = call.x, call.weight, call.x_scale, call.out_dtype
    x_name, weight_name, out_name = names.get("x", "x"), names.get("weight", "weight"), names.get("out", "out")
    require_rank(x_name, x, 2)
    require_rank(weight_name, weight, 2)
    require_computing_device(x_name, x)
    device = x.device
    token_format = _token_format(call, x_name)
    n, packed = weight.shape
    require_tensor(weight_name, weight, [(n, packed)], [torch.uint8, torch.float8_e4m3fn], device)
    if token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4) and weight.dtype is not torch.uint8:
        raise ValueError(f"weight is {describe(weight)}; with activation='mxfp4' it must be uint8 (MXFP4)")
    m, k = x.shape[0], require_k_alignment("k", call.k)
    columns = k // 2 if token_format == MXFP4_SWIZZLED else k
    require_tensor(x_name, x, [(m, columns)], [x.dtype], device, f"k as {weight_name}'s")
    require_scales(names.get("weight_scale", "weight_scale"), call.weight_scale, n, k, device)
    if x_scale is not None:
        linear = token_format == MXFP8_LINEAR
        # Rows that are no whole words of scales are read by bytes.
        alignment = ELEMENT if linear and k % (SCALE_WORD * BLOCK_SIZE) else SCALE_WORD
        require_scales(names.get("x_scale", "x_scale"), x_scale, m, k, device, not linear, alignment)
    if out_dtype is None:
        out_dtype = call.out.dtype if isinstance(call.out, torch.Tensor) else torch.bfloat16
    require_output_dtype("out_dtype", out_dtype, OUTPUT_DTYPES)
    for name, tensor, shapes, dtypes in (
        ("bias", call.bias, [(n,)], OUTPUT_DTYPES),
        ("alpha", call.alpha, [(), (1,)], (torch.float32,)),
        ("residual", call.residual, [(m, n)], (out_dtype,)),
        (out_name, call.out, [(m, n)], (out_dtype,)),
    ):
        if tensor is not None:
            require_tensor(name, tensor, shapes, dtypes, device, alignment=ELEMENT)
    require_switches(call, "swizzled_x_scale", "constant_weights")
    require_apart(call, {"out": ("residual",)}, names)
    return out_dtype, token_format


def weights_of(weight: torch.Tensor) -> Literal["mxfp4", "mxfp8"]:
    """The format of a weight: packed bytes are MXFP4, e4m3 is MXFP8."""
    return "mxfp8" if weight.dtype is torch.float8_e4m3fn else "mxfp4"


# Where one way overtakes another: measured on an H200 for gpt-oss's layers, a prediction on SM12x.
SECOND_PASS_BYTES = 12 << 20
"""Weights that are streamed twice, for two tiles of tokens, rather than multiplied by a GEMM: L2 still has them."""
GB10_SMS = 48
FEW_TILES = {"bf16": 2, "mxfp8": 1, "mxfp4": 1}
"""Tiles of the output for each SM, of 128 rows and the fewest tokens, up to which small tiles are faster: measured on an H200
for bf16; for the others none is cut then (a prediction)."""
GEMM_TILE_COST = {"bf16": {32: 1.0, 48: 1.2, 64: 1.45}, "mxfp8": {64: 1.0, 128: 1.8}, "mxfp4": {64: 1.0, 128: 1.8}}
"""Time of a tile of so many tokens, where there are many, by what it multiplies: measured for bf16, predicted for the others."""
DEQUANTIZED_TOKENS = {False: 256, True: 4096}
"""From so many tokens on cuBLAS multiplies dequantized weights: on Hopper, whose cuBLAS has wgmma, and on SM12x. Quantized tokens
stay with SM12x's block-scaled MMA, whose rate is two to eight times that of bfloat16."""
DEQUANTIZED_IN_PIECES_TOKENS = {"mxfp4": 1024, "mxfp8": 512}
"""The same on Hopper where the weight is dequantized in pieces (``DEQUANTIZED_BYTES``), as an LM head is: measured."""


def choose(
    weights: str,
    num_tokens: int,
    n: int,
    k: int,
    on_sm12x: bool = True,
    operand: Format = "bf16",
    sm_count: int = GB10_SMS,
) -> Instance | None:
    """The instance for ``num_tokens`` rows and a weight ``[n, k]``; None: cuBLAS is to multiply dequantized weights.

    ``operand`` is as what a GEMM multiplies the tokens, ``sm_count`` the device's multiprocessors.
    """
    in_pieces = not on_sm12x and 2 * n * k > DEQUANTIZED_BYTES
    if operand == "bf16" and num_tokens >= (
        DEQUANTIZED_IN_PIECES_TOKENS[weights] if in_pieces else DEQUANTIZED_TOKENS[on_sm12x]
    ):
        return None
    return choose_instance(weights, num_tokens, n, k, operand, sm_count)


def choose_instance(weights: str, num_tokens: int, n: int, k: int, operand: Format, sm_count: int) -> Instance:
    """The instance for ``num_tokens`` rows and a weight ``[n, k]``; a GEMM multiplies the tokens as ``operand``."""
    rows = [row for row in DENSE_INSTANCES if row.weights == weights and row.longest_k >= k]
    passes = 2 if n * k // (2 if weights == "mxfp4" else 1) <= SECOND_PASS_BYTES else 1
    streams = [row for row in rows if row.streamed and passes * row.token_tile >= num_tokens]
    if streams:
        return min(streams, key=lambda row: (-(-num_tokens // row.token_tile), row.token_tile, row.k_tile))
    gemms = [row for row in rows if not row.streamed and row.operand == operand]
    smallest = min(gemms, key=lambda row: row.token_tile)
    if -(-n // 128) * -(-num_tokens // smallest.token_tile) <= FEW_TILES[operand] * sm_count:
        return smallest
    return min(gemms, key=lambda row: -(-num_tokens // row.token_tile) * GEMM_TILE_COST[operand][row.token_tile])


@functools.cache
def _mma_is_used(operand: Format) -> bool:
    """Whether this machine's MMA of ``operand`` adds up widely enough; read once, as modules are built once."""
    return operand == "bf16" or not multiplies_in_half({"mxfp8": "mxf8f6f4", "mxfp4": "mxf4"}[operand])


def gemm_operand(weights: str, token_format: int, on_sm12x: bool) -> Format:
    """As what a GEMM multiplies tokens of this format: bf16 unless the device has a block-scaled MMA that is used."""
    if not on_sm12x:
        return "bf16"
    return [operand for operand in gemm_operands(weights, token_format) if _mma_is_used(operand)][-1]


def gemm_operands(weights: str, token_format: int) -> tuple[Format, ...]:
    """As what GEMMs can multiply tokens of this format without rounding; what is chosen on SM12x last."""
    if token_format == BF16:
        return ("bf16",)
    if token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4):
        return ("bf16", "mxfp4")
    if token_format == MXFP4_SWIZZLED and weights == "mxfp4":
        return ("bf16", "mxfp8", "mxfp4")
    return ("bf16", "mxfp8")


def instance(tactic: int | str | None, weights: str, k: int, token_format: int = QUANTIZE_BF16) -> Instance:
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
    activation: Format = "bf16",
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
        UE8M0 bytes (uint8 or float8_e8m0fnu) in 128x4 layout: ``pad128(n) * pad4(k / 32)`` of them, of any shape.
    bias : torch.Tensor, optional
        ``[n]`` bfloat16, float16 or float32.
    activation : str
        ``"bf16"``: x is multiplied as it is (W4A16, W8A16). ``"mxfp8"``: it is rounded to MXFP8 first, inside (W4A8,
        W8A8). ``"mxfp4"``, of MXFP4 weights: it is rounded to MXFP4 (W4A4), by ``mxfp4_quantize``'s rule, where a block with
        a NaN is NaN; SM12x's MMA has twice the rate then. Without meaning with ``x_scale``.
    x_scale : torch.Tensor, optional
        UE8M0 bytes of ``x``: 128x4 (``pad128(m) * pad4(k / 32)``), or linear ``[m, k / 32]``. They start at a
        multiple of 4 bytes, unless they are linear and k is no multiple of 128.
    swizzled_x_scale : bool
        Which of the two.
    alpha : torch.Tensor, optional
        One float32, a factor of the product.
    residual : torch.Tensor, optional
        ``[m, n]`` of the output's dtype, added.
    out : torch.Tensor, optional
        ``[m, n]``; may be ``residual`` itself, and else shares memory with no argument.
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
            activation=activation,
            swizzled_x_scale=swizzled_x_scale,
            constant_weights=constant_weights,
            enable_pdl=enable_pdl,
            tactic=forced,
            top_k=0,
            first_index=0,
            caller="dense_mx",
        )
    )


_known: dict[Any, tuple[torch.dtype, int]] = {}


def compute(call: DenseCall) -> torch.Tensor:
    """The output of a call, which is allocated where the call brings none."""
    traced = is_traced(call)
    token_format = -1
    if not traced:
        dtype, token_format = validated(validate, call, _known)
        call = call._replace(out_dtype=dtype)
    if call.out is None:
        call = call._replace(out=call.new_output())
    if traced:
        _operator(call)
    else:
        run(call, token_format)
    out: Any = call.out
    return out


def _run_operator(call: DenseCall) -> None:
    dtype, token_format = validate(call)
    run(call._replace(out_dtype=dtype), token_format)


_operator = define("sm12x_dense_mx", DenseCall, _run_operator, mutates=("out",))


def instance_for(backend: Backend | None, call: DenseCall, token_format: int) -> Instance | None:
    """What computes a valid call; None: cuBLAS on dequantized weights, or the CPU.

    Raises
    ------
    ValueError
        As :func:`instance`.
    """
    weights = weights_of(call.weight)
    row = None if call.tactic is None else instance(call.tactic, weights, call.k, token_format)
    if backend is None or row is not None:
        return None if backend is None else row
    on_sm12x = backend.block_scaled_mma
    operand = gemm_operand(weights, token_format, on_sm12x)
    sizes = call.x.shape[0], call.weight.shape[0], call.k
    planned = choose(weights, *sizes, on_sm12x, operand, backend.sm_count)
    if not backend.is_cuda or tune.is_idle():
        return planned
    from .sm12x_dense_tuning import tuned_instance

    return tuned_instance(backend, call, token_format, planned)


def run(call: DenseCall, token_format: int, top_k: RowTopK | None = None) -> None:
    """Compute a valid call, and the largest of each row; without memory for outputs where only these are wanted.

    Raises
    ------
    NotImplementedError
        The GPU has no kernels of this family.
    ValueError
        As :func:`instance`.
    """
    require_served("dense_mx", call.x.device)
    backend = kernels(call.x.device)
    row = instance_for(backend, call, token_format)
    if call.out is None and not (call.top_k == 1 and row is not None and row.streamed):
        call = call._replace(out=call.new_output())
    if call.x.shape[0] and call.weight.shape[0]:
        launch(backend, row, call, token_format, top_k)


def launch(
    backend: Backend | None, row: Instance | None, call: DenseCall, token_format: int, top_k: RowTopK | None = None
) -> None:
    """Compute a valid call of at least one output by ``row``; None: by cuBLAS, or on the CPU, which a virtual device is."""
    if backend is None or (row is None and not backend.is_cuda):
        with plain_torch(call.x.device):
            _compute_on_cpu(call, token_format)
            if top_k is not None and call.out is not None:
                top_k.compute_on_cpu(call.out)
        return
    module, pdl = backend.module(gen_dense_module), backend.pdl(call.enable_pdl)
    m, n = call.x.shape[0], call.weight.shape[0]
    out = call.out
    if out is None:  # nothing of it is written; its dtype is read
        out = torch.empty((0, n), dtype=call.out_dtype, device=call.x.device)
    writes = [out]
    largest: tuple[Any, ...] = ()
    if top_k is not None:
        size = _size(backend, "sm12x_row_top_k_workspace_size", m, n, top_k.indices.shape[1])
        largest = (*top_k, backend.empty(size))
        writes += [top_k.values, top_k.indices, largest[-1]]
    if row is None:
        with plain_torch(call.x.device):
            backend.call(_multiply_dequantized, module, call, token_format, writes=writes)
        if top_k is not None:
            backend.call(module.sm12x_row_top_k_run, *largest, out, pdl, writes=writes)
        return
    workspace = None
    if not row.streamed:
        size = _size(backend, "sm12x_dense_gemm_workspace_size", m, call.k, row.index, token_format)
        workspace = backend.empty(size)
        writes.append(workspace)
    function = module.sm12x_dense_run if top_k is None else module.sm12x_dense_top_k_run
    tensors = (out, *call[1 : DenseCall._fields.index("out_dtype")])
    backend.call(
        function, *largest, *tensors, workspace, token_format, row.index, call.constant_weights, pdl, writes=writes
    )


def _size(backend: Backend, function: str, *sizes: int) -> int:
    """Bytes that a function of the kernels' module says, remembered."""
    key = function, sizes
    if key not in backend.memo:
        ask = getattr(backend.module(gen_dense_module), function)
        backend.memo[key] = int(backend.call(ask, *sizes, writes=()))
    size: int = backend.memo[key]
    return size


def _token_values(call: DenseCall, token_format: int) -> torch.Tensor:
    """What the kernels multiply, as float32."""
    x, x_scale, blocks = call.x, call.x_scale, call.k // BLOCK_SIZE
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
    weight, k = call.weight, call.k
    scales = mx_cpu.unswizzle_128x4(call.weight_scale, weight.shape[0], k // BLOCK_SIZE)
    dequantize = mx_cpu.dequantize_mxfp4_linear if weight.dtype is torch.uint8 else mx_cpu.dequantize_mxfp8_linear
    tokens = _token_values(call, token_format)
    chunk = max(1, DEQUANTIZED_BYTES // (4 * k))
    for first in range(0, weight.shape[0], chunk):
        part = slice(first, first + chunk)
        _finish(call, slice(None), part, tokens @ dequantize(weight[part], scales[part]).T)


def _multiply_dequantized(module: Any, call: DenseCall, token_format: int) -> None:
    """Many tokens on a GPU: both operands as bfloat16, some rows of weights at a time, by cuBLAS."""
    x, weight, k = call.x, call.weight, call.k
    n, weight_format = weight.shape[0], MXFP4_SWIZZLED if weight.dtype is torch.uint8 else MXFP8_SWIZZLED
    tokens = x
    if token_format != BF16:
        tokens = torch.empty((x.shape[0], k), dtype=torch.bfloat16, device=x.device)
        module.sm12x_dequantize_rows(tokens, x, call.x_scale, token_format)
    chunk = max(128, DEQUANTIZED_BYTES // (2 * k) // 128 * 128)  # whole chunks of scales
    dequantized = torch.empty((min(n, chunk), k), dtype=torch.bfloat16, device=x.device)
    scales = call.weight_scale.view(torch.uint8).reshape(-1, mx_cpu.swizzled_size(1, k // BLOCK_SIZE))  # of 128 rows
    for first in range(0, n, chunk):
        part = slice(first, min(n, first + chunk))
        some = dequantized[: part.stop - first]
        module.sm12x_dequantize_rows(some, weight[part], scales[first // 128 :], weight_format)
        for row in range(0, x.shape[0], DEQUANTIZED_ROWS):
            rows = slice(row, row + DEQUANTIZED_ROWS)
            _finish(call, rows, part, torch.mm(tokens[rows], some.T, out_dtype=torch.float32))
