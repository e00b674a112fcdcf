"""DeepEP's `Buffer`, over one `LowLatencyAllToAll` at a time in memory that is there once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deep_moe.described import described_as
from deep_moe.fused.buffer import device_for, memory_for, ranks_of, require_equal
from deep_moe.fused.checks import STATISTICS, named_as, require_type
from deep_moe.fused.rank_buffer import ClosedBufferError
from deep_moe.heuristics.low_latency import LowLatencyShape, low_latency_buffer_layout
from deep_moe.heuristics.segments import Layout
from deep_moe.heuristics.shape import MAX_TOPK, require_int
from deep_moe.split.handle import Dispatched, DispatchHandle, Progress
from deep_moe.split.kernels import Launch
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.tensor_memory import check_memory

from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.tokens import TokenFormatName

Hook = Callable[[], None]

# What arguments of the layer are called here.
_DISPATCH_NAMES = {"expert_totals": STATISTICS, "wait_cycles": "dispatch_wait_recv_cost_stats"}
_SIZES = {
    "num_max_tokens_per_rank": "num_max_dispatch_tokens_per_rank",
    "hidden": "x's hidden",
    "num_topk": "topk_idx's top-k",
}
_COMBINE_NAMES = {"y": "x", "wait_cycles": "combine_wait_recv_cost_stats"}


class Config:
    """Of DeepEP's throughput kernels, which are not here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "Config is of the throughput kernels; there are only the low-latency ones here"
        )


class LowLatencyHandle(tuple[Any, ...]):
    """What `low_latency_combine` needs: (src_info, layout_range, num_max_dispatch_tokens_per_rank,
    hidden, num_experts), as in DeepEP. It has to be given on as it is: a tuple made of its parts
    does not know its dispatch.

    Attributes:
        src_info: int32 [local experts, ranks * max tokens], the token's index on its rank.
        layout_range: int64 [local experts, ranks], the number of rows from a rank in the low half,
            the first of them in the high half.
    """

    dispatched: DispatchHandle
    topk_idx: torch.Tensor

    @classmethod
    def of_dispatch(
        cls, result: Dispatched, shape: LowLatencyShape, topk_idx: torch.Tensor
    ) -> LowLatencyHandle:
        sizes = (shape.num_max_tokens_per_rank, shape.hidden, shape.num_experts)
        handle = cls((result.src_info, result.layout_range, *sizes))
        handle.dispatched = result.handle
        handle.topk_idx = topk_idx
        return handle


def _in_slots_of(dispatched_idx: torch.Tensor, topk_idx: Any, topk_weights: Any) -> tuple[Any, Any]:
    """topk_idx and topk_weights with each expert in the slot in which it was dispatched: DeepEP
    finds rows by expert, deep_moe's combine by slot. What does not fit is left as it is, for
    combine to refuse."""
    if topk_idx is dispatched_idx:
        return topk_idx, topk_weights
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != dispatched_idx.shape:
            return topk_idx, topk_weights
        if tensor.device != dispatched_idx.device or tensor.layout is not torch.strided:
            return topk_idx, topk_weights
        check_memory(name, tensor)
    if topk_idx.dtype != dispatched_idx.dtype or topk_weights.dtype != torch.float32:
        return topk_idx, topk_weights
    # [tokens, slot of combine, slot of dispatch]
    is_same = (topk_idx[:, :, None] == dispatched_idx[:, None, :]) & (topk_idx >= 0)[:, :, None]
    is_sent, slots = is_same.max(dim=2)
    weights = torch.zeros_like(topk_weights).scatter_add_(1, slots, topk_weights * is_sent)
    is_wanted = torch.zeros_like(topk_weights).scatter_add_(1, slots, is_sent.float()) > 0
    return torch.where(is_wanted, dispatched_idx, -1), weights


class Buffer:
    """Dispatch and combine for small batches, between the ranks of a group.

    Args:
        group: the ranks; None is one rank alone.
        num_nvl_bytes: taken for DeepEP's signature, and not needed.
        num_rdma_bytes: of symmetric memory, as `get_low_latency_rdma_size_hint` says; all ranks
            give the same.
        low_latency_mode: only True.
        num_qps_per_rank: taken for DeepEP's signature, and not needed.
        allow_nvlink_for_low_latency_mode: only True: NVLink is what is used.
        allow_mnnvl: taken for DeepEP's signature, and not needed.
        explicitly_destroy: taken for DeepEP's signature, and not needed.
        enable_shrink: taken for DeepEP's signature, and not needed.
        comm: only None.
        use_fabric: taken for DeepEP's signature, and not needed.
        device: as of `LowLatencyAllToAll`.
        timeout_s: as of `LowLatencyAllToAll`.

    All ranks are in one NVLink domain; others are refused when the memory is made.

    Calls may have any of DeepEP's formats in turn. If a call has other sizes than the one before,
    or another top-k, all ranks wait for each other, handles of before become invalid, and nothing
    may be captured in a CUDA graph meanwhile.

    rank, group_size, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode: as given. num_sms:
    what `set_num_sms` said; only throughput kernels would heed it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: None = None,
        *,
        use_fabric: bool = False,
        device: torch.device | str | int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        require_type("low_latency_mode", low_latency_mode, bool, "a bool")
        if not low_latency_mode:
            raise ValueError(
                "low_latency_mode must be True: there are only the low-latency kernels here; "
                f"got {low_latency_mode}"
            )
        if not allow_nvlink_for_low_latency_mode:
            raise ValueError(
                "allow_nvlink_for_low_latency_mode must be True: ranks write to each other's "
                "memory; got False"
            )
        if comm is not None:
            raise ValueError(f"comm must be None, and the ranks be given as group; got {comm!r}")
        require_int("num_rdma_bytes", num_rdma_bytes, "at least 1")
        if num_rdma_bytes < 1:
            raise ValueError(
                "num_rdma_bytes must be what get_low_latency_rdma_size_hint says; "
                f"got {num_rdma_bytes}"
            )
        self.group = group
        self.group_size = ranks_of(group)
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        device = device_for(group, device)
        if group is not None:
            require_equal({"num_rdma_bytes": num_rdma_bytes, "device": device.type}, group)
        everything = Layout((), num_rdma_bytes, (("control_bytes", 0),))
        self._memory = memory_for(everything, group, device)
        self._timeout_s = timeout_s
        self.rank = self._memory.rank
        self._comm_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_run_ahead = False  # the communication stream, of some other one
        self._layer: LowLatencyAllToAll | None = None
        self._masked: set[int] = set()

    if not TYPE_CHECKING:  # so that mypy still knows which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            """What there is not, or no longer."""
            if name == "_memory":
                raise ClosedBufferError("Buffer must be open; this one was destroyed")
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it is DeepEP's "
                "low-latency all-to-all, without the throughput kernels"
            )

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Taken, for throughput kernels that are not here.

        Args:
            new_num_sms: the number that `Buffer.num_sms` then has.
        """
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that calls of these sizes need at most, in any format and for any top-k.

        Args:
            num_max_dispatch_tokens_per_rank: most tokens of a rank in one call.
            hidden: values of a token.
            num_ranks: ranks of the group.
            num_experts: experts of all ranks.

        Examples:
            >>> Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) >> 20
            588
        """
        shape = _shape_of(
            num_ranks,
            num_max_dispatch_tokens_per_rank,
            hidden,
            num_experts,
            min(MAX_TOPK, num_experts),
        )
        return low_latency_buffer_layout(shape).num_bytes

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Where calls without a hook run."""
        if self._comm_stream is None:
            raise ValueError(f"there is no stream on {self._memory.device}")
        return self._comm_stream

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor,
        LowLatencyHandle,
        EventOverlap,
        Hook | None,
    ]:
        """Send every token to the ranks of its experts.

        Args:
            x: bfloat16 [tokens, hidden].
            topk_idx: int64 [tokens, topk]; -1 names nobody.
            num_max_dispatch_tokens_per_rank: most tokens of a rank in one call, equal on all ranks.
            num_experts: experts of all ranks.
            cumulative_local_expert_recv_stats: int32 [local experts]; the call adds to each entry
                the rows that this expert received.
            dispatch_wait_recv_cost_stats: int64 [ranks]; the call adds to each entry the clocks
                until that rank's tokens had come.
            use_fp8: E4M3 with a scale per 128 values.
            round_scale: powers of two.
            use_ue8m0: scales as UE8M0 bytes; needs round_scale, and a hidden that is a multiple of
                512.
            async_finish: the current stream does not wait; `event.current_stream_wait()` does.
            return_recv_hook: only send; `hook()` receives.

        Returns recv_x, recv_count int32 [local experts], the handle, event and hook. recv_x is
        bfloat16 [local experts, ranks * max tokens, hidden], or with use_fp8 a pair: float8_e4m3fn
        of that shape, and scales float32 [local experts, ranks * max tokens, hidden / 128] or, with
        use_ue8m0, int32 [.., hidden / 512] with four bytes each; in both the rows lie side by side.

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
        token_format = _format(use_fp8, round_scale, use_ue8m0)
        _refuse_both(async_finish, return_recv_hook)
        require_type("x", x, torch.Tensor, "a tensor")
        require_type("topk_idx", topk_idx, torch.Tensor, "a tensor")
        if x.ndim != 2 or topk_idx.ndim != 2:
            raise ValueError(
                "x must be [tokens, hidden] and topk_idx [tokens, topk]; got shapes "
                f"{tuple(x.shape)} and {tuple(topk_idx.shape)}"
            )
        with named_as(_SIZES):
            shape = _shape_of(
                self.group_size,
                num_max_dispatch_tokens_per_rank,
                x.shape[1],
                num_experts,
                topk_idx.shape[1],
            )
        layer = self._laid_out(shape)
        with named_as(_DISPATCH_NAMES):
            launch, result = layer.prepare_dispatch(
                x,
                topk_idx,
                token_format=token_format,
                receive=not return_recv_hook,
                expert_totals=cumulative_local_expert_recv_stats,
                wait_cycles=dispatch_wait_recv_cost_stats,
            )
        event = self._run(layer, launch, async_finish, return_recv_hook)
        recv_x = result.recv_x if result.scales is None else (result.recv_x, result.scales)
        handle = LowLatencyHandle.of_dispatch(result, layer.shape, topk_idx)
        return recv_x, result.recv_count, handle, event, self._hook(handle, return_recv_hook)

    @described_as(low_latency_dispatch)
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Bring the experts' rows back and add them, weighted: bfloat16 [tokens, hidden].

        Other arguments and errors are as of `low_latency_dispatch`.

        Args:
            x: bfloat16 [local experts, ranks * max tokens, hidden].
            topk_idx: as dispatched, or each token's experts in another order, which costs some
                small kernels.
            topk_weights: float32 [tokens, topk], of the experts in topk_idx.
            handle: what the dispatch returned.
            use_logfmt: only False.
            zero_copy: the rows are in `get_next_low_latency_combine_buffer(handle)`, and x is not
                looked at.
            out: where the result goes.
            combine_wait_recv_cost_stats: int64 [ranks]; the call adds to each entry the clocks
                until that rank's rows had come.

        A handle may be combined several times, by all ranks; with zero_copy the last time only.
        """
        if use_logfmt:
            raise ValueError("use_logfmt must be False: rows travel as bfloat16; got True")
        _refuse_both(async_finish, return_recv_hook)
        layer, dispatched = self._layer_of(handle)
        topk_idx, topk_weights = _in_slots_of(handle.topk_idx, topk_idx, topk_weights)
        with named_as(_COMBINE_NAMES):
            launch, combined = layer.prepare_combine(
                layer.get_combine_buffer(dispatched) if zero_copy else x,
                topk_idx,
                topk_weights,
                dispatched,
                out,
                zero_copy=zero_copy,
                receive=not return_recv_hook,
                again=dispatched.call.progress is Progress.DONE,
                wait_cycles=combine_wait_recv_cost_stats,
            )
        event = self._run(layer, launch, async_finish, return_recv_hook)
        return combined, event, self._hook(handle, return_recv_hook)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Memory for the experts' rows from which a combine with zero_copy takes them: bfloat16
        [local experts, ranks * max tokens, hidden]. For the newest dispatch.

        Args:
            handle: of the newest dispatch.
        """
        layer, dispatched = self._layer_of(handle)
        return layer.get_combine_buffer(dispatched)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Begin again, for calls of these sizes; all ranks together. Handles become invalid.

        Args:
            num_max_dispatch_tokens_per_rank: most tokens of a rank in one call.
            hidden: values of a token.
            num_experts: experts of all ranks.
        """
        layer = self._layer
        if layer is None:
            return
        sizes = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
        shape = layer.shape
        if sizes == (shape.num_max_tokens_per_rank, shape.hidden, shape.num_experts):
            self._begin(layer)
        else:
            self._layer = None  # the next call lays the memory out, and its ranks meet

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of the calls that follow, or let it take part again. All others do the
        same between the same two calls.

        Args:
            rank_to_mask: the rank.
            mask: True leaves the rank out, False lets it take part.
        """
        masked = self._masked | {rank_to_mask} if mask else self._masked - {rank_to_mask}
        self._set_masked(masked)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Say which ranks are left out.

        Args:
            mask_status: int32 [ranks]; becomes 1 for ranks that are left out, otherwise 0.
        """
        require_type("mask_status", mask_status, torch.Tensor, "a tensor")
        if mask_status.shape != (self.group_size,) or mask_status.dtype != torch.int32:
            raise ValueError(
                f"mask_status must be int32 [{self.group_size}]; got {mask_status.dtype} "
                f"{list(mask_status.shape)}"
            )
        mask_status.copy_(
            torch.tensor(
                [int(rank in self._masked) for rank in range(self.group_size)],
                dtype=torch.int32,
                device="cpu",
            )
        )

    def low_latency_clean_mask_buffer(self) -> None:
        """Let all ranks take part again."""
        self._set_masked(set())

    def destroy(self) -> None:
        """Give the symmetric memory back. The buffer cannot be used after this."""
        self._memory.synchronize()
        if self._layer is not None:
            self._layer.close()
            self._layer = None
        del self._memory

    def _laid_out(self, shape: LowLatencyShape) -> LowLatencyAllToAll:
        """The layer of these sizes. If they are new, the ranks meet."""
        memory = self._memory
        if self._layer is not None and self._layer.shape == shape:
            return self._layer
        if memory.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "sizes of a call must be those of the one before while a CUDA graph is captured"
            )
        num_bytes = low_latency_buffer_layout(shape).num_bytes
        if num_bytes > self.num_rdma_bytes:
            raise ValueError(
                f"num_rdma_bytes must be at least {num_bytes} for a call of these sizes, which "
                f"get_low_latency_rdma_size_hint knows; got {self.num_rdma_bytes}"
            )
        layer = LowLatencyAllToAll.of_memory(
            shape, memory, timeout_s=self._timeout_s, scales_by_column=True
        )
        self._begin(layer)
        self._layer = layer
        return layer

    def _begin(self, layer: LowLatencyAllToAll) -> None:
        layer.reset(self.group)
        if self._masked:
            layer.mask_ranks(self._masked)

    def _set_masked(self, masked: set[int]) -> None:
        for rank in masked:
            require_int("rank_to_mask", rank, f"0 to {self.group_size - 1}")
            if not 0 <= rank < self.group_size or rank == self.rank:
                raise ValueError(
                    f"rank_to_mask must be another rank, 0 to {self.group_size - 1} but not "
                    f"{self.rank}; got {rank}"
                )
        if self._layer is not None:
            self._layer.mask_ranks(masked)
        self._masked = masked

    def _layer_of(self, handle: LowLatencyHandle) -> tuple[LowLatencyAllToAll, DispatchHandle]:
        require_type("handle", handle, LowLatencyHandle, "what low_latency_dispatch returned")
        if not hasattr(handle, "dispatched"):
            raise ValueError(
                "handle must be given on as low_latency_dispatch returned it; got one made of parts"
            )
        layer = self._layer
        if layer is None or handle.dispatched.layer is not layer:
            raise ValueError(
                "handle must be of a dispatch since the memory was laid out for the sizes of the "
                "calls; got one of before, or of another Buffer"
            )
        return layer, handle.dispatched

    def _run(
        self, layer: LowLatencyAllToAll, launch: Launch, async_finish: bool, has_hook: bool
    ) -> EventOverlap:
        """On the communication stream, or, with a hook, on the current one; the kernels of all
        calls in order."""
        stream = self._comm_stream
        if stream is None or has_hook:
            if self._has_run_ahead:
                torch.cuda.current_stream().wait_stream(self.get_comm_stream())
                self._has_run_ahead = False
            layer.run(launch)
            return self._event(launch, async_finish)
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            layer.run(launch)
            event = self._event(launch, async_finish)
        if not async_finish:
            current.wait_stream(stream)
        self._has_run_ahead = async_finish
        return event

    @staticmethod
    def _event(launch: Launch, async_finish: bool) -> EventOverlap:
        """It keeps what the kernel uses behind the back of the current stream."""
        if not async_finish:
            return EventOverlap()
        return EventOverlap(EventHandle(), (*launch.read.values(), *launch.written.values()))

    def _hook(self, handle: LowLatencyHandle, has_hook: bool) -> Hook | None:
        if not has_hook:
            return None

        def receive() -> None:
            layer, dispatched = self._layer_of(handle)
            layer.receive(dispatched)

        return receive


def _shape_of(
    num_ranks: int, num_max_tokens: int, hidden: int, num_experts: int, num_topk: int
) -> LowLatencyShape:
    return LowLatencyShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        num_max_tokens_per_rank=num_max_tokens,
        token_format="bf16",
        has_shared_rows=True,
        any_format=True,
    )


def _format(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> TokenFormatName:
    flags = {"use_fp8": use_fp8, "round_scale": round_scale, "use_ue8m0": use_ue8m0}
    for name, flag in flags.items():
        require_type(name, flag, bool, "a bool")
    if (use_ue8m0 and not round_scale) or (round_scale and not use_fp8):
        raise ValueError(
            "use_ue8m0 must come with round_scale, and that with use_fp8; got "
            f"use_fp8={use_fp8}, round_scale={round_scale}, use_ue8m0={use_ue8m0}"
        )
    if not use_fp8:
        return "bf16"
    if use_ue8m0:
        return "fp8_128_ue8m0"
    return "fp8_128_pow2" if round_scale else "fp8_128"


def _refuse_both(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError(
            "async_finish and return_recv_hook must not both be True: a hook runs on the stream "
            "that calls it"
        )
