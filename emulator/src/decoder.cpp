// What decoders of instructions are given: modifiers and operands of a statement, one by one.
#include <algorithm>
#include <cstring>

#include "program_builder.h"

namespace deep_moe::emulator {

Decoder::Decoder(const Statement& statement, ProgramBuilder& builder)
    : statement(statement), builder(builder) {}

void Decoder::start() {
    std::string_view rest = std::string_view(statement.mnemonic).substr(name_length);
    while (!rest.empty()) {
        rest.remove_prefix(1);  // the dot
        size_t dot = rest.find('.');
        modifiers.emplace_back(rest.substr(0, dot));
        if (dot == std::string_view::npos) break;
        rest.remove_prefix(dot);
    }
}

void Decoder::finish() {
    if (modifiers.empty()) return;
    std::string left;
    for (const std::string& m : modifiers) left += " ." + m;
    unsupported("modifier" + left + " of this instruction is not supported");
}

bool Decoder::has(std::string_view modifier) const {
    return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

bool Decoder::is_predicate(size_t i) const {
    return parsed(i).kind == ParsedOperand::Kind::reg &&
           builder.register_type(parsed(i).name) == Type::pred;
}

int Decoder::num_bits_of(size_t i) const {
    return num_bits(builder.register_type(parsed(i).name));
}

bool Decoder::take(std::string_view modifier) {
    auto found = std::find(modifiers.begin(), modifiers.end(), modifier);
    if (found == modifiers.end()) return false;
    modifiers.erase(found);
    return true;
}

std::string_view Decoder::take_any(std::initializer_list<std::string_view> choices) {
    for (std::string_view choice : choices)
        if (take(choice)) return choice;
    return {};
}

bool Decoder::take_prefix(std::string_view prefix, std::string& whole) {
    for (auto it = modifiers.begin(); it != modifiers.end(); ++it) {
        if (it->compare(0, prefix.size(), prefix) != 0) continue;
        whole = *it;
        modifiers.erase(it);
        return true;
    }
    return false;
}

void Decoder::ignore(std::initializer_list<std::string_view> names) {
    for (std::string_view name : names) take(name);
}

bool Decoder::peek_type(Type& type) const {
    for (const std::string& m : modifiers)
        if (parse_type(m, type)) return true;
    return false;
}

Type Decoder::take_type() {
    Type type;
    for (auto it = modifiers.begin(); it != modifiers.end(); ++it) {
        if (!parse_type(*it, type)) continue;
        modifiers.erase(it);
        return type;
    }
    invalid("the instruction has no type");
}

Type Decoder::take_type(std::initializer_list<Type> allowed) {
    Type type = take_type();
    if (std::find(allowed.begin(), allowed.end(), type) == allowed.end())
        unsupported(std::string("type .") + name_of(type) + " is not supported here");
    return type;
}

Space Decoder::take_space(Space otherwise) {
    if (take("global")) return Space::global;
    if (take("shared::cluster")) return Space::shared_cluster;
    if (take("shared::cta") || take("shared")) return Space::shared;
    if (take("local")) return Space::local;
    if (take("const")) return Space::constant;
    if (take("param") || take("param::entry") || take("param::func")) return Space::param;
    return otherwise;
}

void Decoder::expect_operands(size_t low, size_t high) {
    if (high == 0) high = low;
    if (num_operands() < low || num_operands() > high)
        invalid(format("expected %zu operands, found %zu", low, num_operands()));
}

Operand Decoder::destination(const ParsedOperand& p, Type type) {
    Operand o;
    o.bits = storage_bits(type);
    if (p.kind == ParsedOperand::Kind::sink) {
        o.base = Base::registers;
        o.sink = true;
        return o;
    }
    if (p.kind != ParsedOperand::Kind::reg) invalid("the destination is not a register");
    Operand r = builder.register_operand(p.name);
    if (r.bits == o.bits) {
        writes.push_back(int(r.offset));
        return r;
    }
    if (r.bits == 64 && o.bits == 32) {  // a narrow result in a wide register is extended
        Operand narrow = builder.temporary(r);
        writes.push_back(int(narrow.offset));
        widenings.push_back({narrow, r, is_signed(type)});
        return narrow;
    }
    invalid("register " + p.name + " is too narrow for ." + name_of(type));
}

Operand Decoder::source(const ParsedOperand& p, Type type) {
    int bits = storage_bits(type);
    switch (p.kind) {
        case ParsedOperand::Kind::reg: {
            Operand r = builder.register_operand(p.name);
            r.negated = p.negated;
            if (r.bits == 64 && bits == 32) {  // the low half of a wide register
                Operand narrow = builder.temporary(r);
                Op helper;
                helper.body = narrow_body();
                builder.append(helper, {narrow, r}, {int(r.offset)}, {int(narrow.offset)},
                               statement, RegisterUse::low_half);
                r = narrow;
            } else if (r.bits != bits) {
                invalid("register " + p.name + " does not hold a ." + name_of(type));
            }
            reads.push_back(int(r.offset));
            return r;
        }
        case ParsedOperand::Kind::immediate: {
            if (type == Type::pred) return constant(p.value ? full_mask : 0, 1);
            if (is_float(type) && num_bits(type) >= 32 && p.value != 0)
                return constant(uint64_t(p.value), bits);  // raw bits
            return constant(uint64_t(p.value), bits);
        }
        case ParsedOperand::Kind::float_immediate: {
            if (type == Type::f64 && !p.is_double) {
                float f;
                uint32_t low = uint32_t(p.bits);
                std::memcpy(&f, &low, 4);
                double d = f;
                uint64_t wide;
                std::memcpy(&wide, &d, 8);
                return constant(wide, 64);
            }
            if (bits == 32 && p.is_double) {
                double d;
                std::memcpy(&d, &p.bits, 8);
                float f = float(d);
                uint32_t low;
                std::memcpy(&low, &f, 4);
                return constant(low, 32);
            }
            return constant(p.bits, bits);
        }
        case ParsedOperand::Kind::special: {
            Operand o;
            if (p.name == "%envreg1" || p.name == "%envreg2")
                builder.program().uses_grid_workspace = true;
            if (p.name == "%reserved_smem_offset_1")
                builder.program().shared_begin = runtime_shared_base;
            if (!special_operand(p.name, o))
                unsupported("special register " + p.name + " is not supported here");
            if (bits != o.bits)
                unsupported(format("special register %s is %d bits wide", p.name.c_str(), o.bits));
            return o;
        }
        case ParsedOperand::Kind::symbol: {
            if (p.name == "WARP_SZ") return constant(warp_size, bits);
            Space space;
            Operand o = builder.symbol_address(p.name, p.value, bits, statement.scope, space);
            if (!o.bits) {
                const uint64_t address = builder.function_address(p.name);
                if (!address) invalid("there is no variable '" + p.name + "'");
                return constant(address, bits);
            }
            if (o.base == Base::special) return frame_address(o, bits);
            if (o.bits != bits) invalid("the address of '" + p.name + "' has 64 bits");
            return o;
        }
        default:
            invalid("the operand is not a value");
    }
}

// The value of an address in the function's frame.
Operand Decoder::frame_address(const Operand& in_frame, int bits) {
    Operand value = builder.temporary(bits, "an address in the frame");
    Op helper;
    helper.body = frame_address_body(bits);
    helper.aux = uint64_t(in_frame.displacement);
    builder.append(helper, {value, in_frame}, {}, {int(value.offset)}, statement,
                   RegisterUse::copy);
    reads.push_back(int(value.offset));
    return value;
}

Operand Decoder::destination(size_t i, Type type) {
    return destination(parsed(i), type);
}
Operand Decoder::source(size_t i, Type type) {
    return source(parsed(i), type);
}
Operand Decoder::address(size_t i) {
    return address(parsed(i));
}

const ParsedOperand& Decoder::parsed(size_t i) const {
    if (i < num_operands()) return statement.operands[i];
    builder.fail(FaultKind::invalid_ptx, statement, "an operand is missing");
}

Operand Decoder::second(size_t i) {
    Operand o;
    o.base = Base::registers;
    o.sink = true;
    const ParsedOperand& p = parsed(i);
    if (p.second.empty()) return o;
    o = builder.register_operand(p.second);
    writes.push_back(int(o.offset));
    return o;
}

Operand Decoder::address(const ParsedOperand& p) {
    if (p.kind != ParsedOperand::Kind::address) invalid("the operand is not an address");
    auto kind = ParsedOperand::Kind(p.bits);
    if (kind == ParsedOperand::Kind::reg) {
        const int bits = num_bits(builder.register_type(p.name));
        if (bits != 32 && bits != 64)
            invalid("register " + p.name + " is no address: it has not 32 or 64 bits");
        Operand o = builder.register_operand(p.name);
        reads.push_back(int(o.offset));
        o.displacement = p.value;
        return o;
    }
    if (kind == ParsedOperand::Kind::immediate) return constant(uint64_t(p.value), 64);
    Operand o = builder.symbol_address(p.name, p.value, 32, statement.scope, symbol_space);
    if (!o.bits) invalid("there is no variable '" + p.name + "'");
    return o;
}

std::vector<Operand> Decoder::destinations(size_t i, Type type) {
    if (parsed(i).kind != ParsedOperand::Kind::vector) return {destination(i, type)};
    std::vector<Operand> all;
    for (const ParsedOperand& p : parsed(i).elements) all.push_back(destination(p, type));
    return all;
}

std::vector<Operand> Decoder::sources(size_t i, Type type) {
    if (parsed(i).kind != ParsedOperand::Kind::vector) return {source(i, type)};
    std::vector<Operand> all;
    for (const ParsedOperand& p : parsed(i).elements) all.push_back(source(p, type));
    return all;
}

uint64_t Decoder::immediate(size_t i) {
    if (parsed(i).kind != ParsedOperand::Kind::immediate) invalid("expected an immediate");
    return uint64_t(parsed(i).value);
}

uint32_t Decoder::immediate_u32(size_t i) {
    const uint64_t value = immediate(i);
    if (value > UINT32_MAX) invalid(format("%lld does not fit into 32 bits", (long long)value));
    return uint32_t(value);
}

Operand Decoder::constant(uint64_t value, int bits) {
    return builder.constant(bits == 32 ? value & 0xffffffffu : value, bits);
}

// Whether the statement reads a clock, which a simulated one answers.
bool Decoder::reads_timer() const {
    for (const ParsedOperand& o : statement.operands)
        if (o.kind == ParsedOperand::Kind::special &&
            (o.name.starts_with("%clock") || o.name.starts_with("%globaltimer")))
            return true;
    return false;
}

void Decoder::emit(Body body, std::initializer_list<Operand> operands, uint64_t aux) {
    emit(body, std::vector<Operand>(operands), aux);
}

void Decoder::emit(Body body, std::vector<Operand> operands, uint64_t aux) {
    op.body = body;
    op.aux = aux;
    builder.append(op, std::move(operands), reads, writes, statement,
                   use_.value_or(register_use(statement.mnemonic)));
    Program& program = builder.program();
    program.costs.back() = cost_of(statement.mnemonic, program.ops.back());
    if (reads_timer())
        program.costs.back().kind = OpKind::timer, program.costs.back().is_ordered = true;
    for (const Widening& w : widenings) {
        Op helper;
        helper.body = w.is_signed ? widen_signed_body() : widen_body();
        builder.append(helper, {w.wide, w.narrow}, {int(w.narrow.offset)}, {int(w.wide.offset)},
                       statement, RegisterUse::copy);
    }
    widenings.clear();
    reads.clear();
    writes.clear();
}

void Decoder::branch_to(const std::string& label) {
    builder.pending_.push_back({uint32_t(builder.program_->ops.size()),
                                builder.label_statement(label, statement),
                                builder.ranges_.size() - 1});
}

void Decoder::unsupported(const std::string& why) {
    builder.fail(FaultKind::unsupported, statement, "'" + statement.mnemonic + "': " + why);
}

void Decoder::invalid(const std::string& why) {
    builder.fail(FaultKind::invalid_ptx, statement, "'" + statement.mnemonic + "': " + why);
}

}  // namespace deep_moe::emulator
