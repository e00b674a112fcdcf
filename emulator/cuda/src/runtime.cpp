// CUDA's runtime over the stand-in's driver: devices, kernels and launches.
//
// Programs find it where they link the runtime dynamically. Where they hold NVIDIA's own, static
// runtime, interpose.cpp leads the calls here.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "driver_calls.h"
#include "runtime_state.h"

namespace deep_moe::cuda::runtime {

namespace {

struct FatBinary {
    const void* image;
    Library* library = nullptr;
    int failure = success;
};

struct Registered {
    FatBinary* binary;
    std::string name;
    size_t bytes = 0;
};

// Constructors of programs register before any of ours may have run.
struct Registry {
    std::map<const void*, Registered> functions, variables;
    struct Managed {
        void** pointer;
        Registered variable;
    };
    std::vector<Managed> managed;
    std::vector<FatBinary*> binaries;
};

Registry& registry() {
    static auto* r = new Registry;
    return *r;
}

thread_local int last_result = success;
thread_local Device device = 0;

struct Configuration {
    Dim3 grid, block;
    size_t shared_bytes;
    Stream* stream;
};
thread_local std::vector<Configuration> configurations;

// Makes a device's primary context the thread's.
void use_device(StandIn& s, Device chosen) {
    Context* c = s.primaries[size_t(chosen)].get();
    c->uses = std::max(c->uses, 1);
    if (current_contexts.empty())
        current_contexts.push_back(c);
    else
        current_contexts.back() = c;
}

Library& loaded(StandIn& s, FatBinary& binary) {
    if (binary.failure) throw Failure{Result(binary.failure), ""};
    if (!binary.library) {
        try {
            binary.library = s.load(binary.image, 0);
        } catch (const Failure& failure) {
            binary.failure = failure.result;
            throw;
        }
    }
    return *binary.library;
}

}  // namespace

void enter() {
    start();
    std::lock_guard lock(the_lock);
    StandIn& s = stand_in();
    // The context that is current decides, if there is one.
    if (!current_contexts.empty() && s.contexts.count(current_contexts.back())) return;
    use_device(s, device);
    for (const auto& each : std::exchange(registry().managed, {})) {
        try {
            uint64_t address, bytes;
            if (s.find_variable(loaded(s, *each.variable.binary), 0, each.variable.name.c_str(),
                                address, bytes))
                *each.pointer = reinterpret_cast<void*>(address);
        } catch (const Failure& failure) {
            s.report_call("a managed variable", failure);
        }
    }
}

int finish(int result) {
    if (result && result != not_ready) last_result = result;
    return result;
}

void require(int result) {
    if (result) throw Failure{Result(result), ""};
}

int last_error(bool forgets) {
    return forgets ? std::exchange(last_result, success) : last_result;
}

Device current_device() {
    std::lock_guard lock(the_lock);
    if (has_started() && !current_contexts.empty() &&
        stand_in().contexts.count(current_contexts.back()))
        return current_contexts.back()->device;
    return device;
}

Function& kernel_of(StandIn& s, const void* host) {
    // A kernel that could not be loaded; the reason was told then.
    if (!host && last_result) throw Failure{Result(last_result), ""};
    auto found = registry().functions.find(host);
    if (found != registry().functions.end()) {
        Function* f = s.find_function(loaded(s, *found->second.binary), found->second.name.c_str());
        if (!f)
            throw Failure{invalid_device_function, "the PTX has no kernel " + found->second.name};
        return *f;
    }
    for (Library* library : s.libraries)
        for (const auto& [name, function] : library->image->functions)
            if (function.get() == host) return *function;
    throw Failure{invalid_device_function, "it is no kernel of this program"};
}

uint64_t variable_of(StandIn& s, const void* host, size_t* bytes) {
    auto found = registry().variables.find(host);
    if (found == registry().variables.end())
        throw Failure{invalid_symbol, "it is no device variable of this program"};
    uint64_t address, size;
    if (!s.find_variable(loaded(s, *found->second.binary), s.current_context().device,
                         found->second.name.c_str(), address, size))
        throw Failure{invalid_symbol, "the PTX has no variable " + found->second.name};
    if (bytes) *bytes = size;
    return address;
}

}  // namespace deep_moe::cuda::runtime

using namespace deep_moe::cuda;
using namespace deep_moe::cuda::runtime;

// ---- what nvcc puts into programs

CALL_OF(void**, __cudaRegisterFatBinary, (void* image)) {
    auto* binary = new FatBinary{image};
    registry().binaries.push_back(binary);
    return reinterpret_cast<void**>(binary);
}

CALL_OF(void, __cudaRegisterFatBinaryEnd, (void**)) {}

CALL_OF(void, __cudaUnregisterFatBinary, (void**)) {}

CALL_OF(char, __cudaInitModule, (void**)) {
    enter();
    return 1;
}

CALL_OF(void, __cudaRegisterFunction,
        (void** handle, const char* host, char*, const char* name, int, void*, void*, void*, void*,
         int*)) {
    registry().functions[host] = {reinterpret_cast<FatBinary*>(handle), name};
}

CALL_OF(void, __cudaRegisterVar,
        (void** handle, char* host, char*, const char* name, int, size_t bytes, int, int)) {
    registry().variables[host] = {reinterpret_cast<FatBinary*>(handle), name, bytes};
}

CALL_OF(void, __cudaRegisterManagedVar,
        (void** handle, void** pointer, char*, const char* name, int, size_t bytes, int, int)) {
    const Registered variable{reinterpret_cast<FatBinary*>(handle), name, bytes};
    registry().variables[pointer] = variable;
    registry().managed.push_back({pointer, variable});
}

CALL_OF(void, __cudaRegisterHostVar, (void**, const char*, char*, size_t)) {}

CALL_OF(unsigned, __cudaPushCallConfiguration,
        (Dim3 grid, Dim3 block, size_t shared_bytes, Stream* stream)) {
    configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}

RUNTIME_CALL(__cudaPopCallConfiguration,
             (Dim3 * grid, Dim3* block, size_t* shared_bytes, void* stream)) {
    if (configurations.empty()) return finish(invalid_configuration);
    const Configuration c = configurations.back();
    configurations.pop_back();
    *grid = c.grid;
    *block = c.block;
    *shared_bytes = c.shared_bytes;
    *static_cast<Stream**>(stream) = c.stream;
    return success;
}

RUNTIME_CALL(__cudaGetKernel, (Function * *kernel, const void* host)) {
    return call("__cudaGetKernel", [&](StandIn& s) { *kernel = &kernel_of(s, host); });
}

// ---- devices

RUNTIME_CALL(cudaGetDeviceCount, (int* count)) {
    start();
    return finish(guarded("cudaGetDeviceCount", [&](StandIn& s) {
        if (!count) throw Failure{invalid_value, ""};
        *count = s.options.num_devices;
    }));
}

RUNTIME_CALL(cudaSetDevice, (Device chosen)) {
    start();
    return finish(guarded("cudaSetDevice", [&](StandIn& s) {
        s.check_device(chosen);
        device = chosen;
        use_device(s, chosen);
    }));
}

RUNTIME_CALL(cudaInitDevice, (Device chosen, unsigned, unsigned)) {
    start();
    return finish(guarded("cudaInitDevice", [&](StandIn& s) { s.check_device(chosen); }));
}

RUNTIME_CALL(cudaGetDevice, (Device * chosen)) {
    start();
    if (!chosen) return finish(invalid_value);
    *chosen = current_device();
    return success;
}

RUNTIME_CALL(cudaDeviceSynchronize, ()) {
    return call("cudaDeviceSynchronize", [](StandIn& s) { s.synchronize(s.current_context()); });
}

namespace {

// What all versions of the structure have.
template <class Properties>
void describe(const StandIn& s, Device device, Properties& p) {
    auto of = [&](int attribute) {
        return device_attribute(s.chip(), s.num_sms(), device, attribute);
    };
    p = {};
    std::strncpy(p.name, s.chip().title, sizeof p.name - 1);
    std::memcpy(p.uuid.bytes, "warpcheck\0\0\0\0\0\0", 16);
    p.uuid.bytes[15] = static_cast<unsigned char>(device);
    p.global_bytes = s.memory_bytes;
    p.shared_per_block = size_t(of(8));
    p.registers_per_block = of(12);
    p.warp_size = of(10);
    p.pitch = size_t(of(11));
    p.threads_per_block = of(1);
    for (int i = 0; i < 3; ++i) {
        p.block[i] = of(2 + i);
        p.grid[i] = of(5 + i);
    }
    p.constant_bytes = size_t(of(9));
    p.major = of(75);
    p.minor = of(76);
    p.texture_alignment = size_t(of(14));
    p.texture_pitch_alignment = size_t(of(51));
    p.num_sms = of(16);
    p.maps_host = of(19);
    p.concurrent_kernels = of(31);
    p.ecc = of(32);
    p.pci_bus = of(33);
    p.copy_engines = of(40);
    p.unified = of(41);
    p.bus_bits = of(37);
    p.l2_bytes = of(38);
    p.threads_per_sm = of(39);
    p.priorities = of(78);
    p.global_l1 = of(79);
    p.local_l1 = of(80);
    p.shared_per_sm = size_t(of(81));
    p.registers_per_sm = of(82);
    p.managed = of(83);
    p.concurrent_managed = of(89);
    p.preemption = of(90);
    p.host_pointer_of_registered = of(91);
    p.cooperative = of(95);
    p.shared_per_block_optin = size_t(of(97));
    p.ctas_per_sm = of(106);
    p.reserved_shared = size_t(of(111));
    p.host_register = of(99);
    p.pools = of(115);
    p.clusters = of(120);
    p.function_pointers = of(129);
}

}  // namespace

RUNTIME_CALL(cudaGetDeviceProperties, (DeviceProperties * p, Device asked)) {
    start();
    return finish(guarded("cudaGetDeviceProperties", [&](StandIn& s) {
        s.check_device(asked);
        if (!p) throw Failure{invalid_value, ""};
        describe(s, asked, *p);
        p->numa_id = p->host_numa = -1;
    }));
}

// As programs of CUDA 12 call it.
RUNTIME_CALL(cudaGetDeviceProperties_v2, (DeviceProperties12 * p, Device asked)) {
    start();
    return finish(guarded("cudaGetDeviceProperties", [&](StandIn& s) {
        s.check_device(asked);
        if (!p) throw Failure{invalid_value, ""};
        describe(s, asked, *p);
        p->clock_khz = s.chip().clock_khz;
        p->memory_khz = s.chip().memory_clock_khz;
        p->overlaps_copies = 1;
        p->double_ratio = 2;
    }));
}

RUNTIME_CALL(cudaDeviceReset, ()) {
    start();
    return finish(cuDevicePrimaryCtxReset_v2(current_device()));
}

RUNTIME_CALL(cudaGetLastError, ()) {
    return last_error(true);
}

RUNTIME_CALL(cudaPeekAtLastError, ()) {
    return last_error(false);
}

CALL_OF(const char*, cudaGetErrorString, (int result)) {
    const char* text = nullptr;
    if (result == invalid_configuration) return "invalid configuration argument";
    if (result == invalid_symbol) return "invalid device symbol";
    cuGetErrorString(result, &text);
    return text ? text : "unrecognized error code";
}

CALL_OF(const char*, cudaGetErrorName, (int result)) {
    // The runtime has names of its own for the driver's numbers.
    switch (result) {
        case success:
            return "cudaSuccess";
        case invalid_value:
            return "cudaErrorInvalidValue";
        case out_of_memory:
            return "cudaErrorMemoryAllocation";
        case not_initialized:
            return "cudaErrorInitializationError";
        case invalid_configuration:
            return "cudaErrorInvalidConfiguration";
        case invalid_symbol:
            return "cudaErrorInvalidSymbol";
        case invalid_device_function:
            return "cudaErrorInvalidDeviceFunction";
        case no_device:
            return "cudaErrorNoDevice";
        case invalid_device:
            return "cudaErrorInvalidDevice";
        case invalid_image:
            return "cudaErrorInvalidKernelImage";
        case invalid_context:
            return "cudaErrorDeviceUninitialized";
        case no_binary_for_gpu:
            return "cudaErrorNoKernelImageForDevice";
        case invalid_ptx:
            return "cudaErrorInvalidPtx";
        case file_not_found:
            return "cudaErrorFileNotFound";
        case invalid_handle:
            return "cudaErrorInvalidResourceHandle";
        case illegal_state:
            return "cudaErrorIllegalState";
        case capture_unsupported:
            return "cudaErrorStreamCaptureUnsupported";
        case not_found:
            return "cudaErrorSymbolNotFound";
        case not_ready:
            return "cudaErrorNotReady";
        case illegal_address:
            return "cudaErrorIllegalAddress";
        case launch_out_of_resources:
            return "cudaErrorLaunchOutOfResources";
        case launch_timeout:
            return "cudaErrorLaunchTimeout";
        case peer_access_already_enabled:
            return "cudaErrorPeerAccessAlreadyEnabled";
        case peer_access_not_enabled:
            return "cudaErrorPeerAccessNotEnabled";
        case assertion:
            return "cudaErrorAssert";
        case host_memory_already_registered:
            return "cudaErrorHostMemoryAlreadyRegistered";
        case host_memory_not_registered:
            return "cudaErrorHostMemoryNotRegistered";
        case illegal_instruction:
            return "cudaErrorIllegalInstruction";
        case misaligned_address:
            return "cudaErrorMisalignedAddress";
        case launch_failed:
            return "cudaErrorLaunchFailure";
        case cooperative_launch_too_large:
            return "cudaErrorCooperativeLaunchTooLarge";
        case not_supported:
            return "cudaErrorNotSupported";
        case unknown_error:
            return "cudaErrorUnknown";
        default:
            return "unrecognized error code";
    }
}

RUNTIME_CALL(cudaGetDriverEntryPointByVersion, (const char* name, void** function, unsigned version,
                                                unsigned long long, int* status)) {
    if (!name || !function) return finish(invalid_value);
    start();
    *function = driver_function(name, int(version));
    if (status) *status = *function ? 0 : 1;
    return finish(*function || status ? success : not_found);
}

RUNTIME_CALL(cudaGetDriverEntryPoint,
             (const char* name, void** function, unsigned long long flags, int* status)) {
    constexpr unsigned version = 13000;
    return cudaGetDriverEntryPointByVersion(name, function, version, flags, status);
}

// ---- kernels

RUNTIME_CALL(cudaFuncGetAttributes, (FunctionAttributes * a, const void* host)) {
    return call("cudaFuncGetAttributes", [&](StandIn& s) {
        Function& f = kernel_of(s, host);
        auto of = [&](int attribute) {
            int value = 0;
            cuFuncGetAttribute(&value, attribute, &f);
            return value;
        };
        std::memset(a, 0, offsetof(FunctionAttributes, reserved));
        a->shared_bytes = size_t(of(1));
        a->constant_bytes = size_t(of(2));
        a->local_bytes = size_t(of(3));
        a->max_threads = of(0);
        a->num_registers = of(4);
        a->ptx_version = of(5);
        a->binary_version = of(6);
        a->dynamic_shared_bytes = of(8);
        a->carveout = of(9);
        for (int i = 0; i < 3; ++i) a->cluster[i] = of(11 + i);
    });
}

RUNTIME_CALL(cudaFuncSetAttribute, (const void* host, int attribute, int value)) {
    return call("cudaFuncSetAttribute", [&](StandIn& s) {
        require(cuFuncSetAttribute(&kernel_of(s, host), attribute, value));
    });
}

RUNTIME_CALL(cudaFuncSetCacheConfig, (const void*, int)) {
    return success;
}

RUNTIME_CALL(cudaFuncSetSharedMemConfig, (const void*, int)) {
    return success;
}

RUNTIME_CALL(cudaFuncGetName, (const char** name, const void* host)) {
    return call("cudaFuncGetName", [&](StandIn& s) { *name = kernel_of(s, host).name.c_str(); });
}

RUNTIME_CALL(cudaFuncGetParamInfo, (const void* host, size_t index, size_t* offset, size_t* size)) {
    return call("cudaFuncGetParamInfo", [&](StandIn& s) {
        require(cuFuncGetParamInfo(&kernel_of(s, host), index, offset, size));
    });
}

RUNTIME_CALL(cudaGetFuncBySymbol, (Function * *function, const void* host)) {
    return call("cudaGetFuncBySymbol", [&](StandIn& s) { *function = &kernel_of(s, host); });
}

RUNTIME_CALL(cudaGetKernel, (Function * *kernel, const void* host)) {
    return call("cudaGetKernel", [&](StandIn& s) { *kernel = &kernel_of(s, host); });
}

RUNTIME_CALL(cudaLaunchKernel, (const void* host, Dim3 grid, Dim3 block, void** arguments,
                                size_t shared_bytes, Stream* stream)) {
    return call("cudaLaunchKernel", [&](StandIn& s) {
        enqueue_launch(s, kernel_of(s, host), s.stream(stream), grid, block, {0, 0, 0}, false,
                       shared_bytes, arguments, nullptr);
    });
}

RUNTIME_CALL(__cudaLaunchKernel, (Function * kernel, Dim3 grid, Dim3 block, void** arguments,
                                  size_t shared_bytes, Stream* stream)) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

RUNTIME_CALL(cudaLaunchCooperativeKernel, (const void* host, Dim3 grid, Dim3 block,
                                           void** arguments, size_t shared_bytes, Stream* stream)) {
    return call("cudaLaunchCooperativeKernel", [&](StandIn& s) {
        enqueue_launch(s, kernel_of(s, host), s.stream(stream), grid, block, {0, 0, 0}, true,
                       shared_bytes, arguments, nullptr);
    });
}

namespace {

LaunchConfig config_of(const RuntimeLaunchConfig& c) {
    return {{c.grid.x, c.grid.y, c.grid.z},
            {c.block.x, c.block.y, c.block.z},
            uint32_t(c.shared_bytes),
            c.stream,
            c.attributes,
            c.num_attributes};
}

}  // namespace

RUNTIME_CALL(cudaLaunchKernelExC,
             (const RuntimeLaunchConfig* config, const void* host, void** arguments)) {
    return call("cudaLaunchKernelExC", [&](StandIn& s) {
        if (!config) throw Failure{invalid_value, ""};
        enqueue_launch_with(s, kernel_of(s, host), config_of(*config), arguments, nullptr);
    });
}

RUNTIME_CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
             (int* count, const void* host, int threads, size_t shared_bytes, unsigned)) {
    return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&](StandIn& s) {
        if (!count) throw Failure{invalid_value, ""};
        *count = resident_ctas(s, kernel_of(s, host), threads, shared_bytes);
    });
}

RUNTIME_CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessor,
             (int* count, const void* host, int threads, size_t shared_bytes)) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, host, threads,
                                                                  shared_bytes, 0);
}

RUNTIME_CALL(cudaOccupancyAvailableDynamicSMemPerBlock,
             (size_t* bytes, const void* host, int num_blocks, int threads)) {
    return call("cudaOccupancyAvailableDynamicSMemPerBlock", [&](StandIn& s) {
        require(cuOccupancyAvailableDynamicSMemPerBlock(bytes, &kernel_of(s, host), num_blocks,
                                                        threads));
    });
}

RUNTIME_CALL(cudaOccupancyMaxPotentialClusterSize,
             (int* size, const void* host, const RuntimeLaunchConfig* config)) {
    return call("cudaOccupancyMaxPotentialClusterSize", [&](StandIn& s) {
        const LaunchConfig c = config_of(*config);
        require(cuOccupancyMaxPotentialClusterSize(size, &kernel_of(s, host), &c));
    });
}

RUNTIME_CALL(cudaOccupancyMaxActiveClusters,
             (int* count, const void* host, const RuntimeLaunchConfig* config)) {
    return call("cudaOccupancyMaxActiveClusters", [&](StandIn& s) {
        const LaunchConfig c = config_of(*config);
        require(cuOccupancyMaxActiveClusters(count, &kernel_of(s, host), &c));
    });
}

// ---- libraries

RUNTIME_CALL(cudaLibraryLoadData, (Library * *library, const void* image, int*, void**, unsigned,
                                   int*, void**, unsigned)) {
    return call("cudaLibraryLoadData", [&](StandIn& s) { *library = s.load(image, 0); });
}

RUNTIME_CALL(cudaLibraryLoadFromFile, (Library * *library, const char* path, int*, void**, unsigned,
                                       int*, void**, unsigned)) {
    return call("cudaLibraryLoadFromFile", [&](StandIn&) { require(cuModuleLoad(library, path)); });
}

RUNTIME_CALL(cudaLibraryUnload, (Library * library)) {
    return call("cudaLibraryUnload", [&](StandIn& s) { s.unload(library); });
}

RUNTIME_CALL(cudaLibraryGetKernel, (Function * *kernel, Library* library, const char* name)) {
    return call("cudaLibraryGetKernel",
                [&](StandIn&) { require(cuModuleGetFunction(kernel, library, name)); });
}

RUNTIME_CALL(cudaLibraryGetKernelCount, (unsigned* count, Library* library)) {
    return call("cudaLibraryGetKernelCount",
                [&](StandIn&) { require(cuModuleGetFunctionCount(count, library)); });
}

RUNTIME_CALL(cudaLibraryEnumerateKernels, (Function * *kernels, unsigned count, Library* library)) {
    return call("cudaLibraryEnumerateKernels",
                [&](StandIn&) { require(cuModuleEnumerateFunctions(kernels, count, library)); });
}

RUNTIME_CALL(cudaLibraryGetGlobal,
             (void** address, size_t* bytes, Library* library, const char* name)) {
    return call("cudaLibraryGetGlobal", [&](StandIn&) {
        require(
            cuModuleGetGlobal_v2(reinterpret_cast<DevicePointer*>(address), bytes, library, name));
    });
}

RUNTIME_CALL(cudaKernelSetAttributeForDevice, (Function * kernel, int attribute, int value, int)) {
    return call("cudaKernelSetAttributeForDevice",
                [&](StandIn&) { require(cuFuncSetAttribute(kernel, attribute, value)); });
}
