// How much host memory the library takes, and no more: what a kernel asks for (recursion, local
// memory, a huge grid, copies that never complete) must end in an error, not end the process.
#pragma once

#include <cstdint>
#include <new>
#include <string>

namespace deep_moe::emulator {

// Of the whole process: all machines share it.
uint64_t memory_in_use();
void limit_memory(uint64_t bytes);
// Fault if `bytes` more do not fit. `what` begins the text: "the grid of 7 CTAs".
void require_memory(double bytes, const std::string& what);
std::string memory_text(uint64_t limit);  // what is in use, and the limit

// Thrown by `new` at the limit, or where the system gives no more.
struct OutOfMemory : std::bad_alloc {
    const char* what() const noexcept override;
};

}  // namespace deep_moe::emulator
