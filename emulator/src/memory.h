// Registered regions of global memory: every global access of a rank must lie inside one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "names.h"

namespace deep_moe::emulator {

enum class Access : uint8_t { read, write, read_write };

// A peer's memory that is not there: the peer does to this rank what this rank does to it, at the
// same time. So accesses go to the rank's own region `onto`, at the same offset, except where
// entries belong to source ranks in turn: the peer's entry for this rank is this rank's for the
// peer that stands to it as it stands to the peer, `shift` entries on.
struct Mirror {
    struct BySource {
        uint64_t offset, num_entries, entry_bytes;
    };
    uint64_t onto = 0;
    uint64_t num_ranks = 1, shift = 0;
    std::vector<BySource> arrays;
    uint64_t offset(uint64_t offset) const;
};

struct Region {
    uint64_t address = 0;
    uint64_t size = 0;
    bool writable = true;
    std::string name;
    NameMap names;  // of arrays inside, by offset
    int home = -1;  // rank whose memory it is; -1: the one that has this table
    // Where a GPU would have it, so that simulated time does not depend on the host's addresses.
    uint64_t device_address = 0;
    std::shared_ptr<const Mirror> mirror;

    std::byte* host(uint64_t at) const {
        if (mirror) at = mirror->onto + mirror->offset(at - address);
        return reinterpret_cast<std::byte*>(at);
    }
};

class RegionTable {
 public:
    // Throws Fault when the region overlaps another one or is not there.
    void add(uint64_t address, uint64_t size, const std::string& name, bool writable);
    void remove(uint64_t address);
    bool discard(uint64_t address);                    // the same; false if no region starts there
    void set_home(uint64_t address, int rank);         // of the region that starts there
    void set_mirror(uint64_t address, Mirror mirror);  // the same; Fault if `onto` is smaller
    const Region* find(uint64_t address) const;
    const Region* find(uint64_t address, uint64_t bytes) const;  // that has all of them
    // Names an array inside the region that starts at `address`.
    void name(uint64_t address, NamedArray array);
    // Host pointer, or Fault that says what lies around the address.
    std::byte* resolve(uint64_t address, uint64_t bytes, Access access) const;
    [[noreturn]] void fail(uint64_t address, uint64_t bytes, Access access) const;
    // A range of addresses, each of which stands for the same byte of several regions: `members`
    // are where it begins in them.
    struct Multicast {
        uint64_t address = 0, size = 0;
        std::string name;
        std::vector<uint64_t> members;
    };
    void add_multicast(Multicast multicast);
    const Multicast* find_multicast(uint64_t address, uint64_t bytes) const;
    uint64_t version() const { return version_; }  // changes with every add and remove

 private:
    std::map<uint64_t, Region> regions_;
    std::vector<Multicast> multicasts_;
    uint64_t next_device_address_ = 1ull << 40;
    uint64_t version_ = 1;
};

}  // namespace deep_moe::emulator
