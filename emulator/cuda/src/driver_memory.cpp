// The driver's calls about memory.
#include <algorithm>
#include <cstring>

#include "entry_points.h"

using namespace deep_moe::cuda;

namespace {

constexpr uint64_t pitch_alignment = 512;

}  // namespace

DRIVER_CALL(cuMemGetInfo_v2, (size_t* free, size_t* total)) {
    return guarded("cuMemGetInfo", [&](StandIn& s) {
        s.current_context();
        out(free) = s.memory_bytes - s.allocated_bytes;
        out(total) = s.memory_bytes;
    });
}

DRIVER_CALL(cuMemAlloc_v2, (DevicePointer * pointer, size_t size)) {
    return guarded("cuMemAlloc", [&](StandIn& s) {
        out(pointer) = s.allocate(size, Kind::device, s.current_context()).address;
    });
}

DRIVER_CALL(cuMemAllocPitch_v2,
            (DevicePointer * pointer, size_t* pitch, size_t width, size_t height, unsigned)) {
    return guarded("cuMemAllocPitch", [&](StandIn& s) {
        out(pitch) = (width + pitch_alignment - 1) / pitch_alignment * pitch_alignment;
        out(pointer) = s.allocate(*pitch * height, Kind::device, s.current_context()).address;
    });
}

DRIVER_CALL(cuMemFree_v2, (DevicePointer pointer)) {
    return guarded("cuMemFree", [&](StandIn& s) {
        if (!pointer) return;
        s.run_all();
        s.release(pointer);
    });
}

DRIVER_CALL(cuMemAllocManaged, (DevicePointer * pointer, size_t size, unsigned flags)) {
    return guarded("cuMemAllocManaged", [&](StandIn& s) {
        out(pointer) = s.allocate(size, Kind::managed, s.current_context(), nullptr, flags).address;
    });
}

DRIVER_CALL(cuMemHostAlloc, (void** pointer, size_t size, unsigned flags)) {
    return guarded("cuMemHostAlloc", [&](StandIn& s) {
        out(pointer) = reinterpret_cast<void*>(
            s.allocate(size, Kind::pinned, s.current_context(), nullptr, flags).address);
    });
}

DRIVER_CALL(cuMemAllocHost_v2, (void** pointer, size_t size)) {
    return cuMemHostAlloc(pointer, size, 0);
}

DRIVER_CALL(cuMemFreeHost, (void* pointer)) {
    return cuMemFree_v2(address_of(pointer));
}

DRIVER_CALL(cuMemHostGetDevicePointer_v2, (DevicePointer * device, void* host, unsigned)) {
    return guarded("cuMemHostGetDevicePointer", [&](StandIn& s) {
        if (!s.find_allocation(address_of(host))) throw Failure{invalid_value, ""};
        out(device) = address_of(host);
    });
}

DRIVER_CALL(cuMemHostGetFlags, (unsigned* flags, void* host)) {
    return guarded("cuMemHostGetFlags", [&](StandIn& s) {
        const Allocation* a = s.find_allocation(address_of(host));
        if (!a) throw Failure{invalid_value, ""};
        out(flags) = a->flags;
    });
}

DRIVER_CALL(cuMemHostRegister_v2, (void* host, size_t size, unsigned flags)) {
    return guarded("cuMemHostRegister", [&](StandIn& s) {
        if (!host || !size) throw Failure{invalid_value, ""};
        if (s.find_allocation(address_of(host)) || s.find_allocation(address_of(host) + size - 1))
            throw Failure{host_memory_already_registered, ""};
        s.adopt(address_of(host), size, Kind::registered, s.current_context(), flags,
                words("registered host memory at %p", host));
    });
}

DRIVER_CALL(cuMemHostUnregister, (void* host)) {
    return guarded("cuMemHostUnregister", [&](StandIn& s) {
        auto found = s.allocations.find(address_of(host));
        if (found == s.allocations.end() || found->second.kind != Kind::registered)
            throw Failure{host_memory_not_registered, ""};
        s.run_all();
        s.release(address_of(host));
    });
}

DRIVER_CALL(cuMemGetAddressRange_v2, (DevicePointer * base, size_t* size, DevicePointer pointer)) {
    return guarded("cuMemGetAddressRange", [&](StandIn& s) {
        const Allocation* a = s.find_allocation(pointer);
        if (!a) throw Failure{not_found, ""};
        if (base) *base = a->address;
        if (size) *size = a->size;
    });
}

// ---- what a pointer is

namespace {

void pointer_attribute(StandIn& s, void* data, int attribute, DevicePointer pointer) {
    const Allocation* a = s.find_allocation(pointer);
    if (attribute == 13) {  // mapped
        *static_cast<int*>(data) = a != nullptr;
        return;
    }
    if (!a) throw Failure{invalid_value, ""};
    const bool is_host = a->kind == Kind::pinned || a->kind == Kind::registered;
    switch (attribute) {
        case 1:
            *static_cast<Context**>(data) = a->context;
            break;
        case 2:
            *static_cast<unsigned*>(data) = is_host ? host_memory : device_memory;
            break;
        case 3:
            *static_cast<DevicePointer*>(data) = pointer;
            break;
        case 4:
            if (a->kind == Kind::device || a->kind == Kind::variable)
                throw Failure{invalid_value, ""};
            *static_cast<void**>(data) = reinterpret_cast<void*>(pointer);
            break;
        case 6:
            *static_cast<int*>(data) = 1;
            break;
        case 7:
            *static_cast<uint64_t*>(data) = a->number;
            break;
        case 8:
            *static_cast<int*>(data) = a->kind == Kind::managed;
            break;
        case 9:
            *static_cast<int*>(data) = a->device;
            break;
        case 10:
            *static_cast<int*>(data) = 0;
            break;  // no IPC
        case 11:
        case 19:
            *static_cast<DevicePointer*>(data) = a->address;
            break;
        case 12:
        case 18:
            *static_cast<size_t*>(data) = a->size;
            break;
        case 14:
            *static_cast<uint64_t*>(data) = 0;
            break;
        case 15:
            *static_cast<int*>(data) = 0;
            break;
        case 16:
            *static_cast<int*>(data) = 3;
            break;
        case 17:
            *static_cast<Pool**>(data) = a->pool;
            break;
        case 20:
            *static_cast<uint64_t*>(data) = a->number;
            break;
        default:
            throw Failure{not_supported, words("pointer attribute %d", attribute)};
    }
}

}  // namespace

DRIVER_CALL(cuPointerGetAttribute, (void* data, int attribute, DevicePointer pointer)) {
    return guarded("cuPointerGetAttribute", [&](StandIn& s) {
        if (!data) throw Failure{invalid_value, ""};
        pointer_attribute(s, data, attribute, pointer);
    });
}

DRIVER_CALL(cuPointerGetAttributes,
            (unsigned count, const int* attributes, void** data, DevicePointer pointer)) {
    return guarded("cuPointerGetAttributes", [&](StandIn& s) {
        if (!attributes || !data) throw Failure{invalid_value, ""};
        // Of memory that the driver does not know, each attribute is zero.
        constexpr int with_8_bytes[] = {1, 3, 4, 7, 11, 12, 14, 17, 18, 19, 20};
        for (unsigned i = 0; i < count; ++i) {
            try {
                pointer_attribute(s, data[i], attributes[i], pointer);
            } catch (const Failure&) {
                const bool is_long = std::count(std::begin(with_8_bytes), std::end(with_8_bytes),
                                                attributes[i]) != 0;
                std::memset(data[i], 0, is_long ? 8 : 4);
                if (attributes[i] == 9) *static_cast<int*>(data[i]) = -2;
            }
        }
    });
}

DRIVER_CALL(cuPointerSetAttribute, (const void*, int, DevicePointer)) {
    return success;
}

// ---- pools

DRIVER_CALL(cuDeviceGetDefaultMemPool, (Pool * *pool, Device device)) {
    return guarded("cuDeviceGetDefaultMemPool", [&](StandIn& s) {
        s.check_device(device);
        out(pool) = s.default_pools[size_t(device)].get();
    });
}

DRIVER_CALL(cuDeviceGetMemPool, (Pool * *pool, Device device)) {
    return guarded("cuDeviceGetMemPool", [&](StandIn& s) {
        s.check_device(device);
        out(pool) = s.current_pools[size_t(device)];
    });
}

DRIVER_CALL(cuDeviceSetMemPool, (Device device, Pool* pool)) {
    return guarded("cuDeviceSetMemPool", [&](StandIn& s) {
        s.check_device(device);
        s.current_pools[size_t(device)] = &s.pool(pool);
    });
}

// type: 1 for pinned, 3 for managed
DRIVER_CALL(cuMemGetDefaultMemPool, (Pool * *pool, const Location* location, int)) {
    return guarded("cuMemGetDefaultMemPool", [&](StandIn& s) {
        if (out(location).type != 1) throw Failure{not_supported, "pools of host memory"};
        s.check_device(location->id);
        out(pool) = s.default_pools[size_t(location->id)].get();
    });
}

DRIVER_CALL(cuMemGetMemPool, (Pool * *pool, const Location* location, int)) {
    return guarded("cuMemGetMemPool", [&](StandIn& s) {
        if (out(location).type != 1) throw Failure{not_supported, "pools of host memory"};
        s.check_device(location->id);
        out(pool) = s.current_pools[size_t(location->id)];
    });
}

DRIVER_CALL(cuMemSetMemPool, (const Location* location, int, Pool* pool)) {
    return guarded("cuMemSetMemPool", [&](StandIn& s) {
        if (out(location).type != 1) throw Failure{not_supported, "pools of host memory"};
        s.check_device(location->id);
        s.current_pools[size_t(location->id)] = &s.pool(pool);
    });
}

DRIVER_CALL(cuMemPoolCreate, (Pool * *pool, const PoolProperties* properties)) {
    return guarded("cuMemPoolCreate", [&](StandIn& s) {
        if (out(properties).location.type != 1)
            throw Failure{not_supported, "only pools of device memory can be emulated"};
        s.check_device(properties->location.id);
        auto* p = new Pool;
        p->device = properties->location.id;
        s.pools.insert(p);
        out(pool) = p;
    });
}

DRIVER_CALL(cuMemPoolDestroy, (Pool * pool)) {
    return guarded("cuMemPoolDestroy", [&](StandIn& s) {
        Pool& p = s.pool(pool);
        for (const auto& each : s.default_pools)
            if (each.get() == &p) throw Failure{invalid_value, "it is a default pool"};
        s.pools.erase(pool);  // what was allocated from it keeps it
        for (size_t d = 0; d < s.current_pools.size(); ++d)
            if (s.current_pools[d] == pool) s.current_pools[d] = s.default_pools[d].get();
    });
}

DRIVER_CALL(cuMemPoolTrimTo, (Pool * pool, size_t)) {
    return guarded("cuMemPoolTrimTo", [&](StandIn& s) { s.pool(pool); });
}

// 1 to 3: reuse, 4: threshold, 5 and 6: reserved, 7 and 8: used
DRIVER_CALL(cuMemPoolSetAttribute, (Pool * pool, int attribute, void* value)) {
    return guarded("cuMemPoolSetAttribute", [&](StandIn& s) {
        Pool& p = s.pool(pool);
        if (!value) throw Failure{invalid_value, ""};
        if (attribute <= 3)
            p.attributes[attribute] = *static_cast<int*>(value);
        else if (attribute == 4)
            p.threshold = *static_cast<uint64_t*>(value);
        else
            p.most_used = p.used;
    });
}

DRIVER_CALL(cuMemPoolGetAttribute, (Pool * pool, int attribute, void* value)) {
    return guarded("cuMemPoolGetAttribute", [&](StandIn& s) {
        const Pool& p = s.pool(pool);
        if (!value) throw Failure{invalid_value, ""};
        if (attribute <= 3) {
            auto found = p.attributes.find(attribute);
            *static_cast<int*>(value) = found == p.attributes.end() ? 1 : found->second;
        } else {
            *static_cast<uint64_t*>(value) = attribute == 4                     ? p.threshold
                                             : attribute == 5 || attribute == 7 ? p.used
                                                                                : p.most_used;
        }
    });
}

DRIVER_CALL(cuMemPoolSetAccess, (Pool * pool, const AccessDescription* map, size_t count)) {
    return guarded("cuMemPoolSetAccess", [&](StandIn& s) {
        Pool& p = s.pool(pool);
        for (size_t i = 0; i < count; ++i) {
            if (map[i].location.type != 1) throw Failure{invalid_value, ""};
            const Device who = map[i].location.id;
            s.check_device(who);
            if (who == p.device) continue;
            const bool allow = map[i].flags != 0, had = p.peers.count(who) != 0;
            if (allow == had) continue;
            if (allow)
                p.peers.insert(who);
            else
                p.peers.erase(who);
            for (const auto& [address, a] : s.allocations) {
                if (a.pool != &p) continue;
                if (allow)
                    dm_add_memory(s.machine, uint32_t(who), address, a.size, a.name.c_str(), 1);
                else
                    dm_remove_memory(s.machine, uint32_t(who), address);
            }
        }
    });
}

DRIVER_CALL(cuMemPoolGetAccess, (int* flags, Pool* pool, const Location* location)) {
    return guarded("cuMemPoolGetAccess", [&](StandIn& s) {
        const Pool& p = s.pool(pool);
        const Device who = out(location).id;
        out(flags) = who == p.device || p.peers.count(who) ? 3 : 0;
    });
}

DRIVER_CALL(cuMemAllocFromPoolAsync,
            (DevicePointer * pointer, size_t size, Pool* pool, Stream* stream)) {
    return guarded("cuMemAllocFromPoolAsync", [&](StandIn& s) {
        Pool& p = s.pool(pool);
        s.stream(stream);
        out(pointer) = s.allocate(size, Kind::device, *s.primaries[size_t(p.device)], &p).address;
    });
}

DRIVER_CALL(cuMemAllocAsync, (DevicePointer * pointer, size_t size, Stream* stream)) {
    return guarded("cuMemAllocAsync", [&](StandIn& s) {
        Context& c = *s.stream(stream).context;
        out(pointer) = s.allocate(size, Kind::device, c, s.current_pools[size_t(c.device)]).address;
    });
}

DRIVER_CALL(cuMemFreeAsync, (DevicePointer pointer, Stream* stream)) {
    return guarded("cuMemFreeAsync", [&](StandIn& s) {
        if (!pointer) return;
        if (!s.allocations.count(pointer)) throw Failure{invalid_value, "it is no allocation"};
        // A graph's launches use what was allocated while it was captured.
        if (s.stream(stream).capture) return;
        s.enqueue(s.stream(stream), [&s, pointer] { s.release(pointer); });
    });
}

// ---- copies

DRIVER_CALL(cuMemcpy, (DevicePointer to, DevicePointer from, size_t size)) {
    return guarded("cuMemcpy",
                   [&](StandIn& s) { copy(s, to, from, size, Direction::any, nullptr, true); });
}

DRIVER_CALL(cuMemcpyAsync, (DevicePointer to, DevicePointer from, size_t size, Stream* stream)) {
    return guarded("cuMemcpyAsync",
                   [&](StandIn& s) { copy(s, to, from, size, Direction::any, stream, false); });
}

DRIVER_CALL(cuMemcpyHtoD_v2, (DevicePointer to, const void* from, size_t size)) {
    return guarded("cuMemcpyHtoD", [&](StandIn& s) {
        copy(s, to, address_of(from), size, Direction::to_device, nullptr, true);
    });
}

DRIVER_CALL(cuMemcpyHtoDAsync_v2,
            (DevicePointer to, const void* from, size_t size, Stream* stream)) {
    return guarded("cuMemcpyHtoDAsync", [&](StandIn& s) {
        copy(s, to, address_of(from), size, Direction::to_device, stream, false);
    });
}

DRIVER_CALL(cuMemcpyDtoH_v2, (void* to, DevicePointer from, size_t size)) {
    return guarded("cuMemcpyDtoH", [&](StandIn& s) {
        copy(s, address_of(to), from, size, Direction::to_host, nullptr, true);
    });
}

DRIVER_CALL(cuMemcpyDtoHAsync_v2, (void* to, DevicePointer from, size_t size, Stream* stream)) {
    return guarded("cuMemcpyDtoHAsync", [&](StandIn& s) {
        copy(s, address_of(to), from, size, Direction::to_host, stream, false);
    });
}

DRIVER_CALL(cuMemcpyDtoD_v2, (DevicePointer to, DevicePointer from, size_t size)) {
    return guarded("cuMemcpyDtoD", [&](StandIn& s) {
        copy(s, to, from, size, Direction::on_device, nullptr, true);
    });
}

DRIVER_CALL(cuMemcpyDtoDAsync_v2,
            (DevicePointer to, DevicePointer from, size_t size, Stream* stream)) {
    return guarded("cuMemcpyDtoDAsync", [&](StandIn& s) {
        copy(s, to, from, size, Direction::on_device, stream, false);
    });
}

DRIVER_CALL(cuMemcpyPeer, (DevicePointer to, Context*, DevicePointer from, Context*, size_t size)) {
    return guarded("cuMemcpyPeer", [&](StandIn& s) {
        copy(s, to, from, size, Direction::on_device, nullptr, true);
    });
}

DRIVER_CALL(cuMemcpyPeerAsync, (DevicePointer to, Context*, DevicePointer from, Context*,
                                size_t size, Stream* stream)) {
    return guarded("cuMemcpyPeerAsync", [&](StandIn& s) {
        copy(s, to, from, size, Direction::on_device, stream, false);
    });
}

DRIVER_CALL(cuMemcpyBatchAsync_v2, (DevicePointer * to, DevicePointer* from, size_t* sizes,
                                    size_t count, void*, size_t*, size_t, Stream* stream)) {
    return guarded("cuMemcpyBatchAsync", [&](StandIn& s) {
        for (size_t i = 0; i < count; ++i)
            copy(s, to[i], from[i], sizes[i], Direction::any, stream, false);
    });
}

DRIVER_CALL(cuMemcpyBatchAsync,
            (DevicePointer * to, DevicePointer* from, size_t* sizes, size_t count, void* attributes,
             size_t* indices, size_t num_attributes, size_t*, Stream* stream)) {
    return cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, indices, num_attributes,
                                 stream);
}

namespace {

Copy3D box_of(const Copy2D& c) {
    Copy3D box = {};
    box.source_x = c.source_x;
    box.source_y = c.source_y;
    box.source_type = c.source_type;
    box.source_host = c.source_host;
    box.source_device = c.source_device;
    box.source_array = c.source_array;
    box.source_pitch = c.source_pitch;
    box.x = c.x;
    box.y = c.y;
    box.type = c.type;
    box.host = c.host;
    box.device = c.device;
    box.array = c.array;
    box.pitch = c.pitch;
    box.width = c.width;
    box.rows = c.height;
    box.depth = 1;
    return box;
}

}  // namespace

DRIVER_CALL(cuMemcpy2D_v2, (const Copy2D* c)) {
    return guarded("cuMemcpy2D", [&](StandIn& s) { copy_box(s, box_of(out(c)), nullptr, true); });
}

DRIVER_CALL(cuMemcpy2DUnaligned_v2, (const Copy2D* c)) {
    return cuMemcpy2D_v2(c);
}

DRIVER_CALL(cuMemcpy2DAsync_v2, (const Copy2D* c, Stream* stream)) {
    return guarded("cuMemcpy2DAsync",
                   [&](StandIn& s) { copy_box(s, box_of(out(c)), stream, false); });
}

DRIVER_CALL(cuMemcpy3D_v2, (const Copy3D* c)) {
    return guarded("cuMemcpy3D", [&](StandIn& s) { copy_box(s, out(c), nullptr, true); });
}

DRIVER_CALL(cuMemcpy3DAsync_v2, (const Copy3D* c, Stream* stream)) {
    return guarded("cuMemcpy3DAsync", [&](StandIn& s) { copy_box(s, out(c), stream, false); });
}

DRIVER_CALL(cuMemcpy3DPeer, (const Copy3D* c)) {
    return cuMemcpy3D_v2(c);
}

DRIVER_CALL(cuMemcpy3DPeerAsync, (const Copy3D* c, Stream* stream)) {
    return cuMemcpy3DAsync_v2(c, stream);
}

// ---- fills

DRIVER_CALL(cuMemsetD8_v2, (DevicePointer to, unsigned char value, size_t count)) {
    return guarded("cuMemsetD8",
                   [&](StandIn& s) { fill(s, to, 0, value, 1, count, 1, nullptr, true); });
}

DRIVER_CALL(cuMemsetD16_v2, (DevicePointer to, unsigned short value, size_t count)) {
    return guarded("cuMemsetD16",
                   [&](StandIn& s) { fill(s, to, 0, value, 2, count, 1, nullptr, true); });
}

DRIVER_CALL(cuMemsetD32_v2, (DevicePointer to, unsigned value, size_t count)) {
    return guarded("cuMemsetD32",
                   [&](StandIn& s) { fill(s, to, 0, value, 4, count, 1, nullptr, true); });
}

DRIVER_CALL(cuMemsetD8Async,
            (DevicePointer to, unsigned char value, size_t count, Stream* stream)) {
    return guarded("cuMemsetD8Async",
                   [&](StandIn& s) { fill(s, to, 0, value, 1, count, 1, stream, false); });
}

DRIVER_CALL(cuMemsetD16Async,
            (DevicePointer to, unsigned short value, size_t count, Stream* stream)) {
    return guarded("cuMemsetD16Async",
                   [&](StandIn& s) { fill(s, to, 0, value, 2, count, 1, stream, false); });
}

DRIVER_CALL(cuMemsetD32Async, (DevicePointer to, unsigned value, size_t count, Stream* stream)) {
    return guarded("cuMemsetD32Async",
                   [&](StandIn& s) { fill(s, to, 0, value, 4, count, 1, stream, false); });
}

DRIVER_CALL(cuMemsetD2D8_v2,
            (DevicePointer to, size_t pitch, unsigned char value, size_t width, size_t height)) {
    return guarded("cuMemsetD2D8",
                   [&](StandIn& s) { fill(s, to, pitch, value, 1, width, height, nullptr, true); });
}

DRIVER_CALL(cuMemsetD2D32_v2,
            (DevicePointer to, size_t pitch, unsigned value, size_t width, size_t height)) {
    return guarded("cuMemsetD2D32",
                   [&](StandIn& s) { fill(s, to, pitch, value, 4, width, height, nullptr, true); });
}

DRIVER_CALL(cuMemsetD2D8Async, (DevicePointer to, size_t pitch, unsigned char value, size_t width,
                                size_t height, Stream* stream)) {
    return guarded("cuMemsetD2D8Async",
                   [&](StandIn& s) { fill(s, to, pitch, value, 1, width, height, stream, false); });
}

DRIVER_CALL(cuMemsetD2D32Async, (DevicePointer to, size_t pitch, unsigned value, size_t width,
                                 size_t height, Stream* stream)) {
    return guarded("cuMemsetD2D32Async",
                   [&](StandIn& s) { fill(s, to, pitch, value, 4, width, height, stream, false); });
}

// ---- where managed memory should lie: it is everywhere

DRIVER_CALL(cuMemPrefetchAsync, (DevicePointer, size_t, Device, Stream*)) {
    return success;
}

DRIVER_CALL(cuMemPrefetchAsync_v2, (DevicePointer, size_t, Location, unsigned, Stream*)) {
    return success;
}

DRIVER_CALL(cuMemAdvise, (DevicePointer, size_t, int, Device)) {
    return success;
}

DRIVER_CALL(cuMemAdvise_v2, (DevicePointer, size_t, int, Location)) {
    return success;
}

DRIVER_CALL(cuStreamAttachMemAsync, (Stream*, DevicePointer, size_t, unsigned)) {
    return success;
}
