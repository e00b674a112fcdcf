// What a chip's file says of it (emulator/chips/). All are numbers; the names are the schema that
// both sides share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace deep_moe::emulator {

// Cycles are the SM clock's; "each" means per warp instruction and scheduler.
struct ChipParameters {
    double num_sms = 0;
    double shared_kib_per_sm = 0;
    // clock
    double max_clock_mhz = 0;    // without tensor cores
    double mma_clock_mhz = 0;    // from the first MMA on
    double power_slope_mhz = 0;  // lost where the tensor cores are always busy
    double power_window_us = 0;  // over which their share is averaged
    // issue and pipes
    double dependent_cycles = 0;  // from one to the next that needs its result
    double issue_gap_cycles = 0;  // from one instruction of a warp to its next
    double alu_cycles = 0, fma_cycles = 0, xu_cycles = 0, shuffle_cycles = 0;  // each
    double xu_latency_cycles = 0, shuffle_latency_cycles = 0;
    double branch_cycles = 0;  // that a taken branch costs its warp
    // shared memory
    double shared_bytes_per_cycle = 0, shared_latency_cycles = 0;
    double cluster_shared_latency_cycles = 0;
    // copies
    double tma_in_flight_kib = 0;   // of an SM; what comes behind waits
    double tma_issue_cycles = 0;    // from one request of an SM to its next
    double tma_latency_cycles = 0;  // of a copy that L2 has, beyond its bytes
    double sm_bytes_per_cycle = 0;  // from L2 into one SM
    // L2 and memory
    double l2_near_latency_cycles = 0, l2_far_latency_cycles = 0;
    double l2_gb_per_s = 0, l2_useful_mib = 0;
    double hbm_latency_ns = 0;  // beyond that of L2
    double hbm_gb_per_s = 0;
    double atomic_cycles = 0;  // at one address, one after the other
    // synchronisation
    double mbarrier_arrive_cycles = 0, mbarrier_test_cycles = 0, mbarrier_wake_cycles = 0;
    double barrier_cycles = 0, barrier_cycles_per_warp = 0, cluster_barrier_cycles = 0;
    double fence_cta_cycles = 0, memory_barrier_cycles = 0, fence_gpu_cycles = 0, fence_sys_ns = 0;
    double setmaxnreg_cycles = 0;
    // tensor cores: m64nN with 32 bytes of K
    double mma_cycles_per_n = 0, mma_shared_floor_cycles = 0;  // floor + N / 4 with A in memory
    double mma_latency_cycles = 0, mma_latency_cycles_per_n = 0;
    double mma_issue_cycles = 0, mma_register_cycles = 0;
    double tmem_bytes_per_cycle = 0, tmem_latency_cycles = 0, tmem_copy_cycles = 0;
    // links
    double link_gb_per_s = 0, link_latency_ns = 0;  // one way
    double link_run_overhead_bytes = 0;  // what a run of stored bytes takes besides itself
    // launches
    double cta_start_ns = 0, kernel_exit_ns = 0, launch_ns = 0;
};

struct ChipParameter {
    const char* name;
    double ChipParameters::* value;
};
const std::vector<ChipParameter>& chip_parameters();

// Lines of "name value"; throws Fault if one is unknown, missing or negative.
ChipParameters parse_chip(std::string_view text);

}  // namespace deep_moe::emulator
