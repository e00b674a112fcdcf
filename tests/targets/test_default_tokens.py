"""Which tokens go with weights where nothing is said: what has a kernel on the target, and the same
for all that make buffers, lay out weights or read options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch

import deep_moe
import deep_moe.fused.emulated_ranks as emulated_ranks
import deep_moe.targets.registry as registry
from deep_moe.cli.layer_options import LayerOptions
from deep_moe.integrations.token_format import served_token_format
from deep_moe.split.grouped_experts import grouped_experts_workspace_size, token_formats_for
from deep_moe.targets import TARGETS, Target
from deep_moe.tokens import token_format
from deep_moe.trial.grouped_calls import random_case
from deep_moe.weights import WEIGHTS, default_token_format

SIZES = (4, 16, 2, 256, 128)  # experts, tokens, slots, hidden, intermediate
CPU = torch.device("cpu")
PAIRS = [(arch, weights) for arch in TARGETS for weights in WEIGHTS]


def of_buffer(target: Target, weights: str) -> str:
    with closing(
        deep_moe.get_symm_buffer_for_mega_moe(None, *SIZES, weights=weights, device=CPU)
    ) as own:
        return own.shape.token_format


def of_emulated_ranks(target: Target, weights: str) -> str:
    with closing(deep_moe.EmulatedRanks(2, *SIZES, weights=weights)) as own:
        return own.shape.token_format


def of_domains(target: Target, weights: str) -> str:
    """Float scales do not travel between domains: such a default is refused by its name."""
    usual = target.default_tokens(weights)
    if token_format(usual).has_float_scales:
        with pytest.raises(ValueError, match=f"between domains; got {usual!r}"):
            deep_moe.TwoLevelMoE(None, None, *SIZES, weights=weights, device=CPU)
        return usual
    with closing(deep_moe.TwoLevelMoE(None, None, *SIZES, weights=weights, device=CPU)) as own:
        return own.shape.token_format


def of_experts(target: Target, weights: str) -> str:
    with closing(deep_moe.GroupedExperts(8, 256, 128, 2, weights=weights, device=CPU)) as own:
        return own.token_format


def of_biases(target: Target, weights: str) -> str:
    """The order of their rows, whose format cannot be told from them."""
    biases = torch.arange(512.0)[None], torch.arange(256.0)[None]
    laid_out = deep_moe.transform_biases_for_mega_moe(*biases, weights=weights)
    usual = target.default_tokens(weights)
    same = deep_moe.transform_biases_for_mega_moe(*biases, weights=weights, token_format=usual)
    return usual if all(map(torch.equal, laid_out, same)) else "another"


def of_buffer_size(target: Target, weights: str) -> str:
    own = deep_moe.buffer_size(1, *SIZES, weights=weights, arch=target.name)
    usual = target.default_tokens(weights)
    same = deep_moe.buffer_size(1, *SIZES, weights=weights, token_format=usual)
    return usual if own == same else "another"


def of_workspace_size(target: Target, weights: str) -> str:
    own = grouped_experts_workspace_size(8, 256, 128, 2, weights=weights, arch=target.name)
    usual = target.default_tokens(weights)
    same = grouped_experts_workspace_size(8, 256, 128, 2, weights=weights, token_format=usual)
    return usual if own == same else "another"


ENTRIES: dict[str, Callable[[Target, str], str]] = {
    "get_symm_buffer_for_mega_moe": of_buffer,
    "buffer_size": of_buffer_size,
    "EmulatedRanks": of_emulated_ranks,
    "TwoLevelMoE": of_domains,
    "empty_weights_for_mega_moe": lambda target, weights: (
        deep_moe.empty_weights_for_mega_moe(2, 256, 128, weights=weights).token_format
    ),
    "transform_biases_for_mega_moe": of_biases,
    "GroupedExperts": of_experts,
    "token_formats_for": lambda target, weights: token_formats_for(weights, target.name)[0],
    "grouped_experts_workspace_size": of_workspace_size,
    "--weights": lambda target, weights: (
        LayerOptions(weights=weights).shape(1, 1, arch=target.name).token_format
    ),
    "adapters": lambda target, weights: served_token_format(weights, None, target.name, CPU),
    "trial": lambda target, weights: (
        random_case(target.name, (3,), weights, intermediate_hidden=128).shape.token_format
    ),
}


@pytest.mark.parametrize(("arch", "weights"), PAIRS)
def test_the_default_tokens_have_a_kernel_and_are_the_same_everywhere(
    monkeypatch: pytest.MonkeyPatch, arch: str, weights: str
) -> None:
    target = TARGETS[arch]
    for module in (registry, emulated_ranks):  # a CPU stands for the target
        monkeypatch.setattr(module, "EMULATED", target)
    usual = target.default_tokens(weights)
    assert usual in target.token_formats(weights)
    assert {name: entry(target, weights) for name, entry in ENTRIES.items()} == dict.fromkeys(
        ENTRIES, usual
    )


@pytest.mark.parametrize("weights", WEIGHTS)
def test_without_a_target_there_is_a_default_where_all_have_the_same(weights: str) -> None:
    defaults = {target.default_tokens(weights) for target in TARGETS.values()}
    if len(defaults) == 1:
        assert {default_token_format(weights)} == defaults
        return
    for call in (
        lambda: deep_moe.buffer_size(1, *SIZES, weights=weights),
        lambda: grouped_experts_workspace_size(8, 256, 128, 2, weights=weights),
    ):
        with pytest.raises(ValueError, match=f"token_format must be given with {weights} weights"):
            call()
