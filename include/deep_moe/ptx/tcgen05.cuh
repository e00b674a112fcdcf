// The fifth-generation tensor core of SM100: tensor memory (TMEM) and the 2-CTA block-scaled MMA.
//
// A TMEM address holds the lane in bits [31:16] and the column in bits [15:0]. All instructions
// here use cta_group::2, because a kernel may not mix groups. Shared-memory addresses are 32-bit
// offsets.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Reserves `num_columns` (power of two, 32..512) in both CTAs of the pair and writes the address to
// shared memory. One whole warp, the same one in both CTAs; readers of `dst` need a barrier.
__device__ __forceinline__ void tcgen05_alloc_cta_group2(uint32_t dst, uint32_t num_columns) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
                 :
                 : "r"(dst), "r"(num_columns)
                 : "memory");
}

// Gives up the right to allocate, so that a later kernel's CTA on this SM need not wait. Whole
// warp.
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit_cta_group2() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
}

// Whole warp, the one that allocated; neither CTA of the pair may touch the columns any more.
__device__ __forceinline__ void tcgen05_dealloc_cta_group2(uint32_t tmem, uint32_t num_columns) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;"
                 :
                 : "r"(tmem), "r"(num_columns)
                 : "memory");
}

// Copies 32 rows of 16 bytes to 4 columns, repeated in all four lane quadrants, from each CTA's own
// shared memory to its own TMEM. One thread of the even CTA.
__device__ __forceinline__ void tcgen05_cp_cta_group2_32x128b_warpx4(uint32_t tmem,
                                                                     uint64_t descriptor) {
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;"
                 :
                 : "r"(tmem), "l"(descriptor)
                 : "memory");
}

// D (+)= (A * scale_a) x (B * scale_b), K = 32, FP32 accumulation; `accumulate` false overwrites D.
// One thread of the even CTA.
__device__ __forceinline__ void tcgen05_mma_cta_group2_mxf8f6f4_block_scale(
    uint32_t d_tmem, uint64_t a_descriptor, uint64_t b_descriptor, uint32_t instruction_descriptor,
    uint32_t scale_a_tmem, uint32_t scale_b_tmem, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], p;\n"
        "}"
        :
        : "r"(d_tmem), "l"(a_descriptor), "l"(b_descriptor), "r"(instruction_descriptor),
          "r"(scale_a_tmem), "r"(scale_b_tmem), "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// The same of packed E2M1 with an E4M3 scale for 16 values, K = 64.
__device__ __forceinline__ void tcgen05_mma_cta_group2_mxf4nvf4_block16(
    uint32_t d_tmem, uint64_t a_descriptor, uint64_t b_descriptor, uint32_t instruction_descriptor,
    uint32_t scale_a_tmem, uint32_t scale_b_tmem, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 "
        "[%0], %1, %2, %3, [%4], [%5], p;\n"
        "}"
        :
        : "r"(d_tmem), "l"(a_descriptor), "l"(b_descriptor), "r"(instruction_descriptor),
          "r"(scale_a_tmem), "r"(scale_b_tmem), "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// D (+)= A x B of types of one byte, as the descriptor says, K = 32, FP32 accumulation;
// `accumulate` false overwrites D. One thread of the even CTA.
__device__ __forceinline__ void tcgen05_mma_cta_group2_f8f6f4(uint32_t d_tmem,
                                                              uint64_t a_descriptor,
                                                              uint64_t b_descriptor,
                                                              uint32_t instruction_descriptor,
                                                              bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::2.kind::f8f6f4 [%0], %1, %2, %3, p;\n"
        "}"
        :
        : "r"(d_tmem), "l"(a_descriptor), "l"(b_descriptor), "r"(instruction_descriptor),
          "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// D (+)= A x B of F16 or BF16, as the descriptor says, K = 16, FP32 accumulation; `accumulate`
// false overwrites D. One thread of the even CTA.
__device__ __forceinline__ void tcgen05_mma_cta_group2_f16(uint32_t d_tmem, uint64_t a_descriptor,
                                                           uint64_t b_descriptor,
                                                           uint32_t instruction_descriptor,
                                                           bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n"
        "}"
        :
        : "r"(d_tmem), "l"(a_descriptor), "l"(b_descriptor), "r"(instruction_descriptor),
          "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// The same with A in tensor memory, from this column on: in lane r row r of each CTA's 128, two
// values along K in a column.
__device__ __forceinline__ void tcgen05_mma_cta_group2_f16_tmem_a(uint32_t d_tmem, uint32_t a_tmem,
                                                                  uint64_t b_descriptor,
                                                                  uint32_t instruction_descriptor,
                                                                  bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::2.kind::f16 [%0], [%1], %2, %3, p;\n"
        "}"
        :
        : "r"(d_tmem), "r"(a_tmem), "l"(b_descriptor), "r"(instruction_descriptor),
          "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// One arrival on the barrier at this offset in every CTA of `cta_mask` once all earlier copies and
// MMAs of the executing thread are complete. Implies fence::before_thread_sync. One thread.
__device__ __forceinline__ void tcgen05_commit_cta_group2_multicast(uint32_t mbarrier,
                                                                    uint16_t cta_mask) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%0], %1;"
        :
        : "r"(mbarrier), "h"(cta_mask)
        : "memory");
}

// Loads 16 lanes x 8 columns of 32 bits. Thread t gets the cells (lane t/4 + 8*(i/2), column
// 2*(t%4) + i%2) in register i. Whole warp, within its own quadrant of lanes; the registers are
// undefined until tcgen05_wait_ld.
__device__ __forceinline__ void tcgen05_ld_16x256b(uint32_t tmem, float (&values)[4]) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(tmem)
                 : "memory");
}

// Waits for all earlier TMEM loads of the executing thread. `values` are the registers they fill:
// naming them here keeps the compiler from using one before the wait. Whole warp.
template <uint32_t num_loads>
__device__ __forceinline__ void tcgen05_wait_ld(float (&values)[num_loads][4]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
    for (uint32_t i = 0; i < num_loads; ++i) {
        asm volatile(""
                     : "+f"(values[i][0]), "+f"(values[i][1]), "+f"(values[i][2]),
                       "+f"(values[i][3]));
    }
}

// Stores 32 lanes x 16 columns of 32 bits: thread t register i to the cell (lane t, column i).
// Whole warp, within its own quadrant of lanes; complete after tcgen05_wait_st.
__device__ __forceinline__ void tcgen05_st_32x32b_x16(uint32_t tmem, const uint32_t (&values)[16]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};"
        :
        : "r"(tmem), "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]),
          "r"(values[5]), "r"(values[6]), "r"(values[7]), "r"(values[8]), "r"(values[9]),
          "r"(values[10]), "r"(values[11]), "r"(values[12]), "r"(values[13]), "r"(values[14]),
          "r"(values[15])
        : "memory");
}

// Waits for all earlier TMEM stores of the executing thread. Whole warp.
__device__ __forceinline__ void tcgen05_wait_st() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// Orders this thread's earlier tcgen05 operations before a following arrive or barrier.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// Orders later tcgen05 operations of this thread after the wait just done.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

}  // namespace deep_moe::ptx
