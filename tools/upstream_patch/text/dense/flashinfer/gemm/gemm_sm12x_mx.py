"""Dense GEMMs with MXFP4 or MXFP8 weights on SM120 and SM121 (``backend="sm12x"``).

Few tokens are one split-K GEMM, more are a GEMM: of quantized tokens by the
block-scaled MMA, else of bfloat16, which holds every value of these formats exactly.
"""

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from ..autotuner import OptimizationProfile, TunableRunner
from ..jit.sm12x.dense import gen_sm12x_dense_module
from ..jit.sm12x.instances import DENSE_INSTANCES, FORMATS, Format, Instance
from ..utils import device_support_pdl, get_device_sm_count, supported_compute_capability

# Formats of tokens, as TokenFormat of types.h numbers them.
BF16 = 0
MXFP8_SWIZZLED = 3
MXFP4_SWIZZLED = 5
# The type in which a GEMM multiplies each. mm_fp4's tokens and weights are both MXFP4: kind::mxf4 takes them directly.
_OPERANDS: Dict[int, Format] = {BF16: "bf16", MXFP8_SWIZZLED: "mxfp8", MXFP4_SWIZZLED: "mxfp4"}

WEIGHT_FORMATS: Dict[torch.dtype, str] = {torch.uint8: "mxfp4", torch.float8_e4m3fn: "mxfp8"}

# take flashinfer/gemm/sm12x_dense_launch.py: SECOND_PASS_BYTES GEMM_TILE_COST choose_instance


def weights_of(weight: torch.Tensor) -> str:
    """Packed bytes are MXFP4, e4m3 is MXFP8."""
    return WEIGHT_FORMATS[weight.dtype]


class DenseCall(NamedTuple):
    """Operands of ``out = alpha * x @ weight.T``, in the order of the kernels' module.

    ``weight`` is ``(n, k)`` float8_e4m3fn or ``(n, k / 2)`` packed e2m1 bytes; scales are 128x4, and may be transposed
    views.
    """

    out: Any  # a tensor, or None while the call is checked
    x: torch.Tensor
    x_scale: Optional[torch.Tensor]
    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: Optional[torch.Tensor] = None

    @property
    def k(self) -> int:
        return self.weight.shape[1] * 8 // FORMATS[weights_of(self.weight)].bits


def _contiguous_scales(scales: Any) -> Any:
    if scales is None:
        return None
    if scales.ndim == 2 and not scales.is_contiguous():
        scales = scales.t()
    return scales.view(torch.uint8)


def _check(call: DenseCall) -> bool:
    """Raise ``ValueError``, in the words of ``mm_*``, unless the kernels can read the operands where they are."""
    k = call.k
    if k % 32 != 0:
        raise ValueError(f"K must be a multiple of 32 for backend='sm12x', got {k}")
    for name, tensor in (("a", call.x), ("b", call.weight), ("out", call.out)):
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous (b: column-major) for backend='sm12x'")
        if name != "out" and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")
    for name, scales, rows in (("a_descale", call.x_scale, call.x), ("b_descale", call.weight_scale, call.weight)):
        if scales is None:
            continue
        needed = (rows.shape[0] + 127) // 128 * 128 * ((k // 32 + 3) // 4 * 4)
        if scales.nbytes != needed:
            raise ValueError(
                f"{name} must be {needed} uint8 in the 128x4 layout for {rows.shape[0]} rows and "
                f"K={k}, got {scales.dtype} {tuple(scales.shape)}"
            )
    return True


# Neither of these two is chosen by "auto": the heuristics have no measurement of the backend on these GPUs.
@supported_compute_capability([120, 121])
def sm12x_mm_fp4_requirement(a, b, a_descale, b_descale, out, use_8x4_sf_layout, backend, use_nvfp4, **_):
    if backend != "sm12x":
        return False
    if use_nvfp4:
        raise ValueError("sm12x FP4 GEMM takes MXFP4 operands (use_nvfp4=False).")
    if use_8x4_sf_layout:
        raise ValueError("sm12x FP4 GEMM only supports 128x4 scale factor layout.")
    return _check(DenseCall(out, a, a_descale, b.t().view(torch.uint8), b_descale))


@supported_compute_capability([120, 121])
def sm12x_mm_mxfp8_requirement(a, b, a_descale, b_descale, out, use_8x4_sf_layout, backend, **_):
    if backend != "sm12x":
        return False
    if use_8x4_sf_layout or a_descale.ndim != 1 or b_descale.ndim != 1:
        raise ValueError("sm12x MXFP8 GEMM only supports 1D swizzled 128x4 scales.")
    return _check(DenseCall(out, a, a_descale, b.t(), b_descale))


@supported_compute_capability([120, 121])
def sm12x_mm_bf16_fp4_requirement(a, b, b_descale, out, **_):
    if b.dim() != 2 or b.dtype != torch.uint8 or b.shape[1] * 2 != a.shape[1]:
        raise ValueError(
            f"sm12x expects the uint8 (N, K/2) weight with K={int(a.shape[1])}; got {b.dtype} {tuple(b.shape)}"
        )
    return _check(DenseCall(out, a, None, b, b_descale))


@functools.cache
def get_sm12x_dense_module():
    return gen_sm12x_dense_module().build_and_load()


def run_dense(call: DenseCall, token_format: int, enable_pdl: bool, tactic: int = -1) -> torch.Tensor:
    """Compute a valid call that has its output; ``tactic`` is a row's index, -1 the default."""
    out, x, k = call.out, call.x, call.k
    if out.numel() == 0:
        return out
    if tactic == -1:
        sizes = x.shape[0], call.weight.shape[0], k
        row = choose_instance(weights_of(call.weight), *sizes, _OPERANDS[token_format], get_device_sm_count(x.device))
    else:
        row = DENSE_INSTANCES[tactic]
    module = get_sm12x_dense_module()
    workspace = None
    if not row.split_k:
        size = module.sm12x_dense_gemm_workspace_size(x.shape[0], k, row.index, token_format)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    call = call._replace(
        x_scale=_contiguous_scales(call.x_scale),
        weight_scale=_contiguous_scales(call.weight_scale),
        alpha=None if call.alpha is None else call.alpha.reshape(1),
    )
    bias = residual = next_weights = None
    constant_weights = False  # whether they may be read before the launch in front ends
    enable_pdl = enable_pdl and device_support_pdl(x.device)
    module.sm12x_dense_run(
        *call, bias, residual, workspace, token_format, row.index, next_weights, constant_weights, enable_pdl
    )
    return out


class Sm12xDenseRunner(TunableRunner):
    """The runner that mm_fp4 and mm_mxfp8 tune; ``inputs`` are theirs."""

    def __init__(self, token_format: int, enable_pdl: bool = True) -> None:
        self.token_format = token_format
        self.enable_pdl = enable_pdl

    def _call(self, inputs: List[Any]) -> DenseCall:
        if self.token_format == MXFP4_SWIZZLED:
            a, b, a_descale, b_descale, alpha, _, out = inputs[:7]
            return DenseCall(out, a.view(torch.uint8), a_descale, b.t().view(torch.uint8), b_descale, alpha)
        a, b, a_descale, b_descale, _, out = inputs[:6]
        return DenseCall(out, a, a_descale, b.t(), b_descale)

    def get_cache_key_extras(self, inputs: List[Any]) -> Tuple[Any, ...]:
        return (self.token_format, str(self._call(inputs).out.dtype), self.enable_pdl)

    def get_valid_tactics(self, inputs: List[Any], profile: OptimizationProfile) -> List[int]:
        call, operand = self._call(inputs), _OPERANDS[self.token_format]
        return [
            row.index
            for row in DENSE_INSTANCES
            if row.weights == weights_of(call.weight)
            and row.longest_k >= call.k
            and (2 * row.block_n >= call.x.shape[0] if row.split_k else row.compute_dtype == operand)
        ]

    def forward(self, inputs: List[Any], tactic: int = -1, do_preparation: bool = False, **kwargs) -> torch.Tensor:
        return run_dense(self._call(inputs), self.token_format, self.enable_pdl, tactic)
