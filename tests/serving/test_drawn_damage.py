"""Damage drawn at random, from seeds, to layers of vLLM and of SGLang as their loaders left them,
and changes of layers that are served. The output is that of the weights, bit for bit, or something
is refused with the name of what was changed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_moe.errors import DeepMoEError
from deep_moe.integrations import served_experts
from tests.integrations.drawn_damage import (
    DAMAGES,
    Damaged,
    Naming,
    Words,
    names_one_of,
)

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("make test-serving installs sglang", allow_module_level=True)

from .layers import FORMS, LOGITS, Layer, X, make_layers  # noqa: E402
from .test_vllm import installed  # noqa: E402
from .test_vllm_formats import some_backend  # noqa: E402

__all__ = ["installed", "make_layers", "some_backend"]  # fixtures

NUM_DRAWS = 1  # of each kind of damage
NAMING = Naming(
    ("w13", "w2"),
    "_scale",
    ["_weight_zero_point", "_weight_scale_3", "_bias_2", "_perm", "_lora_a"],
)
OLD, NEW = 0, 1  # seeds


def fault(layer: Layer, expected: torch.Tensor, damage: Any, seed: int) -> str | None:
    """What is wrong with the answer to one draw."""
    words: Words = damage(Damaged(layer.module, layer.names, NAMING, seed))
    try:
        reason = layer.take()
        if reason is None and not torch.equal(layer.output(), expected):
            return "other values, no reason"
    except DeepMoEError as error:
        reason = str(error)
    except Exception as error:
        return repr(error)
    return None if reason is None else names_one_of(words, reason)


@pytest.mark.parametrize(("engine", "form"), FORMS)
def test_it_is_left_to_the_engine_or_harmless(make_layers: Any, engine: str, form: str) -> None:
    make = make_layers(engine, "sm_90a")
    sound = make(form)
    assert sound.take() is None
    expected, faults = sound.output(), []
    for seed in range(NUM_DRAWS * len(DAMAGES)):
        damage = DAMAGES[seed % len(DAMAGES)]
        number = seed + 1000 * FORMS.index((engine, form))
        found = fault(make(form), expected, damage, number)
        if found is not None:
            faults.append(f"{number} {damage.__name__}: {found}")
    assert faults == [], "\n".join(faults)


class Served:
    """A layer that the kernel runs, and what is drawn for it. given: what its loaders had made."""

    def __init__(self, layer: Layer, given: dict[str, torch.Tensor], seed: int) -> None:
        self.layer, self.given = layer, given
        self.module = layer.module
        self.drawn = random.Random(seed)
        self.names = [name for name in given if name in self.module._parameters]
        self.name = self.drawn.choice([name for name in self.names if _is_of_kernel(self, name)])

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter: torch.nn.Parameter = getattr(self.module, self.name)
        return parameter


def _is_of_kernel(own: Served, name: str) -> bool:
    return getattr(own.module, name).shape != own.given[name].shape


def other_memory(own: Served) -> Words:
    own.parameter.data = own.parameter.data.clone()
    return [own.name]


def another_parameter(own: Served) -> Words:
    copied = torch.nn.Parameter(own.parameter.detach().clone(), requires_grad=False)
    setattr(own.module, own.name, copied)
    return [own.name]


def no_parameter(own: Served) -> Words:
    delattr(own.module, own.name)
    return [own.name]


def nowhere(own: Served) -> Words:
    empty = torch.nn.Parameter(own.parameter.data.to("meta"), requires_grad=False)
    setattr(own.module, own.name, empty)
    return [own.name]


def memory_freed(own: Served) -> Words:
    own.parameter.untyped_storage().resize_(0)
    return [own.name, "weights.l", "storage"]


def written_over(own: Served) -> Words:
    """With what a checkpoint has, past the loaders: the memory has another layout."""
    new = own.given[own.name]
    ways: list[Callable[[], Any]] = [
        lambda: own.parameter.copy_(new),
        lambda: own.parameter.data.copy_(new),
        lambda: own.module.load_state_dict({own.name: new}, strict=False),
        lambda: own.module.load_state_dict({own.name: new}, strict=False, assign=True),
        lambda: torch._foreach_copy_([own.parameter.data], [new]),
    ]
    with torch.no_grad(), pytest.raises((RuntimeError, TypeError)):
        own.drawn.choice(ways)()
    return []


def own_state(own: Served) -> Words:
    own.module.load_state_dict({k: v.clone() for k, v in own.module.state_dict().items()})
    return []


def loaded_without_a_reload(own: Served) -> Words:
    own.layer.load(NEW)
    return [*NAMING.layers]


def reloaded(own: Served) -> Words:
    for seed in own.drawn.choice([[NEW], [OLD], [NEW, OLD], [OLD, NEW]]):
        own.layer.reload(seed)
    return []


def slept(own: Served) -> Words:
    """What the memory held is gone, and other weights come."""
    for name in own.names:
        getattr(own.module, name).data.view(torch.uint8).random_(0, 256)
    served_experts.buffers.close()
    own.layer.reload(NEW)
    return []


def other_defaults(own: Served) -> Words:
    dtype = own.drawn.choice([torch.float64, torch.bfloat16, torch.float16])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        own.layer.reload(NEW)
        own.layer.output()
    finally:
        torch.set_default_dtype(before)
    return []


CHANGES = (
    *(other_memory, another_parameter, no_parameter, nowhere, memory_freed, written_over),
    *(own_state, loaded_without_a_reload, reloaded, slept, other_defaults, written_over),
)
NUM_CHANGES = 4  # of a form


def taken(make: Any, form: str, seed: int) -> tuple[Layer, dict[str, torch.Tensor]]:
    layer: Layer = make(form, seed)
    given = {name: getattr(layer.module, name).detach().clone() for name in layer.names}
    assert layer.take() is None
    return layer, given


def fault_of_change(own: Served, change: Any, outputs: list[torch.Tensor]) -> str | None:
    words: Words = [own.name]
    try:
        words = change(own) or words
        if not any(torch.equal(own.layer.output(), each) for each in outputs):
            return "other values than those of any weights"
    except (DeepMoEError, ValueError) as error:
        return names_one_of([*words, *NAMING.layers], str(error))
    except Exception as error:
        return repr(error)
    return None


@pytest.mark.parametrize(("engine", "form"), FORMS)
def test_changes_of_a_served_layer(make_layers: Any, engine: str, form: str) -> None:
    index = FORMS.index((engine, form))
    # A target's layout may have the sizes of a checkpoint's; FP8's scales there are powers of two.
    arch = "sm_90a" if index % 2 or "locks" in form else "sm_100a"
    make = make_layers(engine, arch)
    outputs = [taken(make, form, seed)[0].output() for seed in (OLD, NEW)]
    assert not torch.equal(*outputs)
    faults = []
    for draw in range(NUM_CHANGES):
        change = CHANGES[(index * NUM_CHANGES + draw) % len(CHANGES)]
        own = Served(*taken(make, form, OLD), 100 * index + draw)
        found = fault_of_change(own, change, outputs)
        if found is not None:
            faults.append(f"{draw} {change.__name__} of {own.name}: {found}")
    assert faults == [], "\n".join(faults)


def half(tensors: list[torch.Tensor], how: str) -> None:
    """In place, by ways of which most count no version."""
    if how == "foreach":
        torch._foreach_mul_(tensors, 0.5)
    for tensor in tensors:
        if how == "data":
            tensor.data.mul_(0.5)
        elif how == "view":
            tensor.view(-1)[:] = tensor.view(-1) * 0.5
        elif how == "numpy":
            bits = tensor.detach().view(torch.int16).numpy()
            bits[...] = (tensor.detach() * 0.5).view(torch.int16).numpy()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("engine", "form"), [("vllm", "bf16"), ("sglang", "BF16")])
def test_updates_in_place_are_seen(make_layers: Any, engine: str, form: str, arch: str) -> None:
    """Of numbers, which mean the same in every layout."""
    make = make_layers(engine, arch)
    changed = make(form)
    half([parameter.data for parameter in changed.module.parameters()], "data")
    assert changed.take() is None
    expected = changed.output()
    for how in ("foreach", "data", "view", "numpy"):
        layer, _ = taken(make, form, OLD)
        before = layer.output()
        with torch.no_grad():
            half([*layer.module.parameters()], how)
        assert torch.equal(layer.output(), expected), how
        assert not torch.equal(before, expected)


@pytest.mark.parametrize(("engine", "form"), [("vllm", "mxfp4"), ("sglang", "mxfp4")])
def test_calls(make_layers: Any, engine: str, form: str) -> None:
    layer, _ = taken(make_layers(engine, "sm_90a"), form, OLD)
    expected = layer.output()
    wide = torch.stack([X, X], -1)[..., 0]
    assert not wide.is_contiguous()
    assert torch.equal(layer.output(wide), expected)
    assert torch.equal(layer.output(X[:2], LOGITS[:2]), expected[:2])
    assert layer.output(X[:0], LOGITS[:0]).shape == X[:0].shape
    for x in (X.float(), X.half(), X.repeat(9, 1)):
        logits = LOGITS.repeat(9, 1)[: len(x)]
        with pytest.raises((DeepMoEError, ValueError, TypeError), match=r"^(x must|hidden)"):
            layer.output(x, logits)
