// cp.async.bulk*, cp.reduce.async.bulk*, prefetches of bytes and of tensor maps.
//
// A copy is checked when it is issued and happens later, at a moment that the seed chooses: first
// its data, then its completion. A store of a bulk group happens in two steps, reading its source
// and writing its destination.
#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>
#include <utility>

#include "async_units.h"
#include "float_types.h"
#include "instruction_table.h"
#include "numeric.h"
#include "race_detector.h"
#include "reductions.h"
#include "timing.h"

namespace deep_moe::emulator {
namespace {

constexpr uint64_t no_order = 0;

// ---- decoding

// aux of every copy.
struct CopyForm {
    Space destination = Space::shared_cluster, source = Space::global;
    uint8_t rank = 0;  // of the tensor, 0 for plain bytes
    bool multicast = false, pair_barrier = false, bulk_group = false, byte_mask = false;
    bool picks_rows = false;  // tile::gather4, tile::scatter4
    bool is_im2col = false, has_offsets = false;
    Reduction reduction = Reduction::none;
    Type type = Type::none;

    uint64_t pack() const {
        return uint64_t(destination) | uint64_t(source) << 8 | uint64_t(rank) << 16 |
               uint64_t(multicast) << 20 | uint64_t(pair_barrier) << 21 |
               uint64_t(bulk_group) << 22 | uint64_t(byte_mask) << 23 | uint64_t(reduction) << 24 |
               uint64_t(type) << 32 | uint64_t(picks_rows) << 40 | uint64_t(is_im2col) << 41 |
               uint64_t(has_offsets) << 42;
    }
    int num_offsets() const { return has_offsets ? rank - 2 : 0; }
    int num_coordinates() const { return picks_rows ? 1 + TensorMap::num_picked_rows : rank; }
    static CopyForm unpack(uint64_t aux) {
        CopyForm form;
        form.destination = Space(aux & 0xff);
        form.source = Space(aux >> 8 & 0xff);
        form.rank = uint8_t(aux >> 16 & 0xf);
        form.multicast = aux >> 20 & 1;
        form.pair_barrier = aux >> 21 & 1;
        form.bulk_group = aux >> 22 & 1;
        form.byte_mask = aux >> 23 & 1;
        form.reduction = Reduction(aux >> 24 & 0xff);
        form.type = Type(aux >> 32 & 0xff);
        form.picks_rows = aux >> 40 & 1;
        form.is_im2col = aux >> 41 & 1;
        form.has_offsets = aux >> 42 & 1;
        return form;
    }
};

// Destination and source space stand in this order among the modifiers.
Space take_next_space(Decoder& d) {
    for (const std::string& modifier : d.modifiers) {
        if (modifier == "global") return d.take("global"), Space::global;
        if (modifier == "shared::cta") return d.take("shared::cta"), Space::shared;
        if (modifier == "shared::cluster") return d.take("shared::cluster"), Space::shared_cluster;
    }
    d.invalid("destination or source space is missing");
}

uint8_t take_rank(Decoder& d) {
    for (int rank = 1; rank <= TensorMap::max_rank; ++rank) {
        if (d.take(std::to_string(rank) + "d")) return uint8_t(rank);
    }
    d.invalid("the dimension (.1d to .5d) is missing");
}

// `[map, {x, y}]` -> map address and coordinates.
void append_tensor_operand(Decoder& d, size_t index, int rank, std::vector<Operand>& operands) {
    const ParsedOperand& p = d.parsed(index);
    if (p.kind != ParsedOperand::Kind::address || p.elements.size() != 1) {
        d.invalid("expected [tensor map, {coordinates}]");
    }
    operands.push_back(d.address(p));
    const ParsedOperand& list = p.elements[0];
    if (list.kind != ParsedOperand::Kind::vector) {
        if (rank != 1) d.invalid("the number of coordinates does not match the dimension");
        operands.push_back(d.source(list, Type::s32));
        return;
    }
    if (list.elements.size() != rank)
        d.invalid("the number of coordinates does not match the dimension");
    for (const ParsedOperand& coordinate : list.elements)
        operands.push_back(d.source(coordinate, Type::s32));
}

// Of loads and prefetches: .tile, .tile::gather4, .im2col; of stores: .tile, .tile::scatter4,
// .im2col_no_offs.
void take_mode(Decoder& d, CopyForm& form, bool is_store) {
    form.picks_rows = d.take(is_store ? "tile::scatter4" : "tile::gather4");
    if (form.picks_rows && form.rank != 2) d.invalid("its tensors have two dimensions");
    form.is_im2col = d.take(is_store ? "im2col_no_offs" : "im2col");
    form.has_offsets = form.is_im2col && !is_store;
    if (form.is_im2col && form.rank < 3) d.invalid(".im2col is of three to five dimensions");
    // Where the halo's elements lie PTX shows in figures only.
    if (d.has("im2col::w") || d.has("im2col::w::128")) d.unsupported("the mode im2col::w");
    d.ignore({"tile"});
}

// `{w, h, d}`, as many as there are.
void append_offsets(Decoder& d, size_t index, const CopyForm& form,
                    std::vector<Operand>& operands) {
    if (!form.has_offsets) return;
    const std::vector<Operand> offsets = d.sources(index, Type::u16);
    if (offsets.size() != size_t(form.num_offsets()))
        d.invalid("the number of im2col offsets does not match the dimension");
    operands.insert(operands.end(), offsets.begin(), offsets.end());
}

void take_completion(Decoder& d, CopyForm& form) {
    if (d.take("mbarrier::complete_tx::bytes")) {
        if (form.destination == Space::global)
            d.invalid("a copy to global memory completes by .bulk_group");
    } else if (d.take("bulk_group")) {
        if (form.destination != Space::global)
            d.invalid("a copy to shared memory completes by an mbarrier");
        form.bulk_group = true;
    } else {
        d.invalid("the completion mechanism is missing");
    }
    form.multicast = d.take("multicast::cluster");
}

// ---- effects

void check_aligned(uint64_t value, uint32_t grain, const char* what, int lane) {
    if (value % grain == 0) return;
    throw Fault(FaultKind::misaligned,
                format("%s 0x%llx is not a multiple of %u", what,
                       static_cast<unsigned long long>(value), grain),
                lane);
}

// One CTA that receives data, and the barrier that counts it.
struct Receiver {
    Cta* cta;
    Cta* barrier_cta;
    uint64_t phase;  // of the barrier, when the copy was issued
};

std::vector<Receiver> receivers(Warp& w, const CopyForm& form, const SharedPlace& destination,
                                const SharedPlace& barrier, uint32_t mask, int lane) {
    const uint32_t barrier_rank = barrier.cta->cluster_rank;
    std::vector<Receiver> all;
    if (form.multicast) {
        if (mask == 0)
            throw Fault(FaultKind::invalid_operation, "multicast with an empty CTA mask", lane);
        for (uint32_t rank = 0; rank < 16; ++rank) {
            if (!(mask >> rank & 1)) continue;
            Cta& cta = cluster_cta(*w.cta, rank, "multicast copy");
            // Each receiver signals itself, or the member of its pair that has the parity of the
            // given barrier's CTA.
            const uint32_t target = form.pair_barrier ? (rank & ~1u) | (barrier_rank & 1) : rank;
            Cta& barrier_cta = cluster_cta(*w.cta, target, "multicast copy");
            all.push_back({&cta, &barrier_cta, phase_of(barrier_cta, barrier.offset)});
        }
        return all;
    }
    const bool pair = form.pair_barrier && (destination.cta->cluster_rank ^ barrier_rank) == 1;
    if (destination.cta != barrier.cta && !pair) {
        throw Fault(FaultKind::invalid_operation,
                    format("the destination lies in the CTA with cluster rank %u, the mbarrier in "
                           "rank %u: they must be "
                           "the same%s",
                           destination.cta->cluster_rank, barrier_rank,
                           form.pair_barrier ? " or a pair" : " (or a pair, with .cta_group::2)"),
                    lane);
    }
    all.push_back({destination.cta, barrier.cta, phase_of(*barrier.cta, barrier.offset)});
    return all;
}

// Counts a copy for as long as it needs the CTA's shared memory.
void hold(Cta& cta) {
    bulk_state(cta).hold(cta.machine->here());
}
void release(Cta& cta) {
    bulk_state(cta).release(cta.machine->here());
}

void hold(const std::vector<Receiver>& all) {
    for (const Receiver& r : all) hold(*r.cta), hold(*r.barrier_cta);
}
void release(const std::vector<Receiver>& all) {
    for (const Receiver& r : all) release(*r.cta), release(*r.barrier_cta);
}

std::shared_ptr<BulkGroup> join_group(Warp& w, int lane) {
    BulkThread& thread = bulk_state(*w.cta).threads[thread_in_cta(w, lane)];
    if (w.machine->races && !thread.read_agent) {
        RaceDetector& races = *w.machine->races;
        const uint32_t index = thread_in_cta(w, lane), warp = w.clock->agent;
        thread.read_agent = races.new_agent(*w.cta, "reads of bulk groups of", index, warp);
        thread.write_agent = races.new_agent(*w.cta, "writes of bulk groups of", index, warp);
    }
    auto group = thread.open;
    ++group->unread;
    ++group->unfinished;
    return group;
}

void finish_read(Cta& cta, BulkGroup& group) {
    --group.unread;
    release(cta);
    cta.machine->wake(cta.bulk_waiters);
    cta.machine->note_progress();
}

// The CTA may be gone by now: the writes of a group only need it if somebody still waits for them.
void finish_write(const std::weak_ptr<BulkGroup>& weak, Cta* cta) {
    auto group = weak.lock();
    if (!group) return;
    --group->unfinished;
    cta->machine->wake(cta->bulk_waiters);
    cta->machine->note_progress();
}

struct Piece {  // of a store
    uint64_t address;
    std::vector<uint8_t> bytes;
};

// A store or reduction to global memory: `read` fills the pieces, later they are written.
void store_in_two_steps(Warp& w, const CopyForm& form, int lane, uint64_t num_bytes,
                        uint64_t address, std::function<void(std::vector<Piece>&)> read) {
    auto group = join_group(w, lane);
    auto pieces = std::make_shared<std::vector<Piece>>();
    Cta* cta = w.cta;
    Rank* rank = w.grid->rank;
    hold(*cta);
    const uint64_t key = w.machine->new_order_key();
    auto issue = issue_of(w, lane);
    if (issue && form.reduction != Reduction::none) {  // relaxed atomics of gpu scope
        auto updates = std::make_shared<Issue>(*issue);
        updates->flags = Record::strong | uint32_t(Scope::gpu) << 2;
        issue = std::move(updates);
    }
    const BulkThread& thread = bulk_state(*cta).threads[thread_in_cta(w, lane)];
    const uint32_t readers = thread.read_agent, writers = thread.write_agent,
                   moment = thread.num_committed + 1;
    Timing* timing = w.machine->timing;
    const int64_t read_at = timing ? timing->bulk_store_read(w, num_bytes) : 0,
                  written_at =
                      timing ? timing->bulk_store_write(w, address, num_bytes, read_at) : 0;
    const auto read_source = [=, read = std::move(read)] {
        {
            AsyncAccesses accesses(cta->machine->races.get(), issue, readers, moment);
            read(*pieces);
        }
        finish_read(*cta, *group);
    };
    const auto write_destination = [=, weak = std::weak_ptr(group)] {
        RankMemory memory(*cta->machine, *rank);
        {
            AsyncAccesses accesses(cta->machine->races.get(), issue, writers, moment);
            for (const Piece& piece : *pieces) {
                combine(form.reduction, form.type, memory.write(piece.address, piece.bytes.size()),
                        piece.bytes.data(), piece.bytes.size());
            }
        }
        finish_write(weak, cta);
    };
    w.machine->enqueue_async(w, "bulk store, reading its source", key, read_source, read_at);
    w.machine->enqueue_async(w, "bulk store, writing its destination", key, write_destination,
                             written_at);
}

// ---- plain bytes

// destination, source, size, mbarrier, CTA mask or byte mask
Flow copy_bytes(Warp& w, const Op& op) {
    const CopyForm form = CopyForm::unpack(op.aux);
    w.for_each_lane([&](int lane) {
        const uint64_t destination = w.address(op.operands[0], lane),
                       source = w.address(op.operands[1], lane);
        const uint32_t size = w.in<uint32_t>(op.operands[2])[lane],
                       mask = w.in<uint32_t>(op.operands[4])[lane];
        check_aligned(destination, 16, "bulk copy: destination", lane);
        check_aligned(source, 16, "bulk copy: source", lane);
        check_aligned(size, 16, "bulk copy: size", lane);
        Cta* own = w.cta;
        if (form.bulk_group) {
            const SharedPlace from = shared_place(w, Space::shared, source, lane);
            store_in_two_steps(w, form, lane, size, destination, [=](std::vector<Piece>& pieces) {
                const uint8_t* bytes = CtaWindow(*own, "bulk copy").read(from.offset, size);
                if (!form.byte_mask) {
                    pieces.push_back({destination, {bytes, bytes + size}});
                    return;
                }
                for (uint32_t i = 0; i < size; ++i) {
                    if (mask >> (i % 16) & 1) pieces.push_back({destination + i, {bytes[i]}});
                }
            });
            return;
        }
        const SharedPlace to = shared_place(w, form.destination, destination, lane);
        const SharedPlace barrier =
            shared_place(w, form.destination, w.address(op.operands[3], lane), lane);
        const std::vector<Receiver> all = receivers(w, form, to, barrier, mask, lane);
        hold(all);
        Rank* rank = w.grid->rank;
        SharedPlace from{};
        if (form.source != Space::global) {
            from = shared_place(w, Space::shared, source, lane);
            hold(*own);
        }
        const auto copy = [=, issue = issue_of(w, lane)] {
            const uint8_t* bytes;
            {
                const auto accesses =
                    accesses_by_barrier(issue, *all[0].barrier_cta, barrier.offset);
                bytes = from.cta ? CtaWindow(*own, "bulk copy").read(from.offset, size)
                                 : RankMemory(*own->machine, *rank).read(source, size);
            }
            for (const Receiver& r : all) {
                const auto accesses = accesses_by_barrier(issue, *r.barrier_cta, barrier.offset);
                combine(form.reduction, form.type,
                        CtaWindow(*r.cta, "bulk copy").write(to.offset, size), bytes, size);
            }
            if (from.cta) release(*own);
            release(all);
            for (const Receiver& r : all)
                complete_bytes_at(*r.barrier_cta, barrier.offset, size, r.phase);
        };
        constexpr const char* kind = "bulk copy to shared memory";
        if (from.cta) {
            Timing* timing = w.machine->timing;
            w.machine->enqueue_async(w, kind, no_order, copy,
                                     timing ? timing->shared_copy(w, size) : 0);
        } else {
            w.machine->enqueue_load(w, kind, {{source, size}}, size, copy);
        }
    });
    return Flow::next;
}

void decode_copy(Decoder& d, bool reduces) {
    CopyForm form;
    form.destination = take_next_space(d);
    form.source = take_next_space(d);
    const bool to_global = form.destination == Space::global;
    if (to_global && form.source != Space::shared)
        d.invalid("a copy to global memory reads .shared::cta");
    take_completion(d, form);
    if (reduces) {
        form.reduction = take_reduction(d);
        d.ignore({"noftz"});
        form.type = d.take_type();
    }
    const bool policy = d.take("L2::cache_hint");
    form.byte_mask = d.take("cp_mask");
    if (to_global) {
        const size_t count = 3 + policy + form.byte_mask;
        d.expect_operands(count);
        const Operand mask = form.byte_mask ? d.source(count - 1, Type::u16) : d.constant(0);
        d.emit(copy_bytes,
               {d.address(0), d.address(1), d.source(2, Type::u32), d.constant(0), mask},
               form.pack());
        return;
    }
    d.expect_operands(4 + form.multicast + policy);
    const Operand mask = form.multicast ? d.source(4, Type::u16) : d.constant(0);
    d.emit(copy_bytes, {d.address(0), d.address(1), d.source(2, Type::u32), d.address(3), mask},
           form.pack());
}

void decode_bulk_copy(Decoder& d) {
    decode_copy(d, false);
}
void decode_bulk_reduction(Decoder& d) {
    decode_copy(d, true);
}

// ---- tensors

// offsets: operands behind the coordinates.
TensorMap read_map(Warp& w, const Operand& address, const CopyForm& form, const Operand* offsets,
                   int lane) {
    const uint64_t at = w.address(address, lane);
    check_aligned(at, 64, "tensor map address", lane);
    uint8_t image[128];
    for (uint32_t half : {0, 64}) {
        std::memcpy(image + half, w.resolve(Space::generic, at + half, 64, Access::read, lane), 64);
    }
    TensorMap map = TensorMap::decode(image, w.program->target.starts_with("sm_90"));
    if (map.rank != form.rank) {
        throw Fault(
            FaultKind::invalid_operation,
            format("the instruction has %d dimensions, the tensor map %d", form.rank, map.rank),
            lane);
    }
    if (map.is_im2col != form.is_im2col) {
        throw Fault(FaultKind::invalid_operation,
                    map.is_im2col ? "the tensor map is im2col, the instruction is not"
                                  : "the instruction is im2col, the tensor map is tiled",
                    lane);
    }
    // 16, 8 or 5 bits in each of one, two or three dimensions.
    const uint32_t end = 1u << (form.rank == 3 ? 16 : form.rank == 4 ? 8 : 5);
    for (int i = 0; i < form.num_offsets(); ++i) {
        map.offsets[i] = w.in<uint32_t>(offsets[i])[lane] & 0xffff;
        if (map.offsets[i] < end) continue;
        throw Fault(FaultKind::invalid_operation,
                    format("im2col copy: offset %d is %u, not below %u", i, map.offsets[i], end),
                    lane);
    }
    if (form.picks_rows && map.box[1] != 1) {
        throw Fault(FaultKind::invalid_operation,
                    format("gather4 and scatter4 need a box of one row, the tensor map's has %u",
                           map.box[1]),
                    lane);
    }
    map.picks_rows = form.picks_rows;
    return map;
}

// A reduction of a map's elements, and their type. What is missing here ends a kernel on an H200
// with an illegal instruction. TF32 types are added as FP32.
std::pair<Reduction, Type> reduction_of(const TensorMap& map, Reduction reduction) {
    const bool is_min_max = reduction == Reduction::min || reduction == Reduction::max;
    const bool counts = reduction == Reduction::inc || reduction == Reduction::dec;
    const bool bits = reduction >= Reduction::bit_and;
    const bool adds = reduction == Reduction::add;
    switch (map.data_type) {
        case 2:
            return {reduction, Type::u32};
        case 3:
            if (!counts) return {reduction, bits ? Type::b32 : Type::s32};
            break;
        case 4:
            if (!counts) return {reduction, Type::u64};
            break;
        case 5:
            if (is_min_max) return {reduction, Type::s64};
            break;
        case 6:
            if (adds || is_min_max) return {reduction, Type::f16};
            break;
        case 8:
            if (adds) return {reduction, Type::f64};
            break;
        case 9:
            if (adds || is_min_max) return {reduction, Type::bf16};
            break;
        case 7:
        case TensorMap::type_tf32:
            if (adds) return {reduction, Type::f32};
            break;
        case TensorMap::type_f32_ftz:
        case TensorMap::type_tf32_ftz:
            if (adds) return {Reduction::add_flushed, Type::f32};
            break;
    }
    fail(FaultKind::invalid_operation, "there is no tensor reduction .%s of %s",
         reduction_name(reduction), map.type_name());
}

struct Coordinates {
    int32_t at[TensorMap::max_rank] = {};
};

Coordinates read_coordinates(const Warp& w, const Operand* operands, int rank, int lane) {
    Coordinates c;
    for (int i = 0; i < rank; ++i) c.at[i] = w.in<int32_t>(operands[i])[lane];
    return c;
}

// destination, mbarrier, CTA mask, map, coordinates, offsets
Flow load_tensor(Warp& w, const Op& op) {
    const CopyForm form = CopyForm::unpack(op.aux);
    w.for_each_lane([&](int lane) {
        const TensorMap map =
            read_map(w, op.operands[3], form, op.operands + 4 + form.num_coordinates(), lane);
        const Coordinates coordinates =
            read_coordinates(w, op.operands + 4, form.num_coordinates(), lane);
        const SharedPlace to =
            shared_place(w, form.destination, w.address(op.operands[0], lane), lane);
        const SharedPlace barrier =
            shared_place(w, form.destination, w.address(op.operands[1], lane), lane);
        map.check_load(coordinates.at, to.offset);
        const std::vector<Receiver> all =
            receivers(w, form, to, barrier, w.in<uint32_t>(op.operands[2])[lane], lane);
        hold(all);
        Rank* rank = w.grid->rank;
        Cta* own = w.cta;
        std::vector<std::pair<uint64_t, uint32_t>> rows;
        if (w.machine->timing)
            map.for_each_run(coordinates.at, [&](uint64_t address, uint64_t num_bytes) {
                rows.emplace_back(address, uint32_t(num_bytes));
            });
        const auto load = [=, issue = issue_of(w, lane)] {
            RankMemory memory(*own->machine, *rank);
            for (const Receiver& r : all) {
                const auto accesses = accesses_by_barrier(issue, *r.barrier_cta, barrier.offset);
                CtaWindow window(*r.cta, "tensor load");
                map.load_tile(coordinates.at, to.offset, memory, window);
            }
            release(all);
            for (const Receiver& r : all)
                complete_bytes_at(*r.barrier_cta, barrier.offset, map.transaction_bytes(), r.phase);
        };
        w.machine->enqueue_load(w, "tensor load", rows, map.transaction_bytes(), load);
    });
    return Flow::next;
}

// source, map, coordinates
Flow store_tensor(Warp& w, const Op& op) {
    const CopyForm form = CopyForm::unpack(op.aux);
    w.for_each_lane([&](int lane) {
        const TensorMap map = read_map(w, op.operands[1], form, nullptr, lane);
        const Coordinates coordinates =
            read_coordinates(w, op.operands + 2, form.num_coordinates(), lane);
        const SharedPlace from =
            shared_place(w, Space::shared, w.address(op.operands[0], lane), lane);
        map.check_store(coordinates.at, from.offset);
        CopyForm stored = form;
        if (form.reduction != Reduction::none)
            std::tie(stored.reduction, stored.type) = reduction_of(map, form.reduction);
        Cta* own = w.cta;
        uint64_t address = 0, num_bytes = 0;
        map.for_each_run(coordinates.at, [&](uint64_t at, uint64_t count) {
            if (!num_bytes) address = at;
            num_bytes += count;
        });
        store_in_two_steps(w, stored, lane, num_bytes, address, [=](std::vector<Piece>& pieces) {
            CtaWindow window(*own, "tensor store");
            map.read_tile_for_store(
                coordinates.at, from.offset, window,
                [&](uint64_t address, const uint8_t* bytes, uint64_t num_bytes) {
                    pieces.push_back({address, {bytes, bytes + num_bytes}});
                });
        });
    });
    return Flow::next;
}

void decode_tensor_copy(Decoder& d) {
    CopyForm form;
    form.rank = take_rank(d);
    form.pair_barrier = d.take("cta_group::2");
    d.take("cta_group::1");
    form.destination = take_next_space(d);
    form.source = take_next_space(d);
    take_mode(d, form, form.destination == Space::global);
    take_completion(d, form);
    const bool policy = d.take("L2::cache_hint");
    std::vector<Operand> operands;
    if (form.destination == Space::global) {
        if (form.source != Space::shared) d.invalid("a tensor store reads .shared::cta");
        d.expect_operands(2 + policy);
        operands.push_back(d.address(1));
        append_tensor_operand(d, 0, form.num_coordinates(), operands);
        d.emit(store_tensor, std::move(operands), form.pack());
        return;
    }
    if (form.source != Space::global) d.invalid("a tensor load reads .global");
    d.expect_operands(3 + form.has_offsets + form.multicast + policy);
    operands = {d.address(0), d.address(2),
                form.multicast ? d.source(3 + form.has_offsets, Type::u16) : d.constant(0)};
    append_tensor_operand(d, 1, form.num_coordinates(), operands);
    append_offsets(d, 3, form, operands);
    d.emit(load_tensor, std::move(operands), form.pack());
}

void decode_tensor_reduction(Decoder& d) {
    CopyForm form;
    form.rank = take_rank(d);
    form.destination = take_next_space(d);
    form.source = take_next_space(d);
    if (form.destination != Space::global || form.source != Space::shared) {
        d.invalid("a tensor reduction goes from .shared::cta to .global");
    }
    form.reduction = take_reduction(d);
    take_mode(d, form, true);
    if (form.picks_rows) d.invalid("a reduction has no .tile::scatter4");
    take_completion(d, form);
    const bool policy = d.take("L2::cache_hint");
    d.expect_operands(2 + policy);
    std::vector<Operand> operands{d.address(1)};
    append_tensor_operand(d, 0, form.rank, operands);
    d.emit(store_tensor, std::move(operands), form.pack());
}

// map, coordinates, offsets. A hint, but of a box where a load may start
Flow prefetch_tensor(Warp& w, const Op& op) {
    const CopyForm form = CopyForm::unpack(op.aux);
    w.for_each_lane([&](int lane) {
        const TensorMap map =
            read_map(w, op.operands[0], form, op.operands + 1 + form.num_coordinates(), lane);
        map.check_start(read_coordinates(w, op.operands + 1, form.num_coordinates(), lane).at);
    });
    return Flow::next;
}

void decode_tensor_prefetch(Decoder& d) {
    CopyForm form;
    form.rank = take_rank(d);
    d.ignore({"L2", "global"});
    take_mode(d, form, false);
    const bool policy = d.take("L2::cache_hint");
    d.expect_operands(1 + form.has_offsets + policy);
    std::vector<Operand> operands;
    append_tensor_operand(d, 0, form.num_coordinates(), operands);
    append_offsets(d, 1, form, operands);
    d.emit(prefetch_tensor, std::move(operands), form.pack());
}

// ---- groups

Flow commit_group(Warp& w, const Op&) {
    w.for_each_lane([&](int lane) {
        BulkThread& thread = bulk_state(*w.cta).threads[thread_in_cta(w, lane)];
        ++thread.num_committed;
        thread.committed.push_back(std::exchange(thread.open, std::make_shared<BulkGroup>()));
    });
    return Flow::next;
}

// aux: groups that may stay pending; bit 32: wait for the reads of sources only
Flow wait_group(Warp& w, const Op& op) {
    const size_t allowed = uint32_t(op.aux);
    const bool reads_only = op.aux >> 32 & 1;
    bool waits = false;
    w.for_each_lane([&](int lane) {
        auto& threads = bulk_state(*w.cta).threads;
        auto found = threads.find(thread_in_cta(w, lane));
        if (found == threads.end()) return;
        auto& groups = found->second.committed;
        while (!groups.empty() && groups.front()->unfinished == 0) groups.pop_front();
        for (size_t i = 0; i + allowed < groups.size(); ++i) {
            if (reads_only ? groups[i]->unread : groups[i]->unfinished) waits = true;
        }
    });
    if (!waits) {
        if (w.machine->races) {
            w.for_each_lane([&](int lane) {
                auto& threads = bulk_state(*w.cta).threads;
                auto found = threads.find(thread_in_cta(w, lane));
                if (found == threads.end() || found->second.num_committed <= allowed) return;
                const BulkThread& t = found->second;
                const uint32_t done = t.num_committed - uint32_t(allowed);
                if (t.read_agent) w.machine->races->waited_for(w, 1u << lane, t.read_agent, done);
                if (t.write_agent && !reads_only)
                    w.machine->races->waited_for(w, 1u << lane, t.write_agent, done);
            });
        }
        return Flow::next;
    }
    return w.block(w.cta->bulk_waiters,
                   reads_only ? "bulk groups: all but %llu to be read"
                              : "bulk groups: all but %llu to be complete",
                   allowed);
}

void decode_commit_group(Decoder& d) {
    d.expect_operands(0);
    d.emit(commit_group, {});
}

void decode_wait_group(Decoder& d) {
    const bool read = d.take("read");
    d.expect_operands(1);
    d.emit(wait_group, {}, d.immediate_u32(0) | uint64_t(read) << 32);
}

// ---- hints

// address, size. Nothing is read. An H100 faults at the address only, and takes any size and memory
// that is not there.
Flow prefetch_bytes(Warp& w, const Op& op) {
    w.for_each_lane([&](int lane) {
        const uint64_t source = w.address(op.operands[0], lane);
        const uint32_t size = w.in<uint32_t>(op.operands[1])[lane];
        check_aligned(source, 16, "bulk prefetch: source", lane);
        if (!w.machine->checks) return;
        if (size % 16 != 0) {
            w.machine->find(FaultKind::misaligned, [&] {
                return format("bulk prefetch: size %u is not a multiple of 16", size);
            });
        }
        if (!w.grid->rank->memory.find(source, size)) {
            w.machine->find(FaultKind::out_of_bounds, [&] {
                return format("bulk prefetch of %u bytes at 0x%llx: not all of them are there",
                              size, static_cast<unsigned long long>(source));
            });
        }
    });
    return Flow::next;
}

void decode_prefetch(Decoder& d) {
    d.ignore({"L2", "global"});
    const bool policy = d.take("L2::cache_hint");
    d.expect_operands(2 + policy);
    d.emit(prefetch_bytes, {d.address(0), d.source(1, Type::u32)});
}

Flow nothing(Warp&, const Op&) {
    return Flow::next;
}

void decode_hint(Decoder& d) {
    d.modifiers.clear();
    d.emit(nothing, {});
}

}  // namespace

InstructionTable bulk_copy_instructions() {
    return {
        {"cp.async.bulk", decode_bulk_copy,
         "bytes between global and shared memory, also to a CTA of the cluster"},
        {"cp.async.bulk.tensor", decode_tensor_copy,
         "tile of a tensor map, load or store; im2col; of sm_100: tile::gather4, tile::scatter4"},
        {"cp.async.bulk.commit_group", decode_commit_group, "closes the thread's bulk group"},
        {"cp.async.bulk.wait_group", decode_wait_group,
         "waits until all but N groups are complete (.read: read)"},
        {"cp.async.bulk.prefetch", decode_prefetch, "hint, no effect"},
        {"cp.async.bulk.prefetch.tensor", decode_tensor_prefetch, "hint, no effect"},
        {"cp.reduce.async.bulk", decode_bulk_reduction,
         "bytes combined with the destination's elements"},
        {"cp.reduce.async.bulk.tensor", decode_tensor_reduction,
         "tile combined with the tensor's elements"},
        {"prefetch.tensormap", decode_hint, "hint, no effect"},
        {"prefetch.param.tensormap", decode_hint, "hint, no effect"},
        {"prefetch.const.tensormap", decode_hint, "hint, no effect"},
    };
}

}  // namespace deep_moe::emulator
