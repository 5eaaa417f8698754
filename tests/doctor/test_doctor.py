# SPDX-License-Identifier: Apache-2.0
"""The doctor names what is wrong with a machine, its commands fix it, and what it prints keeps its form."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machine import REPO, UPSTREAM, Machine
from layer_toys import OURS, write_tree
from planted import PLANTED
from readers import read_by_its_reader

import flashinfer_sm12x.doctor as doctor
from flashinfer.jit.sm12x import prebuilt
from flashinfer_sm12x.build import toolchain
from flashinfer_sm12x.doctor import questions

PAGE = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

# The toy wheel has nothing to build, and memory is that of the machine that the test runs on.
NOT_FAKED = {"modules", "headroom"}


def test_a_healthy_machine(machine: Machine) -> None:
    found = machine.diagnose()
    assert set(found.states()) == set(doctor.CHECKS) - {"architectures", "probe"}  # of modules, which see
    assert {found.states()[check] for check in set(found.states()) - NOT_FAKED} == {"ok"}
    assert found["modules"][0] == "unknown"
    assert found.status == 1  # for that
    assert "experts are this fork's (moe auto, qkv bf16" in found["vllm-plugin"][1]


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("fail", 1), ("unknown", 1)])
def test_exit_status(state: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask", lambda *_: {})
    found = [doctor.Finding("import", "ok", ""), doctor.Finding("gpu", state, "", "a fix")]
    monkeypatch.setattr(doctor, "diagnose", lambda *_: found)
    assert doctor.main([]) == status


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_state_is_named_and_its_command_fixes_it(machine: Machine, name: str) -> None:
    """All commands are pasted into one shell, in which the doctor runs again."""
    expected = PLANTED[name]
    machine.variables |= {"USERS_OWN": "1"}
    machine.path.append(machine.root / "users-own")
    expected.into(machine)
    before = machine.diagnose()
    state, found, command, why = before[expected.check]
    assert (state, expected.found in found) == (expected.state, True), (state, found)
    assert expected.command in command.replace("'", "")  # which a path with a space has around it
    assert bool(command) == bool(expected.command)
    assert expected.why in why
    assert bool(command or why) == (state != "ok")
    assert before.status == int(not {"fail", "unknown"}.isdisjoint(before.states().values()))
    commands = [finding["command"] for finding in before.data["findings"] if finding["command"]]
    for each in commands:
        read_by_its_reader(each, machine.environment())
    after, variables, statuses = machine.paste(commands)
    assert not {2, 127}.intersection(statuses), "a command that no shell takes"
    now, found, *_ = after[expected.check]
    assert now == expected.then if expected.fixes else expected.found in found, after[expected.check]
    wanted = re.search(r"(?:pip|apt-get) (?:un)?install (?:--python (?:'.*?'|\S+) )?(.*)", command)
    if wanted:
        assert all(word in machine.installed() for word in shlex.split(wanted[1].split("&&")[0]))
    assert commands or not machine.installed()
    unset = " ".join(re.findall(r"unset (\w+)", " ".join(commands)))
    for variable, text in machine.environment().items():
        kept = re.split("[:, ]", variables.get(variable, ""))
        lost = [
            item
            for item in re.split("[:, ]", text)
            if item not in kept and not item.endswith(expected.loses or ("\0",))
        ]
        assert not lost or variable in unset, (variable, text, kept)


def test_a_fork_that_only_the_working_directory_gives_is_not_what_a_server_imports(machine: Machine) -> None:
    """``python -m`` looks there; ``vllm serve`` does not. And the command runs without upstream's, which toys lack."""
    machine.path.remove(machine.tree)
    for how in (("-m", "flashinfer", "sm12x-doctor"), ("-Bmflashinfer", "sm12x-doctor")):
        result = machine.doctor("--json", how=how, cwd=REPO)
        assert result.returncode == 1, result.stderr
        finding = json.loads(result.stdout)["findings"][0]
        assert (finding["check"], finding["state"]) == ("import", "fail")
        assert finding["found"].startswith(f"the plain wheel in {machine.wheel}")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"sm12x": {"qkv": "int4"}}', "qkv is 'int4'; it may be bf16"),
        ('{"sm12x": {"dense": "/nowhere"}}', "vLLM does not start: /nowhere is no folder"),
        ("{", "Expecting property name"),
        ('{"other": {"qkv": 1}}', ""),
    ],
)
def test_additional_config_is_checked_as_vllm_will_have_it(machine: Machine, config: str, words: str) -> None:
    state, found, _, _ = machine.diagnose("--additional-config", config)["vllm-plugin"]
    assert (state, words in found) == ("fail" if words else "ok", True), found
    assert words or found.endswith("decode fused)")


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_keeps_its_form(machine: Machine) -> None:
    data = machine.diagnose().data
    assert list(data) == ["format", "fork", "upstream", "findings", "facts"]
    assert (data["format"], data["upstream"]) == (2, UPSTREAM)
    assert set(data["facts"]) == set(questions.QUESTIONS)
    for finding in data["findings"]:
        assert list(finding) == ["check", "state", "found", "command", "why"]
        assert {type(value) for value in finding.values()} == {str}
        assert finding["state"] in doctor.STATES
    listed = [finding["check"] for finding in data["findings"]]
    assert listed == [check for check in doctor.CHECKS if check in listed]


def test_the_page_has_each_check_and_no_other() -> None:
    outputs = [re.findall(r"^(?:ok|warn|fail|unknown) +([\w-]+)", text, re.MULTILINE) for text in PAGE.split("```text")]
    explained = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`[a-z].*?) \|", PAGE, re.MULTILINE)))
    (shown,) = filter(None, outputs)
    assert shown == [check for check in doctor.CHECKS if check in shown]
    assert explained == [*doctor.CHECKS, *doctor.PROBE_CHECKS]
    assert "\n## What it cannot find\n" in PAGE


def test_the_table_has_commands_alone_and_counts(machine: Machine) -> None:
    machine.variables["CUDA_HOME"] = "/none"
    result = machine.doctor()
    lines = result.stdout.splitlines()
    assert result.returncode == 1
    failed = [line.split()[1] for line in lines if line.startswith("fail")]
    assert failed == ["build", "vllm-flashinfer"]
    assert any(line.strip() == "$ unset CUDA_HOME" for line in lines)
    assert re.fullmatch(r"\d+ ok, \d+ warn, 2 fail, 1 unknown", lines[-1])
    assert [line for line in lines if len(line) > 120 and "$ " not in line and str(machine.root) not in line] == []


# --- this machine -----------------------------------------------------------------------------------------------------


def environment_of(folder: Path, *path: Path) -> dict[str, str]:
    """The variables of this process, but for this project's; ``folder`` is where the cache is."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER")}
    return environment | {
        "PYTHONPATH": ":".join(map(str, (REPO, *path))),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
    }


def of_this_environment(folder: Path, *path: Path, **variables: str) -> dict[str, dict[str, str]]:
    """All questions for real, through the command line."""
    environment = environment_of(folder, *path) | variables
    command = [sys.executable, "-m", "flashinfer", "sm12x-doctor", "--json", "--timeout", "300"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    found = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.returncode == int("fail" in {finding["state"] for finding in found.values()})
    return found


@pytest.mark.privileges
def test_this_environment_with_a_broken_file_of_a_probe(tmp_path: Path) -> None:
    probe = tmp_path / ".cache" / "flashinfer" / UPSTREAM / "121a" / "sm12x_probe.json"
    write_tree(probe.parent, {probe.name: "{}"})
    found = of_this_environment(tmp_path)
    assert found["import"]["state"] == found["build"]["state"] == "ok"
    assert str(OURS / "__init__.py") in found["import"]["found"]
    assert found["architectures"]["found"] == "12.1a"
    assert (found["probe"]["state"], shlex.split(found["probe"]["command"])) == ("fail", ["rm", str(probe)])


EMPTY_OBJECTS = """#!/bin/sh
for word; do
  [ "$previous" != -o ] || out=$word
  [ "$word" != -c ] || compile=1
  previous=$word
done
[ "$compile" ] || exec "$@"
exec c++ -x c++ -c /dev/null -o "$out"
"""
"""Stands before compilers, and has them take no time."""


def test_the_command_of_the_modules_row_makes_it_ok(tmp_path: Path) -> None:
    """The real sm12x-build, with compilers that make empty objects."""
    try:
        toolchain.discover()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    launcher = tmp_path / "launcher"
    launcher.write_text(EMPTY_OBJECTS)
    launcher.chmod(0o755)
    launchers = {f"FLASHINFER_{language}_LAUNCHER": shlex.quote(str(launcher)) for language in ("NVCC", "CXX")}
    before = of_this_environment(tmp_path, **launchers)["modules"]
    assert (before["state"], before["command"].endswith("-m flashinfer sm12x-build")) == ("warn", True)
    subprocess.run(
        ["bash", "-c", before["command"]], cwd=tmp_path, env=environment_of(tmp_path) | launchers, check=True
    )
    after = of_this_environment(tmp_path, **launchers)["modules"]
    assert (after["state"], after["command"]) == ("ok", "")
    assert "fused_moe_120: built and fresh" in after["found"]
    assert "fused_moe_120_nvfp4: it is not built yet" in after["found"]


def test_this_environment_with_kernels_of_an_older_fork(tmp_path: Path) -> None:
    manifest = {"format": prebuilt.FORMAT, "fork": "0.0.9", "modules": []}
    package = {"__init__.py": "", prebuilt.MANIFEST: json.dumps(manifest)}
    write_tree(tmp_path / "kernels" / prebuilt.PACKAGE, package)
    modules = of_this_environment(tmp_path, tmp_path / "kernels")["modules"]
    assert modules["state"] == "warn"
    assert "fused_moe_120: it is not built yet" in modules["found"]
    assert "has fork 0.0.9, this is fork" in modules["found"]
    assert "uninstall --yes flashinfer-sm12x-kernels && " in modules["command"]
    assert modules["command"].endswith("-m flashinfer sm12x-build")
