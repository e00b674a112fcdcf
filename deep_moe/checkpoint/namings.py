"""How models name the tensors of their experts, up to the suffixes, which are the formats'
(forms.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from deep_moe.errors import CheckpointError

_ROUTED, _SHARED = "experts.{expert}", "shared_experts"


@dataclass(frozen=True)
class ExpertNaming:
    """Tensors of its own for each expert and projection.

    Args:
        gate: with {layer} and {expert}; None where experts have none.
        up: with {layer} and {expert}.
        down: with {layer} and {expert}.
        suffixes: what is appended for the weights, "weight", and for what else the format has;
            None: whatever the known formats append.
        bias: the suffix of biases. Shared experts have "shared_experts" in place of
            "experts.{expert}".
    """

    gate: str | None
    up: str
    down: str
    suffixes: Mapping[str, str] | None = None
    bias: str = ".bias"

    @property
    def own(self) -> list[str]:
        """Names of gate, if there is one, up and down, as they were given."""
        return [own for own in (self.gate, self.up, self.down) if own is not None]

    def modules(self, layer: int, expert: int | str) -> list[str]:
        """Of gate, up and down, without suffixes.

        Args:
            layer: number of the layer.
            expert: number of the expert, or a pattern in its place.
        """
        return [own.format(layer=layer, expert=expert) for own in self.own]

    def shared_modules(self, layer: int) -> list[str]:
        """The same of the shared experts.

        Args:
            layer: number of the layer.
        """
        for own in self.own:
            if _ROUTED not in own:
                raise CheckpointError(
                    f"naming must contain {_ROUTED!r}, in place of which {_SHARED!r} names shared "
                    f"experts; got {own!r}"
                )
        routed = (own.replace(_ROUTED, _SHARED) for own in self.own)
        return [own.format(layer=layer) for own in routed]

    def beginnings(self, layer: int) -> tuple[str, ...]:
        """Of all names of the layer's experts, up to their number.

        Args:
            layer: number of the layer.
        """
        modules = self.modules(layer, "\0")
        return tuple(sorted({module.partition("\0")[0] for module in modules}))

    def numbers(self, layer: int, names: list[str]) -> Iterator[tuple[str, int | None]]:
        """Names of the layer's experts among `names`, with the expert's number. None: no number
        where one is due.

        Args:
            layer: number of the layer.
            names: names of tensors in the checkpoint.
        """
        beginnings = self.beginnings(layer)
        number = re.compile(r"(0|[1-9][0-9]{0,8})(?![0-9])")
        for name in names:
            for start in beginnings:
                if name.startswith(start):
                    match = number.match(name, len(start))
                    if match is not None or start.endswith("."):
                        yield name, None if match is None else int(match[1])
                    break


@dataclass(frozen=True)
class StackedNaming:
    """All experts of a layer in one tensor per projection: [experts, rows, ...].

    Args:
        gate_up: with {layer}.
        down: with {layer}.
        suffixes: what is appended for the weights, "weight", and for what else the format has.
        interleaved: rows of gate and up alternate, as opposed to all of gate before all of up, in
            biases, too.
        bias: the suffix of these, [experts, rows].
    """

    gate_up: str
    down: str
    suffixes: Mapping[str, str]
    bias: str
    interleaved: bool

    def modules(self, layer: int) -> list[str]:
        """Of both projections, without suffixes.

        Args:
            layer: number of the layer.
        """
        return [self.gate_up.format(layer=layer), self.down.format(layer=layer)]

    def beginnings(self, layer: int) -> tuple[str, ...]:
        """Of all names of the layer's experts.

        Args:
            layer: number of the layer.
        """
        return tuple(sorted({own[: own.rfind(".") + 1] or own for own in self.modules(layer)}))


def _numbered(layer: str, experts: str = "ffn.experts") -> ExpertNaming:
    prefix = f"{layer}.{{layer}}.{experts}.{{expert}}."
    return ExpertNaming(gate=prefix + "w1", up=prefix + "w3", down=prefix + "w2")


def _separate(layer: str, experts: str = "mlp.experts", *, has_gate: bool = True) -> ExpertNaming:
    prefix = f"{layer}.{{layer}}.{experts}.{{expert}}."
    gate = prefix + "gate_proj" if has_gate else None
    return ExpertNaming(gate=gate, up=prefix + "up_proj", down=prefix + "down_proj")


_STACKED = "model.layers.{layer}.mlp.experts."

DEFAULT_NAMING = _separate("model.layers")

# By name. "numbered": DeepSeek-V4. "mtp": the layers behind the others that predict further tokens,
# counted from 0. "multimodal" and "language_model" behind a name: the same in a model that has a
# language model as one of its parts. "nemotron": experts without gate. "step": Step-3.
NamingName = Literal[
    "experts",
    "experts_multimodal",
    "experts_language_model",
    "mixtral",
    "mixtral_language_model",
    "nemotron",
    "step",
    "numbered",
    "numbered_model",
    "mtp",
    "mtp_model",
    "stacked",
    "stacked_plain",
]
NAMINGS: dict[NamingName, ExpertNaming | StackedNaming] = {
    "experts": DEFAULT_NAMING,
    "experts_multimodal": _separate("model.language_model.layers"),
    "experts_language_model": _separate("language_model.model.layers"),
    "mixtral": _numbered("model.layers", "block_sparse_moe.experts"),
    "mixtral_language_model": _numbered("language_model.model.layers", "block_sparse_moe.experts"),
    "nemotron": _separate("backbone.layers", "mixer.experts", has_gate=False),
    "step": _separate("model.layers", "moe.experts"),
    "numbered": _numbered("layers"),
    "numbered_model": _numbered("model.layers"),
    "mtp": _numbered("mtp"),
    "mtp_model": _numbered("model.mtp"),
    "stacked": StackedNaming(
        _STACKED + "gate_up_proj",
        _STACKED + "down_proj",
        {"weight": "_blocks", "scale": "_scales"},
        bias="_bias",
        interleaved=True,
    ),
    "stacked_plain": StackedNaming(
        _STACKED + "gate_up_proj",
        _STACKED + "down_proj",
        {"weight": ""},
        bias="_bias",
        interleaved=False,
    ),
}
