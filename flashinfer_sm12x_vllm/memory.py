# SPDX-License-Identifier: Apache-2.0
"""A host that shares its memory with its GPU, as a DGX Spark does: vLLM's share of it, and the weights' load watched.

Numbers and reasons are ``flashinfer/sm12x/host_memory.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.logger import init_logger

from .settings import load

host_memory = load("sm12x/host_memory.py")
logger = init_logger("vllm.flashinfer_sm12x")

PAGE = 'docs/troubleshooting.md, "Hosts that hang"'


def shared() -> bool:
    """Whether the host's memory is the GPU's, asked without initializing CUDA.

    By the GPU, too, and not by sizes alone: a host with 32 GB of its own beside a card of 32 GB is common.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_device_capability(121):
        return False
    host = host_memory.read()
    return host is not None and host_memory.is_shared(host, current_platform.get_device_total_memory())


def bound_share(vllm_config: Any) -> None:
    """On such a host lower vLLM's default of ``--gpu-memory-utilization`` to this fork's, and warn of a user's that is above.

    vLLM does not say whether a number was given. The default's own is taken for none, and the line in the log says so.
    """
    cache = vllm_config.cache_config
    given, default, share = cache.gpu_memory_utilization, type(cache).gpu_memory_utilization, host_memory.SHARE
    if given <= share or cache.kv_cache_memory_bytes is not None:  # bytes that were named take the share's place
        return
    try:
        if not shared():
            return
    except Exception as error:  # whatever NVML or a process that asks CUDA can fail with: vLLM goes on without, too
        logger.warning(
            "flashinfer-sm12x: the GPU does not tell its memory (%s): %s of it is taken; where it is the host's, pass "
            "--gpu-memory-utilization %s (%s)",
            error,
            given,
            share,
            PAGE,
        )
        return
    if given == default:
        cache.gpu_memory_utilization = share
        logger.warning(
            "flashinfer-sm12x: --gpu-memory-utilization is %s in place of vLLM's default of %s: the GPU's memory is the "
            "host's, which stops where none is left (%s). To take more, name another number than %s",
            share,
            default,
            PAGE,
            default,
        )
    else:
        logger.warning(
            "flashinfer-sm12x: --gpu-memory-utilization %s is more than %s of a memory that is the host's, too; starts take "
            "20 to 30 GiB beyond it, and hosts without memory stop (%s)",
            given,
            share,
            PAGE,
        )


def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, as long as a host that shares its memory keeps ``HEADROOM`` of it free. Page cache counts as free.

    Raises
    ------
    RuntimeError
        It does not: the load ends before the host stops answering.
    """
    watches = shared()
    for name, tensor in weights:
        host = host_memory.read() if watches else None
        if host is not None and host.available < host_memory.HEADROOM:
            gib = host_memory.GIB
            raise RuntimeError(
                f"flashinfer-sm12x: the load was stopped before {name}: {host.available / gib:.1f} of {host.total / gib:.0f} "
                f"GiB of the host's memory are free, and below {host_memory.HEADROOM // gib} a host that shares it with its "
                f"GPU may stop answering ({PAGE}). Stop what else holds memory ('ps -eo rss,pid,args --sort=-rss | head', "
                "'docker ps'), or load a smaller model"
            )
        yield name, tensor
