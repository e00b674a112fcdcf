// What to say when nothing can go on: each role, where it stands, and what it waits for.
#include <algorithm>
#include <cstring>

#include "async_units.h"
#include "engine.h"

namespace deep_moe::emulator {

namespace {

std::string describe_mbarrier(const Awaited& awaited) {
    const Cta& cta = *awaited.cta;
    const uint32_t offset = uint32_t(awaited.address);
    const Mbarrier* barrier = find_mbarrier(cta, offset);
    std::string text = "mbarrier " + describe_shared(cta, offset);
    if (!barrier || !barrier->valid) return text + ", which is not initialized";
    const auto phase = (unsigned long long)barrier->phase;
    text += awaited.kind == Awaited::Kind::mbarrier_parity
                ? format(": parity %llu; it is in phase %llu", awaited.value, phase)
                : format(": end of phase %llu; it is in phase %llu", awaited.value, phase);
    text += format(", %u of %u arrivals", barrier->expected - barrier->pending, barrier->expected);
    if (barrier->transactions > 0)
        text += format(", %lld bytes still to come", (long long)barrier->transactions);
    if (barrier->transactions < 0)
        text += format(", %lld bytes more than expected", -(long long)barrier->transactions);
    return text + Mbarrier::text_of(barrier->events);
}

std::string describe_memory(const Awaited& awaited) {
    const Cta& cta = *awaited.cta;
    const bool is_shared = awaited.kind == Awaited::Kind::shared_memory;
    const std::byte* at = is_shared ? cta.shared + awaited.address
                                    : reinterpret_cast<const std::byte*>(awaited.address);
    uint64_t value = 0;
    std::memcpy(&value, at, std::min<uint64_t>(awaited.value, sizeof value));
    return (is_shared ? describe_shared(cta, uint32_t(awaited.address))
                      : describe_global(*cta.grid->rank, awaited.address)) +
           format(", which is 0x%llx", (unsigned long long)value);
}

}  // namespace

// Events of one kind at one place are added up.
std::string Mbarrier::text_of(const std::vector<Event>& events) {
    constexpr size_t max_lines = 8;
    std::vector<Event> sums;
    for (const Event& e : events) {
        auto same = std::find_if(sums.begin(), sums.end(), [&](const Event& other) {
            const Where &a = e.where, &b = other.where;
            return e.kind == other.kind && a.grid == b.grid && a.cta == b.cta && a.warp == b.warp &&
                   a.pc == b.pc;
        });
        if (same == sums.end())
            sums.push_back(e);
        else
            same->amount += e.amount;
    }
    std::string text;
    for (size_t i = 0; i < std::min(sums.size(), max_lines); ++i) {
        const Event& e = sums[i];
        const char* pattern = e.kind == Event::Kind::arrival    ? "\n      %lld arrived: "
                              : e.kind == Event::Kind::expected ? "\n      %lld bytes expected by "
                                                                : "\n      %lld bytes brought for ";
        text += format(pattern, (long long)e.amount) + describe_site(e.where);
    }
    if (sums.size() > max_lines) text += format("\n      and %zu more", sums.size() - max_lines);
    return text;
}

std::string describe(const Awaited& awaited) {
    switch (awaited.kind) {
        case Awaited::Kind::nothing:
            break;
        case Awaited::Kind::mbarrier_parity:
        case Awaited::Kind::mbarrier_state:
            return describe_mbarrier(awaited);
        case Awaited::Kind::named_barrier: {
            const NamedBarrier& b = awaited.cta->barriers[awaited.address];
            return format("barrier %llu (%u of %u threads have arrived)",
                          (unsigned long long)awaited.address, b.arrived, b.expected);
        }
        case Awaited::Kind::cluster_barrier:
            return format("the cluster barrier (%u of %u threads have arrived)",
                          awaited.cta->cluster->arrived, awaited.cta->cluster->live_threads);
        case Awaited::Kind::memory:
        case Awaited::Kind::shared_memory:
            return describe_memory(awaited);
    }
    return "";
}

std::string Engine::deadlock_report(const char* reason) const {
    // Warps of one role that stand at the same instruction differ in numbers only: the first is
    // shown, the others are counted.
    struct Stand {
        std::string text;
        std::vector<std::string> others;
    };
    std::vector<Stand> stands;
    std::map<std::tuple<const Program*, std::string, uint32_t, bool>, size_t> known;
    auto add = [&](const Warp& w, const Group& g) {
        if (!g.lanes) return;
        const Grid& grid = *w.grid;
        std::string role = role_of(grid, w.index);
        if (role.empty()) role = describe_warp(grid, w.index);
        const std::string who =
            format("rank %u, CTA %u, ", grid.rank->index, w.cta->index) +
            describe_warp(grid, w.index) +
            (g.lanes != w.live ? format(", lanes 0x%08x", g.lanes) : std::string());
        const bool waits = g.blocked || g.meeting;
        auto [found, is_new] = known.try_emplace({w.program, role, g.pc, waits}, stands.size());
        if (!is_new) {
            stands[found->second].others.push_back(who);
            return;
        }
        std::string text = "kernel " + readable_name(w.program->name) + ", " + who;
        const std::string awaited = describe(g.wait.awaited);
        if (waits)
            text += " waits for " +
                    (awaited.empty() ? format(g.wait.text, g.wait.a, g.wait.b) : awaited);
        else
            text += " runs";
        // What it looked at since anything changed, unless that is what it waits for.
        const bool polls = w.last_poll.kind != Awaited::Kind::nothing &&
                           w.progress_at_poll == progress && !(waits && !awaited.empty());
        if (polls) text += "\n    polls " + describe(w.last_poll);
        stands.push_back({text + "\n    " + describe_instruction(*w.program, g.pc), {}});
    };
    for (const auto& grid : grids) {
        for (const auto& cta : grid->ctas) {
            if (!cta) continue;
            for (const auto& w : cta->warps) {
                if (!w->live) continue;
                add(*w, w->current);
                for (const Group& g : w->others) add(*w, g);
            }
        }
    }
    constexpr size_t max_stands = 64, max_others = 3;
    std::string text = std::string("deadlock: ") + reason;
    for (size_t i = 0; i < std::min(stands.size(), max_stands); ++i) {
        const auto& others = stands[i].others;
        text += "\n" + stands[i].text;
        if (others.empty()) continue;
        text += "\n    and so do ";
        for (size_t k = 0; k < std::min(others.size(), max_others); ++k)
            text += (k ? "; " : "") + others[k];
        if (others.size() > max_others)
            text += format("; and %zu more", others.size() - max_others);
    }
    if (stands.size() > max_stands)
        text += format("\n... and %zu more", stands.size() - max_stands);
    return text;
}

}  // namespace deep_moe::emulator
