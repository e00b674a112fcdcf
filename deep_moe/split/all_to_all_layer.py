"""`EPAll2AllLayer`: the all-to-all for many tokens under another layer's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.fused.checks import check_contiguous, check_tensor, named_as, require_type
from deep_moe.fused.peers import gather_objects
from deep_moe.heuristics.shape import require_int

from .layer import check_place, groups_of_nodes, num_nodes_of
from .throughput import AllToAll, AllToAllHandle
from .two_level_throughput import TwoLevelAllToAll

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .domain_groups import DomainGroups

_NAMES = {
    "x": "input",
    "y": "input",
    "topk_idx": "exp_indices",
    "topk_weights": "weight",
    "max_tokens_per_rank": "max_tokens",
    "num_experts": "num_tot_experts",
    "num_topk": "topk",
    "num_sms": "num_sm",
}


@dataclass(frozen=True)
class EPAllToAllLayoutDesc:
    """What `EPAll2AllLayer.combine` needs of a dispatch.

    Attributes:
        num_dispatch_token_cur_rank: tokens that this rank has sent.
        num_recv_tokens: rows that it got.
        topk_indices_tensor: [tokens, topk], as given to the dispatch.
        handle: of the `AllToAll` below.
    """

    num_dispatch_token_cur_rank: int
    num_recv_tokens: int
    topk_indices_tensor: torch.Tensor
    handle: AllToAllHandle = field(repr=False)


class EPAll2AllLayer:
    """Dispatch and combine of tokens as they are, for larger batches, on one node or several.

    Args:
        ep_group: the process group; None for one rank alone. For several nodes all ranks, or what
            `make_domain_groups` gave.
        max_tokens: most tokens per rank.
        hidden: values of a token, a multiple of 128.
        topk: slots of a token.
        rank: of this process.
        num_tot_experts: experts of all ranks.
        local_world_size: ranks per node, a divisor of world_size. Nodes are NVLink domains.
        world_size: ranks of all nodes.
        dtype: torch.bfloat16 or torch.float16.
        weight_dtype: of routing weights, only torch.float32.
        num_sm: CTAs of the kernels.
        enable_local_combine: taken for that layer's signature. Sums of a node's experts are always
            made there before they travel to another node.
        use_aot: taken for that layer's signature; `deep-moe warmup` compiles kernels ahead.
        max_recv_tokens: most rows that a rank gets in one call, by default all that can come:
            there is memory for them from the beginning. More are an error.
        device: as of `AllToAll`.
        timeout_s: as of `AllToAll`.
    """

    def __init__(
        self,
        ep_group: ProcessGroup | DomainGroups | None,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.float32,
        num_sm: int | None = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        max_recv_tokens: int | None = None,
        device: torch.device | str | int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        for name, flag in {
            "enable_local_combine": enable_local_combine,
            "use_aot": use_aot,
        }.items():
            require_type(name, flag, bool, "a bool")
        if weight_dtype is not torch.float32:
            raise ValueError(f"weight_dtype must be torch.float32; got {weight_dtype}")
        num_nodes = num_nodes_of(local_world_size, world_size)
        check_place(ep_group, rank, world_size)
        allowed = "at least 1"
        for name, size in {"max_tokens": max_tokens, "topk": topk}.items():
            if require_int(name, size, allowed) < 1:
                raise ValueError(f"{name} must be {allowed}; got {size}")
        if max_recv_tokens is None:
            max_recv_tokens = world_size * max_tokens * topk
        sizes = (max_tokens, hidden, num_tot_experts, topk)
        common: dict[str, Any] = {
            "max_recv_rows": max_recv_tokens,
            "expert_alignment": 1,
            "dtype": dtype,
            "num_sms": num_sm,
            "device": device,
            "timeout_s": timeout_s,
        }
        self._all_to_all: AllToAll | TwoLevelAllToAll
        with named_as({**_NAMES, "max_recv_rows": "max_recv_tokens"}):
            if num_nodes > 1:
                groups = groups_of_nodes("ep_group", ep_group, num_nodes)
                self._all_to_all = TwoLevelAllToAll(*groups, *sizes, **common)
            else:
                group = ep_group.domain if isinstance(ep_group, tuple) else ep_group
                self._all_to_all = AllToAll(group, *sizes, **common)
        self._group = ep_group
        self.rank = rank

    def dispatch(
        self,
        input: torch.Tensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
        """Send tokens to the ranks of their experts.

        Args:
            input: [tokens, hidden] of dtype.
            exp_indices: int32 or int64 [tokens, topk].
            weight: float32 [tokens, topk], sent along; on all ranks or none.
            full_scatter_indices: only None.

        Returns the rows [received, hidden] by local expert, a row for each slot; their weights,
        float32 [received], or None; and what `combine` needs. The host waits to learn how many rows
        there are.
        """
        if full_scatter_indices is not None:
            raise ValueError("full_scatter_indices must be None: rows have a place of their own")
        with named_as(_NAMES):
            received, handle = self._all_to_all.dispatch(input, exp_indices, topk_weights=weight)
        num_rows = int(received.num_rows)
        rows, weights = received.x[:num_rows], received.topk_weights
        layout = EPAllToAllLayoutDesc(input.shape[0], num_rows, exp_indices, handle)
        return rows, None if weights is None else weights[:num_rows], layout

    def combine(
        self, input: torch.Tensor, ep_a2a_layout_desc: EPAllToAllLayoutDesc
    ) -> torch.Tensor:
        """The sum of what the experts made of each token: [tokens, hidden] of dtype. A dispatch has
        to come between two combines.

        Args:
            input: [received, hidden], rows where the dispatch had them, times their weights.
            ep_a2a_layout_desc: what the dispatch returned.
        """
        layout = ep_a2a_layout_desc
        require_type("ep_a2a_layout_desc", layout, EPAllToAllLayoutDesc, "what a dispatch returned")
        layer = self._all_to_all
        size = (layout.num_recv_tokens, layer.shape.hidden)
        check_tensor("input", input, layer.dtype, size, layer.device)
        check_contiguous("input", input)
        rows = layer.get_combine_buffer()
        rows[: layout.num_recv_tokens].copy_(input)
        with named_as(_NAMES):
            return layer.combine(rows, layout.handle)

    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Wait until all ranks are here, and what is on the stream is done.

        Args:
            stream: a torch.cuda.Stream, by default the current one; not looked at on a CPU.
            intra_node_only: ranks of this node only.
        """
        device = self._all_to_all.device
        if device.type == "cuda":
            (torch.cuda.current_stream(device) if stream is None else stream).synchronize()
        for group in self._groups(intra_node_only):
            gather_objects(None, group)

    def _groups(self, intra_node_only: bool) -> list[ProcessGroup]:
        layer = self._all_to_all
        if isinstance(layer, TwoLevelAllToAll):
            domain, cross = layer.groups
            groups = [domain] if intra_node_only else [domain, cross]
        elif isinstance(self._group, tuple):
            groups = [self._group.domain]
        else:
            groups = [self._group]
        return [group for group in groups if group is not None]

    def finalize(self) -> None:
        """Give the symmetric memory back."""
        self._all_to_all.close()
