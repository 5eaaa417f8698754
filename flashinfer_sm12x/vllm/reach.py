# SPDX-License-Identifier: Apache-2.0
"""Choices that do not apply: on a gpt-oss that is not in its own MXFP4, and on other models. The log says it once."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.logger import init_logger

from ..variables import RESCORED
from . import api_checks, settings, table

logger = init_logger("vllm.flashinfer_sm12x")

# Keys that mean a checkpoint's layers; the others are of vLLM's steps around them.
OF_LAYERS = ("moe", "moe_input", "qkv", "o", "lm_head")
OF_OWN_MXFP4 = ("moe", "moe_input", "qkv", "o")


def chosen(keys: tuple[str, ...]) -> dict[str, str]:
    """The choices for these keys that differ from the defaults."""
    values, defaults = (dataclasses.asdict(each) for each in (settings.current(), settings.Settings()))
    return {key: values[key] for key in keys if values[key] != defaults[key]}


def tell_of_gpt_oss(vllm_config: Any, model: Any) -> None:
    """Log the table for a gpt-oss in another format than its own, whose layers ask no class of this fork, and warn of
    choices that do not apply."""
    quantization = vllm_config.model_config.quantization
    if quantization == settings.CHECKPOINTS:
        return
    what = quantization or "bf16"
    given = chosen(OF_OWN_MXFP4)
    layer = next(layer for layer in model.layers if hasattr(layer, "attn"))
    experts = layer.mlp.experts.routed_experts.quant_method
    for kind, method in (
        ("moe", experts),
        ("qkv", layer.attn.qkv_proj.quant_method),
        ("o", layer.attn.o_proj.quant_method),
    ):
        ours = kind == "moe" and _is_ours(experts)
        backend = "flashinfer-sm12x" if ours else f"vLLM's {type(method).__name__}"
        why = f'no "{kind}": "{given[kind]}" here' if kind in given else "default"
        table.note(kind, backend, f"{what}, {table.AS_CHECKPOINT}", why)
    if given:
        head = settings.current().choice("lm_head")
        alone = "" if head.weights == "bf16" or not _has_head(vllm_config) else f"; the LM head alone is {head}"
        logger.warning_once(
            "flashinfer-sm12x: the checkpoint's layers are %s, not gpt-oss's own MXFP4, and stay so: %s do not apply%s",
            what,
            _pairs(given),
            alone,
            scope="global",
        )
    table.log_once()


def tell_of_another_model(architecture: str) -> None:
    """Warn of choices that apply only to gpt-oss, and of ``moe`` if no MXFP4 experts were built. Called when another
    model's head is built, which vLLM does after its layers."""
    given = chosen(tuple(key for key in OF_LAYERS if key != "moe"))
    if given.get("lm_head") == RESCORED:  # which every model's head takes
        del given["lm_head"]
    if given:
        logger.warning_once(
            "flashinfer-sm12x: %s do not apply to %s: these choices are gpt-oss's",
            _pairs(given),
            architecture,
            scope="global",
        )
    experts = api_checks.module("experts")
    if (given := chosen(("moe",))) and experts is not None and not experts.were_built():
        logger.warning_once(
            "flashinfer-sm12x: %s does not apply to %s: it has no MXFP4 experts",
            _pairs(given),
            architecture,
            scope="global",
        )


def _pairs(given: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())


def _is_ours(method: Any) -> bool:
    ours, experts = api_checks.module("experts"), getattr(method, "experts_cls", None)
    return ours is not None and experts is not None and issubclass(experts, ours.SM12xExperts)


def _has_head(vllm_config: Any) -> bool:
    return bool(vllm_config.model_config.runner_type == "generate")
