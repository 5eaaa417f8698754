# SPDX-License-Identifier: Apache-2.0
"""Counts of grouped GEMMs that others wrote on the virtual SM121, for :mod:`perfmodel.peers`.

Upstream's SM120 MXFP4 GEMM is ``tests/benchmarks/upstream_group_gemm.cu``, Marlin's
``emulator/tests/upstream/marlin_moe.cu``: those whose results the tests hold against float64. Here they run in a
layer's full sizes on a few experts, and are fitted as this fork's are (:func:`emulate.fit_launch`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulate import build_emulator, fit_launch, launches_of, seen, unless_impossible
from perfmodel import peers
from perfmodel.gb10 import MULTIPROCESSORS, Counts, Launch
from perfmodel.moe import Fit, Work, write_fits
from perfmodel.step import LAYER_MODEL

from flashinfer._layer import fork_root, wheel_root
from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer.sm12x.models import MODELS, SCALE_BLOCK
from flashinfer.testing import make_group_gemm_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

WORKSPACE = 32 << 20
MARLIN_TILES = {8: (128, 64, 128, 3), 64: (256, 64, 256, 1)}
"""By routes of a block: the tile along N and K, threads, and blocks an SM holds, of the configurations of the package's
list the one with the most of them on an SM12x."""

GroupedGemm = Callable[[Sequence[int], int, int], None]
"""A function of the rows of each expert, N and K."""


def library(
    name: str, source: Path, standard: str, defines: Sequence[str], folders: Sequence[Path] = ()
) -> ctypes.CDLL:
    """A source of others' kernels, compiled for SM121 with its PTX, and loaded."""
    target = "-gencode=arch=compute_121a,code=compute_121a"  # no machine code: nothing reads it
    spec = JitSpecSm12x(
        name=name,
        sources=[source],
        extra_cflags=[],
        extra_cuda_cflags=[f"-std={standard}", "-O3", "-DNDEBUG", "-w", "--compress-mode=none", *defines, target],
        extra_ldflags=None,
        extra_include_dirs=list(folders),
        architectures=((12, "1a"),),
    )
    spec.build(need_lock=True)
    return ctypes.CDLL(str(spec.plan.library))


def upstreams_gemm(device: VirtualDevice, tile: int) -> Callable[..., None]:
    """Upstream's grouped GEMM by its operands' names; up to 64 rows of a tile its operands change places."""
    source = fork_root() / "tests" / "benchmarks" / "upstream_group_gemm.cu"
    built = library("upstream_group_gemm", source, "c++17", ["-DCUTLASS_ENABLE_GDC_FOR_SM100=1"])
    function = built[f"group_gemm_{tile}_{str(tile <= 64).lower()}"]

    def run(out: torch.Tensor, **operands: torch.Tensor) -> None:
        spaces, (*matrices, m_indptr) = [device.empty(WORKSPACE) for _ in range(2)], operands.values()
        (groups, n, _), k = operands["b"].shape, operands["a"].shape[1]

        def call(*given: torch.Tensor) -> None:
            first, second, *others = (ctypes.c_void_p(tensor.data_ptr()) for tensor in given)
            size = ctypes.c_size_t(WORKSPACE)
            if (status := function(first, size, second, size, *others, n, k, groups)) != 0:
                raise RuntimeError(f"upstream's grouped GEMM answered {status}")

        device.call(call, *spaces, *matrices, out, m_indptr, writes=(*spaces, out))

    return run


def cutlass(device: VirtualDevice, tile: int) -> GroupedGemm:
    """Upstream's grouped GEMM."""
    gemm = upstreams_gemm(device, tile)

    def run(rows: Sequence[int], n: int, k: int) -> None:
        out = torch.empty((sum(rows), n), dtype=torch.bfloat16)
        gemm(**make_group_gemm_inputs(rows, n, k, 0), out=out)

    return run


def marlin_sources() -> Path:
    """The folder of the sglang package's kernels.

    Raises
    ------
    RuntimeError
        It is not there.
    """
    try:
        folder = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang/kernels/jit")))
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(
            "Marlin's sources are in the sglang package, which is not installed: pip install --no-deps -r "
            "emulator/tests/upstream/requirements.txt"
        ) from error
    if importlib.util.find_spec("tvm_ffi") is None:
        raise RuntimeError("Marlin's sources need the headers of apache-tvm-ffi, which is not installed")
    return folder


def marlin(device: VirtualDevice, tile: int) -> GroupedGemm:
    """Marlin's grouped GEMM; each row is a token of its own."""
    names = ("N_TILE", "K_TILE", "THREADS", "BLOCKS_PER_SM")
    defines = [f"-D{name}={value}" for name, value in zip(names, MARLIN_TILES[tile], strict=True)]
    defines += ["-DSGL_CUDA_ARCH=1210", f"-DBLOCK={tile}"]
    package = marlin_sources()
    tvm_ffi = importlib.util.find_spec("tvm_ffi")
    assert tvm_ffi is not None
    assert tvm_ffi.origin is not None
    folders = [package / "include", package / "csrc", Path(tvm_ffi.origin).parent / "include",
               wheel_root() / "data/cccl/libcudacxx/include"]  # fmt: skip
    source = fork_root() / "emulator" / "tests" / "upstream" / "marlin_moe.cu"
    program = library(f"emulated_marlin_{tile}", source, "c++20", defines, folders).main

    def run(rows: Sequence[int], n: int, k: int) -> None:
        total, random = sum(rows), np.random.default_rng(0)
        first = itertools.accumulate(rows, initial=0)
        padded = [-(-count // tile) * tile for count in rows]
        routes = np.concatenate(
            [np.pad(np.arange(begin, begin + count), (0, full - count), constant_values=total)
             for begin, count, full in zip(first, rows, padded, strict=False)]
        )  # fmt: skip
        owners = np.repeat(np.arange(len(rows)), [full // tile for full in padded])
        arrays = (
            random.integers(0, 2**15, (total, k), np.uint16) % 0x4000, random.integers(0, 256, (len(rows), n, k // 2),
            np.uint8),
            random.integers(120, 129, (len(rows), k // SCALE_BLOCK, n), np.uint8), routes.astype(np.int32),
            owners.astype(np.int32), np.array([routes.size], np.int32), np.ones((total, 1), np.float32),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder, name)) for name in ("in", "out")]
            Path(files[0]).write_bytes(b"".join(array.tobytes() for array in arrays))
            words = ["marlin", *map(str, (total, 1, len(rows), n, k, routes.size)), *files]
            arguments = (ctypes.c_char_p * len(words))(*map(str.encode, words))

            def call() -> None:
                if (status := program(len(words), arguments)) != 0:
                    raise RuntimeError(f"Marlin's program answered {status}")

            device.call(call)

    return run


def partial_bytes(tiles: Sequence[int], n: int, k: int, tile: int) -> int:
    """Bytes that Marlin's blocks write of sums that they share, given the rows of each tile; they stay in L2.

    Blocks take equal runs of tiles along K, one column of outputs after the other; a column that is cut has a buffer.
    """
    n_tile, k_tile, _, per_sm = MARLIN_TILES[tile]
    columns, length = n // n_tile, k // k_tile
    share = -(-len(tiles) * columns * length // (MULTIPROCESSORS * per_sm))
    cut = [
        at // columns
        for at in range(len(tiles) * columns)
        if at * length // share != (at * length + length - 1) // share
    ]
    unit = min(tile, 16)
    return sum(4 * n_tile * unit * -(-tiles[each] // unit) for each in cut)


def marlins_work(launch: Any, rows: Sequence[int], n: int, k: int, tile: int) -> Launch:
    """The launch's counts less its polling, which depends on the emulator's order of blocks, and its partial sums,
    which stay in L2.

    Blocks wait for one another's sums in a loop of three instructions with one global load. The kernel has few other
    global loads: it copies weights and tokens to shared memory.
    """
    found, polls = seen(launch), launch.counters.by_class["load_global"]
    tiles = [min(tile, count - first) for count in rows for first in range(0, count, tile)]
    return dataclasses.replace(
        found, counts=found.counts + Counts(instructions=-3.0 * polls, bytes=-float(partial_bytes(tiles, n, k, tile)))
    )


def fit_peer(device: VirtualDevice, gemm: GroupedGemm, tile: int, n: int, k: int) -> tuple[Fit, float]:
    """The counts of a GEMM's launch, and the largest deviation of a fourth run: ragged, one expert with two tiles."""
    short = max(1, tile // 8)
    batches = [[short] * 2, [short] * 4, [tile] * 2, [1, tile + 1, tile // 2]]

    def counted(rows: Sequence[int]) -> Launch:
        # Upstream's first launch fills in the GEMM's arguments.
        launch = launches_of(device, functools.partial(gemm, rows, n, k))[-1]
        return marlins_work(launch, rows, n, k, tile) if "marlin" in launch.kernel else seen(launch)

    launches = [counted(rows) for rows in batches]
    works = [Work(sum(rows), len(rows), sum(-(-count // tile) for count in rows), sum(rows)) for rows in batches]
    fit = fit_launch(launches[:3], works[:3], tile, by_tokens=False)
    from_fit, found = fit.at(works[3]), launches[3].counts
    pairs = [(getattr(from_fit, name), getattr(found, name)) for name in ("instructions", "mma_flops", "bytes")]
    return fit, max(abs(a - b) / b for a, b in pairs)


KERNELS: dict[str, Callable[[VirtualDevice, int], GroupedGemm]] = {"CUTLASS": cutlass, "Marlin": marlin}
RUNS = (("CUTLASS", 64, 1), ("CUTLASS", 64, 2), ("CUTLASS", 128, 1), ("Marlin", 8, 1), ("Marlin", 64, 1))
"""Kernel, tile and GPUs that share the layer, of the published rows."""


@unless_impossible
def renew() -> None:
    """Run all that is kept again, and write it."""
    build_emulator()
    fitted = []
    with virtual_device("sm_121a", strict=False) as device:
        for name, tile, ranks in RUNS:
            gemm = KERNELS[name](device, tile)
            hidden, inter = peers.PEERS[name].padded(MODELS[LAYER_MODEL].split(ranks).moe)
            fits = []
            for n, k in ((2 * inter, hidden), (hidden, inter)):
                began = time.perf_counter()
                fit, deviation = fit_peer(device, gemm, tile, n, k)
                fits.append(fit)
                took = f"{time.perf_counter() - began:.0f} s"
                print(f"{name}, tile {tile}, N {n}, K {k}: {took}, check off by {deviation:.1%}", flush=True)
            fitted.append(({"kernel": name, "hidden": hidden, "inter": inter}, fits))
    write_fits(peers.FITS, fitted)
    print(f"wrote {peers.FITS}")


if __name__ == "__main__":
    sys.exit(renew())
