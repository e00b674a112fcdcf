// What the asynchronous instructions share: where a shared address leads in the cluster, the
// mbarriers of a CTA, the bulk groups of its threads, its tensor memory, and the views that the
// functional units get.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "machine.h"
#include "mbarrier.h"
#include "race_detector.h"
#include "shared_window.h"
#include "tensor_map.h"
#include "tensor_memory.h"

namespace deep_moe::emulator {

struct SharedPlace {
    Cta* cta;
    uint32_t offset;
};

// `space` is shared (own CTA only), shared_cluster or generic.
SharedPlace shared_place(const Warp& w, Space space, uint64_t address, int lane);
// The CTA with this rank in the cluster of `cta`; Fault if there is none or it has exited.
Cta& cluster_cta(Cta& cta, uint32_t rank, const char* what);

class CtaWindow final : public SharedWindow {
 public:
    CtaWindow(Cta& cta, const char* what, bool is_access = true)
        : cta_(cta), what_(what), is_watched_(is_access && cta.machine->races) {}
    const uint8_t* read(uint32_t address, uint32_t num_bytes) override {
        if (is_watched_) note(address, num_bytes, Access::read);
        // Operands are read 16 or 32 bytes at a time: the check for those without a loop.
        if ((num_bytes == 16 || num_bytes == 32) && address >= shared_base &&
            address + num_bytes <= cta_.shared_end) {
            uint64_t shadow[4];
            const uint8_t* written = cta_.shadow.data() + address;
            std::memcpy(shadow, written, 16);
            std::memcpy(shadow + 2, written + num_bytes - 16, 16);
            constexpr uint64_t all_written = 0x0101010101010101ull;
            const auto is_written = [](uint64_t bytes) { return bytes == all_written; };
            if (std::all_of(shadow, shadow + 4, is_written)) {
                return reinterpret_cast<const uint8_t*>(cta_.shared + address);
            }
        }
        return reinterpret_cast<const uint8_t*>(
            cta_.shared_at(address, num_bytes, Access::read, what_));
    }
    uint8_t* write(uint32_t address, uint32_t num_bytes) override {
        if (cta_.machine->races) note(address, num_bytes, Access::write);
        return reinterpret_cast<uint8_t*>(cta_.shared_at(address, num_bytes, Access::write, what_));
    }

 private:
    void note(uint32_t address, uint32_t num_bytes, Access access);
    Cta& cta_;
    const char* what_;
    bool is_watched_;  // by the race detector
};

class RankMemory final : public GlobalMemory {
 public:
    RankMemory(Machine& machine, Rank& rank) : machine_(machine), rank_(rank) {}
    const uint8_t* read(uint64_t address, uint64_t num_bytes) override;
    uint8_t* write(uint64_t address, uint64_t num_bytes) override;

 private:
    Machine& machine_;
    Rank& rank_;
};

// ---- mbarriers

Mbarrier& mbarrier_at(Cta& cta, uint32_t offset);
const Mbarrier* find_mbarrier(const Cta& cta, uint32_t offset);  // null if nobody has named it
void arrive_at(Cta& cta, uint32_t offset, uint32_t count);
// `phase`: the barrier's when the copy was issued; bytes belong to it.
void complete_bytes_at(Cta& cta, uint32_t offset, uint32_t num_bytes, uint64_t phase);
// After a change of the barrier: whoever waits looks again if that completed its phase.
void signal(Cta& cta, const Mbarrier& barrier, bool phase_complete);
uint64_t phase_of(const Cta& cta, uint32_t offset);  // 0 for a barrier that nobody has named

// What the race detector knows an asynchronous operation by; null without checks.
std::shared_ptr<const Issue> issue_of(Warp& w, int lane);
// Bytes that copies bring belong to the mbarrier's current phase.
AsyncAccesses accesses_by_barrier(const std::shared_ptr<const Issue>& issue, Cta& barrier_cta,
                                  uint32_t offset);

// ---- state per CTA

struct BulkGroup {
    uint32_t unread = 0;      // copies whose source has not been read
    uint32_t unfinished = 0;  // copies whose writes are not done
};

struct BulkThread {
    std::shared_ptr<BulkGroup> open = std::make_shared<BulkGroup>();
    std::deque<std::shared_ptr<BulkGroup>> committed;
    uint32_t num_committed = 0;                // since the start
    uint32_t read_agent = 0, write_agent = 0;  // of the race detector; moment n: n-th group
};

struct BulkState {
    std::unordered_map<uint32_t, BulkThread> threads;  // by thread in the CTA
    std::vector<Where> in_flight;  // copies that have not touched this CTA's shared memory yet
    void hold(const Where& copy) { in_flight.push_back(copy); }
    void release(const Where& copy);
};
BulkState& bulk_state(Cta& cta);

struct TensorMemoryState {
    TensorMemory memory;
    std::unordered_map<uint32_t, uint64_t>
        order_keys;  // by thread: its tcgen05 operations stay in order
    struct Queue {
        uint32_t agent = 0, num_issued = 0;
    };
    std::unordered_map<uint32_t, Queue> queues;  // the same for the race detector
    uint32_t in_flight = 0;                      // operations, arrivals of commits among them
    uint32_t cells_in_flight = 0;                // those that read or write tensor memory
    // Allocations of the pair (cta_group::2) must happen in both CTAs: sizes asked for and columns
    // given so far.
    std::vector<uint32_t> pair_requests, pair_columns;
};
TensorMemoryState& tensor_memory_state(Cta& cta);

inline uint32_t thread_in_cta(const Warp& w, int lane) {
    return w.index * warp_size + uint32_t(lane);
}

// Called when the last thread of a CTA exits: work that still needs the CTA, or tensor memory that
// was not given back, is an error.
void check_units_at_exit(Cta& cta);

}  // namespace deep_moe::emulator
