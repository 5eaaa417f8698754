# SPDX-License-Identifier: Apache-2.0
"""A compiler that takes no time, and does on request what compilers do on bad days."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from flashinfer.jit import cpp_ext
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import flags
from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer_sm12x.build import engine, toolchain

FAKE_COMPILER = """#!{python} -IS
# Understands -c, -o, -I, --version; "compiles" by copying the text of the source and of the headers it includes.
# A line "// fake: <what>" in the source asks for: wait (until there is a file "go" beside it), kill, kill-once, enospc,
# fail <text>, say <text>, silent.
import os, re, sys, time
home = os.path.dirname(os.path.abspath(__file__))
if "--version" in sys.argv:
    print(open(os.path.join(home, "banner")).read())
    sys.exit(0)
args = sys.argv[1:]
value = lambda flag: args[args.index(flag) + 1] if flag in args else None
source, output = value("-c"), value("-o")
if source is None:  # link
    with open(output, "wb") as out:
        for path in args:
            if path.endswith(".o"):
                out.write(open(path, "rb").read())
    sys.exit(0)
with open(os.path.join(home, "calls"), "a") as log:
    log.write(os.path.basename(source) + chr(10))
text = open(source).read()
for name in re.findall(r'#include "(.+?)"', text):
    headers = [os.path.join(folder, name) for flag, folder in zip(args, args[1:]) if flag == "-I"]
    there = [header for header in headers if os.path.exists(header)]
    if there:
        text += open(there[0]).read()
    else:
        print(source + ":1:10: fatal error: " + name + ": No such file or directory")
        sys.exit(1)
for what in re.findall(r"// fake: (.+)", text):
    verb, _, rest = what.partition(" ")
    if verb == "wait":
        for _ in range(90000):
            if os.path.exists(os.path.join(os.path.dirname(source), "go")):
                break
            time.sleep(0.01)
    elif verb == "kill":
        os.kill(os.getpid(), 9)
    elif verb == "kill-once" and not os.path.exists(os.path.join(home, "killed")):
        open(os.path.join(home, "killed"), "w").close()
        os.kill(os.getpid(), 9)
    elif verb == "enospc":
        print("/tmp/cc.s: fatal error: error writing to /tmp/cc.s: No space left on device")
        sys.exit(1)
    elif verb == "fail":
        print("some warning first" + chr(10) + source + ":3:7: error: " + rest)
        sys.exit(2)
    elif verb == "say":
        print(rest)
    elif verb == "silent":
        sys.exit(0)
with open(output, "w") as out:
    out.write(" ".join(a for a in args if a.startswith("-D")) + text)
"""


BUILD = (
    "import signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from jit_fakes import Project;"
    "signal.signal(signal.SIGINT, signal.default_int_handler);"
    "print(len(Project(Path(sys.argv[2]), cache=Path(sys.argv[3])).build().compiled))"
)
"""Builds a project; with the usual meaning of SIGINT even where the tests run with it ignored."""


@dataclass
class Project:
    """Sources, a compiler and a cache in a folder of their own, or a cache that is elsewhere.

    ``a.cu`` includes ``one.h``; ``b.cu`` includes ``one.h`` and ``two.h``; ``c.cu`` includes nothing.
    """

    root: Path
    flags: tuple[str, ...] = ("-DX=1",)
    names: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    module: str = "demo"
    cache: Path = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.cache = self.cache or self.root / "cache"

    def write(self, name: str, text: str) -> Path:
        path = self.root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    @property
    def compiler(self) -> Path:
        return self.root / "toolkit" / "bin" / "nvcc"

    def plan(self) -> engine.ModulePlan:
        engine.compiler_identity.cache_clear()
        toolchain.compiler_banner.cache_clear()
        src = self.root / "src"
        flags = (*self.flags, "-I", str(src))
        steps = tuple(
            engine.CompileStep(f"{name}.o", src / f"{name}.cu", str(self.compiler), flags) for name in self.names
        )
        return engine.ModulePlan(
            name=self.module,
            folder=self.cache / self.module,
            lock_path=self.cache / "tmp" / f"{self.module}.lock",
            steps=steps,
            linker=str(self.compiler),
            link_flags=("-shared",),
        )

    def build(self, **kwargs: object) -> engine.BuildReport:
        plan = self.plan()
        with engine.module_lock(plan.lock_path) as lock:
            return engine.build(plan, lock=lock, **kwargs)  # type: ignore[arg-type]

    def command(self, cache: Path | None = None) -> list[str]:
        """Builds it in a process of its own, which prints how many sources it compiled."""
        return [sys.executable, "-c", BUILD, str(Path(__file__).parent), str(self.root), str(cache or self.cache)]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def change_compiler(self, before: str, inserted: str) -> None:
        """Insert code into the compiler."""
        text = self.compiler.read_text()
        assert before in text
        self.compiler.write_text(text.replace(before, inserted + before, 1))

    @property
    def fresh(self) -> bool:
        return engine.find_library(self.plan()) is not None

    def object_text(self, name: str) -> str:
        """The text of all objects of that name, whatever their hashes."""
        return "".join(path.read_text() for path in (self.cache / "demo" / "obj").glob(f"*/{name}.o"))

    def object_of(self, name: str) -> Path:
        """The object of a source as it is now."""
        plan = self.plan()
        return plan.object_path(next(step for step in plan.steps if step.name == f"{name}.o"))

    def calls(self) -> list[str]:
        """Sources compiled since the last call, sorted."""
        log = self.compiler.parent / "calls"
        lines = sorted(log.read_text().splitlines()) if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def with_flags(self, *flags: str) -> Project:
        return replace(self, flags=flags)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def use_cache(root: Path, patch: pytest.MonkeyPatch) -> None:
    for name, folder in (("BASE", ""), ("WORKSPACE", ""), ("JIT", "cached_ops"), ("GEN_SRC", "generated")):
        patch.setattr(jit_env, f"FLASHINFER_{name}_DIR", root / folder)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> None:
        raise toolchain.ToolchainError("no CUDA compiler found")

    monkeypatch.setattr(cpp_ext, "find_toolkit", none_found)


needs_nvcc = pytest.mark.usefixtures("nvcc")
"""For a test that compiles CUDA: it is skipped where nothing can."""


BINDING = """
#include <cuda_runtime.h>
#include <tvm/ffi/function.h>
#include "answer.h"
__global__ void kernel(int* out) { *out = ANSWER; }
int64_t launch(int64_t out) { kernel<<<1, 1>>>(reinterpret_cast<int*>(out)); return cudaGetLastError(); }
int64_t answer() { return ANSWER; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, launch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
"""


def small_spec(folder: Path, name: str = "small") -> JitSpecSm12x:
    """The spec of a module of one kernel, one source and one header, in ``folder/src``."""
    source = folder / "src" / f"{name}.cu"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        source.write_text(BINDING)
        (source.parent / "answer.h").write_text("#define ANSWER 41\n")
    return JitSpecSm12x(
        name=name,
        sources=[source],
        extra_cflags=[],
        extra_cuda_cflags=flags.cuda_flags([(12, "1a")], False),
        extra_ldflags=None,
        extra_include_dirs=[source.parent],
        architectures=((12, "1a"),),
    )
