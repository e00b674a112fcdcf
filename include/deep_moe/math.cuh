// Integer arithmetic used on sizes and indices.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

inline constexpr uint32_t warp_size = 32;
inline constexpr uint32_t full_warp = 0xffffffff;  // member mask of a converged warp

template <class T>
__host__ __device__ constexpr T ceil_div(T value, T divisor) {
    return (value + divisor - 1) / divisor;
}

template <class T>
__host__ __device__ constexpr T align_up(T value, T alignment) {
    return ceil_div(value, alignment) * alignment;
}

template <class T>
__host__ __device__ constexpr T min(T a, T b) {
    return a < b ? a : b;
}

template <class T>
__host__ __device__ constexpr T max(T a, T b) {
    return a > b ? a : b;
}

}  // namespace deep_moe
