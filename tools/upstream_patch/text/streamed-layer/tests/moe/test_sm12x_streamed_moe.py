import pytest
import torch

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.sm12x_moe import choose_moe
from flashinfer.jit.sm12x.instances import tactic
from tests.test_helpers.mx_formats import skip_unless_sm12x
from tests.test_helpers.sm12x_moe import assert_layer, make_layer


@pytest.mark.parametrize("name", ["stream_mxfp8_as_bf16_m8", "stream_bf16_m8", "nvfp4_stream_bf16_m8"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_streamed_layer(name, tokens):
    skip_unless_sm12x()
    layer = make_layer(tokens, 4, 8, 288, 192, "nvfp4" if name.startswith("nvfp4") else "mxfp4")
    w4a8 = name == "stream_mxfp8_as_bf16_m8"
    given = {**layer.arguments("mxfp8" if w4a8 else "bf16"), "profile_ids": [tactic(name)] * 2, "backend": "sm12x"}
    out = cutlass_fused_moe(**given)
    assert_layer(out, layer, w4a8)
    assert torch.equal(out, cutlass_fused_moe(**given))


@pytest.mark.parametrize("activation,weights", [("mxfp8", "mxfp4"), ("bf16", "mxfp4"), ("bf16", "nvfp4")])
def test_few_rows_are_streamed(activation, weights):
    assert choose_moe(activation, weights, 4, 128, 2880, 2880).streamed
    assert not choose_moe(activation, weights, 4, 128, 2880, 2880, all_sms=False).streamed
    assert not choose_moe(activation, weights, 4096, 128, 2880, 2880).streamed
    # K is longer than the warps of a block hold.
    assert not choose_moe(activation, weights, 4, 128, 2880, 4096).streamed
    assert choose_moe(activation, weights, 4, 128, 2880, 2880).weights == weights
