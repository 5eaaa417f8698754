import pytest
import torch

from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size, sm12x_moe
from flashinfer.jit.sm12x.instances import tactic
from flashinfer.utils import BackendSupportedError, get_compute_capability
from tests.test_helpers.mx_formats import quantize_mxfp8, swizzle_scales
from tests.test_helpers.sm12x_moe import assert_layer, make_layer


def _skip_unless_sm12x():
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        pytest.skip("backend='sm12x' is for SM120 and SM121")


def _run(layer, mode, output_dtype=torch.bfloat16, **named):
    arguments = {"use_mxfp8_act_scaling": True, "quant_scales": layer.w4a8_scales}
    x = layer.x.to(torch.bfloat16)
    if mode == "mxfp8":
        x, linear = quantize_mxfp8(layer.x)
        arguments["input_sf"] = swizzle_scales(linear)
    if mode == "bf16":
        arguments = {"use_w4_group_scaling": True, "quant_scales": layer.w4a16_scales}
    arguments = {
        "fc1_expert_weights": layer.fc1,
        "fc2_expert_weights": layer.fc2,
        "fc1_expert_biases": layer.fc1_bias,
        "fc2_expert_biases": layer.fc2_bias,
        "swiglu_alpha": layer.alpha,
        "swiglu_beta": layer.beta,
        "swiglu_limit": layer.limit,
        **arguments,
        **named,
    }
    return cutlass_fused_moe(x, layer.ids, layer.weights, output_dtype=output_dtype, backend="sm12x", **arguments)


def _workspace_size(*sizes, **named):
    return cutlass_fused_moe_workspace_size(
        *sizes,
        x_dtype=torch.float8_e4m3fn,
        weight_dtype=torch.uint8,
        use_mxfp8_act_scaling=True,
        device=torch.device("cuda", 0),
        backend="sm12x",
        **named,
    )


@pytest.mark.parametrize("mode", ["mxfp8", "quantized inside", "bf16"])
@pytest.mark.parametrize("tokens", [1, 6, 150])
@pytest.mark.parametrize("hidden,inter", [(128, 128), (288, 160)])
def test_sm12x_fused_moe(mode, tokens, hidden, inter):
    _skip_unless_sm12x()
    layer = make_layer(tokens, 2, 5, hidden, inter)
    out = _run(layer, mode)
    assert_layer(out, layer, w4a8=mode != "bf16")
    assert torch.equal(out, _run(layer, mode))


@pytest.mark.parametrize("mode", ["mxfp8", "bf16"])
def test_expert_parallel_ranks_and_padding(mode):
    _skip_unless_sm12x()
    layer = make_layer(9, 3, 6, 128, 96)
    layer.ids[4] = -1
    for rank in range(2):
        local = slice(3 * rank, 3 * rank + 3)
        named = {
            "fc1_expert_weights": layer.fc1[local],
            "fc2_expert_weights": layer.fc2[local],
            "fc1_expert_biases": layer.fc1_bias[local],
            "fc2_expert_biases": layer.fc2_bias[local],
            "swiglu_alpha": layer.alpha[local],
            "swiglu_beta": layer.beta[local],
            "swiglu_limit": layer.limit[local],
            "quant_scales": [scale[local] for scale in (layer.w4a16_scales if mode == "bf16" else layer.w4a8_scales)],
        }
        out = _run(layer, mode, ep_size=2, ep_rank=rank, **named)
        assert_layer(out, layer, mode != "bf16", 3 * rank, 3 * rank + 3)
        assert not out[4].any()


def test_output_workspace_and_forced_tactics():
    _skip_unless_sm12x()
    layer = make_layer(20, 2, 4, 128, 128)
    size = _workspace_size(64, 128, 128, 4, 2)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    output = torch.empty(20, 128, dtype=torch.float16, device="cuda")
    for name in ("mxfp8_m8_k128", "mxfp8_m16_k128"):
        out = _run(
            layer, "mxfp8", torch.float16, output=output, workspace_buffer=workspace, profile_ids=[tactic(name), -1]
        )
        assert out is output
        assert_layer(out, layer, w4a8=True)


def test_errors_come_before_a_launch():
    _skip_unless_sm12x()
    layer = make_layer(2, 2, 4, 128, 128)
    with pytest.raises(ValueError, match=r"it must be \[fc1_tactic, fc2_tactic\]"):
        _run(layer, "mxfp8", profile_ids=[17, 17])
    with pytest.raises(ValueError, match="takes MXFP4 weights"):
        _run(layer, "mxfp8", use_mxfp8_act_scaling=False)
    with pytest.raises(ValueError, match="swiglu_alpha is"):
        _run(layer, "mxfp8", swiglu_alpha=layer.alpha[:2])
    with pytest.raises(ValueError, match="takes SwiGLU's parameters only"):
        _run(layer, "mxfp8", situ_beta=layer.beta)
    with pytest.raises(ValueError, match="hidden_size is 100"):
        _workspace_size(16, 100, 128, 4, 2)
    with pytest.raises(ValueError, match="must be divisible by"):
        _workspace_size(16, 128, 128, 5, 2, ep_size=2)


def test_other_gpus_are_refused(monkeypatch):
    _skip_unless_sm12x()
    layer = make_layer(2, 2, 4, 128, 128)
    monkeypatch.setattr(sm12x_moe, "get_compute_capability", lambda device: (10, 0))
    with pytest.raises(BackendSupportedError, match="not SM100"):
        _run(layer, "mxfp8")
