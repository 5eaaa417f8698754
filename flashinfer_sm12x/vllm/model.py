# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's model class: vLLM's own, and an executor over its layers for decode steps.

The executor (:class:`DecodeSteps`) computes a step of decodes alone, of one token or of a window that verifies a draft,
with this fork's operators: per layer QKV with its norm, attention with rope and the cache's write in it, O, the router
with its norm, the experts. It runs where vLLM captures such a step into a full CUDA graph, or runs models eagerly; all
else, torch.compile with it, is vLLM's forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import vllm.envs as envs
from vllm import _custom_ops as ops
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backends.flashinfer import (
    FlashInferDecodeKernel,
    FlashInferMetadata,
    FlashInferTrtllmAPIDecode,
)
from vllm.v1.attention.backends.utils import get_flashinfer_layout_string

from . import api_checks, fallback, memory, reach, settings, table
from .dense import ForkKernel
from .layer_object import LayerObject
from .moe import SM12xAutoExperts, SM12xMoEMethod, reason_against_a_step

logger = init_logger("vllm.flashinfer_sm12x")

HEAD = 64
GROUP = 8  # query heads of a KV head
MAX_ROWS = 64  # the router is made for few tokens, and an H200 gains nothing beyond
PART = api_checks.MODULES["decode"][1]
BF16_CACHES, E4M3_CACHES = ("auto", "bfloat16"), ("fp8", "fp8_e4m3")


class SM12xGptOssForCausalLM(GptOssForCausalLM):
    """vLLM's model, built and loaded as it is."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.decode_steps: DecodeSteps | None = None
        reason = "failed, as the log says"
        with fallback.leaving(PART):
            against = reason_against(vllm_config, self.model) or prepare(self.model)
            if not against:
                self.decode_steps = self._make_decode_steps(vllm_config)
                table.note("decode", "flashinfer-sm12x", f"up to {MAX_ROWS} tokens", "default")
                return
            reason = against
        table.note("decode", "vLLM's layers", "", reason)
        with fallback.leaving("messages about choices that do not apply are"):
            reach.tell_of_gpt_oss(vllm_config, self.model)  # whose experts this fork's decode steps do not take

    def _make_decode_steps(self, vllm_config: VllmConfig) -> DecodeSteps:
        """The executor; its tensors are buffers of the model's, because sleep mode, level 2, keeps nothing else."""
        # vLLM rounds its table to the model's type at each call, too.
        rope = self.model.layers[0].attn.rotary_emb.cos_sin_cache.to(torch.bfloat16)
        self.register_buffer("sm12x_rope_table", rope, persistent=False)
        self.register_buffer("sm12x_workspace", decode_workspace(rope.device), persistent=False)
        self.register_buffer("sm12x_barrier", torch.zeros(2, dtype=torch.int32, device=rope.device), persistent=False)
        return DecodeSteps(vllm_config, self.model, self.lm_head)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """A decode step by the executor, or what vLLM's model does."""
        steps = self.decode_steps
        if steps is not None and input_ids is not None and inputs_embeds is None and intermediate_tensors is None:
            if steps.may_fail():
                self.decode_steps = None  # for ever, if this fails: vLLM computes the step once more
                with fallback.leaving(PART):
                    computed = self._step(steps, input_ids)
                    self.decode_steps = steps
                    if computed is not None:
                        return computed
            elif (computed := self._step(steps, input_ids)) is not None:
                return computed
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def _step(self, steps: DecodeSteps, input_ids: torch.Tensor) -> Any:
        """A decode step by the executor; None if vLLM's layers are to compute it."""
        step = steps.metadata(input_ids.shape[0])
        if step is None:
            return None
        buffers = self.sm12x_rope_table, self.sm12x_workspace, self.sm12x_barrier
        if steps.taken():
            return steps.run(input_ids, step, *buffers)
        steps.warm_up(input_ids, step, *buffers)
        return None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights as vLLM's model does, but fail before the host runs out of memory (:func:`.memory.watched`)."""
        loaded: set[str] = super().load_weights(memory.watched(weights))
        return loaded


def reason_against(config: VllmConfig, model: Any) -> str:
    """The reason to leave every step of a model to vLLM; empty if there is none."""
    if settings.resolve(config.additional_config).decode == "vllm":
        return "chosen"
    parallel, compilation = config.parallel_config, config.compilation_config
    graphs = compilation.cudagraph_mode
    asked = {
        "LoRA": config.lora_config is not None,
        "transfer of the KV cache": config.kv_transfer_config is not None,
        "routed experts are returned": config.aux_output_config.enabled,
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY,
        "weights are offloaded to the host": config.offload_config.uva.cpu_offload_gb > 0
        or config.offload_config.prefetch.offload_group_size > 0,
        "use_trtllm_attention is false, so there is no XQA": config.attention_config.use_trtllm_attention is False,
        "expert load balancing (EPLB)": parallel.enable_eplb,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1,
        "sequence-parallel experts": parallel.use_sequence_parallel_moe,
        "microbatches (DBO)": parallel.use_ubatching,
        f"--dtype {config.model_config.dtype}": config.model_config.dtype is not torch.bfloat16,
        f"compilation mode {compilation.mode}": compilation.mode
        not in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE),
        # A graph of a step with prefills could be one that was captured with decodes alone.
        f"cudagraph_mode {graphs}": graphs.mixed_mode() == CUDAGraphMode.FULL
        or (not _runs_eagerly(config) and graphs.decode_mode() != CUDAGraphMode.FULL),
    }
    for what, given in asked.items():
        if given:
            return what
    return next(filter(None, map(_reason_against_layer, model.layers)), "")


def _reason_against_layer(layer: Any) -> str:
    attention, mlp = layer.attn, layer.mlp
    kernel, experts = attention.attn, mlp.experts.routed_experts
    heads = (kernel.num_heads, kernel.num_kv_heads, kernel.head_size)
    if not (hasattr(kernel, "_k_scale_float") and hasattr(kernel, "_v_scale_float")):  # which no method gives it
        return "vLLM's attention keeps the scales of its KV cache elsewhere than vLLM 0.33.0 does"
    if not isinstance(experts.quant_method, SM12xMoEMethod):
        return "the experts are vLLM's"
    if reason := reason_against_a_step(mlp.experts):
        return reason
    if experts.moe_config.hidden_dim != mlp.hidden_size or mlp.hidden_size % 8:
        return f"a hidden size of {mlp.hidden_size}"
    if kernel.attn_backend.get_name() != "FLASHINFER":
        return f"attention by {kernel.attn_backend.get_name()}"
    if kernel.kv_cache_dtype not in (*BF16_CACHES, *E4M3_CACHES):
        return f"KV cache {kernel.kv_cache_dtype}"
    if heads != (GROUP * kernel.num_kv_heads, kernel.num_kv_heads, HEAD):
        return f"{heads[0]} query heads, {heads[1]} KV heads of {HEAD if heads[2] == HEAD else heads[2]} a rank"
    return ""


def _runs_eagerly(config: VllmConfig) -> bool:
    compilation = config.compilation_config
    return (compilation.mode, compilation.cudagraph_mode) == (CompilationMode.NONE, CUDAGraphMode.NONE)


def prepare(model: Any) -> str:
    """Build the executor's modules or find them built, as :func:`.moe.build` does; why that failed, or an empty
    text."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return ""  # tests: CPU tensors need no module
    from flashinfer.jit.sm12x.modules import gen_router_module
    from flashinfer.sm12x.backend import kernels

    try:
        decode_workspace(device)
        backend = kernels(torch.device("cuda", torch.cuda.current_device()))
        assert backend is not None
        backend.module(gen_router_module)
    except Exception as error:  # whatever a compiler or a linker can fail with
        return f"could not be built: {error}"
    return ""


def decode_workspace(device: torch.device) -> torch.Tensor:
    """For every attention of a decode step; on a GPU this builds the kernel, or finds it built."""
    from flashinfer.decode import decode_workspace_size

    return torch.zeros(decode_workspace_size(device), dtype=torch.uint8, device=device)


class DecodeSteps:
    """Runs the layers of a built gpt-oss, whose weights and caches stay where they are, for steps of decodes alone."""

    def __init__(self, config: VllmConfig, model: Any, head: Any) -> None:
        self.model, self.head = model, head
        self.eager = _runs_eagerly(config)
        self.alone = config.parallel_config.tensor_parallel_size == 1
        self.attention = [Attention(layer.attn.attn) for layer in model.layers]
        self._warm: set[int] = set()

    def metadata(self, rows: int) -> Mapping[str, FlashInferMetadata] | None:
        """The attention metadata of a step that the executor can compute, by layer; else None.

        It depends on nothing that ranks do not share.
        """
        if not 0 < rows <= MAX_ROWS or not is_forward_context_available():
            return None
        context = get_forward_context()
        found = context.attn_metadata
        if not isinstance(found, dict) or context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            return None
        names = (layer.attn.attn.layer_name for layer in self.model.layers)
        return found if all(_is_decode(found.get(name), rows) for name in names) else None

    def may_fail(self) -> bool:
        """Whether vLLM's layers can compute a step once more in which the executor failed.

        Not within a capture, of which a part is recorded by then; nor with several ranks, which would reduce this
        rank's next step with the rest of the failed one.
        """
        return self.alone and (self.eager or not torch.cuda.is_current_stream_capturing())

    def taken(self) -> bool:
        """Whether this is a run to compute a step in: captured, or one of a model that is not compiled."""
        return self.eager or torch.cuda.is_current_stream_capturing()

    def warm_up(self, input_ids: torch.Tensor, *step: Any) -> None:
        """Run once for each number of rows what a capture will, which may load no kernel, before vLLM's layers do.

        Both write the same positions of the cache.
        """
        if input_ids.shape[0] not in self._warm:
            self._warm.add(input_ids.shape[0])
            self.run(input_ids, *step)

    def run(
        self,
        input_ids: torch.Tensor,
        step: Mapping[str, FlashInferMetadata],
        rope: torch.Tensor,
        workspace: torch.Tensor,
        barrier: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states ``[rows, hidden]`` after the last norm, as ``GptOssModel.forward`` returns them: with those in
        front of the layers that a draft reads (EAGLE3), if it reads any."""
        hidden = self.model.embed_input_ids(input_ids)
        residual = None
        for_draft: list[torch.Tensor] = []
        read = self.model.aux_hidden_state_layers  # by the number of layers in front
        following = [layer.attn.qkv_proj for layer in self.model.layers[1:]] + [self.head]
        for index, (layer, next_layer) in enumerate(zip(self.model.layers, following, strict=True)):
            attention, router = layer.attn, layer.mlp.router
            with reading_ahead(fork_kernel(attention.qkv_proj), attention.o_proj):
                qkv, residual = norm_and_project(layer.input_layernorm, attention.qkv_proj, hidden, residual)
            if index in read:
                for_draft.append(residual.clone())  # vLLM's norms write over it
            attended = self.attention[index].attend(qkv, step[attention.attn.layer_name], rope, workspace)
            with reading_ahead(fork_kernel(attention.o_proj), router):
                hidden, _ = attention.o_proj(attended)
            hidden, residual = route_and_compute(layer, hidden, residual, barrier, weight_of(next_layer))
        assert residual is not None
        _add_and_norm(self.model.norm, hidden, residual)
        if len(following) in read:
            for_draft.append(residual)
        return (hidden, for_draft) if for_draft else hidden


def _is_decode(metadata: Any, rows: int) -> bool:
    """Whether a layer's step goes to XQA with equally many new tokens per sequence: one, or a window that verifies a
    draft."""
    if not isinstance(metadata, FlashInferMetadata) or metadata.num_prefills or not metadata.causal:
        return False
    decode = metadata.decode
    return (
        isinstance(decode, FlashInferTrtllmAPIDecode)
        and decode.kernel == FlashInferDecodeKernel.XQA
        and decode.q_cu_seq_lens is None  # else windows are of different lengths
        and (decode.mask is None) == (decode.q_len_per_req == 1)  # of causal attention within the window
        and metadata.num_decodes * decode.q_len_per_req <= rows
    )


def fork_kernel(linear: Any) -> ForkKernel | None:
    """A linear layer's kernel, if that is this fork's."""
    kernel = getattr(linear.quant_method, "kernel", None)
    return kernel if isinstance(kernel, ForkKernel) else None


def experts_of(layer: Any) -> SM12xAutoExperts | None:
    """A layer's experts, if they read ahead."""
    experts = layer.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts
    return experts if isinstance(experts, SM12xAutoExperts) else None


@contextlib.contextmanager
def reading_ahead(kernel: ForkKernel | None, layer: Any) -> Iterator[None]:
    """Calls of ``kernel`` in here bring the weight of ``layer`` into L2 when they have none of their own left to ask
    for."""
    if kernel is not None:
        kernel.next_weights = weight_of(layer)
    try:
        yield
    finally:
        if kernel is not None:
            kernel.next_weights = None  # torch.compile traces such calls, and takes no tensor for a constant


def weight_of(layer: Any) -> torch.Tensor | None:
    """The weight that a launch in front may read ahead; None where a kernel of vLLM's keeps it in a way that it cannot
    be."""
    weight = getattr(layer, "sm12x_coarse", None)  # an LM head that rescores reads this one
    if weight is None:
        weight = getattr(layer, "weight", None)
    return weight if weight is not None and weight.is_contiguous() else None


def norm_and_project(
    norm: Any, linear: Any, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``linear`` of ``hidden + residual`` behind the norm, and that sum; both arguments may be overwritten."""
    kernel = fork_kernel(linear)
    if kernel is not None and kernel.norms(linear, len(hidden)):
        return kernel.apply_behind_norm(linear, hidden, residual, norm)
    if residual is None:
        residual, hidden = hidden, _norm(norm, hidden)
    else:
        _add_and_norm(norm, hidden, residual)
    projected, _ = linear(hidden)
    return projected, residual


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.rms_norm(out, x, norm.weight, norm.variance_epsilon)
    return out


def _add_and_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> None:
    """In place: the sum in ``residual``, its norm in ``x``."""
    ops.fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)


class Attention:
    """The attention of one layer in decode steps: rope, the cache's write and attention in one launch.

    The fork's object is made of the cache that vLLM gave the layer (:class:`.LayerObject`).
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._object = LayerObject()

    def _attention(self, layout: Any, rope: torch.Tensor, workspace: torch.Tensor) -> Any:
        from flashinfer.decode import DecodeAttentionLayer

        layer = self.layer
        cache = layer.kv_cache
        scales = (layer._k_scale_float, layer._v_scale_float) if layer.kv_cache_dtype in E4M3_CACHES else (1.0, 1.0)
        tensors = (cache, rope, workspace, layer.impl.sinks)
        values = (cache.data_ptr(), scales, layout)  # the address: the object has views of the cache
        if (known := self._object.get(tensors, values)) is not None:
            return known
        if cache.dtype is torch.uint8:
            cache = cache.view(torch.float8_e4m3fn)
        made = DecodeAttentionLayer(
            cache.permute(*layout.layer_view_order).split(HEAD, dim=-1),
            rope_table=rope,
            sinks=layer.impl.sinks,
            sm_scale=layer.impl.scale,
            window_left=layer.impl.window_left,
            k_scale=scales[0],
            v_scale=scales[1],
            kv_layout=get_flashinfer_layout_string(layout),
            workspace_buffer=workspace,
            constant_cache=True,
        )
        return self._object.keep(made, tensors, values)

    def attend(
        self, qkv: torch.Tensor, metadata: FlashInferMetadata, rope: torch.Tensor, workspace: torch.Tensor
    ) -> torch.Tensor:
        """Attention of ``qkv`` ``[rows, (heads + 2 kv_heads) 64]``; padding rows write nothing to the cache.

        Padding is a sequence of length 0 (FULL graphs), or rows beyond the tokens; the outputs of these rows are
        undefined.
        """
        layer, rows, decode = self.layer, qkv.shape[0], metadata.decode
        tokens = metadata.num_decodes * decode.q_len_per_req
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        query, key, value = qkv.view(rows, -1, HEAD)[:tokens].split(heads, dim=1)
        out = torch.empty((rows, layer.num_heads, HEAD), dtype=qkv.dtype, device=qkv.device)
        self._attention(metadata.kv_cache_layout, rope, workspace).run(
            query,
            decode.block_tables,
            decode.seq_lens,
            key=key,
            value=value,
            q_len_per_req=decode.q_len_per_req,
            out=out[:tokens],
        )
        return out.view(rows, -1)


def route_and_compute(
    layer: Any,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    barrier: torch.Tensor,
    next_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of ``hidden + residual`` behind their norm, and that sum; rows of padding go to no expert."""
    from flashinfer.fused_moe import router_logits, router_top_k
    from flashinfer.fused_moe.sm12x_operator import CHOOSING_TOKENS

    norm, router, runner = layer.post_attention_layernorm, layer.mlp.router, layer.mlp.experts
    padding = get_forward_context().is_padding if envs.VLLM_MOE_SKIP_PADDING else None
    is_padding = None if padding is None else padding[: len(hidden)]
    top_k, experts = runner.router.top_k, runner.routed_experts
    given: dict[str, Any] = {
        "bias": router.bias,
        "residual": residual,
        "norm_weight": norm.weight,
        "eps": norm.variance_epsilon,
        "logits_dtype": hidden.dtype,  # as vLLM's router gives them: what is chosen is what vLLM's layers choose
        "constant_weights": True,
    }
    experts._ensure_moe_quant_config_init()
    own, kept = experts_of(layer), {"barrier": barrier, "next_weights": next_weights}
    if own is not None and len(hidden) <= CHOOSING_TOKENS:
        decided = router_logits(hidden, router.weight, **given)
        computed = own.step(
            experts, decided.hidden_states, router_logits=decided.logits, top_k=top_k, is_padding=is_padding, **kept
        )
        return runner._maybe_reduce_final_output(computed, None), decided.residual
    routed = router_top_k(hidden, router.weight, top_k, is_padding=is_padding, **given)
    rows, weights, ids = routed.hidden_states, routed.topk_weights, routed.topk_ids
    if own is None:
        computed = experts.forward_modular(x=rows, topk_weights=weights, topk_ids=ids)
    else:
        computed = own.step(experts, rows, token_selected_experts=ids, token_final_scales=weights, **kept)
    return runner._maybe_reduce_final_output(computed, None), routed.residual
