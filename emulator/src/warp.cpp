// What a warp does besides running bodies: groups of lanes that split, wait, meet and merge;
// checked memory access.
#include <algorithm>

#include "engine.h"

namespace deep_moe::emulator {

void Cta::check_range(uint32_t offset, uint32_t bytes, const char* what) const {
    const uint32_t begin = grid->program->shared_begin;
    if (offset < begin || offset >= shared_end || bytes > shared_end - offset) {
        throw Fault(
            FaultKind::out_of_bounds,
            format("%s of %u bytes at %s is out of bounds: the CTA's shared memory is 0x%x..0x%x",
                   what, bytes, describe_shared(*this, offset).c_str(), begin, shared_end));
    }
}

std::byte* Cta::shared_at(uint32_t offset, uint32_t bytes, Access access, const char* what) {
    check_range(offset, bytes, what);
    const auto fill = [&](Finding& finding) {
        finding.space = name_of(Space::shared);
        finding.address = offset;
    };
    if (machine->checks && std::memchr(shadow.data() + offset, 2, bytes)) {
        machine->find(
            FaultKind::barrier_misuse,
            [&] {
                const void* at = std::memchr(shadow.data() + offset, 2, bytes);
                const auto first = uint32_t(static_cast<const uint8_t*>(at) - shadow.data());
                return format("%s of %u bytes at %s touches the mbarrier ", what, bytes,
                              describe_shared(*this, offset).c_str()) +
                       describe_shared(*this, first / 8 * 8) +
                       ", which is in use: only mbarrier instructions may";
            },
            {}, fill);
    }
    if (access == Access::write) {
        std::memset(shadow.data() + offset, 1, bytes);
    } else if (machine->checks) {
        for (uint32_t i = 0; i < bytes; ++i) {
            if (shadow[offset + i]) continue;
            machine->find(
                FaultKind::uninitialized,
                [&] {
                    return format("%s of %u bytes at %s: byte 0x%x was never written", what, bytes,
                                  describe_shared(*this, offset).c_str(), offset + i);
                },
                {}, fill);
            break;
        }
    }
    return shared + offset;
}

uint64_t Warp::shared_address(uint64_t address) const {
    if ((address & window_mask) != shared_window) return address;
    machine->find(FaultKind::invalid_operation, [&] {
        return format(
            "0x%llx is a generic address, but the instruction says .shared: "
            "__cvta_generic_to_shared (cvta.to.shared) makes the address that it needs",
            (unsigned long long)address);
    });
    return address & ~window_mask;
}

std::byte* Warp::resolve(Space space, uint64_t address, uint32_t bytes, Access access, int lane) {
    try {
        if (space == Space::generic) {
            uint64_t window = address & window_mask;
            if (window == shared_window) {
                space = Space::shared_cluster;
                address &= ~window_mask;
            } else if (window == local_window) {
                space = Space::local;
                address &= ~window_mask;
            } else {
                space = Space::global;
            }
        }
        if (space == Space::shared || space == Space::shared_cluster)
            address = shared_address(address);
        // Vectors wider than 16 bytes are aligned like the rest: to their size.
        if (address & (bytes - 1)) {
            throw Fault(FaultKind::misaligned,
                        format("%s address 0x%llx is not aligned to %u bytes", name_of(space),
                               (unsigned long long)address, bytes));
        }
        const char* what = access == Access::read    ? "read"
                           : access == Access::write ? "write"
                                                     : "atomic update";
        switch (space) {
            case Space::shared:
            case Space::shared_cluster: {
                uint64_t rank = address >> shared_rank_shift;
                Cta* owner = cta;
                if (rank != cta->cluster_rank) {
                    if (space == Space::shared || rank >= cta->cluster->ctas.size()) {
                        throw Fault(FaultKind::out_of_bounds,
                                    format("%s address 0x%llx belongs to CTA rank %llu of the "
                                           "cluster, this CTA has "
                                           "rank %u of %zu",
                                           name_of(space), (unsigned long long)address,
                                           (unsigned long long)rank, cta->cluster_rank,
                                           cta->cluster->ctas.size()));
                    }
                    owner = cta->cluster->ctas[rank];
                    if (!owner->live_threads) {
                        throw Fault(FaultKind::out_of_bounds,
                                    format("%s of shared memory of CTA rank %llu, which has exited",
                                           what, (unsigned long long)rank));
                    }
                }
                const uint32_t offset = uint32_t(address) & shared_offset_mask;
                return owner->shared_at(offset, bytes, access, what);
            }
            case Space::local: {
                const uint32_t top = stack_tops[size_t(lane)];
                if (address >= top || bytes > top - address) {
                    throw Fault(
                        FaultKind::out_of_bounds,
                        format("%s of %u bytes at local address 0x%llx is out of bounds: the lane "
                               "has %u bytes of stack",
                               what, bytes, (unsigned long long)address, top));
                }
                return local_at(uint32_t(address), lane);
            }
            default: {
                const Region* r = find_region(address);
                if (!r || bytes > r->size - (address - r->address) ||
                    (access != Access::read && !r->writable))
                    grid->rank->memory.fail(address, bytes, access);
                return r->host(address);
            }
        }
    } catch (Fault& fault) {
        fault.lane = lane;
        if (!fault.finding) {
            fault.space = name_of(space);
            fault.address = address;
        }
        throw;
    }
}

void Warp::grow_stack(uint32_t top, int lane) {
    const uint64_t needed = top + call_stacks[size_t(lane)].size() * sizeof(Activation) +
                            kept_registers[size_t(lane)].size() * sizeof(uint32_t);
    if (needed > max_stack_bytes) {
        throw Fault(
            FaultKind::out_of_bounds,
            format("stack overflow: the lane needs %llu bytes of local memory and for %zu "
                   "calls, more than %u",
                   (unsigned long long)needed, call_stacks[size_t(lane)].size(), max_stack_bytes),
            lane);
    }
    if (top <= local_stride) return;
    const uint32_t stride =
        std::max(local_stride * 2, (top + frame_alignment - 1) / frame_alignment * frame_alignment);
    std::vector<std::byte> grown(size_t(stride) * warp_size, std::byte{0xcb});
    for (size_t i = 0; i < warp_size; ++i)
        std::copy_n(local.data() + i * local_stride, local_stride, grown.data() + i * stride);
    local = std::move(grown);
    local_stride = stride;
}

// ---- groups
// ---------------------------------------------------------------------------------------------------

Flow Warp::block(WaitQueue& queue, const char* text, uint64_t a, uint64_t b, uint64_t deadline) {
    if (exec != current.lanes) {  // the lanes whose guard is false go on
        Group rest;
        rest.pc = current.pc + 1;
        rest.lanes = current.lanes & ~exec;
        others.push_back(rest);
        current.lanes = exec;
    }
    current.wait = {text, a, b, {}};
    current.deadline = deadline;
    queue.warps.push_back(this);
    if (machine->timing) {
        if (&queue == &machine->sleepers) engine_of(*machine).wake_at(*this, deadline);
    } else if (deadline) {
        engine_of(*machine).timers.emplace(deadline, this);
        Turns::Naps& naps = turns->naps;
        if (naps.progress != machine->progress) naps.count = 0;
        naps = {naps.count + 1, machine->progress, polls, polls != naps.polls_before};
    }
    return Flow::blocked;
}

Flow Warp::block(WaitQueue& queue, const Awaited& awaited, uint64_t deadline) {
    const Flow flow = block(queue, "", 0, 0, deadline);
    current.wait.awaited = awaited;
    return flow;
}

Flow Warp::jump(uint32_t target) {
    uint32_t taken = exec;
    if (taken == current.lanes) {
        current.pc = target;
        return Flow::jumped;
    }
    Group rest;
    rest.lanes = current.lanes & ~taken;
    rest.pc = current.pc + 1;
    current.lanes = taken;
    current.pc = target;
    if (rest.pc < current.pc) std::swap(rest, current);
    others.push_back(rest);
    return Flow::jumped;
}

void Warp::exit_lanes(uint32_t lanes) {
    live &= ~lanes;
    current.lanes &= ~lanes;
    for (Group& g : others) g.meeting = false;  // whoever waits for these lanes looks again
    uint32_t count = uint32_t(__builtin_popcount(lanes));
    cta->live_threads -= count;
    Cluster& cluster = *cta->cluster;
    cluster.live_threads -= count;
    if (cluster_generation == cluster.generation)
        cluster.arrived -= uint32_t(__builtin_popcount(cluster_arrived & lanes));
    cluster_arrived &= ~lanes;
    machine->note_progress();
    cta->threads_exited();
}

}  // namespace deep_moe::emulator
