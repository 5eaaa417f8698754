# SPDX-License-Identifier: Apache-2.0
"""Toolkit discovery in made-up trees, and linking against a toolkit without link names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.jit.sm12x import toolchain
from flashinfer.jit.sm12x.toolchain import ToolchainError, discover, link_shim, require_architectures


def make_toolkit(
    root: Path, version: str = "13.0", libraries: str | None = "lib64", headers: tuple[str, ...] = ()
) -> Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.88"\n')
    nvcc.chmod(0o755)
    for header in ("cuda_runtime.h", "cuda.h", *headers):
        path = root / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("CUresult CUDAAPI cuInit(unsigned int);\n#define cuMemAlloc cuMemAlloc_v2\n")
    if libraries:
        (root / libraries).mkdir()
        (root / libraries / "libcudart.so.13").write_bytes(b"")
    return root


@pytest.fixture(autouse=True)
def _forget_compilers() -> None:
    toolchain.compiler_banner.cache_clear()


def test_order_of_the_places(tmp_path: Path) -> None:
    named, other, on_path, default = (make_toolkit(tmp_path / name) for name in ("home", "path", "bin", "default"))
    wheels = [tmp_path / "site-packages" / "nvidia"]
    wheel = make_toolkit(wheels[0] / "cu13", libraries="lib")
    environ = {"CUDA_HOME": str(named), "CUDA_PATH": str(other), "PATH": f"/usr/bin:{on_path / 'bin'}"}
    found = []
    for drop in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        toolkit = discover(environ, wheels, default)
        found.append((toolkit.origin, toolkit.root))
        del environ[drop]
    toolkit = discover(environ, wheels, default)
    found.append((toolkit.origin, toolkit.root))
    toolkit = discover(environ, [], default)
    found.append((toolkit.origin, toolkit.root))
    assert found == [
        ("CUDA_HOME", named),
        ("CUDA_PATH", other),
        ("PATH", on_path),
        ("pip", wheel),
        ("default", default),
    ]


def test_none_found_names_the_pip_command(tmp_path: Path) -> None:
    (tmp_path / "cu13" / "include").mkdir(parents=True)  # of a wheel without the compiler
    with pytest.raises(ToolchainError, match="no CUDA compiler found") as caught:
        discover({"PATH": str(tmp_path)}, [tmp_path], tmp_path / "none")
    assert 'pip install "nvidia-cuda-nvcc==13.0.*"' in str(caught.value)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_named_folder_without_a_compiler_is_an_error_and_not_passed_over(tmp_path: Path, variable: str) -> None:
    wheel = tmp_path / "nvidia"
    make_toolkit(wheel / "cu13")
    with pytest.raises(ToolchainError, match=rf"{variable}={tmp_path}/empty holds no bin/nvcc\. Point it at"):
        discover({variable: str(tmp_path / "empty"), "PATH": ""}, [wheel])


def test_newest_wheel_wins(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "cu9")
    make_toolkit(tmp_path / "cu13")
    assert discover({"PATH": ""}, [tmp_path]).root == tmp_path / "cu13"


@pytest.mark.parametrize("kind", ["link", "script"])
def test_compiler_on_path_that_stands_for_another(tmp_path: Path, kind: str) -> None:
    real = make_toolkit(tmp_path / "cuda")
    folder = tmp_path / "bin"
    folder.mkdir()
    nvcc = folder / "nvcc"
    if kind == "link":
        nvcc.symlink_to(real / "bin" / "nvcc")
    else:
        nvcc.write_text(f'#!/bin/sh\necho "#$ TOP={real}/bin/.." >&2\n')
        nvcc.chmod(0o755)
    assert discover({"PATH": f"{folder}:/bin:/usr/bin"}, []).root == real


def test_headers_it_lacks_come_from_wheels_after_its_own(tmp_path: Path) -> None:
    toolkit_root = make_toolkit(tmp_path / "cuda")
    wheels = tmp_path / "nvidia"
    make_toolkit(wheels / "cu13", libraries="lib", headers=("curand_kernel.h",))
    toolkit = discover({"CUDA_HOME": str(toolkit_root)}, [wheels])
    assert toolkit.include_dirs == (toolkit_root / "include", wheels / "cu13" / "include")
    assert toolkit.library_dirs == (toolkit_root / "lib64", wheels / "cu13" / "lib")


def test_headers_of_another_major_version_are_not_mixed_in(tmp_path: Path) -> None:
    toolkit_root = make_toolkit(tmp_path / "cuda", version="12.9")
    wheels = tmp_path / "nvidia"
    make_toolkit(wheels / "cu13", headers=("curand_kernel.h",))
    (wheels / "curand" / "include").mkdir(parents=True)
    (wheels / "curand" / "include" / "curand_kernel.h").touch()
    assert discover({"CUDA_HOME": str(toolkit_root)}, [wheels]).include_dirs[1:] == (wheels / "curand" / "include",)


def test_complete_toolkit_gets_nothing_added(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda", headers=tuple(toolchain.COMPANION_HEADERS))
    wheels = tmp_path / "nvidia"
    make_toolkit(wheels / "cu13", headers=("curand_kernel.h",))
    assert discover({"CUDA_HOME": str(root)}, [wheels]).include_dirs[1:] == ()


@pytest.mark.parametrize(
    ("version", "architecture", "needed"),
    [
        ("12.8", (12, "1a"), "12.9"),
        ("12.8", (12, "0f"), "12.9"),
        ("12.6", (12, "0a"), "12.8"),
        ("12.8", (12, "1f"), "12.9"),
    ],
)
def test_toolkit_too_old(tmp_path: Path, version: str, architecture: tuple[int, str], needed: str) -> None:
    toolkit = discover({"CUDA_HOME": str(make_toolkit(tmp_path / "cuda", version=version))}, [])
    with pytest.raises(
        ToolchainError, match=rf"12\.{architecture[1]} needs CUDA {needed} or later, .* is {version}\. .*pip"
    ):
        require_architectures(toolkit, [architecture])


def test_toolkit_new_enough(tmp_path: Path) -> None:
    old = discover({"CUDA_HOME": str(make_toolkit(tmp_path / "cuda", version="12.8"))}, [])
    require_architectures(old, [(12, "0a"), (9, "0a"), (8, "9")])
    new = discover({"CUDA_HOME": str(make_toolkit(tmp_path / "new", version="12.9"))}, [])
    require_architectures(new, [(12, "0a"), (12, "0f"), (12, "1a"), (12, "1f")])


def test_library_that_is_not_there(tmp_path: Path) -> None:
    toolkit = discover({"CUDA_HOME": str(make_toolkit(tmp_path / "cuda", libraries=None))}, [])
    with pytest.raises(ToolchainError, match=r"has no libcudart\.so \(folders searched: none\).* pip install"):
        toolkit.find_library("cudart")


def test_banner_without_a_version(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda")
    (root / "bin" / "nvcc").write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(ToolchainError, match="names no CUDA release; it printed: 'hello'"):
        _ = discover({"CUDA_HOME": str(root)}, []).version


@pytest.fixture
def bare_toolkit(tmp_path: Path) -> toolchain.Toolkit:
    """As from PyPI: ``lib`` with a versioned runtime, no link name, no stub of the driver."""
    root = make_toolkit(tmp_path / "cu13", libraries="lib")
    library = root / "lib" / "libcudart.so.13"
    command = ["c++", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input='extern "C" int cudaGetVersion() { return 13; }', text=True, check=True)
    return discover({"CUDA_HOME": str(root)}, [])


def test_link_without_lib64_and_without_driver(bare_toolkit: toolchain.Toolkit, tmp_path: Path) -> None:
    shim = link_shim(bare_toolkit, tmp_path / "cache")
    source = (
        'extern "C" int cudaGetVersion(); extern "C" int cuInit(unsigned); extern "C" int cuMemAlloc_v2();'
        'extern "C" int runtime() { return cudaGetVersion(); }'
    )
    library = tmp_path / "module.so"
    search = [f"-L{shim}", f"-Wl,-rpath,{bare_toolkit.library_dirs[0]}"]
    link = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-Wl,--as-needed", "-lcudart", "-lcuda", *search, "-o"]
    subprocess.run([*link, str(library)], input=source, text=True, check=True)
    # In a process of its own: this one may have loaded the real runtime, which has the same SONAME.
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).runtime())"
    out = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True)
    assert out.stdout.strip() == "13", out.stderr

    # One that calls the driver records the driver's own name, and all its names resolve.
    source += 'extern "C" int driver() { return cuInit(0) + cuMemAlloc_v2(); }'
    user = tmp_path / "user.so"
    subprocess.run([*link, str(user), "-Wl,-z,defs"], input=source, text=True, check=True)
    needed = subprocess.run(["readelf", "-d", str(user)], capture_output=True, text=True, check=True).stdout
    assert "[libcuda.so.1]" in needed
    assert "[libcudart.so.13]" in needed


def test_shim_is_made_once_and_mended(bare_toolkit: toolchain.Toolkit, tmp_path: Path) -> None:
    first = link_shim(bare_toolkit, tmp_path / "cache")
    stub = first / "libcuda.so"
    inode = stub.stat().st_ino
    assert link_shim(bare_toolkit, tmp_path / "cache") == first
    assert stub.stat().st_ino == inode
    stub.unlink()
    assert link_shim(bare_toolkit, tmp_path / "cache") == first
    assert stub.exists()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [first.name]


def test_shim_leaves_alone_what_the_toolkit_has(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda")
    (root / "lib64" / "libcudart.so").symlink_to("libcudart.so.13")
    (root / "lib64" / "stubs").mkdir()
    (root / "lib64" / "stubs" / "libcuda.so").touch()
    shim = link_shim(discover({"CUDA_HOME": str(root)}, []), tmp_path / "cache")
    assert list(shim.iterdir()) == []


def test_host_compiler_missing(bare_toolkit: toolchain.Toolkit, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no-such-compiler cannot be run .*apt-get install g\+\+\) or set CXX"):
        link_shim(bare_toolkit, tmp_path / "cache", cxx="no-such-compiler")
    assert os.listdir(tmp_path / "cache") == []
