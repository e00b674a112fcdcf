#include "register_watch.h"

#include <algorithm>

#include "machine.h"

namespace deep_moe::emulator {

namespace {

constexpr uint32_t scale_d_operand = 1;  // of a wgmma

struct MnemonicUse {
    std::string_view name;
    RegisterUse use;
};

// Whole mnemonics first, then the part in front of the first dot.
constexpr MnemonicUse whole_mnemonics[] = {
    {"wgmma.mma_async", RegisterUse::wgmma},
    {"wgmma.fence", RegisterUse::wgmma_fence},
    {"wgmma.commit_group", RegisterUse::wgmma_commit},
    {"wgmma.wait_group", RegisterUse::wgmma_wait},
    {"tcgen05.ld", RegisterUse::tensor_load},
    {"tcgen05.wait::ld", RegisterUse::tensor_load_wait},
    // Arguments of calls, and what is spilled, may be undefined where nobody reads them.
    {"st.local", RegisterUse::bits},
    {"st.param", RegisterUse::bits},
};
constexpr std::string_view computing[] = {
    "add",  "addc", "sub",      "subc",  "mul",  "mul24",    "mad",        "madc", "mad24", "fma",
    "div",  "rem",  "neg",      "abs",   "min",  "max",      "sad",        "cvt",  "cvta",  "setp",
    "set",  "slct", "sqrt",     "rcp",   "ex2",  "lg2",      "sin",        "cos",  "tanh",  "rsqrt",
    "dp4a", "dp2a", "copysign", "testp", "mapa", "isspacep", "getctarank",
};
// Those of `computing` whose halves do not mix if the type has two elements.
constexpr std::string_view by_element[] = {
    "add", "sub", "mul", "fma", "neg", "abs", "min", "max", "ex2", "tanh",
};
constexpr std::string_view bitwise[] = {
    "and", "or",  "xor",  "not", "cnot", "lop3",  "shl",   "shr",  "shf",  "prmt",
    "bfi", "bfe", "brev", "clz", "popc", "bfind", "szext", "bmsk", "shfl",
};

bool is_in_order(RegisterUse use) {
    return use == RegisterUse::select || use == RegisterUse::pack || use == RegisterUse::unpack;
}
bool is_copy(RegisterUse use) {
    return use <= RegisterUse::low_half;
}

Quarters all_quarters(uint32_t lanes) {
    Quarters all;
    all.fill(lanes);
    return all;
}
uint32_t any(const Quarters& quarters) {
    uint32_t lanes = 0;
    for (uint32_t quarter : quarters) lanes |= quarter;
    return lanes;
}
void join(Quarters& into, const Quarters& from) {
    for (int q = 0; q < num_quarters; ++q) into[size_t(q)] |= from[size_t(q)];
}

bool starts_with(std::string_view text, std::string_view prefix) {
    return text.substr(0, prefix.size()) == prefix &&
           (text.size() == prefix.size() || text[prefix.size()] == '.');
}

template <size_t n>
bool has(const std::string_view (&names)[n], std::string_view name) {
    return std::find(names, names + n, name) != names + n;
}

// cvt of an integer to half of its width, without saturation.
bool takes_low_half(std::string_view mnemonic) {
    for (std::string_view name : {"16.u32", "16.s32", "32.u64", "32.s64"})
        if (mnemonic == std::string("cvt.u").append(name) ||
            mnemonic == std::string("cvt.s").append(name))
            return true;
    return false;
}

class Check {
 public:
    Check(Warp& w, const Op& op, const RegisterCheck& check, uint32_t lanes)
        : w_(w), op_(op), check_(check), watch_(*w.watch), lanes_(lanes), pc_(w.current.pc) {}

    void guard() {
        if (check_.guard != RegisterCheck::unwatched) demand_written(check_.guard);
    }

    void before() {
        check_written();
        if (is_copy(check_.use)) return;
        if (check_.use == RegisterUse::wgmma) return check_wgmma();
        for (uint32_t r : check_.reads) check_read(r);
        for (uint32_t r : check_.writes) check_write(r);
    }

    void after() {
        mark_written();
        switch (check_.use) {
            case RegisterUse::copy:
            case RegisterUse::pack:
            case RegisterUse::unpack:
            case RegisterUse::low_half:
                return copy();
            case RegisterUse::wgmma:
                return issue_wgmma();
            case RegisterUse::tensor_load:
                ++watch_.num_loads;
                for (uint32_t r : check_.writes) {
                    state(r).loaded_by = watch_.num_loads;
                    state(r).async_pc = pc_;
                }
                return;
            case RegisterUse::tensor_load_wait:
                watch_.num_complete_loads = watch_.num_loads;
                return;
            case RegisterUse::wgmma_fence:
                ++watch_.num_fences;
                return;
            case RegisterUse::wgmma_commit:
                ++watch_.num_groups;
                return;
            case RegisterUse::wgmma_wait: {
                const uint32_t pending = uint32_t(op_.aux);
                if (watch_.num_groups > pending)
                    watch_.num_complete_groups =
                        std::max(watch_.num_complete_groups, watch_.num_groups - pending);
                return;
            }
            default:
                for (uint32_t r : check_.reads)
                    if (r != RegisterCheck::unwatched) state(r).read = {watch_.num_fences + 1, pc_};
                for (uint32_t r : check_.writes) {
                    state(r) = {.unwritten = state(r).unwritten, .read = state(r).read};
                    state(r).write = {watch_.num_fences + 1, pc_};
                }
        }
    }

 private:
    RegisterState& state(uint32_t r) { return watch_.states[r]; }
    const char* name(uint32_t r) const {
        return w_.program->register_plan->registers[r].name.c_str();
    }

    // ---- written at all

    bool decides() const {
        switch (check_.use) {
            case RegisterUse::copy:
            case RegisterUse::pack:
            case RegisterUse::unpack:
            case RegisterUse::low_half:
            case RegisterUse::compute:
            case RegisterUse::compute_two:
            case RegisterUse::select:
            case RegisterUse::bits:
                return false;
            default:
                return true;
        }
    }

    void check_written() {
        if (!decides()) return;
        // Without scale-d the old accumulators do not count.
        const bool overwrites = check_.use == RegisterUse::wgmma &&
                                (w_.predicate(op_.operands[scale_d_operand]) & lanes_) == 0;
        for (uint32_t r : check_.reads) {
            if (overwrites && is_written(r)) continue;
            demand_written(r);
        }
    }

    bool is_written(uint32_t r) const {
        return std::find(check_.writes.begin(), check_.writes.end(), r) != check_.writes.end();
    }

    void demand_written(uint32_t r) {
        const uint32_t missing = any(state(r).unwritten) & lanes_;
        if (!missing) return;
        for (uint32_t& quarter : state(r).unwritten) quarter &= ~lanes_;
        w_.machine->find(
            FaultKind::uninitialized,
            [&] {
                return format(
                    "register %s is used, but no instruction has written it in lanes 0x%08x",
                    name(r), missing);
            },
            {}, [](Finding& finding) { finding.space = "register"; });
    }

    Quarters unwritten_of(uint32_t r) {
        return r == RegisterCheck::unwatched ? Quarters{} : state(r).unwritten;
    }

    void mark(uint32_t r, const Quarters& unwritten) {
        if (r == RegisterCheck::unwatched) return;
        Quarters& own = state(r).unwritten;
        for (size_t q = 0; q < own.size(); ++q)
            own[q] = (own[q] & ~lanes_) | (unwritten[q] & lanes_);
    }

    void mark_written() {
        const std::vector<uint32_t>&reads = check_.reads, &writes = check_.writes;
        if (writes.empty()) return;
        Quarters unwritten{};
        switch (check_.use) {
            case RegisterUse::select: {
                const uint32_t p = w_.predicate(op_.operands[3]);
                const Quarters a = unwritten_of(reads[0]), b = unwritten_of(reads[1]);
                const uint32_t unknown = any(unwritten_of(reads[2]));
                for (size_t q = 0; q < unwritten.size(); ++q)
                    unwritten[q] = (a[q] & p) | (b[q] & ~p) | unknown;
                break;
            }
            case RegisterUse::pack: {  // of two or four
                const size_t n = reads.size();
                for (size_t i = 0; i < num_quarters; ++i) {
                    const Quarters part = unwritten_of(reads[i * n / num_quarters]);
                    const size_t first = i * n % num_quarters;
                    for (size_t q = first; q < std::min<size_t>(first + n, num_quarters); ++q)
                        unwritten[i] |= part[q];
                }
                break;
            }
            case RegisterUse::unpack: {
                const size_t n = writes.size();
                const Quarters whole = unwritten_of(reads[0]);
                for (size_t part = 0; part < n; ++part) {
                    Quarters own;
                    for (size_t q = 0; q < own.size(); ++q)
                        own[q] = whole[(part * num_quarters + q) / n];
                    mark(writes[part], own);
                }
                return;
            }
            case RegisterUse::low_half: {
                const Quarters whole = reads.empty() ? Quarters{} : unwritten_of(reads[0]);
                unwritten = {whole[0], whole[0], whole[1], whole[1]};
                break;
            }
            case RegisterUse::copy:
                for (uint32_t r : reads) join(unwritten, unwritten_of(r));
                break;
            case RegisterUse::compute: {
                uint32_t lanes = 0;
                for (uint32_t r : reads) lanes |= any(unwritten_of(r));
                unwritten = all_quarters(lanes);
                break;
            }
            case RegisterUse::compute_two:
                for (uint32_t r : reads) {
                    const Quarters own = unwritten_of(r);
                    const uint32_t low = own[0] | own[1], high = own[2] | own[3];
                    join(unwritten, {low, low, high, high});
                }
                break;
            default:
                break;
        }
        for (uint32_t r : writes) mark(r, unwritten);
    }

    // ---- asynchronous use

    bool is_pending(uint32_t group) const { return group > watch_.num_complete_groups; }
    bool is_loading(const RegisterState& s) const {
        return s.loaded_by > watch_.num_complete_loads && w_.machine->strict_tcgen05;
    }

    [[gnu::noinline]] void report(uint32_t r, const char* what, uint32_t pc, const char* other) {
        w_.machine->find(
            FaultKind::race,
            [&] {
                return format("register %s is %s\n  %s: ", name(r), what, other) +
                       describe_instruction(*w_.program, pc);
            },
            {w_.program, pc},
            [&](Finding& finding) {
                finding.space = "register";
                const Where now = w_.machine->here();
                finding.involved = {involved_at({now.grid, now.program, pc, now.cta, now.warp}, -1),
                                    involved_at(now, -1)};
            });
    }

    void check_read(uint32_t r) {
        if (r == RegisterCheck::unwatched) return;
        const RegisterState& s = state(r);
        if (is_pending(s.written_by))
            report(r,
                   "read while a wgmma may still write it: no wgmma.wait_group has waited for it",
                   s.async_pc, "wgmma");
        if (is_loading(s))
            report(r, "read before tcgen05.wait::ld has waited for the load that brings it",
                   s.async_pc, "load");
    }

    void check_write(uint32_t r) {
        const RegisterState& s = state(r);
        if (is_pending(s.written_by) || is_pending(s.read_by))
            report(r,
                   "written while a wgmma may still use it: no wgmma.wait_group has waited for it",
                   s.async_pc, "wgmma");
        if (is_loading(s))
            report(r, "written before tcgen05.wait::ld has waited for a load that brings it",
                   s.async_pc, "load");
    }

    void check_fenced(uint32_t r, const RegisterState::Access& access, const char* kind) {
        if (access.fences == watch_.num_fences + 1)
            report(r, "used by a wgmma, but no wgmma.fence follows an ordinary access to it",
                   access.pc, kind);
    }

    void check_wgmma() {
        if (watch_.num_fences == 0) {
            w_.machine->find(FaultKind::race, [] {
                return std::string("wgmma before the warp's first wgmma.fence");
            });
        }
        for (uint32_t r : check_.fragments) {
            check_read(r);
            check_fenced(r, state(r).write, "written");
        }
        for (uint32_t r : check_.writes) {
            const RegisterState& s = state(r);
            if (is_pending(s.read_by))
                report(r, "an accumulator, while an earlier wgmma may still read it", s.async_pc,
                       "wgmma");
            check_fenced(r, s.write, "written");
            check_fenced(r, s.read, "read");
        }
    }

    void issue_wgmma() {
        const uint32_t group = watch_.num_groups + 1;
        for (uint32_t r : check_.fragments) state(r).read_by = group, state(r).async_pc = pc_;
        for (uint32_t r : check_.writes) state(r).written_by = group, state(r).async_pc = pc_;
    }

    // A register that several are packed into has the state of all of them.
    void copy() {
        if (check_.writes.empty()) return;
        RegisterState merged;
        for (uint32_t r : check_.reads) {
            if (r == RegisterCheck::unwatched) continue;
            const RegisterState& s = state(r);
            if (s.written_by > merged.written_by || s.loaded_by > merged.loaded_by)
                merged.async_pc = s.async_pc;
            merged.written_by = std::max(merged.written_by, s.written_by);
            merged.loaded_by = std::max(merged.loaded_by, s.loaded_by);
            if (s.read.fences > merged.read.fences) merged.read = s.read;
            if (s.write.fences > merged.write.fences) merged.write = s.write;
        }
        for (uint32_t r : check_.writes) {
            if (r == RegisterCheck::unwatched) continue;
            merged.unwritten = state(r).unwritten;
            state(r) = merged;
        }
    }

    Warp& w_;
    const Op& op_;
    const RegisterCheck& check_;
    RegisterWatch& watch_;
    const uint32_t lanes_, pc_;
};

}  // namespace

RegisterUse register_use(std::string_view mnemonic) {
    for (const MnemonicUse& m : whole_mnemonics)
        if (starts_with(mnemonic, m.name)) return m.use;
    const std::string_view first = mnemonic.substr(0, mnemonic.find('.'));
    if (first == "mov") return RegisterUse::copy;
    if (first == "selp") return RegisterUse::select;
    if (first == "cvt" && takes_low_half(mnemonic)) return RegisterUse::low_half;
    if (has(by_element, first) && mnemonic.find("x2") != mnemonic.npos)
        return RegisterUse::compute_two;
    if (has(computing, first)) return RegisterUse::compute;
    if (has(bitwise, first)) return RegisterUse::bits;
    return RegisterUse::decide;
}

std::shared_ptr<const RegisterPlan> watch_registers(std::vector<Op>& ops,
                                                    const std::vector<RegisterTraffic>& traffic,
                                                    const std::vector<int>& live_at_entry,
                                                    const std::vector<uint8_t>& bits,
                                                    const std::vector<std::string>& names) {
    std::vector<bool> unwritten(bits.size()), asynchronous(bits.size());
    for (int r : live_at_entry) unwritten[size_t(r)] = true;
    auto is_fragment = [&](const RegisterTraffic& t, int r) {
        return bits[size_t(r)] == 32 &&
               std::find(t.writes.begin(), t.writes.end(), r) == t.writes.end();
    };
    for (const RegisterTraffic& t : traffic) {
        if (t.use == RegisterUse::wgmma) {
            for (int r : t.reads)
                if (is_fragment(t, r)) asynchronous[size_t(r)] = true;
        }
        if (t.use == RegisterUse::wgmma || t.use == RegisterUse::tensor_load)
            for (int r : t.writes) asynchronous[size_t(r)] = true;
    }
    // What moves and arithmetic pass on.
    for (bool changed = true; changed;) {
        changed = false;
        auto pass = [&](std::vector<bool>& set, const std::vector<int>& from,
                        const std::vector<int>& to) {
            if (std::none_of(from.begin(), from.end(),
                             [&](int r) { return r >= 0 && set[size_t(r)]; }))
                return;
            for (int r : to) {
                if (r < 0 || set[size_t(r)]) continue;
                set[size_t(r)] = true;
                changed = true;
            }
        };
        for (const RegisterTraffic& t : traffic) {
            if (is_copy(t.use)) {
                pass(asynchronous, t.reads, t.writes);
                pass(asynchronous, t.writes, t.reads);
            }
            if (is_copy(t.use) || t.use == RegisterUse::compute ||
                t.use == RegisterUse::compute_two || t.use == RegisterUse::select)
                pass(unwritten, t.reads, t.writes);
        }
    }

    auto plan = std::make_shared<RegisterPlan>();
    std::vector<uint32_t> watched(bits.size(), RegisterCheck::unwatched);
    for (size_t r = 0; r < bits.size(); ++r) {
        if (!unwritten[r] && !asynchronous[r]) continue;
        watched[r] = uint32_t(plan->registers.size());
        plan->registers.push_back({names[r]});
    }
    if (plan->registers.empty()) return nullptr;
    for (int r : live_at_entry) plan->registers[watched[size_t(r)]].starts_unwritten = true;
    plan->check_of_op.resize(ops.size());
    for (size_t i = 0; i < ops.size(); ++i) {
        const RegisterTraffic& t = traffic[i];
        RegisterCheck check{ops[i].body, t.use};
        auto add = [&](std::vector<uint32_t>& to, const std::vector<int>& from, bool keeps_all) {
            for (int r : from) {
                const uint32_t index = r < 0 ? RegisterCheck::unwatched : watched[size_t(r)];
                if (keeps_all || index != RegisterCheck::unwatched) to.push_back(index);
            }
        };
        add(check.reads, t.reads, is_in_order(t.use));
        add(check.writes, t.writes, t.use == RegisterUse::unpack);
        if (t.guard >= 0) check.guard = watched[size_t(t.guard)];
        if (t.use == RegisterUse::wgmma) {
            for (int r : t.reads)
                if (is_fragment(t, r)) check.fragments.push_back(watched[size_t(r)]);
        }
        const auto is_watched = [](uint32_t r) { return r != RegisterCheck::unwatched; };
        const bool touches = is_watched(check.guard) ||
                             std::any_of(check.writes.begin(), check.writes.end(), is_watched) ||
                             std::any_of(check.reads.begin(), check.reads.end(), is_watched);
        if (!touches && t.use < RegisterUse::wgmma) continue;
        plan->check_of_op[i] = uint32_t(plan->checks.size());
        plan->checks.push_back(std::move(check));
        ops[i].body = run_checked;
    }
    return plan;
}

RegisterWatch::RegisterWatch(const RegisterPlan& plan) : states(plan.registers.size()) {
    for (size_t r = 0; r < states.size(); ++r)
        states[r].unwritten = all_quarters(plan.registers[r].starts_unwritten ? full_mask : 0);
}

static const RegisterCheck& check_at(const Warp& w) {
    const RegisterPlan& plan = *w.program->register_plan;
    return plan.checks[plan.check_of_op[w.current.pc]];
}

void check_guard(Warp& w) {
    if (!w.watch) return;
    w.exec = w.current.lanes;  // for messages
    Check(w, w.program->ops[w.current.pc], check_at(w), w.current.lanes).guard();
}

Flow run_checked(Warp& w, const Op& op) {
    const RegisterCheck& check = check_at(w);
    if (!w.watch) return check.body(w, op);
    Check now(w, op, check, w.exec);
    now.before();
    const Flow flow = check.body(w, op);
    if (flow != Flow::blocked) now.after();
    return flow;
}

}  // namespace deep_moe::emulator
