"""What the layers of the split path have in common: a rank's buffer, how its kernels run, and the
checks of what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.fused.call_plan import (
    DEFAULT_EMULATED_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    EMULATED_NUM_SMS,
)
from deep_moe.fused.checks import (
    TOPK_IDX_DTYPES,
    check_contiguous,
    check_ids,
    check_start,
    check_tensor,
    require_type,
)
from deep_moe.fused.emulated_call import run_rank
from deep_moe.fused.options import MAX_TIMEOUT_S, check_checked, check_seed
from deep_moe.fused.rank_buffer import RankBuffer, used
from deep_moe.fused.symm_memory import DeviceMemory, HostMemory
from deep_moe.heuristics.segments import Layout
from deep_moe.heuristics.shape import require_int
from deep_moe.jit.launch import MemoryRegion
from deep_moe.targets import EMULATED, target_of
from deep_moe.tensor_memory import refuse_shared_memory

from .kernels import Launch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.low_latency import LowLatencyShape
    from deep_moe.heuristics.throughput import ThroughputShape

ROW_ALIGNMENT = 16  # bytes that a lane loads at once


@dataclass(frozen=True)
class KernelSettings:
    """How the kernels of a layer run."""

    num_sms: int
    arch: str
    timeout_s: float
    checked: bool
    schedule_seed: int = 0


class SplitLayer:
    """name: the class that callers know. layout: of one rank's symmetric memory."""

    shape: LowLatencyShape | ThroughputShape
    _settings: KernelSettings
    _emulated_ranks: str  # the class that runs several ranks in one process

    def __init__(
        self,
        name: str,
        layout: Layout,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None,
    ) -> None:
        self._buffer = RankBuffer(name, layout, memory, group)

    @property
    def rank(self) -> int:
        return self._buffer.rank

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

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
                launch.emulated(self.rank, self.memory_regions()),
                buffer,
                self._agreed(launch),
                num_ranks=self.shape.num_ranks,
                seed=self._settings.schedule_seed,
                checked=self._settings.checked,
            )

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """What every kernel may touch, for the emulator."""
        memory = self._buffer.memory
        layout = self._buffer.layout
        buffers = (
            MemoryRegion(f"symmetric buffer of rank {rank}", address, self.nbytes, True, layout)
            for rank, address in enumerate(memory.addresses)
        )
        return (*buffers, MemoryRegion("wait status", memory.status_address, 64, True))

    def _agreed(self, launch: Launch) -> dict[str, Any]:
        """What of a launch must be the same on every rank."""
        raise NotImplementedError

    def _kernel_settings(
        self,
        num_sms: int | None,
        timeout_s: float | None,
        arch: str | None,
        checked: bool | None,
        schedule_seed: int,
    ) -> dict[str, Any]:
        """The fields of KernelSettings, checked, with defaults for None."""
        gpu = self._buffer.gpu
        own = EMULATED if gpu is None else gpu.target
        if arch is not None and target_of(arch) is not own and gpu is not None:
            raise ValueError(
                f"arch must be {own.name}, that of {gpu.device}, or None; got {arch!r}"
            )
        num_ctas = (
            (EMULATED_NUM_SMS if gpu is None else gpu.num_sms) if num_sms is None else num_sms
        )
        require_int("num_sms", num_ctas, "at least 1")
        if num_ctas < 1 or (gpu is not None and num_ctas > gpu.num_sms):
            most = "" if gpu is None else f" and at most {gpu.num_sms}, the SMs of {gpu.name}"
            raise ValueError(f"num_sms must be at least 1{most}; got {num_ctas}")
        if timeout_s is None:
            timeout_s = DEFAULT_EMULATED_TIMEOUT_S if gpu is None else DEFAULT_TIMEOUT_S
        require_type("timeout_s", timeout_s, (int, float), "a number or None")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be a positive number of at most {MAX_TIMEOUT_S:.0e}; "
                f"got {timeout_s}"
            )
        check_checked(checked)
        check_seed(schedule_seed)
        return {
            "num_sms": num_ctas,
            "arch": own.name if arch is None else arch,
            "timeout_s": timeout_s,
            "checked": gpu is None if checked is None else checked,
            "schedule_seed": schedule_seed,
        }

    def _check_rows(
        self, name: str, tensor: torch.Tensor, width: int, dtypes: Any = torch.bfloat16
    ) -> None:
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
            return torch.empty(size, dtype=torch.bfloat16, device=self.device)
        self._check_rows("out", out, self.shape.hidden)
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

    def _segment(self, name: str) -> torch.Tensor:
        segment = self._buffer.layout[name]
        return self._buffer.memory.tensor[segment.offset : segment.end]
