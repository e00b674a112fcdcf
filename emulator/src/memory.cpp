#include "memory.h"

#include <iterator>

#include "machine.h"

namespace deep_moe::emulator {

void RegionTable::add(uint64_t address, uint64_t size, const std::string& name, bool writable) {
    if (size == 0) throw Fault(FaultKind::launch, "memory region '" + name + "' is empty");
    if (address == 0 || address >= shared_window || size > shared_window - address)
        throw Fault(FaultKind::launch,
                    format("memory region '%s' of %llu bytes at 0x%llx cannot be in a process",
                           name.c_str(), (unsigned long long)size, (unsigned long long)address));
    auto next = regions_.lower_bound(address);
    const Region* other = nullptr;
    if (next != regions_.end() && next->second.address < address + size) other = &next->second;
    if (next != regions_.begin() &&
        std::prev(next)->second.address + std::prev(next)->second.size > address)
        other = &std::prev(next)->second;
    if (other)
        throw Fault(FaultKind::launch,
                    "memory region '" + name + "' overlaps '" + other->name + "'");
    constexpr uint64_t device_page = 2 << 20;
    regions_[address] = {address, size, writable, name, {}, -1, next_device_address_, nullptr};
    next_device_address_ += (size + device_page - 1) / device_page * device_page;
    ++version_;
}

bool RegionTable::discard(uint64_t address) {
    ++version_;
    return regions_.erase(address) != 0;
}

void RegionTable::remove(uint64_t address) {
    if (!discard(address))
        throw Fault(FaultKind::launch,
                    format("no memory region starts at 0x%llx", (unsigned long long)address));
}

void RegionTable::set_home(uint64_t address, int rank) {
    auto found = regions_.find(address);
    if (found != regions_.end()) found->second.home = rank;
}

void RegionTable::name(uint64_t address, NamedArray array) {
    auto found = regions_.find(address);
    if (found == regions_.end())
        throw Fault(FaultKind::launch,
                    format("no memory region starts at 0x%llx", (unsigned long long)address));
    uint64_t end;
    if (__builtin_add_overflow(array.offset, array.num_bytes(), &end)) end = UINT64_MAX;
    if (end > found->second.size)
        throw Fault(FaultKind::launch,
                    format("'%s' ends at byte %llu of memory region '%s', which has %llu",
                           array.name.c_str(), (unsigned long long)end, found->second.name.c_str(),
                           (unsigned long long)found->second.size));
    found->second.names.add(std::move(array));
}

uint64_t Mirror::offset(uint64_t offset) const {
    for (const BySource& array : arrays) {
        if (offset - array.offset >= array.num_entries * array.entry_bytes) continue;
        const uint64_t entry = (offset - array.offset) / array.entry_bytes,
                       source = entry % num_ranks,
                       mirrored = entry - source + (source + shift) % num_ranks;
        return offset + (mirrored - entry) * array.entry_bytes;
    }
    return offset;
}

void RegionTable::set_mirror(uint64_t address, Mirror mirror) {
    auto found = regions_.find(address), onto = regions_.find(mirror.onto);
    if (found == regions_.end() || onto == regions_.end())
        throw Fault(FaultKind::launch,
                    format("no memory region starts at 0x%llx",
                           (unsigned long long)(found == regions_.end() ? address : mirror.onto)));
    if (onto->second.size < found->second.size)
        throw Fault(FaultKind::launch, "memory region '" + found->second.name +
                                           "' is larger than its mirror '" + onto->second.name +
                                           "'");
    for (const Mirror::BySource& array : mirror.arrays) {
        uint64_t bytes;
        if (!mirror.num_ranks || !array.entry_bytes || array.num_entries % mirror.num_ranks ||
            __builtin_mul_overflow(array.num_entries, array.entry_bytes, &bytes) ||
            array.offset > found->second.size || bytes > found->second.size - array.offset)
            throw Fault(
                FaultKind::launch,
                format("entries by source rank at byte %llu of memory region '%s': %llu of "
                       "%llu bytes for %llu ranks",
                       (unsigned long long)array.offset, found->second.name.c_str(),
                       (unsigned long long)array.num_entries, (unsigned long long)array.entry_bytes,
                       (unsigned long long)mirror.num_ranks));
    }
    found->second.mirror = std::make_shared<const Mirror>(std::move(mirror));
    ++version_;
}

void RegionTable::add_multicast(Multicast multicast) {
    const uint64_t begin = multicast.address, end = begin + multicast.size;
    for (const Multicast& other : multicasts_) {
        if (begin < other.address + other.size && other.address < end)
            throw Fault(FaultKind::launch,
                        "multicast memory '" + multicast.name + "' overlaps '" + other.name + "'");
    }
    multicasts_.push_back(std::move(multicast));
}

const RegionTable::Multicast* RegionTable::find_multicast(uint64_t address, uint64_t bytes) const {
    for (const Multicast& m : multicasts_) {
        const uint64_t at = address - m.address;
        if (at < m.size && bytes <= m.size - at) return &m;
    }
    return nullptr;
}

const Region* RegionTable::find(uint64_t address) const {
    auto next = regions_.upper_bound(address);
    if (next == regions_.begin()) return nullptr;
    const Region& r = std::prev(next)->second;
    return address - r.address < r.size ? &r : nullptr;
}

const Region* RegionTable::find(uint64_t address, uint64_t bytes) const {
    const Region* r = find(address);
    return r && bytes <= r->size - (address - r->address) ? r : nullptr;
}

std::byte* RegionTable::resolve(uint64_t address, uint64_t bytes, Access access) const {
    const Region* r = find(address, bytes);
    if (!r || (access != Access::read && !r->writable)) fail(address, bytes, access);
    return r->host(address);
}

void RegionTable::fail(uint64_t address, uint64_t bytes, Access access) const {
    const char* what = access == Access::read    ? "read"
                       : access == Access::write ? "write"
                                                 : "atomic update";
    std::string text = format("%s of %llu bytes at global address 0x%llx ", what,
                              (unsigned long long)bytes, (unsigned long long)address);
    const Region* inside = find(address);
    if (inside && access != Access::read && !inside->writable)
        throw Fault(FaultKind::out_of_bounds, text + "in read-only memory '" + inside->name + "'");
    if (const Multicast* multicast = find_multicast(address, 1))
        throw Fault(FaultKind::out_of_bounds, text + "is in multicast memory '" + multicast->name +
                                                  "', which only multimem instructions access");
    text += "is out of bounds: ";
    auto next = regions_.upper_bound(address);
    const Region* before = next == regions_.begin() ? nullptr : &std::prev(next)->second;
    if (before) {
        uint64_t end = before->address + before->size;
        text += address >= end
                    ? format("%llu bytes past the end of '%s' (%llu bytes at 0x%llx)",
                             (unsigned long long)(address - end), before->name.c_str(),
                             (unsigned long long)before->size, (unsigned long long)before->address)
                    : format("it runs past the end of '%s' (%llu bytes at 0x%llx)",
                             before->name.c_str(), (unsigned long long)before->size,
                             (unsigned long long)before->address);
    } else if (next != regions_.end()) {
        text +=
            format("%llu bytes before '%s'", (unsigned long long)(next->second.address - address),
                   next->second.name.c_str());
    } else {
        text += "this rank has no memory registered";
    }
    throw Fault(FaultKind::out_of_bounds, text);
}

}  // namespace deep_moe::emulator
