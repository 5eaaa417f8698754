import pytest
import torch

from flashinfer.fused_moe.sm12x_moe import choose_moe
from flashinfer.jit.sm12x.instances import tactic
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_fused_moe import check_case
from tests.test_helpers.sm12x_moe import MoECase

device = pytest.fixture(sm12x_device, name="device")


@pytest.mark.parametrize("name", ["stream_mxfp8_as_bf16_m8", "stream_bf16_m8", "nvfp4_stream_bf16_m8"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_streamed_layer(name: str, tokens: int, device: torch.device) -> None:
    weights = "nvfp4" if name.startswith("nvfp4") else "mxfp4"
    for mode in (0, 1) if name == "stream_mxfp8_as_bf16_m8" else (2,):
        check_case(MoECase(tokens, 288, 192, 8, 4, mode, weights=weights), tokens, device, [[tactic(name)] * 2])


@pytest.mark.parametrize("activation,weights", [("mxfp8", "mxfp4"), ("bf16", "mxfp4"), ("bf16", "nvfp4")])
def test_few_rows_are_streamed(activation: str, weights: str) -> None:
    assert choose_moe(activation, weights, 4, 128, 2880, 2880).streamed
    assert not choose_moe(activation, weights, 4, 128, 2880, 2880, all_sms=False).streamed
    assert not choose_moe(activation, weights, 4096, 128, 2880, 2880).streamed
    # K is longer than the warps of a block hold.
    assert not choose_moe(activation, weights, 4, 128, 2880, 4096).streamed
    assert choose_moe(activation, weights, 4, 128, 2880, 2880).weights == weights
