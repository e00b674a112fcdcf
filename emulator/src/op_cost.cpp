#include "op_cost.h"

#include <algorithm>
#include <string>

#include "machine.h"
#include "program.h"

namespace deep_moe::emulator {
namespace {

struct Row {
    const char* name;  // a mnemonic or its beginning
    double issue, alu = 0, fma = 0, xu = 0;
    OpKind kind = OpKind::plain;
    int extra = 0;
};

// The longest name that fits counts. Numbers are machine instructions per PTX instruction, seen in
// sm_90a code that ptxas 13.0 made: moves mostly vanish, bitwise ones of two operands are joined to
// one of three, addresses of 64 bits are added in two steps.
constexpr Row rows[] = {
    {"mov", 0.25, 0.25},
    {"cvta", 0},
    {"ld.param", 0.25},
    {"ld.const", 0.25},
    {"add", 1, 1},
    {"sub", 1, 1},
    {"neg", 1, 1},
    {"abs", 1, 1},
    {"min", 1, 1},
    {"max", 1, 1},
    {"mul", 1, 0, 1},
    {"mad", 1, 0, 1},
    {"mul.wide", 1, 0, 2},
    {"mad.wide", 1, 0, 2},
    {"div", 12, 6, 4, 1},
    {"rem", 14, 7, 4, 1},
    {"and", 0.6, 0.6},
    {"or", 0.6, 0.6},
    {"xor", 0.6, 0.6},
    {"not", 0.4, 0.4},
    {"lop3", 1, 1},
    {"shl", 0.8, 0.8},
    {"shr", 0.8, 0.8},
    {"shf", 1, 1},
    {"prmt", 1, 1},
    {"bfe", 2, 2},
    {"bfi", 2, 2},
    {"popc", 1, 0, 0, 1},
    {"clz", 1, 0, 0, 1},
    {"brev", 1, 0, 0, 1},
    {"bfind", 1, 0, 0, 1},
    {"fns", 12, 12},
    {"selp", 1, 1},
    {"slct", 2, 2},
    {"setp", 1, 1},
    {"set", 1, 1},
    {"fma", 1, 0, 1},
    {"add.f32", 1, 0, 1},
    {"add.rn", 1, 0, 1},
    {"add.ftz", 1, 0, 1},
    {"add.f16", 1, 0, 1},
    {"add.bf16", 1, 0, 1},
    {"sub.f", 1, 0, 1},
    {"sub.rn", 1, 0, 1},
    {"cvt", 1, 1},
    {"ex2", 1, 0, 0, 1, OpKind::slow},
    {"lg2", 1, 0, 0, 1, OpKind::slow},
    {"rcp", 1, 0, 0, 1, OpKind::slow},
    {"rsqrt", 1, 0, 0, 1, OpKind::slow},
    {"sqrt", 1, 0, 0, 1, OpKind::slow},
    {"sin", 1, 0, 0, 1, OpKind::slow},
    {"cos", 1, 0, 0, 1, OpKind::slow},
    {"tanh", 1, 0, 0, 1, OpKind::slow},
    {"shfl", 1, 0, 0, 0, OpKind::slow},
    {"vote", 1, 1},
    {"activemask", 1, 1},
    {"match", 4, 4},
    {"redux", 1, 0, 0, 0, OpKind::slow},
    {"elect", 1, 1},
    {"bar.warp", 1},
    {"bra", 1, 0, 0, 0, OpKind::branch},
    {"brx", 3, 0, 0, 0, OpKind::branch},
    {"call", 4, 0, 0, 0, OpKind::branch},
    {"ret", 2, 0, 0, 0, OpKind::copy},
    {"exit", 1, 0, 0, 0, OpKind::copy},
    {"ld", 1, 0, 0, 0, OpKind::load},
    {"ldu", 1, 0, 0, 0, OpKind::load},
    {"ldmatrix", 1, 0, 0, 0, OpKind::load},
    {"st", 1, 0, 0, 0, OpKind::store},
    {"stmatrix", 1, 0, 0, 0, OpKind::store},
    {"atom", 2, 0, 0, 0, OpKind::atomic},
    {"red", 2, 0, 0, 0, OpKind::reduction},
    {"st.async", 2, 0, 0, 0, OpKind::copy},
    {"red.async", 2, 0, 0, 0, OpKind::copy},
    {"bar", 1, 0, 0, 0, OpKind::barrier},
    {"barrier", 1, 0, 0, 0, OpKind::barrier},
    {"bar.arrive", 1, 0, 0, 0, OpKind::barrier_arrive},
    {"bar.cta.arrive", 1, 0, 0, 0, OpKind::barrier_arrive},
    {"barrier.arrive", 1, 0, 0, 0, OpKind::barrier_arrive},
    {"barrier.cta.arrive", 1, 0, 0, 0, OpKind::barrier_arrive},
    {"barrier.cluster.arrive", 2, 0, 0, 0, OpKind::cluster_arrive},
    {"barrier.cluster.wait", 1, 0, 0, 0, OpKind::cluster_wait},
    {"fence", 1, 0, 0, 0, OpKind::fence_sys},
    {"fence.proxy", 2, 0, 0, 0, OpKind::fence_proxy},
    {"fence.mbarrier_init", 2, 0, 0, 0, OpKind::fence_gpu},
    {"membar", 1, 0, 0, 0, OpKind::fence_sys},
    {"membar.cta", 1, 0, 0, 0, OpKind::fence_cta},
    {"membar.gl", 1, 0, 0, 0, OpKind::fence_gpu},
    {"mbarrier", 2, 0, 0, 0, OpKind::mbarrier},
    {"mbarrier.test_wait", 2, 0, 0, 0, OpKind::mbarrier_wait},
    {"mbarrier.try_wait", 2, 0, 0, 0, OpKind::mbarrier_wait},
    {"cp.async", 1, 0, 0, 0, OpKind::copy},
    {"cp.reduce", 4, 2, 0, 0, OpKind::copy},
    {"cp.async.bulk", 4, 2, 0, 0, OpKind::copy},
    {"cp.async.bulk.commit_group", 1, 0, 0, 0, OpKind::copy},
    {"cp.async.bulk.wait_group", 1, 0, 0, 0, OpKind::copy},
    {"mma", 1, 0, 0, 0, OpKind::mma},
    {"wmma", 2, 0, 0, 0, OpKind::mma},
    {"wgmma.mma_async", 1, 0, 0, 0, OpKind::wgmma},
    {"wgmma.fence", 1},
    {"wgmma.commit_group", 0.5, 0, 0, 0, OpKind::wgmma_commit},
    {"wgmma.wait_group", 1, 0, 0, 0, OpKind::wgmma_wait},
    {"tcgen05", 2, 1, 0, 0, OpKind::copy},
    {"tcgen05.ld", 1, 0, 0, 0, OpKind::tensor_load},
    {"tcgen05.st", 1, 0, 0, 0, OpKind::tensor_load},
    {"tcgen05.wait", 1, 0, 0, 0, OpKind::tensor_wait},
    {"tcgen05.fence", 0.25},
    {"nanosleep", 1, 0, 0, 0, OpKind::copy},
    {"setmaxnreg", 1, 0, 0, 0, OpKind::set_registers},
    {"clusterlaunchcontrol", 2, 0, 0, 0, OpKind::copy},
    {"griddepcontrol", 1},
    {"mapa", 1, 1},
    {"isspacep", 1, 1},
    {"getctarank", 1, 1},
    {"prefetch", 1},
    {"discard", 1},
};

bool fits(std::string_view mnemonic, std::string_view name) {
    if (mnemonic.substr(0, name.size()) != name) return false;
    if (mnemonic.size() == name.size() || name.back() == 'f') return true;
    return mnemonic[name.size()] == '.' || mnemonic[name.size()] == ':';
}

bool has(std::string_view mnemonic, std::string_view modifier) {
    for (size_t at = mnemonic.find(modifier); at != std::string_view::npos;
         at = mnemonic.find(modifier, at + 1)) {
        const size_t end = at + modifier.size();
        if (at && mnemonic[at - 1] == '.' && (end == mnemonic.size() || mnemonic[end] == '.'))
            return true;
    }
    return false;
}

bool is_64_bits(std::string_view m) {
    return has(m, "s64") || has(m, "u64") || has(m, "b64") || has(m, "f64");
}

constexpr uint64_t quarters(double instructions) {
    return uint64_t(instructions * 4 + 0.5);
}

// Types between which a conversion of 32-bit registers is nothing or a move.
bool is_plain_conversion(std::string_view m) {
    if (m.find(".f") != std::string_view::npos || m.find("e4m3") != std::string_view::npos ||
        m.find("e5m2") != std::string_view::npos || m.find("e2m1") != std::string_view::npos ||
        m.find("ue8m0") != std::string_view::npos)
        return false;
    return m.find("bf16") == std::string_view::npos;
}

constexpr uint64_t space_bits = 0xf;  // of a memory instruction's aux

}  // namespace

OpCost cost_of(std::string_view m, const Op& op) {
    OpCost cost;
    const Row* best = nullptr;
    for (const Row& row : rows) {
        if (!fits(m, row.name)) continue;
        if (!best || std::string_view(row.name).size() > std::string_view(best->name).size())
            best = &row;
    }
    static constexpr Row other = {"", 1, 1};
    const Row row = best ? *best : other;
    double scale = 1;
    const bool is_integer_or_move = row.kind == OpKind::plain && !op.is_branch;
    if (is_integer_or_move && is_64_bits(m) && m.substr(0, 3) != "cvt" && m.substr(0, 3) != "mov")
        scale = has(m, "f64") ? 16 : m.substr(0, 3) == "mul" || m.substr(0, 3) == "mad" ? 4 : 2;
    if (m.substr(0, 3) == "cvt" && is_plain_conversion(m)) scale = 0.25;
    cost.work = pipe_work(quarters(row.issue * scale), quarters(row.alu * scale),
                          quarters(row.fma * scale), quarters(row.xu * scale));
    cost.kind = row.kind;
    cost.extra = uint8_t(row.extra);
    // To global memory it is a store or an update as others are.
    if ((fits(m, "st.async") || fits(m, "red.async")) && has(m, "global"))
        cost.kind = m[0] == 's' ? OpKind::store : OpKind::reduction;
    const bool is_wide = has(m, "b128");
    switch (cost.kind) {
        case OpKind::slow:
            cost.num_results = 1;
            cost.is_shuffle = row.xu == 0;
            break;
        case OpKind::load:
            cost.num_results = uint8_t(std::max(1, op.num_operands - 1));
            cost.address = uint8_t(op.num_operands - 1);
            cost.space = uint8_t(op.aux & space_bits);
            break;
        case OpKind::store:
            cost.space = uint8_t(op.aux & space_bits);
            break;
        case OpKind::atomic:
            cost.num_results = op.aux & 64 || has(m, "cas") || is_wide ? 1 : 0;
            cost.address = has(m, "cas") || is_wide ? 1
                           : op.aux & 64            ? uint8_t(op.aux >> 8 & 0xff)
                                                    : 0;
            cost.space = uint8_t(op.aux & space_bits);
            break;
        case OpKind::reduction:
            cost.space = uint8_t(op.aux & space_bits);
            break;
        case OpKind::fence_sys:
            if (has(m, "gpu")) cost.kind = OpKind::fence_gpu;
            if (has(m, "cta")) cost.kind = OpKind::fence_cta;
            if (has(m, "cluster")) cost.kind = OpKind::fence_gpu;
            break;
        case OpKind::fence_proxy:
            // Of one space it is a FENCE.VIEW, without the memory barrier of the generic one.
            if (has(m, "shared::cta") || has(m, "shared::cluster") || has(m, "global"))
                cost.kind = OpKind::fence_cta;
            break;
        case OpKind::wgmma:
            cost.size = uint16_t(op.aux >> 12 & 0xfff);
            cost.has_registers = op.aux >> 36 & 1;
            break;
        default:
            break;
    }
    if (m.substr(0, 8) == "ldmatrix" || m.substr(0, 8) == "stmatrix") {
        cost.space = uint8_t(Space::shared);
        const int matrices = has(m, "x4") ? 4 : has(m, "x2") ? 2 : 1;
        cost.size = uint16_t(matrices * 4);
        const bool loads = m[0] == 'l';
        cost.first_result = 1;
        cost.num_results = loads ? uint8_t(matrices) : 0;
        cost.address = 0;
    } else if (cost.kind == OpKind::load || cost.kind == OpKind::store ||
               cost.kind == OpKind::atomic || cost.kind == OpKind::reduction) {
        const size_t vector = has(m, "v8") ? 8 : has(m, "v4") ? 4 : has(m, "v2") ? 2 : 1;
        size_t bytes = 4;
        for (const auto& [type, size] :
             {std::pair("8", 1), {"16", 2}, {"32", 4}, {"64", 8}, {"128", 16}, {"16x2", 4}}) {
            for (const char* letter : {"b", "u", "s", "f", "bf"})
                if (has(m, std::string(letter) + type)) bytes = size_t(size);
        }
        cost.size = uint16_t(vector * bytes);
    }
    constexpr std::string_view impure[] = {"bar",      "barrier", "wgmma",         "tcgen05",
                                           "prefetch", "discard", "griddepcontrol"};
    cost.is_pure = best && (cost.kind == OpKind::plain || cost.kind == OpKind::slow) &&
                   std::none_of(std::begin(impure), std::end(impure),
                                [&](std::string_view name) { return fits(m, name); });
    const bool is_strong = has(m, "volatile") || has(m, "relaxed") || has(m, "acquire") ||
                           has(m, "release") || has(m, "acq_rel") || has(m, "mmio");
    // Of the CTA's threads each sees what the others have written, so that nobody waits.
    cost.is_release = (has(m, "release") || has(m, "acq_rel")) && !has(m, "cta");
    cost.reaches_system = has(m, "sys");
    if (cost.kind == OpKind::mbarrier || cost.kind == OpKind::cluster_arrive)
        cost.is_release &= has(m, "cluster");
    else if (cost.kind != OpKind::store && cost.kind != OpKind::atomic &&
             cost.kind != OpKind::reduction)
        cost.is_release = false;
    switch (cost.kind) {
        case OpKind::plain:
        case OpKind::slow:
        case OpKind::mma:
        case OpKind::wgmma:
        case OpKind::wgmma_commit:
        case OpKind::wgmma_wait:
        case OpKind::tensor_load:
        case OpKind::tensor_wait:
        case OpKind::branch:
        case OpKind::fence_cta:
        case OpKind::fence_proxy:
        case OpKind::fence_gpu:
        case OpKind::fence_sys:
            break;
        case OpKind::load:
        case OpKind::store:
            cost.is_ordered = is_strong;
            if (cost.kind == OpKind::load)
                cost.is_pure = !is_strong && m.substr(0, 8) != "ldmatrix";
            break;
        default:
            cost.is_ordered = true;
    }
    return cost;
}

void set_line_costs(Program& program, const std::map<int, LineCost>& costs) {
    int last_line = 0;
    for (size_t i = 0; i < program.costs.size(); ++i) {
        OpCost& cost = program.costs[i];
        const int line = program.infos[i].ptx_line;
        const auto found = costs.find(line);
        cost.is_scheduled = true;
        cost.work = 0;
        cost.own = 0;
        // A statement may be more than one operation: the first stands for all.
        if (line != last_line && found != costs.end()) {
            const LineCost& c = found->second;
            cost.work =
                pipe_work(quarters(c.issue), quarters(c.alu), quarters(c.fma), quarters(c.xu));
            cost.own = uint32_t(c.cycles * 16 + 0.5);
        }
        // Where the compiler made predicates of a branch, nothing jumps.
        const bool has_branch = found != costs.end() && found->second.has_branch;
        if (cost.kind == OpKind::branch && !has_branch) cost.kind = OpKind::plain;
        last_line = line;
    }
}

uint64_t touched_registers(const Op& op) {
    uint64_t bits = 0;
    for (int i = 0; i < op.num_operands; ++i) {
        const Operand& o = op.operands[i];
        if (o.base == Base::registers && !o.sink) bits |= register_bit(o.offset);
    }
    if (op.guard != Guard::always) bits |= register_bit(op.guard_offset);
    return bits;
}

}  // namespace deep_moe::emulator
