# SPDX-License-Identifier: Apache-2.0
"""Caches that other users could write to, links planted in a cache, and caches that can only be read."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jit_fakes import Project, needs_nvcc, small_spec

from flashinfer.jit import cpp_ext
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import build as engine
from flashinfer.jit.sm12x.diagnosis import JitBuildError
from flashinfer.jit.sm12x.trust import ALLOW_VARIABLE, UntrustedCacheError, make_folder, require_trusted

pytestmark = pytest.mark.privileges

ANOTHER = 12345
"""A user and a group that are not this one's."""


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``path`` another user's, for real where that is allowed."""
    if os.geteuid() == 0:
        os.chown(path, ANOTHER, ANOTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A private cache with a library in it."""
    tmp_path.chmod(0o700)
    (tmp_path / "base" / "cache").mkdir(parents=True, mode=0o755)
    library = tmp_path / "base" / "cache" / "m.so"
    library.touch(mode=0o644)
    return library


def test_own_cache_is_trusted(cache: Path) -> None:
    require_trusted(cache, cache.parents[1])
    require_trusted(cache.with_name("not yet") / "m.so", cache.parents[1])


@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "folder", "base"])
def test_owner_and_mode_of_each_level_count(cache: Path, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each = [cache, *cache.parents][level]
    mode = each.stat().st_mode
    each.chmod(mode | 0o002)
    with pytest.raises(UntrustedCacheError, match=f"{each} is writable by everybody.*{ALLOW_VARIABLE}=1"):
        require_trusted(cache, cache.parents[1])
    each.chmod(mode)
    _give_away(each, monkeypatch)
    with pytest.raises(UntrustedCacheError, match="belongs to user"):
        require_trusted(cache, cache.parents[1])
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    require_trusted(cache, cache.parents[1])


def test_what_lies_above_the_base_does_not_count(cache: Path) -> None:
    cache.parents[2].chmod(0o777)
    require_trusted(cache, cache.parents[1])
    with pytest.raises(UntrustedCacheError, match=f"{cache.parents[2]} is writable by everybody"):
        require_trusted(cache, Path("/none"))
    cache.parents[2].chmod(0o1777)  # as /tmp
    require_trusted(cache, Path("/none"))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another group needs root")
def test_group_of_the_same_number_is_the_owners_own(cache: Path) -> None:
    folder = cache.parent
    folder.chmod(0o775)
    os.chown(folder, 0, 0)
    require_trusted(cache, cache.parents[1])
    os.chown(folder, 0, ANOTHER)
    with pytest.raises(UntrustedCacheError, match=f"is writable by group {ANOTHER}"):
        require_trusted(cache, cache.parents[1])


def test_folders_are_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o755, 0o755]


@needs_nvcc
def test_nothing_is_loaded_or_built_in_a_cache_that_others_write_to(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "cached_ops").mkdir()
    (workspace / "cached_ops").chmod(0o777)
    spec = small_spec(workspace)
    assert spec.try_load() is None
    with pytest.raises(UntrustedCacheError, match=f"cached_ops is writable by everybody.*{ALLOW_VARIABLE}=1"):
        spec.build_and_load()
    assert not spec.build_dir.exists()
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    assert spec.plan.folder == spec.build_dir


def test_upstreams_modules_are_not_built_there_either(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ninja(*_: object) -> None:
        raise AssertionError("ninja was run")

    monkeypatch.setattr(cpp_ext._upstream, "run_ninja", ninja)
    workdir = workspace / "cached_ops" / "norm"
    workdir.mkdir(parents=True)
    workdir.parent.chmod(0o777)
    with pytest.raises(UntrustedCacheError, match="cached_ops is writable by everybody"):
        cpp_ext.run_ninja(workdir, workdir / "build.ninja", False)
    odd = workspace / "a$b"
    with pytest.raises(JitBuildError, match=r"the cache path holds a \$"):
        cpp_ext.run_ninja(odd, odd / "build.ninja", False)


def test_links_in_a_cache_are_not_followed(project: Project, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("letter", "hard", "d.o"):
        (victim / name).write_text("mine")
    folder = project.plan().folder
    folder.mkdir(parents=True)
    (folder / "build.log").symlink_to(victim / "letter")
    (folder / "obj").symlink_to(victim)
    (folder / "tmp-1").symlink_to(victim)
    (folder / "manifest.json").symlink_to(victim / "letter")
    project.build()
    os.unlink(folder / "build.log")
    os.link(victim / "hard", folder / "build.log")
    project.write("c.cu", "int another;\n")
    project.build()
    assert sorted(os.listdir(victim)) == ["d.o", "hard", "letter"]
    assert {(victim / name).read_text() for name in os.listdir(victim)} == {"mine"}
    assert not (folder / "obj").is_symlink()
    assert "c.o" in (folder / "build.log").read_text()


def test_module_folder_that_is_a_link_is_replaced(project: Project, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "obj").mkdir(parents=True)
    (victim / "obj" / "mine.o").write_text("mine")
    folder = project.plan().folder
    folder.parent.mkdir()
    folder.symlink_to(victim)
    project.build()
    assert sorted(path.name for path in victim.rglob("*")) == ["mine.o", "obj"]
    assert engine.is_fresh(project.plan())


def _without_override() -> None:
    """In a child: take root's power over modes away, so that a folder that may not be written cannot be."""
    if os.geteuid() == 0:
        drop_from_bounding_set, override = 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
        ctypes.CDLL(None).prctl(drop_from_bounding_set, override, 0, 0, 0)


def _run(code: str, base: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(base), "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        preexec_fn=_without_override,
    )


def _set_writable(folder: Path, writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if writable and path.is_dir() else 0o644 if writable else 0o555 if path.is_dir() else 0o444)


USE_SMALL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from jit_fakes import small_spec
spec = small_spec(Path(sys.argv[2]))
if sys.argv[3] == "build":
    spec.build(need_lock=True)
module = spec.try_load()
print(module and module.answer(), spec.plan.library)
"""


@needs_nvcc
@pytest.mark.slow
def test_prebuilt_cache_that_can_only_be_read_is_used(tmp_path: Path) -> None:
    base, temporary = tmp_path / "base", tmp_path / "tmp"
    temporary.mkdir()
    here = Path(__file__).parent

    def run(what: str) -> subprocess.CompletedProcess[str]:
        return _run(USE_SMALL, base, here, tmp_path, what, TMPDIR=str(temporary))

    built = run("build")
    assert built.stdout.startswith(f"41 {base}/"), built.stderr
    for log in base.rglob("*.log"):
        log.unlink()
    shutil.rmtree(next(base.rglob("cached_ops")) / "tmp")  # the locks
    _set_writable(base, False)
    try:
        before = sorted(base.rglob("*"))
        used = run("load")
        assert used.stdout == built.stdout, used.stderr
        assert "can only be read (Permission denied): what is fresh in it is used" in used.stderr
        (tmp_path / "src" / "answer.h").write_text("#define ANSWER 42\n")
        assert run("load").stdout.startswith("None ")
        again = run("build")
        assert again.stdout.startswith(f"42 {temporary}/flashinfer-{os.geteuid()}/"), again.stderr
        assert sorted(base.rglob("*")) == before
    finally:
        _set_writable(base, True)


def test_import_with_a_cache_that_can_only_be_read(tmp_path: Path) -> None:
    base, temporary = tmp_path / "base", tmp_path / "tmp"
    temporary.mkdir()
    modules = base / ".cache" / "flashinfer" / "0.7.2.post1" / "121a" / "cached_ops"
    modules.mkdir(parents=True)
    _set_writable(base, False)
    code = "from flashinfer.jit import env; print(env.PREBUILT_JIT_DIR, env.FLASHINFER_JIT_DIR)"
    try:
        result = _run(code, base, TMPDIR=str(temporary))
    finally:
        _set_writable(base, True)
    other = temporary / f"flashinfer-{os.geteuid()}" / "0.7.2.post1" / "121a" / "cached_ops"
    assert result.stdout.split() == [str(modules), str(other)], result.stderr


def test_temporary_workspace_that_somebody_else_prepared_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jit_env, "make_folder", lambda path: path.is_relative_to(tmp_path) or _refuse())
    prepared = tmp_path / f"flashinfer-{os.geteuid()}"
    prepared.mkdir()
    workspace = jit_env.FLASHINFER_CACHE_DIR / "0.7.2.post1" / "121a"
    monkeypatch.setattr(jit_env, "_make_workspace", lambda folder: None)
    assert jit_env._temporary_workspace(workspace) == prepared / "0.7.2.post1" / "121a"
    prepared.chmod(0o777)
    assert jit_env._temporary_workspace(workspace) is None


def _refuse() -> None:
    raise PermissionError
