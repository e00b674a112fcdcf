"""NVIDIA B200, HGX with NVLink 5. From the literature: nobody here has measured one."""

from .chip import Parameter, derived
from .h100 import H100

_SA = "SemiAnalysisAI/microbench-blackwell, May 2026"
_AS = "AndreSlavescu/flashinfer-competition, microbenchmarks on a B200, March 2026"
_QR = "ademeure/QuickRunCUDA, B300 catalogue"
_NV = "nvbandwidth in public threads"

B200 = derived(
    H100,
    "b200",
    "sm_100a",
    num_sms=Parameter(148, 0, f"{_AS}: device query"),
    max_clock_mhz=Parameter(1965, 0.01, f"{_AS}: device query"),
    mma_clock_mhz=Parameter(1848, 0.03, f"{_AS}: cycles and time of MMA rows"),
    power_slope_mhz=Parameter(200, 0.75, f"{_QR}: sustained products of random values"),
    xu_latency_cycles=Parameter(17, 0.1, _AS),
    shuffle_latency_cycles=Parameter(26, 0.1, _AS),
    tma_in_flight_kib=Parameter(64, 0.2, f"{_SA}: rate of memory by bytes in flight"),
    tma_issue_cycles=Parameter(40, 0.4, _AS),
    tma_latency_cycles=Parameter(370, 0.1, _AS),
    sm_bytes_per_cycle=Parameter(120, 0.12, _QR),
    l2_near_latency_cycles=Parameter(300, 0.1, _AS),
    l2_far_latency_cycles=Parameter(500, 0.25, f"{_QR}; {_SA}: they disagree"),
    l2_gb_per_s=Parameter(15000, 0.2, _QR),
    l2_useful_mib=Parameter(64, 0.3, f"{_AS}: latency by size of the set"),
    hbm_latency_ns=Parameter(207, 0.1, _AS),
    hbm_gb_per_s=Parameter(7100, 0.02, f"{_SA}; {_QR}"),
    cluster_barrier_cycles=Parameter(380, 0.1, _QR),
    memory_barrier_cycles=Parameter(165, 0.3, f"{_QR}: the GPU's, less 120 to acquire"),
    fence_gpu_cycles=Parameter(285, 0.1, _QR),
    fence_sys_ns=Parameter(900, 1.0, _QR),
    mma_latency_cycles=Parameter(170, 0.15, f"{_SA}: two CTAs, operands in shared memory"),
    mma_latency_cycles_per_n=Parameter(0, 0, f"{_SA}: none seen beside the rate"),
    mma_shared_floor_cycles=Parameter(32, 0.1, f"{_SA}: the same law as shared memory's port"),
    tmem_bytes_per_cycle=Parameter(128, 0.5, "Thor, same instruction; estimate"),
    tmem_latency_cycles=Parameter(47, 0.2, "Thor, same instruction"),
    tmem_copy_cycles=Parameter(30, 0.5, f"{_AS}: 48 alone; CUTLASS's rate allows at most 31"),
    link_gb_per_s=Parameter(780, 0.03, _NV),
    link_latency_ns=Parameter(750, 0.12, f"{_QR}: a remote load takes 1.45 to 1.55 us"),
)
