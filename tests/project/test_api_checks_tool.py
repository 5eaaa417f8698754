# SPDX-License-Identifier: Apache-2.0
"""``tools/api_checks.py`` on a toy of vLLM's and two of FlashInfer's whose every line is known."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from layer_toys import load_tool, write_tree

tool = load_tool("api_checks")

VLLM = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from .inner import Config as Config\nfrom . import inner as inner\n",
    "vllm/config/inner.py": """
from dataclasses import dataclass
from vllm.base import Base
if True:
    class Config(Base):
        field: int = 0
        def __init__(self):
            self.set_by_init = 1
            self.register_buffer("buffer", None)
        def method(self, a, *, b=None): ...
        def two(self, a, b, c=WIDTH, *, d=True, **more): ...
        @staticmethod
        def alone(x): ...
made = Config()
WIDTH = 3
""",
    "vllm/uses.py": "import vllm.base as b\nclass Sub(b.Base): ...\n",
    "vllm/base.py": "class Base:\n    def inherited(self, layer): ...\n",
    "vllm/envs.py": "table = {'LAZY': 1}\ndef __getattr__(name): return table[name]\n",
}


@pytest.fixture(params=["folder", "wheel"])
def sources(request: pytest.FixtureRequest, tmp_path: Path):
    folder = write_tree(tmp_path / "unpacked", VLLM)
    if request.param == "folder":
        return tool.Sources(folder)
    with zipfile.ZipFile(tmp_path / "toy.whl", "w") as wheel:
        for name, text in VLLM.items():
            wheel.writestr(name, text)
    return tool.Sources(tmp_path / "toy.whl")


GONE = " is gone"


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("vllm.config", "Config", ""),
        ("vllm.config", "inner", ""),
        ("vllm.config", "Config.field", ""),
        ("vllm.config", "Config.set_by_init", ""),
        ("vllm.config", "Config.buffer", ""),
        ("vllm.config", "Config.method(a, b=)", ""),
        ("vllm.config", "Config.method(a=, b=)", ""),
        ("vllm.config", "Config.method(a, b=None)", ""),
        ("vllm.config", "Config.method(a, b=...)", ""),
        ("vllm.config", "Config.method(a, gone=None)", ""),
        ("vllm.config", "Config.method(a, b)", ".method takes (a, *, b=None): argument 2 is not b"),
        ("vllm.config", "Config.method(a, c=)", ".method takes (a, *, b=None): c is no keyword"),
        ("vllm.config", "Config.method(a, a=)", ".method takes (a, *, b=None): a is no keyword"),
        ("vllm.config", "Config.method(b=)", ".method takes (a, *, b=None): a is needed"),
        ("vllm.config", "Config.method(a, b=0)", ".method takes (a, *, b=None): b is not 0 by default"),
        ("vllm.config", "Config.method(a, b=False)", ".method takes (a, *, b=None): b is not False by default"),
        ("vllm.config", "Config.method(a, *args)", ": it takes no more arguments by position"),
        ("vllm.config", "Config.two(a, b, c=3, d=True, other=)", ""),
        ("vllm.config", "Config.two(b, a)", ".two takes (a, b, c=..., *, d=True, **more): argument 1 is not b"),
        ("vllm.config", "Config.two(a, b, d=1)", ".two takes (a, b, c=..., *, d=True, **more): d is not 1 by default"),
        ("vllm.config", "Config.two <- (a, b, c=4, *, d=True, **more)", ""),
        (
            "vllm.config",
            "Config.two <- (b, a, c=4, *, d=True, **more)",
            ".two takes (a, b, c=..., *, d=True, **more), not (b, a, c=4, *, d=True, **more)",
        ),
        (
            "vllm.config",
            "Config.two <- (a, b, c=4, d=True, **more)",
            ".two takes (a, b, c=..., *, d=True, **more), not (a, b, c=4, d=True, **more)",
        ),
        (
            "vllm.config",
            "Config.two <- (a, b, c, *, d=True, **more)",
            ".two takes (a, b, c=..., *, d=True, **more), not (a, b, c, *, d=True, **more)",
        ),
        ("vllm.config", "Config.alone(x)", ""),
        ("vllm.config", "Config.alone <- (x)", ""),
        ("vllm.config", "Config.alone <- (y)", ".alone takes (x), not (y)"),
        ("vllm.config", "Config.alone <- (x, /)", ".alone takes (x), not (x, /)"),
        ("vllm.config", "Config.inherited <- (layer)", ""),
        ("vllm.config.inner", "made.method(a)", ""),
        ("vllm.uses", "Sub.inherited <- (layer)", ""),
        ("vllm.uses", "Sub.other", GONE),
        ("vllm.config", "Config.other", GONE),
        ("vllm.config", "Other", GONE),
        ("vllm.other", "Config", "vllm.other is gone"),
        ("vllm.envs", "LAZY", ""),
        ("vllm.envs", "OTHER", GONE),
    ],
)
def test_an_api_is_checked_in_sources(sources, module: str, text: str, message: str) -> None:
    moved = tool.Moved(sources)
    found = moved.probe(tool.api_checks.parse(module, text))
    assert found.endswith(message)
    assert bool(found) == bool(message)


def test_every_import_that_goes_round_in_a_circle_ends(tmp_path: Path) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    files = {
        f"flashinfer/{n}.py": f"from .{m} import x as x\nfrom . import x as y\n"
        for n, m in zip(names, names[1:] + "a", strict=True)
    }
    files["flashinfer/__init__.py"] = "from . import a as a\n"
    sources = tool.Sources(write_tree(tmp_path, files))
    assert sources.resolve("flashinfer", "a") == ("flashinfer.a", None)
    assert sources.resolve("flashinfer.a", "x") is None


def flashinfer(folder: Path, name: str, function: str) -> Path:
    core = f"class Kept: ...\n{function}\n"
    return write_tree(
        folder / name,
        {"flashinfer/__init__.py": "", "flashinfer/fused_moe/__init__.py": "", "flashinfer/fused_moe/core.py": core},
    )


@pytest.mark.parametrize(
    ("now", "lines", "status"),
    [
        ("def cutlass_fused_moe(a): return 1", ["  gone: nothing", "  to be read: nothing"], 0),
        (
            "def cutlass_fused_moe(a): return 2",
            ["  gone: nothing", "    flashinfer/fused_moe/core.py: cutlass_fused_moe: text"],
            0,
        ),
        (
            "def cutlass_fused_moe(a, b=1): ...",
            ["    flashinfer/fused_moe/core.py: cutlass_fused_moe: takes b more"],
            0,
        ),
        (
            "def cutlass_fused_moe(b): ...",
            ["    flashinfer/fused_moe/core.py: cutlass_fused_moe: takes b more; takes a no more"],
            0,
        ),
        (
            "def cutlass_fused_moe(a=1): ...",
            ["    flashinfer/fused_moe/core.py: cutlass_fused_moe: takes a otherwise"],
            0,
        ),
        (
            "def cutlass_fused_moe(*, a): ...",
            ["    flashinfer/fused_moe/core.py: cutlass_fused_moe: takes a otherwise"],
            0,
        ),
        ("", ["    flashinfer/fused_moe/core.py: cutlass_fused_moe is gone"], 1),
    ],
)
def test_what_the_layer_touches_is_compared(tmp_path: Path, capsys, now: str, lines: list[str], status: int) -> None:
    before = flashinfer(tmp_path, "before", "def cutlass_fused_moe(a): return 1\ndef not_touched(): ...")
    after = flashinfer(tmp_path, "after", now)
    assert tool.main(["--flashinfer-from", str(before), "--flashinfer", str(after)]) == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "FlashInfer, from before to after:"
    assert [line for line in lines if line not in printed] == []


def test_another_order_of_the_same_arguments_is_reported() -> None:
    was, to = (tool.ast.parse(f"def f({each}): ...").body[0] for each in ("a, b, c", "a, c, b"))
    assert tool._signatures(was, to) == ": takes (a, c, b) in this order"
    assert tool._signatures(was, was) == ": text"


def test_the_installed_wheel_is_what_the_layer_was_made_over(capsys, site_packages: Path) -> None:
    assert tool.main(["--flashinfer", str(site_packages)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  gone: nothing", "  to be read: nothing"]


@pytest.mark.parametrize(
    ("words", "message"), [([], "name a wheel"), (["--vllm", "none.whl"], "there is no none.whl; pip download")]
)
def test_a_wrong_command_line(capsys, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        tool.main(words)
    assert message in capsys.readouterr().err
