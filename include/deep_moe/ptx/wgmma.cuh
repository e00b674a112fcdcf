// wgmma: the fourth-generation tensor core of SM90. A warpgroup multiplies 64 rows of A, in its
// registers or in shared memory, with B in shared memory; the products run asynchronously, in
// groups.
//
// All four warps of a warpgroup execute each of these, converged. Thread t of warp w holds
//   A, register r, byte e:  row 16*w + t/4 + 8*(r%2), k = 4*(t%4) + e + 16*(r/2)
//   D, register i:          row 16*w + t/4 + 8*(i/2%2), column 2*(t%4) + i%2 + 8*(i/4)
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Before the first wgmma, and whenever registers that one uses were touched since the last.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// Closes the group of all wgmmas since the last one.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// Until at most `num_pending` newest groups are incomplete. Registers of an incomplete one, A and
// accumulators, must not be touched.
template <uint32_t num_pending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(num_pending) : "memory");
}

// The operand lists below: the first 4, 8, 16, ... registers of an accumulator, by number and as
// constraints.
#define DEEP_MOE_NUMBERS_4 "%0, %1, %2, %3"
#define DEEP_MOE_NUMBERS_8 DEEP_MOE_NUMBERS_4 ", %4, %5, %6, %7"
#define DEEP_MOE_NUMBERS_12 DEEP_MOE_NUMBERS_8 ", %8, %9, %10, %11"
#define DEEP_MOE_NUMBERS_16 DEEP_MOE_NUMBERS_12 ", %12, %13, %14, %15"
#define DEEP_MOE_NUMBERS_20 DEEP_MOE_NUMBERS_16 ", %16, %17, %18, %19"
#define DEEP_MOE_NUMBERS_24 DEEP_MOE_NUMBERS_20 ", %20, %21, %22, %23"
#define DEEP_MOE_NUMBERS_28 DEEP_MOE_NUMBERS_24 ", %24, %25, %26, %27"
#define DEEP_MOE_NUMBERS_32 DEEP_MOE_NUMBERS_28 ", %28, %29, %30, %31"
#define DEEP_MOE_NUMBERS_36 DEEP_MOE_NUMBERS_32 ", %32, %33, %34, %35"
#define DEEP_MOE_NUMBERS_40 DEEP_MOE_NUMBERS_36 ", %36, %37, %38, %39"
#define DEEP_MOE_NUMBERS_44 DEEP_MOE_NUMBERS_40 ", %40, %41, %42, %43"
#define DEEP_MOE_NUMBERS_48 DEEP_MOE_NUMBERS_44 ", %44, %45, %46, %47"
#define DEEP_MOE_NUMBERS_52 DEEP_MOE_NUMBERS_48 ", %48, %49, %50, %51"
#define DEEP_MOE_NUMBERS_56 DEEP_MOE_NUMBERS_52 ", %52, %53, %54, %55"
#define DEEP_MOE_NUMBERS_60 DEEP_MOE_NUMBERS_56 ", %56, %57, %58, %59"
#define DEEP_MOE_NUMBERS_64 DEEP_MOE_NUMBERS_60 ", %60, %61, %62, %63"
#define DEEP_MOE_NUMBERS_68 DEEP_MOE_NUMBERS_64 ", %64, %65, %66, %67"
#define DEEP_MOE_NUMBERS_72 DEEP_MOE_NUMBERS_68 ", %68, %69, %70, %71"
#define DEEP_MOE_NUMBERS_76 DEEP_MOE_NUMBERS_72 ", %72, %73, %74, %75"
#define DEEP_MOE_NUMBERS_80 DEEP_MOE_NUMBERS_76 ", %76, %77, %78, %79"
#define DEEP_MOE_NUMBERS_84 DEEP_MOE_NUMBERS_80 ", %80, %81, %82, %83"
#define DEEP_MOE_NUMBERS_88 DEEP_MOE_NUMBERS_84 ", %84, %85, %86, %87"
#define DEEP_MOE_FLOATS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DEEP_MOE_FLOATS_8(d, i) DEEP_MOE_FLOATS_4(d, i), DEEP_MOE_FLOATS_4(d, i + 4)
#define DEEP_MOE_FLOATS_12(d, i) DEEP_MOE_FLOATS_8(d, i), DEEP_MOE_FLOATS_4(d, i + 8)
#define DEEP_MOE_FLOATS_16(d, i) DEEP_MOE_FLOATS_12(d, i), DEEP_MOE_FLOATS_4(d, i + 12)
#define DEEP_MOE_FLOATS_20(d, i) DEEP_MOE_FLOATS_16(d, i), DEEP_MOE_FLOATS_4(d, i + 16)
#define DEEP_MOE_FLOATS_24(d, i) DEEP_MOE_FLOATS_20(d, i), DEEP_MOE_FLOATS_4(d, i + 20)
#define DEEP_MOE_FLOATS_28(d, i) DEEP_MOE_FLOATS_24(d, i), DEEP_MOE_FLOATS_4(d, i + 24)
#define DEEP_MOE_FLOATS_32(d, i) DEEP_MOE_FLOATS_28(d, i), DEEP_MOE_FLOATS_4(d, i + 28)
#define DEEP_MOE_FLOATS_36(d, i) DEEP_MOE_FLOATS_32(d, i), DEEP_MOE_FLOATS_4(d, i + 32)
#define DEEP_MOE_FLOATS_40(d, i) DEEP_MOE_FLOATS_36(d, i), DEEP_MOE_FLOATS_4(d, i + 36)
#define DEEP_MOE_FLOATS_44(d, i) DEEP_MOE_FLOATS_40(d, i), DEEP_MOE_FLOATS_4(d, i + 40)
#define DEEP_MOE_FLOATS_48(d, i) DEEP_MOE_FLOATS_44(d, i), DEEP_MOE_FLOATS_4(d, i + 44)
#define DEEP_MOE_FLOATS_52(d, i) DEEP_MOE_FLOATS_48(d, i), DEEP_MOE_FLOATS_4(d, i + 48)
#define DEEP_MOE_FLOATS_56(d, i) DEEP_MOE_FLOATS_52(d, i), DEEP_MOE_FLOATS_4(d, i + 52)
#define DEEP_MOE_FLOATS_60(d, i) DEEP_MOE_FLOATS_56(d, i), DEEP_MOE_FLOATS_4(d, i + 56)
#define DEEP_MOE_FLOATS_64(d, i) DEEP_MOE_FLOATS_60(d, i), DEEP_MOE_FLOATS_4(d, i + 60)
#define DEEP_MOE_FLOATS_68(d, i) DEEP_MOE_FLOATS_64(d, i), DEEP_MOE_FLOATS_4(d, i + 64)
#define DEEP_MOE_FLOATS_72(d, i) DEEP_MOE_FLOATS_68(d, i), DEEP_MOE_FLOATS_4(d, i + 68)
#define DEEP_MOE_FLOATS_76(d, i) DEEP_MOE_FLOATS_72(d, i), DEEP_MOE_FLOATS_4(d, i + 72)
#define DEEP_MOE_FLOATS_80(d, i) DEEP_MOE_FLOATS_76(d, i), DEEP_MOE_FLOATS_4(d, i + 76)
#define DEEP_MOE_FLOATS_84(d, i) DEEP_MOE_FLOATS_80(d, i), DEEP_MOE_FLOATS_4(d, i + 80)
#define DEEP_MOE_FLOATS_88(d, i) DEEP_MOE_FLOATS_84(d, i), DEEP_MOE_FLOATS_4(d, i + 84)

// D[64 rows][n] += A (E5M2) x B (E4M3), K = 32, FP32 accumulation. `b_descriptor`: n rows of 32
// bytes of K.
#define DEEP_MOE_WGMMA(n, num_accumulators, a0, a1, a2, a3, b)                         \
    __device__ __forceinline__ void wgmma_m64k32_f32_e5m2_e4m3(                        \
        float (&d)[num_accumulators], const uint32_t (&a)[4], uint64_t b_descriptor) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n                             \
                     "k32.f32.e5m2.e4m3 "                                              \
                     "{" DEEP_MOE_NUMBERS_##num_accumulators                           \
                     "}, "                                                             \
                     "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", 1, 1, 1;"               \
                     : DEEP_MOE_FLOATS_##num_accumulators(d, 0)                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor)   \
                     : "memory");                                                      \
    }
DEEP_MOE_WGMMA("8", 4, "%4", "%5", "%6", "%7", "%8")
DEEP_MOE_WGMMA("16", 8, "%8", "%9", "%10", "%11", "%12")
DEEP_MOE_WGMMA("24", 12, "%12", "%13", "%14", "%15", "%16")
DEEP_MOE_WGMMA("32", 16, "%16", "%17", "%18", "%19", "%20")
DEEP_MOE_WGMMA("40", 20, "%20", "%21", "%22", "%23", "%24")
DEEP_MOE_WGMMA("48", 24, "%24", "%25", "%26", "%27", "%28")
DEEP_MOE_WGMMA("56", 28, "%28", "%29", "%30", "%31", "%32")
DEEP_MOE_WGMMA("64", 32, "%32", "%33", "%34", "%35", "%36")
DEEP_MOE_WGMMA("72", 36, "%36", "%37", "%38", "%39", "%40")
DEEP_MOE_WGMMA("80", 40, "%40", "%41", "%42", "%43", "%44")
DEEP_MOE_WGMMA("88", 44, "%44", "%45", "%46", "%47", "%48")
DEEP_MOE_WGMMA("96", 48, "%48", "%49", "%50", "%51", "%52")
DEEP_MOE_WGMMA("104", 52, "%52", "%53", "%54", "%55", "%56")
DEEP_MOE_WGMMA("112", 56, "%56", "%57", "%58", "%59", "%60")
DEEP_MOE_WGMMA("120", 60, "%60", "%61", "%62", "%63", "%64")
DEEP_MOE_WGMMA("128", 64, "%64", "%65", "%66", "%67", "%68")
DEEP_MOE_WGMMA("136", 68, "%68", "%69", "%70", "%71", "%72")
DEEP_MOE_WGMMA("144", 72, "%72", "%73", "%74", "%75", "%76")
DEEP_MOE_WGMMA("152", 76, "%76", "%77", "%78", "%79", "%80")
DEEP_MOE_WGMMA("160", 80, "%80", "%81", "%82", "%83", "%84")
DEEP_MOE_WGMMA("168", 84, "%84", "%85", "%86", "%87", "%88")
DEEP_MOE_WGMMA("176", 88, "%88", "%89", "%90", "%91", "%92")

#undef DEEP_MOE_WGMMA

// D[64 rows][n] (+)= A (E4M3) x B (E4M3), K = 32, FP32 accumulation, both in shared memory: 64 and
// n rows of 32 bytes of K. `accumulate` false overwrites D.
#define DEEP_MOE_WGMMA(n, num_accumulators, a, b, p)                                       \
    __device__ __forceinline__ void wgmma_m64k32_f32_e4m3_e4m3(                            \
        float (&d)[num_accumulators], uint64_t a_descriptor, uint64_t b_descriptor,        \
        bool accumulate) {                                                                 \
        asm volatile(                                                                      \
            "{\n"                                                                          \
            ".reg .pred p;\n"                                                              \
            "setp.ne.b32 p, " p                                                            \
            ", 0;\n"                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" n                                          \
            "k32.f32.e4m3.e4m3 "                                                           \
            "{" DEEP_MOE_NUMBERS_##num_accumulators "}, " a ", " b                         \
                                                    ", p, 1, 1;\n"                         \
                                                    "}"                                    \
            : DEEP_MOE_FLOATS_##num_accumulators(d, 0)                                     \
            : "l"(a_descriptor), "l"(b_descriptor), "r"(static_cast<uint32_t>(accumulate)) \
            : "memory");                                                                   \
    }
DEEP_MOE_WGMMA("8", 4, "%4", "%5", "%6")
DEEP_MOE_WGMMA("16", 8, "%8", "%9", "%10")
DEEP_MOE_WGMMA("24", 12, "%12", "%13", "%14")
DEEP_MOE_WGMMA("32", 16, "%16", "%17", "%18")
DEEP_MOE_WGMMA("40", 20, "%20", "%21", "%22")
DEEP_MOE_WGMMA("48", 24, "%24", "%25", "%26")
DEEP_MOE_WGMMA("56", 28, "%28", "%29", "%30")
DEEP_MOE_WGMMA("64", 32, "%32", "%33", "%34")
DEEP_MOE_WGMMA("72", 36, "%36", "%37", "%38")
DEEP_MOE_WGMMA("80", 40, "%40", "%41", "%42")
DEEP_MOE_WGMMA("88", 44, "%44", "%45", "%46")
DEEP_MOE_WGMMA("96", 48, "%48", "%49", "%50")
DEEP_MOE_WGMMA("104", 52, "%52", "%53", "%54")
DEEP_MOE_WGMMA("112", 56, "%56", "%57", "%58")
DEEP_MOE_WGMMA("120", 60, "%60", "%61", "%62")
DEEP_MOE_WGMMA("128", 64, "%64", "%65", "%66")
DEEP_MOE_WGMMA("136", 68, "%68", "%69", "%70")
DEEP_MOE_WGMMA("144", 72, "%72", "%73", "%74")
DEEP_MOE_WGMMA("152", 76, "%76", "%77", "%78")
DEEP_MOE_WGMMA("160", 80, "%80", "%81", "%82")
DEEP_MOE_WGMMA("168", 84, "%84", "%85", "%86")
DEEP_MOE_WGMMA("176", 88, "%88", "%89", "%90")

#undef DEEP_MOE_WGMMA

// D[64 rows][n] += A (BF16) x B (BF16), K = 16, FP32 accumulation, both in shared memory, K-major:
// 64 and n rows of 32 bytes of K.
#define DEEP_MOE_WGMMA(n, num_accumulators, a, b)                                              \
    __device__ __forceinline__ void wgmma_m64k16_f32_bf16_bf16(                                \
        float (&d)[num_accumulators], uint64_t a_descriptor, uint64_t b_descriptor) {          \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n                                     \
                     "k16.f32.bf16.bf16 "                                                      \
                     "{" DEEP_MOE_NUMBERS_##num_accumulators "}, " a ", " b ", 1, 1, 1, 0, 0;" \
                     : DEEP_MOE_FLOATS_##num_accumulators(d, 0)                                \
                     : "l"(a_descriptor), "l"(b_descriptor)                                    \
                     : "memory");                                                              \
    }
DEEP_MOE_WGMMA("8", 4, "%4", "%5")
DEEP_MOE_WGMMA("16", 8, "%8", "%9")
DEEP_MOE_WGMMA("24", 12, "%12", "%13")
DEEP_MOE_WGMMA("32", 16, "%16", "%17")
DEEP_MOE_WGMMA("40", 20, "%20", "%21")
DEEP_MOE_WGMMA("48", 24, "%24", "%25")
DEEP_MOE_WGMMA("56", 28, "%28", "%29")
DEEP_MOE_WGMMA("64", 32, "%32", "%33")
DEEP_MOE_WGMMA("72", 36, "%36", "%37")
DEEP_MOE_WGMMA("80", 40, "%40", "%41")
DEEP_MOE_WGMMA("88", 44, "%44", "%45")
DEEP_MOE_WGMMA("96", 48, "%48", "%49")
DEEP_MOE_WGMMA("104", 52, "%52", "%53")
DEEP_MOE_WGMMA("112", 56, "%56", "%57")
DEEP_MOE_WGMMA("120", 60, "%60", "%61")
DEEP_MOE_WGMMA("128", 64, "%64", "%65")
DEEP_MOE_WGMMA("136", 68, "%68", "%69")
DEEP_MOE_WGMMA("144", 72, "%72", "%73")
DEEP_MOE_WGMMA("152", 76, "%76", "%77")
DEEP_MOE_WGMMA("160", 80, "%80", "%81")
DEEP_MOE_WGMMA("168", 84, "%84", "%85")
DEEP_MOE_WGMMA("176", 88, "%88", "%89")

#undef DEEP_MOE_WGMMA

// The same with A in registers, as pairs along K: of thread t, register r, half e is row
// 16*w + t/4 + 8*(r%2), k = 2*(t%4) + e + 8*(r/2).
#define DEEP_MOE_WGMMA(n, num_accumulators, a0, a1, a2, a3, b)                         \
    __device__ __forceinline__ void wgmma_m64k16_f32_bf16_bf16(                        \
        float (&d)[num_accumulators], const uint32_t (&a)[4], uint64_t b_descriptor) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n                             \
                     "k16.f32.bf16.bf16 "                                              \
                     "{" DEEP_MOE_NUMBERS_##num_accumulators                           \
                     "}, "                                                             \
                     "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", 1, 1, 1, 0;"            \
                     : DEEP_MOE_FLOATS_##num_accumulators(d, 0)                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor)   \
                     : "memory");                                                      \
    }
DEEP_MOE_WGMMA("8", 4, "%4", "%5", "%6", "%7", "%8")
DEEP_MOE_WGMMA("16", 8, "%8", "%9", "%10", "%11", "%12")
DEEP_MOE_WGMMA("24", 12, "%12", "%13", "%14", "%15", "%16")
DEEP_MOE_WGMMA("32", 16, "%16", "%17", "%18", "%19", "%20")
DEEP_MOE_WGMMA("40", 20, "%20", "%21", "%22", "%23", "%24")
DEEP_MOE_WGMMA("48", 24, "%24", "%25", "%26", "%27", "%28")
DEEP_MOE_WGMMA("56", 28, "%28", "%29", "%30", "%31", "%32")
DEEP_MOE_WGMMA("64", 32, "%32", "%33", "%34", "%35", "%36")
DEEP_MOE_WGMMA("72", 36, "%36", "%37", "%38", "%39", "%40")
DEEP_MOE_WGMMA("80", 40, "%40", "%41", "%42", "%43", "%44")
DEEP_MOE_WGMMA("88", 44, "%44", "%45", "%46", "%47", "%48")
DEEP_MOE_WGMMA("96", 48, "%48", "%49", "%50", "%51", "%52")
DEEP_MOE_WGMMA("104", 52, "%52", "%53", "%54", "%55", "%56")
DEEP_MOE_WGMMA("112", 56, "%56", "%57", "%58", "%59", "%60")
DEEP_MOE_WGMMA("120", 60, "%60", "%61", "%62", "%63", "%64")
DEEP_MOE_WGMMA("128", 64, "%64", "%65", "%66", "%67", "%68")
DEEP_MOE_WGMMA("136", 68, "%68", "%69", "%70", "%71", "%72")
DEEP_MOE_WGMMA("144", 72, "%72", "%73", "%74", "%75", "%76")
DEEP_MOE_WGMMA("152", 76, "%76", "%77", "%78", "%79", "%80")
DEEP_MOE_WGMMA("160", 80, "%80", "%81", "%82", "%83", "%84")
DEEP_MOE_WGMMA("168", 84, "%84", "%85", "%86", "%87", "%88")
DEEP_MOE_WGMMA("176", 88, "%88", "%89", "%90", "%91", "%92")

#undef DEEP_MOE_WGMMA
#undef DEEP_MOE_NUMBERS_4
#undef DEEP_MOE_NUMBERS_8
#undef DEEP_MOE_NUMBERS_12
#undef DEEP_MOE_NUMBERS_16
#undef DEEP_MOE_NUMBERS_20
#undef DEEP_MOE_NUMBERS_24
#undef DEEP_MOE_NUMBERS_28
#undef DEEP_MOE_NUMBERS_32
#undef DEEP_MOE_NUMBERS_36
#undef DEEP_MOE_NUMBERS_40
#undef DEEP_MOE_NUMBERS_44
#undef DEEP_MOE_NUMBERS_48
#undef DEEP_MOE_NUMBERS_52
#undef DEEP_MOE_NUMBERS_56
#undef DEEP_MOE_NUMBERS_60
#undef DEEP_MOE_NUMBERS_64
#undef DEEP_MOE_NUMBERS_68
#undef DEEP_MOE_NUMBERS_72
#undef DEEP_MOE_NUMBERS_76
#undef DEEP_MOE_NUMBERS_80
#undef DEEP_MOE_NUMBERS_84
#undef DEEP_MOE_NUMBERS_88
#undef DEEP_MOE_FLOATS_4
#undef DEEP_MOE_FLOATS_8
#undef DEEP_MOE_FLOATS_12
#undef DEEP_MOE_FLOATS_16
#undef DEEP_MOE_FLOATS_20
#undef DEEP_MOE_FLOATS_24
#undef DEEP_MOE_FLOATS_28
#undef DEEP_MOE_FLOATS_32
#undef DEEP_MOE_FLOATS_36
#undef DEEP_MOE_FLOATS_40
#undef DEEP_MOE_FLOATS_44
#undef DEEP_MOE_FLOATS_48
#undef DEEP_MOE_FLOATS_52
#undef DEEP_MOE_FLOATS_56
#undef DEEP_MOE_FLOATS_60
#undef DEEP_MOE_FLOATS_64
#undef DEEP_MOE_FLOATS_68
#undef DEEP_MOE_FLOATS_72
#undef DEEP_MOE_FLOATS_76
#undef DEEP_MOE_FLOATS_80
#undef DEEP_MOE_FLOATS_84
#undef DEEP_MOE_FLOATS_88

// Keeps the compiler from moving uses of an accumulator in front of the wait that completes it.
template <uint32_t num_accumulators>
__device__ __forceinline__ void wgmma_keep_order(float (&d)[num_accumulators]) {
#pragma unroll
    for (uint32_t i = 0; i < num_accumulators; ++i) asm volatile("" : "+f"(d[i]));
}

}  // namespace deep_moe::ptx
