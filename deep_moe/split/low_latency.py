"""`LowLatencyAllToAll`: dispatch and combine for small batches, in one kernel each.

docs/split.md says how the kernels work together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.described import described_as
from deep_moe.fused.checks import (
    check_contiguous,
    check_start,
    check_tensor,
    refuse_gradients,
    require_type,
)
from deep_moe.fused.run_settings import RunSettings
from deep_moe.fused.symm_memory import DeviceMemory, HostMemory
from deep_moe.heuristics.low_latency import (
    NUM_HALVES,
    LowLatencyConfig,
    LowLatencyShape,
    Step,
)
from deep_moe.heuristics.shape import require_int
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import LowLatencyArgs

from .handle import Call, Dispatched, DispatchHandle, Progress, own_handle
from .kernels import Launch
from .split_layer import ROW_ALIGNMENT, SplitLayer, name_of_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.low_latency import Placement
    from deep_moe.tokens import TokenFormatName


class LowLatencyAllToAll(SplitLayer):
    """Sends tokens to the ranks of their experts, and brings back what those make of them.

    Args:
        group: a torch.distributed process group, or None for a single rank. Every rank of it makes
            one, with the same arguments, and all call its methods in the same order.
        num_max_tokens_per_rank: most tokens of one call, at most 1024.
        hidden: a multiple of 128.
        num_experts: of all ranks together; rank r owns the r-th part.
        num_topk: slots of a token, at most 32.
        token_format: how tokens travel and arrive: "fp8_128", E4M3 with a float32 scale per 128
            values; "fp8_128_pow2", the same with scales that are powers of two; "fp8_128_ue8m0",
            those as UE8M0 bytes, for a hidden that is a multiple of 512; "mxfp8", E4M3 with a UE8M0
            scale per 32 values; "bf16", not quantized.
        any_format: make room for every format, so that a dispatch may have another one.
        zero_copy: make room for the experts' rows in the buffer, for `get_combine_buffer`.
        scales_by_column: scales lie in memory as [experts, hidden/128, N]: those of neighbouring
            rows side by side.
        placement: "ranks": a token goes once to each rank of its experts, which spreads it there.
            "experts": a token goes once to each of its experts, into memory that is kept for that
            expert and source rank; this takes more bytes over the links and more memory. Results
            are the same.
        relays_tokens: tokens come from elsewhere, quantized, each with a number: `dispatch` takes
            x_sf and origins, and sends x as it is.
        group_size: values per scale for "fp8_128" and "fp8_128_pow2": 16, 32, 64, 128, 256 or 512,
            a divisor of hidden. Scales are [.., hidden/group_size] then.
        dtype: torch.bfloat16 or torch.float16: type of tokens that are not quantized, of the
            experts' rows and of their sums. It takes the place of bfloat16 in what follows.
        device: where the calls run. A CPU runs them in the emulator. By default the current GPU for
            a group with NCCL and, if there is a GPU, for None; otherwise the CPU.
        num_sms: CTAs of a kernel, equal on all ranks; by default all SMs of the GPU, 4 on a CPU.
        timeout_s: limit of the kernels' waits for other ranks; by default 60 on GPUs and 600 in the
            emulator. After it MegaMoETimeoutError says who waited for whom, and `reset()` is
            needed.
        arch: "sm_100a" and so on; by default that of the GPU, sm_100a on a CPU.
        checked: check the expert ids, for which a call on a GPU waits; on a CPU also look for races
            in the kernels. By default only on CPUs. Unchecked, an id out of range is taken as -1.
        schedule_seed: on a CPU, picks the order in which the emulator interleaves warps.
        enable_profiling: let the kernels stamp their phases, for `dump_dispatch_trace` and
            `dump_combine_trace`. Calls take a few microseconds longer.

    Calls use the two halves of the buffer in turn: up to two dispatches may be under way, and the
    host waits for none. All kernels of a layer run in the order of the calls: on one stream, or on
    streams that wait for each other. They may be captured in a CUDA graph after a call outside.

    Attributes:
        nbytes: size of the symmetric buffer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        MemoryError: the machine has too little memory for these sizes.
    """

    shape: LowLatencyShape
    _emulated_ranks = "EmulatedAllToAll"

    def __init__(
        self,
        group: ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        token_format: TokenFormatName = "fp8_128",
        any_format: bool = False,
        zero_copy: bool = False,
        scales_by_column: bool = False,
        placement: Placement = "ranks",
        relays_tokens: bool = False,
        group_size: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        num_sms: int | None = None,
        timeout_s: float | None = None,
        arch: str | None = None,
        checked: bool | None = None,
        schedule_seed: int = 0,
        enable_profiling: bool = False,
    ) -> None:
        require_type("token_format", token_format, str, "a str")
        require_type("any_format", any_format, bool, "a bool")
        require_type("zero_copy", zero_copy, bool, "a bool")
        require_type("scales_by_column", scales_by_column, bool, "a bool")
        require_type("placement", placement, str, "a str")
        require_type("relays_tokens", relays_tokens, bool, "a bool")
        sizes = {
            "num_experts": num_experts,
            "num_topk": num_topk,
            "hidden": hidden,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "token_format": token_format,
            "has_shared_rows": zero_copy,
            "any_format": any_format,
            "placement": placement,
            "relays_tokens": relays_tokens,
            "group_size": group_size,
            "dtype": name_of_dtype(dtype),
        }
        self._join(
            group,
            LowLatencyShape,
            sizes,
            device,
            RunSettings(num_sms, timeout_s, arch, checked, schedule_seed),
            {},
            scales_by_column=scales_by_column,
            enable_profiling=enable_profiling,
        )

    def _set_up(
        self,
        shape: LowLatencyShape,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None,
        run: RunSettings,
        enable_profiling: bool = False,
        scales_by_column: bool = False,
    ) -> None:
        super()._set_up(shape, memory, group, run, enable_profiling)
        self._scales_by_column = scales_by_column
        self._calls: list[Call | None] = [None] * NUM_HALVES

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"LowLatencyAllToAll(rank {self.rank} of {shape.num_ranks} on {self.device}, "
            f"{shape.num_experts} experts, top-{shape.num_topk}, hidden {shape.hidden}, "
            f"{shape.token_format}, up to {shape.num_max_tokens_per_rank} tokens, "
            f"{self.nbytes / 2**20:.1f} MiB, {self._buffer.state})"
        )

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        *,
        x_sf: torch.Tensor | None = None,
        origins: torch.Tensor | None = None,
        token_format: TokenFormatName | None = None,
        receive: bool = True,
        expert_totals: torch.Tensor | None = None,
        wait_cycles: torch.Tensor | None = None,
    ) -> Dispatched:
        """Send every token to the ranks of its experts, and receive those of the local ones.

        Args:
            x: bfloat16 [tokens, hidden]; tokens may be 0 and may differ between ranks. With
                relays_tokens float8_e4m3fn, unless token_format is "bf16".
            topk_idx: int64 or int32 [tokens, topk], global expert ids; -1: the slot is not used. A
                token that names an expert in several slots is sent there once.
            x_sf: with relays_tokens, scales of x, [tokens, hidden/128]: float32, whose values are
                powers of two for "fp8_128_pow2" and "fp8_128_ue8m0", or int32 with four UE8M0 bytes
                for "mxfp8"; else None.
            origins: with relays_tokens, int32 [tokens], numbers that `src_info` gives in place of
                the tokens' own; else None.
            token_format: of this call, equal on all ranks, if the layer was made with
                any_format=True; by default the layer's.
            receive: False only sends. The results are written by `receive(handle)`, which must come
                before the next dispatch.
            expert_totals: int32 [local experts]; the call adds the rows of each expert.
            wait_cycles: int64 [ranks]; the call adds the clocks of an SM until that rank's tokens
                had come.

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
        launch, result = self.prepare_dispatch(
            x,
            topk_idx,
            x_sf=x_sf,
            origins=origins,
            token_format=token_format,
            receive=receive,
            expert_totals=expert_totals,
            wait_cycles=wait_cycles,
        )
        self.run(launch)
        return result

    @described_as(dispatch)
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

        Errors are as of `dispatch`.

        Args:
            y: bfloat16 [local experts, N, hidden], where recv_x had its rows; with zero_copy, what
                `get_combine_buffer(handle)` gave, on all ranks.
            topk_idx: as given to the dispatch.
            topk_weights: float32 [tokens, topk].
            handle: what the dispatch returned.
            out: where to write the result, by default a new tensor.
            zero_copy: whether `y` is what `get_combine_buffer(handle)` gave.
            receive: False only sends; `receive(handle)` writes the result, before the next dispatch
                but one.
            again: this handle has been combined before, on all ranks; they wait for each other
                first, so this takes a round between ranks longer.
            wait_cycles: int64 [ranks]; the call adds the clocks of an SM until that rank's rows had
                come.

        A token's sum goes over its used slots in their order: weight times row, in float32, each
        product and each sum rounded; the end is rounded to bfloat16 once. So it does not depend on
        who comes first.
        """
        launch, result = self.prepare_combine(
            y,
            topk_idx,
            topk_weights,
            handle,
            out,
            zero_copy=zero_copy,
            receive=receive,
            again=again,
            wait_cycles=wait_cycles,
        )
        self.run(launch)
        return result

    def get_combine_buffer(self, handle: DispatchHandle) -> torch.Tensor:
        """Memory for the experts' rows from which the other ranks fetch them: bfloat16 [local
        experts, N, hidden], for a `combine` with zero_copy. No row is copied then before it is
        added.

        It is there once: for the newest dispatch, whose combine must be received before the next
        one. The layer must have been made with zero_copy=True.

        Args:
            handle: of the newest dispatch.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            MegaMoEError: the last kernel gave up; the text says why.
        """
        self._buffer.raise_if_unusable()
        self._check_handle(handle)
        if not self.shape.has_shared_rows:
            raise ValueError(
                "get_combine_buffer needs a layer with zero_copy=True; this one has False"
            )
        call = handle.call
        # After a combine from elsewhere the rows may still be given, for one that is made again.
        may_fill = call.progress is Progress.RECEIVED or (
            call.progress is Progress.DONE and not call.is_fetched
        )
        if call is not self._call_before(1) or not may_fill:
            raise ValueError(
                "handle must be of the newest dispatch, received and not combined from this "
                f"buffer; got that of call {call.number}: {call.progress.value}"
            )
        call.has_buffer = True
        return self._shared_rows()

    def receive(self, handle: DispatchHandle) -> None:
        """Receive what a dispatch or combine with `receive=False` has sent. Its results are valid
        behind this, on the stream.

        Args:
            handle: of the dispatch or combine.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
            MegaMoEError: the kernel gave up, or an earlier call did; `reset()` on every rank makes
                the object usable again. On a GPU the next call raises it.
            MegaMoETimeoutError: a wait took longer than `timeout_s`; the text names what is
                missing. It is a MegaMoEError.
        """
        self.run(self.prepare_receive(handle))

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, from the next call on; an empty list lets all take part.

        Their experts' slots count as unused, their tokens as none. All remaining ranks must do this
        between the same two calls; after a call that failed because of those ranks, behind a
        `reset` of each remaining rank.

        Args:
            ranks: numbers of the ranks to leave out.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a value, shape, dtype or device that is not allowed; the
                text names it.
        """
        masked = torch.zeros(self.shape.num_ranks, dtype=torch.int32)
        for rank in ranks:
            require_int("ranks", rank, f"0 to {self.shape.num_ranks - 1} each")
            if not 0 <= rank < self.shape.num_ranks or rank == self.rank:
                raise ValueError(
                    f"ranks must be other ranks, 0 to {self.shape.num_ranks - 1} but not "
                    f"{self.rank}; got {rank}"
                )
            masked[rank] = 1
        self._buffer.raise_if_closed()
        self._masked_ranks().copy_(masked)

    def masked_ranks(self) -> list[int]:
        """The ranks that `mask_ranks` left out. Waits for the device."""
        self._buffer.raise_if_closed()
        return [int(rank) for rank in self._masked_ranks().nonzero().flatten()]

    def reset(self, group: ProcessGroup | None = None) -> None:
        """Make the layer usable again after a failed call. Every rank of the group must call this;
        it returns when all have. Handles become invalid, and all ranks take part again.

        Args:
            group: if ranks are dead, a group of all others, which are those that call; it has to
                have been made before. `mask_ranks` comes next then.
        """
        self._buffer.reset(group)
        self._generation += 1
        self._calls = [None] * NUM_HALVES

    # What follows is called by `EmulatedAllToAll` too.

    def prepare_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        *,
        x_sf: torch.Tensor | None = None,
        origins: torch.Tensor | None = None,
        token_format: TokenFormatName | None = None,
        receive: bool = True,
        expert_totals: torch.Tensor | None = None,
        wait_cycles: torch.Tensor | None = None,
    ) -> tuple[Launch, Dispatched]:
        """The first kernel of a dispatch, after all checks."""
        self._buffer.raise_if_unusable()
        shape = self._shape_of(token_format)
        self._check_tokens(x, x_sf, origins, shape)
        num_tokens = x.shape[0]
        if num_tokens > shape.num_max_tokens_per_rank:
            raise ValueError(
                f"x must have at most num_max_tokens_per_rank ({shape.num_max_tokens_per_rank}) "
                f"tokens; got {num_tokens}"
            )
        self._check_topk_idx(topk_idx, num_tokens)
        self._check_statistics("expert_totals", expert_totals, torch.int32)
        self._check_statistics("wait_cycles", wait_cycles, torch.int64)
        if torch.is_grad_enabled():
            refuse_gradients(x=x)
        statistics = {"expert_totals": expert_totals, "wait_cycles": wait_cycles}
        given = {"x": x, "topk_idx": topk_idx, "x_sf": x_sf, "origins": origins}
        read = {name: tensor for name, tensor in given.items() if tensor is not None}
        self._check_written(statistics, read)
        last, older = self._call_before(1), self._call_before(2)
        if last is not None and last.progress is Progress.SENT:
            raise ValueError(
                "dispatch must follow receive(handle) of the dispatch before it; "
                f"call {last.number} has only been sent"
            )
        if last is not None and last.has_buffer and last.progress is not Progress.DONE:
            raise ValueError(
                "dispatch must follow the combine of the call before it, which has the combine "
                f"buffer; of call {last.number}, {last.progress.value}"
            )
        if older is not None and older.progress is Progress.RETURNING:
            raise ValueError(
                "dispatch must follow receive(handle) of the combine two calls before it, because "
                "both use the same half of the buffer; the combine of call "
                f"{older.number} has only been sent"
            )
        progress = Progress.RECEIVED if receive else Progress.SENT
        call = Call(self._num_dispatches, self._generation, progress)
        result = self._empty_result(shape, call, num_tokens)
        handle = result.handle
        args = self._args(num_tokens, topk_idx, handle)
        args.x = x.data_ptr()
        if x_sf is not None:
            args.x_sf = x_sf.data_ptr()
        if origins is not None:
            args.origins = origins.data_ptr()
        args.recv_x = result.recv_x.data_ptr()
        args.src_info = result.src_info.data_ptr()
        if result.scales is not None:
            args.recv_scales = result.scales.data_ptr()
            strides = result.scales.stride()
            args.scale_expert_stride, args.scale_row_stride, args.scale_column_stride = strides
        if expert_totals is not None:
            args.expert_totals = expert_totals.data_ptr()
        if wait_cycles is not None:
            args.wait_cycles = wait_cycles.data_ptr()
        sent = {"call_idx": handle.call_idx, "sent_rows": handle.sent_rows}
        optional = {"scales": result.scales, **statistics}
        written = {
            "recv_x": result.recv_x,
            "recv_count": handle.recv_count,
            "src_slots": handle.src_slots,
            "src_info": result.src_info,
            "layout_range": handle.layout_range,
            **{name: tensor for name, tensor in optional.items() if tensor is not None},
        }
        config = self._config(shape, "dispatch", topk_idx)
        if receive:
            launch = self._launch(config, call, args, read, {**sent, **written})
        else:
            launch = self._launch(replace(config, receives=False), call, args, read, sent)
            call.pending = self._launch(replace(config, sends=False), call, args, sent, written)
        self._calls[self._num_dispatches % NUM_HALVES] = call
        self._num_dispatches += 1
        return launch, result

    def prepare_combine(
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
    ) -> tuple[Launch, torch.Tensor]:
        """The first kernel of a combine, after all checks."""
        self._buffer.raise_if_unusable()
        shape = self.shape
        self._check_handle(handle)
        call = handle.call
        if call.progress is Progress.SENT:
            raise ValueError(
                f"combine must follow receive(handle) of its dispatch; call {call.number} has only "
                "been sent"
            )
        if call.progress is not (Progress.DONE if again else Progress.RECEIVED):
            allowed = "one that has been combined, for again" if again else "used for one combine"
            raise ValueError(
                f"handle must be {allowed}; that of call {call.number} has been: "
                f"{call.progress.value}"
            )
        if again and call.is_fetched:
            raise ValueError(
                "again must be False for a handle whose rows the other ranks have fetched: they "
                "may still be fetching them"
            )
        rows = (shape.num_experts_per_rank, shape.num_rows_per_expert, shape.hidden)
        check_tensor("y", y, self.dtype, rows, self.device)
        check_contiguous("y", y)
        check_start("y", y, ROW_ALIGNMENT)
        if zero_copy != call.has_buffer or (
            zero_copy and y.data_ptr() != self._shared_rows().data_ptr()
        ):
            raise ValueError(
                "y must be what get_combine_buffer(handle) gave if zero_copy is True, which it "
                f"must be if that was called; got zero_copy={zero_copy}"
            )
        num_tokens = handle.num_tokens
        self._check_topk_idx(topk_idx, num_tokens)
        self._check_statistics("wait_cycles", wait_cycles, torch.int64)
        slots = (num_tokens, shape.num_topk)
        check_tensor("topk_weights", topk_weights, torch.float32, slots, self.device)
        check_contiguous("topk_weights", topk_weights)
        if torch.is_grad_enabled():
            refuse_gradients(y=y, topk_weights=topk_weights)
        given = {"y": y, "topk_idx": topk_idx, "topk_weights": topk_weights}
        out = self._out_rows(out, num_tokens, given)
        self._check_written({"wait_cycles": wait_cycles}, {**given, "out": out})
        args = self._args(num_tokens, topk_idx, handle)
        args.y = y.data_ptr()
        args.topk_weights = topk_weights.data_ptr()
        args.out = out.data_ptr()
        if again:
            args.num_earlier_combines = call.num_combines
        if wait_cycles is not None:
            args.wait_cycles = wait_cycles.data_ptr()
        sent = {
            **({} if zero_copy else {"y": y}),
            "call_idx": handle.call_idx,
            "recv_count": handle.recv_count,
            "src_slots": handle.src_slots,
            "layout_range": handle.layout_range,
            "sent_rows": handle.sent_rows,
        }
        received = {"topk_idx": topk_idx, "topk_weights": topk_weights}
        statistics = {} if wait_cycles is None else {"wait_cycles": wait_cycles}
        written = {"out": out, **statistics}
        config = replace(
            self._config(shape, "combine", topk_idx), fetches_rows=zero_copy, repeats=again
        )
        if receive:
            launch = self._launch(config, call, args, {**sent, **received}, written)
            call.progress = Progress.DONE
        else:
            # One that is made again waits before it sends.
            waited = statistics if again else {}
            launch = self._launch(replace(config, receives=False), call, args, sent, waited)
            received |= {"call_idx": handle.call_idx, "sent_rows": handle.sent_rows}
            call.pending = self._launch(replace(config, sends=False), call, args, received, written)
            call.progress = Progress.RETURNING
        call.num_combines += 1
        call.is_fetched = zero_copy
        return launch, out

    def prepare_receive(self, handle: DispatchHandle) -> Launch:
        """The kernel that receives, after all checks."""
        self._buffer.raise_if_unusable()
        self._check_handle(handle)
        call = handle.call
        if call.pending is None:
            raise ValueError(
                f"receive must follow a dispatch or a combine with receive=False; call "
                f"{call.number} has nothing to receive: {call.progress.value}"
            )
        launch = call.pending
        call.pending = None
        is_dispatch = call.progress is Progress.SENT
        call.progress = Progress.RECEIVED if is_dispatch else Progress.DONE
        return launch

    def _left_out(self, launch: Launch) -> list[int]:
        return self.masked_ranks()

    def _agreed(self, launch: Launch) -> dict[str, Any]:
        config = launch.config
        assert isinstance(config, LowLatencyConfig)
        return {
            "step": config.step,
            "sends": config.sends,
            "receives": config.receives,
            "zero_copy": config.fetches_rows,
            "again": config.repeats,
            "token_format": config.shape.token_format,
        }

    def _config(
        self, shape: LowLatencyShape, step: Step, topk_idx: torch.Tensor
    ) -> LowLatencyConfig:
        """Of a kernel that both sends and receives."""
        return LowLatencyConfig(
            shape,
            step,
            num_ctas=self._settings.num_sms,
            arch=self._settings.arch,
            has_int32_topk_idx=topk_idx.dtype == torch.int32,
        )

    def _launch(
        self,
        config: LowLatencyConfig,
        call: Call,
        args: CppStruct,
        read: dict[str, torch.Tensor],
        written: dict[str, torch.Tensor],
    ) -> Launch:
        if self._profile is None:
            return Launch(config, args, read, written)
        config = replace(config, trace=True)
        trace = self._profile.attach(config, call.number, self.device)
        own_args = LowLatencyArgs.from_buffer_copy(args)
        own_args.trace = trace.data_ptr()
        return Launch(config, own_args, read, {**written, "trace": trace})

    def _shape_of(self, token_format: TokenFormatName | None) -> LowLatencyShape:
        if token_format is None or token_format == self.shape.token_format:
            return self.shape
        if not self.shape.any_format:
            raise ValueError(
                f"token_format must be that of the layer, {self.shape.token_format!r}, or None, "
                f"unless it was made with any_format=True; got {token_format!r}"
            )
        return replace(self.shape, token_format=token_format)

    def _args(self, num_tokens: int, topk_idx: torch.Tensor, handle: DispatchHandle) -> CppStruct:
        memory = self._buffer.memory
        args = LowLatencyArgs()
        for rank, address in enumerate(memory.addresses):
            args.rank_buffers[rank] = address
        args.status = memory.status_address
        args.wait_timeout_ns = self._settings.wait_timeout_ns
        args.rank_idx = self.rank
        args.num_tokens = num_tokens
        args.topk_idx = topk_idx.data_ptr()
        args.call_idx = handle.call_idx.data_ptr()
        args.recv_count = handle.recv_count.data_ptr()
        args.src_slots = handle.src_slots.data_ptr()
        args.layout_range = handle.layout_range.data_ptr()
        args.sent_rows = handle.sent_rows.data_ptr()
        return args

    def _empty_result(self, shape: LowLatencyShape, call: Call, num_tokens: int) -> Dispatched:
        num_experts, num_rows = shape.num_experts_per_rank, shape.num_rows_per_expert

        def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        scales = None
        dtype = shape.tokens.scale_torch_dtype
        if dtype is not None:
            num_words = shape.num_received_scale_words
            if self._scales_by_column:
                scales = empty((num_experts, num_words, num_rows), dtype).mT
            else:
                scales = empty((num_experts, num_rows, num_words), dtype)
        handle = DispatchHandle(
            layer=self,
            call=call,
            num_tokens=num_tokens,
            call_idx=empty((1,), torch.int32),
            recv_count=empty((num_experts,), torch.int32),
            src_slots=empty((num_experts, num_rows), torch.int32),
            layout_range=empty((num_experts, shape.num_ranks), torch.int64),
            sent_rows=empty((shape.num_ranks,), torch.int32),
        )
        values = torch.float8_e4m3fn if shape.num_scale_words else self.dtype
        return Dispatched(
            empty((num_experts, num_rows, shape.hidden), values),
            scales,
            handle.recv_count,
            empty((num_experts, num_rows), torch.int32),
            handle.layout_range,
            handle,
        )

    def _call_before(self, age: int) -> Call | None:
        """The newest call (1) or the one before it (2)."""
        if age > self._num_dispatches:
            return None
        return self._calls[(self._num_dispatches - age) % NUM_HALVES]

    def _check_tokens(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        origins: torch.Tensor | None,
        shape: LowLatencyShape,
    ) -> None:
        if not shape.relays_tokens:
            for name, tensor in {"x_sf": x_sf, "origins": origins}.items():
                if tensor is not None:
                    raise ValueError(f"{name} must be None without relays_tokens; got a tensor")
            self._check_rows("x", x, shape.hidden, self.dtype)
            return
        given = shape.tokens.dtype if shape.tokens.has_scales else self.dtype
        self._check_rows("x", x, shape.hidden, given)
        num_tokens = x.shape[0]
        require_type("origins", origins, torch.Tensor, "a tensor with relays_tokens")
        numbers: dict[str, tuple[torch.Tensor | None, torch.dtype, tuple[int, ...]]] = {
            "origins": (origins, torch.int32, (num_tokens,))
        }
        dtype = shape.tokens.scale_torch_dtype
        if dtype is None:
            if x_sf is not None:
                raise ValueError(
                    f"x_sf must be None for token_format {shape.token_format!r}; got a tensor"
                )
        else:
            require_type("x_sf", x_sf, torch.Tensor, "a tensor with relays_tokens")
            # Scales are packed on the way out.
            of_words = torch.float32 if shape.tokens.packs_scales else dtype
            numbers["x_sf"] = (x_sf, of_words, (num_tokens, shape.num_scale_words))
        for name, (tensor, of_type, size) in numbers.items():
            assert tensor is not None
            check_tensor(name, tensor, of_type, size, self.device)
            check_contiguous(name, tensor)

    def _check_handle(self, handle: DispatchHandle) -> None:
        call = own_handle(handle, DispatchHandle, self).call
        self._check_generation(call.generation)
        age = self._num_dispatches - call.number
        if age > NUM_HALVES:
            raise ValueError(
                f"handle must be of one of the last {NUM_HALVES} dispatches, since a later one "
                f"takes its half of the buffer; got that of call {call.number}, and the newest is "
                f"{self._num_dispatches - 1}"
            )

    def _check_statistics(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> None:
        if tensor is None:
            return
        shape = self.shape
        size = shape.num_experts_per_rank if name == "expert_totals" else shape.num_ranks
        check_tensor(name, tensor, dtype, (size,), self.device)
        check_contiguous(name, tensor)

    def _masked_ranks(self) -> torch.Tensor:
        return self._segment("masked_ranks").view(torch.int32)

    def _shared_rows(self) -> torch.Tensor:
        shape = self.shape
        rows = self._segment("shared_rows").view(self.dtype)
        return rows.view(shape.num_experts_per_rank, shape.num_rows_per_expert, shape.hidden)
