import functools

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.jit.sm12x.moe import gen_sm12x_moe_module
from flashinfer.utils import device_support_pdl, get_compute_capability
from tests.test_helpers.mx_formats import quantize_mxfp8, swizzle_scales
from tests.test_helpers.sm12x_moe import assert_layer, make_layer

# Activations, as the module numbers them.
MXFP8_INPUT, HALF_INPUT, W4A16 = range(3)


@functools.cache
def _module():
    return gen_sm12x_moe_module().build_and_load()


def _run(layer, mode, tactic, output_dtype=torch.bfloat16):
    module = _module()
    tokens, hidden = layer.x.shape
    experts, _, half_inter = layer.fc2.shape
    size = module.sm12x_moe_workspace_size(tokens, hidden, 2 * half_inter, experts, layer.ids.shape[1], mode, False)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    output = torch.empty(tokens, hidden, dtype=output_dtype, device="cuda")
    x, x_sf = layer.x.to(torch.bfloat16), None
    if mode == MXFP8_INPUT:
        x, linear = quantize_mxfp8(layer.x)
        x_sf = swizzle_scales(linear)
    scales = layer.w4a8_scales
    if mode == W4A16:
        scales[1] = scales[3] = None
    module.sm12x_moe_run(
        output,
        x,
        x_sf,
        layer.ids,
        layer.weights,
        layer.fc1,
        scales[0],
        scales[1],
        layer.fc1_bias,
        layer.fc2,
        scales[2],
        scales[3],
        layer.fc2_bias,
        layer.alpha,
        layer.beta,
        layer.limit,
        False,
        workspace,
        mode,
        True,
        0,
        experts,
        tactic,
        tactic,
        device_support_pdl(torch.device("cuda")),
    )
    return output


@pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_sm12x_moe_module(row, tokens):
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        pytest.skip("the module is for SM120 and SM121")
    layer = make_layer(tokens, top_k=2, experts=4, hidden=256, inter=160)
    modes = [W4A16] if row.activation == "bf16" else [MXFP8_INPUT, HALF_INPUT]
    if not row.takes(tokens * 2, 256, 160):
        pytest.skip("more rows than a streamed layer takes")
    for mode in modes:
        out = _run(layer, mode, row.index)
        assert_layer(out, layer, w4a8=mode != W4A16)
        assert torch.equal(out, _run(layer, mode, row.index))


def test_rows_are_told_apart_by_name_and_number():
    assert len({row.name for row in INSTANCES}) == len(INSTANCES)
    assert len({row.number for row in INSTANCES}) == len(INSTANCES)
