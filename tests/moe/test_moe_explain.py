# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer sm12x-plan``: it shows what a call gets, and says what is wrong with its options."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashinfer.__main__ import cli
from flashinfer.fused_moe import sm12x_planner
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x.device_class import CLASSES
from flashinfer.sm12x.instances import INSTANCES


def plan(*options: str) -> Result:
    return CliRunner().invoke(cli, ["sm12x-plan", *options])


def rows_of(*options: str) -> Any:
    result = plan(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("mode", sm12x_planner.MODES)
@pytest.mark.parametrize("device", sm12x_planner.DEVICES)
@pytest.mark.parametrize("model", sm12x_planner.MODELS)
def test_shows_what_the_planner_gives_a_call(model: str, device: str, mode: str) -> None:
    tokens = [1, 4, 64, 2048, 8192]
    shown = rows_of("--tokens", ",".join(map(str, tokens)), "--model", model, "--mode", mode, "--device", device)
    layer, gpu = sm12x_planner.MODELS[model], sm12x_planner.DEVICES[device]
    number = int(sm12x_planner.MODES[mode])
    assert [row["tokens"] for row in shown["rows"]] == tokens
    for row in shown["rows"]:
        planned = sm12x_planner.plan_moe(
            row["tokens"],
            layer.top_k,
            layer.experts,
            layer.hidden,
            layer.inter,
            number,
            gpu,
        )
        fc1, fc2 = (INSTANCES[tactic] for tactic in planned)
        assert (row["fc1"], row["fc2"]) == (fc1.profile_id, fc2.profile_id)
        assert (row["fc1_instance"], row["fc2_instance"]) == (fc1.name, fc2.name)
        sizes = row["tokens"], layer.top_k, layer.experts
        used = sm12x_planner.plan_mode(Mode(number), *sizes, gpu)
        assert {INSTANCES[tactic].activation for tactic in planned} == {used.activation}
        assert row["reason"]
    assert shown["device"] == {
        "name": gpu.gpu,
        "sm_count": gpu.sm_count,
        "block_scaled_mma": device != "h200",
        "unified_memory": device == "gb10",
    }


def test_the_reason_is_of_the_tactic_that_is_shown() -> None:
    modes = set(Mode) - {Mode.AUTO}
    for mode, tokens, known in itertools.product(modes, (1, 3, 8, 37, 64, 512, 8192), CLASSES):
        activation: Any = mode.activation
        choice = sm12x_planner.choose(activation, tokens * 4, 128, known, (2880, 2880))
        assert choice.instance.index in sm12x_planner.plan_moe(tokens, 4, 128, 2880, 2880, int(mode), known)


def test_table_names_the_layer_and_gives_a_line_per_token_count() -> None:
    result = plan("--tokens", "1,64", "--hidden", "2048", "--inter", "768", "--top-k", "8", "--sm-count", "36")
    assert result.exit_code == 0, result.output
    first, header, _, *lines = result.output.strip().splitlines()
    assert first == ("hidden 2048, inter 768, 128 experts, top-8, auto; GB10, 36 SMs, MMA with block scales")
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "tokens", "rows/expert", "FC1", "FC1's instance", "FC2", "FC2's instance", "why",
    ]  # fmt: skip
    assert [line.split("|")[1].strip() for line in lines] == ["1", "64"]


def test_rows_per_expert() -> None:
    (one, many) = rows_of("--tokens", "1,8192")["rows"]
    assert one["rows_per_expert"] == pytest.approx(1.0, abs=0.02)  # four rows on four of 128 experts, nearly always
    assert many["rows_per_expert"] == pytest.approx(8192 * 4 / 128)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tokens", "many"], "'many' is no list of numbers such as 1,4,64"),
        (["--tokens", "1,,2"], "'1,,2' is no list of numbers"),
        (["--tokens", "0"], "0 tokens; it must be in [1, 2147483647]"),
        (["--tokens", "9" * 400], "99999 tokens; it must be in [1, 2147483647]"),
        (["--model", "llama"], "'llama' is not one of 'gpt-oss-120b', 'gpt-oss-20b'"),
        (["--mode", "w8a8"], "'w8a8' is not one of 'auto', 'w4a8', 'w4a8-bf16', 'w4a16'"),
        (["--device", "b200"], "'b200' is not one of 'gb10', 'rtx5090', 'h200'"),
        (["--sm-count", "0"], "sm_count is 0; it must be at least 1"),
        (
            ["--hidden", "2890"],
            "hidden is 2890; it must be a positive multiple of 32 (pad the weights with zeros to 2912)",
        ),
        (["--inter", "0"], r"inter is 0; it must be an integer in [1, 1073741823], a multiple of 32"),
        (["--experts", "513"], "experts is 513; it must be in [1, 512]"),
        (["--experts", "0"], "experts is 0; it must be in [1, 512]"),
        (["--experts", "2"], "top_k is 4; it must be in [1, 2], the number of experts"),
        (["--top-k", "0"], "top_k is 0; it must be in [1, 128]"),
        (["--top-k", "few"], "'few' is not a valid integer"),
    ],
)
def test_bad_options(options: list[str], text: str) -> None:
    result = plan(*options)
    assert result.exit_code != 0
    assert text in " ".join(result.output.split())


def test_help_and_errors_name_the_same_choices() -> None:
    """Those of the planner's tables."""
    shown = "".join(plan("--help").output.split())
    for option, table in (
        ("--model", sm12x_planner.MODELS),
        ("--mode", sm12x_planner.MODES),
        ("--device", sm12x_planner.DEVICES),
    ):
        assert f"{option}[{'|'.join(table)}]" in shown
        error = plan(option, "none").output
        assert re.findall(r"'([^']+)'", error.rpartition("is not one of")[2]) == list(table)


@pytest.mark.parametrize(("experts", "text"), [(1, "1 expert, top-1, auto; GB10"), (2, "2 experts, top-1")])
def test_one_expert_is_one(experts: int, text: str) -> None:
    assert text in plan("--experts", str(experts), "--top-k", "1", "--tokens", "1").output
    assert ", 1 SM, MMA" in plan("--sm-count", "1", "--tokens", "1").output
