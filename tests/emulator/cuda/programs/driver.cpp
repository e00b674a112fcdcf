// A program that finds CUDA's driver as programs do, and uses it: one scenario each, by name.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace {

void check(int result, const char* what) {
    if (!result) return;
    std::printf("%s: %d\n", what, result);
    std::exit(10);
}

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("wrong: %s\n", what);
    std::exit(11);
}

PFN_cuGetProcAddress_v12000 get;

template <class F>
F driver(const char* name) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status;
    constexpr int version = 12080;  // some calls take other arguments from 13.0 on
    check(get(name, &found, version, 0, &status), name);
    require(found != nullptr, name);
    return reinterpret_cast<F>(found);
}

#define CU(name, ...) check(driver<decltype(&::name)>(#name)(__VA_ARGS__), #name)
#define RESULT(name, ...) driver<decltype(&::name)>(#name)(__VA_ARGS__)

std::string image;
CUcontext contexts[2];

CUfunction kernel(const char* name) {
    CUmodule module;
    CUfunction function;
    CU(cuModuleLoadData, &module, image.c_str());
    CU(cuModuleGetFunction, &function, module, name);
    return function;
}

CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr pointer;
    CU(cuMemAlloc, &pointer, bytes);
    return pointer;
}

void launch(CUfunction f, unsigned grid, unsigned block, CUstream stream, std::vector<void*> args,
            unsigned shared = 0) {
    CU(cuLaunchKernel, f, grid, 1, 1, block, 1, 1, shared, stream, args.data(), nullptr);
}

std::vector<int> read(CUdeviceptr pointer, size_t count) {
    std::vector<int> values(count);
    CU(cuMemcpyDtoH, values.data(), pointer, 4 * count);
    return values;
}

// ---- scenarios

void adds() {
    int n = 1000;
    std::vector<int> values(n);
    for (int i = 0; i < n; ++i) values[i] = i;
    CUdeviceptr a = allocate(4 * n);
    CU(cuMemcpyHtoD, a, values.data(), 4 * n);
    launch(kernel("add"), 8, 128, nullptr, {&a, &n});
    std::vector<int> result = read(a, n);
    for (int i = 0; i < n; ++i) require(result[i] == i + 1, "an element");
    CU(cuMemFree, a);
}

// The block of arguments that frameworks of compilers pass.
void packed_arguments() {
    struct {
        CUdeviceptr pointer;
        int n;
    } block{allocate(400), 100};
    CU(cuMemsetD32, block.pointer, 7, 100);
    size_t bytes = sizeof block;
    void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                     CU_LAUNCH_PARAM_END};
    CU(cuLaunchKernel, kernel("add"), 1, 1, 1, 128, 1, 1, 0, nullptr, nullptr, extra);
    require(read(block.pointer, 100)[99] == 8, "an element");
}

void variables() {
    CUmodule module;
    CUfunction function;
    CUdeviceptr counter;
    size_t bytes;
    CU(cuModuleLoadData, &module, image.c_str());
    CU(cuModuleGetGlobal, &counter, &bytes, module, "counter");
    require(bytes == 4, "the size of a variable");
    require(read(counter, 1)[0] == 40, "the initial value of a variable");
    CU(cuModuleGetFunction, &function, module, "count");
    launch(function, 2, 1, nullptr, {});
    require(read(counter, 1)[0] == 42, "the value of a variable");
    require(RESULT(cuModuleGetGlobal, &counter, &bytes, module, "nothing") == CUDA_ERROR_NOT_FOUND,
            "a variable that is not there");
}

// Work of streams comes in their order, and events order streams; copies from plain memory keep
// what it held at the call.
void streams() {
    int n = 64;
    CUstream first, second;
    CUevent event;
    CU(cuStreamCreate, &first, CU_STREAM_NON_BLOCKING);
    CU(cuStreamCreate, &second, CU_STREAM_NON_BLOCKING);
    CU(cuEventCreate, &event, 0);
    CUdeviceptr a = allocate(4 * n), b = allocate(4 * n);
    std::vector<int> values(n, 5);
    CUfunction add = kernel("add");
    CU(cuMemcpyHtoDAsync, a, values.data(), 4 * n, first);
    values.assign(n, 1000);
    launch(add, 1, 64, first, {&a, &n});
    CU(cuEventRecord, event, first);
    require(RESULT(cuEventQuery, event) == CUDA_SUCCESS, "an event that has come");
    CU(cuEventRecord, event, first);
    CU(cuStreamWaitEvent, second, event, 0);
    CU(cuMemcpyDtoDAsync, b, a, 4 * n, second);
    launch(add, 1, 64, second, {&b, &n});
    int called = 0;
    CU(cuLaunchHostFunc, second, [](void* data) { ++*static_cast<int*>(data); }, &called);
    CU(cuStreamSynchronize, second);
    require(called == 1, "a function in a stream");
    require(read(b, n)[63] == 7, "an element");
    CU(cuStreamDestroy, first);
    CU(cuStreamDestroy, second);
    CU(cuEventDestroy, event);
}

// The legacy stream waits for blocking streams, and they for it.
void legacy_stream() {
    int n = 32;
    CUstream stream;
    CU(cuStreamCreate, &stream, CU_STREAM_DEFAULT);
    CUdeviceptr a = allocate(4 * n);
    CUfunction add = kernel("add"), twice = kernel("twice");
    CU(cuMemsetD32, a, 3, n);
    launch(add, 1, 32, stream, {&a, &n});     // 4
    launch(twice, 1, 32, nullptr, {&a, &n});  // 8
    launch(add, 1, 32, stream, {&a, &n});     // 9
    CU(cuCtxSynchronize);
    require(read(a, n)[31] == 9, "an element");
}

// Kernels of two GPUs that wait for each other.
void peers() {
    CUdeviceptr flags[2];
    CUfunction functions[2];
    for (int d = 0; d < 2; ++d) {
        CU(cuCtxSetCurrent, contexts[d]);
        flags[d] = allocate(4);
        CU(cuMemsetD32, flags[d], 0, 1);
        functions[d] = kernel("meet");
        CU(cuCtxEnablePeerAccess, contexts[1 - d], 0);
    }
    require(RESULT(cuCtxEnablePeerAccess, contexts[0], 0) == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
            "access that is there already");
    for (int d = 0; d < 2; ++d) {
        CU(cuCtxSetCurrent, contexts[d]);
        launch(functions[d], 1, 1, nullptr, {&flags[d], &flags[1 - d]});
    }
    for (int d = 0; d < 2; ++d) {
        CU(cuCtxSetCurrent, contexts[d]);
        CU(cuCtxSynchronize);
    }
    require(read(flags[0], 1)[0] == 1, "a flag");
}

void clusters() {
    CUdeviceptr a = allocate(16);
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {2, 1, 1};
    CUlaunchConfig config = {4, 1, 1, 32, 1, 1, 0, nullptr, &attribute, 1};
    CUfunction function = kernel("cluster_rank");
    void* args[] = {&a};
    CU(cuLaunchKernelEx, &config, function, args, nullptr);
    require(read(a, 4) == std::vector<int>{20, 21, 20, 21}, "ranks in clusters");
    int count = 0;
    CU(cuOccupancyMaxActiveClusters, &count, function, &config);
    require(count > 0, "clusters that fit");
}

void cooperative() {
    CUdeviceptr a = allocate(4);
    CUfunction function = kernel("count");
    require(RESULT(cuLaunchCooperativeKernel, function, 1u << 20, 1u, 1u, 32u, 1u, 1u, 0u, nullptr,
                   nullptr) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
            "a cooperative launch that does not fit");
    CU(cuLaunchCooperativeKernel, function, 4, 1, 1, 32, 1, 1, 0, nullptr, nullptr);
    CU(cuCtxSynchronize);
    CU(cuMemFree, a);
}

void shared_memory() {
    CUfunction function = kernel("dynamic");
    CUdeviceptr a = allocate(4);
    unsigned bytes = 100 << 10;
    void* args[] = {&a, &bytes};
    require(RESULT(cuLaunchKernel, function, 1u, 1u, 1u, 32u, 1u, 1u, bytes, nullptr, args,
                   nullptr) == CUDA_ERROR_INVALID_VALUE,
            "more shared memory than allowed");
    CU(cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int(bytes));
    launch(function, 1, 32, nullptr, {&a, &bytes}, bytes);
    require(read(a, 1)[0] == 77, "a word of shared memory");
    int resident = 0;
    CU(cuOccupancyMaxActiveBlocksPerMultiprocessor, &resident, function, 32, bytes);
    require(resident == 2, "blocks that fit a multiprocessor");
}

void tensor_map() {
    CUdeviceptr a = allocate(64 * 64 * 4), out = allocate(32 * 4);
    std::vector<int> values(64 * 64);
    for (size_t i = 0; i < values.size(); ++i) values[i] = int(i);
    CU(cuMemcpyHtoD, a, values.data(), values.size() * 4);
    CUtensorMap map;
    cuuint64_t dims[] = {64, 64}, strides[] = {256};
    cuuint32_t box[] = {8, 4}, steps[] = {1, 1};
    auto encode = [&] {
        return RESULT(cuTensorMapEncodeTiled, &map, CU_TENSOR_MAP_DATA_TYPE_INT32, 2u,
                      reinterpret_cast<void*>(a), dims, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    strides[0] = 250;
    require(encode() == CUDA_ERROR_INVALID_VALUE, "a stride that is not allowed");
    strides[0] = 256;
    check(encode(), "cuTensorMapEncodeTiled");
    CUfunction function = kernel("load_box");
    void* args[] = {&map, &out};
    CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, nullptr, args, nullptr);
    std::vector<int> result = read(out, 32);
    for (int i = 0; i < 32; ++i)
        require(result[i] == (2 + i / 8) * 64 + 16 + i % 8, "an element of a box");
}

void im2col_map() {
    CUdeviceptr a = allocate(3 * 6 * 4 * 4), out = allocate(32 * 4);  // images of 6 x 4 channels
    std::vector<int> values(3 * 6 * 4);
    for (size_t i = 0; i < values.size(); ++i) values[i] = int(i) + 1;
    CU(cuMemcpyHtoD, a, values.data(), values.size() * 4);
    CUtensorMap map;
    cuuint64_t dims[] = {4, 6, 3}, strides[] = {16, 96};
    cuuint32_t steps[] = {1, 1, 1};
    int lower = -70000, upper = -1;
    auto encode = [&] {
        return RESULT(cuTensorMapEncodeIm2col, &map, CU_TENSOR_MAP_DATA_TYPE_INT32, 3u,
                      reinterpret_cast<void*>(a), dims, strides, &lower, &upper, 4u, 8u, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    require(encode() == CUDA_ERROR_INVALID_VALUE, "a corner that is not allowed");
    lower = -1;
    check(encode(), "cuTensorMapEncodeIm2col");
    CUfunction function = kernel("load_pixels");
    void* args[] = {&map, &out};
    CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, nullptr, args, nullptr);
    std::vector<int> result = read(out, 32);
    // Bases -1 to 4 of image 1, then those of image 2; the offset is 1.
    for (int i = 0; i < 32; ++i)
        require(result[i] == (1 + i / 24) * 24 + i % 24 + 1, "an element of a pixel");
}

void memory() {
    CUdeviceptr a = allocate(256);
    size_t size = 0;
    CUdeviceptr base = 0;
    CU(cuMemGetAddressRange, &base, &size, a + 100);
    require(base == a && size == 256, "the range of an address");
    std::vector<char> host(300);
    require(RESULT(cuMemcpyHtoD, a, host.data(), size_t(300)) == CUDA_ERROR_INVALID_VALUE,
            "a copy beyond the end");
    int device = -1;
    CU(cuPointerGetAttribute, &device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, a);
    require(device == 0, "the device of a pointer");
    require(RESULT(cuPointerGetAttribute, &device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                   CUdeviceptr(host.data())) == CUDA_ERROR_INVALID_VALUE,
            "a pointer of the host");
    CU(cuMemHostRegister, host.data(), host.size(), 0);
    unsigned type = 0;
    CU(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUdeviceptr(host.data()));
    require(type == CU_MEMORYTYPE_HOST, "the type of registered memory");
    CU(cuMemHostUnregister, host.data());
    // What a stream frees serves until then.
    CUstream stream;
    CU(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CUdeviceptr b;
    int n = 16;
    CU(cuMemAllocAsync, &b, 64, stream);
    CU(cuMemsetD32Async, b, 1, 16, stream);
    launch(kernel("add"), 1, 32, stream, {&b, &n});
    CU(cuMemFreeAsync, b, stream);
    CU(cuStreamSynchronize, stream);
    CU(cuMemFree, a);
    require(RESULT(cuMemFree, a) == CUDA_ERROR_INVALID_VALUE, "to free twice");
    // Rows with a pitch.
    size_t pitch;
    CU(cuMemAllocPitch, &a, &pitch, 40, 3, 4);
    std::vector<int> rows(30), back(30);
    for (int i = 0; i < 30; ++i) rows[i] = i;
    CUDA_MEMCPY2D c = {};
    c.srcMemoryType = CU_MEMORYTYPE_HOST;
    c.srcHost = rows.data();
    c.srcPitch = 40;
    c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    c.dstDevice = a;
    c.dstPitch = pitch;
    c.WidthInBytes = 40;
    c.Height = 3;
    CU(cuMemcpy2D, &c);
    CU(cuMemcpyDtoH, back.data(), a + pitch, 40);
    require(back[0] == 10 && back[9] == 19, "a row");
}

// A stream that waits for a word that another one writes.
void words_in_memory() {
    CUstream first, second;
    CU(cuStreamCreate, &first, CU_STREAM_NON_BLOCKING);
    CU(cuStreamCreate, &second, CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = allocate(8);
    int n = 1;
    CU(cuMemsetD32, a, 0, 2);
    CU(cuStreamWaitValue32, first, a + 4, 1, CU_STREAM_WAIT_VALUE_EQ);
    launch(kernel("add"), 1, 32, first, {&a, &n});
    require(RESULT(cuStreamQuery, first) == CUDA_ERROR_NOT_READY, "a stream that waits");
    CU(cuStreamWriteValue32, second, a + 4, 1, 0);
    CU(cuStreamSynchronize, first);
    require(read(a, 1)[0] == 1, "an element");
    CU(cuStreamWaitValue32, first, a + 4, 9, CU_STREAM_WAIT_VALUE_EQ);
    require(RESULT(cuStreamSynchronize, first) == CUDA_ERROR_LAUNCH_TIMEOUT,
            "a stream that waits for ever");
}

// A graph of two streams that is captured once and launched twice.
void graphs() {
    int n = 32;
    CUstream first, second;
    CUevent fork, join;
    CU(cuStreamCreate, &first, CU_STREAM_NON_BLOCKING);
    CU(cuStreamCreate, &second, CU_STREAM_NON_BLOCKING);
    CU(cuEventCreate, &fork, 0);
    CU(cuEventCreate, &join, 0);
    CUdeviceptr a = allocate(4 * n), b = allocate(4 * n);
    CUfunction add = kernel("add"), twice = kernel("twice");
    CU(cuMemsetD32, a, 1, n);
    CU(cuStreamBeginCapture, first, CU_STREAM_CAPTURE_MODE_GLOBAL);
    launch(add, 1, 32, first, {&a, &n});
    CU(cuEventRecord, fork, first);
    CU(cuStreamWaitEvent, second, fork, 0);
    launch(twice, 1, 32, second, {&a, &n});
    CU(cuEventRecord, join, second);
    CU(cuStreamWaitEvent, first, join, 0);
    CU(cuMemcpyDtoDAsync, b, a, 4 * n, first);
    CUstreamCaptureStatus status;
    CU(cuStreamIsCapturing, second, &status);
    require(status == CU_STREAM_CAPTURE_STATUS_ACTIVE, "a stream that joined a capture");
    require(RESULT(cuStreamSynchronize, first) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            "a wait for a captured stream");
    CUgraph graph;
    CUgraphExec executable;
    CU(cuStreamEndCapture, first, &graph);
    CU(cuGraphInstantiateWithFlags, &executable, graph, 0);
    CU(cuGraphDestroy, graph);
    require(read(a, n)[0] == 1, "what was captured has not run");
    CU(cuGraphLaunch, executable, first);
    CU(cuGraphLaunch, executable, first);
    CU(cuStreamSynchronize, first);
    require(read(b, n)[31] == 10, "an element");  // ((1 + 1) * 2 + 1) * 2
    CU(cuGraphExecDestroy, executable);
}

void out_of_bounds() {
    int n = 1000;
    CUdeviceptr a = allocate(40);
    launch(kernel("add"), 8, 128, nullptr, {&a, &n});
    int result = RESULT(cuCtxSynchronize);
    require(result == CUDA_ERROR_ILLEGAL_ADDRESS, "the result of a bad access");
    require(RESULT(cuMemcpyDtoH, &n, a, size_t(4)) == CUDA_ERROR_ILLEGAL_ADDRESS,
            "what comes after it");
}

void use_after_free() {
    int n = 10;
    CUdeviceptr a = allocate(40);
    CU(cuMemFree, a);
    launch(kernel("add"), 1, 32, nullptr, {&a, &n});
    require(RESULT(cuCtxSynchronize) == CUDA_ERROR_ILLEGAL_ADDRESS, "an access to freed memory");
}

void race() {
    CUdeviceptr a = allocate(4);
    CUfunction function = kernel("race");
    for (int i = 0; i < 3; ++i) launch(function, 1, 64, nullptr, {&a});
    CU(cuCtxSynchronize);
}

void exits_with_3() {
    std::exit(3);
}

void waits_for_ever() {
    for (volatile bool waits = true; waits;) {
    }
}

}  // namespace

int main(int, char** argv) {
    std::ifstream file(argv[2], std::ios::binary);
    image.assign(std::istreambuf_iterator<char>(file), {});
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    require(library != nullptr, "there is a driver");
    get = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
    int count = 0;
    require(RESULT(cuDeviceGetCount, &count) == CUDA_ERROR_NOT_INITIALIZED, "cuInit comes first");
    CU(cuInit, 0);
    CU(cuDeviceGetCount, &count);
    for (int d = count - 1; d >= 0; --d) {
        CU(cuDevicePrimaryCtxRetain, &contexts[d], d);
        CU(cuCtxSetCurrent, contexts[d]);
    }
    const std::map<std::string, void (*)()> scenarios = {
        {"adds", adds},
        {"packed_arguments", packed_arguments},
        {"variables", variables},
        {"streams", streams},
        {"legacy_stream", legacy_stream},
        {"peers", peers},
        {"clusters", clusters},
        {"cooperative", cooperative},
        {"shared_memory", shared_memory},
        {"tensor_map", tensor_map},
        {"im2col_map", im2col_map},
        {"memory", memory},
        {"words_in_memory", words_in_memory},
        {"graphs", graphs},
        {"out_of_bounds", out_of_bounds},
        {"use_after_free", use_after_free},
        {"race", race},
        {"exits_with_3", exits_with_3},
        {"waits_for_ever", waits_for_ever},
    };
    scenarios.at(argv[1])();
    std::puts("ok");
    return 0;
}
