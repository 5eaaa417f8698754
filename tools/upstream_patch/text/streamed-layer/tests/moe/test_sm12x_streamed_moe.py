import pytest
import torch

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.sm12x_moe import choose_moe
from flashinfer.jit.sm12x.instances import tactic
from flashinfer.utils import get_compute_capability
from tests.test_helpers.mx_formats import quantize_mxfp8, swizzle_scales
from tests.test_helpers.sm12x_moe import assert_layer, make_layer


@pytest.mark.parametrize("name", ["stream_mxfp8_as_bf16_m8", "stream_bf16_m8"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_streamed_layer(name, tokens):
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        pytest.skip("backend='sm12x' is for SM120 and SM121")
    layer = make_layer(tokens, 4, 8, 288, 192)
    w4a8 = name != "stream_bf16_m8"
    x, x_sf = layer.x.to(torch.bfloat16), None
    if w4a8:
        x, linear = quantize_mxfp8(layer.x)
        x_sf = swizzle_scales(linear)

    def run():
        return cutlass_fused_moe(
            x,
            layer.ids,
            layer.weights,
            layer.fc1,
            layer.fc2,
            torch.bfloat16,
            layer.w4a8_scales if w4a8 else layer.w4a16_scales,
            layer.fc1_bias,
            layer.fc2_bias,
            x_sf,
            layer.alpha,
            layer.beta,
            layer.limit,
            use_mxfp8_act_scaling=w4a8,
            use_w4_group_scaling=not w4a8,
            profile_ids=[tactic(name)] * 2,
            backend="sm12x",
        )

    out = run()
    assert_layer(out, layer, w4a8)
    assert torch.equal(out, run())


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_few_rows_are_streamed(activation):
    assert choose_moe(activation, 4, 128, 2880, 2880).streamed
    assert not choose_moe(activation, 4, 128, 2880, 2880, all_sms=False).streamed
    assert not choose_moe(activation, 4096, 128, 2880, 2880).streamed
    # K is longer than the warps of a block hold.
    assert not choose_moe(activation, 4, 128, 2880, 4096).streamed
