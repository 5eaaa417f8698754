# SPDX-License-Identifier: Apache-2.0
"""What the plugin replaces in vLLM, found by ``replaced.py`` in vLLM's own modules: it is what the table says, once
however often it is registered, and a part that fails on the way replaces nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_vllm_processes import start

from flashinfer_sm12x.vllm import api_checks, replacements

FAILS = [(part, at) for part in api_checks.TABLE for at in range(len(replacements.of(part)))]
LEFT_WITH = {"config": set(api_checks.TABLE), "experts": {"nvfp4"}, "head": {"rescored"}}
"""Part -> the others whose replacements are not made either if it fails."""


@pytest.fixture(scope="module")
def found() -> Any:
    # VLLM_PLUGINS: the program registers the plugin itself.
    process = start("replaced.py", VIRTUAL_GPU_CAPABILITY="12.1", VLLM_PLUGINS="virtual_gpu")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return json.loads(output.rpartition("RESULT")[2])


def test_what_registering_changes_in_vllm_is_the_table(found: Any) -> None:
    assert found["looked at"] > 50_000  # attributes and entries
    assert found["made"] == {str(each): each.by for each in replacements.TABLE}
    assert (found["outcome"], found["log"]) == ("installed", [])


def test_registering_again_changes_nothing(found: Any) -> None:
    assert found["again"] == []
    assert found["in a child"] == []


@pytest.mark.parametrize(("part", "at"), FAILS)
def test_a_part_that_fails_on_the_way_replaces_nothing(found: Any, part: str, at: int) -> None:
    """Whether the replacement that failed had been written or not."""
    without = {part} | LEFT_WITH.get(part, set())
    cases = [case for case in found["failed"] if (case["part"], case["at"]) == (part, at)]
    assert len(cases) == 2
    for case in cases:
        assert sorted(case["changed"]) == sorted(
            str(each) for each in replacements.TABLE if each.part not in without
        ), case
        assert part in case["left"]
        assert f"flashinfer-sm12x: {api_checks.MODULES[part][1]} left to vLLM: RuntimeError: injected" in case["log"]
        if part == "config":
            assert case["outcome"] == "RuntimeError: injected"
