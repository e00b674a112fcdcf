// mma.sync: the tensor core as one warp asks for it. A warp multiplies 16 rows of A with 8 columns
// of B, both in its registers, and goes on when it needs the sums.
//
// All 32 lanes execute it, converged. Lane t holds, half e of a register being the lower for e = 0,
//   A, register r:  row t/4 + 8*(r%2), k = 2*(t%4) + e + 8*(r/2)
//   B, register r:  column t/4, k = 2*(t%4) + e + 8*r
//   D, register i:  row t/4 + 8*(i/2), column 2*(t%4) + i%2
// which is wgmma's way for 16 of its rows (ptx/wgmma.cuh).
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// D[16 rows][8] += A (BF16) x B (BF16), K = 16, FP32 accumulation.
__device__ __forceinline__ void mma_m16n8k16_f32_bf16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes from shared memory. Lane 8*i + j gives the address of row j
// of matrix i. Lane t gets, in register i, bytes 4*(t%4) to 4*(t%4) + 3 of row t/4 of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&matrices)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace deep_moe::ptx
