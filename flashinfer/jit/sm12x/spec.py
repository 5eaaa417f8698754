# SPDX-License-Identifier: Apache-2.0
"""The JIT spec of a module that the engine in ``build`` builds: one of the SM12x family, or one of upstream's.

The registry, the AOT entry, the command line and callers of ``build_and_load`` use it like upstream's own specs.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from flashinfer._layer import fork_root, wheel_root
from flashinfer_sm12x import variables
from flashinfer_sm12x.build import engine, toolchain
from flashinfer_sm12x.build.build_hash import namer
from flashinfer_sm12x.build.diagnosis import JitBuildError, explained_os_errors
from flashinfer_sm12x.build.jobs import DEFAULT_JOB_MEMORY
from flashinfer_sm12x.build.trust import require_trusted_tree

from .. import core, cpp_ext
from .. import env as jit_env
from . import flags, prebuilt

_JitSpecNvcc: Any = core.JitSpecNvcc


@dataclass
class JitSpecSm12x(_JitSpecNvcc):  # type: ignore[misc]
    """A module that the engine builds.

    Its fields are those of upstream's ``JitSpecNvcc``.

    Attributes:
        architectures: The targets it is compiled for, as in ``CompilationContext.TARGET_CUDA_ARCHS``.
        job_memory: Bytes that a compiler may need.
        links_driver: Its code calls the driver and other libraries by name, as upstream's does.
        for_wheel: Its library goes into a wheel of kernels.
    """

    has_own_engine: ClassVar[bool] = True  # core.build_jit_specs asks

    architectures: tuple[tuple[int, str], ...] = ()
    job_memory: int = DEFAULT_JOB_MEMORY
    links_driver: bool = False
    for_wheel: bool = False

    @classmethod
    def adopt(cls, spec: Any, architectures: Iterable[tuple[int, str]], job_memory: int) -> JitSpecSm12x:
        """A module of upstream's, to be built by the engine; it takes the place of ``spec`` in the registry.

        Raises:
            ValueError: the module is of a kind that only upstream can build.
        """
        if spec.needs_device_linking or spec.embedded_cubin_factory or spec.extra_cuda_cflags_by_source:
            raise ValueError(f"{spec.name} needs steps that the engine does not have")
        fields = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
        adopted = cls(**fields, architectures=tuple(architectures), job_memory=job_memory, links_driver=True)
        core.replace_registered(adopted)
        return adopted

    @property
    def roots(self) -> dict[str, str]:
        """Name -> folder, of what is compiled and lies elsewhere in another checkout, environment or cache."""
        tree = {name: fork_root() / name for name in ("csrc", "include", "3rdparty")}
        named = {**tree, "generated": jit_env.FLASHINFER_GEN_SRC_DIR, "wheel": wheel_root()}
        return {name: os.path.realpath(folder) for name, folder in named.items()}

    @property
    def build_hash(self) -> str:
        """The hash that a prebuilt library bears: of the flags, the sources and this tree's and the pinned wheel's
        headers.

        It is the same on every machine, also one without a compiler: of the include folders it has those of this tree
        and of the wheel, and of the compilers and their environment nothing.
        """
        name = namer(self.roots)
        folders = map(os.path.realpath, (*(self.extra_include_dirs or ()), *cpp_ext.upstreams_includes()))
        common = [f"-I{folder}" for folder in folders if name(folder) != folder]
        sources = [(source, flags.of_source(self, source.suffix, common)) for source in self.sources]
        return engine.portable_key(self.roots, sources, flags.users_link_flags(self))

    @cached_property
    def prebuilt(self) -> Path | None:
        """The library of an installed wheel of kernels that takes the place of a build; a line says why one does
        not."""
        library, reason = prebuilt.find(self)
        if reason:
            self._pass_over(reason)
        return library

    def _pass_over(self, reason: str) -> None:
        core.logger.warning("the prebuilt %s is passed over: %s", self.name, reason)

    @cached_property
    def plan(self) -> engine.ModulePlan:
        """The plan of what is built and where.

        Raises:
            ToolchainError: there is no CUDA compiler, or one too old for the architectures.
            UntrustedCacheError: another user can write to the cache.
            JitBuildError: the cache cannot be read, or the links to libraries cannot be written.
        """
        with explained_os_errors(self.name, self.build_dir):
            return self._make_plan()

    def _make_plan(self) -> engine.ModulePlan:
        toolkit = cpp_ext.find_toolkit()
        toolchain.require_architectures(toolkit, self.architectures)
        read_only = jit_env.PREBUILT_JIT_DIR and jit_env.PREBUILT_JIT_DIR / self.name
        plan = engine.ModulePlan(
            name=self.name,
            folder=self.build_dir,
            lock_path=self.lock_path,
            steps=self._steps(toolkit),
            linker=engine.host_compiler(),
            link_flags=tuple(flags.link_flags(self, toolkit)),
            job_memory=self.job_memory,
            description=f"CUDA {toolkit.version} in {toolkit.root} (found through {toolkit.origin})",
            roots=self.roots,
            read_only=read_only,
        )
        for folder in filter(None, (plan.folder, plan.read_only)):
            require_trusted_tree(folder)
        core.require_trusted_sources(self.sources)
        return plan

    def _steps(self, toolkit: toolchain.Toolkit) -> tuple[engine.CompileStep, ...]:
        common = cpp_ext.build_common_cflags(str(toolkit.root), self.extra_include_dirs)
        steps = []
        for source in self.sources:
            arguments = flags.as_arguments(flags.of_source(self, source.suffix, common), toolkit.root)
            name = f"{source.parent.name}_{source.stem}.o"
            steps.append(engine.compile_step(name, source, toolkit.nvcc, arguments))
        return tuple(steps)

    def get_compile_commands(self) -> list[dict[str, str]]:
        """One entry of ``compile_commands.json`` for each source: the very command that the engine runs."""
        entries = []
        for step in self.plan.steps:
            command = shlex.join(step.command(str(step.source), f"obj/{step.name}"))
            entries.append({"directory": str(self.plan.folder), "command": command, "file": str(step.source)})
        return entries

    def get_library_path(self) -> Path:
        """The library that is or would be loaded."""
        return self.prebuilt or self.jit_library_path

    @property
    def aot_artifacts(self) -> tuple[Any, ...]:
        """Empty: modules of these names in wheels of upstream's prebuilt modules are upstream's, with other
        functions."""
        return ()

    def try_load(self) -> Any:
        """The module from an installed wheel of kernels, or from the cache; None where neither has what would be
        built."""
        if self.prebuilt is not None:
            try:
                return self.load(self.prebuilt)
            except (OSError, RuntimeError) as error:
                self._pass_over(f"it does not load: {error}")
                self.prebuilt = None
        try:
            library = engine.find_library(self.plan)
            return self.load(library) if library is not None else None
        except (toolchain.ToolchainError, OSError, RuntimeError) as error:
            core.logger.debug("%s in the cache cannot be used: %s", self.name, error)
            return None

    def build(
        self,
        verbose: bool | None = None,
        need_lock: bool = False,
        max_jobs: int | None = None,
        lock: int | None = None,
    ) -> engine.BuildReport:
        """Make the library in the cache, if it is not there, even if a prebuilt one exists.

        Args:
            verbose: Show commands and compiler output; ``FLASHINFER_JIT_VERBOSE=1`` when omitted.
            need_lock: Take the module's lock. False: the caller holds it.
            max_jobs: Compilers at once; chosen by the engine when omitted.
            lock: The descriptor of a lock that the caller holds; the compilers inherit it and hold it, too.

        Returns:
            The report of the build; it is empty if the library was there.

        Raises:
            MissingJITCacheError: ``FLASHINFER_DISABLE_JIT`` is set.
            ToolchainError: there is no CUDA compiler, or one too old.
            UntrustedCacheError: another user can write to the cache.
            JitBuildError: a compiler failed, or the cache cannot be written.
        """
        if variables.read("FLASHINFER_DISABLE_JIT"):
            raise core.MissingJITCacheError(
                f"{self.name} is not built, or no longer fresh, and FLASHINFER_DISABLE_JIT forbids building it. Unset "
                "that variable, or build the module where it is not set",
                spec=self,
            )
        if verbose is None:
            verbose = variables.read("FLASHINFER_JIT_VERBOSE")
        with engine.module_lock(self.lock_path) if need_lock else nullcontext(lock) as held:
            return engine.build(self.plan, verbose, max_jobs, held)

    def build_and_load(self) -> Any:
        """Load the module, building it first if it is not there. Processes that want it at once build it once.

        Raises:
            The errors of :meth:`build`.
        """
        module = self.try_load()
        if module is not None:
            return module
        with engine.module_lock(self.lock_path) as lock:
            module = self.try_load()
            if module is not None:
                return module
            return self.load(self.build(lock=lock).library)

    @property
    def lock_path(self) -> Path:
        """The file that is locked while the module is built. Making its folder is left to whoever locks it."""
        return jit_env.FLASHINFER_JIT_DIR / "tmp" / f"{self.name}.lock"


__all__ = ["JitBuildError", "JitSpecSm12x"]
