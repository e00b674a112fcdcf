"""What the all-to-alls over several NVLink domains have in common: the layer inside the domain,
what travels between domains, and checks before anything does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.fused.buffer import device_for
from deep_moe.fused.checks import (
    TOPK_IDX_DTYPES,
    check_contiguous,
    check_ids,
    check_tensor,
    named_as,
    refuse_gradients,
    require_type,
)
from deep_moe.fused.gpu import gpu_of
from deep_moe.fused.run_settings import timeout_of
from deep_moe.heuristics.domain_relay import RelayShape
from deep_moe.tensor_memory import refuse_shared_memory

from .domain_groups import (
    DomainGroups,
    DomainPlace,
    check_backend,
    ranks_of_groups,
    require_equal_everywhere,
)
from .domain_mask import DomainMask
from .domain_relay import DomainRelay
from .domain_transport import TransportName, check_sms_beside, check_transport_sms
from .profile import DumpsTraces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.low_latency import Step

    from .low_latency import LowLatencyAllToAll
    from .throughput import AllToAll


def sms_beside_transport(
    device: torch.device, num_sms: int | None, num_transport_sms: int, num_domains: int
) -> int | None:
    """CTAs of the kernels: with several domains, on a GPU, the SMs that the transport leaves."""
    check_transport_sms(num_transport_sms)
    if device.type == "cpu" or num_domains == 1:
        return num_sms
    gpu = gpu_of(device)
    assert gpu is not None, "a device that is no CPU"
    most = gpu.num_sms - num_transport_sms
    num_sms = most if num_sms is None else num_sms
    check_sms_beside(num_sms, most, gpu, num_transport_sms)
    return num_sms


def why_groups(transport: TransportName, *, can_overflow: bool) -> str | None:
    """Why ranks of a layer's groups cannot be left out, if they cannot."""
    if transport == "nccl_ep":
        return "transport='nccl_ep' exchanges blocks with all domains of its group"
    if can_overflow:
        return (
            "num_max_foreign_tokens bounds what travels, and all ranks of the groups tell each "
            "other how much that was"
        )
    return None


def check_groups(groups: DomainGroups | None, place: DomainPlace) -> None:
    """An error unless these can be what `reset` is given."""
    if groups is None:
        return
    require_type("groups", groups, DomainGroups, "DomainGroups or None")
    if groups.domain is None and place.num_ranks > 1:
        raise ValueError(
            "groups.domain must be a group of the remaining ranks of the domain, also of one; "
            "got None"
        )


def check_listed(shape: RelayShape, name: str, limit: int) -> None:
    """ValueError if own and foreign tokens of a call are more. name: the argument that says how
    many own ones there are."""
    own = shape.num_max_tokens_per_rank
    if own > limit:
        raise ValueError(f"{name} must be at most {limit}; got {own}")
    if shape.num_listed_tokens > limit:
        raise ValueError(
            f"num_max_foreign_tokens must be at most {limit - own}, since own and foreign tokens "
            f"of a call are {limit} at most; got {shape.num_max_foreign_tokens}, with "
            f"{shape.num_chunk_foreign} foreign tokens of {shape.num_domains} domains"
        )


class TwoLevelLayer(DumpsTraces):
    """One rank's. _most_tokens: the argument that bounds them. _may_return: whether ranks that were
    left out may take part again without a reset."""

    shape: RelayShape
    device: torch.device
    rank: int
    _most_tokens: str
    _may_return = False
    _inside: LowLatencyAllToAll | AllToAll
    _relay: DomainRelay
    _place: DomainPlace

    def _join(
        self,
        inside: Callable[..., LowLatencyAllToAll | AllToAll],
        domain_group: ProcessGroup | None,
        cross_group: ProcessGroup | None,
        sizes: Mapping[str, Any],
        most_listed: int,
        *arguments: Any,
        equal: Mapping[str, Any],
        num_transport_sms: int,
        transport: TransportName,
        device: torch.device | str | int | None,
        num_sms: int | None,
        timeout_s: float | None,
        is_numbered: bool = False,
        **options: Any,
    ) -> None:
        """As a rank of both groups, all of which have the same sizes and other equal arguments.

        inside: makes the layer of the domain. sizes: of the RelayShape. most_listed: own and
        foreign tokens of a call. arguments, options: of `inside` beside sizes, `equal` and what is
        named here.
        """
        groups = DomainGroups(domain_group, cross_group)
        place = DomainPlace.of(groups)
        device = device_for(cross_group if domain_group is None else domain_group, device)
        check_backend(cross_group, device)
        with named_as({"num_max_tokens_per_rank": self._most_tokens}):
            told = {"device": device.type, "transport": transport}
            require_equal_everywhere({**sizes, **equal, **told}, groups)
            shape = RelayShape(place.num_domains, place.num_ranks, **sizes, is_numbered=is_numbered)
        check_listed(shape, self._most_tokens, most_listed)
        self._inside = inside(
            domain_group,
            shape.num_listed_tokens,
            shape.hidden,
            shape.num_experts_per_domain,
            shape.num_topk,
            *arguments,
            token_format=shape.token_format,
            device=device,
            num_sms=sms_beside_transport(device, num_sms, num_transport_sms, place.num_domains),
            timeout_s=timeout_s,
            **equal,
            **options,
        )
        self.shape = shape
        self.device = self._inside.device
        self.rank = place.domain * place.num_ranks + place.rank
        self._place = place
        self._mask = DomainMask(
            place,
            self.device,
            why_groups(transport, can_overflow=shape.can_overflow),
            may_return=self._may_return,
        )
        self._relay = DomainRelay(
            shape,
            place,
            groups,
            self.device,
            timeout_of(timeout_s, is_emulated=self.device.type == "cpu"),
            self._inside.settings.arch,
            transport,
            num_transport_sms,
        )

    def __repr__(self) -> str:
        shape, place = self.shape, self._place
        return (
            f"{type(self).__name__}(rank {place.rank} of {place.num_ranks} in domain "
            f"{place.domain} of {place.num_domains} on {self.device}, {shape.num_experts} experts, "
            f"top-{shape.num_topk}, hidden {shape.hidden}, {shape.token_format}, up to "
            f"{shape.num_max_tokens_per_rank} own tokens, {self.nbytes / 2**20:.1f} MiB)"
        )

    @property
    def nbytes(self) -> int:
        return self._inside.nbytes + self._relay.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens that are not quantized, and of the experts' rows."""
        return self._inside.dtype

    @property
    def groups(self) -> DomainGroups:
        """Those that take part."""
        return self._relay.groups

    @property
    def domain(self) -> int:
        """Which domain this rank is in."""
        return self._place.domain

    def check(self) -> None:
        """Wait for all calls on the current stream, and raise what they found: ForeignTokensError,
        LostDomainError, what a kernel reported.

        Raises:
            ForeignTokensError: other domains have more tokens for a rank than it has room for.
            LostDomainError: a domain does not answer.
            MegaMoEError: the last kernel gave up; the text says why.
        """
        self._relay.transport.raise_if_failed()
        with self._relay.transport.naming_the_domain():
            try:
                self._relay.check()
            finally:
                self._inside.check()

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, from the next call on.

        Their experts' slots count as unused, their tokens as none. So do, for the other ranks of
        a masked one's number, the slots of all experts in its domain: it would have to pass their
        tokens on. All remaining ranks of all domains must do this between the same two calls, and
        before a CUDA graph captures one. After a call that failed because of those ranks,
        `reset(groups)` does it.

        Args:
            ranks: numbers of the ranks to leave out, among those of all domains.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
        """
        self._mask.leave_out(ranks)
        self._relay.leave_out(self._mask.domains)

    def masked_ranks(self) -> list[int]:
        """The ranks that are left out."""
        return sorted(self._mask.ranks)

    def reset(self, groups: DomainGroups | None = None) -> None:
        """Make the layer usable again after a failed call. Every rank of all domains must call
        this; it returns when all have. Handles become invalid, and all ranks take part again.

        Args:
            groups: if ranks are dead, or the transport between domains has failed, new groups of
                all others, which are those that call: `domain` the remaining ranks of this domain,
                `cross` the remaining ones of this rank's number, in the order of the domains.
                `make_domain_groups` makes both. Ranks that the groups do not lead to are left out,
                as by `mask_ranks`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            LostDomainError: the transport has failed, and there are no new groups.
        """
        check_groups(groups, self._place)
        if groups is None:
            self._relay.transport.raise_if_failed()
        self._inside.reset(None if groups is None else groups.domain)
        there = ranks_of_groups(self._place, self.groups if groups is None else groups)
        self._relay.rejoin(groups, there)
        self._mask.rejoin(there)

    def close(self) -> None:
        """Give the memory back. The layer cannot be used after this."""
        self._inside.close()  # waits for the device
        self._relay.transport.close()

    def _dump_trace(self, step: Step, path: str | Path) -> None:
        self._inside.dump_trace(step, path, self.rank)

    # Checks.

    def _check_tokens(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        require_type("x", x, torch.Tensor, "a tensor")
        if x.ndim != 2:
            raise ValueError(
                f"x must be 2-dimensional [tokens, hidden]; got shape {tuple(x.shape)}"
            )
        num_tokens = x.shape[0]
        check_tensor("x", x, dtype, (num_tokens, self.shape.hidden), self.device)
        check_contiguous("x", x)
        if num_tokens > self.shape.num_max_tokens_per_rank:
            raise ValueError(
                f"x must have at most {self._most_tokens} ({self.shape.num_max_tokens_per_rank}) "
                f"tokens; got {num_tokens}"
            )

    def _check_weights(self, topk_weights: torch.Tensor, num_tokens: int) -> None:
        require_type("topk_weights", topk_weights, torch.Tensor, "a tensor")
        slots = (num_tokens, self.shape.num_topk)
        check_tensor("topk_weights", topk_weights, torch.float32, slots, self.device)
        check_contiguous("topk_weights", topk_weights)
        if torch.is_grad_enabled():
            refuse_gradients(topk_weights=topk_weights)

    def _check_routing(self, topk_idx: torch.Tensor, num_tokens: int) -> None:
        require_type("topk_idx", topk_idx, torch.Tensor, "a tensor")
        slots = (num_tokens, self.shape.num_topk)
        check_tensor("topk_idx", topk_idx, TOPK_IDX_DTYPES, slots, self.device)
        check_contiguous("topk_idx", topk_idx)
        if self._inside.settings.checked:
            check_ids(topk_idx, self.shape.num_experts)

    def _out(
        self, out: torch.Tensor | None, num_tokens: int, read: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        size = (num_tokens, self.shape.hidden)
        if out is None:
            return torch.empty(size, dtype=self.dtype, device=self.device)
        require_type("out", out, torch.Tensor, "a tensor or None")
        check_tensor("out", out, self.dtype, size, self.device)
        check_contiguous("out", out)
        refuse_shared_memory({"out": out}, read)
        return out
