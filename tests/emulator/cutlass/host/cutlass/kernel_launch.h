// CUTLASS's launch of a kernel without a cluster, in CUDA's runtime API instead of nvcc's syntax.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"

namespace cutlass {

template <class Kernel, class Params>
Status kernel_launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                     const Params& params, bool /*launch_with_pdl*/) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    void* arguments[] = {const_cast<Params*>(&params)};
    cudaError_t result = cudaLaunchKernelExC(
        &config, reinterpret_cast<const void*>(&device_kernel<Kernel>), arguments);
    return result == cudaSuccess ? Status::kSuccess : Status::kErrorInternal;
}

}  // namespace cutlass
