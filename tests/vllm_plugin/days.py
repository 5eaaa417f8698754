# SPDX-License-Identifier: Apache-2.0
"""The days on which CI runs the tests that need vLLM, one of seven each (``make test-vllm DAYS=7``)."""

from __future__ import annotations

from slow_tests import covers, day_of

MOVED = "test_vllm_api_checks.py::test_a_gpt_oss_loads_and_answers_where_vllm_moved"
ELSEWHERE = "test_vllm_processes.py::test_elsewhere_vllms_choices_are_what_they_were"
RANKS = "test_vllm_processes.py::test_two_ranks_agree_with_transformers"
ALONE = "test_vllm_versions.py::test_vllm_is_as_without_the_fork"

LONG: tuple[str, ...] = tuple(
    f"tests/vllm_plugin/{entry}"
    for entry in (
        # Files whose tests share a server, and tests that start processes of vLLM's: each import of it takes ten
        # seconds.
        "test_vllm_answers.py",
        "test_vllm_decode.py::test_two_ranks_decode_as_one",
        "test_vllm_sglang.py",
        "test_vllm_folder.py::test_a_rank_has_its_part_of_the_folder",
        f"{MOVED}[all]",
        "test_vllm_folder.py::test_two_ranks_agree_with_transformers",
        "test_vllm_chat.py",
        "test_vllm_virtual.py::test_a_decode_step_is_the_executors_on_the_virtual_sm121",
        "test_vllm_scripts.py::test_compare_vllm_prints_what_vllms_benchmark_measured",
        "test_vllm_virtual.py::test_a_decode_step_of_the_experts_runs_the_compiled_kernels",
        "test_vllm_virtual.py::test_verify_gpu_judges_the_compiled_kernels_on_the_virtual_sm121",
        *(f"{RANKS}[{kind}]" for kind in ("tensor parallel", "expert parallel", "dense layers quantized")),
        "test_vllm_replacements.py",
        "test_vllm_processes.py::test_a_start_comes_as_far_as_it_can_without_a_gpu",
        "test_vllm_models.py::test_each_dense_choice_agrees_with_transformers_on_quantized_weights",
        "test_vllm_models.py::test_a_model_of_the_forks_experts_agrees_with_transformers",
        "test_vllm_left.py::test_a_model_is_built_loaded_and_answers_without_what_fails",
        *(f"{MOVED}[{part}]" for part in ("attention", "decode steps", "decode steps, a private call")),
        *(f"{MOVED}[{part}]" for part in ("dense layers", "experts", "head")),
        *(
            f"{ELSEWHERE}[{place}]"
            for place in ("Hopper", "data-centre Blackwell", "switched off", "fork switched off")
        ),
        *(f"{ALONE}[{case}]" for case in ("another version", "another, plugin off", "another, fork off")),
        *(f"{ALONE}[{case}]" for case in ("plugin off", "fork off")),
        "test_vllm_transformers.py::test_the_example_writes_tokens",
        "test_vllm_scripts.py::test_soak_server_sees_each_fault_and_none_where_there_is_none",
        "test_vllm_memory.py::test_other_models_keep_vllms_share",
        "test_vllm_reach.py::test_another_model_reports_that_the_choices_are_gpt_osss",
        "test_vllm_decode.py::test_decode_steps_are_the_executors_and_as_near_as_vllms",
        "test_vllm_left.py::test_a_configuration_is_made_without_what_fails",
    )
)
"""Tests of more than ten seconds of a core, all parameters together where none are named, the longest first: entries
that follow each other run on different days."""


def day_of_vllms(node: str, days: int) -> int:
    """The day of ``days`` on which a test runs. A round of the long ones goes forwards, the next one backwards."""
    for place, entry in enumerate(LONG):
        if covers(entry, node):
            there = place % (2 * days)
            return min(there, 2 * days - 1 - there)
    return day_of(node, days)


def left_for_another_day(node: str, share: str) -> bool:
    """Whether a test belongs to another day than ``share``, ``DAY/DAYS``; tests that do not need vLLM run with the
    others, every day."""
    day, _, days = share.partition("/")
    if int(days) == 1:
        return False
    needs_vllm = node.partition("::")[0].rpartition("/")[2].startswith("test_vllm_")
    return not needs_vllm or day_of_vllms(node, int(days)) != int(day)
