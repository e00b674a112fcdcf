"""Which config a call gets, by all that it follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deep_moe.heuristics.config import MegaMoEConfig, choose_config

from .tuning_tables import find_tuning

if TYPE_CHECKING:
    from deep_moe.activations import Activation
    from deep_moe.heuristics.shape import MoEShape


@dataclass(frozen=True)
class ConfigChooser:
    """Of the calls of one kind: arguments as `choose_config` has them. gpu: whose tuning tables
    come before the formula, None for those of no GPU."""

    shape: MoEShape
    arch: str
    num_sms: int
    activation: str | Activation
    activation_clamp: float | None
    fast_math: bool
    accumulate: bool
    overrides: tuple[tuple[str, int], ...]
    trace: bool
    gpu: str | None

    def __call__(self, expected_tokens: int, is_uneven: bool = False) -> MegaMoEConfig:
        return choose_config(
            self.shape,
            expected_tokens,
            is_uneven=is_uneven,
            arch=self.arch,
            num_sms=self.num_sms,
            activation=self.activation,
            activation_clamp=self.activation_clamp,
            fast_math=self.fast_math,
            accumulate=self.accumulate,
            trace=self.trace,
            overrides=dict(self.overrides),
            tuning=None if self.gpu is None else find_tuning(self.gpu),
        )
