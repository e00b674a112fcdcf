"""`Router`: how a model chooses a token's experts from the logits of its router."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from .shape import require_int

Scoring = Literal[
    "softmax", "sigmoid", "sqrt_softplus", "tanh_sigmoid", "fast_softmax", "fast_sigmoid"
]
SCORINGS: tuple[str, ...] = get_args(Scoring)
MAX_GROUPS = 32  # a lane of a warp has a group
MAX_ROUTER_EXPERTS = 1024


@dataclass(frozen=True)
class Router:
    """A router's rule, from logits to experts and weights.

    Each logit gives a score. An expert's choice is its score plus its bias, if there is one. A
    token gets the experts with the largest choices, in that order; of equal ones the lower expert
    comes first. An expert's weight is its score, without the bias.

    Attributes:
        scoring: how a logit gives a score.

            - "softmax": over all experts.
            - "sigmoid".
            - "sqrt_softplus": sqrt(log(1 + exp(logit))). The sum is rounded, so scores below 0.01
              are coarse.
            - "tanh_sigmoid": the sigmoid as 0.5 + 0.5 tanh(0.5 logit). Weights are multiplied by
              scale before they are divided, as in vLLM's kernel of groups.
            - "fast_softmax", "fast_sigmoid": by approximate powers and quotients, as in SGLang's
              kernel. Choices of "fast_softmax" are logits, plus the bias.
        renormalize: whether weights are divided by their sum.
        num_groups: number of groups of neighbouring experts, all of one size; 1 to 32.
        num_chosen_groups: number of groups that a token's experts are from, 1 to num_groups. The
            value of a group is its largest choice, or, with a bias, the sum of its two largest.
        scale: finite factor of the weights, applied last.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that is not allowed.

    >>> Router("sigmoid", num_groups=8, num_chosen_groups=4, scale=2.5).scoring
    'sigmoid'
    """

    scoring: Scoring = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}; got {self.scoring!r}")
        if not isinstance(self.renormalize, bool):
            raise TypeError(f"renormalize must be a bool; got {self.renormalize!r}")
        for name, most, words in (
            ("num_groups", MAX_GROUPS, f"1 to {MAX_GROUPS}"),
            ("num_chosen_groups", self.num_groups, "1 to num_groups"),
        ):
            value = require_int(name, getattr(self, name), words)
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be {words}; got {value}")
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float)):
            raise TypeError(f"scale must be a finite number; got {self.scale!r}")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be a finite number; got {self.scale!r}")

    def check_sizes(self, num_experts: int, num_topk: int) -> None:
        """Look whether the rule is one for a model.

        Args:
            num_experts: logits of a token.
            num_topk: experts of a token.

        Raises:
            ValueError: it is not; the text says why.
        """
        if not 1 <= num_experts <= MAX_ROUTER_EXPERTS:
            raise ValueError(
                f"router_logits must be of 1 to {MAX_ROUTER_EXPERTS} experts; got {num_experts}"
            )
        if num_experts % self.num_groups:
            raise ValueError(
                f"router.num_groups must divide the {num_experts} experts of router_logits; got "
                f"{self.num_groups}"
            )
        most = num_experts // self.num_groups * self.num_chosen_groups
        if num_topk > most:
            raise ValueError(
                f"router must leave at least {num_topk} experts to choose from; got {most}"
            )
