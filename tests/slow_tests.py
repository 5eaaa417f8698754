# SPDX-License-Identifier: Apache-2.0
"""Tests that ``make test`` leaves to ``make test-all``: the marker ``slow`` is given here, and nowhere else.

A test is slow

* if ``LONG`` names it: with all its parameters and compilations it takes more than ten seconds of one core, and a test
  that is not slow covers the same path;
* if it runs on the virtual SM121 (``tests/*/test_virtual_*.py``), unless it is the first, cheapest one that notices
  some change of ``tests/mutations.toml``. Some 170 of 1,900 are such; each kernel family has one or more with
  every checker on.
"""

from __future__ import annotations

import fnmatch
import re
import zlib
from functools import cache

from layer_toys import REPO, load_tool

VIRTUAL = "tests/*/test_virtual_*.py"
LONG = (
    "tests/layer/test_bases.py::test_the_tests_of_this_folder_over_another_base",
    "tests/install/test_pips_compiler.py",
    "tests/upstream_patch/test_moved_upstream.py",
    "tests/jit/test_machine_code.py::test_machine_code_as_built",
    "tests/upstream_patch/test_exported.py",
    "tests/quantize/test_quantize.py::test_smollm2s_losses",
    "tests/quantize/test_quantize_checkpoints.py::test_a_config_or_an_index_with_a_wrong_field_is_refused_or_means_the_same",
    "tests/quantize/test_quantize_checkpoints.py::test_a_disk_that_is_full_on_the_way_ends_with_a_line_and_whole_files",
    "tests/quantize/test_quantize_checkpoints.py::test_a_hub_that_cannot_be_reached_is_not_one_that_lacks_the_name",
    "tests/benchmarks/test_bench_accuracy.py::test_smollm2s_order_of_formats",
    "tests/project/test_project.py::test_the_demo_runs",
    "tests/project/test_typing.py",
    "tests/install/test_install.py::test_installing_again_replaces",
    "tests/jit/test_jit_trust.py::test_prebuilt_cache_that_can_only_be_read_is_used",
    "tests/doctor/test_doctor.py::test_a_planted_state_is_named_and_its_command_fixes_it",
    "tests/install/test_install.py::test_uninstalling_removes_all_of_it",
    "tests/jit/test_jit_spec.py::test_cache_paths_that_nvcc_would_have_a_shell_read",
    "tests/jit/test_prebuilt.py::test_the_same_sources_make_the_same_bytes",
    "tests/layer/test_upstream_modules.py::test_what_imports_and_what_does_not_is_the_same",
    "tests/layer/test_upstream_alone.py -k real_wheel",
    "tests/project/test_prose.py::test_each_one_liner_for_the_reader_runs",
    "tests/sm12x/test_layers.py -k MXFP8",
    "tests/sm12x/test_layers.py -k linear",
    "tests/sm12x/test_layers.py -k fp8",
    "tests/doctor/test_doctor_variables.py::test_what_upstream_reads_while_it_is_imported_is_reported_by_the_import",
    "tests/jit/test_jit_trust.py::test_a_build_is_private_whatever_the_umask_is",
    "tests/project/test_scripts.py::test_help_needs_nothing_of_vllm",
    "tests/doctor/test_doctor.py::test_additional_config_is_checked_as_vllm_will_have_it",
    "tests/doctor/test_doctor.py::test_this_environment_with_a_broken_file_of_a_probe",
    "tests/doctor/test_doctor.py::test_the_command_of_the_modules_row_makes_it_ok",
    "tests/doctor/test_doctor.py::test_this_environment_with_kernels_of_an_older_fork",
    "tests/doctor/test_doctor_probe.py::test_parts_that_hang_or_crash_and_the_file",
    "tests/gemm/test_dense_planner.py::test_sm12x_takes_an_instance_near_the_models_best[slow-LM head-mxfp4-bf16]",
    "tests/gemm/test_dense_planner.py::test_sm12x_takes_an_instance_near_the_models_best[slow-LM head-mxfp4-mxfp8]",
    "tests/gemm/test_dense_planner.py::test_sm12x_takes_an_instance_near_the_models_best[slow-LM head-mxint8-bf16]",
    "tests/install/test_install.py::test_an_upgrade_of_what_was_imported_leaves_no_old_module",
    "tests/install/test_install.py::test_building_leaves_the_checkout_as_it_was",
    "tests/jit/test_jit_build.py::test_killed_builders_compilers_hold_the_lock_and_nothing_false_stays[the same again]",
    "tests/jit/test_jit_build.py::test_source_edited_while_it_is_compiled_is_compiled_again[the same again]",
    "tests/jit/test_jit_command_line.py::test_only_what_compiles_needs_a_compiler",
    "tests/jit/test_jit_spec.py::test_a_row_that_differs_from_the_layout_of_shared_memory_does_not_compile",
    "tests/jit/test_jit_spec.py::test_table_of_instances_as_built",
    "tests/jit/test_jit_trust.py::test_in_a_namespace_without_root_its_folders_are_nobodys",
    "tests/jit/test_machine_code.py::test_arrivals_have_fences_wherever_a_gb10_may_run_them",
    "tests/jit/test_machine_code.py::test_arrivals_without_their_fence_are_found",
    "tests/layer/test_upstream_modules.py::test_no_public_name_is_lost",
    "tests/layer/test_upstream_modules.py::test_the_wheels_other_top_level_package_finds_its_code",
    "tests/moe/test_moe_planner.py::test_sm12x_takes_a_tactic_within_ten_percent_of_the_models_best",
    "tests/moe/test_virtual_launcher.py::test_every_part_of_a_dense_layers_workspace_is_as_large_as_what_it_holds",
    "tests/moe/test_virtual_launcher.py::test_largest_outputs_of_rows_beyond_31_bits",
    "tests/moe/test_virtual_launcher.py::test_outputs_of_a_streamed_dense_layer_beyond_31_bits",
    "tests/moe/test_virtual_launcher.py::test_tokens_of_a_layer_beyond_31_bits",
    "tests/project/test_mutate.py::test_every_outcome",
    "tests/project/test_mutate.py::test_every_test_of_the_lists_can_be_collected",
    "tests/project/test_mutate.py::test_the_command_fails_where_tests_of_the_days_changes_fail_anyway",
    "tests/project/test_scripts.py::test_arguments_are_refused_before_anything_starts",
    "tests/project/test_scripts.py::test_the_doctor_comes_before_all_that_may_be_broken",
    "tests/project/test_scripts.py::test_what_is_missing_is_reported_in_a_line",
    "tests/sm12x/test_layers.py::test_a_function_that_knows_its_experts_raises_and_computes_the_same[MoE 1]",
    "tests/sm12x/test_layers.py::test_a_function_that_knows_its_experts_raises_and_computes_the_same[MoE 2]",
    "tests/sm12x/test_layers.py::test_a_layer_is_compiled_as_its_function[SM12xMoELayer, MoE 1]",
    "tests/sm12x/test_layers.py::test_a_layer_is_compiled_as_its_function[SM12xMoELayer, MoE 2]",
    "tests/sm12x/test_layers.py::test_a_layer_raises_and_computes_what_its_function_does[made-SM12xMoELayer, MoE 1]",
    "tests/sm12x/test_layers.py::test_a_layer_raises_and_computes_what_its_function_does[made-SM12xMoELayer, MoE 2]",
    "tests/sm12x/test_layers.py::test_a_layer_raises_and_computes_what_its_function_does[reused-SM12xMoELayer, MoE 1]",
    "tests/sm12x/test_layers.py::test_a_layer_raises_and_computes_what_its_function_does[reused-SM12xMoELayer, MoE 2]",
    "tests/sm12x/test_layers.py::test_what_a_layer_was_made_of_may_change[SM12xMoELayer, MoE 1]",
    "tests/sm12x/test_layers.py::test_what_a_layer_was_made_of_may_change[SM12xMoELayer, MoE 2]",
)
"""Files, tests with all their parameters, or with some: more than ten seconds of a core, together. The longest come
first: entries that follow each other run on different days."""


@cache
def noticing() -> frozenset[str]:
    """The first test of each change that a test must notice: node ids, or ``FILE -k WORD``."""
    mutate = load_tool("mutate")
    return frozenset(m.tests[0] for m in mutate.read_list(REPO / mutate.LIST) if not m.equivalent)


def covers(entry: str, node: str) -> bool:
    """Whether an entry holds the test with that node id. An entry is a file, a test with or without its parameters, or
    ``FILE -k WORD``."""
    file, word_given, word = entry.partition(" -k ")
    if word_given:
        return node.startswith(f"{file}::") and word in node
    return entry in (node, node.partition("[")[0], node.partition("::")[0])


EVERY_DAY = (
    "tests/layer/test_bases.py::test_the_tests_of_this_folder_over_another_base",
    "tests/upstream_patch/test_exported.py::test_a_call_of_the_moe_backend_reaches_its_checks",
)
"""Slow tests that run every day: another FlashInfer may break the one without a change of ours, and most changes of an
operator the other, which exports the branches."""


ON_ONE_DAY = {"narrow_sums": 4, "dense.*mxfp6": 2, "dense.*mxint8": 0, "dense.*nvfp4": 3}
"""Tests of modules that no quick test compiles, or hardly one (half precision): a pattern of their node ids, and the
day on which all of them run, one of few other tests. Each of the modules takes a minute of a core."""


def day_of(node: str, days: int) -> int:
    """The day of ``days`` on which a slow test runs. Tests that differ only in parameters run on the same day, because
    they share what they compile and load, unless it is a module that few tests share."""
    for place, entry in enumerate(LONG):
        if covers(entry, node):
            return place % days
    for pattern, day in ON_ONE_DAY.items():
        if re.search(pattern, node):
            return day % days
    return zlib.crc32(node.partition("[")[0].encode()) % days


def left_for_another_day(node: str, share: str) -> bool:
    """Whether a slow test belongs to another day than ``share``, ``DAY/DAYS``."""
    day, _, days = share.partition("/")
    return not any(covers(entry, node) for entry in EVERY_DAY) and day_of(node, int(days)) != int(day)


def is_slow(node: str) -> bool:
    if any(covers(entry, node) for entry in LONG):
        return True
    return fnmatch.fnmatch(node.partition("::")[0], VIRTUAL) and not any(covers(entry, node) for entry in noticing())
