#include "chip_parameters.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <string>
#include <string_view>

#include "fault.h"
#include "machine.h"

namespace deep_moe::emulator {

#define PARAMETER(name) {#name, &ChipParameters::name}

const std::vector<ChipParameter>& chip_parameters() {
    static const std::vector<ChipParameter> all = {
        PARAMETER(num_sms),
        PARAMETER(shared_kib_per_sm),
        PARAMETER(max_clock_mhz),
        PARAMETER(mma_clock_mhz),
        PARAMETER(power_slope_mhz),
        PARAMETER(power_window_us),
        PARAMETER(issue_gap_cycles),
        PARAMETER(dependent_cycles),
        PARAMETER(alu_cycles),
        PARAMETER(fma_cycles),
        PARAMETER(xu_cycles),
        PARAMETER(shuffle_cycles),
        PARAMETER(xu_latency_cycles),
        PARAMETER(shuffle_latency_cycles),
        PARAMETER(branch_cycles),
        PARAMETER(shared_bytes_per_cycle),
        PARAMETER(shared_latency_cycles),
        PARAMETER(cluster_shared_latency_cycles),
        PARAMETER(tma_in_flight_kib),
        PARAMETER(tma_issue_cycles),
        PARAMETER(tma_latency_cycles),
        PARAMETER(sm_bytes_per_cycle),
        PARAMETER(l2_near_latency_cycles),
        PARAMETER(l2_far_latency_cycles),
        PARAMETER(l2_gb_per_s),
        PARAMETER(l2_useful_mib),
        PARAMETER(hbm_latency_ns),
        PARAMETER(hbm_gb_per_s),
        PARAMETER(atomic_cycles),
        PARAMETER(mbarrier_arrive_cycles),
        PARAMETER(mbarrier_test_cycles),
        PARAMETER(mbarrier_wake_cycles),
        PARAMETER(barrier_cycles),
        PARAMETER(barrier_cycles_per_warp),
        PARAMETER(cluster_barrier_cycles),
        PARAMETER(fence_cta_cycles),
        PARAMETER(memory_barrier_cycles),
        PARAMETER(fence_gpu_cycles),
        PARAMETER(fence_sys_ns),
        PARAMETER(setmaxnreg_cycles),
        PARAMETER(mma_cycles_per_n),
        PARAMETER(mma_shared_floor_cycles),
        PARAMETER(mma_latency_cycles),
        PARAMETER(mma_latency_cycles_per_n),
        PARAMETER(mma_issue_cycles),
        PARAMETER(mma_register_cycles),
        PARAMETER(tmem_bytes_per_cycle),
        PARAMETER(tmem_latency_cycles),
        PARAMETER(tmem_copy_cycles),
        PARAMETER(link_gb_per_s),
        PARAMETER(link_latency_ns),
        PARAMETER(link_run_overhead_bytes),
        PARAMETER(cta_start_ns),
        PARAMETER(kernel_exit_ns),
        PARAMETER(launch_ns),
    };
    return all;
}

#undef PARAMETER

namespace {

// Takes it off the text. Not a stream: those need a newer C library than the wheel promises.
std::string next_word(std::string_view& text) {
    constexpr std::string_view space = " \t\n";
    text.remove_prefix(std::min(text.find_first_not_of(space), text.size()));
    const std::string word(text.substr(0, text.find_first_of(space)));
    text.remove_prefix(word.size());
    return word;
}

}  // namespace

ChipParameters parse_chip(std::string_view text) {
    ChipParameters chip;
    std::set<std::string> given;
    for (std::string name = next_word(text); !name.empty(); name = next_word(text)) {
        const std::string number = next_word(text);
        double value = 0;
        const auto read = std::from_chars(number.data(), number.data() + number.size(), value);
        if (read.ec != std::errc{} || read.ptr != number.data() + number.size())
            fail(FaultKind::launch, "the chip's %s must be a number of at least 0; got '%s'",
                 name.c_str(), number.c_str());
        bool known = false;
        for (const ChipParameter& p : chip_parameters()) {
            if (name != p.name) continue;
            known = true;
            chip.*p.value = value;
        }
        if (!known) fail(FaultKind::launch, "a chip has no parameter '%s'", name.c_str());
        if (!std::isfinite(value) || value < 0)
            fail(FaultKind::launch, "the chip's %s must be a number of at least 0; got %g",
                 name.c_str(), value);
        given.insert(name);
    }
    for (const ChipParameter& p : chip_parameters())
        if (!given.count(p.name)) fail(FaultKind::launch, "the chip's %s is missing", p.name);
    return chip;
}

}  // namespace deep_moe::emulator
