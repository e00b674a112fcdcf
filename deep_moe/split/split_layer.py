"""What the layers of the split path have in common: a rank's buffer, how its kernels run, and the
checks of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.fused.buffer import device_for, memory_for, ranks_of, require_equal
from deep_moe.fused.checks import (
    TOPK_IDX_DTYPES,
    check_contiguous,
    check_ids,
    check_start,
    check_tensor,
    require_type,
)
from deep_moe.fused.emulated_call import masked_ranks_of, run_rank
from deep_moe.fused.options import MASKED_RANKS
from deep_moe.fused.rank_buffer import RankBuffer, used
from deep_moe.fused.run_settings import KernelSettings, RunSettings
from deep_moe.fused.symm_memory import DeviceMemory, HostMemory
from deep_moe.jit.launch import MemoryRegion
from deep_moe.tensor_memory import refuse_shared_memory

from .kernels import Launch
from .profile import DumpsTraces, PhaseOfCta, Profile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from deep_moe.heuristics.low_latency import LowLatencyShape
    from deep_moe.heuristics.low_latency import Step as TracedStep
    from deep_moe.heuristics.throughput import ThroughputShape

ROW_ALIGNMENT = 16  # bytes that a lane loads at once
ROW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # as shapes name them


def name_of_dtype(dtype: torch.dtype) -> str:
    """As shapes name it."""
    for name, known in ROW_DTYPES.items():
        if dtype is known:
            return name
    allowed = " or ".join(map(str, ROW_DTYPES.values()))
    kind = ValueError if isinstance(dtype, torch.dtype) else TypeError
    raise kind(f"dtype must be {allowed}; got {dtype!r}")


class SplitLayer(DumpsTraces):
    """A layer of one rank, whose class callers know by its name."""

    shape: LowLatencyShape | ThroughputShape
    _emulated_ranks: str  # the class that runs several ranks in one process

    @classmethod
    def of_memory(
        cls,
        shape: LowLatencyShape | ThroughputShape,
        memory: HostMemory | DeviceMemory,
        **arguments: Any,
    ) -> Self:
        """A rank whose memory is there already; for ranks that live in one process.

        arguments: of the class, but for sizes and devices.
        """
        layer = cls.__new__(cls)
        run = RunSettings.taken_from(arguments)
        layer._set_up(shape, memory, None, run, **arguments)
        return layer

    def _join(
        self,
        group: ProcessGroup | None,
        shape_of: Callable[..., LowLatencyShape | ThroughputShape],
        sizes: Mapping[str, Any],
        device: torch.device | str | int | None,
        run: RunSettings,
        equal: Mapping[str, Any],
        **own: Any,
    ) -> None:
        """As a rank of the group, all of which have the same sizes and other equal arguments. own:
        arguments of `_set_up`."""
        num_ranks = ranks_of(group)
        device = device_for(group, device)
        if group is not None:
            kernels = {"num_sms": run.num_sms, "arch": run.arch}
            require_equal({**sizes, "device": device.type, **equal, **kernels}, group)
        shape = shape_of(num_ranks=num_ranks, **sizes)
        self._set_up(shape, memory_for(shape.buffer_layout, group, device), group, run, **own)

    def _set_up(
        self,
        shape: Any,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None,
        run: RunSettings,
        enable_profiling: bool = False,
    ) -> None:
        require_type("enable_profiling", enable_profiling, bool, "a bool")
        self.shape = shape
        self._buffer = RankBuffer(type(self).__name__, shape.buffer_layout, memory, group)
        self._settings = run.on(self._buffer.gpu)
        self._profile = Profile() if enable_profiling else None
        self._generation = 0
        self._num_dispatches = 0

    @property
    def rank(self) -> int:
        return self._buffer.rank

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens that are not quantized, and of the experts' rows."""
        return ROW_DTYPES[self.shape.dtype]

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def dump_trace(self, step: TracedStep, path: str | Path, rank: int) -> None:
        """Write the phases of this rank's newest calls of one step as a file for ui.perfetto.dev.

        Args:
            step: "dispatch" or "combine".
            path: of the file to write.
            rank: the number of this rank in the trace.
        """
        self._buffer.raise_if_closed()
        self._traced().write(step, path, rank, is_emulated=self._buffer.is_emulated)

    def _dump_trace(self, step: TracedStep, path: str | Path) -> None:
        self.dump_trace(step, path, self.rank)

    def _traced(self) -> Profile:
        if self._profile is None:
            raise ValueError("enable_profiling must be True for a layer that dumps traces")
        return self._profile

    def newest_phases(self, step: TracedStep) -> tuple[int, list[PhaseOfCta]]:
        """Of the last dispatch or combine; as `Profile.newest`. For deep_moe.trial.split_trace."""
        return self._traced().newest(step, is_emulated=self._buffer.is_emulated)

    def check(self) -> None:
        """Raise what the last kernel reported, if it gave up. Does not wait for a GPU."""
        self._buffer.raise_if_closed()
        self._buffer.raise_if_failed()

    def reset(self) -> None:
        """Make the layer usable again after a failed call."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the symmetric memory back. The layer cannot be used after this."""
        self._buffer.close()

    # What follows is called by emulated ranks too.

    @property
    def buffer(self) -> RankBuffer:
        return self._buffer

    @property
    def num_dispatches(self) -> int:
        """So far."""
        return self._num_dispatches

    @property
    def settings(self) -> KernelSettings:
        return self._settings

    def run(self, launch: Launch) -> None:
        """A prepared kernel, on the current stream."""
        buffer = self._buffer
        with used([buffer]):
            if buffer.gpu is not None:
                launch.on_gpu(buffer.gpu)
                return
            memory = buffer.memory
            assert isinstance(memory, HostMemory)
            if self.shape.num_ranks > 1 and not memory.is_shared:
                raise ValueError(
                    f"{buffer.name} must be called through its {self._emulated_ranks}: its other "
                    "ranks live in this process too"
                )
            run_rank(
                launch.emulated(self.rank, self.memory_regions(launch)),
                buffer,
                {**self._agreed(launch), MASKED_RANKS: self._left_out(launch)},
                num_ranks=self.shape.num_ranks,
                seed=self._settings.schedule_seed,
                checked=self._settings.checked,
            )

    def memory_regions(self, launch: Launch) -> tuple[MemoryRegion, ...]:
        """What a kernel may touch beside its tensors, for the emulator: nothing of ranks that the
        step leaves out."""
        memory = self._buffer.memory
        layout = self._buffer.layout
        masked = self._left_out(launch)
        buffers = (
            MemoryRegion(f"symmetric buffer of rank {rank}", address, self.nbytes, True, layout)
            for rank, address in enumerate(memory.addresses)
            if rank not in masked or rank == self.rank
        )
        return (*buffers, MemoryRegion("wait status", memory.status_address, 64, True))

    def _left_out(self, launch: Launch) -> list[int]:
        """Ranks that take no part in a launch, the same on every rank that does."""
        return masked_ranks_of(launch.read)

    def _agreed(self, launch: Launch) -> dict[str, Any]:
        """What else of a launch must be the same on every rank."""
        raise NotImplementedError

    def _check_rows(self, name: str, tensor: torch.Tensor, width: int, dtypes: Any) -> None:
        require_type(name, tensor, torch.Tensor, "a tensor")
        if tensor.ndim != 2:
            raise ValueError(
                f"{name} must be 2-dimensional [tokens, hidden]; got shape {tuple(tensor.shape)}"
            )
        check_tensor(name, tensor, dtypes, (tensor.shape[0], width), self.device)
        check_contiguous(name, tensor)
        check_start(name, tensor, ROW_ALIGNMENT)

    def _out_rows(
        self,
        out: torch.Tensor | None,
        num_tokens: int,
        read: Mapping[str, torch.Tensor | None],
    ) -> torch.Tensor:
        """Where a combine that reads these tensors writes its result, a new tensor for None."""
        if out is None:
            size = (num_tokens, self.shape.hidden)
            return torch.empty(size, dtype=self.dtype, device=self.device)
        self._check_rows("out", out, self.shape.hidden, self.dtype)
        if out.shape[0] != num_tokens:
            raise ValueError(
                f"out must have as many rows as the dispatch had tokens ({num_tokens}); "
                f"got {out.shape[0]}"
            )
        self._check_written({"out": out}, read)
        return out

    def _check_written(
        self,
        written: Mapping[str, torch.Tensor | None],
        read: Mapping[str, torch.Tensor | None],
    ) -> None:
        """Raise if what a call writes shares memory with what it reads or with a rank's buffer.
        Tensors that the layer made itself share none."""
        if any(tensor is not None for tensor in written.values()):
            for name, tensor in written.items():
                if tensor is not None:
                    self._buffer.occupied.refuse_tensor(name, tensor)
            refuse_shared_memory(written, read)

    def _check_topk_idx(self, topk_idx: torch.Tensor, num_tokens: int) -> None:
        require_type("topk_idx", topk_idx, torch.Tensor, "a tensor")
        slots = (num_tokens, self.shape.num_topk)
        check_tensor("topk_idx", topk_idx, TOPK_IDX_DTYPES, slots, self.device)
        check_contiguous("topk_idx", topk_idx)
        if self._settings.checked:
            check_ids(topk_idx, self.shape.num_experts)

    def _check_generation(self, generation: int) -> None:
        """Of a handle."""
        if generation != self._generation:
            raise ValueError(
                "handle must be of a dispatch since the last reset(); got one of before"
            )

    def _segment(self, name: str) -> torch.Tensor:
        segment = self._buffer.layout[name]
        return self._buffer.memory.tensor[segment.offset : segment.end]
