# SPDX-License-Identifier: Apache-2.0
"""``run(words)`` for ``python WORDS``, forked from a Python that has imported all that ``import flashinfer`` needs of
others.

A fresh interpreter spends five sixths of ``import flashinfer`` on torch and the like. Whoever tests the imports
themselves, the interpreter's options or its end takes ``subprocess``.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 600


def run(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """Return as ``subprocess.run([sys.executable, *words], capture_output=True, text=True)`` does; ``words`` has no
    options but ``-c`` or ``-m``."""
    assert words[0] in ("-c", "-m") or not words[0].startswith("-"), words
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("out", "err")]
        asked = {
            "words": list(words),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "files": files,
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the process that forks ended with status {server.wait()}"
        code = int(answer)
        return subprocess.CompletedProcess([sys.executable, *words], code, *(Path(f).read_text() for f in files))


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    __import__("torch")
    for name in _foreign():
        try:
            __import__(name)
        except Exception:  # a part that only its owner may import
            continue
    own = str(Path(__file__).parent)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [place for place in sys.path if place not in (own, *given)]
    assert not any(name.partition(".")[0] == "flashinfer" for name in sys.modules)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(asked, path)  # leaves by SystemExit, so that what is registered for the end runs
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _foreign() -> list[str]:
    """The modules of others that flashinfer and its command line import, from a child that does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for name in [name for name in os.environ if name.startswith("FLASHINFER")]:
            del os.environ[name]  # which a test may have set
        sys.path.insert(0, str(Path(__file__).parents[1]))
        import flashinfer.__main__
        import flashinfer.jit  # noqa: F401

        names = [name for name in sys.modules if name.partition(".")[0] not in ("flashinfer", "__main__")]
        os.write(writing, json.dumps(names).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        names = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return names


def _become(asked: dict[str, Any], path: list[str]) -> None:
    """In the child: run the words, and raise SystemExit with what Python would end with."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, file in enumerate(asked["files"], 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    signal.alarm(SECONDS)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    kind, *rest = asked["words"]
    places = list(filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep)))
    first = "" if kind == "-c" else asked["cwd"] if kind == "-m" else str(Path(kind).parent)
    sys.path[:] = [first, *places, *path]
    sys.path_importer_cache.clear()
    sys.orig_argv = [sys.executable, *asked["words"]]
    sys.argv = [kind, *rest[1:]] if kind in ("-c", "-m") else [kind, *rest]
    try:
        if kind == "-c":
            program = types.ModuleType("__main__")
            sys.modules["__main__"] = program
            exec(compile(rest[0], "<string>", "exec"), program.__dict__)
        elif kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    _serve()
