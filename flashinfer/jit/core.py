# SPDX-License-Identifier: Apache-2.0
"""JIT specs, and building many of them.

Adds to upstream: ``build_jit_specs`` hands specs of the SM12x family to their own engine, and builds upstream's so that
their first load finds them fresh; that engine's log lines go where upstream's do.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from flashinfer._layer import extend

_upstream = extend(globals())

from flashinfer_sm12x import variables
from flashinfer_sm12x.build.diagnosis import explained_os_errors
from flashinfer_sm12x.build.engine import Progress
from flashinfer_sm12x.build.jobs import parallel_jobs
from flashinfer_sm12x.build.trust import make_folder, require_trusted, require_trusted_tree

from . import cpp_ext
from . import env as jit_env

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


# Upstream's JIT logger stands outside the hierarchy.
_engine_logger = logging.getLogger("flashinfer.jit.sm12x")
_engine_logger.handlers = list(_upstream.logger.handlers)
_engine_logger.setLevel(_upstream.logger.level)
_engine_logger.propagate = False


def require_trusted_sources(sources: Iterable[Path]) -> None:
    """Check the folders of generated sources: what lies beside one is found by its ``#include "..."``.

    Raises:
        UntrustedCacheError: another user can write there.
    """
    for folder in {Path(source).parent for source in sources}:
        if folder.is_relative_to(jit_env.FLASHINFER_GEN_SRC_DIR):
            require_trusted_tree(folder)


_JitSpecNvcc: Any = _upstream.JitSpecNvcc


class JitSpecNvcc(_JitSpecNvcc):  # type: ignore[misc]
    """Upstream's; its folder is made private, and what lies in the cache is loaded if nobody else can have put it
    there."""

    def build_and_load(self) -> Any:
        """The module, built before if it is not there or a file that it is made of has changed.

        Raises:
            JitBuildError: a compiler failed, or the cache cannot be written.
            UntrustedCacheError: another user can write to the cache.
        """
        with explained_os_errors(self.name, self.build_dir):
            return super().build_and_load()

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's.

        Raises:
            The errors of :meth:`build_and_load`.
        """
        with explained_os_errors(self.name, self.build_dir):
            return super().build(*args, **kwargs)

    def write_ninja(self) -> None:
        """Write the build file.

        Raises:
            UntrustedCacheError: another user can write to the module's folder, or beside a generated source.
        """
        require_trusted_tree(self.build_dir)
        require_trusted_sources(self.sources)
        make_folder(self.build_dir)
        super().write_ninja()
        self.ninja_path.chmod(self.ninja_path.stat().st_mode & ~0o022)

    def load(self, so_path: Path | None = None) -> Any:
        """The module at ``so_path``, of a wheel or of the cache; the cache's when omitted.

        Raises:
            UntrustedCacheError: it lies in the cache, and another user can write there.
        """
        path = so_path or self.jit_library_path
        if path.is_relative_to(jit_env.FLASHINFER_JIT_DIR):
            require_trusted(path)
        return super().load(path)


def replace_registered(spec: Any) -> None:
    """Put a spec into the registry in place of the one of its name, if there is one."""
    _upstream.jit_spec_registry.register(spec)
    _upstream.jit_spec_registry._specs[spec.name] = spec


def build_jit_specs(specs: Sequence[Any], verbose: bool = False, skip_prebuilt: bool = True) -> None:
    """Build modules.

    Args:
        specs: JIT specs, upstream's and those of the SM12x family.
        verbose: Show the compilers' output.
        skip_prebuilt: Leave out modules of upstream's that an installed wheel brings.

    Raises:
        JitBuildError: a module could not be built.
        TypeError: a spec of upstream's is not compiled by nvcc.
    """
    max_jobs = variables.read("FLASHINFER_JIT_PREBUILD_MAX_JOBS")
    own = [spec for spec in specs if getattr(spec, "has_own_engine", False)]
    others = []
    for spec in specs:
        if spec in own:
            continue
        if not isinstance(spec, _JitSpecNvcc):
            raise TypeError(f"{spec.name} is a {type(spec).__name__}; build_jit_specs compiles modules by nvcc only")
        if not (skip_prebuilt and spec.aot_path.exists()):
            others.append(spec)
    for spec in own:
        spec.build(verbose=verbose, need_lock=True, max_jobs=max_jobs)
    if not others:
        return
    jobs, decided_by = parallel_jobs(max_jobs=max_jobs)
    at_once = min(jobs, len(others))
    steps = {spec.name: len(spec.sources) + 1 for spec in others}  # the library, too
    done = dict.fromkeys(steps, 0)
    total = sum(steps.values())
    _engine_logger.info(
        "building %d modules of upstream's, %d steps, %d compilers at once (%s)", len(others), total, jobs, decided_by
    )
    progress = Progress("upstream's modules")

    # One ninja per module, where upstream runs one for all: that one's log would lie in another folder than the log of
    # the ninja that a load starts, which would then compile everything again.
    def tell(spec: Any, made: int, _: int, name: str) -> None:
        done[spec.name] = made
        progress.tell(sum(done.values()), total, f"{spec.name}: {name}")

    def build(spec: Any) -> None:
        with explained_os_errors(spec.name, spec.build_dir), FileLock(spec.lock_path, thread_local=False):
            spec.write_ninja()
            cpp_ext.run_ninja(spec.build_dir, spec.ninja_path, verbose, jobs // at_once, functools.partial(tell, spec))
            done[spec.name] = steps[spec.name]  # of a module that was built in part ninja counts the rest

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(build, others))
