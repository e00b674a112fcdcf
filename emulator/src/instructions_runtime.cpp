// Functions that the CUDA driver provides and a module only declares: vprintf, __assertfail, malloc
// and free.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "lanes.h"
#include "program_builder.h"

namespace deep_moe::emulator {

namespace {

template <class T>
T read_memory(Warp& w, uint64_t address, int lane) {
    T value;
    std::memcpy(&value, w.resolve(Space::generic, address, sizeof value, Access::read, lane),
                sizeof value);
    return value;
}

std::string read_text(Warp& w, uint64_t address, int lane) {
    std::string text;
    for (; address; ++address) {
        char c = read_memory<char>(w, address, lane);
        if (!c) break;
        text.push_back(c);
    }
    return text;
}

// A parameter of the call, at this place of the lane's local memory.
template <class T>
T parameter(Warp& w, const Operand& place, int lane) {
    T value;
    std::memcpy(
        &value,
        w.resolve(Space::local, w.in<uint32_t>(place)[lane], sizeof value, Access::read, lane),
        sizeof value);
    return value;
}
template <class T>
void return_value(Warp& w, const Operand& place, int lane, T value) {
    std::memcpy(
        w.resolve(Space::local, w.in<uint32_t>(place)[lane], sizeof value, Access::write, lane),
        &value, sizeof value);
}

constexpr unsigned max_print_width = 4096;

// `format` filled with values that lie one after the other at `values`, each aligned to its size.
std::string print_formatted(Warp& w, const std::string& format_text, uint64_t values, int lane) {
    std::string out;
    auto next = [&]<class T>(T) {
        values = (values + sizeof(T) - 1) / sizeof(T) * sizeof(T);
        T value = read_memory<T>(w, values, lane);
        values += sizeof(T);
        return value;
    };
    for (size_t i = 0; i < format_text.size(); ++i) {
        if (format_text[i] != '%') {
            out.push_back(format_text[i]);
            continue;
        }
        if (i + 1 < format_text.size() && format_text[i + 1] == '%') {
            out.push_back(format_text[++i]);
            continue;
        }
        std::string directive = "%";
        bool is_long = false;
        for (++i; i < format_text.size(); ++i) {
            char c = format_text[i];
            if (c == '*') {
                directive += std::to_string(next(int32_t{}));
            } else if (std::strchr("ljtz", c)) {
                is_long = true;
            } else if (c != 'h') {
                directive.push_back(c);
                if (!std::strchr("-+ #0123456789.", c)) break;
            }
        }
        for (size_t at = 1; at < directive.size(); ++at) {
            if (std::isdigit(static_cast<unsigned char>(directive[at])) &&
                std::strtoull(directive.c_str() + at, nullptr, 10) > max_print_width)
                throw Fault(FaultKind::invalid_operation,
                            format("printf: a width or precision above %u", max_print_width), lane);
        }
        switch (directive.back()) {
            case 's':
                out += format(directive.c_str(), read_text(w, next(uint64_t{}), lane).c_str());
                break;
            case 'p':
                out += format(directive.c_str(), reinterpret_cast<void*>(next(uint64_t{})));
                break;
            case 'c':
                out += format(directive.c_str(), next(int32_t{}));
                break;
            case 'd':
            case 'i':
            case 'u':
            case 'o':
            case 'x':
            case 'X':
                if (!is_long) {
                    out += format(directive.c_str(), next(int32_t{}));
                } else {
                    directive.insert(directive.size() - 1, "ll");
                    out += format(directive.c_str(), next(int64_t{}));
                }
                break;
            case 'f':
            case 'F':
            case 'e':
            case 'E':
            case 'g':
            case 'G':
            case 'a':
            case 'A':
                out += format(directive.c_str(), next(double{}));
                break;
            default:
                throw Fault(FaultKind::invalid_operation,
                            format("printf does not know '%s'", directive.c_str()), lane);
        }
    }
    return out;
}

// operands: places of result, format, values
Flow print(Warp& w, const Op& op) {
    w.for_each_lane([&](int lane) {
        std::string text =
            print_formatted(w, read_text(w, parameter<uint64_t>(w, op.operands[1], lane), lane),
                            parameter<uint64_t>(w, op.operands[2], lane), lane);
        std::fwrite(text.data(), 1, text.size(), stdout);
        return_value(w, op.operands[0], lane, int32_t(text.size()));
    });
    std::fflush(stdout);
    return Flow::next;
}

// A failed assert(). operands: places of message, file, line
Flow assertion_failed(Warp& w, const Op& op) {
    int lane = w.first_lane();
    auto text = [&](const Operand& o) {
        return read_text(w, parameter<uint64_t>(w, o, lane), lane);
    };
    throw Fault(FaultKind::trap,
                format("assertion failed: %s (%s:%u)", text(op.operands[0]).c_str(),
                       text(op.operands[1]).c_str(), parameter<uint32_t>(w, op.operands[2], lane)),
                lane);
}

// operands: places of result, size
Flow allocate(Warp& w, const Op& op) {
    Rank& rank = *w.grid->rank;
    w.for_each_lane([&](int lane) {
        const uint64_t size = parameter<uint64_t>(w, op.operands[1], lane);
        uint64_t address = 0;
        if (size) {
            constexpr size_t alignment = 16;
            // Null when there is no room, as on the device.
            std::unique_ptr<std::byte[]> storage;
            if (size < SIZE_MAX - alignment)
                storage.reset(new (std::nothrow) std::byte[size + alignment]);
            if (storage) {
                std::memset(storage.get(), 0xcb, size + alignment);
                address = (reinterpret_cast<uint64_t>(storage.get()) + alignment - 1) / alignment *
                          alignment;
                rank.memory.add(address, size, "memory from malloc", true);
                rank.heap[address] = std::move(storage);
            }
        }
        return_value(w, op.operands[0], lane, address);
    });
    return Flow::next;
}

// operands: place of the address
Flow release(Warp& w, const Op& op) {
    Rank& rank = *w.grid->rank;
    w.for_each_lane([&](int lane) {
        const uint64_t address = parameter<uint64_t>(w, op.operands[0], lane);
        if (!address) return;
        auto found = rank.heap.find(address);
        if (found == rank.heap.end())
            throw Fault(FaultKind::invalid_operation,
                        format("free of 0x%llx, which malloc has not given",
                               static_cast<unsigned long long>(address)),
                        lane);
        rank.memory.remove(address);
        rank.freed.push_back(std::move(found->second));
        rank.heap.erase(found);
    });
    return Flow::next;
}

}  // namespace

bool decode_runtime_call(Decoder& d) {
    size_t callee = d.parsed(0).kind == ParsedOperand::Kind::parenthesis ? 1 : 0;
    if (d.num_operands() != callee + 2) return false;
    const std::string& name = d.parsed(callee).name;
    if (d.builder.function_address(name)) return false;  // the module has its own
    const auto& parameters = d.parsed(callee + 1).elements;
    auto place = [&](const ParsedOperand& p) { return d.source(p, Type::u32); };
    if (name == "__assertfail") {
        if (callee != 0 || parameters.size() != 5)
            d.invalid("__assertfail takes five parameters and has no result");
        d.op.ends_block = d.op.never_falls_through = true;
        d.emit(assertion_failed,
               {place(parameters[0]), place(parameters[1]), place(parameters[2])});
        return true;
    }
    if (name == "vprintf") {
        if (callee != 1 || d.parsed(0).elements.size() != 1 || parameters.size() != 2)
            d.invalid("vprintf takes two parameters and has a result");
        d.emit(print, {place(d.parsed(0).elements[0]), place(parameters[0]), place(parameters[1])});
        return true;
    }
    if (name == "malloc" && callee == 1 && parameters.size() == 1) {
        d.emit(allocate, {place(d.parsed(0).elements[0]), place(parameters[0])});
        return true;
    }
    if (name == "free" && callee == 0 && parameters.size() == 1) {
        d.emit(release, {place(parameters[0])});
        return true;
    }
    return false;
}

}  // namespace deep_moe::emulator
