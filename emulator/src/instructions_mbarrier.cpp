// mbarrier.*
#include "async_units.h"
#include "instruction_table.h"
#include "race_detector.h"

namespace deep_moe::emulator {
namespace {

// aux: space in bits 0..7, the operation's variant above.
Space space_of(const Op& op) {
    return Space(op.aux & 0xff);
}

SharedPlace place(const Warp& w, const Op& op, const Operand& address, int lane) {
    return shared_place(w, space_of(op), w.address(address, lane), lane);
}

// aux
constexpr uint64_t cluster_scope = 1 << 8;
constexpr uint64_t relaxed = 1 << 9;  // neither releases nor acquires

void note(Warp& w, Mbarrier& barrier, Mbarrier::Event::Kind kind, int64_t amount) {
    if (w.machine->checks) barrier.note(kind, amount, w.machine->here());
}

constexpr size_t mbarrier_bytes = 8;

Flow init(Warp& w, const Op& op) {
    auto count = w.in<uint32_t>(op.operands[1]);
    w.for_each_lane([&](int lane) {
        SharedPlace at = place(w, op, op.operands[0], lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        if (barrier.valid) {
            w.machine->find(FaultKind::barrier_misuse, [&] {
                return "mbarrier.init of " + barrier.name +
                       ", which is in use: it needs mbarrier.inval first";
            });
        }
        barrier.init(count[lane], w.machine->checks);
        if (w.machine->checks) std::memset(at.cta->shadow.data() + at.offset, 2, mbarrier_bytes);
        if (w.machine->races) w.machine->races->init_barrier(w, lane, *at.cta, barrier);
    });
    return Flow::next;
}

Flow inval(Warp& w, const Op& op) {
    w.for_each_lane([&](int lane) {
        SharedPlace at = place(w, op, op.operands[0], lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        if (!barrier.valid) {
            w.machine->find(FaultKind::barrier_misuse, [&] {
                return "mbarrier.inval on the mbarrier " + barrier.name +
                       ", which nobody has initialized";
            });
        }
        barrier.valid = false;
        std::memset(at.cta->shadow.data() + at.offset, 0, mbarrier_bytes);
    });
    return Flow::next;
}

// What an arrival returns: the phase that it belongs to, and above it the arrivals that were
// pending.
constexpr int phase_bits = 44;
uint64_t state_of(const Mbarrier& barrier) {
    return barrier.phase | uint64_t(barrier.pending) << phase_bits;
}
uint64_t phase_of(uint64_t state) {
    return state & ((uint64_t(1) << phase_bits) - 1);
}

Flow pending_count(Warp& w, const Op& op) {
    const auto state = w.in<uint64_t>(op.operands[1]);
    w.for_each_lane([&](int lane) {
        w.out<uint32_t>(op.operands[0]).set(lane, uint32_t(state[lane] >> phase_bits));
    });
    return Flow::next;
}

enum class Arrival : uint8_t { plain, drop, expect, drop_and_expect };

// state, address, count or bytes
template <Arrival kind>
Flow arrive(Warp& w, const Op& op) {
    auto value = w.in<uint32_t>(op.operands[2]);
    w.for_each_lane([&](int lane) {
        SharedPlace at = place(w, op, op.operands[1], lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        if (!op.operands[0].sink) w.out<uint64_t>(op.operands[0]).set(lane, state_of(barrier));
        if (w.machine->races) {
            if (op.aux & relaxed)
                w.machine->races->arrive_relaxed(w, lane, *at.cta, barrier);
            else
                w.machine->races->arrive(w, lane, *at.cta, barrier, op.aux & cluster_scope);
        }
        constexpr bool expects = kind == Arrival::expect || kind == Arrival::drop_and_expect;
        if (expects) note(w, barrier, Mbarrier::Event::Kind::expected, value[lane]);
        note(w, barrier, Mbarrier::Event::Kind::arrival, expects ? 1 : value[lane]);
        bool complete = false;
        switch (kind) {
            case Arrival::plain:
                complete = barrier.arrive(value[lane]);
                break;
            case Arrival::drop:
                complete = barrier.arrive_and_drop(value[lane]);
                break;
            case Arrival::expect:
                complete = barrier.arrive_and_expect(1, value[lane]);
                break;
            case Arrival::drop_and_expect:
                complete = barrier.arrive_and_drop(1, value[lane]);
                break;
        }
        signal(*at.cta, barrier, complete);
    });
    return Flow::next;
}

Flow expect_tx(Warp& w, const Op& op) {
    auto bytes = w.in<uint32_t>(op.operands[1]);
    w.for_each_lane([&](int lane) {
        SharedPlace at = place(w, op, op.operands[0], lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        note(w, barrier, Mbarrier::Event::Kind::expected, bytes[lane]);
        signal(*at.cta, barrier, barrier.expect(bytes[lane]));
    });
    return Flow::next;
}

Flow complete_tx(Warp& w, const Op& op) {
    auto bytes = w.in<uint32_t>(op.operands[1]);
    w.for_each_lane([&](int lane) {
        SharedPlace at = place(w, op, op.operands[0], lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        note(w, barrier, Mbarrier::Event::Kind::brought, bytes[lane]);
        signal(*at.cta, barrier, barrier.complete(bytes[lane]));
    });
    return Flow::next;
}

// A warp that has waited for a phase in vain and comes back when the next one has ended, too,
// cannot tell: by parity, the phase that it waits for has not begun.
void check_parity(Warp& w, const Mbarrier& barrier, uint64_t parity, bool complete) {
    Warp::FailedWait& failed = w.failed_wait;
    const bool again = failed.barrier == &barrier && (failed.phase & 1) == parity;
    if (again && barrier.phase >= failed.phase + 2) {
        w.machine->find(FaultKind::barrier_misuse, [&] {
            return format(
                "the warp waits for the end of phase %llu of the mbarrier %s by its "
                "parity, but since it last looked that phase and the next have ended",
                (unsigned long long)failed.phase, barrier.name.c_str());
        });
    }
    if (complete && again) failed = {};
    if (!complete && !again) failed = {&barrier, barrier.phase};
}

// Lanes whose phase is complete.
uint32_t test(Warp& w, const Op& op, bool by_parity) {
    uint32_t done = 0, together = 0;  // together: done lanes at `seen`, as a rule all
    SharedPlace seen{};
    auto pass_on = [&] {
        if (!w.machine->races || !together) return;
        w.machine->races->wait(w, together, *seen.cta, mbarrier_at(*seen.cta, seen.offset),
                               !(op.aux & relaxed));
    };
    w.for_each_lane([&](int lane) {
        SharedPlace at = place(w, op, op.operands[1], lane);
        Mbarrier& barrier = mbarrier_at(*at.cta, at.offset);
        const uint64_t value = by_parity ? w.in<uint32_t>(op.operands[2])[lane] & 1
                                         : phase_of(w.in<uint64_t>(op.operands[2])[lane]);
        const bool complete =
            by_parity ? barrier.test_parity(uint32_t(value)) : barrier.test_state(value);
        if (by_parity && w.machine->checks) check_parity(w, barrier, value, complete);
        if (complete) {
            if (together && at.offset != seen.offset) pass_on(), together = 0;
            seen = at;
            together |= 1u << lane;
            done |= 1u << lane;
        } else {
            w.note_poll({by_parity ? Awaited::Kind::mbarrier_parity : Awaited::Kind::mbarrier_state,
                         at.cta, at.offset, value});
        }
    });
    pass_on();
    return done;
}

// predicate, address, parity or state
template <bool by_parity>
Flow test_wait(Warp& w, const Op& op) {
    const uint32_t done = test(w, op, by_parity);
    w.set_predicate(op.operands[0], done);
    if (done == w.exec) return Flow::next;
    ++w.polls;
    return Flow::yield;
}

// The hardware suspends a thread for a bounded time; then the answer is false and the program may
// look at other things.
constexpr uint64_t default_suspend_ns = 1'000'000;

// The limit is the hardware's affair, so that any try may fail, even of a phase that comes: the
// seed picks one in eight. Programs must run what follows a failed try right, too. A simulated
// clock knows the limit.
bool fails_early(Warp& w) {
    const Machine& machine = *w.machine;
    if (machine.timing) return false;
    uint64_t number = machine.seed + (uint64_t(w.grid->id) << 40) +
                      (uint64_t(w.cta->index) << 20 | w.index) + (++w.num_suspensions << 52);
    for (int round = 0; round < 2; ++round)  // mixes the bits (Stafford)
        number = (number ^ number >> 31) * 0x9e3779b97f4a7c15ull;
    return number >> 61 == 0;
}

// predicate, address, parity or state, time limit in ns (0: the default)
template <bool by_parity>
Flow try_wait(Warp& w, const Op& op) {
    const uint32_t done = test(w, op, by_parity);
    if (!done) {
        uint64_t& deadline = w.current.token;
        const uint64_t now = w.machine->now_ns();
        if (!deadline && fails_early(w)) {
            deadline = now;
        } else if (!deadline) {
            const uint32_t hint = w.uniform<uint32_t>(op.operands[3]);
            deadline = now + (hint ? hint : default_suspend_ns);
        }
        if (now < deadline) return w.block(w.cta->mbarrier_waiters, w.last_poll, deadline);
    }
    w.set_predicate(op.operands[0], done);
    if (done) return Flow::next;
    ++w.polls;
    return Flow::yield;
}

uint64_t take_order(Decoder& d) {
    const uint64_t order =
        (d.take("cluster") ? cluster_scope : 0) | (d.take("relaxed") ? relaxed : 0);
    d.ignore({"release", "acquire", "cta", "b64"});
    return order;
}

void decode_init(Decoder& d) {
    const Space space = d.take_space();
    if (space == Space::shared_cluster) d.invalid("mbarrier.init reaches only the own CTA");
    d.ignore({"b64"});
    d.expect_operands(2);
    d.emit(init, {d.address(0), d.source(1, Type::u32)}, uint64_t(space));
}

void decode_inval(Decoder& d) {
    const Space space = d.take_space();
    d.ignore({"b64"});
    d.expect_operands(1);
    d.emit(inval, {d.address(0)}, uint64_t(space));
}

void decode_arrive(Decoder& d, bool drop) {
    const bool expect = d.take("expect_tx");
    d.ignore({"noComplete"});
    const Space space = d.take_space();
    const uint64_t order = take_order(d);
    d.expect_operands(expect ? 3 : 2, 3);
    const Operand state = d.destination(0, Type::b64);
    if (space == Space::shared_cluster && !state.sink)
        d.invalid("an arrival in .shared::cluster returns no state");
    const Operand value = d.num_operands() == 3 ? d.source(2, Type::u32) : d.constant(1);
    const Body body = drop ? (expect ? arrive<Arrival::drop_and_expect> : arrive<Arrival::drop>)
                           : (expect ? arrive<Arrival::expect> : arrive<Arrival::plain>);
    d.emit(body, {state, d.address(1), value}, uint64_t(space) | order);
}

void decode_plain_arrive(Decoder& d) {
    decode_arrive(d, false);
}
void decode_arrive_drop(Decoder& d) {
    decode_arrive(d, true);
}

void decode_pending_count(Decoder& d) {
    d.ignore({"b64"});
    d.expect_operands(2);
    d.emit(pending_count, {d.destination(0, Type::u32), d.source(1, Type::b64)});
}

void decode_transactions(Decoder& d, Body body) {
    const Space space = d.take_space();
    take_order(d);
    d.expect_operands(2);
    d.emit(body, {d.address(0), d.source(1, Type::u32)}, uint64_t(space));
}

void decode_expect_tx(Decoder& d) {
    decode_transactions(d, expect_tx);
}
void decode_complete_tx(Decoder& d) {
    decode_transactions(d, complete_tx);
}

void decode_wait(Decoder& d, bool suspends) {
    const bool by_parity = d.take("parity");
    const Space space = d.take_space();
    if (space == Space::shared_cluster) d.invalid("waits reach only the own CTA");
    const uint64_t order = take_order(d);
    d.expect_operands(3, suspends ? 4 : 3);
    const Operand done = d.destination(0, Type::pred);
    const Operand address = d.address(1), value = d.source(2, by_parity ? Type::u32 : Type::b64);
    const Operand limit = d.num_operands() == 4 ? d.source(3, Type::u32) : d.constant(0);
    const Body body = suspends ? (by_parity ? try_wait<true> : try_wait<false>)
                               : (by_parity ? test_wait<true> : test_wait<false>);
    d.emit(body, {done, address, value, limit}, uint64_t(space) | order);
}

void decode_test_wait(Decoder& d) {
    decode_wait(d, false);
}
void decode_try_wait(Decoder& d) {
    decode_wait(d, true);
}

}  // namespace

InstructionTable mbarrier_instructions() {
    return {
        {"mbarrier.init", decode_init, "sets expected arrivals, phase 0"},
        {"mbarrier.inval", decode_inval, "ends the object's life"},
        {"mbarrier.arrive", decode_plain_arrive,
         "arrival, also .expect_tx, local or in the cluster"},
        {"mbarrier.arrive_drop", decode_arrive_drop, "arrival that lowers the expected count"},
        {"mbarrier.expect_tx", decode_expect_tx, "more bytes are expected in this phase"},
        {"mbarrier.complete_tx", decode_complete_tx, "bytes have come, without a copy"},
        {"mbarrier.pending_count", decode_pending_count,
         "arrivals that were pending before the one that returned a state"},
        {"mbarrier.test_wait", decode_test_wait, "asks for a phase, by state or parity"},
        {"mbarrier.try_wait", decode_try_wait,
         "waits a bounded time for a phase, by state or parity"},
    };
}

}  // namespace deep_moe::emulator
