# SPDX-License-Identifier: Apache-2.0
"""A choice says which parts of a model are quantized, and how: each choice is a row of the tables."""

from __future__ import annotations

import dataclasses

from .formats import BF16, HEADS, Q8_0

GROUPS, RESCORED_ROWS = 48, 16
"""Groups of an LM head's rows, and rows of each that are rescored, as ``flashinfer.gemm.dense_block_scaled_rescored``
has them by default."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Formats of the dense weights, to what dense layers and experts round their tokens, and the KV cache's format.

    Parts that are bf16 stay as they are in the reference.
    """

    qkv: str = BF16
    o: str = BF16
    lm_head: str = BF16
    tokens: str = BF16
    experts: str = BF16
    kv: str = BF16
    folder: str = ""
    """A folder of ``sm12x-quantize``: QKV, O and LM head take their weights from it as far as it holds them, in its
    formats."""
    rescored: int = RESCORED_ROWS
    """Rows of each group that are rescored, of a head in one of ``formats.HEADS``."""

    @property
    def body(self) -> Choice:
        """The part of the choice on which hidden states depend."""
        if self.qkv == self.o == BF16:
            return dataclasses.replace(self, lm_head=BF16, tokens=BF16, folder="", rescored=RESCORED_ROWS)
        return dataclasses.replace(self, lm_head=BF16, rescored=RESCORED_ROWS)

    @property
    def rescores(self) -> bool:
        """Whether the head's largest logits are computed again from its original rows."""
        return self.lm_head in HEADS

    @property
    def is_llama_cpp(self) -> bool:
        return self.qkv == Q8_0

    @property
    def weights(self) -> str:
        """QKV, O and LM head in a cell of a table."""
        parts = [self.qkv, *([self.o] if self.o != self.qkv else [])]
        body = ", ".join(parts)
        head = self.lm_head if self.rescored == RESCORED_ROWS else f"{self.lm_head}, {self.rescored} of a group"
        description = body if body == head else f"{body} / {head}"
        return f"{description}, by sm12x-quantize" if self.folder else description

    @property
    def modes(self) -> str:
        """The cell that tells what is rounded beside the weights."""
        description = [] if self.tokens == BF16 else [f"dense tokens {self.tokens}"]
        description += [] if self.experts == BF16 else [f"experts' tokens {self.experts}"]
        description += [] if self.kv == BF16 else ["KV e4m3"]
        return ", ".join(description)

    def __str__(self) -> str:
        return f"{self.weights}{', ' if self.modes else ''}{self.modes}"
