"""How transformers brings the experts of several ranks their tokens: the kernel does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.expert_parallel import AutoEP, EPImplementation

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
        num_tokens, hidden = hidden_states.shape
        share = -(-num_tokens // self.group.size())
        first = self.group.rank() * share
        rows = slice(first, first + share)
        own = run(
            path.layer,
            hidden_states[rows],
            top_k_index[rows],
            top_k_weights[rows],
            num_most_tokens=share,
        )
        # The last ranks' shares may be smaller, or empty.
        padded = own.new_zeros(share, hidden)
        padded[: own.shape[0]] = own
        gathered = own.new_empty(share * self.group.size(), hidden)
        _all_gather(gathered, padded, group=self.group)
        return gathered[:num_tokens]
