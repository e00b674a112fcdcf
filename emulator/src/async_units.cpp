#include "async_units.h"

#include <algorithm>

namespace deep_moe::emulator {
namespace {

struct MbarrierTable {
    std::unordered_map<uint32_t, Mbarrier> barriers;
};

template <class State>
State& unit_state(Cta& cta, Unit unit) {
    auto& slot = cta.units[int(unit)];
    if (!slot) slot = std::make_shared<State>();
    return *static_cast<State*>(slot.get());
}

}  // namespace

SharedPlace shared_place(const Warp& w, Space space, uint64_t address, int lane) {
    const auto shown = static_cast<unsigned long long>(address);
    if (space == Space::generic) {
        if ((address & window_mask) != shared_window) {
            throw Fault(FaultKind::invalid_operation,
                        format("generic address 0x%llx does not lead to shared memory", shown),
                        lane);
        }
        address &= ~window_mask;
    } else {
        address = w.shared_address(address);
    }
    const uint32_t rank = uint32_t(address >> shared_rank_shift),
                   offset = uint32_t(address) & shared_offset_mask;
    if (address >> 32 || rank >= w.cta->cluster->ctas.size()) {
        throw Fault(FaultKind::out_of_bounds,
                    format("shared address 0x%llx: the cluster has %zu CTAs", shown,
                           w.cta->cluster->ctas.size()),
                    lane);
    }
    if (space == Space::shared && rank != w.cta->cluster_rank) {
        throw Fault(FaultKind::invalid_operation,
                    format("shared address 0x%llx lies in the CTA with cluster rank %u, but "
                           ".shared::cta reaches only the "
                           "own CTA, rank %u",
                           shown, rank, w.cta->cluster_rank),
                    lane);
    }
    return {&cluster_cta(*w.cta, rank, "shared memory access"), offset};
}

Cta& cluster_cta(Cta& cta, uint32_t rank, const char* what) {
    const auto& ctas = cta.cluster->ctas;
    if (rank >= ctas.size()) {
        fail(FaultKind::invalid_operation,
             "%s needs the CTA with cluster rank %u, but the cluster has %zu CTAs", what, rank,
             ctas.size());
    }
    if (!ctas[rank] || ctas[rank]->live_threads == 0) {
        fail(FaultKind::invalid_operation,
             "%s needs the CTA with cluster rank %u, which has exited", what, rank);
    }
    return *ctas[rank];
}

Mbarrier& mbarrier_at(Cta& cta, uint32_t offset) {
    if (offset % 8)
        fail(FaultKind::misaligned, "mbarrier address 0x%x is not a multiple of 8", offset);
    auto& barriers = unit_state<MbarrierTable>(cta, Unit::mbarrier).barriers;
    auto found = barriers.find(offset);
    if (found != barriers.end()) return found->second;
    cta.shared_at(offset, 8, Access::write, "mbarrier");
    Mbarrier& barrier = barriers[offset];
    barrier.address = offset;
    barrier.name = describe_shared(cta, offset);
    return barrier;
}

const Mbarrier* find_mbarrier(const Cta& cta, uint32_t offset) {
    const auto& slot = cta.units[int(Unit::mbarrier)];
    if (!slot) return nullptr;
    const auto& barriers = static_cast<const MbarrierTable*>(slot.get())->barriers;
    auto found = barriers.find(offset);
    return found == barriers.end() ? nullptr : &found->second;
}

void signal(Cta& cta, const Mbarrier& barrier, bool phase_complete) {
    cta.machine->note_progress();
    if (!phase_complete) return;
    if (barrier.unseen) {
        cta.machine->find(FaultKind::barrier_misuse, [&] {
            return format(
                "the mbarrier %s completes phase %llu although nobody has seen the end of the "
                "phase before",
                barrier.name.c_str(), (unsigned long long)barrier.phase - 1);
        });
    }
    if (cta.machine->races) cta.machine->races->phase_complete(cta, barrier);
    cta.machine->wake(cta.mbarrier_waiters, barrier.address);
}

void arrive_at(Cta& cta, uint32_t offset, uint32_t count) {
    Mbarrier& barrier = mbarrier_at(cta, offset);
    if (cta.machine->checks)
        barrier.note(Mbarrier::Event::Kind::arrival, count, cta.machine->here());
    signal(cta, barrier, barrier.arrive(count));
}

uint64_t phase_of(const Cta& cta, uint32_t offset) {
    const Mbarrier* barrier = find_mbarrier(cta, offset);
    return barrier ? barrier->phase : 0;
}

void complete_bytes_at(Cta& cta, uint32_t offset, uint32_t num_bytes, uint64_t phase) {
    Mbarrier& barrier = mbarrier_at(cta, offset);
    if (cta.machine->checks) {
        if (barrier.phase != phase) {
            cta.machine->find(FaultKind::barrier_misuse, [&] {
                return format(
                           "%u bytes come to the mbarrier %s in its phase %llu, but their copy "
                           "was issued in phase %llu, which has ended without them:",
                           num_bytes, barrier.name.c_str(), (unsigned long long)barrier.phase,
                           (unsigned long long)phase) +
                       Mbarrier::text_of(barrier.previous_events);
            });
        }
        barrier.note(Mbarrier::Event::Kind::brought, num_bytes, cta.machine->here());
    }
    signal(cta, barrier, barrier.complete(num_bytes));
}

std::shared_ptr<const Issue> issue_of(Warp& w, int lane) {
    return w.machine->races ? w.machine->races->issue(w, lane) : nullptr;
}

AsyncAccesses accesses_by_barrier(const std::shared_ptr<const Issue>& issue, Cta& barrier_cta,
                                  uint32_t offset) {
    RaceDetector* races = issue ? barrier_cta.machine->races.get() : nullptr;
    if (!races) return {nullptr, issue, 0, 0};
    const Mbarrier& barrier = mbarrier_at(barrier_cta, offset);
    return {races, issue, races->order_of(barrier_cta, barrier).agent, uint32_t(barrier.phase) + 1};
}

void CtaWindow::note(uint32_t address, uint32_t num_bytes, Access access) {
    cta_.check_range(address, num_bytes, what_);
    cta_.machine->races->async_shared_access(cta_, address, num_bytes, access);
}

static void note(Machine& machine, const Region* region, uint64_t address, uint64_t num_bytes,
                 Access access) {
    if (!machine.races || !machine.races->is_active()) return;
    if (access == Access::read && region && !region->writable) return;
    machine.races->async_global_access(address, num_bytes, access);
}

const uint8_t* RankMemory::read(uint64_t address, uint64_t num_bytes) {
    const std::byte* at = rank_.memory.resolve(address, num_bytes, Access::read);
    note(machine_, machine_.races ? rank_.memory.find(address) : nullptr, address, num_bytes,
         Access::read);
    return reinterpret_cast<const uint8_t*>(at);
}

uint8_t* RankMemory::write(uint64_t address, uint64_t num_bytes) {
    std::byte* at = rank_.memory.resolve(address, num_bytes, Access::write);
    note(machine_, nullptr, address, num_bytes, Access::write);
    return reinterpret_cast<uint8_t*>(at);
}

BulkState& bulk_state(Cta& cta) {
    return unit_state<BulkState>(cta, Unit::bulk_copy);
}

TensorMemoryState& tensor_memory_state(Cta& cta) {
    return unit_state<TensorMemoryState>(cta, Unit::tensor_memory);
}

void BulkState::release(const Where& copy) {
    auto found = std::find(in_flight.begin(), in_flight.end(), copy);
    if (found != in_flight.end()) in_flight.erase(found);
}

static std::string describe_copies(const std::vector<Where>& copies) {
    constexpr size_t max_named = 4;
    std::vector<std::string> named;
    for (const Where& copy : copies) {
        std::string site = describe_site(copy);
        if (std::find(named.begin(), named.end(), site) == named.end())
            named.push_back(std::move(site));
    }
    std::string text = format(
        "the CTA exits while asynchronous copies that need its shared memory are in flight (%zu):",
        copies.size());
    for (size_t i = 0; i < named.size() && i < max_named; ++i)
        text += "\n    issued by " + named[i];
    if (named.size() > max_named) text += format("\n    and %zu more", named.size() - max_named);
    return text;
}

void check_units_at_exit(Cta& cta) {
    Machine& machine = *cta.machine;
    for (const auto& w : cta.warps) {
        const Warp& first = *cta.warps[w->index / 4 * 4];
        if (w->register_changes.size() == first.register_changes.size()) continue;
        machine.find(FaultKind::invalid_operation, [&] {
            return describe_warp(*cta.grid, w->index) +
                   format(" has executed %zu setmaxnreg, ", w->register_changes.size()) +
                   describe_warp(*cta.grid, first.index) +
                   format(" of its warpgroup %zu: all of a warpgroup must execute the same",
                          first.register_changes.size());
        });
    }
    if (cta.units[int(Unit::bulk_copy)] && !bulk_state(cta).in_flight.empty()) {
        machine.find(FaultKind::invalid_operation,
                     [&] { return describe_copies(bulk_state(cta).in_flight); });
    } else if (cta.units[int(Unit::mbarrier)]) {
        for (const auto& [offset, barrier] :
             unit_state<MbarrierTable>(cta, Unit::mbarrier).barriers) {
            if (!barrier.valid || !barrier.transactions) continue;
            machine.find(FaultKind::barrier_misuse, [&] {
                return format("the CTA exits although the mbarrier %s ", barrier.name.c_str()) +
                       (barrier.transactions > 0
                            ? format("expects %lld more bytes in its phase %llu:",
                                     (long long)barrier.transactions,
                                     (unsigned long long)barrier.phase)
                            : format("got %lld bytes more than expected in its phase %llu:",
                                     -(long long)barrier.transactions,
                                     (unsigned long long)barrier.phase)) +
                       Mbarrier::text_of(barrier.events);
            });
        }
    }
    if (!cta.units[int(Unit::tensor_memory)]) return;
    const TensorMemoryState& state = tensor_memory_state(cta);
    if (state.in_flight) {
        machine.find(FaultKind::invalid_operation, [&] {
            return format("the CTA exits while %u tcgen05 operation(s) that use it are in flight",
                          state.in_flight);
        });
    }
    if (state.memory.num_allocated()) {
        machine.find(FaultKind::invalid_operation, [&] {
            return format("the CTA exits without giving back %u columns of tensor memory",
                          state.memory.num_allocated());
        });
    }
}

}  // namespace deep_moe::emulator
