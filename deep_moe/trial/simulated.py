"""A call of the layer on a chip that this machine need not have: how long it takes on the
emulator's clock.

Weights are zero here and products are left out, because almost no decision of the kernel depends on
values. Pages that hold only zeros take no memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deep_moe.emulator import Chip, GpuUsage, LaunchTime, Machine
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.heuristics import MoEShape
from deep_moe.targets.config import MegaMoEConfig
from deep_moe.weights.transform import empty_weights_for_mega_moe

from .calls import fill_inputs
from .real_size import rank_tokens
from .trace import RankTrace, record

_MIRRORED_SHARE = 2  # how often an expert is named by a rank in the mean
_ALIGNMENT = 1024  # of a tensor on a GPU at least 256


@dataclass(frozen=True)
class SimulatedCall:
    """A call of all ranks on a chip's clock.

    launches: each rank's kernel; of rank 0 alone where its peers mirrored it. config: of the
    kernel. usage: what the GPUs' units were busy with. traces: what each rank recorded, if that was
    asked for.
    """

    chip: Chip
    launches: tuple[LaunchTime, ...]
    config: MegaMoEConfig
    usage: tuple[GpuUsage, ...]
    traces: tuple[RankTrace, ...] = ()

    @property
    def kernel_us(self) -> float:
        """The slowest rank's kernel."""
        return max(launch.ns for launch in self.launches) / 1e3

    @property
    def us(self) -> float:
        """What events around the call see."""
        return self.kernel_us + self.chip.value("launch_ns") / 1e3


def simulate_call(
    shape: MoEShape,
    counts: Sequence[int],
    chip: Chip,
    *,
    seed: int = 0,
    routing: str = "uniform",
    num_warmup: int = 0,
    traced: bool = False,
    mirrored: bool | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> SimulatedCall:
    """One call after `num_warmup` others of the same tokens, on all SMs of the chip.

    counts: each rank's tokens, made up as `benchmarks.mega_moe` does. traced: record it. options:
    keyword arguments of `EmulatedRanks.call`.

    mirrored: only rank 0, whose peers do what it does, see `EmulatedRanks.call`; all ranks must
    have as many tokens, and routing must be uniform. By default where that holds, each of more than
    two ranks names an expert twice in the mean, and nothing is traced.
    """
    is_symmetric = len(set(counts)) == 1 and routing == "uniform"
    if mirrored is None:
        # Where few tokens name few experts, some rank has more of them, and all wait for it.
        names_experts = counts[0] * shape.num_topk >= _MIRRORED_SHARE * shape.num_experts
        mirrored = is_symmetric and names_experts and shape.num_ranks > 2 and not traced
    if mirrored and not is_symmetric:
        raise ValueError(
            "mirrored=True needs as many tokens on each rank and routing='uniform'; got "
            f"{tuple(counts)} and {routing!r}"
        )
    device = torch.device("cpu")
    machines: list[Machine] = []
    options = {
        "arch": chip.arch,
        "num_sms": int(chip.value("num_sms")),
        "checked": False,
        "chip": chip,
        "products": False,
        "progress": progress,
        "mirrored": mirrored,
        **options,
    }
    form = empty_weights_for_mega_moe(
        shape.num_experts_per_rank + shape.num_shared_experts,
        shape.hidden,
        shape.intermediate_hidden,
        arch=chip.arch,
        device="meta",
        weights=shape.weights,
        token_format=shape.token_format,
        has_gate=shape.has_gate,
    )
    with EmulatedRanks(shape.num_ranks, **shape.buffer_arguments) as ranks:
        weights = [
            form.with_tensors([_untouched_zeros(tensor) for tensor in form.tensors])
            for _ in ranks.buffers
        ]
        ys = [torch.zeros(count, shape.hidden, dtype=torch.bfloat16) for count in counts]
        running = ranks.buffers[:1] if mirrored else ranks.buffers

        def call(**more: Any) -> None:
            for buffer, count in zip(running, counts, strict=False):
                fill_inputs(buffer, rank_tokens(shape, count, buffer.rank, seed, device, routing))
            ranks.call(ys, weights, **options, **more)

        for _ in range(num_warmup):
            call()
        if traced:
            with record(*running) as recorders:
                for recorder in recorders:
                    recorder.is_timed = True
                call(observe=machines.append)
                traces = tuple(recorder.collect() for recorder in recorders)
        else:
            traces = ()
            call(observe=machines.append)
        _, plan = list(ranks.buffers[0].caches.plans.items())[-1]
    (machine,) = machines
    return SimulatedCall(
        chip, tuple(machine.launch_times), plan.config, tuple(machine.usage), traces
    )


def _untouched_zeros(form: torch.Tensor) -> torch.Tensor:
    """A tensor of this form whose pages the system has not given yet."""
    storage = np.zeros(form.nbytes + _ALIGNMENT, np.uint8)
    begin = -storage.ctypes.data % _ALIGNMENT
    tensor = torch.from_numpy(storage[begin : begin + form.nbytes])
    return tensor.view(form.dtype).view(form.shape)
