// The CUDA functions that an example's host side calls: memory is host memory, a tensor map is the
// image that the emulator reads, and a launch goes to a callback.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

// One wave of CTAs is all there is time for.
constexpr int NUM_SMS = 148;

// What kernels name. Their host copies are compiled, since addresses are taken, but never called.
char shared_memory[1];
extern const uint3 threadIdx{}, blockIdx{};
extern const dim3 blockDim{}, gridDim{};
void __syncthreads() {}
int __syncthreads_and(int) {
    return 0;
}
void __syncwarp(unsigned) {}
namespace cutlass {
char smem[1];
namespace arch {
int LaneId() {
    return 0;
}
int SmId() {
    return 0;
}
}  // namespace arch
}  // namespace cutlass

namespace {

using AllocationCallback = void (*)(void* address, size_t num_bytes);
using LaunchCallback = int (*)(uint64_t kernel_offset, const uint32_t grid[3],
                               const uint32_t block[3], const uint32_t cluster[3],
                               uint32_t shared_bytes, void** arguments);
AllocationCallback on_allocation;
LaunchCallback on_launch;

// Where a call of exit() returns to, so that it does not end the process.
std::jmp_buf left;
int exit_status;

template <class T>
void put(unsigned char* image, size_t offset, T value) {
    std::memcpy(image + offset, &value, sizeof value);
}

}  // namespace

extern "C" {

// The linker sends calls of exit() here.
[[noreturn]] void __wrap_exit(int status) {
    exit_status = status;
    std::longjmp(left, 1);
}

int run_example(int (*example_main)(int, const char**), int argc, const char** argv,
                AllocationCallback allocation, LaunchCallback launch) {
    on_allocation = allocation;
    on_launch = launch;
    exit_status = setjmp(left) ? exit_status : example_main(argc, argv);
    std::cout.flush();
    std::fflush(stdout);
    return exit_status;
}

cudaError_t cudaMalloc(void** address, size_t num_bytes) {
    constexpr size_t alignment = 1024;
    *address = std::aligned_alloc(alignment, (num_bytes + alignment - 1) / alignment * alignment);
    std::memset(*address, 0, num_bytes);
    on_allocation(*address, num_bytes);
    return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
    std::free(address);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
    std::memcpy(to, from, num_bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t num_bytes, cudaStream_t) {
    std::memset(to, value, num_bytes);
    return cudaSuccess;
}

// Both architectures' examples ask only for the compute capability and the number of SMs.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    properties->major = DEVICE_MAJOR;
    properties->multiProcessorCount = NUM_SMS;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount      ? NUM_SMS
             : attribute == cudaDevAttrComputeCapabilityMajor ? DEVICE_MAJOR
                                                              : 0;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *free = *total = size_t{1} << 37;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
    return "error";
}
const char* cudaGetErrorName(cudaError_t) {
    return "error";
}

cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*,
                                           const cudaLaunchConfig_t* config) {
    *count = NUM_SMS;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeClusterDimension)
            *count /= attribute.val.clusterDim.x * attribute.val.clusterDim.y;
    }
    return cudaSuccess;
}

// Nothing is timed.
cudaError_t cudaEventCreate(cudaEvent_t*) {
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
    *ms = 1;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
    Dl_info library;
    dladdr(kernel, &library);
    uint64_t offset =
        reinterpret_cast<uintptr_t>(kernel) - reinterpret_cast<uintptr_t>(library.dli_fbase);
    uint32_t cluster[3] = {1, 1, 1};
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
        cluster[0] = attribute.val.clusterDim.x;
        cluster[1] = attribute.val.clusterDim.y;
        cluster[2] = attribute.val.clusterDim.z;
    }
    const uint32_t grid[3] = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
    const uint32_t block[3] = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
    bool good =
        on_launch(offset, grid, block, cluster, uint32_t(config->dynamicSmemBytes), arguments) != 0;
    return good ? cudaSuccess : cudaErrorLaunchFailure;
}

CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "error";
    return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
    std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    auto* image = reinterpret_cast<unsigned char*>(map);
    std::memset(image, 0, sizeof *map);
    std::memcpy(image, "DMTMAP01", 8);
    const int header[] = {type, int(rank), interleave, swizzle, fill};
    for (size_t i = 0; i < 5; ++i) image[8 + i] = static_cast<unsigned char>(header[i]);
    put(image, 16, reinterpret_cast<uint64_t>(address));
    for (size_t i = 0; i < rank; ++i) {
        put(image, 24 + 8 * i, uint64_t(dims[i]));
        if (i + 1 < rank) put(image, 64 + 8 * i, uint64_t(strides[i]));
        put(image, 96 + 2 * i, uint16_t(box[i]));
        put(image, 106 + i, uint8_t(element_strides[i]));
    }
    return CUDA_SUCCESS;
}

}  // extern "C"
