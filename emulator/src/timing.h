// Simulated time: when each warp gets on, and the queues that everything goes through. A queue
// serves one request after the other at its rate; a request is done when the slowest queue on its
// way is, plus a fixed latency. The engine runs whichever warp or asynchronous operation comes
// first, so that a wait lasts until its event, and the schedule is the simulated one.
//
// Time is in picoseconds since the run began. Work between two moments that others can notice is
// added up and charged at once (`flush`): a warp takes the longest of its own issue and of its
// scheduler's pipes, which serve their warps in turn.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chip_parameters.h"
#include "machine.h"
#include "op_cost.h"
#include "usage_series.h"

namespace deep_moe::emulator {

using Picoseconds = int64_t;

// What a warp's time goes to.
enum class Spent : int {
    instructions,  // issue and pipes
    memory,        // results of loads and atomics
    tensor,        // wgmma groups, tensor memory
    mbarrier,
    barrier,  // of the CTA or cluster
    fence,    // and the stores that it waits for
    sleep,
    other,
    count
};
const char* name_of(Spent spent);

struct ServiceQueue {
    Picoseconds free = 0;
    Picoseconds busy = 0;  // in all
    UsageSeries* usage = nullptr;
    int num_units = 1;  // that are busy at once, for `usage`
    // When a request that comes at `at` and takes `duration` has been served.
    Picoseconds take(Picoseconds at, Picoseconds duration) {
        free = (at > free ? at : free) + duration;
        busy += duration;
        if (usage && duration) usage->add(free - duration, free, num_units);
        return free;
    }
};

// The same for requests that come in any order: one that comes over a link is known before it
// comes, and those that come meanwhile do not wait for it. Time is in slots; what is left of a slot
// before a request comes is lost.
class SlottedQueue {
 public:
    UsageSeries* usage = nullptr;
    Picoseconds take(Picoseconds at, Picoseconds duration);

 private:
    static constexpr Picoseconds width = 10'000;
    static constexpr size_t num_slots = 1 << 15;
    struct Slot {
        int64_t index = -1;
        int64_t next = 0;  // where to look for room when this one is full
        Picoseconds used = 0;
    };
    Slot& slot(int64_t index);
    int64_t first_with_room(int64_t index);
    std::vector<Slot> slots_;  // by the index's remainder
};

struct WarpTime {
    Picoseconds time = 0;  // what is in `work` not counted
    uint64_t work = 0;     // see OpCost
    uint32_t own = 0;      // sixteenths of cycles that the warp takes by itself
    uint32_t extra = 0;    // cycles
    uint64_t pending_registers = 0;
    struct Pending {  // results on their way
        std::array<uint32_t, 8> offsets;
        uint32_t count;
        Picoseconds ready;
        Spent kind;
    };
    std::vector<Pending> pending;
    Picoseconds drained = 0;  // when all its stores are known to have arrived
    Picoseconds arrival = 0;  // of the ordered write over a link that it issues now
    Picoseconds last_arrival = 0;
    // An instruction that others may notice and that came behind something: the warp waited, and
    // what else came first goes first. Then it goes on with the same instruction.
    enum class Resumes : uint8_t { nowhere, behind_fence, behind_access };
    Resumes resumes = Resumes::nowhere;
    uint32_t resumed_pc = 0;
    Picoseconds mma_end = 0;  // of the group that is open
    std::deque<Picoseconds> mma_groups;
    uint64_t stamp = 0;  // of its entry in the list of events; 0: it is in none
    Spent blocked_by = Spent::other;
    std::array<Picoseconds, size_t(Spent::count)> spent{};
};

struct PendingCopy {  // to shared memory
    struct Run {
        struct GpuTime* home;
        uint64_t address, bytes;
        bool is_remote;
    };
    std::vector<Run> runs;
    uint64_t bytes;
    Picoseconds ready;
    std::shared_ptr<AsyncOperation> operation;
};

struct SmTime {
    struct Partition {
        ServiceQueue issue, alu, fma, xu, shuffle, tensor;
    };
    std::array<Partition, 4> partitions;
    ServiceQueue shared_port, tma, ingress, tensor, tensor_port;
    std::deque<PendingCopy> copies;  // that wait until those before them have come
    uint64_t bytes_in_flight = 0;
    uint32_t num_ctas = 0, num_threads = 0, shared_bytes = 0, num_registers = 0;
};

// Which lines of 128 bytes L2 holds: sets of 16, the least recently used goes.
class CacheTags {
 public:
    struct Line {
        uint64_t tag = ~0ull;
        uint64_t used = 0;
        Picoseconds ready = 0;
        uint8_t sectors = 0;  // of 32 bytes that are there
        bool dirty = false;
    };
    void resize(uint64_t bytes);
    void settle();  // what was on its way has come
    // The line's place; `evicts_dirty` if what was there has to be written first.
    Line& find(uint64_t line, bool& evicts_dirty);

 private:
    static constexpr uint32_t ways = 16;
    std::vector<Line> lines_;
    uint64_t num_sets_ = 0, uses_ = 0;
};

// Of the last run; of the tensor cores those of all SMs together.
struct GpuUsage {
    UsageSeries memory, l2, links_in, links_out, tensor_cores;
};

struct GpuTime {
    uint32_t index = 0;
    double cycle = 0;  // ps
    std::vector<SmTime> sms;
    SlottedQueue l2, hbm, link_in, link_out;
    CacheTags tags;
    std::vector<ServiceQueue> atomics;  // by address
    bool has_multiplied = false;
    Picoseconds tensor_busy = 0, tensor_busy_seen = 0, clock_seen = 0;
    double tensor_share = 0;  // averaged
    double cycles_seen = 0, hbm_bytes = 0, l2_bytes = 0, link_bytes = 0;
    GpuUsage usage;
};

struct DevicePlace {
    GpuTime& gpu;
    uint64_t address;  // there
    bool is_remote;    // behind a link; of a mirrored peer, whose GPU is this one
};

struct LaunchTime {
    uint32_t rank = 0, grid = 0;
    std::string kernel;
    Picoseconds start = 0, end = 0;
    double cycles = 0, hbm_bytes = 0, l2_bytes = 0, link_bytes = 0, tensor_share = 0;
    // By warp of a CTA: what the mean CTA spent.
    std::vector<std::array<double, size_t(Spent::count)>> spent;
};

struct WarpWait {  // of a timeline
    uint32_t grid, cta, warp;
    Spent kind;
    Picoseconds start, end;
};

class Timing {
 public:
    Timing(const ChipParameters& chip, std::function<Rank&(uint32_t)> rank_of)
        : chip(chip),
          rank_of_(std::move(rank_of)),
          issue_sixteenths_(uint32_t(chip.issue_gap_cycles * 4 + 0.5)),
          dependent_sixteenths_(uint32_t(chip.dependent_cycles * 4 + 0.5)) {}
    const ChipParameters chip;

    // ---- the engine's
    void start_run();
    // Places for a cluster's CTAs, or none.
    bool place(const Grid& grid, uint32_t num_ctas, std::vector<SmTime*>& sms);
    void start_cta(Cta& cta, uint32_t rank);
    void end_cta(Cta& cta);
    void end_grid(const Grid& grid);
    void tick();  // looks at the load of each GPU now and then
    // Charges the instruction; false if something else comes first.
    bool begin(Warp& w, const Op& op, const OpCost& cost);
    // The same for what it waits for and goes through.
    bool before(Warp& w, const Op& op, const OpCost& cost);
    void after(Warp& w, const Op& op, const OpCost& cost, Flow flow);
    void block(Warp& w);  // it waits until `wake`
    void wake(Warp& w);
    void requeue(Warp& w);
    void enqueue(AsyncOperation operation, uint64_t key, Picoseconds at);
    struct Event {
        Picoseconds time;
        uint64_t order;
        Warp* warp;                                 // or
        AsyncOperation* operation;                  // owned
        bool operator<(const Event& other) const {  // for a heap with the first on top
            return time != other.time ? time > other.time : order > other.order;
        }
    };
    bool has_events() const { return !events_.empty(); }
    Event take_event();
    Picoseconds next_event() const { return events_.empty() ? INT64_MAX : events_.front().time; }
    Picoseconds now = 0;   // of the warp or operation that runs
    Picoseconds last = 0;  // the latest end so far
    Picoseconds next_tick = 0;
    void clear();

    // ---- what bodies ask: when an asynchronous operation that `w` issues now is done
    void load(Warp& w, const std::vector<std::pair<uint64_t, uint32_t>>& rows, uint64_t bytes,
              AsyncOperation operation);
    Picoseconds shared_copy(Warp& w, uint64_t bytes);  // to another CTA of the cluster
    Picoseconds bulk_store_read(Warp& w, uint64_t bytes);
    Picoseconds bulk_store_write(Warp& w, uint64_t address, uint64_t bytes, Picoseconds read);
    Picoseconds thread_copies(Warp& w, const std::vector<std::pair<uint64_t, uint32_t>>& pieces);
    Picoseconds tensor_mma(Warp& w, uint32_t m, uint32_t n, int num_ctas, bool a_in_shared);
    Picoseconds tensor_copy(Warp& w);
    Picoseconds soon(Warp& w, double cycles);
    // Whether what `w` writes now to `address` happens later: an ordered write over a link. Its
    // body leaves that to `write`, which says whether it changed anything.
    bool is_late(Warp& w, uint64_t address);
    void write_later(Warp& w, uint64_t address, std::function<bool()> write);
    Picoseconds here(Warp& w) {
        flush(w);
        return time_of(w);
    }
    uint64_t cycles_of(Warp& w);  // %clock64
    double clock_mhz(const GpuTime& gpu) const { return 1e6 / gpu.cycle; }

    std::vector<LaunchTime> launches;
    std::string launches_as_json() const;
    bool keeps_waits = false;
    std::vector<WarpWait> waits;
    std::string usage_as_json(uint64_t begin_ns) const;

 private:
    void watch(GpuTime& gpu);
    void flush(Warp& w);
    Picoseconds time_of(const Warp& w) const;
    void advance(Warp& w, Picoseconds to, Spent reason);
    void await_registers(Warp& w, const Op& op);
    void add_pending(Warp& w, const Op& op, const OpCost& cost, Picoseconds ready, Spent kind);
    bool wait_and_resume(Warp& w, Picoseconds until, Spent reason, WarpTime::Resumes where);
    Picoseconds arrival_of(const Warp& w, uint64_t address, uint64_t bytes) const;
    bool access(Warp& w, const Op& op, const OpCost& cost);
    void access_region(Warp& w, const OpCost& cost, std::span<uint64_t> at, Picoseconds start,
                       Picoseconds& ready, Picoseconds& arrival);
    Picoseconds fenced(Warp& w, double ns);
    Picoseconds l2(GpuTime& gpu, uint64_t address, uint64_t bytes, Picoseconds at, bool writes);
    void start_copies(GpuTime& gpu, SmTime& sm, Picoseconds at);
    Picoseconds from_memory(GpuTime& gpu, SmTime& sm, const DevicePlace& place, uint64_t bytes,
                            Picoseconds at);
    Picoseconds to_memory(Warp& w, const DevicePlace& place, uint64_t bytes, Picoseconds at);
    GpuTime& gpu_of(uint32_t rank);
    DevicePlace home_of(const Warp& w, uint64_t address);
    double l2_latency(const Warp& w, uint64_t address) const;
    void run_clock(GpuTime& gpu, Picoseconds at);
    Picoseconds cycles(const GpuTime& gpu, double count) const {
        return Picoseconds(count * gpu.cycle + 0.5);
    }
    static Picoseconds ns(double count) { return Picoseconds(count * 1e3 + 0.5); }
    static Picoseconds transfer(double bytes, double gb_per_s) {
        return Picoseconds(bytes / gb_per_s * 1e3 + 0.5);
    }

    std::function<Rank&(uint32_t)> rank_of_;
    const uint32_t issue_sixteenths_, dependent_sixteenths_;  // of a quarter of an instruction
    std::vector<Event> events_;
    uint64_t num_events_ = 0;
    std::map<uint32_t, std::unique_ptr<GpuTime>> gpus_;
    std::map<uint64_t, Picoseconds> last_of_key_;
    std::map<const Grid*, LaunchTime> running_;
    // When ordered writes over links arrive, by issuing rank and 32 bytes of its addresses.
    std::map<std::pair<uint32_t, uint64_t>, Picoseconds> late_writes_;
};

}  // namespace deep_moe::emulator
