"""How the kernels of a layer run: what its caller says, and what follows on a device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from deep_moe.heuristics.shape import require_int
from deep_moe.targets import EMULATED, target_of

from .call_plan import DEFAULT_EMULATED_TIMEOUT_S, DEFAULT_TIMEOUT_S, EMULATED_NUM_SMS
from .checks import require_type
from .options import MAX_TIMEOUT_S, check_checked, check_seed

if TYPE_CHECKING:
    from deep_moe.targets import Target

    from .gpu import Gpu


@dataclass(frozen=True)
class KernelSettings:
    """What kernels are launched with. num_sms: CTAs. checked, schedule_seed: of the emulator, and
    whether a call looks at what it is given beyond its form."""

    num_sms: int
    target: Target
    timeout_s: float
    checked: bool
    schedule_seed: int = 0

    @property
    def arch(self) -> str:
        return self.target.name

    @property
    def wait_timeout_ns(self) -> int:
        return max(1, round(1e9 * self.timeout_s))


@dataclass(frozen=True)
class RunSettings:
    """The arguments of a layer that say how its kernels run; None for what follows from the
    device."""

    num_sms: int | None = None
    timeout_s: float | None = None
    arch: str | None = None
    checked: bool | None = None
    schedule_seed: int = 0

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> RunSettings:
        """Of those among `arguments`, which are taken out."""
        names = (field.name for field in fields(cls))
        return cls(**{name: arguments.pop(name) for name in names if name in arguments})

    def on(self, gpu: Gpu | None) -> KernelSettings:
        """What they come to on a GPU, or in the emulator, or an error."""
        own = EMULATED if gpu is None else gpu.target
        target = own if self.arch is None else target_of(self.arch)
        if target is not own and gpu is not None:
            raise ValueError(
                f"arch must be {own.name}, that of {gpu.device}, or None; got {self.arch!r}"
            )
        num_ctas = self.num_sms
        if num_ctas is None:
            num_ctas = EMULATED_NUM_SMS if gpu is None else gpu.num_sms
        require_int("num_sms", num_ctas, "at least 1")
        # CTAs wait for each other, so all must be resident.
        if num_ctas < 1 or (gpu is not None and num_ctas > gpu.num_sms):
            most = "" if gpu is None else f" and at most {gpu.num_sms}, the SMs of {gpu.name}"
            raise ValueError(f"num_sms must be at least 1{most}; got {num_ctas}")
        check_checked(self.checked)
        check_seed(self.schedule_seed)
        return KernelSettings(
            num_ctas,
            target,
            timeout_of(self.timeout_s, is_emulated=gpu is None),
            gpu is None if self.checked is None else self.checked,
            self.schedule_seed,
        )


def timeout_of(timeout_s: float | None, *, is_emulated: bool) -> float:
    """The limit of waits, checked; by default that of the device."""
    if timeout_s is None:
        timeout_s = DEFAULT_EMULATED_TIMEOUT_S if is_emulated else DEFAULT_TIMEOUT_S
    require_type("timeout_s", timeout_s, (int, float), "a number or None")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be a positive number of at most {MAX_TIMEOUT_S:.0e}; got {timeout_s}"
        )
    return float(timeout_s)
