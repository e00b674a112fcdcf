"""What a chip's file holds: for each parameter of the clock a value, its uncertainty and source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType


@dataclass(frozen=True)
class Parameter:
    """A number that the clock uses.

    Attributes:
        value: in the unit that SCHEMA names.
        uncertainty: one standard deviation, as a share of the value.
        source: where the value comes from; "measured: ..." names a record of this repository.
    """

    value: float
    uncertainty: float
    source: str


@dataclass(frozen=True)
class Meaning:
    """What a parameter is.

    Attributes:
        unit: of its value.
        text: what it means.
    """

    unit: str
    text: str


_SM, _MHZ, _CY, _NS, _GBS = "SMs", "MHz", "SM cycles", "ns", "GB/s"

# In the order of emulator/src/chip_parameters.h, which has the same names.
SCHEMA: Mapping[str, Meaning] = MappingProxyType(
    {
        "num_sms": Meaning(_SM, "SMs of the GPU"),
        "shared_kib_per_sm": Meaning("KiB", "shared memory of an SM, for all its CTAs"),
        "max_clock_mhz": Meaning(_MHZ, "clock while no tensor core works"),
        "mma_clock_mhz": Meaning(_MHZ, "clock from the first MMA of a launch on"),
        "power_slope_mhz": Meaning(_MHZ, "what the clock loses where all tensor cores are busy"),
        "power_window_us": Meaning("us", "time over which their share is averaged"),
        "issue_gap_cycles": Meaning(_CY, "from one instruction of a warp to its next"),
        "dependent_cycles": Meaning(_CY, "the same where the next needs the first one's result"),
        "alu_cycles": Meaning(_CY, "of a scheduler's ALU per warp instruction"),
        "fma_cycles": Meaning(_CY, "of its FMA pipe"),
        "xu_cycles": Meaning(_CY, "of its special-function unit"),
        "shuffle_cycles": Meaning(_CY, "of its shuffles"),
        "xu_latency_cycles": Meaning(_CY, "until a special function has its result"),
        "shuffle_latency_cycles": Meaning(_CY, "until a shuffle has its result"),
        "branch_cycles": Meaning(_CY, "that a taken branch costs its warp"),
        "shared_bytes_per_cycle": Meaning("bytes per cycle", "of an SM's shared memory"),
        "shared_latency_cycles": Meaning(_CY, "of a load from shared memory"),
        "cluster_shared_latency_cycles": Meaning(_CY, "the same from another CTA of the cluster"),
        "tma_in_flight_kib": Meaning("KiB", "of copies that an SM waits for at once"),
        "tma_issue_cycles": Meaning(_CY, "from one bulk or tensor copy of an SM to its next"),
        "tma_latency_cycles": Meaning(_CY, "of a copy whose bytes L2 has, besides its bytes"),
        "sm_bytes_per_cycle": Meaning("bytes per cycle", "from L2 into one SM"),
        "l2_near_latency_cycles": Meaning(_CY, "of a load from the near half of L2"),
        "l2_far_latency_cycles": Meaning(_CY, "of a load from the far half"),
        "l2_gb_per_s": Meaning(_GBS, "that L2 gives to all SMs together"),
        "l2_useful_mib": Meaning("MiB", "of L2 that keep what is read again"),
        "hbm_latency_ns": Meaning(_NS, "that memory adds to the latency of L2"),
        "hbm_gb_per_s": Meaning(_GBS, "that memory gives"),
        "atomic_cycles": Meaning(_CY, "between two atomics on one address"),
        "mbarrier_arrive_cycles": Meaning(_CY, "that an arrival takes its warp"),
        "mbarrier_test_cycles": Meaning(_CY, "of a wait whose phase is over"),
        "mbarrier_wake_cycles": Meaning(
            _CY, "from the end of a phase until a waiting warp goes on"
        ),
        "barrier_cycles": Meaning(_CY, "of bar.sync, from the last arrival"),
        "barrier_cycles_per_warp": Meaning(_CY, "that each warp of the CTA adds"),
        "cluster_barrier_cycles": Meaning(_CY, "of barrier.cluster, from the last arrival"),
        "fence_cta_cycles": Meaning(_CY, "of a fence inside the CTA"),
        "memory_barrier_cycles": Meaning(_CY, "of a release of the GPU or a generic proxy fence"),
        "fence_gpu_cycles": Meaning(_CY, "of a fence of the GPU that acquires, too"),
        "fence_sys_ns": Meaning(_NS, "of a fence of the system with nothing outstanding"),
        "setmaxnreg_cycles": Meaning(_CY, "of setmaxnreg.inc"),
        "mma_cycles_per_n": Meaning(_CY, "of an MMA with 64 rows (SM90), 128 (SM100) per column"),
        "mma_shared_floor_cycles": Meaning(_CY, "that A takes from shared memory, beside N / 4"),
        "mma_latency_cycles": Meaning(_CY, "from an MMA's last product until a wait sees it"),
        "mma_latency_cycles_per_n": Meaning(_CY, "that each column adds"),
        "mma_issue_cycles": Meaning(_CY, "that a wgmma takes its warp"),
        "mma_register_cycles": Meaning(
            _CY, "of a wgmma with A in registers at least; but for one, nothing else is issued"
        ),
        "tmem_bytes_per_cycle": Meaning("bytes per cycle", "of tensor memory to one warp"),
        "tmem_latency_cycles": Meaning(_CY, "of a load from tensor memory"),
        "tmem_copy_cycles": Meaning(_CY, "of a tcgen05.cp"),
        "link_gb_per_s": Meaning(_GBS, "of a GPU's links, each way"),
        "link_latency_ns": Meaning(_NS, "one way to another GPU"),
        "link_run_overhead_bytes": Meaning("bytes", "that a run of stored bytes takes besides"),
        "cta_start_ns": Meaning(_NS, "from a launch until its CTAs' first instruction"),
        "kernel_exit_ns": Meaning(_NS, "from the last instruction until the kernel has ended"),
        "launch_ns": Meaning(_NS, "that events around a launch see besides the kernel"),
    }
)


@dataclass(frozen=True)
class Chip:
    """A chip for `Machine(clock=...)`.

    Attributes:
        name: of its file.
        arch: what kernels for it are compiled for.
        parameters: every name of SCHEMA.
    """

    name: str
    arch: str
    parameters: Mapping[str, Parameter]

    def __post_init__(self) -> None:
        unknown = [name for name in self.parameters if name not in SCHEMA]
        missing = [name for name in SCHEMA if name not in self.parameters]
        if unknown or missing:
            raise ValueError(
                f"chip {self.name}: parameters must be those of SCHEMA; unknown: "
                f"{', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}"
            )
        for name, parameter in self.parameters.items():
            value, uncertainty = parameter.value, parameter.uncertainty
            if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"chip {self.name}: {name} must be a number of at least 0; got {value!r}"
                )
            if name in _POSITIVE and value <= 0:
                raise ValueError(f"chip {self.name}: {name} must be more than 0; got {value!r}")
            if not 0 <= uncertainty < 4:
                raise ValueError(
                    f"chip {self.name}: uncertainty of {name} must be 0 to 4 times its value; "
                    f"got {uncertainty!r}"
                )
            if not parameter.source:
                raise ValueError(f"chip {self.name}: {name} must have a source")
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))

    def value(self, name: str) -> float:
        """In the unit that SCHEMA names.

        Args:
            name: of the parameter.
        """
        return self.parameters[name].value

    def replace(self, **values: float) -> Chip:
        """The same chip with other values.

        Args:
            values: by the names of SCHEMA. ValueError for another name, or a value that is not
                allowed.
        """
        changed = dict(self.parameters)
        for name, value in values.items():
            if name not in SCHEMA:
                raise ValueError(f"a chip has no parameter {name!r}; it has {', '.join(SCHEMA)}")
            changed[name] = Parameter(float(value), 0.0, "given by the caller")
        return replace(self, parameters=changed)

    def at_clock(self, mhz: float) -> Chip:
        """The same chip at a clock that was measured, whatever its load.

        Args:
            mhz: of the SMs.
        """
        return self.replace(max_clock_mhz=mhz, mma_clock_mhz=mhz, power_slope_mhz=0)

    def as_text(self) -> str:
        """Lines of "name value", as the emulator's library takes them."""
        return "".join(f"{name} {p.value!r}\n" for name, p in self.parameters.items())


_POSITIVE = {
    "num_sms",
    "shared_kib_per_sm",
    "max_clock_mhz",
    "mma_clock_mhz",
    "shared_bytes_per_cycle",
    "sm_bytes_per_cycle",
    "l2_gb_per_s",
    "l2_useful_mib",
    "hbm_gb_per_s",
    "tmem_bytes_per_cycle",
    "link_gb_per_s",
}


def derived(base: Chip, name: str, arch: str, **changed: Parameter) -> Chip:
    """A chip that differs from another one in some parameters."""
    return Chip(name, arch, {**base.parameters, **changed})
