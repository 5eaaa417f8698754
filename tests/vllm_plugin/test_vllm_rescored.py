# SPDX-License-Identifier: Apache-2.0
"""LM heads that rescore, of several models, by vLLM's own loader on CPU tensors: their largest logits are the bf16
head's, whatever has become of the weight since."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import checkpoint
import language_models
import pytest
import served
import torch
from test_vllm_models import attention_in_pytorch, serve, table

from flashinfer.quantization.block_scaled import dequantize_weight, quantize_weight

__all__ = ["attention_in_pytorch"]

RESCORED = {"lm_head": "nvfp4_rescored"}
VOCABULARY, PADDED, K = 12_013, 12_032, 96  # as vLLM pads it; 11 tokens are rescored, and no more
TOKENS = (torch.arange(11) * 2654435761 + 12345) % VOCABULARY
WITHOUT_TOKENIZER = "--skip-tokenizer-init"
ULP = 2.0**-8
DRAFTED = 11_776  # tokens that a draft knows
MODELS = ("gpt-oss", "Llama", "tied Llama", "Qwen3-MoE in NVFP4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    checkpoint.write(folder / "gpt-oss", 1, vocab_size=VOCABULARY)
    language_models.write_llama(folder / "Llama", 2)
    language_models.write_llama(folder / "tied Llama", 3, tie_word_embeddings=True)
    language_models.write_qwen3_moe(folder / "Qwen3-MoE in NVFP4", 4)
    return folder


@pytest.fixture(autouse=True)
def operators_in_pytorch(monkeypatch):
    language_models.in_pytorch(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # vLLM's preparation of NVFP4 experts


@pytest.fixture(autouse=True)
def no_heads_of_other_tests(monkeypatch):
    """A head lives until its reference cycles are collected; updates derive those of a process, as a server has one."""
    from flashinfer_sm12x.vllm import rescored

    monkeypatch.setattr(rescored, "_heads", weakref.WeakSet())


@contextlib.contextmanager
def running(folder: Any, chosen: Any, *words: str) -> Iterator[tuple[Any, Any]]:
    """The server's config, and its model with weights."""
    made = serve(folder, chosen, WITHOUT_TOKENIZER, *words)
    with served.parallel_groups(made):
        yield made, language_models.native(served.load_model(made))


def fine_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.float() @ model.lm_head.weight[:VOCABULARY].float().T


def require_rescored(got: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """All logits of a head with ``weight`` are coarse or fine to rounding, and the largest ones fine: most of 768."""
    fine = hidden.float() @ weight.float().T
    coarse = hidden.float() @ dequantize_weight(quantize_weight(weight, "nvfp4"), "nvfp4", weight.shape[1]).T

    def near(expected: torch.Tensor) -> torch.Tensor:
        return (got.float() - expected).abs() <= ULP * expected.abs() + 1e-5 * expected.abs().amax()

    assert bool((near(fine) | near(coarse)).all())
    assert bool(near(fine).gather(-1, fine.topk(8).indices).all())
    assert torch.equal(got.argmax(-1), fine.to(got.dtype).argmax(-1))
    alone = (near(fine) & ~near(coarse)).sum(-1), (near(coarse) & ~near(fine)).sum(-1)
    print("fine alone", alone[0].tolist(), "coarse alone", alone[1].tolist())
    assert int(alone[0].min()) > 400
    assert int(alone[0].max()) <= 768
    assert int(alone[1].min()) > 1000


def logits_and_states(config: Any, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    states: list[torch.Tensor] = []
    compute = model.compute_logits
    model.compute_logits = lambda hidden: (states.append(hidden), compute(hidden))[1]
    try:
        return served.logits(config, model, TOKENS), states[-1]
    finally:
        del model.compute_logits


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_logits_are_the_bf16_heads(folders, log, name):
    with running(folders / name, {}) as (made, model):
        assert type(model.lm_head.quant_method).__name__ in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
        bf16 = served.logits(made, model, TOKENS)
    log.clear()
    with running(folders / name, RESCORED) as (made, model):
        got, hidden = logits_and_states(made, model)
        assert type(model.lm_head.quant_method).__name__ == "RescoredHeadMethod"
        assert model.lm_head.weight.dtype is torch.bfloat16
        assert ("lm_head.weight" in dict(model.named_parameters())) is (name != "tied Llama")
        assert not [each for each in model.state_dict() if "sm12x_coarse" in each]
        require_rescored(got, hidden, model.lm_head.weight[:VOCABULARY])
    assert torch.equal(got.argmax(-1), bf16.argmax(-1))
    assert (got.amax(-1) - bf16.amax(-1)).abs().max() <= ULP * bf16.abs().max()
    assert got.shape == bf16.shape == (len(TOKENS), VOCABULARY)
    (text,) = [message for message in log if "flashinfer-sm12x serves" in message]
    assert f"serves {'gpt-oss' if name == 'gpt-oss' else type(model).__name__}:" in text
    assert [message for message in log if "not apply" in message or "left to vLLM" in message] == []
    assert "| lm_head" in text
    assert "| flashinfer-sm12x | nvfp4_rescored" in text


class Head:
    """A head alone, as vLLM builds and loads it."""

    def __init__(
        self, config: Any, weight: torch.Tensor | None = None, prefix: str = "lm_head", **options: Any
    ) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.utils.torch_utils import set_default_torch_dtype

        rows, k = options.pop("shape", (VOCABULARY, K))
        with set_default_torch_dtype(options.pop("dtype", torch.bfloat16)):
            self.layer = ParallelLMHead(rows, k, prefix=prefix, **options)
        self.config = config
        if weight is not None:
            self.load(weight)
            self.prepare()

    def load(self, weight: torch.Tensor) -> None:
        self.layer.weight.weight_loader(self.layer.weight, weight)

    def prepare(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        process_weights_after_loading(self.layer, self.config.model_config, torch.device("cpu"))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with torch.inference_mode():
            return self.layer.quant_method.apply(self.layer, x, bias)

    @property
    def method(self) -> str:
        return type(self.layer.quant_method).__name__


def random(seed: int, rows: int = VOCABULARY, k: int = K) -> torch.Tensor:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, k, generator=generator) * k**-0.5).to(torch.bfloat16)


@pytest.fixture(scope="module")
def made_once(folders):
    return serve(folders / "gpt-oss", RESCORED)


@pytest.fixture
def config(made_once):
    with served.parallel_groups(made_once):
        yield made_once


@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_padding_take_no_tokens_place(config, biased):
    """All logits are negative but those of padding, which are 0 and would be the largest of their group."""
    weight, x = -random(1).abs(), random(2, 4).abs()
    head = Head(config, weight, bias=biased)
    bias = None
    if biased:
        head.layer.bias.copy_(torch.nn.functional.pad(random(3, VOCABULARY, 1)[:, 0], (0, PADDED - VOCABULARY)))
        bias = head.layer.bias
    got = head(x, bias)
    assert got.shape == (4, PADDED)
    assert bool((got[:, VOCABULARY:] == -math.inf).all())
    fine = x.float() @ weight.float().T + (0 if bias is None else bias[:VOCABULARY].float())
    for group in range(48):
        rows = torch.arange(VOCABULARY)[torch.arange(VOCABULARY) // 16 % 48 == group]
        best = fine[:, rows].amax(-1)
        assert (got[:, rows].float().amax(-1) - best).abs().max() <= ULP * best.abs().max(), group
    if not biased:
        require_rescored(got[:, :VOCABULARY], x, weight)


def test_rows_that_were_added_behind_padding_are_no_padding(config):
    """2,900 rows of the model, 12 of padding, 105 added, 31 of padding: vLLM's vocabulary with added tokens."""
    from flashinfer_sm12x.vllm import rescored

    mask = rescored._mask_of_padding(Head(config, shape=(2900 + 105, K), org_num_embeddings=2900).layer)
    assert len(mask) == 2944 + 128
    real = (mask == 0).nonzero().flatten().tolist()
    assert real == [*range(2900), *range(2944, 2944 + 105)]
    assert rescored._mask_of_padding(Head(config, shape=(PADDED, K)).layer) is None


def test_each_rank_rescores_its_own_rows(config, monkeypatch):
    from vllm.model_executor.layers import vocab_parallel_embedding as module

    weight, x = random(4, 24_064), random(5, 3)
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        own = Head(config, weight, shape=(24_064, K))
        assert own.layer.tp_size == 2
        require_rescored(own(x), x, weight[PADDED * rank : PADDED * (rank + 1)])


def worker(write: Any) -> Any:
    """A worker as far as vLLM's methods that end an update read it; ``write`` writes the weights."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(),
        model_runner=SimpleNamespace(reload_weights=write, reset_lora_state=lambda: None),
        _check_weight_transfer_engine=lambda: None,
        weight_transfer_engine=SimpleNamespace(finish_weight_update=write, reset_weight_update_target=lambda: None),
        _weight_update_active=True,
        _weight_update_is_draft=False,
    )


WAYS = (
    *("loader", "tied embedding's loader", "in place, reload_weights", "in place, finish_weight_update"),
    *("reload layer by layer", "tied reload"),
)


@pytest.mark.parametrize("way", WAYS)
def test_no_call_reads_a_coarse_weight_of_an_earlier_weight(config, monkeypatch, way):
    """The tensors that a captured graph has read hold the new weight's values, at their addresses."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker import gpu_worker

    first, second, x = random(6), random(7) * 3, random(8, 5)
    head = Head(config)
    model = torch.nn.ModuleDict({"head": head.layer})
    if "tied" in way:
        with set_default_torch_dtype(torch.bfloat16):
            model["embedding"] = VocabParallelEmbedding(VOCABULARY, K)
        model["head"] = head.layer.tie_weights(model["embedding"])
    layerwise.record_metadata_for_reloading(model)
    owner = model["embedding" if "tied" in way else "head"]
    owner.weight.weight_loader(owner.weight, first)
    Head.prepare(SimpleNamespace(layer=model, config=config))
    require_rescored(head(x)[:, :VOCABULARY], x, first)
    before = {name: (each.data_ptr(), each.clone()) for name, each in head.layer.named_buffers()}
    assert sorted(before) == ["sm12x_coarse", "sm12x_coarse_alpha", "sm12x_coarse_scale", "sm12x_padding"]
    if "loader" in way:
        owner.weight.weight_loader(owner.weight, second)
    elif "in place" in way:
        monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: contextlib.nullcontext())
        write = lambda: head.layer.weight.data[:VOCABULARY].copy_(second)  # noqa: E731
        getattr(gpu_worker.Worker, way.partition(", ")[2])(worker(write))
    else:
        layerwise.initialize_layerwise_reload(model)
        owner.weight.weight_loader(owner.weight, second)
        layerwise.finalize_layerwise_reload(model, config.model_config)
    assert torch.equal(head.layer.weight[:VOCABULARY], second)
    require_rescored(head(x)[:, :VOCABULARY], x, second)
    for name, buffer in head.layer.named_buffers():
        address, content = before[name]
        assert buffer.data_ptr() == address
        assert torch.equal(buffer, content) is (name == "sm12x_padding"), name
    expected = quantize_weight(head.layer.weight, "nvfp4")
    assert torch.equal(head.layer.sm12x_coarse, expected.values)
    assert torch.equal(head.layer.sm12x_coarse_scale, expected.scales)
    assert torch.equal(head.layer.sm12x_coarse_alpha, expected.global_scale)


def test_a_stale_coarse_weight_is_noticed_by_these_tests(config):
    """Without the derivation the logits are those of neither weight."""
    head, second, x = Head(config, random(6)), random(7), random(8, 5)
    with torch.no_grad():
        head.layer.weight.data[:VOCABULARY].copy_(second)
    with pytest.raises(AssertionError):
        require_rescored(head(x)[:, :VOCABULARY], x, second)


@pytest.mark.parametrize("name", ["gpt-oss", "tied Llama"])
def test_sleep_and_a_reload_leave_the_same_answers(folders, name):
    """Level 2 gives away all but buffers; a reload writes the weights of the checkpoint at their old addresses."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with running(folders / name, RESCORED) as (made, model):
        before = served.logits(made, model, TOKENS)
        kept = {each: buffer.clone() for each, buffer in model.named_buffers()}
        assert "lm_head.sm12x_coarse" in kept
        addresses = {each: buffer.data_ptr() for each, buffer in model.named_buffers()}
        with torch.inference_mode():
            for each in (*model.parameters(), *model.buffers()):
                each.data.fill_(7)
            for each, buffer in model.named_buffers():
                # What an update leaves of the coarse weight counts for nothing: it is derived again.
                if "sm12x_coarse" not in each:
                    buffer.copy_(kept[each])
        reload_weights(made, model, None, None, is_checkpoint_format=True)
        assert {each: buffer.data_ptr() for each, buffer in model.named_buffers()} == addresses
        assert torch.equal(served.logits(made, model, TOKENS), before)


def test_a_prompts_logprobs_are_of_the_bf16_head(config):
    """vLLM's own functions call the model's ``compute_logits``; both runners' are replaced."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from flashinfer_sm12x.vllm import replacements, rescored

    weight, x = random(9), random(10, 5)
    head = Head(config, weight)
    fine = (x.float() @ weight.float().T).bfloat16()
    replaced = {each.path for each in replacements._before if each.part == "rescored"}
    assert replaced == {each.path for each in replacements.of("rescored")}
    scored = rescored.fine_for_prompts(lambda states, bias=None: head(states, bias))(x)[:, :VOCABULARY]
    torch.testing.assert_close(scored.float(), fine.float(), rtol=ULP, atol=1e-6)
    require_rescored(head(x)[:, :VOCABULARY], x, weight)  # afterwards as before
    with pytest.raises(ZeroDivisionError):
        rescored.fine_for_prompts(lambda: 1 / 0)()
    require_rescored(head(x)[:, :VOCABULARY], x, weight)

    # The real functions as far as the first attribute that they read, at which the head's state is taken.
    states: list[bool] = []

    class Stub:
        def __getattr__(self, name: str) -> Any:
            states.append(rescored._scores_prompts)
            raise LookupError(name)

    for function, more in (
        (GPUModelRunner._get_prompt_logprobs_dict, 2),
        (PromptLogprobsWorker.compute_prompt_logprobs, 6),
        (PromptLogprobsWorker.compute_prompt_token_id_logprobs, 4),
    ):
        with pytest.raises(LookupError):
            function(Stub(), *[Stub()] * more)
    assert states == [True] * 3
    assert rescored._scores_prompts is False


def test_a_long_batch_is_vllms_own(config, monkeypatch):
    """From where all tokens' rows together are more bytes than the bf16 weight, by the planner's answer."""
    from flashinfer.gemm.sm12x_dense_rescored import rescores
    from flashinfer_sm12x.vllm import rescored

    weight = random(11)
    head = Head(config, weight)
    most = max(tokens for tokens in range(1, 200) if rescores(tokens, PADDED, "nvfp4"))
    calls: list[int] = []
    vllms = rescored.UnquantizedEmbeddingMethod.apply
    monkeypatch.setattr(
        rescored.UnquantizedEmbeddingMethod,
        "apply",
        lambda method, layer, x, bias=None: (calls.append(len(x)), vllms(method, layer, x, bias))[1],
    )
    for tokens in (most, most + 1):
        head(random(12, tokens))
    assert calls == [most + 1]


def draft_words(folder: Any, **more: Any) -> tuple[str, str]:
    given = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 1, **more}
    return "--speculative-config", json.dumps(given)


@pytest.mark.parametrize("own", [True, False], ids=["its own head", "vLLM's draft_lm_head_quantization"])
def test_a_drafts_head_rescores_where_vllm_is_not_asked_to_quantize_it(folders, tmp_path, monkeypatch, log, own):
    """EAGLE3: a window's logits are those without a draft, and the draft's largest are those of its bf16 head."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    checkpoint.write_draft(tmp_path / "draft", 5, DRAFTED, VOCABULARY)
    with running(folders / "gpt-oss", RESCORED) as (made, model):
        plain = served.logits(made, model, TOKENS)
    made = serve(folders / "gpt-oss", RESCORED, *draft_words(tmp_path / "draft"))
    if not own:  # which vLLM takes with its second model runner alone
        made.speculative_config.draft_lm_head_quantization = "nvfp4"
    with served.parallel_groups(made):
        model = served.load_model(made)
        model.set_aux_hidden_state_layers((0, 1, 2))
        monkeypatch.setitem(sys.modules, "vllm.compilation.backends", SimpleNamespace(model_tag="eagle_head"))
        drafter = get_model(vllm_config=made, model_config=made.speculative_config.draft_model_config)
        drafter.model.embed_tokens = model.model.embedding
        language_models.native(drafter)
        states: list[torch.Tensor] = []
        method = drafter.lm_head.quant_method
        apply = type(method).apply

        def remember(method: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            states.append(x)
            return apply(method, layer, x, bias)

        monkeypatch.setattr(type(method), "apply", remember)
        with torch.inference_mode(), set_forward_context(None, made, num_tokens=len(TOKENS)):
            hidden, auxiliary = model(TOKENS, positions := torch.arange(len(TOKENS)))
            window = model.compute_logits(hidden).float()
            given = drafter.combine_hidden_states(torch.cat(auxiliary, -1))
            drafted = drafter.compute_logits(drafter(TOKENS, positions, given)[0])
    assert torch.equal(window, plain)
    assert type(method).__name__ == ("RescoredHeadMethod" if own else "UnquantizedEmbeddingMethod")
    fine = states[-1].float() @ drafter.lm_head.weight[:DRAFTED].float().T
    assert torch.equal(drafted[:, :DRAFTED].argmax(-1), fine.bfloat16().argmax(-1))
    line = "flashinfer-sm12x: the draft's LM head is left to vLLM: draft_lm_head_quantization"
    assert (line in log) is not own
    assert table(log)["lm_head"][:3] == ("flashinfer-sm12x", "nvfp4_rescored", "chosen")


def test_vllms_quantized_copy_for_a_draft_is_of_such_a_head(config, monkeypatch):
    """``draft_lm_head_quantization`` asks for a target's head that is unquantized, and leaves it as it is."""
    from vllm.model_executor.layers.quantization.online import lm_head as online
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Online(UnquantizedEmbeddingMethod):
        pass

    head = Head(config, random(13))
    monkeypatch.setattr(online, "_LM_HEAD_METHODS", {"nvfp4": Online})
    copied = online._quantize_copy(head.layer, "nvfp4")
    assert type(copied.quant_method) is Online
    assert copied.weight.data_ptr() == head.layer.weight.data_ptr()
    assert head.method == "RescoredHeadMethod"


LEFT = "flashinfer-sm12x: the LM head is left to vLLM: "


@pytest.mark.parametrize(
    ("words", "options", "reason"),
    [
        ((), {"dtype": torch.float16}, "its weight is torch.float16"),
        ((), {"shape": (VOCABULARY, 80)}, "its K of 80 is no multiple of 32"),
        ((), {"shape": (VOCABULARY, 14_368)}, "its K of 14368 is more than 14336"),
        ((), {"shape": (VOCABULARY, 14_336)}, ""),
        ((), {"shape": (1000, K)}, "1024 rows, of which a token would read more than all in bf16"),
        ((), {"shape": (294_913, 32)}, "294976 rows, of which a group would have more than 6144"),
        ((), {"shape": (294_912, 32)}, ""),
        (("--hf-overrides", '{"head_dtype": "float32"}'), {}, "head_dtype torch.float32"),
        (("--enable-lora",), {}, "LoRA adapters may change it"),
        (("--enable-lora", "--lora-target-modules", "q_proj", "lm_head"), {}, "LoRA adapters may change it"),
        (("--enable-lora", "--lora-target-modules", "q_proj", "o_proj"), {}, ""),
        ((), {"prefix": "language_model.lm_head"}, ""),
        ((), {"prefix": "model.layers.61.shared_head.head"}, ""),
        ((), {"prefix": "model.markov_w2"}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_head_that_does_not_fit_is_left_to_vllm_with_a_reason(folders, log, words, options, reason):
    from flashinfer_sm12x.vllm import table as rows

    made = serve(folders / "gpt-oss", RESCORED, *words)
    with served.parallel_groups(made):
        rows._rows.clear()
        head = Head(made, **options)
    assert head.method == ("RescoredHeadMethod" if reason == "" else "UnquantizedEmbeddingMethod")
    left = [message.removeprefix(LEFT) for message in log if message.startswith(LEFT)]
    assert [message[: len(reason or "")] for message in left] == ([reason] if reason else [])
    if reason:
        assert rows._rows["lm_head"] == ("vLLM's", "torch.bfloat16, as the checkpoint", left[0])


def test_batch_invariance_leaves_the_head_to_vllm(config, monkeypatch):
    import vllm.envs as envs

    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert Head(config).method == "UnquantizedEmbeddingMethod"


def test_a_quantized_head_and_one_of_another_choice_stay(folders, log):
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Quantized(UnquantizedEmbeddingMethod):
        pass

    made = serve(folders / "Llama", RESCORED, WITHOUT_TOKENIZER)
    with served.parallel_groups(made), pytest.MonkeyPatch.context() as patch:
        from vllm.model_executor.layers import vocab_parallel_embedding as module

        patch.setattr(module, "resolve_quant_method", lambda config, layer, prefix: Quantized())
        assert Head(made, quant_config=object()).method == "Quantized"
        assert f"{LEFT}it is quantized: Quantized" in log
        for given in (Quantized, UnquantizedEmbeddingMethod):  # what a model or vLLM's own copy names, stays
            assert Head(made, quant_method=given()).method == given.__name__
    made = serve(folders / "gpt-oss", {"lm_head": "mxint8"})
    with served.parallel_groups(made):
        assert Head(made).method == "DenseMethod"
        assert Head(made, prefix="language_model.lm_head").method == "UnquantizedEmbeddingMethod"


def test_a_pooling_models_head_and_a_draft_without_a_tag_stay(folders, monkeypatch, log):
    made = serve(folders / "gpt-oss", RESCORED, "--runner", "pooling")
    with served.parallel_groups(made):
        assert Head(made).method == "UnquantizedEmbeddingMethod"
        assert [message for message in log if "left to vLLM" in message] == []  # it was not asked for
    made = serve(folders / "gpt-oss", RESCORED)
    monkeypatch.setitem(sys.modules, "vllm.compilation.backends", SimpleNamespace())
    with served.parallel_groups(made):
        assert Head(made).method == "UnquantizedEmbeddingMethod"


def test_a_model_without_a_head_is_named_in_the_table(folders, log):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from flashinfer_sm12x.vllm import table as rows

    made = serve(folders / "Llama", RESCORED, WITHOUT_TOKENIZER)
    with served.parallel_groups(made):
        rows._rows.clear()
        LogitsProcessor(VOCABULARY, scale=0.5, soft_cap=30.0)
    (text,) = [message for message in log if "serves LlamaForCausalLM" in message]
    assert "the model has none: vLLM gives its embedding to the logits processor" in text
    log.clear()
    made = serve(folders / "Llama", RESCORED, WITHOUT_TOKENIZER)
    with served.parallel_groups(made):
        Head(made)
        LogitsProcessor(VOCABULARY)
    made = serve(folders / "Llama", {}, WITHOUT_TOKENIZER)
    with served.parallel_groups(made):
        LogitsProcessor(VOCABULARY)
    assert [message for message in log if "the model has none" in message] == []


def test_a_head_is_vllms_where_a_name_that_it_needs_has_moved(config, monkeypatch, log):
    from flashinfer_sm12x.vllm import api_checks
    from flashinfer_sm12x.vllm import table as rows

    monkeypatch.setattr(
        api_checks, "_moved", lambda part: "Worker.reload_weights is gone" if part == "rescored" else ""
    )
    assert Head(config).method == "UnquantizedEmbeddingMethod"
    assert "flashinfer-sm12x: the rescored LM head is left to vLLM: Worker.reload_weights is gone" in log
    assert rows._rows["lm_head"][2] == "Worker.reload_weights is gone"


def test_a_failure_leaves_the_head_to_vllm(config, monkeypatch, log):
    from flashinfer_sm12x.vllm import rescored

    monkeypatch.setattr(rescored.CoarseWeight, "fill", lambda *_: 1 / 0)
    weight, x = random(14), random(15, 2)
    head = Head(config, weight)
    assert head.method == "UnquantizedEmbeddingMethod"
    assert any(message.startswith("flashinfer-sm12x: the rescored LM head is left to vLLM: Zero") for message in log)
    torch.testing.assert_close(head(x)[:, :VOCABULARY].float(), x.float() @ weight.float().T, rtol=ULP, atol=1e-3)


def test_a_weight_is_quantized_by_chunks_of_rows(config, monkeypatch):
    from flashinfer.quantization import block_scaled

    real, rows = block_scaled.LAYOUTS["nvfp4"], []
    quantize = lambda values, *more: (rows.append(len(values)), real.quantize(values, *more))[1]  # noqa: E731
    monkeypatch.setitem(block_scaled.LAYOUTS, "nvfp4", real._replace(quantize=quantize))
    Head(config, random(16))
    assert rows == [2048] * 5 + [1792]


def test_decode_steps_read_the_coarse_weight_ahead(config):
    from flashinfer_sm12x.vllm import model

    head = Head(config, random(17)).layer
    assert model.weight_of(head) is head.sm12x_coarse


@pytest.fixture(scope="module")
def folder_of_quantized(folders, tmp_path_factory):
    """A head that ``sm12x-quantize`` made, with error feedback; stored as NVFP4 is, under the name of this choice."""
    from test_vllm_folder import quantize

    from flashinfer_sm12x.quantize.manifest import MANIFEST

    target = tmp_path_factory.mktemp("quantized") / "folder"
    quantize(folders / "gpt-oss", target, {"qkv": "bf16", "o": "bf16", "lm_head": "nvfp4"})
    found = json.loads((target / MANIFEST).read_text())
    found["formats"]["lm_head"] = "nvfp4_rescored"
    (target / MANIFEST).write_text(json.dumps(found))
    return target


def test_a_folders_coarse_weight_takes_the_place_of_rounding(folders, folder_of_quantized, log):
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from flashinfer_sm12x.quantize.files import FolderError
    from flashinfer_sm12x.quantize.folder import Folder
    from flashinfer_sm12x.vllm import rescored

    (of_folder,) = Folder(folder_of_quantized).weights(["lm_head"])
    with running(folders / "gpt-oss", {"dense": str(folder_of_quantized)}) as (made, model):
        head = model.lm_head
        assert table(log)["lm_head"][:3] == ("flashinfer-sm12x", "nvfp4_rescored", f"chosen, {folder_of_quantized}")
        rounded = quantize_weight(head.weight, "nvfp4")
        assert torch.equal(head.sm12x_coarse[:VOCABULARY], of_folder.values)
        assert not torch.equal(head.sm12x_coarse, rounded.values)
        got, hidden = logits_and_states(made, model)
        assert torch.equal(got.argmax(-1), fine_logits(model, hidden).bfloat16().argmax(-1))
        head.sm12x_coarse.fill_(7)
        reload_weights(made, model, None, None, is_checkpoint_format=True)
        rescored.derive_all()  # nothing was written to since
        assert torch.equal(head.sm12x_coarse[:VOCABULARY], of_folder.values)
        assert torch.equal(served.logits(made, model, TOKENS), got.float())
        with torch.no_grad():
            head.weight.data[5] = 1.0
        with pytest.raises(FolderError, match=f"was written in place, and {folder_of_quantized} is of the checkpoint"):
            rescored.derive_all()
        with pytest.raises(FolderError, match="was made of another lm_head than this checkpoint's"):
            head.weight.weight_loader(head.weight, random(18, VOCABULARY, 160))
