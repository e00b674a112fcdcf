"""NVIDIA GB200 in an NVL72 rack. From the literature: nobody here has measured one."""

from .b200 import B200
from .chip import Parameter, derived

GB200 = derived(
    B200,
    "gb200",
    "sm_100a",
    link_latency_ns=Parameter(860, 0.05, "nvbandwidth: a remote load takes 1.71 to 1.73 us"),
)
