// tcgen05.*: tensor memory and the fifth-generation tensor core.
//
// mma, cp, shift and commit of one thread run later, in the order of issue; ld and st run at once.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "async_units.h"
#include "instruction_table.h"
#include "mma_sm100.h"
#include "race_detector.h"
#include "timing.h"

namespace deep_moe::emulator {
namespace {

int take_cta_group(Decoder& d) {
    if (d.take("cta_group::1")) return 1;
    if (d.take("cta_group::2")) return 2;
    d.invalid("the .cta_group is missing");
}

// Tensor memory addresses stand in brackets in most instructions.
Operand tensor_memory_address(Decoder& d, size_t i) {
    return d.parsed(i).kind == ParsedOperand::Kind::address ? d.address(i) : d.source(i, Type::u32);
}

void whole_warp(Decoder& d) {
    d.take("sync");
    d.take("aligned");
    d.op.meeting = Meeting::whole_warp;
}

// The same value in all lanes, as .sync.aligned instructions demand.
uint32_t common_address(const Warp& w, const Operand& operand) {
    const uint32_t address = uint32_t(w.address(operand, w.first_lane()));
    w.for_each_lane([&](int lane) {
        const auto own = uint32_t(w.address(operand, lane));
        if (own == address) return;
        w.machine->find(FaultKind::invalid_operation, [&] {
            return format("tensor memory address 0x%08x of lane %d differs from lane %d's 0x%08x",
                          own, lane, w.first_lane(), address);
        });
    });
    return address;
}

Cta& pair_peer(Cta& cta, const char* what) {
    return cluster_cta(cta, cta.cluster_rank ^ 1, what);
}

// ---- allocation

// destination, columns; aux: cta_group, space of the destination above bit 8
Flow alloc(Warp& w, const Op& op) {
    TensorMemoryState& state = tensor_memory_state(*w.cta);
    const uint32_t count = w.uniform<uint32_t>(op.operands[1]);
    TensorMemory::check_size(count);
    const bool pair = (op.aux & 0xff) == 2;
    if (pair) {
        Cta& peer = pair_peer(*w.cta, "tcgen05.alloc.cta_group::2");
        TensorMemoryState& other = tensor_memory_state(peer);
        uint64_t& turn = w.current.token;  // which of the pair's allocations this is, from 1
        if (!turn) {
            state.pair_requests.push_back(count);
            turn = state.pair_requests.size();
            w.machine->wake(peer.tmem_waiters);
        }
        if (other.pair_requests.size() < turn) {
            return w.block(w.cta->tmem_waiters,
                           "tcgen05.alloc of %llu columns in the other CTA of the pair", count);
        }
        if (other.pair_requests[turn - 1] != count) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.alloc.cta_group::2 of %u columns, the other CTA of the pair asks for %u",
                 count, other.pair_requests[turn - 1]);
        }
    }
    const std::optional<uint32_t> column = state.memory.try_allocate(count);
    if (!column) return w.block(w.cta->tmem_waiters, "%llu free columns of tensor memory", count);
    if (pair) {
        TensorMemoryState& other =
            tensor_memory_state(pair_peer(*w.cta, "tcgen05.alloc.cta_group::2"));
        state.pair_columns.push_back(*column);
        const size_t turn = state.pair_columns.size();
        if (other.pair_columns.size() >= turn && other.pair_columns[turn - 1] != *column) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.alloc.cta_group::2 gives column %u here and %u in the other CTA of the "
                 "pair",
                 *column, other.pair_columns[turn - 1]);
        }
    }
    const int lane = w.first_lane();
    const uint64_t destination = w.address(op.operands[0], lane);
    *reinterpret_cast<uint32_t*>(
        w.resolve(Space(op.aux >> 8 & 0xff), destination, 4, Access::write, lane)) = *column;
    if (RaceDetector* races = w.machine->races.get()) {
        races->forget_tensor_memory(*w.cta, *column, count);
        races->access(w, Space(op.aux >> 8 & 0xff), destination, 4, Access::write, lane);
    }
    w.machine->note_progress();
    return Flow::next;
}

void decode_alloc(Decoder& d) {
    whole_warp(d);
    const int group = take_cta_group(d);
    const Space space = d.take_space();
    d.ignore({"b32"});
    d.expect_operands(2);
    d.emit(alloc, {d.address(0), d.source(1, Type::u32)}, uint64_t(group) | uint64_t(space) << 8);
}

Flow dealloc(Warp& w, const Op& op) {
    TensorMemoryState& state = tensor_memory_state(*w.cta);
    if (state.cells_in_flight) {
        w.machine->find(FaultKind::invalid_operation, [&] {
            return format("tcgen05.dealloc while %u tcgen05 operation(s) are in flight",
                          state.cells_in_flight);
        });
        // A run that goes on does so as if the program had waited.
        return w.block(w.cta->tmem_waiters, "the end of %llu tcgen05 operations",
                       state.cells_in_flight);
    }
    state.memory.deallocate(common_address(w, op.operands[0]), w.uniform<uint32_t>(op.operands[1]));
    w.machine->note_progress();
    w.machine->wake(w.cta->tmem_waiters);
    return Flow::next;
}

void decode_dealloc(Decoder& d) {
    whole_warp(d);
    take_cta_group(d);
    d.ignore({"b32"});
    d.expect_operands(2);
    d.emit(dealloc, {tensor_memory_address(d, 0), d.source(1, Type::u32)});
}

Flow relinquish(Warp& w, const Op&) {
    tensor_memory_state(*w.cta).memory.relinquished = true;
    return Flow::next;
}

void decode_relinquish(Decoder& d) {
    whole_warp(d);
    take_cta_group(d);
    d.expect_operands(0);
    d.emit(relinquish, {});
}

// ---- work in the issuing thread's order

// How the race detector knows an operation: who issued it, and its place in the thread's queue.
struct Queued {
    std::shared_ptr<const Issue> issue;
    uint32_t agent = 0, moment = 0;
};

Queued next_in_queue(Warp& w, int lane) {
    RaceDetector* races = w.machine->races.get();
    if (!races) return {};
    auto& queue = tensor_memory_state(*w.cta).queues[thread_in_cta(w, lane)];
    if (!queue.agent) queue.agent = races->new_agent(*w.cta, "tcgen05 operations of", w.index);
    return {races->issue(w, lane), queue.agent, ++queue.num_issued};
}

AsyncAccesses accesses_of(Cta& cta, const Queued& queued) {
    return {cta.machine->races.get(), queued.issue, queued.agent, queued.moment};
}

void note_cells(Cta& cta, uint32_t column, uint32_t count, Access access,
                uint32_t quadrants = 0b1111) {
    if (cta.machine->races && count)
        cta.machine->races->tensor_access(cta, quadrants, column & 0xffff, count, access);
}

// touches_cells: it reads or writes tensor memory.
void enqueue_in_order(Warp& w, int lane, int cta_group, const char* kind, bool touches_cells,
                      int64_t at, std::function<void()> complete) {
    Cta* ctas[2] = {w.cta, nullptr};
    if (cta_group == 2) ctas[1] = &pair_peer(*w.cta, kind);
    uint64_t& key = tensor_memory_state(*w.cta).order_keys[thread_in_cta(w, lane)];
    if (!key) key = w.machine->new_order_key();
    for (Cta* cta : ctas) {
        if (!cta) continue;
        ++tensor_memory_state(*cta).in_flight;
        tensor_memory_state(*cta).cells_in_flight += touches_cells;
    }
    w.machine->enqueue_async(
        w, kind, key,
        [ctas = std::to_array(ctas), complete = std::move(complete), touches_cells] {
            complete();
            for (Cta* cta : ctas) {
                if (!cta) continue;
                TensorMemoryState& state = tensor_memory_state(*cta);
                --state.in_flight;
                state.cells_in_flight -= touches_cells;
                if (touches_cells && !state.cells_in_flight) cta->machine->wake(cta->tmem_waiters);
                cta->machine->note_progress();
            }
        },
        at);
}

// The CTAs that take part, the one with the even cluster rank first.
std::array<Cta*, 2> participants(Warp& w, int cta_group, const char* what) {
    if (cta_group == 1) return {w.cta, nullptr};
    Cta& peer = pair_peer(*w.cta, what);
    return w.cta->cluster_rank & 1 ? std::array<Cta*, 2>{&peer, w.cta}
                                   : std::array<Cta*, 2>{w.cta, &peer};
}

MatrixDescriptor shared_operand(Warp& w, const Operand& operand, int lane) {
    const uint64_t bits = w.in<uint64_t>(operand)[lane];
    if (w.machine->checks) {
        const std::string wrong = MatrixDescriptor::wrong_constants_sm100(bits);
        if (!wrong.empty()) w.machine->find(FaultKind::invalid_operation, [&] { return wrong; });
    }
    return MatrixDescriptor::sm100(bits);
}

// ---- mma

struct MmaForm {
    MmaKind kind = MmaKind::f16;
    int cta_group = 1;
    bool a_in_tensor_memory = false;
    uint32_t num_scale_blocks = 1;
    bool disables_lanes = false;
    bool is_weight_stationary = false;
    bool is_sparse = false;

    uint64_t pack() const {
        return uint64_t(kind) | uint64_t(cta_group) << 8 | uint64_t(a_in_tensor_memory) << 16 |
               uint64_t(num_scale_blocks) << 24 | uint64_t(disables_lanes) << 32 |
               uint64_t(is_weight_stationary) << 33 | uint64_t(is_sparse) << 34;
    }
    static MmaForm unpack(uint64_t aux) {
        return {MmaKind(aux & 0xff),        int(aux >> 8 & 0xff), (aux >> 16 & 1) != 0,
                uint32_t(aux >> 24 & 0xff), (aux >> 32 & 1) != 0, (aux >> 33 & 1) != 0,
                (aux >> 34 & 1) != 0};
    }
};

// Of tcgen05.mma. Those of disabled lanes (4 or 8, if any) follow.
enum MmaOperand {
    mma_d,
    mma_a,
    mma_b,
    mma_shape,
    mma_sfa,
    mma_sfb,
    mma_enable_input_d,
    mma_scale_input_d,
    mma_metadata,
    mma_zero_columns,
    first_disabled_lanes
};

void note_mma_cells(Cta& cta, const Mma& mma) {
    const uint32_t rows = mma.shape.m / uint32_t(mma.cta_group);
    const bool halves = mma.cta_group == 2 && rows == 64;
    const uint32_t columns = halves                     ? mma.shape.n / 2
                             : mma.is_weight_stationary ? mma.shape.n * rows / 128
                                                        : mma.shape.n;
    note_cells(cta, mma.d_address, mma.shape.d == Accumulator::f16 ? (columns + 1) / 2 : columns,
               Access::write);
    if (mma.a_in_tensor_memory) note_cells(cta, mma.a_address, 8, Access::read);
    if (mma.is_sparse)
        note_cells(cta, mma.metadata_column(), mma.num_metadata_columns(), Access::read);
    if (!is_block_scaled(mma.kind)) return;
    note_cells(cta, mma.sfa_address, (rows + 31) / 32, Access::read);
    note_cells(cta, mma.sfb_address, (mma.shape.n + 31) / 32, Access::read);
}

Flow mma(Warp& w, const Op& op) {
    const MmaForm form = MmaForm::unpack(op.aux);
    const uint32_t enable = w.predicate(op.operands[mma_enable_input_d]);
    w.for_each_lane([&](int lane) {
        Mma mma;
        mma.kind = form.kind;
        mma.cta_group = form.cta_group;
        mma.is_weight_stationary = form.is_weight_stationary;
        mma.is_sparse = form.is_sparse;
        mma.shape = InstructionDescriptor::decode(w.in<uint32_t>(op.operands[mma_shape])[lane],
                                                  form.kind, form.cta_group,
                                                  form.is_weight_stationary, form.is_sparse);
        mma.a_in_tensor_memory = form.a_in_tensor_memory;
        if (form.a_in_tensor_memory)
            mma.a_address = uint32_t(w.address(op.operands[mma_a], lane));
        else
            mma.a = shared_operand(w, op.operands[mma_a], lane);
        mma.b = shared_operand(w, op.operands[mma_b], lane);
        mma.d_address = uint32_t(w.address(op.operands[mma_d], lane));
        mma.num_scale_blocks = form.num_scale_blocks;
        if (is_block_scaled(form.kind)) {
            mma.sfa_address = uint32_t(w.address(op.operands[mma_sfa], lane));
            mma.sfb_address = uint32_t(w.address(op.operands[mma_sfb], lane));
        }
        mma.accumulate = enable >> lane & 1;
        mma.scale_d_shift = int(w.in<uint32_t>(op.operands[mma_scale_input_d])[lane]);
        if (form.is_sparse)
            mma.metadata_address = uint32_t(w.address(op.operands[mma_metadata], lane));
        if (form.is_weight_stationary)
            mma.zero_columns = {w.in<uint64_t>(op.operands[mma_zero_columns])[lane]};
        if (form.disables_lanes) {
            for (int i = 0; i < op.num_operands - first_disabled_lanes; ++i) {
                mma.disabled_lanes[i] = w.in<uint32_t>(op.operands[first_disabled_lanes + i])[lane];
            }
        }
        const std::array<Cta*, 2> ctas =
            participants(w, form.cta_group, "tcgen05.mma.cta_group::2");
        const Queued queued = next_in_queue(w, lane);
        Timing* timing = w.machine->timing;
        const int64_t at = timing ? timing->tensor_mma(w, mma.shape.m, mma.shape.n, form.cta_group,
                                                       !form.a_in_tensor_memory)
                                  : 0;
        enqueue_in_order(w, lane, form.cta_group, "tcgen05.mma", true, at, [ctas, mma, queued] {
            if (ctas[0]->machine->leaves_out_products) return;
            static thread_local Panels panels;
            const AsyncAccesses accesses = accesses_of(*ctas[0], queued);
            for (Cta* cta : ctas) {
                if (cta) note_mma_cells(*cta, mma);
            }
            CtaWindow even(*ctas[0], "tcgen05.mma operand"),
                odd(*(ctas[1] ? ctas[1] : ctas[0]), "tcgen05.mma operand");
            const MmaCta sides[2] = {
                {&even, &tensor_memory_state(*ctas[0]).memory},
                {&odd, ctas[1] ? &tensor_memory_state(*ctas[1]).memory : nullptr}};
            mma.run(sides, ctas[0]->machine->checks, panels);
        });
    });
    return Flow::next;
}

MmaKind take_kind(Decoder& d) {
    constexpr std::pair<const char*, MmaKind> kinds[] = {
        {"kind::f16", MmaKind::f16},           {"kind::tf32", MmaKind::tf32},
        {"kind::f8f6f4", MmaKind::f8f6f4},     {"kind::i8", MmaKind::i8},
        {"kind::mxf8f6f4", MmaKind::mxf8f6f4}, {"kind::mxf4nvf4", MmaKind::mxf4nvf4},
        {"kind::mxf4", MmaKind::mxf4}};
    for (auto [name, kind] : kinds) {
        if (d.take(name)) return kind;
    }
    d.invalid("the .kind is missing");
}

void take_scale_blocks(Decoder& d, MmaForm& form) {
    if (!is_block_scaled(form.kind)) return;
    if (!d.take("block_scale")) d.invalid("this kind needs .block_scale");
    uint32_t block = form.kind == MmaKind::mxf4nvf4 ? 0 : 32;
    if (d.take("block32")) block = 32;
    if (d.take("block16")) block = 16;
    const uint32_t k = form.kind == MmaKind::mxf8f6f4 ? 32 : 64;
    form.num_scale_blocks = block ? k / block : 0;
    std::string vector;
    if (d.take_prefix("scale_vec::", vector)) form.num_scale_blocks = uint32_t(vector.at(11) - '0');
    const bool fits = form.kind == MmaKind::mxf8f6f4 ? form.num_scale_blocks == 1
                      : form.kind == MmaKind::mxf4
                          ? form.num_scale_blocks == 2
                          : form.num_scale_blocks == 2 || form.num_scale_blocks == 4;
    if (!fits) d.invalid("this scale vector size does not exist for this kind");
}

// The instruction's operands up to the descriptor of its shape: of mma_d to mma_shape, then
// metadata. Returns how many it has used.
size_t append_matrices(Decoder& d, MmaForm& form, std::vector<Operand>& operands,
                       Operand& metadata) {
    form.a_in_tensor_memory = d.parsed(1).kind == ParsedOperand::Kind::address;
    operands.push_back(tensor_memory_address(d, 0));
    operands.push_back(form.a_in_tensor_memory ? d.address(1) : d.source(1, Type::b64));
    operands.push_back(d.source(2, Type::b64));
    size_t next = 3;
    metadata = form.is_sparse ? tensor_memory_address(d, next++) : d.constant(0);
    operands.push_back(d.source(next++, Type::u32));
    return next;
}

void decode_product(Decoder& d, bool is_sparse) {
    MmaForm form;
    form.is_sparse = is_sparse;
    form.cta_group = take_cta_group(d);
    form.kind = take_kind(d);
    take_scale_blocks(d, form);
    std::string collector;
    d.take_prefix("collector::", collector);  // may keep A in a cache; no effect on results
    const bool scaled = is_block_scaled(form.kind);
    d.expect_operands((scaled ? 7 : 5) + is_sparse, 7 + is_sparse);
    std::vector<Operand> operands;
    Operand metadata;
    size_t next = append_matrices(d, form, operands, metadata);
    const Operand none = d.constant(0);
    if (scaled) {
        for (int i = 0; i < 2; ++i) operands.push_back(tensor_memory_address(d, next++));
        operands.insert(operands.end(), {d.source(next, Type::pred), none, metadata, none});
        d.emit(mma, std::move(operands), form.pack());
        return;
    }
    std::vector<Operand> lanes;
    if (d.parsed(next).kind == ParsedOperand::Kind::vector) {
        form.disables_lanes = true;
        lanes = d.sources(next++, Type::b32);
        if (lanes.size() != size_t(4 * form.cta_group))
            d.invalid("disable-output-lane needs 4 or, for a pair, 8 registers");
    }
    const Operand enable = d.source(next++, Type::pred);
    const uint64_t scale = next < d.num_operands() ? d.immediate(next++) : 0;
    if (scale > 15) d.invalid("scale-input-d must be 0 to 15");
    if (next != d.num_operands()) d.invalid("too many operands");
    operands.insert(operands.end(), {none, none, enable, d.constant(scale), metadata, none});
    operands.insert(operands.end(), lanes.begin(), lanes.end());
    d.emit(mma, std::move(operands), form.pack());
}

void decode_mma(Decoder& d) {
    decode_product(d, false);
}
void decode_sparse_mma(Decoder& d) {
    decode_product(d, true);
}

// .ws: B stays in the collector and A goes by, which is no difference in results. Its accumulators
// of 32 and 64 rows lie otherwise in tensor memory.
void decode_stationary_product(Decoder& d, bool is_sparse) {
    MmaForm form;
    form.is_weight_stationary = true;
    form.is_sparse = is_sparse;
    form.cta_group = take_cta_group(d);
    if (form.cta_group != 1) d.invalid(".ws has .cta_group::1");
    form.kind = take_kind(d);
    if (is_block_scaled(form.kind)) d.invalid("this kind has no .ws");
    std::string collector;
    d.take_prefix("collector::", collector);
    d.expect_operands(5 + is_sparse, 6 + is_sparse);
    std::vector<Operand> operands;
    Operand metadata;
    size_t next = append_matrices(d, form, operands, metadata);
    const Operand none = d.constant(0), enable = d.source(next++, Type::pred);
    const Operand zero_columns = next < d.num_operands() ? d.source(next, Type::b64) : none;
    operands.insert(operands.end(), {none, none, enable, none, metadata, zero_columns});
    d.emit(mma, std::move(operands), form.pack());
}

void decode_weight_stationary(Decoder& d) {
    decode_stationary_product(d, false);
}
void decode_sparse_weight_stationary(Decoder& d) {
    decode_stationary_product(d, true);
}

// ---- cp, shift

// address, descriptor; aux: cta_group, shape above bit 8, bits of packed elements above bit 16
Flow copy(Warp& w, const Op& op) {
    const int cta_group = int(op.aux & 0xff);
    const CopyShape shape = CopyShape(op.aux >> 8 & 0xff);
    const auto packed_bits = uint32_t(op.aux >> 16);
    w.for_each_lane([&](int lane) {
        const uint32_t address = uint32_t(w.address(op.operands[0], lane));
        const MatrixDescriptor source = shared_operand(w, op.operands[1], lane);
        const std::array<Cta*, 2> ctas = participants(w, cta_group, "tcgen05.cp.cta_group::2");
        const Queued queued = next_in_queue(w, lane);
        Timing* timing = w.machine->timing;
        const int64_t at = timing ? timing->tensor_copy(w) : 0;
        enqueue_in_order(w, lane, cta_group, "tcgen05.cp", true, at, [=] {
            const AsyncAccesses accesses = accesses_of(*ctas[0], queued);
            for (Cta* cta : ctas) {  // each from its own shared memory
                if (!cta) continue;
                const bool wide = shape == CopyShape::x128x256b || shape == CopyShape::x4x256b;
                note_cells(*cta, address, wide ? 8 : 4, Access::write);
                CtaWindow window(*cta, "tcgen05.cp source");
                copy_to_tensor_memory(tensor_memory_state(*cta).memory, address, window, source,
                                      shape, packed_bits);
            }
        });
    });
    return Flow::next;
}

CopyShape take_copy_shape(Decoder& d) {
    if (d.take("32x128b")) {
        if (!d.take("warpx4")) d.invalid(".32x128b needs .warpx4");
        return CopyShape::x32x128b_warpx4;
    }
    if (d.take("64x128b")) {
        if (d.take("warpx2::02_13")) return CopyShape::x64x128b_02_13;
        if (d.take("warpx2::01_23")) return CopyShape::x64x128b_01_23;
        d.invalid(".64x128b needs .warpx2::02_13 or .warpx2::01_23");
    }
    if (d.take("128x128b")) return CopyShape::x128x128b;
    if (d.take("128x256b")) return CopyShape::x128x256b;
    if (d.take("4x256b")) return CopyShape::x4x256b;
    d.invalid("the shape is missing");
}

void decode_copy(Decoder& d) {
    const int group = take_cta_group(d);
    const CopyShape shape = take_copy_shape(d);
    uint64_t packed_bits = 0;
    if (d.take("b8x16")) {
        packed_bits = d.take("b6x16_p32") ? 6 : d.take("b4x16_p64") ? 4 : 0;
        if (!packed_bits) d.invalid("the source's format (.b6x16_p32, .b4x16_p64) is missing");
    }
    d.expect_operands(2);
    d.emit(copy, {tensor_memory_address(d, 0), d.source(1, Type::b64)},
           uint64_t(group) | uint64_t(shape) << 8 | packed_bits << 16);
}

// 31 of the quadrant's 32 lanes take the 32 bytes of the lane above them.
Flow shift(Warp& w, const Op& op) {
    const int cta_group = int(op.aux);
    const bool check_written = w.machine->checks;
    w.for_each_lane([&](int lane) {
        const uint32_t address = uint32_t(w.address(op.operands[0], lane));
        const uint32_t first = address >> 16, column = address & 0xffff;
        if (first % 32)
            fail(FaultKind::invalid_operation, "tcgen05.shift: lane %u is no multiple of 32",
                 first);
        const std::array<Cta*, 2> ctas = participants(w, cta_group, "tcgen05.shift.cta_group::2");
        const Queued queued = next_in_queue(w, lane);
        enqueue_in_order(w, lane, cta_group, "tcgen05.shift", true, 0, [=] {
            const AsyncAccesses accesses = accesses_of(*ctas[0], queued);
            for (Cta* cta : ctas) {
                if (!cta) continue;
                note_cells(*cta, column, 8, Access::write, 1u << (first / 32 & 3));
                TensorMemory& memory = tensor_memory_state(*cta).memory;
                for (uint32_t row = 0; row < 31; ++row) {
                    const uint32_t* source = memory.read(first + row + 1, column, 8, check_written);
                    std::memcpy(memory.write(first + row, column, 8), source, 32);
                }
            }
        });
    });
    return Flow::next;
}

void decode_shift(Decoder& d) {
    const int group = take_cta_group(d);
    if (!d.take("down")) d.invalid(".down is missing");
    d.expect_operands(1);
    d.emit(shift, {tensor_memory_address(d, 0)}, uint64_t(group));
}

// ---- commit

// mbarrier, CTA mask; aux: cta_group, space above bit 8, multicast in bit 16
Flow commit(Warp& w, const Op& op) {
    const int cta_group = int(op.aux & 0xff);
    const bool multicast = op.aux >> 16 & 1;
    w.for_each_lane([&](int lane) {
        auto space = Space(op.aux >> 8 & 0xff);
        const uint64_t address = w.address(op.operands[0], lane);
        // Triton's kernels give a shared address where PTX asks for a generic one, and run.
        if (space == Space::generic && !(address >> 32) && !w.machine->strict_tcgen05)
            space = Space::shared_cluster;
        const SharedPlace at = shared_place(w, space, address, lane);
        std::vector<Cta*> targets;
        if (multicast) {
            const uint32_t mask = w.in<uint32_t>(op.operands[1])[lane];
            for (uint32_t rank = 0; rank < 16; ++rank) {
                if (mask >> rank & 1)
                    targets.push_back(&cluster_cta(*w.cta, rank, "tcgen05.commit.multicast"));
            }
            if (targets.empty())
                throw Fault(FaultKind::invalid_operation, "multicast with an empty CTA mask", lane);
        } else {
            targets.push_back(at.cta);
        }
        const Queued queued = next_in_queue(w, lane);
        enqueue_in_order(w, lane, cta_group, "tcgen05.commit", false, 0,
                         [targets, offset = at.offset, queued] {
                             for (Cta* cta : targets) {
                                 cluster_cta(*cta, cta->cluster_rank, "tcgen05.commit");
                                 if (RaceDetector* races = cta->machine->races.get()) {
                                     races->commit(*queued.issue, queued.agent, queued.moment, *cta,
                                                   mbarrier_at(*cta, offset));
                                 }
                                 arrive_at(*cta, offset, 1);
                             }
                         });
    });
    return Flow::next;
}

void decode_commit(Decoder& d) {
    const int group = take_cta_group(d);
    if (!d.take("mbarrier::arrive::one")) d.invalid(".mbarrier::arrive::one is missing");
    const Space space = d.take_space();
    const bool multicast = d.take("multicast::cluster");
    d.ignore({"b64"});
    d.expect_operands(multicast ? 2 : 1);
    const Operand mask = multicast ? d.source(1, Type::u16) : d.constant(0);
    d.emit(commit, {d.address(0), mask},
           uint64_t(group) | uint64_t(space) << 8 | uint64_t(multicast) << 16);
}

// ---- ld, st

struct TransferForm {
    TmemShape shape = TmemShape::x32x32b;
    uint32_t num_registers = 0;
    bool halves = false;       // .pack::16b, .unpack::16b
    uint32_t half_offset = 0;  // of .16x32bx2

    uint64_t pack() const {
        return uint64_t(shape) | uint64_t(num_registers) << 8 | uint64_t(halves) << 20 |
               uint64_t(half_offset) << 32;
    }
    static TransferForm unpack(uint64_t aux) {
        return {TmemShape(aux & 0xff), uint32_t(aux >> 8 & 0xfff), (aux >> 20 & 1) != 0,
                uint32_t(aux >> 32)};
    }
};

// Calls `f(register index, lane of the warp, cell lane, cell column)` for all registers of all
// threads.
template <class F>
void for_each_cell(const Warp& w, const TransferForm& form, uint32_t address, F f) {
    const uint32_t first_lane =
        tmem_first_lane(form.shape, address, w.index, w.machine->strict_tcgen05);
    const uint32_t first_column = address & 0xffff;
    for (uint32_t i = 0; i < form.num_registers; ++i) {
        w.for_each_lane([&](int lane) {
            const TmemCell cell = tmem_cell(form.shape, uint32_t(lane), i, form.half_offset);
            f(i, lane, first_lane + cell.lane, first_column + cell.column * (form.halves ? 2 : 1));
        });
    }
}

// Tells the race detector which columns of the warp's quadrant a tcgen05.ld or .st touches.
void note_transfer(Warp& w, const TransferForm& form, uint32_t address, bool is_load) {
    RaceDetector* races = w.machine->races.get();
    if (!races) return;
    tmem_first_lane(form.shape, address, w.index, w.machine->strict_tcgen05);
    uint32_t end = 0;
    for (uint32_t lane = 0; lane < warp_size; ++lane) {
        const TmemCell cell = tmem_cell(form.shape, lane, form.num_registers - 1, form.half_offset);
        end = std::max(end, (cell.column + 1) * (form.halves ? 2 : 1));
    }
    races->begin_transfer(w, is_load);
    const Access access = is_load ? Access::read : Access::write;
    try {
        note_cells(*w.cta, address, end, access, 1u << (w.index % 4));
    } catch (...) {
        races->end();
        throw;
    }
    races->end();
}

// address, registers
Flow load(Warp& w, const Op& op) {
    const TransferForm form = TransferForm::unpack(op.aux);
    note_transfer(w, form, common_address(w, op.operands[0]), true);
    TensorMemory& memory = tensor_memory_state(*w.cta).memory;
    const uint32_t count = form.halves ? 2 : 1;
    bool check_written = w.machine->checks;
    auto read = [&](uint32_t row, uint32_t column) {
        try {
            return memory.read(row, column, count, check_written);
        } catch (const Fault& fault) {
            if (fault.kind != FaultKind::uninitialized) throw;
            w.machine->find(
                fault.kind, [&] { return std::string(fault.what()); }, {},
                [&](Finding& finding) {
                    finding.space = "tensor";
                    finding.address = uint64_t(row) << 16 | column;
                });
            check_written = false;  // of this instruction that is known now
            return memory.read(row, column, count, check_written);
        }
    };
    for_each_cell(w, form, common_address(w, op.operands[0]),
                  [&](uint32_t i, int lane, uint32_t row, uint32_t column) {
                      const uint32_t* cells = read(row, column);
                      w.out<uint32_t>(op.operands[1 + i])
                          .set(lane, form.halves ? (cells[0] & 0xffff) | cells[1] << 16 : cells[0]);
                  });
    return Flow::next;
}

Flow store(Warp& w, const Op& op) {
    const TransferForm form = TransferForm::unpack(op.aux);
    note_transfer(w, form, common_address(w, op.operands[0]), false);
    TensorMemory& memory = tensor_memory_state(*w.cta).memory;
    const uint32_t count = form.halves ? 2 : 1;
    for_each_cell(w, form, common_address(w, op.operands[0]),
                  [&](uint32_t i, int lane, uint32_t row, uint32_t column) {
                      uint32_t* cells = memory.write(row, column, count);
                      const uint32_t value = w.in<uint32_t>(op.operands[1 + i])[lane];
                      cells[0] = form.halves ? value & 0xffff : value;
                      if (form.halves) cells[1] = value >> 16;
                  });
    return Flow::next;
}

TransferForm take_transfer(Decoder& d, const char* halves) {
    constexpr std::pair<const char*, TmemShape> shapes[] = {{"32x32b", TmemShape::x32x32b},
                                                            {"16x64b", TmemShape::x16x64b},
                                                            {"16x128b", TmemShape::x16x128b},
                                                            {"16x256b", TmemShape::x16x256b},
                                                            {"16x32bx2", TmemShape::x16x32bx2}};
    TransferForm form;
    whole_warp(d);
    bool found = false;
    for (auto [name, shape] : shapes) {
        if (!d.take(name)) continue;
        form.shape = shape;
        found = true;
    }
    if (!found) d.invalid("the shape is missing");
    std::string repeat;
    if (!d.take_prefix("x", repeat)) d.invalid("the repeat count (.x1 to .x128) is missing");
    form.num_registers = uint32_t(std::stoul(repeat.substr(1))) * registers_per_repeat(form.shape);
    if (form.num_registers < 1 || form.num_registers > 128) d.invalid("more than 128 registers");
    form.halves = d.take(halves);
    d.ignore({"b32"});
    return form;
}

// What tcgen05.ld.red makes of a thread's registers.
enum class LoadReduction : uint8_t { min, max };
struct ReducedLoad {
    LoadReduction operation = LoadReduction::min;
    Type type = Type::f32;
    bool absolute = false, passes_nan = false;

    uint64_t pack() const {
        return uint64_t(operation) | uint64_t(type) << 8 | uint64_t(absolute) << 16 |
               uint64_t(passes_nan) << 17;
    }
    static ReducedLoad unpack(uint64_t bits) {
        return {LoadReduction(bits & 0xff), Type(bits >> 8 & 0xff), (bits >> 16 & 1) != 0,
                (bits >> 17 & 1) != 0};
    }

    uint32_t combine(uint32_t a, uint32_t b) const {
        const bool is_min = operation == LoadReduction::min;
        if (type == Type::u32) return is_min ? std::min(a, b) : std::max(a, b);
        if (type == Type::s32)
            return uint32_t(is_min ? std::min(int32_t(a), int32_t(b))
                                   : std::max(int32_t(a), int32_t(b)));
        const auto x = std::bit_cast<float>(a), y = std::bit_cast<float>(b);
        if (std::isnan(x) || std::isnan(y)) {
            if (passes_nan || (std::isnan(x) && std::isnan(y))) return 0x7fffffff;
            return std::isnan(x) ? b : a;
        }
        if (x == y) return std::signbit(x) == is_min ? a : b;  // -0 is less than 0
        return (x < y) == is_min ? a : b;
    }
    uint32_t prepared(uint32_t value) const {
        return absolute && type == Type::f32 ? value & 0x7fffffff : value;
    }
};

// tcgen05.ld's address and registers, then the result, and the form of the reduction as a constant.
Flow load_and_reduce(Warp& w, const Op& op) {
    load(w, op);
    const uint32_t count = TransferForm::unpack(op.aux).num_registers;
    const auto reduction = ReducedLoad::unpack(w.uniform<uint32_t>(op.operands[2 + count]));
    const auto out = w.out<uint32_t>(op.operands[1 + count]);
    w.for_each_lane([&](int lane) {
        uint32_t value = reduction.prepared(w.in<uint32_t>(op.operands[1])[lane]);
        for (uint32_t i = 1; i < count; ++i)
            value = reduction.combine(value,
                                      reduction.prepared(w.in<uint32_t>(op.operands[1 + i])[lane]));
        out.set(lane, value);
    });
    return Flow::next;
}

void decode_load_and_reduce(Decoder& d) {
    ReducedLoad reduction;
    if (d.take("max"))
        reduction.operation = LoadReduction::max;
    else if (!d.take("min"))
        d.invalid("the operation (.min, .max) is missing");
    reduction.absolute = d.take("abs");
    reduction.passes_nan = d.take("NaN");
    reduction.type = d.take_type({Type::f32, Type::u32, Type::s32});
    if (reduction.type != Type::f32 && (reduction.absolute || reduction.passes_nan))
        d.invalid(".abs and .NaN go with .f32");
    TransferForm form = take_transfer(d, "pack::16b");
    const bool two = form.shape == TmemShape::x16x32bx2;
    if (form.halves || (!two && form.shape != TmemShape::x32x32b))
        d.invalid("this shape has no .red");
    d.expect_operands(two ? 4 : 3);
    if (two) form.half_offset = d.immediate_u32(3);
    std::vector<Operand> operands{tensor_memory_address(d, 2)};
    const std::vector<Operand> registers = d.destinations(0, Type::b32);
    if (registers.size() != form.num_registers || registers.size() < 2)
        d.invalid("the number of registers does not match the shape");
    for (const Operand& r : registers)
        if (r.sink) d.unsupported("a register that is thrown away");
    operands.insert(operands.end(), registers.begin(), registers.end());
    operands.push_back(d.destination(1, Type::b32));
    operands.push_back(d.constant(reduction.pack()));
    d.emit(load_and_reduce, std::move(operands), form.pack());
}

void decode_load(Decoder& d) {
    TransferForm form = take_transfer(d, "pack::16b");
    const bool two = form.shape == TmemShape::x16x32bx2;
    d.expect_operands(two ? 3 : 2);
    if (two) form.half_offset = d.immediate_u32(2);
    std::vector<Operand> operands{tensor_memory_address(d, 1)};
    const std::vector<Operand> registers = d.destinations(0, Type::b32);
    if (registers.size() != form.num_registers)
        d.invalid("the number of registers does not match the shape");
    operands.insert(operands.end(), registers.begin(), registers.end());
    d.emit(load, std::move(operands), form.pack());
}

void decode_store(Decoder& d) {
    TransferForm form = take_transfer(d, "unpack::16b");
    const bool two = form.shape == TmemShape::x16x32bx2;
    d.expect_operands(two ? 3 : 2);
    if (two) form.half_offset = d.immediate_u32(1);
    std::vector<Operand> operands{tensor_memory_address(d, 0)};
    const std::vector<Operand> registers = d.sources(two ? 2 : 1, Type::b32);
    if (registers.size() != form.num_registers)
        d.invalid("the number of registers does not match the shape");
    operands.insert(operands.end(), registers.begin(), registers.end());
    d.emit(store, std::move(operands), form.pack());
}

// ---- waits and fences: loads and stores are complete when they have been issued, so that these
// only tell the race detector what is ordered

template <void (RaceDetector::*note)(Warp&)>
Flow order(Warp& w, const Op&) {
    if (w.machine->races) ((*w.machine->races).*note)(w);
    return Flow::next;
}

template <void (RaceDetector::*note)(Warp&)>
void decode_wait(Decoder& d) {
    whole_warp(d);
    d.expect_operands(0);
    d.emit(order<note>, {});
}

template <void (RaceDetector::*note)(Warp&)>
void decode_fence(Decoder& d) {
    d.expect_operands(0);
    d.emit(order<note>, {});
}

}  // namespace

InstructionTable tcgen05_instructions() {
    return {
        {"tcgen05.alloc", decode_alloc,
         "allocates columns of tensor memory, for one CTA or a pair"},
        {"tcgen05.dealloc", decode_dealloc, "gives columns back"},
        {"tcgen05.relinquish_alloc_permit", decode_relinquish, "no more allocations in this CTA"},
        {"tcgen05.mma", decode_mma,
         "dense f16, tf32, f8f6f4, i8; block-scaled mxf8f6f4, mxf4, mxf4nvf4"},
        {"tcgen05.mma.ws", decode_weight_stationary,
         "weight-stationary, f16, tf32, f8f6f4, i8; M = 32, 64, 128; zero-column masks"},
        {"tcgen05.mma.sp", decode_sparse_mma,
         "the same as tcgen05.mma with a sparse A of 128 rows per CTA (or M = 64)"},
        {"tcgen05.mma.ws.sp", decode_sparse_weight_stationary,
         "the same as tcgen05.mma.ws with a sparse A, M = 128"},
        {"tcgen05.cp", decode_copy,
         "shared memory to tensor memory, all shapes; 4 and 6 bits to bytes"},
        {"tcgen05.shift", decode_shift, "rows of a quadrant down by one lane"},
        {"tcgen05.commit", decode_commit,
         "arrival when the thread's earlier operations are complete"},
        {"tcgen05.ld", decode_load, "tensor memory to registers, all shapes"},
        {"tcgen05.ld.red", decode_load_and_reduce,
         "the same of 32x32b and 16x32bx2, and the least or largest of a thread's registers"},
        {"tcgen05.st", decode_store, "registers to tensor memory, all shapes"},
        {"tcgen05.wait::ld", decode_wait<&RaceDetector::wait_loads>,
         "loads are complete when issued; looked at by the race detector"},
        {"tcgen05.wait::st", decode_wait<&RaceDetector::wait_stores>,
         "stores are complete when issued; looked at by the race detector"},
        {"tcgen05.fence::before_thread_sync", decode_fence<&RaceDetector::fence_before>,
         "looked at by the race detector"},
        {"tcgen05.fence::after_thread_sync", decode_fence<&RaceDetector::fence_after>,
         "looked at by the race detector"},
    };
}

}  // namespace deep_moe::emulator
