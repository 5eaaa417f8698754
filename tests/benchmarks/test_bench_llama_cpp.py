# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a peer: its formats of weights, and, where LLAMA_CPP_LIBRARIES names a folder of ggml's libraries, its
graphs on ggml's CPU backend."""

from __future__ import annotations

import functools
import importlib.util
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_dense_mx
import pytest
import torch
from moe_bench import measure, peer_llama_cpp, peers
from moe_bench.peer_llama_cpp import TOKEN_ERROR, Gemm, Library, LlamaCpp, mxfp4_blocks, q8_0_blocks, q8_0_values
from moe_bench.results import Entry
from test_bench_humming import _rows, dense_inputs

from flashinfer.sm12x_gpu_probe.timing import Sample
from flashinfer.testing import moe_layers, moe_reference
from flashinfer.testing.mxfp_formats import dequantize_mxfp4

FOLDER = os.environ.get("LLAMA_CPP_LIBRARIES")
needs_library = pytest.mark.skipif(FOLDER is None, reason="LLAMA_CPP_LIBRARIES names no folder of ggml's libraries")
ROOT = Path(__file__).parents[2]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def library() -> Library:
    assert FOLDER is not None
    return Library(Path(FOLDER), "cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dense_mx, "time_graph", lambda run, repeats: Sample(20.0, 19.0, 22.0))
    monkeypatch.setattr(bench_dense_mx, "context_error", lambda: None)
    monkeypatch.setattr(bench_dense_mx, "CHECKED_ROWS", 64)


def generator(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def test_mxfp4_blocks_hold_the_same_values() -> None:
    """Decoded one value after the other, from bytes: all 16 codes, and scales over the whole range of float32."""
    given = generator(1)
    packed = torch.randint(0, 256, (6, 48), dtype=torch.uint8, generator=given)
    scales = torch.randint(2, 252, (6, 3), dtype=torch.uint8, generator=given)
    blocks = mxfp4_blocks(packed, scales)
    assert (blocks.shape, blocks.dtype) == ((6, 3, 17), torch.uint8)
    reference = dequantize_mxfp4(packed, scales)
    for row in range(6):
        for block in range(3):
            raw = bytes(blocks[row, block].tolist())
            assert raw[0] == scales[row, block]
            codes = [byte & 15 for byte in raw[1:]] + [byte >> 4 for byte in raw[1:]]
            values = [(-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (raw[0] - 127) for code in codes]
            assert values == reference[row, 32 * block : 32 * block + 32].tolist()


def test_experts_keep_their_blocks() -> None:
    given = generator(2)
    packed = torch.randint(0, 256, (2, 4, 32), dtype=torch.uint8, generator=given)
    scales = torch.randint(0, 255, (2, 4, 2), dtype=torch.uint8, generator=given)
    blocks = mxfp4_blocks(packed, scales)
    assert torch.equal(blocks[1], mxfp4_blocks(packed[1], scales[1]))


def test_q8_0_blocks() -> None:
    """Decoded from bytes, each value is the nearest of its block's steps, which are the largest value over 127."""
    values = torch.randn(3, 96, generator=generator(3))
    values[1, 32:64] = 0
    blocks = q8_0_blocks(values)
    assert (blocks.shape, blocks.dtype) == ((3, 3, 34), torch.uint8)
    for row in range(3):
        for block in range(3):
            step, *codes = struct.unpack("<e32b", bytes(blocks[row, block].tolist()))
            of_block = values[row, 32 * block : 32 * block + 32]
            assert step == (of_block.abs().max() / 127).half().item()
            # float16 may round the step down by 2**-11, so that the largest value lies beyond 127 of them
            for code, value in zip(codes, of_block.tolist(), strict=True):
                assert abs(step * code - value) <= step * (0.5 + 127 * 2.0**-11)
            assert [step * code for code in codes] == q8_0_values(blocks)[row, 32 * block : 32 * block + 32].tolist()
    assert not blocks[1, 1].any()


def test_the_tolerance_is_of_tokens_in_steps_of_their_block() -> None:
    """Rounded as Q8_0 and Q8_1 round them, tokens of any spread are off by less than it, and by no tenth of it."""
    given = generator(4)
    for x in (torch.randn(64, 256, generator=given), torch.randn(64, 256, generator=given) ** 5):
        error = peers.relative_error(q8_0_values(q8_0_blocks(x)), x.double())
        assert TOKEN_ERROR / 10 < error < TOKEN_ERROR


def test_it_is_said_why_it_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure.find_peers("llama_cpp", None, None, None, None) == []
    assert "llama_cpp: not measured: --llama-cpp names the folder of its libraries" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"llama_cpp cannot be measured: --llama-cpp: .* is no folder with libggml"):
        measure.find_peers("llama_cpp", None, None, None, tmp_path)
    (tmp_path / "libggml-base.so.0").write_text("no library")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.load_llama_cpp(tmp_path) == (None, "needs a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    library, why = peers.load_llama_cpp(tmp_path)
    assert library is None
    assert why.startswith("OSError: ")
    assert "libggml-base.so.0" in why
    with pytest.raises(SystemExit, match="llama_cpp cannot be measured: OSError"):
        bench_dense_mx.main(["--llama-cpp", str(tmp_path)])
    spec = importlib.util.find_spec("torch._C")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "libggml-base.so.0").unlink()
    (tmp_path / "libggml-base.so.0").symlink_to(spec.origin)  # some library
    with pytest.raises(FileNotFoundError, match=r"has no libggml-cpu\.so"):
        Library(tmp_path, "cpu")


def test_the_build_leaves_out_what_is_not_called(tmp_path: Path) -> None:
    """On files of the shape of ggml's: kept ones stay as they are, functions of the others are stubs."""
    spec = importlib.util.spec_from_file_location("build_llama_cpp", ROOT / "scripts" / "build_llama_cpp.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    instances = tmp_path / "template-instances"
    instances.mkdir()
    for name in (
        "mmq-instance-mxfp4",
        "mmq-instance-q8_0",
        "mmq-instance-q4_0",
        "mmf-instance-ncols_1",
        "fattn-vec-a-b",
    ):
        (instances / f"{name}.cu").write_text("kernels")
    (tmp_path / "unary.cu").write_text("kernels")
    (tmp_path / "roll.cu").write_text("kernels")
    (tmp_path / "roll.cuh").write_text(
        "template <int n>\nvoid inner(int a);\nstatic void own(int a);\n"
        "void roll(int a,\n          int * b = nullptr);\nbool can_roll(const int & a);\n"
    )
    for name, called in (("mmq", "mul_mat_q_case"), ("mmvq", "mul_mat_vec_q_switch_ncols_dst")):
        case = "        case GGML_TYPE_{0}:\n            {1}<GGML_TYPE_{0}>(x);\n            break;\n"
        (tmp_path / f"{name}.cu").write_text(
            "        case GGML_TYPE_Q4_0:\n            return 4;\n"
            + "".join(case.format(kind, called) for kind in ("Q4_0", "Q8_0", "Q5_0", "MXFP4", "NVFP4"))
        )
    script.leave_out(tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.cu")) == ["left-out", "mmq", "mmvq", "unary"]
    assert {path.stem: path.read_text() for path in instances.glob("*.cu")} == {
        "mmq-instance-mxfp4": "kernels", "mmq-instance-q8_0": "kernels", "fattn-vec-a-b": "",
    }  # fmt: skip
    assert (tmp_path / "left-out.cu").read_text() == (
        '#include "roll.cuh"\nvoid roll(int a,\n          int * b) { GGML_ABORT("left out"); }\n'
        "bool can_roll(const int & a) { return false; }\n"
    )
    text = (tmp_path / "mmq.cu").read_text()
    assert text.startswith("        case GGML_TYPE_Q4_0:\n            return 4;\n")
    assert [kind for kind in ("Q4_0", "Q8_0", "Q5_0", "MXFP4", "NVFP4") if f"<GGML_TYPE_{kind}>" in text] == [
        "Q8_0",
        "MXFP4",
    ]
    (tmp_path / "mmvq.cu").write_text("mul_mat_vec_q_switch_ncols_dst<GGML_TYPE_Q4_0>(x)")
    with pytest.raises(SystemExit, match=r"mmvq\.cu is not as this script knows it"):
        script.leave_out(tmp_path)


@pytest.mark.usefixtures("clock")
def test_a_dense_layer_that_fails_is_marked() -> None:
    rows = _rows(2)
    failing = functools.partial(bench_dense_mx.measure_llama_cpp, None)
    assert bench_dense_mx.add_peer(failing, rows, [dense_inputs(5)], 3)
    for row in rows:
        assert list(row["peers"]) == ["llama.cpp MXFP4", "llama.cpp Q8_0"]
        assert all(entry.note.startswith("AttributeError") for entry in row["peers"].values())
    head, _, *lines = bench_dense_mx.table(rows).splitlines()
    assert head.endswith("| llama.cpp MXFP4 | llama.cpp Q8_0 |")
    assert all(line.endswith("| failed | failed |") for line in lines)


@pytest.mark.usefixtures("clock")
def test_two_peers_stand_side_by_side() -> None:
    def of(name: str) -> Callable[[Any, int], list[dict[str, Entry]]]:
        return lambda inputs, repeats: [{name: Entry(Sample(float(repeats), 1, 9), 0.5)} for _ in inputs.batches]

    rows = _rows(2)
    for repeats, name in enumerate(("first", "second")):
        bench_dense_mx.add_peer(of(name), rows, [dense_inputs(1)], repeats)
    assert [line.split("|")[-3:-1] for line in bench_dense_mx.table(rows).splitlines()[2:]] == [[" 0.0 ", " 1.0 "]] * 2


@needs_library
@pytest.mark.usefixtures("clock")
def test_dense_layers(library: Library) -> None:
    rows = _rows(2)
    measured = functools.partial(bench_dense_mx.measure_llama_cpp, library)
    assert bench_dense_mx.add_peer(measured, rows, [dense_inputs(6)], 3)
    for row in rows:
        for entry in row["peers"].values():
            assert entry.sample == Sample(20.0, 19.0, 22.0), entry.note
            assert entry.used is not None
            assert 0.1 < entry.used < 1


@needs_library
@pytest.mark.parametrize("kind", [peer_llama_cpp.MXFP4, peer_llama_cpp.Q8_0])
@pytest.mark.parametrize("value", [1.0, -96.0])
def test_tokens_that_rounding_keeps(library: Library, kind: int, value: float) -> None:
    """One value of a token is not 0, a block's largest is kept, and a row of the weight comes out, in float32."""
    given = generator(7)
    packed = torch.randint(0, 256, (64, 48), dtype=torch.uint8, generator=given)
    scales = torch.randint(120, 130, (64, 3), dtype=torch.uint8, generator=given)
    blocks, weight = mxfp4_blocks(packed, scales), dequantize_mxfp4(packed, scales)
    if kind == peer_llama_cpp.Q8_0:
        blocks = q8_0_blocks(weight)
        weight = q8_0_values(blocks)
    x = torch.zeros(96, 96)
    x.fill_diagonal_(127 * value)  # with a step that float16 has
    graph = Gemm(library, kind, blocks, torch.zeros(64)).bind(x)
    for _ in range(2):
        torch.testing.assert_close(graph().double(), 127 * value * weight.T, rtol=2.0**-22, atol=0)


@needs_library
@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
def test_moe_layers(tokens: int, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moe_layers.MODELS, "tiny", (160, 96, 8, 3))
    print("seed", tokens)
    batch = moe_layers.route(moe_layers.make_layer("tiny", tokens, tokens, "cpu"), tokens, tokens)
    before = [t.clone() for t in (batch.inputs.fc1_weights, batch.inputs.fc2_weights, batch.inputs.input)]
    layer = LlamaCpp(library).prepare(batch.inputs)
    call = layer.bind(batch)
    reference, _ = moe_reference(batch.inputs)
    assert TOKEN_ERROR / 10 < peers.relative_error(call(), reference) < layer.tolerance
    after = (batch.inputs.fc1_weights, batch.inputs.fc2_weights, batch.inputs.input)
    assert all(map(torch.equal, before, after))


@needs_library
def test_one_expert_per_token(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is summed; the result is the weighted product itself."""
    monkeypatch.setitem(moe_layers.MODELS, "tiny", (64, 32, 4, 1))
    print("seed 3")
    batch = moe_layers.route(moe_layers.make_layer("tiny", 5, 3, "cpu"), 5, 3)
    call = LlamaCpp(library).prepare(batch.inputs).bind(batch)
    reference, _ = moe_reference(batch.inputs)
    assert peers.relative_error(call(), reference) < 3.1 * TOKEN_ERROR
