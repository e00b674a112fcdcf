// CUDA's runtime over the stand-in's driver: memory, streams and events.
#include <cstring>

#include "driver_calls.h"
#include "runtime_state.h"

using namespace deep_moe::cuda;
using namespace deep_moe::cuda::runtime;

namespace {

enum CopyKind : int { host_to_host, host_to_device, device_to_host, device_to_device, by_address };

Direction direction_of(int kind) {
    switch (kind) {
        case host_to_device:
            return Direction::to_device;
        case device_to_host:
            return Direction::to_host;
        case device_to_device:
            return Direction::on_device;
        default:
            return Direction::any;
    }
}

DevicePointer* device_out(void** pointer) {
    return reinterpret_cast<DevicePointer*>(pointer);
}

// A call that the driver has, too.
template <class F>
int forward(F f) {
    enter();
    return finish(f());
}

Copy3D flat_box(void* to, size_t pitch, const void* from, size_t source_pitch, size_t width,
                size_t height) {
    Copy3D box = {};
    box.source_type = box.type = unified;
    box.source_device = address_of(from);
    box.device = address_of(to);
    box.source_pitch = source_pitch;
    box.pitch = pitch;
    box.width = width;
    box.rows = height;
    box.depth = 1;
    return box;
}

Copy3D box_of(const BoxParameters& p) {
    Copy3D box = flat_box(p.target.pointer, p.target.pitch, p.source.pointer, p.source.pitch,
                          p.extent.x, p.extent.y);
    box.source_array = p.source_array;
    box.array = p.array;
    box.source_x = p.source_position.x;
    box.source_y = p.source_position.y;
    box.source_z = p.source_position.z;
    box.x = p.position.x;
    box.y = p.position.y;
    box.z = p.position.z;
    box.source_height = p.source.height;
    box.height = p.target.height;
    box.depth = p.extent.z;
    return box;
}

}  // namespace

// ---- allocation

RUNTIME_CALL(cudaMalloc, (void** pointer, size_t size)) {
    return call("cudaMalloc", [&](StandIn& s) {
        if (!pointer) throw Failure{invalid_value, ""};
        *pointer = nullptr;
        if (size)
            *pointer = reinterpret_cast<void*>(
                s.allocate(size, Kind::device, s.current_context()).address);
    });
}

RUNTIME_CALL(cudaFree, (void* pointer)) {
    return forward([&] { return cuMemFree_v2(address_of(pointer)); });
}

RUNTIME_CALL(cudaMallocPitch, (void** pointer, size_t* pitch, size_t width, size_t height)) {
    return forward(
        [&] { return cuMemAllocPitch_v2(device_out(pointer), pitch, width, height, 4); });
}

RUNTIME_CALL(cudaMalloc3D, (Pitched * out, Position extent)) {
    return forward([&] {
        out->width = extent.x;
        out->height = extent.y;
        return cuMemAllocPitch_v2(device_out(&out->pointer), &out->pitch, extent.x,
                                  extent.y * extent.z, 4);
    });
}

RUNTIME_CALL(cudaMallocManaged, (void** pointer, size_t size, unsigned flags)) {
    return forward([&] { return cuMemAllocManaged(device_out(pointer), size, flags); });
}

RUNTIME_CALL(cudaHostAlloc, (void** pointer, size_t size, unsigned flags)) {
    return forward([&] { return cuMemHostAlloc(pointer, size, flags); });
}

RUNTIME_CALL(cudaMallocHost, (void** pointer, size_t size)) {
    return forward([&] { return cuMemHostAlloc(pointer, size, 0); });
}

RUNTIME_CALL(cudaFreeHost, (void* pointer)) {
    return forward([&] { return cuMemFree_v2(address_of(pointer)); });
}

RUNTIME_CALL(cudaHostRegister, (void* pointer, size_t size, unsigned flags)) {
    return forward([&] { return cuMemHostRegister_v2(pointer, size, flags); });
}

RUNTIME_CALL(cudaHostUnregister, (void* pointer)) {
    return forward([&] { return cuMemHostUnregister(pointer); });
}

RUNTIME_CALL(cudaHostGetDevicePointer, (void** device, void* host, unsigned flags)) {
    return forward([&] { return cuMemHostGetDevicePointer_v2(device_out(device), host, flags); });
}

RUNTIME_CALL(cudaHostGetFlags, (unsigned* flags, void* host)) {
    return forward([&] { return cuMemHostGetFlags(flags, host); });
}

RUNTIME_CALL(cudaMemGetInfo, (size_t* free, size_t* total)) {
    return forward([&] { return cuMemGetInfo_v2(free, total); });
}

RUNTIME_CALL(cudaMallocAsync, (void** pointer, size_t size, Stream* stream)) {
    return forward([&] { return cuMemAllocAsync(device_out(pointer), size, stream); });
}

RUNTIME_CALL(cudaMallocFromPoolAsync, (void** pointer, size_t size, Pool* pool, Stream* stream)) {
    return forward(
        [&] { return cuMemAllocFromPoolAsync(device_out(pointer), size, pool, stream); });
}

RUNTIME_CALL(cudaFreeAsync, (void* pointer, Stream* stream)) {
    return forward([&] { return cuMemFreeAsync(address_of(pointer), stream); });
}

RUNTIME_CALL(cudaDeviceGetDefaultMemPool, (Pool * *pool, Device device)) {
    return forward([&] { return cuDeviceGetDefaultMemPool(pool, device); });
}

RUNTIME_CALL(cudaDeviceGetMemPool, (Pool * *pool, Device device)) {
    return forward([&] { return cuDeviceGetMemPool(pool, device); });
}

RUNTIME_CALL(cudaDeviceSetMemPool, (Device device, Pool* pool)) {
    return forward([&] { return cuDeviceSetMemPool(device, pool); });
}

RUNTIME_CALL(cudaMemPoolCreate, (Pool * *pool, const PoolProperties* properties)) {
    return forward([&] { return cuMemPoolCreate(pool, properties); });
}

RUNTIME_CALL(cudaMemPoolDestroy, (Pool * pool)) {
    return forward([&] { return cuMemPoolDestroy(pool); });
}

RUNTIME_CALL(cudaMemPoolTrimTo, (Pool * pool, size_t bytes)) {
    return forward([&] { return cuMemPoolTrimTo(pool, bytes); });
}

RUNTIME_CALL(cudaMemPoolSetAttribute, (Pool * pool, int attribute, void* value)) {
    return forward([&] { return cuMemPoolSetAttribute(pool, attribute, value); });
}

RUNTIME_CALL(cudaMemPoolGetAttribute, (Pool * pool, int attribute, void* value)) {
    return forward([&] { return cuMemPoolGetAttribute(pool, attribute, value); });
}

RUNTIME_CALL(cudaMemPoolSetAccess, (Pool * pool, const AccessDescription* map, size_t count)) {
    return forward([&] { return cuMemPoolSetAccess(pool, map, count); });
}

RUNTIME_CALL(cudaMemPoolGetAccess, (int* flags, Pool* pool, const Location* location)) {
    return forward([&] { return cuMemPoolGetAccess(flags, pool, location); });
}

RUNTIME_CALL(cudaPointerGetAttributes, (PointerAttributes * out, const void* pointer)) {
    return call("cudaPointerGetAttributes", [&](StandIn& s) {
        if (!out) throw Failure{invalid_value, ""};
        *out = {};
        auto* address = const_cast<void*>(pointer);
        const Allocation* a = s.find_allocation(address_of(pointer));
        if (!a) {  // memory that nobody registered
            out->device = -2;
            out->host_pointer = address;
            return;
        }
        const bool is_host = a->kind == Kind::pinned || a->kind == Kind::registered;
        out->type = is_host ? 1 : a->kind == Kind::managed ? 3 : 2;
        out->device = a->device;
        out->device_pointer = address;
        out->host_pointer = is_host || a->kind == Kind::managed ? address : nullptr;
    });
}

// ---- copies

RUNTIME_CALL(cudaMemcpy, (void* to, const void* from, size_t size, int kind)) {
    return call("cudaMemcpy", [&](StandIn& s) {
        copy(s, address_of(to), address_of(from), size, direction_of(kind), nullptr, true);
    });
}

RUNTIME_CALL(cudaMemcpyAsync, (void* to, const void* from, size_t size, int kind, Stream* stream)) {
    return call("cudaMemcpyAsync", [&](StandIn& s) {
        copy(s, address_of(to), address_of(from), size, direction_of(kind), stream, false);
    });
}

RUNTIME_CALL(cudaMemcpyPeer, (void* to, Device, const void* from, Device, size_t size)) {
    return call("cudaMemcpyPeer", [&](StandIn& s) {
        copy(s, address_of(to), address_of(from), size, Direction::on_device, nullptr, true);
    });
}

RUNTIME_CALL(cudaMemcpyPeerAsync,
             (void* to, Device, const void* from, Device, size_t size, Stream* stream)) {
    return call("cudaMemcpyPeerAsync", [&](StandIn& s) {
        copy(s, address_of(to), address_of(from), size, Direction::on_device, stream, false);
    });
}

RUNTIME_CALL(cudaMemcpy2D, (void* to, size_t pitch, const void* from, size_t source_pitch,
                            size_t width, size_t height, int)) {
    return call("cudaMemcpy2D", [&](StandIn& s) {
        copy_box(s, flat_box(to, pitch, from, source_pitch, width, height), nullptr, true);
    });
}

RUNTIME_CALL(cudaMemcpy2DAsync, (void* to, size_t pitch, const void* from, size_t source_pitch,
                                 size_t width, size_t height, int, Stream* stream)) {
    return call("cudaMemcpy2DAsync", [&](StandIn& s) {
        copy_box(s, flat_box(to, pitch, from, source_pitch, width, height), stream, false);
    });
}

RUNTIME_CALL(cudaMemcpy3D, (const BoxParameters* p)) {
    return call("cudaMemcpy3D", [&](StandIn& s) {
        if (!p) throw Failure{invalid_value, ""};
        copy_box(s, box_of(*p), nullptr, true);
    });
}

RUNTIME_CALL(cudaMemcpy3DAsync, (const BoxParameters* p, Stream* stream)) {
    return call("cudaMemcpy3DAsync", [&](StandIn& s) {
        if (!p) throw Failure{invalid_value, ""};
        copy_box(s, box_of(*p), stream, false);
    });
}

namespace {

void copy_symbol(StandIn& s, const void* symbol, size_t offset, uint64_t other, size_t size,
                 bool to_symbol, int kind, Stream* stream, bool waits) {
    size_t bytes;
    const uint64_t address = variable_of(s, symbol, &bytes);
    if (offset > bytes || size > bytes - offset)
        throw Failure{invalid_value,
                      words("%zu bytes at %zu of a variable of %zu bytes", size, offset, bytes)};
    if (to_symbol)
        copy(s, address + offset, other, size, direction_of(kind), stream, waits);
    else
        copy(s, other, address + offset, size, direction_of(kind), stream, waits);
}

}  // namespace

RUNTIME_CALL(cudaMemcpyToSymbol,
             (const void* symbol, const void* from, size_t size, size_t offset, int kind)) {
    return call("cudaMemcpyToSymbol", [&](StandIn& s) {
        copy_symbol(s, symbol, offset, address_of(from), size, true, kind, nullptr, true);
    });
}

RUNTIME_CALL(cudaMemcpyToSymbolAsync, (const void* symbol, const void* from, size_t size,
                                       size_t offset, int kind, Stream* stream)) {
    return call("cudaMemcpyToSymbolAsync", [&](StandIn& s) {
        copy_symbol(s, symbol, offset, address_of(from), size, true, kind, stream, false);
    });
}

RUNTIME_CALL(cudaMemcpyFromSymbol,
             (void* to, const void* symbol, size_t size, size_t offset, int kind)) {
    return call("cudaMemcpyFromSymbol", [&](StandIn& s) {
        copy_symbol(s, symbol, offset, address_of(to), size, false, kind, nullptr, true);
    });
}

RUNTIME_CALL(cudaMemcpyFromSymbolAsync,
             (void* to, const void* symbol, size_t size, size_t offset, int kind, Stream* stream)) {
    return call("cudaMemcpyFromSymbolAsync", [&](StandIn& s) {
        copy_symbol(s, symbol, offset, address_of(to), size, false, kind, stream, false);
    });
}

RUNTIME_CALL(cudaGetSymbolAddress, (void** address, const void* symbol)) {
    return call("cudaGetSymbolAddress",
                [&](StandIn& s) { *address = reinterpret_cast<void*>(variable_of(s, symbol)); });
}

RUNTIME_CALL(cudaGetSymbolSize, (size_t* bytes, const void* symbol)) {
    return call("cudaGetSymbolSize", [&](StandIn& s) { variable_of(s, symbol, bytes); });
}

// ---- fills

RUNTIME_CALL(cudaMemset, (void* to, int value, size_t count)) {
    return call("cudaMemset", [&](StandIn& s) {
        fill(s, address_of(to), 0, uint8_t(value), 1, count, 1, nullptr, true);
    });
}

RUNTIME_CALL(cudaMemsetAsync, (void* to, int value, size_t count, Stream* stream)) {
    return call("cudaMemsetAsync", [&](StandIn& s) {
        fill(s, address_of(to), 0, uint8_t(value), 1, count, 1, stream, false);
    });
}

RUNTIME_CALL(cudaMemset2D, (void* to, size_t pitch, int value, size_t width, size_t height)) {
    return call("cudaMemset2D", [&](StandIn& s) {
        fill(s, address_of(to), pitch, uint8_t(value), 1, width, height, nullptr, true);
    });
}

RUNTIME_CALL(cudaMemset2DAsync,
             (void* to, size_t pitch, int value, size_t width, size_t height, Stream* stream)) {
    return call("cudaMemset2DAsync", [&](StandIn& s) {
        fill(s, address_of(to), pitch, uint8_t(value), 1, width, height, stream, false);
    });
}

RUNTIME_CALL(cudaMemset3D, (Pitched to, int value, Position extent)) {
    return call("cudaMemset3D", [&](StandIn& s) {
        for (size_t z = 0; z < extent.z; ++z)
            fill(s, address_of(to.pointer) + z * to.height * to.pitch, to.pitch, uint8_t(value), 1,
                 extent.x, extent.y, nullptr, true);
    });
}

RUNTIME_CALL(cudaMemPrefetchAsync, (const void*, size_t, Location, unsigned, Stream*)) {
    return success;
}

RUNTIME_CALL(cudaMemAdvise, (const void*, size_t, int, Location)) {
    return success;
}

RUNTIME_CALL(cudaCtxResetPersistingL2Cache, ()) {
    return success;
}

// ---- devices

RUNTIME_CALL(cudaDeviceGetAttribute, (int* value, int attribute, Device device)) {
    start();
    return finish(cuDeviceGetAttribute(value, attribute, device));
}

RUNTIME_CALL(cudaDeviceCanAccessPeer, (int* can, Device device, Device peer)) {
    start();
    return finish(cuDeviceCanAccessPeer(can, device, peer));
}

RUNTIME_CALL(cudaDeviceGetP2PAttribute, (int* value, int attribute, Device device, Device peer)) {
    start();
    return finish(cuDeviceGetP2PAttribute(value, attribute, device, peer));
}

RUNTIME_CALL(cudaDeviceGetPCIBusId, (char* text, int size, Device device)) {
    start();
    return finish(cuDeviceGetPCIBusId(text, size, device));
}

RUNTIME_CALL(cudaDeviceGetByPCIBusId, (Device * device, const char* text)) {
    start();
    return finish(cuDeviceGetByPCIBusId(device, text));
}

RUNTIME_CALL(cudaDeviceEnablePeerAccess, (Device peer, unsigned)) {
    return call("cudaDeviceEnablePeerAccess", [&](StandIn& s) {
        s.check_device(peer);
        s.allow_peer(s.current_context().device, peer, true);
    });
}

RUNTIME_CALL(cudaDeviceDisablePeerAccess, (Device peer)) {
    return call("cudaDeviceDisablePeerAccess", [&](StandIn& s) {
        s.check_device(peer);
        s.allow_peer(s.current_context().device, peer, false);
    });
}

RUNTIME_CALL(cudaDeviceGetLimit, (size_t* value, int limit)) {
    return forward([&] { return cuCtxGetLimit(value, limit); });
}

RUNTIME_CALL(cudaDeviceSetLimit, (int limit, size_t value)) {
    return forward([&] { return cuCtxSetLimit(limit, value); });
}

RUNTIME_CALL(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest)) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return success;
}

RUNTIME_CALL(cudaDeviceSetCacheConfig, (int)) {
    return success;
}

RUNTIME_CALL(cudaDeviceGetCacheConfig, (int* config)) {
    *config = 0;
    return success;
}

RUNTIME_CALL(cudaSetDeviceFlags, (unsigned)) {
    return success;
}

RUNTIME_CALL(cudaGetDeviceFlags, (unsigned* flags)) {
    *flags = 0;
    return success;
}

RUNTIME_CALL(cudaChooseDevice, (Device * device, const void*)) {
    *device = 0;
    return success;
}

RUNTIME_CALL(cudaDriverGetVersion, (int* version)) {
    *version = 13000;
    return success;
}

RUNTIME_CALL(cudaRuntimeGetVersion, (int* version)) {
    *version = 13000;
    return success;
}

RUNTIME_CALL(cudaProfilerStart, ()) {
    return success;
}

RUNTIME_CALL(cudaProfilerStop, ()) {
    return success;
}

RUNTIME_CALL(cudaThreadExchangeStreamCaptureMode, (int*)) {
    return success;
}

// ---- streams

RUNTIME_CALL(cudaStreamCreate, (Stream * *stream)) {
    return forward([&] { return cuStreamCreateWithPriority(stream, 0, 0); });
}

RUNTIME_CALL(cudaStreamCreateWithFlags, (Stream * *stream, unsigned flags)) {
    return forward([&] { return cuStreamCreateWithPriority(stream, flags, 0); });
}

RUNTIME_CALL(cudaStreamCreateWithPriority, (Stream * *stream, unsigned flags, int priority)) {
    return forward([&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}

RUNTIME_CALL(cudaStreamDestroy, (Stream * stream)) {
    return forward([&] { return cuStreamDestroy_v2(stream); });
}

RUNTIME_CALL(cudaStreamSynchronize, (Stream * stream)) {
    return forward([&] { return cuStreamSynchronize(stream); });
}

RUNTIME_CALL(cudaStreamQuery, (Stream * stream)) {
    return forward([&] { return cuStreamQuery(stream); });
}

RUNTIME_CALL(cudaStreamGetFlags, (Stream * stream, unsigned* flags)) {
    return forward([&] { return cuStreamGetFlags(stream, flags); });
}

RUNTIME_CALL(cudaStreamGetPriority, (Stream * stream, int* priority)) {
    return forward([&] { return cuStreamGetPriority(stream, priority); });
}

RUNTIME_CALL(cudaStreamGetId, (Stream * stream, unsigned long long* id)) {
    return forward([&] { return cuStreamGetId(stream, id); });
}

RUNTIME_CALL(cudaStreamGetDevice, (Stream * stream, Device* device)) {
    return forward([&] { return cuStreamGetDevice(stream, device); });
}

RUNTIME_CALL(cudaStreamWaitEvent, (Stream * stream, Event* event, unsigned flags)) {
    return forward([&] { return cuStreamWaitEvent(stream, event, flags); });
}

RUNTIME_CALL(cudaStreamAddCallback,
             (Stream * stream, void (*function)(Stream*, int, void*), void* data, unsigned flags)) {
    return forward([&] { return cuStreamAddCallback(stream, function, data, flags); });
}

RUNTIME_CALL(cudaLaunchHostFunc, (Stream * stream, void (*function)(void*), void* data)) {
    return forward([&] { return cuLaunchHostFunc(stream, function, data); });
}

RUNTIME_CALL(cudaStreamAttachMemAsync, (Stream*, void*, size_t, unsigned)) {
    return success;
}

RUNTIME_CALL(cudaStreamSetAttribute, (Stream*, int, const void*)) {
    return success;  // all are hints
}

RUNTIME_CALL(cudaStreamIsCapturing, (Stream * stream, int* status)) {
    return forward([&] { return cuStreamIsCapturing(stream, status); });
}

RUNTIME_CALL(cudaStreamGetCaptureInfo, (Stream * stream, int* status, unsigned long long* id,
                                        void**, const void**, const void**, size_t* count)) {
    if (id) *id = 0;
    if (count) *count = 0;
    return forward([&] { return cuStreamIsCapturing(stream, status); });
}

// ---- events

RUNTIME_CALL(cudaEventCreate, (Event * *event)) {
    return forward([&] { return cuEventCreate(event, 0); });
}

RUNTIME_CALL(cudaEventCreateWithFlags, (Event * *event, unsigned flags)) {
    return forward([&] { return cuEventCreate(event, flags); });
}

RUNTIME_CALL(cudaEventDestroy, (Event * event)) {
    return forward([&] { return cuEventDestroy_v2(event); });
}

RUNTIME_CALL(cudaEventRecord, (Event * event, Stream* stream)) {
    return forward([&] { return cuEventRecord(event, stream); });
}

RUNTIME_CALL(cudaEventRecordWithFlags, (Event * event, Stream* stream, unsigned)) {
    return forward([&] { return cuEventRecord(event, stream); });
}

RUNTIME_CALL(cudaEventQuery, (Event * event)) {
    return forward([&] { return cuEventQuery(event); });
}

RUNTIME_CALL(cudaEventSynchronize, (Event * event)) {
    return forward([&] { return cuEventSynchronize(event); });
}

RUNTIME_CALL(cudaEventElapsedTime, (float* milliseconds, Event* begin, Event* end)) {
    return forward([&] { return cuEventElapsedTime(milliseconds, begin, end); });
}

// ---- graphs

RUNTIME_CALL(cudaStreamBeginCapture, (Stream * stream, int mode)) {
    return forward([&] { return cuStreamBeginCapture_v2(stream, mode); });
}

RUNTIME_CALL(cudaStreamEndCapture, (Stream * stream, Graph** graph)) {
    return forward([&] { return cuStreamEndCapture(stream, graph); });
}

RUNTIME_CALL(cudaGraphInstantiate, (Graph * *executable, Graph* graph, unsigned long long flags)) {
    return forward([&] { return cuGraphInstantiateWithFlags(executable, graph, flags); });
}

RUNTIME_CALL(cudaGraphInstantiateWithFlags,
             (Graph * *executable, Graph* graph, unsigned long long flags)) {
    return forward([&] { return cuGraphInstantiateWithFlags(executable, graph, flags); });
}

RUNTIME_CALL(cudaGraphExecUpdate, (Graph * executable, Graph* graph, int* result)) {
    return forward([&] { return cuGraphExecUpdate_v2(executable, graph, result); });
}

RUNTIME_CALL(cudaGraphUpload, (Graph*, Stream*)) {
    return success;
}

RUNTIME_CALL(cudaGraphLaunch, (Graph * executable, Stream* stream)) {
    return forward([&] { return cuGraphLaunch(executable, stream); });
}

RUNTIME_CALL(cudaGraphGetNodes, (Graph * graph, void** nodes, size_t* count)) {
    return forward([&] { return cuGraphGetNodes(graph, nodes, count); });
}

RUNTIME_CALL(cudaGraphDestroy, (Graph * graph)) {
    return forward([&] { return cuGraphDestroy(graph); });
}

RUNTIME_CALL(cudaGraphExecDestroy, (Graph * executable)) {
    return forward([&] { return cuGraphExecDestroy(executable); });
}
