"""The tensors of a layer's weights, two or three, as one object."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from deep_moe.weights import weight_format
from deep_moe.weights.layers import ExpertWeights, LayerWeights, detached, layer_weights, one_expert

PAIR = LayerWeights(torch.zeros(3, 4, 8), torch.ones(3, 4))
TRIPLE = LayerWeights(*PAIR, torch.arange(6.0).view(3, 2))


@pytest.mark.parametrize("layer", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_it_is_a_tuple_of_the_tensors_that_there_are(layer: LayerWeights) -> None:
    assert len(layer) == (3 if layer.global_sf is not None else 2)
    assert layer[0] is layer.weight
    assert layer[1] is layer.sf
    assert layer[2:] == (() if layer is PAIR else (layer.global_sf,))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
@pytest.mark.parametrize("layer", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_copies_keep_the_form(layer: LayerWeights, copied) -> None:
    made = copied(layer)
    assert type(made) is LayerWeights
    assert all(map(torch.equal, made, layer))
    assert len(made) == len(layer)


def test_experts_are_taken_out_of_all_tensors() -> None:
    one = ExpertWeights(TRIPLE, PAIR).expert(2)
    assert [tuple(own.shape) for own in one.l1] == [(1, 4, 8), (1, 4), (1, 2)]
    assert one.l1.global_sf.tolist() == [[4, 5]]
    assert one.l2.global_sf is None
    assert one_expert(TRIPLE, 1).global_sf.tolist() == [2, 3]


def test_all_tensors_lose_their_history() -> None:
    layer = LayerWeights(*(own.clone().requires_grad_() for own in TRIPLE))
    assert not any(own.requires_grad for own in detached(layer))


def test_a_third_tensor_is_refused_where_the_format_has_two() -> None:
    with pytest.raises(TypeError, match=r"w must be a pair .* got \(Tensor, Tensor, Tensor\)"):
        layer_weights("w", TRIPLE, weight_format("mxfp4"))
