# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (``-p separate_instances``): on the virtual device every kernel instance is a module of its own.

``fused_moe_120`` then holds the binding and the launcher alone, and a test builds the instances that it runs, so that
a change of a header costs the compilation of one or two instances instead of all. ``tools/mutate.py`` runs tests so.
The grouped GEMM's module holds the first of its instances.

The emulator runs on one host thread, with which a run repeats exactly: what a test caught once, it always catches.

The instance table stays as it is: what is chosen, and the names of parametrized tests, are those of the whole family.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flashinfer.jit import fused_moe
from flashinfer.jit.sm12x import modules
from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.testing import virtual_operators
from flashinfer.testing.virtual_device import VirtualDevice


def _gen_launcher_module() -> Any:
    sources = [modules._csrc() / modules._MOE_BINDING, modules._csrc() / modules._LAUNCHER]
    return modules._spec(f"{modules.FUSED_MOE}_launcher", sources, modules._MOE_TEMPLATE, [])


def _gen_instance_module(tactic: int) -> Any:
    return modules.gen_fused_moe_instance_module(dataclasses.replace(INSTANCES[tactic], default=False))


def _register_instance(device: VirtualDevice, module: Any, tactic: int) -> None:
    instance = device.module(_gen_instance_module, tactic)
    module.sm12x_register_instance(tactic, instance.sm12x_instance_address())


_init = VirtualDevice.__init__


def _init_with_one_thread(
    self: VirtualDevice, architecture: str, strict: bool, watch: int | None, threads: int, *more: Any, **named: Any
) -> None:
    _init(self, architecture, strict, watch, 1, *more, **named)


VirtualDevice.__init__ = _init_with_one_thread  # type: ignore[method-assign]
fused_moe.gen_cutlass_fused_moe_sm120_module = _gen_launcher_module
virtual_operators._register_instance = _register_instance  # type: ignore[assignment]
modules.GEMM_INSTANCES = modules.GEMM_INSTANCES[:1]
