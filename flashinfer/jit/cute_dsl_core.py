# SPDX-License-Identifier: Apache-2.0
"""JIT specs of CuTe-DSL kernels.

Adds to upstream: an object in the cache is code, so it is loaded if nobody else can have put it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

from flashinfer_sm12x.build.trust import make_folder, require_trusted, require_trusted_tree

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_JitSpecCuteDsl: Any = _upstream.JitSpecCuteDsl


class JitSpecCuteDsl(_JitSpecCuteDsl):  # type: ignore[misc]
    """Upstream's; its folder is made private, and what lies in the cache is loaded if nobody else can have put it
    there."""

    def try_load(self) -> Any:
        """The kernel from the cache, if it is there and fresh.

        Raises:
            UntrustedCacheError: another user can write to the module's folder.
        """
        require_trusted_tree(self.module_dir)
        return super().try_load()

    def _load_from_disk(self) -> Any:
        require_trusted(self.object_path)
        return super()._load_from_disk()

    def _export(self) -> None:
        require_trusted(self.module_dir)
        make_folder(self.module_dir)
        mode = self.module_dir.stat().st_mode
        self.module_dir.chmod(0o700)  # the files are written by the umask: nobody else may open one meanwhile
        try:
            super()._export()
            for path in (self.object_path, self.meta_path):
                path.chmod(path.stat().st_mode & ~0o022)
        finally:
            self.module_dir.chmod(mode)
