#include "race_detector.h"

#include <algorithm>
#include <cstring>

namespace deep_moe::emulator {

namespace {

constexpr uint64_t page_bytes = 4096;
constexpr uint32_t tensor_columns = 512;
constexpr const char* barrier_bytes = "copies counted by";  // what such an agent is

}  // namespace

void Clock::join(const Clock& other) {
    if (other.moments.empty()) return;
    make_room(other.first, other.end());
    uint32_t* mine = moments.data() + (other.first - first);
    const uint32_t* theirs = other.moments.data();
    for (size_t i = 0, n = other.moments.size(); i < n; ++i) mine[i] = std::max(mine[i], theirs[i]);
}

void Clock::make_room(uint32_t begin, uint32_t end) {
    if (moments.empty()) first = begin;
    if (begin < first) {
        moments.insert(moments.begin(), first - begin, 0);
        first = begin;
    }
    if (end > this->end()) moments.resize(end - first);
}

void View::join(const View& other) {
    seen.join(other.seen);
    async_shared.join(other.async_shared);
    async_global.join(other.async_global);
    overwritable.join(other.overwritable);
    tensor.join(other.tensor);
}

RaceDetector::RaceDetector(Machine& machine, bool watches_global)
    : machine_(machine), watches_global_(watches_global) {
    // Index 0 means none in all of these.
    agents_.push_back({});
    reads_.emplace_back();
    split_cells_.emplace_back();
}

uint32_t RaceDetector::new_agent(const Cta& cta, const char* what, uint32_t number, uint32_t warp) {
    if (agents_.size() > Record::max_agent)
        fail(FaultKind::unsupported,
             "the race detector tells at most %u warps, mbarriers and threads with asynchronous "
             "work apart; run this with checks=False",
             Record::max_agent);
    agents_.push_back({&cta, nullptr, what, number, warp});
    return uint32_t(agents_.size() - 1);
}

void RaceDetector::add_warp(Warp& w) {
    w.clock = std::make_shared<WarpClock>();
    w.clock->agent = new_agent(*w.cta, "warp", w.index);
    agents_.back().warp = &w;
    if (const Grid* previous = w.grid->previous) *w.clock->orders[0].view = *previous->end;
    for (const auto& [first, program] : sites_)
        if (program == w.program) w.clock->first_site = first;
    if (!w.clock->first_site) {
        w.clock->first_site = next_site_;
        sites_.emplace_back(next_site_, w.program);
        next_site_ += uint32_t(w.program->ops.size());
    }
}

void RaceDetector::end(Grid& grid) {
    auto view = std::make_shared<View>();
    for (const auto& cta : grid.ctas)
        for (const auto& w : cta->warps)
            for (const LaneOrder& order : w->clock->orders) view->join(*order.view);
    for (uint32_t agent = 1; agent < agents_.size(); ++agent)
        if (agents_[agent].cta->grid == &grid) view->seen.raise(agent, ~0u);
    view->async_global.join(view->seen);
    grid.end = std::move(view);
}

uint32_t RaceDetector::site_of(const Warp& w) {
    return w.clock->first_site + w.current.pc;
}

// ---- order

// Calls f(order, its lanes among `lanes`) for each order of these lanes; lanes that part from
// others get one of their own first.
template <class F>
void RaceDetector::for_orders(Warp& w, uint32_t lanes, F f) {
    WarpClock& c = *w.clock;
    lanes &= w.live;
    if (c.orders.size() == 1 && lanes == w.live) return f(c.orders[0], lanes);
    for (uint32_t rest = lanes; rest;) {
        const uint8_t index = c.order_of[size_t(__builtin_ctz(rest))];
        uint32_t members = 0, used = 0;
        for (uint32_t m = w.live; m; m &= m - 1) {
            const int lane = __builtin_ctz(m);
            used |= 1u << (c.order_of[size_t(lane)] % 32);
            if (c.order_of[size_t(lane)] == index) members |= 1u << lane;
        }
        const uint32_t mine = members & lanes;
        rest &= ~mine;
        uint8_t target = index;
        if (mine != members) {  // fewer orders than lanes are in use, so that one is free
            target = uint8_t(__builtin_ctz(~used));
            if (target >= c.orders.size()) c.orders.resize(size_t(target) + 1);
            c.orders[target] = c.orders[index];
            for (uint32_t m = mine; m; m &= m - 1) c.order_of[size_t(__builtin_ctz(m))] = target;
        }
        f(c.orders[target], mine);
    }
}

uint32_t RaceDetector::lane_agent(Warp& w, int lane) {
    uint32_t& agent = w.clock->lane_agents[size_t(lane)];
    if (!agent) {
        agent = new_agent(*w.cta, "warp", w.index);
        agents_.back().warp = &w;
    }
    return agent;
}

// Adds what these lanes did up to `moment`, and what all did before they were last synchronized.
void RaceDetector::raise_own(Warp& w, Clock& clock, uint32_t lanes, uint32_t moment) {
    const WarpClock& c = *w.clock;
    if (!(c.active & ~lanes)) return clock.raise(c.agent, moment);
    clock.raise(c.agent, c.synced - 1);
    for (uint32_t m = c.active & lanes; m; m &= m - 1)
        clock.raise(lane_agent(w, __builtin_ctz(m)), moment);
}

// Adds what these lanes' own fences cover of what they did since then.
void RaceDetector::raise_fenced(Warp& w, Clock& clock, uint32_t lanes,
                                uint32_t WarpClock::Own::* fenced) {
    const WarpClock& c = *w.clock;
    uint32_t all = ~0u;
    for (uint32_t m = c.active; m; m &= m - 1) {
        const int lane = __builtin_ctz(m);
        all = std::min(all, lanes >> lane & 1 ? c.own[lane].*fenced : 0);
    }
    if (!c.active) all = 0;
    if (all >= c.synced) clock.raise(c.agent, all);
    for (uint32_t m = c.active & lanes; m; m &= m - 1) {
        const int lane = __builtin_ctz(m);
        const uint32_t moment = c.own[lane].*fenced;
        if (moment >= c.synced && moment > all) clock.raise(lane_agent(w, lane), moment);
    }
}

// Adds all that lanes with this order hand over: what they know and what they did.
void RaceDetector::release(Warp& w, const LaneOrder& order, uint32_t lanes, View& into) {
    into.join(*order.view);
    raise_own(w, into.seen, lanes, w.clock->now);
    raise_fenced(w, into.async_shared, lanes, &WarpClock::Own::async_shared);
    raise_fenced(w, into.async_global, lanes, &WarpClock::Own::async_global);
}

// Adds what a relaxed write of this lane hands over by a fence of this scope in front of it.
void RaceDetector::release_fenced(Warp& w, int lane, Scope scope, View& into) {
    WarpClock& c = *w.clock;
    if (!c.fences) return;
    const LaneFences::Fenced& fenced = c.fences[size_t(lane)].fenced[size_t(scope)];
    if (!fenced.view) return;
    into.join(*fenced.view);
    into.seen.raise(fenced.alone ? c.agent : lane_agent(w, lane), fenced.moment);
}

bool RaceDetector::covers(const Clock& clock, const Record& record) const {
    const uint32_t agent = record.agent(), moment = record.moment();
    if (moment <= clock.at(agent)) return true;
    const Warp* warp = agents_[agent].warp;
    const uint32_t alone = warp ? warp->clock->lane_agents[record.lane()] : 0;
    return alone && moment <= clock.at(alone);
}

void RaceDetector::sync_lanes(Warp& w, uint32_t lanes) {
    WarpClock& c = *w.clock;
    lanes &= w.live;
    const bool is_whole = lanes == w.live;
    if (!is_whole || c.orders.size() > 1) {
        LaneOrder joined;
        bool is_first = true;
        for_orders(w, lanes, [&](LaneOrder& order, uint32_t) {
            if (is_first) {
                joined = order;
                is_first = false;
                return;
            }
            joined.change().join(*order.view);
            joined.last_word = 0;
        });
        if (!is_whole) {
            raise_own(w, joined.change().seen, lanes, c.now);
            raise_fenced(w, joined.change().async_shared, lanes, &WarpClock::Own::async_shared);
            raise_fenced(w, joined.change().async_global, lanes, &WarpClock::Own::async_global);
            for_orders(w, lanes, [&](LaneOrder& order, uint32_t) { order = joined; });
            ++c.now;
            return;
        }
        c.orders.assign(1, std::move(joined));
        c.order_of.fill(0);
    }
    LaneOrder& order = c.orders[0];
    for (auto [clock, fenced] : {std::pair{&View::async_shared, &WarpClock::Own::async_shared},
                                 {&View::async_global, &WarpClock::Own::async_global}}) {
        bool any = false;
        for (uint32_t m = c.active; m; m &= m - 1)
            any |= c.own[__builtin_ctz(m)].*fenced >= c.synced;
        if (any) raise_fenced(w, order.change().*clock, lanes, fenced);
    }
    c.synced = c.met = ++c.now;
    c.active = 0;
}

void RaceDetector::arrive(Warp& w, MeetingOrder& meeting) {
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t lanes) {
        release_tensor(*w.clock, order);
        release(w, order, lanes, meeting.arriving);
    });
    if (w.exec == w.live)
        sync_lanes(w, w.exec);
    else
        ++w.clock->now;
}

// Hands over what fences have covered, no more.
void RaceDetector::arrive_relaxed(Warp& w, MeetingOrder& meeting) {
    WarpClock& c = *w.clock;
    // It is the cluster's barrier.
    w.for_each_lane([&](int lane) { release_fenced(w, lane, Scope::cluster, meeting.arriving); });
    if (c.barrier_inits_fenced) meeting.arriving.seen.raise(c.agent, c.barrier_inits_fenced - 1);
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t) {
        meeting.arriving.tensor.join(order.view->tensor);
    });
}

void RaceDetector::complete(MeetingOrder& meeting) {
    meeting.complete.join(meeting.arriving);
    meeting.arriving = {};
}

void RaceDetector::leave(Warp& w, const MeetingOrder& meeting) {
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t) {
        order.change().join(meeting.complete);
        acquire_tensor(*w.clock, order);
    });
    if (w.exec == w.live) sync_lanes(w, w.exec);
}

void RaceDetector::release_to(const Warp& w, Word& word, Scope scope, const View& released) {
    const Cta* cta = w.cta;
    if (!word.version) {
        word.only = cta;
        word.only_cluster = cta->cluster;
    }
    if (word.only != cta) word.only = nullptr;
    if (word.only_cluster != cta->cluster) word.only_cluster = nullptr;
    switch (scope) {
        case Scope::cta:
            word.cta[cta].join(released);
            break;
        case Scope::cluster:
            word.cluster[cta->cluster].join(released);
            break;
        case Scope::sys:
            word.system.join(released);
            [[fallthrough]];
        case Scope::gpu:
            word.device[w.grid->rank->index].join(released);
            break;
    }
    word.version = ++last_version_;
}

void RaceDetector::write_word(Warp& w, int lane, uint64_t key, Scope scope, bool releases,
                              bool is_update) {
    WarpClock& c = *w.clock;
    const LaneFences* fences = c.fences ? &c.fences[size_t(lane)] : nullptr;
    const bool is_fenced = fences && fences->fenced[0].view;
    auto found = words_.find(key);
    if (!releases && !is_fenced) {
        if (found != words_.end() && !is_update) words_.erase(found);
        return;
    }
    Word& word = found == words_.end() ? words_[key] : found->second;
    if (!is_update) word = {};
    View released;
    if (releases) {
        LaneOrder& order = c.order(lane);
        release_tensor(c, order);
        release(w, order, 1u << lane, released);
        ++c.now;
        return release_to(w, word, scope, released);
    }
    for (size_t s = 0; s <= size_t(scope); ++s) {
        const LaneFences::Fenced& fenced = fences->fenced[s];
        // A wider one that is the same does it, too.
        if (s < size_t(scope) && fenced.view == fences->fenced[s + 1].view) continue;
        if (!fenced.view) continue;
        released = {};
        release_fenced(w, lane, Scope(s), released);
        release_to(w, word, Scope(s), released);
    }
}

// Notes what a fence of this scope will acquire.
void RaceDetector::read_relaxed(WarpClock& c, int lane, Scope scope, uint64_t key, uint64_t version,
                                const View& released) {
    auto& mine = c.fences_of(lane).relaxed_reads[size_t(scope)];
    WarpClock::RelaxedRead& last = c.relaxed_read[size_t(scope)];
    if (last.key != key || last.version != version || last.before != mine) {
        auto all = mine ? std::make_shared<View>(*mine) : std::make_shared<View>();
        all->join(released);
        last = {key, version, mine, std::move(all)};
    }
    mine = last.after;
}

void RaceDetector::read_word(Warp& w, int lane, uint64_t key, Scope scope, bool acquires) {
    auto found = words_.find(key);
    if (found == words_.end()) return;
    WarpClock& c = *w.clock;
    const Word& word = found->second;
    const uint64_t version = word.version * num_scopes + uint64_t(scope);
    const uint8_t before = c.order_of[size_t(lane)];
    if (acquires) {
        if (c.orders[before].last_word == key && c.orders[before].last_word_version == version)
            return;
        // Lanes that read one word one after the other stay together.
        if (c.last_split.from == before && c.last_split.key == key &&
            c.last_split.version == version && c.last_split.now == c.now) {
            const uint8_t with = c.order_of[size_t(c.last_split.lane)];
            const LaneOrder& other = c.orders[with];
            if (with != before && other.last_word == key && other.last_word_version == version) {
                c.order_of[size_t(lane)] = with;
                return;
            }
        }
    } else {
        LaneFences& fences = c.fences_of(lane);
        if (fences.last_word == key && fences.last_word_version == version) return;
        fences.last_word = key;
        fences.last_word_version = version;
    }
    // What was released, and the scope that reaches its writers.
    const auto for_each_release = [&](auto f) {
        const auto look = [&](const View& released, Scope needed) {
            if (needed <= scope) f(released, needed);
        };
        const Scope writers = word.only == w.cta                    ? Scope::cta
                              : word.only_cluster == w.cta->cluster ? Scope::cluster
                                                                    : Scope::gpu;
        if (auto own = word.cta.find(w.cta); own != word.cta.end()) look(own->second, Scope::cta);
        if (auto own = word.cluster.find(w.cta->cluster); own != word.cluster.end())
            look(own->second, std::min(writers, Scope::cluster));
        if (auto own = word.device.find(w.grid->rank->index); own != word.device.end())
            look(own->second, writers);
        look(word.system, Scope::sys);
    };
    if (!acquires) {
        for_each_release([&](const View& released, Scope needed) {
            read_relaxed(c, lane, needed, key, version, released);
        });
        return;
    }
    for_orders(w, 1u << lane, [&](LaneOrder& order, uint32_t) {
        order.last_word = key;
        order.last_word_version = version;
        for_each_release([&](const View& released, Scope) { order.change().join(released); });
        acquire_tensor(c, order);
    });
    c.last_split = {key, version, c.now, before, uint8_t(lane)};
}

// Each executing lane acquires what it has read before.
void RaceDetector::acquire_fenced(Warp& w, Scope scope) {
    WarpClock& c = *w.clock;
    if (!c.fences) return;
    for (uint32_t rest = w.exec; rest;) {
        const auto reads = c.fences[size_t(__builtin_ctz(rest))].relaxed_reads;
        uint32_t same = 0;
        for (uint32_t m = rest; m; m &= m - 1) {
            LaneFences& fences = c.fences[size_t(__builtin_ctz(m))];
            if (fences.relaxed_reads != reads) continue;
            same |= m & -m;
            for (size_t s = 0; s <= size_t(scope); ++s) fences.relaxed_reads[s].reset();
            fences.last_word = 0;
        }
        rest &= ~same;
        for (size_t s = 0; s <= size_t(scope); ++s) {
            if (!reads[s]) continue;
            for_orders(w, same, [&](LaneOrder& order, uint32_t) {
                order.change().join(*reads[s]);
                order.last_word = 0;
                acquire_tensor(c, order);
            });
        }
    }
}

void RaceDetector::fence(Warp& w, Scope scope, bool releases, bool acquires) {
    WarpClock& c = *w.clock;
    if (acquires) acquire_fenced(w, scope);
    if (!releases) return;
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t lanes) {
        release_tensor(c, order);
        auto view = std::make_shared<View>(*order.view);
        view->seen.raise(c.agent, c.synced - 1);
        for (uint32_t m = lanes; m; m &= m - 1) {
            auto& fenced = c.fences_of(__builtin_ctz(m)).fenced;
            for (size_t s = 0; s <= size_t(scope); ++s)
                fenced[s] = {view, c.now, !(c.active & ~(m & -m))};
        }
    });
    ++c.now;
}

void RaceDetector::fence_async(Warp& w, bool shared, bool global) {
    WarpClock& c = *w.clock;
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t lanes) {
        View& view = order.change();
        for (auto [covered, clock] :
             {std::pair{shared, &view.async_shared}, {global, &view.async_global}}) {
            if (!covered) continue;
            clock->join(view.seen);
            clock->raise(c.agent, c.synced - 1);
        }
        for (uint32_t m = lanes; m; m &= m - 1) {
            WarpClock::Own& own = c.own[__builtin_ctz(m)];
            if (shared) own.async_shared = c.now;
            if (global) own.async_global = c.now;
        }
    });
    ++c.now;
}

void RaceDetector::fence_barrier_inits(Warp& w) {
    w.clock->barrier_inits_fenced = ++w.clock->now;
}

void RaceDetector::waited_for(Warp& w, uint32_t lanes, uint32_t agent, uint32_t moment) {
    bool is_new = false;
    for (uint32_t m = lanes & w.live; m; m &= m - 1)
        is_new |= w.clock->order(__builtin_ctz(m)).view->seen.at(agent) < moment;
    if (!is_new) return;
    for_orders(w, lanes,
               [&](LaneOrder& order, uint32_t) { order.change().seen.raise(agent, moment); });
}

// ---- mbarriers

BarrierOrder& RaceDetector::order_of(Cta& cta, const Mbarrier& barrier) {
    BarrierOrder& order = barriers_[&barrier];
    if (!order.agent) order.agent = new_agent(cta, barrier_bytes, barrier.address);
    return order;
}

void RaceDetector::init_barrier(Warp& w, int lane, Cta& cta, const Mbarrier& barrier) {
    BarrierOrder& order = order_of(cta, barrier);
    order.initializer = w.clock->agent;
    order.initialized = w.clock->now;
    order.initializer_lane = lane;
    order.initializer_clock = w.clock.get();
    w.clock->active |= 1u << lane;
}

void RaceDetector::check_initialized(Warp& w, int lane, Cta& cta, const Mbarrier& barrier) {
    const BarrierOrder& order = order_of(cta, barrier);
    const WarpClock& c = *w.clock;
    if (!order.initializer) return;
    if (order.initializer == c.agent &&
        (order.initialized < c.synced || order.initializer_lane == lane))
        return;
    const Record init{order.initializer, order.initialized, uint32_t(order.initializer_lane), 0, 0};
    if (covers(c.order(lane).view->seen, init)) return;
    machine_.find(FaultKind::race, [&] {
        // A cluster barrier that does not release hands over what that fence covers, and no more.
        const char* mend = "";
        if (&cta != w.cta && order.initialized >= order.initializer_clock->barrier_inits_fenced)
            mend =
                ", which needs fence.mbarrier_init and a barrier of the cluster behind it, or "
                "such a barrier that releases";
        return "the mbarrier " + describe_shared(cta, barrier.address) +
               format(" of CTA %u is used, but no barrier orders this after its mbarrier.init by ",
                      cta.index) +
               describe_warp(*cta.grid, agents_[order.initializer].number) + mend;
    });
}

void RaceDetector::arrive(Warp& w, int lane, Cta& cta, const Mbarrier& barrier,
                          bool at_cluster_scope) {
    check_initialized(w, lane, cta, barrier);
    WarpClock& c = *w.clock;
    View& into = order_of(cta, barrier).arriving;
    // As a rule all lanes arrive at one barrier, or one lane.
    const uint32_t arriving = w.exec == w.live ? w.exec : 1u << lane;
    if (c.last_arrival.barrier == &barrier && c.last_arrival.now == c.now && arriving == w.exec &&
        lane != w.first_lane())
        return;
    for_orders(w, arriving, [&](LaneOrder& order, uint32_t lanes) {
        release_tensor(c, order);
        into.overwritable.join(order.view->seen);
        // What other lanes had read when the whole warp last met is no longer read.
        into.overwritable.raise(c.agent, c.met - 1);
        raise_own(w, into.overwritable, lanes, c.now);
        if (&cta == w.cta || at_cluster_scope) {
            release(w, order, lanes, into);
        } else {
            into.tensor.join(order.view->tensor);
            into.overwritable.join(order.view->overwritable);
        }
    });
    c.last_arrival = {&barrier, ++c.now};
}

void RaceDetector::arrive_relaxed(Warp& w, int lane, Cta& cta, const Mbarrier& barrier) {
    check_initialized(w, lane, cta, barrier);
    View& into = order_of(cta, barrier).arriving;
    release_fenced(w, lane, &cta == w.cta ? Scope::cta : Scope::cluster, into);
    into.tensor.join(w.clock->order(lane).view->tensor);
}

void RaceDetector::arrive_for(Cta& cta, const Mbarrier& barrier, uint32_t agent, uint32_t moment) {
    order_of(cta, barrier).arriving.seen.raise(agent, moment);
}

void RaceDetector::phase_complete(Cta& cta, const Mbarrier& barrier) {
    BarrierOrder& order = order_of(cta, barrier);
    order.complete.join(order.arriving);
    order.arriving = {};
}

void RaceDetector::wait(Warp& w, uint32_t lanes, Cta& cta, const Mbarrier& barrier, bool acquires) {
    BarrierOrder& from = order_of(cta, barrier);
    WarpClock& c = *w.clock;
    // Lanes differ where one of them has just initialized it.
    const bool is_fresh = from.initializer == c.agent && from.initialized >= c.synced;
    for (uint32_t m = is_fresh ? lanes : lanes & -lanes; m; m &= m - 1)
        check_initialized(w, __builtin_ctz(m), cta, barrier);
    const auto join = [&](View& view) {
        view.join(from.complete);
        view.seen.raise(from.agent, uint32_t(barrier.phase));
    };
    if (!acquires) {
        View complete;
        join(complete);
        const uint64_t version = ++last_version_;
        for (uint32_t m = lanes; m; m &= m - 1)
            read_relaxed(c, __builtin_ctz(m), Scope::cta, 0, version, complete);
    }
    for_orders(w, lanes, [&](LaneOrder& order, uint32_t) {
        if (acquires) {
            join(order.change());
            acquire_tensor(c, order);
            return;
        }
        order.change().tensor.join(from.complete.tensor);
    });
}

// ---- cells

bool RaceDetector::both_strong(const Record& a, const Record& b) const {
    if (!a.is_strong() || !b.is_strong()) return false;
    const Cta& x = *agents_[a.agent()].cta;
    const Cta& y = *agents_[b.agent()].cta;
    const Scope needed = &x == &y                       ? Scope::cta
                         : x.cluster == y.cluster       ? Scope::cluster
                         : x.grid->rank == y.grid->rank ? Scope::gpu
                                                        : Scope::sys;
    return a.scope() >= needed && b.scope() >= needed;
}

bool RaceDetector::before_warp(const WarpClock& c, const Record& old, const Record& now,
                               bool old_is_write, bool is_write) const {
    if (old.agent() == c.agent &&
        (old.moment() < c.synced || old.lane() == now.lane() || old.site == now.site))
        return true;
    const View& view = *c.order(int(now.lane())).view;
    return covers(view.seen, old) || (is_write && !old_is_write && covers(view.overwritable, old));
}

bool RaceDetector::is_counted(uint32_t agent) const {
    return agents_[agent].what == barrier_bytes;
}

bool RaceDetector::before_issue(const Record& old, bool old_is_write, bool is_write,
                                bool is_global) const {
    const Issue& i = *issue_;
    const View& view = *i.view;
    const uint32_t agent = old.agent(), moment = old.moment();
    if (i.is_generic) {
        if (agent == issue_record_.agent() && moment == issue_record_.moment() &&
            old.site == issue_record_.site)
            return true;
        if (agent == i.warp_agent && moment <= i.now && (moment < i.synced || old.lane() == i.lane))
            return true;
        return covers(view.seen, old) ||
               (is_write && !old_is_write && covers(view.overwritable, old));
    }
    // What an mbarrier counts comes in no order: only who has waited for it comes later.
    if (agent == issue_record_.agent() && !is_counted(agent)) return true;
    if (old.is_async()) {
        // The lanes of a warp that all execute one copy: CUTLASS has a whole warp store a tile.
        const uint32_t issuer = agents_[agent].issuer;
        if (issuer && issuer == agents_[issue_record_.agent()].issuer &&
            old.site == issue_record_.site)
            return true;
        if (is_global && old_is_write && agents_[agent].cta != i.cta)
            return moment <= view.async_global.at(agent);
        return moment <= view.seen.at(agent) || (is_write && moment <= view.overwritable.at(agent));
    }
    const bool is_own = agent == i.warp_agent && (moment < i.synced || old.lane() == i.lane);
    if (agent == i.warp_agent && !is_own && !covers(view.seen, old)) return false;
    if (covers(is_global ? view.async_global : view.async_shared, old)) return true;
    if (is_own && old.lane() == i.lane &&
        moment <= (is_global ? i.own_async_global : i.own_async_shared))
        return true;
    if (old_is_write) return false;
    // Bulk copies of global memory overwrite what ordinary loads have read: order is enough there.
    if (is_global) return (is_own && moment <= i.now) || covers(view.seen, old);
    return covers(view.overwritable, old);
}

uint32_t RaceDetector::new_reads() {
    if (free_reads_.empty()) {
        reads_.emplace_back();
        return uint32_t(reads_.size() - 1);
    }
    const uint32_t index = free_reads_.back();
    free_reads_.pop_back();
    return index;
}

void RaceDetector::drop_reads(uint32_t index) {
    if (--reads_[index].owners) return;
    reads_[index].records.clear();
    free_reads_.push_back(index);
}

// The further reads of a cell, with one more. Lists do not change, and cells share them.
uint32_t RaceDetector::add_read(uint32_t from, const Record& read) {
    const uint32_t to = new_reads();
    auto& records = reads_[to].records;
    if (from) records = reads_[from].records;
    bool found = false;
    for (Record& r : records) {
        if (r.agent() == read.agent() && r.lane() == read.lane()) r = read, found = true;
    }
    if (!found) records.push_back(read);
    return to;
}

// Whether an asynchronous read of the cell's last write comes before the access that `ordered` is
// for. That one cannot overtake the write then, whoever wrote: a tcgen05.commit says of what its
// operations have read that it may be overwritten, but nothing of those who filled it.
template <class Ordered>
bool RaceDetector::was_read_before(const Cell& cell, const Ordered& ordered) const {
    const Record write{cell.write_bits, cell.write_site};
    auto follows = [&](const Record& read) {
        return read.bits && read.is_async() && !both_strong(write, read) && ordered(read, false);
    };
    if (follows({cell.read_bits, cell.read_site})) return true;
    if (!cell.more_reads) return false;
    const auto& more = reads_[cell.more_reads].records;
    return std::any_of(more.begin(), more.end(), follows);
}

// Neighbouring cells have the same past as a rule: what was found for the last one holds for them.
template <class Ordered>
void RaceDetector::touch(Cell& cell, const Record& record, bool is_write, const Ordered& ordered,
                         const Location& at) {
    Past& past = past_;
    // Copies of one phase of an mbarrier look alike; who issued them tells them apart.
    const uint64_t issue = issue_ ? uint64_t(issue_->now) << 32 | issue_->warp_agent : 0;
    if (past.record.bits != record.bits || past.record.site != record.site ||
        past.is_write != is_write || past.space != at.space || past.issue != issue) {
        if (past.reads_after) drop_reads(past.reads_after);
        past = {.record = record, .is_write = is_write, .space = at.space, .issue = issue};
    }
    const Record write{cell.write_bits, cell.write_site};
    if (write.bits && write.bits != record.bits && write.bits != past.ordered_write) {
        if (both_strong(write, record) || ordered(write, true))
            past.ordered_write = write.bits;
        else if (!is_write || !was_read_before(cell, ordered))
            report(write, true, record, is_write, at);
    }
    if (!is_write) {
        if (cell.read_bits == record.bits) return;
        const Record read{cell.read_bits, cell.read_site};
        if (read.bits) {
            if (past.read != read.bits) {
                past.read = read.bits;
                past.is_read_ordered = ordered(read, false);
                if (past.reads_after) drop_reads(past.reads_after);
                past.reads_before = past.reads_after = 0;
            }
            if (!past.is_read_ordered) {
                if (!past.reads_after || past.reads_before != cell.more_reads) {
                    const uint32_t more = add_read(cell.more_reads, read);
                    if (past.reads_after) drop_reads(past.reads_after);
                    past.reads_before = cell.more_reads;
                    past.reads_after = more;
                    ++reads_[more].owners;  // it is kept for the next cells
                }
                ++reads_[past.reads_after].owners;
                if (cell.more_reads) drop_reads(cell.more_reads);
                cell.more_reads = past.reads_after;
            }
        }
        cell.read_bits = record.bits;
        cell.read_site = record.site;
        return;
    }
    if (cell.read_bits) {
        auto check = [&](const Record& read) {
            if (both_strong(read, record) || ordered(read, false)) return true;
            report(read, false, record, true, at);
            return false;
        };
        if (cell.read_bits != past.read && check({cell.read_bits, cell.read_site}))
            past.read = cell.read_bits;
        cell.read_bits = 0;
        if (cell.more_reads) {
            if (cell.more_reads != past.reads_after) {
                bool all = true;
                for (const Record& read : reads_[cell.more_reads].records) all &= check(read);
                if (past.reads_after) drop_reads(past.reads_after);
                past.reads_after = all ? cell.more_reads : 0;
                if (all) ++reads_[cell.more_reads].owners;
            }
            drop_reads(cell.more_reads);
            cell.more_reads = 0;
        }
    }
    cell.write_bits = record.bits;
    cell.write_site = record.site;
}

// The same for whole cells, none of which is split: the first one, and those behind it that are
// like it, if nothing is found. Returns how many they were.
template <class Ordered>
uint32_t RaceDetector::touch_alike(Cell* cells, uint32_t count, const Record& record, bool is_write,
                                   const Ordered& ordered, const Location& at) {
    const Cell before = cells[0];
    if (is_write ? before.write_bits != record.bits || before.read_bits
                 : before.read_bits != record.bits)
        touch(cells[0], record, is_write, ordered, at);
    const Cell after = cells[0];
    if (before.more_reads || after.more_reads) return 1;
    const bool follows_write = !before.write_bits || before.write_bits == record.bits ||
                               before.write_bits == past_.ordered_write;
    const bool follows_read = !is_write || !before.read_bits || before.read_bits == past_.read;
    if (!follows_write || !follows_read) return 1;
    uint32_t alike = 1;
    for (; alike < count && cells[alike] == before; ++alike) cells[alike] = after;
    return alike;
}

// The same for bytes [first, first + count), counted from the first block.
template <class Ordered>
void RaceDetector::touch_range(Block* blocks, uint64_t first, uint64_t count, const Record& record,
                               bool is_write, const Ordered& ordered, Location at) {
    for (const uint64_t end = first + count; first < end;) {
        Block& block = blocks[first / Block::num_bytes];
        const uint64_t begin = first % Block::num_bytes;
        const uint64_t part = std::min(end - first, Block::num_bytes - begin);
        if (!(begin % 4 | part % 4) &&
            cut(block, uint32_t(begin / 4), uint32_t((begin + part) / 4))) {
            for (int which : {0, 1}) {
                const uint32_t from = 4 * block.begin(which), to = 4 * block.end(which);
                if (from == to || from < begin || to > begin + part) continue;
                const Location own{at.space, at.address + (from - begin), at.cta};
                if (!block.has_cells)
                    touch_stretch(block, which, record, is_write, ordered, own);
                else  // the first one needed them
                    touch_cells(block.cells.get(), from, to - from, record, is_write, ordered, own);
            }
        } else {
            touch_cells(cells_of(block), begin, part, record, is_write, ordered, at);
        }
        at.address += part;
        first += part;
    }
}

// Makes stretches of words [begin, end), if it can: where the block's are not cut otherwise.
bool RaceDetector::cut(Block& block, uint32_t begin, uint32_t end) {
    if (block.has_cells) return false;
    if (begin == 0 && end == Block::num_cells) return true;
    const uint32_t at = begin ? begin : end;
    if (begin && end != Block::num_cells) return false;
    if (block.split) return block.split == at;
    Stretch &first = block.stretches[0], &second = block.stretches[1];
    Cell& cell = second.cell;
    // A lane's words stay together.
    const auto is_between_lanes = [&](uint64_t bits, uint8_t shift) {
        return !bits || shift == Stretch::uniform || at % (1u << shift) == 0;
    };
    if (!is_between_lanes(cell.write_bits, second.write_shift) ||
        !is_between_lanes(cell.read_bits, second.read_shift)) {
        cells_of(block);
        return false;
    }
    first = second;
    if (cell.more_reads) ++reads_[cell.more_reads].owners;
    if (cell.write_bits) cell.write_bits += uint64_t(at >> second.write_shift) << 4;
    if (cell.read_bits) cell.read_bits += uint64_t(at >> second.read_shift) << 4;
    block.split = uint8_t(at);
    return true;
}

// All of a stretch.
template <class Ordered>
void RaceDetector::touch_stretch(Block& block, int which, const Record& record, bool is_write,
                                 const Ordered& ordered, const Location& at) {
    Stretch& stretch = block.stretches[which];
    Cell& cell = stretch.cell;
    const uint32_t begin = block.begin(which), num_cells = block.end(which) - begin;
    // Of a row's lanes each may be another thread's past.
    const auto is_row_ordered = [&](uint64_t bits, uint32_t site, uint8_t shift,
                                    bool old_is_write) {
        if (!bits || shift == Stretch::uniform) return true;
        for (uint32_t i = 0; i < num_cells; i += 1u << shift)
            if (!ordered(Record{bits + (uint64_t(i >> shift) << 4), site}, old_is_write))
                return false;
        return true;
    };
    const bool has_row_of_reads = cell.read_bits && stretch.read_shift != Stretch::uniform;
    if (!is_row_ordered(cell.write_bits, cell.write_site, stretch.write_shift, true) ||
        (has_row_of_reads && cell.more_reads) ||
        !is_row_ordered(cell.read_bits, cell.read_site, stretch.read_shift, false)) {
        touch_cells(cells_of(block), 4 * begin, 4 * num_cells, record, is_write, ordered, at);
        return;
    }
    // What is known of rows is out of the way.
    const uint64_t write_bits = cell.write_bits;
    const bool has_row_of_writes = write_bits && stretch.write_shift != Stretch::uniform;
    if (has_row_of_writes) cell.write_bits = 0;
    if (has_row_of_reads) cell.read_bits = 0;
    stretch.read_shift = Stretch::uniform;
    if (!is_write ? cell.read_bits != record.bits
                  : cell.write_bits != record.bits || cell.read_bits)
        touch(cell, record, is_write, ordered, at);
    if (is_write)
        stretch.write_shift = Stretch::uniform;
    else
        cell.write_bits = write_bits;
}

template <class Ordered>
void RaceDetector::touch_cells(Cell* cells, uint64_t first, uint64_t count, const Record& record,
                               bool is_write, const Ordered& ordered, Location at) {
    const uint64_t end = first + count;
    for (uint64_t byte = first; byte < end;) {
        const uint64_t index = byte / 4, stop = std::min(end, (index + 1) * 4);
        Cell& cell = cells[index];
        if (!cell.bytes && stop - byte == 4) {
            const uint64_t bytes =
                4 * touch_alike(&cell, uint32_t((end - byte) / 4), record, is_write, ordered, at);
            at.address += bytes;
            byte += bytes;
            continue;
        }
        if (!cell.bytes) {
            split_cells_.push_back({cell, cell, cell, cell});
            if (cell.more_reads) reads_[cell.more_reads].owners += 3;
            cell.bytes = uint32_t(split_cells_.size() - 1);
        }
        for (; byte < stop; ++byte, ++at.address)
            touch(split_cells_[cell.bytes][byte % 4], record, is_write, ordered, at);
    }
}

// The cells of a block, which count from now on.
Cell* RaceDetector::cells_of(Block& block) {
    if (block.has_cells) return block.cells.get();
    if (!block.cells) block.cells = std::make_unique_for_overwrite<Cell[]>(Block::num_cells);
    for (int which : {0, 1}) {
        const auto& [whole, write_shift, read_shift] = block.stretches[which];
        const uint32_t begin = block.begin(which), end = block.end(which);
        for (uint32_t i = begin; i < end; ++i) {
            Cell& cell = block.cells[i];
            cell = whole;
            if (whole.write_bits) cell.write_bits += uint64_t((i - begin) >> write_shift) << 4;
            if (whole.read_bits) cell.read_bits += uint64_t((i - begin) >> read_shift) << 4;
        }
        if (whole.more_reads && end > begin) reads_[whole.more_reads].owners += end - begin - 1;
    }
    block.has_cells = true;
    return block.cells.get();
}

Block* RaceDetector::shared_blocks(Cta& cta) {
    if (cta.blocks.empty()) cta.blocks.resize(size_t(cta.shared_end) / Block::num_bytes + 1);
    return cta.blocks.data();
}

Block* RaceDetector::page(uint64_t number) {
    PageEntry& last = last_pages_[number % last_pages_.size()];
    if (number == last.number) return last.blocks;
    auto& blocks = pages_[number];
    if (!blocks) blocks = std::make_unique<Block[]>(page_bytes / Block::num_bytes);
    last = {number, blocks.get()};
    return last.blocks;
}

bool RaceDetector::access(Warp& w, Space space, uint64_t address, uint32_t bytes, Access access,
                          int lane, uint32_t flags) {
    const uint64_t window = space == Space::generic ? address & window_mask : 0;
    if (space == Space::local || window == local_window) return false;
    if (space == Space::param || space == Space::constant) return false;
    if (space == Space::shared || space == Space::shared_cluster || window == shared_window) {
        Cta& owner = *w.cta->cluster->ctas[uint32_t(address) >> shared_rank_shift];
        shared_access(w, owner, uint32_t(address) & shared_offset_mask, bytes, access, lane, flags);
        return true;
    }
    const Region* region = w.last_region();
    if (access == Access::read && region && !region->writable &&
        address - region->address < region->size)
        return false;
    global_access(w, address, bytes, access, lane, flags);
    return true;
}

// A warp's ordinary access, and whether another one is before it. As a rule all lanes know the
// same, and the cells' past is what one clock covers: then lanes need not be told apart.
struct RaceDetector::Row {
    const WarpClock& clock;
    const Clock* seen;  // of all lanes, or of the one lane; null: they differ
    Record first;       // of lane 0
    bool is_write;
    uint8_t shift = 0;                       // each lane has 2^shift words
    mutable uint32_t agent = 0, moment = 0;  // the last agent asked for

    bool is_before(uint64_t bits, uint64_t own) const {
        if (uint32_t(bits ^ own) >> 4 == 0) return true;  // of the same lane
        const Record record{bits, 0};
        if (record.agent() != agent) {
            agent = record.agent();
            moment = agent == clock.agent ? clock.synced - 1 : seen->at(agent);
        }
        return record.moment() <= moment;
    }
    bool is_past(const Cell& cell, uint64_t own) const {
        return (!cell.write_bits || is_before(cell.write_bits, own)) &&
               (!cell.read_bits || is_before(cell.read_bits, own)) &&
               (!is_write || !cell.more_reads);
    }
    void mark(Cell& cell, uint64_t own) const {
        if (is_write) {
            cell.write_bits = own;
            cell.write_site = first.site;
            cell.read_bits = 0;
        } else {
            cell.read_bits = own;
            cell.read_site = first.site;
        }
    }
};

// Notes the access of lanes from `first_lane` on to words [begin, end) of the block; false: it has
// to be looked at lane by lane.
bool RaceDetector::try_row(Block& block, const Row& row, uint32_t first_lane, uint32_t begin,
                           uint32_t end) {
    if (!row.seen) return false;
    const uint64_t own = row.first.bits | first_lane << 4;
    if (block.has_cells) {
        Cell* cells = block.cells.get();
        for (uint32_t i = begin; i < end; ++i) {
            if (cells[i].bytes ||
                !row.is_past(cells[i], own + (uint64_t((i - begin) >> row.shift) << 4)))
                return false;
        }
        if (!row.is_write || end - begin < Block::num_cells) {
            for (uint32_t i = begin; i < end; ++i)
                row.mark(cells[i], own + (uint64_t((i - begin) >> row.shift) << 4));
            return true;
        }
        // They all have one past from now on.
        block.has_cells = false;
        block.split = 0;
        block.stretches[1] = {};
        row.mark(block.stretches[1].cell, own);
        block.stretches[1].write_shift = row.shift;
        return true;
    }
    if (!cut(block, begin, end)) return false;
    const auto lane_bits = [&](int which) {
        return own + (uint64_t((block.begin(which) - begin) >> row.shift) << 4);
    };
    const auto is_in = [&](int which) {
        return block.begin(which) >= begin && block.end(which) <= end &&
               block.begin(which) < block.end(which);
    };
    for (int which : {0, 1}) {
        if (!is_in(which)) continue;
        if ((block.begin(which) - begin) % (1u << row.shift)) return false;
        const auto& [cell, write_shift, read_shift] = block.stretches[which];
        // Lanes are compared where both rows are the warp's own since its lanes last met; each has
        // the same words in both, or they are not told apart.
        const auto is_past = [&](uint64_t bits, uint8_t shift) {
            if (!bits) return true;
            if (shift != row.shift && Record{bits, 0}.agent() == row.clock.agent)
                return Record{bits, 0}.moment() < row.clock.synced;
            return row.is_before(bits, lane_bits(which));
        };
        if (!is_past(cell.write_bits, write_shift) || !is_past(cell.read_bits, read_shift) ||
            (row.is_write && cell.more_reads))
            return false;
    }
    for (int which : {0, 1}) {
        if (!is_in(which)) continue;
        Stretch& stretch = block.stretches[which];
        row.mark(stretch.cell, lane_bits(which));
        (row.is_write ? stretch.write_shift : stretch.read_shift) = row.shift;
        if (row.is_write) stretch.read_shift = Stretch::uniform;
    }
    return true;
}

// The same of some words that one lane accesses.
bool RaceDetector::try_cells(Cell* cells, uint32_t count, const Row& row, uint64_t bits) {
    if (!row.seen) return false;
    for (uint32_t i = 0; i < count; ++i)
        if (cells[i].bytes || !row.is_past(cells[i], bits)) return false;
    for (uint32_t i = 0; i < count; ++i) row.mark(cells[i], bits);
    return true;
}

void RaceDetector::shared_access(Warp& w, Cta& owner, uint32_t offset, uint32_t bytes,
                                 Access access, int lane, uint32_t flags) {
    warp_access(w, shared_blocks(owner), offset, bytes, access, lane, flags,
                {Space::shared, offset, &owner});
}

void RaceDetector::global_access(Warp& w, uint64_t address, uint32_t bytes, Access access, int lane,
                                 uint32_t flags) {
    if (!watches_global_) return;
    warp_access(w, page(address / page_bytes), address % page_bytes, bytes, access, lane, flags,
                {Space::global, address, w.cta});
}

// By one lane, of bytes from `first` on, counted from the first block.
void RaceDetector::warp_access(Warp& w, Block* blocks, uint64_t first, uint32_t bytes,
                               Access access, int lane, uint32_t flags, const Location& at) {
    WarpClock& c = *w.clock;
    c.active |= 1u << lane;
    const bool is_write = access != Access::read;
    const Record record{c.agent, c.now, uint32_t(lane), flags, site_of(w)};
    const uint64_t begin = first % Block::num_bytes;
    if (!(begin % 4 | bytes % 4) && begin + bytes <= Block::num_bytes) {
        Cell* cells = cells_of(blocks[first / Block::num_bytes]) + begin / 4;
        const Row row{c, &c.order(lane).view->seen, record, is_write};
        if (try_cells(cells, bytes / 4, row, record.bits)) return;
    }
    touch_range(
        blocks, first, bytes, record, is_write,
        [&](const Record& old, bool old_is_write) {
            return before_warp(c, old, record, old_is_write, is_write);
        },
        at);
}

void RaceDetector::row_access(Warp& w, Space space, uint64_t address, uint32_t bytes,
                              const std::byte* at, const std::byte* values) {
    const bool in_shared = space == Space::shared, is_write = values;
    if (!in_shared && !watches_global_) return;
    WarpClock& c = *w.clock;
    c.active = full_mask;
    Row row{c, c.orders.size() == 1 ? &c.orders[0].view->seen : nullptr,
            Record{c.agent, c.now, 0, 0, site_of(w)}, is_write};
    row.shift = uint8_t(__builtin_ctz(bytes / 4));
    for (uint32_t lane = 0; lane < warp_size;) {
        const uint64_t own = address + uint64_t(lane) * bytes;
        Block* blocks = in_shared ? shared_blocks(*w.cta) : page(own / page_bytes);
        const uint64_t offset = in_shared ? own : own % page_bytes;
        Block& block = blocks[offset / Block::num_bytes];
        // A lane's bytes lie in one block.
        const auto begin = uint32_t(offset % Block::num_bytes) / 4;
        const uint32_t end = std::min(Block::num_cells, begin + ((warp_size - lane) << row.shift));
        const uint32_t after = lane + ((end - begin) >> row.shift);
        if (try_row(block, row, lane, begin, end)) {
            lane = after;
            continue;
        }
        Cell* cells = cells_of(block) + begin;
        for (; lane < after; ++lane, cells += bytes / 4) {
            if (try_cells(cells, bytes / 4, row, row.first.bits | lane << 4)) continue;
            const Access access = is_write ? Access::write : Access::read;
            const uint64_t place = address + uint64_t(lane) * bytes;
            if (is_write) begin_store(at + lane * bytes, values + lane * bytes, bytes);
            if (in_shared)
                shared_access(w, *w.cta, uint32_t(place), bytes, access, int(lane));
            else
                global_access(w, place, bytes, access, int(lane));
            end_store();
        }
    }
}

void RaceDetector::lanes_differ(Warp& w, Space space, uint64_t address, int first, int second) {
    const WarpClock& c = *w.clock;
    const uint64_t window = space == Space::generic ? address & window_mask : 0;
    Location at{Space::global, address, w.cta};
    if (space == Space::shared || space == Space::shared_cluster || window == shared_window) {
        at = {Space::shared, address & shared_offset_mask,
              w.cta->cluster->ctas[uint32_t(address) >> shared_rank_shift]};
    }
    report({c.agent, c.now, uint32_t(first), 0, site_of(w)}, true,
           {c.agent, c.now, uint32_t(second), 0, site_of(w)}, true, at);
}

Record RaceDetector::last_write(const Block& block, uint64_t byte) const {
    if (!block.has_cells) {
        const int which = byte / 4 >= block.split;
        const auto& [cell, shift, read_shift] = block.stretches[which];
        if (!cell.write_bits) return {};
        return {cell.write_bits + ((byte / 4 - block.begin(which)) >> shift << 4), cell.write_site};
    }
    const Cell& word = block.cells[byte / 4];
    const Cell& cell = word.bytes ? split_cells_[word.bytes][byte % 4] : word;
    return {cell.write_bits, cell.write_site};
}

void RaceDetector::check_unwritten(Warp& w, uint64_t address, uint32_t bytes, int lane) {
    if (!watches_global_) return;
    const Block* blocks = page(address / page_bytes);
    const Record now{w.clock->agent, w.clock->now, uint32_t(lane), 0, site_of(w)};
    for (uint32_t i = 0; i < bytes; ++i) {
        const uint64_t byte = address % page_bytes + i;
        const Record write = last_write(blocks[byte / Block::num_bytes], byte % Block::num_bytes);
        if (!write.bits || agents_[write.agent()].cta->grid->has_ended()) continue;
        machine_.find(
            FaultKind::race,
            [&] {
                return "data race at " + describe_global(*w.grid->rank, address + i) +
                       ": ld.global.nc reads what is written while kernels run\n  first: " +
                       describe(write, true) + "\n  then: " + describe(now, false);
            },
            instruction_of(write),
            [&](Finding& finding) {
                finding.space = name_of(Space::global);
                finding.address = address + i;
                finding.involved = {involved(write, true), involved(now, false)};
            });
        return;
    }
}

// ---- asynchronous accesses

std::shared_ptr<const Issue> RaceDetector::issue(Warp& w, int lane) {
    WarpClock& c = *w.clock;
    auto issue = std::make_shared<Issue>();
    *issue = {c.order(lane).view,
              c.tensor,
              nullptr,
              w.cta,
              c.agent,
              c.now++,
              c.synced,
              uint32_t(lane),
              site_of(w),
              c.own[lane].async_shared,
              c.own[lane].async_global};
    return issue;
}

std::shared_ptr<const Issue> RaceDetector::issue_generic(Warp& w, int lane, uint32_t flags) {
    auto generic = std::make_shared<Issue>(*issue(w, lane));
    generic->is_generic = true;
    generic->flags = flags;
    return generic;
}

void RaceDetector::begin(const Issue& issue, uint32_t agent, uint32_t moment) {
    issue_ = &issue;
    // In place of a lane: the warp, for messages, and three bits of a hash of the issue (Knuth's
    // multiplicative one). They tell copies apart that one instruction issues and one phase of an
    // mbarrier counts, seven pairs of eight.
    const uint32_t warp = issue.cta ? agents_[issue.warp_agent].number : 0;
    const uint32_t which =
        is_counted(agent) ? (issue.now + issue.warp_agent) * 0x9e3779b9u >> 29 : 0;
    issue_record_ = {agent, moment, warp | which * warp_size,
                     issue.flags | (issue.is_generic ? 0 : Record::async), issue.site};
}

void RaceDetector::async_shared_access(Cta& cta, uint32_t offset, uint32_t bytes, Access access) {
    const bool is_write = access != Access::read;
    touch_range(shared_blocks(cta), offset, bytes, issue_record_, is_write,
                [&](const Record& old, bool old_is_write) {
                    return before_issue(old, old_is_write, is_write, false);
                },
                {Space::shared, offset, &cta});
}

void RaceDetector::async_global_access(uint64_t address, uint64_t bytes, Access access) {
    if (!watches_global_) return;
    const bool is_write = access != Access::read;
    while (bytes) {
        const uint64_t part = std::min(bytes, page_bytes - address % page_bytes);
        touch_range(page(address / page_bytes), address % page_bytes, part, issue_record_, is_write,
                    [&](const Record& old, bool old_is_write) {
                        return before_issue(old, old_is_write, is_write, true);
                    },
                    {Space::global, address, issue_->cta});
        address += part;
        bytes -= part;
    }
}

// ---- tensor memory

void RaceDetector::tensor_access(Cta& cta, uint32_t quadrants, uint32_t column, uint32_t count,
                                 Access access) {
    if (cta.tensor_cells.empty()) cta.tensor_cells.resize(4 * tensor_columns);
    const Issue& i = *issue_;
    auto ordered = [&](const Record& old, bool) {
        return old.agent() == issue_record_.agent() || old.moment() <= i.tensor->at(old.agent()) ||
               (i.completed && old.moment() <= i.completed->at(old.agent()));
    };
    for (uint32_t quadrant = 0; quadrant < 4; ++quadrant) {
        if (!(quadrants >> quadrant & 1)) continue;
        const uint32_t end = std::min(column + count, tensor_columns);
        for (uint32_t c = column; c < end;) {
            c += touch_alike(&cta.tensor_cells[quadrant * tensor_columns + c], end - c,
                             issue_record_, access != Access::read, ordered,
                             {Space::local, uint64_t(quadrant) * 32 << 16 | c, &cta});
        }
    }
}

void RaceDetector::forget_tensor_memory(Cta& cta, uint32_t column, uint32_t count) {
    if (cta.tensor_cells.empty()) return;
    for (uint32_t quadrant = 0; quadrant < 4; ++quadrant) {
        std::fill_n(cta.tensor_cells.begin() + quadrant * tensor_columns + column, count, Cell{});
    }
}

void RaceDetector::begin_transfer(Warp& w, bool is_load) {
    WarpClock& c = *w.clock;
    uint32_t& agent = is_load ? c.loads : c.stores;
    if (!agent) agent = new_agent(*w.cta, is_load ? "tcgen05.ld of" : "tcgen05.st of", w.index);
    transfer_ = {c.order(w.first_lane()).view,
                 c.tensor,
                 &c.completed,
                 w.cta,
                 c.agent,
                 c.now,
                 c.synced,
                 0,
                 site_of(w)};
    begin(transfer_, agent, 1 + (is_load ? c.num_loads : c.num_stores));
}

void RaceDetector::wait_loads(Warp& w) {
    WarpClock& c = *w.clock;
    if (c.loads) c.completed.raise(c.loads, ++c.num_loads);
}

void RaceDetector::wait_stores(Warp& w) {
    WarpClock& c = *w.clock;
    if (c.stores) c.completed.raise(c.stores, ++c.num_stores);
}

void RaceDetector::fence_before(Warp& w) {
    WarpClock& c = *w.clock;
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t) {
        View& view = order.change();
        view.tensor.join(c.completed);
        view.tensor.join(*c.tensor);
    });
}

void RaceDetector::fence_after(Warp& w) {
    WarpClock& c = *w.clock;
    if (c.tensor.use_count() > 1) c.tensor = std::make_shared<Clock>(*c.tensor);
    for_orders(w, w.exec, [&](LaneOrder& order, uint32_t) { c.tensor->join(order.view->tensor); });
}

void RaceDetector::release_tensor(WarpClock& c, LaneOrder& order) {
    if (machine_.strict_tcgen05 || order.view->tensor.covers(c.completed)) return;
    order.change().tensor.join(c.completed);
}

void RaceDetector::acquire_tensor(WarpClock& c, const LaneOrder& order) {
    if (machine_.strict_tcgen05 || c.tensor->covers(order.view->tensor)) return;
    if (c.tensor.use_count() > 1) c.tensor = std::make_shared<Clock>(*c.tensor);
    c.tensor->join(order.view->tensor);
}

void RaceDetector::commit(const Issue& issue, uint32_t agent, uint32_t moment, Cta& cta,
                          const Mbarrier& barrier) {
    // It says that the thread's operations are complete, and with them the copies that they had to
    // come after. It does not release what the thread itself had written or seen others write.
    View& into = order_of(cta, barrier).arriving;
    const Clock& seen = issue.view->seen;
    for (uint32_t a = std::max(seen.first, 1u); a < seen.end(); ++a) {
        if (!agents_[a].warp && seen.at(a)) into.seen.raise(a, seen.at(a));
    }
    into.seen.raise(agent, moment);
    into.overwritable.raise(agent, moment);
    into.tensor.join(*issue.tensor);
    into.tensor.raise(agent, moment);
}

// ---- messages

Place RaceDetector::instruction_of(const Record& record) const {
    auto found = std::find_if(sites_.rbegin(), sites_.rend(),
                              [&](const auto& s) { return s.first <= record.site; });
    if (found == sites_.rend()) return {};
    return {found->second, record.site - found->first};
}

std::string RaceDetector::access_of(const Record& record, bool is_write) const {
    return std::string(record.is_async() ? "asynchronous " : "") +
           (record.is_strong() ? "atomic or volatile " : "") + (is_write ? "write" : "read");
}

// The warp that made an access or issued it, and the lane if it is known.
std::pair<uint32_t, int> RaceDetector::thread_of(const Record& record) const {
    const Agent& agent = agents_[record.agent()];
    if (agent.warp) return {agent.number, int(record.lane())};
    if (agent.issuer) return {agent.number / warp_size, int(agent.number % warp_size)};
    return {is_counted(record.agent()) ? record.lane() % warp_size : agent.number, -1};
}

Involved RaceDetector::involved(const Record& record, bool is_write) const {
    const Cta& cta = *agents_[record.agent()].cta;
    const auto [warp, lane] = thread_of(record);
    const Place at = instruction_of(record);
    if (at.program)
        return involved_at({cta.grid, at.program, at.pc, cta.index, warp}, lane,
                           access_of(record, is_write));
    Involved i;
    i.access = access_of(record, is_write);
    i.rank = cta.grid->rank->index;
    i.cta = cta.index;
    i.warp = warp;
    i.lane = lane;
    return i;
}

std::string RaceDetector::describe(const Record& record, bool is_write) const {
    const Agent& agent = agents_[record.agent()];
    const auto [warp, lane] = thread_of(record);
    const std::string who =
        describe_warp(*agent.cta->grid, warp) + (lane < 0 ? "" : format(", lane %d", lane));
    std::string text =
        access_of(record, is_write) +
        format(" by rank %u, CTA %u, ", agent.cta->grid->rank->index, agent.cta->index);
    if (agent.warp)
        text += who;
    else if (!is_counted(record.agent()))
        text += agent.what + (" " + who);
    else
        text += agent.what + (" " + describe_shared(*agent.cta, agent.number)) + ", issued by " +
                who + (agent.cta->cluster->ctas.size() > 1 ? " of a CTA of the cluster" : "");
    const Place at = instruction_of(record);
    if (at.program) text += "\n    " + describe_instruction(*at.program, at.pc);
    return text;
}

void RaceDetector::report(const Record& old, bool old_is_write, const Record& record, bool is_write,
                          const Location& at) {
    const bool same_value = old_is_write && is_write && store_.value &&
                            !std::memcmp(store_.at, store_.value, store_.bytes);
    const auto fill = [&](Finding& finding) {
        finding.space = at.space == Space::local ? "tensor" : name_of(at.space);
        finding.address = at.address;
        finding.same_value = same_value;
        finding.involved = {involved(old, old_is_write), involved(record, is_write)};
    };
    const Place other = instruction_of(old);
    // What is known of a pair of lines says more than that both write one value there, too.
    static const char conflict = 0, agreement = 0;
    if (same_value && machine_.has_found(&conflict, other)) return;
    machine_.find_by(
        same_value ? &agreement : &conflict, FaultKind::race,
        [&] {
            return race_text(old, old_is_write, record, is_write, at,
                             same_value ? ", but both write the same value" : "");
        },
        other, fill);
}

std::string RaceDetector::race_text(const Record& old, bool old_is_write, const Record& record,
                                    bool is_write, const Location& at, const char* more) const {
    std::string place;
    if (at.space == Space::global)
        place = describe_global(*at.cta->grid->rank, at.address);
    else if (at.space == Space::shared)
        place =
            describe_shared(*at.cta, uint32_t(at.address)) + format(" of CTA %u", at.cta->index);
    else
        place = format("tensor memory address 0x%08llx of CTA %u", (unsigned long long)at.address,
                       at.cta->index);
    std::string reason = old.is_strong() && record.is_strong()
                             ? "the scope of one of them does not reach the other"
                             : "nothing orders them";
    if (issue_ && at.space == Space::local) {
        if (old.moment() <= issue_->view->seen.at(old.agent()) ||
            old.moment() <= issue_->view->tensor.at(old.agent()))
            reason = "a tcgen05 fence or wait is missing between them";
    } else if (issue_ && (old.agent() == issue_->warp_agent || covers(issue_->view->seen, old))) {
        reason = old.agent() == issue_->warp_agent && old.moment() >= issue_->synced &&
                         old.lane() != issue_->lane
                     ? "no bar.warp.sync orders the lanes"
                     : "they are ordered, but no fence.proxy.async stands between them";
    } else if (!issue_ && old.agent() == record.agent() && old.site == record.site) {
        reason = "lanes store different values by one instruction";
    } else if (!issue_ && old.agent() == record.agent()) {
        reason = "no bar.warp.sync orders the lanes";
    }
    return "data race at " + place + ": " + reason + more +
           "\n  first: " + describe(old, old_is_write) + "\n  then: " + describe(record, is_write);
}

}  // namespace deep_moe::emulator
