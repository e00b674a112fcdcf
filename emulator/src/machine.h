// What instruction bodies see of a run: the warp that executes them, its CTA, cluster, grid and
// rank, and what a machine does for them. Bodies get a `Warp&`; everything else is reached from
// there. Who runs when is the engine's (engine.h), which no body includes.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"
#include "fault.h"
#include "findings.h"
#include "memory.h"
#include "program.h"

namespace deep_moe::emulator {

struct Machine;
struct Grid;
struct Cta;
struct Warp;
struct TensorMemory;  // tensor_memory.h
struct WarpClock;     // race_detector.h
class RaceDetector;
struct View;   // clocks.h
struct Turns;  // engine.h
class Timing;  // timing.h, as are the next three
struct WarpTime;
struct SmTime;
struct GpuTime;

// Addresses. Global, constant and kernel-parameter addresses are host addresses. A shared address
// is offset + (cluster rank << 24); generic addresses of shared and local memory lie in windows of
// their own.
constexpr uint64_t shared_window = 0x0100'0000'0000'0000ull;
constexpr uint64_t local_window = 0x0200'0000'0000'0000ull;
constexpr uint64_t window_mask = 0xff00'0000'0000'0000ull;
constexpr uint32_t shared_rank_shift = 24;
constexpr uint32_t shared_offset_mask = (1u << shared_rank_shift) - 1;

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// ---- operands as 32 lanes

template <class T>
constexpr size_t lane_stride = sizeof(T) <= 4 ? 4 : 8;

template <class T>
struct In {
    const std::byte* data;
    T operator[](int lane) const {
        return *reinterpret_cast<const T*>(data + size_t(lane) * lane_stride<T>);
    }
};

template <class T>
struct Out {  // writes to lanes; types below 32 bits are extended to their 4 bytes
    std::byte* data;
    void set(int lane, T value) const {
        if constexpr (std::is_integral_v<T> && std::is_signed_v<T> && sizeof(T) < 4) {
            reinterpret_cast<int32_t*>(data)[lane] = value;
        } else if constexpr (sizeof(T) < 4) {
            uint32_t wide = 0;
            std::memcpy(&wide, &value, sizeof(T));
            reinterpret_cast<uint32_t*>(data)[lane] = wide;
        } else {
            reinterpret_cast<T*>(data)[lane] = value;
        }
    }
};

// Indices of the rows of `Warp::special`, 32 lanes of 4 bytes each.
enum class Special : uint32_t {
    tid_x,
    tid_y,
    tid_z,
    ntid_x,
    ntid_y,
    ntid_z,
    ctaid_x,
    ctaid_y,
    ctaid_z,
    nctaid_x,
    nctaid_y,
    nctaid_z,
    laneid,
    warpid,
    nwarpid,
    smid,
    nsmid,
    gridid,
    clusterid_x,
    clusterid_y,
    clusterid_z,
    nclusterid_x,
    nclusterid_y,
    nclusterid_z,
    cluster_ctaid_x,
    cluster_ctaid_y,
    cluster_ctaid_z,
    cluster_nctaid_x,
    cluster_nctaid_y,
    cluster_nctaid_z,
    cluster_ctarank,
    cluster_nctarank,
    is_explicit_cluster,
    lanemask_eq,
    lanemask_le,
    lanemask_lt,
    lanemask_ge,
    lanemask_gt,
    dynamic_smem_size,
    total_smem_size,
    aggr_smem_size,
    reserved_smem_offset_begin,
    reserved_smem_offset_cap,
    reserved_smem_offset_1,
    envreg1,
    envreg2,
    frame,  // no register of PTX: where the current function's frame starts in local memory
    count
};

// ---- waiting

// Warps that wait for one thing (or one kind of thing). Whoever changes it calls `Machine::wake`;
// every woken warp runs its instruction again, which looks for itself whether it may go on.
struct WaitQueue {
    std::vector<Warp*> warps;
};

// What a warp waits for or polls, so that a report can say how it stands.
struct Awaited {
    enum class Kind : uint8_t {
        nothing,
        mbarrier_parity,  // address: shared offset, value: the parity
        mbarrier_state,   // value: the phase
        named_barrier,    // address: its index
        cluster_barrier,
        memory,         // value: bytes
        shared_memory,  // address: shared offset
    };
    Kind kind = Kind::nothing;
    const Cta* cta = nullptr;
    uint64_t address = 0, value = 0;
};
std::string describe(const Awaited& awaited);  // "" for nothing

struct Wait {
    const char* text = "";  // printf pattern with up to two %llx / %llu
    unsigned long long a = 0, b = 0;
    Awaited awaited;  // if there is more to say
};

// Lanes of one warp that share a program counter.
struct Group {
    uint32_t pc = 0;
    uint32_t lanes = 0;
    bool blocked = false;   // at `pc`, until the warp is woken
    bool meeting = false;   // at `pc`, until the other lanes of a collective come
    uint64_t token = 0;     // the body's, between the runs of one blocked instruction; 0 at first
    uint64_t deadline = 0;  // virtual ns at which a blocked group is woken anyway, 0 = never
    Wait wait;
};

// A function that a lane has called another one from.
struct Activation {
    uint32_t return_pc = 0, site = 0, callee = 0;
    uint32_t frame = 0, stack_top = 0;
};

struct Warp {
    // What bodies use.
    Machine* machine = nullptr;
    Grid* grid = nullptr;
    Cta* cta = nullptr;
    const Program* program = nullptr;
    uint32_t index = 0;  // in its CTA
    uint32_t live = 0;   // lanes that have not exited
    uint32_t exec = 0;   // lanes that execute the current instruction (guard and meeting applied)
    Group current;
    uint32_t carry = 0;        // the condition code of add.cc, one bit per lane
    std::byte* bases[3] = {};  // by `Base`

    const std::byte* data(const Operand& o) const { return bases[int(o.base)] + o.offset; }
    template <class T>
    In<T> in(const Operand& o) const {
        return {data(o)};
    }
    template <class T>
    Out<T> out(const Operand& o) const {
        return {bases[0] + o.offset};
    }
    uint32_t predicate(const Operand& o) const {
        uint32_t bits = *reinterpret_cast<const uint32_t*>(data(o));
        return o.negated ? ~bits : bits;
    }
    // Sets the executing lanes' bits of a predicate, leaves the others.
    void set_predicate(const Operand& o, uint32_t bits) const {
        if (o.sink) return;
        auto& p = *reinterpret_cast<uint32_t*>(bases[0] + o.offset);
        p = (p & ~exec) | (bits & exec);
    }
    // Value of the first executing lane.
    template <class T>
    T uniform(const Operand& o) const {
        return in<T>(o)[first_lane()];
    }
    // 64-bit address of an address operand in one lane.
    uint64_t address(const Operand& o, int lane) const {
        uint64_t base = o.bits == 64 ? in<uint64_t>(o)[lane] : in<uint32_t>(o)[lane];
        uint64_t sum = base + uint64_t(o.displacement);
        return o.bits == 64 ? sum : uint32_t(sum);
    }
    // Drops the window of a generic address where the instruction says .shared, as hardware does,
    // which takes 32 bits. PTX asks for an address of the space itself.
    uint64_t shared_address(uint64_t address) const;
    int first_lane() const { return __builtin_ctz(exec); }
    template <class F>
    void for_each_lane(F f) const {
        for (uint32_t m = exec; m; m &= m - 1) f(__builtin_ctz(m));
    }

    // Host address of `bytes` bytes for an access by `lane`, after every check; throws Fault.
    std::byte* resolve(Space space, uint64_t address, uint32_t bytes, Access access, int lane);

    // The region of global memory that the last access was in, null if it may be gone since.
    const Region* last_region() const;
    // The region with this address, null if there is none.
    const Region* find_region(uint64_t address);

    // Waits: `return w.block(queue, "%llu columns", a)`. Run again after `Machine::wake(queue)`, or
    // at `deadline` (0: never).
    Flow block(WaitQueue& queue, const char* text, uint64_t a = 0, uint64_t b = 0,
               uint64_t deadline = 0);
    Flow block(WaitQueue& queue, const Awaited& awaited, uint64_t deadline = 0);
    // It looks at something that others may change.
    inline void note_poll(const Awaited& awaited);

    std::byte* local_at(uint32_t offset, int lane) {
        return local.data() + size_t(lane) * local_stride + offset;
    }
    // Makes room for a lane's stack up to `top`; Fault if it gets too large with what calls keep.
    void grow_stack(uint32_t top, int lane);

    // Moves the executing lanes to `pc` and lets the group's others go on behind the current
    // instruction.
    Flow jump(uint32_t pc);
    void exit_lanes(uint32_t lanes);

    // ---- what the engine, the checks and the bodies of their own kind keep here
    std::vector<Group> others;                    // groups of lanes besides `current`
    std::shared_ptr<WarpClock> clock;             // if races are looked for
    std::shared_ptr<struct RegisterWatch> watch;  // register_watch.h; null if nothing is watched
    std::shared_ptr<Turns> turns;
    std::shared_ptr<WarpTime> timed;  // null without a simulated clock
    uint64_t num_suspensions = 0;     // at mbarriers
    uint64_t polls = 0;               // loads that may be polls, failed waits, clock reads
    Awaited last_poll;
    struct FailedWait {  // by parity, of a phase that has not been seen to end since
        const void* barrier = nullptr;
        uint64_t phase = 0;
    } failed_wait;
    uint64_t progress_at_poll = 0;
    std::vector<std::byte> registers;
    std::vector<uint32_t> special;
    std::vector<std::byte> local;  // lane-major: a stack of frames per lane
    uint32_t local_stride = 0;     // bytes per lane, see `grow_stack`
    std::array<uint32_t, warp_size> stack_tops{};
    std::array<std::vector<Activation>, warp_size> call_stacks;
    std::array<std::vector<uint32_t>, warp_size> kept_registers;  // of recursive callers
    const Region* region = nullptr;                               // see `last_region`
    uint64_t region_version = 0;
    uint32_t num_registers = 0;              // per thread, as setmaxnreg sees it (0: unknown)
    std::vector<uint64_t> register_changes;  // what it asked setmaxnreg for
    uint32_t cluster_arrived = 0;  // lanes that have arrived at the cluster barrier, not waited yet
    uint64_t cluster_generation = 0;  // phase in which they arrived
};

struct NamedBarrier {
    uint32_t arrived = 0;   // threads
    uint32_t expected = 0;  // threads, 0 while nobody has arrived
    uint64_t generation = 0;
    uint32_t count = 0;  // threads whose predicate was true (barrier.red)
    uint32_t lanes = 0;  // threads that have arrived, without the missing ones of a last warp
    uint32_t result_count = 0, result_threads = 0;  // of the last completed generation
    bool counts_all = false;                        // expected: every thread that has not exited
    MeetingOrder order;
    WaitQueue waiters;
};

struct Cluster {
    std::vector<Cta*> ctas;  // by rank
    uint32_t index = 0;
    // barrier.cluster: threads that have arrived in this phase
    uint32_t arrived = 0;
    uint32_t live_threads = 0;
    uint64_t generation = 0;
    MeetingOrder order;
    WaitQueue waiters;
};

enum class Unit : int { mbarrier, bulk_copy, thread_copy, tensor_memory, matrix, count };

struct Cta {
    Machine* machine = nullptr;
    Grid* grid = nullptr;
    Cluster* cluster = nullptr;
    uint32_t index = 0;  // linear in the grid
    uint32_t cluster_rank = 0;
    uint32_t live_threads = 0;
    std::vector<std::unique_ptr<Warp>> warps;
    SmTime* sm = nullptr;  // where it runs; null without a simulated clock
    GpuTime* gpu = nullptr;

    // Shared memory, indexed by shared offset (so 0..0x3ff are not used). `shadow` has one byte per
    // byte.
    std::byte* shared = nullptr;
    uint32_t shared_end = 0;  // first offset past the end
    std::vector<std::byte> shared_storage;
    std::vector<uint8_t> shadow;  // 1: written, 2: part of an mbarrier object
    // Last accesses, for races: of shared memory by 128 bytes, of tensor memory by column and
    // quadrant.
    std::vector<Block> blocks;
    std::vector<Cell> tensor_cells;

    NamedBarrier barriers[16];
    WaitQueue mbarrier_waiters;  // wake it when any mbarrier of this CTA completes a phase
    WaitQueue bulk_waiters;      // wake it when a bulk group of a thread of this CTA moves on
    WaitQueue tmem_waiters;  // wake it when tensor memory is given back or async tcgen05 work ends
    WaitQueue register_waiters;     // setmaxnreg.inc
    uint32_t launch_registers = 0;  // per thread, 0 if the module does not say
    int64_t free_registers = 0;     // setmaxnreg pool

    // State of functional units, by `Unit`; created by them on first use.
    std::shared_ptr<void> units[size_t(Unit::count)];

    // Threads have exited: barriers that wait for nobody else complete.
    void threads_exited();

    // Throws unless these bytes of its shared memory are there. `what` words the error.
    void check_range(uint32_t offset, uint32_t bytes, const char* what) const;
    // Checked access to this CTA's shared memory by offset.
    std::byte* shared_at(uint32_t offset, uint32_t bytes, Access access, const char* what);
};

// A module's .global and .const variables as one rank has them.
struct ModuleMemory {
    std::vector<std::byte> storage;
    std::map<std::string, uint64_t> addresses;
};

struct Rank {
    uint32_t index = 0;
    RegionTable memory;
    std::map<const Module*, ModuleMemory> modules;
    // What kernels got from malloc, by address. Storage that was freed is kept, so that no address
    // comes twice.
    std::map<uint64_t, std::unique_ptr<std::byte[]>> heap;
    std::vector<std::unique_ptr<std::byte[]>> freed;
};

struct Grid {
    Machine* machine = nullptr;
    Rank* rank = nullptr;
    const Program* program = nullptr;
    uint32_t id = 0;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t num_threads = 0, num_warps = 0;  // per CTA
    uint32_t num_ctas = 0, next_cta = 0, live_ctas = 0;
    uint32_t dynamic_shared_bytes = 0;
    uint32_t num_registers = 0;  // per thread at the start; 0: what the compiler may use
    // By cluster rank: addresses of shared variables differ.
    std::vector<std::vector<std::byte>> constants;
    std::byte* parameters = nullptr;
    std::vector<std::byte> parameter_storage;
    std::unique_ptr<std::array<uint32_t, 4>> workspace;  // of a barrier over the whole grid
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Cluster>> clusters;
    Grid* previous = nullptr;         // starts when that one has ended
    std::shared_ptr<const View> end;  // all that happened before its end, once it has come
    bool has_ended() const { return next_cta == num_ctas && live_ctas == 0; }
    std::vector<WarpRole> roles;  // names for messages
    NameMap shared_names;         // of arrays in dynamic shared memory
};

struct Where {  // of an instruction, kept with asynchronous work for messages
    const Grid* grid = nullptr;
    const Program* program = nullptr;
    uint32_t pc = 0, cta = 0, warp = 0;
    bool operator==(const Where&) const = default;
};

struct AsyncOperation;  // engine.h

// What a machine does for instruction bodies, functional units and checks.
struct Machine {
    bool checks = true;
    std::shared_ptr<RaceDetector> races;  // while a run with checks goes on, else none
    bool strict_tcgen05 = false;          // PTX's canonical patterns and addresses are asked for
    bool hopper_fp8_sums = false;         // wgmma drops low bits of FP8 sums as an H200 does
    uint64_t seed = 0;
    uint64_t steps = 0;                // warp instructions so far
    WaitQueue sleepers;                // nanosleep
    Timing* timing = nullptr;          // the simulated clock, if there is one
    bool leaves_out_products = false;  // of matrices: only time is asked for

    // What a check found that execution does not depend on: thrown, or collected. `text` makes the
    // message; `other` is the instruction besides the one that runs, if there is one; `fill` says
    // of the finding what is known besides.
    template <class Text, class Fill = void (*)(Finding&)>
    void find(FaultKind kind, Text text, Place other = {}, Fill fill = [](Finding&) {}) {
        static const char check = 0;  // one for each check, since each has a text of its own type
        find_by(&check, kind, text, other, fill);
    }
    // The same, and of which check.
    template <class Text, class Fill>
    void find_by(const void* check, FaultKind kind, Text text, Place other, Fill fill) {
        if (collects_findings && !findings.is_new(check, place(), other)) return;
        Finding finding;
        finding.kind = kind;
        finding.text = text();
        fill(finding);
        report(std::move(finding));
    }
    // Whether a check has found something at these two instructions.
    bool has_found(const void* check, Place other) {
        return findings.is_known(check, place(), other);
    }
    void report(Finding finding);
    // Work that completes later, at a moment that the seed chooses. Operations with the same
    // non-zero key complete in the order in which they were enqueued; key 0 has no order.
    // `complete` may throw Fault and may enqueue more. at: the moment on the simulated clock, which
    // asks for none where there is none.
    void enqueue_async(Warp& issuer, const char* kind, uint64_t order_key,
                       std::function<void()> complete, int64_t at = 0);
    // The same for a copy of `bytes` bytes to shared memory: of these rows, address and length.
    void enqueue_load(Warp& issuer, const char* kind,
                      const std::vector<std::pair<uint64_t, uint32_t>>& rows, uint64_t bytes,
                      std::function<void()> complete);
    // A fresh key, never equal to another one.
    uint64_t new_order_key() { return ++last_order_key; }
    void wake(WaitQueue& queue);
    void wake(WaitQueue& queue, uint32_t mbarrier);  // of those that wait for it
    // Something changed that others may wait for: memory, a barrier's phase.
    void note_progress() { ++progress; }
    uint64_t now_ns() const;             // %globaltimer
    uint64_t now_cycles(Warp& w) const;  // %clock64
    bool is_running(const Warp& w) const { return running == &w; }
    Where here() const;   // the instruction that runs or completes
    Place place() const;  // the same

 protected:
    friend struct Warp;
    Machine() = default;
    ~Machine() = default;
    std::string context() const;     // `here` in words
    bool collects_findings = false;  // rather than stop at the first one
    Findings findings;               // since the machine was made
    uint64_t last_order_key = 0;
    uint64_t progress = 0;
    const Warp* running = nullptr;               // now, or none
    const AsyncOperation* completing = nullptr;  // now, or none
    bool real_clock = false;
    uint64_t virtual_ns = 1'000'000'000'000ull;
};

inline void Warp::note_poll(const Awaited& awaited) {
    last_poll = awaited;
    progress_at_poll = machine->progress;
}

inline const Region* Warp::last_region() const {
    return region_version == grid->rank->memory.version() ? region : nullptr;
}
inline const Region* Warp::find_region(uint64_t address) {
    const Region* last = last_region();
    if (!last || address - last->address >= last->size) {
        const RegionTable& table = grid->rank->memory;
        region = last = table.find(address);
        region_version = table.version();
    }
    return last;
}

std::string describe_source(const Program& program, int index);
std::string ptx_of(const Program& program, uint32_t pc);  // the line of the instruction
std::string describe_instruction(const Program& program, uint32_t pc);
std::string describe(const Where& where, int lane);
std::string describe_site(const Where& where);  // CTA, warp and source line

}  // namespace deep_moe::emulator
