import functools

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.jit.sm12x.moe import gen_sm12x_moe_module
from flashinfer.tllm_enums import ActivationType
from flashinfer.utils import device_support_pdl
from tests.test_helpers.mx_formats import skip_unless_sm12x
from tests.test_helpers.sm12x_moe import assert_layer, make_layer

# Activations, as the module numbers them.
MODES = ["mxfp8", "half", "bf16"]


@functools.cache
def _module():
    return gen_sm12x_moe_module().build_and_load()


def _run(layer, mode, tactic):
    module, given, number = _module(), layer.arguments(mode), MODES.index(mode)
    (tokens, hidden), (experts, _, half_inter) = layer.x.shape, given["fc2_expert_weights"].shape
    top_k, scales = given["token_selected_experts"].shape[1], given["quant_scales"]
    fc1_sf, fc1_global, fc2_sf, fc2_global = scales if len(scales) == 4 else (scales[0], None, scales[1], None)
    size = module.sm12x_moe_workspace_size(tokens, hidden, 2 * half_inter, experts, top_k, number, False)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    output = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    module.sm12x_moe_run(
        output,
        given["input"],
        given.get("input_sf"),
        top_k,
        given["token_selected_experts"],
        given["token_final_scales"],
        given["fc1_expert_weights"],
        fc1_sf,
        fc1_global,
        given["fc1_expert_biases"],
        given["fc2_expert_weights"],
        fc2_sf,
        fc2_global,
        given["fc2_expert_biases"],
        given["swiglu_alpha"],
        given["swiglu_beta"],
        given["swiglu_limit"],
        int(ActivationType.Swiglu),
        workspace,
        number,
        True,  # input_sf is 128x4
        0,
        experts,  # the rank's first expert, and all of them
        tactic,
        tactic,
        *[None] * 4,  # what only a decode step's call has
        device_support_pdl(torch.device("cuda")),
    )
    return output


@pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_sm12x_moe_module(row, tokens):
    skip_unless_sm12x()
    layer = make_layer(tokens, 2, 4, 256, 160, row.weights)
    if not row.takes(tokens * 2, 256, 160):
        pytest.skip("more rows than a streamed layer takes")
    for mode in ["bf16"] if row.activation == "bf16" else ["mxfp8", "half"]:
        out = _run(layer, mode, row.index)
        assert_layer(out, layer, w4a8=mode != "bf16")
        assert torch.equal(out, _run(layer, mode, row.index))


def test_rows_are_told_apart_by_name_and_number():
    assert len({row.name for row in INSTANCES}) == len(INSTANCES)
    assert len({row.number for row in INSTANCES}) == len(INSTANCES)
