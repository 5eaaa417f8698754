# SPDX-License-Identifier: Apache-2.0
"""Finds the CUDA compiler, its headers and its libraries.

Three kinds of toolkit are understood:

- a toolkit as NVIDIA's installers lay it out (``bin/``, ``include/``, ``lib64/``),
- a distribution's (``/usr/bin/nvcc`` with headers in ``/usr/include``),
- the wheels of PyPI (``site-packages/nvidia/cu13``): ``bin/`` and ``include/``, but ``lib/`` in place of
  ``lib64/``, versioned libraries only (``libcudart.so.13``, no ``libcudart.so``), and no stub of the driver.

The first of these that exists is used: ``CUDA_HOME``, ``CUDA_PATH``, ``FLASHINFER_NVCC``'s own, ``nvcc`` on ``PATH``,
``/usr/local/cuda``, the wheels. The wheels come last because pip puts pieces of different releases side by side, and
because vLLM and upstream look in the other places, in this order. A toolkit that cannot compile is passed over: its
compiler is too old, or lies beside headers or pieces of another release. The doctor and vLLM's
plugin ask here, too.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.version import Version

COMPILER_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
"""The pieces of which a compiler is made: driver and assembler, headers it generates calls for, code generator,
runtime. No mixture of 13.0's and 13.5's compiles a kernel, and pip's requirements do not tie them to each other."""


OWN_RELEASE = "13.0"
"""The release of the toolkit in ``requirements-cuda.txt``, this project's extra ``cuda``."""


def checkout() -> tuple[Path, bool] | None:
    """The folder that pip can install this fork from, and whether it is installed editable; None if it is gone."""
    tree, editable = Path(__file__).resolve().parents[2], False
    for found in importlib.metadata.distributions(name="flashinfer-sm12x"):
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # not installed from a folder
            about = json.loads(found.read_text("direct_url.json") or "")
            source = Path(url2pathname(urlsplit(about["url"]).path)).resolve()
            if not _is_checkout(tree):
                tree = source
            editable = bool(about["dir_info"].get("editable")) and source == tree
        break
    return (tree, editable) if _is_checkout(tree) else None


def _is_checkout(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("pyproject.toml", "requirements-cuda.txt"))


def pip_command(release: str = OWN_RELEASE) -> str:
    """The command that installs a toolkit that this package can use, all of one release, without root.

    For :data:`OWN_RELEASE` it is README's, the extra ``cuda`` of the checkout. Other releases, and a fork whose
    checkout is gone, need the pieces by their names.
    """
    if release == OWN_RELEASE and (found := checkout()) is not None:
        folder, editable = found
        return f"pip install {'-e ' * editable}{shlex.quote(f'{folder}[cuda]')}"
    return " ".join(["pip install", *(f'"{name}=={release}.*"' for name in COMPILER_WHEELS), "nvidia-curand"])


PIP_COMMAND = pip_command()

DEFAULT_ROOT = Path("/usr/local/cuda")
"""The folder in which NVIDIA's installers put the toolkit; used when nothing else names one."""

_MINIMUM_VERSION = "12.8"
"""Oldest toolkit: the first with compute capability 12.0, and with the compiler's flags that modules use."""

_LATER_VERSIONS: Mapping[tuple[int, str], str] = {(12, "1a"): "12.9", (12, "0f"): "12.9", (12, "1f"): "12.9"}
"""Architectures that came after it (release notes of CUDA 12.9)."""

COMPANION_HEADERS: Mapping[str, str] = {
    "curand_kernel.h": "nvidia-curand",
    "cublas_v2.h": "nvidia-cublas",
    "cublasLt.h": "nvidia-cublas",
    "nvrtc.h": "nvidia-cuda-nvrtc",
    "cusparse.h": "nvidia-cusparse",
    "cusolverDn.h": "nvidia-cusolver",
    "cupti.h": "nvidia-cuda-cupti",
    "nvtx3/nvToolsExt.h": "nvidia-nvtx",
}
"""Headers that FlashInfer's sources include and a bare toolkit may lack -> the wheel that has them."""


class ToolchainError(RuntimeError):
    """No usable CUDA compiler: none found, a broken one named, one beside headers or pieces of another release, or one
    too old for the architecture."""


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit.

    Attributes:
        root: The folder that ``CUDA_HOME`` would name.
        nvcc: The compiler driver; ``FLASHINFER_NVCC``, if that is set.
        origin: The way it was found, for messages: ``CUDA_HOME``, ``CUDA_PATH``, ``FLASHINFER_NVCC``, ``PATH``,
            ``default``, ``pip``.
        include_dirs: Its own header folder first, then those of wheels that hold what it lacks.
        library_dirs: Existing folders with its libraries, in search order.
        passed_over: Toolkits that come before it but cannot compile, with the reasons.
    """

    root: Path
    nvcc: Path
    origin: str
    include_dirs: tuple[Path, ...] = field(default=())
    library_dirs: tuple[Path, ...] = field(default=())
    passed_over: tuple[str, ...] = field(default=())

    @property
    def version(self) -> Version:
        """The toolkit's version, e.g. ``13.0``, as ``nvcc --version`` gives it."""
        text = compiler_banner(self.nvcc)
        match = re.search(r"release (\d+\.\d+)", text)
        if match is None:
            raise ToolchainError(f"{self.nvcc} --version names no CUDA release; it printed: {text.strip()[:200]!r}")
        return Version(match.group(1))

    @property
    def compiler_root(self) -> Path:
        """The toolkit to which the compiler belongs; it differs from ``root`` if a variable names only the compiler."""
        return self.root if self.nvcc == self.root / "bin" / "nvcc" else _root_of(self.nvcc)

    @property
    def runtime_header(self) -> Path:
        """``cuda_runtime_api.h`` as the compiler finds it, whose own toolkit comes first; where it ought to be if it is
        not there."""
        roots = dict.fromkeys([self.compiler_root, self.root])
        folders = [folder for root in roots for folder in (root / "include", root / "targets" / _target() / "include")]
        headers = [folder / "cuda_runtime_api.h" for folder in folders]
        return next(filter(Path.is_file, headers), headers[0])

    def find_library(self, stem: str) -> Path:
        """The shared library ``lib<stem>.so`` or its newest versioned file.

        Raises:
            ToolchainError: no folder of the toolkit holds it.
        """
        for folder in self.library_dirs:
            plain = folder / f"lib{stem}.so"
            if plain.exists():
                return plain
            versioned = sorted(folder.glob(f"lib{stem}.so.*"), key=lambda path: len(path.name))
            if versioned:
                return versioned[0]
        searched = ", ".join(map(str, self.library_dirs)) or "none"
        raise ToolchainError(
            f"the CUDA toolkit {self.root} has no lib{stem}.so (folders searched: {searched}). "
            f"Install the missing part, or all of it: {PIP_COMMAND}"
        )


@cache
def compiler_banner(compiler: Path | str) -> str:
    """The output of ``<compiler> --version``. Asked once per process and compiler."""
    try:
        result = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{compiler} --version failed: {error}") from error
    return result.stdout


def find_ninja() -> str:
    """The program: of this Python environment, else on ``PATH``.

    Raises:
        ToolchainError: it is not installed.
    """
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if found is None:
        raise ToolchainError("ninja, which runs the compilers, is not installed. Install it: pip install ninja")
    return found


def wheel_folders() -> list[Path]:
    """The ``nvidia`` folders of every site-packages on ``sys.path``: where CUDA's wheels unpack."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]


def discover(
    environ: Mapping[str, str] | None = None,
    wheels: Sequence[Path] | None = None,
    default_root: Path | None = None,
) -> Toolkit:
    """Find the CUDA toolkit.

    Args:
        environ: The environment to read; the process's own when omitted.
        wheels: Folders to search for CUDA's wheels; those on ``sys.path`` when omitted.
        default_root: The folder to try if no variable names a toolkit; :data:`DEFAULT_ROOT` when omitted.

    Raises:
        ToolchainError: ``CUDA_HOME``, ``CUDA_PATH`` or ``FLASHINFER_NVCC`` names a toolkit that cannot compile, or
            there is no toolkit; the message says what disagrees or where it looked, and gives the command that installs
            one.
    """
    environ = os.environ if environ is None else environ
    wheels = wheel_folders() if wheels is None else wheels
    default_root = DEFAULT_ROOT if default_root is None else default_root
    needed = _needed_version(environ)
    driver = _named_driver(environ)
    for variable in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"):
        if not environ.get(variable):
            continue
        root = _root_of(driver) if variable == "FLASHINFER_NVCC" and driver else Path(environ[variable])
        if not driver and not _is_executable(root / "bin" / "nvcc"):
            raise ToolchainError(
                f"{variable}={environ[variable]} holds no bin/nvcc. Point it at a CUDA toolkit of {_MINIMUM_VERSION} "
                f"or later, or unset it to use nvcc on PATH or the one that this installs: {PIP_COMMAND}"
            )
        toolkit = _toolkit(root, variable, wheels, driver)
        if reason := _why_unusable(toolkit, needed):
            raise ToolchainError(
                f"{variable}={environ[variable]}: {reason}. Point it at another toolkit, or unset it to use nvcc on "
                f"PATH or the one that this installs: {_fix([toolkit], needed)}"
            )
        return toolkit
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    places = [(_root_of(Path(on_path)), "PATH")] if on_path is not None else []
    if _is_executable(default_root / "bin" / "nvcc"):
        places.append((default_root, "default"))
    places += [(root, "pip") for root in _wheel_toolkits(wheels)]
    passed_over: dict[str, Toolkit] = {}
    for root, origin in places:
        toolkit = _toolkit(root, origin, wheels)
        reason = _why_unusable(toolkit, needed)
        if not reason:
            return replace(toolkit, passed_over=tuple(passed_over))
        passed_over[reason] = toolkit
    if not passed_over:
        raise ToolchainError(
            f"no CUDA compiler found: CUDA_HOME and CUDA_PATH are not set, nvcc is not on PATH, {default_root} has "
            f"none, and no wheel brings one. Install one with: {PIP_COMMAND}"
        )
    command = _fix(passed_over.values(), needed)
    raise ToolchainError(f"no CUDA compiler can be used: {'; '.join(passed_over)}. Install one that can: {command}")


def _named_driver(environ: Mapping[str, str]) -> Path | None:
    """The program that ``FLASHINFER_NVCC`` names.

    Raises:
        ToolchainError: there is none.
    """
    name = environ.get("FLASHINFER_NVCC")
    if not name:
        return None
    found = shutil.which(name, path=environ.get("PATH", ""))
    if found is None:
        raise ToolchainError(
            f"FLASHINFER_NVCC={name} is not a program. Correct it, or unset it to use the toolkit's nvcc"
        )
    return Path(found)


def _needed_version(environ: Mapping[str, str]) -> Version:
    """The oldest toolkit that knows all that ``FLASHINFER_CUDA_ARCH_LIST`` names."""
    listed = re.findall(r"\b(\d+)\.(\d[af]?)", environ.get("FLASHINFER_CUDA_ARCH_LIST", ""))
    return max(map(_version_for, ((int(major), minor) for major, minor in listed)), default=Version(_MINIMUM_VERSION))


def _version_for(architecture: tuple[int, str]) -> Version:
    return Version(_LATER_VERSIONS.get(architecture, _MINIMUM_VERSION))


def _why_unusable(toolkit: Toolkit, needed: Version) -> str:
    """The reason why a toolkit cannot compile; empty if it can.

    The headers of CUDA's C++ library (``cuda/std/__cccl/cuda_toolkit.h``) refuse a compiler whose release differs from
    ``CUDART_VERSION``. Upstream's modules include them. This fork's do not, and without this check two releases would
    mix.
    """
    try:
        release = toolkit.version
    except ToolchainError as error:
        return str(error)
    if release < needed:
        return f"{toolkit.nvcc} is of CUDA {release}, but {needed} or later is needed"
    root = toolkit.compiler_root
    pieces = _wheels_of(root)
    driver, *_ = COMPILER_WHEELS
    for name, version in pieces.items():
        if version is None:
            return f"{name} is missing beside {driver} {pieces[driver]} in {root}"
        if version.release[:2] != release.release[:2]:
            return f"{driver} {pieces[driver]} and {name} {version} in {root} disagree"
    header = toolkit.runtime_header
    headers = _release_of(header)
    if headers is None:
        return f"{toolkit.nvcc} has no headers: {header} is missing"
    if headers != release:
        return f"{toolkit.nvcc} is of CUDA {release}, but {header} of {headers}"
    return ""


def _wheels_of(root: Path) -> dict[str, Version | None]:
    """The versions of :data:`COMPILER_WHEELS`, if pip put the compiler there; None for one that is missing."""
    root = root.resolve()
    if root.parent.name != "nvidia":
        return {}
    found: dict[str, Version | None] = {}
    for name in COMPILER_WHEELS:
        distributions = importlib.metadata.distributions(name=name, path=[str(root.parents[1])])
        found[name] = next((Version(each.version) for each in distributions), None)
    return found if found[COMPILER_WHEELS[0]] else {}


def _release_of(header: Path) -> Version | None:
    """The release that ``CUDART_VERSION`` in ``cuda_runtime_api.h`` states; None if the header is not there."""
    try:
        match = re.search(r"^\s*#\s*define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return Version(f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}") if match else None


def _fix(toolkits: Iterable[Toolkit], needed: Version) -> str:
    """The command that installs what can be used where these cannot: the compiler for the headers that a torch
    brought."""
    for toolkit in toolkits:
        headers = _release_of(toolkit.runtime_header)
        if _wheels_of(toolkit.compiler_root) and headers is not None and headers >= needed:
            return pip_command(str(headers))
    return PIP_COMMAND


def require_architectures(toolkit: Toolkit, architectures: Iterable[tuple[int, str]]) -> None:
    """Check that the toolkit knows every architecture.

    Args:
        toolkit: The toolkit.
        architectures: ``(major, minor with suffix)``, as in ``CompilationContext.TARGET_CUDA_ARCHS``.

    Raises:
        ToolchainError: it is too old for one of them; the message names both versions.
    """
    for major, minor in sorted(architectures):
        needed = _version_for((major, minor))
        if toolkit.version < needed:
            raise ToolchainError(
                f"building for compute capability {major}.{minor} needs CUDA {needed} or later, but {toolkit.nvcc} "
                f"(found through {toolkit.origin}) is {toolkit.version}. Install a newer one: {PIP_COMMAND}"
            )


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _wheel_toolkits(wheels: Sequence[Path]) -> list[Path]:
    """Folders ``nvidia/cu<major>`` that hold a compiler, newest first."""
    found = [root for folder in wheels for root in folder.glob("cu[0-9]*") if _is_executable(root / "bin" / "nvcc")]
    return sorted(found, key=lambda root: int(re.sub(r"\D", "", root.name)), reverse=True)


def _root_of(nvcc: Path) -> Path:
    """The toolkit of an ``nvcc`` on PATH, which may be a link or a script that runs another one."""
    for candidate in (nvcc.parent.parent, nvcc.resolve().parent.parent):
        if _has_runtime_header(candidate):
            return candidate
    try:
        plan = subprocess.run([str(nvcc), "--dryrun", "-c", "x.cu"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return nvcc.parent.parent
    match = re.search(r"^#\$ TOP=(.+)$", plan.stderr + plan.stdout, re.MULTILINE)
    if match is not None:
        top = Path(os.path.normpath(match.group(1).strip()))
        if _has_runtime_header(top) and _is_executable(top / "bin" / "nvcc"):
            return top
    return nvcc.parent.parent


def _target() -> str:
    """NVIDIA's name for this kind of machine."""
    return f"{'sbsa' if os.uname().machine == 'aarch64' else os.uname().machine}-linux"


def _has_runtime_header(root: Path) -> bool:
    return (root / "include" / "cuda_runtime.h").is_file()


def _toolkit(root: Path, origin: str, wheels: Sequence[Path], driver: Path | None = None) -> Toolkit:
    toolkit = Toolkit(root, driver or root / "bin" / "nvcc", origin)
    companions = _companion_roots(toolkit, wheels)
    missing = [header for header in COMPANION_HEADERS if not (root / "include" / header).is_file()]
    includes = [companion / "include" for companion in companions]
    includes = [folder for folder in includes if any((folder / header).is_file() for header in missing)]
    libraries = [root / "lib64", root / "lib", root / "targets" / _target() / "lib"]
    libraries += [companion / "lib" for companion in companions]
    return replace(
        toolkit,
        include_dirs=tuple(dict.fromkeys([root / "include", *includes])),
        library_dirs=tuple(dict.fromkeys(folder for folder in libraries if any(folder.glob("lib*")))),
    )


def _companion_roots(toolkit: Toolkit, wheels: Sequence[Path]) -> list[Path]:
    """Folders of wheels whose headers and libraries are of the toolkit's major version."""
    try:
        major = toolkit.version.major
    except ToolchainError:
        return []
    roots = []
    for folder in wheels:
        roots.append(folder / f"cu{major}")
        if major == 12:  # the wheels of CUDA 12 have a folder per library
            libraries = sorted(path.parent for path in folder.glob("*/include"))
            roots += [library for library in libraries if not re.fullmatch(r"cu\d+", library.name)]
    return [root for root in roots if (root / "include").is_dir() and root != toolkit.root]


def link_shim(toolkit: Toolkit, parent: Path, cxx: str = "c++") -> Path:
    """A folder that makes ``-lcudart -lcuda -lnvrtc ...`` resolve for a toolkit without link names.

    It holds ``lib<x>.so`` for every library of which the toolkit has only the versioned file, and, if the toolkit has
    no stub of the driver, a ``libcuda.so`` made here: it carries the driver's SONAME and exports every name that
    ``cuda.h`` declares, and none of its code is ever run. It is a link to a file that is named by its content's hash,
    by which damage is seen.

    Args:
        toolkit: The toolkit.
        parent: The folder in which it is made (in the cache): once, and again when a link is broken or the stub
            damaged.
        cxx: The host compiler that makes the stub.

    Returns:
        The folder, for ``-L``.

    Raises:
        ToolchainError: the host compiler cannot make the stub.
        OSError: the folder cannot be written.
    """
    links = _missing_link_names(toolkit)
    needs_stub = not any((folder / "stubs" / "libcuda.so").exists() for folder in toolkit.library_dirs)
    key = hashlib.sha256(
        "\n".join([str(toolkit.root), str(needs_stub), *(f"{k}={v}" for k, v in sorted(links.items()))]).encode()
    ).hexdigest()[:12]
    shim = parent / f"link-{key}"
    if all((shim / name).exists() for name in links) and (_whole_stub(shim) if needs_stub else shim.is_dir()):
        return shim
    parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".link-") as scratch:
        folder = Path(scratch)
        if needs_stub:
            _make_driver_stub(toolkit, folder, cxx)
        for name, target in links.items():
            (folder / name).symlink_to(target)
        shim.mkdir(mode=0o755, exist_ok=True)
        for made in folder.iterdir():  # another process may be putting the same ones there
            made.replace(shim / made.name)
    return shim


def _whole_stub(folder: Path) -> bool:
    """Whether the stub of the driver is there, with the content that its name states."""
    try:
        name = os.readlink(folder / "libcuda.so")
        return name == _stub_name((folder / name).read_bytes())
    except OSError:
        return False


def _stub_name(content: bytes) -> str:
    return f"libcuda-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _missing_link_names(toolkit: Toolkit) -> dict[str, Path]:
    links: dict[str, Path] = {}
    for folder in toolkit.library_dirs:
        for library in sorted(folder.glob("lib*.so.*")):
            name = library.name.split(".so.")[0] + ".so"
            if name not in links and not any((other / name).exists() for other in toolkit.library_dirs):
                links[name] = library.absolute()
    return links


def _make_driver_stub(toolkit: Toolkit, folder: Path, cxx: str) -> None:
    names: set[str] = set()
    for include in toolkit.include_dirs:
        header = include / "cuda.h"
        if header.is_file():
            names.update(re.findall(r"\bcu[A-Z]\w+(?=\s*\()", header.read_text(errors="replace")))
            names.update(re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+)", header.read_text(errors="replace")))
            break
    source = folder / "stub.s"
    # Assembly: nothing to compile, and no type to agree with.
    lines = [f".globl {name}\n.type {name}, %function\n{name}:" for name in sorted(names)]
    source.write_text(".text\n" + "\n".join(lines) + '\n.section .note.GNU-stack,"",%progbits\n')
    command = [cxx, "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so"), str(source)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except subprocess.CalledProcessError as error:
        first = (error.stderr or error.stdout).strip().splitlines()
        if "No space left on device" in error.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise ToolchainError(
            f"the host compiler {cxx} cannot link a shared library: {first[0] if first else error}"
        ) from error
    except OSError as error:
        raise ToolchainError(
            f"the host compiler {cxx} cannot be run ({error}). Install one (Debian, Ubuntu: apt-get install g++) "
            "or set CXX"
        ) from error
    source.unlink()
    stub = folder / "libcuda.so"
    stub.chmod(0o755)  # whatever the umask is
    stub.symlink_to(stub.rename(folder / _stub_name(stub.read_bytes())).name)
