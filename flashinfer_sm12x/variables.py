# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that this project reads: one table.

The product asks :func:`read`, the doctor :func:`problems`; both say the same of a bad value. Nothing but the standard
library is imported here: the doctor and vLLM's plugin load this file without the rest of FlashInfer.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# C's environment, which os.environ changes too: a call reads two variables that are hardly ever set, and os.environ
# takes 1 us to say so, by an exception; this takes 0.2 us.
getenv = ctypes.PyDLL(None).getenv
getenv.restype = ctypes.c_char_p


class VariableError(ValueError):
    """A variable, or a key of vLLM's ``--additional-config``, has a value that it cannot have."""


@dataclass(frozen=True)
class Variable:
    """One row.

    Attributes:
        takes: Its values, in words that complete "it may be ...".
        default: The effect of leaving it unset, in words.
        help: Its purpose; a sentence.
        parse: Turns its text, never empty, into its value; raises ``ValueError`` for a bad one.
        unset: Its value if it is unset or empty.
        forgotten: ``(value, effect)`` of a debugging switch; the doctor warns if it is left on.
    """

    takes: str
    default: str
    help: str
    parse: Callable[[str], Any] = str
    unset: Any = ""
    forgotten: tuple[Any, str] | None = None


def _switch(default: str, help: str, unset: bool | None = False, forgotten: tuple[Any, str] | None = None) -> Variable:
    return Variable("0, 1", default, help, lambda text: bool(("0", "1").index(text)), unset, forgotten)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    return int(text[:9])


def _count(text: str) -> int:
    if not _whole(text):
        raise ValueError
    return int(text)


_LEVELS = ("debug", "info", "warning", "error", "critical")


def _level(text: str) -> str:
    return _LEVELS[_LEVELS.index(text.lower())].upper()


def _words(text: str) -> tuple[str, ...]:
    """The text's words, split as a shell splits them."""
    return tuple(shlex.split(text))


def _folder(text: str) -> str:
    """The folder's path; ``~`` and ``~name`` are home folders even if no shell has expanded them."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError
    return path


def _architecture(text: str) -> str:
    return ("sm_121a",)[("sm_121a",).index(text)]


_TOKENS = {
    "mxint8": ("a16",),
    "mxfp8": ("a16", "a8"),
    "mxfp6": ("a16", "a8"),
    "nvfp4": ("a16",),
    "mxfp4": ("a16", "a8"),
}
"""Formats of dense weights, and to what their tokens may be rounded beside them."""
_DENSE = (
    "bf16",
    *(name for form, tokens in _TOKENS.items() for name in (form, *(f"{form}-{each}" for each in tokens))),
)

RESCORED = "nvfp4_rescored"
"""Of LM heads: NVFP4, and the largest logits again from the bf16 weight."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "moe": ("auto", "mxfp4", "mxfp4-a8", "mxfp4-a16", "vllm"),
    "qkv": _DENSE,
    "o": _DENSE,
    "lm_head": (*_DENSE, RESCORED),
    "moe_input": ("bf16", "mxfp8"),
    "graphs": ("spark", "vllm"),
    "attention": ("flashinfer", "vllm"),
    "decode": ("fused", "vllm"),
}
"""The choices that vLLM's plugin gives a user: key -> its values."""

FOLDER, PRESET = "dense", "preset"
"""Keys beside those: a folder of ``sm12x-quantize``'s or a name of one on the hub, and one of :data:`PRESETS`."""
KEYS = (*CHOICES, FOLDER, PRESET)


def _dense(body: str, lm_head: str) -> Mapping[str, str]:
    return {"qkv": body, "o": body, "lm_head": lm_head}


PRESETS: Mapping[str, Mapping[str, str]] = {
    "spark": _dense("mxfp6", RESCORED),
    "spark-int8": _dense("mxint8", "mxint8"),
    "spark-fast": _dense("nvfp4", RESCORED),
    "spark-mxfp4": _dense("mxfp4", "mxfp4"),
    "spark-mxfp8": _dense("mxfp8", "mxfp8"),
}
"""Dense layers' choices under one name; docs/accuracy.md has what each loses."""

CHANGED_PRESETS: Mapping[str, str] = {
    "spark": "'spark' is MXFP6 in QKV and O and nvfp4_rescored in the LM head; it was MXINT8 there (lm_head=mxint8), "
    "and before that MXFP4 in all three, which is 'spark-mxfp4'",
    "spark-fast": "'spark-fast' is NVFP4 in QKV and O and nvfp4_rescored in the LM head; it was MXINT8 there "
    "(lm_head=mxint8)",
    "spark-mxfp8": "'spark-mxfp8' is MXFP8, as it was; 'spark-int8' has the same bytes and loses less",
}
"""The message, given once, for a user who chooses a name that meant another choice, or is no longer the best of its
kind."""


def presets_in(text: str) -> list[str]:
    """The presets that :func:`parse_choices` would find."""
    return [item for item in map(str.strip, text.split(",")) if item in PRESETS]


def check_choices(given: Mapping[str, Any], origin: str) -> dict[str, str]:
    """The same keys and values, where they are of :data:`KEYS`.

    Raises:
        VariableError: an unknown key or value, naming ``origin``, where it stands, and what it may be.
    """
    for key, value in given.items():
        if key not in KEYS:
            raise VariableError(f"{origin}: {key!r} is no key of it; the keys are {', '.join(KEYS)}")
        if key == FOLDER:
            if not isinstance(value, str):
                raise VariableError(
                    f"{origin}: {key} is {value!r}; it may be a folder of sm12x-quantize's, or a name on the hub"
                )
            continue
        allowed = tuple(PRESETS) if key == PRESET else CHOICES[key]
        if value not in allowed:
            hint = " (the checkpoint's experts are MXFP4 and stay so)" if key == "moe" else ""
            raise VariableError(f"{origin}: {key} is {value!r}{hint}; it may be {', '.join(allowed)}")
    return dict(given)


def check_together(chosen: Mapping[str, str]) -> None:
    """Refuse choices that exclude each other, wherever each of them was made.

    Raises:
        VariableError: naming both, and which may go.
    """
    if (chosen.get("moe"), chosen.get("moe_input")) == ("mxfp4-a16", "mxfp8"):
        raise VariableError(
            "moe is 'mxfp4-a16' and moe_input 'mxfp8': experts that multiply bf16 tokens take no MXFP8 input; choose "
            "moe 'mxfp4-a8', or moe_input 'bf16'"
        )


PLUGIN = "FLASHINFER_SM12X_VLLM"


def parse_choices(text: str, origin: str, also: str = "") -> dict[str, str]:
    """``spark``, ``qkv=mxfp8,o=mxfp8`` or both, in which a pair wins over a preset; ``also`` is what else it may be.
    The last preset is kept under :data:`PRESET`.

    Raises:
        VariableError: as :func:`check_choices`, or an item that is neither.
    """
    items = [item.strip() for item in text.split(",")]
    chosen: dict[str, str] = {}
    for item in items:
        if "=" not in item and item not in PRESETS:
            raise VariableError(
                f"{origin}: {item!r} is no key=value and no preset; it may be {also}{', '.join(PRESETS)}, pairs such "
                f"as moe=mxfp4-a16,qkv=mxfp8 with the keys {', '.join(KEYS)}, or both with commas between them"
            )
        if item in PRESETS:
            chosen[PRESET] = item
    pairs = (item.partition("=") for item in items if "=" in item)
    return chosen | check_choices({key.strip(): value.strip() for key, _, value in pairs}, origin)


def with_preset(chosen: Mapping[str, str]) -> dict[str, str]:
    """Choices with those of a preset among them in its place; what is chosen beside it wins."""
    pairs = {key: value for key, value in chosen.items() if key != PRESET}
    return {**PRESETS.get(chosen.get(PRESET, ""), {}), **pairs}


def _plugin_choices(text: str) -> dict[str, str] | None:
    """The choices, none for 1; None for 0, which switches the plugin off."""
    if text.strip() in ("", "0", "1"):
        return None if text.strip() == "0" else {}
    return parse_choices(text, PLUGIN, "0, 1, ")


TABLE: Mapping[str, Variable] = {
    "FLASHINFER_SM12X_MOE": _switch(
        "1 on SM12x, 0 elsewhere",
        "`0`: SM12x uses upstream's kernels, for comparison; `1`: Hopper uses this family, too.",
        None,
        (False, "upstream's kernels run in place of this fork's"),
    ),
    PLUGIN: Variable(
        f"0, 1, {', '.join(PRESETS)} or pairs such as qkv=mxint8,o=mxfp6",
        "1",
        "`0` switches vLLM's plugin off; presets and pairs are its [choices](serving.md#choices).",
        _plugin_choices,
        {},
        (None, "vLLM goes without this fork's plugin"),
    ),
    "FLASHINFER_SM12X_CHECK": _switch(
        "0",
        "`1`: indices and lengths are checked on the GPU before each launch; for debugging.",
        forgotten=(True, "every layer waits for the GPU"),
    ),
    "FLASHINFER_SM12X_HALF_MMA": _switch(
        "what `--probe` found, else 0",
        "`1`: MXFP8 and MXFP4 tokens are multiplied in half precision; `0`: by block-scaled MMAs.",
        None,
    ),
    "FLASHINFER_SM12X_EMBED_PTX": _switch(
        "0",
        "`1`: modules carry their kernels' PTX, under names of their own.",
        forgotten=(True, "modules of another name, with PTX, are built and used"),
    ),
    "FLASHINFER_SM12X_EDITABLE": _switch("0", "Set by `tools/pep517.py` while `pip install -e` runs."),
    "FLASHINFER_VIRTUAL_DEVICE": Variable(
        "sm_121a", "none", "CPU tensors run the compiled kernels on the virtual SM121.", _architecture
    ),
    "FLASHINFER_CUDA_ARCH_LIST": Variable(
        "12.1a, 12.1f, 12.0a, 12.0f, 9.0a, or several with spaces or semicolons",
        "the GPUs that are visible",
        "What modules are compiled for.",
    ),
    "FLASHINFER_WORKSPACE_BASE": Variable(
        "a folder; ~ and ~name are home folders of users that there are",
        "the home folder",
        "The cache is `.cache/flashinfer` in this folder.",
        _folder,
    ),
    "FLASHINFER_ALLOW_SHARED_CACHE": _switch(
        "0",
        "`1`: a cache is used that other users own or may write to.",
        forgotten=(True, "whoever can write to the cache chooses what code runs here"),
    ),
    "FLASHINFER_DISABLE_JIT": Variable(
        "any text",
        "modules are compiled when first used",
        "Nothing is compiled: a module that is not built is an error.",
        bool,
        False,
        (True, "a module that is not built, upstream's included, is an error"),
    ),
    "FLASHINFER_DISABLE_VERSION_CHECK": Variable(
        "any text",
        "versions are compared",
        "Upstream loads kernels of other versions of FlashInfer.",
        bool,
        False,
        (True, "kernels of other versions of FlashInfer are loaded"),
    ),
    "FLASHINFER_LOGLEVEL": Variable(
        "a whole number", "0", "Upstream's log of its calls: 1 their names, 3 arguments, 5 statistics.", _whole, 0
    ),
    "FLASHINFER_LOGGING_LEVEL": Variable(
        ", ".join(_LEVELS), "info", "Upstream's log of what is compiled and downloaded.", _level, "INFO"
    ),
    "FLASHINFER_NVCC_THREADS": Variable(
        "a positive whole number", "1", "Threads of each CUDA compiler; a bad value is ignored.", _count, 1
    ),
    "FLASHINFER_JIT_VERBOSE": _switch("0", "`1`: compilers' commands and output are printed."),
    "FLASHINFER_JIT_DEBUG": _switch(
        "0",
        "`1`: kernels are compiled for a debugger.",
        forgotten=(True, "kernels are compiled without optimization"),
    ),
    "FLASHINFER_JIT_LINEINFO": _switch("0", "`1`: kernels are compiled with line information for a profiler."),
    "FLASHINFER_JIT_PREBUILD_MAX_JOBS": Variable(
        "a positive whole number",
        "as `MAX_JOBS`",
        "Compilers at once when modules are built ahead of time.",
        _count,
        None,
    ),
    "FLASHINFER_NVCC": Variable("a program", "the toolkit's", "The CUDA compiler."),
    "FLASHINFER_NVCC_LAUNCHER": Variable(
        "a command, quoted as for a shell", "none", "Stands before the CUDA compiler: `ccache`, `distcc`.", _words, ()
    ),
    "FLASHINFER_CXX_LAUNCHER": Variable(
        "a command, quoted as for a shell", "none", "Stands before the C++ compiler.", _words, ()
    ),
    "FLASHINFER_EXTRA_CFLAGS": Variable(
        "flags, quoted as for a shell", "none", "Added when C++ is compiled.", _words, ()
    ),
    "FLASHINFER_EXTRA_CUDAFLAGS": Variable(
        "flags, quoted as for a shell", "none", "Added when CUDA is compiled.", _words, ()
    ),
    "FLASHINFER_EXTRA_LDFLAGS": Variable(
        "flags, quoted as for a shell", "none", "Added when a module is linked.", _words, ()
    ),
    "CUDA_HOME": Variable("a folder", "`nvcc` on `PATH`, then `/usr/local/cuda`, then pip's", "The CUDA toolkit."),
    "CUDA_PATH": Variable("a folder", "as `CUDA_HOME`", "The CUDA toolkit where `CUDA_HOME` is unset."),
    "CC": Variable("a program", "nvcc's choice", "The host compiler of CUDA sources."),
    "CXX": Variable("a program", "`c++`", "Compiles C++ and links."),
    "NVCC_CCBIN": Variable("a program", "nvcc's choice", "The host compiler of CUDA sources where `CC` is unset."),
    "MAX_JOBS": Variable(
        "a positive whole number",
        "by cores and free memory",
        "Compilers at once; a bad value is ignored.",
        _count,
        None,
    ),
}


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The value of a variable of :data:`TABLE` now.

    Raises:
        VariableError: it has none; the message says what it may be.
    """
    variable = TABLE[name]
    found = getenv(name.encode()) if environ is None else environ.get(name)
    if not found:
        return variable.unset
    text = found if isinstance(found, str) else os.fsdecode(found)
    try:
        return variable.parse(text)
    except VariableError:
        raise
    except ValueError:
        raise VariableError(f"{name} is {text!r}; it may be {variable.takes} or unset") from None


def check_imported() -> None:
    """Name a bad variable of the two that upstream reads while it is imported, in words of Python's.

    Raises:
        VariableError: as :func:`read`, or one is empty, which upstream does not take for unset.
    """
    for name in ("FLASHINFER_LOGLEVEL", "FLASHINFER_LOGGING_LEVEL"):
        read(name)
        if os.environ.get(name) == "":
            raise VariableError(f"{name} is empty; it may be {TABLE[name].takes} or unset")


def one_edit_apart(a: str, b: str) -> bool:
    """Whether one edit turns ``a`` into ``b``: a letter inserted, dropped, changed or swapped with its neighbour."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest, other = a[start:], b[start:]
    swapped = rest[1::-1] + rest[2:] if len(rest) > 1 else rest
    return a != b and (rest[1:] == other[1:] or rest[1:] == other or rest == other[1:] or swapped == other)


def _meant(name: str) -> str | None:
    """The variable of :data:`TABLE` that a name misspells; empty: the name has SM12X in it but is close to no variable;
    None: the name is not this project's, or is right."""
    upper = name.upper()
    if name in TABLE or not re.fullmatch(r"\w+", name, re.ASCII):  # nobody sets another from a shell
        return None
    for known in TABLE:
        if known.startswith("FLASHINFER_") and (known == upper or one_edit_apart(known, upper)):
            return known
    return "" if "SM12X" in upper else None


def problems(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """``(name, what is wrong, the name that was meant)`` of unknown names and bad values; the last is empty for
    values."""
    for name in sorted(environ):
        meant = _meant(name)
        if meant is not None:
            known = f"; {meant} is" if meant else ""
            yield name, f"{name} is no variable of this project{known}", meant
        elif name in TABLE:
            try:
                read(name, environ)
            except VariableError as error:
                yield name, str(error), ""


def forgotten(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """``(name, effect)`` of debugging switches that are left on."""
    for name, variable in TABLE.items():
        if variable.forgotten is not None and environ.get(name):
            value, effect = variable.forgotten
            try:
                if read(name, environ) == value:
                    yield name, f"{name}={environ[name]}: {effect}"
            except VariableError:
                continue


def as_markdown() -> str:
    """The table of docs/troubleshooting.md."""
    rows = [f"| `{name}` | {v.takes} | {v.default} | {v.help} |" for name, v in TABLE.items()]
    return "\n".join(["| variable | takes | unset | |", "|---|---|---|---|", *rows])
