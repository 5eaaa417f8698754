# SPDX-License-Identifier: Apache-2.0
"""The hindcast: published figures and the model are apart, and what the model takes of routing, engines and cards."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import bench_token
import pytest
from perfmodel import gb10
from perfmodel import step as model
from perfmodel.devices import DEVICES, GB10
from perfmodel.drafts import EAGLE3, SHORT_HEAD, draft_bytes, draft_us
from perfmodel.moe import mean_work
from perfmodel.peers import PEERS
from perfmodel.routing import PROFILE, Routing, distinct, routed
from perfmodel.step import Given, Step, formats_of, kept_kernel, on_device, predict
from printed import cells
from token_bench import hindcast
from token_bench.predict import pays_from, tokens_per_second, yields

from flashinfer.sm12x.models import MODELS, NVFP4_LAYERS, MoELayer, matrix_bytes

REPO = Path(bench_token.__file__).parents[1]
PREDICTING = [
    REPO / "flashinfer" / "sm12x" / "models.py",
    *sorted((REPO / "benchmarks" / "perfmodel").glob("*.py")),
    *(REPO / "benchmarks" / "token_bench" / name for name in ("predict.py", "hindcast.py")),
]
LAYER = MODELS["gpt-oss-120b"].moe


def constants(paths: list[Path]) -> set[float]:
    """Numbers that stand in code."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {
        float(node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    }


def test_no_published_figure_stands_in_the_predicting_code() -> None:
    """Nor, among numbers that are not whole, its time in ms; inputs do."""
    # A prompt's rate and a card's by chance.
    known = constants(PREDICTING) - {float(NVFP4_LAYERS["nemotron-3-nano"].inter), gb10.FAST.dram_gb_per_second}
    for row in hindcast.rows():
        assert not [each for each in known if math.isclose(each, row.value, rel_tol=2e-3)], row.name
        times = [each for each in known if not each.is_integer() and math.isclose(each, 1e3 / row.value, rel_tol=2e-3)]
        assert not times, row.name
    inputs = {each.name: each.value for each in hindcast.figures() if each.role == "input"}
    assert not set(inputs) & {row.name for row in hindcast.rows()}
    listed = {
        "one node of a graph",
        "all-reduce of 8 KB, RDMA",
        "all-reduce of 48 KB, NCCL",
        "DRAM, marginal, trellis experts",
        "bf16 MMA, cuBLAS",
        "cuBLAS, bf16 layer matrices",
        "an expert more of a CUTLASS layer",
        "block-scaled MMA",
    }
    assert listed <= set(inputs)
    for name in listed:
        assert inputs[name] in known
    assert known >= {round(inputs["FP8 GEMM"] / 237.7, 2), round(inputs["CUTLASS grouped GEMM"] / 237.7, 2)}


def test_a_prediction_does_not_read_what_was_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = hindcast.rows()
    before = [hindcast.slow_middle_fast(row) for row in rows]
    monkeypatch.setattr(hindcast, "PUBLISHED", tmp_path / "absent.csv")
    mean_work.cache_clear()
    after = [hindcast.slow_middle_fast(dataclasses.replace(row, value=math.nan)) for row in rows]
    assert after == before


def test_rows_tell_what_is_needed_and_were_frozen() -> None:
    rows = hindcast.rows()
    names = {row.name for row in rows}
    counted, autumn = (hindcast.earlier(path) for path in (hindcast.COUNTED, hindcast.AUTUMN))
    assert hindcast.earlier(hindcast.FROZEN).keys() < hindcast.earlier(hindcast.BY_BYTES).keys() == counted.keys()
    assert counted.keys() | autumn.keys() == names and not counted.keys() & autumn.keys()
    assert {row.name for row in rows if row.role == "autumn"} <= autumn.keys()
    for row in rows:
        assert row.source.startswith("https://") and row.date and row.configuration and row.value > 0
        assert row.gpu in DEVICES and row.model in MODELS and row.unit in ("tokens/s", "us")
        assert (row.unit == "us") == (row.engine in hindcast.ALONE)
    assert {row.role for row in rows} == {"row", "held", "later", "counted", "autumn", "routing", "taken"}
    assert len({row.name for row in rows}) == len(rows)


def test_the_command_counts_rows_inside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And the page has what it prints: the aims' lines, rows, the layer's line and this fork's figures."""
    assert bench_token.main(["--hindcast", "--out", str(tmp_path), "--spread", "0"]) == 0
    out = capsys.readouterr().out
    them = hindcast.compared()
    counted = [each for each in them if each.row.role not in ("routing", "taken")]
    fitting = sum(
        each.slow <= each.row.value <= each.fast or each.fast <= each.row.value <= each.slow for each in counted
    )
    far = sum(not 0.85 <= each.middle / each.row.value <= 1.15 for each in counted)
    assert re.fullmatch(
        rf"all rows, today: {fitting} of {len(counted)} inside .*, middles off by more than 15%: {far} .*",
        out.splitlines()[-1],
    )
    page = (REPO / "docs" / "hindcast.md").read_text(encoding="utf-8")
    assert hindcast.summary(them) in page and hindcast.summary(them) in out
    layer = [line for line in cells(hindcast.layer_line()) if line[0] != "layer of CUTLASS experts"]
    assert all(line in cells(page) for line in layer) and len(layer) == 4
    wanted = {each.row.name: each.span for each in them}
    wanted |= {name: tokens_per_second(step) for name, step in hindcast.own_steps().items()}
    listed = dict(re.findall(r"^\| ([^|]+?) \| ([\d.,]+ - [\d.,]+ \([^|]+?\)) \|", page, re.MULTILINE))
    assert listed.keys() <= wanted.keys() and hindcast.own_steps().keys() <= listed.keys()
    assert {each.row.name for each in counted if not each.inside} <= listed.keys(), "all that miss are told"
    assert listed == {name: wanted[name] for name in listed}, "the page has what is predicted today"


def test_the_profile_is_that_of_the_rows_that_give_it() -> None:
    """Distinct experts by kubis.ai's times a step lie between the profile's ends, within 5 %."""
    given = {row.sequences: row.value for row in hindcast.figures() if row.role == "routing"}
    assert sorted(given) == [4, 8, 16, 32]
    for streams, rate in given.items():
        few, many = (
            sum(len(routed(LAYER, streams, 1, seed, routing).unique()) for seed in range(64)) / 64
            for routing in PROFILE
        )
        assert 0.95 * few < distinct(streams, rate, alone=57.5) < 1.05 * many, streams
    # By hand: 16 streams take 73.2 ms, one 17.4, KV 1.4.
    assert distinct(16, 218.5, 57.5) == pytest.approx(4 + (73_227 - 17_391 - 1440) / (36 * 62), rel=1e-3)


def test_a_token_keeps_a_share_of_the_experts_before_it() -> None:
    layer = MODELS["gpt-oss-120b"].moe
    for shared in (0.0, 0.4, 0.8):
        ids = routed(layer, 400, 4, 0, Routing(shared=shared)).view(400, 4, layer.top_k)
        assert all(len(set(token.tolist())) == layer.top_k for window in ids[:50] for token in window)
        common = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(-1).double().mean().item()
        chance = (1 - shared) * layer.top_k / layer.experts
        assert common == pytest.approx(shared + chance, abs=0.03)
    # The first token of a sequence shares nothing with another sequence's last.
    ids = routed(layer, 2000, 2, 0, Routing(shared=1.0)).view(2000, 2, layer.top_k)
    across = (ids[1:, 0, :, None] == ids[:-1, 1, None, :]).any(-1).double().mean().item()
    assert across == pytest.approx(layer.top_k / layer.experts, abs=0.01)


def test_skew_touches_fewer_experts_and_one_stream_as_many() -> None:
    size, given = MODELS["gpt-oss-120b"], Given(GB10)
    touched = [model.touched(size, Step(32, 1024), Routing(spread=spread)) for spread in (0.0, 1.0, 2.0)]
    assert touched[0] > touched[1] > touched[2] > 4
    assert model.touched(size, Step(1, 1024), PROFILE[0]) == 4
    plain, skewed = (
        predict("gpt-oss-120b", Step(32, 1024, formats=formats_of("mxfp4")), given=each)
        for each in (given, Given(GB10, routing=PROFILE))
    )
    assert skewed.fast < skewed.slow < plain.fast
    assert {row.part: row for row in skewed.rows}["O"] == {row.part: row for row in plain.rows}["O"]


def test_a_card_moves_each_resource_by_its_own_rate() -> None:
    line = kept_kernel("MoE", "gpt-oss-20b", 1, 1, "mxfp4", "mxfp8")
    double = dataclasses.replace(GB10, dram=(500.0, 436.0))
    for got, before, rate in zip(on_device(line, False, double), (line.fast, line.slow), GB10.dram, strict=True):
        assert before - got == pytest.approx(line.dram * 233 / rate / 2)
    # A prompt's MMAs: with more SMs the experts take less, until DRAM binds.
    prompt = kept_kernel("MoE", "gpt-oss-20b", 1, 8192, "mxfp4", "mxfp8")
    assert prompt.mma > prompt.dram / 4
    more = dataclasses.replace(GB10, multiprocessors=4800, dram=(23_600.0, 22_000.0))
    assert on_device(prompt, True, more)[0] < prompt.fast / 2


def test_others_hand_large_tensors_through_dram() -> None:
    """Once: the GEMM at the other side of a tensor has its own counts. Sizes are those that vLLM pads to."""
    layer, rows, mxfp8 = MODELS["gpt-oss-120b"].moe, 8192 * 4, 33 / 32
    cutlass, marlin = PEERS["CUTLASS"], PEERS["Marlin"]
    assert cutlass.handed(layer, 64, GB10.l2_bytes) == marlin.handed(layer, 64, GB10.l2_bytes) == 0
    by_hand = rows * (mxfp8 * 2944 + 2 * 2 * 2944 + mxfp8 * 2944 + 2 * 2944)
    assert cutlass.handed(layer, 8192, GB10.l2_bytes) == pytest.approx(by_hand)
    assert marlin.handed(layer, 8192, GB10.l2_bytes) == pytest.approx(rows * 2 * (2 * 2944 + 2944 + 3072))
    assert cutlass.handed(layer, 8192, 1e9) == 0


TWO_SPARKS = MODELS["gpt-oss-120b"].split(2).moe


@pytest.mark.parametrize(("name", "layer"), [("CUTLASS", LAYER), ("CUTLASS", TWO_SPARKS), ("Marlin", LAYER)])
def test_counts_of_others_are_those_of_their_sizes(name: str, layer: MoELayer) -> None:
    """At one token: padded weights and scales from DRAM once, little else; MMAs of a whole tile for each of four
    experts."""
    peer = PEERS[name]
    hidden, inter = peer.padded(layer)
    assert (hidden, inter) == (3072 if name == "Marlin" else 2944, 2944 if layer == LAYER else 1536)
    for launch, (n, k) in zip(peer.launches(layer, 1), ((2 * inter, hidden), (hidden, inter)), strict=True):
        once = 4 * n * k * 17 / 32
        assert once < launch.counts.bytes < 1.03 * once
        rows = 8 if name == "Marlin" else 64
        assert launch.counts.mma_flops == pytest.approx(4 * 2 * n * k * rows, rel=1e-3)
        assert 0.3 < launch.counts.instructions / (4 * n * k / 32) < 10  # of a warp, for each 32 elements


def test_others_tiles_follow_the_batch() -> None:
    tiles = {
        tokens: (PEERS["CUTLASS"].tile(LAYER, tokens), PEERS["Marlin"].tile(LAYER, tokens)) for tokens in (1, 64, 2048)
    }
    assert tiles == {1: (64, 8), 64: (128, 8), 2048: (128, 64)}
    assert PEERS["Marlin"].tile(LAYER, 231) == 16  # 7.2 routes an expert are more than nine tenths of 8
    with pytest.raises(ValueError, match="Marlin's experts of 3072 x 2944 with tiles of 16 tokens were not emulated"):
        PEERS["Marlin"].launches(LAYER, 231)


def test_marlin_reads_an_experts_weights_for_each_tile_once_tiles_take_turns() -> None:
    """Or once, where tiles keep pace, as upstream's do."""
    rows, once = 2048 * 4, 128 * 5888 * 3072 * 17 / 32
    work = mean_work(LAYER, 2048, 64)
    assert work.tiles > 150 > work.experts
    for keep_pace, reads in ((False, work.tiles / 128), (True, 1.0)):
        fc1 = PEERS["Marlin"].launches(LAYER, 2048, keep_pace=keep_pace)[0]
        assert fc1.counts.bytes == pytest.approx(once * reads + rows * 2 * (3072 + 5888), rel=0.03)
    assert PEERS["Marlin"].launches(LAYER, 1, keep_pace=False) == PEERS["Marlin"].launches(LAYER, 1)
    cutlass = PEERS["CUTLASS"].launches(LAYER, 2048)[0]
    assert cutlass.counts.bytes == pytest.approx(128 * 5888 * 2944 * 17 / 32 + rows * (2944 + 2 * 5888), rel=0.03)


def test_experts_of_vllms_rows_are_counted() -> None:
    for row in hindcast.rows():
        experts = next(part for part in hindcast.predicted(row).rows if part.part == "MoE")
        kernel = "CUTLASS" if row.engine in hindcast.ALONE else row.engine.partition(" ")[2]
        assert experts.by == (f"{kernel}, virtual SM121" if kernel else "bytes + launch"), row.name
    servers = {row.engine.partition(" ")[0] for row in hindcast.rows() if row.engine not in hindcast.ALONE}
    assert servers == {*hindcast.SERVERS, "llama.cpp"}


def test_a_layer_of_given_experts_by_hand() -> None:
    """Each expert's weights once, whatever the routing; a window's tokens share them by the share that it is given."""
    row = next(each for each in hindcast.rows() if each.name == "gptoss-spark layer, 8 experts")
    slow, _, fast = hindcast.slow_middle_fast(row)
    least = 8 * 3 * 2944 * 2944 * 17 / 32
    for end, rate, launch in ((fast, GB10.dram[0], 1.3), (slow, GB10.dram[1], 3.0)):
        assert end == pytest.approx(least / 1e3 / rate + 55.85 + 2 * launch, rel=0.005)
    nine = hindcast.slow_middle_fast(dataclasses.replace(row, experts=9, sequences=3))
    assert nine[2] - fast == pytest.approx(least / 8 / 1e3 / GB10.dram[0], rel=0.01)
    size, given = MODELS["gpt-oss-120b"], Given(GB10, routing=(Routing(shared=1.0), Routing(shared=1.0)))
    window, plain = (
        model.counted_experts(size, Step(1, 1024, new, verified=new > 1, fork=False, experts="CUTLASS"), given)
        for new in (4, 1)
    )
    assert window == pytest.approx(plain, rel=0.01)


def test_counted_experts_by_hand() -> None:
    """Of one token DRAM binds both GEMMs: their bytes, two GEMMs' and six to eight small launches' fixed times."""
    given = Given(hindcast.loaded("GB10"))
    step = Step(1, 1024, fork=False, experts="Marlin")
    counted = sum(launch.counts.bytes for launch in PEERS["Marlin"].launches(LAYER, 1))
    fast, slow = model.counted_experts(MODELS["gpt-oss-120b"], step, given)
    assert fast == pytest.approx(
        counted / 1e3 / GB10.dram[0] + 2 * gb10.FIXED_US["gemm"][0] + 6 * gb10.FIXED_US["small"][0]
    )
    assert slow == pytest.approx(
        counted / 1e3 / GB10.dram[1] + 2 * gb10.FIXED_US["gemm"][1] + 8 * gb10.FIXED_US["small"][1]
    )


def test_an_all_reduce_grows_with_the_batch() -> None:
    assert model.all_reduce_us(5.8) == model.all_reduce_us(8) == (15.5, 35.2)
    assert model.all_reduce_us(48) == (23, 59)
    assert model.all_reduce_us(28) == pytest.approx((19.25, 47.1))
    assert model.all_reduce_us(28, nccl=True) == pytest.approx((47.1, 47.1))


def test_a_step_of_others_has_none_of_this_forks_kernels() -> None:
    step = predict("gpt-oss-120b", Step(1, 1024, formats=formats_of("mxfp4"), fork=False))
    assert {row.by for row in step.rows} == {"bytes + launch"}
    experts = next(row for row in step.rows if row.part == "MoE")
    assert experts.fast == pytest.approx(
        experts.bytes / 1e3 / GB10.dram[0] + 36 * (2 * gb10.FIXED_US["gemm"][0] + 6 * gb10.FIXED_US["small"][0])
    )
    assert matrix_bytes(64, 64, "q8_0") == 64 * 64 + 2 * 64 * 2  # llama.cpp's blocks
    engine = predict("gpt-oss-120b", Step(1, 1024, fork=False), given=Given(GB10, engine_us=(0.0, 1600.0)))
    assert engine.slow - predict("gpt-oss-120b", Step(1, 1024, fork=False)).slow == pytest.approx(1600)


def test_a_draft_pays_by_what_it_yields() -> None:
    assert yields(3, 0.5) == 1 + 0.5 + 0.25 + 0.125
    assert pays_from(3, yields(3, 0.5)) == pytest.approx(0.5)
    assert pays_from(1, 2.5) == math.inf
    assert pays_from(0, 1.0) <= 1


def test_a_draft_reads_its_matrices_and_head_by_hand() -> None:
    """Sizes in gptoss-spark's bench/draft_microbench.py: 307.6 MB of MXFP4 head, 1.16 GB in bf16."""
    four, sixteen = (draft_bytes(EAGLE3, weights) for weights in ("mxfp4", "bf16"))
    assert sixteen["LM head"] == 201_088 * 2880 * 2
    for rows, size in ((201_088, four), (32_768, draft_bytes(EAGLE3, "mxfp4", SHORT_HEAD))):
        assert size["LM head"] == pytest.approx(rows * 2880 * 17 / 32, rel=2e-3)  # scales are padded
    rest = 2880 * (8640 + 4096 + 3 * 16_384) + 5120 * 5760
    assert sum(sixteen.values()) - sixteen["LM head"] == 2 * rest
    fast, slow = draft_us(EAGLE3, "bf16")
    assert fast == pytest.approx(sum(sixteen.values()) / 250e3 + 6 * 2.1 + 10 * 1.7 + 8.0)
    assert slow == pytest.approx(sixteen["LM head"] / 218e3 + 2 * rest / 190e3 + 6 * 8.6 + 10 * 2.9 + 16.0)


def test_the_pages_draft_table_is_todays(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--predict", "--draft", "eagle3", "--drafted", "0,1,2", "--accepted", "0.5,0.61"]
    assert bench_token.main(arguments) == 0
    printed = [line for line in cells(capsys.readouterr().out) if line[0] in ("preset", "bf16", "spark", "spark-mxfp4")]
    page = cells((REPO / "docs" / "hindcast.md").read_text(encoding="utf-8"))
    assert len(printed) == 22 and all(line in page for line in printed)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--drafted", "-1"], "0 or more tokens"),
        (["--accepted", "1.2"], "probabilities of 0 to 1"),
        (["--draft", "mtp"], "invalid choice: 'mtp'"),
        (["--draft", "eagle3", "--models", "gpt-oss-20b"], "eagle3 is a draft of gpt-oss-120b, not of gpt-oss-20b"),
    ],
)
def test_a_draft_of_no_use_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_token.main(["--predict", *arguments])
    assert why in capsys.readouterr().err


def test_cards_that_cannot_hold_a_model_are_left_out() -> None:
    table = hindcast.cards()
    assert "GB10" not in table
    lines = [line for line in table.splitlines() if "gpt-oss-120b" in line]
    assert len(lines) == 1 and "RTX PRO 6000" in lines[0]
    assert sum("gpt-oss-20b" in line for line in table.splitlines()) == len(DEVICES) - 1
