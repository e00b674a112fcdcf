// Barriers of CTAs and clusters, memory fences.
#include "lanes.h"
#include "race_detector.h"

namespace deep_moe::emulator {

namespace {

// ---- CTA barriers

void complete(Machine& machine, NamedBarrier& b) {
    b.result_count = b.count;
    b.result_threads = b.lanes;
    b.arrived = b.expected = b.count = b.lanes = 0;
    b.counts_all = false;
    ++b.generation;
    if (machine.races) machine.races->complete(b.order);
    machine.note_progress();
    machine.wake(b.waiters);
}

// Threads of warps that have not ended; a warp counts as a whole.
uint32_t threads_of_live_warps(const Cta& cta) {
    uint32_t threads = 0;
    for (const auto& w : cta.warps) threads += w->live ? warp_size : 0;
    return threads;
}

uint32_t barrier_index(Warp& w, const Operand& o) {
    uint32_t index = w.uniform<uint32_t>(o);
    if (index >= 16)
        throw Fault(FaultKind::invalid_operation, format("barrier %u; there are 16", index));
    return index;
}

// The warp's arrival. expected 0: all threads of the CTA.
void arrive(Warp& w, uint32_t index, uint32_t expected, uint32_t predicate) {
    NamedBarrier& b = w.cta->barriers[index];
    bool all = expected == 0;
    if (all) expected = threads_of_live_warps(*w.cta);
    if (expected % warp_size)
        throw Fault(FaultKind::barrier_misuse,
                    format("barrier %u: thread count %u is not a multiple of %d", index, expected,
                           warp_size));
    if (b.arrived == 0) {
        b.expected = expected;
        b.counts_all = all;
    } else if (b.expected != expected) {
        throw Fault(FaultKind::barrier_misuse,
                    format("barrier %u: this warp expects %u threads, those that wait expect %u",
                           index, expected, b.expected));
    }
    b.arrived += warp_size;
    b.lanes += uint32_t(__builtin_popcount(w.exec));
    b.count += uint32_t(__builtin_popcount(predicate & w.exec));
    if (w.machine->races) w.machine->races->arrive(w, b.order);
    if (b.arrived >= b.expected) complete(*w.machine, b);
}

// operands: barrier, count (optional)
Flow barrier_sync(Warp& w, const Op& op) {
    uint32_t index = barrier_index(w, op.operands[0]);
    NamedBarrier& b = w.cta->barriers[index];
    if (!w.current.token) {
        w.current.token = b.generation + 1;
        arrive(w, index, op.num_operands > 1 ? w.uniform<uint32_t>(op.operands[1]) : 0, 0);
    }
    if (b.generation >= w.current.token) {
        if (w.machine->races) w.machine->races->leave(w, b.order);
        return Flow::next;
    }
    return w.block(b.waiters, {Awaited::Kind::named_barrier, w.cta, index});
}

Flow barrier_arrive(Warp& w, const Op& op) {
    uint32_t expected = w.uniform<uint32_t>(op.operands[1]);
    if (!expected) throw Fault(FaultKind::barrier_misuse, "barrier.arrive needs a thread count");
    arrive(w, barrier_index(w, op.operands[0]), expected, 0);
    return Flow::next;
}

enum Reduction : uint64_t { reduce_popc, reduce_and, reduce_or };

// operands: d, barrier, predicate, count (optional)
Flow barrier_reduce(Warp& w, const Op& op) {
    uint32_t index = barrier_index(w, op.operands[1]);
    NamedBarrier& b = w.cta->barriers[index];
    if (!w.current.token) {
        w.current.token = b.generation + 1;
        uint32_t expected = op.num_operands > 3 ? w.uniform<uint32_t>(op.operands[3]) : 0;
        arrive(w, index, expected, w.predicate(op.operands[2]));
    }
    if (b.generation < w.current.token)
        return w.block(b.waiters, {Awaited::Kind::named_barrier, w.cta, index});
    if (w.machine->races) w.machine->races->leave(w, b.order);
    if (op.aux == reduce_popc) {
        auto d = w.out<uint32_t>(op.operands[0]);
        w.for_each_lane([&](int lane) { d.set(lane, b.result_count); });
    } else {
        bool result = op.aux == reduce_or ? b.result_count > 0 : b.result_count == b.result_threads;
        w.set_predicate(op.operands[0], result ? full_mask : 0);
    }
    return Flow::next;
}

void decode_barrier(Decoder& d) {
    d.take("cta");
    d.take("aligned");
    std::string_view kind = d.take_any({"sync", "arrive", "red"});
    d.op.meeting = Meeting::whole_warp;
    if (kind == "sync") {
        d.expect_operands(1, 2);
        std::vector<Operand> operands{d.source(0, Type::u32)};
        if (d.num_operands() > 1) operands.push_back(d.source(1, Type::u32));
        d.emit(barrier_sync, operands);
    } else if (kind == "arrive") {
        d.expect_operands(2);
        d.emit(barrier_arrive, {d.source(0, Type::u32), d.source(1, Type::u32)});
    } else if (kind == "red") {
        std::string_view operation = d.take_any({"popc", "and", "or"});
        Type type = d.take_type({Type::u32, Type::pred});
        d.expect_operands(3, 4);
        bool has_count = d.num_operands() > 3;
        std::vector<Operand> operands{d.destination(0, type), d.source(1, Type::u32),
                                      d.source(has_count ? 3 : 2, Type::pred)};
        if (has_count) operands.push_back(d.source(2, Type::u32));
        d.emit(barrier_reduce, operands,
               operation == "popc"  ? reduce_popc
               : operation == "and" ? reduce_and
                                    : reduce_or);
    } else {
        d.unsupported("only sync, arrive and red");
    }
}

// ---- cluster barrier

void complete_if_all(Machine& machine, Cluster& c) {
    if (c.arrived == 0 || c.arrived < c.live_threads) return;
    c.arrived = 0;
    ++c.generation;
    if (machine.races) machine.races->complete(c.order);
    machine.note_progress();
    machine.wake(c.waiters);
}

// aux: whether it releases
Flow cluster_arrive(Warp& w, const Op& op) {
    Cluster& c = *w.cta->cluster;
    if (w.cluster_arrived & w.exec)
        throw Fault(FaultKind::barrier_misuse, "barrier.cluster.arrive twice without a wait",
                    __builtin_ctz(w.cluster_arrived & w.exec));
    w.cluster_arrived |= w.exec;
    w.cluster_generation = c.generation;
    c.arrived += uint32_t(__builtin_popcount(w.exec));
    if (w.machine->races)
        op.aux ? w.machine->races->arrive(w, c.order)
               : w.machine->races->arrive_relaxed(w, c.order);
    complete_if_all(*w.machine, c);
    return Flow::next;
}

Flow cluster_wait(Warp& w, const Op&) {
    Cluster& c = *w.cta->cluster;
    if (w.exec & ~w.cluster_arrived)
        throw Fault(FaultKind::barrier_misuse, "barrier.cluster.wait without an arrive",
                    __builtin_ctz(w.exec & ~w.cluster_arrived));
    if (c.generation == w.cluster_generation)
        return w.block(c.waiters, {Awaited::Kind::cluster_barrier, w.cta});
    w.cluster_arrived &= ~w.exec;
    if (w.machine->races) w.machine->races->leave(w, c.order);
    return Flow::next;
}

void decode_cluster_barrier(Decoder& d) {
    std::string_view kind = d.take_any({"arrive", "wait"});
    const bool relaxed = d.take("relaxed");
    d.ignore({"release", "acquire"});
    if (d.take("aligned")) d.op.meeting = Meeting::whole_warp;
    d.expect_operands(0);
    d.emit(kind == "arrive" ? cluster_arrive : cluster_wait, {}, !relaxed);
}

// ---- fences: one process runs memory operations in order, asynchronous ones excepted, and there
// fences only tell the checks what is ordered. Other processes may run other ranks: for them the
// host's processor must keep the order, too, as few do by themselves.

constexpr uint64_t releases = 1 << 8, acquires = 1 << 9;

// aux: scope and order
Flow fence(Warp& w, const Op& op) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (w.machine->races)
        w.machine->races->fence(w, Scope(op.aux & 0xff), op.aux & releases, op.aux & acquires);
    return Flow::next;
}

constexpr uint64_t covers_shared = 1, covers_global = 2;

Flow fence_async(Warp& w, const Op& op) {
    if (w.machine->races)
        w.machine->races->fence_async(w, op.aux & covers_shared, op.aux & covers_global);
    return Flow::next;
}

Flow fence_barrier_inits(Warp& w, const Op&) {
    if (w.machine->races) w.machine->races->fence_barrier_inits(w);
    return Flow::next;
}

Flow nothing(Warp&, const Op&) {
    return Flow::next;
}

Scope take_scope(Decoder& d) {
    if (d.take("cta")) return Scope::cta;
    if (d.take("cluster")) return Scope::cluster;
    if (d.take("gpu") || d.take("gl")) return Scope::gpu;
    d.take("sys");
    return Scope::sys;
}

void decode_fence(Decoder& d) {
    if (d.take("mbarrier_init")) {
        d.ignore({"release", "cluster"});
        d.emit(fence_barrier_inits, {});
        return;
    }
    if (d.take("proxy")) {
        const bool is_async = d.take("async");
        const bool global = d.take("global");
        const bool shared = d.take("shared::cta") | d.take("shared::cluster");
        d.ignore({"alias", "async::generic", "async.global", "tensormap::generic", "release",
                  "acquire", "cta", "cluster", "gpu", "sys", "sync_restrict::shared::cta",
                  "sync_restrict::shared::cluster"});
        const uint64_t all = covers_shared | covers_global;
        if (is_async)
            d.emit(fence_async, {}, shared ? covers_shared : global ? covers_global : all);
        else
            d.emit(nothing, {});
        return;
    }
    const uint64_t order = d.take("acquire")   ? acquires
                           : d.take("release") ? releases
                                               : releases | acquires;
    d.ignore({"sc", "acq_rel", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
    d.emit(fence, {}, uint64_t(take_scope(d)) | order);
}

void decode_membar(Decoder& d) {
    if (d.take("proxy")) {
        d.ignore({"alias", "async"});
        d.emit(nothing, {});
        return;
    }
    const Scope scope = take_scope(d);
    d.expect_operands(0);
    d.emit(fence, {}, uint64_t(scope) | releases | acquires);
}

}  // namespace

void Cta::threads_exited() {
    for (NamedBarrier& b : barriers) {
        if (!b.counts_all || !b.arrived) continue;
        b.expected = threads_of_live_warps(*this);
        if (b.expected && b.arrived >= b.expected) complete(*machine, b);
    }
    complete_if_all(*machine, *cluster);
}

InstructionTable barrier_instructions() {
    return {
        {"bar", decode_barrier, "CTA barrier; sync, arrive, red"},
        {"barrier", decode_barrier, "CTA barrier; sync, arrive, red"},
        {"barrier.cluster", decode_cluster_barrier, "cluster barrier; arrive, wait"},
        {"fence", decode_fence,
         "memory fence, proxy fence, fence of mbarrier.init: looked at by the race detector"},
        {"membar", decode_membar, "memory fence, looked at by the race detector"},
    };
}

}  // namespace deep_moe::emulator
