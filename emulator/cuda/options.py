"""What the emulated GPUs are, and how kernels run on them."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine import SCHEDULES, Schedule

# As src/chip.h has them.
CHIP_NAMES = ("h100", "h200", "b200", "gb200", "b300")
MAX_DEVICES = 64
MAX_SMS = 1024


@dataclass(frozen=True)
class GpuOptions:
    """The emulated GPUs of a program.

    Args:
        chip: "h100", "h200", "b200", "gb200" or "b300".
        devices: how many of them.
        sms: multiprocessors of each; None for the chip's own number. Programs that launch as many
            blocks as there are multiprocessors run faster with few.
        seed: picks the interleaving of warps.
        schedule: as for `Machine`.
        checks: look for data races and the like.
        stop_at_findings: a finding ends its kernel, as on a GPU an illegal address does.
        strict_tcgen05: as for `Machine`.
    """

    chip: str = "h100"
    devices: int = 1
    sms: int | None = None
    seed: int = 0
    schedule: Schedule = "random"
    checks: bool = True
    stop_at_findings: bool = False
    strict_tcgen05: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("chip", CHIP_NAMES), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name, value, most in (
            ("devices", self.devices, MAX_DEVICES),
            ("sms", 1 if self.sms is None else self.sms, MAX_SMS),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be 1 to {most}; got {value}")

    def as_variable(self) -> str:
        """The value of the environment variable that the stand-in reads.

        >>> GpuOptions(seed=3, sms=4).as_variable()
        'chip=h100,devices=1,seed=3,schedule=0,checks=1,stop=0,strict_tcgen05=0,sms=4'
        """
        values: dict[str, object] = {
            "chip": self.chip,
            "devices": self.devices,
            "seed": self.seed % 2**64,
            "schedule": SCHEDULES.index(self.schedule),
            "checks": int(self.checks),
            "stop": int(self.stop_at_findings),
            "strict_tcgen05": int(self.strict_tcgen05),
        }
        if self.sms is not None:
            values["sms"] = self.sms
        return ",".join(f"{name}={value}" for name, value in values.items())
