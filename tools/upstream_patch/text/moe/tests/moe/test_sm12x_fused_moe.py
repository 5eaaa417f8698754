import pytest
import torch

from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size, sm12x_moe
from flashinfer.jit.sm12x.instances import INSTANCES, tactic
from flashinfer.utils import BackendSupportedError
from tests.test_helpers.mx_formats import skip_unless_sm12x
from tests.test_helpers.sm12x_moe import assert_layer, make_layer


def _run(layer, mode, **named):
    return cutlass_fused_moe(**{**layer.arguments(mode), "backend": "sm12x", **named})


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


@pytest.mark.parametrize("mode", ["mxfp8", "half", "bf16"])
@pytest.mark.parametrize("tokens", [1, 6, 150])
@pytest.mark.parametrize("hidden,inter", [(128, 128), (288, 160)])
def test_sm12x_fused_moe(mode, tokens, hidden, inter):
    skip_unless_sm12x()
    layer = make_layer(tokens, 2, 5, hidden, inter)
    out = _run(layer, mode)
    assert_layer(out, layer, w4a8=mode != "bf16")
    assert torch.equal(out, _run(layer, mode))


@pytest.mark.parametrize("tokens", [1, 6, 150])
@pytest.mark.parametrize("hidden,inter", [(128, 128), (288, 160)])
def test_nvfp4_weights(tokens, hidden, inter):
    skip_unless_sm12x()
    layer = make_layer(tokens, 2, 5, hidden, inter, "nvfp4")
    out = _run(layer, "bf16")
    assert_layer(out, layer, w4a8=False)
    assert torch.equal(out, _run(layer, "bf16"))
    with pytest.raises(ValueError, match="NVFP4"):
        _run(layer, "bf16", quant_scales=[each.view(torch.uint8) for each in layer.arguments("bf16")["quant_scales"]])


@pytest.mark.parametrize("mode,weights", [("mxfp8", "mxfp4"), ("half", "mxfp4"), ("bf16", "mxfp4"), ("bf16", "nvfp4")])
@pytest.mark.parametrize("tokens", [1, 6, 150])
def test_relu2_without_gate_rows(mode, weights, tokens):
    skip_unless_sm12x()
    layer = make_layer(tokens, 2, 5, 288, 160, weights, gated=False)
    assert_layer(_run(layer, mode), layer, w4a8=mode != "bf16")
    with pytest.raises(ValueError, match="swiglu_limit is given; activation_type Relu2 has no parameters"):
        _run(layer, mode, swiglu_limit=torch.ones(5, device="cuda"))


@pytest.mark.parametrize("mode", ["mxfp8", "bf16"])
def test_expert_parallel_ranks_and_padding(mode):
    skip_unless_sm12x()
    layer = make_layer(9, 3, 6, 128, 96)
    layer.named["token_selected_experts"][4] = -1
    for rank in range(2):
        local = slice(3 * rank, 3 * rank + 3)
        named = {name: value[local] for name, value in layer.named.items() if name.startswith(("fc", "swiglu"))}
        named["quant_scales"] = [scale[local] for scale in layer.arguments(mode)["quant_scales"]]
        out = _run(layer, mode, ep_size=2, ep_rank=rank, **named)
        assert_layer(out, layer, mode != "bf16", 3 * rank, 3 * rank + 3)
        assert not out[4].any()


def test_output_workspace_and_forced_tactics():
    skip_unless_sm12x()
    layer = make_layer(20, 2, 4, 128, 128)
    size = _workspace_size(64, 128, 128, 4, 2)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    output = torch.empty(20, 128, dtype=torch.float16, device="cuda")
    for name in ("mxfp8_m8_k128", "mxfp8_m16_k128"):
        out = _run(
            layer,
            "mxfp8",
            output_dtype=torch.float16,
            output=output,
            workspace_buffer=workspace,
            profile_ids=[tactic(name), -1],
        )
        assert out is output
        assert_layer(out, layer, w4a8=True)


def test_errors_come_before_a_launch():
    skip_unless_sm12x()
    layer = make_layer(2, 2, 4, 128, 128)
    with pytest.raises(ValueError, match=r"it must be \[fc1_tactic, fc2_tactic\]"):
        _run(layer, "mxfp8", profile_ids=[17, 17])
    with pytest.raises(ValueError, match="takes packed e2m1 weights"):
        _run(layer, "mxfp8", use_mxfp8_act_scaling=False)
    with pytest.raises(ValueError, match="swiglu_alpha is"):
        _run(layer, "mxfp8", swiglu_alpha=layer.named["swiglu_alpha"][:2])
    with pytest.raises(ValueError, match="situ_beta is given"):
        _run(layer, "mxfp8", situ_beta=layer.named["swiglu_beta"])
    with pytest.raises(ValueError, match="hidden_size is 100"):
        _workspace_size(16, 100, 128, 4, 2)
    with pytest.raises(ValueError, match="must be divisible by"):
        _workspace_size(16, 128, 128, 5, 2, ep_size=2)


def test_other_gpus_are_refused(monkeypatch):
    skip_unless_sm12x()
    layer = make_layer(2, 2, 4, 128, 128)
    monkeypatch.setattr(sm12x_moe, "get_compute_capability", lambda device: (10, 0))
    with pytest.raises(BackendSupportedError, match="not SM100"):
        _run(layer, "mxfp8")


@pytest.mark.parametrize("gemm", [1, 2])
def test_what_the_autotuner_times_is_the_layer(monkeypatch, gemm):
    skip_unless_sm12x()
    asked = []
    monkeypatch.setattr(sm12x_moe, "tuned_tactics", lambda *given: asked.append(given) or given[2])
    _run(make_layer(3, 2, 4, 128, 128), "mxfp8")
    ((problem, call, _),) = asked
    runner = sm12x_moe.SM12xMoERunner(problem, call, gemm)
    inputs = [call.input, call.fc1_expert_weights, call.fc2_expert_weights]
    names = runner.get_valid_tactics(inputs, None)
    assert set(names) <= {row.name for row in INSTANCES}
    for name in (-1, names[0], names[-1]):
        out = runner(inputs, tactic=name)
        assert out.shape == call.input.shape
        assert out.isfinite().all()
