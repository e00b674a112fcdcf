"""Counters of what experts have to do, which the host reads without waiting for a GPU."""

from __future__ import annotations

import torch

from deep_moe.heuristics.shape import require_int


class LoadCounters:
    """Slots that named each place, counted on the device.

    Args:
        num_places: of all ranks, or of what is counted otherwise.
        device: where calls run.

    Attributes:
        on_device: int32 [places], for `expert_load` of `prepare_inputs`, or for a call's
            `cumulative_local_expert_recv_stats` if places are those of the own rank.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not allowed; the text names it.
    """

    def __init__(self, num_places: int, device: torch.device | str | int) -> None:
        if require_int("num_places", num_places, "at least 1") < 1:
            raise ValueError(f"num_places must be at least 1; got {num_places}")
        self.on_device = torch.zeros(num_places, dtype=torch.int32, device=torch.device(device))
        self._is_cuda = self.on_device.is_cuda
        self._coming = torch.zeros(num_places, dtype=torch.int32, pin_memory=self._is_cuda)
        self._come: torch.cuda.Event | None = None
        self._known = torch.zeros(num_places, dtype=torch.int64)

    def collect(self) -> torch.Tensor:
        """int64 [places] on the CPU: what was counted up to an earlier call of this, or, if calls
        run on a CPU, up to this one. The host waits for nothing.

        What the device has counted by then, on the current stream, is on its way to a later call;
        the counters there begin at 0 again. To be called outside of CUDA graphs, which may count.
        """
        if self._come is not None and self._come.query():
            self._take()
        if self._come is None:
            self._coming.copy_(self.on_device, non_blocking=True)
            self.on_device.zero_()
            if self._is_cuda:
                self._come = torch.cuda.Event()
                self._come.record(torch.cuda.current_stream(self.on_device.device))
            else:
                self._take()
        return self._known.clone()

    def _take(self) -> None:
        self._known += self._coming
        self._come = None
