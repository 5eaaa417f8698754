# SPDX-License-Identifier: Apache-2.0
"""The platform class; apart from ``virtual_gpu`` because vLLM loads that one before platforms can be imported."""

from __future__ import annotations

import os

import torch
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class VirtualGpu(NonNvmlCudaPlatform):
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*map(int, os.environ["VIRTUAL_GPU_CAPABILITY"].split(".")))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "virtual GPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 128 << 30

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def device_count(cls) -> int:
        return int(os.environ.get("VIRTUAL_GPU_COUNT", "1"))

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
