// FP32 minimum and maximum that keep NaN: unlike fminf and fmaxf, NaN if either operand is NaN.
// Any thread may call them.
#pragma once

namespace deep_moe::ptx {

__device__ __forceinline__ float min_nan_f32(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}

__device__ __forceinline__ float max_nan_f32(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

}  // namespace deep_moe::ptx
