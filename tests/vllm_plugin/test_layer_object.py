# SPDX-License-Identifier: Apache-2.0
"""The cache of the plugin's layer objects; vLLM is not needed."""

from __future__ import annotations

import pytest
import torch

from flashinfer_sm12x.vllm.layer_object import LayerObject

VALUES = (4096, (1.0, 1.0), "HND")


def test_the_object_of_the_same_tensors_and_values_is_found():
    tensors = (torch.zeros(2), None, torch.zeros(3))
    known = LayerObject()
    assert known.get(tensors, VALUES) is None
    assert known.get((), None) is None
    made = object()
    assert known.keep(made, tensors, VALUES) is made
    assert known.get((*tensors,), (4096, (1.0, 1.0), "HND")) is made  # equal values, in other tuples
    tensors[0].add_(1)
    assert known.get(tensors, VALUES) is made  # contents are the object's to see


@pytest.mark.parametrize("place", range(3))
def test_another_tensor_is_another_layer(place):
    """Also one with the same elements, shape and dtype: it lies elsewhere."""
    tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    known = LayerObject()
    known.keep("first", tuple(tensors), VALUES)
    for other in (tensors[place].clone(), tensors[place].view(2), None):
        changed = (*tensors[:place], other, *tensors[place + 1 :])
        assert known.get(changed, VALUES) is None
        assert known.keep("second", changed, VALUES) == "second"
        assert known.get(changed, VALUES) == "second"
        assert known.get(tuple(tensors), VALUES) is None  # the last one alone is kept
        known.keep("first", tuple(tensors), VALUES)


@pytest.mark.parametrize("values", [(4097, *VALUES[1:]), (4096, (1.0, 2.0), "HND"), (*VALUES[:2], "NHD"), None])
def test_other_values_are_another_layer(values):
    tensors = (torch.zeros(2),)
    known = LayerObject()
    known.keep("made", tensors, VALUES)
    assert known.get(tensors, values) is None
    assert known.get(tensors, VALUES) == "made"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_or_more_tensors_are_another_layer(count):
    tensor = torch.zeros(2)
    known = LayerObject()
    known.keep("made", (tensor, tensor), None)
    assert known.get((tensor,) * count, None) is None
