// What the stand-in says of its GPUs.
#pragma once

#include <cstdint>
#include <string>

namespace deep_moe::cuda {

struct ChipFacts {
    const char* name;
    const char* title;  // as the device's name
    int major, minor;
    int num_sms;
    uint64_t memory_bytes, l2_bytes;
    int clock_khz, memory_clock_khz, bus_bits;
};

inline constexpr ChipFacts chips[] = {
    {"h100", "NVIDIA H100 80GB HBM3 (emulated)", 9, 0, 132, 80ull << 30, 50ull << 20, 1980000,
     2619000, 5120},
    {"h200", "NVIDIA H200 (emulated)", 9, 0, 132, 141ull << 30, 50ull << 20, 1980000, 3201000,
     6144},
    {"b200", "NVIDIA B200 (emulated)", 10, 0, 148, 180ull << 30, 126ull << 20, 1965000, 3996000,
     8192},
    {"gb200", "NVIDIA GB200 (emulated)", 10, 0, 152, 185ull << 30, 126ull << 20, 2062000, 3996000,
     8192},
    {"b300", "NVIDIA B300 (emulated)", 10, 3, 148, 275ull << 30, 126ull << 20, 2032000, 3996000,
     8192},
};

// Of all of them.
inline constexpr int warp_threads = 32, max_block_threads = 1024, max_sm_threads = 2048,
                     max_sm_ctas = 32, registers_per_sm = 65536;
inline constexpr int default_shared_bytes = 48 << 10, max_shared_bytes = 227 << 10,
                     sm_shared_bytes = 228 << 10, reserved_shared_bytes = 1 << 10;

// A device attribute by the driver's number; 0 for those that the chip does not have.
int device_attribute(const ChipFacts& chip, int num_sms, int device, int attribute);

}  // namespace deep_moe::cuda
