"""Dispatch, experts and combine as kernels of their own, shared by all layers of the same sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deep_moe.heuristics.low_latency import LowLatencyShape
from deep_moe.split.grouped_experts import (
    GroupedExperts,
    grouped_experts_workspace_size,
)
from deep_moe.split.low_latency import LowLatencyAllToAll

from .kept_by_group import KeptByGroup
from .shared_buffers import LayerSizes, with_index
from .unsupported import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.activations import Activation


class Steps(NamedTuple):
    """What a layer runs in turn: all_to_all's dispatch, experts, all_to_all's combine."""

    all_to_all: LowLatencyAllToAll
    experts: GroupedExperts

    def reset(self) -> None:
        """Begin anew, on every rank, as after a failed call."""
        self.experts.reset()
        self.all_to_all.reset()

    def close(self) -> None:
        self.experts.close()
        self.all_to_all.close()


class SharedSteps(KeptByGroup[Steps]):
    """Steps by group, device, sizes, activation, number of tokens and target. Layers' calls run one
    after the other, so that one of each is enough."""

    def steps(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        sizes: LayerSizes,
        activation: Activation,
        max_tokens_per_rank: int,
        arch: str | None,
    ) -> Steps:
        """Every rank of `group` must call this with the same arguments, in the same order as the
        others: where the steps have to be made, ranks meet. Raises UnsupportedError, on all, if
        they cannot be made: for ranks whose GPUs are not linked."""
        self._close_those_of_destroyed_groups()
        device = with_index(device)
        key = (group, device, sizes, activation, max_tokens_per_rank, arch)
        if key not in self._kept:
            try:
                self._kept[key] = _make_steps(
                    group, device, sizes, activation, max_tokens_per_rank, arch
                )
            except ValueError as error:
                raise UnsupportedError(str(error)) from None
        return self._kept[key]


def _make_steps(
    group: ProcessGroup | None,
    device: torch.device,
    sizes: LayerSizes,
    activation: Activation,
    max_tokens_per_rank: int,
    arch: str | None,
) -> Steps:
    num_ranks = 1 if group is None else group.size()
    # Tensors that are made in inference mode cannot be written to outside of it.
    with torch.inference_mode(False):
        experts = GroupedExperts(
            _max_rows(sizes, num_ranks, max_tokens_per_rank),
            sizes.hidden,
            sizes.intermediate_hidden,
            sizes.num_experts // num_ranks,
            weights=sizes.weights,
            biases=sizes.biases,
            token_format=sizes.token_format,
            activation=activation,
            num_pool_tokens=sizes.num_pool_tokens,
            device=device,
            arch=arch,
        )
        all_to_all = LowLatencyAllToAll(
            group,
            max_tokens_per_rank,
            sizes.hidden,
            sizes.num_experts,
            sizes.num_topk,
            token_format=experts.token_format,
            device=device,
            arch=arch,
        )
    return Steps(all_to_all, experts)


def check_step_sizes(sizes: LayerSizes, num_ranks: int, max_tokens_per_rank: int) -> None:
    """Raise UnsupportedError for sizes that the kernels of the steps do not take."""
    try:
        LowLatencyShape(
            num_ranks=num_ranks,
            num_experts=sizes.num_experts,
            num_topk=sizes.num_topk,
            hidden=sizes.hidden,
            num_max_tokens_per_rank=max_tokens_per_rank,
            token_format=sizes.token_format,
        )
        grouped_experts_workspace_size(
            _max_rows(sizes, num_ranks, max_tokens_per_rank),
            sizes.hidden,
            sizes.intermediate_hidden,
            sizes.num_experts // num_ranks,
            weights=sizes.weights,
            token_format=sizes.token_format,
            num_pool_tokens=sizes.num_pool_tokens,
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedError(str(error)) from None


def _max_rows(sizes: LayerSizes, num_ranks: int, max_tokens_per_rank: int) -> int:
    """Of all experts of a rank: a token comes once to each of them that it names."""
    per_token = min(sizes.num_topk, sizes.num_experts // num_ranks)
    return num_ranks * max_tokens_per_rank * per_token
