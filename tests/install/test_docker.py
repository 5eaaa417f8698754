# SPDX-License-Identifier: Apache-2.0
"""The images' recipes agree with the project, and what carries them out without Docker reads them as Docker does."""

from __future__ import annotations

import importlib.util
import re
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
