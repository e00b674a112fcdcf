// Branches, calls, exits, sleeping, register budgets.
#include <algorithm>

#include "lanes.h"
#include "program_builder.h"

namespace deep_moe::emulator {

namespace {

Flow branch(Warp& w, const Op& op) {
    return w.jump(op.target);
}

void decode_bra(Decoder& d) {
    d.take("uni");
    d.expect_operands(1);
    d.op.is_branch = d.op.ends_block = d.op.never_falls_through = true;
    d.branch_to(d.parsed(0).name);
    d.emit(branch, {});
}

// Moves the executing lanes to `pc_of(lane)`, which may differ between them; the group's others go
// on.
template <class F>
Flow scatter(Warp& w, F pc_of) {
    Group rest;
    rest.pc = w.current.pc + 1;
    rest.lanes = w.current.lanes & ~w.exec;
    if (rest.lanes) w.others.push_back(rest);
    std::vector<Group> groups;
    w.for_each_lane([&](int lane) {
        uint32_t pc = pc_of(lane);
        auto same =
            std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.pc == pc; });
        if (same == groups.end()) {
            groups.push_back({});
            same = groups.end() - 1;
            same->pc = pc;
        }
        same->lanes |= 1u << lane;
    });
    std::sort(groups.begin(), groups.end(),
              [](const Group& a, const Group& b) { return a.pc < b.pc; });
    w.current = groups.front();
    w.others.insert(w.others.end(), groups.begin() + 1, groups.end());
    return Flow::jumped;
}

// operands: index; aux: table
Flow branch_indexed(Warp& w, const Op& op) {
    const auto& table = w.program->branch_tables[op.aux];
    auto index = w.in<uint32_t>(op.operands[0]);
    return scatter(w, [&](int lane) {
        if (index[lane] >= table.size())
            throw Fault(
                FaultKind::invalid_operation,
                format("branch index %u, the table has %zu targets", index[lane], table.size()),
                lane);
        return table[index[lane]];
    });
}

void decode_brx_idx(Decoder& d) {
    d.take("uni");
    d.expect_operands(2);
    d.op.is_table_branch = d.op.ends_block = d.op.never_falls_through = true;
    uint32_t table = d.builder.add_branch_table(d.parsed(1).name, d.statement);
    d.emit(branch_indexed, {d.source(0, Type::u32)}, table);
}

void copy_frame(Warp& w, int lane, const std::vector<FrameCopy>& copies) {
    std::byte* frame = w.local.data() + size_t(lane) * w.program->local_bytes;
    for (const FrameCopy& c : copies) std::memcpy(frame + c.to, frame + c.from, c.bytes);
}

Flow call(Warp& w, const Op& op) {
    const CallSite& site = w.program->calls[op.aux];
    w.for_each_lane([&](int lane) {
        copy_frame(w, lane, site.arguments);
        w.call_stacks[size_t(lane)].push_back(uint64_t(w.current.pc + 1) << 32 | op.aux);
    });
    return w.jump(site.target);
}

void decode_call(Decoder& d) {
    d.take("uni");
    if (decode_runtime_call(d)) return;
    uint32_t site = d.builder.add_call(d.statement);
    d.op.ends_block = true;
    d.emit(call, {}, site);
}

Flow exit_threads(Warp& w, const Op&) {
    uint32_t lanes = w.exec;
    w.exit_lanes(lanes);
    ++w.current.pc;
    return Flow::jumped;
}

void decode_exit(Decoder& d) {
    d.op.ends_block = d.op.never_falls_through = true;
    d.emit(exit_threads, {});
}

Flow return_from(Warp& w, const Op& op) {
    if (w.call_stacks[size_t(w.first_lane())].empty()) return exit_threads(w, op);
    return scatter(w, [&](int lane) {
        auto& stack = w.call_stacks[size_t(lane)];
        uint64_t frame = stack.back();
        stack.pop_back();
        copy_frame(w, lane, w.program->calls[uint32_t(frame)].results);
        return uint32_t(frame >> 32);
    });
}

void decode_ret(Decoder& d) {
    d.take("uni");
    d.op.ends_block = d.op.never_falls_through = true;
    d.emit(return_from, {});
}

Flow trap(Warp& w, const Op&) {
    throw Fault(FaultKind::trap, "the kernel executed trap", w.first_lane());
}

void decode_trap(Decoder& d) {
    d.op.ends_block = d.op.never_falls_through = true;
    d.emit(trap, {});
}

Flow breakpoint(Warp& w, const Op&) {
    throw Fault(FaultKind::trap, "the kernel reached a breakpoint", w.first_lane());
}

void decode_breakpoint(Decoder& d) {
    d.op.ends_block = true;
    d.emit(breakpoint, {});
}

Flow sleep(Warp& w, const Op& op) {
    if (w.current.token) return Flow::next;
    ++w.polls;
    w.current.token = 1;
    uint64_t ns = std::min(w.uniform<uint32_t>(op.operands[0]), 1'000'000u);
    return w.block(w.machine->sleepers, "the end of nanosleep", 0, 0, w.machine->now_ns() + ns + 1);
}

void decode_nanosleep(Decoder& d) {
    d.take_type({Type::u32});
    d.expect_operands(1);
    d.emit(sleep, {d.source(0, Type::u32)});
}

Flow nothing(Warp&, const Op&) {
    return Flow::next;
}

void decode_griddepcontrol(Decoder& d) {
    d.ignore({"wait", "launch_dependents"});
    d.emit(nothing, {});
}

void decode_pmevent(Decoder& d) {
    d.take("mask");
    d.emit(nothing, {});
}

std::string describe_change(uint64_t aux) {
    return format("setmaxnreg.%s %llu", aux >> 16 ? "inc" : "dec",
                  (unsigned long long)(aux & 0xffff));
}

// The warps of a warpgroup must all execute the same ones.
void check_warpgroup(Warp& w, uint64_t change) {
    const size_t index = w.register_changes.size() - 1;
    for (const auto& other : w.cta->warps) {
        if (other->index / 4 != w.index / 4 || other->register_changes.size() <= index ||
            other->register_changes[index] == change)
            continue;
        throw Fault(FaultKind::invalid_operation,
                    describe_change(change) + ", but " + describe_warp(*w.grid, other->index) +
                        " of its warpgroup has executed " +
                        describe_change(other->register_changes[index]));
    }
}

// aux: registers per thread, bit 16: increase. Registers move between the warps of a CTA through
// its pool.
Flow set_max_registers(Warp& w, const Op& op) {
    Cta& cta = *w.cta;
    uint32_t wanted = op.aux & 0xffff;
    bool increase = op.aux >> 16;
    if (!w.current.token) {  // else it has come to wait for registers
        w.current.token = 1;
        w.register_changes.push_back(op.aux);
        check_warpgroup(w, op.aux);
    }
    if (!w.num_registers) return Flow::next;  // the launch's register count is not known: no effect
    if (increase ? wanted < w.num_registers : wanted > w.num_registers)
        throw Fault(FaultKind::invalid_operation,
                    format("setmaxnreg.%s to %u, the warp has %u registers per thread",
                           increase ? "inc" : "dec", wanted, w.num_registers));
    int64_t change = (int64_t(wanted) - w.num_registers) * warp_size;
    if (change > cta.free_registers)
        return w.block(cta.register_waiters, "%llu registers; the CTA's pool has %llu",
                       uint64_t(change), uint64_t(cta.free_registers));
    cta.free_registers -= change;
    w.num_registers = wanted;
    w.machine->note_progress();
    if (change < 0) w.machine->wake(cta.register_waiters);
    return Flow::next;
}

void decode_setmaxnreg(Decoder& d) {
    bool increase = d.take_any({"inc", "dec"}) == "inc";
    d.ignore({"sync", "aligned"});
    d.take_type({Type::u32});
    uint64_t count = d.immediate(0);
    if (count < 24 || count > 256 || count % 8)
        d.invalid("the count must be a multiple of 8 in 24..256");
    d.op.meeting = Meeting::whole_warp;
    d.emit(set_max_registers, {}, count | uint64_t(increase) << 16);
}

}  // namespace

InstructionTable control_instructions() {
    return {
        {"bra", decode_bra, "branch"},
        {"brx.idx", decode_brx_idx, "branch by table"},
        {"call", decode_call, "call of a function of the module"},
        {"ret", decode_ret, "return, or exit from a kernel"},
        {"exit", decode_exit, "end of the thread"},
        {"trap", decode_trap, "abort with an error"},
        {"brkpt", decode_breakpoint, "breakpoint, an error like trap"},
        {"nanosleep", decode_nanosleep, "wait for some time"},
        {"griddepcontrol", decode_griddepcontrol, "programmatic dependent launch (no effect)"},
        {"pmevent", decode_pmevent, "performance event (no effect)"},
        {"setmaxnreg", decode_setmaxnreg, "registers per thread; the CTA's pool is checked"},
    };
}

}  // namespace deep_moe::emulator
