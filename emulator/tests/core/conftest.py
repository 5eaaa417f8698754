# SPDX-License-Identifier: Apache-2.0
"""One virtual device for the instruction tests, and a way to run a single instruction over many values."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from bits import HEADER

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from vsm.device import Device, Watch, pack
from vsm.results import Launch

FORMATS = {16: "H", 32: "I", 64: "Q"}


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    with Device("sm_121a", threads=1) as value:
        yield value


def _instruction_source(body: str, sources: Sequence[int], result: int) -> str:
    """A kernel that loads %a, %b, ... of the given widths, runs ``body`` and stores %d. A width of 1 is a predicate."""
    lines = [
        HEADER + ".visible .entry k(.param .u64 out, .param .u64 in, .param .u32 n) {",
        ".reg .pred %past, %p, %q, %pd; .reg .b16 %h<8>; .reg .b32 %t<8>, %i, %n; .reg .b64 %w<8>, %out, %in, %at;",
    ]
    names = "abcef"[: len(sources)]
    for name, bits in zip(names, sources, strict=True):
        lines.append(f".reg .{'pred' if bits == 1 else f'b{bits}'} %{name};")
    lines.append(f".reg .{'pred' if result == 1 else f'b{result}'} %d;")
    lines.append("mov.u32 %t0, %ctaid.x; mov.u32 %t1, %ntid.x; mov.u32 %t2, %tid.x; mad.lo.u32 %i, %t0, %t1, %t2;")
    lines.append("ld.param.u32 %n, [n]; setp.ge.u32 %past, %i, %n; @%past bra END;")
    lines.append("ld.param.u64 %out, [out]; ld.param.u64 %in, [in];")
    lines.append(f"mul.wide.u32 %at, %i, {8 * max(1, len(sources))}; add.u64 %in, %in, %at;")
    lines.append("mul.wide.u32 %at, %i, 8; add.u64 %out, %out, %at;")
    for k, (name, bits) in enumerate(zip(names, sources, strict=True)):
        if bits == 1:
            lines.append(f"ld.global.u32 %t3, [%in+{8 * k}]; setp.ne.u32 %{name}, %t3, 0;")
        else:
            lines.append(f"ld.global.b{bits} %{name}, [%in+{8 * k}];")
    lines.append(body)
    if result == 1:
        lines.append("selp.b32 %t4, 1, 0, %d; cvt.u64.u32 %w7, %t4; st.global.b64 [%out], %w7;")
    else:
        lines.append(f"st.global.b{result} [%out], %d;")
    lines.append("END: ret; }")
    return "\n".join(lines)


@pytest.fixture
def evaluate(device: Device) -> Callable[..., list[int]]:
    """``evaluate(body, result_bits, source_bits, rows)``: %d of ``body`` for each row of source bit patterns."""

    def run(body: str, result: int, sources: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
        module = device.load(_instruction_source(body, sources, result), "instruction")
        width = max(1, len(sources))
        data = b"".join(
            struct.pack(f"<{width}Q", *(v & (2**64 - 1) for v in row), *[0] * (width - len(row))) for row in rows
        )
        source, out = device.upload(data), device.upload(bytes(8 * len(rows)))
        try:
            launch = module.kernel("k").launch(
                (len(rows) + 31) // 32, 32, pack(out, source) + struct.pack("<I", len(rows))
            )
            assert launch.clean, str(launch)
            return list(struct.unpack(f"<{len(rows)}Q", device.download(out, 8 * len(rows))))
        finally:
            device.release(source)
            device.release(out)
            module.unload()

    return run


@pytest.fixture
def run_kernel(device: Device) -> Callable[..., tuple[Launch, bytes]]:
    """``run_kernel(ptx, out_bytes, block=32, ...)``: runs ``.entry k(.param .u64 out)``; the launch and its output."""

    def run(
        source: str,
        out_bytes: int = 4096,
        *,
        grid: int = 1,
        block: int = 32,
        inputs: Sequence[bytes] = (),
        watch: Watch = Watch.ALL,
        dynamic_shared: int = 0,
        max_warp_instructions: int = 5_000_000,
    ) -> tuple[Launch, bytes]:
        module = device.load(HEADER + source, "kernel")
        out = device.upload(bytes(out_bytes))
        addresses = [device.upload(data) for data in inputs]
        try:
            launch = module.kernel("k").launch(
                grid,
                block,
                pack(out, *addresses),
                watch=watch,
                dynamic_shared=dynamic_shared,
                max_warp_instructions=max_warp_instructions,
            )
            return launch, device.download(out, out_bytes)
        finally:
            for address in (out, *addresses):
                device.release(address)
            module.unload()

    return run
