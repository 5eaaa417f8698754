# SPDX-License-Identifier: Apache-2.0
"""A compiler that takes no time, and does on request what compilers do on bad days."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flashinfer.jit.sm12x import build as engine
from flashinfer.jit.sm12x import toolchain

FAKE_COMPILER = """#!{python} -IS
# Understands -c, -o, -MF, -I, --version; "compiles" by copying the text of the source and of the headers it includes.
# A line "// fake: <what>" in the source asks for: sleep <s>, kill, enospc, fail <text>, allocate <MiB>, silent.
import os, re, sys, time
home = os.path.dirname(os.path.abspath(__file__))
if "--version" in sys.argv:
    print(open(os.path.join(home, "banner")).read())
    sys.exit(0)
args = sys.argv[1:]
value = lambda flag: args[args.index(flag) + 1] if flag in args else None
include_dirs = [b for a, b in zip(args, args[1:]) if a == "-I"]
source, output, depfile = value("-c"), value("-o"), value("-MF")
if source is None:  # link
    with open(output, "wb") as out:
        for path in args:
            if path.endswith(".o"):
                out.write(open(path, "rb").read())
    sys.exit(0)
with open(os.path.join(home, "calls"), "a") as log:
    log.write(os.path.basename(source) + chr(10))
read = [source]
text = open(source).read()
for name in re.findall(r'#include "(.+?)"', text):
    for folder in include_dirs:
        header = os.path.join(folder, name)
        if os.path.exists(header):
            read.append(header)
            text += open(header).read()
            break
    else:
        print(source + ":1:10: fatal error: " + name + ": No such file or directory")
        sys.exit(1)
for what in re.findall(r"// fake: (.+)", text):
    verb, _, rest = what.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
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
    elif verb == "allocate":
        block = bytearray(int(rest) << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
    elif verb == "silent":
        sys.exit(0)
with open(output, "w") as out:
    out.write(" ".join(a for a in args if a.startswith("-D")) + text)
with open(depfile, "w") as out:
    out.write(output + ": " + (" \\\\" + chr(10) + " ").join(p.replace(" ", "\\\\ ") for p in read) + chr(10))
"""


@dataclass
class Project:
    """Sources, a compiler and a cache in a folder of their own.

    ``a.cu`` includes ``one.h``; ``b.cu`` includes ``one.h`` and ``two.h``; ``c.cu`` includes nothing.
    """

    root: Path
    flags: tuple[str, ...] = ("-DX=1",)
    names: list[str] = field(default_factory=lambda: ["a", "b", "c"])

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
        includes = ("-I", str(src / "first"), "-I", str(src))
        steps = tuple(
            engine.CompileStep(f"{name}.o", src / f"{name}.cu", str(self.compiler), (*self.flags, *includes))
            for name in self.names
        )
        folder = self.root / "cache" / "demo"
        lock = self.root / "cache" / "tmp" / "demo.lock"
        return engine.ModulePlan("demo", folder, lock, steps, (str(self.compiler),), ("-shared",), watched=(src,))

    def build(self, **kwargs: object) -> engine.BuildReport:
        plan = self.plan()
        with engine.module_lock(plan):
            return engine.build(plan, **kwargs)  # type: ignore[arg-type]

    def calls(self) -> list[str]:
        """Sources compiled since the last call, sorted."""
        log = self.compiler.parent / "calls"
        lines = sorted(log.read_text().splitlines()) if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def with_flags(self, *flags: str) -> Project:
        return replace(self, flags=flags)
