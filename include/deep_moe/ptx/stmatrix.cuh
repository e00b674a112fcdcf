// stmatrix: a warp stores register fragments of the tensor core as transposed rows of shared
// memory.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Four 8x8 tiles of 16-bit elements, transposed. Thread t passes the address of row t%8 of tile t/8
// (16 bytes, 16-byte aligned); half h of its register j lands in row 2*(t%4) + h of tile j, slot
// t/4. Whole warp. SM90 and up.
__device__ __forceinline__ void stmatrix_m8n8_x4_trans_b16(uint32_t row, uint32_t value0,
                                                           uint32_t value1, uint32_t value2,
                                                           uint32_t value3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row), "r"(value0), "r"(value1), "r"(value2), "r"(value3)
                 : "memory");
}

// Two of these tiles; threads 0..15 pass row addresses.
__device__ __forceinline__ void stmatrix_m8n8_x2_trans_b16(uint32_t row, uint32_t value0,
                                                           uint32_t value1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :
                 : "r"(row), "r"(value0), "r"(value1)
                 : "memory");
}

// One 16x8 tile of bytes, transposed into 8 rows of 16 bytes. Threads 0..7 pass the row addresses
// (16-byte aligned); byte e of thread t lands in row 2*(t%4) + e%2, byte t/4 + 8*(e/2).
// Whole warp. SM100a.
__device__ __forceinline__ void stmatrix_m16n8_x1_trans_b8(uint32_t row, uint32_t value) {
    asm volatile("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%0], {%1};"
                 :
                 : "r"(row), "r"(value)
                 : "memory");
}

}  // namespace deep_moe::ptx
