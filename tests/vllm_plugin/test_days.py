# SPDX-License-Identifier: Apache-2.0
"""The days of tests that need vLLM; vLLM is not needed."""

from __future__ import annotations

import ast
from pathlib import Path

from days import LONG, day_of_vllms, left_for_another_day

REPO = Path(__file__).parents[2]
DAYS = 7


def test_each_long_test_exists():
    for entry in LONG:
        file, _, name = entry.partition("[")[0].partition("::")
        functions = [
            node.name for node in ast.parse((REPO / file).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert not name or name in functions, entry
    assert len(set(LONG)) == len(LONG)


def test_long_tests_are_spread_and_the_longest_meet_the_shortest():
    first = [day_of_vllms(entry, DAYS) for entry in LONG[: 2 * DAYS]]
    assert first == [*range(DAYS), *reversed(range(DAYS))]


def test_every_test_has_one_day_of_seven_and_those_without_vllm_none():
    nodes = [*LONG, "tests/vllm_plugin/test_vllm_models.py::test_a", "tests/vllm_plugin/test_vllm_models.py::test_a[b]"]
    for node in nodes:
        days = [day for day in range(DAYS) if not left_for_another_day(node, f"{day}/{DAYS}")]
        assert len(days) == 1, node
    assert day_of_vllms(nodes[-1], DAYS) == day_of_vllms(nodes[-2], DAYS)  # they share what they load
    assert all(
        left_for_another_day("tests/vllm_plugin/test_settings.py::test_a", f"{day}/{DAYS}") for day in range(DAYS)
    )
    assert not any(left_for_another_day(node, "0/1") for node in [*nodes, "tests/vllm_plugin/test_settings.py::test_a"])
