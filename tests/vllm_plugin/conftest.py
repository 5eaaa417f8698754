# SPDX-License-Identifier: Apache-2.0
"""Tests with the real vLLM, in the environment of ``make test-vllm``; elsewhere only those that need nothing of it
run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "platform"), str(HERE.parents[1] / "scripts")]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_vllm_*.py"]

if HAS_VLLM:
    os.environ.setdefault("VIRTUAL_GPU_CAPABILITY", "12.1")
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1"}

SEED = 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``make test-vllm DAYS=7``: the tests of a day, of those in this folder."""
    if not HAS_VLLM:
        return
    from days import left_for_another_day

    share = config.getoption("--slow-share")
    others = {item for item in items if item.path.parent == HERE and left_for_another_day(item.nodeid, share)}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import checkpoint

    print("seed", SEED)
    folder = tmp_path_factory.mktemp("gpt-oss")
    checkpoint.write(folder, SEED)
    return folder


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The plugin's log, message by message; messages that are logged once are new in each test."""
    import logging

    from vllm import logger as vllm_logger

    from flashinfer_sm12x.vllm import fallback

    fallback._logged.clear()
    for once in ("_print_info_once", "_print_warning_once"):
        getattr(vllm_logger, once).cache_clear()
    messages: list[str] = []

    def collect(record: Any) -> bool:
        messages.append(record.getMessage())
        return True

    # A filter, because vLLM's main() configures logging anew and drops handlers.
    logger = logging.getLogger("vllm.flashinfer_sm12x")
    logger.addFilter(collect)
    yield messages
    logger.removeFilter(collect)
