// A library with a static runtime inside, which a program loads while it runs.
#include <cuda_runtime.h>

__global__ void add(int* a) {
    a[threadIdx.x] += 1;
}

extern "C" int add_one(int* host) {
    int* device;
    const size_t bytes = 32 * sizeof(int);
    if (const cudaError_t error = cudaMalloc(&device, bytes)) return error;
    cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
    add<<<1, 32>>>(device);
    const cudaError_t error = cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
    cudaFree(device);
    return error;
}
