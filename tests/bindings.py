# SPDX-License-Identifier: Apache-2.0
"""The functions of the compiled modules, from their C++: the names of what a launch passes by its place, and the texts
of what is refused."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import torch

from flashinfer._layer import fork_root

_EXPORT = re.compile(r"TVM_FFI_DLL_EXPORT_TYPED_FUNC\((\w+), (?:\w+::)*(\w+)\)")
TYPES: dict[str, tuple[type, ...]] = {
    "TensorView": (torch.Tensor,),
    "Optional<TensorView>": (torch.Tensor, type(None)),
    "int64_t": (int,),
    "double": (float,),
    "bool": (bool,),
}
"""What Python passes as a C++ type. TVM-FFI would turn a bool into a number, and any number into a bool, without a
word."""


@functools.cache
def signatures() -> dict[str, dict[str, str]]:
    """Exported functions that this project's sources define beside the export: parameters' names and types, in
    order."""
    found = {}
    for path in sorted((fork_root() / "csrc").rglob("*sm12x*binding*")):
        text = path.read_text()
        for exported, function in _EXPORT.findall(text):
            for definition in re.findall(rf"^\w+ {function}\(([^)]*)\) {{$", text, re.MULTILINE):
                pairs = (each.split() for each in definition.split(",") if each)
                found[exported] = {name: kind for kind, name in pairs}
    return found


def named(function: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of a call by their parameters' names; raises ``TypeError`` where one is of another type."""
    given = dict(zip(signatures()[function], arguments, strict=True))
    for name, kind in signatures()[function].items():
        value, types = given[name], TYPES[kind]
        if not isinstance(value, types) or (bool not in types and isinstance(value, bool)):
            raise TypeError(f"{function}: {name} is a {type(value).__name__}; C++ takes {kind}")
    return given


def in_order(function: str, **arguments: Any) -> tuple[Any, ...]:
    """Arguments in the order of the function's parameters; what is not given and may be absent is None."""
    parameters = signatures()[function]
    if unknown := arguments.keys() - parameters.keys():
        raise TypeError(f"{function} has no {', '.join(sorted(unknown))}; it has {', '.join(parameters)}")
    ordered = tuple(arguments.get(name) for name in parameters)
    named(function, ordered)
    return ordered


_CHECK = re.compile(r'TVM_FFI_CHECK\((.*?)\)\s*(<<(?:"(?:[^"\\]|\\.)*"|[^;"])*);', re.DOTALL)
_STATUS = re.compile(r"return \{\s*(?:cudaError\w+|error),\s*(\"[^\"]*\")", re.DOTALL)


class Refusal(NamedTuple):
    """A refusal of a binding's or a launcher's: the name of its file, and the literals of its text, between which
    values stand."""

    file: str
    parts: tuple[str, ...]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.parts).split())


@functools.cache
def refusals() -> tuple[Refusal, ...]:
    """All refusals with a text of this project's C++."""
    found = []
    for folder in ("csrc", "include/flashinfer/gemm", "include/flashinfer/sm12x"):
        for path in sorted((fork_root() / folder).rglob("*")):
            if path.suffix in (".cu", ".cuh", ".h", ".inl", ".cpp"):
                text = re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
                for said in (*(said for _, said in _CHECK.findall(text)), *_STATUS.findall(text)):
                    found.append(Refusal(path.name, tuple(re.findall(r'"((?:[^"\\]|\\.)*)"', said))))
    return tuple(each for each in found if each.parts)
