"""DeepEP's `ElasticBuffer`: dispatch into expanded rows, and their combine, over an `AllToAll`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deep_moe.described import described_as
from deep_moe.fused.buffer import device_for, ranks_of
from deep_moe.fused.checks import STATISTICS, check_tensor, named_as, require_type
from deep_moe.fused.gpu import gpu_of
from deep_moe.fused.peers import gather_objects
from deep_moe.heuristics.segments import align_up
from deep_moe.heuristics.shape import require_int
from deep_moe.heuristics.throughput import (
    MAX_ALIGNMENT,
    ThroughputShape,
    throughput_buffer_layout,
)
from deep_moe.split.throughput import AllToAll, AllToAllHandle
from deep_moe.tensor_memory import check_dense, refuse_shared_memory

from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.tokens import TokenFormatName

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_SIZE_ALIGNMENT = 2 << 20  # bytes, of what a size hint says
_SF_ALIGNMENT = 4  # rows of 4 bytes, which TMA wants to begin at multiples of 16
_NAMES = {
    "x_sf": "x's scales",
    "y": "x",
    "values": "topk_weights",
    "max_tokens_per_rank": "num_max_tokens_per_rank",
    "hidden": "x's hidden",
    "num_topk": "topk_idx's top-k",
}


@dataclass(frozen=True)
class EPHandle:
    """What `combine` needs of a dispatch, and a dispatch of other rows the same ways.

    Attributes:
        do_expand: True.
        num_experts: of all ranks.
        expert_alignment: rows of an expert begin at a multiple of this.
        num_max_tokens_per_rank: of the dispatch.
        num_sms: as given to the dispatch.
        topk_idx: as given to the dispatch, or a copy.
        num_recv_tokens_per_expert_list: rows of each local expert, padding included; empty if the
            host did not wait for them.
        psum_num_recv_tokens_per_expert: int32 [local experts], where the rows of each end, without
            its padding. They begin at the end before, rounded up to the alignment.
        num_unaligned_recv_tokens_per_expert: int32 [local experts], rows of each without padding.
        rows: the handle of the `AllToAll` below.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    rows: AllToAllHandle = field(repr=False)


class ElasticBuffer:
    """Dispatch and combine between the ranks of a group, of one NVLink domain.

    Args:
        group: the ranks; None is one rank alone.
        num_bytes: taken for DeepEP's signature: memory is made for the first dispatch's sizes.
        num_cpu_bytes: only 0.
        num_max_tokens_per_rank: most tokens of a rank in one call, unless a dispatch says so.
        hidden: values of a token.
        num_topk: slots of a token.
        use_fp8_dispatch: taken for DeepEP's signature: x says what travels.
        deterministic: taken for DeepEP's signature: the order of rows never depends on who comes
            first.
        allow_hybrid_mode: taken for DeepEP's signature, and not needed.
        allow_multiple_reduction: taken for DeepEP's signature, and not needed.
        prefer_overlap_with_compute: taken for DeepEP's signature, and not needed.
        sl_idx: taken for DeepEP's signature, and not needed.
        num_allocated_qps: taken for DeepEP's signature, and not needed.
        num_cpu_timeout_secs: taken for DeepEP's signature, and not needed.
        num_gpu_timeout_secs: limit of the kernels' waits in seconds; None: as of `AllToAll`.
        explicitly_destroy: taken for DeepEP's signature, and not needed.
        device: as of `AllToAll`.

    Only the expanded layout is there: a row for each used slot. Rows lie by local expert, source
    rank, token and slot. There is memory for all rows that can come. A dispatch with another number
    of experts, another alignment or more tokens makes new memory: all ranks then wait for each
    other, and earlier handles become invalid.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 0,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int | None = None,
        num_gpu_timeout_secs: int | None = None,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        if num_cpu_bytes:
            raise ValueError(f"num_cpu_bytes must be 0: memory is the GPU's; got {num_cpu_bytes}")
        self.group = group
        self.num_ranks = ranks_of(group)
        self.device = device_for(group, device)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_bytes = num_bytes
        if num_bytes is None and num_max_tokens_per_rank and hidden:
            self.num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            )
        self.explicitly_destroy = explicitly_destroy
        self._timeout_s = num_gpu_timeout_secs
        self._layer: AllToAll | None = None
        self._is_destroyed = False

    if not TYPE_CHECKING:  # so that mypy still knows which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            """What there is not."""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it has DeepEP's "
                "dispatch and combine, without Engram, pipelines and all-gathers"
            )

    @staticmethod
    def get_buffer_size_hint(
        group: ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of symmetric memory of calls of these sizes, but for the experts' padding.

        Args:
            group: the ranks.
            num_max_tokens_per_rank: most tokens of a rank in one call.
            hidden: values of a token.
            num_topk: slots of a token; 0: one for each rank.
            use_fp8_dispatch: taken for DeepEP's signature.
            allow_hybrid_mode: taken for DeepEP's signature.
            allow_multiple_reduction: taken for DeepEP's signature.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
        """
        num_ranks = ranks_of(group)
        num_topk = num_topk or num_ranks
        shape = ThroughputShape(
            num_ranks,
            num_ranks * num_topk,
            num_topk,
            hidden,
            num_max_tokens_per_rank,
            num_ranks * num_max_tokens_per_rank * num_topk,
        )
        return align_up(throughput_buffer_layout(shape).num_bytes, _SIZE_ALIGNMENT)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """SMs that the kernels take: all.

        Args:
            num_experts: of all ranks.
            num_topk: slots of a token.
        """
        gpu = gpu_of(self.device)
        return 4 if gpu is None else gpu.num_sms

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def dispatch(
        self,
        x: Tokens,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tokens, None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send every token to the ranks of its experts, once to each.

        Args:
            x: bfloat16 [tokens, hidden]; or a pair: float8_e4m3fn of that shape and scales, float32
                [tokens, hidden / 128] or int32 of the same shape with four UE8M0 bytes each, of 32
                values.
            topk_idx: int64 or int32 [tokens, topk]; -1 names nobody. None with a handle.
            topk_weights: float32 [tokens, topk], sent along. None with a handle.
            cumulative_local_expert_recv_stats: int32 [local experts]; the call adds the rows of
                each expert.
            num_experts: experts of all ranks; with a handle as before.
            num_max_tokens_per_rank: by default that of the buffer.
            expert_alignment: rows of an expert begin at a multiple of this, a power of two; 1 by
                default.
            num_sms: CTAs of the kernels, if memory is made for this call; 0: all SMs.
            num_qps: taken for DeepEP's signature, and not needed.
            previous_event: what the current stream waits for first.
            previous_event_before_epilogue: the same.
            async_with_compute_stream: whether `event` is one to wait for. Kernels run on the
                current stream.
            allocate_on_comm_stream: taken for DeepEP's signature, and not needed.
            handle: of an earlier dispatch, whose ways the rows of x go.
            do_handle_copy: whether the handle has a copy of topk_idx.
            do_cpu_sync: whether the host waits for the number of rows, and gets no more than these;
                by default unless there is a handle.
            do_expand: only True.
            do_zero_padding: taken for DeepEP's signature: padding between experts is always zero.
            use_tma_aligned_col_major_sf: scales of neighbouring rows lie side by side, and columns
                begin at multiples of 16 bytes.

        Returns recv_x like x, None, recv_topk_weights float32 [rows] or None, the handle and the
        event. Without the host's wait there are as many rows as can come; those behind the last
        expert's are not written.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes
                the object usable again. On a GPU the next call raises it.
            MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is
                missing. It is a MegaMoEError.
            CompileError: NVRTC refused the kernel.
        """
        flags = {
            "do_handle_copy": do_handle_copy,
            "do_expand": do_expand,
            "use_tma_aligned_col_major_sf": use_tma_aligned_col_major_sf,
        }
        for name, flag in flags.items():
            require_type(name, flag, bool, "a bool")
        if not do_expand:
            raise ValueError("do_expand must be True: there is a row for each slot here")
        _wait_for(previous_event, previous_event_before_epilogue)
        tokens, scales, token_format = _taken_apart(x)
        if handle is None:
            layer = self._laid_out(
                tokens, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, num_sms
            )
        else:
            layer = self._layer_of(handle)
            _refuse_with_handle(topk_idx, topk_weights, do_cpu_sync)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            require_type(STATISTICS, stats, torch.Tensor, "a tensor or None")
            size = (layer.shape.num_experts_per_rank,)
            check_tensor(STATISTICS, stats, torch.int32, size, self.device)
            given = {
                "x": tokens,
                "x's scales": scales,
                "topk_idx": topk_idx,
                "topk_weights": topk_weights,
            }
            for name, tensor in given.items():
                if tensor is not None:
                    require_type(name, tensor, torch.Tensor, "a tensor")
                    check_dense(name, tensor)
            refuse_shared_memory({STATISTICS: stats}, given)
        with named_as(_NAMES):
            received, rows = layer.dispatch(
                tokens,
                topk_idx,
                topk_weights=topk_weights,
                x_sf=scales,
                token_format=token_format,
                handle=None if handle is None else handle.rows,
            )
        if stats is not None:
            stats.add_(received.expert_count)
        num_rows = layer.shape.max_recv_rows
        if handle is None:
            assert topk_idx is not None
            counts: list[int] = []
            if do_cpu_sync is None or do_cpu_sync:
                begins = [*received.expert_begin.tolist(), int(received.num_rows)]
                counts = [end - begin for begin, end in itertools.pairwise(begins)]
                num_rows = begins[-1]
            handle = EPHandle(
                True,
                layer.shape.num_experts,
                layer.shape.expert_alignment,
                layer.shape.max_tokens_per_rank,
                num_sms,
                topk_idx.clone() if do_handle_copy else topk_idx,
                counts,
                received.expert_begin + received.expert_count,
                received.expert_count,
                rows,
            )
        elif handle.num_recv_tokens_per_expert_list:
            num_rows = sum(handle.num_recv_tokens_per_expert_list)
        recv_x: Tokens = received.x[:num_rows]
        if received.x_sf is not None:
            recv_sf = received.x_sf[:num_rows]
            if use_tma_aligned_col_major_sf:
                recv_sf = by_column(recv_sf)
            recv_x = received.x[:num_rows], recv_sf
        weights = received.topk_weights
        event = EventOverlap(EventHandle()) if async_with_compute_stream else EventOverlap()
        return recv_x, None, None if weights is None else weights[:num_rows], handle, event

    @described_as(dispatch)
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back and add those of each token: bfloat16 [tokens, hidden].

        Other arguments and errors are as of `dispatch`.

        Args:
            x: bfloat16 [rows, hidden], rows where the dispatch had them.
            handle: what the dispatch returned.
            topk_weights: float32 [rows], numbers of rows that go back to their slots.
            bias: only None.
            num_sms: taken for DeepEP's signature: as of the dispatch.

        Returns the sums, topk_weights as float32 [tokens, topk] or None, and the event. A sum goes
        over the token's slots in their order in float32, and is rounded to bfloat16 once.
        """
        layer = self._layer_of(handle)
        if bias is not None:
            raise ValueError("bias must be None: add it to the result; got a tensor")
        _wait_for(previous_event, previous_event_before_epilogue)
        most, hidden = layer.shape.max_recv_rows, layer.shape.hidden
        require_type("x", x, torch.Tensor, "a tensor")
        if x.ndim != 2 or x.shape[0] > most:
            raise ValueError(
                f"x must be [rows, hidden] with at most {most} rows; got shape {tuple(x.shape)}"
            )
        num_rows = x.shape[0]
        check_tensor("x", x, torch.bfloat16, (num_rows, hidden), self.device)
        if topk_weights is not None:
            require_type("topk_weights", topk_weights, torch.Tensor, "a tensor or None")
            check_tensor("topk_weights", topk_weights, torch.float32, (num_rows,), self.device)
        with named_as(_NAMES):
            out = layer.combine(_with_rows(x, most), handle.rows)
            numbers = None
            if topk_weights is not None:
                numbers = layer.return_scalars(_with_rows(topk_weights, most), handle.rows)
        event = EventOverlap(EventHandle()) if async_with_compute_stream else EventOverlap()
        return out, numbers, event

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait on the host until all ranks are here, and what is on the current stream is done.

        Args:
            use_comm_stream: taken for DeepEP's signature.
            with_cpu_sync: taken for DeepEP's signature: the host waits.
            sequential: taken for DeepEP's signature.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.group is not None:
            gather_objects(None, self.group)

    def destroy(self) -> None:
        """Give the memory back. The buffer cannot be used after this."""
        if self._layer is not None:
            self._layer.close()
        self._layer = None
        self._is_destroyed = True

    def _laid_out(
        self,
        values: torch.Tensor,
        topk_idx: torch.Tensor | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
        num_sms: int,
    ) -> AllToAll:
        """For calls of these sizes."""
        if self._is_destroyed:
            raise ValueError("ElasticBuffer must be open; this one was destroyed")
        require_type("topk_idx", topk_idx, torch.Tensor, "a tensor, unless there is a handle")
        assert topk_idx is not None
        if values.ndim != 2 or topk_idx.ndim != 2:
            raise ValueError(
                "x must be [tokens, hidden] and topk_idx [tokens, topk]; got shapes "
                f"{tuple(values.shape)} and {tuple(topk_idx.shape)}"
            )
        most = self.num_max_tokens_per_rank
        most = most if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        for name, size in {"num_max_tokens_per_rank": most, "num_experts": num_experts}.items():
            if require_int(name, size, "at least 1") < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        assert num_experts is not None
        alignment = 1 if expert_alignment is None else expert_alignment
        allowed = f"a power of two, 1 to {MAX_ALIGNMENT}"
        value = require_int("expert_alignment", alignment, allowed)
        if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise ValueError(f"expert_alignment must be {allowed}; got {value}")
        num_topk, hidden = topk_idx.shape[1], values.shape[1]
        num_rows = self.num_ranks * most * num_topk
        num_rows += -(-num_experts // self.num_ranks) * max(0, alignment - 1)
        with named_as(_NAMES):
            wanted = ThroughputShape(
                self.num_ranks, num_experts, num_topk, hidden, most, num_rows, alignment
            )
        if self._layer is None or self._layer.shape != wanted:
            if self._layer is not None:
                self._layer.close()
                self._layer = None
            self._layer = AllToAll(
                self.group,
                most,
                hidden,
                num_experts,
                num_topk,
                num_rows,
                expert_alignment=alignment,
                device=self.device,
                num_sms=num_sms or None,
                timeout_s=self._timeout_s,
            )
        return self._layer

    def _layer_of(self, handle: Any) -> AllToAll:
        require_type("handle", handle, EPHandle, "what a dispatch returned")
        if self._layer is None or handle.rows.layer is not self._layer:
            raise ValueError(
                "handle must be of a dispatch since the memory was made for the sizes of the "
                "calls; got one of before, or of another ElasticBuffer"
            )
        return self._layer


def _wait_for(*events: EventHandle | None) -> None:
    for event in events:
        if event is not None:
            event.current_stream_wait()


def _refuse_with_handle(
    topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, do_cpu_sync: bool | None
) -> None:
    given = {"topk_idx": topk_idx, "topk_weights": topk_weights}
    for name, tensor in given.items():
        if tensor is not None:
            raise ValueError(f"{name} must be None with a handle; got a tensor")
    if do_cpu_sync:
        raise ValueError("do_cpu_sync must be False or None with a handle; got True")


def _taken_apart(x: Tokens) -> tuple[torch.Tensor, torch.Tensor | None, TokenFormatName]:
    """Tokens, scales in rows, and what that is called."""
    if not isinstance(x, tuple):
        require_type("x", x, torch.Tensor, "a tensor, or a pair of tensors")
        return x, None, "bf16"
    if len(x) != 2:
        raise ValueError(f"x must be a tensor or a pair of tensors; got {len(x)} of them")
    values, scales = x
    for name, tensor in {"x[0]": values, "x[1]": scales}.items():
        require_type(name, tensor, torch.Tensor, "a tensor")
    if scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"x[1] must be float32 or int32; got {scales.dtype}")
    token_format: TokenFormatName = "fp8_128" if scales.dtype == torch.float32 else "mxfp8"
    return values, scales.contiguous(), token_format


def by_column(scales: torch.Tensor) -> torch.Tensor:
    """The same [rows, words], neighbouring rows side by side, columns aligned as TMA wants them."""
    num_rows, num_words = scales.shape
    size = (num_words, align_up(max(num_rows, 1), _SF_ALIGNMENT))
    columns = torch.zeros(size, dtype=scales.dtype, device=scales.device)
    columns[:, :num_rows].copy_(scales.mT)
    return columns.mT[:num_rows]


def _with_rows(given: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The first rows of so many; the others are nobody's."""
    if given.shape[0] == num_rows and given.is_contiguous():
        return given
    rows = given.new_zeros((num_rows, *given.shape[1:]))
    rows[: given.shape[0]].copy_(given)
    return rows
