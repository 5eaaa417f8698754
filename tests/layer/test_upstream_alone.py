# SPDX-License-Identifier: Apache-2.0
"""Over a wheel that was not tested, and with ``FLASHINFER_SM12X_MOE=0``, flashinfer is upstream's as if there were no
fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from layer_toys import FORK_FILES, OURS, REPO, WHEEL_FILES, Run, write_fork, write_tree, write_wheel
from other_wheels import UNTESTED, environment_with

OFF = {"FLASHINFER_SM12X_MOE": "0"}
FILES = {
    **WHEEL_FILES,
    "__main__.py": "import sys\nprint('upstream main', sys.argv[1:])\ndef cli(): print('upstream cli')\n",
}
ABOUT = """
import importlib, json, pickle, pkgutil, sys
from importlib import resources
import flashinfer, flashinfer.ops.core as core
print(json.dumps({
    "about": [str(getattr(flashinfer, name)) for name in
              ("__file__", "__path__", "__doc__", "__cached__", "__package__")],
    "spec": {name: str(value) for name, value in vars(flashinfer.__spec__).items() if name != "loader"},
    "loader": [type(flashinfer.__loader__).__name__, flashinfer.__loader__ is flashinfer.__spec__.loader],
    "names": sorted(vars(flashinfer)),
    "modules": sorted((name, module.__file__) for name, module in sys.modules.items()
                      if name.partition(".")[0] == "flashinfer"),
    "found": importlib.util.find_spec("flashinfer.ops").origin,
    "listed": sorted(module.name for module in pkgutil.walk_packages(flashinfer.__path__, "flashinfer.")),
    "resource": str(resources.files("flashinfer") / "table.json"), "data": str(core.DATA),
    "pickled": [pickle.dumps(each).hex() for each in (core.Spec, core.call)], "called": core.call(),
}))
"""


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    return write_fork(tmp_path / "fork", FORK_FILES)


def about(result: subprocess.CompletedProcess[str]) -> dict[str, object]:
    return json.loads(result.stdout)


def warning(version: str, site: Path, python: Path | str = sys.executable) -> str:
    from flashinfer_sm12x.versions import TESTED_VERSIONS, __fork_version__

    return (
        "flashinfer-sm12x steps aside, and 'import flashinfer' is upstream's package alone: flashinfer-python "
        f"{version} in {site} is none that flashinfer-sm12x {__fork_version__} was tested with "
        f"({', '.join(TESTED_VERSIONS)}). For this "
        f'fork\'s kernels: "{python}" -m pip install --force-reinstall --no-deps '
        f'"flashinfer-python=={TESTED_VERSIONS[0]}", unless other packages need the one that is there; then a newer '
        "flashinfer-sm12x may serve it\n"
    )


@pytest.mark.parametrize("version", ["0.7.1", "0.7.2.post2", "0.7.3", "0.6.0rc1"])
def test_a_wheel_that_was_not_tested_is_as_without_the_fork(
    run_python: Run, fork: Path, tmp_path: Path, version: str
) -> None:
    wheel = write_wheel(tmp_path / "wheel", FILES, version)
    arguments = ("-W", "error", "-c", ABOUT)
    layered = run_python(*arguments, path=[fork, wheel], bare=True)
    assert about(layered) == about(run_python(*arguments, path=[wheel], bare=True))
    assert layered.stderr == warning(version, wheel)  # once, although it is imported twice


def test_0_is_as_without_the_fork_over_a_tested_wheel_too_and_logs_nothing(
    run_python: Run, fork: Path, tmp_path: Path
) -> None:
    wheel = write_wheel(tmp_path / "wheel", FILES)
    (fork / "flashinfer" / "ops" / "core.py").write_text("raise OSError('a fork that is not whole')")
    switched_off = run_python("-c", ABOUT, path=[fork, wheel], bare=True, env=OFF)
    assert about(switched_off) == about(run_python("-c", ABOUT, path=[wheel], bare=True))
    assert switched_off.stderr == ""


def test_reload(run_python: Run, fork: Path, tmp_path: Path) -> None:
    """It gives the same module, which keeps what upstream put there, without the warning."""
    wheel = write_wheel(tmp_path / "wheel", WHEEL_FILES, UNTESTED)
    code = """if True:
        import importlib, flashinfer.ops
        first = {**vars(flashinfer)}
        again = importlib.reload(flashinfer)
        print(again is flashinfer, {n for n in vars(flashinfer) if first.get(n) != getattr(flashinfer, n)})
        print(flashinfer.__file__, set(first) ^ set(vars(flashinfer)))
    """
    done = run_python("-c", code, path=[fork, wheel], bare=True)
    assert done.stdout == f"True set()\n{wheel}/flashinfer/__init__.py set()\n"
    assert done.stderr == warning(UNTESTED, wheel)


def test_without_a_wheel_0_fails_as_anything_else(run_python: Run, fork: Path) -> None:
    result = run_python("-c", "import flashinfer", path=[fork], bare=True, check=False, env=OFF)
    assert "ImportError: flashinfer (the SM12x fork" in result.stderr


def test_the_command_line_and_its_script_are_upstreams(run_python: Run, fork: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheel", FILES, UNTESTED)
    done = run_python("-m", "flashinfer", "sm12x-build", "--vllm", path=[fork, wheel], bare=True)
    assert (done.stdout, done.stderr) == ("upstream main ['sm12x-build', '--vllm']\n", warning(UNTESTED, wheel))
    script = "from flashinfer.__main__ import cli; cli()"
    assert run_python("-c", script, path=[fork, wheel], bare=True).stdout.endswith("upstream cli\n")


def test_the_first_of_several_is_taken(run_python: Run, fork: Path, tmp_path: Path) -> None:
    first, second = (write_wheel(tmp_path / version, FILES, version) for version in ("0.8.0", "0.5.0"))
    done = run_python("-c", "import flashinfer; print(flashinfer.__file__)", path=[fork, first, second], bare=True)
    assert (done.stdout, done.stderr) == (f"{first}/flashinfer/__init__.py\n", warning("0.8.0", first))


def test_another_copy_of_the_fork_is_not_taken_for_upstream(run_python: Run, fork: Path, tmp_path: Path) -> None:
    other = write_fork(tmp_path / "other", FORK_FILES)
    wheel = write_wheel(tmp_path / "wheel", FILES, UNTESTED)
    done = run_python("-c", "import flashinfer; print(flashinfer.__file__)", path=[fork, other, wheel], bare=True)
    assert (done.stdout, done.stderr) == (f"{wheel}/flashinfer/__init__.py\n", warning(UNTESTED, wheel))


def test_a_checkout_of_upstreams_that_a_finder_or_the_path_gives(run_python: Run, fork: Path, tmp_path: Path) -> None:
    """Without metadata beside it: an editable install."""
    source = write_tree(tmp_path / "source", {f"flashinfer/{name}": text for name, text in FILES.items()})
    finder = f"""if True:
        import importlib.util, sys
        class Finder:
            def find_spec(name, path=None, target=None):
                if name == "flashinfer":
                    return importlib.util.spec_from_file_location(name, {str(source / "flashinfer" / "__init__.py")!r})
        class OldFinder:
            def find_module(name, path=None):
                pass
        sys.meta_path += [OldFinder, Finder]
    """
    expected = f"{source}/flashinfer/__init__.py\n", warning("of an unknown version", source)
    code = "import flashinfer; print(flashinfer.__file__)"
    for path, prologue in (([fork, source], ""), ([fork], finder)):
        done = run_python("-c", f"{prologue}\n{code}", path=path, bare=True)
        assert (done.stdout, done.stderr) == expected


def test_where_upstream_itself_fails_it_fails_as_without_the_fork_and_may_be_tried_again(
    run_python: Run, fork: Path, tmp_path: Path
) -> None:
    wheel = write_wheel(
        tmp_path / "wheel",
        {"__init__.py": "import os\nos.stat(os.environ['MISSING'])\nfrom . import x\n", "x.py": ""},
        UNTESTED,
    )
    missing = tmp_path / "missing"
    code = f"""if True:
        import sys
        try:
            import flashinfer
        except OSError as error:
            print(error, [name for name in sys.modules if name.partition(".")[0] == "flashinfer"])
        open({str(missing)!r}, "w").close()
        import flashinfer
        print(flashinfer.x.__name__)
    """
    done = run_python("-c", code, path=[fork, wheel], bare=True, env={"MISSING": str(missing)})
    assert done.stdout == f"[Errno 2] No such file or directory: '{missing}' []\nflashinfer.x\n"
    assert done.stderr == warning(UNTESTED, wheel)


def test_a_thread_waits_until_upstreams_package_is_imported(run_python: Run, fork: Path, tmp_path: Path) -> None:
    slow = (
        "import threading, time\nthreading.Thread(target=__import__, args=('other',)).start()\ntime.sleep(0.5)\n"
        "LATE = 1\n"
    )
    wheel = write_wheel(tmp_path / "wheel", {"__init__.py": slow}, UNTESTED)
    write_tree(wheel, {"other.py": "import flashinfer\nprint(flashinfer.LATE)\n"})
    assert run_python("-c", "import flashinfer", path=[fork, wheel], bare=True).stdout == "1\n"


@pytest.fixture(scope="module")
def python(site_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's in which the wheel says that it is of another version."""
    return environment_with(site_packages, tmp_path_factory.mktemp("other") / "environment", UNTESTED)


REAL = """
import json, pickle, sys
import flashinfer, flashinfer.fused_moe, flashinfer.gemm, flashinfer.jit.env as env
print(json.dumps({
    "names": [sorted(vars(each)) for each in (flashinfer, flashinfer.fused_moe, flashinfer.gemm)],
    "modules": sorted((n, str(getattr(m, "__file__", ""))) for n, m in sys.modules.items()
                      if n.partition(".")[0] == "flashinfer"),
    "pickled": pickle.dumps(flashinfer.fused_moe.cutlass_fused_moe).hex(), "data": str(env.FLASHINFER_DATA),
}))
"""


def test_the_real_wheel_under_another_version(run_python: Run, python: Path, tmp_path: Path) -> None:
    variables = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    with_fork, without = (run_python("-c", REAL, path=path, python=python, env=variables) for path in ([REPO], []))
    assert about(with_fork) == about(without)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    assert with_fork.stderr == warning(UNTESTED, site, python)


def test_b12x_over_the_real_wheel_finds_its_code(run_python: Run, python: Path) -> None:
    code = (
        "import b12x, b12x._lib.compile_plan as m; print(b12x.__file__, m.__file__, b12x.__path__, hasattr(b12x, "
        "'OpMeta'))"
    )
    found = [run_python("-c", code, path=path, python=python).stdout for path in ([REPO], [])]
    assert found[0] == found[1]
    assert str(OURS) not in found[0]


def test_the_doctor_over_the_real_wheel_runs_and_reports_it(run_python: Run, python: Path) -> None:
    words = ("-m", "flashinfer", "sm12x-doctor", "--json")
    done = run_python(*words, path=[REPO], python=python, check=False)
    finding = json.loads(done.stdout)["findings"][0]
    assert (finding["check"], finding["state"], done.returncode) == ("import", "fail", 1)
    assert f"flashinfer-python {UNTESTED} in " in finding["found"]
    assert finding["command"].endswith('install --force-reinstall --no-deps "flashinfer-python==0.7.2.post1"')
