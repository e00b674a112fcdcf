// Copies and fills, which the driver and the runtime spell in many ways.
#include <algorithm>
#include <cstring>
#include <memory>

#include "stand_in.h"

namespace deep_moe::cuda {

namespace {

// Memory that a copy may read when its turn comes; of other memory it keeps what is there now.
bool is_stable(StandIn& s, uint64_t address) {
    return s.find_allocation(address) != nullptr;
}

void* pointer(uint64_t address) {
    return reinterpret_cast<void*>(address);
}

void finish(StandIn& s, Stream& stream, bool waits) {
    if (waits) s.synchronize(stream);
}

}  // namespace

void copy(StandIn& s, uint64_t to, uint64_t from, size_t size, Direction direction, Stream* handle,
          bool waits) {
    Stream& stream = s.stream(handle);
    if (!size) {
        finish(s, stream, waits);
        return;
    }
    if (!to || !from) throw Failure{invalid_value, "a null pointer"};
    const bool from_device = direction == Direction::to_host || direction == Direction::on_device,
               to_device = direction == Direction::to_device || direction == Direction::on_device;
    if (from_device || s.find_allocation(from)) s.check_range(from, size, "a read");
    if (to_device || s.find_allocation(to)) s.check_range(to, size, "a write");
    std::shared_ptr<std::vector<std::byte>> kept;
    if (!waits && !is_stable(s, from)) {
        const auto* bytes = static_cast<const std::byte*>(pointer(from));
        kept = std::make_shared<std::vector<std::byte>>(bytes, bytes + size);
    }
    s.enqueue(stream, [=] {
        std::memmove(pointer(to), kept ? static_cast<const void*>(kept->data()) : pointer(from),
                     size);
    });
    // What goes to plain host memory is there when the call returns.
    finish(s, stream, waits || (!is_stable(s, to) && !stream.capture));
}

void fill(StandIn& s, uint64_t to, size_t pitch, uint64_t value, size_t value_bytes, size_t width,
          size_t height, Stream* handle, bool waits) {
    Stream& stream = s.stream(handle);
    if (width && height) {
        if (to % value_bytes) throw Failure{invalid_value, "the address is not aligned"};
        s.check_range(to, (height - 1) * pitch + width * value_bytes, "a fill");
        s.enqueue(stream, [=] {
            for (size_t row = 0; row < height; ++row) {
                auto* bytes = static_cast<unsigned char*>(pointer(to + row * pitch));
                if (value_bytes == 1) {
                    std::memset(bytes, int(value), width);
                    continue;
                }
                for (size_t i = 0; i < width; ++i)
                    std::memcpy(bytes + i * value_bytes, &value, value_bytes);
            }
        });
    }
    finish(s, stream, waits);
}

void copy_box(StandIn& s, const Copy3D& box, Stream* handle, bool waits) {
    Stream& stream = s.stream(handle);
    if (box.source_type == array_memory || box.type == array_memory || box.source_array ||
        box.array)
        throw Failure{not_supported, "CUDA arrays (textures) cannot be emulated"};
    if (!box.width || !box.rows || !box.depth) return finish(s, stream, waits);
    auto address = [](MemoryType type, const void* host, DevicePointer device) {
        return type == host_memory ? reinterpret_cast<uint64_t>(host) : device;
    };
    auto extent = [&](size_t pitch, size_t height) {
        return ((box.depth - 1) * height + box.rows - 1) * pitch + box.width;
    };
    const size_t source_pitch = box.source_pitch ? box.source_pitch : box.width,
                 pitch = box.pitch ? box.pitch : box.width,
                 source_height = box.source_height ? box.source_height : box.rows,
                 height = box.height ? box.height : box.rows;
    const uint64_t from = address(box.source_type, box.source_host, box.source_device) +
                          (box.source_z * source_height + box.source_y) * source_pitch +
                          box.source_x;
    const uint64_t to =
        address(box.type, box.host, box.device) + (box.z * height + box.y) * pitch + box.x;
    if (box.source_type == device_memory || s.find_allocation(from))
        s.check_range(from, extent(source_pitch, source_height), "a read");
    if (box.type == device_memory || s.find_allocation(to))
        s.check_range(to, extent(pitch, height), "a write");
    std::shared_ptr<std::vector<std::byte>> kept;
    if (!waits && !is_stable(s, from)) {
        const auto* bytes = static_cast<const std::byte*>(pointer(from));
        kept = std::make_shared<std::vector<std::byte>>(
            bytes, bytes + extent(source_pitch, source_height));
    }
    const size_t width = box.width, rows = box.rows, depth = box.depth;
    s.enqueue(stream, [=] {
        const auto* source = kept ? kept->data() : static_cast<const std::byte*>(pointer(from));
        auto* target = static_cast<std::byte*>(pointer(to));
        for (size_t z = 0; z < depth; ++z)
            for (size_t y = 0; y < rows; ++y)
                std::memmove(target + (z * height + y) * pitch,
                             source + (z * source_height + y) * source_pitch, width);
    });
    finish(s, stream, waits || !is_stable(s, to));
}

}  // namespace deep_moe::cuda
