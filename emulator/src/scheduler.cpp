// Runs warps: which one next and for how long, the rendezvous of lanes, asynchronous completions,
// the virtual clock, and what to say when nothing can go on.
#include <time.h>

#include <algorithm>
#include <chrono>

#include "engine.h"
#include "race_detector.h"
#include "register_watch.h"
#include "timing.h"

namespace deep_moe::emulator {

Where where_of(const Warp& w) {
    return {w.grid, w.program, w.current.pc, w.cta->index, w.index};
}

namespace {

constexpr uint64_t deadlock_ns =
    4'400'000'000'000ull;  // virtual time without progress that counts as a deadlock
// A kernel's own time limits must get their say first: a waiter that looks at the clock only every
// so many polls, and suspends in each, needs many leaps to do so.
constexpr uint64_t max_leap_ns = deadlock_ns / 256;
constexpr uint64_t stall_ns = 10'000'000;  // the same, worth a report
// Time never leaps past the waking of a warp that only sleeps: it counts its naps, as others
// compute. One that polls between its naps most likely waits for others, and surely when it has had
// its share of so many without a change.
constexpr uint64_t max_polling_naps = 1 << 14;
constexpr uint32_t patience =
    4;  // quanta in which the lowest program counter goes first before another group may

uint64_t host_ns() {
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count());
}

uint64_t steady_ns() {
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now().time_since_epoch())
                        .count());
}

void host_sleep(uint64_t ns) {
    timespec t{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    nanosleep(&t, nullptr);
}

// With the instruction that it came from.
[[noreturn]] void rethrow(const Fault& fault, const Where& where, const std::string& context) {
    Fault located(fault, context);
    Finding finding;
    if (fault.finding) finding = *fault.finding;
    finding.kind = fault.kind;
    finding.text = located.what();
    if (!fault.finding) {
        finding.space = fault.space;
        finding.address = fault.address;
        finding.involved.push_back(involved_at(where, fault.lane));
    }
    located.finding = std::make_shared<Finding>(std::move(finding));
    throw located;
}

std::string in_operation(const AsyncOperation& operation) {
    return std::string("\n  in the asynchronous ") + operation.kind + " issued by\n" +
           describe(operation.where, -1);
}

bool runnable(const Group& g) {
    return !g.blocked && !g.meeting;
}

// Puts a group that can run into `current`; the lowest program counter, or one at random. False:
// all wait.
template <class Random>
bool choose_group(Warp& w, bool at_random, Random random) {
    int best = -1;
    uint32_t count = 0;
    for (size_t i = 0; i < w.others.size(); ++i) {
        if (!runnable(w.others[i])) continue;
        ++count;
        if (at_random) {
            if (random() % count == 0) best = int(i);
        } else if (best < 0 || w.others[i].pc < w.others[size_t(best)].pc) {
            best = int(i);
        }
    }
    bool current_runs = w.current.lanes && runnable(w.current);
    if (best < 0) return current_runs;
    if (current_runs && !at_random && w.current.pc <= w.others[size_t(best)].pc) return true;
    if (current_runs && at_random && random() % (count + 1) == 0) return true;
    std::swap(w.current, w.others[size_t(best)]);
    if (!w.others[size_t(best)].lanes) {
        w.others[size_t(best)] = w.others.back();
        w.others.pop_back();
    }
    return true;
}

// Joins the current group with all others that stand at the same instruction.
bool merge(Warp& w) {
    bool merged = false;
    for (size_t i = 0; i < w.others.size();) {
        Group& g = w.others[i];
        if (g.pc == w.current.pc && !g.blocked && !g.token && !w.current.token) {
            w.current.lanes |= g.lanes;
            g = w.others.back();
            w.others.pop_back();
            merged = true;
        } else {
            ++i;
        }
    }
    if (merged) w.turns->quanta_since_merge = 0;
    return merged;
}

enum class Met { run, wait };

void park_in_meeting(Warp& w, uint32_t lanes) {
    if (lanes != w.current.lanes) {
        Group rest;
        rest.pc = w.current.pc + 1;
        rest.lanes = w.current.lanes & ~lanes;
        w.others.push_back(rest);
        w.current.lanes = lanes;
    }
    w.current.meeting = true;
}

Met meet_whole_warp(Warp& w, const Op& op, uint32_t exec) {
    if (exec == w.live) {
        w.exec = exec;
        return Met::run;
    }
    if (w.current.lanes == w.live) {
        throw Fault(FaultKind::invalid_operation,
                    format("the whole warp must execute this instruction, but its guard is false "
                           "in lanes 0x%08x",
                           w.live & ~exec));
    }
    (void)op;
    park_in_meeting(w, exec);
    w.current.wait = {
        "the warp's other lanes (this group has 0x%08llx, the warp 0x%08llx)", exec, w.live, {}};
    return Met::wait;
}

// Runs the lanes whose mask is complete; others of the group go on waiting. Lanes may name
// different masks.
Met meet_member_mask(Warp& w, const Op& op, uint32_t exec) {
    auto masks = w.in<uint32_t>(op.operands[op.mask_operand]);
    uint32_t complete = 0;
    for (uint32_t rest = exec; rest;) {
        int lane = __builtin_ctz(rest);
        uint32_t mask = masks[lane], same = 0;
        for (uint32_t m = rest; m; m &= m - 1)
            if (masks[__builtin_ctz(m)] == mask) same |= 1u << __builtin_ctz(m);
        rest &= ~same;
        if (same & ~mask) {
            throw Fault(FaultKind::invalid_operation,
                        format("the member mask 0x%08x does not name the executing lane", mask),
                        __builtin_ctz(same & ~mask));
        }
        uint32_t needed = mask & w.live;
        if ((needed & ~same) == 0) {
            complete = same;
            break;
        }
        // bar.warp.sync pairs up across instructions: other groups may wait at another one with the
        // same mask.
        if (op.meets_anywhere) {
            uint32_t together = same;
            for (const Group& g : w.others) {
                const Op& other = w.program->ops[g.pc];
                if (g.meeting && other.meets_anywhere &&
                    w.in<uint32_t>(other.operands[other.mask_operand])[__builtin_ctz(g.lanes)] ==
                        mask)
                    together |= g.lanes;
            }
            if ((needed & ~together) == 0) {
                for (Group& g : w.others) {
                    if (g.meeting && (g.lanes & needed) == g.lanes &&
                        w.program->ops[g.pc].meets_anywhere) {
                        g.meeting = false;
                        ++g.pc;
                    }
                }
                complete = same;
                break;
            }
        }
    }
    if (!complete) {
        park_in_meeting(w, exec);
        w.current.wait = {"lanes of its member mask 0x%08llx (this group has 0x%08llx)",
                          masks[__builtin_ctz(exec)],
                          exec,
                          {}};
        return Met::wait;
    }
    if (complete != exec) {  // the rest of the executing lanes tries again on its own
        Group rest = w.current;
        rest.lanes = exec & ~complete;
        w.others.push_back(rest);
        w.current.lanes &= ~rest.lanes;
    }
    w.exec = complete;
    return Met::run;
}

}  // namespace

// xorshift64*
uint64_t Engine::random() {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (random_state * 0x2545F4914F6CDD1Dull) >> 16;
}

uint64_t Machine::now_ns() const {
    if (timing) return virtual_ns + uint64_t(timing->now) / 1000;
    return real_clock ? host_ns() : virtual_ns;
}

uint64_t Machine::now_cycles(Warp& w) const {
    return timing ? timing->cycles_of(w) : steps;
}

// The end of a nanosleep on the simulated clock.
void Engine::wake_at(Warp& w, uint64_t deadline) {
    const auto end = [this, &w, deadline] {
        const auto unblock = [deadline](Group& g) {
            if (g.blocked && g.deadline && g.deadline <= deadline) g.blocked = false;
        };
        unblock(w.current);
        for (Group& g : w.others) unblock(g);
        if (w.live) timing->wake(w);
    };
    timing->enqueue({"nanosleep", where_of(w), end, true}, 0,
                    timing->now + Picoseconds(deadline - now_ns()) * 1000);
}

void Engine::make_ready(Warp& w) {
    if (timing) {
        if (w.live) timing->wake(w);
        return;
    }
    if (w.turns->ready || !w.live) return;
    w.turns->ready = true;
    ready.push_back(&w);
}

// Warps that wait for something else than this mbarrier stay where they are.
void Machine::wake(WaitQueue& queue, uint32_t mbarrier) {
    if (!timing) return wake(queue);
    std::erase_if(queue.warps, [&](Warp* w) {
        if (!w->live) return true;
        bool woken = false, waits = false;
        const auto look = [&](Group& g) {
            if (!g.blocked) return;
            const Awaited& awaited = g.wait.awaited;
            const bool is_mbarrier = awaited.kind == Awaited::Kind::mbarrier_parity ||
                                     awaited.kind == Awaited::Kind::mbarrier_state;
            if (is_mbarrier && awaited.address == mbarrier)
                g.blocked = false, woken = true;
            else
                waits = true;
        };
        look(w->current);
        for (Group& g : w->others) look(g);
        if (woken) timing->wake(*w);
        return !waits;
    });
}

void Machine::wake(WaitQueue& queue) {
    Engine& engine = engine_of(*this);
    for (Warp* w : queue.warps) {
        if (!w->live) continue;
        if (w->current.blocked) w->current.blocked = false;
        for (Group& g : w->others) g.blocked = false;
        engine.make_ready(*w);
    }
    queue.warps.clear();
}

void Machine::enqueue_async(Warp& issuer, const char* kind, uint64_t order_key,
                            std::function<void()> complete, int64_t at) {
    Engine& engine = engine_of(*this);
    AsyncOperation operation{kind, where_of(issuer), std::move(complete)};
    if (timing) {
        constexpr double other_cycles = 100;
        timing->enqueue(std::move(operation), order_key,
                        at ? at : timing->soon(issuer, other_cycles));
        return;
    }
    if (order_key) {
        auto found = engine.async_by_key.find(order_key);
        if (found != engine.async_by_key.end()) {
            found->second->operations.push_back(std::move(operation));
            return;
        }
    }
    auto queue = std::make_unique<Engine::Queue>();
    queue->key = order_key;
    queue->operations.push_back(std::move(operation));
    if (order_key) engine.async_by_key[order_key] = queue.get();
    engine.async_queues.push_back(std::move(queue));
}

void Machine::enqueue_load(Warp& issuer, const char* kind,
                           const std::vector<std::pair<uint64_t, uint32_t>>& rows, uint64_t bytes,
                           std::function<void()> complete) {
    if (!timing) return enqueue_async(issuer, kind, 0, std::move(complete));
    timing->load(issuer, rows, bytes, {kind, where_of(issuer), std::move(complete)});
}

bool Engine::complete_one_async() {
    if (async_queues.empty()) return false;
    size_t pick = random() % async_queues.size();
    Queue& queue = *async_queues[pick];
    AsyncOperation operation = std::move(queue.operations.front());
    queue.operations.pop_front();
    if (queue.operations.empty()) {
        if (queue.key) async_by_key.erase(queue.key);
        async_queues[pick] = std::move(async_queues.back());
        async_queues.pop_back();
    }
    complete(operation);
    return true;
}

void Engine::complete(AsyncOperation& operation) {
    if (!operation.is_timer) note_progress();
    completing = &operation;
    try {
        operation.complete();
    } catch (const Fault& fault) {
        rethrow(fault, operation.where, in_operation(operation));
    } catch (...) {
        completing = nullptr;
        running = nullptr;
        throw;
    }
    completing = nullptr;
}

Where Machine::here() const {
    return completing ? completing->where : where_of(*running);
}

Place Machine::place() const {
    const Where where = here();
    return {where.program, where.pc};
}

std::string Machine::context() const {
    return completing ? in_operation(*completing) : "\n" + describe(where_of(*running), -1);
}

void Machine::report(Finding finding) {
    if (finding.involved.empty()) finding.involved.push_back(involved_at(here(), -1));
    if (collects_findings) {
        finding.text += context();
        findings.add(std::move(finding));
        return;
    }
    Fault fault(finding.kind, finding.text);
    fault.finding = std::make_shared<Finding>(std::move(finding));
    throw fault;
}

template <bool is_timed>
void Engine::run_warp(Warp& w, uint64_t budget) {
    const Op* ops = w.program->ops.data();
    const OpCost* costs = w.program->costs.data();
    bool lowest_first = true;
    const auto choose_group = [this](Warp& warp, bool at_random) {
        return emulator::choose_group(warp, at_random, [this] { return random(); });
    };
    if (!w.others.empty()) {
        lowest_first = ++w.turns->quanta_since_merge <= patience;
        choose_group(w, !lowest_first);
    }
    uint64_t executed = 0, lanes = 0;
    auto account = [&] {
        steps += executed;
        lane_steps += lanes;
        if (!real_clock && !is_timed) virtual_ns += executed;
    };
    try {
        while (executed < budget) {
            Group& g = w.current;
            const Op& op = ops[g.pc];
            if (!w.others.empty() && (op.leader || op.meeting != Meeting::none)) {
                merge(w);
                if (lowest_first && op.leader && !w.others.empty()) {
                    uint32_t before = g.pc;
                    choose_group(w, false);
                    if (g.pc != before) continue;
                }
            }
            const OpCost& cost = costs[g.pc];
            if constexpr (is_timed) {
                if (!timing->begin(w, op, cost)) break;
            }
            ++executed;
            uint32_t exec = g.lanes;
            if (op.guard != Guard::always) {
                if (op.body == run_checked) check_guard(w);
                uint32_t p = *reinterpret_cast<const uint32_t*>(w.bases[0] + op.guard_offset);
                exec &= op.guard == Guard::if_true ? p : ~p;
                if (!exec) {
                    ++g.pc;
                    continue;
                }
            }
            w.exec = exec;
            if (op.meeting != Meeting::none) {
                Met met = op.meeting == Meeting::whole_warp ? meet_whole_warp(w, op, exec)
                                                            : meet_member_mask(w, op, exec);
                if (met == Met::wait) {
                    if (choose_group(w, !lowest_first)) continue;
                    account();
                    if constexpr (is_timed) timing->block(w);
                    return;
                }
                if (races && w.exec == w.live) races->meet_lanes(w);
            }
            lanes += uint64_t(__builtin_popcount(w.exec));
            if constexpr (is_timed) {
                if (cost.kind != OpKind::plain && !timing->before(w, op, cost)) {
                    --executed;
                    lanes -= uint64_t(__builtin_popcount(w.exec));
                    break;
                }
            }
            const bool is_left_out = is_timed && leaves_out_products && cost.is_unused;
            Flow flow = is_left_out ? Flow::next : op.body(w, op);
            if constexpr (is_timed) {
                if (cost.kind != OpKind::plain) timing->after(w, op, cost, flow);
            }
            switch (flow) {
                case Flow::next:
                    g.token = 0;
                    ++g.pc;
                    break;
                case Flow::jumped:
                    if (!w.current.lanes) {  // they have exited
                        if (!w.live || !choose_group(w, !lowest_first)) {
                            account();
                            if constexpr (is_timed) timing->block(w);
                            return;
                        }
                    }
                    break;
                case Flow::blocked:
                    g.blocked = true;
                    if (choose_group(w, !lowest_first)) break;
                    account();
                    if constexpr (is_timed) timing->block(w);
                    return;
                case Flow::yield:
                    g.token = 0;
                    ++g.pc;
                    if (is_timed) break;
                    account();
                    make_ready(w);
                    return;
            }
        }
    } catch (const Fault& fault) {
        account();
        rethrow(fault, where_of(w), "\n" + describe(where_of(w), fault.lane));
    }
    account();
    if constexpr (is_timed)
        timing->requeue(w);
    else
        make_ready(w);
}

// Nothing is ready: lets time pass until the next deadline. False when there is none.
bool Engine::advance_clock() {
    while (!timers.empty()) {
        auto [deadline, w] = *timers.begin();
        uint64_t now = now_ns();
        if (deadline > now) {
            if (real_clock) {
                host_sleep(std::min<uint64_t>(deadline - now, 50'000));
                if (now_ns() < deadline) return true;
            } else {
                virtual_ns = deadline;
            }
        }
        timers.erase(timers.begin());
        bool woken = false;
        auto unblock = [&](Group& g) {
            if (g.blocked && g.deadline && g.deadline <= deadline) g.blocked = false, woken = true;
        };
        if (w->live) {
            unblock(w->current);
            for (Group& g : w->others) unblock(g);
        }
        if (woken) {
            make_ready(*w);
            return true;
        }
    }
    return false;
}

bool Engine::leap(uint64_t ns) {
    for (const auto& [deadline, w] : timers) {
        if (deadline >= virtual_ns + ns) break;
        const auto is_asleep = [at = deadline](const Group& g) {
            return g.blocked && g.deadline == at;
        };
        const bool sleeps = w->live && (is_asleep(w->current) ||
                                        std::any_of(w->others.begin(), w->others.end(), is_asleep));
        const Turns::Naps& naps = w->turns->naps;
        const bool waits_for_others = naps.polls && naps.progress == progress &&
                                      naps.count > max_polling_naps / timers.size();
        if (!sleeps || waits_for_others) continue;
        virtual_ns = std::max(virtual_ns, deadline);
        return false;
    }
    virtual_ns += ns;
    return true;
}

// Whether the schedule holds this warp back.
bool Engine::is_victim(const Warp& w) const {
    switch (schedule) {
        case Schedule::slow_rank:
            return w.grid->rank->index == seed % ranks.size();
        case Schedule::starved_role:
            return w.index == seed % w.grid->num_warps;
        case Schedule::last_warp:
            return w.grid->id == victim.grid && w.cta->index == victim.cta &&
                   w.index == victim.warp;
        default:
            return false;
    }
}

// The warp with the seed's number, over all grids that wait to run.
void Engine::pick_victim() {
    uint64_t num_warps = 0;
    for (const auto& g : grids) num_warps += uint64_t(g->num_ctas) * g->num_warps;
    if (!num_warps) return;
    uint64_t number = seed % num_warps;
    for (const auto& g : grids) {
        const uint64_t own = uint64_t(g->num_ctas) * g->num_warps;
        if (number < own) {
            victim = {g->id, uint32_t(number / g->num_warps), uint32_t(number % g->num_warps)};
            return;
        }
        number -= own;
    }
}

// Index in `ready` of the warp to run.
size_t Engine::pick_ready() {
    if (schedule == Schedule::round_robin) {
        auto first = std::min_element(ready.begin(), ready.end(), [](const Warp* a, const Warp* b) {
            return a->turns->last < b->turns->last;
        });
        return size_t(first - ready.begin());
    }
    size_t pick = random() % ready.size();
    // When nobody else gets on, it is the turn of those that are held back.
    if (victims_run) return pick;
    if (schedule == Schedule::last_warp)
        return is_victim(*ready[pick]) ? (pick + 1) % ready.size() : pick;
    if (schedule != Schedule::slow_rank && schedule != Schedule::starved_role) return pick;
    // Now and then they run: others that poll are always ready, and would wait for them in vain.
    constexpr int num_tries = 24, turns_of_others = 64;
    if (random() % turns_of_others == 0) return pick;
    for (int i = 0; i < num_tries && is_victim(*ready[pick]); ++i) pick = random() % ready.size();
    return pick;
}

std::string Engine::describe_running() const {
    return running || completing ? context() : "";
}

// Whatever comes first on the simulated clock. Waits with a time limit that nobody ends are looked
// at now and then, and when nothing else is left.
void Engine::run_timed(const std::function<bool()>& keep_going) {
    constexpr uint64_t rounds_between_looks = 4096, look_ns = 50'000'000;  // at the host's clock
    constexpr uint64_t most_instructions = 1 << 14;                        // of a warp in a row
    constexpr Picoseconds limits_step = 200'000'000, idle_step = 20'000'000'000;
    timing->start_run();
    for (auto& grid : grids) admit_ctas(*grid);
    uint64_t rounds = 0, next_look_ns = steady_ns() + look_ns, seen_progress = progress;
    Picoseconds next_limits = limits_step, changed = 0;
    uint64_t leap_ns = idle_step / 1000, leapt_ns = 0;
    for (;;) {
        if (keep_going && ++rounds % rounds_between_looks == 0 && steady_ns() >= next_look_ns) {
            if (!keep_going()) throw Fault(FaultKind::internal, "stopped by the caller");
            next_look_ns = steady_ns() + look_ns;
        }
        if (!timing->has_events() || timing->next_event() >= next_limits) {
            const bool is_idle = !timing->has_events();
            if (is_idle) {
                const bool all_done = std::all_of(grids.begin(), grids.end(),
                                                  [](const auto& g) { return g->has_ended(); });
                if (all_done) break;
            }
            if (!wake_overdue(is_idle) && is_idle)
                throw Fault(FaultKind::deadlock,
                            deadlock_report("every warp waits and nothing is pending"));
            next_limits = std::max(next_limits, timing->now) + limits_step;
            if (progress != seen_progress) {
                seen_progress = progress;
                changed = timing->now;
                leap_ns = idle_step / 1000, leapt_ns = 0;
            } else if (timing->now - changed > idle_step) {
                // Warps poll for what nobody does: their time limits come sooner.
                if (stall.empty())
                    stall = deadlock_report("nothing changed for 20 ms of simulated time");
                leapt_ns += leap_ns;
                if (leapt_ns > deadlock_ns)
                    throw Fault(FaultKind::deadlock,
                                deadlock_report("warps poll, but nothing changed for over an hour "
                                                "of simulated time"));
                virtual_ns += leap_ns;
                leap_ns = std::min(leap_ns * 2, max_leap_ns);
            }
            if (is_idle) continue;
        }
        timing->tick();
        const Timing::Event event = timing->take_event();
        if (event.operation) {
            const std::unique_ptr<AsyncOperation> operation(event.operation);
            complete(*operation);
            continue;
        }
        if (!event.warp || !event.warp->live) continue;
        Warp& w = *event.warp;
        Cta& cta = *w.cta;
        running = &w;
        run_warp<true>(w, most_instructions);
        if (!w.live && cta.live_threads == 0) {
            try {
                retire_cta(cta);
            } catch (const Fault& fault) {
                rethrow(fault, where_of(w), "\n" + describe(where_of(w), -1));
            }
        }
        running = nullptr;
    }
    virtual_ns += uint64_t(timing->last) / 1000;
    timing->now = 0;
    reset();
}

// Ends waits whose time limit has come; `at_once`: nothing else happens any more, so that the
// next limit comes now. False if no warp has one.
bool Engine::wake_overdue(bool at_once) {
    uint64_t first = UINT64_MAX;
    const auto each_blocked = [&](const auto& see) {
        for (const auto& grid : grids)
            for (const auto& cta : grid->ctas) {
                if (!cta || !cta->live_threads) continue;
                for (const auto& w : cta->warps) {
                    if (!w->live) continue;
                    if (w->current.blocked && w->current.deadline) see(*w, w->current);
                    for (Group& g : w->others)
                        if (g.blocked && g.deadline) see(*w, g);
                }
            }
    };
    each_blocked([&](Warp&, const Group& g) { first = std::min(first, g.deadline); });
    if (first == UINT64_MAX) return false;
    if (at_once && first > now_ns()) timing->now += Picoseconds(first - now_ns()) * 1000;
    const uint64_t due = now_ns();
    each_blocked([&](Warp& w, Group& g) {
        if (g.deadline > due) return;
        g.blocked = false;
        timing->wake(w);
    });
    return true;
}

void Engine::run(const std::function<bool()>& keep_going) {
    random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567890ABCDEFull;
    for (int i = 0; i < 8; ++i) random();
    // Launches of one run may overlap; what came before it is over.
    if (checks) races = std::make_shared<RaceDetector>(*this, !real_clock);
    stall.clear();
    victims_run = false;
    pick_victim();
    if (timing) return run_timed(keep_going);
    for (auto& grid : grids) admit_ctas(*grid);

    uint64_t seen_progress = progress, idle_quanta = 0, leap_ns = 1000, last_change_ns = now_ns();
    constexpr uint64_t turns_between_looks = 64, look_ns = 50'000'000;  // at the host's clock
    uint64_t rounds = 0, next_look_ns = steady_ns() + look_ns;
    uint64_t turns = 0;
    uint32_t async_odds = 4, schedulings = 0;
    const bool holds_back = schedule == Schedule::slow_rank || schedule == Schedule::starved_role ||
                            schedule == Schedule::last_warp;
    const auto look_for_stall = [&] {
        if (progress != seen_progress) return;
        const uint64_t idle_ns = virtual_ns - last_change_ns;
        if (idle_ns > stall_ns && stall.empty())
            stall = deadlock_report("nothing changed for 10 ms of virtual time");
        if (idle_ns > deadlock_ns) {
            throw Fault(FaultKind::deadlock,
                        deadlock_report(
                            "warps poll, but nothing changed for over an hour of virtual time"));
        }
    };
    for (;;) {
        if (keep_going && ++rounds % turns_between_looks == 0 && steady_ns() >= next_look_ns) {
            if (!keep_going()) throw Fault(FaultKind::internal, "stopped by the caller");
            next_look_ns = steady_ns() + look_ns;
        }
        while (!timers.empty() && timers.begin()->first <= now_ns()) {
            if (!advance_clock()) break;
        }
        if (ready.empty()) {
            if (complete_one_async()) continue;
            bool all_done = true;
            for (auto& grid : grids) all_done = all_done && grid->has_ended();
            if (all_done) break;
            // Warps that sleep between their polls let time pass here.
            if (!advance_clock())
                throw Fault(FaultKind::deadlock,
                            deadlock_report("every warp waits and nothing is pending"));
            if (!real_clock) look_for_stall();
            continue;
        }
        if (++schedulings % 512 == 0) async_odds = 1u << (random() % 6);
        if (!async_queues.empty() && schedule != Schedule::late_copies &&
            random() % async_odds == 0) {
            complete_one_async();
            if (ready.empty()) continue;
        }
        size_t pick = pick_ready();
        if (schedule == Schedule::last_warp && !victims_run && is_victim(*ready[pick])) {
            // Nobody else can run: copies and sleepers go before it, too.
            if (complete_one_async() || advance_clock()) continue;
        }
        Warp& w = *ready[pick];
        w.turns->last = ++turns;
        ready[pick] = ready.back();
        ready.pop_back();
        w.turns->ready = false;
        uint64_t dice = random();
        const bool is_short = dice % 8 == 0;
        uint64_t budget = is_short ? 1 + (dice >> 8) % 16 : 64 + (dice >> 8) % 1024;
        uint64_t polls = w.polls;
        Cta& cta = *w.cta;
        running = &w;
        run_warp<false>(w, budget);
        if (!w.live && cta.live_threads == 0) {
            try {
                retire_cta(cta);
            } catch (const Fault& fault) {
                rethrow(fault, where_of(w), "\n" + describe(where_of(w), -1));
            }
        }

        if (progress != seen_progress) {
            seen_progress = progress;
            victims_run = false;
            idle_quanta = 0;
            leap_ns = 1000;
            last_change_ns = now_ns();
        } else if (w.polls == polls && w.turns->ready) {
            if (!is_short) idle_quanta = 0;  // it computes; a short turn may end between two polls
        } else if (++idle_quanta > 4 * ready.size() + 16) {
            idle_quanta = 0;
            if (complete_one_async()) continue;
            if (!victims_run && holds_back) {
                victims_run = true;
                continue;
            }
            if (real_clock) {
                host_sleep(50'000);
            } else {
                if (leap(leap_ns)) leap_ns = std::min(leap_ns * 2, max_leap_ns);
                look_for_stall();
            }
        }
    }
    reset();
}

}  // namespace deep_moe::emulator
