"""`TwoLevelMoE`: one layer over several NVLink domains.

Inside a domain the fused kernel does everything. Between domains `torch.distributed` moves tokens
there and partial sums back; no kernel of ours leaves its domain. docs/two-level.md says what that
costs, and what is rounded where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation
from deep_moe.described import described_as
from deep_moe.errors import DeepMoEError
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.buffer import (
    SymmBuffer,
    device_for,
    get_symm_buffer_for_mega_moe,
    tokens_on,
)
from deep_moe.fused.call_tensors import (
    STATISTICS_TENSOR,
    CallTensors,
    check_form,
    check_types,
    with_statistics,
)
from deep_moe.fused.checks import (
    STATISTICS,
    TOPK_IDX_DTYPES,
    TOPK_WEIGHT_DTYPES,
    WEIGHT_NAMES,
    check_contiguous,
    check_ids,
    check_tensor,
    check_weights,
    refuse_gradients,
    require_type,
)
from deep_moe.fused.input_preparation import prepare_rows
from deep_moe.fused.mega_moe import call_with_layers, mega_moe
from deep_moe.fused.options import (
    MASKED_RANKS,
    CallArguments,
    CallOptions,
    given_options,
    with_plain_options,
)
from deep_moe.fused.run_settings import timeout_of
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS, MoEShape, require_int
from deep_moe.heuristics.two_level import CallSizes, ExchangeSizes, TwoLevelShape
from deep_moe.targets import target_of
from deep_moe.tensor_memory import refuse_shared_memory
from deep_moe.weights import DEFAULT_WEIGHTS
from deep_moe.weights.layers import MegaMoEWeights

from .domain_groups import (
    NUM_TRANSPORT_SMS,
    DomainGroups,
    DomainPlace,
    check_backend,
    ranks_of_groups,
    require_equal_everywhere,
)
from .domain_mask import DomainMask
from .domain_routes import (
    Routes,
    add_in_domain_order,
    chunk_bounds,
    domains_of,
    ids_in_domain,
    known_ids,
    others,
    partial_rows,
    route_chunks,
    sum_rounded_once,
)
from .domain_transport import (
    DomainTransport,
    TransportName,
    check_sms_beside,
    check_transport_sms,
)
from .foreign_tokens import raise_overflow, worst_of
from .two_level_layer import check_groups, why_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from deep_moe.activations import ActivationName
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

_MAX_ROOMS = 256  # sizes of calls whose views are kept

_Call = TypeVar("_Call", bound=Callable[..., torch.Tensor])


class _Exchange(NamedTuple):
    """How many rows each domain sends to this rank, and gets from it, in one chunk."""

    received: list[int]
    sent: list[int]


class _Room(NamedTuple):
    """What travels in a call of these sizes: views of the layer's memory, [chunks, rows, bytes].
    received_fields: of each chunk. They are kept, since views take the host's time."""

    sizes: ExchangeSizes
    sent: torch.Tensor
    received: torch.Tensor
    received_fields: list[_Staged]


class _Staged(NamedTuple):
    """Tokens as the kernel takes them, [most tokens, ...]; but topk_idx are of all domains, and
    int32 in rows that have travelled. x of those are words of 8 bytes, since single bytes that do
    not lie one behind the other take four times as long to copy."""

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class _DomainCall:
    """Calls of the fused kernel inside the domain, but for their tokens. numerics:
    activation, activation_clamp and fast_math."""

    weights: MegaMoEWeights
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    tensors: CallTensors
    numerics: tuple[ActivationName | Activation, float | None, bool]
    options: Mapping[str, Any]

    def run(
        self,
        y: torch.Tensor,
        buffer: SymmBuffer,
        expected: int,
        num_local_experts: int | None = None,
    ) -> None:
        """With all local experts, or with the first ones."""
        weights = self.weights
        l1_bias, l2_bias = self.biases
        if num_local_experts is not None:
            own = slice(num_local_experts)
            weights = weights.with_tensors([tensor[own] for tensor in weights.tensors])
            l1_bias = None if l1_bias is None else l1_bias[own]
            l2_bias = None if l2_bias is None else l2_bias[own]
        expected = min(expected, buffer.shape.num_max_tokens_per_rank)
        call_with_layers(
            "TwoLevelMoE.call",
            y,
            weights.l1,
            weights.l2,
            buffer,
            self.tensors,
            *self.numerics,
            l1_bias,
            l2_bias,
            cast("CallOptions", {**self.options, "expected_tokens_per_rank": expected}),
        )


def _in_turn(call: _Call) -> _Call:
    """Refuses a second thread: it would stage its tokens over those of the first."""

    @wraps(call)
    def call_in_turn(self: TwoLevelMoE, *arguments: Any, **options: Any) -> torch.Tensor:
        try:
            self._turn.pop()
        except IndexError:
            raise DeepMoEError(
                "TwoLevelMoE is in use by another thread; let one thread at a time call it: ranks "
                "go through its calls one after the other, all in the same order"
            ) from None
        try:
            return call(self, *arguments, **options)
        finally:
            self._turn.append(None)

    return cast("_Call", call_in_turn)


@described_as(get_symm_buffer_for_mega_moe)
class TwoLevelMoE:
    """A layer whose experts live in several NVLink domains, each a group of ranks that reach each
    other's memory.

    Other arguments are as of `get_symm_buffer_for_mega_moe`.

    Args:
        domain_group: the ranks of this process's domain, or None if it is alone there.
        cross_group: the ranks with the same rank in all domains, in the order of the domains, or
            None if there is one only: NCCL's on GPUs, gloo's on CPUs. `make_domain_groups` makes
            both.
        num_experts: of all domains together: domain d owns the d-th part, and its rank r the r-th
            part of that. So rank r of domain d holds the experts that rank d * R + r of one large
            domain would. Each domain has at least num_topk.
        num_max_tokens_per_rank: most own tokens of a call.
        num_shared_experts: as of `get_symm_buffer_for_mega_moe`. Own tokens then have a call of
            their own, in front of the chunks', since foreign ones must not go to shared experts,
            and the weights are read once more.
        num_max_foreign_tokens: most tokens that a rank takes from all other domains together in one
            call. Each chunk has its share, rounded up, and, with fixed sizes, each domain its share
            of that. More is a ForeignTokensError on all ranks. By default as many as can come.
        num_chunks: parts in which tokens go through: while one is computed, others travel.
        exact_sizes: no more travels than is sent, and the host waits once in a call, to learn how
            much that is. Without, a chunk has the same number of rows for each domain, and those
            that nobody fills travel, too; the host waits for nothing, and a CUDA graph can capture
            a call.
        num_transport_sms: where kernels and transport run at the same time, SMs of a GPU that
            kernels leave free: at least as many as the NCCL of cross_group may take CTAs, which
            `make_domain_groups` sees to; of another group its `max_ctas`, or NCCL_MAX_CTAS. With
            fewer, ranks can wait for each other for ever.
        transport: between domains, "torch" for the all-to-all of cross_group or "nccl_ep" for NCCL
            EP, which needs its package, fixed sizes and room for all foreign tokens.
        timeout_s: limit of waits for other domains and, unless a call says otherwise, of the
            kernel's for other ranks; by default 60 on GPUs and 600 in the emulator.

    Every rank of all domains makes one, with the same arguments, and all call it in the same order.

    NVFP4 tokens, the default with nvfp4 weights on SM100, do not travel between domains and are
    refused: there `token_format` must be "bf16", of the weights too.

    A token travels once to every domain that owns one of its experts, as E4M3 with its scales, for
    bf16 weights as BF16, and a BF16 partial sum comes back. The partial sums are added in the order
    of the domains in FP32 and rounded once. A token whose experts live in one domain has the bits
    that one large domain would give it.

    Attributes:
        nbytes: what this rank gives to the layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    def __init__(
        self,
        domain_group: ProcessGroup | None,
        cross_group: ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        *,
        weights: WeightsName = DEFAULT_WEIGHTS,
        token_format: TokenFormatName | None = None,
        num_shared_experts: int = 0,
        num_pool_tokens: int | None = DEFAULT_POOL_TOKENS,
        biases: bool = False,
        num_max_foreign_tokens: int | None = None,
        num_chunks: int = 1,
        exact_sizes: bool = False,
        num_transport_sms: int = NUM_TRANSPORT_SMS,
        transport: TransportName = "torch",
        timeout_s: float | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        groups = DomainGroups(domain_group, cross_group)
        self._place = DomainPlace.of(groups)
        sizes: dict[str, Any] = {
            "num_experts": num_experts,
            "num_topk": num_topk,
            "hidden": hidden,
            "intermediate_hidden": intermediate_hidden,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "num_max_foreign_tokens": num_max_foreign_tokens,
            "num_chunks": num_chunks,
            "exact_sizes": exact_sizes,
            "weights": weights,
            "token_format": token_format,
            "biases": biases,
            "num_shared_experts": num_shared_experts,
            "num_pool_tokens": num_pool_tokens,
        }
        device = device_for(cross_group if domain_group is None else domain_group, device)
        check_backend(cross_group, device)
        require_equal_everywhere({**sizes, "device": device.type, "transport": transport}, groups)
        sizes["token_format"] = tokens_on(device, weights, token_format)
        self.shape = TwoLevelShape(self._place.num_domains, self._place.num_ranks, **sizes)
        if exact_sizes and transport == "nccl_ep":
            raise ValueError(
                "exact_sizes must be False with transport='nccl_ep', which sends blocks of one "
                "size; got True"
            )
        check_transport_sms(num_transport_sms)
        self._num_transport_sms = num_transport_sms
        self._timeout_s = timeout_of(timeout_s, is_emulated=device.type == "cpu")
        self._transport_name: TransportName = transport
        self._groups = groups
        self._transport = DomainTransport(
            *(groups, device, self._timeout_s, self._place, transport, num_transport_sms)
        )
        self._mask = DomainMask(
            self._place, device, why_groups(transport, can_overflow=self.shape.can_overflow)
        )
        self.device = device
        self._turn = [None]  # who calls has it, as a buffer's
        shape = self.shape
        self._buffer = self._make_buffer(shape.domain_shape, domain_group)
        self._own_buffer = self._buffer
        if shape.own_shape is not None:
            self._own_buffer = self._make_buffer(shape.own_shape, domain_group)
        self._make_tensors()

    def __repr__(self) -> str:
        shape, place = self.shape, self._place
        return (
            f"TwoLevelMoE(rank {place.rank} of {place.num_ranks} in domain {place.domain} of "
            f"{place.num_domains} on {self.device}, {shape.num_experts} experts, "
            f"top-{shape.num_topk}, hidden {shape.hidden}, intermediate "
            f"{shape.intermediate_hidden}, {shape.weights} weights, up to "
            f"{shape.num_max_tokens_per_rank} own tokens in {shape.num_chunks} chunks, "
            f"{'exact' if shape.exact_sizes else 'fixed'} sizes, {self.nbytes / 2**20:.1f} MiB)"
        )

    @property
    def nbytes(self) -> int:
        return sum(self.shape.buffer_bytes.values())

    @property
    def domain(self) -> int:
        """Which domain this rank is in."""
        return self._place.domain

    @described_as(mega_moe)
    @_in_turn
    @with_plain_options
    def call(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: MegaMoEWeights,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        most_tokens: int | None = None,
        activation: ActivationName | Activation = DEFAULT_ACTIVATION,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        l1_bias: torch.Tensor | None = None,
        l2_bias: torch.Tensor | None = None,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor:
        """One MoE layer over all ranks of all domains: bfloat16 [tokens, hidden].

        Other arguments are as of `mega_moe`.

        Args:
            x: bfloat16 [tokens, hidden]; tokens may be 0 and may differ between ranks.
            topk_idx: int64 or int32 [tokens, topk], global expert ids, -1 for an unused slot.
            topk_weights: float32 or bfloat16 [tokens, topk].
            weights: this rank's experts, transformed.
            out: where to write the result, by default a new tensor.
            most_tokens: the most tokens that any rank has in this call, the same on all ranks; by
                default num_max_tokens_per_rank. With fixed sizes as many rows travel to each
                domain.
            {options}

        ForeignTokensError, on all ranks, if one of them is sent more than num_max_foreign_tokens
        allow. With exact sizes it is raised before anything is computed; with fixed ones, on CPUs,
        at the end of the call, and on GPUs, where the host does not wait, by `check()`, and that
        call's result is all NaN on all ranks. LostDomainError names a domain that does not answer;
        on GPUs, where that shows only to who waits, it comes from `check()` and from a call with
        exact sizes.

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
        shape = self.shape
        self._buffer.raise_if_closed()
        self._transport.raise_if_failed()
        arguments = self._arguments(given_options("call", options))
        arch = arguments.get("arch")
        target = self._buffer.target if arch is None else target_of(arch)
        check_weights(weights, self._buffer.shape, target.kernel, activation)
        stats, checked = cumulative_local_expert_recv_stats, is_checked(arguments, self.device)
        self._check(x, topk_idx, topk_weights, weights, stats, out, checked)
        room = self._room_for(most_tokens, x.shape[0])
        sizes = room.sizes

        tensors = with_statistics(stats)
        if self._mask.inside is not None:
            tensors = {**tensors, MASKED_RANKS: self._mask.inside}
        inside = _DomainCall(
            weights,
            (l1_bias, l2_bias),
            tensors,
            (activation, activation_clamp, fast_math),
            arguments,
        )
        num_tokens = x.shape[0]
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.no_grad():
            bounds = chunk_bounds(num_tokens, shape.num_chunks)
            rows = self._rows_of_tokens(num_tokens, room)
            if sizes.is_dense:
                # Rows are those of the tokens, and ids tell which go there.
                self._stage(x, topk_idx, topk_weights, rows, arguments.get("arch"))
                self._spread_rows(rows, bounds, room)
                exchanges = self._fixed_exchanges(sizes)
            else:
                # Sizes first: they travel while tokens are quantized and put into rows.
                goes = domains_of(topk_idx.long(), shape)
                if not all(self._transport.takes_part):
                    goes &= self._goes_there
                routes = route_chunks(others(goes, self.domain), sizes)
                agree = self._begin_to_agree(routes, sizes)
                self._stage(x, topk_idx, topk_weights, rows, arguments.get("arch"))
                self._gather_rows(routes, room)
                exchanges = agree()
            arrivals = [
                self._send(chunk, exchange, room) for chunk, exchange in enumerate(exchanges)
            ]
            expected = arguments.get("expected_tokens_per_rank")
            with self._transport.naming_the_domain():
                returns = self._compute(
                    inside,
                    room,
                    num_tokens,
                    num_tokens if expected is None else expected,
                    list(zip(bounds, exchanges, arrivals, strict=True)),
                )
            for come_back in returns:
                come_back()
            if sizes.is_dense:
                for chunk, (begin, end) in enumerate(bounds):
                    if end > begin:
                        self._add(chunk, begin, end, sizes, out)
                return out
            table = partial_rows(goes, routes, self.domain, sizes)
            add_in_domain_order(self._partials, table, out)
            if sizes.can_overflow and not shape.exact_sizes:
                self._note_overflow(routes, sizes, out)
        return out

    def check(self) -> None:
        """Wait for all calls on the current stream, and raise what they found: ForeignTokensError,
        once on each rank of all domains; LostDomainError; what a kernel reported.

        Raises:
            ForeignTokensError: other domains had more tokens for a rank than it has room for.
            LostDomainError: a domain does not answer.
            MegaMoEError: the last kernel gave up; the text says why.
        """
        self._transport.raise_if_failed()
        with self._transport.naming_the_domain():
            try:
                self._transport.wait_for_device()
            finally:
                self._own_buffer.raise_if_failed()
                self._buffer.raise_if_failed()
        if self.shape.can_overflow and not self.shape.exact_sizes:
            worst = int(self._worst.item())
            self._worst.zero_()
            raise_overflow(worst, self.shape, self.shape.num_ranks)

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, as of `TwoLevelAllToAll`.

        Args:
            ranks: numbers of the ranks to leave out, among those of all domains.
        """
        self._mask.leave_out(ranks)
        self._leave_out()

    def masked_ranks(self) -> list[int]:
        """The ranks that are left out."""
        return sorted(self._mask.ranks)

    def reset(self, groups: DomainGroups | None = None) -> None:
        """Make the layer usable again after a failed call, as of `TwoLevelAllToAll`.

        Args:
            groups: of the ranks that are left, if some are not.
        """
        check_groups(groups, self._place)
        if groups is None:
            self._transport.raise_if_failed()
        for buffer in {id(own): own for own in (self._own_buffer, self._buffer)}.values():
            buffer.reset(None if groups is None else groups.domain)
        there = ranks_of_groups(self._place, self._groups if groups is None else groups)
        if groups is not None:
            self._groups = groups
            self._transport = DomainTransport(
                *(groups, self.device, self._timeout_s, self._place),
                *(self._transport_name, self._num_transport_sms, there),
            )
        self._worst.zero_()
        self._mask.rejoin(there)
        self._leave_out()

    def close(self) -> None:
        """Give the memory back. The layer cannot be used after this."""
        self._own_buffer.close()
        self._buffer.close()  # waits for the device
        self._transport.close()
        self._sent = self._received = self._partials = self._rows = torch.empty(0)
        self._own_ids = self._id_in_domain = torch.empty(0, dtype=torch.int64)
        self._goes_there = torch.empty(0, dtype=torch.bool)
        self._staged = _Staged(*[torch.empty(0)] * 4)
        self._rooms.clear()

    # Construction.

    def _make_buffer(self, shape: MoEShape, group: ProcessGroup | None) -> SymmBuffer:
        return get_symm_buffer_for_mega_moe(
            group,
            **shape.buffer_arguments,
            device=self.device,
        )

    def _make_tensors(self) -> None:
        """What a call uses of this rank's own memory. It is there for good, so that streams may use
        it without telling the allocator, and so that graphs find it again."""
        shape, row = self.shape, self.shape.row
        num_tokens, num_topk = shape.num_max_tokens_per_rank, shape.num_topk

        def zeros(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        ids = zeros((num_tokens, num_topk), torch.int64)
        if shape.stages_own:
            dtype = shape.tokens.dtype
            num_words = (row.scales.stop - row.scales.start) // 4
            as_bytes = torch.uint8 if dtype.itemsize == 1 else dtype
            self._staged = _Staged(
                zeros((num_tokens, shape.hidden), as_bytes).view(dtype),
                zeros((num_tokens, num_words), torch.int32),
                ids,
                zeros((num_tokens, num_topk), torch.float32),
            )
            self._own_ids = torch.zeros_like(ids)
        else:
            buffer, own = self._buffer, slice(num_tokens)
            self._staged = _Staged(buffer.x[own], buffer.x_sf[own], ids, buffer.topk_weights[own])
            self._own_ids = buffer.topk_idx[own]
        # The last row is nobody's: what is sent where there is no token.
        self._rows = zeros((num_tokens + 1, row.num_bytes), torch.uint8)
        self._field(self._rows, row.ids, torch.int32)[-1] = -1
        self._sent, self._received = (
            zeros((shape.num_chunks * num_rows, row.num_bytes), torch.uint8)
            for num_rows in (shape.num_chunk_sent, shape.num_chunk_foreign)
        )
        self._rooms: BoundedCache[int, _Room] = BoundedCache(_MAX_ROOMS)
        self._partials = zeros((shape.num_partial_rows, shape.hidden), torch.bfloat16)
        self._id_in_domain = ids_in_domain(
            shape.num_experts, shape.num_domains, self.domain, self.device
        )
        # The largest number of tokens for which there was no room so far, and where; 0 for none.
        self._worst = zeros((), torch.int64)
        self._goes_there = torch.ones(shape.num_domains, dtype=torch.bool, device=self.device)

    def _leave_out(self) -> None:
        """Ranks of the mask."""
        self._transport.leave_out(self._mask.domains)
        self._goes_there.copy_(torch.tensor(self._transport.takes_part))

    # A call's steps.

    def _room_for(self, most_tokens: int | None, num_tokens: int) -> _Room:
        """num_tokens: of this rank."""
        shape = self.shape
        most = shape.num_max_tokens_per_rank
        if most_tokens is not None:
            allowed = f"{num_tokens}, the tokens of x, to num_max_tokens_per_rank ({most}), or None"
            if not num_tokens <= require_int("most_tokens", most_tokens, allowed) <= most:
                raise ValueError(f"most_tokens must be {allowed}; got {most_tokens}")
            most = max(1, most_tokens)
        room = self._rooms.get(most)
        if room is not None:
            return room
        sizes = CallSizes(shape, most)
        row = shape.row

        def of_chunks(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
            size = (shape.num_chunks, num_rows, row.num_bytes)
            return rows[: shape.num_chunks * num_rows].view(size)

        received = of_chunks(self._received, sizes.num_chunk_foreign)
        fields = [
            _Staged(
                self._field(rows, row.values, torch.int64),
                self._field(rows, row.scales, torch.int32),
                self._field(rows, row.ids, torch.int32),
                self._field(rows, row.weights, torch.float32),
            )
            for rows in received
        ]
        sent = of_chunks(self._sent, sizes.num_chunk_sent)
        return self._rooms.put(most, _Room(sizes, sent, received, fields))

    def _arguments(self, given: CallArguments) -> dict[str, Any]:
        """Options of the calls inside the domain."""
        if given.get("accumulate"):
            raise ValueError(
                "accumulate must be False: a result is the sum of what several domains send; "
                "got True"
            )
        arguments: dict[str, Any] = {"timeout_s": self._timeout_s, **given}
        gpu = self._buffer.gpu
        is_overlapped = self.shape.num_chunks > 1 or self.shape.is_own_apart
        if gpu is None or not is_overlapped or not self.shape.num_other_domains:
            return arguments
        free = gpu.num_sms - self._num_transport_sms
        most = gpu.target.whole_clusters(free) if free > 0 else 0
        num_sms = arguments.setdefault("num_sms", most)
        check_sms_beside(num_sms, most, gpu, self._num_transport_sms)
        return arguments

    def _check(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: MegaMoEWeights,
        stats: torch.Tensor | None,
        out: torch.Tensor | None,
        checked: bool,
    ) -> None:
        given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        for name, tensor in given.items():
            require_type(name, tensor, torch.Tensor, "a tensor")
            if tensor.ndim != 2:
                axes = "[tokens, hidden]" if name == "x" else "[tokens, topk]"
                raise ValueError(
                    f"{name} must be 2-dimensional {axes}; got shape {tuple(tensor.shape)}"
                )
        rows, slots = (x.shape[0], self.shape.hidden), (x.shape[0], self.shape.num_topk)
        check_tensor("x", x, torch.bfloat16, rows, self.device)
        check_tensor("topk_idx", topk_idx, TOPK_IDX_DTYPES, slots, self.device)
        check_tensor("topk_weights", topk_weights, TOPK_WEIGHT_DTYPES, slots, self.device)
        if x.shape[0] > self.shape.num_max_tokens_per_rank:
            raise ValueError(
                "x must have at most num_max_tokens_per_rank "
                f"({self.shape.num_max_tokens_per_rank}) tokens; got {x.shape[0]}"
            )
        for name, tensor in given.items():
            check_contiguous(name, tensor)
        if torch.is_grad_enabled():
            refuse_gradients(x=x, topk_weights=topk_weights)
        if stats is not None:
            check_types({STATISTICS: stats})
            check_form(STATISTICS, stats, STATISTICS_TENSOR, self._buffer, x.shape[0])
        of_experts = dict(zip(WEIGHT_NAMES, weights.tensors, strict=True))
        refuse_shared_memory({STATISTICS: stats}, {**given, **of_experts})
        if out is not None:
            require_type("out", out, torch.Tensor, "a tensor or None")
            check_tensor("out", out, torch.bfloat16, rows, self.device)
            check_contiguous("out", out)
            # Not with x: what a rank needs of its own tokens is staged before `out` is written.
            refuse_shared_memory({"out": out}, {**of_experts, STATISTICS: stats})
        if checked:
            check_ids(topk_idx, self.shape.num_experts)
        gpu = self._buffer.gpu
        if self.shape.exact_sizes and gpu is not None and gpu.is_capturing():
            raise ValueError(
                "exact_sizes must be False for calls in a CUDA graph: the host learns the sizes of "
                "each call; got True"
            )

    def _rows_of_tokens(self, num_tokens: int, room: _Room) -> torch.Tensor:
        """Where own tokens become rows: where they are sent from, if that is one place."""
        sizes = room.sizes
        rows = self._rows
        if sizes.is_dense and sizes.num_chunks == sizes.num_other_domains == 1:
            rows = room.sent[0]
        return rows[:num_tokens]

    def _stage(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        rows: torch.Tensor,
        arch: str | None,
    ) -> None:
        """Own tokens, quantized, as the kernel takes them, and as rows that travel.

        In the buffer's memory, where there is one call: kernels of this rank's earlier calls are
        over by then, and with them what other ranks read of it."""
        staged, row, num_tokens = self._staged, self.shape.row, x.shape[0]
        prepare_rows(x, topk_idx, topk_weights, staged, arch)
        own = slice(num_tokens)
        ids = known_ids(staged.topk_idx[own], self.shape.num_experts)
        torch.take(self._id_in_domain, ids, out=self._own_ids[own])
        if not self.shape.num_other_domains:
            return
        self._field(rows, row.values, torch.int64).copy_(staged.x[own].view(torch.int64))
        self._field(rows, row.scales, torch.int32).copy_(staged.x_sf[own])
        self._field(rows, row.ids, torch.int32).copy_(ids)
        self._field(rows, row.weights, torch.float32).copy_(staged.topk_weights[own])

    def _gather_rows(self, routes: Routes, room: _Room) -> None:
        """Each domain's rows, of the tokens that go there."""
        if room.sent.numel():
            sent = room.sent.view(-1, self.shape.row.num_bytes)
            torch.index_select(self._rows, 0, routes.token_of_row.flatten(), out=sent)

    def _spread_rows(
        self, rows: torch.Tensor, bounds: Sequence[tuple[int, int]], room: _Room
    ) -> None:
        """All tokens' rows to every other domain, chunk by chunk, and nobody's behind them."""
        sizes, row = room.sizes, self.shape.row
        if not sizes.num_other_domains:
            return
        of_domains = room.sent.view(sizes.num_chunks, sizes.num_other_domains, -1, row.num_bytes)
        for sent, (begin, end) in zip(of_domains, bounds, strict=True):
            used = end - begin
            if rows.data_ptr() != sent.data_ptr():
                sent[:, :used].copy_(rows[begin:end])
            if used < sizes.num_pair_rows:
                sent[:, used:, row.ids].view(torch.int32).fill_(-1)

    @staticmethod
    def _field(rows: torch.Tensor, field: slice, dtype: torch.dtype) -> torch.Tensor:
        return rows[:, field].view(dtype)

    def _begin_to_agree(
        self, routes: Routes, sizes: ExchangeSizes
    ) -> Callable[[], list[_Exchange]]:
        """What travels in each chunk, once what is returned is asked. With exact sizes the host
        waits there, for the sizes alone, of all chunks."""
        shape, domain = self.shape, self.domain
        if not shape.exact_sizes:
            return lambda: self._fixed_exchanges(sizes)
        if not shape.num_other_domains:
            return lambda: [_Exchange([0], [0])] * shape.num_chunks
        counts = routes.counts.T
        own = counts.new_zeros((1, shape.num_chunks))
        sent = torch.cat([counts[:domain], own, counts[domain:]])  # [domains, chunks]
        received = torch.zeros_like(sent)
        ones = [1] * shape.num_domains
        as_bytes = received.view(torch.uint8), sent.view(torch.uint8)
        self._transport.exchange(*as_bytes, ones, ones)()
        numbers = [received, sent]
        if sizes.can_overflow:
            worst = worst_of(received.sum(dim=0), sizes.num_chunk_foreign, self._place)
            self._transport.largest(worst)
            numbers.append(worst.expand(1, shape.num_chunks))
        to_host = self._transport.begin_to_host(torch.cat(numbers))
        return lambda: self._exchanges_of(to_host(), sizes)

    def _fixed_exchanges(self, sizes: ExchangeSizes) -> list[_Exchange]:
        """Rows for domains that are left out have their place, and nothing comes from there."""
        domains = range(self.shape.num_domains)
        sent = [0 if d == self.domain else sizes.num_pair_rows for d in domains]
        takes_part = self._transport.takes_part
        received = [rows if takes_part[d] else 0 for d, rows in enumerate(sent)]
        return [_Exchange(received, sent)] * sizes.num_chunks

    def _exchanges_of(self, on_host: Sequence[int], sizes: ExchangeSizes) -> list[_Exchange]:
        """Of the numbers that `_begin_to_agree` asks for, [numbers, chunks]."""
        shape = self.shape
        table = [
            on_host[first : first + shape.num_chunks]
            for first in range(0, len(on_host), shape.num_chunks)
        ]
        if sizes.can_overflow:
            raise_overflow(table[-1][0], sizes, shape.num_ranks)
        return [
            _Exchange(
                [table[d][chunk] for d in range(shape.num_domains)],
                [table[shape.num_domains + d][chunk] for d in range(shape.num_domains)],
            )
            for chunk in range(shape.num_chunks)
        ]

    def _send(self, chunk: int, exchange: _Exchange, room: _Room) -> Callable[[], None]:
        """Begin to send a chunk's tokens."""
        sent = room.sent[chunk, : sum(exchange.sent)]
        received = room.received[chunk, : sum(exchange.received)]
        return self._transport.exchange(received, sent, exchange.received, exchange.sent)

    def _fill_own(self, buffer: SymmBuffer, begin: int, end: int) -> int:
        """Own tokens into the first rows of the domain's buffer, unless they are there. How
        many."""
        staged, rows, own = self._staged, slice(end - begin), slice(begin, end)
        if not self.shape.stages_own:
            return end - begin
        buffer.x[rows].copy_(staged.x[own])
        buffer.x_sf[rows].copy_(staged.x_sf[own])
        buffer.topk_idx[rows].copy_(self._own_ids[own])
        buffer.topk_weights[rows].copy_(staged.topk_weights[own])
        return end - begin

    def _fill(
        self, chunk: int, bounds: tuple[int, int], exchange: _Exchange, room: _Room
    ) -> torch.Tensor:
        """A chunk's own and foreign tokens into the domain's buffer. Their output."""
        buffer, sizes = self._buffer, room.sizes
        begin = 0
        if not sizes.is_own_apart:
            begin = self._fill_own(buffer, *bounds)
        num_foreign = sum(exchange.received)
        if num_foreign:
            rows, received = slice(begin, begin + num_foreign), room.received_fields[chunk]
            ids = received.topk_idx[:num_foreign].long()
            buffer.x[rows].view(torch.int64).copy_(received.x[:num_foreign])
            buffer.x_sf[rows].copy_(received.x_sf[:num_foreign])
            torch.take(self._id_in_domain, ids, out=buffer.topk_idx[rows])
            buffer.topk_weights[rows].copy_(received.topk_weights[:num_foreign])
        first = chunk * sizes.num_chunk_rows
        return self._partials[first : first + begin + num_foreign]

    def _compute(
        self,
        inside: _DomainCall,
        room: _Room,
        num_tokens: int,
        expected: int,
        chunks: Sequence[tuple[tuple[int, int], _Exchange, Callable[[], None]]],
    ) -> list[Callable[[], None]]:
        """Each chunk, when it has arrived, through the domain's kernel, and its foreign tokens'
        sums on their way back, for which what is returned waits.

        num_tokens: own ones. expected: the mean of all ranks. chunks: of each its own tokens,
        what travels, and a wait for it.
        """
        shape = self.shape
        num_routed = None
        if shape.is_own_apart:
            self._fill_own(self._own_buffer, 0, num_tokens)
            first = shape.num_chunks * room.sizes.num_chunk_rows
            y = self._partials[first : first + num_tokens]
            inside.run(y, self._own_buffer, -(-expected // shape.num_domains))
            expected -= expected // shape.num_domains
            num_routed = shape.domain_shape.num_experts_per_rank
        returns = []
        for chunk, (bounds, exchange, arrive) in enumerate(chunks):
            arrive()
            y = self._fill(chunk, bounds, exchange, room)
            inside.run(y, self._buffer, -(-expected // shape.num_chunks), num_routed)
            returns.append(self._send_back(chunk, y, exchange, room.sizes))
        return returns

    def _send_back(
        self, chunk: int, y: torch.Tensor, exchange: _Exchange, sizes: ExchangeSizes
    ) -> Callable[[], None]:
        """Begin to send the foreign tokens' partial sums to where they came from."""
        num_foreign = sum(exchange.received)
        end = (chunk + 1) * sizes.num_chunk_rows
        begin = end - sizes.num_chunk_sent
        back = self._partials[begin : begin + sum(exchange.sent)]
        return self._transport.exchange(
            back.view(torch.uint8),
            y[y.shape[0] - num_foreign :].view(torch.uint8),
            exchange.sent,
            exchange.received,
        )

    def _add(
        self, chunk: int, begin: int, end: int, sizes: ExchangeSizes, out: torch.Tensor
    ) -> None:
        """A chunk's tokens, whose rows every domain has: as `add_in_domain_order`, where a domain
        that has none of a token's experts has zeros for it."""
        first, number = chunk * sizes.num_chunk_rows, end - begin
        own = first
        if sizes.is_own_apart:
            own = sizes.num_chunks * sizes.num_chunk_rows + begin
        back = first + sizes.num_chunk_rows - sizes.num_chunk_sent
        places = [back + other * sizes.num_pair_rows for other in range(sizes.num_other_domains)]
        places.insert(self.domain, own)
        places = [p for p, here in zip(places, self._transport.takes_part, strict=True) if here]
        sums = [self._partials[place : place + number] for place in places]
        sum_rounded_once(sums, out[begin:end])

    # Too many foreign tokens.

    def _note_overflow(self, routes: Routes, sizes: ExchangeSizes, out: torch.Tensor) -> None:
        """With fixed sizes: all ranks learn of tokens that had no row, and no rank's result can be
        taken for one."""
        worst = worst_of(routes.counts.T, sizes.num_pair_rows, self._place)
        self._transport.largest(worst)
        torch.maximum(self._worst, worst, out=self._worst)
        out.masked_fill_(worst > 0, torch.nan)
        if self.device.type == "cpu":
            self._worst.zero_()
            raise_overflow(int(worst), self.shape, self.shape.num_ranks)


def is_checked(arguments: dict[str, Any], device: torch.device) -> bool:
    """Whether a call looks at the expert ids: as `checked` of the fused call."""
    checked = arguments.get("checked")
    return device.type == "cpu" if checked is None else bool(checked)
