# SPDX-License-Identifier: Apache-2.0
"""Guards a host that shares its memory with its GPU, as a DGX Spark does: it bounds vLLM's share and watches the
weights' load.

``flashinfer_sm12x/host_memory.py`` has the numbers and their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.logger import init_logger

from .. import host_memory
from . import fallback

logger = init_logger("vllm.flashinfer_sm12x")

PAGE = 'docs/troubleshooting.md, "Hosts that hang"'
WATCH = "the watch over the host's memory is"


def shared() -> bool:
    """Whether host and GPU share memory, found without initializing CUDA.

    The GPU's model counts as well as the sizes: a host with 32 GB of its own and a card with 32 GB is common.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_device_capability(121):
        return False
    host = host_memory.read()
    return host is not None and host_memory.is_shared(host, current_platform.get_device_total_memory())


def bound_share(vllm_config: Any) -> None:
    """On such a host lower vLLM's default of ``--gpu-memory-utilization`` to this fork's; warn if a user's own is
    larger.

    vLLM does not say whether the user gave a number. A number equal to the default is taken for the default, and the
    log says so.
    """
    part = (
        "the share of memory (on a host that shares it with its GPU pass --gpu-memory-utilization "
        f"{host_memory.SHARE}: "
    )
    with fallback.leaving(f"{part}{PAGE}) is"):
        _bound_share(vllm_config.cache_config)


def _bound_share(cache: Any) -> None:
    given, default, share = cache.gpu_memory_utilization, type(cache).gpu_memory_utilization, host_memory.SHARE
    if given <= share or cache.kv_cache_memory_bytes is not None:  # a number of bytes overrides the share
        return
    if not shared():
        return
    if given == default:
        cache.gpu_memory_utilization = share
        logger.warning(
            "flashinfer-sm12x: --gpu-memory-utilization is %s in place of vLLM's default of %s: the GPU's memory is "
            "the host's, which stops where none is left (%s). To take more, name another number than %s",
            share,
            default,
            PAGE,
            default,
        )
    else:
        logger.warning(
            "flashinfer-sm12x: --gpu-memory-utilization %s is more than %s of a memory that is the host's, too; "
            "starts take 20 to 30 GiB beyond it, and hosts without memory stop (%s)",
            given,
            share,
            PAGE,
        )


def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same weights; fail if a host that shares its memory has less than ``HEADROOM`` free (page cache
    included).

    Raises
    ------
    RuntimeError
        Too little is free; the load ends before the host stops answering.
    """
    watches = False
    with fallback.leaving(WATCH):
        watches = shared()
    for name, tensor in weights:
        host = None
        if watches:
            with fallback.leaving(WATCH):
                host = host_memory.read()
        if host is not None and host.available < host_memory.HEADROOM:
            gib = host_memory.GIB
            raise RuntimeError(
                f"flashinfer-sm12x: the load was stopped before {name}: {host.available / gib:.1f} of "
                f"{host.total / gib:.0f} GiB of the host's memory are free, and below {host_memory.HEADROOM // gib} a "
                f"host that shares it with its GPU may stop answering ({PAGE}). Stop what else holds memory ('ps -eo "
                "rss,pid,args --sort=-rss | head', 'docker ps'), or load a smaller model"
            )
        yield name, tensor
