# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (``-p separate_instances``): on the virtual device every kernel instance is a module of its own.

``fused_moe_120`` then holds the binding and the launcher alone, and a test builds the instances that it runs, so that
a change of a header costs the compilation of one or two instances instead of all. ``tools/mutate.py`` runs tests so.
The grouped GEMM's module holds the first of its instances.

The emulator runs on one host thread, with which a run repeats exactly: what a test caught once, it always catches.

The instance tables stay as they are: what is chosen, and the names of parametrized tests, are those of the whole
family.
"""

from __future__ import annotations

from typing import Any

from flashinfer.fused_moe import sm12x_launch
from flashinfer.jit import fused_moe
from flashinfer.jit.sm12x import modules
from flashinfer.sm12x import instances
from flashinfer.testing.virtual_device import VirtualDevice


def _gen_launcher_module() -> Any:
    sources = [modules._MOE_BINDING, modules._LAUNCHER, modules._REGISTRY]
    return modules._spec(f"{modules.FUSED_MOE}_launcher", sources, modules._MOE_TEMPLATE, [])


_init = VirtualDevice.__init__


def _init_with_one_thread(
    self: VirtualDevice, architecture: str, strict: bool, watch: int | None, threads: int, *more: Any, **named: Any
) -> None:
    _init(self, architecture, strict, watch, 1, *more, **named)


VirtualDevice.__init__ = _init_with_one_thread  # type: ignore[method-assign]
for _module in (fused_moe, sm12x_launch):
    for _name in ("gen_cutlass_fused_moe_sm120_module", "gen_cutlass_fused_moe_sm120_nvfp4_module"):
        setattr(_module, _name, _gen_launcher_module)
instances.MOE_MODULES.update(dict.fromkeys(instances.MOE_MODULES, ()))
modules.GEMM_INSTANCES = modules.GEMM_INSTANCES[:1]
