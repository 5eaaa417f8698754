# SPDX-License-Identifier: Apache-2.0
"""Building modules ahead of time: ``python -m flashinfer.aot``.

Adds to upstream: the modules of the SM12x family, and upstream's own fused MoE module for these GPUs beside them.
Upstream's sources are taken from the wheel, since this tree holds none of them.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend, wheel_root

_upstream = extend(globals())

from .jit.fused_moe import gen_cutlass_fused_moe_sm120_upstream_module
from .jit.sm12x.modules import gen_shipped_modules

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def gen_all_modules(*args: Any, **kwargs: Any) -> list[Any]:
    """The modules of the SM12x family where MoE modules for such a GPU are asked for, then upstream's list."""
    asked = inspect.signature(_upstream.gen_all_modules).bind(*args, **kwargs).arguments
    capabilities = asked["sm_capabilities"]
    ours: list[Any] = []
    if asked["add_moe"] and (capabilities.get("sm120") or capabilities.get("sm121")):
        # First, so that they are registered even where a generator of upstream's lacks something.
        ours = [*gen_shipped_modules(), gen_cutlass_fused_moe_sm120_upstream_module()]
    names = {spec.name for spec in ours}
    return ours + [spec for spec in _upstream.gen_all_modules(*args, **kwargs) if spec.name not in names]


def compile_and_package_modules(
    out_dir: Path | None,
    build_dir: Path,
    project_root: Path,
    config: dict[str, Any] | None = None,
    verbose: bool = False,
    skip_prebuilt: bool = True,
) -> None:
    """Compile and package modules.

    Args:
        out_dir: The folder that gets ``<module>/<module>.so``; emptied first. None: libraries are not copied.
        build_dir: The folder in which modules are built.
        project_root: A source tree of upstream's. If it lacks upstream's sources, the wheel's are used.
        config: The modules to build; see ``get_default_config``.
        verbose: Print what is done.
        skip_prebuilt: Leave out modules that an installed wheel brings.
    """
    if not (project_root / "3rdparty" / "spdlog").is_dir():
        project_root = _wheel_as_source_tree(build_dir)
    _upstream.compile_and_package_modules(out_dir, build_dir, project_root, config, verbose, skip_prebuilt)


def _wheel_as_source_tree(build_dir: Path) -> Path:
    """Links that give the wheel's data folder the layout of a source tree."""
    data = wheel_root() / "data"
    tree = build_dir / "upstream"
    links = {"csrc": "csrc", "include": "include", "3rdparty/cutlass": "cutlass", "3rdparty/spdlog": "spdlog"}
    for name, target in links.items():
        link = tree / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(data / target, target_is_directory=True)
    return tree


if __name__ == "__main__":
    _upstream.main()
