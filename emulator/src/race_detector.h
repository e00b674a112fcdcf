// Finds data races: two accesses to one place, one of them a write, that nothing orders. It looks
// at the order that the program asks for, not at what happened to come first, so that one run tells
// of most races, whatever its schedule.
//
// **Agents and moments.** Who accesses memory is an *agent*: a warp; the tcgen05.ld and .st of a
// warp; the tcgen05 operations of a thread; the reads and the writes of a thread's bulk groups; the
// wgmma groups of a warp; an mbarrier, for the bytes that copies bring in its phases. Each agent
// counts *moments*. A warp's go on at every release; what completes together and is waited for
// together is one moment of the others, so that a wait says exactly what it waited for. Every
// access leaves a `Record` (agent, moment, lane, how) in the `Cell` of the word that it touches:
// the last write, and the reads since.
//
// **Clocks and views.** A `Clock` says of each agent up to which moment its accesses come before
// whoever holds the clock. Two accesses are ordered if the later one's clock covers the earlier
// one's record. A `View` is the clocks that one holder needs, because order alone is not enough for
// every kind of access:
//   seen           ordinary accesses
//   async_shared,  accesses through the async proxy: what lies before a fence.proxy.async
//   async_global
//   tensor         tensor memory: finished tcgen05 operations behind their fences
//   overwritable   reads that are over, so that copies may overwrite what they read
// Lanes have views, and so have barriers, mbarriers and words in memory that were written with
// release. To release is to join one's view into theirs, to acquire is to join theirs into one's
// own.
//
// **Proxies.** An asynchronous access (bulk and tensor copies, wgmma, tcgen05) takes the view of
// its issuer at the issue (`Issue`). It needs a fence.proxy.async somewhere between an ordinary
// access and itself, by the writer or by whoever comes after it; ordinary accesses need none behind
// it once they have waited for it.
//
// **Lanes.** Lanes of a warp share its clock, and as a rule what they know: a `LaneOrder` is what
// lanes with one history know, and there is one for the whole warp unless some lanes alone have
// waited, acquired or fenced since bar.warp.sync or a wider barrier brought all together. What a
// lane releases is its own accesses and what all lanes did before the last such barrier. Where
// another lane has accessed memory since, the releasing lane gets an agent of its own, which shares
// the warp's moments.
//
// **Not a race.** Relaxed, volatile and atomic accesses of both sides whose scopes reach each
// other; lanes that store the same value by one instruction.
//
// **tcgen05 without its fences.** PTX's canonical patterns put tcgen05 fences around relaxed
// mbarrier operations. Where a release and an acquire order finished operations (committed, or
// waited for by tcgen05.wait), CUTLASS leaves the fences out, and PTX says that the usual ways to
// synchronize hold for tcgen05 too. So a release stands for fence::before_thread_sync of finished
// operations and an acquire for fence::after_thread_sync, unless the machine is strict.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"
#include "mbarrier.h"

namespace deep_moe::emulator {

enum class Scope : uint8_t { cta, cluster, gpu, sys };
constexpr size_t num_scopes = 4;

// One access. Moments start at 1, so that zero bits mean none.
struct Record {
    uint64_t bits = 0;
    uint32_t site = 0;

    static constexpr uint32_t async = 1, strong = 2;  // flags; bits 2..3: scope of a strong one
    Record() = default;
    Record(uint64_t bits, uint32_t site) : bits(bits), site(site) {}
    Record(uint32_t agent, uint32_t moment, uint32_t lane, uint32_t flags, uint32_t site)
        : bits(uint64_t(moment) << 32 | uint64_t(agent) << 12 | lane << 4 | flags), site(site) {}
    uint32_t moment() const { return uint32_t(bits >> 32); }
    static constexpr uint32_t max_agent = 0xfffff;
    uint32_t agent() const { return uint32_t(bits >> 12) & max_agent; }
    uint32_t lane() const { return uint32_t(bits >> 4) & 0xff; }
    bool is_async() const { return bits & async; }
    bool is_strong() const { return bits & strong; }
    Scope scope() const { return Scope(bits >> 2 & 3); }
};

// What lanes with one history know.
struct LaneOrder {
    std::shared_ptr<View> view = std::make_shared<View>();
    uint64_t last_word = 0, last_word_version = 0;

    View& change() {
        if (view.use_count() > 1) view = std::make_shared<View>(*view);
        return *view;
    }
};

// What one lane's fences and relaxed accesses make together. It is the lane's alone: a fence and
// the access that it belongs to are of one thread.
struct LaneFences {
    struct Fenced {  // what a later relaxed write releases
        std::shared_ptr<const View> view;
        uint32_t moment = 0;  // the lane's own accesses before it, too
        bool alone = false;   // no other lane was active
    };
    std::array<Fenced, num_scopes> fenced;  // by scope: a wide fence is a narrow one, too
    // Released views read without acquire, by the scope that a fence needs to acquire them.
    std::array<std::shared_ptr<const View>, num_scopes> relaxed_reads;
    uint64_t last_word = 0, last_word_version = 0;
};

// The clocks of one warp.
struct WarpClock {
    uint32_t agent = 0;
    uint32_t now = 1;
    uint32_t synced = 1;  // what lanes did before this moment is ordered for all of them
    uint32_t met = 1;     // the same of a last instruction that the whole warp had to execute
    uint32_t active = 0;  // lanes that accessed memory at `synced` or later
    // Of a lane's own accesses since then: up to which moment its fences cover them.
    struct Own {
        uint32_t async_shared = 0, async_global = 0;  // fence.proxy.async
    } own[warp_size];
    std::unique_ptr<LaneFences[]> fences;  // by lane, once one is needed
    // The last relaxed read by scope, which the next lane may repeat.
    struct RelaxedRead {
        uint64_t key = 0, version = 0;
        std::shared_ptr<const View> before, after;
    } relaxed_read[num_scopes];
    std::vector<LaneOrder> orders = std::vector<LaneOrder>(1);
    std::array<uint8_t, warp_size> order_of = {};
    std::array<uint32_t, warp_size> lane_agents = {};  // 0: none yet
    struct Arrival {
        const Mbarrier* barrier = nullptr;
        uint32_t now = 0;  // behind it
    } last_arrival;
    struct Split {  // of the last lane that read a word for itself
        uint64_t key = 0, version = 0;
        uint32_t now = 0;
        uint8_t from = 0, lane = 0;
    } last_split;
    uint32_t barrier_inits_fenced = 0;  // fence.mbarrier_init covers what came before this moment
    uint32_t loads = 0, stores = 0;     // agents of tcgen05.ld and .st, 0 until used
    uint32_t num_loads = 0, num_stores = 0;
    uint32_t matrix = 0, num_matrix_groups = 0;                 // agent of wgmma groups
    std::shared_ptr<Clock> tensor = std::make_shared<Clock>();  // before its next tcgen05 ones
    Clock completed;          // own tcgen05.ld and .st that were waited for
    uint32_t first_site = 0;  // of the program

    LaneFences& fences_of(int lane) {
        if (!fences) fences = std::make_unique<LaneFences[]>(warp_size);
        return fences[size_t(lane)];
    }
    LaneOrder& order(int lane) { return orders[order_of[size_t(lane)]]; }
    const LaneOrder& order(int lane) const { return orders[order_of[size_t(lane)]]; }
};

// Who issued an asynchronous operation, and what came before it.
struct Issue {
    std::shared_ptr<const View> view;
    std::shared_ptr<const Clock> tensor;
    const Clock* completed = nullptr;  // of a tcgen05.ld or .st: the warp's own
    const Cta* cta = nullptr;
    uint32_t warp_agent = 0, now = 0, synced = 0, lane = 0, site = 0;
    uint32_t own_async_shared = 0, own_async_global = 0;
    // cp.async, st.async, red.async: asynchronous, but in the generic proxy.
    bool is_generic = false;
    uint32_t flags = 0;  // of its records, besides that they are asynchronous
};

// The order that one mbarrier carries.
struct BarrierOrder {
    uint32_t agent = 0;                         // bytes that copies bring
    uint32_t initializer = 0, initialized = 0;  // warp agent and moment of mbarrier.init
    int initializer_lane = 0;
    const WarpClock* initializer_clock = nullptr;
    View arriving, complete;
};

class RaceDetector {
 public:
    // watches_global: false where other processes take part, whose accesses nobody sees.
    RaceDetector(Machine& machine, bool watches_global);

    void add_warp(Warp& w);
    // The grid has ended. That orders all it did, of both proxies, before launches that follow it.
    void end(Grid& grid);
    // warp: the agent of the warp whose thread it belongs to, if it belongs to one.
    uint32_t new_agent(const Cta& cta, const char* what, uint32_t number, uint32_t warp = 0);

    // ---- order
    void sync_lanes(Warp& w, uint32_t lanes);                    // bar.warp.sync
    void meet_lanes(Warp& w) { w.clock->met = ++w.clock->now; }  // .sync of the whole warp
    void arrive(Warp& w, MeetingOrder& meeting);
    void complete(MeetingOrder& meeting);
    void leave(Warp& w, const MeetingOrder& meeting);
    void arrive_relaxed(Warp& w, MeetingOrder& meeting);
    // The word at `key` (host address) is written or read with this strength.
    void write_word(Warp& w, int lane, uint64_t key, Scope scope, bool releases, bool is_update);
    void read_word(Warp& w, int lane, uint64_t key, Scope scope, bool acquires);
    void fence(Warp& w, Scope scope, bool releases, bool acquires);
    void fence_async(Warp& w, bool shared, bool global);
    void fence_barrier_inits(Warp& w);

    // ---- mbarriers
    BarrierOrder& order_of(Cta& cta, const Mbarrier& barrier);
    void init_barrier(Warp& w, int lane, Cta& cta, const Mbarrier& barrier);
    void check_initialized(Warp& w, int lane, Cta& cta, const Mbarrier& barrier);
    void arrive(Warp& w, int lane, Cta& cta, const Mbarrier& barrier, bool at_cluster_scope);
    void arrive_relaxed(Warp& w, int lane, Cta& cta, const Mbarrier& barrier);
    // The arrival that asynchronous work of `agent` up to `moment` brings.
    void arrive_for(Cta& cta, const Mbarrier& barrier, uint32_t agent, uint32_t moment);
    void phase_complete(Cta& cta, const Mbarrier& barrier);
    void wait(Warp& w, uint32_t lanes, Cta& cta, const Mbarrier& barrier, bool acquires);

    // ---- accesses of warps
    // Whether others can reach this memory and change it, which is what is looked at.
    bool access(Warp& w, Space space, uint64_t address, uint32_t bytes, Access access, int lane,
                uint32_t flags = 0);
    void shared_access(Warp& w, Cta& owner, uint32_t offset, uint32_t bytes, Access access,
                       int lane, uint32_t flags = 0);
    void global_access(Warp& w, uint64_t address, uint32_t bytes, Access access, int lane,
                       uint32_t flags = 0);
    // The same of all lanes, one behind the other, `bytes` each, a multiple of 4: ordinary reads,
    // or writes of `values` to `at`. The addresses are those of shared_access and global_access.
    void row_access(Warp& w, Space space, uint64_t address, uint32_t bytes,
                    const std::byte* at = nullptr, const std::byte* values = nullptr);

    // What an ordinary store is about to write, and where: until `end_store` a race with another
    // write can tell whether both write the same.
    void begin_store(const std::byte* at, const std::byte* value, uint32_t bytes) {
        store_ = {at, value, bytes};
    }
    void end_store() { store_ = {}; }

    // Two lanes have stored different values to one address by one instruction.
    void lanes_differ(Warp& w, Space space, uint64_t address, int first, int second);

    // A load that nobody may write for as long as the kernel runs, before it or after.
    void check_unwritten(Warp& w, uint64_t address, uint32_t bytes, int lane);

    // ---- asynchronous accesses: those between `begin` and `end`
    std::shared_ptr<const Issue> issue(Warp& w, int lane);
    std::shared_ptr<const Issue> issue_generic(Warp& w, int lane, uint32_t flags = 0);
    void begin(const Issue& issue, uint32_t agent, uint32_t moment);
    void end() { issue_ = nullptr; }
    void async_shared_access(Cta& cta, uint32_t offset, uint32_t bytes, Access access);
    void async_global_access(uint64_t address, uint64_t bytes, Access access);
    void tensor_access(Cta& cta, uint32_t quadrants, uint32_t column, uint32_t count,
                       Access access);
    bool is_active() const { return issue_ != nullptr; }
    void forget_tensor_memory(Cta& cta, uint32_t column, uint32_t count);

    // ---- tcgen05
    // Arrival of a commit: what the issuing thread's operations up to `moment` did.
    void commit(const Issue& issue, uint32_t agent, uint32_t moment, Cta& cta,
                const Mbarrier& barrier);
    void wait_loads(Warp& w);
    void wait_stores(Warp& w);
    void fence_before(Warp& w);
    void fence_after(Warp& w);
    // Begins the accesses of a tcgen05.ld (or .st).
    void begin_transfer(Warp& w, bool is_load);
    // Lanes waited until `moment` of the queue of bulk groups, wgmma groups, ... `agent`.
    void waited_for(Warp& w, uint32_t lanes, uint32_t agent, uint32_t moment);

 private:
    struct Store {
        const std::byte *at = nullptr, *value = nullptr;
        uint32_t bytes = 0;
    } store_;
    struct Agent {
        const Cta* cta;
        const Warp* warp;
        const char* what;
        uint32_t number;
        uint32_t issuer;  // agent of the warp, 0: none
    };
    struct Location {  // for messages
        Space space;
        uint64_t address;
        const Cta* cta;
    };
    struct Word {  // what was released to it, by how far that reaches
        View system;
        std::unordered_map<uint32_t, View> device;  // by rank; of sys scope, too
        std::unordered_map<const Cluster*, View> cluster;
        std::unordered_map<const Cta*, View> cta;
        const Cta* only = nullptr;  // the CTA that all of it is from, if there is but one
        const Cluster* only_cluster = nullptr;  // the same of the cluster
        uint64_t version = 0;
    };

    uint32_t site_of(const Warp& w);
    template <class F>
    void for_orders(Warp& w, uint32_t lanes, F f);
    uint32_t lane_agent(Warp& w, int lane);
    void raise_own(Warp& w, Clock& clock, uint32_t lanes, uint32_t moment);
    void raise_fenced(Warp& w, Clock& clock, uint32_t lanes, uint32_t WarpClock::Own::* fenced);
    void release(Warp& w, const LaneOrder& order, uint32_t lanes, View& into);
    void release_fenced(Warp& w, int lane, Scope scope, View& into);
    void release_to(const Warp& w, Word& word, Scope scope, const View& released);
    void read_relaxed(WarpClock& c, int lane, Scope scope, uint64_t key, uint64_t version,
                      const View& released);
    void acquire_fenced(Warp& w, Scope scope);
    bool covers(const Clock& clock, const Record& record) const;
    void release_tensor(WarpClock& c, LaneOrder& order);
    void acquire_tensor(WarpClock& c, const LaneOrder& order);
    template <class Ordered>
    bool was_read_before(const Cell& cell, const Ordered& ordered) const;
    template <class Ordered>
    void touch(Cell& cell, const Record& record, bool is_write, const Ordered& ordered,
               const Location& at);
    template <class Ordered>
    uint32_t touch_alike(Cell* cells, uint32_t count, const Record& record, bool is_write,
                         const Ordered& ordered, const Location& at);
    template <class Ordered>
    void touch_range(Block* blocks, uint64_t first, uint64_t count, const Record& record,
                     bool is_write, const Ordered& ordered, Location at);
    template <class Ordered>
    void touch_stretch(Block& block, int which, const Record& record, bool is_write,
                       const Ordered& ordered, const Location& at);
    bool cut(Block& block, uint32_t begin, uint32_t end);
    template <class Ordered>
    void touch_cells(Cell* cells, uint64_t first, uint64_t count, const Record& record,
                     bool is_write, const Ordered& ordered, Location at);
    Cell* cells_of(Block& block);
    Record last_write(const Block& block, uint64_t byte) const;
    struct Row;
    bool try_row(Block& block, const Row& row, uint32_t first_lane, uint32_t begin, uint32_t end);
    bool try_cells(Cell* cells, uint32_t count, const Row& row, uint64_t bits);
    void warp_access(Warp& w, Block* blocks, uint64_t first, uint32_t bytes, Access access,
                     int lane, uint32_t flags, const Location& at);
    uint32_t new_reads();
    void drop_reads(uint32_t index);
    uint32_t add_read(uint32_t from, const Record& read);
    bool both_strong(const Record& a, const Record& b) const;
    bool before_warp(const WarpClock& c, const Record& old, const Record& now, bool old_is_write,
                     bool is_write) const;
    bool is_counted(uint32_t agent) const;  // whether it is the bytes that an mbarrier counts
    bool before_issue(const Record& old, bool old_is_write, bool is_write, bool is_global) const;
    Place instruction_of(const Record& record) const;
    std::string access_of(const Record& record, bool is_write) const;
    std::pair<uint32_t, int> thread_of(const Record& record) const;
    Involved involved(const Record& record, bool is_write) const;
    std::string describe(const Record& record, bool is_write) const;
    std::string race_text(const Record& old, bool old_is_write, const Record& record, bool is_write,
                          const Location& at, const char* more) const;
    void report(const Record& old, bool old_is_write, const Record& record, bool is_write,
                const Location& at);
    Block* page(uint64_t number);
    Block* shared_blocks(Cta& cta);

    Machine& machine_;
    bool watches_global_;
    std::vector<Agent> agents_;
    std::vector<std::pair<uint32_t, const Program*>> sites_;  // first site of each program
    uint32_t next_site_ = 1;
    struct Reads {  // further ones of cells
        std::vector<Record> records;
        uint32_t owners = 0;
    };
    std::vector<Reads> reads_;
    std::vector<uint32_t> free_reads_;
    struct Past {  // of the cells that the access `record` has touched
        Record record;
        bool is_write = false, is_read_ordered = false;
        Space space = Space::generic;
        uint64_t ordered_write = 0, read = 0;
        uint32_t reads_before = 0,
                 reads_after = 0;  // a write: only those looked at, in reads_after
        uint64_t issue = 0;        // of an asynchronous access
    } past_;
    std::vector<std::array<Cell, 4>> split_cells_;
    std::unordered_map<uint64_t, std::unique_ptr<Block[]>> pages_;
    struct PageEntry {
        uint64_t number = ~0ull;
        Block* blocks = nullptr;
    };
    std::array<PageEntry, 16> last_pages_;  // by the low bits of their numbers
    std::unordered_map<uint64_t, Word> words_;
    uint64_t last_version_ = 0;
    std::unordered_map<const Mbarrier*, BarrierOrder> barriers_;

    const Issue* issue_ = nullptr;
    Record issue_record_;
    Issue transfer_;  // of the tcgen05.ld or .st that runs
};

// Begins asynchronous accesses and ends them, also when one of them is an error.
class AsyncAccesses {
 public:
    AsyncAccesses(RaceDetector* races, const std::shared_ptr<const Issue>& issue, uint32_t agent,
                  uint32_t moment)
        : races_(races) {
        if (races_) races_->begin(*issue, agent, moment);
    }
    ~AsyncAccesses() {
        if (races_) races_->end();
    }
    AsyncAccesses(const AsyncAccesses&) = delete;

 private:
    RaceDetector* races_;
};

}  // namespace deep_moe::emulator
