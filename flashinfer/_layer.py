# SPDX-License-Identifier: Apache-2.0
"""How this package lies over a tested ``flashinfer-python`` wheel.

The fork holds only the modules it adds or changes; every other module is the wheel's. Two things make the two
directories one package:

1. ``__path__`` of each package that both have is ``[ours, the wheel's]``, so a module of ours is found first and any
   other one is found in the wheel.
2. A module of ours that exists upstream too *extends* it. It says so once, as the first statement after its
   docstring::

       from flashinfer._layer import extend

       _upstream = extend(globals())

   Upstream's code then runs in the module's own namespace, and what our module defines afterwards replaces names in
   that same namespace: upstream functions of the module see our replacements. ``_upstream`` holds upstream's
   definitions as they were, so that a replacement can call what it replaces::

       def cutlass_fused_moe(...):
           if not _is_ours(...):
               return _upstream.cutlass_fused_moe(...)

   For type checkers, follow it with ``if TYPE_CHECKING: def __getattr__(name: str) -> Any: ...``.

Rules that follow from it, each with a test in ``tests/layer``:

* A directory of ours under ``flashinfer/`` that exists upstream needs an ``__init__.py`` that extends. If it had none,
  Python would take the wheel's package and never find our modules in it.
* While upstream's code runs, ``__file__`` is upstream's (``flashinfer.jit.env`` derives the data folder from it) and
  ``__name__`` is the module's real name, also under ``python -m``: upstream's ``if __name__ == "__main__"`` does not
  fire, so a module of ours that is run as a script needs its own. Afterwards both are what Python set.
  ``__upstream_file__`` remains as the wheel's file.
* A module docstring of ours wins over upstream's; without one, upstream's stays.

Over a wheel of another version, and with ``FLASHINFER_SM12X_MOE=0``, nothing is layered: :func:`hand_over` makes the
package the wheel's.

``docs/development.md`` tells it with a table.
"""

from __future__ import annotations

import functools
import linecache
import logging
import sys
from collections.abc import Iterator, Set
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.readers import MultiplexedPath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashinfer_sm12x.versions import (
    SWITCH,
    UPSTREAM_DISTRIBUTION,
    Wheel,
    __fork_version__,
    fix,
    installed_wheels,
    needed,
    tested_wheel,
    upstream_spec,
)

_OURS = Path(__file__).resolve().parent


def fork_root() -> Path:
    """The directory that holds this fork's ``flashinfer/``, ``include/``, ``csrc/`` and ``3rdparty/``.

    It is the checkout when the fork runs from one (``PYTHONPATH``, ``pip install -e .``), and
    ``site-packages/flashinfer_sm12x_tree`` after ``pip install .``. The layout below it is the same.
    """
    return _OURS.parent


def wheel_root() -> Path:
    """The ``flashinfer/`` directory of the wheel that is extended, looked for on ``sys.path``.

    Raises:
        ImportError: no installed wheel has a version that this fork extends. The message lists what was found and
            gives the command that installs what is needed.
    """
    return _wheel().package


@functools.cache
def _wheel() -> Wheel:
    wheel = tested_wheel()
    if wheel is not None:
        return wheel
    found = "; ".join(map(str, installed_wheels()))
    raise ImportError(
        f"flashinfer (the SM12x fork {__fork_version__} in {fork_root()}) extends the wheel {needed()}.\n"
        f"Found: {found or f'no {UPSTREAM_DISTRIBUTION} on sys.path'}.\n"
        f"Install it with:  {fix('--force-reinstall --no-deps ' if found else '')}",
        name="flashinfer",
        path=str(_OURS),
    )


def hand_over(namespace: dict[str, Any], before: Set[str], reason: str) -> None:
    """Make the package that Python is importing upstream's, as if this fork were not on ``sys.path``.

    Args:
        namespace: ``globals()`` of our ``flashinfer/__init__.py``, which executes nothing more of its own after that.
        before: The names in it when our code began.
        reason: :func:`flashinfer_sm12x.versions.upstream_alone`'s; a warning says it once, unless a user asked for it.
    """
    spec: Any = upstream_spec()
    logger: Any = logging.getLogger("flashinfer_sm12x")
    if not reason.startswith(SWITCH) and not hasattr(logger, "warned"):
        logger.warned = True  # this module is forgotten below
        # Not warnings.warn: a user's filter may make it an error, and upstream's package must still be imported.
        logger.warning(
            "flashinfer-sm12x steps aside, and 'import flashinfer' is upstream's package alone: %s. For this fork's "
            "kernels: %s, unless other packages need the one that is there; then a newer flashinfer-sm12x may serve "
            "it",
            reason,
            fix("--force-reinstall --no-deps "),
        )
    for name in set(namespace) - before:
        del namespace[name]
    for name in [name for name, module in sys.modules.items() if _is_ours(name, module)]:
        del sys.modules[name]  # upstream may have a module of that name
    module = sys.modules[spec.name]
    namespace.update(
        __doc__=None,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __path__=spec.submodule_search_locations,
        __spec__=spec,
    )
    spec._initializing = True  # as Python has it of a module that other threads must wait for
    try:
        spec.loader.exec_module(module)
    finally:
        spec._initializing = False


def _is_ours(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return name.startswith("flashinfer.") and file is not None and Path(file).resolve().is_relative_to(_OURS)


def extend(namespace: dict[str, Any]) -> Any:
    """Run the upstream module of the same name in ``namespace``, which is the caller's ``globals()``.

    Args:
        namespace: ``globals()`` of the module that extends. Its ``__spec__`` names the upstream module.

    Returns:
        A namespace object with upstream's definitions as attributes, as they were before the caller replaced any.

    Raises:
        ImportError: no wheel of a tested version is there, or it has no module of this name.
        RuntimeError: the caller was not imported as a module (``python path/to/file.py``).
    """
    spec = namespace.get("__spec__")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            f"{namespace.get('__file__', namespace.get('__name__'))} extends a module of the flashinfer wheel and "
            f"so must be imported, or run with 'python -m', not run as a file"
        )
    source = _upstream_source(spec)
    if spec.submodule_search_locations is not None:
        _layer_package(namespace, spec, source.parent)

    before = dict(namespace)
    namespace.update(__file__=str(source), __name__=spec.name)
    try:
        code = SourceFileLoader(spec.name, str(source)).get_code(spec.name)
        assert code is not None
        exec(code, namespace)
    finally:
        namespace.update(__file__=before["__file__"], __name__=before["__name__"])
    if before.get("__doc__"):
        namespace["__doc__"] = before["__doc__"]

    # Names that upstream's code binds, even if our module had imported the very same object before.
    added = {k: v for k, v in namespace.items() if before.get(k) is not v or k in code.co_names}
    _let_inspect_see_both(spec, source, added)
    namespace["__upstream_file__"] = str(source)
    return SimpleNamespace(**added)


def _upstream_source(spec: ModuleSpec) -> Path:
    """The wheel's file at the place that the module of ours has in this package."""
    assert spec.origin is not None
    ours = Path(spec.origin).resolve()
    if not ours.is_relative_to(_OURS):
        raise ImportError(f"{spec.name} calls extend(), but {ours} does not lie in {_OURS}", name=spec.name)
    same = wheel_root() / ours.relative_to(_OURS)
    other_kind = same.parent.with_suffix(".py") if same.name == "__init__.py" else same.with_suffix("") / "__init__.py"
    for source in (same, other_kind):
        if source.is_file():
            return source
    raise ImportError(
        f"{spec.name} calls extend(), but {_wheel()} has no such module: there is nothing to extend",
        name=spec.name,
    )


def _layer_package(namespace: dict[str, Any], spec: ModuleSpec, upstream: Path) -> None:
    """Append the wheel's directory to the package's ``__path__`` and to where its resources are looked for."""
    locations = namespace["__path__"]
    if str(upstream) not in locations:
        locations.append(str(upstream))
    assert spec.origin is not None
    reader = SimpleNamespace(files=functools.partial(_LayeredFiles, Path(spec.origin).parent, upstream))
    vars(spec.loader)["get_resource_reader"] = lambda _name: reader


class _LayeredFiles(MultiplexedPath):
    """Directories of the same name as one: the first that has an entry gives it."""

    def __init__(self, *roots: Path) -> None:
        super().__init__(*roots)
        self._roots = roots

    def joinpath(self, *parts: Any) -> Any:
        paths = [root.joinpath(*parts) for root in self._roots]
        present = [path for path in paths if path.exists()] or paths[:1]
        if len(present) > 1 and all(path.is_dir() for path in present):
            return _LayeredFiles(*present)
        return present[0]

    def __truediv__(self, part: Any) -> Any:
        return self.joinpath(part)


def _let_inspect_see_both(spec: ModuleSpec, upstream: Path, added: dict[str, Any]) -> None:
    """Make ``inspect.getsource`` work for upstream's classes too.

    ``inspect`` finds a function's text by its code object, which knows the wheel's file, but a class's text by its
    module's ``__file__``, which is ours. So the line cache's entry for our file gets upstream's text after ours: line
    numbers of ours stay true, and a class of upstream's is found below. Python 3.13 records the line of a class in
    the class itself; it is moved by as much.
    """
    assert spec.origin is not None
    linecache.cache.pop(spec.origin, None)  # after importlib.reload(): what an earlier call put there
    ours = linecache.getlines(spec.origin)
    head = [*ours, "\n", f"# ---- extends {upstream}\n"]
    lines = head + linecache.getlines(str(upstream))
    # A modification time of None keeps linecache.checkcache() from dropping the entry.
    linecache.cache[spec.origin] = (
        sum(map(len, lines)),
        None,
        lines,
        spec.origin,
    )
    for cls in _classes_of(spec.name, added):
        if "__firstlineno__" in vars(cls):
            cls.__firstlineno__ += len(head)


def _classes_of(module: str, namespace: dict[str, Any]) -> Iterator[Any]:
    seen: set[int] = set()
    stack = list(namespace.values())
    while stack:
        value = stack.pop()
        if isinstance(value, type) and value.__module__ == module and id(value) not in seen:
            seen.add(id(value))
            yield value
            stack.extend(vars(value).values())
