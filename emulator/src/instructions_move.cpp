// Moves, packing and unpacking of vectors, special registers, address conversions.
#include "lanes.h"

namespace deep_moe::emulator {

namespace {

template <class T>
Flow move(Warp& w, const Op& op) {
    return map1<T, T>(w, op, [](T a) { return a; });
}

Flow narrow(Warp& w, const Op& op) {
    return map1<uint32_t, uint64_t>(w, op, [](uint64_t a) { return uint32_t(a); });
}
Flow widen(Warp& w, const Op& op) {
    return map1<uint64_t, uint32_t>(w, op, [](uint32_t a) { return uint64_t(a); });
}
Flow widen_signed(Warp& w, const Op& op) {
    return map1<uint64_t, int32_t>(w, op, [](int32_t a) { return uint64_t(int64_t(a)); });
}

template <class T>
Flow place_in_frame(Warp& w, const Op& op) {  // aux: offset in the frame
    return map1<T, uint32_t>(w, op, [&](uint32_t frame) { return T(frame + op.aux); });
}

Flow move_predicate(Warp& w, const Op& op) {
    w.set_predicate(op.operands[0], w.predicate(op.operands[1]));
    return Flow::next;
}

Flow move_wide(Warp& w, const Op& op) {  // 128 bits: two rows of 64
    for (uint32_t half = 0; half < 2; ++half) {
        Out<uint64_t> d{w.bases[0] + op.operands[0].offset + half * 256};
        In<uint64_t> a{w.data(op.operands[1]) + half * 256};
        w.for_each_lane([&](int i) { d.set(i, a[i]); });
    }
    return Flow::next;
}

// aux: bits of one part. Operand 0 is the whole, the others its parts from the low end.
Flow pack(Warp& w, const Op& op) {
    uint32_t bits = uint32_t(op.aux);
    uint64_t mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
    const Operand& whole = op.operands[0];
    w.for_each_lane([&](int i) {
        uint64_t value[2] = {0, 0};
        for (uint32_t k = 1, at = 0; k < op.num_operands; ++k, at += bits) {
            const Operand& part = op.operands[k];
            uint64_t v = part.bits == 64 ? w.in<uint64_t>(part)[i] : w.in<uint32_t>(part)[i];
            value[at / 64] |= (v & mask) << (at % 64);
        }
        if (whole.bits == 32) {
            w.out<uint32_t>(whole).set(i, uint32_t(value[0]));
        } else {
            w.out<uint64_t>(whole).set(i, value[0]);
            if (whole.bits == 128) Out<uint64_t>{w.bases[0] + whole.offset + 256}.set(i, value[1]);
        }
    });
    return Flow::next;
}

// Operand 0 is the whole, the others take its parts.
Flow unpack(Warp& w, const Op& op) {
    uint32_t bits = uint32_t(op.aux);
    uint64_t mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
    const Operand& whole = op.operands[0];
    w.for_each_lane([&](int i) {
        uint64_t value[2] = {0, 0};
        if (whole.bits == 32) {
            value[0] = w.in<uint32_t>(whole)[i];
        } else {
            value[0] = w.in<uint64_t>(whole)[i];
            if (whole.bits == 128) value[1] = In<uint64_t>{w.data(whole) + 256}[i];
        }
        for (uint32_t k = 1, at = 0; k < op.num_operands; ++k, at += bits) {
            const Operand& part = op.operands[k];
            uint64_t v = (value[at / 64] >> (at % 64)) & mask;
            if (part.bits == 64)
                w.out<uint64_t>(part).set(i, v);
            else
                w.out<uint32_t>(part).set(i, uint32_t(v));
        }
    });
    return Flow::next;
}

template <class T>
Flow read_timer(Warp& w, const Op& op) {  // aux 1: the clock counts instructions; 2: high word
    ++w.polls;
    uint64_t value = op.aux & 1 ? w.machine->now_cycles(w) : w.machine->now_ns();
    if (op.aux & 2) value >>= 32;
    auto d = w.out<T>(op.operands[0]);
    w.for_each_lane([&](int i) { d.set(i, T(value)); });
    return Flow::next;
}

struct SpecialName {
    const char* name;
    Special row;
};
constexpr SpecialName special_names[] = {
    {"%tid.x", Special::tid_x},
    {"%tid.y", Special::tid_y},
    {"%tid.z", Special::tid_z},
    {"%ntid.x", Special::ntid_x},
    {"%ntid.y", Special::ntid_y},
    {"%ntid.z", Special::ntid_z},
    {"%ctaid.x", Special::ctaid_x},
    {"%ctaid.y", Special::ctaid_y},
    {"%ctaid.z", Special::ctaid_z},
    {"%nctaid.x", Special::nctaid_x},
    {"%nctaid.y", Special::nctaid_y},
    {"%nctaid.z", Special::nctaid_z},
    {"%laneid", Special::laneid},
    {"%warpid", Special::warpid},
    {"%nwarpid", Special::nwarpid},
    {"%smid", Special::smid},
    {"%nsmid", Special::nsmid},
    {"%gridid", Special::gridid},
    {"%clusterid.x", Special::clusterid_x},
    {"%clusterid.y", Special::clusterid_y},
    {"%clusterid.z", Special::clusterid_z},
    {"%nclusterid.x", Special::nclusterid_x},
    {"%nclusterid.y", Special::nclusterid_y},
    {"%nclusterid.z", Special::nclusterid_z},
    {"%cluster_ctaid.x", Special::cluster_ctaid_x},
    {"%cluster_ctaid.y", Special::cluster_ctaid_y},
    {"%cluster_ctaid.z", Special::cluster_ctaid_z},
    {"%cluster_nctaid.x", Special::cluster_nctaid_x},
    {"%cluster_nctaid.y", Special::cluster_nctaid_y},
    {"%cluster_nctaid.z", Special::cluster_nctaid_z},
    {"%cluster_ctarank", Special::cluster_ctarank},
    {"%cluster_nctarank", Special::cluster_nctarank},
    {"%lanemask_eq", Special::lanemask_eq},
    {"%lanemask_le", Special::lanemask_le},
    {"%lanemask_lt", Special::lanemask_lt},
    {"%lanemask_ge", Special::lanemask_ge},
    {"%lanemask_gt", Special::lanemask_gt},
    {"%dynamic_smem_size", Special::dynamic_smem_size},
    {"%total_smem_size", Special::total_smem_size},
    {"%aggr_smem_size", Special::aggr_smem_size},
    {"%reserved_smem_offset_begin", Special::reserved_smem_offset_begin},
    {"%reserved_smem_offset_cap", Special::reserved_smem_offset_cap},
    {"%reserved_smem_offset_1", Special::reserved_smem_offset_1},
    {"%envreg1", Special::envreg1},
    {"%envreg2", Special::envreg2},
};

void decode_mov(Decoder& d) {
    Type type = d.take_type();
    d.expect_operands(2);
    const ParsedOperand& to = d.parsed(0);
    const ParsedOperand& from = d.parsed(1);
    using Kind = ParsedOperand::Kind;
    if (type == Type::pred) {
        d.emit(move_predicate, {d.destination(0, type), d.source(1, type)});
        return;
    }
    if (from.kind == Kind::vector || to.kind == Kind::vector) {
        const auto& parts = from.kind == Kind::vector ? from.elements : to.elements;
        int bits = num_bits(type) / int(parts.size());
        Type part = bits <= 8    ? Type::b8
                    : bits == 16 ? Type::b16
                    : bits == 32 ? Type::b32
                                 : Type::b64;
        if (from.kind == Kind::vector) {
            std::vector<Operand> operands{d.destination(0, type)};
            for (const Operand& o : d.sources(1, part)) operands.push_back(o);
            d.set_use(RegisterUse::pack);
            d.emit(pack, operands, uint64_t(bits));
        } else {
            std::vector<Operand> operands{d.source(1, type)};
            for (const Operand& o : d.destinations(0, part)) operands.push_back(o);
            d.set_use(RegisterUse::unpack);
            d.emit(unpack, operands, uint64_t(bits));
        }
        return;
    }
    if (from.kind == Kind::special) {
        static const std::map<std::string, uint64_t> timers = {
            {"%clock", 1},       {"%clock64", 1},        {"%clock_hi", 3},
            {"%globaltimer", 0}, {"%globaltimer_lo", 0}, {"%globaltimer_hi", 2}};
        auto timer = timers.find(from.name);
        if (timer != timers.end()) {
            d.emit(num_bits(type) == 64 ? read_timer<uint64_t> : read_timer<uint32_t>,
                   {d.destination(0, type)}, timer->second);
            return;
        }
        if (num_bits(type) == 64) {
            d.emit(widen, {d.destination(0, type), d.source(1, Type::b32)});
            return;
        }
        if (from.name == "%is_explicit_cluster") d.unsupported("it is a predicate");
    }
    if (type == Type::b128) {
        d.emit(move_wide, {d.destination(0, type), d.source(1, type)});
        return;
    }
    d.emit(num_bits(type) == 64 ? move<uint64_t> : move<uint32_t>,
           {d.destination(0, type), d.source(1, type)});
}

// ---- address conversions ----

// aux: the window to add (0: none), or ~0 to remove whatever window is there
template <class T>
Flow convert_address(Warp& w, const Op& op) {
    return map1<T, T>(w, op, [&](T a) {
        if (op.aux == ~0ull) return T(a & T(~window_mask));
        return T(a | T(op.aux));
    });
}

void decode_cvta(Decoder& d) {
    bool to = d.take("to");
    Space space = d.take_space();
    Type type = d.take_type({Type::u32, Type::u64});
    if (type == Type::u32) d.unsupported("generic addresses have 64 bits");
    d.expect_operands(2);
    bool window = space == Space::shared || space == Space::shared_cluster || space == Space::local;
    uint64_t aux = !window ? 0 : to ? ~0ull : space == Space::local ? local_window : shared_window;
    d.emit(convert_address<uint64_t>, {d.destination(0, type), d.source(1, type)}, aux);
}

// Whether a .const variable of the module lies there.
bool is_constant(const Warp& w, uint64_t address) {
    const auto found = w.grid->rank->modules.find(w.program->module);
    if (found == w.grid->rank->modules.end()) return false;
    for (const auto& [name, symbol] : w.program->module->variables) {
        if (symbol.space != Space::constant) continue;
        const auto at = found->second.addresses.find(name);
        if (at != found->second.addresses.end() && address - at->second < symbol.size) return true;
    }
    return false;
}

Flow isspacep(Warp& w, const Op& op) {
    auto a = w.in<uint64_t>(op.operands[1]);
    uint32_t bits = 0;
    w.for_each_lane([&](int i) {
        uint64_t window = a[i] & window_mask;
        bool in = false;
        switch (Space(op.aux)) {
            case Space::shared_cluster:
                in = window == shared_window;
                break;
            case Space::shared:
                in = window == shared_window &&
                     ((a[i] & ~window_mask) >> shared_rank_shift) == w.cta->cluster_rank;
                break;
            case Space::local:
                in = window == local_window;
                break;
            case Space::param: {
                uint64_t base = reinterpret_cast<uint64_t>(w.grid->parameters);
                in = a[i] - base < w.program->parameter_bytes;
                break;
            }
            case Space::constant:
                in = window == 0 && is_constant(w, a[i]);
                break;
            default:
                in = window == 0 && !is_constant(w, a[i]);
                break;
        }
        bits |= uint32_t(in) << i;
    });
    w.set_predicate(op.operands[0], bits);
    return Flow::next;
}

void decode_isspacep(Decoder& d) {
    Space space = d.take_space();
    d.expect_operands(2);
    d.emit(isspacep, {d.destination(0, Type::pred), d.source(1, Type::u64)}, uint64_t(space));
}

template <class T>
Flow mapa(Warp& w, const Op& op) {
    auto d = w.out<T>(op.operands[0]);
    auto a = w.in<T>(op.operands[1]);
    auto rank = w.in<uint32_t>(op.operands[2]);
    w.for_each_lane([&](int i) {
        if (rank[i] >= w.cta->cluster->ctas.size())
            throw Fault(FaultKind::invalid_operation,
                        format("mapa to CTA rank %u of a cluster of %zu", rank[i],
                               w.cta->cluster->ctas.size()),
                        i);
        T field = T(0xff) << shared_rank_shift;
        d.set(i, T((a[i] & ~field) | T(rank[i]) << shared_rank_shift));
    });
    return Flow::next;
}

void decode_mapa(Decoder& d) {
    d.take_space();
    Type type = d.take_type({Type::u32, Type::u64});
    d.expect_operands(3);
    d.emit(type == Type::u64 ? mapa<uint64_t> : mapa<uint32_t>,
           {d.destination(0, type), d.source(1, type), d.source(2, Type::u32)});
}

template <class T>
Flow getctarank(Warp& w, const Op& op) {
    return map1<uint32_t, T>(w, op, [](T a) { return uint32_t(a >> shared_rank_shift) & 0xff; });
}

void decode_getctarank(Decoder& d) {
    d.take_space();
    Type type = d.take_type({Type::u32, Type::u64});
    d.expect_operands(2);
    d.emit(type == Type::u64 ? getctarank<uint64_t> : getctarank<uint32_t>,
           {d.destination(0, Type::u32), d.source(1, type)});
}

void decode_createpolicy(Decoder& d) {  // hints have no effect: any value will do
    d.modifiers.clear();
    d.emit(move<uint64_t>, {d.destination(0, Type::b64), d.constant(0, 64)});
}

}  // namespace

Body Decoder::narrow_body() {
    return narrow;
}
Body Decoder::widen_body() {
    return widen;
}
Body Decoder::widen_signed_body() {
    return widen_signed;
}
Body Decoder::frame_address_body(int bits) {
    return bits == 64 ? place_in_frame<uint64_t> : place_in_frame<uint32_t>;
}

bool Decoder::special_operand(const std::string& name, Operand& out) {
    for (const SpecialName& s : special_names) {
        if (name != s.name) continue;
        out.base = Base::special;
        out.bits = 32;
        out.offset = uint32_t(s.row) * warp_size * 4;
        return true;
    }
    if (name == "%is_explicit_cluster") {  // a predicate: its row holds the mask
        out.base = Base::special;
        out.bits = 1;
        out.offset = uint32_t(Special::is_explicit_cluster) * warp_size * 4;
        return true;
    }
    return false;
}

InstructionTable move_instructions() {
    return {
        {"mov", decode_mov, "copy, pack, unpack, special registers, addresses of variables"},
        {"cvta", decode_cvta, "conversion between generic addresses and those of a state space"},
        {"isspacep", decode_isspacep, "state space of a generic address"},
        {"mapa", decode_mapa, "address in another CTA of the cluster"},
        {"getctarank", decode_getctarank, "CTA rank of a shared address"},
        {"createpolicy", decode_createpolicy, "cache policy (no effect)"},
    };
}

}  // namespace deep_moe::emulator
