# SPDX-License-Identifier: Apache-2.0
"""The cache of call signatures: a call of ``cutlass_fused_moe`` on CUDA like an earlier one is not validated again.

A signature is all that validation and planning depend on: the options of a call, which are values that hash, and the
metadata of its tensors.  A :class:`ValidatedCall` keeps what they led to; :func:`repeat` launches a call whose signature
is in the cache.  What may differ between such calls, the addresses, is checked every time.  A call that is not there is
no error: its caller validates it from the start.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .. import sm12x_probes
from ..jit.sm12x.instances import INSTANCES
from ..sm12x_arguments import POINTER_ALIGNMENT, SCALE_WORD, require_alignment
from .sm12x_autotuner import tuned_tactics
from .sm12x_launch import Plan, launch, pair_tactics
from .sm12x_validation import WORKSPACE_ALIGNMENT

MAX_OPTIONS = 4096  # distinct options before the cache starts anew
MAX_SIGNATURES = 8  # of the same options; the oldest makes room
_UINT8 = torch.uint8


class MoETensors(NamedTuple):
    """The tensors of a call, named as in ``cutlass_fused_moe``; ``quant_scales`` travel beside them."""

    output: torch.Tensor | None
    input: torch.Tensor
    input_sf: torch.Tensor | None
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor | None
    fc1_expert_weights: torch.Tensor
    fc1_expert_biases: torch.Tensor | None
    fc2_expert_weights: torch.Tensor
    fc2_expert_biases: torch.Tensor | None
    swiglu_alpha: torch.Tensor | None
    swiglu_beta: torch.Tensor | None
    swiglu_limit: torch.Tensor | None
    workspace_buffer: torch.Tensor | None


def _metadata(tensor: Any) -> tuple[Any, ...]:
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), type(tensor)


def same_metadata(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether as many tensors have the shapes, strides, dtypes and devices of ``tensors``.

    torch's own guards do it in one call into C++, where they are as expected.
    """
    guards = sm12x_probes.TENSOR_GUARDS
    if guards is not None:
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check
    expected = [_metadata(tensor) for tensor in tensors]
    return lambda *others: [_metadata(other) for other in others] == expected


def kernel_arguments(
    tensors: Sequence[Any],
    output: torch.Tensor,
    quant_scales: Sequence[torch.Tensor],
    swizzled_input_sf: bool,
) -> tuple[Any, ...]:
    """What ``sm12x_moe_run`` takes before the workspace, from the tensors of a validated call.

    Raises
    ------
    ValueError
        A tensor that does not start at a multiple of the kernels' widest access.
    """
    _, x, input_sf, ids, final_scales, fc1, fc1_bias, fc2, fc2_bias, alpha, beta, limit, _ = tensors
    if len(quant_scales) == 2:
        (fc1_sf, fc2_sf), fc1_global, fc2_global = quant_scales, None, None
    else:
        fc1_sf, fc1_global, fc2_sf, fc2_global = quant_scales
    addresses = (
        x.data_ptr() | output.data_ptr() | fc1.data_ptr() | fc2.data_ptr() | fc1_sf.data_ptr() | fc2_sf.data_ptr()
    )
    if fc1_bias is not None:
        addresses |= fc1_bias.data_ptr()
    if fc2_bias is not None:
        addresses |= fc2_bias.data_ptr()
    if addresses % POINTER_ALIGNMENT:
        named = {
            "input": x,
            "output": output,
            "fc1_expert_weights": fc1,
            "fc1_expert_biases": fc1_bias,
            "fc2_expert_weights": fc2,
            "fc2_expert_biases": fc2_bias,
            "fc1's block scales (quant_scales)": fc1_sf,
            "fc2's block scales (quant_scales)": fc2_sf,
        }
        require_alignment(named)
    if input_sf is not None and input_sf.data_ptr() % SCALE_WORD and (swizzled_input_sf or x.shape[1] % 128 == 0):
        require_alignment({"input_sf": input_sf}, SCALE_WORD)  # other rows of scales are no whole words: read by bytes
    return (
        output,
        x,
        input_sf if input_sf is None or input_sf.dtype is _UINT8 else input_sf.view(_UINT8),
        ids,
        final_scales,
        fc1 if fc1.dtype is _UINT8 else fc1.view(_UINT8),
        fc1_sf if fc1_sf.dtype is _UINT8 else fc1_sf.view(_UINT8),
        fc1_global,
        fc1_bias,
        fc2 if fc2.dtype is _UINT8 else fc2.view(_UINT8),
        fc2_sf if fc2_sf.dtype is _UINT8 else fc2_sf.view(_UINT8),
        fc2_global,
        fc2_bias,
        alpha,
        beta,
        limit,
    )


def require_element_alignment(tensors: MoETensors, quant_scales: Sequence[torch.Tensor]) -> None:
    """Raise unless what the kernels read in elements of 32 bits starts at a multiple of them.

    Memory that torch allocates does, and views of it do; foreign memory may not.  So it is looked at once, when a call
    is validated.
    """
    names = ("token_selected_experts", "token_final_scales", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    elements = {name: getattr(tensors, name) for name in names}
    if len(quant_scales) == 4:
        elements.update({f"quant_scales[{index}]": quant_scales[index] for index in (1, 3)})
    require_alignment(elements, 4)


@dataclasses.dataclass(eq=False)
class ValidatedCall:
    """A validated call on a CUDA device with at least one token: what its launch takes beside the tensors.

    ``forced`` are the tactics that ``profile_ids`` ask for, ``None`` without them.
    """

    plan: Plan
    device: torch.device
    output_dtype: torch.dtype
    swizzled_input_sf: bool
    enable_pdl: bool
    forced: tuple[int, int] | None

    def run(
        self, tensors: Sequence[Any], quant_scales: Sequence[torch.Tensor], tune_max_num_tokens: int
    ) -> torch.Tensor:
        """Launch the layer on ``tensors`` (the fields of :class:`MoETensors`) and return its output."""
        plan = self.plan
        output, workspace = tensors[0], tensors[-1]
        if output is None:
            shape = (plan.problem.num_tokens, plan.problem.hidden)
            output = torch.empty(shape, dtype=self.output_dtype, device=self.device)
        if workspace is None:
            workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=self.device)
        elif workspace.data_ptr() % WORKSPACE_ALIGNMENT:
            require_alignment({"workspace_buffer": workspace}, WORKSPACE_ALIGNMENT)
        arguments = kernel_arguments(tensors, output, quant_scales, self.swizzled_input_sf)
        tactics = self.forced
        if tactics is None:
            tactics = plan.tactics
            tuner = sm12x_probes.TUNER_HOLDER._instance
            if tuner is not None:
                swizzled = self.swizzled_input_sf
                tactics = tuned_tactics(tuner, plan, arguments, swizzled, tune_max_num_tokens, self.enable_pdl)
        options = workspace, self.swizzled_input_sf
        if not launch(plan.problem, arguments, *options, tactics, self.enable_pdl):
            if self.forced is not None:
                raise ValueError(
                    f"profile_ids asks for {INSTANCES[self.forced[0]].name}, which computes the layer in one launch that "
                    "needs all SMs of the device, and this stream has fewer (a green context, or MPS with a limited "
                    "share): pass tactics of a pair of GEMMs, or None"
                )
            launch(plan.problem, arguments, *options, pair_tactics(plan, self.device), self.enable_pdl)
        return output


class _Signature(NamedTuple):
    present: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]  # the tensors that are not None
    num_scales: int
    repeated: tuple[tuple[int, int], ...]  # positions of one tensor among those and the scales: the first, and another
    distinct: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]  # what is left without the other positions
    matches: Callable[..., bool]
    call: ValidatedCall

    def fits(self, tensors: Sequence[Any], quant_scales: Sequence[torch.Tensor]) -> bool:
        """Whether a call's tensors have the metadata of the one remembered."""
        if len(quant_scales) != self.num_scales:
            return False
        given = (*self.present(tensors), *quant_scales)
        for first, other in self.repeated:
            if given[first] is not given[other]:
                return False
        return self.matches(*(self.distinct(given) if self.repeated else given))


_cache: dict[Hashable, list[_Signature]] = {}


def remember(options: Hashable, tensors: MoETensors, quant_scales: Sequence[torch.Tensor], call: ValidatedCall) -> None:
    """Keep ``call``, which came of these arguments.

    ``options`` must determine every argument that is no tensor, which tensors are ``None``, and what of the environment
    the call depended on.
    """
    present = operator.itemgetter(*(position for position, tensor in enumerate(tensors) if tensor is not None))
    given = (*present(tensors), *quant_scales)
    # One tensor in two places, as callers pass a scale of 1 for both GEMMs: torch's guards take each only once.
    firsts: dict[int, int] = {}
    repeated = tuple(
        (firsts[id(tensor)], position)
        for position, tensor in enumerate(given)
        if firsts.setdefault(id(tensor), position) != position
    )
    distinct = operator.itemgetter(*firsts.values())
    signature = _Signature(present, len(quant_scales), repeated, distinct, same_metadata(distinct(given)), call)
    if len(_cache) >= MAX_OPTIONS:
        _cache.clear()
    signatures = _cache.setdefault(options, [])
    signatures.append(signature)
    del signatures[:-MAX_SIGNATURES]


def repeat(
    options: Hashable, tensors: Sequence[Any], quant_scales: Sequence[torch.Tensor], tune_max_num_tokens: int
) -> torch.Tensor | None:
    """Launch a call whose signature is in the cache and return its output; ``None`` when it is not there.

    ``tensors`` are the fields of :class:`MoETensors`; a plain tuple of them is made faster.
    """
    try:
        signatures = _cache.get(options)
    except TypeError:  # something that does not hash, such as a list for a number: validation reports it
        return None
    if signatures is None:
        return None
    for signature in signatures:
        if signature.fits(tensors, quant_scales):
            return signature.call.run(tensors, quant_scales, tune_max_num_tokens)
    return None
