"""NVIDIA H200 SXM, 141 GB HBM3e: an H100 with faster memory."""

from .chip import Parameter, derived
from .h100 import H100

H200 = derived(
    H100,
    "h200",
    "sm_90a",
    hbm_gb_per_s=Parameter(4440, 0.01, "benchmarks/LOG.md: reading of memory"),
)
