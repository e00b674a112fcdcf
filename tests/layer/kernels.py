"""Compiles what tests will need, on all CPUs at once: one by one takes longer than to run it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deep_moe.fused.deployment import build_deployment
from deep_moe.fused.tuning_tables import find_tuning
from deep_moe.heuristics import MoEShape
from deep_moe.targets import MegaMoEConfig, choose_config, target_of_device
from tests.pairs import has_pair


def gpu_has_pair(pair: str) -> bool:
    """Whether there is a kernel of a pair of formats for this machine's GPUs."""
    return has_pair(target_of_device(torch.device("cuda")).name, pair)


def gpu_config(
    shape: MoEShape,
    num_tokens: int,
    *,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> MegaMoEConfig:
    """What a call with these arguments takes on this machine's GPUs."""
    device = torch.device("cuda")
    return choose_config(
        shape,
        num_tokens,
        arch=target_of_device(device).name,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        activation_clamp=activation_clamp,
        fast_math=fast_math,
        tuning=find_tuning(torch.cuda.get_device_name(device)),
    )


def compile_all(configs: Iterable[MegaMoEConfig]) -> None:
    """Into the cache folder, where every process of the tests finds them."""
    different = list(dict.fromkeys(configs))
    if different:
        build_deployment([(0, 0, config) for config in different])
