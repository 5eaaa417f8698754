"""The grouped MXFP8 x MXFP4 GEMM on SM120 and SM121 (``backend="sm12x"``).

Unlike the CUTLASS kernels it takes groups of any size, and weights stay packed in
shared memory.
"""

import functools

import torch

from ..jit.sm12x.group_gemm import gen_sm12x_group_gemm_module
from ..jit.sm12x.heuristics import choose_group_gemm
from ..utils import device_support_pdl, supported_compute_capability


@functools.cache
def get_sm12x_group_gemm_module():
    return gen_sm12x_group_gemm_module().build_and_load()


# take flashinfer/gemm/sm12x_group_gemm.py: scale_rows


@supported_compute_capability([120, 121])
def sm12x_group_gemm_requirement(a, b, a_scale, b_scale, m_indptr, out, **_):
    """Raise ``ValueError`` unless the kernels can read the tensors where they are."""
    num_groups, n = b.shape[:2]
    blocks = (a.shape[1] // 32 + 3) // 4 * 4
    rows = scale_rows(a.shape[0], num_groups)
    if a_scale.ndim != 2 or a_scale.shape[0] < rows or a_scale.shape[1] != blocks:
        raise ValueError(f"a_scale must have shape (>= {rows}, {blocks}), got {tuple(a_scale.shape)}")
    b_scale_shape = (num_groups, (n + 127) // 128 * 128, blocks)
    if b_scale.shape != b_scale_shape:
        raise ValueError(f"b_scale must have shape {b_scale_shape}, got {tuple(b_scale.shape)}")
    tensors = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": m_indptr}
    if out is not None:
        tensors["out"] = out
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be contiguous and start at a multiple of 16 bytes")
    return True


def group_gemm_mxfp4_sm12x(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the products of all groups into ``out``; arguments are checked ones of
    :func:`flashinfer.gemm.group_gemm_mxfp8_mxfp4_nt_groupwise`.
    """
    if a.shape[0] == 0:
        return out
    module = get_sm12x_group_gemm_module()
    workspace = torch.empty(module.sm12x_group_gemm_workspace_size(), dtype=torch.uint8, device=a.device)
    module.sm12x_group_gemm_run(
        out,
        a,
        a_scale,
        b,
        b_scale,
        m_indptr,
        workspace,
        choose_group_gemm(a.shape[0], b.shape[0]).index,
        device_support_pdl(a.device),
    )
    return out
