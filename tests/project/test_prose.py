# SPDX-License-Identifier: Apache-2.0
"""Texts about the project hold: commands exist and run, lines fit, tests say their seeds."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path
from typing import Any

import forked_python
import pytest
from documents import FENCE, code_lines, serve_commands, tracked
from layer_toys import REPO

from flashinfer_sm12x.host_memory import SHARE

ONLY_LINK = re.compile(r"\W*\[[^]]*\]\([^)]*\)\W*")


def commands(program: str) -> list[tuple[Path, list[str]]]:
    """The words of each command with which a page has its reader start ``program``, and the page."""
    found = []
    for page in tracked("*.md"):
        text = page.read_text(encoding="utf-8")
        lines = code_lines(page)
        lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for part in (part.strip() for line in lines for part in line.split("&&")):
            if part == program or part.startswith(f"{program} "):
                found.append((page, shlex.split(part.replace("<", "'<'"), comments=True)))
    assert found, f"no page has a command {program!r}: this test would not see a wrong one"
    return found


def test_prose_fits_the_line() -> None:
    long = [
        f"{page.relative_to(REPO)}:{number}: {len(line)} characters"
        for page in tracked("*.md")
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and not line.lstrip().startswith("|") and not ONLY_LINK.fullmatch(line)
    ]
    assert long == []


def test_pages_can_be_read_in_one_sitting() -> None:
    assert [page.name for page in tracked("*.md") if len(page.read_text(encoding="utf-8").splitlines()) > 500] == []


def test_the_readme_fits_a_page() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1050


def test_the_readmes_figures_are_those_of_the_performance_page() -> None:
    """And a preset's are those of the page of choices: its speed, and its loss."""
    readme, performance, serving = (
        (REPO / page).read_text(encoding="utf-8") for page in ("README.md", "docs/performance.md", "docs/serving.md")
    )
    (measured,) = re.findall(r"^\*\*H100\*\*.*?(?=\n\n)", readme, re.MULTILINE | re.DOTALL)
    ranges = re.findall(r"\b[\d,]+-[\d,]*\d\b", measured.partition("streams")[2])
    assert len(ranges) == 4
    for found in ranges:
        assert found.replace("-", " - ") in performance, found
    columns = r"\|.*\| ([\d. -]+) \| ([\d.]+ \|[\d. ]* \|)$"
    presets = re.findall(rf"^\| \*{{0,2}}`(spark[\w-]*)`\*{{0,2}} {columns}", readme, re.MULTILINE)
    assert len(presets) == 4
    for name, speed, losses in presets:
        (row,) = re.findall(rf"^\| `{name}` \|.*", serving, re.MULTILINE)
        assert f"| {speed} |" in row
        assert row.endswith(f"| {losses}")


def test_each_documented_server_leaves_the_host_its_memory_and_answers_this_machine_alone() -> None:
    """Whoever pastes a line runs it as it stands: vLLM's own defaults are 0.92 of the memory and every interface."""
    found = serve_commands()
    assert {serve.file.name for serve in found} >= {"README.md", "serving.md", "demo.py"}
    assert len(found) >= 9
    for file, variables, words in found:
        served = f"{file.relative_to(REPO)}: {variables} vllm serve {shlex.join(words)}"
        assert option(words, "--gpu-memory-utilization") == str(SHARE), served
        if "--headless" not in words:  # it serves no requests
            assert option(words, "--host") == "127.0.0.1", served
    sglang = [line for page in tracked("*.md") for line in code_lines(page) if "sglang.launch_server" in line]
    assert sglang
    for line in sglang:  # its own default is 127.0.0.1
        assert option(shlex.split(line), "--mem-fraction-static") == str(SHARE)
        assert "--host" not in line


def option(words: list[str], name: str) -> str:
    """The word that follows an option, or an empty text."""
    return words[words.index(name) + 1] if name in words else ""


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them of its headings."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def leads_nowhere(target: str, folder: Path, page: Path) -> bool:
    """Whether a page, or an anchor on it, does not exist; ``page`` is meant where only an anchor is named."""
    file, _, anchor = target.partition("#")
    linked = folder / file if file else page
    return not linked.exists() or bool(anchor and anchor not in headings(linked))


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in tracked("*.md")
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8")))
        if not target.startswith("http")
    ]
    assert any("#" in target for _, target in links)
    assert [(page.name, target) for page, target in links if leads_nowhere(target, page.parent, page)] == []


def test_pages_named_in_code_messages_and_comments_exist() -> None:
    named = [
        (file, target)
        for file in tracked()
        for target in re.findall(
            r"(?<!blob/main/)\bdocs/[\w-]+\.md(?:#[\w-]+)?", file.read_text(encoding="utf-8", errors="replace")
        )
    ]
    assert {file.suffix for file, _ in named} >= {".py", ".md", ".toml"}
    assert [(file.name, target) for file, target in named if leads_nowhere(target, REPO, file)] == []


def test_each_command_of_the_cli_exists_with_its_options() -> None:
    import flashinfer_sm12x.doctor as doctor
    from flashinfer.__main__ import _group

    for page, (_, _, _, *words) in commands("python -m flashinfer"):
        command: Any = _group
        while words and not words[0].startswith("--"):
            name = words.pop(0)
            if not hasattr(command, "commands"):
                break
            assert name in command.commands, f"{page.name}: python -m flashinfer ... {name}"
            command = command.commands[name]
        options = {option for parameter in command.params for option in parameter.opts}
        if command.name == "sm12x-doctor":  # click hands its arguments on
            options = set(doctor.parser()._option_string_actions)
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"{page.name}: {command.name} has no {unknown}"


def test_each_target_of_make_exists() -> None:
    for page, (_, *arguments) in commands("make"):
        folder = REPO / "emulator" if "emulator" in page.parts or arguments[:2] == ["-C", "emulator"] else REPO
        rules = (folder / "Makefile").read_text() + (REPO / "Makefile").read_text()
        for word in arguments:
            if re.fullmatch("[a-z]+", word) and word != "emulator":
                assert re.search(rf"^{word}:", rules, re.MULTILINE), f"{page.name}: make {word}"


def test_requirements_named_in_commands_exist() -> None:
    for page, words in commands("pip install"):
        for word in words:
            if match := re.search(r"flashinfer-sm12x/(.+)", word):
                assert (REPO / match[1]).exists(), f"{page.name}: {word}"


def test_scripts_named_in_prose_have_their_options() -> None:
    seen = 0
    for page in tracked("*.md"):
        for script, arguments in re.findall(r"`([\w/]+\.py)((?: [^`\n]*)?)`", page.read_text(encoding="utf-8")):
            if "/" not in script:
                continue
            path = next((root / script for root in (REPO, page.parent) if (root / script).is_file()), None)
            assert path is not None or (REPO / "include" / "flashinfer" / "sm12x" / script).exists(), (
                page.name,
                script,
            )
            for option in re.findall(r"--[a-z-]+", arguments):
                seen += 1
                assert f'"{option}"' in (path.read_text() if path else ""), f"{page.name}: {script} {option}"
    assert seen


def one_liners() -> list[str]:
    pages = [REPO / "README.md", REPO / "docs" / "troubleshooting.md"]
    return sorted({code for page in pages for code in re.findall(r"\bpython -c '([^']+)'", page.read_text())})


@pytest.mark.parametrize("code", one_liners())
def test_each_one_liner_for_the_reader_runs(code: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    result = forked_python.run(["-c", code], cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    if "flashinfer.__file__" in code:
        assert result.stdout.split()[0] == str(REPO / "flashinfer" / "__init__.py")
    if "find_toolkit" in code:
        assert Path(result.stdout.strip(), "bin", "nvcc").is_file()


SEEDERS = {"manual_seed", "default_rng", "Random"}


def says_seed(function: ast.FunctionDef) -> bool:
    """It prints it, or its seed is a parameter, which pytest and Hypothesis name when the test fails."""
    if function.name.startswith("test_") and "seed" in {argument.arg for argument in function.args.args}:
        return True
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "print"
        and any(isinstance(leaf, ast.Constant) and "seed" in str(leaf.value) for leaf in ast.walk(node))
        for node in ast.walk(function)
    )


def test_random_tests_say_their_seed() -> None:
    silent = []
    # The golden cases' inputs are part of the golden data.
    for file in (file for file in tracked("tests/**.py", "emulator/tests/**.py") if "golden" not in file.parts):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in (
            inner for outer in tree.body for inner in (outer.body if isinstance(outer, ast.ClassDef) else [outer])
        ):
            calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            if not SEEDERS & {getattr(call, "attr", getattr(call, "id", "")) for call in calls}:
                continue
            if not isinstance(node, ast.FunctionDef) or not says_seed(node):
                silent.append(f"{file.relative_to(REPO)}:{node.lineno}")
    assert silent == []
