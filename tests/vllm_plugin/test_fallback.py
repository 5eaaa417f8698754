# SPDX-License-Identifier: Apache-2.0
"""What a failure of the plugin leaves to vLLM; vLLM is not needed. ``test_vllm_left.py`` has the places."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from flashinfer_sm12x import variables
from flashinfer_sm12x.quantize.manifest import FolderError
from flashinfer_sm12x.vllm import fallback


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(fallback, "_logged", set())
    found: list[str] = []
    logger = logging.getLogger("vllm.flashinfer_sm12x")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class NVMLError(Exception): ...


@pytest.mark.parametrize(
    "error", [OSError, RuntimeError, AttributeError, NVMLError, ImportError, StopIteration, ValueError]
)
def test_a_failure_is_one_line_and_the_statements_after_it_run(lines, error):
    for text in ("first", "second"):
        with fallback.leaving("the part is"):
            raise error(text)
    assert lines == [f"WARNING flashinfer-sm12x: the part is left to vLLM: {error.__name__}: first"]
    with fallback.leaving("another part is"):
        raise error("third")
    assert len(lines) == 2


def test_what_does_not_fail_logs_nothing(lines):
    with fallback.leaving("the part is"):
        value = 1
    assert (value, lines) == (1, [])


class OfRefusal(fallback.Refusal): ...


@pytest.mark.parametrize(
    "error",
    [
        fallback.Refusal,
        OfRefusal,
        FolderError,
        variables.VariableError,
        KeyboardInterrupt,
        SystemExit,
    ],
)
def test_refusals_and_interrupts_pass(lines, error):
    with pytest.raises(error, match="as it was asked for"), fallback.leaving("the part is"):
        raise error("as it was asked for")
    assert lines == []
