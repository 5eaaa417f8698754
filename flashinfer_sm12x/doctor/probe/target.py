# SPDX-License-Identifier: Apache-2.0
"""The GPU that is measured, or the virtual one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer.jit.sm12x.modules import gen_probe_module
from flashinfer.sm12x.backend import kernels
from flashinfer.sm12x.device_class import DeviceClass, class_of
from flashinfer.sm12x.devices import serves_cuda
from flashinfer.testing.virtual_device import VirtualDevice


class NoTargetError(RuntimeError):
    """There is no GPU that the kernels serve; the text says what there is instead."""


@dataclass(frozen=True)
class Target:
    """A GPU, or the virtual SM121.

    Attributes:
        device: The tensors' device; the CPU for the virtual one.
        name: The driver's name for it.
        capability: Compute capability.
        sm_count: Multiprocessors.
        virtual: The virtual device, whose times mean nothing; None for a GPU.
    """

    device: torch.device
    name: str
    capability: tuple[int, int]
    sm_count: int
    virtual: VirtualDevice | None = None

    @property
    def device_class(self) -> DeviceClass:
        """The target's class among those that the kernels serve."""
        found = class_of(self.capability)
        assert found is not None
        return found

    def call(self, name: str, *arguments: Any, writes: Sequence[torch.Tensor] = ()) -> None:
        """Call ``sm12x_probe_<name>`` of the module ``probe_sm12x``, which is built if need be.

        Args:
            name: The end of the function's name.
            arguments: Tensors on :attr:`device`, and numbers.
            writes: The tensors that it writes.
        """
        backend = kernels(self.device) if self.virtual is None else self.virtual
        assert backend is not None
        backend.call(getattr(backend.module(gen_probe_module), f"sm12x_probe_{name}"), *arguments, writes=writes)

    def synchronize(self) -> None:
        if self.virtual is None:
            torch.cuda.synchronize(self.device)


def find_target() -> Target:
    """The virtual device if one is active, else the current GPU.

    Raises:
        NoTargetError: the kernels serve neither.
    """
    cpu = torch.device("cpu")
    virtual: Any = kernels(cpu)
    if virtual is not None:
        return Target(cpu, "virtual SM121", virtual.compute_capability, virtual.sm_count, virtual)
    if not torch.cuda.is_available():
        raise NoTargetError(f"torch {torch.__version__} sees no GPU")
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if not serves_cuda(index):
        raise NoTargetError(
            f"{properties.name} (compute capability {properties.major}.{properties.minor}) is not served by this "
            "fork's kernels: they are for 12.x, and for 9.0 with FLASHINFER_SM12X_MOE=1"
        )
    return Target(torch.device("cuda", index), properties.name, capability, properties.multi_processor_count)
