# SPDX-License-Identifier: Apache-2.0
"""Finds what the plugin replaces in vLLM by looking at all of vLLM's modules before and after ``register()``. Run in a
process of its own, without the plugin; prints one JSON object.

Every value that a module or a class of vLLM's holds is compared by identity, and so are the entries of dictionaries,
lists and sets, and the attributes of objects of vLLM's own classes, that they hold.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import flashinfer_sm12x.vllm as plugin
from flashinfer_sm12x.vllm import api_checks, fallback, replacements

State = dict[tuple[int, str], tuple[str, Any]]
"""The holder's identity and a name in it -> the path at which it was found, and the value; the holder has no name."""
DEPTH = 3  # a module, an object of it, that object's registry, and its entries
PARTS = ("config", "decode", "experts", "nvfp4", "head", "rescored", "attention")


def is_vllms(name: object) -> bool:
    return str(name).partition(".")[0] == "vllm"


def items(held: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds: ``.attribute`` or ``[key]``, and its value."""
    if isinstance(held, ModuleType) or (isinstance(held, type) and is_vllms(held.__module__)):
        for name, value in list(vars(held).items()):
            yield f".{name}", value
    elif isinstance(held, dict):
        for key, value in list(held.items()):
            yield f"[{key}]", value
    elif isinstance(held, (list, tuple)):
        for at, value in enumerate(held):
            yield f"[{at}]", value
    elif isinstance(held, (set, frozenset)):
        for value in held:
            yield f"[{value}]", value
    elif is_vllms(type(held).__module__):
        for name, value in list(getattr(held, "__dict__", {}).items()):
            yield f".{name}", value


def state() -> State:
    """Everything that vLLM's modules hold."""
    found: State = {}
    seen: set[int] = set()
    modules = [(name, module, 0) for name, module in sorted(sys.modules.items()) if is_vllms(name)]
    inside: deque[tuple[str, Any, int]] = deque(modules)
    while inside:
        path, held, depth = inside.popleft()
        if id(held) in seen:
            continue
        seen.add(id(held))
        found[id(held), ""] = (path, held)
        for name, value in items(held):
            found[id(held), name] = (f"{path}{name}", value)
            if depth <= DEPTH and not isinstance(value, ModuleType):
                inside.append((f"{path}{name}", value, depth + 1))
    return found


def changed(before: State, after: State) -> dict[str, Any]:
    """What is not what it was, an entry of the table by its name there -> what it is now."""
    entries = {}
    for each in replacements.TABLE:
        holder, name, is_registry = each._place()
        entries[id(holder), f"[{name}]" if is_registry else f".{name}"] = str(each)
    gone = ("", object())
    # What a new object holds came with it.
    both = {holder for holder, name in before if not name} & {holder for holder, name in after if not name}
    return {
        entries.get(key) or (after.get(key) or before[key])[0]: after.get(key, gone)[1]
        for key in {**before, **after}
        if key[0] in both and before.get(key, gone)[1] is not after.get(key, gone)[1]
    }


def told(value: Any) -> str:
    """An object of this package by its name, as the table has it; others as they are shown."""
    if hasattr(value, "module_name"):  # the registry's entry of a model that is not imported yet
        return f"{value.module_name}.{value.class_name}".removeprefix(f"{plugin.__name__}.")
    if not hasattr(value, "__qualname__"):
        return repr(value)[:200]
    return f"{value.__module__}.{value.__qualname__}".removeprefix(f"{plugin.__name__}.").partition(".<locals>")[0]


def start_anew() -> None:
    """As a process that has not registered the plugin."""
    for each in reversed([*replacements._before]):
        each.take_back()
    api_checks._left.clear()
    fallback._logged.clear()
    plugin._registered, plugin.outcome = False, ""


def build_a_head() -> None:
    """What the first head that rescores does, if the plugin's class of heads is there."""
    module = api_checks.module("rescored")
    if module is not None and any(each.part == "head" for each in replacements._before):
        with fallback.leaving(api_checks.MODULES["rescored"][1]):
            module.install()


def register(fails: Callable[[Any], bool] = lambda _: False, written: bool = False) -> None:
    """``register()``, in which an entry for which ``fails`` cannot be replaced; ``written``: what failed had replaced
    it."""
    real = replacements.Replacement.replace

    def replace(self: Any, new: Any, through: Any = None) -> None:
        def fail(new: Any) -> None:
            if written:
                (through or self._write)(new)
            raise RuntimeError("injected")

        real(self, new, fail if fails(self) else through)

    replacements.Replacement.replace = replace  # type: ignore[method-assign]
    try:
        plugin.register()
        build_a_head()
    finally:
        replacements.Replacement.replace = real  # type: ignore[method-assign]


def in_a_child(before: State) -> list[str]:
    """What registering once more in a forked process changes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        plugin._registered = False
        plugin.register()
        os.write(write, json.dumps([*changed(before, state())]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return list(json.load(pipe))


if __name__ == "__main__":
    from vllm.platforms import current_platform

    messages: list[str] = []
    logging.getLogger("vllm.flashinfer_sm12x").addFilter(lambda record: messages.append(record.getMessage()) or False)
    assert current_platform.is_device_capability(121)
    for part in api_checks.TABLE:  # imports all of vLLM's that register() does
        assert not api_checks.why_not(part), part

    virgin = state()
    plugin.register()
    build_a_head()
    after = state()
    made = changed(virgin, after)
    result: dict[str, Any] = {
        "looked at": len(virgin),
        "outcome": plugin.outcome,
        "made": {path: told(value) for path, value in made.items()},
    }
    plugin._registered = False
    plugin.register()
    build_a_head()
    result["again"] = [*changed(after, state())]
    result["in a child"] = in_a_child(after)
    result["log"] = messages[:]
    result["failed"] = []
    for part in PARTS:
        for at, entry in enumerate(replacements.of(part)):
            for written in (False, True):
                start_anew()
                messages.clear()
                assert not changed(virgin, state())
                register(lambda each, entry=entry: each == entry, written)
                result["failed"].append(
                    {
                        "part": part,
                        "at": at,
                        "changed": [*changed(virgin, state())],
                        "outcome": plugin.outcome,
                        "left": [each for each in api_checks.TABLE if api_checks.why_not(each)],
                        "log": messages[:],
                    }
                )
    print("RESULT", json.dumps(result))
