# SPDX-License-Identifier: Apache-2.0
"""The table of what the plugin replaces in vLLM: how an entry is replaced and taken back, that ``docs/development.md``
shows it, and that no line of the plugin writes elsewhere. ``test_vllm_replacements.py`` compares it with vLLM
itself."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import touched
from touched import OURS, Walk

from flashinfer_sm12x.vllm import api_checks, replacements
from flashinfer_sm12x.vllm.replacements import Replacement

PAGE = Path(__file__).parents[2] / "docs" / "development.md"
ROWS = {
    "function": Replacement("config", "their.module", "function", "", ""),
    "of a class": Replacement("config", "their.module", "Class.method", "", ""),
    "inherited": Replacement("config", "their.module", "Class.inherited", "", ""),
    "new": Replacement("config", "their.module", "new", "", ""),
    "registry": Replacement("config", "their.module", "registry[known]", "", ""),
    "new in a registry": Replacement("config", "their.module", "Class.registry[new]", "", ""),
}


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module like one of vLLM's, and a plugin that has replaced nothing in it."""
    module: Any = types.ModuleType("their.module")
    module.function = lambda: "theirs"
    module.registry = {"known": "theirs"}
    base = type("Base", (), {"inherited": lambda self: "theirs"})
    module.Class = type("Class", (base,), {"method": staticmethod(lambda: "theirs"), "registry": {}})
    monkeypatch.setitem(sys.modules, "their.module", module)
    monkeypatch.setattr(replacements, "_before", {})
    monkeypatch.setattr(replacements, "TABLE", tuple(ROWS.values()))
    monkeypatch.setattr(api_checks, "_left", {})
    return module


def held(module: Any) -> dict[str, Any]:
    """All that the module, its class and their registries hold, as it is stored."""
    parts = {"module": vars(module), "class": vars(module.Class)}
    parts |= {"registry": module.registry, "registry of the class": module.Class.registry}
    return {f"{part} {name}": value for part, held in parts.items() for name, value in held.items()}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_entry_is_replaced_once_and_taken_back(theirs: Any, row: Replacement) -> None:
    before, original = held(theirs), row.original()
    assert (original is None) == ("new" in row.path or "inherited" in row.path)
    row.replace("ours")
    after = held(theirs)
    assert [name for name in after if after[name] is not before.get(name)] == [
        name for name in after if after[name] == "ours"
    ]
    assert "ours" in after.values()
    row.replace("ours again")
    assert held(theirs) == after
    assert row.original() is original
    row.take_back()
    assert held(theirs) == before


def test_an_entry_is_replaced_by_vllms_own_registration(theirs: Any) -> None:
    calls: list[str] = []

    def register(new: str) -> None:
        calls.append(new)
        theirs.Class.registry["new"] = new

    for _ in range(2):
        ROWS["new in a registry"].replace("ours", through=register)
    assert (calls, theirs.Class.registry) == (["ours"], {"new": "ours"})
    ROWS["new in a registry"].take_back()
    assert theirs.Class.registry == {}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("writes", [False, True])
def test_a_part_is_installed_whole_or_not_at_all(theirs: Any, writes: bool, error: type[BaseException]) -> None:
    """What was replaced before it, by another part, stays."""
    ROWS["function"].replace("another part's")
    before = held(theirs)

    def fail(new: str) -> None:
        if writes:
            theirs.registry["known"] = new
        raise error("injected")

    def install() -> None:
        with replacements.installing("config") as rows:
            assert rows == tuple(ROWS.values())
            for row in rows:
                row.replace("ours", through=fail if row is ROWS["registry"] else None)

    with pytest.raises(error, match="injected"):
        install()
    assert held(theirs) == before
    assert api_checks.why_not("config") == f"{error.__name__}: injected"


def test_a_part_within_another_is_taken_back_with_it(theirs: Any) -> None:
    before = held(theirs)
    inner = Replacement("decode", "their.module", "function", "", "")

    def install() -> None:
        with replacements.installing("config"):
            with replacements.installing("decode"):
                inner.replace("ours")
            raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        install()
    assert held(theirs) == before


def test_parts_that_need_one_that_could_not_be_installed_are_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_checks, "_left", {})
    monkeypatch.setattr(api_checks, "_moved", lambda part: "")
    assert [part for part in api_checks.TABLE if api_checks.why_not(part)] == []
    api_checks.leave("experts", "RuntimeError: injected")
    left = {part: api_checks.why_not(part) for part in api_checks.TABLE if api_checks.why_not(part)}
    too = "the experts are, too"
    assert left == {"experts": "RuntimeError: injected", "nvfp4": too, "decode": too}


def test_the_page_shows_the_table() -> None:
    rows = [
        f"| `{row.part}` | `{row.path}` of `{row.module.removeprefix('vllm.')}` | `{row.by}` | {row.why} |"
        for row in replacements.TABLE
    ]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index("| part | of vLLM's, under `vllm.` | by, in `flashinfer_sm12x/vllm/` | why |")
    assert lines[first + 1 : first + 3 + len(rows)] == ["|---|---|---|---|", *rows, ""]


def test_what_is_replaced_is_among_the_contacts_of_its_part() -> None:
    """So it is probed before it is replaced, and ``tools/api_checks.py`` compares it between versions."""
    for row in replacements.TABLE:
        parts = ("config", row.part, *api_checks.NEEDS.get(row.part, ()))
        known = {(each.module, each.path) for part in parts for each in api_checks.checks_of(part)}
        assert (row.module, row.path.partition("[")[0]) in known, row


WRITING = "setattr delattr update setdefault append extend insert pop clear add __setitem__".split()


def writes(path: Path) -> Iterator[str]:
    """Lines that write to what a file imports from vLLM, or call a registration of vLLM's other than through an
    entry."""
    imports = {name: found for name, found in touched.File(Walk({}, {}), path).imports.items() if found != OURS}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    through = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replace"
        for keyword in node.keywords
        if keyword.arg == "through"
        for inner in ast.walk(keyword.value)
    }

    def root(node: Any) -> str:
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return getattr(node, "id", "")

    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            found = root(node) in imports
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            of = node.args[0] if name in ("setattr", "delattr") and node.args else node.func
            found = root(of) in imports and (name in WRITING or name.startswith("register")) and id(node) not in through
        else:
            continue
        if found:
            yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_line_of_the_plugin_writes_to_vllm_elsewhere() -> None:
    """``installing()`` is the one way; so nothing is replaced later than by ``register()`` either."""
    assert [line for path in sorted(touched.PLUGIN.glob("*.py")) for line in writes(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "flashinfer.has_nvidia_artifactory = None",
        "del flashinfer.has_nvidia_artifactory",
        "Registry.models['name'] = None",
        "Registry.models.update(name=None)",
        "setattr(flashinfer, 'name', None)",
        "Registry.register_model('name', 'class')",
        "Registry.method, other = None, None",
        "@Registry.register_oot(name='name')\n    class Ours: ...",
    ],
)
def test_a_line_that_writes_is_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "config.py"
    head = "from vllm.utils import flashinfer\nfrom vllm.registry import Registry\ndef install():\n"
    file.write_text(f"{head}    {line}\n", encoding="utf-8")
    assert len(list(writes(file))) == 1
    file.write_text(f"{head}    row.replace(new, through=Registry.register_oot(name='name'))\n", encoding="utf-8")
    assert list(writes(file)) == []
