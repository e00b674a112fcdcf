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
    int home = -1;  // rank whose memory it is; -1: the one that has this table
    // Where a GPU would have it, so that simulated time does not depend on the host's addresses.
    uint64_t device_address = 0;
};

class RegionTable {
 public:
    // Throws Fault when the region overlaps another one or is not there.
    void add(uint64_t address, uint64_t size, const std::string& name, bool writable);
    void remove(uint64_t address);
    bool discard(uint64_t address);             // the same; false if no region starts there
    void set_home(uint64_t address, int rank);  // of the region that starts there
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
    uint64_t next_device_address_ = 1ull << 40;
    uint64_t version_ = 1;
};

}  // namespace deep_moe::emulator
