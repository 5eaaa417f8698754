# SPDX-License-Identifier: Apache-2.0
"""A choice says which parts of a model are quantized, and how: each choice is a row of the tables."""

from __future__ import annotations

import dataclasses

from .formats import BF16, Q8_0


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

    @property
    def body(self) -> Choice:
        """The part of the choice on which hidden states depend."""
        if self.qkv == self.o == BF16:
            return dataclasses.replace(self, lm_head=BF16, tokens=BF16, folder="")
        return dataclasses.replace(self, lm_head=BF16)

    @property
    def is_llama_cpp(self) -> bool:
        return self.qkv == Q8_0

    @property
    def weights(self) -> str:
        """QKV, O and LM head in a cell of a table."""
        parts = [self.qkv, *([self.o] if self.o != self.qkv else [])]
        body = ", ".join(parts)
        description = body if body == self.lm_head else f"{body} / {self.lm_head}"
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
