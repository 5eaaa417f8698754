# SPDX-License-Identifier: Apache-2.0
"""Toolkit discovery in made-up trees, and linking against a toolkit without link names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from layer_toys import write_tree

from flashinfer_sm12x.build import toolchain
from flashinfer_sm12x.build.toolchain import ToolchainError, discover, link_shim, require_architectures


def make_toolkit(
    root: Path,
    version: str = "13.0",
    libraries: str | None = "lib64",
    headers: tuple[str, ...] = (),
    cudart: str | None = None,
) -> Path:
    """A toolkit of ``version``, with a runtime header of ``cudart`` if that is another."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.88"\n')
    nvcc.chmod(0o755)
    for header in ("cuda_runtime.h", "cuda.h", *headers):
        path = root / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("CUresult CUDAAPI cuInit(unsigned int);\n#define cuMemAlloc cuMemAlloc_v2\n")
    major, minor = (cudart or version).split(".")
    api = f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n"
    (root / "include" / "cuda_runtime_api.h").write_text(api)
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
    toolkit = discover(environ, wheels, tmp_path / "none")
    found.append((toolkit.origin, toolkit.root))
    assert found == [
        ("CUDA_HOME", named),
        ("CUDA_PATH", other),
        ("PATH", on_path),
        ("default", default),
        ("pip", wheel),
    ]


def install_wheels(site: Path, **versions: str | None) -> Path:
    """``site/nvidia``, as pip leaves it with the pieces of a compiler of these versions; those not named are
    13.0.88."""
    wanted = dict.fromkeys(toolchain.COMPILER_WHEELS, "13.0.88") | {
        f"nvidia-{name.replace('_', '-')}": version for name, version in versions.items()
    }
    release = {name: ".".join(version.split(".")[:2]) for name, version in wanted.items() if version}
    compiler, runtime = release["nvidia-cuda-nvcc"], release.get("nvidia-cuda-runtime", "13.0")
    root = make_toolkit(site / "nvidia" / "cu13", compiler, "lib", cudart=runtime)
    if "nvidia-cuda-runtime" not in release:
        (root / "include" / "cuda_runtime_api.h").unlink()
    for name, version in wanted.items():
        if version:
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return site / "nvidia"


def only_pips(site: Path) -> toolchain.Toolkit:
    return discover({"PATH": ""}, [site / "nvidia"], site / "no default")


NEWER = {"cuda_nvcc": "13.5.37", "cuda_crt": "13.5.37", "nvvm": "13.5.37", "cuda_runtime": "13.0.96"}
"""The versions that ``pip install vllm==0.33.0`` brings: torch pins the runtime, nobody the compiler."""


@pytest.mark.parametrize(
    ("versions", "disagree", "release"),
    [
        (NEWER, "nvidia-cuda-nvcc 13.5.37 and nvidia-cuda-runtime 13.0.96 in {root} disagree", "13.0"),
        ({"cuda_nvcc": "13.5.37"}, "nvidia-cuda-nvcc 13.5.37 and nvidia-cuda-crt 13.0.88 in {root} disagree", "13.0"),
        ({"cuda_crt": "13.5.37"}, "nvidia-cuda-nvcc 13.0.88 and nvidia-cuda-crt 13.5.37 in {root} disagree", "13.0"),
        ({"nvvm": "13.1.80"}, "nvidia-cuda-nvcc 13.0.88 and nvidia-nvvm 13.1.80 in {root} disagree", "13.0"),
        (
            {"cuda_runtime": "13.2.75"},
            "nvidia-cuda-nvcc 13.0.88 and nvidia-cuda-runtime 13.2.75 in {root} disagree",
            "13.2",
        ),
        ({"nvvm": None}, "nvidia-nvvm is missing beside nvidia-cuda-nvcc 13.0.88 in {root}", "13.0"),
        ({"cuda_runtime": None}, "nvidia-cuda-runtime is missing beside nvidia-cuda-nvcc 13.0.88 in {root}", "13.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_pips_pieces_of_different_releases(
    tmp_path: Path, versions: dict[str, str | None], disagree: str, release: str
) -> None:
    """One line says which two disagree, and installs the compiler of the release that the runtime's headers have."""
    install_wheels(tmp_path, **versions)
    with pytest.raises(ToolchainError) as caught:
        only_pips(tmp_path)
    root = tmp_path / "nvidia" / "cu13"
    assert str(caught.value) == (
        f"no CUDA compiler can be used: {disagree.format(root=root)}. Install one that can: "
        f"{toolchain.pip_command(release)}"
    )
    pieces = f'"nvidia-nvvm=={release}.*"'
    assert ("[cuda]" if release == toolchain.OWN_RELEASE else pieces) in str(caught.value)


def test_pips_pieces_of_one_release(tmp_path: Path) -> None:
    install_wheels(tmp_path, cuda_nvcc="13.0.48", cuda_runtime="13.0.96")
    found = only_pips(tmp_path)
    assert (found.origin, found.passed_over) == ("pip", ())


@pytest.mark.parametrize("origin", ["CUDA_HOME", "CUDA_PATH", "PATH", "default"])
def test_a_whole_toolkit_comes_before_pips_pieces(tmp_path: Path, origin: str) -> None:
    """And says nothing of them."""
    wheels = install_wheels(tmp_path, **NEWER)
    whole = make_toolkit(tmp_path / "cuda")
    environ = {"PATH": str(whole / "bin") if origin == "PATH" else ""}
    environ |= {origin: str(whole)} if origin.startswith("CUDA") else {}
    found = discover(environ, [wheels], whole if origin == "default" else tmp_path / "none")
    assert (found.root, found.origin, found.passed_over) == (whole, origin, ())


def test_a_toolkit_whose_headers_are_of_another_release_is_passed_over(tmp_path: Path) -> None:
    on_path = make_toolkit(tmp_path / "path", version="13.5", cudart="13.0")
    default = make_toolkit(tmp_path / "default", cudart="12.8")
    wheels = install_wheels(tmp_path)
    environ = {"PATH": str(on_path / "bin")}
    found = discover(environ, [wheels], default)
    reasons = (
        f"{on_path}/bin/nvcc is of CUDA 13.5, but {on_path}/include/cuda_runtime_api.h of 13.0",
        f"{default}/bin/nvcc is of CUDA 13.0, but {default}/include/cuda_runtime_api.h of 12.8",
    )
    assert (found.origin, found.passed_over) == ("pip", reasons)
    with pytest.raises(ToolchainError) as caught:
        discover(environ, [], default)
    assert str(caught.value) == (
        f"no CUDA compiler can be used: {'; '.join(reasons)}. Install one that can: {toolchain.PIP_COMMAND}"
    )


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named_is_not_passed_over(tmp_path: Path, variable: str) -> None:
    wheels = install_wheels(tmp_path, **NEWER)
    whole = make_toolkit(tmp_path / "cuda")
    root = wheels / "cu13"
    with pytest.raises(
        ToolchainError, match=rf"^{variable}={root}: nvidia-cuda-nvcc 13\.5\.37 and .* disagree\. .*unset"
    ):
        discover({variable: str(root), "PATH": str(whole / "bin")}, [wheels], whole)
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(ToolchainError, match=rf"^{variable}={link}: nvidia-cuda-nvcc 13\.5\.37 and .* disagree"):
        discover({variable: str(link), "PATH": ""}, [])


def test_a_compiler_too_old_for_what_is_to_be_compiled_is_passed_over(tmp_path: Path) -> None:
    """So that installing a newer one by pip helps."""
    old = make_toolkit(tmp_path / "cuda", version="12.8")
    wheels = install_wheels(tmp_path)
    for listed, origin in (("12.1a", "pip"), ("9.0a;12.0f", "pip"), ("12.0a", "default"), ("", "default")):
        assert discover({"PATH": "", "FLASHINFER_CUDA_ARCH_LIST": listed}, [wheels], old).origin == origin, listed
    older = make_toolkit(tmp_path / "older", version="12.6")
    assert discover({"PATH": ""}, [wheels], older).origin == "pip"


def test_headers_are_found_where_conda_has_them(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda")
    folder = root / "targets" / toolchain._target() / "include"
    folder.mkdir(parents=True)
    (root / "include" / "cuda_runtime_api.h").rename(folder / "cuda_runtime_api.h")
    assert discover({"CUDA_HOME": str(root)}, []).runtime_header == folder / "cuda_runtime_api.h"


def test_the_compiler_that_a_variable_names_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    """Its own headers come first; where it has none it sees those of the toolkit."""
    whole, other = make_toolkit(tmp_path / "cuda"), make_toolkit(tmp_path / "other", version="13.5")
    nvcc = other / "bin" / "nvcc"
    environ = {"PATH": "/bin:/usr/bin", "CUDA_HOME": str(whole), "FLASHINFER_NVCC": str(nvcc)}
    found = discover(environ, [])
    assert (found.root, found.nvcc, str(found.version), found.origin) == (whole, nvcc, "13.5", "CUDA_HOME")
    pips = install_wheels(tmp_path / "site", **NEWER) / "cu13"
    assert discover({**environ, "CUDA_HOME": str(pips)}, []).nvcc == nvcc  # whose pieces are its own
    with pytest.raises(ToolchainError, match=f"^CUDA_HOME={whole}: nvidia-cuda-nvcc .* in {pips} disagree"):
        discover({**environ, "FLASHINFER_NVCC": str(pips / "bin" / "nvcc")}, [])
    del environ["CUDA_HOME"]
    found = discover(environ, [], whole)
    assert (found.root, found.nvcc, found.origin) == (other, nvcc, "FLASHINFER_NVCC")
    for header in (other / "include").iterdir():
        header.unlink()
    with pytest.raises(ToolchainError, match=f"^CUDA_HOME={whole}: {nvcc} is of CUDA 13.5, but {whole}/.* of 13.0"):
        discover({**environ, "CUDA_HOME": str(whole)}, [])
    with pytest.raises(ToolchainError, match=f"^FLASHINFER_NVCC={nvcc}: {nvcc} has no headers: "):
        discover(environ, [], whole)
    with pytest.raises(ToolchainError, match=r"^FLASHINFER_NVCC=nvcc-none is not a program"):
        discover({**environ, "FLASHINFER_NVCC": "nvcc-none"}, [], whole)


def test_none_found_names_the_pip_command(tmp_path: Path) -> None:
    (tmp_path / "cu13" / "include").mkdir(parents=True)  # of a wheel without the compiler
    with pytest.raises(ToolchainError, match="no CUDA compiler found") as caught:
        discover({"PATH": str(tmp_path)}, [tmp_path], tmp_path / "none")
    assert str(caught.value).endswith(f" Install one with: {toolchain.PIP_COMMAND}")


CHECKOUT = {"pyproject.toml": "", "requirements-cuda.txt": ""}


@pytest.mark.parametrize(
    ("tree", "url", "command"),
    [
        ("a checkout", None, "pip install '{root}/a checkout[cuda]'"),
        ("a checkout", '{{"url": "file://{root}/a%20checkout", "dir_info": {{}}}}',
            "pip install '{root}/a checkout[cuda]'"),
        (
            "a checkout",
            '{{"url": "file://{root}/a%20checkout", "dir_info": {{"editable": true}}}}',
            "pip install -e '{root}/a checkout[cuda]'",
        ),
        ("a checkout", '{{"url": "file:///other", "dir_info": {{"editable": true}}}}',
            "pip install '{root}/a checkout[cuda]'"),
        ("site", '{{"url": "file://{root}/a%20checkout", "dir_info": {{}}}}', "pip install '{root}/a checkout[cuda]'"),
        ("site", '{{"url": "file://{root}/moved", "dir_info": {{}}}}', None),
        ("site", '{{"url": "https://a.b/c.whl", "archive_info": {{}}}}', None),
        ("site", "{{", None),
        ("site", "[]", None),
        ("site", None, None),
    ],
)  # fmt: skip
def test_the_command_installs_from_the_checkout_where_there_is_one(
    tree: str, url: str | None, command: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that runs, or the one that it was installed from; else the pieces by name."""
    write_tree(tmp_path / "a checkout", CHECKOUT)
    info = {"METADATA": "Metadata-Version: 2.1\nName: flashinfer-sm12x\nVersion: 0.1.0\n"}
    if url is not None:
        info["direct_url.json"] = url.format(root=tmp_path)
    write_tree(tmp_path / "site" / "flashinfer_sm12x-0.1.0.dist-info", info)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / tree / "flashinfer_sm12x" / "build" / "toolchain.py"))
    pieces = 'pip install "nvidia-cuda-nvcc==13.0.*" '
    assert toolchain.pip_command().startswith(pieces if command is None else command.format(root=tmp_path))
    assert toolchain.pip_command("12.9").startswith('pip install "nvidia-cuda-nvcc==12.9.*" ')


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_named_folder_without_a_compiler_is_an_error_and_not_passed_over(tmp_path: Path, variable: str) -> None:
    wheel = tmp_path / "nvidia"
    make_toolkit(wheel / "cu13")
    with pytest.raises(ToolchainError, match=rf"{variable}={tmp_path}/empty holds no bin/nvcc\. Point it at"):
        discover({variable: str(tmp_path / "empty"), "PATH": ""}, [wheel])


def test_newest_wheel_wins(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "cu9")
    make_toolkit(tmp_path / "cu13")
    assert discover({"PATH": ""}, [tmp_path], tmp_path / "none").root == tmp_path / "cu13"


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
    root = make_toolkit(tmp_path / "cuda", version=version)
    toolkit = toolchain.Toolkit(root, root / "bin" / "nvcc", "CUDA_HOME")
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
def bare_toolkit(gxx: str, tmp_path: Path) -> toolchain.Toolkit:
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


def test_shim_is_made_once_and_fixed(bare_toolkit: toolchain.Toolkit, tmp_path: Path) -> None:
    first = link_shim(bare_toolkit, tmp_path / "cache")
    stub = first / "libcuda.so"
    inode = stub.stat().st_ino
    assert link_shim(bare_toolkit, tmp_path / "cache") == first
    assert stub.stat().st_ino == inode
    stub.unlink()
    assert link_shim(bare_toolkit, tmp_path / "cache") == first
    assert stub.exists()
    for damage in (lambda content: content[: len(content) // 2], lambda content: bytes(len(content)), lambda _: b""):
        good = stub.read_bytes()
        stub.write_bytes(damage(good))
        assert link_shim(bare_toolkit, tmp_path / "cache") == first
        assert stub.read_bytes() == good
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
