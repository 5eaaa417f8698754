"""Dense GEMMs with MXFP4 or MXFP8 weights on SM120 and SM121 (``backend="sm12x"``).

Few tokens are one stream of weights, more are a GEMM: of quantized tokens by the
block-scaled MMA, else of bfloat16, which holds every value of these formats exactly.
"""

import functools
from typing import Any, Dict, List, Literal, Optional, Tuple

import torch

from ..autotuner import OptimizationProfile, TunableRunner
from ..jit.sm12x.dense import gen_sm12x_dense_module
from ..jit.sm12x.instances import DENSE_INSTANCES, Format, Instance
from ..utils import device_support_pdl, get_device_sm_count, supported_compute_capability

# Formats of tokens, as TokenFormat of types.h numbers them.
BF16 = 0
MXFP8_SWIZZLED = 3
MXFP4_SWIZZLED = 5
# As what a GEMM multiplies them. mm_fp4's weights are MXFP4 as its tokens are: kind::mxf4 multiplies both as they come.
_OPERANDS: Dict[int, Format] = {BF16: "bf16", MXFP8_SWIZZLED: "mxfp8", MXFP4_SWIZZLED: "mxfp4"}

# take flashinfer/gemm/sm12x_dense_launch.py: SECOND_PASS_BYTES FEW_TILES GEMM_TILE_COST weights_of choose_instance


@functools.cache
def get_sm12x_dense_module():
    return gen_sm12x_dense_module().build_and_load()


def _contiguous_scales(scales: torch.Tensor) -> torch.Tensor:
    """128x4 scales, which may be given as a transposed view."""
    if scales.ndim == 2 and not scales.is_contiguous():
        scales = scales.t()
    return scales.view(torch.uint8)


def _check(
    a: torch.Tensor, k: int, a_descale: Optional[torch.Tensor], rows: torch.Tensor, b_descale: torch.Tensor,
    out: Optional[torch.Tensor],
) -> bool:
    """Raise ``ValueError`` unless the kernels can read the operands where they are.

    ``rows`` are the weights, ``(n, k)`` or ``(n, k / 2)``.
    """
    if k % 32 != 0:
        raise ValueError(f"K must be a multiple of 32 for backend='sm12x', got {k}")
    for name, tensor in (("a", a), ("b", rows), ("out", out)):
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous (b: column-major) for backend='sm12x'")
        if name != "out" and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")
    for name, scales, count in (("a_descale", a_descale, a.shape[0]), ("b_descale", b_descale, rows.shape[0])):
        if scales is None:
            continue
        scales = _contiguous_scales(scales)
        needed = (count + 127) // 128 * 128 * ((k // 32 + 3) // 4 * 4)
        if scales.numel() != needed:
            raise ValueError(
                f"{name} must be {needed} uint8 in the 128x4 layout for {count} rows and "
                f"K={k}, got {scales.dtype} {tuple(scales.shape)}"
            )
    return True


# Neither of these two is chosen by "auto": the heuristics have no measurement of the backend on these GPUs.
@supported_compute_capability([120, 121])
def sm12x_mm_fp4_requirement(
    a: torch.Tensor, b: torch.Tensor, a_descale: torch.Tensor, b_descale: torch.Tensor,
    out: Optional[torch.Tensor] = None, use_8x4_sf_layout: bool = False, backend: str = "auto",
    use_nvfp4: bool = True, **_,
):
    if backend != "sm12x":
        return False
    if use_nvfp4:
        raise ValueError("sm12x FP4 GEMM takes MXFP4 operands (use_nvfp4=False).")
    if use_8x4_sf_layout:
        raise ValueError("sm12x FP4 GEMM only supports 128x4 scale factor layout.")
    return _check(a, a.shape[1] * 2, a_descale, b.t(), b_descale, out)


@supported_compute_capability([120, 121])
def sm12x_mm_mxfp8_requirement(
    a: torch.Tensor, b: torch.Tensor, a_descale: torch.Tensor, b_descale: torch.Tensor,
    out: Optional[torch.Tensor] = None, use_8x4_sf_layout: bool = False, backend: str = "auto", **_,
):
    if backend != "sm12x":
        return False
    if use_8x4_sf_layout or a_descale.ndim != 1 or b_descale.ndim != 1:
        raise ValueError("sm12x MXFP8 GEMM only supports 1D swizzled 128x4 scales.")
    return _check(a, a.shape[1], a_descale, b.t(), b_descale, out)


@supported_compute_capability([120, 121])
def sm12x_mm_bf16_fp4_requirement(
    a: torch.Tensor, b: torch.Tensor, b_descale: torch.Tensor, out: Optional[torch.Tensor] = None, **_
):
    if b.dim() != 2 or b.dtype != torch.uint8 or b.shape[1] * 2 != a.shape[1]:
        raise ValueError(
            f"sm12x expects the uint8 (N, K/2) weight with K={int(a.shape[1])}; "
            f"got {b.dtype} {tuple(b.shape)}"
        )
    return _check(a, int(a.shape[1]), None, b, b_descale, out)


def run_dense(
    out: torch.Tensor, tokens: torch.Tensor, token_scales: Optional[torch.Tensor], weight: torch.Tensor,
    weight_scales: torch.Tensor, alpha: Optional[torch.Tensor], token_format: int, enable_pdl: bool, tactic: int = -1,
) -> torch.Tensor:
    """``out = alpha * tokens @ weight.T``; ``tactic`` is a row's index, -1 the default.

    ``weight`` is ``(n, k)`` float8_e4m3fn or ``(n, k / 2)`` packed e2m1 bytes.
    """
    if out.numel() == 0:
        return out
    weights, num_tokens = weights_of(weight), tokens.shape[0]
    n, k = weight.shape[0], weight.shape[1] * (2 if weights == "mxfp4" else 1)
    if tactic == -1:
        row = choose_instance(weights, num_tokens, n, k, _OPERANDS[token_format], get_device_sm_count(tokens.device))
    else:
        row = DENSE_INSTANCES[tactic]
    module = get_sm12x_dense_module()
    workspace = None
    if not row.streamed:
        size = module.sm12x_dense_gemm_workspace_size(num_tokens, k, row.index, token_format)
        workspace = torch.empty(size, dtype=torch.uint8, device=tokens.device)
    module.sm12x_dense_run(
        out, tokens, None if token_scales is None else _contiguous_scales(token_scales),
        weight, _contiguous_scales(weight_scales), None if alpha is None else alpha.reshape(1),
        None,  # bias
        None,  # residual
        workspace, token_format, row.index,
        False,  # weights may be read before the launch in front ends
        enable_pdl and device_support_pdl(tokens.device),
    )
    return out


class Sm12xDenseRunner(TunableRunner):
    """What mm_fp4 and mm_mxfp8 tune; ``inputs`` are theirs."""

    def __init__(self, token_format: int, enable_pdl: bool = True) -> None:
        self.token_format = token_format
        self.enable_pdl = enable_pdl

    def _operands(self, inputs: List[Any]) -> Tuple[Any, ...]:
        """The first ones of :func:`run_dense`."""
        if self.token_format == MXFP4_SWIZZLED:
            a, b, a_descale, b_descale, alpha, _, out = inputs[:7]
            return out, a.view(torch.uint8), a_descale, b.t().view(torch.uint8), b_descale, alpha
        a, b, a_descale, b_descale, _, out = inputs[:6]
        return out, a, a_descale, b.t(), b_descale, None

    def get_cache_key_extras(self, inputs: List[Any]) -> Tuple[Any, ...]:
        return (self.token_format, str(self._operands(inputs)[0].dtype), self.enable_pdl)

    def get_valid_tactics(self, inputs: List[Any], profile: OptimizationProfile) -> List[int]:
        _, tokens, _, rows, _, _ = self._operands(inputs)
        k = rows.shape[1] * (2 if self.token_format == MXFP4_SWIZZLED else 1)
        return [
            row.index
            for row in DENSE_INSTANCES
            if row.weights == weights_of(rows)
            and row.longest_k >= k
            and (2 * row.token_tile >= tokens.shape[0] if row.streamed else row.operand == _OPERANDS[self.token_format])
        ]

    def forward(self, inputs: List[Any], tactic: int = -1, do_preparation: bool = False, **kwargs) -> torch.Tensor:
        return run_dense(*self._operands(inputs), self.token_format, self.enable_pdl, tactic)
