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

const Callable& callee_of(const Warp& w, const CallSite& site, const Op& op, int lane,
                          uint32_t& index) {
    const Program& program = *w.program;
    if (site.callee >= 0) {
        index = uint32_t(site.callee);
        return program.callables[index];
    }
    const uint64_t address = w.in<uint64_t>(op.operands[0])[lane];
    auto found = program.callables_by_address.find(address);
    if (found == program.callables_by_address.end()) {
        throw Fault(FaultKind::invalid_operation,
                    format("call of 0x%llx, which is no function's address",
                           static_cast<unsigned long long>(address)),
                    lane);
    }
    index = found->second;
    const Callable& callee = program.callables[index];
    auto fits = [](const std::vector<FrameSlot>& a, const std::vector<FrameSlot>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                          [](FrameSlot x, FrameSlot y) { return x.bytes == y.bytes; });
    };
    if (!fits(site.arguments, callee.parameters) || !fits(site.results, callee.results)) {
        throw Fault(FaultKind::invalid_operation,
                    "the call's parameters are not those of " + callee.name, lane);
    }
    return callee;
}

void copy_parameters(Warp& w, int lane, const std::vector<FrameSlot>& from, uint32_t from_frame,
                     const std::vector<FrameSlot>& to, uint32_t to_frame) {
    for (size_t i = 0; i < from.size(); ++i) {
        std::memcpy(w.local_at(to_frame + to[i].offset, lane),
                    w.local_at(from_frame + from[i].offset, lane),
                    std::min(from[i].bytes, to[i].bytes));
    }
}

uint32_t& frame_of(Warp& w, int lane) {
    return w.special[size_t(Special::frame) * warp_size + size_t(lane)];
}

// Calls `f(32 bits of the lane's registers)` for all that `registers` names, in order.
template <class F>
void for_each_word(Warp& w, const std::vector<RegisterPlace>& registers, int lane, F f) {
    for (const RegisterPlace& r : registers) {
        std::byte* at = w.registers.data() + r.offset;
        if (r.bits == 1) {
            auto& mask = *reinterpret_cast<uint32_t*>(at);
            uint32_t bit = mask >> lane & 1;
            f(bit);
            mask = (mask & ~(1u << lane)) | bit << lane;
        } else if (r.bits <= 32) {
            f(reinterpret_cast<uint32_t*>(at)[lane]);
        } else {
            for (uint32_t word = 0; word < r.bits / 32u; ++word)
                f(reinterpret_cast<uint32_t*>(at)[word / 2 * 64 + uint32_t(lane) * 2 + word % 2]);
        }
    }
}

// operands: the function's address, if the site does not name it
Flow call(Warp& w, const Op& op) {
    const CallSite& site = w.program->calls[op.aux];
    const uint32_t return_pc = w.current.pc + 1;
    return scatter(w, [&](int lane) {
        Activation caller{return_pc, uint32_t(op.aux), 0, frame_of(w, lane),
                          w.stack_tops[size_t(lane)]};
        const Callable& callee = callee_of(w, site, op, lane, caller.callee);
        const uint32_t frame =
            (caller.stack_top + frame_alignment - 1) / frame_alignment * frame_alignment;
        w.grow_stack(frame + callee.frame_bytes, lane);
        copy_parameters(w, lane, site.arguments, caller.frame, callee.parameters, frame);
        if (site.is_recursive) {
            auto& kept = w.kept_registers[size_t(lane)];
            for_each_word(w, w.program->callables[site.caller].registers, lane,
                          [&](uint32_t& word) { kept.push_back(word); });
        }
        frame_of(w, lane) = frame;
        w.stack_tops[size_t(lane)] = frame + callee.frame_bytes;
        w.call_stacks[size_t(lane)].push_back(caller);
        return callee.target;
    });
}

void decode_call(Decoder& d) {
    d.take("uni");
    if (decode_runtime_call(d)) return;
    uint32_t site = d.builder.add_call(d.statement);
    d.op.ends_block = true;
    std::vector<Operand> address;
    for (const ParsedOperand& p : d.statement.operands)
        if (p.kind == ParsedOperand::Kind::reg) address.push_back(d.source(p, Type::b64));
    d.emit(call, std::move(address), site);
}

Flow exit_threads(Warp& w, const Op&) {
    uint32_t lanes = w.exec;
    w.exit_lanes(lanes);
    if (w.current.lanes) ++w.current.pc;  // else it names the exit in messages
    return Flow::jumped;
}

void decode_exit(Decoder& d) {
    d.op.ends_block = d.op.never_falls_through = true;
    d.emit(exit_threads, {});
}

Flow return_from(Warp& w, const Op& op) {
    if (w.call_stacks[size_t(w.first_lane())].empty()) return exit_threads(w, op);
    return scatter(w, [&](int lane) {
        const Activation caller = w.call_stacks[size_t(lane)].back();
        w.call_stacks[size_t(lane)].pop_back();
        const CallSite& site = w.program->calls[caller.site];
        copy_parameters(w, lane, w.program->callables[caller.callee].results, frame_of(w, lane),
                        site.results, caller.frame);
        frame_of(w, lane) = caller.frame;
        w.stack_tops[size_t(lane)] = caller.stack_top;
        if (site.is_recursive) {
            auto& kept = w.kept_registers[size_t(lane)];
            const auto& registers = w.program->callables[site.caller].registers;
            size_t count = 0;
            for_each_word(w, registers, lane, [&](uint32_t&) { ++count; });
            size_t next = kept.size() - count;
            for_each_word(w, registers, lane, [&](uint32_t& word) { word = kept[next++]; });
            kept.resize(kept.size() - count);
        }
        return caller.return_pc;
    });
}

void decode_ret(Decoder& d) {
    d.take("uni");
    d.op.ends_block = d.op.never_falls_through = true;
    d.emit(return_from, {});
}

// ---- memory on the stack

template <class T>
Flow allocate_on_stack(Warp& w, const Op& op) {  // d, size; aux: alignment
    auto d = w.out<T>(op.operands[0]);
    auto size = w.in<T>(op.operands[1]);
    w.for_each_lane([&](int lane) {
        uint32_t& top = w.stack_tops[size_t(lane)];
        const uint64_t start = (top + op.aux - 1) / op.aux * op.aux,
                       end = start + std::min<uint64_t>(size[lane], max_stack_bytes + 1);
        w.grow_stack(uint32_t(end), lane);
        d.set(lane, T(start));
        top = uint32_t(end);
    });
    return Flow::next;
}

template <class T>
Flow save_stack(Warp& w, const Op& op) {
    auto d = w.out<T>(op.operands[0]);
    w.for_each_lane([&](int lane) { d.set(lane, T(w.stack_tops[size_t(lane)])); });
    return Flow::next;
}

template <class T>
Flow restore_stack(Warp& w, const Op& op) {
    auto a = w.in<T>(op.operands[0]);
    w.for_each_lane([&](int lane) {
        if (a[lane] > w.stack_tops[size_t(lane)])
            throw Fault(FaultKind::invalid_operation, "stackrestore to above the stack's top",
                        lane);
        w.stack_tops[size_t(lane)] = uint32_t(a[lane]);
    });
    return Flow::next;
}

void decode_alloca(Decoder& d) {
    d.take("local");
    const Type type = d.take_type({Type::u32, Type::u64});
    d.expect_operands(2, 3);
    const uint64_t alignment = d.num_operands() == 3 ? d.immediate(2) : 8;
    if (alignment == 0 || alignment > frame_alignment) d.unsupported("an alignment above 128");
    d.emit(type == Type::u64 ? allocate_on_stack<uint64_t> : allocate_on_stack<uint32_t>,
           {d.destination(0, type), d.source(1, type)}, alignment);
}

void decode_stacksave(Decoder& d) {
    const Type type = d.take_type({Type::u32, Type::u64});
    d.expect_operands(1);
    d.emit(type == Type::u64 ? save_stack<uint64_t> : save_stack<uint32_t>,
           {d.destination(0, type)});
}

void decode_stackrestore(Decoder& d) {
    const Type type = d.take_type({Type::u32, Type::u64});
    d.expect_operands(1);
    d.emit(type == Type::u64 ? restore_stack<uint64_t> : restore_stack<uint32_t>,
           {d.source(0, type)});
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

// The warps of a warpgroup must all execute the same ones. Released kernels have warps of one
// warpgroup disagree, so a run can go on behind it: each warp has what it asked for.
void check_warpgroup(Warp& w, uint64_t change) {
    const size_t index = w.register_changes.size() - 1;
    for (const auto& other : w.cta->warps) {
        if (other->index / 4 != w.index / 4 || other->register_changes.size() <= index ||
            other->register_changes[index] == change)
            continue;
        w.machine->find(FaultKind::invalid_operation, [&] {
            return describe_change(change) + ", but " + describe_warp(*w.grid, other->index) +
                   " of its warpgroup has executed " +
                   describe_change(other->register_changes[index]);
        });
        return;
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
        if (w.machine->checks) check_warpgroup(w, op.aux);
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
    Program& program = d.builder.program();
    program.largest_budget = std::max(program.largest_budget, uint32_t(count));
    d.op.meeting = Meeting::whole_warp;
    d.emit(set_max_registers, {}, count | uint64_t(increase) << 16);
}

}  // namespace

InstructionTable control_instructions() {
    return {
        {"bra", decode_bra, "branch"},
        {"brx.idx", decode_brx_idx, "branch by table"},
        {"call", decode_call, "call of a function of the module, also by address"},
        {"ret", decode_ret, "return, or exit from a kernel"},
        {"alloca", decode_alloca, "memory on the stack"},
        {"stacksave", decode_stacksave, "the stack's top"},
        {"stackrestore", decode_stackrestore, "gives memory on the stack back"},
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
