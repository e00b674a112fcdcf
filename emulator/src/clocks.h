// Vector clocks, what barriers hand over, and what is remembered of a memory cell's last accesses:
// the parts of the race detector that live in other objects.
#pragma once

#include <cstdint>
#include <vector>

namespace deep_moe::emulator {

struct Clock {
    std::vector<uint32_t> moments;  // by agent
    uint32_t at(uint32_t agent) const { return agent < moments.size() ? moments[agent] : 0; }
    void raise(uint32_t agent, uint32_t moment) {
        if (agent >= moments.size()) moments.resize(agent + 1);
        if (moments[agent] < moment) moments[agent] = moment;
    }
    void join(const Clock& other);
    bool covers(const Clock& other) const {
        for (uint32_t i = 0; i < other.moments.size(); ++i)
            if (other.moments[i] > at(i)) return false;
        return true;
    }
};

struct View {
    Clock seen;          // ordered before ordinary accesses
    Clock async_shared;  // ordinary accesses ordered before asynchronous ones, in shared memory
    Clock async_global;  // the same in global memory
    Clock overwritable;  // reads that asynchronous writes may follow: handed over by an mbarrier
    Clock tensor;  // tcgen05 operations before a fence::before_thread_sync, finished ones before a
                   // release
    void join(const View& other);
};

// The order that bar and barrier.cluster carry.
struct MeetingOrder {
    View arriving, complete;
};

// What is known of 4 bytes (in tensor memory: of 32 lanes of a column).
struct Cell {
    uint64_t write_bits = 0, read_bits = 0;
    uint32_t write_site = 0, read_site = 0;
    uint32_t more_reads = 0;  // index of a list, 0: none
    uint32_t bytes = 0;       // index of four cells that replace this one, 0: none
};

}  // namespace deep_moe::emulator
