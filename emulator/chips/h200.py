"""NVIDIA H200 SXM, 141 GB HBM3e: an H100 with faster memory."""

from .chip import Parameter, derived
from .h100 import H100

_FENCES = "measured: benchmarks/chips/h200-2026-11-28.json"

H200 = derived(
    H100,
    "h200",
    "sm_90a",
    hbm_gb_per_s=Parameter(4440, 0.01, "benchmarks/LOG.md: reading of memory"),
    memory_barrier_cycles=Parameter(145, 0.1, _FENCES),
    fence_gpu_cycles=Parameter(265, 0.05, _FENCES),
    fence_sys_ns=Parameter(530, 0.1, f"{_FENCES}: 980 cycles; 1125 on another H200"),
)
