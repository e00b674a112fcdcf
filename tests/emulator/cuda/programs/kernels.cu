extern "C" {
__device__ int counter = 40;

__global__ void add(int* a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += 1;
}

__global__ void twice(int* a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] *= 2;
}

__global__ void count() {
    if (threadIdx.x == 0) atomicAdd(&counter, 1);
}

__global__ void meet(int* mine, int* others) {
    asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(others) : "memory");
    int seen = 0;
    while (!seen)
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
}

__global__ void cluster_rank(int* out) {
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) out[blockIdx.x] = 10 * size + rank;
}

extern __shared__ int dynamic_words[];
__global__ void dynamic(int* out, unsigned bytes) {
    if (threadIdx.x) return;
    dynamic_words[bytes / 4 - 1] = 77;
    out[0] = dynamic_words[bytes / 4 - 1];
}

struct alignas(64) Map {
    unsigned long long words[16];
};
}

// copy(shared memory, mbarrier) by one thread: 128 bytes.
template <class Copy>
__device__ void load_words(int* out, Copy copy) {
    __shared__ alignas(128) int box[32];
    __shared__ unsigned long long barrier;
    const auto at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
    const auto to = static_cast<unsigned>(__cvta_generic_to_shared(box));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(at)
                     : "memory");
        copy(to, at);
    }
    __syncthreads();
    asm volatile(
        "{ .reg .pred done; again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;"
        " @!done bra again_%=; }" ::"r"(at)
        : "memory");
    out[threadIdx.x] = box[threadIdx.x];
}

extern "C" {
__global__ void load_box(const __grid_constant__ Map map, int* out) {
    load_words(out, [&](unsigned to, unsigned at) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(&map), "r"(16), "r"(2), "r"(at)
            : "memory");
    });
}

__global__ void load_pixels(const __grid_constant__ Map map, int* out) {
    load_words(out, [&](unsigned to, unsigned at) {
        const unsigned short offset = 1;
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4}], [%5], {%6};" ::"r"(to),
            "l"(&map), "r"(0), "r"(-1), "r"(1), "r"(at), "h"(offset)
            : "memory");
    });
}

__global__ void race(int* a) {
    a[0] = threadIdx.x / 32;
}
}
