"""How rows get from domain to domain: `torch.distributed`'s all-to-all beside the kernels, or, by
name, NCCL EP.

On GPUs it is NCCL on a stream of its own; the host waits for nothing, and what a wait of the host's
is asked for ends after `timeout_s`. On CPUs it is gloo, whose threads work meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

from deep_moe.errors import LostDomainError, MegaMoEError
from deep_moe.heuristics.shape import require_int

from .domain_groups import ROLL_CALL_S, DomainGroups, DomainPlace, RollCall, rounds_to_tell_all
from .nccl_ep import Blocks, NcclEpExchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.fused.gpu import Gpu

# Sizes are there after some tens of microseconds, and a sleep takes longer than it is asked to.
_BUSY_S = 1e-3
_POLL_S = 20e-6

# `torch.distributed`'s all-to-all, or NCCL EP.
TransportName = Literal["torch", "nccl_ep"]


class DomainTransport:
    """One rank's way to the ranks of its rank in other domains, and, for what all ranks must know,
    to all ranks.

    num_sms: that kernels leave to it. there: numbers of the ranks that the groups lead to, by
    default all.

    Attributes:
        takes_part: of each domain whether rows go there: the own one, and those whose rank of the
            own number is in the cross group and not left out.
    """

    def __init__(
        self,
        groups: DomainGroups,
        device: torch.device,
        timeout_s: float,
        place: DomainPlace,
        name: TransportName,
        num_sms: int,
        there: Collection[int] | None = None,
    ) -> None:
        check_transport(name)
        self._groups = groups
        self._device = device
        self._timeout_s = timeout_s
        self._roll_call = roll_call = RollCall(place, groups)
        self._failure: str | None = None
        self._domain = place.domain
        self._num_domains = place.num_domains
        self._num_rounds = 1 if there is None else rounds_to_tell_all(there, place.num_ranks)
        self.takes_part = [d in roll_call.members for d in range(place.num_domains)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._nccl_ep: NcclEpExchange | None = None
        if name == "nccl_ep" and groups.cross is not None:
            self._nccl_ep = NcclEpExchange(groups.cross, device, timeout_s, num_sms)

    def leave_out(self, domains: Collection[int]) -> None:
        """Send nothing to these domains, and await nothing from them, from now on."""
        members = self._roll_call.members
        self.takes_part = [d in members and d not in domains for d in range(self._num_domains)]

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_rows: Sequence[int],
        sent_rows: Sequence[int],
    ) -> Callable[[], None]:
        """Send rows of bytes to each domain that takes part, so many of them, and receive those of
        each. What is returned waits: on a GPU it lets the current stream wait."""
        cross = self._groups.cross
        if cross is None:
            return lambda: None
        self.raise_if_failed()
        splits = list(received_rows), list(sent_rows)
        if self._nccl_ep is not None or not all(self.takes_part):
            return self.exchange_blocks(received.split(splits[0]), sent.split(splits[1]))
        if self._stream is None:
            return self._waiter(
                lambda: [
                    dist.all_to_all_single(received, sent, *splits, group=cross, async_op=True)
                ]
            )
        return self._beside(
            self._stream, lambda: dist.all_to_all_single(received, sent, *splits, group=cross)
        )

    def exchange_blocks(self, of_domains: Blocks, to_domains: Blocks) -> Callable[[], None]:
        """The same with a block of rows for each domain, None for the own one, or for all where
        nothing is exchanged. A domain that takes no part need not call this."""
        cross = self._groups.cross
        if cross is None:
            return lambda: None
        kept, own = of_domains[self._domain], to_domains[self._domain]
        if kept is not None and own is not None:
            kept.copy_(own)
        received, sent = (
            [
                blocks[domain] if self.takes_part[domain] and domain != self._domain else None
                for domain in self._roll_call.members
            ]
            for blocks in (of_domains, to_domains)
        )
        if not any(block is not None for block in (*received, *sent)):
            return lambda: None
        self.raise_if_failed()
        if self._nccl_ep is not None:
            return self._by_nccl_ep(self._nccl_ep, received, sent)
        if self._stream is None:
            return self._waiter(lambda: _messages(received, sent, cross))
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        to_here, to_there = (
            [nothing if block is None else block.view(torch.uint8) for block in blocks]
            for blocks in (received, sent)
        )
        return self._beside(self._stream, lambda: dist.all_to_all(to_here, to_there, group=cross))

    def _by_nccl_ep(
        self, exchange: NcclEpExchange, received: Blocks, sent: Blocks
    ) -> Callable[[], None]:
        to_here, to_there = (
            [None if block is None else block.view(torch.uint8) for block in blocks]
            for blocks in (received, sent)
        )
        if self._stream is None:  # of a stand-in
            exchange.exchange(to_here, to_there, 0)
            return lambda: None
        number = self._stream.cuda_stream
        return self._beside(self._stream, lambda: exchange.exchange(to_here, to_there, number))

    def _beside(
        self, stream: torch.cuda.Stream, exchange: Callable[[], object]
    ) -> Callable[[], None]:
        """On the transport's own stream. What is returned lets the current stream wait."""
        # Rows are ready, and nobody reads any more what is overwritten.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            exchange()
            done = self._event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def close(self) -> None:
        """Give memory back, where the device has come to the end of all exchanges: not if a domain
        was lost, for which kernels may still wait."""
        if self._nccl_ep is not None and self._failure is None:
            self._nccl_ep.close()

    def largest(self, value: torch.Tensor) -> None:
        """The largest of all ranks of all domains, in place of an int64 tensor. To be called where
        no kernel of the layer runs: it needs SMs of all ranks of the domain at once."""
        for group in self._num_rounds * (self._groups.cross, self._groups.domain):
            if group is not None:
                self._reduce(value, group)

    def _reduce(self, value: torch.Tensor, group: ProcessGroup) -> None:
        self.raise_if_failed()
        if self._stream is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
            return
        self._waiter(
            lambda: [dist.all_reduce(value, dist.ReduceOp.MAX, group=group, async_op=True)]
        )()

    def begin_to_host(self, value: torch.Tensor) -> Callable[[], list[int]]:
        """An int64 tensor's values, once the device has come to them, which what is returned waits
        for: not for what the caller puts on the stream meanwhile."""
        if self._stream is None:
            return lambda: [int(entry) for entry in value.flatten().tolist()]
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        done = self._event()

        def wait() -> list[int]:
            self._wait_for(done)
            return [int(entry) for entry in pinned.flatten().tolist()]

        return wait

    def wait_for_device(self) -> None:
        """Wait for what is on the current stream; LostDomainError if it does not end in time."""
        if self._stream is None:
            return
        self.raise_if_failed()
        self._wait_for(self._event())

    def _event(self) -> torch.cuda.Event:
        """Behind what is on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _wait_for(self, done: torch.cuda.Event) -> None:
        begin = time.monotonic()
        while not done.query():
            waited_s = time.monotonic() - begin
            if waited_s > self._timeout_s:
                self._fail(f"the GPU has waited for other domains for {self._timeout_s:g} s")
            if waited_s > _BUSY_S:
                time.sleep(_POLL_S)

    def raise_if_failed(self) -> None:
        """A group of which a rank has gone cannot be used again."""
        if self._failure is not None:
            raise LostDomainError(
                f"{self._failure}; call reset(groups) with groups of the ranks that are left"
            )

    def told(self) -> str:
        """What other ranks of this domain know of lost ones."""
        return self._roll_call.told()

    @contextmanager
    def naming_the_domain(self) -> Iterator[None]:
        """Adds to an error of a kernel in which domain it was, since its ranks are those of the
        domain, and what a rank of it knows of lost domains."""
        try:
            yield
        except LostDomainError:
            raise
        except MegaMoEError as error:
            told = self.told()
            because = f" ({told}, says a rank of domain {self._domain})" if told else ""
            raise type(error)(f"domain {self._domain}: {error}{because}") from error

    def _waiter(self, begin: Callable[[], list[dist.Work]]) -> Callable[[], None]:
        """Of gloo, where a rank that has gone is an error at the beginning or at the end."""
        try:
            works = begin()
        except RuntimeError as error:
            self._fail(_first_line(error))

        def wait() -> None:
            try:
                while works:  # a message can be waited for once
                    works.pop(0).wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                self._fail(_first_line(error))

        return wait

    def _fail(self, what: str) -> None:
        self._failure = self._roll_call.explain(what, min(ROLL_CALL_S, self._timeout_s))
        raise LostDomainError(self._failure)


def check_transport(name: TransportName) -> None:
    """An error unless there is such a transport."""
    names = get_args(TransportName)
    if name not in names:
        raise ValueError(f"transport must be one of {', '.join(names)}; got {name!r}")


def check_transport_sms(num_transport_sms: int) -> None:
    """An error unless a transport can have so many SMs."""
    require_int("num_transport_sms", num_transport_sms, "at least 0")
    if num_transport_sms < 0:
        raise ValueError(f"num_transport_sms must be at least 0; got {num_transport_sms}")


def check_sms_beside(num_sms: int, most: int, gpu: Gpu, num_transport_sms: int) -> None:
    """ValueError if kernels would have SMs that the transport needs. most: that it leaves."""
    if not 0 < num_sms <= most:
        raise ValueError(
            f"num_sms must be at most {most}: of the {gpu.num_sms} SMs of {gpu.name}, "
            f"num_transport_sms ({num_transport_sms}) are the transport's while kernels run; "
            f"got {num_sms}"
        )


def _messages(
    received: Sequence[torch.Tensor | None],
    sent: Sequence[torch.Tensor | None],
    group: ProcessGroup,
) -> list[dist.Work]:
    """Of gloo, whose all-to-all waits for ranks with which nothing is exchanged, too."""
    works = []
    for rank, block in enumerate(received):
        if block is not None and block.numel():
            works.append(dist.irecv(block, group=group, group_src=rank))
    for rank, block in enumerate(sent):
        if block is not None and block.numel():
            works.append(dist.isend(block, group=group, group_dst=rank))
    return [work for work in works if work is not None]


def _first_line(error: Exception) -> str:
    return f"the transport between domains failed: {str(error).splitlines()[0]}"
