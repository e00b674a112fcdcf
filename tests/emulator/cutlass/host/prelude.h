// Included before an example's first line when a plain C++ compiler compiles its host side.
#pragma once

#include <cuda_runtime.h>
#include <device_launch_parameters.h>

// Kernels are compiled too, since their addresses are taken, but never called.
void __syncthreads();
int __syncthreads_and(int);
void __syncwarp(unsigned mask = ~0u);

namespace cutlass::arch {
int LaneId();
int SmId();
}  // namespace cutlass::arch

// nvcc's cuda_runtime.h has this one for pointers to functions.
template <class... Arguments>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Arguments...), cudaFuncAttribute attribute,
                                 int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

#define main example_main
