# SPDX-License-Identifier: Apache-2.0
"""The SM12x family's operators on a virtual device: the arguments that a GPU's launch would get, launched there.

Their callers have validated everything already and hold CPU tensors::

    device = virtual_device.active()
    if device is not None:
        virtual_operators.run_moe(device, problem, arguments, swizzled_input_sf, tactics, enable_pdl)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..jit.sm12x.instances import INSTANCES, SM12X
from .virtual_device import VirtualDevice


def run_moe(
    device: VirtualDevice,
    problem: Any,
    arguments: tuple[Any, ...],
    swizzled_input_sf: bool,
    tactics: Sequence[int] | None = None,
    enable_pdl: bool = True,
) -> None:
    """One MoE layer.

    Args:
        device: Where it runs.
        problem: Sizes (``fused_moe.sm12x_validation.MoEProblem``).
        arguments: Those of ``sm12x_moe_run`` before the workspace, ``output`` first; CPU tensors.
        swizzled_input_sf: As in ``cutlass_fused_moe``.
        tactics: Of the two GEMMs, places in ``INSTANCES``, -1 for the planner's; checked.
        enable_pdl: Launch programmatic dependents.

    Raises:
        VirtualDeviceError: a launch was refused, failed, or a watcher reported.
    """
    from flashinfer.fused_moe.sm12x_launch import resolved_pair
    from flashinfer.fused_moe.sm12x_planner import plan_moe
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module

    sizes = (problem.num_tokens, problem.top_k, problem.num_local_experts, problem.hidden, problem.inter)
    planned = plan_moe(*sizes, int(problem.mode))
    tactics = resolved_pair(tactics or (-1, -1), planned)
    module = device.module(gen_cutlass_fused_moe_sm120_module)
    for tactic in tactics:
        _register_instance(device, module, tactic)
    size = device.call(
        module.sm12x_moe_workspace_size,
        problem.num_tokens,
        problem.hidden,
        problem.inter,
        problem.num_local_experts,
        problem.top_k,
        int(problem.mode),
        any(INSTANCES[tactic].multiplies == "mxfp8_as_bf16" for tactic in tactics),
    )
    workspace = device.empty(max(1, int(size)))
    device.call(
        module.sm12x_moe_run,
        *arguments,
        workspace,
        int(problem.mode),
        swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        *tactics,
        enable_pdl,
        writes=(arguments[0], workspace),
    )


def _register_instance(device: VirtualDevice, module: Any, tactic: int) -> None:
    """Make a tactic that SM12x's table has not runnable: its module is built and handed to the main one."""
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_instance_module

    if INSTANCES[tactic] not in SM12X:
        instance = device.module(gen_cutlass_fused_moe_sm120_instance_module, tactic)
        module.sm12x_register_instance(tactic, instance.sm12x_instance_address())


def run_group_gemm(
    device: VirtualDevice,
    problem: Any,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    tactic: int | None = None,
    enable_pdl: bool = True,
) -> None:
    """One grouped GEMM of MXFP8 rows and MXFP4 weights.

    Args:
        device: Where it runs.
        problem: Sizes (``gemm.sm12x_group_gemm.GroupGemmProblem``).
        out, a, b, a_scale, b_scale, m_indptr: CPU tensors, as in ``group_gemm_mxfp4_nt_groupwise``; ``out`` is written.
        tactic: An instance of the table; the planner's when omitted.
        enable_pdl: Launch programmatic dependents.

    Raises:
        VirtualDeviceError: a launch was refused, failed, or a watcher reported.
    """
    from flashinfer.fused_moe.sm12x_planner import plan_group_gemm
    from flashinfer.jit.sm12x.modules import gen_group_gemm_module

    if tactic is None:
        tactic = int(plan_group_gemm(problem.cum_m, problem.num_groups))
    module = device.module(gen_group_gemm_module)
    size = device.call(module.sm12x_group_gemm_workspace_size)
    workspace = device.empty(max(1, int(size)))
    device.call(
        module.sm12x_group_gemm_run,
        out,
        a,
        a_scale,
        b,
        b_scale,
        m_indptr,
        workspace,
        tactic,
        enable_pdl,
        writes=(out, workspace),
    )


def run_dense(
    device: VirtualDevice,
    operands: Any,
    token_format: int,
    tactic: int,
    constant_weights: bool = False,
    enable_pdl: bool = True,
    top_k: Any = None,
) -> None:
    """One dense layer.

    Args:
        device: Where it runs.
        operands: ``gemm.sm12x_dense.Operands`` of CPU tensors; ``out`` is written.
        token_format: Of ``x``, as the kernels number it.
        tactic: An instance of the table.
        constant_weights: As in ``dense_mx``.
        enable_pdl: Launch as a programmatic dependent.
        top_k: ``gemm.sm12x_dense.RowTopK`` of CPU tensors, which are written too.

    Raises:
        VirtualDeviceError: a launch was refused, failed, or a watcher reported.
    """
    from flashinfer.jit.sm12x.instances import DENSE_INSTANCES
    from flashinfer.jit.sm12x.modules import gen_dense_module

    module = device.module(gen_dense_module)
    writes, workspace = [operands.out], None
    run, largest = module.sm12x_dense_run, ()
    if top_k is not None:
        rows = operands.x.shape[0], operands.weight.shape[0], top_k.indices.shape[1]
        ranks = device.empty(int(device.call(module.sm12x_row_top_k_workspace_size, *rows)))
        run, largest = module.sm12x_dense_top_k_run, (*top_k, ranks)
        writes += [top_k.values, top_k.indices, ranks]
    if not DENSE_INSTANCES[tactic].streamed:
        sizes = operands.x.shape[0], operands.k, tactic, token_format
        size = device.call(module.sm12x_dense_gemm_workspace_size, *sizes)
        workspace = device.empty(int(size))
        writes.append(workspace)
    arguments = (*largest, *operands, workspace, token_format, tactic, constant_weights, enable_pdl)
    device.call(run, *arguments, writes=writes)


def run_router(device: VirtualDevice, arguments: tuple[Any, ...], writes: Sequence[torch.Tensor]) -> None:
    """One router.

    Args:
        device: Where it runs.
        arguments: Those of ``sm12x_router_run``; CPU tensors.
        writes: Its outputs among them.

    Raises:
        VirtualDeviceError: a launch was refused, failed, or a watcher reported.
    """
    from flashinfer.jit.sm12x.modules import gen_router_module

    module = device.module(gen_router_module)
    device.call(module.sm12x_router_run, *arguments, writes=writes)


def run_decode(
    device: VirtualDevice,
    written: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
    arguments: tuple[Any, ...],
    appends: bool,
) -> None:
    """One decode attention.

    Args:
        device: Where it runs.
        written: Output, keys and values of the cache; CPU tensors, as are those among ``arguments``.
        workspace: Zero before its first use; a new one when omitted.
        arguments: Those of ``sm12x_decode_run`` behind the workspace.
        appends: The kernel writes the cache.

    Raises:
        VirtualDeviceError: a launch was refused, failed, or a watcher reported.
    """
    from flashinfer.jit.sm12x.modules import gen_decode_module

    module = device.module(gen_decode_module)
    if workspace is None:
        workspace = torch.zeros(int(module.sm12x_decode_workspace_size(0)), dtype=torch.uint8)

    # Parts of one tensor (keys and values, queries and keys) overlap as ranges: their storages are what is registered.
    def storage(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    out, keys, values = written
    tensors = [out, keys, values, workspace, *(each for each in arguments if isinstance(each, torch.Tensor))]
    storages = {tensor.untyped_storage().data_ptr(): storage(tensor) for tensor in tensors if tensor.numel()}
    writes = [storage(tensor) for tensor in (out, workspace, *((keys, values) if appends else ()))]
    device.call(
        lambda *_: module.sm12x_decode_run(out, keys, values, workspace, *arguments),
        *storages.values(),
        writes=writes,
    )
