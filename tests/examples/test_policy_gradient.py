"""examples/policy_gradient.py: the ratio of an action's probabilities is 1 to the last bit."""

from __future__ import annotations

import torch

from examples import policy_gradient


def test_every_ratio_is_exactly_one_and_the_policy_learns() -> None:
    steps = policy_gradient.learn(4, torch.device("cpu"))
    assert {step.ratio for step in steps} == {(1.0, 1.0)}
    assert min(step.error for step in steps) > 1e-4  # of a forward pass that is not serving's
    assert steps[-1].reward > 2 * steps[0].reward
