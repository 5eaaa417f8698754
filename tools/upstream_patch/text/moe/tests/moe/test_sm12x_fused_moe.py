"""``backend="sm12x"`` of cutlass_fused_moe, MXFP4 weights, against a float64 reference."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.fused_moe import sm12x_moe
from flashinfer.jit.sm12x.instances import INSTANCES, tactic
from flashinfer.tllm_enums import ActivationType
from flashinfer.utils import BackendSupportedError
from tests.test_helpers.mx_error_bounds import accumulation_on, check_within_bound
from tests.test_helpers.mx_formats import (
    quantize_mxfp8,
    sm12x_device,
    swizzle_scales,
    unswizzle_scales,
)
from tests.test_helpers.sm12x_fused_moe import (
    check_case,
    cutlass_fused_moe,
    replayed,
    run,
    tactics_to_force,
    workspace_bytes,
)
from tests.test_helpers.sm12x_moe import (
    MoECase,
    make_moe_inputs,
    moe_inputs_with_not_numbers,
    same_bits,
)
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

device = pytest.fixture(sm12x_device, name="device")
_check = check_case

# take tests/moe/test_cutlass_fused_moe_mxfp4.py: MODES test_modes_and_token_counts CORNERS test_corners
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_shard_of_720_padded_with_zeros
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_expert_parallel_ranks_sum_to_the_whole tensor_parallel_shards
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_tensor_parallel_shards_sum_to_the_whole test_input_scale_layouts
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_inside_quantization_equals_quantizing_outside
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_views_of_weights_and_scales_give_the_same_bits
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_absent_parameters_have_their_defaults
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_no_tokens_give_an_empty_output
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_duplicate_expert_of_a_token_counts_twice
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_what_is_no_number_stays_where_it_is
# take tests/moe/test_cutlass_fused_moe_mxfp4.py: test_larger_workspace_and_int8_are_taken test_inputs_are_not_written
# take tests/moe/test_moe_validation.py: CASE test_padding_contributes_nothing
# take tests/moe/test_activations.py: STEP test_an_absent_limit_is_upstreams_seven
# take tests/moe/test_activations.py: test_each_parameter_counts_and_each_activation_has_its_own_formula
# take tests/moe/test_activations.py: test_swiglu_bias_is_another_name_of_swiglu
# take tests/moe/test_activations.py: KINDS test_relu2_against_its_reference
# take tests/moe/test_activations.py: test_what_is_no_number_passes_relu2


# --- sizes of models, for a GPU -------------------------------------------------------

# Hidden and intermediate size, experts and experts of a token.
MODELS = {
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "gpt-oss-120b, two ranks": (2880, 1440, 128, 4),
    "128 experts of 2048 x 768": (2048, 768, 128, 8),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_layers_of_models(model: str, mode: int, tokens: int, device: torch.device) -> None:
    check_case(MoECase(tokens, *MODELS[model], mode), tokens, device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_replays_from_a_cuda_graph(mode: int, tokens: int, device: torch.device) -> None:
    inputs = make_moe_inputs(MoECase(tokens, 288, 352, 8, 3, mode), 50, device)
    assert same_bits(replayed(inputs, device, None), run(inputs, device, 0xFF, None))


# --- tactics --------------------------------------------------------------------------


def _rows(inputs: MoEInputs) -> list:
    activation = "bf16" if inputs.w4a16 else "mxfp8"
    (tokens, top_k), (_, hidden, half) = inputs.token_selected_experts.shape, inputs.fc2_weights.shape
    rows = [row for row in INSTANCES if (row.activation, row.weights) == (activation, inputs.weights)]
    return [row for row in rows if row.takes(tokens * top_k, hidden, 2 * half)]


@pytest.mark.parametrize("mode", MODES)
def test_every_tactic_is_forced_by_its_number(mode: int, device: torch.device) -> None:
    case = MoECase(33, 160, 96, 4, 2, mode)
    rows = _rows(make_moe_inputs(case, 51, device))
    assert len(rows) >= 4
    check_case(case, 51, device, [[row.profile_id] * 2 for row in rows])


def test_gemms_of_a_pair_are_chosen_each(device: torch.device) -> None:
    first, second = tactic("mxfp8_m8_k128"), tactic("mxfp8_m16_k128")
    check_case(MoECase(9, 160, 96, 4, 2, 0), 52, device, [[first, second], [first, -1], [-1, second]])


@pytest.mark.parametrize("mode", MODES)
def test_the_autotuner_times_every_tactic_and_the_fastest_is_used(
    mode: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are given here; each tactic is run once."""
    inputs = make_moe_inputs(MoECase(8, 96, 64, 4, 2, mode), 53, device)
    rows = [row for row in _rows(inputs) if not row.split_k]
    asked = []

    def profile(tuner, runner, inputs, tactic, *given, **named):
        assert runner(inputs, tactic=tactic).isfinite().all()
        asked.append((runner.gemm_idx, tactic))
        return 0.5 if tactic == rows[-1].name else 1.0

    launched = []
    launch = sm12x_moe.launch
    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(sm12x_moe, "launch", lambda *given: launched.append(given[3]) or launch(*given))
    AutoTuner.get().clear_cache()
    with autotune(True):
        cutlass_fused_moe(**inputs.arguments(), tune_max_num_tokens=8)
    assert {name for gemm, name in asked if gemm == 1} - {-1} == {row.name for row in _rows(inputs)}
    assert {name for gemm, name in asked if gemm == 2} - {-1} == {row.name for row in rows}
    output = cutlass_fused_moe(**inputs.arguments(), tune_max_num_tokens=8)
    assert launched[-1] == (rows[-1].index, rows[-1].index)
    check_within_bound(output, *moe_reference(inputs, accumulation_on(device)), "seed 53")
    AutoTuner.get().clear_cache()


def test_other_gpus_are_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_moe_inputs(CASE, 54, device)
    monkeypatch.setattr(sm12x_moe, "get_compute_capability", lambda device: (10, 0))
    with pytest.raises(BackendSupportedError, match="not SM100"):
        cutlass_fused_moe(**inputs.arguments())
