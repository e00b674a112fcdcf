"""The two kinds of process groups of a layer over several NVLink domains, and who has gone when one
of them fails."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from deep_moe.fused.buffer import describe_difference, ranks_of
from deep_moe.fused.checks import named_as
from deep_moe.fused.peers import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# SMs of a GPU that are the transport's while kernels run. NCCL by itself may take more CTAs.
NUM_TRANSPORT_SMS = 32
ROLL_CALL_S = 10.0  # that a rank has to answer, once another one finds that something is wrong
_POLL_S = 0.02


class DomainGroups(NamedTuple):
    """The process groups of a `TwoLevelMoE`.

    Attributes:
        domain: the ranks of this process's domain, None if it is alone there.
        cross: those with the same rank in every domain, in the order of the domains, None if there
            is one domain only.
    """

    domain: ProcessGroup | None
    cross: ProcessGroup | None


def make_domain_groups(
    num_domains: int,
    *,
    num_transport_sms: int = NUM_TRANSPORT_SMS,
    without: Collection[int] = (),
    **arguments: Any,
) -> DomainGroups:
    """Both groups of this process for `TwoLevelMoE`, from the default group: domain d has the ranks
    d * R to (d + 1) * R - 1, where R is the number of ranks of a domain.

    Args:
        num_domains: NVLink domains; a divisor of the number of processes.
        num_transport_sms: what `TwoLevelMoE` is told: where the backend is nccl, and `arguments`
            have no pg_options, NCCL takes at most so many CTAs between domains.
        without: ranks that are dead; the groups are for `reset(groups)` of a layer then.
        arguments: of `torch.distributed.new_group` for each of them, `timeout` or `backend`.

    Every process must call this, but for those that are dead.
    """
    world = dist.get_world_size()
    for name, value in {"num_domains": num_domains, "num_transport_sms": num_transport_sms}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int; got {value!r}")
    if num_domains < 1 or world % num_domains:
        raise ValueError(f"num_domains must divide the {world} ranks there are; got {num_domains}")
    num_ranks = world // num_domains
    domain, rank = divmod(dist.get_rank(), num_ranks)
    backend = arguments.get("backend") or dist.get_backend()
    limits_nccl = backend == "nccl" and num_transport_sms > 0 and "pg_options" not in arguments
    own: dict[str, ProcessGroup | None] = {"domain": None, "cross": None}
    if without:
        # Of the ranks of a group alone, since the dead cannot call.
        arguments = {**arguments, "use_local_synchronization": True}
    if num_ranks > 1:
        for d in range(num_domains) if not without else [domain]:
            members = range(d * num_ranks, (d + 1) * num_ranks)
            group = dist.new_group([m for m in members if m not in without], **arguments)
            own["domain"] = group if d == domain else own["domain"]
    if num_domains > 1:
        for r in range(num_ranks) if not without else [rank]:
            given = dict(arguments)
            if limits_nccl:
                given["pg_options"] = dist.ProcessGroupNCCL.Options()
                given["pg_options"].config.max_ctas = num_transport_sms
            members = range(r, world, num_ranks)
            group = dist.new_group([m for m in members if m not in without], **given)
            own["cross"] = group if r == rank else own["cross"]
    return DomainGroups(**own)


class DomainPlace(NamedTuple):
    """Where a process stands."""

    domain: int
    rank: int
    num_domains: int
    num_ranks: int

    @property
    def number(self) -> int:
        """Among the ranks of all domains."""
        return self.domain * self.num_ranks + self.rank

    @property
    def num_all_ranks(self) -> int:
        return self.num_domains * self.num_ranks

    @classmethod
    def of(cls, groups: DomainGroups) -> DomainPlace:
        """ValueError on every rank that can tell if the groups do not make a grid of domains and
        ranks."""
        sizes = _size("cross_group", groups.cross), _size("domain_group", groups.domain)
        domain = 0 if groups.cross is None else dist.get_rank(groups.cross)
        rank = 0 if groups.domain is None else dist.get_rank(groups.domain)
        place = cls(domain, rank, *sizes)
        if groups.cross is not None:
            found = gather_objects((place.rank, place.num_ranks), groups.cross)
            if len(set(found)) > 1:
                of_domains = ", ".join(
                    f"{rank} of {number} in domain {domain}"
                    for domain, (rank, number) in enumerate(found)
                )
                raise ValueError(
                    "cross_group must be ranks with the same rank in domains of as many ranks; got "
                    f"rank {of_domains}"
                )
        if groups.domain is not None:
            found = gather_objects((place.domain, place.num_domains), groups.domain)
            if len(set(found)) > 1:
                raise ValueError(
                    "domain_group must be ranks that stand at the same place in cross groups of "
                    f"one size; got (place, size) {', '.join(map(str, found))}"
                )
        return place


def check_backend(cross_group: ProcessGroup | None, device: torch.device) -> None:
    """ValueError unless the group between domains can move tensors of the device."""
    if cross_group is None:
        return
    backend = str(dist.get_backend(cross_group))
    needed = "nccl" if device.type == "cuda" else "gloo"
    if needed not in backend:
        raise ValueError(
            f"cross_group must have the backend {needed} for a layer on {device}; got {backend}"
        )


def ranks_of_groups(place: DomainPlace, groups: DomainGroups) -> frozenset[int]:
    """Numbers of the ranks that the groups lead to, over other ranks too. All of these call it, and
    none goes on before all have come."""
    known = {place.number}
    for _ in range(min(place.num_domains, place.num_ranks) + 1):  # as long as the longest way
        for group in (groups.cross, groups.domain):
            if group is not None:
                known = known.union(*gather_objects(known, group))
    return frozenset(known)


def rounds_to_tell_all(ranks: Collection[int], num_ranks: int) -> int:
    """How often ranks have to tell what they know to those of their number in other domains, and
    then to those of their domain, until all know all that these ways lead to.

    num_ranks: of a domain.

    >>> rounds_to_tell_all(range(6), 3), rounds_to_tell_all([0, 1, 2], 2)
    (1, 2)
    """
    known = {rank: frozenset({rank}) for rank in ranks}
    rounds = 0
    while True:
        before = known
        for line_of in (lambda rank: rank % num_ranks, lambda rank: rank // num_ranks):
            lines: dict[int, set[int]] = {}
            for rank, others in known.items():
                lines.setdefault(line_of(rank), set()).update(others)
            known = {rank: frozenset(lines[line_of(rank)]) for rank in known}
        if known == before:
            return max(rounds, 1)
        rounds += 1


def gather_from_all(value: Any, groups: DomainGroups) -> list[list[Any]]:
    """`value` of every rank of every domain: [domain][rank]."""
    column = [value] if groups.cross is None else gather_objects(value, groups.cross)
    columns = [column] if groups.domain is None else gather_objects(column, groups.domain)
    return [list(row) for row in zip(*columns, strict=True)]


def require_equal_everywhere(arguments: dict[str, Any], groups: DomainGroups) -> None:
    """ValueError on all ranks of all domains if some have other arguments."""
    of_all = [rank for domain in gather_from_all(arguments, groups) for rank in domain]
    difference = describe_difference(dict(enumerate(of_all)))
    if difference is not None:
        raise ValueError(difference)


def _size(name: str, group: Any) -> int:
    with named_as({"group": name}):
        return ranks_of(group)


class RollCall:
    """Asks, once a transport has failed, which of the domains that took part in it still answer, by
    the store through which PyTorch's groups were made. Every rank of the groups makes one.

    members: domains of the ranks of the cross group.
    """

    def __init__(self, place: DomainPlace, groups: DomainGroups) -> None:
        self.place = place
        own = uuid.uuid4().hex, place.domain
        of_cross = [own] if groups.cross is None else gather_objects(own, groups.cross)
        of_domain = [own] if groups.domain is None else gather_objects(own, groups.domain)
        self.members = [domain for _, domain in of_cross]
        self._here, self._lost = (
            f"deep_moe/two_level/{names[0][0]}" for names in (of_cross, of_domain)
        )
        self._store = None
        # PyTorch has no public way to ask for it.
        default_store = getattr(dist.distributed_c10d, "_get_default_store", None)
        if groups.cross is not None and default_store is not None:
            self._store = default_store()

    def explain(self, failed: str, within_s: float) -> str:
        """Words for what has failed, with who is lost. Those who come to ask as well have so long
        to do so: all ranks of this rank in their domains, for whom it has failed, too."""
        place = self.place
        try:
            lost = self._missing(within_s)
        except Exception as error:  # of the store, whose host may be what is lost
            others = ", ".join(str(d) for d in self.members if d != place.domain)
            reason = str(error).splitlines()[0]
            return f"one of domains {others} is lost ({failed}); which, cannot be asked: {reason}"
        text = describe_lost(lost, place.rank)
        if text:
            self._tell(text)
        else:
            told = self.told()
            text = f"every domain's rank {place.rank} answers within {within_s:g} s"
            text = f"{told}, says a rank of domain {place.domain}" if told else text
        return f"{text} ({failed})"

    def told(self) -> str:
        """What a rank of this domain has found out of lost ones, or nothing."""
        key = self._lost_key()
        try:
            if self._store is None or not self._store.check([key]):
                return ""
            return bytes(self._store.get(key)).decode()
        except Exception:  # this only adds to an error
            return ""

    def _tell(self, text: str) -> None:
        if self._store is not None:
            self._store.set(self._lost_key(), text)

    def _missing(self, within_s: float) -> list[int]:
        """Domains whose rank of this rank has not come within that time."""
        place, store = self.place, self._store
        if store is None:
            raise RuntimeError("this PyTorch does not say which store its groups have")
        store.set(self._here_key(place.domain), "here")
        waiting = self.members
        deadline = time.monotonic() + within_s
        while True:
            waiting = [domain for domain in waiting if not store.check([self._here_key(domain)])]
            if not waiting or time.monotonic() > deadline:
                return waiting
            time.sleep(_POLL_S)

    def _here_key(self, domain: int) -> str:
        return f"{self._here}/here/{domain}"

    def _lost_key(self) -> str:
        return f"{self._lost}/lost"


def describe_lost(domains: Sequence[int], rank: int) -> str:
    """Words for the domains whose rank of that number does not answer.

    >>> describe_lost([1, 3], 2)
    'domains 1, 3 are lost: their rank 2 does not answer'
    """
    if not domains:
        return ""
    names = ", ".join(map(str, domains))
    if len(domains) == 1:
        return f"domain {names} is lost: its rank {rank} does not answer"
    return f"domains {names} are lost: their rank {rank} does not answer"
