"""What a machine with a simulated clock tells of the launches of its last run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchTime:
    """One launch; nanoseconds from the beginning of the run.

    Attributes:
        rank: whose launch it was.
        kernel: its name in the PTX.
        start_ns: when its first CTA was given to an SM.
        end_ns: when its last CTA had ended.
        clock_mhz: of the SMs, in the mean.
        hbm_bytes: what the GPU's memory moved meanwhile.
        l2_bytes: what L2 moved.
        link_bytes: between this GPU and others, by its own requests.
        tensor_share: how busy the tensor cores were, 0 to 1.
        spent_ns: for each warp of a CTA, what the mean CTA's warp spent on what: "instructions"
            (issue and pipes), "memory" (results of loads), "tensor" (wgmma groups, tensor memory),
            "mbarrier", "barrier", "fence" (with the stores that it waits for), "sleep", "other".
    """

    rank: int
    kernel: str
    start_ns: float
    end_ns: float
    clock_mhz: float
    hbm_bytes: float
    l2_bytes: float
    link_bytes: float
    tensor_share: float
    spent_ns: tuple[Mapping[str, float], ...]

    @property
    def ns(self) -> float:
        """How long the kernel took."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class WarpWait:
    """A warp waited; nanoseconds from the beginning of the run.

    Attributes:
        launch: index among all launches of the machine, from 1.
        cta: index in the grid.
        warp: index in the CTA.
        kind: as in `LaunchTime.spent_ns`.
        start_ns: when it began to wait.
        end_ns: when it went on.
    """

    launch: int
    cta: int
    warp: int
    kind: str
    start_ns: float
    end_ns: float


# As in emulator/src/timing.h.
KINDS = ("instructions", "memory", "tensor", "mbarrier", "barrier", "fence", "sleep", "other")


def decode_launch_times(text: str) -> list[LaunchTime]:
    return [
        LaunchTime(
            rank=one["rank"],
            kernel=one["kernel"],
            start_ns=one["start"] / 1e3,
            end_ns=one["end"] / 1e3,
            clock_mhz=1e6 * one["cycles"] / max(one["end"] - one["start"], 1),
            hbm_bytes=one["hbm_bytes"],
            l2_bytes=one["l2_bytes"],
            link_bytes=one["link_bytes"],
            tensor_share=one["tensor_share"],
            spent_ns=tuple({k: ps / 1e3 for k, ps in warp.items()} for warp in one["spent"]),
        )
        for one in json.loads(text)
    ]
