"""Damage drawn at random, from seeds, to the tensors of an engine's layer of experts, before an
adapter takes it. The adapter gives the values that the layer had, bit for bit, or leaves it to the
engine for a reason that names what was damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..checkpoint.test_drawn_damage import DTYPES, SHAPES

# Either the values are as they were, or the reason has one of these words; without words, the
# former.
Words = list[str]


class Naming(NamedTuple):
    """How an engine names tensors. layers: what the names of each layer's begin with. scales: what
    names of scales have. added: what tensors may have behind a layer's name that nobody knows."""

    layers: Sequence[str]
    scales: str
    added: Sequence[str]


class Damaged:
    """A layer, and what is drawn for it.

    names: of its tensors. also: words of a reason that names no tensor.
    """

    def __init__(
        self,
        module: Any,
        names: Sequence[str],
        naming: Naming,
        seed: int,
        also: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.naming = naming
        self.drawn = random.Random(seed)
        self.names = sorted(names)
        self.name = self.drawn.choice(self.names)
        self.also = [*also]

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.module, name).detach()
        return tensor

    def set(self, name: str, tensor: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        old = getattr(self.module, name, None)
        if old is not None:  # the engine's attributes, such as its loader
            vars(parameter).update(vars(old))
        setattr(self.module, name, parameter)

    def is_scale(self, name: str) -> bool:
        return self.naming.scales in name

    def is_exponent(self, name: str) -> bool:
        tensor = self.tensor(name)
        return self.is_scale(name) and tensor.dtype in (torch.uint8, torch.float8_e8m0fnu)

    def of_layers(self) -> list[str]:
        """The tensor alone, or that of both layers."""
        if self.drawn.random() < 0.5:
            return [self.name]
        first, second = self.naming.layers
        rest = self.name.removeprefix(first).removeprefix(second)
        return [layer + rest for layer in self.naming.layers]

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Words:
        for name in self.of_layers():
            self.set(name, change(self.tensor(name)))
        return [*self.naming.layers, *self.also]


def missing(own: Damaged) -> Words:
    delattr(own.module, own.name)
    if own.drawn.random() < 0.5:
        setattr(own.module, own.name, None)
    return [own.name]


def converted(own: Damaged) -> Words:
    """Of another size, for one of the same might be a type that the format takes, too: as may bytes
    where a float stands for an exponent."""
    tensor = own.tensor(own.name)
    may_be_exponent = own.is_scale(own.name) and tensor.dtype == torch.float32
    bytes_ = (torch.uint8, torch.float8_e8m0fnu) if may_be_exponent else ()
    size = tensor.element_size()
    dtype = own.drawn.choice([d for d in DTYPES if d.itemsize != size and d not in bytes_])
    return own.change(lambda tensor: tensor.float().to(dtype))


def read_as_another_type(own: Damaged) -> Words:
    tensor = own.tensor(own.name)
    same = [each for each in DTYPES if each.itemsize == tensor.element_size()]
    # Bytes are E2M1's, or an exponent's, whether they have a sign or not.
    same = [each for each in same if each not in (torch.bool, tensor.dtype)]
    if tensor.dtype in (torch.int8, torch.uint8, torch.float8_e8m0fnu):
        same = [torch.float8_e5m2]
    if own.is_scale(own.name):  # checkpoints of integers may have either
        same = [each for each in same if each not in (torch.float16, torch.bfloat16)]
    dtype = own.drawn.choice(same)
    return own.change(lambda tensor: tensor.view(dtype))


def reshaped(own: Damaged) -> Words:
    tensor = own.tensor(own.name)
    for change in own.drawn.sample(SHAPES, len(SHAPES)):
        try:
            if change(tensor).shape != tensor.shape:
                break
        except (RuntimeError, IndexError):
            continue

    def made(tensor: torch.Tensor) -> torch.Tensor:
        try:
            return change(tensor).clone()
        except (RuntimeError, IndexError):
            return tensor

    return own.change(made)


def no_number(own: Damaged) -> Words:
    """In a tensor of scales, if there is one in floats."""
    for name in own.names:
        tensor = own.tensor(name)
        if own.is_scale(name) and tensor.dtype == torch.float32:
            changed = tensor.clone()
            # Those of integers' groups may have any sign.
            is_float = any(
                own.tensor(other).dtype.itemsize == 1 and own.tensor(other).is_floating_point()
                for other in own.names
            )
            is_signed = tensor.dim() == 3 and not is_float
            wrong = own.drawn.choice(
                [torch.nan, torch.inf, -torch.inf, torch.nan if is_signed else -1.0]
            )
            changed.view(-1)[own.drawn.randrange(changed.numel())] = wrong
            own.set(name, changed)
            break
    return [*own.naming.layers, "expert"]


def added(own: Damaged) -> Words:
    """A tensor of a name that says that it belongs to the weights."""
    name = own.drawn.choice(own.naming.layers) + own.drawn.choice(own.naming.added)
    if own.drawn.random() < 0.5:
        own.set(name, torch.ones(8, 3))
    else:
        own.module.register_buffer(name, torch.ones(8, 3))
    return [name]


def on_meta(own: Damaged) -> Words:
    return own.change(lambda tensor: tensor.to("meta"))


def freed(own: Damaged) -> Words:
    """As FSDP frees what it gathers."""

    def free(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        made.untyped_storage().resize_(0)
        return made

    return own.change(free)


def strided(own: Damaged) -> Words:
    """Other memory, the same values."""
    own.change(lambda tensor: torch.stack([tensor, tensor], -1)[..., 0])
    return []


DAMAGES = (
    *(missing, converted, read_as_another_type, reshaped, no_number, added, on_meta, freed),
    strided,
)


def names_one_of(words: Words, reason: str) -> str | None:
    """What is wrong with a reason, if anything."""
    if any(word in reason for word in words):
        return None
    return f"the reason names none of {words}: {reason}"
