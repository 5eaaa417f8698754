# SPDX-License-Identifier: Apache-2.0
"""The cache of the plugin's layer objects: ``SM12xMoELayer``, ``DenseLayer`` and ``DecodeAttentionLayer``."""

from __future__ import annotations

import operator
from typing import Any


class LayerObject:
    """A layer's object, which holds the tensors that it was made of: :meth:`get` gives it while vLLM has the same ones.

    vLLM puts other tensors into a layer when it prepares weights anew or allocates its KV cache. Tensors whose memory
    changes are found by the object itself in each call (:class:`flashinfer.sm12x.checks.Unchanged`).
    """

    def __init__(self) -> None:
        self._tensors: tuple[Any, ...] = ()
        self._values: Any = None
        self._made: Any = None

    def get(self, tensors: tuple[Any, ...], values: Any = None) -> Any:
        """The object, if it was made of these very tensors and of equal ``values``; else None."""
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return self._made if same and values == self._values else None

    def keep(self, made: Any, tensors: tuple[Any, ...], values: Any = None) -> Any:
        """Keep ``made``, which was made of these, in place of the last one; give it back."""
        self._tensors, self._values, self._made = tensors, values, made
        return made
