# SPDX-License-Identifier: Apache-2.0
"""The kernels that measure a GPU, on the virtual SM121: what they compute is right, and what they look for is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import emulate
import pytest
import torch
from perfmodel import moe

from flashinfer.jit.sm12x import modules
from flashinfer.sm12x.instances import MAIN_MODULE
from flashinfer.sm12x.models import MOE_LAYERS
from flashinfer.testing import SM120_SUM_BITS, TENSOR_CORE, dequantize_mxfp4, verify
from flashinfer.testing.virtual_device import VirtualDeviceError, virtual_device
from flashinfer_sm12x.doctor.probe import arrivals, launches, layer, mma, parts, timing
from flashinfer_sm12x.doctor.probe.target import NoTargetError, Target, find_target

ALL_CHECKERS = 31  # vsm.Watch.ALL, races included, and ARRIVALS: GB10's rule
KINDS = pytest.mark.parametrize("name", mma.KINDS)


@pytest.fixture
def target() -> Any:
    with virtual_device("sm_121a", watch=ALL_CHECKERS):
        yield find_target()


def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(NoTargetError, match="sees no GPU"):
        find_target()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_every_word_is_copied_once(target: Target) -> None:
    """Each of the 48 blocks takes several pieces, so that stages are used again; one piece is of 16 bytes."""
    print("seed", 2)
    generator = torch.Generator().manual_seed(2)
    sizes = [32_768] * 100 + [16, 80_000] + [4_096] * 150
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    pieces = timing.Pieces.of(tensors, target.device)
    blocks = target.sm_count
    assert len(pieces.vectors) > 5 * blocks > 3 * blocks * 1.5
    pieces.sums.fill_(-1)
    assert target.virtual is not None
    target.virtual.call(lambda *_: timing.BulkRead(target).run(pieces), *tensors, writes=())
    cut = [part for tensor in tensors for part in tensor.split(32 << 10)]
    found = pieces.sums.view(-1)[: blocks * timing.BULK_READ_WARPS].view(blocks, -1).long()
    for block in range(blocks):
        words = torch.cat([part.view(torch.int32).long() for part in cut[block::blocks]])
        assert int(found[block].sum()) & 0xFFFFFFFF == int(words.sum()) & 0xFFFFFFFF, block
    assert (pieces.sums.view(-1)[blocks * timing.BULK_READ_WARPS :] == -1).all()


def test_every_word_is_read_once(target: Target) -> None:
    """Pieces of 32 KB, one that is shorter, and one of 16 bytes; each has a sum of its own."""
    print("seed", 1)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in (80_000, 16, 32_768)]
    pieces = timing.Pieces.of(tensors, target.device)
    assert pieces.num_bytes == 80_000 + 16 + 32_768
    assert target.virtual is not None
    target.virtual.call(lambda *_: timing.StreamingRead(target).run(pieces), *tensors, writes=())
    cut = [part for tensor in tensors for part in tensor.split(32 << 10)]
    expected = [sum(int.from_bytes(bytes(part[i : i + 4]), "little") for i in range(0, len(part), 4)) for part in cut]
    found = [int(row.long().sum()) & 0xFFFFFFFF for row in pieces.sums]
    assert found == [value & 0xFFFFFFFF for value in expected]


# --- MMAs -------------------------------------------------------------------------------------------------------------


@KINDS
def test_mmas_of_every_warp_and_chain(target: Target, name: str) -> None:
    kind, seed = mma.KINDS[name], 5
    print("seed", seed)
    a, b, c = mma.random_operands(kind, seed)
    done = mma.multiply(target, kind, a, b, c, iterations=2, scales=(0x827E, 0x7D81), blocks=2, warps=3)
    first, second = (2.0 ** (0x7E + 0x81 - 254), 2.0 ** (0x82 + 0x7D - 254)) if kind.scaled else (1.0, 1.0)
    for block, warp, chain in ((0, 0, 0), (0, 2, 3), (1, 1, 7)):
        for row, column in ((0, 0), (7, 1), (8, 6), (15, 7)):
            products = [float(x) * float(y) for x, y in zip(a[row], b[chain, column])]
            expected = float(c[row, column]) + 2 * (first * sum(products[:32]) + second * sum(products[32:]))
            assert float(done.d[block, warp, chain, row, column]) == expected
    assert (done.times[:, 1] > done.times[:, 0]).all()
    assert (done.times[:, 3] > done.times[:, 2]).all()
    assert mma.wrong_results(target, kind) == 0


@KINDS
def test_a_wrong_mma_is_counted(name: str) -> None:
    """One of its scales, or the type of its operand, is another one."""
    faults = {
        "bf16": {"m16n8k16.row.col.f32.bf16.bf16": "m16n8k16.row.col.f32.f16.f16"},
        "f16": {"m16n8k16.row.col.f32.f16.f16": "m16n8k16.row.col.f32.bf16.bf16"},
        "mxf8f6f4": {"m16n8k32.row.col.f32.e2m1.e4m3": "m16n8k32.row.col.f32.e3m2.e4m3"},
        "mxf4": {
            "kind::mxf4.block_scale.scale_vec::2X": "kind::mxf4nvf4.block_scale.scale_vec::4X",
            "f32.e2m1.e2m1.f32.ue8m0": "f32.e2m1.e2m1.f32.ue4m3",
        },
    }
    with virtual_device("sm_121a", planted=faults[name]) as device:
        assert mma.wrong_results(find_target(), mma.KINDS[name]) > 100
        assert device.planted > 0


def test_values_that_a_format_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="e2m1 lacks a value of"):
        mma.encode(torch.full((1, 64), 5.0), "e2m1")
    packed = mma.encode(torch.tensor([[0.5, -6.0] * 32]), "e2m1")
    assert dequantize_mxfp4(packed, torch.full((1, 2), 127, dtype=torch.uint8))[0, :2].tolist() == [0.5, -6.0]


@pytest.mark.parametrize("bits", [0, 13, 17, 20, 21, 25, None], ids=str)
def test_the_width_in_which_mmas_add_up(bits: int | None) -> None:
    with virtual_device("sm_121a", accumulation_bits=bits):
        found = mma.all_sum_bits(find_target())
    if bits is None:
        assert found == {kind: SM120_SUM_BITS[kind] for kind in mma.KINDS}
    elif bits == 0:
        assert set(found.values()) == {mma.LOOKED_FOR}
    elif bits > 23:
        # The halves of an MMA with 64 elements are added in float32.
        assert found == {"bf16": bits, "f16": bits, "mxf8f6f4": bits, "mxf4": 23}
    else:
        assert set(found.values()) == {bits}


def test_each_kind_has_a_width_of_its_own() -> None:
    widths = {"bf16": 22, "f16": 19, "mxf8f6f4": 14, "mxf4": 17}
    with virtual_device("sm_121a", accumulation_bits=widths):
        assert mma.all_sum_bits(find_target()) == widths


@pytest.mark.parametrize("bits", [13, 20, 25])
def test_products_may_be_narrow_where_c_is_added_apart(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an H200 computes e4m3: products in one sum, cut, and C added to it in float32."""

    def multiply(_target, kind, a, b, c, scales=(mma.IDENTITY_SCALES,) * 2):
        factors = torch.ones(kind.k, dtype=torch.float64)
        factors[:32] = 2.0 ** ((scales[1] & 0xFF) - 0x7F)
        products = torch.einsum("rk,nck->nrck", a.double() * factors, b.double())
        unit = 2.0 ** (products.abs().amax(-1, keepdim=True).log2().floor() - bits)
        d = ((products / unit).trunc() * unit).sum(-1) + c.double()
        return mma.Multiplied(d[None, None].float(), torch.zeros(1, 4))

    monkeypatch.setattr(mma, "multiply", multiply)
    found = {name: mma.sum_bits(None, kind) for name, kind in mma.KINDS.items()}
    assert found.pop("mxf8f6f4") == (bits if bits < 20 else mma.LOOKED_FOR)  # e2m1 times e4m3 spans 2^20
    assert set(found.values()) == {bits}


def test_a_rate_is_of_cycles_and_nanoseconds() -> None:
    times = torch.tensor([[1000, 3000, 50_000, 51_000], [2_000, 4_000, 50_100, 51_100]])
    rate = mma.rate_of(times, flops_per_block=4_096_000)
    tflops = pytest.approx(2 * 4_096_000 / 1100 / 1e3)
    assert rate == {"flops_per_clock": 2048, "gigahertz": 2.0, "tflops": tflops}


def test_the_width_is_left_for_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.jit_env, "FLASHINFER_WORKSPACE_DIR", tmp_path)
    monkeypatch.delenv(modules.HALF_MMA_VARIABLE, raising=False)
    assert not modules.computes_in_fp16()
    parts.write_sum_bits({"mxf8f6f4": 13, "mxf4": 25}, "NVIDIA GB10")
    assert modules.probed_sum_bits("mxf8f6f4") == 13
    assert modules.computes_in_fp16() and not modules.computes_in_fp16("mxf4")
    parts.write_sum_bits({"mxf8f6f4": 25, "mxf4": 13}, "NVIDIA GB10")
    assert not modules.computes_in_fp16() and modules.computes_in_fp16("mxf4")
    parts.write_sum_bits({"bf16": 25, "f16": 25}, "NVIDIA H200")  # which has no block-scaled MMAs
    assert modules.probed_sum_bits("mxf8f6f4") is None and not modules.computes_in_fp16()


# --- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", launches.KINDS)
def test_a_chain_of_launches_counts(target: Target, kind: str) -> None:
    steps = launches.new_steps(target, 12)
    launches.launch_chain(target, steps, kind, blocks=3)
    assert steps.tolist() == list(range(1, 14))
    assert launches.out_of_order(target, kind, 12) == 0
    assert target.virtual is not None
    for launch in target.virtual.launches:
        assert (launch.programmatic, launch.cooperative) == (kind == "dependent", kind == "cooperative")


def test_a_dependent_launch_that_does_not_wait_is_loud() -> None:
    with virtual_device("sm_121a", planted={"griddepcontrol.wait;": ""}) as device:
        with pytest.raises(VirtualDeviceError, match="launch_step_kernel"):
            launches.out_of_order(find_target(), "dependent", 4)
        assert device.planted > 0


def test_launches_that_do_not_overlap_here(target: Target) -> None:
    """The virtual device runs one launch after the other: times are told apart by which side of the end they are on."""
    found = launches.overlap(target, dependent=True, shared_bytes=4096, cycles=500)
    assert found["first_us"] > 0
    assert found["began_before_end_us"] < 0 < found["released_after_end_us"]
    assert target.virtual is not None
    first, second = target.virtual.launches
    assert (first.programmatic, second.programmatic) == (False, True)
    assert (first.dynamic_shared, second.dynamic_shared) == (0, 4096)


# --- arrivals ---------------------------------------------------------------------------------------------------------

COPIES = pytest.mark.parametrize("copies", [False, True], ids=["stores", "copies"])
ROUNDS, BLOCKS = 131, 2  # more than there are contents


@COPIES
def test_stages_are_handed_over(target: Target, copies: bool) -> None:
    found = arrivals.hand_over(target, True, copies, ROUNDS, BLOCKS)
    assert found == {"compared": ROUNDS * 128 * 8 * BLOCKS, "wrong": 0}
    assert target.virtual is not None
    assert all(launch.clean for launch in target.virtual.launches)


@COPIES
def test_arrivals_without_a_fence_are_what_gb10_does_not_order(copies: bool) -> None:
    """The ISA orders them, and so does the emulator: nothing is wrong but by GB10's rule, which a checker has."""
    with virtual_device("sm_121a"):
        assert arrivals.hand_over(find_target(), False, copies, 8, 1)["wrong"] == 0
    with (
        virtual_device("sm_121a", watch=ALL_CHECKERS),
        pytest.raises(VirtualDeviceError, match="missing arrival fence"),
    ):
        arrivals.hand_over(find_target(), False, copies, 8, 1)


def test_words_of_another_stage_are_counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bulk copies bring two words that are not those of their round."""
    source = arrivals.source_words()
    source[3, 5], source[63, 127] = source[5, 5], 0
    monkeypatch.setattr(arrivals, "source_words", lambda: source)
    found = arrivals.hand_over(target, True, True, ROUNDS, BLOCKS)
    hits = len(range(3, ROUNDS, 64)) + len(range(63, ROUNDS, 64))
    assert found == {"compared": ROUNDS * 128 * 8 * BLOCKS, "wrong": hits * 8 * BLOCKS}
    assert arrivals.hand_over(target, True, False, ROUNDS, BLOCKS)["wrong"] == 0


# --- arguments --------------------------------------------------------------------------------------------------------


def test_errors_come_before_the_launch(target: Target) -> None:
    kind = mma.KINDS["bf16"]
    a, b, c = mma.random_operands(kind, 1)
    with pytest.raises(ValueError, match="the number of warps is 17; it must be from 1 to 16"):
        mma.multiply(target, kind, a, b, c, warps=17)
    with pytest.raises(ValueError, match="b has 1024 elements of 8 bits; it must have 2048 of 8"):
        mma.multiply(target, kind, a, b[:4], c)
    with pytest.raises(ValueError, match="kind is 4; it must be from 0 to 3"):
        mma.multiply(target, mma.Kind(4, "bf16", "bf16", 16), a, b, c)
    with pytest.raises(ValueError, match="the number of blocks is 49; it must be from 1 to 48"):
        launches.out_of_order(target, "plain", 4, blocks=49)
    with pytest.raises(ValueError, match="shared_bytes is 200000; it must be from 0 to 101376"):
        launches.overlap(target, dependent=True, shared_bytes=200_000)
    with pytest.raises(ValueError, match="rounds is -1"):
        arrivals.hand_over(target, True, False, -1, 1)
    assert target.virtual is not None
    assert not target.virtual.launches


# --- parts ------------------------------------------------------------------------------------------------------------


def test_the_parts_tell_what_they_find() -> None:
    """All that are quick, as the doctor asks for them; nothing is timed."""
    answers: dict[str, dict[str, Any]] = {}
    with virtual_device("sm_121a", accumulation_bits=13):
        for part in ("device", "dram", "mma", "sums", "launch", "order", "layer"):
            answers[part] = {}
            parts.run(part, lambda facts=answers[part], **found: facts.update(found))
    rates = {"bf16": [862, 1024], "f16": [862, 1024], "mxf8f6f4": [2048, 2048], "mxf4": [4096, 4096]}
    assert json.loads(json.dumps(answers)) == {
        "device": answers["device"],
        "dram": {"wrong": False, "copies_wrong": False, "predicted": [218.0, 250.0]},
        "mma": {kind: {"wrong": 0, "predicted": predicted} for kind, predicted in rates.items()},
        "sums": {"bf16": 13, "f16": 13, "mxf8f6f4": 13, "mxf4": 13, "needed": modules.NARROWEST_SUM},
        "launch": {f"{kind} out of order": 0 for kind in launches.KINDS},
        "order": {
            f"{how} {fenced} fence": {"compared": 40_960, "wrong": 0}
            for how in ("stores", "copies")
            for fenced in ("with", "without")
        },
        "layer": {},
    }
    assert answers["device"]["name"] == "virtual SM121"
    assert answers["device"]["virtual"] is answers["device"]["gb10"] is answers["device"]["sm12x"] is True


def test_every_default_tactic_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as torch for CUDA takes the virtual GPU for one
    with virtual_device("sm_121a") as device:
        found = list(verify.moe_results([(96, 64, 4)], (2,), 3, torch.device("cpu"), TENSOR_CORE, True, modes=(2,)))
        names = {row.name for row in MAIN_MODULE if row.activation == "bf16"}
        assert {result.what.rpartition(", ")[2] for result in found} == names
        assert len(found) == len(names)
        assert all(0 < result.used <= 1 and not result.wrong for result in found)
        assert device.launches


def test_the_fits_that_are_kept_are_those_of_the_kernels() -> None:
    """Else the kernels changed and the file did not: counts of one short batch."""
    sizes = MOE_LAYERS[layer.MODEL]
    tactics = moe.planned(sizes, layer.MODE, 1)
    fits = moe.known_fits(layer.MODE, tactics, sizes[:2])
    with virtual_device("sm_121a", strict=False) as device:
        for _ in range(3):  # warps that wait for other blocks issue more on a busy machine
            ids, done = emulate.emulate_moe(device, sizes, layer.MODE, emulate.runs_for(tactics)[0], tactics)
            assert len(fits) == len(done)
            given = [
                (fit.at(moe.work_of(ids, fit.tile)).values(), emulate.seen(launched).counts.values())
                for fit, launched in zip(fits, done, strict=True)
            ]
            if all(expected == pytest.approx(seen, rel=0.03, abs=300) for expected, seen in given):
                return
    pytest.fail(f"kept and emulated counts differ; moe.FITS says how to renew the file: {given}")
