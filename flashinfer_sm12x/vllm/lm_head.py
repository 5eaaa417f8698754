# SPDX-License-Identifier: Apache-2.0
"""The LM head's class: most models of vLLM's build their heads without a quantization config, so the class is where a
format can come in."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ..variables import RESCORED
from . import api_checks, dense, fallback, reach, replacements, settings, table

logger = init_logger("vllm.flashinfer_sm12x")

NAMES = ("", "lm_head", "head", "output", "output_layer", "proj_out")
"""Last parts of the names that models give a head whose logits choose a token."""
TARGET, DRAFT = "backbone", "draft"
_last_built_for: Any = None
"""A weak reference to the config of the model for which a head was built last."""


class SM12xParallelLMHead(ParallelLMHead):
    """vLLM's head; gpt-oss's own gets the format that was chosen, and every model's may rescore. All others are built
    as if this class were not there."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, prefix: str = "", quant_method: Any = None, **kw: Any
    ) -> None:
        is_given = quant_method is not None
        if not is_given and prefix == "lm_head":
            with fallback.leaving(api_checks.MODULES["head"][1]):
                quant_method = _chosen_method(prefix)
        super().__init__(num_embeddings, embedding_dim, *args, prefix=prefix, quant_method=quant_method, **kw)
        if not is_given and prefix.rpartition(".")[2] in NAMES:
            with fallback.leaving(api_checks.MODULES["rescored"][1]):
                _rescore(self)

    def weight_loader(self, param: Any, loaded_weight: torch.Tensor) -> None:
        super().weight_loader(param, loaded_weight)
        follow = getattr(self.quant_method, "weight_was_loaded", None)
        if follow is not None and param.dim() == 2:  # not the bias
            follow(self, param, loaded_weight)


class SM12xLogitsProcessor(LogitsProcessor):
    """vLLM's, which says where a model has no head that could rescore."""

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(vocab_size, org_vocab_size, scale, logits_as_input, soft_cap)
        with fallback.leaving("messages about choices that do not apply are"):
            _tell_of_no_head()


def _chosen_method(prefix: str) -> Any:
    """The method of the head that is built now; None if it is vLLM's, or one that rescores."""
    model = _model_that_is_built()
    if model is None:
        return None
    if model.hf_config.model_type != "gpt_oss":
        reach.tell_of_another_model(model.architecture)
        return None
    chosen = settings.current()
    choice = chosen.choice("lm_head")
    if model.runner_type != "generate":
        # vLLM takes the head away, or reads its bf16 rows for a classifier's.
        table.note("lm_head", "none", "", f"--runner {model.runner_type}")
        return None
    if choice.weights == RESCORED:
        return None
    if choice.weights == "bf16":
        table.note("lm_head", "vLLM's (cuBLAS)", "bf16", "default")
        return None
    return dense.method_of("lm_head", choice, chosen.folder("lm_head"), prefix)


def _rescore(head: Any) -> None:
    """Have a built head rescore, if that was chosen."""
    from vllm.config import get_current_vllm_config_or_none

    global _last_built_for
    config, being_built = get_current_vllm_config_or_none(), _being_built()
    if config is None or config.model_config is None or not being_built:
        return
    _last_built_for = weakref.ref(config)
    model, chosen = config.model_config, settings.resolve(config.additional_config)
    if chosen.choice("lm_head").weights != RESCORED or model.runner_type != "generate":
        return
    rescored = api_checks.module("rescored")
    if rescored is None:
        table.note("lm_head", "vLLM's", f"{model.dtype}, {table.AS_CHECKPOINT}", api_checks.why_not("rescored"))
        return
    rescored.rescore(head, config, chosen.folder("lm_head"), being_built == DRAFT)


def _tell_of_no_head() -> None:
    """Log that the model whose logits processor was built has no head of its own, if one was to rescore."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or _being_built() != TARGET or not get_pp_group().is_last_rank:
        return
    if _last_built_for is not None and _last_built_for() is config:
        return
    model, chosen = config.model_config, settings.resolve(config.additional_config)
    if chosen.choice("lm_head").weights == RESCORED and model.runner_type == "generate":
        reason = "the model has none: vLLM gives its embedding to the logits processor"
        table.note("lm_head", "vLLM's", f"{model.dtype}, {table.AS_CHECKPOINT}", reason)
        table.log_once(model.architecture)


def _model_that_is_built() -> Any:
    """The config of the model that is being built; None if that is a draft, or if nothing tells."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none() if _being_built() == TARGET else None
    return None if config is None else config.model_config


def _being_built() -> str:
    """Whether vLLM is building its model or a draft; empty if nothing tells."""
    tags = sys.modules.get("vllm.compilation.backends")  # what loads a draft has imported it
    if tags is not None and not hasattr(tags, "model_tag"):
        logger.warning_once(
            "flashinfer-sm12x: the LM head is left to vLLM: vllm.compilation.backends.model_tag is gone, which told "
            "a draft's"
        )
        return ""
    return TARGET if tags is None or tags.model_tag == TARGET else DRAFT


def install() -> None:
    """Have vLLM build :class:`SM12xParallelLMHead` and :class:`SM12xLogitsProcessor` where it asks for its own."""
    classes = SM12xParallelLMHead, SM12xLogitsProcessor
    with replacements.installing("head") as entries:
        for entry, ours in zip(entries, classes, strict=True):
            name = ours.__name__.removeprefix("SM12x")
            if entry.original() is not None:
                logger.warning(
                    "flashinfer-sm12x: another plugin replaces %s; the LM head stays as that one makes it", name
                )
                return
            entry.replace(ours, through=PluggableLayer.register_oot(name=name))
