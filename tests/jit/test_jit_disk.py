# SPDX-License-Identifier: Apache-2.0
"""Caches that cannot be written: each write of a build that fails is an error with the file and what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from jit_fakes import Project, small_spec

from flashinfer.jit import cpp_ext, utils
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import modules
from flashinfer_sm12x.build.diagnosis import JitBuildError

CLONE_NEWNS, MS_PRIVATE, MS_REC = 0x20000, 1 << 18, 1 << 14

ERRORS = {
    errno.ENOSPC: r"No space left on device: .*\nHint: .* MiB free\) is full\. Make room, or set "
    r"FLASHINFER_WORKSPACE_BASE",
    errno.EDQUOT: r"Disk quota exceeded: .*\nHint: .* is full\. Make room, or set FLASHINFER_WORKSPACE_BASE",
    errno.EROFS: r"the cache cannot be written: Read-only file system: .*\nHint: set FLASHINFER_WORKSPACE_BASE",
    errno.EACCES: r"the cache cannot be written: Permission denied: .*\nHint: set FLASHINFER_WORKSPACE_BASE",
}
"""What a write may fail with -> what is said of it."""


def render(_: Project) -> None:
    """Write the generated sources of a module of this family."""
    modules.gen_group_gemm_module()


def render_upstreams(_: Project) -> None:
    """As upstream's generators write theirs."""
    utils.write_if_different(jit_env.FLASHINFER_GEN_SRC_DIR / "silu" / "silu.cu", "int x;\n" * 2000)


def build(project: Project) -> None:
    project.build()


def run_upstreams_ninja(project: Project) -> None:
    """Its build file is there already, and one that fails, so that a log is written."""
    # The cache of these tests has a space in its path, which upstream does not quote.
    folder = project.cache.with_name(project.cache.name.replace(" ", "-")) / "norm"
    file = project.root / "failing.ninja"
    file.write_text("rule fail\n command = echo Error: it failed; exit 1\nbuild said: fail\n")
    try:
        cpp_ext.run_ninja(folder, file, False)
    except JitBuildError as error:
        if "it failed" not in str(error):
            raise


USES = [render, render_upstreams, build, run_upstreams_ninja]


class Failing:
    """Calls of the system that write, of which one fails.

    Attributes:
        left: How many succeed before it.
        made: What the ones that succeeded were.
    """

    def __init__(self, left: int, number: int, patch: pytest.MonkeyPatch) -> None:
        self.left, self._number = left, number
        self.failed = ""
        for name in ("mkdir", "open", "replace", "symlink", "link"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return function(*args, **kwargs)
            if name == "mkdir" and os.path.isdir(args[0]):
                return function(*args, **kwargs)
            self.left -= 1
            if self.left == -1:
                self.failed = f"{name} {args[0]}"
                raise OSError(self._number, os.strerror(self._number), str(args[0]))
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_each_write_that_fails_is_explained(
    use: Callable[[Project], None],
    project: Project,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """One at a time; a hard link that fails costs a compilation and no more."""
    if use is run_upstreams_ninja:
        request.getfixturevalue("upstream_builds_here")
    project.names = ["c"]
    failed = []
    for left in range(200):
        number = list(ERRORS)[left % len(ERRORS)]
        project.cache = workspace / f"cache {left}"
        for name, folder in (("JIT", "cached_ops"), ("GEN_SRC", "generated")):
            monkeypatch.setattr(jit_env, f"FLASHINFER_{name}_DIR", project.cache / folder)
        with monkeypatch.context() as patch:
            failing = Failing(left, number, patch)
            try:
                use(project)
            except JitBuildError as error:
                assert failing.failed, f"it failed without: {error}"
                assert re.search(ERRORS[number], str(error)), (failing.failed, str(error))
            except OSError:
                pytest.fail(f"after {failing.failed} a bare error:\n{traceback.format_exc()}")
        failed.append(failing.failed)
        if not failing.failed:
            break
        use(project)
    assert not failed[-1], "every one was tried"
    assert len(failed) > 2, failed


def on_a_small_disk(folder: Path, options: str, use: Callable[[], object]) -> str:
    """What ``use`` raises, or nothing, in a process that sees a file system in memory at ``folder``.

    Args:
        folder: An empty folder.
        options: Of the file system.
        use: Called in that process.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            mounted = (
                libc.unshare(CLONE_NEWNS) == 0
                and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
                and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options.encode()) == 0
            )
            problem = "" if mounted else f"nothing may be mounted here: {os.strerror(ctypes.get_errno())}"
            if mounted:
                try:
                    use()
                except BaseException as error:
                    problem = f"{type(error).__name__}: {error}"
            os.write(writing, problem.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        problem = pipe.read()
    os.waitpid(child, 0)
    if problem.startswith("nothing may be mounted"):
        pytest.skip(problem)
    return problem


@pytest.mark.parametrize("limit", ["size={}k", "size=4m,nr_inodes={}"], ids=["bytes", "files"])
@pytest.mark.parametrize("use", [render, render_upstreams, build], ids=lambda use: use.__name__)
def test_a_disk_that_is_full(
    use: Callable[[Project], None], limit: str, project: Project, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much fits: it is said that it is full, and with enough space everything is there."""
    project.names = ["c"]
    disk = workspace / "disk"
    disk.mkdir()
    project.cache = disk / "cache"
    for name, folder in (("JIT", "cached_ops"), ("GEN_SRC", "generated")):
        monkeypatch.setattr(jit_env, f"FLASHINFER_{name}_DIR", project.cache / folder)
    outcomes = []
    for step in range(40):
        outcomes.append(
            on_a_small_disk(disk, limit.format(4 * (step + 1) if "k" in limit else step + 2), lambda: use(project))
        )
        if not outcomes[-1]:
            break
        assert outcomes[-1].startswith("JitBuildError: building "), outcomes[-1]
        assert "No space left on device" in outcomes[-1]
        assert " is full. Make room, or set FLASHINFER_WORKSPACE_BASE" in outcomes[-1]
    assert not outcomes[-1]
    assert len(outcomes) > 1


def test_links_to_libraries_that_cannot_be_written(
    nvcc: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "libcuda.so")

    spec = small_spec(workspace)
    spec.links_driver = True
    monkeypatch.setattr(cpp_ext.toolchain, "link_shim", full)
    with pytest.raises(
        JitBuildError, match=r"building small failed: No space left on device: libcuda\.so\nHint: .* full"
    ):
        _ = spec.plan
