# SPDX-License-Identifier: Apache-2.0
"""Loads a model from a ``vllm serve`` command line by vLLM's own code, in this process and without a server."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def engine_config(*words: str) -> Any:
    """The ``VllmConfig`` of ``vllm serve`` with ``words``, as the API server makes it before it starts the engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli import main, serve
    from vllm.usage.usage_lib import UsageContext

    taken: list[Any] = []
    with (
        mock.patch.object(sys, "argv", ["vllm", "serve", *words]),
        mock.patch.object(serve, "run_server", taken.append),
        mock.patch.object(serve.uvloop, "run"),
    ):
        main.main()
    return AsyncEngineArgs.from_cli_args(taken[0]).create_engine_config(UsageContext.OPENAI_API_SERVER)


@contextlib.contextmanager
def parallel_groups(config: Any, rank: int = 0, port: int = 0) -> Iterator[None]:
    """vLLM's process groups; those of several ranks meet at ``port``."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.worker.workspace import init_workspace_manager

    with set_current_vllm_config(config), questions_to_the_gpu():
        world = config.parallel_config.world_size
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port or get_open_port()}", rank, "gloo")
        initialize_model_parallel(world)
        init_workspace_manager(torch.device("cpu"))
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def built(config: Any) -> Any:
    """The model of ``config`` without its weights, as vLLM's loader builds it."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16):
        return initialize_model(vllm_config=config)


def kernels(model: Any) -> dict[str, str]:
    """The kernels that vLLM chose for the first layer and the head, by name."""
    layer = model.model.layers[0]
    experts = next(m.quant_method for m in layer.modules() if hasattr(m, "quant_method") and hasattr(m, "moe_config"))
    found = {"moe": f"{experts.mxfp4_backend.value} {experts.experts_cls.__name__}"}
    for kind, module in (("qkv", layer.attn.qkv_proj), ("o", layer.attn.o_proj), ("lm_head", model.lm_head)):
        method = module.quant_method
        found[kind] = type(getattr(method, "kernel", method)).__name__
    return found


def load_model(config: Any) -> Any:
    """The model of ``config``, built, loaded and post-processed by vLLM's loader."""
    from vllm.model_executor.model_loader import get_model

    return get_model(vllm_config=config)


@contextlib.contextmanager
def questions_to_the_gpu() -> Iterator[None]:
    """Answers of torch's that need a CUDA build: a GB10's properties, an allocator, a buffer of FlashInfer's
    attention."""
    from vllm.v1.attention.backends import flashinfer as attention

    gb10 = types.SimpleNamespace(multi_processor_count=48, major=12, minor=1, total_memory=128 << 30)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gb10),
        mock.patch.object(torch.accelerator, "empty_cache"),
        mock.patch.object(torch.accelerator, "max_memory_allocated", return_value=0),
        mock.patch.object(attention, "_get_multi_ctas_kv_counter_buffer", return_value=torch.zeros(1)),
    ):
        yield


def logits(config: Any, model: Any, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """float32 logits of one sequence, all positions at once."""
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(tokens)):
        from vllm.forward_context import get_forward_context

        if padding is not None:
            get_forward_context().is_padding = padding
        hidden = model(tokens, torch.arange(len(tokens)))
        return model.compute_logits(hidden).float()
