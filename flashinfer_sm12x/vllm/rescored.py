# SPDX-License-Identifier: Apache-2.0
"""LM heads of any model that read 4.5 bits a weight and choose as their bf16 rows do: ``"lm_head": "nvfp4_rescored"``.

The head keeps its bf16 ``weight``, which vLLM loads, shares with a draft, and reads for ``head_dtype``. It also has
NVFP4 values, scales and a global scale, as buffers: they give all logits, and the bf16 rows the largest again
(``flashinfer.gemm.dense_block_scaled_rescored``). The buffers are derived from the weight when it has been loaded, and
again in place after every other load, because captured graphs hold their addresses:

=================================================== ===============================================================
vLLM prepares a loaded layer, at the start or       :meth:`RescoredHeadMethod.process_weights_after_loading`
in a reload layer by layer
weights are loaded into a running model, or those   their loader, :meth:`RescoredHeadMethod.weight_was_loaded`
of an embedding whose weight the head shares
tensors are copied into the weight                  the worker's methods that end an update, :func:`deriving_after`
=================================================== ===============================================================
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ..quantize.choice import GROUPS
from ..quantize.files import FolderError
from ..variables import RESCORED
from . import api_checks, dense, dense_folder, fallback, replacements, table
from .coarse_weight import FORMAT, CoarseWeight, padding_mask
from .layer_object import LayerObject

logger = init_logger("vllm.flashinfer_sm12x")

BLOCK_SIZE = 32
PART = api_checks.MODULES["rescored"][1]
TENSORS = (torch.Tensor, torch.nn.Parameter)
BUFFERS = ("sm12x_coarse", "sm12x_coarse_scale", "sm12x_coarse_alpha", "sm12x_padding")
"""A head's buffers, none of which a checkpoint holds."""

_heads: weakref.WeakSet[Any] = weakref.WeakSet()
"""The heads of this process whose method is :class:`RescoredHeadMethod`."""
_scores_prompts = False


def reason_against(head: Any, config: Any) -> str:
    """Why a head is left to vLLM, or an empty text; ``config`` is the server's."""
    from flashinfer.gemm.sm12x_dense_rescored import MAX_GROUP_ROWS, MAX_K, group_rows, rescores

    if type(head.quant_method) not in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod):
        return f"it is quantized: {type(head.quant_method).__name__}"
    n, k = head.weight.shape
    adapters, dtype = config.lora_config, config.model_config.head_dtype
    asked = {
        f"its weight is {head.weight.dtype}": head.weight.dtype is not torch.bfloat16,
        f"its K of {k} is no multiple of {BLOCK_SIZE}": k % BLOCK_SIZE != 0,
        f"its K of {k} is more than {MAX_K}": k > MAX_K,
        f"{n} rows, of which a token would read more than all in bf16": not rescores(1, n, FORMAT),
        f"{n} rows, of which a group would have more than {MAX_GROUP_ROWS}": group_rows(n, GROUPS) > MAX_GROUP_ROWS,
        f"head_dtype {dtype}": dtype is not torch.bfloat16,
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        "LoRA adapters may change it; with --lora-target-modules q_proj k_proj v_proj o_proj they do not": adapters
        is not None
        and (not adapters.target_modules or any(name.endswith("lm_head") for name in adapters.target_modules)),
    }
    return next((what for what, given in asked.items() if given), "")


def rescore(head: Any, config: Any, folder: str, is_draft: bool) -> None:
    """Have a head that vLLM has just built rescore, or say in table and log why it does not.

    Raises
    ------
    FolderError
        The folder that a user named cannot be used; nothing takes its place.
    """
    reason = reason_against(head, config) or dense.build(torch.get_default_device().type, FORMAT)
    if is_draft:
        speculative = config.speculative_config
        if speculative is not None and speculative.draft_lm_head_quantization is not None:
            reason = "draft_lm_head_quantization"
        if reason:
            logger.info_once("flashinfer-sm12x: the draft's LM head is left to vLLM: %s", reason, scope="global")
            return
        folder = ""  # which is of the model's own head
    elif reason:
        logger.warning_once("flashinfer-sm12x: the LM head is left to vLLM: %s", reason, scope="global")
        table.note("lm_head", "vLLM's", f"{config.model_config.dtype}, {table.AS_CHECKPOINT}", reason)
        return
    install()
    model = config.model_config
    told = is_draft or model.hf_config.model_type == "gpt_oss"
    head.quant_method = RescoredHeadMethod(head, folder, "" if told else model.architecture)
    _heads.add(head)
    if not is_draft:
        table.note("lm_head", "flashinfer-sm12x", RESCORED, f"chosen, {folder}" if folder else "chosen")


class RescoredHeadMethod(UnquantizedEmbeddingMethod):
    """The method of a head that rescores; its weight is the one that vLLM's method made."""

    def __init__(self, head: Any, folder: str, model: str) -> None:
        self._model = model  # for which no other layer logs the table
        self.quantized = dense_folder.Layer(folder, "lm_head", head.prefix) if folder else None
        if self.quantized is not None:
            self.quantized.loader = functools.partial(ParallelLMHead.weight_loader, head)
        self._coarse: CoarseWeight | None = None
        self._mask: torch.Tensor | None = None
        self._is_tied = False
        self._live: Any = None  # the weight that calls read
        self._object = LayerObject()

    def weight_was_loaded(self, head: Any, weight: Any, loaded_weight: Any) -> None:
        """Derive anew after the loads that no :meth:`process_weights_after_loading` follows. ``weight`` is the
        parameter that ``loaded_weight`` of the checkpoint was loaded into."""
        if self.quantized is not None:
            self.quantized.loaded[""] = loaded_weight
        # A transfer may record what a loader would copy, with a tensor of another class.
        runs = self._coarse is not None and not weight.is_meta and type(loaded_weight) in TENSORS
        if runs and (self._is_tied or weight is self._live()):
            self.derive(head, weight)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """The head shares the embedding's weight, and the loads of that one are watched."""
        method, loader = type(embed_tokens.quant_method), getattr(embed_tokens.weight.weight_loader, "__func__", None)
        if method is not UnquantizedEmbeddingMethod or loader is not VocabParallelEmbedding.weight_loader:
            reason = f"it shares the embedding's weight, which {method.__name__} loads"
            if self.quantized is not None:
                raise FolderError(f"{self.quantized.name} cannot be used for {layer.prefix}: {reason}")
            table.note("lm_head", "vLLM's", table.AS_CHECKPOINT, reason)
            layer.quant_method = UnquantizedEmbeddingMethod()
            return layer.quant_method.tie_weights(layer, embed_tokens)
        tied = super().tie_weights(layer, embed_tokens)
        self._is_tied = True
        # vLLM keeps what loads a weight for as long as its layer lives: a strong reference would keep the layer.
        of_head, embedding = weakref.ref(layer), weakref.ref(embed_tokens)

        def load(param: Any, loaded_weight: Any) -> None:
            running = of_head()
            owner = embedding() or running  # a draft may have been given another embedding
            functools.partial(VocabParallelEmbedding.weight_loader, owner)(param, loaded_weight)
            if running is not None:
                self.weight_was_loaded(running, param, loaded_weight)

        layer.weight.weight_loader = load
        return tied

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if self._model:
            table.log_once(self._model)
        # A head that has run is in graphs; from a folder nothing takes the place of what a user named.
        if self._coarse is not None or self.quantized is not None:
            self.derive(layer, layer.weight)
            return
        with fallback.leaving(PART):
            self.derive(layer, layer.weight)
            return
        layer.quant_method = UnquantizedEmbeddingMethod()

    def derive(self, layer: Any, weight: torch.Tensor) -> None:
        """Make the head's coarse weight from ``weight``, of which calls read these values from now on."""
        coarse = CoarseWeight(weight) if self._coarse is None else self._coarse
        if self.quantized is None:
            coarse.fill(weight)
        else:
            coarse.take(self.quantized.weight(SimpleNamespace(weight=weight)), weight)
        if self._coarse is None:
            self._live, self._mask = weakref.ref(layer.weight), _mask_of_padding(layer)
            buffers = coarse.values, coarse.scales, coarse.global_scale, self._mask
            for name, tensor in zip(BUFFERS, buffers, strict=True):
                layer.register_buffer(name, tensor, persistent=False)
        self._coarse = coarse

    def follow(self, head: Any) -> None:
        """Derive anew if the weight is not the one that the coarse weight was derived from."""
        if self._coarse is None or self._coarse.is_of(head.weight):
            return
        if self.quantized is not None:
            raise FolderError(
                f"the LM head's weight was written in place, and {self.quantized.name} is of the checkpoint's: update "
                'weights by the checkpoint\'s tensors, or start without the folder, "lm_head": "nvfp4_rescored"'
            )
        self.derive(head, head.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[..., n]`` in bfloat16; all are fine where a prompt is scored, or where that reads fewer bytes."""
        rows = x.reshape(-1, x.shape[-1])
        compiles = torch.compiler.is_compiling()
        if not compiles and (_scores_prompts or not _is_rescored(rows, len(layer.weight))):
            return super().apply(layer, x, bias)
        if self._coarse is None:  # a loader that prepares no layers
            self.derive(layer, layer.weight)
        if self._mask is not None:
            bias = self._mask if bias is None else self._mask + bias
        return self._head(layer, bias, compiles).run(rows.contiguous()).view(*x.shape[:-1], -1)

    def _head(self, layer: Any, bias: torch.Tensor | None, compiles: bool) -> Any:
        """The fork's object of the head (:class:`.LayerObject`)."""
        from flashinfer.gemm import RescoredLayer

        coarse = self._coarse
        assert coarse is not None
        tensors = coarse.values, coarse.scales, layer.weight, bias, coarse.global_scale
        if not compiles and (known := self._object.get(tensors)) is not None:  # what is traced is the graph's
            return known
        made = RescoredLayer(
            coarse.values,
            coarse.scales,
            layer.weight,
            bias=bias,
            weight_format=FORMAT,
            alpha=coarse.global_scale,
            constant_weights=True,
        )
        return made if compiles else self._object.keep(made, tensors)


def _is_rescored(rows: torch.Tensor, n: int) -> bool:
    """Whether the operator rescores so many rows; else its logits are those of the bf16 weight."""
    from flashinfer.gemm.sm12x_dense_rescored import rescores
    from flashinfer.sm12x.backend import kernels
    from flashinfer.sm12x.device_class import GB10

    backend = kernels(rows.device)
    return rescores(len(rows), n, FORMAT, device=GB10 if backend is None else backend.device_class)


def _mask_of_padding(head: Any) -> torch.Tensor | None:
    indices = head.shard_indices
    added = indices.num_org_elements_padded
    ranges = (0, indices.num_org_elements), (added, added + indices.num_added_elements)
    return padding_mask(head.weight, *ranges)


def deriving_after(update: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the worker that ends an update of weights; the heads of this process are derived again after it."""

    def updated(*arguments: Any, **more: Any) -> Any:
        result = update(*arguments, **more)
        derive_all()
        return result

    return updated


def derive_all() -> None:
    """Derive the coarse weights of this process again, if their heads' weights were written to since.

    Raises
    ------
    FolderError
        The coarse weight is of a folder, and nothing tells of what checkpoint the new weight is.
    """
    for head in _heads:
        method = head.quant_method
        if isinstance(method, RescoredHeadMethod) and not head.weight.is_meta:
            method.follow(head)


@contextlib.contextmanager
def scoring_prompts() -> Iterator[None]:
    """Heads give the logits of their bf16 weights in this context."""
    global _scores_prompts
    outer, _scores_prompts = _scores_prompts, True
    try:
        yield
    finally:
        _scores_prompts = outer


def fine_for_prompts(score: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``prompt_logprobs``, which look at tokens of every rank: all of their logits are fine."""

    def scored(*arguments: Any, **more: Any) -> Any:
        with scoring_prompts():
            return score(*arguments, **more)

    return scored


def install() -> None:
    """Replace what vLLM's worker does after updates and for prompts. Called when the first such head is built: vLLM has
    imported its worker by then, which a registration of this plugin must not do."""
    with replacements.installing("rescored") as (*updates, first, second, third):
        for each in updates:
            each.replace(deriving_after(each.original()))
        for each in (first, second, third):
            each.replace(fine_for_prompts(each.original()))
