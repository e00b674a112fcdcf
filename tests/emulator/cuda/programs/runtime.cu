// A CUDA program as nvcc takes it: the runtime's calls, launches by <<<>>>, device variables.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                       \
    do {                                                                  \
        const cudaError_t result = (call);                                \
        if (result) {                                                     \
            std::printf("%s: %s\n", #call, cudaGetErrorName(result));     \
            std::exit(1);                                                 \
        }                                                                 \
    } while (0)

__device__ int counter;
__constant__ float factor = 2;
__managed__ int managed = 5;

template <class T>
__global__ void saxpy(int n, T a, const T* x, T* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i] = a * x[i] * factor + y[i];
    atomicAdd(&counter, 1);
    if (i == 0) managed += 1;
}

__global__ void whole_grid(int* out) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    out[grid.thread_rank()] = 1;
    grid.sync();
    if (grid.thread_rank() == 0)
        for (int i = 1; i < grid.size(); ++i) out[0] += out[i];
}

#ifndef NO_CLUSTERS
__global__ void __cluster_dims__(2) pairs(int* out) {
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    __shared__ int mine;
    mine = 10 + blockIdx.x;
    cluster.sync();
    out[blockIdx.x] = *cluster.map_shared_rank(&mine, cluster.block_rank() ^ 1);
    cluster.sync();
}
#endif

__global__ void large(int* out) {
    extern __shared__ int words[];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

int main() {
    const int n = 1000;
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    std::printf("sm_%d%d\n", properties.major, properties.minor);
    float *x, *y;
    CHECK(cudaMalloc(&x, n * sizeof(float)));
    CHECK(cudaMallocManaged(&y, n * sizeof(float)));
    std::vector<float> host(n);
    for (int i = 0; i < n; ++i) host[i] = float(i);
    CHECK(cudaMemcpy(x, host.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(y, 0, n * sizeof(float)));
    const int zero = 0;
    CHECK(cudaMemcpyToSymbol(counter, &zero, sizeof zero));
    cudaStream_t stream;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin, stream));
    saxpy<float><<<8, 128, 0, stream>>>(n, 3.f, x, y);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    for (int i = 0; i < n; ++i)
        if (y[i] != 6.f * float(i)) return 2;
    int count = 0;
    CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    if (count != n || managed != 6 || milliseconds < 0) return 3;

    int resident = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, whole_grid, 64, 0));
    if (resident < 1) return 4;
    int* out;
    CHECK(cudaMallocAsync(&out, 4096, stream));
    void* arguments[] = {&out};
    CHECK(cudaLaunchCooperativeKernel(whole_grid, 4, 64, arguments, 0, stream));
    int sum = 0;
    CHECK(cudaMemcpyAsync(&sum, out, sizeof sum, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    if (sum != 256) return 5;

#ifndef NO_CLUSTERS
    pairs<<<4, 1, 0, stream>>>(out);
    int swapped[4];
    CHECK(cudaMemcpyAsync(swapped, out, sizeof swapped, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    if (swapped[0] != 11 || swapped[1] != 10 || swapped[2] != 13 || swapped[3] != 12) return 6;
#endif

    const int bytes = 100 << 10;
    large<<<1, 32, bytes, stream>>>(out);
    if (cudaGetLastError() != cudaErrorInvalidValue) return 7;
    CHECK(cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, large, out));
    int last = -1;
    CHECK(cudaMemcpyAsync(&last, out, sizeof last, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaFreeAsync(out, stream));
    CHECK(cudaDeviceSynchronize());
    if (last != 31) return 8;
    CHECK(cudaFree(x));
    CHECK(cudaFree(y));
    std::puts("ok");
    return 0;
}
