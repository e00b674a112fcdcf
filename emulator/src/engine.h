// The engine: what a run consists of, which warp runs next, and when asynchronous work completes.
// Instruction bodies, functional units and checks see a `Machine` and do without this header.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"
#include "timing.h"

namespace deep_moe::emulator {

// When a warp has run and slept.
struct Turns {
    bool ready = false;                    // in the engine's list
    uint64_t last = 0;                     // scheduling at which it ran last
    uint32_t quanta_since_merge = 0;       // of its groups of lanes
    struct Naps {                          // waits that time ends, too
        uint64_t count = 0, progress = 0;  // since the machine's progress was this
        uint64_t polls_before = 0;         // at the last one
        bool polls = false;                // between the last two
    } naps;
};

struct AsyncOperation {
    const char* kind;
    Where where;
    std::function<void()> complete;
    bool is_timer = false;  // it changes nothing that others may wait for
};

Where where_of(const Warp& w);  // the instruction that it executes

// Which warp runs next, and when asynchronous operations complete.
enum class Schedule : int {
    random,
    round_robin,   // the warp that has waited longest
    late_copies,   // asynchronous operations only complete when nothing else can go on
    slow_rank,     // one rank, which the seed picks, hardly ever runs
    starved_role,  // the same for the warps of one index in all CTAs
    last_warp,     // one warp, which the seed picks, runs only when nothing else can go on
};

struct Engine : Machine {
    // ---- settings
    using Machine::collects_findings;
    using Machine::findings;
    using Machine::real_clock;
    using Machine::virtual_ns;
    Schedule schedule = Schedule::random;
    uint32_t max_resident_ctas = 4096;  // per grid

    // ---- launches and runs
    Rank& rank(uint32_t index);
    void launch(const Program& program, uint32_t rank, const uint32_t grid[3],
                const uint32_t block[3], const uint32_t cluster[3], uint32_t shared_bytes,
                const std::vector<std::byte>& parameters, bool in_order, uint32_t num_registers);
    void withdraw_launch();  // the last one
    // keep_going: asked every some ms; false ends the run.
    void run(const std::function<bool()>& keep_going);
    void reset();                          // forgets all launches
    std::string describe_running() const;  // "" if nothing runs
    // A module's variables as a rank has them, laid out when first asked for.
    ModuleMemory& module_memory(const Module& module, Rank& rank);
    void forget_module(const Module& module);
    std::deque<std::unique_ptr<Grid>> grids;  // running
    std::string stall;        // a report of this run, made when nothing changed for a while
    uint64_t lane_steps = 0;  // lane instructions
    std::unique_ptr<Timing> clock;
    void set_clock(const ChipParameters& chip) {
        clock = std::make_unique<Timing>(chip, [this](uint32_t r) -> Rank& { return rank(r); });
        timing = clock.get();
    }

 private:
    friend struct Machine;
    friend struct Warp;
    struct Queue {
        uint64_t key;
        std::deque<AsyncOperation> operations;
    };

    // ---- warps
    void forget_module(const Module& module, Rank& rank);
    void forget_regions(const Grid& grid);
    void check_memory(const Grid& grid) const;
    void admit_ctas(Grid& grid);
    void admit_cluster(Grid& grid, const std::vector<SmTime*>& sms);
    bool is_alone(const Grid& grid) const;
    std::unique_ptr<Cta> make_cta(Grid& grid, Cluster& cluster, const uint32_t position[3]);
    std::unique_ptr<Warp> make_warp(Cta& cta, uint32_t index);
    void retire_cta(Cta& cta);

    // ---- time and turns
    uint64_t random();
    void make_ready(Warp& warp);
    void wake_at(Warp& warp, uint64_t deadline);
    bool is_victim(const Warp& warp) const;
    void pick_victim();
    size_t pick_ready();
    template <bool is_timed>
    void run_warp(Warp& warp, uint64_t budget);
    void run_timed(const std::function<bool()>& keep_going);
    bool wake_overdue(bool at_once);
    bool complete_one_async();
    void complete(AsyncOperation& operation);
    bool advance_clock();
    // Lets up to `ns` of virtual time pass while warps poll; false if a sleeper cut it short.
    bool leap(uint64_t ns);
    std::string deadlock_report(const char* reason) const;

    std::map<uint32_t, std::unique_ptr<Rank>> ranks;
    std::vector<Warp*> ready;
    uint64_t random_state = 0;
    bool victims_run = false;  // of schedules that hold some warps back: nobody else gets on
    struct Victim {            // of last_warp
        uint32_t grid = 0, cta = 0, warp = 0;
    } victim;
    std::vector<std::unique_ptr<Queue>> async_queues;  // none is empty
    std::unordered_map<uint64_t, Queue*> async_by_key;
    std::multimap<uint64_t, Warp*> timers;
    uint32_t last_grid_id = 0;
};

inline Engine& engine_of(Machine& machine) {
    return static_cast<Engine&>(machine);
}

}  // namespace deep_moe::emulator
