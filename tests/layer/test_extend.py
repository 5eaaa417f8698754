# SPDX-License-Identifier: Apache-2.0
"""The promises of ``extend``, on a toy wheel whose every line is known."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
from layer_toys import FORK_FILES, WHEEL_FILES, Run, write_fork, write_wheel


@pytest.fixture
def evaluate(run_python: Run, toy: list[Path]):
    """Run statements that fill ``out`` in an interpreter that sees only the toy; return ``out``."""

    def evaluate(code: str, **options):
        script = f"import json\nout = {{}}\n{dedent(code)}\nprint(json.dumps(out))"
        return json.loads(run_python("-c", script, path=toy, bare=True, **options).stdout.splitlines()[-1])

    return evaluate


def test_package_is_ours_over_the_wheel(evaluate, toy):
    out = evaluate("""
        import flashinfer, importlib.util
        out["file"] = flashinfer.__file__
        out["path"] = flashinfer.__path__
        out["found_in"] = importlib.util.find_spec("flashinfer.ops").submodule_search_locations
        out["versions"] = flashinfer.__version__, flashinfer.__fork_version__
        out["upstream_only"] = flashinfer.plain.NAME
    """)
    ours, theirs = (root / "flashinfer" for root in toy)
    assert out["file"] == str(ours / "__init__.py")
    assert out["path"] == [str(ours), str(theirs)]
    assert out["found_in"] == [str(ours / "ops")]
    assert out["versions"][0] == "0.7.2.post1"
    assert out["versions"][1] not in ("", "0.7.2.post1")
    assert out["upstream_only"] == "flashinfer.plain"


def test_upstream_runs_first_in_the_same_namespace(evaluate, toy):
    out = evaluate("""
        import flashinfer.ops.core as core, flashinfer.ops
        out["call"] = core.call()                     # upstream's function sees our helper
        out["same"] = flashinfer.ops.call is core.call
        out["kept"] = core._upstream.helper()
        out["data"] = str(core.DATA)
        out["during"] = core.NAME_DURING
        out["files"] = core.__file__, core.__upstream_file__
        out["docs"] = core.__doc__, flashinfer.ops.__doc__
        out["modules"] = core.Spec.__module__, core.Mine.__module__, core.__name__
    """)
    fork, wheel = toy
    assert out["call"] == "our helper over upstream helper"
    assert out["same"]
    assert out["kept"] == "upstream helper"
    assert out["data"] == str(wheel / "flashinfer" / "data")
    assert out["during"] == "flashinfer.ops.core"
    assert out["files"] == [str(root / "flashinfer" / "ops" / "core.py") for root in (fork, wheel)]
    assert out["docs"] == ["Our core.", "Upstream ops."]
    assert out["modules"] == ["flashinfer.ops.core"] * 3


def test_both_directories_of_a_package_give_modules(evaluate):
    out = evaluate("""
        import pkgutil
        import flashinfer.ops, flashinfer.ops.extra, flashinfer.ops.only_upstream
        out["answer"] = flashinfer.ops.extra.ANSWER
        out["listed"] = sorted(m.name for m in pkgutil.iter_modules(flashinfer.ops.__path__))
    """)
    assert out == {"answer": 42, "listed": ["core", "extra", "only_upstream"]}


def test_resources_of_both_directories(evaluate, toy):
    out = evaluate("""
        from importlib import resources
        top, ops = resources.files("flashinfer"), resources.files("flashinfer.ops")
        out["json"] = (top / "table.json").read_text()
        out["nested"] = top.joinpath("data", "csrc", "kernel.cu").read_text()
        out["slashes"] = top.joinpath("data/csrc/kernel.cu").read_text()
        out["both"] = [(ops / name).read_text() for name in ("table.txt", "ours.txt")]
        out["merged"] = sorted(p.name for p in (top / "ops").iterdir() if p.name.endswith(".txt"))
        out["ours_wins"] = str(ops / "core.py")
        out["absent"] = (top / "nothing.bin").is_file()
        with resources.as_file(ops / "table.txt") as path:
            out["as_file"] = path.read_text()
    """)
    assert out["json"] == "{}"
    assert out["nested"] == out["slashes"] == "// upstream"
    assert out["both"] == ["upstream", "ours"]
    assert out["merged"] == ["ours.txt", "table.txt"]
    assert out["ours_wins"] == str(toy[0] / "flashinfer" / "ops" / "core.py")
    assert out["absent"] is False
    assert out["as_file"] == "upstream"


def test_source_of_functions_and_classes(evaluate):
    out = evaluate("""
        import inspect, linecache
        import flashinfer.ops.core as core
        for name in ("Spec", "Mine", "call", "helper"):
            out[name] = inspect.getsource(getattr(core, name))
        out["Inner"] = inspect.getsource(core.Spec.Inner)
        out["method"] = inspect.getsource(core.Spec.method)
        linecache.checkcache()
        out["after_checkcache"] = inspect.getsource(core.Spec)
    """)
    assert out["Spec"].startswith('class Spec:\n    """A class of upstream\'s."""')
    assert out["Spec"].rstrip().endswith('return "upstream method"')
    assert out["after_checkcache"] == out["Spec"]
    assert out["Mine"] == 'class Mine:\n    """A class of ours."""\n\n    width = 1\n'
    assert out["call"] == "def call():\n    return helper()\n"
    assert out["helper"] == 'def helper():\n    return "our helper over " + _upstream.helper()\n'
    assert out["Inner"] == "    class Inner:\n        depth = 2\n"
    assert out["method"] == '    def method(self):\n        return "upstream method"\n'


@pytest.mark.parametrize(
    ("function", "root", "line"),
    [
        ("fails", 1, 'raise ValueError("from upstream")'),
        ("also_fails", 0, 'raise KeyError("from ours")'),
    ],
)
def test_tracebacks_name_the_file_the_line_is_in(run_python, toy, function, root, line):
    result = run_python("-c", f"import flashinfer.ops.core as c; c.{function}()", path=toy, bare=True, check=False)
    file = toy[root] / "flashinfer" / "ops" / "core.py"
    number = file.read_text().split(line)[0].count("\n") + 1
    assert f'File "{file}", line {number}, in {function}\n    {line}' in result.stderr


def test_pickle(evaluate):
    out = evaluate("""
        import pickle
        import flashinfer.ops.core as core
        things = [core.Spec, core.Spec.Inner, core.Mine, core.call, core.helper]
        out["same"] = [pickle.loads(pickle.dumps(thing)) is thing for thing in things]
        out["instance"] = pickle.loads(pickle.dumps(core.Spec())).method()
    """)
    assert out == {"same": [True] * 5, "instance": "upstream method"}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing(run_python, toy, tmp_path, method):
    script = tmp_path / "main.py"
    script.write_text(
        dedent(f"""
        import multiprocessing
        import flashinfer.ops.core as core

        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(1) as pool:
                print(pool.apply(core.call))
        """)
    )
    assert run_python(str(script), path=toy, bare=True).stdout == "our helper over upstream helper\n"


def test_running_a_module_runs_only_our_main(run_python, toy):
    result = run_python("-m", "flashinfer.ops.core", path=toy, bare=True)
    assert result.stdout == "our main ran in __main__ with flashinfer.ops.core\n"


def test_runpy(evaluate):
    out = evaluate("""
        import contextlib, io, runpy
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            names = runpy.run_module("flashinfer.ops.core", run_name="__main__")
        out["printed"] = printed.getvalue()
        out["name"] = names["__name__"]
        out["imported"] = runpy.run_module("flashinfer.plain")["NAME"]
    """)
    assert out["printed"] == "our main ran in __main__ with flashinfer.ops.core\n"
    assert out["name"] == "__main__"
    assert out["imported"] == "flashinfer.plain"


def test_reload(run_python, tmp_path):
    """Also after an edit: what a notebook with autoreload does."""
    fork, wheel = write_fork(tmp_path / "fork", FORK_FILES), write_wheel(tmp_path / "wheel", WHEEL_FILES)
    code = """if True:
        import importlib, inspect, linecache, pathlib
        import flashinfer, flashinfer.ops.core as core
        path, length = list(flashinfer.__path__), len(linecache.getlines(core.__file__))
        file = pathlib.Path(core.__file__)
        file.write_text(file.read_text().replace("width = 1", "width = 1000"))
        for _ in range(2):
            importlib.reload(core)
            importlib.reload(flashinfer)
        print(flashinfer.__path__ == path, len(linecache.getlines(core.__file__)) == length)
        print(core.call())
        print(core.Mine.width, inspect.getsource(core.Mine).split()[-1], inspect.getsource(core.Spec).split()[1])
    """
    output = run_python("-B", "-c", code, path=[fork, wheel], bare=True).stdout.splitlines()
    assert output == ["True True", "our helper over upstream helper", "1000 1000 Spec:"]


def test_upstream_view_has_what_upstream_binds(run_python, tmp_path):
    """Names that both import, dunder names, and the original of what we replace; nothing that only we bind."""
    wheel_files = {**WHEEL_FILES, "plain.py": "import os\n__all__ = ['f']\ndef f(): return 1\n"}
    fork_files = {
        **FORK_FILES,
        "plain.py": "import os, sys\nfrom flashinfer._layer import extend\n_upstream = extend(globals())\n"
        "def f(): return 2\n__all__ = [*_upstream.__all__, 'g']\n",
    }
    path = [write_fork(tmp_path / "fork", fork_files), write_wheel(tmp_path / "wheel", wheel_files)]
    code = (
        "import flashinfer.plain as p, os; u = p._upstream; "
        "print(u.os is os, hasattr(u, 'sys'), hasattr(u, 'extend'), u.f(), p.f(), p.__all__)"
    )
    assert run_python("-c", code, path=path, bare=True).stdout == "True False False 1 2 ['f', 'g']\n"


def test_running_an_extending_file_as_a_script_is_refused(run_python, toy):
    file = toy[0] / "flashinfer" / "ops" / "core.py"
    result = run_python(str(file), path=toy, bare=True, check=False)
    assert result.returncode == 1
    assert f"RuntimeError: {file} extends a module of the flashinfer wheel and so must be imported" in result.stderr


def test_extending_what_upstream_has_not(run_python, tmp_path):
    files = {**FORK_FILES, "novel.py": "from flashinfer._layer import extend\nextend(globals())\n"}
    path = [write_fork(tmp_path / "fork", files), write_wheel(tmp_path / "wheel", WHEEL_FILES)]
    result = run_python("-c", "import flashinfer.novel", path=path, bare=True, check=False)
    assert result.returncode == 1
    assert (
        f"ImportError: flashinfer.novel calls extend(), but flashinfer-python 0.7.2.post1 in {path[1]} has no such "
        f"module: there is nothing to extend" in result.stderr
    )


def test_an_error_in_upstream_leaves_no_half_module(run_python, tmp_path):
    files = {**WHEEL_FILES, "ops/core.py": "raise ImportError('no such library')\n"}
    path = [write_fork(tmp_path / "fork", FORK_FILES), write_wheel(tmp_path / "wheel", files)]
    code = dedent("""
        import sys
        import flashinfer
        for _ in range(2):
            try:
                import flashinfer.ops.core
            except ImportError as error:
                print(error, "flashinfer.ops.core" in sys.modules, "flashinfer.ops" in sys.modules)
    """)
    assert run_python("-c", code, path=path, bare=True).stdout == "no such library False False\n" * 2
