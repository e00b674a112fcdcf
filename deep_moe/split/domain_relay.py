"""What an all-to-all over several NVLink domains does between them: each token once to every other
domain of its experts, and sums, or numbers, back.

The rank of the sender's number in the other domain lists the tokens that it takes behind its own,
and an all-to-all of its domain carries them on. docs/two-level.md has the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from deep_moe.heuristics.domain_relay import RelayShape
from deep_moe.heuristics.low_latency import NUM_HALVES

from .domain_groups import DomainGroups, DomainPlace
from .domain_routes import (
    Routes,
    add_in_domain_order,
    domains_of,
    ids_in_domain,
    known_ids,
    others,
    partial_rows,
    route_chunks,
)
from .domain_transport import DomainTransport, TransportName
from .foreign_tokens import raise_overflow, worst_of
from .quantized_rows import quantize_rows, unrouted
from .split_layer import ROW_DTYPES

Wait = Callable[[], None]


@dataclass(frozen=True, eq=False)
class RelayedCall:
    """Of one dispatch. half: of the tables of sums and weights. goes: `domains_of` the rank's
    tokens. topk_idx: int64 [listed tokens, topk], ids inside the domain, -1 for others. overflow:
    `worst_of` all ranks, None where there is room for all."""

    num_tokens: int
    half: int
    goes: torch.Tensor
    routes: Routes
    topk_idx: torch.Tensor
    overflow: torch.Tensor | None


class DomainRelay:
    """One rank's. Everything that it sends and receives has its place for good, so that streams may
    use it without telling the allocator, and so that graphs find it again.

    x, x_sf, numbers: of the listed tokens, [listed tokens, ...]: own ones first, then those of the
    other domains, domain after domain, each at a place of its own. They are of the newest dispatch.
    """

    def __init__(
        self,
        shape: RelayShape,
        place: DomainPlace,
        groups: DomainGroups,
        device: torch.device,
        timeout_s: float,
        arch: str | None,
        transport: TransportName,
        num_transport_sms: int,
    ) -> None:
        self.shape = shape
        self._transport: tuple[TransportName, int] = (transport, num_transport_sms)
        self.place = place
        self.device = device
        self._timeout_s = timeout_s
        self._arch = arch
        self._other_domains = [d for d in range(shape.num_domains) if d != place.domain]
        self._make_tensors()
        self._join(groups)
        self._num_calls = 0

    def _join(self, groups: DomainGroups, there: Collection[int] | None = None) -> None:
        """there: as of `DomainTransport`."""
        self.groups = groups
        self.transport = DomainTransport(
            *(groups, self.device, self._timeout_s, self.place, *self._transport, there)
        )
        self.leave_out([])

    @property
    def nbytes(self) -> int:
        return sum(self.shape.buffer_bytes.values())

    def leave_out(self, domains: Collection[int]) -> None:
        """Nothing is sent to these domains, and nothing awaited from them; an empty list lets all
        take part that are in the cross group."""
        self.transport.leave_out(domains)
        self._goes_there = torch.tensor(self.transport.takes_part, device=self.device)
        shape = self.shape
        came_back = slice(shape.num_listed_tokens, shape.num_partial_rows - 1)
        tables = self._received, *(sums[came_back] for sums in self._partials)
        for table in tables:
            for domain, block in zip(self._other_domains, self._blocks(table), strict=True):
                if not self.transport.takes_part[domain]:
                    block.zero_()  # what would come there, also of calls under way
        for domain, ids in zip(self._other_domains, self._blocks(self._received_ids), strict=True):
            if not self.transport.takes_part[domain]:
                ids.fill_(-1)

    def rejoin(self, groups: DomainGroups | None, there: Collection[int]) -> None:
        """Behind a failure, on all ranks that are left; with new groups if some are not. All that
        are left take part again. there: as of `DomainTransport`."""
        if groups is None:
            self.leave_out([])
        else:
            self._join(groups, there)
        self._worst.zero_()

    # A dispatch.

    def route(self, topk_idx: torch.Tensor) -> tuple[torch.Tensor, Routes]:
        """Which of the rank's tokens go to which domain, and in which row."""
        goes = domains_of(topk_idx.long(), self.shape)
        if not all(self.transport.takes_part):
            goes &= self._goes_there
        return goes, route_chunks(others(goes, self.place.domain), self.shape)

    def begin(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        x_sf: torch.Tensor | None = None,
    ) -> tuple[RelayedCall, Wait]:
        """Lists own tokens, and sends what goes to other domains. What is returned waits for what
        others have sent, and lists it. ForeignTokensError on CPUs if some rank has no room.

        x: bfloat16, or of the format with x_sf.
        """
        goes, routes = self.route(topk_idx)
        ids = torch.full(
            (self.shape.num_listed_tokens, self.shape.num_topk), -1, device=self.device
        )
        half = self._num_calls % NUM_HALVES
        call = RelayedCall(x.shape[0], half, goes, routes, ids, self._overflow(routes))
        self._num_calls += 1
        self._list_own(call, x, x_sf, topk_idx, topk_weights)
        return call, self._send_rows(call, has_ids=True)

    def again(
        self,
        call: RelayedCall,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        x_sf: torch.Tensor | None,
    ) -> Wait:
        """Other rows the ways of an earlier dispatch."""
        self._list_values(x, x_sf)
        self._list_weights(call, topk_weights)
        return self._send_rows(call, has_ids=False)

    def _list_own(
        self,
        call: RelayedCall,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self._list_values(x, x_sf)
        self._list_weights(call, topk_weights)
        ids = known_ids(topk_idx.long(), self.shape.num_experts)
        own = slice(call.num_tokens)
        torch.take(self._id_in_domain, ids, out=call.topk_idx[own])
        self._field(self._rows[own], self.shape.row.ids, torch.int32).copy_(ids)

    def _list_values(self, x: torch.Tensor, x_sf: torch.Tensor | None) -> None:
        """Own tokens as they travel: the first of the list."""
        tokens, num_tokens = self.shape.tokens, x.shape[0]
        own = slice(num_tokens)
        if x.dtype == self.x.dtype:
            self.x[own].copy_(x)
            if x_sf is not None:
                self.x_sf[own].copy_(x_sf)
        else:
            first = slice(self.shape.num_max_tokens_per_rank)
            rows = self.x[first], self.x_sf[first]
            quantize_rows(x, tokens, *rows, self._unrouted, self._arch, packs=False)

    def _list_weights(self, call: RelayedCall, topk_weights: torch.Tensor | None) -> None:
        if topk_weights is not None:
            self.weights_of(call)[: call.num_tokens].copy_(topk_weights)
            self._field(self._rows[: call.num_tokens], self.shape.row.weights, torch.float32).copy_(
                topk_weights
            )

    def _send_rows(self, call: RelayedCall, *, has_ids: bool) -> Wait:
        shape = self.shape
        if not shape.num_chunk_foreign:
            return lambda: None
        row, own = shape.row, slice(call.num_tokens)
        rows = self._rows[own]
        # Words of 8 bytes: single ones that do not lie one behind the other take longer to copy.
        self._field(rows, row.values, torch.int64).copy_(self.x[own].view(torch.int64))
        if self.x_sf.numel():
            self._field(rows, row.scales, self.x_sf.dtype).copy_(self.x_sf[own])
        torch.index_select(self._rows, 0, call.routes.token_of_row.flatten(), out=self._sent)
        arrive = self._exchange(self._received, self._sent)

        def list_foreign() -> None:
            arrive()
            behind, received = slice(shape.num_chunk_tokens, None), self._received
            values = self._field(received, row.values, torch.int64)
            self.x[behind].view(torch.int64).copy_(values)
            if self.x_sf.numel():
                self.x_sf[behind].copy_(self._field(received, row.scales, self.x_sf.dtype))
            self.weights_of(call)[behind].copy_(self._field(received, row.weights, torch.float32))
            if has_ids:
                ids = self._received_ids.long()
                torch.take(self._id_in_domain, ids, out=call.topk_idx[behind])
                if shape.is_numbered:
                    self.numbers[behind].copy_(
                        self._field(received, row.tokens, torch.int32).flatten()
                    )

        return list_foreign

    # What comes back.

    def weights_of(self, call: RelayedCall) -> torch.Tensor:
        """Routing weights of the listed tokens: float32 [listed tokens, topk]."""
        return self._weights[call.half]

    def send_weights(self, call: RelayedCall, topk_weights: torch.Tensor) -> Wait:
        """Own tokens' routing weights, alone, where their rows went. What is returned waits until
        `weights_of` has those of the listed tokens."""
        listed = self.weights_of(call)
        listed[: call.num_tokens].copy_(topk_weights)
        if not self.shape.num_chunk_foreign:
            return lambda: None
        self._own_weights[: call.num_tokens].copy_(topk_weights)
        rows = call.routes.token_of_row.flatten()
        torch.index_select(self._own_weights, 0, rows, out=self._sent_weights)
        return self._exchange(listed[self.shape.num_chunk_tokens :], self._sent_weights)

    def sums_of(self, call: RelayedCall) -> torch.Tensor:
        """Where the all-to-all of the domain writes the sums of the listed tokens: bfloat16
        [listed tokens, hidden]."""
        return self._partials[call.half, : self.shape.num_listed_tokens]

    def send_back(self, call: RelayedCall, table: torch.Tensor | None = None) -> Wait:
        """The foreign tokens' sums to where they came from, or their rows of another table that is
        like the one of the sums."""
        shape = self.shape
        table = self._partials[call.half] if table is None else table
        first, end = shape.num_chunk_tokens, shape.num_listed_tokens
        return self._exchange(table[end : end + shape.num_chunk_sent], table[first:end])

    def add(self, call: RelayedCall, out: torch.Tensor) -> torch.Tensor:
        """out: bfloat16 [tokens, hidden], the sum of each token's sums in the order of the domains;
        NaN on all ranks if some token had no room."""
        rows = partial_rows(call.goes, call.routes, self.place.domain, self.shape)
        add_in_domain_order(self._partials[call.half], rows, out)
        if call.overflow is not None:
            out.masked_fill_(call.overflow > 0, torch.nan)
        return out

    def add_numbers(self, call: RelayedCall, listed: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, columns]: of a number for each slot of each listed token, 0 for slots of
        other domains, those of own tokens from wherever they are."""
        shape = self.shape
        size = (shape.num_partial_rows, listed.shape[1])
        table = torch.zeros(size, dtype=torch.float32, device=self.device)
        table[: shape.num_listed_tokens].copy_(listed)
        self.send_back(call, table)()
        rows = partial_rows(call.goes, call.routes, self.place.domain, shape)
        total = table.index_select(0, rows[:, 0])
        for column in range(1, rows.shape[1]):
            total += table.index_select(0, rows[:, column])
        return total

    # Failures.

    def _overflow(self, routes: Routes) -> torch.Tensor | None:
        """All ranks learn of tokens for which there is no row."""
        shape = self.shape
        if not shape.can_overflow:
            return None
        worst = worst_of(routes.counts.T, shape.num_pair_rows, self.place)
        self.transport.largest(worst)
        if self.device.type == "cpu":
            raise_overflow(int(worst), shape, shape.num_ranks)
        torch.maximum(self._worst, worst, out=self._worst)
        return worst

    def check(self) -> None:
        """Wait for the device, and raise what calls found: LostDomainError, and ForeignTokensError,
        once."""
        self.transport.wait_for_device()
        if self.shape.can_overflow:
            worst = int(self._worst.item())
            self._worst.zero_()
            raise_overflow(worst, self.shape, self.shape.num_ranks)

    # Memory.

    def _make_tensors(self) -> None:
        shape, row = self.shape, self.shape.row
        tokens, max_tokens = shape.tokens, shape.num_max_tokens_per_rank
        num_listed, num_topk, num_words = shape.num_listed_tokens, shape.num_topk, 0

        def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        num_words = shape.num_scale_words
        scale_dtype = torch.float32 if tokens.packs_scales else tokens.scale_torch_dtype
        dtype = tokens.dtype if tokens.has_scales else ROW_DTYPES[shape.dtype]
        self.x = zeros((num_listed, shape.hidden * dtype.itemsize), torch.uint8).view(dtype)
        self.x_sf = zeros((num_listed, num_words), scale_dtype or torch.int32)
        self.numbers = zeros((num_listed,), torch.int32)
        self.numbers[:max_tokens].copy_(torch.arange(max_tokens))
        # The last row is nobody's: what is sent where there is no token.
        self._rows = zeros((max_tokens + 1, row.num_bytes), torch.uint8)
        self._field(self._rows, row.ids, torch.int32)[-1] = -1
        if shape.is_numbered:
            self._field(self._rows[:-1], row.tokens, torch.int32).copy_(
                self.numbers[:max_tokens, None]
            )
        self._sent = zeros((shape.num_chunk_sent, row.num_bytes), torch.uint8)
        self._received = zeros((shape.num_chunk_foreign, row.num_bytes), torch.uint8)
        self._received_ids = self._field(self._received, row.ids, torch.int32)
        self._received_ids.fill_(-1)
        self._weights = zeros((NUM_HALVES, num_listed, num_topk), torch.float32)
        self._own_weights = zeros((max_tokens + 1, num_topk), torch.float32)
        self._sent_weights = zeros((shape.num_chunk_sent, num_topk), torch.float32)
        size = (NUM_HALVES, shape.num_partial_rows, shape.hidden)
        self._partials = zeros(size, ROW_DTYPES[shape.dtype])
        self._unrouted = unrouted(max_tokens, num_topk, self.device)
        self._id_in_domain = ids_in_domain(
            shape.num_experts, shape.num_domains, self.place.domain, self.device
        )
        self._worst = zeros((), torch.int64)

    @staticmethod
    def _field(rows: torch.Tensor, field: slice, dtype: torch.dtype) -> torch.Tensor:
        return rows[:, field].view(dtype)

    def _blocks(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Of each other domain."""
        num_rows = self.shape.num_pair_rows
        return [rows[i * num_rows : (i + 1) * num_rows] for i in range(len(self._other_domains))]

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> Wait:
        """A block of rows with each other domain that takes part."""
        if not self.shape.num_chunk_foreign:
            return lambda: None
        own = self.place.domain
        to_here, to_there = (
            [*blocks[:own], None, *blocks[own:]]
            for blocks in (self._blocks(received), self._blocks(sent))
        )
        return self.transport.exchange_blocks(to_here, to_there)
