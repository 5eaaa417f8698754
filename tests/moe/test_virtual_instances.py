# SPDX-License-Identifier: Apache-2.0
"""Every instance of the kernel family, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on.

Outputs are held to the float64 reference's derived bound for tensor cores. Shapes are small, but hidden and
intermediate sizes are no multiples of a tile, and the tests of the instances assert from their launches' grids that
rings wrapped, that blocks took parts of more than one unit of work, and that units were cut between blocks.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import virtual_moe
from virtual_devices import ALL_CHECKERS, RACES, assert_clean
from virtual_group_gemm import launch_group_gemm
from virtual_moe import blocks_of_gemms, run_moe, sm_count

from flashinfer.fused_moe.sm12x_planner import choose
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x.device_class import GB10
from flashinfer.sm12x.instances import (
    BLOCK_M,
    FUSED_MOE_ROUTED_ROWS,
    GEMM_INSTANCES,
    IN_KERNEL_ROUTED_ROWS,
    INSTANCES,
    MAIN_MODULE,
    MAX_EXPERTS,
    NVFP4,
    SM12X,
    Instance,
    index_of,
)
from flashinfer.sm12x.models import MOE_LAYERS
from flashinfer.testing import (
    TENSOR_CORE,
    MoECase,
    MoEInputs,
    check_within_bound,
    group_gemm_reference,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.moe_inputs import group_gemm_inputs_with_not_numbers, moe_inputs_with_not_numbers
from flashinfer.testing.moe_layers import case_of
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

# The race checker keeps a clock for each thread and takes three times as long, so only tests marked ``races`` use it,
# some for each kind of kernel. With this variable all tests do, which is too slow for every change.
RACES_VARIABLE = "FLASHINFER_TEST_RACES"
PAIRS = [instance for instance in INSTANCES if not instance.split_k]
STREAMED = [instance for instance in INSTANCES if instance.split_k]
LONG = [instance for instance in STREAMED if instance.block_k > 256]
EIGHT_BIT = [instance for instance in PAIRS if instance.compute == "mxfp8"]
SIXTEEN_BIT = [instance for instance in PAIRS if instance.compute == "bf16"]
AS_BF16 = [instance for instance in PAIRS if instance.compute == "mxfp8_as_bf16"]  # Hopper's: modules of their own
WIDEST_BF16 = max(SIXTEEN_BIT, key=lambda row: row.block_n)
# One of each kind whose weights are scaled while they are expanded.
FOLDING = [*(row for row in STREAMED if row in MAIN_MODULE), SIXTEEN_BIT[0], WIDEST_BF16, AS_BF16[0]]
# Neither is a multiple of a tile along N or K; K / 32 is 39 and 13, no multiple of the four that share a scale word.
HIDDEN, INTER = 1248, 416
# Tokens by N tile: with two of four experts a token, an expert's rows are several tiles, the last one partly
# filled.
TOKENS = {8: 56, 16: 100, 24: 114, 32: 130, 40: 134, 64: 160, 128: 300}
SMS_OF_TOKENS = 48  # blocks have such shares with so many SMs
EACH_EIGHT_BIT = pytest.mark.parametrize("instance", [*EIGHT_BIT, *AS_BF16], ids=lambda row: row.name)
EACH_SIXTEEN_BIT = pytest.mark.parametrize(
    "instance",
    [pytest.param(row, marks=pytest.mark.races) for row in SIXTEEN_BIT],
    ids=[row.name for row in SIXTEEN_BIT],
)
EACH_MODE = pytest.mark.parametrize(
    ("mode", "instance"),
    [pytest.param(mode, (SIXTEEN_BIT if mode == 2 else EIGHT_BIT)[0], marks=pytest.mark.races) for mode in (0, 1, 2)],
    ids=["MXFP8 input", "bf16 input", "W4A16"],
)
PACKING = pytest.mark.parametrize("instance", [WIDEST_BF16, AS_BF16[0]], ids=lambda row: row.name)
WITHOUT_ROWS = pytest.mark.parametrize(
    ("mode", "instance"),
    [(0, None), (0, EIGHT_BIT[0]), (0, AS_BF16[0]), (2, None), (2, SIXTEEN_BIT[0])],
    ids=lambda value: getattr(value, "name", str(value)),
)
WHOLE_UNITS = pytest.mark.parametrize(
    "instance", [EIGHT_BIT[0], EIGHT_BIT[-1], WIDEST_BF16, AS_BF16[0]], ids=lambda row: row.name
)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[VirtualDevice]:
    races = request.node.get_closest_marker("races") is not None or os.environ.get(RACES_VARIABLE) == "1"
    with virtual_device("sm_121a", watch=ALL_CHECKERS if races else ALL_CHECKERS - RACES) as made:
        yield made
        assert_clean(made)


def names(instances: list[Instance] | tuple[Instance, ...]) -> list[str]:
    return [instance.name for instance in instances]


def check_moe(device: VirtualDevice, case: MoECase, seed: int, profile_ids: list[int] | None = None) -> MoEInputs:
    """Assert that the layer keeps its bound and that no checker reports; its experts have the format of the tactics."""
    print("seed", seed)
    if profile_ids:
        case = dataclasses.replace(case, weights=INSTANCES[profile_ids[0]].weights)
    inputs = make_moe_inputs(case, seed)
    output = run_moe(device, inputs, case.mode, profile_ids)
    used = check_within_bound(
        output, *moe_reference(inputs, TENSOR_CORE), f"{case}, seed {seed}, profile_ids {profile_ids}"
    )
    print(f"{used:.1%} of the bound")
    assert all(launch.clean for launch in device.launches), device.launches
    return inputs


def gemm_launches(device: VirtualDevice) -> list[Any]:
    return [launch for launch in device.launches if "grouped_gemm_kernel" in launch.kernel]


def layer_launch(device: VirtualDevice) -> Any:
    """The one launch of a fused MoE kernel."""
    (launch,) = [launch for launch in device.launches if "fused_moe_kernel" in launch.kernel]
    return launch


def assert_instance(launch: Any, instance: Instance) -> None:
    """The kernel's template arguments are the instance's: N tile, K tile, stages, blocks per SM; of a streamed one
    N tile, K blocks, warps."""
    sizes = (instance.block_n, instance.block_k, instance.stages, instance.blocks_per_sm)
    if instance.split_k:
        sizes = (instance.block_n, instance.block_k // 128, instance.mma_warps)
    assert "".join(f"Li{size}E" for size in sizes) in launch.kernel, launch.kernel


def assert_shares(blocks: int, instance: Instance, rows_of_experts: list[int], row_tiles: int, k: int) -> None:
    """The blocks of a launch reuse stages, hold parts of more than one unit, and cut units between them.

    Blocks take whole units in turn as long as two are left for each; the rest is shared by K tiles, a unit having
    ``k_tiles``.
    """
    k_tiles = -(-k // instance.block_k)
    units = sum(-(-rows // instance.block_n) for rows in rows_of_experts) * row_tiles
    turns = max(units // blocks - 1, 0)
    tiles = (units - turns * blocks) * k_tiles
    length, longer = divmod(tiles, blocks)
    starts = [block * length + min(block, longer) for block in range(blocks + 1)]
    whole = turns * k_tiles
    assert whole + length > instance.stages, f"{tiles} K tiles in {blocks} blocks do not fill {instance.name}'s ring"
    assert any(start % k_tiles for start in starts)
    assert any((end - 1) // k_tiles > start // k_tiles for start, end in zip(starts, starts[1:], strict=False))


def assert_moe_shares(device: VirtualDevice, case: MoECase, inputs: MoEInputs, instance: Instance) -> None:
    fc1, fc2 = blocks_of_gemms(device, instance)
    rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=case.num_experts).tolist()
    assert max(rows) > instance.block_n
    assert_shares(fc1, instance, rows, -(-case.inter // (BLOCK_M // 2)), case.hidden)
    assert_shares(fc2, instance, rows, -(-case.hidden // BLOCK_M), case.inter)


def layer(instance: Instance, mode: int, sms: int, **changes: Any) -> MoECase:
    """A layer that exercises ``instance`` on a GPU with ``sms`` SMs."""
    tokens = -(-TOKENS[instance.block_n] * sms // SMS_OF_TOKENS)
    case = MoECase(tokens, HIDDEN, INTER, num_experts=4, top_k=2, mode=mode)
    return dataclasses.replace(case, **changes)


@EACH_EIGHT_BIT
@pytest.mark.parametrize(
    ("mode", "swizzled"), [(0, True), (0, False), (1, True)], ids=["MXFP8 swizzled", "MXFP8 linear", "bf16 quantized"]
)
def test_an_instance_with_8_bit_activations(device, instance, mode, swizzled):
    """One form of input has a long K. The others differ in how rows and scales are fetched, and their last word of
    scales has two blocks instead of three or one."""
    case = layer(instance, mode, sm_count(device), swizzled_input_sf=swizzled)
    if mode != 0 or not swizzled:
        case = dataclasses.replace(case, num_tokens=2 * instance.block_n + 3, hidden=320, inter=192)
    inputs = check_moe(device, case, 100 + instance.index, [instance.index] * 2)
    if case.hidden == HIDDEN:
        assert_moe_shares(device, case, inputs, instance)


@EACH_SIXTEEN_BIT
def test_an_instance_with_16_bit_activations(device, instance):
    case = layer(instance, 2, sm_count(device))
    inputs = check_moe(device, case, 200 + instance.index, [instance.index] * 2)
    assert_moe_shares(device, case, inputs, instance)


@WHOLE_UNITS
def test_blocks_take_whole_units_in_turn(device, instance):
    """More than two units for each block: what is not shared along K. FC1 of the first layer, FC2 of the second."""
    tiles = (2 if instance.blocks_per_sm == 1 else 7) * sm_count(device) / SMS_OF_TOKENS
    tokens = math.ceil(tiles * instance.block_n) + 3
    mode = 2 if instance.activation == "bf16" else 0
    for gemm, hidden, inter in ((0, 672, 2400), (1, 4128, 96)):
        inputs = check_moe(
            device, MoECase(tokens, hidden, inter, 4, 2, mode, biases=False), 310 + instance.index, [instance.index] * 2
        )
        rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=4).tolist()
        tiles = sum(-(-count // instance.block_n) for count in rows)
        units = tiles * (-(-inter // (BLOCK_M // 2)), -(-hidden // BLOCK_M))[gemm]
        blocks = blocks_of_gemms(device, instance)[gemm]
        print(f"{units} units, {blocks} blocks")
        assert units >= 3 * blocks  # two turns and a rest


@pytest.mark.races
@pytest.mark.parametrize(
    "pair",
    [("mxfp8_m8_k128", "mxfp8_m32_k256"), ("mxfp8_m128_k128", "mxfp8_m8_k256"), ("mxfp8_m64_k128", "mxfp8_m16_k256")],
    ids=" then ".join,
)
def test_both_gemms_choose_for_themselves(device, pair):
    case = MoECase(20, 352, INTER, num_experts=3, top_k=2, mode=0)
    tactics = [index_of(name) for name in pair]
    check_moe(device, case, 300, tactics)
    for launch, number in zip(gemm_launches(device), tactics, strict=True):
        assert_instance(launch, INSTANCES[number])


def optional(given: bool) -> dict[str, Any]:
    return {"biases": given, "swiglu_parameters": given, "global_scales": given}


@pytest.mark.races
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["MXFP8 input", "16-bit input", "W4A16"])
@pytest.mark.parametrize(
    "changes",
    [optional(True), optional(False), {"bias_dtype": torch.float32, "output_dtype": torch.float16}],
    ids=["all", "none", "other dtypes"],
)
def test_optional_tensors_and_dtypes(device, mode, changes):
    case = MoECase(7, 352, INTER, 4, 2, mode, **changes)
    if mode == 1 and "output_dtype" in changes:
        case = dataclasses.replace(case, input_dtype=torch.float16)
    check_moe(device, case, 301)


def test_more_tokens_than_the_grid_packs_at_once(device):
    """Threads go on to other tokens, and to other places in their rows."""
    hidden = 416
    check_moe(device, MoECase(1600, hidden, 32, 4, 1, 2), 309, [WIDEST_BF16.index] * 2)
    (launch,) = [launch for launch in device.launches if "moe_pack_kernel" in launch.kernel]
    row_eighths, at_once = -(-hidden // 128) * 16, launch.grid[0] * launch.block[0]
    assert 1600 * row_eighths > at_once and at_once % row_eighths == 0
    # Rows of 80 eighths: a pass of the grid ends within one.
    check_moe(device, MoECase(1400, 608, 32, 4, 1, 2), 310, [WIDEST_BF16.index] * 2)
    launch = [launch for launch in device.launches if "moe_pack_kernel" in launch.kernel][-1]
    assert launch.grid[0] * launch.block[0] < 1400 * 80 and launch.grid[0] * launch.block[0] % 80 != 0


@pytest.mark.parametrize("rank", [0, 1])
@PACKING
def test_packed_rows_of_a_shard(device, rank, instance):
    """There are fewer rows than routed rows."""
    mode = 2 if instance.activation == "bf16" else 1
    case = MoECase(40, 352, INTER, 16, 2, mode, ep_size=2, ep_rank=rank, biases=False)
    check_moe(device, case, 308, [instance.index] * 2)


@WITHOUT_ROWS
def test_a_shard_without_any_row_is_zeros(device, mode, instance):
    case = MoECase(9, 352, INTER, 16, 2, mode, routing="few_experts", ep_size=2, ep_rank=0)
    inputs = make_moe_inputs(case, 307)
    assert int(inputs.token_selected_experts.min()) >= 8
    tactics = None if instance is None else [instance.index] * 2
    assert torch.equal(run_moe(device, inputs, mode, tactics), torch.zeros((9, 352), dtype=torch.bfloat16))


@pytest.mark.parametrize("mode", [0, 2], ids=["MXFP8 input", "W4A16"])
@pytest.mark.parametrize(
    "tokens", [37, IN_KERNEL_ROUTED_ROWS + 9], ids=["routed by the kernels", "routed by the prologue"]
)
def test_every_token_on_one_expert(device, mode, tokens):
    case = MoECase(tokens, 352, INTER, 8, 1, mode, routing="one_expert", swizzled_input_sf=False)
    inputs = check_moe(device, case, 303)
    assert len(set(inputs.token_selected_experts.flatten().tolist())) == 1


@EACH_MODE
def test_more_pairs_than_the_kernels_route(device, mode, instance):
    """To more experts than a warp has lanes: several warps add up how many rows each has."""
    check_moe(device, MoECase(IN_KERNEL_ROUTED_ROWS // 2 + 2, 160, 96, 40, 2, mode), 304, [instance.index] * 2)


@pytest.mark.parametrize("activation", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("instance", GEMM_INSTANCES, ids=names(GEMM_INSTANCES))
def test_a_grouped_gemm_instance(device, instance, activation):
    tile = instance.block_n
    rows, n, k = [3 * tile - 3, 0, 1, 4 * tile + 5, 2 * tile], HIDDEN, 800
    if activation == torch.float8_e5m2:
        rows, n, k = [tile + 3, 0, 1], 160, 320
    seed = 400 + instance.index
    print("seed", seed)
    call = make_group_gemm_inputs(rows, n, k, seed, dtype=activation)
    out = launch_group_gemm(device, call, instance.index)
    used = check_within_bound(
        out, *group_gemm_reference(**call, accumulation=TENSOR_CORE), f"{instance.name}, seed {seed}"
    )
    print(f"{used:.1%} of the bound")
    (launch,) = gemm_launches(device)
    assert_instance(launch, instance)
    if n == HIDDEN:
        assert_shares(launch.grid[0], instance, rows, -(-n // BLOCK_M), k)


@pytest.mark.parametrize("activation", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_what_is_no_number_stays_in_its_row_or_column(device, activation):
    """A grouped GEMM keeps NaN and infinity in their row or column."""
    inputs = make_group_gemm_inputs([9, 0, 5], 136, 160, 450, dtype=activation)
    for what, call in group_gemm_inputs_with_not_numbers(inputs, 451):
        out = launch_group_gemm(device, call, GEMM_INSTANCES[0].index)
        reference, bound = group_gemm_reference(**call, accumulation=TENSOR_CORE)
        check_within_bound(out, reference, bound, what)
        assert what == "numbers" or reference.isnan().any() or reference.isinf().any()
        assert not reference[:9].isnan().all() and not reference[9:].isnan().all()


@pytest.mark.parametrize("mode", [0, 2], ids=["MXFP8 input", "W4A16"])
def test_a_layer_of_gpt_oss_20b_by_a_pair_of_gemms(device, mode):
    case = MoECase(num_tokens=1, hidden=2880, inter=2880, num_experts=32, top_k=4, mode=mode)
    instance = choose("bf16" if mode == 2 else "mxfp8", 4, 32, GB10, (2880, 2880), all_sms=False).instance
    check_moe(device, case, 510 + mode, [instance.index] * 2)
    assert len(gemm_launches(device)) == 2


def stream_modes() -> list[Any]:
    """Streamed rows with each mode that fits them."""
    modes = {"mxfp8": {0: "MXFP8", 1: "bf16 quantized"}, "bf16": {2: "bf16"}}
    return [
        pytest.param(row, mode, id=f"{row.name} {name}")
        for row in STREAMED
        for mode, name in modes[row.activation].items()
    ]


# K of 1, 2 and 4 groups of warps; of whole K blocks, and with one, two and three scale blocks in the last, whose linear
# scales of tokens are no whole word; of few and of many units for each block.
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1248, 416), marks=pytest.mark.races),
        (2880, 96),
        (1504, 160),
        (288, 2912),
        (256, 1440),
        (320, 64),
        (64, 192),
    ],
    ids=str,
)
@pytest.mark.parametrize(("instance", "mode"), stream_modes())
def test_a_fused_moe_layer(device, instance, mode, sizes):
    hidden, inter = sizes
    swizzled = hidden not in (256, 320, 288)
    case = MoECase(37, hidden, inter, num_experts=4, top_k=2, mode=mode, swizzled_input_sf=swizzled)
    inputs = check_moe(device, case, 600 + instance.index, [instance.index] * 2)
    rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=4)
    assert int(rows.max()) > instance.block_n  # several tiles for an expert, the last of them partly filled
    assert int(rows.max()) % instance.block_n or int(rows.min()) % instance.block_n
    assert_instance(layer_launch(device), instance)


# K beyond 3,072: of whole K blocks, and with one to three scale blocks in the last, where a stage's tail holds partial
# sums; beside a short K that two and four groups of warps share.
@pytest.mark.parametrize("sizes", [(4096, 64), (3104, 192), (4576, 32), (64, 4608), (96, 3168)], ids=str)
@pytest.mark.parametrize(("instance", "mode"), [each for each in stream_modes() if each.values[0] in LONG])
def test_a_fused_moe_layer_with_a_long_k(device, instance, mode, sizes):
    hidden, inter = sizes
    case = MoECase(5, hidden, inter, num_experts=3, top_k=2, mode=mode, swizzled_input_sf=hidden % 128 == 0)
    check_moe(device, case, 610 + instance.index)
    assert (instance.block_n, instance.block_k, instance.mma_warps) == (8, 384, 12)
    assert_instance(layer_launch(device), instance)


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("gpt-oss-120b", 1),
        *((name, 0) for name in MOE_LAYERS if name not in ("gpt-oss-120b", "gpt-oss-20b")),
        *((name, 2) for name in ("gpt-oss-20b", "gpt-oss-120b-tp2", "deepseek-v4-flash-tp2", "ling-3.0-flash")),
    ],
)
def test_a_layer_of_each_model_in_full_dimensions(device, model, mode):
    """One token, with its model's activation and biases, and as many experts as it takes: what the planner chooses."""
    layer = MOE_LAYERS[model]
    check_moe(device, case_of(layer, 1, mode, num_experts=layer.top_k), 520 + mode)
    longest = max(layer.hidden, layer.inter)
    if longest > 4608:
        assert len(gemm_launches(device)) == 2
    elif longest == 4096:  # two stages of rows and scales; a bias has room in any case
        stage = 16 * 2048 + 16 * 32 * 16 + 16 * 4
        assert layer_launch(device).dynamic_shared == 6016 + 2 * -(-stage // 128) * 128
    else:
        launch = layer_launch(device)
        assert launch.grid[0] == device.sm_count
        (row,) = [row for row in STREAMED if row in MAIN_MODULE and row.activation == Mode(mode).activation]
        assert launch.dynamic_shared == row.shared_bytes or (layer.hidden, layer.inter) != (2880, 2880)


@pytest.mark.parametrize(("experts", "top_k"), [(256, 6), (512, 8)], ids=["256, 6 a token", "512, 8 a token"])
@pytest.mark.parametrize("tokens", [3, 41], ids=["routed in registers", "routed in shared memory"])
@pytest.mark.parametrize("instance", [row for row in STREAMED if row.block_n == 8], ids=lambda row: row.name)
def test_a_fused_moe_layer_of_many_experts(device, instance, tokens, experts, top_k):
    """SwigluStep for one number of experts, for the other Swiglu."""
    mode = 2 if instance.activation == "bf16" else 1
    case = MoECase(tokens, 96, 32, experts, top_k, mode, biases=False, swiglu_step=experts == 512)
    check_moe(device, case, 650 + tokens, [instance.index] * 2)


@pytest.mark.parametrize(
    "tokens",
    [1, 2, pytest.param(8, marks=pytest.mark.races), 9, pytest.param(130, marks=pytest.mark.races)],
    ids=lambda tokens: f"{tokens} tokens",
)
@pytest.mark.parametrize("instance", STREAMED, ids=lambda row: row.name)
def test_a_fused_moe_layer_routes_few_and_many(device, instance, tokens):
    """Up to 32 routed rows are sorted in registers, more in shared memory."""
    case = MoECase(tokens, 160, 96, 40, 4, 2 if instance.activation == "bf16" else 0)
    check_moe(device, case, 620 + tokens, [instance.index] * 2)


@pytest.mark.parametrize(
    "instance", [row for row in STREAMED if row in (*MAIN_MODULE, *NVFP4)], ids=lambda row: row.name
)
def test_a_fused_moe_layer_has_room_for_the_most_tiles(device, instance):
    """All experts are hit, and no other number of pairs makes more tiles: each expert's last tile holds one."""
    tile, experts = instance.block_n, MAX_EXPERTS
    full = (FUSED_MOE_ROUTED_ROWS - experts) // tile
    ids = torch.arange(experts).repeat_interleave(torch.tensor([1 + tile] * full + [1] * (experts - full)))
    seed = 650
    print("seed", seed)
    case = MoECase(len(ids), 64, 32, experts, 1, 2 if instance.activation == "bf16" else 0, weights=instance.weights)
    inputs = make_moe_inputs(case, seed)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    inputs = dataclasses.replace(inputs, token_selected_experts=ids[order, None].int())
    assert case.num_tokens == FUSED_MOE_ROUTED_ROWS
    output = run_moe(device, inputs, case.mode, [instance.index] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{case}, seed {seed}")


@pytest.mark.parametrize("tokens", [15, 45], ids=["routed in registers", "routed in shared memory"])
@pytest.mark.parametrize("instance", [row for row in STREAMED if row.block_n == 16], ids=lambda row: row.name)
def test_tiles_with_more_and_with_fewer_than_eight_tokens(device, instance, tokens):
    """Streamed tiles have room for 16 tokens; those with eight or fewer take one step of MMAs."""
    hidden, inter = 288, 160
    case = MoECase(tokens, hidden, inter, 4, 2, 2 if instance.activation == "bf16" else 1)
    inputs = check_moe(device, case, 640, [instance.index] * 2)
    rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=4).tolist()
    tiles = [min(16, count - first) for count in rows for first in range(0, count, 16)]
    assert min(tiles) <= 8 < max(tiles), rows
    # Eight MMAs a step for each K block that a warp takes: FC1's M16 fragments have 8 outputs, FC2's 16. Three K
    # blocks are two warps, two are one. The prewarm is a step of one fragment for each warp of a block that has one in
    # FC1.
    k_blocks = instance.block_k // 128
    steps = 8 * k_blocks * (inter // 8 * 2 + hidden // 16 * 1)
    launch = layer_launch(device)
    warm_up = launch.grid[0] * 8 * k_blocks * (4 * 2)
    assert launch.counters.by_class["mma"] == warm_up + steps * sum(2 if tile > 8 else 1 for tile in tiles)


@pytest.mark.races
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("instance", [row for row in STREAMED if row in SM12X], ids=lambda row: row.name)
def test_a_fused_moe_layer_on_a_shard_some_of_whose_experts_have_no_row(device, instance, rank):
    mode, optional = 2 if instance.activation == "bf16" else rank, rank == 0
    case = MoECase(9, 352, 416, 16, 2, mode, ep_size=2, ep_rank=rank, biases=optional, swiglu_parameters=optional)
    inputs = check_moe(device, case, 630 + rank, [instance.index] * 2)
    local = inputs.token_selected_experts - 8 * rank
    here = (local >= 0) & (local < 8)
    assert here.any() and not here.all()
    assert len(set(local[here].tolist())) < 8


@pytest.mark.parametrize("instance", FOLDING, ids=lambda row: row.name)
@pytest.mark.parametrize("exponent", [0, 126, 129, 200], ids=lambda e: f"scales from 2^{e - 127}")
def test_any_weight_scale(device, instance, exponent):
    """Scales above 2^1 do not fold into the expansion's factor; they take a path of their own. Blocks of both kinds
    mix."""
    mode = 2 if instance.activation == "bf16" else 0
    inputs = make_moe_inputs(MoECase(3, 160, 96, 4, 2, mode, biases=False, swiglu_parameters=False), 640 + exponent)
    print("seed", 640 + exponent)
    generator = torch.Generator().manual_seed(640 + exponent)
    for scales, fixed in ((inputs.fc1_scales, None), (inputs.fc2_scales, 254 - 2 * min(max(exponent, 64), 190))):
        low = exponent if fixed is None else min(max(fixed, 0), 250)
        scales.copy_(torch.randint(low, low + 4, scales.shape, generator=generator, dtype=torch.uint8))
    output = run_moe(device, inputs, mode, [instance.index] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"scales from {exponent}")


@pytest.mark.parametrize("instance", NVFP4, ids=lambda row: row.name)
@pytest.mark.parametrize("low", [0, 0x40, 0x77], ids=lambda low: f"scales from {low:#x}")
def test_any_scale_of_nvfp4(device, instance, low):
    """Subnormals and zero among them, and the largest, 448; sign bits, which nobody reads."""
    case = MoECase(3, 160, 96, 4, 2, 2, biases=False, swiglu_parameters=False, weights="nvfp4")
    inputs = make_moe_inputs(case, 645 + low)
    print("seed", 645 + low)
    generator = torch.Generator().manual_seed(645 + low)
    for scales in (inputs.fc1_scales, inputs.fc2_scales):
        numbers = torch.randint(low, low + 8, scales.shape, generator=generator, dtype=torch.uint8)
        scales.copy_(numbers | torch.randint(0, 2, scales.shape, generator=generator, dtype=torch.uint8) << 7)
    output = run_moe(device, inputs, 2, [instance.index] * 2)
    reference, bound = moe_reference(inputs, TENSOR_CORE)
    assert torch.isfinite(bound).all()
    check_within_bound(output, reference, bound, f"scales from {low}")


@pytest.mark.parametrize(
    ("instance", "mode", "swizzled"),
    [
        (EIGHT_BIT[0], 0, True),
        (EIGHT_BIT[0], 0, False),
        (EIGHT_BIT[0], 1, True),
        (SIXTEEN_BIT[0], 2, True),
        (AS_BF16[0], 0, True),
        (FOLDING[0], 0, False),
        (FOLDING[0], 1, True),
        (FOLDING[1], 2, True),
        (NVFP4[0], 2, True),
        (NVFP4[-1], 2, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_is_no_number_stays_where_it_is(device, instance, mode, swizzled):
    """NaN and infinity in each operand: the outputs that are NaN are the reference's, of other tokens and experts
    none."""
    case = MoECase(12, 160, 96, 6, 2, mode, swizzled_input_sf=swizzled, weights=instance.weights)
    inputs = make_moe_inputs(case, 660 + mode)
    print("seeds", 660 + mode, 670)
    nan = 0
    for what, changed in moe_inputs_with_not_numbers(inputs, 670):
        output = run_moe(device, changed, mode, [instance.index] * 2)
        reference, bound = moe_reference(changed, TENSOR_CORE)
        check_within_bound(output, reference, bound, what)
        tokens = reference.isnan().any(1)
        assert not tokens.all()
        nan += int(tokens.any())
    assert nan >= 14


def test_the_launcher_refuses_tactics_that_make_no_layer(device, monkeypatch):
    """Python refuses them before; the launcher for itself, since it would write where nobody reads."""
    monkeypatch.setattr(virtual_moe, "resolved_pair", lambda wanted, default: tuple(wanted))
    streamed = next(row.index for row in STREAMED if row.activation == "mxfp8")
    inputs = make_moe_inputs(MoECase(2, 160, 96, 4, 2, 0), 651)
    for tactics, message in (
        ([streamed, EIGHT_BIT[0].index], "FC1 and FC2 must name the same"),
        ([AS_BF16[0].index, EIGHT_BIT[0].index], "FC1 and FC2 must keep activations in the same type"),
    ):
        with pytest.raises(Exception, match=message):
            run_moe(device, inputs, 0, tactics)
    assert device.launches == []


@pytest.mark.parametrize(("given", "taken"), [("mxfp4", "nvfp4"), ("nvfp4", "mxfp4")], ids=["too few", "too many"])
def test_scales_of_another_format_are_refused(device, given, taken):
    """NVFP4's are twice as many: its kernels would read beyond MXFP4's. Python tells the formats apart before."""
    inputs = make_moe_inputs(MoECase(2, 160, 96, 4, 2, 2, weights=given), 653)
    (row,) = [row for row in STREAMED if (row.weights, row.name.endswith("stream_bf16_m8")) == (taken, True)]
    counts = {"mxfp4": 4 * 256 * 8, "nvfp4": 4 * 256 * 12}
    message = f"fc1_sf has {counts[given]} scales; the tactic's weights have {counts[taken]}"
    with pytest.raises(Exception, match=message):
        run_moe(device, dataclasses.replace(inputs, weights=taken), 2, [row.index] * 2)
    assert device.launches == []


def test_activations_beyond_32_bits_of_pieces_are_refused(device):
    """One row seen as many: nothing of it is read."""
    n, k, rows = 128, 4096, 1 << 24
    call = make_group_gemm_inputs([4], n, k, 652)
    call["a"] = call["a"][:1].expand(rows, k)
    out = torch.zeros((1, n), dtype=torch.bfloat16).expand(rows, n)
    with pytest.raises(Exception, match="activations of 64 GiB and more"):
        launch_group_gemm(device, call, EIGHT_BIT[0].index, out)
    assert device.launches == []


def test_a_fused_moe_tactic_refuses_what_it_cannot_take(device):
    place = index_of("stream_mxfp8_as_bf16_m8")
    for case, message in (
        (MoECase(400, 160, 96, 4, 4, 0), "at most 1536"),
        (MoECase(2, 3104, 96, 4, 2, 0), "K is too long for this fused MoE tactic"),
    ):
        with pytest.raises(Exception, match=message):
            run_moe(device, make_moe_inputs(case, 650), 0, [place, place])
    longer = index_of("stream_mxfp8_as_bf16_m8_w3")
    with pytest.raises(Exception, match="K is too long for this fused MoE tactic"):
        run_moe(device, make_moe_inputs(MoECase(2, 96, 4640, 4, 2, 0), 650), 0, [longer, longer])
