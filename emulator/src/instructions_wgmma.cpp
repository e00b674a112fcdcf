// wgmma.*: the fourth-generation tensor core (sm_90a).
//
// A warp's part of a wgmma runs when it is issued. To catch shared memory that is overwritten while
// the hardware may still read it, the operands' bytes are looked at again when the warp waits for
// the group.
#include <utility>

#include "async_units.h"
#include "element_types.h"
#include "instruction_table.h"
#include "race_detector.h"
#include "wgmma.h"

namespace deep_moe::emulator {
namespace {

struct Operands {  // in shared memory, of one uncompleted wgmma
    MatrixDescriptor descriptor;
    bool mn_major;
    uint32_t num_rows, row_bytes, element_bytes;
    uint64_t digest;
    uint32_t pc;
};

struct WarpState {
    std::vector<Operands> open;
    std::deque<std::vector<Operands>> committed;
};

struct WgmmaState {
    std::unordered_map<uint32_t, WarpState> warps;
};

WarpState& warp_state(Warp& w) {
    auto& slot = w.cta->units[int(Unit::matrix)];
    if (!slot) slot = std::make_shared<WgmmaState>();
    return static_cast<WgmmaState*>(slot.get())->warps[w.index];
}

// FNV-1a over 64-bit words.
uint64_t digest_of(Cta& cta, const Operands& o) {
    static thread_local std::vector<uint8_t> bytes;
    bytes.resize(size_t(o.num_rows) * o.row_bytes);
    CtaWindow window(cta, "wgmma operand", /*is_access=*/false);
    gather_operand(window, o.descriptor, o.mn_major, o.num_rows, o.row_bytes, o.element_bytes,
                   bytes.data());
    uint64_t digest = 0xcbf29ce484222325ull;
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
        uint64_t word;
        std::memcpy(&word, bytes.data() + i, 8);
        digest = (digest ^ word) * 0x100000001b3ull;
    }
    return digest;
}

void remember(Warp& w, const MatrixDescriptor& descriptor, bool mn_major, uint32_t num_rows,
              Element element, uint32_t k) {
    Operands o{
        descriptor, mn_major,    num_rows, k * element_bits(element) / 8, container_bytes(element),
        0,          w.current.pc};
    o.digest = digest_of(*w.cta, o);
    warp_state(w).open.push_back(o);
}

struct WgmmaForm {
    Wgmma unit;
    bool a_in_registers = false, is_sparse = false;

    uint64_t pack() const {
        return uint64_t(unit.a_element_type) | uint64_t(unit.b_element_type) << 4 |
               uint64_t(unit.d_type) << 8 | uint64_t(unit.n) << 12 | uint64_t(unit.k) << 48 |
               uint64_t(unit.a_mn_major) << 32 | uint64_t(unit.b_mn_major) << 33 |
               uint64_t(unit.negate_a) << 34 | uint64_t(unit.negate_b) << 35 |
               uint64_t(a_in_registers) << 36 | uint64_t(is_sparse) << 37 |
               uint64_t(unit.saturates) << 38;
    }
    static WgmmaForm unpack(uint64_t aux) {
        WgmmaForm form;
        form.unit.a_element_type = Element(aux & 0xf);
        form.unit.b_element_type = Element(aux >> 4 & 0xf);
        form.unit.d_type = Accumulator(aux >> 8 & 0xf);
        form.unit.n = uint32_t(aux >> 12 & 0xfff);
        form.unit.k = uint32_t(aux >> 48);
        form.unit.a_mn_major = aux >> 32 & 1;
        form.unit.b_mn_major = aux >> 33 & 1;
        form.unit.negate_a = aux >> 34 & 1;
        form.unit.negate_b = aux >> 35 & 1;
        form.a_in_registers = aux >> 36 & 1;
        form.is_sparse = aux >> 37 & 1;
        form.unit.saturates = aux >> 38 & 1;
        return form;
    }
};

MatrixDescriptor shared_operand(Warp& w, const Operand& operand) {
    const uint64_t bits = w.uniform<uint64_t>(operand);
    if (w.machine->checks) {
        const std::string wrong = MatrixDescriptor::wrong_constants_sm90(bits);
        if (!wrong.empty()) w.machine->find(FaultKind::invalid_operation, [&] { return wrong; });
    }
    return MatrixDescriptor::sm90(bits);
}

// b, scale-d, a descriptor or 4 registers, accumulators, of sparse A metadata and selector
Flow mma_async(Warp& w, const Op& op) {
    if (w.machine->leaves_out_products) return Flow::next;
    WgmmaForm form = WgmmaForm::unpack(op.aux);
    const uint32_t scale_d = w.predicate(op.operands[1]) & w.exec;
    if (scale_d != 0 && scale_d != w.exec) {
        fail(FaultKind::invalid_operation, "wgmma: scale-d differs between the lanes (0x%08x)",
             scale_d);
    }
    form.unit.accumulate = scale_d != 0;
    if (w.machine->hopper_fp8_sums) form.unit.numerics = WgmmaNumerics::hopper_fp8;
    const MatrixDescriptor b = shared_operand(w, op.operands[0]);
    MatrixDescriptor a;
    const uint32_t* fragment[4];
    const int first_d = 2 + (form.a_in_registers ? 4 : 1);
    if (form.a_in_registers) {
        for (int r = 0; r < 4; ++r)
            fragment[r] = reinterpret_cast<const uint32_t*>(w.data(op.operands[2 + r]));
    } else {
        a = shared_operand(w, op.operands[2]);
    }
    uint32_t* accumulators[128];
    const int end_d = op.num_operands - (form.is_sparse ? 2 : 0);
    for (int i = first_d; i < end_d; ++i) {
        accumulators[i - first_d] =
            reinterpret_cast<uint32_t*>(w.out<uint32_t>(op.operands[i]).data);
    }
    if (form.is_sparse) {
        form.unit.sparse = {reinterpret_cast<const uint32_t*>(w.data(op.operands[end_d])),
                            w.uniform<uint32_t>(op.operands[end_d + 1])};
    }
    static thread_local WgmmaPanels panels;
    CtaWindow window(*w.cta, "wgmma operand");
    RaceDetector* races = w.machine->races.get();
    std::shared_ptr<const Issue> issue;
    if (races) {
        WarpClock& clock = *w.clock;
        if (!clock.matrix) clock.matrix = races->new_agent(*w.cta, "wgmma of", w.index);
        issue = races->issue(w, w.first_lane());
    }
    const AsyncAccesses accesses(races, issue, races ? w.clock->matrix : 0,
                                 races ? w.clock->num_matrix_groups + 1 : 0);
    form.unit.run(window, w.index % 4, form.a_in_registers ? fragment : nullptr, a, b, accumulators,
                  panels);
    if (w.machine->checks) {
        remember(w, b, form.unit.b_mn_major, form.unit.n, form.unit.b_element_type, form.unit.k);
        if (!form.a_in_registers)
            remember(w, a, form.unit.a_mn_major, 64, form.unit.a_element_type, form.unit.kept_k());
    }
    return Flow::next;
}

struct Shape {
    uint32_t m, n, k;
};

Shape take_shape(Decoder& d) {
    std::string text;
    Shape shape{};
    if (!d.take_prefix("m64n", text) ||
        std::sscanf(text.c_str(), "m%un%uk%u", &shape.m, &shape.n, &shape.k) != 3) {
        d.invalid("the shape is missing");
    }
    if (shape.n % 8 || shape.n < 8 || shape.n > 256) d.invalid("N must be 8 to 256 in steps of 8");
    return shape;
}

void decode_form(Decoder& d, bool is_sparse) {
    WgmmaForm form;
    form.is_sparse = is_sparse;
    d.ignore({"sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    const Shape shape = take_shape(d);
    const Type result = d.take_type({Type::f32, Type::f16, Type::u32, Type::s32});
    form.unit.d_type = result == Type::f32   ? Accumulator::f32
                       : result == Type::f16 ? Accumulator::f16
                                             : Accumulator::s32;
    form.unit.a_element_type = take_element(d);
    form.unit.b_element_type = take_element(d);
    form.unit.n = shape.n;
    form.unit.k = shape.k;
    const uint32_t bits = element_bits(form.unit.a_element_type);
    if (shape.k * bits / 8 != (is_sparse ? 64 : 32)) d.invalid("K does not match the element type");
    if (bits == 4 || (bits == 1 && is_sparse)) d.unsupported("elements of this type");
    if (bits == 1 && (!d.take("and") || !d.take("popc"))) d.invalid(".b1 goes with .and.popc");
    form.unit.saturates = d.take("satfinite");
    if (form.unit.saturates && form.unit.d_type != Accumulator::s32)
        d.invalid(".satfinite is of integers");
    const bool transposes = container_bytes(form.unit.a_element_type) == 2;
    const bool scales = form.unit.d_type != Accumulator::s32;
    form.a_in_registers = d.parsed(1).kind == ParsedOperand::Kind::vector;
    const size_t scale_d = is_sparse ? 5 : 3, next = scale_d + 1;
    const size_t count = next + (scales ? 2 : 0) + (transposes ? (form.a_in_registers ? 1 : 2) : 0);
    d.expect_operands(count);
    if (scales) {
        for (size_t i : {next, next + 1}) {
            const int64_t scale = int64_t(d.immediate(i));
            if (scale != 1 && scale != -1) d.invalid("imm-scale must be 1 or -1");
        }
        form.unit.negate_a = int64_t(d.immediate(next)) < 0;
        form.unit.negate_b = int64_t(d.immediate(next + 1)) < 0;
    }
    if (transposes) {
        form.unit.b_mn_major = d.immediate(count - 1) != 0;
        if (!form.a_in_registers) form.unit.a_mn_major = d.immediate(next + 2) != 0;
    }
    std::vector<Operand> operands{d.source(2, Type::b64), d.source(scale_d, Type::pred)};
    if (form.a_in_registers) {
        const std::vector<Operand> fragment = d.sources(1, Type::b32);
        if (fragment.size() != 4) d.invalid("A needs 4 registers");
        operands.insert(operands.end(), fragment.begin(), fragment.end());
    } else {
        operands.push_back(d.source(1, Type::b64));
    }
    d.sources(0, Type::b32);  // the accumulators are read too
    const std::vector<Operand> accumulators = d.destinations(0, Type::b32);
    if (accumulators.size() != shape.n / (form.unit.d_type == Accumulator::f16 ? 4 : 2)) {
        d.invalid("the number of accumulator registers does not match the shape");
    }
    operands.insert(operands.end(), accumulators.begin(), accumulators.end());
    if (is_sparse) {
        const uint32_t selector = d.immediate_u32(4);
        if (selector > SparseMetadata::last_selector(form.unit.a_element_type, shape.k))
            d.invalid("this sparsity selector does not exist for the shape");
        operands.push_back(d.source(3, Type::b32));
        operands.push_back(d.constant(selector));
    }
    d.emit(mma_async, std::move(operands), form.pack());
}

void decode_mma_async(Decoder& d) {
    decode_form(d, false);
}
void decode_sparse_mma_async(Decoder& d) {
    decode_form(d, true);
}

// Looked at by register_watch.cpp.
Flow fence(Warp&, const Op&) {
    return Flow::next;
}

Flow commit_group(Warp& w, const Op&) {
    if (!w.machine->checks) return Flow::next;
    WarpState& state = warp_state(w);
    state.committed.push_back(std::exchange(state.open, {}));
    if (w.machine->races) ++w.clock->num_matrix_groups;
    return Flow::next;
}

Flow wait_group(Warp& w, const Op& op) {
    if (!w.machine->checks) return Flow::next;
    auto& groups = warp_state(w).committed;
    while (groups.size() > op.aux) {
        for (const Operands& o : groups.front()) {
            if (digest_of(*w.cta, o) == o.digest) continue;
            w.machine->find(
                FaultKind::race,
                [&] {
                    return format(
                        "shared memory read by a wgmma changed before its group was waited for; "
                        "the "
                        "operand starts at 0x%x\n  wgmma: %s",
                        o.descriptor.start, describe_instruction(*w.program, o.pc).c_str());
                },
                {w.program, o.pc},
                [&](Finding& finding) {
                    finding.space = name_of(Space::shared);
                    finding.address = o.descriptor.start;
                    const Where now = w.machine->here();
                    finding.involved = {
                        involved_at({now.grid, now.program, o.pc, now.cta, now.warp}, -1),
                        involved_at(now, -1)};
                });
        }
        groups.pop_front();
    }
    if (w.machine->races) {
        WarpClock& clock = *w.clock;
        if (clock.matrix && clock.num_matrix_groups > op.aux) {
            w.machine->races->waited_for(w, w.exec, clock.matrix,
                                         clock.num_matrix_groups - uint32_t(op.aux));
        }
    }
    return Flow::next;
}

void decode_fence(Decoder& d) {
    d.ignore({"sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    d.expect_operands(0);
    d.emit(fence, {});
}

void decode_commit_group(Decoder& d) {
    d.ignore({"sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    d.expect_operands(0);
    d.emit(commit_group, {});
}

void decode_wait_group(Decoder& d) {
    d.ignore({"sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    d.expect_operands(1);
    d.emit(wait_group, {}, d.immediate_u32(0));
}

}  // namespace

InstructionTable wgmma_instructions() {
    return {
        {"wgmma.mma_async", decode_mma_async,
         "m64nNkK: f16, bf16, tf32, e4m3, e5m2, u8, s8, b1; A from registers or shared memory"},
        {"wgmma.mma_async.sp", decode_sparse_mma_async, "the same with a sparse A; K is doubled"},
        {"wgmma.fence", decode_fence, "orders accesses to registers; looked at by the checks"},
        {"wgmma.commit_group", decode_commit_group, "closes a group of wgmmas"},
        {"wgmma.wait_group", decode_wait_group,
         "checks that the operands of complete groups have not changed"},
    };
}

}  // namespace deep_moe::emulator
