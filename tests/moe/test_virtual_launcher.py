# SPDX-License-Identifier: Apache-2.0
"""The launcher around the kernels, as it ships, on the virtual SM121: sizes, absent arguments, threads, refusals; and,
with lines of it changed, the parts of its workspace, and what lies far from where its memory begins."""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bindings import in_order
from virtual_devices import virtual_fixture
from virtual_group_gemm import launch_group_gemm
from virtual_moe import arguments_of, moe_module, problem_of, register_instance, run_moe

from flashinfer._layer import fork_root
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.gemm import dense_block_scaled
from flashinfer.gemm.sm12x_group_gemm import GroupGemmCall, group_gemm, scale_rows
from flashinfer.jit import fused_moe
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
from flashinfer.jit.sm12x import modules
from flashinfer.sm12x.instances import FUSED_MOE_ROUTED_ROWS, GEMM_INSTANCES, INSTANCES, MAX_EXPERTS, index_of
from flashinfer.testing import (
    TENSOR_CORE,
    DenseCase,
    MoECase,
    MoEInputs,
    check_within_bound,
    dense_reference,
    group_gemm_reference,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.row_top_k_reference import largest_of_rows
from flashinfer.testing.virtual_device import VirtualDevice, compiling_for

device = virtual_fixture()
MODES = [mode for mode in Mode if mode is not Mode.AUTO]
"""The module's."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_bf16", [False, True])
def test_a_workspace_serves_fewer_tokens_too(device: VirtualDevice, mode: int, as_bf16: bool) -> None:
    size_of = moe_module(device).sm12x_moe_workspace_size
    for hidden, inter, experts, top_k in ((2880, 2880, 128, 4), (64, 32, 3, 3), (2048, 768, 128, 8), (96, 96, 8, 1)):
        sizes = [size_of(tokens, hidden, inter, experts, top_k, int(mode), as_bf16) for tokens in range(1, 2049)]
        smaller = [n for n, (one, next_) in enumerate(zip(sizes, sizes[1:], strict=False), start=1) if next_ < one]
        assert not smaller, (
            f"{hidden} x {inter}, top-{top_k}: less than for {smaller[:5]} tokens is enough for one more"
        )


GROUP_GEMM = {"tiles": [1, 128, 128, 128], "swap_ab": True, "out_dtype": None, "tactic": GEMM_INSTANCES[0].index}
Changes = tuple[tuple[str, str, str], ...]  # a file, text that stands there once, what takes its place
LAUNCHER, KERNELS = f"csrc/{modules._LAUNCHER}", "include/flashinfer/sm12x"
ARENA = f"{KERNELS}/host/tile_gemm.cuh"
# Each part of the workspace has memory of its own, just as large: what is written or read behind its end, and would hit
# padding or the next part, is then reported.
PARTS_APART: Changes = (
    (ARENA, "reinterpret_cast<T*>(base_ + used_)", "static_cast<T*>(own_memory(count * sizeof(T)))"),
    (
        ARENA,
        "class Arena {",
        """
inline void* own_memory(size_t bytes) {
  void* memory = nullptr;
  return bytes == 0 || cudaMalloc(&memory, bytes) != cudaSuccess ? nullptr : memory;
}

class Arena {""",
    ),
)
_changed: dict[Any, Any] = {}
MXFP4_DENSE = modules.MODULES[modules.DENSE.format("mxfp4")]


def with_changes(
    device: VirtualDevice, generate: Callable[..., Any], changes: Changes, source: str = Path(LAUNCHER).stem
) -> Any:
    """A module one source of which is compiled anew, with ``changes``; its other objects are as they are."""
    key = generate, changes, source
    if key in _changed:
        return _changed[key]
    with compiling_for(device.architecture):
        spec = generate()
        spec.build(need_lock=True)
        plan = spec.plan
    (step,) = [step for step in plan.steps if step.source.stem == source]
    root = fork_root().resolve()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("include", "csrc"):
            shutil.copytree(root / part, Path(folder, part))
        for file, old, new in changes:
            text = Path(folder, file).read_text(encoding="utf-8")
            assert text.count(old) == 1, old
            Path(folder, file).write_text(text.replace(old, new), encoding="utf-8")
        compiled, library = Path(folder, "changed.o"), Path(folder, "changed.so")
        ours = step.source.is_relative_to(root / "csrc")
        there = Path(folder, step.source.relative_to(root)) if ours else step.source
        first = dataclasses.replace(step, flags=("-I", f"{folder}/include", *step.flags))
        objects = [str(compiled if other is step else plan.object_path(other)) for other in plan.steps]
        for command in (
            first.command(str(there), str(compiled)),
            (plan.linker, *objects, *plan.link_flags, "-o", str(library)),
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        module = _changed[key] = spec.load(library)
    return module


@pytest.fixture
def apart(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    """The device, on which the modules that have a workspace have its parts apart."""
    module = device.module
    sources = {
        fused_moe.gen_cutlass_fused_moe_sm120_module: LAUNCHER,
        modules.gen_group_gemm_module: modules._GEMM_BINDING,
        modules.gen_dense_module: modules._DENSE_BINDING,
    }

    def chosen(generate: Callable[..., Any], *arguments: Any) -> Any:
        if generate not in sources:
            return module(generate, *arguments)
        given = modules.MODULES[modules.DENSE.format(*arguments)] if arguments else generate
        return with_changes(device, given, PARTS_APART, Path(sources[generate]).stem)

    monkeypatch.setattr(device, "module", chosen)
    return device


# Each case fills a part that has room for several tactics, with the tactic that needs it: many tokens with a short K
# fill a pair's e4m3 act and its quantized tokens, few of them the fused MoE kernel's float32. Numbers of experts whose
# offsets fill whole lines, and others.
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("mxfp8_m8_k128", MoECase(4100, 128, 32, 64, 1, 1)),
        ("mxfp8_m8_k128", MoECase(150, 64, 96, 16, 2, 0, swizzled_input_sf=False)),
        ("mxfp8_m8_k128", MoECase(9, 160, 96, 5, 2, 0)),
        ("mxfp8_as_bf16_m16_k128", MoECase(40, 96, 32, 48, 2, 1)),
        ("bf16_m8_k128", MoECase(40, 96, 32, 128, 2, 2)),
        ("stream_mxfp8_as_bf16_m8", MoECase(37, 320, 96, 16, 2, 0)),
        ("stream_mxfp8_as_bf16_m8", MoECase(9, 96, 160, 32, 4, 1, ep_size=2, ep_rank=1)),
        ("stream_bf16_m8", MoECase(512, 64, 32, 3, 2, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.num_tokens} tokens, {value.num_experts} experts",
)
def test_every_part_of_a_layers_workspace_is_as_large_as_what_it_holds(
    apart: VirtualDevice, name: str, case: MoECase
) -> None:
    inputs = make_moe_inputs(case, 8)
    output = run_moe(apart, inputs, case.mode, [index_of(name)] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{name}, {case}")


OF_A8 = ("stream_mxfp8_as_bf16_m8", "mxfp8_m8_k128", "mxfp8_as_bf16_m16_k128")
OF_MODES = {0: OF_A8, 1: OF_A8, 2: ("stream_bf16_m8", "bf16_m8_k128")}


def at_limits() -> list[Any]:
    """Layers of all modes with the most pairs that a stream takes, with a token more, and with 140 tokens.

    A part is as large as the largest of what modes and tactics put there: act is e4m3, packed bfloat16, or float32 as
    long as a stream may come. Each must be full in one of these.
    """
    found = []
    for (mode, names), top_k in itertools.product(OF_MODES.items(), (1, 4)):
        most = FUSED_MOE_ROUTED_ROWS // top_k
        for name, tokens, sizes in itertools.product(names, (140, most, most + 1), ((32, 96), (96, 32))):
            if INSTANCES[index_of(name)].takes(tokens * top_k, *sizes):
                case = MoECase(tokens, *sizes, 128 if top_k == 4 else 3, top_k, mode, biases=False)
                found.append(pytest.param(name, case, id=f"{name}, mode {mode}, {tokens} x {top_k}, {sizes}"))
    return found


@pytest.mark.parametrize(("name", "case"), at_limits())
def test_every_part_of_a_layers_workspace_is_as_large_at_its_limits(
    apart: VirtualDevice, name: str, case: MoECase
) -> None:
    inputs = make_moe_inputs(case, 11)
    output = run_moe(apart, inputs, case.mode, [index_of(name)] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{name}, {case}")


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("dense_mxfp4_m32_gemm", "bf16"),
        ("dense_mxfp8_m32_gemm", "mxfp8_linear"),
        ("dense_mxfp4_m64_gemm_mxfp8", "quantize_bf16"),
        ("dense_mxfp4_m64_gemm_mxfp8", "mxfp8_linear"),
        ("dense_mxfp4_m64_gemm_mxfp8", "mxfp4"),
        ("dense_mxfp4_m64_gemm_mxfp4", "f16_to_mxfp4"),
    ],
)
def test_every_part_of_a_dense_layers_workspace_is_as_large_as_what_it_holds(
    apart: VirtualDevice, name: str, tokens: str
) -> None:
    for m, k in ((70, 320), (3, 96)):
        inputs = make_dense_inputs(DenseCase(m, 200, k, name.split("_")[1], tokens), 9)
        out = torch.full((m, 200), torch.nan, dtype=torch.bfloat16)
        dense_block_scaled(*inputs.arguments, **inputs.named, out=out, tactic=name)
        check_within_bound(out, *dense_reference(inputs), f"{name}, {tokens}, {m} tokens")


def test_every_part_of_a_grouped_gemms_workspace_is_as_large_as_what_it_holds(apart: VirtualDevice) -> None:
    call = make_group_gemm_inputs([9, 0, 70], 264, 416, 10)
    out = torch.full((79, 264), torch.nan, dtype=torch.bfloat16)
    group_gemm(GroupGemmCall(**call, **GROUP_GEMM, out=out))
    check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE), "grouped GEMM")


def sparse(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Zeros that take memory only where something is written."""
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8).view(dtype).view(shape)


def test_rows_of_a_grouped_gemm_beyond_31_bits(device: VirtualDevice) -> None:
    """More than 2^31 elements of outputs and more than 2^32 bytes of tokens lie before the one group there is."""
    n, k, far, rows = 1024, 4096, 1 << 21, 5
    near = make_group_gemm_inputs([rows], n, k, 12)
    a, a_scale = sparse(far + rows, k), sparse(far + 128, k // 32)
    a[far:], a_scale[far:] = near["a"].view(torch.uint8), near["a_scale"]
    out = sparse(far + rows, n, dtype=torch.bfloat16)
    out[far:] = torch.nan
    m_indptr = torch.tensor([far, far + rows], dtype=torch.int32)
    operands = {**near, "a": a.view(torch.float8_e4m3fn), "a_scale": a_scale, "m_indptr": m_indptr}
    launch_group_gemm(device, operands, GEMM_INSTANCES[0].index, out)
    check_within_bound(out[far:], *group_gemm_reference(**near, accumulation=TENSOR_CORE), "far rows")


def test_scales_of_a_grouped_gemm_beyond_31_bits(device: VirtualDevice) -> None:
    """The last of as many groups as there can be is computed; its weights begin beyond 2^35 bytes."""
    n, k, rows = 16512, 8192, 3
    near = make_group_gemm_inputs([rows], n, k, 16)
    b, b_scale = sparse(MAX_EXPERTS, n, k // 2), sparse(MAX_EXPERTS, n, k // 32)
    b[-1], b_scale[-1] = near["b"][0], near["b_scale"][0]
    assert b_scale[:-1].numel() > 1 << 31
    ends = torch.zeros(MAX_EXPERTS + 1, dtype=torch.int32)
    ends[-1] = rows
    a_scale = torch.full((scale_rows(rows, MAX_EXPERTS), k // 32), 255, dtype=torch.uint8)
    a_scale[127 * (MAX_EXPERTS - 1) // 128 * 128 :][:128] = near["a_scale"]
    operands = {"a": near["a"], "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": ends}
    out = launch_group_gemm(device, operands, GEMM_INSTANCES[0].index)
    for columns in (slice(128), slice(n - 128, n)):
        part = {**near, "b": near["b"][:, columns], "b_scale": near["b_scale"][:, columns]}
        reference, bound = group_gemm_reference(**part, accumulation=TENSOR_CORE)
        check_within_bound(out[:, columns], reference, bound, f"{columns}")
    assert not out.isnan().any()


# The prologue would take minutes to prepare all tokens and zero their outputs. It may skip them here, because the
# counts of slots served elsewhere, which it would write, are 0.
FEW_PREPARED: Changes = ((LAUNCHER, "prologue.num_tokens = s.num_tokens;", "prologue.num_tokens = 1;"),)
LAUNCH_FC1 = "  if (const cudaError_t error = a.fc1_instance->fc1("
ONLY_PROLOGUE: Changes = ((LAUNCHER, LAUNCH_FC1, "  return {};\n" + LAUNCH_FC1),)


def run_far_layer(
    device: VirtualDevice, changes: Changes, inputs: MoEInputs, changed: dict[str, Any], mode: int = 0
) -> None:
    """A layer by the two-kernel path, some of its arguments ``changed``, in a workspace that takes memory only where
    something is written."""
    module = with_changes(device, gen_cutlass_fused_moe_sm120_module, changes)
    pair = index_of("bf16_m8_k128" if mode == 2 else "mxfp8_m8_k128")
    register_instance(device, module, pair)
    near, tokens = problem_of(inputs, mode), changed["output"].shape[0]
    sizes = tokens, near.hidden, near.inter, near.num_local_experts, near.top_k
    workspace = sparse(module.sm12x_moe_workspace_size(*sizes, mode, False))
    arguments = arguments_of(inputs, changed["output"]) | changed | {"swizzled_input_sf": True}
    arguments |= {"workspace": workspace, "mode": mode, "tactic_fc1": pair, "tactic_fc2": pair}
    device.call(module.sm12x_moe_run, *in_order("sm12x_moe_run", **arguments), writes=(changed["output"], workspace))


@pytest.mark.parametrize("mode", [0, 2], ids=["MXFP8 input", "W4A16"])
def test_tokens_of_a_layer_beyond_31_bits(device: VirtualDevice, mode: int) -> None:
    """Inputs, packed ones, partial outputs and outputs of more than 2^31 elements: only the last tokens have a local
    expert."""
    hidden, far, tokens = 4128, 1 << 19, 5
    near = make_moe_inputs(MoECase(tokens, hidden, 32, 3, 1, mode), 13)

    def behind_others(rows: torch.Tensor, fill: int = 0) -> torch.Tensor:
        others = sparse(far + rows.shape[0], *rows.shape[1:], dtype=rows.dtype)
        if fill:
            others.fill_(fill)
        others[far:] = rows
        return others

    x = behind_others(near.input.view(torch.uint8)).view(near.input.dtype)
    x_scale = None if near.input_sf is None else behind_others(near.input_sf.view(128, -1))
    ids = behind_others(near.token_selected_experts, fill=-1)
    assert near.token_final_scales is not None
    weights = behind_others(near.token_final_scales)
    output = sparse(far + tokens, hidden, dtype=torch.bfloat16)
    output[far:] = torch.nan
    changed = {"output": output, "input": x, "input_sf": x_scale}
    changed |= {"token_selected_experts": ids, "token_final_scales": weights}
    loop = "  while (token < p.num_tokens) {"
    pack_far = (f"{KERNELS}/rows/pack.cuh", loop, f"  token += {far};\n{loop}")
    run_far_layer(device, (*FEW_PREPARED, *([pack_far] if mode == 2 else [])), near, changed, mode)
    check_within_bound(output[far:], *moe_reference(near, TENSOR_CORE), "far tokens")


def test_a_token_without_a_local_expert_beyond_31_bits(device: VirtualDevice) -> None:
    """Its outputs are zeroed; those of the tokens before are left to the GEMMs, which are not launched here."""
    hidden, tokens, tail = 1 << 16, (1 << 15) + 3, 2
    layer = make_moe_inputs(MoECase(1, hidden, 32, 2, 1, 0), 14)
    output = sparse(tokens, hidden, dtype=torch.bfloat16)
    output[-tail - 1 :] = torch.nan
    ids = torch.zeros((tokens, 1), dtype=torch.int32)
    ids[-tail:] = -1
    x, x_scale = sparse(tokens, hidden).view(torch.float8_e4m3fn), sparse(tokens + -tokens % 128, hidden // 32)
    changed = {"output": output, "input": x, "input_sf": x_scale}
    run_far_layer(device, ONLY_PROLOGUE, layer, changed | {"token_selected_experts": ids, "token_final_scales": None})
    assert not output[-tail:].any()
    assert output[-tail - 1].isnan().all()


def test_outputs_of_a_streamed_dense_layer_beyond_31_bits(device: VirtualDevice) -> None:
    """The kernel begins with the tile of tokens that it would come to after hours."""
    n, k, far, rows, tile = 4096, 2080, 1 << 19, 5, 8  # tokens, too, lie beyond 2^31 bytes
    header = f"{KERNELS}/split_k/dense.cuh"
    changes: Changes = (
        (header, "work_tile(step), tile(0)", f"work_tile(step), tile({far // tile})"),
        (header, "steps(work_tiles * tiles)", f"steps(work_tiles * (tiles - {far // tile}))"),
        (header, "for (int first = 0; first < p.num_tokens;", f"for (int first = {far}; first < p.num_tokens;"),
    )
    module = with_changes(device, MXFP4_DENSE, changes, "dense_mxfp4_m8_w2")
    near = make_dense_inputs(DenseCase(rows, n, k, residual=True), 17)
    x, residual = sparse(far + rows, k, dtype=torch.bfloat16), sparse(far + rows, n, dtype=torch.bfloat16)
    out = sparse(far + rows, n, dtype=torch.bfloat16)
    x[far:], residual[far:], out[far:] = near.arguments[0], near.named["residual"], torch.nan
    operands = out, x, None, *near.arguments[1:], None, None, residual
    device.call(module.sm12x_dense_run, *operands, None, 0, 0, None, True, True, writes=(out,))
    check_within_bound(out[far:], *dense_reference(near), "far rows")


def test_largest_outputs_of_rows_beyond_31_bits(device: VirtualDevice) -> None:
    """The search of two rows takes those behind all others."""
    print("seed", 18)
    n, far, top_k = 4100, 1 << 19, 2
    header = f"{KERNELS}/rows/top_k.cuh"
    changes: Changes = (
        (
            header,
            "row = static_cast<int>(blockIdx.x) / chunks;",
            f"row = {far} + static_cast<int>(blockIdx.x) / chunks;",
        ),
        (header, "row = blockIdx.x;", f"row = {far} + blockIdx.x;"),
    )
    module = with_changes(device, MXFP4_DENSE, changes, Path(modules._DENSE_BINDING).stem)
    logits = sparse(far + 2, n, dtype=torch.bfloat16)
    logits[far:] = torch.randn(2, n, generator=torch.Generator().manual_seed(18)).bfloat16()
    values, indices = sparse(far + 2, top_k, dtype=torch.float32), sparse(far + 2, top_k, dtype=torch.int64)
    ranks = sparse((far + 2) * 3 * top_k * 8)

    def search(*_: torch.Tensor) -> None:
        module.sm12x_row_top_k_run(values[:2], indices[:2], 0, ranks, logits[:2], True)

    device.call(search, values, indices, ranks, logits, writes=(values, indices, ranks))
    expected = largest_of_rows(logits[far:], top_k)
    assert torch.equal(values[far:], expected[0])
    assert torch.equal(indices[far:], expected[1])


@pytest.mark.parametrize("name", ["mxfp8_m8_k128", "stream_mxfp8_as_bf16_m8"])
def test_weights_of_an_expert_beyond_32_bits(device: VirtualDevice, name: str) -> None:
    """The last of as many experts as there can be; FC1's weights begin beyond 2^32 bytes, FC2's beyond 2^31."""
    near = make_moe_inputs(MoECase(1, 3072, 2816, 1, 1, 0), 15)
    changed: dict[str, Any] = {"token_selected_experts": torch.full_like(near.token_selected_experts, MAX_EXPERTS - 1)}
    for field in dataclasses.fields(near):
        value = getattr(near, field.name)
        if isinstance(value, torch.Tensor) and field.name.startswith(("fc1_", "fc2_", "swiglu_")):
            changed[field.name] = sparse(MAX_EXPERTS, *value.shape[1:], dtype=value.dtype)
            changed[field.name][-1] = value[0]
    first = (MAX_EXPERTS - 1) * changed["fc1_weights"][0].numel(), (MAX_EXPERTS - 1) * changed["fc2_weights"][0].numel()
    assert first[0] > 1 << 32 and first[1] > 1 << 31
    output = run_moe(device, dataclasses.replace(near, **changed), 0, [index_of(name)] * 2)
    check_within_bound(output, *moe_reference(near, TENSOR_CORE), name)


@pytest.mark.parametrize("what", ["pair", "streamed", "dense", "grouped GEMM"])
def test_a_workspace_that_lacks_a_byte_is_refused(
    device: VirtualDevice, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = device.empty
    monkeypatch.setattr(device, "empty", lambda size: empty(size - 1))
    layer = make_moe_inputs(MoECase(5, 64, 32, 4, 2, 2), 11)
    dense, groups = make_dense_inputs(DenseCase(5, 40, 64), 11), make_group_gemm_inputs([3, 5], 64, 96, 11)
    calls: dict[str, Callable[[], Any]] = {
        "pair": lambda: run_moe(device, layer, 2, [index_of("bf16_m8_k128")] * 2),
        "streamed": lambda: run_moe(device, layer, 2, [index_of("stream_bf16_m8")] * 2),
        "dense": lambda: dense_block_scaled(*dense.arguments, weight_format="mxfp4", tactic="dense_mxfp4_m32_gemm"),
        "grouped GEMM": lambda: group_gemm(GroupGemmCall(**groups, **GROUP_GEMM, out=None)),
    }
    with pytest.raises(Exception, match="the workspace is too small"):
        calls[what]()
    assert device.launches == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "pair"])
def test_absent_routing_weights_count_one(device: VirtualDevice, mode: Mode, streamed: bool) -> None:
    tactic = next(row.index for row in INSTANCES if row.activation == mode.activation and row.split_k == streamed)
    case = MoECase(num_tokens=5, hidden=128, inter=96, num_experts=4, top_k=2, mode=int(mode))
    inputs = make_moe_inputs(case, seed=3)
    inputs.token_final_scales = torch.ones_like(inputs.token_final_scales)
    reference = moe_reference(inputs, TENSOR_CORE)
    inputs.token_final_scales = None
    check_within_bound(run_moe(device, inputs, mode, [tactic, tactic]), *reference)


def test_threads_with_layers_of_different_sizes_do_not_take_each_others_shared_memory(device: VirtualDevice) -> None:
    """Each launch of a fused MoE kernel asks for shared memory by the layer's sizes; the grant is the kernel's."""
    module = device.module(gen_cutlass_fused_moe_sm120_module)
    tactic = next(row.index for row in INSTANCES if row.activation == "bf16" and row.split_k)
    seed = random.randrange(1 << 16)
    print("seed", seed)
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def launch_again_and_again(hidden: int, inter: int) -> None:
        case = MoECase(num_tokens=2, hidden=hidden, inter=inter, num_experts=2, top_k=1, mode=int(Mode.W4A16))
        inputs = make_moe_inputs(case, seed=seed)
        output = torch.full((case.num_tokens, hidden), float("nan"), dtype=torch.bfloat16)
        size = module.sm12x_moe_workspace_size(2, hidden, inter, 2, 1, int(Mode.W4A16), False)
        workspace = torch.zeros(size, dtype=torch.uint8)
        named = arguments_of(inputs, output) | {"workspace": workspace, "mode": int(Mode.W4A16)}
        arguments = in_order("sm12x_moe_run", **named, tactic_fc1=tactic, tactic_fc2=tactic)
        try:
            start.wait()
            for _ in range(12):  # without one grant for all, about one launch in five is refused
                device.call(module.sm12x_moe_run, *arguments)
            check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=launch_again_and_again, args=sizes) for sizes in ((256, 128), (2880, 64))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_scales_that_are_no_words_are_refused_before_a_launch(device: VirtualDevice) -> None:
    case = MoECase(num_tokens=3, hidden=128, inter=64, num_experts=2, top_k=1, mode=int(Mode.MXFP8_INPUT))
    inputs = make_moe_inputs(case, seed=5)
    buffer = torch.empty(inputs.input_sf.numel() + 1, dtype=torch.uint8)
    odd = buffer[1:].view(inputs.input_sf.shape)
    odd.copy_(inputs.input_sf.view(torch.uint8))
    inputs.input_sf = odd
    with pytest.raises(ValueError, match="input_sf must start at a multiple of 4 bytes"):
        run_moe(device, inputs, int(Mode.MXFP8_INPUT))
    assert device.launches == []
