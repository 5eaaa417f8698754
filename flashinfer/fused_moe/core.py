# SPDX-License-Identifier: Apache-2.0
"""Upstream's MoE operators; ``cutlass_fused_moe`` with MXFP4 weights, and with NVFP4 weights and bfloat16 activations,
runs on SM12x's own kernels and on the CPU.

The device and the weights decide which implementation serves a call:

============================  =========================================  ====================================
device                        MXFP4 or NVFP4 weights, SwiGLU or Relu2    everything else
============================  =========================================  ====================================
CPU                           the CPU backend                            ``NotImplementedError``
CUDA, SM12x                   ``fused_moe_120``, this fork's kernels     upstream's ``fused_moe_120_upstream``
CUDA, 9.0                     upstream's; with                           upstream's
                              ``FLASHINFER_SM12X_MOE=1`` this fork's
CUDA, other                   upstream's                                 upstream's
============================  =========================================  ====================================

``FLASHINFER_SM12X_MOE=0`` sends SM12x to upstream's module too. Calls of upstream's NVFP4 mode, whose six scales are
for quantized activations (W4A4), are upstream's anywhere.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from ..api_logging import flashinfer_api
from ..sm12x import devices
from ..sm12x.backend import kernels
from ..sm12x.checks import (
    describe,
    require_activation_bytes,
    require_computing_device,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_tensor_type,
)
from ..sm12x.instances import MAX_EXPERTS
from ..tllm_enums import ActivationType
from ..trace.templates.moe import cutlass_fused_moe_trace
from .sm12x_autotuner import SM12xStageRunner
from .sm12x_launch import workspace_bytes
from .sm12x_operator import fused_moe
from .sm12x_validation import (
    INPUT_DTYPES,
    WEIGHT_DTYPES,
    Mode,
    MoECall,
    MoEProblem,
    require_pairs,
    require_parallel_sizes,
    select_mode,
)

_SM12X_ARCHITECTURES = ("120", "121")
_MOE_PARAMETERS = tuple(inspect.signature(_upstream.cutlass_fused_moe).parameters)
_WORKSPACE_PARAMETERS = tuple(inspect.signature(_upstream.cutlass_fused_moe_workspace_size).parameters)
_MODE_PARAMETERS = tuple(inspect.signature(select_mode).parameters)[2:]  # behind the two dtypes


@functools.cache
def _upstream_sm12x_module(backend: str, use_fast_build: bool) -> Any:
    """Upstream's MoE module for SM12x under its own name, beside this fork's ``fused_moe_120``.

    Upstream's function finds its generator in its globals; here it runs with a copy of them in which that generator
    is upstream's again.
    """
    from ..jit.fused_moe import gen_cutlass_fused_moe_sm120_upstream_module

    build = inspect.unwrap(_upstream.get_cutlass_fused_moe_module)
    namespace = dict(build.__globals__)
    namespace["gen_cutlass_fused_moe_sm120_module"] = gen_cutlass_fused_moe_sm120_upstream_module
    renamed = types.FunctionType(
        build.__code__,
        namespace,
        build.__name__,
        build.__defaults__,
        build.__closure__,
    )
    return renamed(backend, use_fast_build)


class _Sm12xModule:
    """Upstream's module for SM12x, built when something of it is used, and runners of this fork for its MXFP4 modes."""

    def __init__(self, backend: str, use_fast_build: bool) -> None:
        self._key = (backend, use_fast_build)

    def __getattr__(self, name: str) -> Any:
        return getattr(_upstream_sm12x_module(*self._key), name)

    def MoERunner(self, **options: Any) -> Any:
        """The runner that upstream's unified ``MoELayer`` tunes with; it takes the options of upstream's class of this
        name."""
        mode = select_mode(options["x_dtype"], options["weight_dtype"], **_selected(options, _MODE_PARAMETERS))
        if mode is None or not devices.serves(torch.device("cuda", torch.cuda.current_device())):
            return self.__getattr__("MoERunner")(**options)
        if mode is Mode.AUTO:
            raise ValueError(
                "use_mxfp8_act_scaling and use_w4_group_scaling are both True; tactics of MXFP4 weights are those of "
                "one mode: pass the first for W4A8 or the second for W4A16"
            )
        taken = (options[name] for name in ("activation_type", "output_dtype", "top_k", "ep_size", "enable_pdl"))
        return SM12xStageRunner(mode, *taken)


@functools.cache
def get_cutlass_fused_moe_module(backend: str = "100", use_fast_build: bool = False) -> Any:
    """Upstream's CUTLASS MoE module for compute capability ``backend`` (``"90"``, ``"120"``, ...).

    SM12x's module, ``fused_moe_120_upstream``, is built when one of its attributes is first used.
    """
    if backend in _SM12X_ARCHITECTURES:
        return _Sm12xModule(backend, use_fast_build)
    return _upstream.get_cutlass_fused_moe_module(backend, use_fast_build)


def _reject_foreign_options(min_latency_mode: bool, cluster_size: int, cluster_rank: int, **others: Any) -> None:
    """Raise for options of upstream's signature that mean nothing to the MXFP4 modes."""
    if min_latency_mode:
        raise NotImplementedError("min_latency_mode is True; these weights run without it, pass False")
    if cluster_size != 1 or cluster_rank != 0:
        raise ValueError(f"cluster_size is {cluster_size!r}, cluster_rank {cluster_rank!r}; they must be 1 and 0")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} is given; it belongs to another activation_type, pass None")


def _cpu_mode_error(input: Any, weights: Any, activation_type: Any) -> Exception:
    return NotImplementedError(
        "cutlass_fused_moe on CPU tensors serves MXFP4 weights (torch.uint8 or torch.int64) with activation_type "
        "Swiglu, SwigluStep or Relu2, and use_mxfp8_act_scaling=True (float8_e4m3fn, bfloat16 or float16 input) or "
        f"use_w4_group_scaling=True (bfloat16 input); got weights of {weights.dtype}, input of {input.dtype}, "
        f"activation_type {activation_type!r}. Other kinds need a CUDA device"
    )


def _selected(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names}


# The signatures are upstream's, parameter by parameter; grouped here by what belongs together.
# fmt: off
@flashinfer_api(trace=cutlass_fused_moe_trace)
def cutlass_fused_moe(
    input: torch.Tensor, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor, fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype, quant_scales: list[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None = None, fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None, swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0, cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None, enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False, use_w4_group_scaling: bool = False, use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False, use_packed_weights: bool = False, use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192, enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True, use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None, workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: torch.Tensor | None = None,
    situ_beta: torch.Tensor | None = None, situ_linear_beta: torch.Tensor | None = None,
    backend: str = "cutlass",
) -> torch.Tensor:
    # fmt: on
    """One MoE layer: FC1, activation, FC2 and the weighted sum over each token's experts.

    The signature is upstream's, and so is the meaning of every argument for the kinds of weights that upstream serves;
    ``flashinfer.fused_moe.core._upstream.cutlass_fused_moe`` documents those.  What follows is the contract of
    MXFP4 weights, on SM12x and on the CPU, and of NVFP4 weights with bfloat16 activations (W4A16).  M is the number of
    tokens, H the hidden size, I the intermediate size (both multiples of 32), E the experts of this rank.

    Parameters
    ----------
    input : torch.Tensor
        ``[M, H]``: ``float8_e4m3fn`` with ``input_sf``, or bfloat16/float16 that is quantized to MXFP8 inside (both
        with ``use_mxfp8_act_scaling``), or bfloat16 that is not rounded (``use_w4_group_scaling``).  With both flags
        the planner chooses by M: bfloat16 is quantized unless leaving it takes at most 3 % longer
        (``flashinfer.fused_moe.sm12x_planner.plan_mode``); the CPU chooses as a GB10.
    token_selected_experts : torch.Tensor
        int32 ``[M, top_k]``, global expert ids.  Experts of other ranks contribute nothing, and neither does -1, which
        marks padding: a token without any expert of this rank gets a row of zeros.
    token_final_scales : torch.Tensor
        float32 ``[M, top_k]`` routing weights; ``None`` stands for ones.
    fc1_expert_weights, fc2_expert_weights : torch.Tensor
        Packed e2m1, two per byte, the even element in the low nibble: uint8 ``[E, 2 I, H / 2]`` and ``[E, H, I / 2]``,
        or int64 views of them.  FC1's rows are stacked ``[up; gate]``; with ``Relu2``, ``[E, I, H / 2]``, up alone.
    output_dtype : torch.dtype
        bfloat16 or float16.
    quant_scales : list of torch.Tensor
        W4A8: ``[fc1_sf, fc1_global, fc2_sf, fc2_global]``; W4A16, and with both flags: ``[fc1_sf, fc2_sf]``.  Block
        scales are UE8M0 in 128x4 layout per expert: uint8 ``[E, pad128(rows), pad4(K / 32)]``, its int32 view, or the
        flat bytes. W4A16 of NVFP4: the same four, block scales ``float8_e4m3fn``, ``[E, pad128(rows), pad4(K / 16)]``
        or flat; sign bits are not read.  Global scales are float32 ``[E]`` and multiply the GEMMs' results.  A UE8M0
        byte of 255 is NaN.  An expert that has weights beyond float32 (4 with a scale byte of 253 or more) makes what
        they reach infinite, NaN or anything, by the backend, and nothing else.  Where W4A8 rounds, tokens and FC1's
        activations, an infinite value counts as 448 x 2^119, the largest of MXFP8 in float32.
    fc1_expert_biases, fc2_expert_biases : torch.Tensor, optional
        bfloat16 or ``output_dtype``, ``[E, 2 I]`` (``[E, I]`` with ``Relu2``; added before the activation) and
        ``[E, H]`` (before the routing weight).
    input_sf : torch.Tensor, optional
        uint8 scales of an e4m3 input, 128x4, or linear ``[M, H / 32]`` with ``swizzled_input_sf=False``.
    swiglu_alpha, swiglu_beta, swiglu_limit : torch.Tensor, optional
        float32 ``[E]``; absent they are 1, 0 and infinity.  No limit is below 0.  With ``g = min(gate, limit)`` and
        ``u = clamp(up, -limit, limit)`` the activation is ``g * sigmoid(alpha * g) * (u + beta)``.
    activation_type : ActivationType
        ``Swiglu``, which is the formula above, and ``SwigluBias``, which is the same; or ``SwigluStep``:
        ``min(silu(gate), limit) * u``, with ``swiglu_limit`` (7 if absent) and neither alpha nor beta; or ``Relu2``:
        ``max(up, 0)^2``, without gate rows and without parameters.
    ep_size, ep_rank, tp_size, tp_rank : int
        This rank owns experts ``[ep_rank * E, (ep_rank + 1) * E)``; with ``tp_size > 1`` weights are sharded along I
        and the caller reduces.
    output, workspace_buffer : torch.Tensor, optional
        ``[M, H]`` of ``output_dtype``; 1-D uint8 or int8 of :func:`cutlass_fused_moe_workspace_size` bytes, aligned to
        16.  Given both, the call allocates nothing.  One workspace per stream: calls that run at the same time, on two
        streams or from two graphs, and share one overwrite each other's intermediate results and counters.
    enable_alltoall : bool
        All ids outside ``[0, E * ep_size)``, not -1 alone, mark padding and contribute nothing; without it they are an
        error.
    tune_max_num_tokens : int
        Largest token count that ``flashinfer.autotune`` tunes for.
    profile_ids : list of int, optional
        ``[fc1_tactic, fc2_tactic]``, -1 for the default.  A tactic's number is its name in digits: ``bf16_m8_k128`` is
        3008128, or ``flashinfer.sm12x.instances.tactic("bf16_m8_k128")``.  ``python -m flashinfer sm12x-instances
        --all`` and ``docs/kernels.md`` have the names.  Checked on the CPU, which has one way to compute.
    use_fused_finalize : bool
        Accepted; the sum over experts has a fixed order either way, so results repeat bit for bit.

    Returns
    -------
    torch.Tensor
        ``[M, H]`` of ``output_dtype``.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        Before any launch, naming the argument, what it was and what it may be.  Expert ids and ``swiglu_limit`` are
        checked on the CPU, and on CUDA with ``FLASHINFER_SM12X_CHECK=1``.
    """
    if backend == "cutlass":
        require_tensor_type("input", input)
        require_tensor_type("fc1_expert_weights", fc1_expert_weights)
        mode = select_mode(
            input.dtype,
            fc1_expert_weights.dtype,
            use_mxfp8_act_scaling,
            use_w4_group_scaling,
            use_packed_weights,
            use_wfp4afp8_humming,
            use_deepseek_fp8_block_scale,
            activation_type,
        )
        if mode is not None and devices.serves(input.device):
            _reject_foreign_options(
                min_latency_mode,
                cluster_size,
                cluster_rank,
                clamped_relu2_limit=clamped_relu2_limit,
                situ_beta=situ_beta,
                situ_linear_beta=situ_linear_beta,
            )
            # By place, in the order of MoECall's fields: keywords take 2 us longer.
            # fmt: off
            call = MoECall(
                output, workspace_buffer,
                input, input_sf, token_selected_experts, token_final_scales,
                fc1_expert_weights, fc1_expert_biases, fc2_expert_weights, fc2_expert_biases, quant_scales,
                swiglu_alpha, swiglu_beta, swiglu_limit, int(activation_type),
                output_dtype, int(mode), swizzled_input_sf,
                tp_size, tp_rank, ep_size, ep_rank, enable_alltoall,
                tune_max_num_tokens, enable_pdl, profile_ids,
            )
            # fmt: on
            return fused_moe(call)
        if mode is not None:
            require_computing_device("input", input)
        _reject_auto(mode, input.device)
        if input.device.type == "cpu":
            raise _cpu_mode_error(input, fc1_expert_weights, activation_type)
    return _upstream.cutlass_fused_moe(**_selected(locals(), _MOE_PARAMETERS))


def moe_step(
    *,
    router_logits: torch.Tensor | None = None,
    top_k: int = 0,
    is_padding: torch.Tensor | None = None,
    barrier: torch.Tensor | None = None,
    next_weights: torch.Tensor | None = None,
    **arguments: Any,
) -> torch.Tensor:
    """``cutlass_fused_moe(**arguments)`` of MXFP4 weights in a decode step, with arguments that upstream's signature
    lacks.

    Serves the devices of this fork only.  With few tokens the layer is then one launch, where ``cutlass_fused_moe``
    needs two and a router's top-k a third.  Results are those of ``router_top_k`` and ``cutlass_fused_moe``, bit for
    bit if the layer's launch chooses the experts; if they are chosen before it, torch's softmax may differ in the last
    bit.

    Parameters
    ----------
    router_logits : torch.Tensor, optional
        float32 ``[M, experts of all ranks]``, at most 512 experts.  Experts and their weights follow from it as in
        ``router_top_k``: the layer's own launch chooses them if there are at most 32 routed rows (tokens x top_k) and
        the layer is one fused MoE kernel, else operations before it do. ``token_selected_experts`` and
        ``token_final_scales`` must then be None.
    top_k : int
        Experts of a token, with ``router_logits``; at most 32.
    is_padding : torch.Tensor, optional
        bool ``[M]``, with ``router_logits``: rows that go to no expert, whose outputs are zeros.
    barrier : torch.Tensor, optional
        int32 ``[2]``, zero before its first use: counters of the grid barrier.  Calls that may run at the same time
        need one each, as they need a workspace each.  By default the counters lie in the workspace, and a launch before
        the layer zeroes them.
    next_weights : torch.Tensor, optional
        The same as in :func:`~flashinfer.gemm.dense_block_scaled`.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    NotImplementedError
        The GPU has no kernels of this family, or an option is one of other modes.
    """
    if unknown := sorted(arguments.keys() - _MOE_SIGNATURE.keys()):
        raise TypeError(f"{unknown[0]} is no argument; it must be one of moe_step's own or of cutlass_fused_moe's")
    given = _MOE_DEFAULTS | arguments
    foreign = "min_latency_mode", "cluster_size", "cluster_rank", "clamped_relu2_limit", "situ_beta", "situ_linear_beta"
    _reject_foreign_options(**_selected(given, foreign))
    if given["backend"] != "cutlass":
        raise ValueError(
            f"backend is {given['backend']!r}; it must be 'cutlass', this fork's kernels are not chosen by it"
        )
    for name in ("input", "fc1_expert_weights"):
        require_tensor_type(name, given.get(name))
    require_computing_device("input", given["input"])
    devices.require_served("moe_step", given["input"].device)
    dtypes = given["input"].dtype, given["fc1_expert_weights"].dtype
    if dtypes[1] not in WEIGHT_DTYPES:
        weights = describe(given["fc1_expert_weights"])
        raise ValueError(f"fc1_expert_weights is {weights}; it must be {' or '.join(map(str, WEIGHT_DTYPES))}")
    mode = select_mode(*dtypes, **_selected(given, _MODE_PARAMETERS))
    if mode is None:
        raise ValueError(
            f"input is {dtypes[0]}; it must be what a mode of MXFP4 weights takes, and a flag name the mode: "
            "use_w4_group_scaling (bfloat16), use_mxfp8_act_scaling (float8_e4m3fn, bfloat16 or float16), or both"
        )
    given |= {"moe_mode": int(mode), "activation_type": int(given["activation_type"])}
    given |= {"router_logits": router_logits, "top_k": top_k, "is_padding": is_padding, "barrier": barrier}
    given["next_weights"] = next_weights
    return fused_moe(MoECall(**_selected(given, MoECall._fields)))


_MOE_SIGNATURE = inspect.signature(inspect.unwrap(cutlass_fused_moe)).parameters
_MOE_DEFAULTS: dict[str, Any] = {
    name: None if parameter.default is inspect.Parameter.empty else parameter.default
    for name, parameter in _MOE_SIGNATURE.items()
}
moe_step.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in _MOE_SIGNATURE.values()),
        *list(inspect.signature(moe_step).parameters.values())[:-1],
    ]
)


def _reject_auto(mode: Mode | None, device: torch.device) -> None:
    """Raise for :attr:`Mode.AUTO` where upstream's kernels would compute."""
    if mode is Mode.AUTO:
        raise ValueError(
            f"use_mxfp8_act_scaling and use_w4_group_scaling are both True; on {device} upstream's kernels compute, "
            "which take the first for W4A8 or the second for W4A16, not both"
        )


def _workspace_device(given: Any) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {describe(given)}; it must name a CUDA device or the CPU") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device is {device}; it must be a CUDA device or the CPU")
    if device.type == "cuda":
        count = torch.cuda.device_count()  # 0 without a driver, where any other question is an error of torch's
        number = given if isinstance(given, int) else device.index or 0  # of a number torch.device keeps eight bits
        if number >= count:
            named = number if isinstance(given, int) else device
            raise ValueError(f"device is {named}; it must be the CPU or one of the {count} CUDA devices here")
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return device


# fmt: off
def cutlass_fused_moe_workspace_size(
    max_num_tokens: int, hidden_size: int, intermediate_size: int, num_experts_total: int, top_k: int,
    *,
    x_dtype: torch.dtype, weight_dtype: torch.dtype, output_dtype: torch.dtype = torch.bfloat16,
    activation_type: ActivationType = ActivationType.Swiglu,
    tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False, use_w4_group_scaling: bool = False, use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True, use_packed_weights: bool = False, use_wfp4afp8_humming: bool = False,
    device: torch.device | None = None, backend: str = "cutlass",
) -> int:
    # fmt: on
    """Bytes of ``workspace_buffer`` that :func:`cutlass_fused_moe` needs for up to ``max_num_tokens`` tokens.

    The signature is upstream's.  For MXFP4 weights on this fork's kernels the size is theirs; the CPU backend needs
    none and the answer is 0.  ``device`` defaults to the current CUDA device, or to the CPU if there is none.

    Raises
    ------
    ValueError, TypeError
        For MXFP4 weights: a size that is no positive integer, ranks outside their groups, experts that ``ep_size`` does
        not divide, ``top_k`` above the number of experts, or a dtype that no call may have.  A device that is not
        there.
    """
    given = locals().copy()
    where = _workspace_device(device)
    mode = select_mode(x_dtype, weight_dtype, **_selected(given, _MODE_PARAMETERS))
    if backend == "cutlass" and mode is not None and devices.serves(where):
        problem = _workspace_problem(mode, given)
        runs = kernels(where)
        if runs is None:
            return 0
        modes = (Mode.BF16_INPUT, Mode.W4A16) if mode is Mode.AUTO else (mode,)
        in_bf16 = not runs.device_class.mma_kinds
        return max(workspace_bytes(runs, problem._replace(mode=each), in_bf16) for each in modes)
    _reject_auto(mode, where)
    if where.type == "cpu" and backend == "cutlass":
        raise NotImplementedError(
            f"on the CPU only MXFP4 weights are served; got x_dtype {x_dtype}, weight_dtype {weight_dtype}"
        )
    return int(_upstream.cutlass_fused_moe_workspace_size(**_selected(given, _WORKSPACE_PARAMETERS)))


def _workspace_problem(mode: Mode, given: dict[str, Any]) -> MoEProblem:
    """The largest problem of calls of ``mode``, from the arguments of :func:`cutlass_fused_moe_workspace_size`."""
    ep_size, ep_rank = require_parallel_sizes(*(given[name] for name in ("tp_size", "tp_rank", "ep_size", "ep_rank")))
    num_tokens = require_int("max_num_tokens", given["max_num_tokens"], 1)
    most = MAX_EXPERTS * ep_size
    total = require_int("num_experts_total", given["num_experts_total"], 1, most, f"{MAX_EXPERTS} a rank of ep_size")
    if total % ep_size:
        raise ValueError(f"num_experts_total is {total}; it must be a multiple of ep_size, {ep_size}")
    top_k = require_int("top_k", given["top_k"], 1, total, "num_experts_total")
    require_pairs("max_num_tokens", num_tokens, top_k)
    hidden, inter = (require_k_alignment(name, given[name]) for name in ("hidden_size", "intermediate_size"))
    require_activation_bytes("max_num_tokens", num_tokens, top_k * max(hidden, inter))
    if given["x_dtype"] not in INPUT_DTYPES[mode]:
        allowed = " or ".join(map(str, INPUT_DTYPES[mode]))
        raise ValueError(f"x_dtype is {describe(given['x_dtype'])}; mode {mode.name} takes {allowed}")
    require_output_dtype("output_dtype", given["output_dtype"])
    local = total // ep_size
    return MoEProblem(mode, num_tokens, hidden, inter, local, top_k, ep_rank * local, total, total)
