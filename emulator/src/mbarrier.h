// The mbarrier object: phase, pending arrivals, pending bytes, and what counts as misuse.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace deep_moe::emulator {

struct Mbarrier {
    static constexpr uint32_t max_count = (1u << 20) - 1;

    uint32_t address = 0;
    std::string name;  // for messages
    bool valid = false;
    uint64_t phase = 0;  // completed phases
    uint32_t expected = 0;
    uint32_t pending = 0;
    int64_t transactions = 0;  // expected bytes that have not come yet
    bool observed = true;      // somebody has seen that the last phase is complete
    bool unseen = false;       // the last phase completed although nobody had seen the one before
    bool checks_observation = true;

    // What made up the phase so far, for messages, and the one before.
    struct Event {
        enum class Kind : uint8_t { arrival, expected, brought } kind;
        int64_t amount;
        Where where;
    };
    std::vector<Event> events, previous_events;
    void note(Event::Kind kind, int64_t amount, const Where& where) {
        events.push_back({kind, amount, where});
    }
    static std::string text_of(const std::vector<Event>& events);

    void init(uint32_t count, bool check_observation = true) {
        if (count < 1 || count > max_count) {
            fail(FaultKind::barrier_misuse, "mbarrier.init with count %u, not 1..2^20-1", count);
        }
        valid = true;
        phase = 0;
        expected = pending = count;
        transactions = 0;
        observed = true;
        events.clear();
        previous_events.clear();
        checks_observation = check_observation;
    }

    // True when this completed the phase, here and in all that change counts.
    [[nodiscard]] bool arrive(uint32_t count) {
        check("arrival");
        take_arrivals(count);
        return complete_if_done();
    }

    // One more arrival in this phase than it was initialized for.
    void add_arrival() {
        check("cp.async.mbarrier.arrive");
        if (pending == max_count)
            fail(FaultKind::barrier_misuse, "the mbarrier %s waits for more than 2^20-1 arrivals",
                 label());
        ++pending;
    }

    // Bytes that came before they were expected may have kept the phase open.
    [[nodiscard]] bool expect(uint32_t bytes) {
        check("expect_tx");
        add_transactions(int64_t(bytes), "expect_tx");
        return complete_if_done();
    }

    [[nodiscard]] bool arrive_and_expect(uint32_t count, uint32_t bytes) {
        check("arrive.expect_tx");
        add_transactions(int64_t(bytes), "expect_tx");
        take_arrivals(count);
        return complete_if_done();
    }

    [[nodiscard]] bool complete(uint32_t bytes) {
        check("complete_tx");
        add_transactions(-int64_t(bytes), "complete_tx");
        return complete_if_done();
    }

    // arrive.drop: one arrival, and one less in the phases that follow.
    [[nodiscard]] bool arrive_and_drop(uint32_t count, uint32_t bytes = 0) {
        check("arrive_drop");
        add_transactions(int64_t(bytes), "expect_tx");
        take_arrivals(count);
        expected -= count;
        return complete_if_done();
    }

    // True when the phase with this parity is complete.
    bool test_parity(uint32_t parity) {
        check("wait");
        const bool complete = (phase & 1) != (parity & 1);
        if (complete && phase > 0) observed = true;
        return complete;
    }

    // `state` is what an arrival returned: the number of the phase it belonged to.
    bool test_state(uint64_t state) {
        check("wait");
        const bool complete = phase != state;
        if (complete) observed = true;
        return complete;
    }

 private:
    const char* label() const { return name.c_str(); }

    void check(const char* what) const {
        if (!valid)
            fail(FaultKind::barrier_misuse, "%s on the mbarrier %s, which nobody has initialized",
                 what, label());
    }

    void take_arrivals(uint32_t count) {
        if (count < 1 || count > pending) {
            fail(FaultKind::barrier_misuse,
                 "%u arrival%s at the mbarrier %s, which expects %u per phase and waits for %u "
                 "more%s",
                 count, count == 1 ? "" : "s", label(), expected, pending,
                 pending == 0 ? " (its phase is still open because of outstanding bytes)" : "");
        }
        pending -= count;
    }

    void add_transactions(int64_t bytes, const char* what) {
        transactions += bytes;
        if (transactions > int64_t(max_count) || transactions < -int64_t(max_count)) {
            fail(FaultKind::barrier_misuse,
                 "%s brings the byte count of the mbarrier %s to %lld, outside of +-(2^20-1)", what,
                 label(), static_cast<long long>(transactions));
        }
    }

    bool complete_if_done() {
        if (pending != 0 || transactions != 0) return false;
        unseen = !observed && checks_observation;
        ++phase;
        previous_events.swap(events);
        events.clear();
        pending = expected;
        observed = false;
        return true;
    }
};

}  // namespace deep_moe::emulator
