# SPDX-License-Identifier: Apache-2.0
"""Both kinds of installation, beside a wheel in the same site-packages, in either order.

Wheels are built with this project's own backend and unpacked as pip unpacks a pure one; what Python then does with
them is asked of a real virtual environment. Removal is pip's, so there pip does all of it.
"""

from __future__ import annotations

import email.parser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from layer_toys import REPO, UPSTREAM, WHEEL_FILES, Run, write_wheel
from packaging.requirements import Requirement

from flashinfer_sm12x.versions import TESTED_VERSIONS, UPSTREAM_DISTRIBUTION, __fork_version__

pytestmark = pytest.mark.privileges

BUILD_INPUTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
PACKAGES = ("flashinfer", "flashinfer_sm12x")
TREE = "flashinfer_sm12x_tree"
WHERE = "import flashinfer; print(flashinfer.__file__)"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that it leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    plugin = tuple(path.name for path in REPO.glob("flashinfer_sm12x_vllm-*.dist-info"))
    for name in (*PACKAGES, *plugin, "include", "csrc", "tools"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "3rdparty" / "cutlass").mkdir(parents=True)
    shutil.copy(REPO / "3rdparty" / "cutlass" / "README.md", copy / "3rdparty" / "cutlass")
    for file in [REPO / name for name in BUILD_INPUTS] + list(REPO.glob("requirements*.txt")):
        shutil.copy(file, copy)
    return copy


@pytest.fixture(scope="module")
def build(checkout: Path, tmp_path_factory: pytest.TempPathFactory):
    def build(hook: str, source: Path = checkout) -> zipfile.ZipFile:
        output = tmp_path_factory.mktemp(hook)
        code = f"import sys; sys.path.insert(0, 'tools'); import pep517; pep517.{hook}({str(output)!r})"
        result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        (wheel,) = output.iterdir()
        return zipfile.ZipFile(wheel)

    return build


@pytest.fixture(scope="module")
def normal(build) -> zipfile.ZipFile:
    return build("build_wheel")


@pytest.fixture(scope="module")
def editable(build) -> zipfile.ZipFile:
    return build("build_editable")


class Environment:
    """A virtual environment whose site-packages the tests fill."""

    def __init__(self, root: Path, run: Run) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        self.python = root / "bin" / "python"
        (self.site,) = root.glob("lib/python*/site-packages")
        self._run = run

    def run(self, *arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess:
        return self._run(*arguments, path=list(path), python=self.python)


@pytest.fixture
def environment(tmp_path: Path, run_python: Run) -> Environment:
    return Environment(tmp_path / "env", run_python)


def test_the_wheels_touch_nothing_of_upstreams(normal, editable) -> None:
    for archive in (normal, editable):
        tops = {name.split("/")[0] for name in archive.namelist()}
        info = {name for name in tops if name.endswith(".dist-info")}
        assert tops - info <= {TREE, "_flashinfer_sm12x.py", "flashinfer_sm12x.pth"}
        assert len(info) == 1
    assert not any(name.startswith(f"{TREE}/") for name in editable.namelist())


def test_metadata(normal) -> None:
    (name,) = (name for name in normal.namelist() if name.endswith("/METADATA"))
    metadata = email.parser.Parser().parsestr(normal.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("flashinfer-sm12x", __fork_version__)
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    requirements = metadata.get_all("Requires-Dist")
    (flashinfer,) = (each for each in map(Requirement, requirements) if each.name == UPSTREAM_DISTRIBUTION)
    assert all(version in flashinfer.specifier for version in TESTED_VERSIONS)
    assert not any(requirement.startswith("torch") for requirement in requirements)
    assert any(r.startswith("nvidia-cuda-nvcc==13.0.") and 'extra == "cuda"' in r for r in requirements)
    # Neither processor nor Python ABI: the same file serves x86-64 and aarch64.
    assert normal.filename is not None
    assert normal.filename.endswith("-py3-none-any.whl")


def test_the_tree_travels(normal, checkout: Path) -> None:
    shipped = {name for name in normal.namelist() if name.startswith(f"{TREE}/")}
    wanted = {
        f"{TREE}/{file.relative_to(checkout)}"
        for top in (*PACKAGES, "include", "csrc", "3rdparty")
        for file in (checkout / top).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert shipped == wanted | {f"{TREE}/LICENSE", f"{TREE}/NOTICE"}
    assert f"{TREE}/flashinfer/py.typed" in shipped
    assert f"{TREE}/3rdparty/cutlass/README.md" in shipped


def test_of_a_cutlass_checkout_only_the_headers_travel(build, checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "with_cutlass"
    shutil.copytree(checkout, copy)
    for file in ("include/cutlass/cutlass.h", "test/unit/test.cu", "media/large.png"):
        target = copy / "3rdparty" / "cutlass" / file
        target.parent.mkdir(parents=True)
        target.touch()
    names = build("build_wheel", copy).namelist()
    inside = {name.partition("3rdparty/cutlass/")[2] for name in names if "3rdparty" in name}
    assert inside == {"README.md", "include/cutlass/cutlass.h"}


@pytest.mark.parametrize("ours_first", [True, False], ids=["before the wheel", "after the wheel"])
@pytest.mark.parametrize("kind", ["normal", "editable"])
def test_import_finds_the_fork(request, environment, checkout: Path, kind: str, ours_first: bool) -> None:
    archive = request.getfixturevalue(kind)
    for ours in (ours_first, not ours_first):
        if ours:
            archive.extractall(environment.site)
        else:
            write_wheel(environment.site, WHEEL_FILES)
    tree = checkout if kind == "editable" else environment.site / TREE
    code = (
        "import flashinfer; from flashinfer._layer import fork_root, wheel_root; "
        "print(flashinfer.__file__, flashinfer.__path__[1], fork_root(), wheel_root(), sep='\\n')"
    )
    upstream = str(environment.site / "flashinfer")
    assert environment.run("-c", code).stdout.splitlines() == [
        str(tree / "flashinfer" / "__init__.py"),
        upstream,
        str(tree),
        upstream,
    ]
    assert (tree / "3rdparty" / "cutlass" / "README.md").is_file()


def test_pythonpath_comes_before_an_installation(environment, normal) -> None:
    normal.extractall(environment.site)
    write_wheel(environment.site, WHEEL_FILES)
    assert environment.run("-c", WHERE, path=(REPO,)).stdout.strip() == str(REPO / "flashinfer" / "__init__.py")


def test_without_the_wheel_an_installation_reports_it(environment, normal) -> None:
    normal.extractall(environment.site)
    code = "try:\n import flashinfer\nexcept ImportError as error: print(error)"
    message = environment.run("-c", code).stdout
    assert "Found: no flashinfer-python on sys.path." in message
    assert f'"{environment.python}" -m pip install "flashinfer-python=={UPSTREAM}"' in message


def test_a_checkout_that_moved_away_is_reported(environment, build, checkout: Path, tmp_path: Path) -> None:
    moving = tmp_path / "moving"
    shutil.copytree(checkout, moving)
    build("build_editable", moving).extractall(environment.site)
    write_wheel(environment.site, WHEEL_FILES)
    moving.rename(tmp_path / "moved")
    result = environment.run("-c", WHERE)
    assert result.stdout.strip() == str(environment.site / "flashinfer" / "__init__.py")
    assert f"flashinfer-sm12x: {moving} holds no fork any more" in result.stderr


def test_start_up_imports_nothing_heavy(environment, normal) -> None:
    """The path hook runs whenever Python starts, also for programs that never see flashinfer."""
    loaded = "import sys; print(*sorted(sys.modules))"
    before = set(environment.run("-c", loaded).stdout.split())
    normal.extractall(environment.site)
    added = set(environment.run("-c", loaded).stdout.split()) - before
    # Python decodes .pth files: 3.13 as UTF-8 with a mark, those before as the locale says.
    assert {name for name in added if not name.startswith("encodings.")} == {"_flashinfer_sm12x"}


@pytest.mark.parametrize("kind", ["normal", "editable"])
def test_an_installation_over_the_real_wheel_has_what_vllm_looks_for(
    request, run_python: Run, site_packages: Path, tmp_path: Path, kind: str
) -> None:
    """The trap: an editable install that resolves to an empty namespace package, which vLLM takes for FlashInfer."""
    site = tmp_path / "site-packages"
    request.getfixturevalue(kind).extractall(site)
    for name in ("flashinfer", f"flashinfer_python-{UPSTREAM}.dist-info"):
        (site / name).symlink_to(site_packages / name)
    code = f"""if True:
        import site, sys
        for directory in ({str(site)!r}, {str(site_packages)!r}):
            site.addsitedir(directory)
        import flashinfer, flashinfer.fused_moe as moe
        wanted = [(moe, "cutlass_fused_moe"), (moe, "trtllm_fp4_block_scale_moe"),
                  (flashinfer, "fp4_quantize"), (flashinfer, "nvfp4_block_scale_interleave")]
        print(all(hasattr(module, name) for module, name in wanted), flashinfer.__fork_version__ > "")
    """
    assert run_python("-c", code, path=[], bare=True).stdout == "True True\n"


@pytest.mark.parametrize("kind", ["PYTHONPATH", "normal", "editable"])
def test_vllms_plugin_is_found_however_the_fork_is_there(request, environment, kind: str) -> None:
    """vLLM looks for entry points and calls what they load; that imports nothing but the standard library."""
    if kind != "PYTHONPATH":
        request.getfixturevalue(kind).extractall(environment.site)
    code = """if True:
        import importlib.metadata
        found = importlib.metadata.entry_points(group="vllm.general_plugins")
        print(*{(entry.name, entry.load().__module__) for entry in found})
    """
    path = (REPO,) if kind == "PYTHONPATH" else ()
    assert environment.run("-c", code, path=path).stdout == "('flashinfer_sm12x', 'flashinfer_sm12x.vllm')\n"


class Pip:
    """pip upon a virtual environment that holds setuptools and nothing else. No network, no build isolation."""

    def __init__(self, environment: Environment, run: Run) -> None:
        self.site, self.python, self._run = environment.site, environment.python, run
        setuptools = importlib.metadata.distribution("setuptools")
        for name in {file.parts[0] for file in setuptools.files or ()} - {".."}:
            (self.site / name).symlink_to(Path(str(setuptools.locate_file(name))).resolve())
        self._before = self._found()

    def __call__(self, *arguments: str | Path, path: tuple[Path, ...] = ()) -> str:
        # The tests' own pip, told to work there: the environment needs none.
        pip = ("-m", "pip", "--python", str(self.python), "--disable-pip-version-check")
        result = self._run(*pip, *map(str, arguments), path=path)
        return result.stdout + result.stderr

    def install(self, *what: str | Path) -> str:
        return self("install", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile", *what)

    def _found(self) -> set[str]:
        return {str(path.relative_to(self.site)) for path in contents(self.site)}

    def left(self) -> set[str]:
        """The files in site-packages that were not there at first."""
        return self._found() - self._before


@pytest.fixture
def pip(environment: Environment, run_python: Run) -> Pip:
    return Pip(environment, run_python)


@pytest.fixture
def fresh(checkout: Path, tmp_path: Path) -> Path:
    """A checkout nobody has installed from."""
    return Path(shutil.copytree(checkout, tmp_path / "fresh", ignore=shutil.ignore_patterns("*.egg-info", "build")))


def contents(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


INSTALLS = {"normal": (), "editable": ("--editable",)}


@pytest.mark.parametrize("with_pythonpath", [False, True], ids=["", "PYTHONPATH=checkout"])
@pytest.mark.parametrize("kind", INSTALLS)
def test_uninstalling_removes_all_of_it(pip: Pip, fresh: Path, kind: str, with_pythonpath: bool) -> None:
    before = contents(fresh)
    pip.install(*INSTALLS[kind], fresh)
    assert {"flashinfer_sm12x.pth", "_flashinfer_sm12x.py"} <= pip.left()
    assert contents(fresh) == before, "installing left something in the checkout"
    output = pip("uninstall", "--yes", "flashinfer-sm12x", path=(fresh,) if with_pythonpath else ())
    assert "Successfully uninstalled flashinfer-sm12x" in output
    assert pip.left() == set()


@pytest.mark.parametrize(
    ("first", "second"),
    [("normal", "normal"), ("editable", "editable"), ("normal", "editable"), ("editable", "normal")],
)
def test_installing_again_replaces(pip: Pip, fresh: Path, first: str, second: str) -> None:
    """Also what the newer version has no more."""
    gone = fresh / "csrc" / "gone.cu"
    gone.touch()
    pip.install(*INSTALLS[first], fresh)
    assert (f"{TREE}/csrc/gone.cu" in pip.left()) == (first == "normal")
    gone.unlink()
    version = fresh / "flashinfer_sm12x" / "versions.py"
    version.write_text(re.sub(r'(__fork_version__ = )".*"', r'\1"9.9"', version.read_text()))
    pip.install(*INSTALLS[second], fresh)
    assert {name for name in pip.left() if name.endswith(".dist-info")} == {"flashinfer_sm12x-9.9.dist-info"}
    assert (TREE in pip.left()) == (second == "normal")
    assert f"{TREE}/csrc/gone.cu" not in pip.left()
    pip("uninstall", "--yes", "flashinfer-sm12x")
    assert pip.left() == set()


def test_an_upgrade_of_what_was_imported_leaves_no_old_module(pip: Pip, fresh: Path) -> None:
    """Python writes bytecode beside a module that it imports; pip's list of what it installed has none of it."""
    package = fresh / "flashinfer" / "sm12x_old"
    package.mkdir()
    (package / "__init__.py").write_text("old = True\n")
    installed = pip.site / TREE / "flashinfer"
    pip.install(fresh)
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import sm12x_old"
    subprocess.run([pip.python, "-c", code], check=True, env={})
    assert list(installed.glob("sm12x_old/__pycache__/*.pyc"))
    package.rename(fresh / "flashinfer" / "sm12x_new")
    pip.install("--upgrade", "--force-reinstall", fresh)
    assert not (installed / "sm12x_old").exists(), "a folder that is left is a package that can be imported"
    pip("uninstall", "--yes", "flashinfer-sm12x")
    assert [*pip.site.glob("*flashinfer*")] == []


def test_an_upgrade_over_the_first_layout(pip: Pip, fresh: Path, tmp_path: Path) -> None:
    """Version 0.1.0 kept its tree in ``flashinfer_sm12x/``, which is a package's name now, and had three packages."""
    old = tmp_path / "old"
    parts = ("flashinfer/__init__.py", "flashinfer/_layer.py", "flashinfer/_version.py", "csrc/old.cu", "LICENSE")
    parts += tuple(f"flashinfer_sm12x_{name}/__init__.py" for name in ("vllm", "doctor", "quantize"))
    about = "Metadata-Version: 2.1\nName: flashinfer-sm12x\nVersion: 0.1.0\n"
    point = "[vllm.general_plugins]\nflashinfer_sm12x = flashinfer_sm12x_vllm:register\n"
    files = {
        **{f"flashinfer_sm12x/{part}": "" for part in parts},
        "_flashinfer_sm12x.py": (
            "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'flashinfer_sm12x'))\n"
        ),
        "flashinfer_sm12x.pth": "import _flashinfer_sm12x\n",
        "flashinfer_sm12x-0.1.0.dist-info/METADATA": about,
        "flashinfer_sm12x-0.1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "flashinfer_sm12x-0.1.0.dist-info/entry_points.txt": point,
    }
    record = "flashinfer_sm12x-0.1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    old.mkdir()
    wheel = old / "flashinfer_sm12x-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    pip.install(wheel)
    write_wheel(pip.site, WHEEL_FILES)
    subprocess.run(
        [pip.python, "-c", "import flashinfer_sm12x_vllm"], check=True, env={}, cwd=tmp_path
    )  # bytecode, of no RECORD
    pip.install("--upgrade", "--force-reinstall", fresh)
    code = """if True:
        import importlib.metadata, flashinfer, flashinfer_sm12x
        points = importlib.metadata.entry_points(group="vllm.general_plugins")
        print(flashinfer.__fork_version__, flashinfer_sm12x.__file__, *{each.load().__module__ for each in points})
    """
    done = subprocess.run([pip.python, "-c", code], check=True, env={}, cwd=tmp_path, capture_output=True, text=True)
    package = pip.site / TREE / "flashinfer_sm12x" / "__init__.py"
    assert done.stdout == f"{__fork_version__} {package} flashinfer_sm12x.vllm\n"
    assert not [*pip.site.glob("flashinfer_sm12x/**/*.py")]
    pip("uninstall", "--yes", "flashinfer-sm12x")
    assert [path.name for path in pip.site.glob("*flashinfer_sm12x*")] == []


HOOKS = [
    "get_requires_for_build_wheel()",
    "get_requires_for_build_editable()",
    "get_requires_for_build_sdist()",
    "prepare_metadata_for_build_wheel(out)",
    "prepare_metadata_for_build_editable(out)",
    "build_wheel(out)",
    "build_editable(out)",
    "build_sdist(out)",
]


@pytest.mark.parametrize("call", HOOKS)
def test_building_leaves_the_checkout_as_it_was(run_python: Run, fresh: Path, tmp_path: Path, call: str) -> None:
    """But without an egg-info: one of an older version would go on to be taken for an installation."""
    before = contents(fresh)
    stale = fresh / "flashinfer_sm12x.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: flashinfer-sm12x\nVersion: 0.0.1\n")
    out = tmp_path / "out"
    out.mkdir()
    code = f"import os, pep517; os.chdir({str(fresh)!r}); out = {str(out)!r}; pep517.{call}"
    run_python("-c", code, path=[fresh / "tools"])
    assert contents(fresh) == before
