# SPDX-License-Identifier: Apache-2.0
"""The LM head's class: vLLM's gpt-oss builds its head without a quantization config, so its class is where a format
can come in."""

from __future__ import annotations

import sys
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from . import api_checks, dense, fallback, reach, replacements, settings, table

logger = init_logger("vllm.flashinfer_sm12x")

NAME = "ParallelLMHead"


class SM12xParallelLMHead(ParallelLMHead):
    """vLLM's head; gpt-oss's own gets the format that was chosen, every other is built as if this class were not
    there."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, prefix: str = "", quant_method: Any = None, **kw: Any
    ) -> None:
        if quant_method is None and prefix == "lm_head":
            with fallback.leaving(api_checks.MODULES["head"][1]):
                quant_method = _chosen_method(prefix)
        super().__init__(num_embeddings, embedding_dim, *args, prefix=prefix, quant_method=quant_method, **kw)


def _chosen_method(prefix: str) -> Any:
    """The method of the head that is built now; None if it is vLLM's."""
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
    if choice.weights == "bf16":
        table.note("lm_head", "vLLM's (cuBLAS)", "bf16", "default")
        return None
    return dense.method_of("lm_head", choice, chosen.folder("lm_head"), prefix)


def _model_that_is_built() -> Any:
    """The config of the model that is being built; None if that is a draft, or if nothing tells."""
    from vllm.config import get_current_vllm_config_or_none

    tags = sys.modules.get("vllm.compilation.backends")  # what loads a draft has imported it
    if tags is not None and not hasattr(tags, "model_tag"):
        logger.warning_once(
            "flashinfer-sm12x: the LM head is left to vLLM: vllm.compilation.backends.model_tag is gone, which told "
            "a draft's"
        )
        return None
    if tags is not None and tags.model_tag != "backbone":
        return None
    config = get_current_vllm_config_or_none()
    return None if config is None else config.model_config


def install() -> None:
    """Have vLLM build :class:`SM12xParallelLMHead` where it asks for its own."""
    with replacements.installing("head") as (head,):
        if head.original() is not None:
            logger.warning("flashinfer-sm12x: another plugin replaces %s; the LM head stays as that one makes it", NAME)
            return
        head.replace(SM12xParallelLMHead, through=PluggableLayer.register_oot(name=NAME))
