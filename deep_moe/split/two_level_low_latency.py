"""`TwoLevelLowLatencyAllToAll`: the low-latency all-to-all over several NVLink domains.

Between domains `torch.distributed` moves rows; inside each of them the kernels of
`LowLatencyAllToAll` do the rest. docs/two-level.md says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deep_moe.described import described_as
from deep_moe.fused.checks import (
    check_contiguous,
    check_tensor,
    refuse_gradients,
    require_type,
)
from deep_moe.heuristics.low_latency import MAX_RELAYED_TOKENS
from deep_moe.tensor_memory import refuse_shared_memory

from .domain_groups import (
    NUM_TRANSPORT_SMS,
    DomainGroups,
)
from .domain_relay import RelayedCall
from .domain_transport import TransportName
from .handle import Dispatched, DispatchHandle, own_handle
from .low_latency import LowLatencyAllToAll
from .split_layer import name_of_dtype
from .two_level_layer import TwoLevelLayer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.low_latency import Placement
    from deep_moe.tokens import TokenFormatName


@dataclass(frozen=True, eq=False, repr=False)
class TwoLevelDispatchHandle(DispatchHandle):
    """inside: of the all-to-all of the domain."""

    inside: DispatchHandle
    relayed: RelayedCall


@described_as(LowLatencyAllToAll)
class TwoLevelLowLatencyAllToAll(TwoLevelLayer):
    """`LowLatencyAllToAll` whose ranks are in several NVLink domains: the same calls with the same
    results, over the ranks of all domains.

    Other arguments and errors are as of `LowLatencyAllToAll`.

    Args:
        domain_group: as of `TwoLevelMoE`.
        cross_group: as of `TwoLevelMoE`.
        num_max_tokens_per_rank: most own tokens of one call.
        num_experts: of all domains together: domain d owns the d-th part, and its rank r the r-th
            part of that. Each domain has at least num_topk.
        token_format: as of `LowLatencyAllToAll`; so tokens travel between domains, too.
        num_max_foreign_tokens: most tokens that a rank takes from all other domains together in one
            call; each domain has its share, rounded up. By default as many as can come. Own and
            foreign ones together are at most 4096. More is a ForeignTokensError on all ranks: on
            CPUs of the dispatch, on GPUs, where the host does not wait, of `check()`, and what that
            call's combine gives is NaN on all ranks.
        num_transport_sms: SMs of a GPU that kernels leave free for the transport, as of
            `TwoLevelMoE`.
        transport: as of `TwoLevelMoE`.
        num_sms: as of `LowLatencyAllToAll`; by default all SMs but num_transport_sms.
        timeout_s: limit of the kernels' waits for ranks of the domain, and of the host's for other
            domains.

    Ranks have the number domain * R + r, where R is the number of ranks of a domain. A token goes
    once to each other domain of its experts, to the rank r there, as it is quantized here. Every
    call sends the same number of rows to each domain, so a CUDA graph can capture it.

    The sums of a token's experts in one domain are rounded to bfloat16 before they are added in the
    order of the domains, in float32, and rounded once more. A token whose experts live in one
    domain has the bits that one large domain would give it.

    Attributes:
        rank: of this process among the ranks of all domains.
        nbytes: what this rank gives to the layer.
    """

    _most_tokens = "num_max_tokens_per_rank"
    _may_return = True
    _inside: LowLatencyAllToAll

    def __init__(
        self,
        domain_group: ProcessGroup | None,
        cross_group: ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        token_format: TokenFormatName = "fp8_128",
        zero_copy: bool = False,
        scales_by_column: bool = False,
        placement: Placement = "ranks",
        group_size: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        num_max_foreign_tokens: int | None = None,
        num_transport_sms: int = NUM_TRANSPORT_SMS,
        transport: TransportName = "torch",
        device: torch.device | str | int | None = None,
        num_sms: int | None = None,
        timeout_s: float | None = None,
        arch: str | None = None,
        checked: bool | None = None,
        schedule_seed: int = 0,
        enable_profiling: bool = False,
    ) -> None:
        self._join(
            LowLatencyAllToAll,
            domain_group,
            cross_group,
            {
                "num_experts": num_experts,
                "num_topk": num_topk,
                "hidden": hidden,
                "num_max_tokens_per_rank": num_max_tokens_per_rank,
                "num_max_foreign_tokens": num_max_foreign_tokens,
                "token_format": token_format,
                "group_size": group_size,
                "dtype": name_of_dtype(dtype),
            },
            MAX_RELAYED_TOKENS,
            equal={"zero_copy": zero_copy, "placement": placement},
            num_transport_sms=num_transport_sms,
            transport=transport,
            device=device,
            num_sms=num_sms,
            timeout_s=timeout_s,
            is_numbered=True,
            relays_tokens=True,
            scales_by_column=scales_by_column,
            group_size=group_size,
            dtype=dtype,
            arch=arch,
            checked=checked,
            schedule_seed=schedule_seed,
            enable_profiling=enable_profiling,
        )
        # What receives, by the number of the dispatch.
        self._pending: dict[int, Callable[[], None]] = {}

    @described_as(LowLatencyAllToAll.dispatch)
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        *,
        receive: bool = True,
        expert_totals: torch.Tensor | None = None,
        wait_cycles: torch.Tensor | None = None,
    ) -> Dispatched:
        """Send every token to the ranks of its experts, and receive those of the local ones.

        Other arguments are as of `LowLatencyAllToAll.dispatch`.

        Args:
            x: bfloat16 [tokens, hidden]; tokens may be 0 and may differ between ranks.
            receive: False only sends to other domains. The results are written by
                `receive(handle)`, which must come before the next dispatch.
            wait_cycles: int64 [ranks]; the call adds the clocks of an SM until that rank's tokens
                had come, for ranks of this domain.

        What is returned is as of `LowLatencyAllToAll.dispatch`, with N = ranks of all domains *
        num_max_tokens_per_rank, or less with num_max_foreign_tokens. An expert's rows lie by their
        source rank's number in its domain; of those with the same, the ones of this domain first.
        `layout_range` says where each rank's rows begin.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            ForeignTokensError: other domains have more tokens for a rank than it has room for.
            LostDomainError: a domain does not answer.
            MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes
                the object usable again. On a GPU the next call raises it.
            MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is
                missing. It is a MegaMoEError.
            CompileError: NVRTC refused the kernel.
        """
        self._relay.transport.raise_if_failed()
        self._check_tokens(x, self.dtype)
        self._check_routing(topk_idx, x.shape[0])
        statistics = {"expert_totals": expert_totals, "wait_cycles": wait_cycles}
        waited = self._cycles_inside(wait_cycles)
        if expert_totals is not None:
            of_experts = (self._inside.shape.num_experts_per_rank,)
            check_tensor("expert_totals", expert_totals, torch.int32, of_experts, self.device)
        refuse_shared_memory(statistics, {"x": x, "topk_idx": topk_idx})
        if torch.is_grad_enabled():
            refuse_gradients(x=x)
        self._refuse_early("dispatch must follow receive(handle) of the dispatch before it", 1)
        self._refuse_early(
            "dispatch must follow receive(handle) of the combine two calls before it", 2
        )
        with torch.no_grad():
            relayed, arrive = self._relay.begin(x, topk_idx)
            listed = slice(self.shape.num_listed_tokens)
            relay = self._relay
            launch, inside = self._inside.prepare_dispatch(
                relay.x[listed],
                relayed.topk_idx,
                x_sf=relay.x_sf if relay.x_sf.numel() else None,
                origins=relay.numbers,
                expert_totals=expert_totals,
                wait_cycles=waited,
            )
            size = (inside.recv_count.shape[0], self.shape.num_all_ranks)
            ranges = torch.empty(size, dtype=torch.int64, device=self.device)
            handle = TwoLevelDispatchHandle(
                self,
                inside.handle.call,
                x.shape[0],
                inside.handle.call_idx,
                inside.recv_count,
                inside.handle.src_slots,
                ranges,
                inside.handle.sent_rows,
                inside=inside.handle,
                relayed=relayed,
            )

            def receive_tokens() -> None:
                arrive()
                with self._relay.transport.naming_the_domain():
                    self._inside.run(launch)
                self._find_ranges(inside, ranges)

            if receive:
                receive_tokens()
            else:
                self._pending[handle.call.number] = receive_tokens
        return inside._replace(layout_range=ranges, handle=handle)

    @described_as(LowLatencyAllToAll.combine, errors_of=dispatch)
    def combine(
        self,
        y: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: DispatchHandle,
        out: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        receive: bool = True,
        again: bool = False,
        wait_cycles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring the experts' rows back and add them: bfloat16 [tokens, hidden].

        Other arguments are as of `LowLatencyAllToAll.combine`, errors as of `dispatch`.

        Args:
            receive: False sends the rows inside this domain, and the routing weights to the others;
                `receive(handle)` does the rest.
            wait_cycles: as of `dispatch`.
        """
        self._relay.transport.raise_if_failed()
        own = own_handle(handle, TwoLevelDispatchHandle, self)
        self._refuse_pending(own, "combine")
        inside = self._inside.shape
        rows = (inside.num_experts_per_rank, inside.num_rows_per_expert, self.shape.hidden)
        check_tensor("y", y, self.dtype, rows, self.device)
        self._check_routing(topk_idx, own.num_tokens)
        self._check_weights(topk_weights, own.num_tokens)
        if torch.is_grad_enabled():
            refuse_gradients(y=y)
        given = {"y": y, "topk_idx": topk_idx, "topk_weights": topk_weights}
        out = self._out(out, own.num_tokens, given)
        waited = self._cycles_inside(wait_cycles)
        refuse_shared_memory({"wait_cycles": wait_cycles}, {**given, "out": out})
        relay, relayed = self._relay, own.relayed
        with torch.no_grad():
            launch, _ = self._inside.prepare_combine(
                y,
                relayed.topk_idx,
                relay.weights_of(relayed),
                own.inside,
                relay.sums_of(relayed),
                zero_copy=zero_copy,
                receive=False,
                again=again,
                wait_cycles=waited,
            )
            weights_arrive = relay.send_weights(relayed, topk_weights)
            if again:  # its kernel waits for ranks whose SMs the transport may have meanwhile
                weights_arrive()
            with relay.transport.naming_the_domain():
                self._inside.run(launch)

            def receive_rows() -> None:
                weights_arrive()
                with relay.transport.naming_the_domain():
                    self._inside.receive(own.inside)
                relay.send_back(relayed)()
                relay.add(relayed, out)

            if receive:
                receive_rows()
            else:
                self._pending[own.call.number] = receive_rows
        return out

    def get_combine_buffer(self, handle: DispatchHandle) -> torch.Tensor:
        """As of `LowLatencyAllToAll`.

        Args:
            handle: of the newest dispatch.
        """
        own = own_handle(handle, TwoLevelDispatchHandle, self)
        self._refuse_pending(own, "get_combine_buffer")
        return self._inside.get_combine_buffer(own.inside)

    def receive(self, handle: DispatchHandle) -> None:
        """Receive what a dispatch or combine with `receive=False` has sent. Its results are valid
        behind this, on the stream.

        Args:
            handle: of the dispatch or combine.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            ForeignTokensError: other domains have more tokens for a rank than it has room for.
            LostDomainError: a domain does not answer.
            MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes
                the object usable again. On a GPU the next call raises it.
            MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is
                missing. It is a MegaMoEError.
        """
        own = own_handle(handle, TwoLevelDispatchHandle, self)
        finish = self._pending.pop(own.call.number, None)
        if finish is None:
            raise ValueError(
                f"receive must follow a dispatch or a combine with receive=False; call "
                f"{own.call.number} has nothing to receive"
            )
        with torch.no_grad():
            finish()

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, as of `TwoLevelAllToAll`. An empty list lets all take part
        that the groups lead to.

        Args:
            ranks: numbers of the ranks to leave out, among those of all domains.
        """
        super().mask_ranks(ranks)
        self._inside.mask_ranks(self._mask.ranks_inside)

    def reset(self, groups: DomainGroups | None = None) -> None:
        """Make the layer usable again after a failed call, as of `TwoLevelAllToAll`.

        Args:
            groups: of the ranks that are left, if some are not.
        """
        super().reset(groups)
        self._inside.mask_ranks(self._mask.ranks_inside)
        self._pending.clear()

    # A call's steps.

    def _find_ranges(self, inside: Dispatched, ranges: torch.Tensor) -> None:
        """ranges: int64 [local experts, ranks of all domains], as `Dispatched.layout_range`, from
        that of the domain's ranks and from where in its sender's list each row stood."""
        shape, place = self.shape, self._place
        starts = inside.layout_range >> 32
        num_experts, num_ranks = starts.shape
        num_rows = inside.handle.src_slots.shape[1]
        rows = torch.arange(num_rows, device=self.device).expand(num_experts, -1)
        rank = torch.searchsorted(starts.contiguous(), rows.contiguous(), right=True) - 1
        listed = inside.handle.src_slots // shape.num_topk
        behind = (listed - shape.num_chunk_tokens) // max(shape.num_pair_rows, 1)
        block = (behind + 1).clamp(min=0)  # 0 for own tokens of the rank that passed them on
        source = rank * shape.num_domains + block
        # What lies behind the last row says nothing.
        nobody = num_ranks * shape.num_domains
        source = source.where(rows < inside.recv_count.unsqueeze(1), nobody)
        counts = torch.zeros((num_experts, nobody + 1), dtype=torch.int64, device=self.device)
        counts.scatter_add_(1, source, torch.ones_like(source))
        counts = counts[:, :nobody]
        first = counts.cumsum(1) - counts
        packed = (first << 32 | counts).view(num_experts, num_ranks, shape.num_domains)
        own = place.domain
        by_domain = [*range(1, own + 1), 0, *range(own + 1, shape.num_domains)]
        for domain, number in enumerate(by_domain):
            ranges[:, domain * num_ranks : (domain + 1) * num_ranks].copy_(packed[:, :, number])

    # Checks.

    def _refuse_pending(self, handle: TwoLevelDispatchHandle, step: str) -> None:
        if handle.call.number in self._pending:
            raise ValueError(
                f"{step} must follow receive(handle) of what the call has sent; call "
                f"{handle.call.number} has only been sent"
            )

    def _refuse_early(self, rule: str, age: int) -> None:
        """rule: what must have been received of the call so long ago."""
        number = self._inside.num_dispatches - age
        if number in self._pending:
            raise ValueError(f"{rule}; call {number} has only been sent")

    def _cycles_inside(self, wait_cycles: torch.Tensor | None) -> torch.Tensor | None:
        """The part that is of the ranks of this domain."""
        if wait_cycles is None:
            return None
        require_type("wait_cycles", wait_cycles, torch.Tensor, "a tensor or None")
        size = (self.shape.num_all_ranks,)
        check_tensor("wait_cycles", wait_cycles, torch.int64, size, self.device)
        check_contiguous("wait_cycles", wait_cycles)
        first = self._place.domain * self._place.num_ranks
        return wait_cycles[first : first + self._place.num_ranks]
