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
from flashinfer_sm12x.build.content_key import Files, key_of, namer, searched_by
from flashinfer_sm12x.build.diagnosis import JitBuildError, explained_os_errors
from flashinfer_sm12x.build.jobs import DEFAULT_JOB_MEMORY
from flashinfer_sm12x.build.trust import require_trusted_tree

from .. import core, cpp_ext
from .. import env as jit_env
from . import prebuilt

_JitSpecNvcc: Any = core.JitSpecNvcc


@dataclass
class JitSpecSm12x(_JitSpecNvcc):  # type: ignore[misc]
    """A module that the engine builds.

    Its fields are those of upstream's ``JitSpecNvcc``.

    Attributes:
        architectures: The targets it is compiled for, as in ``CompilationContext.TARGET_CUDA_ARCHS``.
        job_memory: Bytes that a compiler may need.
        links_driver: Its code calls the driver and other libraries by name, as upstream's does.
        runtime_dirs: Folders in which the library looks for CUDA's runtime; empty: the toolkit's own.
    """

    has_own_engine: ClassVar[bool] = True  # core.build_jit_specs asks

    architectures: tuple[tuple[int, str], ...] = ()
    job_memory: int = DEFAULT_JOB_MEMORY
    links_driver: bool = False
    runtime_dirs: tuple[str, ...] = ()

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
    def content_key(self) -> str:
        """The key that a prebuilt library bears: of the flags, the sources and this tree's and the pinned wheel's headers.

        It is the same on every machine, also one without a compiler.
        """
        name = namer(self.roots)
        flags = [*core.common_nvcc_flags, *(self.extra_cflags or ()), *(self.extra_cuda_cflags or ())]
        for variable in ("FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS"):
            flags += cpp_ext.parse_env_flags(variable)
        folders, files = searched_by(flags, os.curdir)
        folders += map(os.path.realpath, (*(self.extra_include_dirs or ()), *cpp_ext.upstreams_includes()))
        folders = [folder for folder in folders if name(folder) != folder]
        sources = [os.path.realpath(source) for source in self.sources]
        read = Files().read_by([*sources, *files], folders)
        return key_of(
            [name(flag) for flag in flags if not flag.startswith(engine.WITHOUT_EFFECT)],
            [name(source) for source in sources],
            sorted((name(path), digest) for path, digest in read.items()),
        )

    @cached_property
    def prebuilt(self) -> Path | None:
        """The library of an installed wheel of kernels that takes the place of a build; a line says why one does not."""
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
            link_flags=self._link_flags(toolkit),
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
        root = str(toolkit.root)
        common = cpp_ext.build_common_cflags(root, self.extra_include_dirs)
        cuda_flags = tuple(_as_arguments(self._cuda_flags(), common, root))
        cxx_flags = tuple(_as_arguments(cpp_ext.build_cflags(common, self.extra_cflags), common, root))
        steps = []
        for source in self.sources:
            flags = cuda_flags if source.suffix == ".cu" else cxx_flags
            steps.append(engine.compile_step(f"{source.parent.name}_{source.stem}.o", source, toolkit.nvcc, flags))
        return tuple(steps)

    def _cuda_flags(self) -> list[str]:
        # Not upstream's build_cuda_cflags: it reads the environment's architectures even for a module that brings its
        # own, and fails if the environment names none.
        return [
            "$common_cflags",
            "--compiler-options=-fPIC",
            "--expt-relaxed-constexpr",
            "-static-global-template-stub=false",
            *core.common_nvcc_flags,
            *(self.extra_cuda_cflags or []),
            *cpp_ext.parse_env_flags("FLASHINFER_EXTRA_CUDAFLAGS"),
        ]

    def get_compile_commands(self) -> list[dict[str, str]]:
        """One entry of ``compile_commands.json`` for each source: the very command that the engine runs."""
        entries = []
        for step in self.plan.steps:
            command = shlex.join(step.command(str(step.source), f"obj/{step.name}"))
            entries.append({"directory": str(self.plan.folder), "command": command, "file": str(step.source)})
        return entries

    def _link_flags(self, toolkit: toolchain.Toolkit) -> tuple[str, ...]:
        extra = [*cpp_ext.parse_env_flags("FLASHINFER_EXTRA_LDFLAGS"), *(self.extra_ldflags or [])]
        if self.links_driver:
            return ("-shared", *cpp_ext.toolkit_link_flags(), "-lcudart", "-lcuda", *extra)
        # The runtime by its file: the wheels have no link name for it. Not the driver: entry points come from
        # cudaGetDriverEntryPoint, so that the module loads on a machine without one.
        # -z now: a name that nobody defines fails the load, rather than the process at the first call.
        runtime = toolkit.find_library("cudart")
        folders = ":".join(self.runtime_dirs) or runtime.parent
        return ("-shared", str(runtime), f"-Wl,-rpath,{folders}", "-Wl,-z,now", *extra)

    def get_library_path(self) -> Path:
        """The library that is or would be loaded."""
        return self.prebuilt or self.jit_library_path

    @property
    def aot_artifacts(self) -> tuple[Any, ...]:
        """Empty: modules of these names in wheels of upstream's prebuilt modules are upstream's, with other
        functions."""
        return ()

    def try_load(self) -> Any:
        """The module from an installed wheel of kernels, or from the cache; None where neither has what would be built."""
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


def _as_arguments(flags: Iterable[str], common: Iterable[str], cuda_home: str) -> Iterable[str]:
    """Upstream's flags, which are text for a build file, as the arguments of a command."""
    for flag in flags:
        if flag == "$common_cflags":
            yield from _as_arguments(common, (), cuda_home)
        elif flag.startswith("-isystem "):
            yield from ("-isystem", flag.removeprefix("-isystem ").replace("$cuda_home", cuda_home))
        elif flag:
            yield flag.replace("$cuda_home", cuda_home)


__all__ = ["JitBuildError", "JitSpecSm12x"]
