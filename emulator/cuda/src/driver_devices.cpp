// The driver's calls about devices and contexts.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "entry_points.h"

using namespace deep_moe::cuda;

namespace {

constexpr int driver_version = 13000;

void make_current(Context* context) {
    if (current_contexts.empty())
        current_contexts.push_back(context);
    else
        current_contexts.back() = context;
}

// Ends what belongs to a context.
void clear(StandIn& s, Context& c) {
    s.run_all();
    for (auto it = s.allocations.begin(); it != s.allocations.end();) {
        const Allocation& a = (it++)->second;
        if (a.context == &c && a.kind != Kind::variable) s.release(a.address);
    }
    for (Stream* stream : c.streams) delete stream;
    c.streams.clear();
    c.sticky = success;
}

size_t usual_limit(int limit) {
    switch (limit) {
        case 0:
            return 1024;  // stack
        case 1:
            return 1 << 20;  // printf
        case 2:
            return 8 << 20;  // malloc
        case 5:
            return 128;  // fetch granularity
        default:
            return 0;
    }
}

}  // namespace

DRIVER_CALL(cuInit, (unsigned)) {
    start();
    return success;
}

DRIVER_CALL(cuDriverGetVersion, (int* version)) {
    if (!version) return invalid_value;
    *version = driver_version;
    return success;
}

DRIVER_CALL(cuDeviceGetCount, (int* count)) {
    return guarded("cuDeviceGetCount", [&](StandIn& s) { out(count) = s.options.num_devices; });
}

DRIVER_CALL(cuDeviceGet, (Device * device, int ordinal)) {
    return guarded("cuDeviceGet", [&](StandIn& s) {
        s.check_device(ordinal);
        out(device) = ordinal;
    });
}

DRIVER_CALL(cuDeviceGetName, (char* name, int size, Device device)) {
    return guarded("cuDeviceGetName", [&](StandIn& s) {
        s.check_device(device);
        if (!name || size <= 0) throw Failure{invalid_value, ""};
        std::strncpy(name, s.chip().title, size_t(size));
        name[size - 1] = 0;
    });
}

DRIVER_CALL(cuDeviceTotalMem_v2, (size_t* bytes, Device device)) {
    return guarded("cuDeviceTotalMem", [&](StandIn& s) {
        s.check_device(device);
        out(bytes) = s.memory_bytes;
    });
}

DRIVER_CALL(cuDeviceGetAttribute, (int* value, int attribute, Device device)) {
    return guarded("cuDeviceGetAttribute", [&](StandIn& s) {
        s.check_device(device);
        if (attribute < 1) throw Failure{invalid_value, ""};
        out(value) = device_attribute(s.chip(), s.num_sms(), device, attribute);
    });
}

DRIVER_CALL(cuDeviceGetUuid_v2, (Uuid * uuid, Device device)) {
    return guarded("cuDeviceGetUuid", [&](StandIn& s) {
        s.check_device(device);
        std::memcpy(out(uuid).bytes, "warpcheck\0\0\0\0\0\0", 16);
        uuid->bytes[15] = static_cast<unsigned char>(device);
    });
}

DRIVER_CALL(cuDeviceGetUuid, (Uuid * uuid, Device device)) {
    return cuDeviceGetUuid_v2(uuid, device);
}

DRIVER_CALL(cuDeviceGetPCIBusId, (char* text, int size, Device device)) {
    return guarded("cuDeviceGetPCIBusId", [&](StandIn& s) {
        s.check_device(device);
        if (!text || size < 13) throw Failure{invalid_value, ""};
        std::strcpy(text, words("0000:%02x:00.0", device + 1).c_str());
    });
}

DRIVER_CALL(cuDeviceGetByPCIBusId, (Device * device, const char* text)) {
    return guarded("cuDeviceGetByPCIBusId", [&](StandIn& s) {
        if (!text) throw Failure{invalid_value, ""};
        const char* colon = std::strchr(text, ':');
        const long bus = colon ? std::strtol(colon + 1, nullptr, 16) : 0;
        s.check_device(Device(bus) - 1);
        out(device) = Device(bus) - 1;
    });
}

DRIVER_CALL(cuDeviceComputeCapability, (int* major, int* minor, Device device)) {
    return guarded("cuDeviceComputeCapability", [&](StandIn& s) {
        s.check_device(device);
        out(major) = s.chip().major;
        out(minor) = s.chip().minor;
    });
}

DRIVER_CALL(cuDeviceGetLuid, (char*, unsigned*, Device)) {
    return not_supported;  // of Windows
}

DRIVER_CALL(cuDeviceCanAccessPeer, (int* can, Device device, Device peer)) {
    return guarded("cuDeviceCanAccessPeer", [&](StandIn& s) {
        s.check_device(device);
        s.check_device(peer);
        out(can) = device != peer;
    });
}

// 1: performance rank, 2: access, 3: native atomics, 4: array access
DRIVER_CALL(cuDeviceGetP2PAttribute, (int* value, int attribute, Device device, Device peer)) {
    return guarded("cuDeviceGetP2PAttribute", [&](StandIn& s) {
        s.check_device(device);
        s.check_device(peer);
        if (device == peer) throw Failure{invalid_device, ""};
        out(value) = attribute == 2 || attribute == 3;
    });
}

DRIVER_CALL(cuDeviceGetExecAffinitySupport, (int* is_supported, int, Device)) {
    return guarded("cuDeviceGetExecAffinitySupport", [&](StandIn&) { out(is_supported) = 0; });
}

DRIVER_CALL(cuFlushGPUDirectRDMAWrites, (int, int)) {
    return success;
}

// ---- primary contexts

DRIVER_CALL(cuDevicePrimaryCtxRetain, (Context * *context, Device device)) {
    return guarded("cuDevicePrimaryCtxRetain", [&](StandIn& s) {
        s.check_device(device);
        out(context) = s.primaries[size_t(device)].get();
        ++s.primaries[size_t(device)]->uses;
    });
}

DRIVER_CALL(cuDevicePrimaryCtxRelease_v2, (Device device)) {
    return guarded("cuDevicePrimaryCtxRelease", [&](StandIn& s) {
        s.check_device(device);
        Context& c = *s.primaries[size_t(device)];
        if (!c.uses) throw Failure{invalid_context, ""};
        if (--c.uses == 0) clear(s, c);
    });
}

DRIVER_CALL(cuDevicePrimaryCtxReset_v2, (Device device)) {
    return guarded("cuDevicePrimaryCtxReset", [&](StandIn& s) {
        s.check_device(device);
        clear(s, *s.primaries[size_t(device)]);
        s.primaries[size_t(device)]->uses = 0;
    });
}

DRIVER_CALL(cuDevicePrimaryCtxSetFlags_v2, (Device device, unsigned flags)) {
    return guarded("cuDevicePrimaryCtxSetFlags", [&](StandIn& s) {
        s.check_device(device);
        s.primaries[size_t(device)]->flags = flags;
    });
}

DRIVER_CALL(cuDevicePrimaryCtxGetState, (Device device, unsigned* flags, int* is_active)) {
    return guarded("cuDevicePrimaryCtxGetState", [&](StandIn& s) {
        s.check_device(device);
        out(flags) = s.primaries[size_t(device)]->flags;
        out(is_active) = s.primaries[size_t(device)]->uses > 0;
    });
}

// ---- contexts

DRIVER_CALL(cuCtxCreate_v2, (Context * *context, unsigned flags, Device device)) {
    return guarded("cuCtxCreate", [&](StandIn& s) {
        s.check_device(device);
        auto* c = new Context(device, false);
        c->flags = flags;
        s.contexts.insert(c);
        out(context) = c;
        current_contexts.push_back(c);
    });
}

DRIVER_CALL(cuCtxCreate_v3, (Context * *context, void*, int, unsigned flags, Device device)) {
    return cuCtxCreate_v2(context, flags, device);
}

DRIVER_CALL(cuCtxCreate_v4, (Context * *context, void*, unsigned flags, Device device)) {
    return cuCtxCreate_v2(context, flags, device);
}

DRIVER_CALL(cuCtxDestroy_v2, (Context * context)) {
    return guarded("cuCtxDestroy", [&](StandIn& s) {
        Context& c = s.context(context);
        if (c.is_primary)
            throw Failure{invalid_context, "a primary context is released, not destroyed"};
        clear(s, c);
        s.contexts.erase(context);
        if (!current_contexts.empty() && current_contexts.back() == context)
            current_contexts.pop_back();
        delete context;
    });
}

DRIVER_CALL(cuCtxPushCurrent_v2, (Context * context)) {
    return guarded("cuCtxPushCurrent",
                   [&](StandIn& s) { current_contexts.push_back(&s.context(context)); });
}

DRIVER_CALL(cuCtxPopCurrent_v2, (Context * *context)) {
    return guarded("cuCtxPopCurrent", [&](StandIn&) {
        if (current_contexts.empty()) throw Failure{invalid_context, ""};
        if (context) *context = current_contexts.back();
        current_contexts.pop_back();
    });
}

DRIVER_CALL(cuCtxSetCurrent, (Context * context)) {
    return guarded("cuCtxSetCurrent", [&](StandIn& s) {
        if (context)
            make_current(&s.context(context));
        else if (!current_contexts.empty())
            current_contexts.pop_back();
    });
}

DRIVER_CALL(cuCtxGetCurrent, (Context * *context)) {
    return guarded("cuCtxGetCurrent", [&](StandIn& s) {
        Context* top = current_contexts.empty() ? nullptr : current_contexts.back();
        out(context) = s.contexts.count(top) ? top : nullptr;
    });
}

DRIVER_CALL(cuCtxGetDevice, (Device * device)) {
    return guarded("cuCtxGetDevice", [&](StandIn& s) { out(device) = s.current_context().device; });
}

DRIVER_CALL(cuCtxGetDevice_v2, (Device * device, Context* context)) {
    return guarded("cuCtxGetDevice", [&](StandIn& s) {
        out(device) = (context ? s.context(context) : s.current_context()).device;
    });
}

DRIVER_CALL(cuCtxGetFlags, (unsigned* flags)) {
    return guarded("cuCtxGetFlags", [&](StandIn& s) { out(flags) = s.current_context().flags; });
}

DRIVER_CALL(cuCtxSetFlags, (unsigned flags)) {
    return guarded("cuCtxSetFlags", [&](StandIn& s) { s.current_context().flags = flags; });
}

DRIVER_CALL(cuCtxGetId, (Context * context, unsigned long long* id)) {
    return guarded("cuCtxGetId", [&](StandIn& s) {
        out(id) = reinterpret_cast<uint64_t>(context ? &s.context(context) : &s.current_context());
    });
}

DRIVER_CALL(cuCtxGetApiVersion, (Context*, unsigned* version)) {
    return guarded("cuCtxGetApiVersion", [&](StandIn&) { out(version) = 3020; });
}

DRIVER_CALL(cuCtxSynchronize, ()) {
    return guarded("cuCtxSynchronize", [&](StandIn& s) { s.synchronize(s.current_context()); });
}

DRIVER_CALL(cuCtxSynchronize_v2, (Context * context)) {
    return guarded("cuCtxSynchronize", [&](StandIn& s) {
        s.synchronize(context ? s.context(context) : s.current_context());
    });
}

DRIVER_CALL(cuCtxGetLimit, (size_t* value, int limit)) {
    return guarded("cuCtxGetLimit", [&](StandIn& s) {
        const auto& limits = s.current_context().limits;
        auto found = limits.find(limit);
        out(value) = found == limits.end() ? usual_limit(limit) : found->second;
    });
}

DRIVER_CALL(cuCtxSetLimit, (int limit, size_t value)) {
    return guarded("cuCtxSetLimit", [&](StandIn& s) { s.current_context().limits[limit] = value; });
}

DRIVER_CALL(cuCtxGetCacheConfig, (int* config)) {
    return guarded("cuCtxGetCacheConfig", [&](StandIn&) { out(config) = 0; });
}

DRIVER_CALL(cuCtxSetCacheConfig, (int)) {
    return success;
}

DRIVER_CALL(cuCtxGetSharedMemConfig, (int* config)) {
    return guarded("cuCtxGetSharedMemConfig", [&](StandIn&) { out(config) = 1; });
}

DRIVER_CALL(cuCtxSetSharedMemConfig, (int)) {
    return success;
}

DRIVER_CALL(cuCtxGetStreamPriorityRange, (int* least, int* greatest)) {
    return guarded("cuCtxGetStreamPriorityRange", [&](StandIn&) {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
    });
}

DRIVER_CALL(cuCtxResetPersistingL2Cache, ()) {
    return success;
}

DRIVER_CALL(cuCtxEnablePeerAccess, (Context * peer, unsigned)) {
    return guarded("cuCtxEnablePeerAccess", [&](StandIn& s) {
        s.allow_peer(s.current_context().device, s.context(peer).device, true);
    });
}

DRIVER_CALL(cuCtxDisablePeerAccess, (Context * peer)) {
    return guarded("cuCtxDisablePeerAccess", [&](StandIn& s) {
        s.allow_peer(s.current_context().device, s.context(peer).device, false);
    });
}

DRIVER_CALL(cuProfilerStart, ()) {
    return success;
}

DRIVER_CALL(cuProfilerStop, ()) {
    return success;
}

DRIVER_CALL(cuThreadExchangeStreamCaptureMode, (int*)) {
    return success;
}

// ---- results in words

namespace {

struct ResultName {
    int result;
    const char *name, *text;
};

constexpr ResultName result_names[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {98, "CUDA_ERROR_INVALID_DEVICE_FUNCTION", "invalid device function"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ResultName* name_of(int result) {
    for (const ResultName& r : result_names)
        if (r.result == result) return &r;
    return nullptr;
}

}  // namespace

DRIVER_CALL(cuGetErrorName, (int result, const char** text)) {
    const ResultName* name = name_of(result);
    if (!text) return invalid_value;
    *text = name ? name->name : nullptr;
    return name ? success : invalid_value;
}

DRIVER_CALL(cuGetErrorString, (int result, const char** text)) {
    const ResultName* name = name_of(result);
    if (!text) return invalid_value;
    *text = name ? name->text : nullptr;
    return name ? success : invalid_value;
}
