// cp.async without .bulk: copies of a few bytes per thread from global to shared memory, in groups
// or counted by an mbarrier. A copy happens at a moment that the seed chooses, in the generic
// proxy.
#include <deque>
#include <map>
#include <set>

#include "async_units.h"
#include "instruction_table.h"
#include "race_detector.h"
#include "timing.h"

namespace deep_moe::emulator {
namespace {

// A thread's copies up to one of its commits or arrivals, which are complete when all copies before
// `limit` are. For the race detector they are what its warp's agent did up to `moment`: lanes copy
// together as a rule.
struct Batch {
    uint64_t limit;
    uint32_t moment;
};

struct Arrival {
    Batch batch;
    SharedPlace barrier;
};

struct CopyThread {
    std::set<uint64_t> pending;              // copies, by number
    std::deque<Batch> groups;                // committed, and not waited for
    std::deque<Arrival> arrivals;            // not made yet
    uint64_t last_copy = 0, last_limit = 0;  // of the last group

    bool is_complete(const Batch& batch) const {
        return pending.empty() || *pending.begin() >= batch.limit;
    }
};

struct CopyWarp {
    uint32_t agent = 0;   // of the race detector
    uint32_t moment = 0;  // of the last copy
};

struct CopyState {
    std::unordered_map<uint32_t, CopyThread> threads;  // by thread in the CTA
    std::unordered_map<uint32_t, CopyWarp> warps;
    uint64_t num_copies = 0;

    Batch batch(const Warp& w) { return {num_copies + 1, warps[w.index].moment}; }
    void commit(const Warp& w, CopyThread& thread) {
        thread.groups.push_back(batch(w));
        thread.last_limit = num_copies + 1;
    }
};

CopyState& copy_state(Cta& cta) {
    auto& slot = cta.units[int(Unit::thread_copy)];
    if (!slot) slot = std::make_shared<CopyState>();
    return *static_cast<CopyState*>(slot.get());
}

uint32_t agent_of(Warp& w) {
    uint32_t& agent = copy_state(*w.cta).warps[w.index].agent;
    if (!agent) agent = w.machine->races->new_agent(*w.cta, "cp.async of", w.index);
    return agent;
}

void arrive(Cta& cta, const Arrival& arrival, uint32_t agent) {
    Machine& machine = *cta.machine;
    Mbarrier& barrier = mbarrier_at(*arrival.barrier.cta, arrival.barrier.offset);
    if (machine.races && agent)
        machine.races->arrive_for(*arrival.barrier.cta, barrier, agent, arrival.batch.moment);
    arrive_at(*arrival.barrier.cta, arrival.barrier.offset, 1);
}

void finish(Cta& cta, uint32_t thread_index, uint64_t number, uint32_t agent) {
    CopyThread& thread = copy_state(cta).threads[thread_index];
    thread.pending.erase(number);
    while (!thread.arrivals.empty() && thread.is_complete(thread.arrivals.front().batch)) {
        const Arrival due = thread.arrivals.front();
        thread.arrivals.pop_front();
        arrive(cta, due, agent);
    }
}

// operands: shared address, global address, source size, whether to ignore the source; aux: size
Flow copy(Warp& w, const Op& op) {
    struct Piece {
        int lane;
        uint64_t number, source;
        uint32_t offset, source_bytes;
        std::shared_ptr<const Issue> issue;
    };
    const uint32_t bytes = uint32_t(op.aux);
    CopyState& state = copy_state(*w.cta);
    RaceDetector* races = w.machine->races.get();
    const uint32_t agent = races ? agent_of(w) : 0, moment = ++state.warps[w.index].moment;
    std::vector<Piece> pieces;
    w.for_each_lane([&](int lane) {
        Piece piece{
            lane,   0, w.address(op.operands[1], lane), 0, w.in<uint32_t>(op.operands[2])[lane],
            nullptr};
        if (op.num_operands > 3 && (w.predicate(op.operands[3]) >> lane & 1))
            piece.source_bytes = 0;
        if (piece.source_bytes > bytes)
            throw Fault(FaultKind::invalid_operation, "cp.async copies more bytes than its size",
                        lane);
        const SharedPlace to =
            shared_place(w, Space::shared, w.address(op.operands[0], lane), lane);
        piece.offset = to.offset;
        const uint64_t source = piece.source;
        if (to.offset % bytes || source % bytes)
            throw Fault(FaultKind::misaligned,
                        format("cp.async of %u bytes from 0x%llx to shared offset 0x%x: both must "
                               "be multiples of its size",
                               bytes, static_cast<unsigned long long>(source), to.offset),
                        lane);
        CopyThread& thread = state.threads[thread_in_cta(w, lane)];
        piece.number = thread.last_copy = ++state.num_copies;
        thread.pending.insert(piece.number);
        if (races) piece.issue = races->issue_generic(w, lane);
        pieces.push_back(std::move(piece));
    });
    Cta* cta = w.cta;
    Rank* rank = w.grid->rank;
    const uint32_t first_thread = w.index * warp_size;
    bulk_state(*cta).hold(cta->machine->here());
    int64_t at = 0;
    if (Timing* timing = w.machine->timing) {
        std::vector<std::pair<uint64_t, uint32_t>> sources;
        for (const Piece& piece : pieces) sources.emplace_back(piece.source, piece.source_bytes);
        at = timing->thread_copies(w, sources);
    }
    const auto complete = [=, pieces = std::move(pieces)] {
        RaceDetector* now = cta->machine->races.get();
        for (const Piece& piece : pieces) {
            uint8_t buffer[16] = {};
            const AsyncAccesses accesses(now, piece.issue, agent, moment);
            if (piece.source_bytes) {
                RankMemory memory(*cta->machine, *rank);
                std::memcpy(buffer, memory.read(piece.source, piece.source_bytes),
                            piece.source_bytes);
            }
            std::memcpy(CtaWindow(*cta, "cp.async").write(piece.offset, bytes), buffer, bytes);
        }
        bulk_state(*cta).release(cta->machine->here());
        for (const Piece& piece : pieces)
            finish(*cta, first_thread + uint32_t(piece.lane), piece.number, agent);
        cta->machine->wake(cta->bulk_waiters);
        cta->machine->note_progress();
    };
    w.machine->enqueue_async(w, "cp.async", 0, complete, at);
    return Flow::next;
}

void decode_copy(Decoder& d) {
    const bool bypasses_l1 = d.take("cg");
    if (!bypasses_l1 && !d.take("ca")) d.invalid(".ca or .cg is missing");
    d.ignore({"shared", "shared::cta", "global", "L2::cache_hint"});
    std::string level;
    while (d.take_prefix("L2::", level)) {
    }
    if (d.num_operands() < 3) d.invalid("expected an address pair and a size");
    const uint64_t bytes = d.immediate(2);
    if (bytes != 4 && bytes != 8 && bytes != 16) d.invalid("the size must be 4, 8 or 16");
    if (bypasses_l1 && bytes != 16) d.invalid(".cg copies 16 bytes");
    std::vector<Operand> operands{d.address(0), d.address(1)};
    using Kind = ParsedOperand::Kind;
    const bool has_more = d.num_operands() > 3, has_predicate = has_more && d.is_predicate(3);
    const bool has_size = has_more && !has_predicate &&
                          (d.parsed(3).kind == Kind::immediate ||
                           (d.parsed(3).kind == Kind::reg && d.num_bits_of(3) == 32));
    operands.push_back(has_size ? d.source(3, Type::u32) : d.constant(bytes));
    if (has_predicate) operands.push_back(d.source(3, Type::pred));
    d.emit(copy, std::move(operands), bytes);
}

Flow commit_group(Warp& w, const Op&) {
    CopyState& state = copy_state(*w.cta);
    w.for_each_lane([&](int lane) { state.commit(w, state.threads[thread_in_cta(w, lane)]); });
    return Flow::next;
}

// aux: groups that may stay pending
Flow wait_group(Warp& w, const Op& op) {
    CopyState& state = copy_state(*w.cta);
    bool waits = false;
    w.for_each_lane([&](int lane) {
        const CopyThread& thread = state.threads[thread_in_cta(w, lane)];
        const size_t count = thread.groups.size();
        waits |= count > op.aux && !thread.is_complete(thread.groups[count - op.aux - 1]);
    });
    if (waits)
        return w.block(w.cta->bulk_waiters, "cp.async groups: all but %llu to be complete", op.aux);
    std::map<uint32_t, uint32_t> waited;  // lanes, by moment
    w.for_each_lane([&](int lane) {
        auto& groups = state.threads[thread_in_cta(w, lane)].groups;
        if (groups.size() <= op.aux) return;
        const auto end = groups.end() - std::ptrdiff_t(op.aux);
        waited[std::prev(end)->moment] |= 1u << lane;
        groups.erase(groups.begin(), end);
    });
    if (w.machine->races) {
        for (auto [moment, lanes] : waited)
            w.machine->races->waited_for(w, lanes, agent_of(w), moment);
    }
    return Flow::next;
}

// PTX defines it as a commit and a wait for all groups.
Flow wait_all(Warp& w, const Op& op) {
    CopyState& state = copy_state(*w.cta);
    w.for_each_lane([&](int lane) {
        CopyThread& thread = state.threads[thread_in_cta(w, lane)];
        // It runs again when it has waited, with nothing left to commit.
        if (thread.last_copy >= thread.last_limit) state.commit(w, thread);
    });
    return wait_group(w, op);
}

void decode_commit_group(Decoder& d) {
    d.expect_operands(0);
    d.emit(commit_group, {});
}
void decode_wait_group(Decoder& d) {
    d.expect_operands(1);
    d.emit(wait_group, {}, d.immediate_u32(0));
}
void decode_wait_all(Decoder& d) {
    d.expect_operands(0);
    d.emit(wait_all, {}, 0);
}

// aux: space; bit 8: the arrival is counted by the barrier already (.noinc)
Flow arrive_on_mbarrier(Warp& w, const Op& op) {
    CopyState& state = copy_state(*w.cta);
    RaceDetector* races = w.machine->races.get();
    const uint32_t agent = races ? agent_of(w) : 0;
    w.for_each_lane([&](int lane) {
        const SharedPlace at =
            shared_place(w, Space(op.aux & 0xff), w.address(op.operands[0], lane), lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        if (races) races->check_initialized(w, lane, *at.cta, barrier);
        if (!(op.aux >> 8 & 1)) barrier.add_arrival();
        CopyThread& thread = state.threads[thread_in_cta(w, lane)];
        const Arrival arrival{state.batch(w), at};
        if (thread.pending.empty())
            arrive(*w.cta, arrival, agent);
        else
            thread.arrivals.push_back(arrival);
    });
    return Flow::next;
}

void decode_arrive(Decoder& d) {
    const bool counted = d.take("noinc");
    const Space space = d.take_space();
    d.ignore({"b64"});
    d.expect_operands(1);
    d.emit(arrive_on_mbarrier, {d.address(0)}, uint64_t(space) | uint64_t(counted) << 8);
}

}  // namespace

InstructionTable copy_instructions() {
    return {
        {"cp.async", decode_copy, "copy of 4, 8 or 16 bytes from global to shared memory"},
        {"cp.async.commit_group", decode_commit_group, "closes the thread's group of cp.async"},
        {"cp.async.wait_group", decode_wait_group, "waits until all but N groups are complete"},
        {"cp.async.wait_all", decode_wait_all, "waits for all of the thread's cp.async"},
        {"cp.async.mbarrier.arrive", decode_arrive,
         "arrival when the thread's cp.async are complete, also .noinc"},
    };
}

}  // namespace deep_moe::emulator
