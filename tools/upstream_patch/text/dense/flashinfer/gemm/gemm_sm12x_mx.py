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
from ..utils import device_support_pdl, get_device_sm_count

# Formats of tokens, as TokenFormat of grouped_gemm_params.cuh numbers them.
BF16 = 0
MXFP8_SWIZZLED = 3
MXFP4_SWIZZLED = 5
# As what a GEMM multiplies them. mm_fp4's weights are MXFP4 as its tokens are: kind::mxf4 multiplies both as they come.
_OPERANDS: Dict[int, Format] = {BF16: "bf16", MXFP8_SWIZZLED: "mxfp8", MXFP4_SWIZZLED: "mxfp4"}

# take flashinfer/gemm/sm12x_dense_launch.py: SECOND_PASS_BYTES FEW_TILES GEMM_TILE_COST weights_of choose_instance


@functools.cache
def get_sm12x_dense_module():
    return gen_sm12x_dense_module().build_and_load()


def _valid_instances(weights: str, num_tokens: int, k: int, token_format: int) -> List[Instance]:
    operand = _OPERANDS[token_format]
    return [
        row
        for row in DENSE_INSTANCES
        if row.weights == weights
        and row.longest_k >= k
        and (row.operand == operand or row.streamed)
        and (not row.streamed or 2 * row.token_tile >= num_tokens)
    ]


def check_scales(name: str, scales: torch.Tensor, rows: int, k: int) -> None:
    """Raise ``ValueError`` unless ``scales`` are 128x4 UE8M0 bytes of ``[rows, k]``."""
    needed = (rows + 127) // 128 * 128 * ((k // 32 + 3) // 4 * 4)
    if scales.dtype != torch.uint8 or scales.numel() != needed:
        raise ValueError(
            f"{name} must be {needed} uint8 in the 128x4 layout for {rows} rows and "
            f"K={k}, got {scales.dtype} {tuple(scales.shape)}"
        )


def check_dense(a: torch.Tensor, rows: torch.Tensor, out: Optional[torch.Tensor], k: int) -> None:
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


def contiguous_scales(scales: torch.Tensor) -> torch.Tensor:
    """128x4 scales, which may be given as a transposed view."""
    if scales.ndim == 2 and not scales.is_contiguous():
        scales = scales.t()
    return scales.view(torch.uint8)


def run_dense(
    out: torch.Tensor,
    tokens: torch.Tensor,
    token_scales: Optional[torch.Tensor],
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    alpha: Optional[torch.Tensor],
    token_format: int,
    enable_pdl: bool,
    tactic: int = -1,
) -> torch.Tensor:
    """``out = alpha * tokens @ weight.T``; ``tactic`` is a row's index, -1 the default.

    ``weight`` is ``(n, k)`` float8_e4m3fn or ``(n, k / 2)`` packed e2m1 bytes.
    """
    if out.numel() == 0:
        return out
    weights = weights_of(weight)
    n, k = weight.shape[0], weight.shape[1] * (2 if weights == "mxfp4" else 1)
    num_tokens = tokens.shape[0]
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
        out,
        tokens,
        token_scales,
        weight,
        weight_scales,
        None if alpha is None else alpha.reshape(1),
        None,  # bias
        None,  # residual
        workspace,
        token_format,
        row.index,
        False,  # weights may be read before the launch in front ends
        enable_pdl and device_support_pdl(tokens.device),
    )
    return out


class Sm12xDenseRunner(TunableRunner):
    """What mm_fp4 and mm_mxfp8 tune; ``inputs`` are theirs."""

    def __init__(self, token_format: int, enable_pdl: bool = True) -> None:
        self.token_format = token_format
        self.enable_pdl = enable_pdl

    def _operands(self, inputs: List[Any]):
        if self.token_format == MXFP4_SWIZZLED:
            a, b, a_descale, b_descale, alpha, _, out = inputs[:7]
        else:
            a, b, a_descale, b_descale, _, out = inputs[:6]
            alpha = None
        rows = b.t()
        if self.token_format == MXFP4_SWIZZLED:
            a, rows = a.view(torch.uint8), rows.view(torch.uint8)
        return (out, a, contiguous_scales(a_descale), rows, contiguous_scales(b_descale), alpha)

    def get_cache_key_extras(self, inputs: List[Any]) -> Tuple[Any, ...]:
        out = self._operands(inputs)[0]
        return (self.token_format, str(out.dtype), self.enable_pdl)

    def get_valid_tactics(self, inputs: List[Any], profile: OptimizationProfile) -> List[int]:
        _, tokens, _, rows, _, _ = self._operands(inputs)
        k = rows.shape[1] * (2 if self.token_format == MXFP4_SWIZZLED else 1)
        return [row.index for row in _valid_instances(weights_of(rows), tokens.shape[0], k, self.token_format)]

    def forward(self, inputs: List[Any], tactic: int = -1, do_preparation: bool = False, **kwargs) -> torch.Tensor:
        out, a, a_scales, rows, b_scales, alpha = self._operands(inputs)
        return run_dense(
            out,
            a,
            a_scales,
            rows,
            b_scales,
            alpha,
            token_format=self.token_format,
            enable_pdl=self.enable_pdl,
            tactic=tactic,
        )
