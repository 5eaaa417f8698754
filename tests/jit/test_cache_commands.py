# SPDX-License-Identifier: Apache-2.0
"""``sm12x-cache`` and ``--version``: clearing removes what it names and nothing else."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashinfer import __main__ as command_line
from flashinfer.jit.sm12x import cache as module_cache
from flashinfer.jit.sm12x import modules
from flashinfer.jit.sm12x.modules import MODULES
from flashinfer_sm12x.versions import UPSTREAM_VERSION, __fork_version__

pytestmark = pytest.mark.privileges

DAY = 86400
OURS = ("fused_moe_120_half_mxf8f6f4", *MODULES)
OTHERS = ("fused_moe_120_upstream", "silu_and_mul")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two architectures; fused_moe_120 is 10 days old in the first and new in the second."""
    cache = tmp_path / "cache" / "flashinfer"
    for architectures, days in (("120a", 10), ("121a", 0)):
        for name in (*OURS, *OTHERS):
            folder = cache / UPSTREAM_VERSION / architectures / "cached_ops" / name
            (folder / "obj").mkdir(parents=True)
            (folder / "obj" / "a.o").write_bytes(bytes(1000))
            library = folder / f"{name}.so"
            library.write_bytes(bytes(500))
            os.utime(library, (time.time() - days * DAY,) * 2)
        (folder.parent / "tmp").mkdir()
        (cache / UPSTREAM_VERSION / architectures / "generated" / "fused_moe_120").mkdir(parents=True)
    monkeypatch.setattr(command_line._upstream, "FLASHINFER_CACHE_DIR", cache)
    return cache


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command_line._group, ["sm12x-cache", *arguments])


def contents(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.suffix != ".lock"}


def removed_by(folder: Path, *arguments: str) -> set[str]:
    """Folders of modules, ``architectures/module``, that a command removed with all that is in them."""
    before = contents(folder)
    result = invoke("clear", *arguments)
    assert result.exit_code == 0, result.output
    gone = before - contents(folder)
    tops = {path for path in gone if path.parent.name == "cached_ops"}
    assert gone == {path for path in before if any(top == path or top in path.parents for top in tops)}
    reported = {
        line.removeprefix("removed ").rpartition(",")[0] for line in result.output.splitlines() if "removed" in line
    }
    assert reported == {str(top) for top in tops}
    return {f"{top.parents[1].name}/{top.name}" for top in tops}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {f"{arch}/{name}" for arch in ("120a", "121a") for name in OURS}),
        (("--module", "fused_moe_120"), {"120a/fused_moe_120", "121a/fused_moe_120"}),
        (("--module", "silu_and_mul", "--older-than", "9.5"), {"120a/silu_and_mul"}),
        (("--older-than", "3"), {f"120a/{name}" for name in OURS}),
        (("--older-than", "30"), set()),
        (("--dry-run",), set()),
    ],
)
def test_clear_removes_what_it_says(cache: Path, arguments: tuple[str, ...], expected: set[str]) -> None:
    assert removed_by(cache, *arguments) == expected


def test_what_is_exactly_as_old_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    day = 86400.0
    monkeypatch.setattr(module_cache.time, "time", lambda: 100 * day)
    ages = (2 * day - 1, 2 * day, 2 * day + 1)
    made = [module_cache.CachedModule("fused_moe_120", "x", Path("/x"), 0, 100 * day - age, True) for age in ages]
    assert module_cache.chosen(made, None, 2) == made[2:]
    assert module_cache.chosen(made, None, None) == made
    assert module_cache.chosen(made, None, 0) == made


@pytest.mark.parametrize("days", ["nan", "-nan", "inf", "-inf", "-1", "-0.5", "1e999", "soon", ""])
def test_what_is_no_number_of_days_removes_nothing(cache: Path, days: str) -> None:
    before = contents(cache)
    result = invoke("clear", "--older-than", days)
    assert result.exit_code == 2
    assert f"{days!r} is no number of days; it must be 0 or more, and finite" in result.output
    assert contents(cache) == before


def test_every_module_of_the_table_is_named_as_there(workspace: Path) -> None:
    """So that one table serves: what builds, what loads and what is cleared."""
    for name, generate in MODULES.items():
        assert generate().name == name
    assert [spec.name for spec in modules.gen_operator_modules()] == [name for name in MODULES if name != "probe_sm12x"]
    generators = {name for name in vars(modules) if name.startswith("gen_") and name.endswith("_module")}
    named = {getattr(generate, "func", generate).__name__ for generate in MODULES.values()}
    assert generators - {"gen_fused_moe_instance_module"} == named


def test_a_dry_run_names_what_would_go(cache: Path) -> None:
    output = invoke("clear", "--module", "gemm_mxfp4_sm12x", "--dry-run").output
    folders = [cache / UPSTREAM_VERSION / arch / "cached_ops" / "gemm_mxfp4_sm12x" for arch in ("120a", "121a")]
    assert output == "".join(f"would remove {folder}, 0.0 MiB\n" for folder in folders)


def test_a_module_that_is_not_there_is_an_error_that_lists_what_is(cache: Path) -> None:
    before = contents(cache)
    for name in ("fused_moe", "../121a", "tmp", "*"):
        result = invoke("clear", "--module", name)
        assert result.exit_code == 1
        assert f"it has: {', '.join(sorted((*OURS, *OTHERS)))}\n" in result.output
    assert contents(cache) == before


@pytest.mark.parametrize("where", ["in the module", "the module", "cached_ops", "the architecture", "the version"])
def test_links_are_not_followed(cache: Path, tmp_path: Path, where: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    version = cache / UPSTREAM_VERSION
    depth = {
        "in the module": version / "121a" / "cached_ops" / "fused_moe_120" / "obj" / "link",
        "the module": version / "121a" / "cached_ops" / "fused_moe_120_linked",
        "cached_ops": version / "100a" / "cached_ops",
        "the architecture": version / "100a",
        "the version": cache / "9.9",
    }
    inner = {"cached_ops": "fused_moe_120", "the architecture": "cached_ops/fused_moe_120"}
    inner["the version"] = "121a/cached_ops/fused_moe_120"
    target = elsewhere / inner.get(where, "")
    target.mkdir(parents=True)
    (target / "fused_moe_120.so").write_text("precious")
    depth[where].parent.mkdir(exist_ok=True)
    depth[where].symlink_to(elsewhere)
    assert invoke("clear").exit_code == 0
    assert (target / "fused_moe_120.so").read_text() == "precious"
    assert depth[where].is_symlink() == (where != "in the module")
    assert not (version / "121a" / "cached_ops" / "fused_moe_120").exists()


def test_a_module_that_is_being_built_stays(cache: Path) -> None:
    operators = cache / UPSTREAM_VERSION / "121a" / "cached_ops"
    with open(operators / "tmp" / "fused_moe_120.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = invoke("clear", "--module", "fused_moe_120")
    assert result.exit_code == 1
    assert f"{operators / 'fused_moe_120'} stays: it is being built" in result.output
    assert (operators / "fused_moe_120" / "obj" / "a.o").is_file()
    assert not (operators.parents[1] / "120a" / "cached_ops" / "fused_moe_120").exists()


def test_the_list(cache: Path) -> None:
    (cache / UPSTREAM_VERSION / "121a" / "cached_ops" / "fused_moe_120" / "fused_moe_120.so").unlink()
    lines = invoke("list").output.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:-1]]
    assert [row[:3] + row[4:] for row in rows if row[0] == "fused_moe_120"] == [
        ["fused_moe_120", f"{UPSTREAM_VERSION}/120a", "0.0", "yes"],
        ["fused_moe_120", f"{UPSTREAM_VERSION}/121a", "0.0", "no"],
    ]
    assert lines[-1] == f"{2 * len((*OURS, *OTHERS))} modules in {cache}"
    assert module_cache.cached_modules(cache)[0].bytes == 1500


def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line._upstream, "FLASHINFER_CACHE_DIR", tmp_path / "none")
    assert invoke("list").output.splitlines()[-1] == f"0 modules in {tmp_path / 'none'}"
    assert invoke("clear").output == "nothing to remove\n"


def test_version() -> None:
    result = CliRunner().invoke(command_line._group, ["--version"])
    assert result.output == f"flashinfer-sm12x {__fork_version__} over flashinfer-python {UPSTREAM_VERSION}\n"
