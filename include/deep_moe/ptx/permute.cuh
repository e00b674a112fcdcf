// Bytes and halves in other places. Any thread may call it.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Byte i of the result is the byte of `low` (0..3) or `high` (4..7) that nibble i of `selectors`
// names; bit 3 of a nibble replicates that byte's sign bit instead. Upper 16 bits of `selectors`
// are ignored.
__device__ __forceinline__ uint32_t prmt(uint32_t low, uint32_t high, uint32_t selectors) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// Bits that leave at the highest come in at the lowest.
__device__ __forceinline__ uint32_t rotate_left(uint32_t word, uint32_t distance) {
    uint32_t rotated;
    asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(rotated) : "r"(word), "r"(distance));
    return rotated;
}

// A half in both halves. As an operand of arithmetic of two halves it takes no instruction: those
// of the machine name a half for both. A permute would be an instruction of its own.
__device__ __forceinline__ uint32_t lower_half_twice(uint32_t halves) {
    uint32_t twice;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "mov.b32 %0, {low, low};\n"
        "}"
        : "=r"(twice)
        : "r"(halves));
    return twice;
}
__device__ __forceinline__ uint32_t upper_half_twice(uint32_t halves) {
    uint32_t twice;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "mov.b32 %0, {high, high};\n"
        "}"
        : "=r"(twice)
        : "r"(halves));
    return twice;
}

}  // namespace deep_moe::ptx
