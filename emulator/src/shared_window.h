// How the asynchronous units (tensor copies, tensor cores) see one CTA's shared memory.
#pragma once

#include <cstdint>

namespace deep_moe::emulator {

constexpr uint32_t max_shared_bytes = 227 * 1024;  // of a CTA

// Addresses are offsets in the CTA's own shared window: the low 24 bits of a shared address. The
// engine implements it; each call checks the range and, where asked for, that every byte has been
// written.
struct SharedWindow {
    virtual const uint8_t* read(uint32_t address, uint32_t num_bytes) = 0;
    virtual uint8_t* write(uint32_t address, uint32_t num_bytes) = 0;

 protected:
    ~SharedWindow() = default;
};

}  // namespace deep_moe::emulator
