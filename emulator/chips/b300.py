"""NVIDIA B300, HGX. From the literature: nobody here has measured one."""

from .b200 import B200
from .chip import Parameter, derived

B300 = derived(
    B200,
    "b300",
    "sm_103a",
    max_clock_mhz=Parameter(1920, 0.03, "ademeure/QuickRunCUDA: under a lock at 2032 MHz"),
)
