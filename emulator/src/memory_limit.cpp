#include "memory_limit.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>

#include "machine.h"

namespace {

std::atomic<uint64_t> in_use{0}, limit{UINT64_MAX};

}  // namespace

namespace deep_moe::emulator {

uint64_t memory_in_use() {
    return in_use.load(std::memory_order_relaxed);
}

void limit_memory(uint64_t bytes) {
    limit.store(bytes, std::memory_order_relaxed);
}

std::string memory_text(uint64_t most) {
    constexpr double gib = double(1 << 30);
    return format("the emulator has %.2f GiB of host memory and may take %.2f (max_memory_bytes)",
                  double(memory_in_use()) / gib, double(most) / gib);
}

void require_memory(double bytes, const std::string& what) {
    if (double(memory_in_use()) + bytes <= double(limit.load())) return;
    throw Fault(FaultKind::memory, what + format(" needs %.2f GiB: ", bytes / double(1 << 30)) +
                                       memory_text(limit.load()));
}

const char* OutOfMemory::what() const noexcept {
    return "no more host memory";
}

}  // namespace deep_moe::emulator

// They are the library's own: it exports nothing but its C ABI. The forms for arrays and without
// exceptions are here, too, for a sanitizer's would not count.
void* operator new(size_t bytes) {
    const uint64_t now = in_use.load(std::memory_order_relaxed),
                   most = limit.load(std::memory_order_relaxed);
    const bool fits = now <= most && bytes <= most - now;
    void* p = fits ? std::malloc(bytes ? bytes : 1) : nullptr;
    if (!p) throw deep_moe::emulator::OutOfMemory();
    in_use.fetch_add(malloc_usable_size(p), std::memory_order_relaxed);
    return p;
}

void* operator new[](size_t bytes) {
    return operator new(bytes);
}

void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
    try {
        return operator new(bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void operator delete(void* p) noexcept {
    if (!p) return;
    in_use.fetch_sub(malloc_usable_size(p), std::memory_order_relaxed);
    std::free(p);
}

void operator delete(void* p, size_t) noexcept {
    operator delete(p);
}

void operator delete[](void* p) noexcept {
    operator delete(p);
}

void operator delete[](void* p, size_t) noexcept {
    operator delete(p);
}
