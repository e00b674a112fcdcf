// Registered regions of global memory: every global access of a rank must lie inside one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "names.h"

namespace deep_moe::emulator {

enum class Access : uint8_t { read, write, read_write };

struct Region {
    uint64_t address = 0;
    uint64_t size = 0;
    bool writable = true;
    std::string name;
    NameMap names;  // of arrays inside, by offset
};

class RegionTable {
 public:
    // Throws Fault when the region overlaps another one or is not there.
    void add(uint64_t address, uint64_t size, const std::string& name, bool writable);
    void remove(uint64_t address);
    bool discard(uint64_t address);  // the same; false if no region starts there
    const Region* find(uint64_t address) const;
    const Region* find(uint64_t address, uint64_t bytes) const;  // that has all of them
    // Names an array inside the region that starts at `address`.
    void name(uint64_t address, NamedArray array);
    // Host pointer, or Fault that says what lies around the address.
    std::byte* resolve(uint64_t address, uint64_t bytes, Access access) const;
    [[noreturn]] void fail(uint64_t address, uint64_t bytes, Access access) const;
    uint64_t version() const { return version_; }  // changes with every add and remove

 private:
    std::map<uint64_t, Region> regions_;
    uint64_t version_ = 1;
};

}  // namespace deep_moe::emulator
