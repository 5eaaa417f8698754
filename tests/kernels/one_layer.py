# SPDX-License-Identifier: Apache-2.0
"""One MoE layer on the virtual SM121 by the installed wheel's module; run by check_wheels.py in an environment of its
own.

    one_layer.py FOLDER SITE

Checks the layer against the float64 reference, that the module is the one in SITE and that nothing was built, and
writes ``call``, ``output`` and ``launches.json`` into FOLDER for the same call on another processor (replay.cpp).
"""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from virtual_moe import run_moe

from flashinfer.jit import core, cpp_ext
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import modules
from flashinfer.testing import MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device
from flashinfer_sm12x.build import toolchain

SEED = 31
CASE = MoECase(num_tokens=3, hidden=256, inter=128, num_experts=4, top_k=2, mode=1)
PAIR = (5, 5)  # FC1 and FC2 by the block-scaled MMA, rather than the fused MoE kernel, which multiplies in bf16
NONE, INT, BOOL, TENSOR = 0, 1, 2, 7  # TVMFFITypeIndex
TYPES = {
    torch.uint8: (1, 8),
    torch.int32: (0, 32),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}  # DLDataTypeCode, bits


def encode(name: str, watch: int, arguments: tuple[Any, ...]) -> bytes:
    """A call as replay.cpp reads it."""
    parts = [struct.pack("<I", len(name)), name.encode(), struct.pack("<II", watch, len(arguments))]
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            code, bits = TYPES[argument.dtype]
            assert argument.is_contiguous()
            data = argument.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            parts.append(
                struct.pack(f"<iBBI{argument.ndim}qQ", TENSOR, code, bits, argument.ndim, *argument.shape, len(data))
            )
            parts.append(data)
        else:
            kind = NONE if argument is None else BOOL if isinstance(argument, bool) else INT
            parts.append(struct.pack("<iq", kind, int(argument or 0)))
    return b"".join(parts)


def main(folder: Path, site: Path) -> None:
    print("seed", SEED)
    inputs = make_moe_inputs(CASE, seed=SEED)
    calls = []

    class Recording(VirtualDevice):
        def call(self, function: Any, *arguments: Any, writes: Any = None) -> Any:
            if writes:  # the size of a workspace is asked for without
                calls.append(encode("sm12x_moe_run", int(self._runtime.settings.watch), arguments))
            return super().call(function, *arguments, writes=writes)

    with virtual_device("sm_121a") as device:
        device.__class__ = Recording
        output = run_moe(device, inputs, CASE.mode, PAIR)
        launches = device.launches
    check_within_bound(output, *moe_reference(inputs))
    assert all(launch.clean for launch in launches), launches
    (call,) = calls
    (folder / "call").write_bytes(call)
    (folder / "output").write_bytes(output.view(torch.uint8).numpy().tobytes())
    kernels = [[launch.kernel, launch.counters.warp_instructions] for launch in launches]
    (folder / "launches.json").write_text(json.dumps(kernels))

    for architecture in ((12, "0f"), (12, "1a")):  # the modules as they ship, over the emulator's runtime
        core.current_compilation_context.TARGET_CUDA_ARCHS = {architecture}
        for generate in (
            modules.gen_fused_moe_module,
            modules.gen_group_gemm_module,
            modules.MODULES["dense_mxfp4_sm12x"],
        ):
            spec = generate()
            assert spec.prebuilt is not None, spec.name
            spec.build_and_load()
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in lines if re.search(r"/(\w+_sm12x|fused_moe_120\w*)(-\w+)?\.so$", line)}
    assert len(mapped) == 7, mapped
    assert all(Path(path).is_relative_to(site / "flashinfer_sm12x_kernels") for path in mapped), mapped
    assert not list(jit_env.FLASHINFER_JIT_DIR.rglob("*.so"))
    try:
        found = cpp_ext.find_toolkit()
    except toolchain.ToolchainError as error:
        print("no compiler:", error)
    else:
        raise AssertionError(f"there is a compiler after all: {found}")
    print(f"{len(launches)} launches, within the bound; {len(mapped)} libraries of {site}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
