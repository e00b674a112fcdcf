"""NVIDIA H100 SXM, 80 GB HBM3."""

from .chip import Chip, Parameter

_QUERY = "device query"
_GH = "hibouwu/CUDA_optimazation, gh200_sm90 experiments, October 2026"
_LOG = "benchmarks/LOG.md"
_MEASURED = "measured: benchmarks/chips/h100-2026-11-26.json"
_CALLS = "measured: the SM clock in calls of flash of 128 and 2048 tokens, docs/clock.md"
_GUESS = "estimate; no measurement known"

H100 = Chip(
    "h100",
    "sm_90a",
    {
        "num_sms": Parameter(132, 0, _QUERY),
        "shared_kib_per_sm": Parameter(228, 0, _QUERY),
        "max_clock_mhz": Parameter(1980, 0, _QUERY),
        "mma_clock_mhz": Parameter(1850, 0.02, _CALLS),
        "power_slope_mhz": Parameter(317, 0.3, _CALLS),
        "power_window_us": Parameter(50, 1.0, _GUESS),
        "issue_gap_cycles": Parameter(1, 0.05, _MEASURED),
        "dependent_cycles": Parameter(4, 0.05, _MEASURED),
        "alu_cycles": Parameter(2, 0.05, _MEASURED),
        "fma_cycles": Parameter(1, 0.05, _MEASURED),
        "xu_cycles": Parameter(8, 0.02, _MEASURED),
        "shuffle_cycles": Parameter(4, 0.02, _MEASURED),
        "xu_latency_cycles": Parameter(16, 0.05, _MEASURED),
        "shuffle_latency_cycles": Parameter(23, 0.05, _MEASURED),
        "branch_cycles": Parameter(16, 0.3, _MEASURED),
        "shared_bytes_per_cycle": Parameter(128, 0.03, f"{_GH}, R03"),
        "shared_latency_cycles": Parameter(22, 0.05, _MEASURED),
        "cluster_shared_latency_cycles": Parameter(200, 0.15, _GH),
        "tma_in_flight_kib": Parameter(48, 0.3, "FlashGPU-Sim, its setting: 384 lines"),
        "tma_issue_cycles": Parameter(32, 0.35, "FlashGPU-Sim, its setting"),
        "tma_latency_cycles": Parameter(245, 0.1, _MEASURED),
        "sm_bytes_per_cycle": Parameter(107, 0.1, _MEASURED),
        "l2_near_latency_cycles": Parameter(245, 0.15, f"{_MEASURED}: the mean of both halves"),
        "l2_far_latency_cycles": Parameter(340, 0.15, f"{_MEASURED}: the mean of both halves"),
        "l2_gb_per_s": Parameter(13700, 0.2, _MEASURED),
        "l2_useful_mib": Parameter(25, 0.3, f"{_GH}, V03: half of L2"),
        "hbm_latency_ns": Parameter(196, 0.05, _MEASURED),
        "hbm_gb_per_s": Parameter(3095, 0.01, _MEASURED),
        "atomic_cycles": Parameter(1.75, 0.2, _MEASURED),
        "mbarrier_arrive_cycles": Parameter(7, 0.3, _GH),
        "mbarrier_test_cycles": Parameter(18, 0.2, _MEASURED),
        "mbarrier_wake_cycles": Parameter(36, 0.2, _MEASURED),
        "barrier_cycles": Parameter(9, 0.1, _MEASURED),
        "barrier_cycles_per_warp": Parameter(2, 0.05, _MEASURED),
        "cluster_barrier_cycles": Parameter(350, 0.1, f"{_GH}, EXP-17"),
        "fence_cta_cycles": Parameter(8, 0.1, _MEASURED),
        "memory_barrier_cycles": Parameter(547, 0.3, _MEASURED),
        "fence_gpu_cycles": Parameter(667, 0.1, _MEASURED),
        "fence_sys_ns": Parameter(705, 0.4, _MEASURED),
        "setmaxnreg_cycles": Parameter(145, 0.1, f"{_GH}, R16"),
        "mma_cycles_per_n": Parameter(0.5, 0.01, f"{_GH}, R00"),
        "mma_shared_floor_cycles": Parameter(16, 0.05, f"{_GH}; rates of FP8 products at N = 16"),
        "mma_latency_cycles": Parameter(36, 0.1, f"{_GH}, R01"),
        "mma_latency_cycles_per_n": Parameter(0.12, 0.2, f"{_GH}, R01"),
        "mma_issue_cycles": Parameter(8, 0.3, "FlashGPU-Sim, its setting"),
        "tmem_bytes_per_cycle": Parameter(128, 0, "this chip has no tensor memory"),
        "tmem_latency_cycles": Parameter(0, 0, "this chip has no tensor memory"),
        "tmem_copy_cycles": Parameter(0, 0, "this chip has no tensor memory"),
        "link_gb_per_s": Parameter(390, 0.03, "nvbandwidth in public threads"),
        "link_latency_ns": Parameter(415, 0.1, "nvbandwidth: a remote load takes 0.83 us"),
        "link_run_overhead_bytes": Parameter(22, 0.3, f"{_LOG}: runs of 32 and 64 bytes"),
        "cta_start_ns": Parameter(700, 0.3, f"{_GH}, R09: first data after a prologue of 1.2 us"),
        "kernel_exit_ns": Parameter(700, 0.5, _GUESS),
        "launch_ns": Parameter(2500, 0.4, f"{_GH}, R09: events see 3.65 to 3.9 us more"),
        # Behind the others, as all that was added later: draws of uncertain values go by place.
        "mma_register_cycles": Parameter(13, 0.05, f"{_MEASURED}; {_LOG}: what runs beside wgmma"),
    },
)
