# SPDX-License-Identifier: Apache-2.0
"""All that the plugin replaces in vLLM's modules, classes and registries.

:data:`TABLE` lists it; nothing else of the plugin writes there. A part's ``install()`` replaces its entries within
:func:`installing`, which makes all of them or none. ``docs/development.md`` shows the table.

Like :mod:`.api_checks` it imports nothing of vLLM's until a part is installed. What the plugin sets on objects of one
server (its config, its layers) is not listed here: those end with the server.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import api_checks
from .api_checks import LAYERS, MODELS

_MISSING: Any = object()


class Replacement(NamedTuple):
    """One entry of :data:`TABLE`.

    Attributes:
        part: The part of :data:`.api_checks.TABLE` that it belongs to.
        module: The module of vLLM's.
        path: The name in it, qualified by its holders; ``path[key]`` is an entry of a registry.
        by: This package's class or function that takes its place: ``module.name``.
        why: The reason, as ``docs/development.md`` gives it.
    """

    part: str
    module: str
    path: str
    by: str
    why: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def original(self) -> Any:
        """vLLM's own, whether it is replaced or not; None if vLLM has none."""
        found = _before[self] if self in _before else self._read()
        return None if found is _MISSING else found

    def replace(self, new: Any, through: Callable[[Any], object] | None = None) -> None:
        """Put ``new`` in place of vLLM's, once: an entry that is replaced stays as it is.

        Parameters
        ----------
        new : Any
            What takes the place.
        through : Callable, optional
            vLLM's own registration, which is given ``new`` and writes the entry.
        """
        if self in _before:
            return
        _before[self] = self._read()
        (through or self._write)(new)

    def take_back(self) -> None:
        """Put vLLM's own back."""
        self._write(_before.pop(self))

    def _place(self) -> tuple[Any, str, bool]:
        """The holder, the name or key in it, and whether the holder is a registry."""
        match = re.fullmatch(r"([\w.]+?)(?:\[(\w+)\])?", self.path)
        assert match is not None, self.path
        names, key = match[1].split("."), match[2]
        holder: Any = importlib.import_module(self.module)
        for name in names if key else names[:-1]:
            holder = getattr(holder, name)
        return holder, key or names[-1], key is not None

    def _read(self) -> Any:
        holder, name, is_registry = self._place()
        return (holder if is_registry else vars(holder)).get(name, _MISSING)

    def _write(self, value: Any) -> None:
        holder, name, is_registry = self._place()
        if is_registry and value is _MISSING:
            holder.pop(name, None)
        elif is_registry:
            holder[name] = value
        elif value is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, value)


TABLE = (
    Replacement(
        "config",
        f"{LAYERS}.quantization",
        "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG[gpt_oss_mxfp4]",
        "config.SM12xGptOssConfig",
        "chooses the methods of gpt-oss's experts, QKV and O",
    ),
    Replacement(
        "config",
        f"{MODELS}.config",
        "MODELS_CONFIG_MAP[GptOssForCausalLM]",
        "config.SM12xGptOssHook",
        "checks the settings before processes start; proposes CUDA graph sizes, bounds the share of memory",
    ),
    Replacement(
        "decode",
        f"{MODELS}.registry",
        "ModelRegistry.models[GptOssForCausalLM]",
        "model_class.SM12xGptOssForCausalLM",
        "runs decode steps by this fork's operators; watches the host's memory during the load",
    ),
    Replacement(
        "experts",
        f"{LAYERS}.quantization.mxfp4",
        "select_deepseek_v4_mxfp4_moe_backend",
        "moe.ours_first",
        "selects this fork's MXFP4 experts for DeepSeek-V4 and the models that share its method",
    ),
    Replacement(
        "experts",
        f"{LAYERS}.quantization.quark.quark_moe",
        "select_mxfp4_moe_backend",
        "moe.ours_first",
        "selects this fork's MXFP4 experts for Quark's checkpoints",
    ),
    Replacement(
        "experts",
        f"{LAYERS}.quantization.quark.quark_moe",
        "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
        "moe.prepared_for_quark",
        "vLLM's prepares weights as gpt-oss has them, gate and up rows in turn; other models' rows are apart",
    ),
    Replacement(
        "nvfp4",
        f"{LAYERS}.quantization.modelopt",
        "select_nvfp4_moe_backend",
        "nvfp4.ours_first",
        "selects this fork's NVFP4 experts for ModelOpt's checkpoints",
    ),
    Replacement(
        "nvfp4",
        f"{LAYERS}.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
        "select_nvfp4_moe_backend",
        "nvfp4.ours_first",
        "the same for compressed-tensors' checkpoints",
    ),
    Replacement(
        "head",
        "vllm.model_executor.custom_op",
        "op_registry_oot[ParallelLMHead]",
        "lm_head.SM12xParallelLMHead",
        "gives gpt-oss's LM head, built without a quantization config, its format; has any model's rescore",
    ),
    Replacement(
        "head",
        "vllm.model_executor.custom_op",
        "op_registry_oot[LogitsProcessor]",
        "lm_head.SM12xLogitsProcessor",
        "logs that a model has no head of its own, where one was to rescore",
    ),
    *(
        Replacement(
            "rescored",
            "vllm.v1.worker.gpu_worker",
            f"Worker.{name}",
            "rescored.deriving_after",
            "derives coarse LM heads again from weights that were written to in place",
        )
        for name in ("reload_weights", "finish_weight_update")
    ),
    *(
        Replacement(
            "rescored",
            module,
            path,
            "rescored.fine_for_prompts",
            "computes the logits of `prompt_logprobs` from the LM head's bf16 weight",
        )
        for module, path in (
            ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_prompt_logprobs_dict"),
            ("vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker.compute_prompt_logprobs"),
            ("vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker.compute_prompt_token_id_logprobs"),
        )
    ),
    Replacement(
        "attention",
        "vllm.utils.flashinfer",
        "has_nvidia_artifactory",
        "attention.answered_here",
        "vLLM takes FlashInfer's attention with sinks only where a server of cubins answers; here it is compiled",
    ),
)

_before: dict[Replacement, Any] = {}
"""Entries that are replaced, in this order, and what was there before."""


def of(part: str) -> tuple[Replacement, ...]:
    """The entries of a part, in the table's order."""
    return tuple(each for each in TABLE if each.part == part)


@contextlib.contextmanager
def installing(part: str) -> Iterator[tuple[Replacement, ...]]:
    """The entries of a part. If the statements in this context fail, every replacement that they made is taken back,
    and the part is vLLM's from then on."""
    made = len(_before)
    try:
        yield of(part)
    except BaseException as error:
        for each in reversed([*_before][made:]):
            each.take_back()
        api_checks.leave(part, f"{type(error).__name__}: {error}")
        raise
