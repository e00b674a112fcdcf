"""The config of a call, from everything that determines it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from deep_moe.heuristics.choices import load_key
from deep_moe.heuristics.tuning import TunedLayerKey
from deep_moe.targets import MegaMoEConfig, choose_config

from .tuning_tables import find_tuning

if TYPE_CHECKING:
    from deep_moe.activations import Activation
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.heuristics.tuning import Tuning


@dataclass(frozen=True)
class ConfigChooser:
    """Of the calls of one kind: arguments as `choose_config` has them. gpu: whose tuning tables
    come before the formula, None for those of no GPU."""

    shape: MoEShape
    arch: str
    num_sms: int
    activation: Activation
    fast_math: bool
    accumulate: bool
    overrides: tuple[tuple[str, int], ...]
    trace: bool
    gpu: str | None
    masks_ranks: bool = False

    def __call__(self, expected_tokens: int, is_uneven: bool = False) -> MegaMoEConfig:
        return choose_config(
            self.shape,
            expected_tokens,
            is_uneven=is_uneven,
            arch=self.arch,
            num_sms=self.num_sms,
            activation=self.activation,
            fast_math=self.fast_math,
            accumulate=self.accumulate,
            masks_ranks=self.masks_ranks,
            trace=self.trace,
            overrides=dict(self.overrides),
            tuning=self._tuning,
        )

    def key(self, expected_tokens: int) -> Hashable:
        """Of numbers of tokens with equal keys the configs are equal. It costs a small part of
        choosing one."""
        measurement = None
        if self._tuned is not None:
            tuning, layer = self._tuned
            measurement = tuning.measurement(layer, expected_tokens)
        # Measurements are kept, so that one has one id.
        return load_key(self.shape, expected_tokens), id(measurement)

    @property
    def _tuning(self) -> Tuning | None:
        return None if self.gpu is None else find_tuning(self.gpu)

    @cached_property
    def _tuned(self) -> tuple[Tuning, TunedLayerKey] | None:
        """The tables, and the layer in them, if they hold anything for it."""
        tuning = self._tuning
        if tuning is None:
            return None
        num_sms = dict(self.overrides).get("num_sms", self.num_sms)
        layer = TunedLayerKey.of(self.shape, device=tuning.device, arch=self.arch, num_sms=num_sms)
        return (tuning, layer) if tuning.measurements(layer) else None
