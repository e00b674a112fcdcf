"""How transformers brings the experts of several ranks their tokens: the kernel does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.expert_parallel import AutoEP, EPImplementation

from ..shares import on_own_share
from .experts import NAME, decide_first, path_of, run, set_group

# Its name from PyTorch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class DeepMoEExpertParallel(EPImplementation):
    """`DistributedConfig(ep_implementation="deep_moe")`.

    Ranks with tokens of their own call the kernel with them. Ranks that all hold the same tokens
    call it with a share each, and gather the results. Experts that the kernel cannot run go the way
    that transformers chooses itself.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        chosen = getattr(experts.config, "_experts_implementation", None)
        if chosen != NAME:
            raise ValueError(
                f'ep_implementation="{NAME}" goes with experts_implementation="{NAME}"; '
                f"got experts_implementation={chosen!r}"
            )
        self.experts = experts
        self.engine = AutoEP(experts, ep_mesh, tp_mesh)
        self.group = ep_mesh.get_group()
        set_group(experts, self.group)
        decide_first(experts)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        path = path_of(self.experts, self.group, top_k_index.shape[-1])
        if path.layer is None:
            return self.engine(hidden_states, top_k_index, top_k_weights)
        if not self.shares_batch:
            return run(path.layer, hidden_states, top_k_index, top_k_weights)
        num_sharers = self.group.size()
        share = -(-hidden_states.shape[0] // num_sharers)
        output = torch.empty_like(hidden_states)
        on_own_share(
            self,
            num_sharers,
            output,
            hidden_states,
            top_k_index,
            top_k_weights,
            lambda own, *call: own.copy_(run(path.layer, *call, num_most_tokens=share)),
        )
        return output

    @property
    def rank_in_group(self) -> int:
        return self.group.rank()

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """What ranks give, behind each other along the first axis."""
        of_all = own.new_empty(own.shape[0] * self.group.size(), *own.shape[1:])
        _all_gather(of_all, own, group=self.group)
        return of_all
