// Vector clocks, what barriers hand over, and what is remembered of a memory cell's last accesses:
// the parts of the race detector that live in other objects.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace deep_moe::emulator {

// Agents of one CTA have neighbouring numbers, and most clocks know of one CTA only: they hold the
// agents from `first` on.
struct Clock {
    uint32_t first = 0;
    std::vector<uint32_t> moments;  // by agent, from `first` on
    uint32_t end() const { return first + uint32_t(moments.size()); }
    uint32_t at(uint32_t agent) const {
        const uint32_t index = agent - first;
        return index < moments.size() ? moments[index] : 0;
    }
    void raise(uint32_t agent, uint32_t moment) {
        make_room(agent, agent + 1);
        uint32_t& mine = moments[agent - first];
        if (mine < moment) mine = moment;
    }
    void join(const Clock& other);
    bool covers(const Clock& other) const {
        for (uint32_t agent = other.first; agent < other.end(); ++agent)
            if (other.moments[agent - other.first] > at(agent)) return false;
        return true;
    }

 private:
    void make_room(uint32_t begin, uint32_t end);  // for these agents
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
    bool operator==(const Cell&) const = default;
};

// What is known of words that all accesses have covered together: one cell says it. They have its
// records, or those of a row of lanes, of which each has 2^shift words; then the cell's records are
// those of the first word.
struct Stretch {
    static constexpr uint8_t uniform = 5;  // as a shift: one record for all words
    Cell cell;
    uint8_t write_shift = uniform, read_shift = uniform;
};

// What is known of 128 bytes: two stretches, of which the second begins at word `split`, or only
// the second (split 0); or cells, where accesses have cut them otherwise.
struct Block {
    static constexpr uint32_t num_cells = 32, num_bytes = 4 * num_cells;
    Stretch stretches[2];
    uint8_t split = 0;
    bool has_cells = false;  // which count instead
    std::unique_ptr<Cell[]> cells;

    uint32_t begin(int which) const { return which ? split : 0; }
    uint32_t end(int which) const { return which ? num_cells : split; }
};

}  // namespace deep_moe::emulator
