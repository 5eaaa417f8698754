# SPDX-License-Identifier: Apache-2.0
"""Steps of a loaded model over a paged KV cache, with vLLM's own attention metadata; the kernels' work is done in
PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import reference_attention
import torch

PAGE = 16


def forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """``Attention.forward``: the cache's write by slots, and attention of each sequence's new tokens over its pages."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import get_attention_context

    batch: Batch = get_forward_context().additional_kwargs["batch"]
    _, _, cache, slots = get_attention_context(layer.layer_name)
    batch.stock.append(layer.layer_name)
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    query, key, value = query.view(-1, heads, size), key.view(-1, kv_heads, size), value.view(-1, kv_heads, size)
    keys, values = (cache.view(torch.float8_e4m3fn) if cache.dtype is torch.uint8 else cache).split(size, -1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, at = divmod(slot, PAGE)
            keys[page, :, at] = (key[token].float() / layer._k_scale_float).to(keys.dtype)
            values[page, :, at] = (value[token].float() / layer._v_scale_float).to(values.dtype)
    out = torch.zeros_like(query)
    starts = batch.starts
    for sequence, (pages, length) in enumerate(zip(batch.pages, batch.lengths, strict=True)):
        k, v = (
            part[pages].transpose(1, 2).flatten(0, 1)[:length].float() * scale
            for part, scale in ((keys, layer._k_scale_float), (values, layer._v_scale_float))
        )
        new = slice(starts[sequence], starts[sequence + 1])
        out[new] = reference_attention.attended(layer, query[new], k, v)
    return out.view(len(query), -1)


class Batch:
    """New tokens of some sequences: ``lengths`` with them, each sequence's pages."""

    def __init__(self, new: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        self.new, self.lengths, self.pages = list(new), list(lengths), [list(each) for each in pages]
        self.starts = [0, *torch.tensor(self.new).cumsum(0).tolist()]
        self.stock: list[str] = []  # layers whose attention vLLM's forward asked for

    def slots(self, rows: int) -> torch.Tensor:
        found = [
            pages[position // PAGE] * PAGE + position % PAGE
            for new, length, pages in zip(self.new, self.lengths, self.pages, strict=True)
            for position in range(length - new, length)
        ]
        return torch.tensor(found + [-1] * (rows - len(found)))

    def positions(self, rows: int) -> torch.Tensor:
        found = [p for new, length in zip(self.new, self.lengths, strict=True) for p in range(length - new, length)]
        return torch.tensor(found + [0] * (rows - len(found)))


class Paged:
    """A model with a cache of ``pages`` pages, in vLLM's layout ``layout`` ("LBNHC" is NHD, "LBHNC" HND)."""

    def __init__(self, config: Any, model: Any, layout: str = "LBNHC", pages: int = 24) -> None:
        from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder
        from vllm.v1.kv_cache_layout import KVCacheLayout

        self.config, self.model, self.pages = config, model, pages
        self.layout = KVCacheLayout[layout]
        config.cache_config.block_size = PAGE
        self.layers = {layer.attn.attn.layer_name: layer.attn.attn for layer in model.model.layers}
        self.builders = {}
        for name, layer in self.layers.items():
            spec = layer.get_kv_cache_spec(config)
            shape = (pages, layer.num_kv_heads, PAGE, 2 * layer.head_size)
            order = self.layout.layer_view_order
            inverse = [order.index(i) for i in range(4)]
            memory = torch.zeros([shape[i] for i in order], dtype=spec.dtype)
            layer.kv_cache = memory.permute(*inverse)
            with mock.patch.object(FlashInferMetadataBuilder, "kv_cache_layout", self.layout):
                self.builders[name] = FlashInferMetadataBuilder(spec, [name], config, torch.device("cpu"))

    def metadata(self, batch: Batch, sequences: int) -> dict[str, Any]:
        """vLLM's, with ``sequences`` sequences after padding; a prefill's has no plan of FlashInfer's."""
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.attention.backends import flashinfer

        padding = sequences - len(batch.new)
        starts = torch.tensor(batch.starts + batch.starts[-1:] * padding, dtype=torch.int32)
        lengths = torch.tensor(batch.lengths + [0] * padding, dtype=torch.int32)
        table = torch.zeros(sequences, self.pages, dtype=torch.int32)
        for row, pages in zip(table, batch.pages, strict=False):
            row[: len(pages)] = torch.tensor(pages)
        total = batch.starts[-1]
        prefill = mock.Mock(spec=flashinfer.BatchPrefillWithPagedKVCacheWrapper)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=sequences,
            num_actual_tokens=total,
            max_query_len=max(batch.new),
            max_seq_len=max(batch.lengths),
            block_table_tensor=table,
            slot_mapping=batch.slots(total),
            causal=True,
        )
        with (
            mock.patch.object(flashinfer.FlashInferMetadataBuilder, "kv_cache_layout", self.layout),
            mock.patch.object(flashinfer.FlashInferMetadataBuilder, "_get_prefill_wrapper", return_value=prefill),
            mock.patch.object(flashinfer.FlashInferMetadataBuilder, "_compute_flashinfer_kv_metadata"),
        ):
            return {name: builder.build(0, common) for name, builder in self.builders.items()}

    def step(
        self, tokens: Sequence[int], batch: Batch, rows: int = 0, sequences: int = 0, **context: Any
    ) -> torch.Tensor:
        """float32 logits of the new tokens' rows, and of the rows of padding up to ``rows``."""
        from vllm.forward_context import get_forward_context, set_forward_context

        rows = rows or len(tokens)
        metadata = self.metadata(batch, sequences or len(batch.new))
        slots = dict.fromkeys(self.layers, batch.slots(rows))
        ids = torch.tensor([*tokens, *[0] * (rows - len(tokens))])
        padding = torch.arange(rows) >= len(tokens)
        with (
            torch.inference_mode(),
            set_forward_context(
                metadata, self.config, num_tokens=rows, slot_mapping=slots, is_padding=padding, **context
            ),
        ):
            get_forward_context().additional_kwargs["batch"] = batch
            hidden = self.model(ids, batch.positions(rows))
            # A model that also returns hidden states for a drafting model returns a tuple.
            return self.model.compute_logits(hidden[0] if isinstance(hidden, tuple) else hidden).float()
