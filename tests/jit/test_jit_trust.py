# SPDX-License-Identifier: Apache-2.0
"""Caches that other users could write to, and caches that can only be read."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from jit_fakes import Project, needs_nvcc, small_spec, umask
from jit_processes import run_python

from flashinfer.jit import activation, core, cpp_ext, cute_dsl_core
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import modules
from flashinfer_sm12x.build import trust
from flashinfer_sm12x.build.diagnosis import JitBuildError
from flashinfer_sm12x.build.trust import (
    ALLOW_VARIABLE,
    UntrustedCacheError,
    make_folder,
    require_trusted,
    require_trusted_tree,
)

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


def test_own_cache_is_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_trusted(cache)
    require_trusted(cache.with_name("not yet") / "m.so")
    require_trusted(cache / "below a file")
    require_trusted_tree(cache.parents[1])
    monkeypatch.chdir(cache.parent)
    require_trusted(Path("m.so"))
    require_trusted(Path("../cache/./m.so"))


@pytest.mark.parametrize("level", [0, 1, 2, 3], ids=["file", "folder", "base", "above it"])
def test_owner_and_mode_of_each_level_count(cache: Path, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each = [cache, *cache.parents][level]
    mode = each.stat().st_mode
    each.chmod(mode | 0o002)
    with pytest.raises(UntrustedCacheError, match=f"{each} is writable by everybody.*{ALLOW_VARIABLE}=1"):
        require_trusted(cache)
    each.chmod(mode)
    _give_away(each, monkeypatch)
    with pytest.raises(UntrustedCacheError, match="belongs to user"):
        require_trusted(cache)
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    require_trusted(cache)


@pytest.mark.parametrize("place", ["obj", "obj/a.o", "build.ninja"])
def test_all_of_a_folder_counts(cache: Path, place: str) -> None:
    folder = cache.parent
    (folder / "obj").mkdir()
    for name in ("obj/a.o", "build.ninja"):
        (folder / name).touch()
    require_trusted_tree(folder)
    (folder / place).chmod(0o777)
    require_trusted(cache)
    with pytest.raises(UntrustedCacheError, match=f"{folder / place} is writable by everybody"):
        require_trusted_tree(folder)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


@needs_root
def test_in_a_folder_of_all_the_next_entry_must_be_this_users(cache: Path) -> None:
    """Such a folder is ``/tmp``."""
    shared = cache.parents[2]
    shared.chmod(0o1777)
    require_trusted(cache)
    os.chown(cache.parents[1], ANOTHER, ANOTHER)
    with pytest.raises(UntrustedCacheError, match=f"{cache.parents[1]} belongs to user {ANOTHER}"):
        require_trusted(cache)
    os.chown(cache.parents[1], 0, 0)
    require_trusted(cache)
    os.chown(shared, ANOTHER, 0)
    with pytest.raises(UntrustedCacheError, match=f"{shared} belongs to user {ANOTHER}"):
        require_trusted(cache)


@needs_root
def test_root_made_a_folder_in_a_folder_of_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd's PrivateTmp makes such a folder. A file of root's could be a hard link, which anybody may make there; a
    folder cannot."""
    cache.parents[2].chmod(0o1777)
    for path in (cache, cache.parent):
        os.chown(path, ANOTHER, ANOTHER)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: ANOTHER)
        require_trusted(cache)
        os.chown(cache.parents[1], ANOTHER + 1, ANOTHER)
        with pytest.raises(UntrustedCacheError, match=f"{cache.parents[1]} belongs to user {ANOTHER + 1}"):
            require_trusted(cache)
        os.chown(cache.parents[1], ANOTHER, ANOTHER)
        (cache.parents[2] / "link.so").hardlink_to(__file__)
        with pytest.raises(UntrustedCacheError, match=r"link\.so belongs to user 0"):
            require_trusted(cache.parents[2] / "link.so")


WITHOUT_ROOT = """
import ctypes, os, sys
from pathlib import Path
from flashinfer.jit.sm12x import modules
from flashinfer_sm12x.build import trust
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([])
os.setresgid(*[user := int(sys.argv[1])] * 3)
os.setresuid(user, user, user)
libc.prctl(4, 1)  # PR_SET_DUMPABLE: else its files in /proc are root's
if libc.unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit(f"no namespace: {os.strerror(ctypes.get_errno())}")
Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
trust._root_outside.cache_clear()  # it was asked when the package was imported
assert os.stat("/").st_uid == 65534 != os.geteuid() == os.stat(sys.argv[2]).st_uid
trust.require_trusted(Path(sys.argv[2]))
try:
    trust.require_trusted(Path(sys.argv[3]))
except RuntimeError as error:
    print(error)
"""


@needs_root
def test_in_a_namespace_without_root_its_folders_are_nobodys() -> None:
    """As in Apptainer: what others left in ``/tmp`` is refused all the same."""
    with tempfile.TemporaryDirectory(dir="/tmp") as own, tempfile.TemporaryDirectory(dir="/tmp") as theirs:
        os.chown(own, ANOTHER, ANOTHER)
        os.chown(theirs, ANOTHER + 1, ANOTHER + 1)
        command = [sys.executable, "-c", WITHOUT_ROOT, str(ANOTHER), own, theirs]
        result = subprocess.run(command, capture_output=True, text=True)
        if "no namespace" in result.stderr:
            pytest.skip(result.stderr)
        assert result.returncode == 0, result.stderr
        assert f"{theirs} belongs to user 65534" in result.stdout


@needs_root
def test_links_are_followed_by_hand(cache: Path, tmp_path: Path) -> None:
    """Each link, and each folder on the way that it leads, counts as the path's own."""
    way = tmp_path / "way"
    way.mkdir()
    (way / "relative").symlink_to("../base/./cache")
    (way / "absolute").symlink_to(way / "relative")
    require_trusted(way / "absolute" / "m.so")
    os.chown(way / "relative", ANOTHER, ANOTHER, follow_symlinks=False)
    with pytest.raises(UntrustedCacheError, match=f"{way / 'relative'} belongs to user {ANOTHER}"):
        require_trusted(way / "absolute" / "m.so")
    os.chown(way / "relative", 0, 0, follow_symlinks=False)
    (tmp_path / "base").chmod(0o777)
    with pytest.raises(UntrustedCacheError, match=f"{tmp_path / 'base'} is writable by everybody"):
        require_trusted(way / "absolute" / "m.so")
    (tmp_path / "base").chmod(0o755)
    # A link in a folder of all leads beside itself: what lies there must be this user's, too.
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to("theirs")
    (shared / "theirs").mkdir()
    require_trusted(shared / "link")
    os.chown(shared / "theirs", ANOTHER, ANOTHER)
    with pytest.raises(UntrustedCacheError, match=f"theirs belongs to user {ANOTHER}"):
        require_trusted(shared / "link")
    (way / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        require_trusted(way / "round")


@needs_root
def test_the_owners_own_group_may_write(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = {0: SimpleNamespace(pw_name="ann", pw_gid=8001)}
    groups = {
        8001: SimpleNamespace(gr_name="ann", gr_mem=[]),
        8002: SimpleNamespace(gr_name="ann", gr_mem=[]),
        8003: SimpleNamespace(gr_name="staff", gr_mem=["ann"]),
    }
    monkeypatch.setattr(pwd, "getpwuid", accounts.__getitem__)
    monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)
    everybody: list[SimpleNamespace] = [SimpleNamespace(pw_name="ann", pw_gid=8001)]
    monkeypatch.setattr(pwd, "getpwall", lambda: everybody)
    folder = cache.parent
    folder.chmod(0o775)
    os.chown(folder, 0, 8001)
    require_trusted(cache)
    groups[8001].gr_mem = ["ann"]
    require_trusted(cache)
    everybody.append(SimpleNamespace(pw_name="bot", pw_gid=8001))
    with pytest.raises(UntrustedCacheError, match=f"{folder} is writable by group 8001"):
        require_trusted(cache)
    everybody.pop()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"] if path == str(folder) else [])
        with pytest.raises(UntrustedCacheError, match=f"{folder} has an access control list"):
            require_trusted(cache)
    groups[8001].gr_mem = ["ann", "bob"]
    for group in (8001, 8002, 8003, 8004):
        os.chown(folder, 0, group)
        with pytest.raises(UntrustedCacheError, match=f"{folder} is writable by group {group}"):
            require_trusted(cache)
    accounts[0].pw_gid = 8003
    os.chown(folder, 0, 8003)
    with pytest.raises(UntrustedCacheError, match=f"{folder} is writable by group 8003"):
        require_trusted(cache)


def test_as_many_links_are_followed_as_linux_follows(cache: Path) -> None:
    link = cache
    for number in range(41):
        link, target = cache.with_name(f"link{number}"), link
        link.symlink_to(target)
    require_trusted(cache.with_name("link39"))
    assert cache.with_name("link39").read_bytes() == b""
    for use in (require_trusted, Path.read_bytes):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            use(link)


def test_folders_are_private_whatever_the_umask_is(tmp_path: Path) -> None:
    with umask(0):
        make_folder(tmp_path / "a" / "b")
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


@pytest.mark.parametrize(("name", "message"), [("a$b", r"a \$,"), ("a b", "a space,")])
def test_a_cache_that_upstreams_build_files_do_not_quote(name: str, message: str, workspace: Path) -> None:
    message = "a space," if " " in str(workspace) else message  # the first that is found is told
    odd = workspace / name
    with pytest.raises(JitBuildError, match=f"the cache path holds {message}"):
        cpp_ext.run_ninja(odd, odd / "build.ninja", False)


IN_A_MODULE = ("obj", "obj/*", "obj/*/a.o", "build.ninja", "digests.json", ".ninja_log", "demo-*.so")


@needs_root
@pytest.mark.parametrize("what", [*(f"demo/{name}" for name in IN_A_MODULE), "tmp"])
def test_what_another_user_left_in_a_module_or_among_locks_is_not_used(project: Project, what: str) -> None:
    project.build()
    (project.cache / "demo" / "digests.json").touch()
    place, *_ = project.cache.glob(what)
    os.chown(place, ANOTHER, ANOTHER)
    project.write("c.cu", "int another;\n")
    with pytest.raises(UntrustedCacheError, match=f"{place} belongs to user {ANOTHER}"):
        project.build()


@needs_nvcc
@needs_root
@pytest.mark.parametrize("name", ["small.cu", "answer.h"])
def test_a_generated_source_and_what_lies_beside_it_of_another_user_are_not_compiled(
    name: str, workspace: Path
) -> None:
    """``#include "..."`` finds what lies beside it first."""
    spec = small_spec(jit_env.FLASHINFER_GEN_SRC_DIR)
    plain = core.gen_jit_spec("plain", [spec.sources[0]])
    os.chown(spec.sources[0].with_name(name), ANOTHER, ANOTHER)
    for each in (spec, plain):
        with pytest.raises(UntrustedCacheError, match=f"{name} belongs to user {ANOTHER}"):
            each.build(need_lock=True)


@needs_nvcc
@pytest.mark.parametrize("mask", [0o000, 0o002])
def test_a_build_is_private_whatever_the_umask_is(mask: int, workspace: Path) -> None:
    with umask(mask):
        spec = small_spec(workspace)
        spec.build(need_lock=True)
    modes = {path.name: path.stat().st_mode for path in (spec.build_dir, *spec.build_dir.rglob("*"), spec.lock_path)}
    assert not {name: oct(mode) for name, mode in modes.items() if mode & 0o022}
    assert modes["small.lock"] & 0o077 == 0
    require_trusted_tree(spec.build_dir)


@pytest.mark.usefixtures("upstream_builds_here")
def test_upstreams_compilers_have_a_folder_of_their_own(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in /tmp, where others could guess the names of nvcc's files."""
    folder = workspace / "cached_ops" / "norm"
    folder.mkdir(parents=True)
    ninja_file = folder / "build.ninja"
    ninja_file.write_text("rule say\n command = touch $out && echo $$TMPDIR > $out\nbuild said: say\n")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    with umask(0):
        cpp_ext.run_ninja(folder, ninja_file, False)
    message = Path((folder / "said").read_text().strip())
    assert message.parent == folder
    assert not message.exists()
    assert (folder / "said").stat().st_mode & 0o777 == 0o644
    assert os.environ["TMPDIR"] == "/elsewhere"


@pytest.mark.usefixtures("upstream_builds_here")
def test_a_builders_end_is_the_end_of_upstreams_compilers(workspace: Path) -> None:
    """The build file's command writes its number, and waits longer than the test would."""
    folder = workspace / "cached_ops" / "norm"
    folder.mkdir(parents=True)
    ninja_file, number = folder / "build.ninja", folder / "number"
    ninja_file.write_text("rule wait\n command = echo $$$$ > new && mv new number && sleep 10000\nbuild said: wait\n")
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            cpp_ext.run_ninja(folder, ninja_file, False)
        finally:
            os._exit(1)
    while not number.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    compiler = Path("/proc", number.read_text().strip())
    deadline = time.monotonic() + 120
    while compiler.exists():
        if time.monotonic() > deadline:
            os.kill(int(compiler.name), signal.SIGKILL)
            pytest.fail("it goes on")
        time.sleep(0.02)


@needs_nvcc
@needs_root
def test_libraries_to_link_against_that_another_user_left_are_not_used(workspace: Path) -> None:
    folder = workspace / "toolchain" / "link-1"
    folder.mkdir(parents=True)
    os.chown(folder, ANOTHER, ANOTHER)
    with pytest.raises(UntrustedCacheError, match=f"{folder} belongs to user {ANOTHER}"):
        cpp_ext.toolkit_link_flags()


@needs_nvcc
@pytest.mark.usefixtures("upstream_builds_here")
def test_upstreams_module_is_private_and_not_loaded_where_others_write(workspace: Path) -> None:
    source = workspace / "plain.cpp"
    source.write_text('extern "C" int f() { return 1; }\n')
    with umask(0o002):
        spec = core.gen_jit_spec("plain", [source])
        spec.build(need_lock=True)
    assert spec.build_dir.stat().st_mode & 0o022 == 0
    spec.load()
    spec.build_dir.chmod(0o777)
    with pytest.raises(UntrustedCacheError, match="plain is writable by everybody"):
        spec.load()
    with pytest.raises(UntrustedCacheError, match="plain is writable by everybody"):
        spec.build(need_lock=True)


def test_compilers_leave_nothing_outside_the_build(project: Project, tmp_path: Path) -> None:
    """Their files are in the module's folder, those of a builder that was killed until the next build."""
    project.change_compiler("text = open(source).read()", 'import tempfile; tempfile.mkstemp(prefix="left-")\n')
    left = project.plan().folder / "tmp" / "of a builder that was killed"
    left.mkdir(parents=True)
    before = set(Path(tempfile.gettempdir()).iterdir())
    project.build()
    assert not {path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if path.name.startswith("left-")}
    assert not left.parent.exists()


WITHOUT_OVERRIDE = """
import ctypes, os
if os.geteuid() == 0:
    data = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0
    for word in (0, 1):  # effective, permitted
        data[word] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
    assert libc.capset(header, data) == 0
    assert libc.prctl(24, 1, 0, 0, 0) == 0  # PR_CAPBSET_DROP: programs that it starts do not get it back
"""
"""Takes root's power over modes away, so that a folder that may not be written cannot be."""


def _run(code: str, base: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", WITHOUT_OVERRIDE + code, *map(str, arguments)], base, **variables)


def _set_writable(folder: Path, writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if writable and path.is_dir() else 0o644 if writable else 0o555 if path.is_dir() else 0o444)


USE_SMALL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from flashinfer_sm12x.build import engine
from jit_fakes import small_spec
from flashinfer.jit import env
spec = small_spec(Path(sys.argv[2]) if len(sys.argv) < 5 else env.FLASHINFER_GEN_SRC_DIR)
if sys.argv[3] == "build":
    spec.build(need_lock=True)
module = spec.try_load()
print(module and module.answer(), engine.find_library(spec.plan))
"""


@needs_nvcc
@pytest.mark.parametrize("generated", [False, True], ids=["", "generated"])
def test_prebuilt_cache_that_can_only_be_read_is_used(generated: bool, tmp_path: Path) -> None:
    """Also for a source that is generated, which lies elsewhere then."""
    base, temporary = tmp_path / "base", tmp_path / "tmp"
    temporary.mkdir()
    here = Path(__file__).parent

    def run(what: str) -> subprocess.CompletedProcess[str]:
        return _run(USE_SMALL, base, here, tmp_path, what, *["generated"] * generated, TMPDIR=str(temporary))

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
        sources = next(temporary.rglob("generated")) if generated else tmp_path
        (sources / "src" / "answer.h").write_text("#define ANSWER 42\n")
        assert run("load").stdout == "None None\n"
        if not generated:
            again = run("build")
            assert again.stdout.startswith(f"42 {temporary}/flashinfer-{os.geteuid()}/"), again.stderr
        assert sorted(base.rglob("*")) == before
    finally:
        _set_writable(base, True)


@pytest.mark.parametrize(("mapped", "who"), [("0 0 4294967295", 0), ("1000 1000 1", 65534), ("0 100000 65536", 0)])
def test_who_roots_files_seem_to_belong_to(mapped: str, who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rootless container, the last one, has a user 65534 of its own."""
    texts = {"/proc/self/uid_map": mapped, "/proc/sys/kernel/overflowuid": "65534"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert trust._root_outside.__wrapped__() == who


@needs_root
@pytest.mark.parametrize("what", ["generated/silu_and_mul.cu", "flashinfer_jit.log", "cached_ops"])
def test_a_workspace_that_another_user_prepared_is_left_alone(what: str, tmp_path: Path) -> None:
    """Links in it would choose what is overwritten, before any module is loaded."""
    workspace = tmp_path / ".cache" / "flashinfer" / "0.7.2.post1" / "121a"
    (workspace / "generated").mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.write_text("of root")
    (workspace / what).symlink_to(precious)
    for path in (tmp_path / ".cache").rglob("*"):
        os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
    before = sorted(tmp_path.rglob("*"))
    code = (
        "import logging; from flashinfer.jit import activation, core, env; activation.gen_act_and_mul_module('silu')\n"
        "core.logger.warning('a line'); print(env.FLASHINFER_GEN_SRC_DIR)"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        result = _run(code, tmp_path, TMPDIR=temporary)
        assert result.returncode == 0, result.stderr
        assert f"belongs to user {ANOTHER}" in result.stderr
        assert f"modules are built in {temporary}/" in result.stderr
        assert result.stdout.startswith(f"{temporary}/flashinfer-{os.geteuid()}/")
        assert list(Path(result.stdout.strip()).rglob("silu_and_mul.cu"))
    assert precious.read_text() == "of root"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("mask", [0o000, 0o002])
def test_what_upstream_generates_is_private_whatever_the_umask_is(mask: int, workspace: Path) -> None:
    with umask(mask):
        spec = activation.gen_act_and_mul_module("silu")
    assert len(spec.sources) > 0
    core.require_trusted_sources(spec.sources)


def test_a_working_directory_that_is_gone_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    require_trusted(tmp_path)


@pytest.mark.parametrize("what", ["link", "pipe", "device"])
def test_a_log_that_is_no_file_is_not_opened(what: str, tmp_path: Path) -> None:
    """A pipe without a reader would hold the import for ever, and a link choose the file that lines are added to."""
    workspace = tmp_path / ".cache" / "flashinfer" / "0.7.2.post1" / "121a"
    workspace.mkdir(parents=True)
    log, target = workspace / "flashinfer_jit.log", tmp_path / "precious"
    target.touch()
    if what == "link":
        log.symlink_to(target)
    elif what == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to("/dev/full")
    result = _run("import flashinfer", tmp_path)
    assert f"the FlashInfer cache {workspace} cannot be written" in result.stderr
    assert not target.read_bytes()


class _Kernel:
    """A kernel as CuTe-DSL compiled it."""

    def export_to_c(self, path: str, function_name: str) -> None:
        assert Path(path).parent.stat().st_mode & 0o077 == 0
        Path(path).write_text(function_name)


def test_objects_of_cute_dsl_are_private_and_not_loaded_where_others_write(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute_dsl_core, "_get_compile_arch", lambda: "sm_121a")
    monkeypatch.setattr(cute_dsl_core, "_get_cute_dsl_version", lambda: "4")
    monkeypatch.setattr(cute_dsl_core._JitSpecCuteDsl, "_load_from_disk", lambda spec: spec.object_path.read_text())
    (workspace / "cached_ops").mkdir()
    spec = cute_dsl_core.JitSpecCuteDsl("norm", "rms", _Kernel, "0123")
    assert spec.try_load() is None
    with umask(0):
        assert spec.build_and_load() == "norm_rms"
    assert spec.try_load() == "norm_rms"
    assert [path.stat().st_mode & 0o777 for path in (spec.module_dir, spec.object_path, spec.meta_path)] == [
        0o755,
        0o644,
        0o644,
    ]
    for place in (spec.object_path, spec.meta_path, spec.module_dir, spec.module_dir.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        for function in (spec.try_load, spec.build_and_load):
            with pytest.raises(UntrustedCacheError, match=f"{place.name} is writable by everybody"):
                function()
        place.chmod(mode)
    spec.object_path.chmod(0o646)
    with pytest.raises(UntrustedCacheError, match=r"rms.o is writable by everybody"):
        spec.load()


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


@pytest.fixture
def waits() -> Iterator[None]:
    """Ends a test that waits for a pipe's other end."""

    def end(*_: object) -> None:
        raise AssertionError("it waits for a pipe that nobody writes to")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


PIPES = ("build.ninja", "digests.json", "spills.json", "build.log", ".ninja_log", "obj/a.o")


@needs_nvcc
@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("whose", ["this family's", "upstream's"])
@pytest.mark.usefixtures("waits")
def test_a_pipe_in_a_modules_folder_is_named_with_what_removes_it(whose: str, name: str, workspace: Path) -> None:
    if whose == "upstream's":
        spec = activation.gen_act_and_mul_module("silu")
        folder, use = spec.build_dir, spec.write_ninja
    else:
        spec = small_spec(workspace)
        folder, use = spec.plan.folder, lambda: small_spec(workspace).plan
    pipe = folder / name
    pipe.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    os.mkfifo(pipe)
    with pytest.raises(UntrustedCacheError, match=re.escape(f"{pipe} is no file and no folder")) as error:
        use()
    command = str(error.value).rpartition("Remove it: ")[2]
    subprocess.run(["/bin/sh", "-ec", command], check=True)
    use()


@pytest.mark.usefixtures("waits")
def test_a_pipe_in_place_of_a_probes_file_is_reported(workspace: Path) -> None:
    pipe = Path(jit_env.FLASHINFER_WORKSPACE_DIR) / modules.PROBE_FILE
    pipe.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=rf"{re.escape(str(pipe))} is not what a probe writes .*no file.* remove it"):
        modules.probed_sum_bits("mxf4")


@pytest.mark.usefixtures("waits")
def test_a_pipe_is_replaced_by_what_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "source.cu")
    trust.write_atomically(tmp_path / "source.cu", "int x;")
    assert (tmp_path / "source.cu").read_text() == "int x;"
