# SPDX-License-Identifier: Apache-2.0
"""Upstream's GEMMs; the MXFP8 x MXFP4 grouped GEMM is this fork's kernel on SM12x, and runs on CPU tensors.

``mm_fp4`` with MXFP4 operands and ``mm_mxfp8`` have this fork's kernels as a backend (:mod:`.sm12x_mm`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from ..api_logging import flashinfer_api
from ..sm12x import devices
from ..sm12x.checks import require_choice, require_computing_device, require_tensor_type
from . import sm12x_mm
from .sm12x_group_gemm import GroupGemmCall, group_gemm

# Here and not in the functions: torch.compile traces these.
_MM_FP4_BACKENDS, _MM_MXFP8_BACKENDS = map(sm12x_mm.backends_of, (_upstream.mm_fp4, _upstream.mm_mxfp8))


# The signature is upstream's, parameter by parameter.
# fmt: off
@flashinfer_api
def group_gemm_mxfp8_mxfp4_nt_groupwise(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, m_indptr: torch.Tensor,
    mma_sm: int = 1, tile_m: int = 128, tile_n: int = 128, tile_k: int = 128, swap_ab: bool = True,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    *,
    skip_check: bool = False,
) -> torch.Tensor:
    # fmt: on
    """Grouped GEMM of MXFP8 rows with MXFP4 matrices: rows of group ``g`` times ``b[g]`` transposed.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) this is the kernel of
    ``cutlass_fused_moe``; CPU tensors are computed on the CPU; other CUDA devices are upstream's.

    Parameters
    ----------
    a : torch.Tensor
        ``[cum_m, k]`` float8_e4m3fn or float8_e5m2, the rows of all groups one after another.
    b : torch.Tensor
        ``[groups, n, k / 2]`` uint8, two e2m1 per byte, the even element in the low nibble.
    a_scale : torch.Tensor
        ``[rows, pad4(k / 32)]`` uint8 UE8M0, 128x4 layout in each group; group ``g`` starts at row
        ``(m_indptr[g] + 127 g) // 128 * 128``, so ``(cum_m + 127 groups) // 128 * 128`` rows hold every split.
    b_scale : torch.Tensor
        ``[groups, pad128(n), pad4(k / 32)]`` uint8 UE8M0, 128x4 layout.
    m_indptr : torch.Tensor
        ``[groups + 1]`` int32: group ``g`` is rows ``[m_indptr[g], m_indptr[g + 1])``.  Here groups may have any size,
        zero included; upstream's kernels want multiples of 4.
    mma_sm, tile_m, tile_n, tile_k, swap_ab
        Upstream's tile choice.  The values upstream takes on SM12x are accepted (1; 128; 32, 64 or 128; 128; any bool)
        and choose nothing here: the tile follows from the shape, or from ``flashinfer.autotune``.
    out : torch.Tensor, optional
        ``[cum_m, n]``, bfloat16 or float16.
    out_dtype : torch.dtype, optional
        bfloat16 (default) or float16; that of ``out`` if given.
    skip_check : bool
        Upstream's switch; here checks are always made.

    Returns
    -------
    torch.Tensor
        ``out``.

    Raises
    ------
    ValueError, TypeError
        Before any launch, naming the argument, what it was and what it may be.  ``m_indptr``'s values are checked
        on the CPU, and on CUDA with ``FLASHINFER_SM12X_CHECK=1``.

    Notes
    -----
    ``k`` is a multiple of 32 and ``n`` of 8.
    """
    require_computing_device("a", a)
    if devices.serves(a.device):
        tiles = [mma_sm, tile_m, tile_n, tile_k]
        call = GroupGemmCall(
            out=out,
            a=a,
            b=b,
            a_scale=a_scale,
            b_scale=b_scale,
            m_indptr=m_indptr,
            out_dtype=out_dtype,
            tiles=tiles,
            swap_ab=swap_ab,
        )
        return group_gemm(call)
    return _upstream.group_gemm_mxfp8_mxfp4_nt_groupwise(
        a=a,
        b=b,
        a_scale=a_scale,
        b_scale=b_scale,
        m_indptr=m_indptr,
        mma_sm=mma_sm,
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        swap_ab=swap_ab,
        out=out,
        out_dtype=out_dtype,
        skip_check=skip_check,
    )


# Callers ask for the operator's compute capabilities through these attributes, which upstream's decorator sets.
for _attribute in ("is_backend_supported", "is_compute_capability_supported"):
    setattr(
        group_gemm_mxfp8_mxfp4_nt_groupwise,
        _attribute,
        getattr(_upstream.group_gemm_mxfp8_mxfp4_nt_groupwise, _attribute),
    )

group_gemm_mxfp4_nt_groupwise = group_gemm_mxfp8_mxfp4_nt_groupwise


# fmt: off
def mm_fp4(
    a: torch.Tensor, b: torch.Tensor, a_descale: torch.Tensor, b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
    block_size: int = 16, use_8x4_sf_layout: bool = False, backend: str = "auto", use_nvfp4: bool = True,
    enable_pdl: bool = True,
    *,
    skip_check: bool = False,
) -> torch.Tensor:
    # fmt: on
    """Upstream's ``mm_fp4`` and its documentation; this fork also computes MXFP4 operands.

    It does so with ``backend="sm12x"``, for CPU tensors, and on SM12x with ``backend="cute-dsl"``, which upstream
    refuses there and vLLM asks for (``--quantization-config '{"linear": "mxfp4"}'``), and with ``"auto"`` if upstream
    has no backend for the call. See :func:`flashinfer.gemm.sm12x_mm.mm_mxfp4`.

    Raises
    ------
    ValueError
        Upstream's, and for the calls above: ``use_8x4_sf_layout``, or operands that do not fit each other.
    """
    def ours() -> torch.Tensor:
        require_choice("backend", backend, _MM_FP4_BACKENDS)
        if use_8x4_sf_layout:
            raise ValueError("mm_fp4 with MXFP4 operands takes 128x4 scales: use_8x4_sf_layout must be False")
        if block_size != 32:
            raise ValueError(f"block_size is {block_size}; with use_nvfp4=False it must be 32 (MXFP4)")
        return sm12x_mm.mm_mxfp4(a, b, a_descale, b_descale, alpha, out_dtype, out, enable_pdl)

    upstreams: Callable[[], torch.Tensor] = functools.partial(
        _upstream.mm_fp4,
        a=a,
        b=b,
        a_descale=a_descale,
        b_descale=b_descale,
        alpha=alpha,
        out_dtype=out_dtype,
        out=out,
        block_size=block_size,
        use_8x4_sf_layout=use_8x4_sf_layout,
        backend=backend,
        use_nvfp4=use_nvfp4,
        enable_pdl=enable_pdl,
        skip_check=skip_check,
    )
    require_tensor_type("a", a)
    if sm12x_mm.takes_mm_fp4(a.device, backend, use_nvfp4):
        return ours()
    return upstreams() if use_nvfp4 else sm12x_mm.automatic(a.device, backend, upstreams, ours)


sm12x_mm.answer_for(mm_fp4, _upstream.mm_fp4)


# fmt: off
def mm_mxfp8(
    a: torch.Tensor, b: torch.Tensor, a_descale: torch.Tensor, b_descale: torch.Tensor,
    out: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    *,
    skip_check: bool = False,
) -> torch.Tensor:
    # fmt: on
    """Upstream's ``mm_mxfp8``, whose documentation holds; this fork computes ``backend="sm12x"``, CPU tensors, and on
    SM12x ``"auto"`` where upstream has no backend for the call.

    See :func:`flashinfer.gemm.sm12x_mm.mm_mxfp8`. There k may be any multiple of 32 and n anything.

    Raises
    ------
    ValueError
        Upstream's, and for the calls above: ``use_8x4_sf_layout``, or operands that do not fit each other.
    """
    def ours() -> torch.Tensor:
        require_choice("backend", backend, _MM_MXFP8_BACKENDS)
        if use_8x4_sf_layout:
            raise ValueError("mm_mxfp8 on this fork's kernels takes 128x4 scales: use_8x4_sf_layout must be False")
        return sm12x_mm.mm_mxfp8(a, b, a_descale, b_descale, out, out_dtype)

    upstreams: Callable[[], torch.Tensor] = functools.partial(
        _upstream.mm_mxfp8,
        a=a,
        b=b,
        a_descale=a_descale,
        b_descale=b_descale,
        out=out,
        out_dtype=out_dtype,
        use_8x4_sf_layout=use_8x4_sf_layout,
        backend=backend,
        skip_check=skip_check,
    )
    require_tensor_type("a", a)
    if backend == sm12x_mm.BACKEND or a.device.type == "cpu":
        return ours()
    return sm12x_mm.automatic(a.device, backend, upstreams, ours)


sm12x_mm.answer_for(mm_mxfp8, _upstream.mm_mxfp8)
