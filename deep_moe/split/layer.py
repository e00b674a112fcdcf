"""`EPLowLatencyAllToAllLayer`: the low-latency all-to-all under another layer's names.

A thin layer: what it adds are the names, and the choice of the all-to-all of one NVLink domain or
of several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep_moe.fused.checks import named_as, require_type
from deep_moe.heuristics.low_latency import NUM_HALVES
from deep_moe.heuristics.shape import require_int

from .domain_groups import DomainGroups, DomainPlace, make_domain_groups
from .handle import DispatchHandle
from .low_latency import LowLatencyAllToAll
from .two_level_low_latency import TwoLevelLowLatencyAllToAll

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.low_latency import Placement


@dataclass(frozen=True)
class DispatchMetaInfo:
    """What `EPLowLatencyAllToAllLayer.combine` needs of a dispatch.

    Attributes:
        recv_token_source_indices: int32 [experts per rank, world_size * max_m], each row's token on
            its source rank.
        recv_token_source_count_and_start: int64 [experts per rank, world_size], rows from a rank in
            the low half, the first of them in the high half.
    """

    recv_token_source_indices: torch.Tensor
    recv_token_source_count_and_start: torch.Tensor
    handle: DispatchHandle = field(repr=False)


class EPLowLatencyAllToAllLayer:
    """Dispatch with quantization on the way, and combine, for small batches, on one or more nodes.

    Args:
        max_m: most tokens per rank.
        hidden: values of a token, a multiple of 128.
        topk: slots of a token.
        online_quant_fp8: only True.
        rank: of this process in `group`.
        num_experts: experts of all ranks.
        local_world_size: ranks per node, a divisor of world_size. Nodes are NVLink domains; between
            several of them `TwoLevelLowLatencyAllToAll` has the tokens moved.
        world_size: ranks of `group`.
        fp8_gsize: values per scale: 16, 32, 64, 128, 256 or 512, a divisor of hidden.
        dtype: torch.bfloat16 or torch.float16, of tokens and of the experts' rows. Where bfloat16
            is said below, it is that.
        enable_profiling: let the kernels stamp their phases.
        group: the process group, by default all ranks; with world_size 1, none is needed. For
            several nodes None or what `make_domain_groups` gave, the groups of one layer or of
            many: without, the layer makes its own.
        zero_copy: make room for the experts' rows in symmetric memory, for `get_combine_buffer`.
            Without, no combine can have zero_copy.
        num_max_foreign_tokens: as of `TwoLevelLowLatencyAllToAll`; only for several nodes.
        placement: as of `LowLatencyAllToAll`.
        device: as of `LowLatencyAllToAll`.
        timeout_s: as of `LowLatencyAllToAll`.

    Attributes:
        phase: of the next dispatch, 0 and 1 in turn;
        call_count: dispatches so far.
    """

    def __init__(
        self,
        max_m: int,
        hidden: int,
        topk: int,
        online_quant_fp8: bool,
        rank: int,
        num_experts: int,
        local_world_size: int,
        world_size: int,
        fp8_gsize: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        enable_profiling: bool = False,
        *,
        group: ProcessGroup | DomainGroups | None = None,
        zero_copy: bool = True,
        num_max_foreign_tokens: int | None = None,
        placement: Placement = "ranks",
        device: torch.device | str | int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        require_type("online_quant_fp8", online_quant_fp8, bool, "True")
        if not online_quant_fp8:
            raise ValueError(
                "online_quant_fp8 must be True: tokens are quantized on the way; for those as they "
                'are, use LowLatencyAllToAll with token_format="bf16"'
            )
        num_nodes = num_nodes_of(local_world_size, world_size)
        check_place(group, rank, world_size)
        common: dict[str, Any] = {
            "token_format": "fp8_128",
            "group_size": fp8_gsize,
            "dtype": dtype,
            "zero_copy": zero_copy,
            "placement": placement,
            "device": device,
            "timeout_s": timeout_s,
            "enable_profiling": enable_profiling,
        }
        sizes = (max_m, hidden, num_experts, topk)
        with named_as({"group_size": "fp8_gsize"}):
            self._all_to_all = self._connected(
                group, num_nodes, world_size, sizes, num_max_foreign_tokens, common
            )
        self.rank = rank
        self.call_count = 0

    @staticmethod
    def _connected(
        group: ProcessGroup | DomainGroups | None,
        num_nodes: int,
        world_size: int,
        sizes: tuple[int, int, int, int],
        num_max_foreign_tokens: int | None,
        common: dict[str, Any],
    ) -> LowLatencyAllToAll | TwoLevelLowLatencyAllToAll:
        if num_nodes > 1:
            groups = groups_of_nodes("group", group, num_nodes)
            return TwoLevelLowLatencyAllToAll(
                *groups, *sizes, num_max_foreign_tokens=num_max_foreign_tokens, **common
            )
        if num_max_foreign_tokens is not None:
            raise ValueError(
                f"num_max_foreign_tokens must be None for one node; got {num_max_foreign_tokens}"
            )
        if isinstance(group, DomainGroups):
            group = group.domain
        elif group is None and world_size > 1:
            group = dist.group.WORLD
        return LowLatencyAllToAll(group, *sizes, **common)

    @property
    def phase(self) -> int:
        """Which half of the buffer the next dispatch takes."""
        return self.call_count % NUM_HALVES

    def dispatch(
        self,
        send_tokens: torch.Tensor,
        send_scales: None,
        topk_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DispatchMetaInfo]:
        """Send tokens to the ranks of their experts.

        Args:
            send_tokens: bfloat16 [tokens, hidden].
            send_scales: only None.
            topk_indices: int32 or int64 [tokens, topk].

        Returns recv_token float8_e4m3fn [experts per rank, world_size * max_m, hidden], recv_scale
        float32 [experts per rank, world_size * max_m, hidden / fp8_gsize], expert_recv_count int32
        [experts per rank], and what `combine` needs.
        """
        if send_scales is not None:
            raise ValueError("send_scales must be None: tokens are quantized on the way")
        result = self._all_to_all.dispatch(send_tokens, topk_indices)
        self.call_count += 1
        assert result.scales is not None
        meta = DispatchMetaInfo(result.src_info, result.layout_range, result.handle)
        return result.recv_x, result.scales, result.recv_count, meta

    def get_combine_buffer(self, dispatch_meta: DispatchMetaInfo) -> torch.Tensor:
        """The communication buffer, for a `combine` with zero_copy: bfloat16 [experts per rank,
        world_size * max_m, hidden], in which the experts write their rows. It is there once, for
        the newest dispatch. The layer must have been made with zero_copy=True.

        Args:
            dispatch_meta: what the newest dispatch returned.
        """
        require_type("dispatch_meta", dispatch_meta, DispatchMetaInfo, "what a dispatch returned")
        return self._all_to_all.get_combine_buffer(dispatch_meta.handle)

    def combine(
        self,
        send_tokens: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_weights: torch.Tensor,
        dispatch_meta: DispatchMetaInfo,
        zero_copy: bool = False,
    ) -> torch.Tensor:
        """The weighted sum of what the experts made of each token: bfloat16 [tokens, hidden].

        Args:
            send_tokens: bfloat16 [experts per rank, world_size * max_m, hidden].
            topk_indices: as given to the dispatch.
            topk_weights: float32 [tokens, topk].
            dispatch_meta: what the dispatch returned.
            zero_copy: send_tokens is what `get_combine_buffer` gave, on all ranks; without it rows
                are sent from wherever they are.
        """
        require_type("dispatch_meta", dispatch_meta, DispatchMetaInfo, "what a dispatch returned")
        return self._all_to_all.combine(
            send_tokens, topk_indices, topk_weights, dispatch_meta.handle, zero_copy=zero_copy
        )

    def dump_dispatch_trace(self) -> None:
        """Write the phases of this rank's newest dispatches to ./prof/ll_dispatch_RANK_{rank}.json,
        for ui.perfetto.dev: quant_and_put, count_put, wait, postprocess. Needs enable_profiling.
        """
        self._all_to_all.dump_dispatch_trace(f"prof/ll_dispatch_RANK_{self.rank}.json")

    def dump_combine_trace(self) -> None:
        """The same of combines, to ./prof/ll_combine_RANK_{rank}.json: copy_and_put, recv_wait,
        topk_reduce."""
        self._all_to_all.dump_combine_trace(f"prof/ll_combine_RANK_{self.rank}.json")

    def finalize(self) -> None:
        """Give the symmetric memory back."""
        self._all_to_all.close()

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, as of `LowLatencyAllToAll` and `TwoLevelLowLatencyAllToAll`.

        Args:
            ranks: numbers of the ranks to leave out.
        """
        self._all_to_all.mask_ranks(ranks)

    def check(self) -> None:
        """Raise what calls found, where the host did not wait for them."""
        self._all_to_all.check()


def num_nodes_of(local_world_size: int, world_size: int) -> int:
    """ValueError unless nodes have equally many ranks."""
    for name, value in (("local_world_size", local_world_size), ("world_size", world_size)):
        if require_int(name, value, "at least 1") < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if world_size % local_world_size:
        raise ValueError(
            f"local_world_size must divide world_size ({world_size}); got {local_world_size}"
        )
    return world_size // local_world_size


def check_place(group: ProcessGroup | DomainGroups | None, rank: int, world_size: int) -> None:
    """ValueError unless rank and world_size are those of the group."""
    if isinstance(group, DomainGroups):
        place = DomainPlace.of(group)
        own_rank = place.domain * place.num_ranks + place.rank
        num_ranks = place.num_domains * place.num_ranks
    elif group is None and world_size == 1:
        own_rank, num_ranks = 0, 1
    else:
        group = dist.group.WORLD if group is None else group
        own_rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if (num_ranks, own_rank) != (world_size, rank):
        raise ValueError(
            f"rank and world_size must be those of the group, {own_rank} and {num_ranks}; "
            f"got {rank} and {world_size}"
        )


def groups_of_nodes(
    name: str, group: ProcessGroup | DomainGroups | None, num_nodes: int
) -> DomainGroups:
    """As given, or new ones of all ranks. name: of the argument that they are."""
    if isinstance(group, DomainGroups):
        if DomainPlace.of(group).num_domains != num_nodes:
            raise ValueError(
                f"{name} must be of as many domains as there are nodes ({num_nodes}); got groups "
                f"of {DomainPlace.of(group).num_domains}"
            )
        return group
    if group is not None and group is not dist.group.WORLD:
        raise ValueError(
            f"{name} must be all ranks or what make_domain_groups gave, for several nodes; got "
            "another group"
        )
    return make_domain_groups(num_nodes)
