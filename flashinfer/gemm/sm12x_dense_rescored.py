# SPDX-License-Identifier: Apache-2.0
"""An LM head that reads few bits and answers as its fine weight does: all logits from a coarse weight, the largest
again from the fine one."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch

from ..api_logging import flashinfer_api
from ..quantization import mx_cpu
from ..quantization.block_scaled import LAYOUTS, WEIGHT_FORMATS, WeightFormat
from ..sm12x.backend import Backend, kernels, plain_torch
from ..sm12x.checks import (
    CallCache,
    Unchanged,
    bounds_of,
    describe,
    is_traced,
    require_apart,
    require_choice,
    require_computing_device,
    require_int,
    require_output_dtype,
    require_rank,
    require_scales,
    require_tensor,
    span,
)
from ..sm12x.device_class import GB10, DeviceClass
from ..sm12x.devices import require_served
from ..sm12x.instances import FORMATS
from ..sm12x.operator import OutputOperator, define
from .sm12x_dense import ARGUMENT_NAMES, OUTPUT_DTYPES, run_served, validate
from .sm12x_dense_launch import (
    BF16,
    DEQUANTIZED_BYTES,
    DEQUANTIZED_ROWS,
    DenseCall,
    FineFormat,
    RowTopK,
    dense_module,
    ranks_of,
    row_ranks,
)
from .sm12x_dense_top_k import MAX_TOP_K, LargestOutputs

TILE_ROWS = 16  # kRescoreTileRows in rows/rescore.cuh
MAX_RESCORED = 16  # kMaxRescored
MAX_GROUP_ROWS = 6144  # kMaxGroupRows
MAX_K = 14_336  # kMaxRescoredK
FINE_FORMATS = get_args(FineFormat)
_DTYPES = {"bf16": torch.bfloat16, "mxint8": LAYOUTS["mxint8"].dtype}


@flashinfer_api
def dense_block_scaled_rescored(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    fine_weight: torch.Tensor,
    fine_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    weight_format: WeightFormat,
    fine_format: FineFormat = "bf16",
    groups: int = 48,
    rescored: int = 16,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> torch.Tensor:
    """Logits of an LM head from a coarse weight, the largest of each group of its rows again from a fine weight.

    First ``alpha * x @ weight.T + bias``, as :func:`~flashinfer.gemm.dense_block_scaled` computes it. The weight's rows
    belong to ``groups`` groups: row ``r`` to group ``r // 16 % groups``. Of each group and token the ``rescored``
    largest logits are replaced by ``x @ fine_weight[r] + bias[r]``. They are chosen as ``out_dtype`` holds them; of
    equal ones the lower row is chosen, and NaN is larger than any number. A group with fewer rows is rescored whole.

    The other logits stay coarse. With 48 groups of 16 an NVFP4 head of SmolLM2 has the first choice of its bf16 rows in
    all of 4,080 tokens. Its KL is 0.0008 where the coarse weight was made with error feedback and 0.0043 where it was
    rounded; that of an MXINT8 head is 0.0011 (docs/accuracy.md).

    A token reads ``groups * rescored`` fine rows. Where all tokens together would read more bytes than the whole fine
    weight has, that weight computes all logits, and the coarse one none (:func:`rescores`): from 189 tokens on for
    201,088 rows in NVFP4 and bf16 on a GB10. Logits that are not rescored then change with the batch.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]`` bfloat16; ``k`` is at most 14,336.
    weight, weight_scale, weight_format, alpha
        The coarse weight ``[n, ...]``, as in ``dense_block_scaled``; ``alpha`` is of its product alone.
    fine_weight : torch.Tensor
        ``[n, k]``, of ``fine_format``.
    fine_scale : torch.Tensor, optional
        For ``fine_format="mxint8"``: its scales in 128x4 layout.
    bias : torch.Tensor, optional
        ``[n]`` bfloat16, float16 or float32, added to coarse and fine products.
    fine_format : str
        ``"bf16"`` or ``"mxint8"``.
    groups : int
        Groups of rows, 1 or more; the same on every device. A group has at most 6,144 rows. Of a head that is split
        over several GPUs each has groups of its own rows: other rows may be rescored than on one GPU.
    rescored : int
        Rows of a group that are rescored, 1 to 16.
    out : torch.Tensor, optional
        ``[m, n]``; shares memory with no argument.
    out_dtype : torch.dtype, optional
        bfloat16 (default), float16 or float32; that of ``out`` if given.
    constant_weights, enable_pdl, tactic
        The same as in ``dense_block_scaled``, of the coarse weight.

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
    A rescored logit is a sum of the device's tensor cores in an order that depends on ``k`` alone; of float32 on the
    CPU. Results are the same on every run.
    """
    return compute(
        RescoredCall(
            out=out,
            x=x,
            weight=weight,
            weight_scale=weight_scale,
            fine_weight=fine_weight,
            fine_scale=fine_scale,
            alpha=alpha,
            bias=bias,
            out_dtype=out_dtype,
            weight_format=weight_format,
            fine_format=fine_format,
            groups=groups,
            rescored=rescored,
            constant_weights=constant_weights,
            enable_pdl=enable_pdl,
            tactic=None if tactic is None else str(tactic),
        )
    )


@flashinfer_api
def dense_block_scaled_rescored_top_k(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    fine_weight: torch.Tensor,
    fine_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    weight_format: WeightFormat,
    fine_format: FineFormat = "bf16",
    groups: int = 48,
    rescored: int = 16,
    top_k: int = 1,
    first_index: int = 0,
    logits: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> LargestOutputs:
    """The ``top_k`` largest of each row of :func:`dense_block_scaled_rescored`, and their indices.

    The results are those of :func:`~flashinfer.gemm.dense_block_scaled_top_k` over the rescored logits: the first of
    equal ones counts, and NaN is larger than any number. The launch that rescores leaves each group's largest, so that
    nothing reads the logits again.

    Parameters
    ----------
    x, weight, weight_scale, fine_weight, fine_scale, bias, weight_format, fine_format, groups, rescored, alpha
        The same as in ``dense_block_scaled_rescored``.
    out_dtype, constant_weights, enable_pdl, tactic
        The same, too.
    top_k, first_index
        The same as in ``dense_block_scaled_top_k``.
    logits : torch.Tensor, optional
        ``[m, n]``: gets all logits, like ``out`` in ``dense_block_scaled_rescored``.

    Returns
    -------
    LargestOutputs
        New tensors.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Those of ``dense_block_scaled_rescored``.
    """
    call = RescoredCall(
        out=logits,
        x=x,
        weight=weight,
        weight_scale=weight_scale,
        fine_weight=fine_weight,
        fine_scale=fine_scale,
        alpha=alpha,
        bias=bias,
        out_dtype=out_dtype,
        weight_format=weight_format,
        fine_format=fine_format,
        groups=groups,
        rescored=rescored,
        constant_weights=constant_weights,
        enable_pdl=enable_pdl,
        tactic=None if tactic is None else str(tactic),
        top_k=top_k,
        first_index=first_index,
        caller="dense_block_scaled_rescored_top_k",
    )
    return LargestOutputs(*(_traced_top_k(call) if is_traced(call) else _run_top_k(call)))


class RescoredLayer:
    """An LM head of :func:`dense_block_scaled_rescored`, made once from its two weights.

    The weights, scales, bias and alpha are checked here, and again by the first call after one of them changed: the
    layer keeps the tensors, so that ``weight.data = other``, vLLM's sleep levels and a reload of weights are seen. A
    call checks its own tensors. Results and errors are those of the functions.

    Parameters
    ----------
    weight, weight_scale, fine_weight, fine_scale, bias, weight_format, fine_format, groups, rescored, alpha
        The same as in ``dense_block_scaled_rescored``.
    constant_weights
        The same, too.
    out_dtype : torch.dtype
        The dtype of all logits: bfloat16, float16 or float32.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    NotImplementedError
        The weights are on a GPU that has no kernels of this family.
    """

    @flashinfer_api
    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        fine_weight: torch.Tensor,
        fine_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        weight_format: WeightFormat,
        fine_format: FineFormat = "bf16",
        groups: int = 48,
        rescored: int = 16,
        alpha: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        constant_weights: bool = False,
    ) -> None:
        operands = weight, weight_scale, fine_weight, fine_scale, alpha, bias
        options = out_dtype, weight_format, fine_format, groups, rescored, constant_weights
        self._operands, self._options = operands, options
        require_choice("weight_format", weight_format, WEIGHT_FORMATS)
        require_output_dtype("out_dtype", out_dtype, OUTPUT_DTYPES)
        # Traced tensors have no addresses that could be checked; traced calls go to the operator, which checks when it
        # runs.
        self._checks = not is_traced(operands)
        if self._checks:
            self._require_weights()

    def _call(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tactic: int | str | None = None,
        **of_top_k: Any,
    ) -> RescoredCall:
        named = None if tactic is None else str(tactic)
        return RescoredCall(out, x, *self._operands, *self._options, enable_pdl, named, **of_top_k)

    def _require_weights(self) -> None:
        """Check what is the layer's, and remember the weights as they are."""
        weight, weight_format = self._operands[0], self._options[1]
        require_rank("weight", weight, 2)
        require_computing_device("weight", weight)
        require_served("RescoredLayer", weight.device)
        k = LAYOUTS[weight_format].k(weight.shape[1])
        no_tokens = torch.empty((0, k), dtype=torch.bfloat16, device=weight.device)
        checked = require_rescored(self._call(no_tokens))
        bounds = bounds_of([span(each) for each in self._operands if each is not None])
        self._calls = CallCache(weight.device, bounds, written=1)
        self._plain = checked.groups, checked.rescored
        # Last of all that the weights are known: what ends this before checks again.
        self._weights = Unchanged(*self._operands)

    def _checked(self, call: RescoredCall) -> RescoredCall:
        if not self._weights.holds(*self._operands):
            self._require_weights()
        tensors = call.out, call.x
        if self._calls.find(tensors, call.enable_pdl) is None:
            require_rescored(call)
            self._calls.add(True, tensors, call.enable_pdl)
        groups, rescored = self._plain
        return call._replace(groups=groups, rescored=rescored)

    @flashinfer_api
    def run(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tactic: int | str | None = None,
    ) -> torch.Tensor:
        """The logits of ``x``; parameters, result and errors are ``dense_block_scaled_rescored``'s."""
        call = self._call(x, out, enable_pdl, tactic)
        if not self._checks or is_traced((x, out)):
            return compute(call)
        call = self._checked(call)
        if call.out is None:
            call = call._replace(out=call.new_output())
        run_rescored(call)
        assert call.out is not None
        return call.out

    @flashinfer_api
    def run_top_k(
        self,
        x: torch.Tensor,
        *,
        top_k: int = 1,
        first_index: int = 0,
        logits: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tactic: int | str | None = None,
    ) -> LargestOutputs:
        """The largest logits of ``x``; parameters, results and errors are ``dense_block_scaled_rescored_top_k``'s."""
        call = self._call(
            x,
            logits,
            enable_pdl,
            tactic,
            top_k=top_k,
            first_index=first_index,
            caller="dense_block_scaled_rescored_top_k",
        )
        if not self._checks or is_traced((x, logits)):
            return LargestOutputs(*_traced_top_k(call))
        return LargestOutputs(*_find_largest(self._checked(call)))


class RescoredCall(NamedTuple):
    """The arguments of one call, named as in :func:`dense_block_scaled_rescored`."""

    out: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    fine_weight: torch.Tensor
    fine_scale: torch.Tensor | None
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    out_dtype: torch.dtype | None
    weight_format: str
    fine_format: str
    groups: int
    rescored: int
    constant_weights: bool
    enable_pdl: bool | None
    tactic: str | None
    top_k: int = 0  # of dense_block_scaled_rescored
    first_index: int = 0
    caller: str = "dense_block_scaled_rescored"

    def coarse(self) -> DenseCall:
        """The dense layer that computes all logits."""
        return DenseCall(
            out=self.out,
            x=self.x,
            x_scale=None,
            weight=self.weight,
            weight_scale=self.weight_scale,
            alpha=self.alpha,
            bias=self.bias,
            out_dtype=self.out_dtype,
            weight_format=self.weight_format,
            constant_weights=self.constant_weights,
            enable_pdl=self.enable_pdl,
            tactic=self.tactic,
            caller=self.caller,
        )

    def new_output(self) -> torch.Tensor:
        """Memory for all logits of a valid call, or of one that is traced."""
        return self.coarse().new_output()


def rescores(
    num_tokens: int,
    n: int,
    weight_format: WeightFormat,
    fine_format: FineFormat = "bf16",
    groups: int = 48,
    rescored: int = 16,
    device: DeviceClass = GB10,
) -> bool:
    """Whether a call rescores; else the fine weight computes all logits.

    It rescores while its bytes, those of the coarse weight and of each token's fine rows, are at most
    ``device.rescored_bytes`` times those of the fine weight.

    Parameters
    ----------
    num_tokens, n : int
        Tokens of the call, and rows of the weights.
    weight_format, fine_format, groups, rescored
        The same as in :func:`dense_block_scaled_rescored`.
    device : DeviceClass
        The class of the GPU.
    """
    coarse, fine = FORMATS[weight_format].bits_with_scales, FORMATS[fine_format].bits_with_scales
    rows = num_tokens * min(n, min(groups, -(-n // TILE_ROWS)) * rescored)  # groups beyond the tiles are empty
    return n * coarse + rows * fine <= device.rescored_bytes * n * fine


def require_rescored(call: RescoredCall) -> RescoredCall:
    """Check a call's metadata and addresses; the call with its output's dtype and plain integers.

    Raises
    ------
    TypeError, ValueError
        Naming the first argument that does not fit, what it was and what it may be.
    """
    require_choice("weight_format", call.weight_format, WEIGHT_FORMATS)
    require_choice("fine_format", call.fine_format, FINE_FORMATS)
    coarse = call.coarse()
    out_dtype, _ = validate(coarse)
    n, k, device = call.weight.shape[0], coarse.k, call.x.device
    if n == 0:
        raise ValueError(f"weight is {describe(call.weight)}; it must have rows, of whose logits some are rescored")
    if k > MAX_K:
        raise ValueError(f"weight is {describe(call.weight)}; the k of a rescored head is at most {MAX_K}")
    groups = int(require_int("groups", call.groups, 1, 2**31 - 1))  # True is 1, which torch does not take
    tiles = -(-n // TILE_ROWS)
    if group_rows(n, groups) > MAX_GROUP_ROWS:
        least = -(-tiles * TILE_ROWS // MAX_GROUP_ROWS)
        raise ValueError(f"groups is {groups}; with {n} rows it must be at least {least}: a group has at most 6,144")
    rescored = int(require_int("rescored", call.rescored, 1, MAX_RESCORED))
    fine = call.fine_weight
    require_tensor(
        "fine_weight", fine, [(n, k)], (_DTYPES[call.fine_format],), device, f"fine_format={call.fine_format!r}"
    )
    if call.fine_format == "bf16":
        if call.fine_scale is not None:
            raise ValueError(f"fine_scale is {describe(call.fine_scale)}; with fine_format='bf16' it must be None")
    else:
        require_scales("fine_scale", call.fine_scale, n, k, device, formats=LAYOUTS[call.fine_format].scales)
    if call.out is not None:
        require_apart(call, {"out": ()}, ARGUMENT_NAMES[call.caller])
    groups = min(groups, tiles)  # others are empty
    return call._replace(groups=groups, rescored=rescored, out_dtype=out_dtype)


def group_rows(n: int, groups: int) -> int:
    """Rows of the largest group, counting the last tile as whole."""
    tiles = -(-n // TILE_ROWS)
    return -(-tiles // groups) * TILE_ROWS


def _run(call: RescoredCall, checked: RescoredCall) -> None:
    require_served("dense_block_scaled_rescored", call.x.device)
    run_rescored(checked._replace(out=call.out))


def _outputs(call: RescoredCall) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (call.x.shape[0], call.top_k), call.x.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int64, device=device)


def _run_top_k(call: RescoredCall) -> tuple[torch.Tensor, torch.Tensor]:
    call = require_rescored(call)
    require_served("dense_block_scaled_rescored_top_k", call.x.device)
    return _find_largest(call)


def _find_largest(call: RescoredCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of a valid call, but for ``top_k`` and ``first_index``, where this fork serves the device."""
    top_k = require_int("top_k", call.top_k, 1, min(MAX_TOP_K, len(call.weight)), "no more than the weight has rows")
    first_index = require_int("first_index", call.first_index, 0, 2**62)
    call = call._replace(top_k=top_k, first_index=first_index)
    if call.out is None:
        call = call._replace(out=call.new_output())
    values, indices = _outputs(call)
    run_rescored(call, RowTopK(values, indices, first_index))
    return values, indices


compute = OutputOperator(
    "sm12x_dense_rescored", RescoredCall, require_rescored, _run, RescoredCall.new_output, ("out",)
)
_traced_top_k = define("sm12x_dense_rescored_top_k", RescoredCall, _run_top_k, _outputs, mutates=("out",))


def run_rescored(call: RescoredCall, top_k: RowTopK | None = None) -> None:
    """Compute a valid call that has its output, and the largest logits of each row, where this fork serves the
    device."""
    assert call.out is not None
    m, n = call.out.shape
    if m == 0:
        return
    backend = kernels(call.x.device)
    device = GB10 if backend is None else backend.device_class
    if not rescores(m, n, call.weight_format, call.fine_format, call.groups, call.rescored, device):  # type: ignore[arg-type]
        _multiply_fine(call)
        if top_k is not None:
            _search(backend, call, top_k)
        return
    run_served(call.coarse(), BF16)
    if backend is None:
        with plain_torch(call.x.device):
            _rescore_on_cpu(call)
            if top_k is not None:
                top_k.compute_on_cpu(call.out)
        return
    module, writes = dense_module(backend, call.weight_format), [call.out]
    largest: tuple[Any, ...] = (None, None, 0, None)
    if top_k is not None:
        ranks = row_ranks(backend, module, m, n, top_k, 8 * m * call.groups * top_k.indices.shape[1])
        largest = (*top_k, ranks)
        writes += [top_k.values, top_k.indices, ranks]
    backend.call(
        module.sm12x_rescore_run,
        call.out,
        call.x,
        call.fine_weight,
        call.fine_scale,
        call.bias,
        call.groups,
        call.rescored,
        *largest,
        backend.pdl(call.enable_pdl),
        writes=writes,
    )


def _search(backend: Backend | None, call: RescoredCall, top_k: RowTopK) -> None:
    """The largest of logits that are all fine."""
    assert call.out is not None
    if backend is None:
        with plain_torch(call.x.device):
            top_k.compute_on_cpu(call.out)
        return
    module = dense_module(backend, call.weight_format)
    ranks = row_ranks(backend, module, call.out.shape[0], call.out.shape[1], top_k)
    writes = [call.out, top_k.values, top_k.indices, ranks]
    backend.call(module.sm12x_row_top_k_run, *top_k, ranks, call.out, backend.pdl(call.enable_pdl), writes=writes)


def _multiply_fine(call: RescoredCall) -> None:
    """All logits from the fine weight: by the dense layer of its format, or in bfloat16 by torch."""
    out, fine = call.out, call.fine_weight
    assert out is not None
    if call.fine_format != "bf16":
        assert call.fine_scale is not None
        dense = call.coarse()._replace(
            weight=fine, weight_scale=call.fine_scale, weight_format=call.fine_format, alpha=None, tactic=None
        )
        run_served(dense, BF16)
        return
    with plain_torch(out.device):
        if out.is_cuda and out.dtype is torch.bfloat16 and call.bias is None:
            torch.mm(call.x, fine.T, out=out)
            return
        rows = max(1, DEQUANTIZED_BYTES // (4 * fine.shape[1]))
        for first in range(0, fine.shape[0], rows):
            columns = slice(first, first + rows)
            for token in range(0, call.x.shape[0], DEQUANTIZED_ROWS):
                tokens = slice(token, token + DEQUANTIZED_ROWS)
                product = _product(call.x[tokens], fine[columns])
                out[tokens, columns] = product if call.bias is None else product + call.bias[columns].float()


def _product(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The float32 product of bfloat16 tokens and rows."""
    return torch.mm(x, rows.T, out_dtype=torch.float32) if x.is_cuda else x.float() @ rows.float().T


def rows_to_rescore(logits: torch.Tensor, groups: int, rescored: int) -> torch.Tensor:
    """Rows of the weight that are rescored, int64 ``[m, ...]``; in place of those that a group lacks, ``n`` and more.

    Parameters
    ----------
    logits : torch.Tensor
        All coarse logits ``[m, n]``, on any device.
    groups, rescored : int
        The same as in :func:`dense_block_scaled_rescored`.
    """
    m, n = logits.shape
    padded_rows = group_rows(n, groups) * groups
    ranks = torch.full((m, padded_rows), torch.iinfo(torch.int64).min, device=logits.device)
    ranks[:, :n] = ranks_of(logits)
    rows = _by_group(torch.arange(padded_rows, device=logits.device)[None], groups)
    largest = _by_group(ranks, groups).topk(min(rescored, rows.shape[2]), dim=2).indices
    return rows.expand(m, -1, -1).gather(2, largest).flatten(1)


def _by_group(of_rows: torch.Tensor, groups: int) -> torch.Tensor:
    """What ``[m, rows]`` holds of whole tiles, as ``[m, groups, rows of a group]``."""
    return of_rows.view(len(of_rows), -1, groups, TILE_ROWS).transpose(1, 2).flatten(2)


def _rescore_on_cpu(call: RescoredCall) -> None:
    """Rescore logits as the kernel does."""
    out, fine = call.out, call.fine_weight
    assert out is not None
    m, n = out.shape
    rows = rows_to_rescore(out, call.groups, call.rescored)
    scales = None
    if call.fine_scale is not None:
        layout = LAYOUTS[call.fine_format]
        scales = mx_cpu.unswizzle_128x4(call.fine_scale, n, fine.shape[1] // layout.scales.block)
    for token in range(m):
        places = rows[token][rows[token] < n]
        values = fine[places]
        values = values.float() if scales is None else LAYOUTS[call.fine_format].dequantize(values, scales[places])
        logits = values @ call.x[token].float()
        if call.bias is not None:
            logits = logits + call.bias[places].float()
        out[token, places] = logits.to(out.dtype)
