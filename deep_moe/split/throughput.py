"""`AllToAll`: dispatch and combine for many tokens, into rows by expert without gaps but padding.

docs/split.md says how the kernels work together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deep_moe.described import described_as
from deep_moe.fused.checks import (
    check_contiguous,
    check_own_rank,
    check_start,
    check_tensor,
    refuse_gradients,
    require_type,
)
from deep_moe.fused.options import MASKED_RANKS
from deep_moe.fused.run_settings import RunSettings
from deep_moe.fused.symm_memory import DeviceMemory, HostMemory
from deep_moe.heuristics.throughput import (
    MAX_CTAS,
    Step,
    ThroughputConfig,
    ThroughputShape,
)
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import ThroughputArgs
from deep_moe.tokens import ALL_TO_ALL_FORMATS
from deep_moe.tokens import token_format as token_format_of

from .handle import own_handle
from .kernels import Launch
from .low_latency import LowLatencyAllToAll
from .split_layer import ROW_ALIGNMENT, SplitLayer, name_of_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.tokens import TokenFormatName

# Formats in which a caller may bring quantized tokens. Their scales travel as they are given.
GIVEN_FORMATS = tuple(
    known.name
    for known in map(token_format_of, ALL_TO_ALL_FORMATS)
    if known.has_scales and not known.packs_scales
)


@dataclass(frozen=True, eq=False)
class AllToAllHandle:
    """Where the rows of a dispatch went. A combine needs it, and so does a dispatch that sends
    other rows to the same places. Both may use it any number of times, in any order, until the
    layer is reset or closed.

    Attributes:
        num_tokens: number of tokens of this rank.
        slot_rows: int32 [tokens, topk]: for each slot rank << 24 | row there, -1 if unused.
        expert_begin: as in `Received`.
        expert_count: as in `Received`.
        expert_end: as in `Received`.
        rank_tokens: int32 [ranks], number of tokens of each rank.
        rows_here: int32 [ranks, max_tokens_per_rank, topk]: for each slot of all ranks the row
            here, -1 if it is not for this rank. Entries behind a rank's tokens are not written.
    """

    layer: object
    number: int
    generation: int
    num_tokens: int
    slot_rows: torch.Tensor
    expert_begin: torch.Tensor
    expert_count: torch.Tensor
    expert_end: torch.Tensor
    rank_tokens: torch.Tensor
    rows_here: torch.Tensor

    def __repr__(self) -> str:
        return f"AllToAllHandle(dispatch {self.number} of {self.num_tokens} tokens)"


class Received(NamedTuple):
    """What a rank's experts are given, rows of all local experts one behind the other.

    N = max_recv_rows. An expert's rows lie by source rank, then by token there, then by slot. Rows
    of the padding between its last one and the next expert's first are zero, in x, x_sf and
    topk_weights; what lies behind the last expert's end is not written.

    Attributes:
        x: [N, hidden], bfloat16 or float8_e4m3fn.
        x_sf: [N, hidden/128], float32, or int32 with four UE8M0 bytes each, the lowest group in the
            lowest byte; for "fp8_128_ue8m0" [N, hidden/512], for "bf16" None.
        expert_begin: int32 [local experts], first row, a multiple of expert_alignment.
        expert_count: int32 [local experts], rows without padding.
        expert_end: int32 [local experts], the next expert's begin, or where all rows end: the
            offsets that a grouped product takes.
        topk_weights: float32 [N], of the slot that a row is for; None if the dispatch had none to
            send.
        num_rows: int32 [1], where all rows end, the last of expert_end.
        row_ids: int64 [N], which slot of which token a row is for, -1 of the padding:
            (source rank * max_tokens_per_rank + token) * num_topk + slot; None if the dispatch was
            not asked.
    """

    x: torch.Tensor
    x_sf: torch.Tensor | None
    expert_begin: torch.Tensor
    expert_count: torch.Tensor
    expert_end: torch.Tensor
    topk_weights: torch.Tensor | None
    num_rows: torch.Tensor
    row_ids: torch.Tensor | None = None


@described_as(LowLatencyAllToAll)
class AllToAll(SplitLayer):
    """Sends many tokens to the ranks of their experts, and brings back what those make of them.

    Other arguments and errors are as of `LowLatencyAllToAll`.

    Args:
        max_tokens_per_rank: most tokens of one call, at most 32,768.
        num_experts: of all ranks together, at most 2,048; rank r owns the r-th part.
        max_recv_rows: most rows that the experts of a rank get in one call, padding included.
            Nothing is dropped: if a rank would get more, every rank gets an error that names it and
            the number.
        expert_alignment: each expert's rows begin at a multiple of this, a power of two.
        token_format: how tokens travel and arrive, unless a dispatch says otherwise: "bf16", or one
            of the FP8 formats of `LowLatencyAllToAll`.

    All kernels of a layer run in the order of the calls: on one stream, or on streams that wait for
    each other. The host waits for none; they may be captured in a CUDA graph after a call outside.

    Attributes:
        nbytes: size of the symmetric buffer.
    """

    shape: ThroughputShape
    _emulated_ranks = "EmulatedThroughputAllToAll"

    def __init__(
        self,
        group: ProcessGroup | None,
        max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        max_recv_rows: int,
        *,
        expert_alignment: int = 128,
        token_format: TokenFormatName = "bf16",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        num_sms: int | None = None,
        timeout_s: float | None = None,
        arch: str | None = None,
        checked: bool | None = None,
        schedule_seed: int = 0,
        enable_profiling: bool = False,
    ) -> None:
        sizes = {
            "num_experts": num_experts,
            "num_topk": num_topk,
            "hidden": hidden,
            "max_tokens_per_rank": max_tokens_per_rank,
            "max_recv_rows": max_recv_rows,
            "expert_alignment": expert_alignment,
            "dtype": name_of_dtype(dtype),
        }
        self._join(
            group,
            ThroughputShape,
            sizes,
            device,
            RunSettings(num_sms, timeout_s, arch, checked, schedule_seed),
            {"token_format": token_format},
            token_format=token_format,
            enable_profiling=enable_profiling,
        )

    def _set_up(
        self,
        shape: ThroughputShape,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None,
        run: RunSettings,
        enable_profiling: bool = False,
        token_format: TokenFormatName = "bf16",
    ) -> None:
        super()._set_up(shape, memory, group, run, enable_profiling)
        if self._settings.num_sms > MAX_CTAS:
            raise ValueError(f"num_sms must be 1 to {MAX_CTAS}; got {self._settings.num_sms}")
        self._token_format = token_format
        self._config("dispatch", token_format=token_format)  # or an error
        self._last_step: Step | None = None
        self._masks_ranks = False  # since the last reset

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"AllToAll(rank {self.rank} of {shape.num_ranks} on {self.device}, "
            f"{shape.num_experts} experts, top-{shape.num_topk}, hidden {shape.hidden}, "
            f"{self._token_format}, up to {shape.max_tokens_per_rank} tokens and "
            f"{shape.max_recv_rows} received rows, {self.nbytes / 2**20:.1f} MiB, "
            f"{self._buffer.state})"
        )

    @property
    def token_format(self) -> TokenFormatName:
        """How they travel, unless a dispatch says otherwise."""
        return self._token_format

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        *,
        topk_weights: torch.Tensor | None = None,
        x_sf: torch.Tensor | None = None,
        token_format: TokenFormatName | None = None,
        handle: AllToAllHandle | None = None,
        row_ids: bool = False,
        masked_ranks: torch.Tensor | None = None,
    ) -> tuple[Received, AllToAllHandle]:
        """Send every token to the ranks of its experts, once to each, and receive those of the
        local ones, a row for each slot.

        Args:
            x: bfloat16 [tokens, hidden], quantized on the way if an FP8 format travels; tokens may
                be 0 and may differ between ranks. Or float8_e4m3fn with x_sf, [tokens, hidden/128]
                as in `Received`, for "fp8_128", "fp8_128_pow2" and "mxfp8".
            topk_idx: int64 or int32 [tokens, topk], global expert ids; -1: the slot is not used. A
                token that names an expert in several slots is a row there for each.
            topk_weights: float32 [tokens, topk], sent along, one to each row.
            x_sf: scales [tokens, hidden/128] of an x that is float8_e4m3fn already; None for
                bfloat16.
            token_format: format in which tokens travel in this call; by default the layer's.
            handle: in place of topk_idx, the handle of an earlier dispatch: rows go where its rows
                went. This is combine's gradient. Given topk_weights, each row is multiplied by its
                slot's weight in float32 and rounded once; the weights are then not sent, and
                token_format is "bf16".
            row_ids: whether to return `row_ids`, the slot of each row.
            masked_ranks: int32 [ranks], not 0 for ranks that are left out, the same on all others:
                they have no tokens, and slots that name their experts, or have a row there, are
                not used. With a handle of before, rows of their tokens become zero. No rank waits
                for them or touches their memory. The kernel reads the tensor, so a CUDA graph
                follows what it holds. Once a call has been given it, all calls need it until
                `reset()`, and a rank that was left out stays so until then.

        token_format, and whether there are topk_weights, x_sf and a handle, must be the same on all
        ranks. Returns what was received and the handle for `combine`.

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
            topk_weights=topk_weights,
            x_sf=x_sf,
            token_format=token_format,
            handle=handle,
            row_ids=row_ids,
            masked_ranks=masked_ranks,
        )
        self.run(launch)
        return result

    @described_as(dispatch)
    def combine(
        self,
        y: torch.Tensor,
        handle: AllToAllHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        masked_ranks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring the experts' rows back and add them: bfloat16 [tokens, hidden].

        Other arguments and errors are as of `dispatch`.

        Args:
            y: bfloat16 [max_recv_rows, hidden], rows where the dispatch had them; rows of no token
                are not read. Either `get_combine_buffer()` on all ranks, from which other ranks
                fetch rows; or another tensor on all ranks, whose rows are sent to the tokens'
                ranks and overwrite that buffer there. If ranks differ, each gets an error.
            handle: what the dispatch returned.
            topk_weights: float32 [tokens, topk]; None: the plain sum, which is dispatch's gradient
                too.
            out: where to write the result, by default a new tensor.

        A token's sum goes over its used slots in their order: weight times row, in float32, each
        product and each sum rounded; the end is rounded to bfloat16 once. So it does not depend on
        who comes first. A token without a used slot gets zeros.
        """
        launch, result = self.prepare_combine(
            y, handle, topk_weights=topk_weights, out=out, masked_ranks=masked_ranks
        )
        self.run(launch)
        return result

    @described_as(combine)
    def return_scalars(
        self,
        values: torch.Tensor,
        handle: AllToAllHandle,
        *,
        masked_ranks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring a number of each row back to its slot: float32 [tokens, topk], 0 for slots that are
        not used.

        Other arguments and errors are as of `combine`.

        Args:
            values: float32 [max_recv_rows], a number for each row; for gradients of routing
                weights.
        """
        launch, result = self.prepare_return_scalars(values, handle, masked_ranks=masked_ranks)
        self.run(launch)
        return result

    def get_combine_buffer(self) -> torch.Tensor:
        """Memory for the experts' rows from which the other ranks fetch them: bfloat16
        [max_recv_rows, hidden], for the next combine. It is there once. Behind a combine other
        ranks may still be reading it, until the next dispatch."""
        self._buffer.raise_if_unusable()
        if self._last_step == "combine":
            raise ValueError(
                "get_combine_buffer must follow a dispatch: other ranks may still fetch rows of "
                "the combine before it"
            )
        return self._combine_rows()

    def reset(self, group: ProcessGroup | None = None) -> None:
        """Make the layer usable again after a failed call. Every rank of the group must call this;
        it returns when all have. Handles become invalid.

        Args:
            group: if ranks are dead, a group of all others, which are those that call; it has to
                have been made before. Later calls must mask the dead ones.
        """
        self._buffer.reset(group)
        self._generation += 1
        self._last_step = None
        self._masks_ranks = False

    # What follows is called by `EmulatedThroughputAllToAll` too.

    def prepare_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        *,
        topk_weights: torch.Tensor | None = None,
        x_sf: torch.Tensor | None = None,
        token_format: TokenFormatName | None = None,
        handle: AllToAllHandle | None = None,
        row_ids: bool = False,
        masked_ranks: torch.Tensor | None = None,
    ) -> tuple[Launch, tuple[Received, AllToAllHandle]]:
        """The kernel of a dispatch, after all checks."""
        self._buffer.raise_if_unusable()
        shape = self.shape
        require_type("x", x, torch.Tensor, "a tensor")
        if topk_idx is not None:
            require_type("topk_idx", topk_idx, torch.Tensor, "a tensor or None")
        if (topk_idx is None) == (handle is None):
            raise ValueError(
                "dispatch must have either topk_idx or the handle of an earlier dispatch; got "
                + ("neither" if handle is None else "both")
            )
        config = self._config(
            "dispatch",
            token_format=self._token_format if token_format is None else token_format,
            has_weights=topk_weights is not None,
            is_quantized_input=x.dtype == torch.float8_e4m3fn,
            knows_rows=handle is not None,
            has_int32_topk_idx=topk_idx is not None and topk_idx.dtype == torch.int32,
            masks_ranks=masked_ranks is not None,
        )
        self._check_tokens(x, x_sf, config)
        num_tokens = x.shape[0]
        if torch.is_grad_enabled():
            refuse_gradients(x=x)
        if handle is None:
            assert topk_idx is not None
            if num_tokens > shape.max_tokens_per_rank:
                raise ValueError(
                    f"x must have at most max_tokens_per_rank ({shape.max_tokens_per_rank}) "
                    f"tokens; got {num_tokens}"
                )
            self._check_topk_idx(topk_idx, num_tokens)
            handle = self._empty_handle(num_tokens)
        else:
            self._check_handle(handle)
            if num_tokens != handle.num_tokens:
                raise ValueError(
                    f"x must have as many tokens as the handle's dispatch ({handle.num_tokens}); "
                    f"got {num_tokens}"
                )
            if topk_weights is not None and shape.dtype != "bf16":
                raise ValueError(
                    "topk_weights must be None for a dispatch with a handle and dtype "
                    f"torch.float16: only rows of bfloat16 are multiplied; got {self.dtype}"
                )
            if topk_weights is not None and config.token_format != "bf16":
                raise ValueError(
                    "topk_weights must be None for a dispatch with a handle unless token_format is "
                    f"'bf16': only such rows are multiplied; got {config.token_format!r}"
                )
        self._check_weights(topk_weights, num_tokens)
        require_type("row_ids", row_ids, bool, "a bool")
        self._check_mask(masked_ranks)
        received = self._empty_received(config, handle, row_ids)
        args = self._args(handle)
        places = {
            "slot_rows": handle.slot_rows,
            "expert_begin": handle.expert_begin,
            "expert_count": handle.expert_count,
            "expert_end": handle.expert_end,
            "rank_tokens": handle.rank_tokens,
            "rows_here": handle.rows_here,
        }
        read = {
            "x": x,
            "x_sf": x_sf,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            MASKED_RANKS: masked_ranks,
        }
        written = {
            "recv_x": received.x,
            "recv_scales": received.x_sf,
            "recv_weights": received.topk_weights,
            "row_ids": received.row_ids,
        }
        if config.knows_rows:
            read.update(places)
        else:
            written.update(places)
            self._num_dispatches += 1
        return self._launch(config, handle.number, args, read, written), (received, handle)

    def prepare_combine(
        self,
        y: torch.Tensor,
        handle: AllToAllHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        masked_ranks: torch.Tensor | None = None,
    ) -> tuple[Launch, torch.Tensor]:
        """The kernel of a combine, after all checks."""
        self._buffer.raise_if_unusable()
        self._check_handle(handle)
        shape = self.shape
        require_type("y", y, torch.Tensor, "a tensor")
        rows = (shape.max_recv_rows, shape.hidden)
        check_tensor("y", y, self.dtype, rows, self.device)
        check_contiguous("y", y)
        check_start("y", y, ROW_ALIGNMENT)
        is_here = y.data_ptr() == self._combine_rows().data_ptr()
        if is_here and self._last_step == "combine":
            raise ValueError(
                "y must not be the combine buffer directly after another combine: other ranks may "
                "still be fetching its rows; a dispatch must come in between"
            )
        num_tokens = handle.num_tokens
        self._check_weights(topk_weights, num_tokens)
        if torch.is_grad_enabled():
            refuse_gradients(y=y)
        if not is_here:
            self._buffer.occupied.refuse_tensor("y", y)
        self._check_mask(masked_ranks)
        inputs = {"y": y, "topk_weights": topk_weights, MASKED_RANKS: masked_ranks}
        out = self._out_rows(out, num_tokens, inputs)
        config = self._config(
            "combine",
            has_weights=topk_weights is not None,
            sends_rows=not is_here,
            masks_ranks=masked_ranks is not None,
        )
        read = {
            **inputs,
            "y": None if is_here else y,
            "slot_rows": handle.slot_rows,
            "rank_tokens": handle.rank_tokens,
            "rows_here": handle.rows_here,
        }
        launch = self._launch(config, handle.number, self._args(handle), read, {"out": out})
        return launch, out

    def prepare_return_scalars(
        self,
        values: torch.Tensor,
        handle: AllToAllHandle,
        *,
        masked_ranks: torch.Tensor | None = None,
    ) -> tuple[Launch, torch.Tensor]:
        """The kernel of `return_scalars`, after all checks."""
        self._buffer.raise_if_unusable()
        self._check_handle(handle)
        require_type("values", values, torch.Tensor, "a tensor")
        check_tensor("values", values, torch.float32, (self.shape.max_recv_rows,), self.device)
        check_contiguous("values", values)
        if torch.is_grad_enabled():
            refuse_gradients(values=values)
        self._check_mask(masked_ranks)
        size = (handle.num_tokens, self.shape.num_topk)
        out = torch.empty(size, dtype=torch.float32, device=self.device)
        read = {
            "scalars": values,
            "slot_rows": handle.slot_rows,
            "expert_end": handle.expert_end,
            MASKED_RANKS: masked_ranks,
        }
        config = self._config("scalars", masks_ranks=masked_ranks is not None)
        args, written = self._args(handle), {"slot_scalars": out}
        return self._launch(config, handle.number, args, read, written), out

    def _agreed(self, launch: Launch) -> dict[str, Any]:
        config = launch.config
        assert isinstance(config, ThroughputConfig)
        return {
            "step": config.step,
            "token_format": config.token_format,
            "handle": config.knows_rows,
            "topk_weights": config.has_weights,
            "y in the combine buffer": config.step == "combine" and not config.sends_rows,
        }

    def _config(self, step: Step, **fields: Any) -> ThroughputConfig:
        return ThroughputConfig(
            self.shape,
            step,
            num_ctas=self._settings.num_sms,
            arch=self._settings.arch,
            **fields,
        )

    def _launch(
        self,
        config: ThroughputConfig,
        number: int,
        args: CppStruct,
        read: Mapping[str, torch.Tensor | None],
        written: Mapping[str, torch.Tensor | None],
    ) -> Launch:
        """number: of the dispatch. Names are those of the arguments; None is left out."""
        own_read = {name: tensor for name, tensor in read.items() if tensor is not None}
        own_written = {name: tensor for name, tensor in written.items() if tensor is not None}
        for name, tensor in {**own_read, **own_written}.items():
            setattr(args, name, tensor.data_ptr())
        self._last_step = config.step
        self._masks_ranks = config.masks_ranks
        if self._profile is not None and config.step != "scalars":
            config = replace(config, trace=True)
            own_written["trace"] = self._profile.attach(config, number, self.device)
            args.trace = own_written["trace"].data_ptr()
        return Launch(config, args, own_read, own_written)

    def _args(self, handle: AllToAllHandle) -> CppStruct:
        memory = self._buffer.memory
        args = ThroughputArgs()
        for rank, address in enumerate(memory.addresses):
            args.rank_buffers[rank] = address
        args.status = memory.status_address
        args.wait_timeout_ns = self._settings.wait_timeout_ns
        args.rank_idx = self.rank
        args.num_tokens = handle.num_tokens
        return args

    def _empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def _empty_handle(self, num_tokens: int) -> AllToAllHandle:
        shape = self.shape
        begin, count, end = (
            self._empty((shape.num_experts_per_rank,), torch.int32) for _ in range(3)
        )
        return AllToAllHandle(
            self,
            self._num_dispatches,
            self._generation,
            num_tokens,
            slot_rows=self._empty((num_tokens, shape.num_topk), torch.int32),
            expert_begin=begin,
            expert_count=count,
            expert_end=end,
            rank_tokens=self._empty((shape.num_ranks,), torch.int32),
            rows_here=self._empty(
                (shape.num_ranks, shape.max_tokens_per_rank, shape.num_topk), torch.int32
            ),
        )

    def _empty_received(
        self, config: ThroughputConfig, handle: AllToAllHandle, row_ids: bool
    ) -> Received:
        num_rows = self.shape.max_recv_rows
        scales = weights = None
        dtype = config.tokens.scale_torch_dtype
        if dtype is not None:
            size = (num_rows, config.num_scale_words)
            scales = self._empty(size, dtype)
        if config.has_weights and not config.knows_rows:
            weights = self._empty((num_rows,), torch.float32)
        values = torch.float8_e4m3fn if scales is not None else self.dtype
        return Received(
            self._empty((num_rows, self.shape.hidden), values),
            scales,
            handle.expert_begin,
            handle.expert_count,
            handle.expert_end,
            weights,
            handle.expert_end[-1:],
            self._empty((num_rows,), torch.int64) if row_ids else None,
        )

    def _check_tokens(
        self, x: torch.Tensor, x_sf: torch.Tensor | None, config: ThroughputConfig
    ) -> None:
        self._check_rows("x", x, self.shape.hidden, (self.dtype, torch.float8_e4m3fn))
        if not config.is_quantized_input:
            if x_sf is not None:
                kind = str(x.dtype).removeprefix("torch.")
                raise ValueError(f"x_sf must be None for an x of {kind}; got a tensor")
            return
        dtype = config.tokens.scale_torch_dtype
        if config.token_format not in GIVEN_FORMATS or dtype is None:
            raise ValueError(
                f"x must be bfloat16 for token_format {config.token_format!r}; got float8_e4m3fn, "
                f"which is for {', '.join(GIVEN_FORMATS)}"
            )
        require_type("x_sf", x_sf, torch.Tensor, "a tensor for an x of float8_e4m3fn")
        assert x_sf is not None
        size = (x.shape[0], self.shape.hidden // 128)
        check_tensor("x_sf", x_sf, dtype, size, self.device)
        check_contiguous("x_sf", x_sf)

    def _check_weights(self, topk_weights: torch.Tensor | None, num_tokens: int) -> None:
        if topk_weights is None:
            return
        require_type("topk_weights", topk_weights, torch.Tensor, "a tensor or None")
        slots = (num_tokens, self.shape.num_topk)
        check_tensor("topk_weights", topk_weights, torch.float32, slots, self.device)
        check_contiguous("topk_weights", topk_weights)
        if torch.is_grad_enabled():
            refuse_gradients(topk_weights=topk_weights)

    def _check_mask(self, masked_ranks: torch.Tensor | None) -> None:
        if masked_ranks is None:
            if self._masks_ranks:
                raise ValueError(
                    f"{MASKED_RANKS} must be given to every call until reset(), since an earlier "
                    "one was given it; got None"
                )
            return
        require_type(MASKED_RANKS, masked_ranks, torch.Tensor, "a tensor or None")
        size = (self.shape.num_ranks,)
        check_tensor(MASKED_RANKS, masked_ranks, torch.int32, size, self.device)
        check_contiguous(MASKED_RANKS, masked_ranks)
        if self._settings.checked:
            check_own_rank(MASKED_RANKS, masked_ranks, self.rank)

    def _check_handle(self, handle: AllToAllHandle) -> None:
        self._check_generation(own_handle(handle, AllToAllHandle, self).generation)

    def _combine_rows(self) -> torch.Tensor:
        shape = self.shape
        rows = self._segment("rows").view(self.dtype).view(-1, shape.hidden)
        return rows[: shape.max_recv_rows]
