// The error that everything in the emulator throws: what is wrong. The engine adds instruction, PTX
// line, source line, rank, CTA, warp and lane.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

namespace deep_moe::emulator {

enum class FaultKind : int {
    invalid_ptx = 1,
    unsupported = 2,
    out_of_bounds = 3,
    misaligned = 4,
    uninitialized = 5,
    barrier_misuse = 6,
    deadlock = 7,
    trap = 8,
    invalid_operation =
        9,  // an instruction was given operands that the architecture does not allow
    launch = 10,
    race = 11,
    internal = 12,
    memory = 13,  // of the host
};

struct Finding;

struct Fault : std::runtime_error {
    FaultKind kind;
    int lane;
    const char* space = "";  // of the access, if it is about one
    uint64_t address = 0;
    std::shared_ptr<const Finding> finding;  // the same as data, once somebody knows who did it
    Fault(FaultKind kind, const std::string& text, int lane = -1)
        : std::runtime_error(text), kind(kind), lane(lane) {}
    // The same with more text behind.
    Fault(const Fault& fault, const std::string& more)
        : std::runtime_error(fault.what() + more),
          kind(fault.kind),
          lane(fault.lane),
          space(fault.space),
          address(fault.address),
          finding(fault.finding) {}
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(FaultKind kind,
                                                                    const char* pattern, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, pattern);
    std::vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    throw Fault(kind, text);
}

}  // namespace deep_moe::emulator
