#include "program_builder.h"

#include <algorithm>
#include <cstring>

#include "shared_window.h"

namespace deep_moe::emulator {

namespace {

uint64_t align_up(uint64_t value, uint64_t alignment) {
    return alignment ? (value + alignment - 1) / alignment * alignment : value;
}

constexpr uint64_t max_parameter_bytes = 32764;

}  // namespace

ProgramBuilder::ProgramBuilder(const ParsedModule& module,
                               std::shared_ptr<const std::vector<std::string>> lines)
    : module_(module), lines_(std::move(lines)) {}

void ProgramBuilder::fail(FaultKind kind, const Statement& statement,
                          const std::string& why) const {
    std::string text =
        format("%s: PTX line %d: %s", module_.name.c_str(), statement.line, why.c_str());
    const std::string line = quoted_line(*lines_, statement.line);
    if (!line.empty()) text += "\n    " + line;
    if (statement.source >= 0) {
        const SourceLine& source = module_.source_lines[size_t(statement.source)];
        text += format("\n    source %s:%d", source.file.c_str(), source.line);
    }
    throw Fault(kind, text);
}

void ProgramBuilder::refuse(const Variable& variable, const std::string& why) const {
    Statement statement;
    statement.line = variable.line;
    fail(FaultKind::invalid_ptx, statement, why);
}

std::unique_ptr<Program> ProgramBuilder::build(const Function& entry) {
    program_ = std::make_unique<Program>();
    Program& p = *program_;
    p.module_name = module_.name;
    p.name = entry.name;
    p.target = module_.target;
    p.lines = lines_;
    p.source_lines = module_.source_lines;
    std::copy(entry.cluster, entry.cluster + 3, p.cluster);
    std::copy(entry.required_threads, entry.required_threads + 3, p.required_threads);
    p.max_threads = entry.max_threads;
    p.max_registers = entry.max_registers;
    for (const Variable& v : entry.parameters) {
        const uint64_t offset = align_up(p.parameter_bytes, v.symbol.alignment),
                       end = offset + v.symbol.size;
        if (end > max_parameter_bytes)
            refuse(v,
                   format("the parameters of %s end at byte %llu; at most %llu", entry.name.c_str(),
                          (unsigned long long)end, (unsigned long long)max_parameter_bytes));
        p.parameters.push_back(
            {v.symbol.name, offset, v.symbol.size, v.symbol.alignment, v.symbol.is_floating});
        p.parameter_bytes = uint32_t(end);
    }
    add_callable(entry);
    for (size_t i = 0; i < waiting_.size(); ++i) {
        decode_function(*waiting_[i]);
        if (calls_by_address_ && i + 1 == waiting_.size()) add_functions_with_address();
    }
    mark_recursive_calls();
    for (Callable& c : p.callables) {
        c.target = call_targets_.at(c.name);
        const uint64_t end = p.local_bytes + align_up(c.frame_bytes, frame_alignment);
        p.local_bytes = uint32_t(std::min<uint64_t>(end, max_stack_bytes));
        if (uint64_t address = module_.function_address(c.name))
            p.callables_by_address[address] = uint32_t(&c - p.callables.data());
    }
    lay_out_shared();
    resolve_branches();
    find_leaders();
    for (const FunctionRange& range : ranges_) allocate_registers(range);
    std::vector<uint8_t> bits;
    std::vector<std::string> names;
    for (const VirtualRegister& r : registers_) bits.push_back(r.bits), names.push_back(r.name);
    p.register_plan = watch_registers(p.ops, traffic_, live_at_entry_, bits, names);
    for (auto& list : p.operand_lists) {
        for (Operand& o : list) {
            if (o.base == Base::registers)
                o.offset = o.sink ? 0 : registers_[o.offset].offset + (o.high_half ? 256 : 0);
        }
    }
    for (Op& op : p.ops) {
        if (op.guard != Guard::always) op.guard_offset = registers_[op.guard_offset].offset;
    }
    for (size_t i = 0; i < p.ops.size(); ++i) p.costs[i].touches = touched_registers(p.ops[i]);
    find_chains();
    find_unused();
    p.register_bytes = uint32_t(align_up(high_water_, 64));
    return std::move(program_);
}

// ---- names
// ----------------------------------------------------------------------------------------------------

Type ProgramBuilder::register_type(const std::string& name) const {
    return function_->register_types.at(name);
}

Operand ProgramBuilder::register_operand(const std::string& name) {
    Operand o;
    o.base = Base::registers;
    o.bits = storage_bits(register_type(name));
    auto [found, is_new] =
        register_ids_.try_emplace(function_->name + "/" + name, int(registers_.size()));
    if (is_new) registers_.push_back({o.bits, 0, name});
    o.offset = uint32_t(found->second);
    return o;
}

Operand ProgramBuilder::temporary(const Operand& wide) {
    return temporary(32, std::string(registers_[wide.offset].name));
}

Operand ProgramBuilder::temporary(int bits, const std::string& name) {
    Operand o;
    o.base = Base::registers;
    o.bits = uint8_t(bits);
    o.offset = uint32_t(registers_.size());
    registers_.push_back({o.bits, 0, name});
    return o;
}

Operand ProgramBuilder::constant(uint64_t low, int bits, uint64_t high) {
    auto [found, is_new] = constant_operands_.try_emplace({low, {high, bits}});
    if (is_new) {
        Constant c;
        c.low = low;
        c.high = high;
        c.bits = uint8_t(bits);
        c.offset = program_->constant_bytes;
        program_->constant_bytes =
            uint32_t(align_up(program_->constant_bytes + storage_bytes(bits), 64));
        program_->constants.push_back(c);
        found->second.base = Base::constants;
        found->second.bits = uint8_t(bits);
        found->second.offset = c.offset;
    }
    return found->second;
}

std::string ProgramBuilder::variable_key(const std::string& name, int scope) const {
    for (int s = scope; s >= 0; s = function_->scopes[size_t(s)].parent) {
        if (function_->scopes[size_t(s)].variables.count(name))
            return function_->name + "/" + std::to_string(s) + "/" + name;
    }
    if (program_->symbols.count(function_->name + "//" + name))
        return function_->name + "//" + name;
    return name;
}

// Plans a function for decoding, if it is not yet; its index in Program::callables. Its .local and
// .param variables get their places in its frame; .shared ones are laid out later.
uint32_t ProgramBuilder::add_callable(const Function& function) {
    auto [found, is_new] =
        callables_.try_emplace(function.name, uint32_t(program_->callables.size()));
    if (!is_new) return found->second;
    waiting_.push_back(&function);
    Callable callable;
    callable.name = function.name;
    auto in_frame = [&](const Variable& variable, const std::string& key) {
        Symbol symbol = variable.symbol;
        if (symbol.alignment > frame_alignment)
            throw Fault(FaultKind::unsupported, module_.name + ": variable " + symbol.name +
                                                    " is aligned to more than 128 bytes");
        symbol.address = align_up(callable.frame_bytes, symbol.alignment);
        const uint64_t end = symbol.address + symbol.size;
        if (end > max_stack_bytes)
            refuse(variable,
                   format("the local memory of %s ends at byte %llu; a thread has %u",
                          function.name.c_str(), (unsigned long long)end, max_stack_bytes));
        callable.frame_bytes = uint32_t(end);
        symbol.space = Space::local;
        program_->symbols[key] = symbol;
        return FrameSlot{uint32_t(symbol.address), uint32_t(symbol.size)};
    };
    for (size_t s = 0; s < function.scopes.size(); ++s) {
        for (const auto& [name, index] : function.scopes[s].variables) {
            const Variable& variable = function.variables[size_t(index)];
            const Symbol& symbol = variable.symbol;
            std::string key = function.name + "/" + std::to_string(s) + "/" + name;
            if (symbol.space == Space::local || symbol.space == Space::param) {
                in_frame(variable, key);
            } else {
                program_->symbols[key] = symbol;
                program_->symbols[key].name = key;
            }
        }
    }
    if (!function.entry) {
        for (const Variable& v : function.parameters)
            callable.parameters.push_back(in_frame(v, function.name + "//" + v.symbol.name));
        for (const Variable& v : function.results)
            callable.results.push_back(in_frame(v, function.name + "//" + v.symbol.name));
    }
    program_->callables.push_back(std::move(callable));
    return found->second;
}

// What a call by address may reach: functions that code or initializers name.
void ProgramBuilder::add_functions_with_address() {
    auto take = [&](const std::string& name) {
        if (!module_.function_address(name)) return;
        const Function& function = module_.functions.at(name);
        add_callable(function);
        functions_with_address_.insert(name);
    };
    for (const auto& [name, variable] : module_.variables)
        for (const auto& [at, target] : variable.symbol.pointers) take(target);
    for (const auto& [name, function] : module_.functions) {
        for (const Statement& statement : function.statements) {
            if (statement.mnemonic.compare(0, 4, "call") == 0) continue;
            for (const ParsedOperand& o : statement.operands)
                if (o.kind == ParsedOperand::Kind::symbol) take(o.name);
        }
    }
}

// A call is recursive if its callee may call the caller again.
void ProgramBuilder::mark_recursive_calls() {
    for (CallSite& site : program_->calls) {
        std::set<std::string> reachable;
        std::vector<std::string> stack;
        auto visit = [&](const std::string& name) {
            if (reachable.insert(name).second) stack.push_back(name);
        };
        if (site.callee >= 0)
            visit(program_->callables[size_t(site.callee)].name);
        else
            for (const std::string& name : functions_with_address_) visit(name);
        while (!stack.empty()) {
            const std::string name = stack.back();
            stack.pop_back();
            for (const std::string& next : callees_[name]) visit(next);
            if (callers_by_address_.count(name))
                for (const std::string& next : functions_with_address_) visit(next);
        }
        site.is_recursive = reachable.count(program_->callables[site.caller].name) != 0;
    }
}

Operand ProgramBuilder::symbol_address(const std::string& name, int64_t displacement, int bits,
                                       int scope, Space& space) {
    Constant c;
    c.bits = uint8_t(bits);
    c.low = uint64_t(displacement);
    const KernelParameter* parameter = nullptr;
    std::string key = variable_key(name, scope);
    if (key == name) {
        for (const KernelParameter& p : program_->parameters)
            if (function_->entry && p.name == name) parameter = &p;
    }
    if (parameter) {
        c.low += parameter->offset;
        c.parameter = true;
        c.bits = 64;
        space = Space::param;
    } else {
        if (key == name && !program_->symbols.count(key)) {
            auto found = module_.variables.find(name);
            if (found == module_.variables.end() || found->second.symbol.space == Space::local)
                return {};
            program_->symbols[key] = found->second.symbol;
        }
        c.symbol = &program_->symbols[key];
        space = c.symbol->space;
        if (space == Space::local) {  // relative to the function's frame
            Operand o;
            o.base = Base::special;
            o.bits = 32;
            o.offset = uint32_t(Special::frame) * warp_size * 4;
            o.displacement = int64_t(c.symbol->address) + displacement;
            return o;
        }
        if (space == Space::global || space == Space::constant) c.bits = 64;
    }
    for (const Constant& other : program_->constants) {
        if (other.symbol == c.symbol && other.parameter == c.parameter && other.low == c.low &&
            other.bits == c.bits && (c.symbol || c.parameter)) {
            Operand o;
            o.bits = other.bits;
            o.offset = other.offset;
            return o;
        }
    }
    c.offset = program_->constant_bytes;
    program_->constant_bytes =
        uint32_t(align_up(program_->constant_bytes + storage_bytes(c.bits), 64));
    program_->constants.push_back(c);
    Operand o;
    o.bits = c.bits;
    o.offset = c.offset;
    return o;
}

void ProgramBuilder::lay_out_shared() {
    uint64_t end = shared_base, dynamic_alignment = 16;
    for (auto& [key, symbol] : program_->symbols) {
        if (symbol.space != Space::shared) continue;
        if (symbol.dynamic) {
            dynamic_alignment = std::max(dynamic_alignment, symbol.alignment);
            continue;
        }
        end = align_up(end, symbol.alignment);
        symbol.address = end;
        end += symbol.size;
        if (end - shared_base > max_shared_bytes)
            throw Fault(FaultKind::invalid_ptx,
                        format("%s: the shared variables of %s up to '%s' take %llu bytes; a CTA "
                               "has at most %u",
                               module_.name.c_str(), program_->name.c_str(), symbol.name.c_str(),
                               (unsigned long long)(end - shared_base), max_shared_bytes));
    }
    program_->static_shared_bytes = uint32_t(end - shared_base);
    program_->dynamic_shared_offset = uint32_t(align_up(end, dynamic_alignment));
    for (auto& [key, symbol] : program_->symbols) {
        if (symbol.space == Space::shared && symbol.dynamic)
            symbol.address = program_->dynamic_shared_offset;
    }
}

// ---- ops
// ------------------------------------------------------------------------------------------------------

void ProgramBuilder::append(const Op& op, std::vector<Operand> operands,
                            const std::vector<int>& reads, const std::vector<int>& writes,
                            const Statement& statement, RegisterUse use) {
    program_->operand_lists.push_back(std::move(operands));
    auto& list = program_->operand_lists.back();
    program_->ops.push_back(op);
    Op& stored = program_->ops.back();
    stored.operands = list.data();
    stored.num_operands = uint16_t(list.size());
    program_->infos.push_back({statement.line, statement.source});
    program_->costs.emplace_back();
    program_->costs.back().is_pure = use <= RegisterUse::low_half;  // a decoder's own helper
    traffic_.push_back({use, reads, writes});
    // All but the first operand: of select a, b, p, of pack and unpack the parts.
    const auto in_order = [&](std::vector<int>& all) {
        all.clear();
        for (size_t i = 1; i < list.size(); ++i)
            all.push_back(list[i].base == Base::registers && !list[i].sink ? int(list[i].offset)
                                                                           : -1);
    };
    if (use == RegisterUse::select || use == RegisterUse::pack) in_order(traffic_.back().reads);
    if (use == RegisterUse::unpack) in_order(traffic_.back().writes);
    if (!statement.guard.empty()) {
        Operand guard = register_operand(statement.guard);
        stored.guard = statement.guard_negated ? Guard::if_false : Guard::if_true;
        stored.guard_offset = guard.offset;
        traffic_.back().guard = int(guard.offset);
    }
}

size_t ProgramBuilder::label_statement(const std::string& label, const Statement& statement) const {
    for (int s = statement.scope; s >= 0; s = function_->scopes[size_t(s)].parent) {
        auto found = function_->scopes[size_t(s)].labels.find(label);
        if (found != function_->scopes[size_t(s)].labels.end()) return found->second;
    }
    fail(FaultKind::invalid_ptx, statement, "there is no label '" + label + "'");
}

uint32_t ProgramBuilder::add_branch_table(const std::string& label, const Statement& statement) {
    for (int s = statement.scope; s >= 0; s = function_->scopes[size_t(s)].parent) {
        auto found = function_->scopes[size_t(s)].branch_targets.find(label);
        if (found == function_->scopes[size_t(s)].branch_targets.end()) continue;
        std::vector<size_t> statements;
        for (const std::string& target : found->second)
            statements.push_back(label_statement(target, statement));
        table_statements_.push_back(std::move(statements));
        table_ranges_.push_back(ranges_.size() - 1);
        program_->branch_tables.emplace_back();
        return uint32_t(table_statements_.size() - 1);
    }
    fail(FaultKind::invalid_ptx, statement, "there is no .branchtargets list '" + label + "'");
}

// `call{.uni} (results), function, (arguments)`, every part but the function optional. A register
// instead of the function's name is followed by a prototype or a list of targets.
uint32_t ProgramBuilder::add_call(const Statement& statement) {
    const ParsedOperand *results = nullptr, *callee = nullptr, *arguments = nullptr;
    for (const ParsedOperand& o : statement.operands) {
        if (o.kind == ParsedOperand::Kind::parenthesis)
            (callee ? arguments : results) = &o;
        else if (!callee)
            callee = &o;
        else if (callee->kind != ParsedOperand::Kind::reg)
            fail(FaultKind::invalid_ptx, statement, "the call names two functions");
    }
    if (!callee) fail(FaultKind::invalid_ptx, statement, "the call names no function");
    CallSite site;
    site.caller = callables_.at(function_->name);
    auto slots = [&](const ParsedOperand* list) {
        std::vector<FrameSlot> all;
        for (const ParsedOperand& actual : list ? list->elements : std::vector<ParsedOperand>()) {
            if (actual.kind != ParsedOperand::Kind::symbol)
                fail(FaultKind::unsupported, statement,
                     "only .param variables can be passed to a function");
            auto own = program_->symbols.find(variable_key(actual.name, statement.scope));
            if (own == program_->symbols.end() || own->second.space != Space::local)
                fail(FaultKind::invalid_ptx, statement,
                     "'" + actual.name + "' is no .param variable of the function that calls");
            all.push_back({uint32_t(own->second.address), uint32_t(own->second.size)});
        }
        return all;
    };
    site.arguments = slots(arguments);
    site.results = slots(results);
    if (callee->kind == ParsedOperand::Kind::reg) {
        calls_by_address_ = true;
        callers_by_address_.insert(function_->name);
    } else {
        auto found = module_.functions.find(callee->name);
        if (found == module_.functions.end() || !found->second.defined)
            fail(FaultKind::unsupported, statement,
                 "call of '" + callee->name + "', which has no body in this module");
        if (found->second.entry)
            fail(FaultKind::invalid_ptx, statement, "a kernel cannot be called");
        callees_[function_->name].insert(callee->name);
        site.callee = int(add_callable(found->second));
        const Callable& target = program_->callables[size_t(site.callee)];
        if (site.arguments.size() != target.parameters.size() ||
            site.results.size() != target.results.size())
            fail(FaultKind::invalid_ptx, statement, "the call does not match the function");
    }
    program_->calls.push_back(std::move(site));
    return uint32_t(program_->calls.size() - 1);
}

void ProgramBuilder::decode_function(const Function& function) {
    function_ = &function;
    FunctionRange range;
    range.function = &function;
    range.begin = uint32_t(program_->ops.size());
    ranges_.push_back(range);
    std::vector<uint32_t> starts;
    call_targets_[function.name] = range.begin;
    for (const Statement& statement : function.statements) {
        starts.push_back(uint32_t(program_->ops.size()));
        const Instruction* instruction = find_instruction(statement.mnemonic);
        if (!instruction)
            fail(FaultKind::unsupported, statement,
                 "unknown instruction '" + statement.mnemonic + "'");
        Decoder decoder(statement, *this);
        decoder.name_length = std::strlen(instruction->name);
        decoder.start();
        try {
            instruction->decode(decoder);
        } catch (const std::logic_error& error) {  // of std::stoul and the like
            decoder.invalid(std::string("cannot be read: ") + error.what());
        }
        decoder.finish();
    }
    starts.push_back(uint32_t(program_->ops.size()));
    Statement last;
    last.mnemonic = function.entry ? "exit" : "ret";
    last.line = function.statements.empty() ? function.line : function.statements.back().line;
    Decoder decoder(last, *this);
    decoder.name_length = last.mnemonic.size();
    decoder.start();
    find_instruction(last.mnemonic)->decode(decoder);
    ranges_.back().end = uint32_t(program_->ops.size());
    ranges_.back().statement_ops = std::move(starts);
}

void ProgramBuilder::resolve_branches() {
    for (const PendingBranch& b : pending_)
        program_->ops[b.op].target = ranges_[b.range].statement_ops[b.statement];
    for (size_t i = 0; i < table_statements_.size(); ++i) {
        for (size_t statement : table_statements_[i])
            program_->branch_tables[i].push_back(
                ranges_[table_ranges_[i]].statement_ops[statement]);
    }
}

// How long the longest chain of dependent instructions of each basic block is, compared with the
// number of its instructions: a compiler puts independent ones between those that wait.
void ProgramBuilder::find_chains() {
    auto& ops = program_->ops;
    auto& costs = program_->costs;
    std::map<int, uint32_t> ready;  // by register, in quarters of instructions
    for (size_t begin = 0, end; begin < ops.size(); begin = end) {
        uint32_t issued = 0, longest = 0;
        ready.clear();
        for (end = begin; end < ops.size() && (end == begin || !ops[end].leader); ++end) {
            const RegisterTraffic& traffic = traffic_[end];
            const auto own = uint32_t(costs[end].work & 0xffff);
            uint32_t start = 0;
            const auto needs = [&](int r) {
                const auto found = ready.find(r);
                if (found != ready.end()) start = std::max(start, found->second);
            };
            for (int r : traffic.reads) needs(r);
            if (traffic.guard >= 0) needs(traffic.guard);
            for (int r : traffic.writes)
                if (r >= 0) ready[r] = start + own;
            issued += own;
            longest = std::max(longest, start + own);
        }
        if (!issued) continue;
        for (size_t i = begin; i < end; ++i) {
            const auto own = uint32_t(costs[i].work & 0xffff);
            costs[i].depth = uint16_t((own * longest + issued / 2) / issued);
        }
    }
}

// What nothing reads but products of matrices, so that a run without those can leave it out.
void ProgramBuilder::find_unused() {
    const auto& ops = program_->ops;
    auto& costs = program_->costs;
    std::vector<bool> matters(registers_.size());
    bool changed = true;
    const auto need = [&](int r) {
        if (r < 0 || matters[size_t(r)]) return;
        matters[size_t(r)] = changed = true;
    };
    const auto is_used = [&](size_t i) {
        const auto& writes = traffic_[i].writes;
        // Lanes meet by their mask, whoever reads what they exchange.
        return !costs[i].is_pure || writes.empty() || ops[i].meeting == Meeting::member_mask ||
               std::any_of(writes.begin(), writes.end(),
                           [&](int r) { return r >= 0 && matters[size_t(r)]; });
    };
    while (changed) {
        changed = false;
        for (size_t i = ops.size(); i-- > 0;) {
            const RegisterTraffic& traffic = traffic_[i];
            const bool is_load = costs[i].kind == OpKind::load;
            if (!is_used(i) && !is_load) continue;
            need(traffic.guard);  // a load's lanes and addresses tell how long it takes
            if (costs[i].kind == OpKind::wgmma) continue;
            for (int r : traffic.reads) need(r);
        }
    }
    for (size_t i = 0; i < ops.size(); ++i) costs[i].is_unused = !is_used(i);
}

void ProgramBuilder::find_leaders() {
    auto& ops = program_->ops;
    for (const FunctionRange& range : ranges_) ops[range.begin].leader = true;
    for (const PendingBranch& b : pending_) {
        ops[ops[b.op].target].leader = true;
        if (b.op + 1 < ops.size()) ops[b.op + 1].leader = true;
    }
    for (const auto& table : program_->branch_tables)
        for (uint32_t target : table) ops[target].leader = true;
    for (size_t i = 0; i + 1 < ops.size(); ++i)
        if (ops[i].ends_block) ops[i + 1].leader = true;
}

}  // namespace deep_moe::emulator
