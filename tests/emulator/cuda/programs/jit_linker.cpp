// Links PTX by a library of nvJitLink's functions, loads what that makes, and runs a kernel.
// Arguments: the library, the PTX, and how: "data", "file", "twice".
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("not so: %s\n", what);
    std::exit(10);
}

template <class Function>
Function* function(void* library, const char* name) {
    void* found = dlsym(library, name);
    require(found, name);
    return reinterpret_cast<Function*>(found);
}

}  // namespace

int main(int, char** arguments) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    require(driver, "the driver");
    require(!function<decltype(cuInit)>(driver, "cuInit")(0), "a driver");
    void* library = dlopen(arguments[1], RTLD_NOW);
    require(library, "the linker's library");
    std::ifstream file(arguments[2], std::ios::binary);
    const std::string ptx(std::istreambuf_iterator<char>(file), {}), how = arguments[3];
    void* handle = nullptr;
    const char* options[] = {"-arch=sm_90a"};
    auto* create = function<int(void**, unsigned, const char**)>(library, "__nvJitLinkCreate_13_0");
    auto* add_data =
        function<int(void*, int, const void*, size_t, const char*)>(library, "nvJitLinkAddData");
    auto* add_file = function<int(void*, int, const char*)>(library, "nvJitLinkAddFile");
    auto* complete = function<int(void*)>(library, "nvJitLinkComplete");
    auto* size_of = function<int(void*, size_t*)>(library, "nvJitLinkGetLinkedCubinSize");
    auto* get = function<int(void*, char*)>(library, "nvJitLinkGetLinkedCubin");
    auto* error_size = function<int(void*, size_t*)>(library, "nvJitLinkGetErrorLogSize");
    auto* error = function<int(void*, char*)>(library, "nvJitLinkGetErrorLog");
    auto* destroy = function<int(void**)>(library, "nvJitLinkDestroy");
    require(create(&handle, 1, options) == 0, "a linker");
    const int added = how == "file" ? add_file(handle, 2, arguments[2])
                                    : add_data(handle, 2, ptx.data(), ptx.size(), "kernels");
    require(added == 0, "PTX is added");
    if (how == "twice") {
        require(add_data(handle, 2, ptx.data(), ptx.size(), "again") != 0, "only one PTX");
        size_t size = 0;
        require(error_size(handle, &size) == 0 && size > 1, "the length of the log");
        std::string log(size, '\0');
        require(error(handle, log.data()) == 0, "the log");
        std::printf("%s\n", log.c_str());
        return 0;
    }
    size_t size = 0;
    require(complete(handle) == 0 && size_of(handle, &size) == 0, "it is linked");
    std::string image(size, '\0');
    require(get(handle, image.data()) == 0 && destroy(&handle) == 0 && !handle, "the image");
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    CUdeviceptr out;
    int value = -1;
    void* args[] = {&out};
    require(!function<decltype(cuDeviceGet)>(driver, "cuDeviceGet")(&device, 0), "a device");
    require(!function<decltype(cuDevicePrimaryCtxRetain)>(driver, "cuDevicePrimaryCtxRetain")(
                &context, device),
            "a context");
    require(!function<decltype(cuCtxSetCurrent)>(driver, "cuCtxSetCurrent")(context), "it is set");
    require(
        !function<decltype(cuModuleLoadData)>(driver, "cuModuleLoadData")(&module, image.data()),
        "the image is loaded");
    require(!function<decltype(cuModuleGetFunction)>(driver, "cuModuleGetFunction")(&kernel, module,
                                                                                    "race"),
            "its kernel");
    require(!function<decltype(cuMemAlloc)>(driver, "cuMemAlloc_v2")(&out, 4), "memory");
    require(!function<decltype(cuLaunchKernel)>(driver, "cuLaunchKernel")(
                kernel, 1, 1, 1, 32, 1, 1, 0, nullptr, args, nullptr),
            "a launch");
    require(!function<decltype(cuMemcpyDtoH)>(driver, "cuMemcpyDtoH_v2")(&value, out, 4), "a copy");
    require(value == 0, "its result");
    std::printf("ok\n");
}
