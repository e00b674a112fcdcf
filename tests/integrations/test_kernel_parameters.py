"""What an engine shows as a layer's parameters is what the kernel reads, or is refused by name."""

from __future__ import annotations

import pytest
import torch

from deep_moe.errors import DeepMoEError
from deep_moe.integrations.kernel_parameters import KernelParameters

NAMES = ("w13_weight", "w2_weight")


@pytest.fixture
def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    for name in NAMES:
        parameter = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        module.register_parameter(name, parameter)
    return module


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(6.0).view(2, 3) for name in NAMES}


@pytest.fixture
def taken(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> KernelParameters:
    return KernelParameters("layer 3", layer, tensors, "Load anew.")


def test_parameters_become_the_kernels_memory(taken, layer, tensors):
    taken.require(layer)
    layer.w2_weight.data.mul_(2)
    assert torch.equal(tensors["w2_weight"], 2 * torch.arange(6.0).view(2, 3))
    assert not taken.need_all(layer)


def swapped_storage(layer: torch.nn.Module) -> None:
    layer.w2_weight.data = layer.w2_weight.data.clone()


def another_parameter(layer: torch.nn.Module) -> None:
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.data.clone(), requires_grad=False)


def no_parameter(layer: torch.nn.Module) -> None:
    del layer.w2_weight


def another_device(layer: torch.nn.Module) -> None:
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.data.to("meta"), requires_grad=False)


@pytest.mark.parametrize(
    "change", [swapped_storage, another_parameter, no_parameter, another_device]
)
def test_other_memory_is_refused_by_name(taken, layer, change):
    change(layer)
    with pytest.raises(DeepMoEError, match=r"^layer 3: w2_weight has other .* not laid out. Load"):
        taken.require(layer)


def test_parts_of_a_checkpoint_are_not_written_into_the_kernels_layout(taken, layer, tensors):
    other = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    taken.refuse_parts(other)
    alias = torch.nn.Parameter(tensors["w13_weight"], requires_grad=False)
    for parameter in (layer.w13_weight, alias):
        with pytest.raises(DeepMoEError, match=r"^layer 3: w13_weight holds the layout of .* Load"):
            taken.refuse_parts(parameter)


def test_new_weights_are_all_of_them_or_none(taken, layer):
    swapped_storage(layer)
    with pytest.raises(DeepMoEError, match=r"must bring all tensors .* no new w13_weight\. Load"):
        taken.need_all(layer)
    layer.w13_weight.data = layer.w13_weight.data.clone()
    assert taken.need_all(layer)
