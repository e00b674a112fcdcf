// Video instructions on the halves or bytes of a register: vadd2, vabsdiff4 and their like.
#include <algorithm>

#include "instruction_table.h"
#include "lanes.h"

namespace deep_moe::emulator {
namespace {

enum class Operation : uint8_t { add, sub, average, difference, minimum, maximum, compare };
enum class Comparison : uint8_t { eq, ne, lt, le, gt, ge };

// aux: operation, parts, signs of a, b and d, .sat, .add, comparison
struct Form {
    Operation operation;
    uint32_t parts;
    bool a_signed, b_signed, d_signed, saturates, accumulates;
    Comparison comparison;

    uint64_t pack() const {
        return uint64_t(operation) | uint64_t(parts) << 8 | uint64_t(a_signed) << 16 |
               uint64_t(b_signed) << 17 | uint64_t(d_signed) << 18 | uint64_t(saturates) << 19 |
               uint64_t(accumulates) << 20 | uint64_t(comparison) << 24;
    }
    static Form unpack(uint64_t aux) {
        return {Operation(aux & 0xff), uint32_t(aux >> 8 & 0xff), (aux >> 16 & 1) != 0,
                (aux >> 17 & 1) != 0,  (aux >> 18 & 1) != 0,      (aux >> 19 & 1) != 0,
                (aux >> 20 & 1) != 0,  Comparison(aux >> 24)};
    }
};

int32_t part_of(uint32_t word, uint32_t index, uint32_t bits, bool is_signed) {
    const uint32_t value = word >> index * bits & ((1u << bits) - 1);
    return is_signed && value >> (bits - 1) ? int32_t(value) - (1 << bits) : int32_t(value);
}

bool holds(Comparison comparison, int32_t a, int32_t b) {
    switch (comparison) {
        case Comparison::eq:
            return a == b;
        case Comparison::ne:
            return a != b;
        case Comparison::lt:
            return a < b;
        case Comparison::le:
            return a <= b;
        case Comparison::gt:
            return a > b;
        default:
            return a >= b;
    }
}

uint32_t result(const Form& f, uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t bits = 32 / f.parts;
    uint32_t packed = 0;
    int32_t sum = 0;
    for (uint32_t i = 0; i < f.parts; ++i) {
        const int32_t x = part_of(a, i, bits, f.a_signed), y = part_of(b, i, bits, f.b_signed);
        int32_t r = 0;
        switch (f.operation) {
            case Operation::add:
                r = x + y;
                break;
            case Operation::sub:
                r = x - y;
                break;
            case Operation::average:  // rounded away from zero
                r = x + y >= 0 ? (x + y + 1) >> 1 : (x + y) >> 1;
                break;
            case Operation::difference:
                r = x > y ? x - y : y - x;
                break;
            case Operation::minimum:
                r = std::min(x, y);
                break;
            case Operation::maximum:
                r = std::max(x, y);
                break;
            case Operation::compare:
                r = holds(f.comparison, x, y);
                break;
        }
        if (f.saturates) {
            const int32_t low = f.d_signed ? -(1 << (bits - 1)) : 0,
                          high = f.d_signed ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
            r = std::clamp(r, low, high);
        }
        sum += r;
        packed |= (uint32_t(r) & ((1u << bits) - 1)) << i * bits;
    }
    return f.accumulates ? c + uint32_t(sum) : packed;
}

Flow combine_parts(Warp& w, const Op& op) {
    const Form f = Form::unpack(op.aux);
    return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
        w, op, [&](uint32_t a, uint32_t b, uint32_t c) { return result(f, a, b, c); });
}

template <Operation operation, int parts>
void decode(Decoder& d) {
    Form f{};
    f.operation = operation;
    f.parts = parts;
    if (operation == Operation::compare) {
        constexpr std::string_view names[] = {"eq", "ne", "lt", "le", "gt", "ge"};
        uint32_t which = 0;
        while (which < 6 && !d.take(names[which])) ++which;
        if (which == 6) d.invalid("the comparison is missing");
        f.comparison = Comparison(which);
    } else {
        f.d_signed = d.take_type({Type::u32, Type::s32}) == Type::s32;
    }
    f.a_signed = d.take_type({Type::u32, Type::s32}) == Type::s32;
    f.b_signed = d.take_type({Type::u32, Type::s32}) == Type::s32;
    f.saturates = d.take("sat");
    f.accumulates = d.take("add");
    d.expect_operands(4);
    for (size_t i = 0; i < 4; ++i) {
        if (d.parsed(i).kind == ParsedOperand::Kind::special)
            d.unsupported("a selection of parts (" + d.parsed(i).name + ")");
    }
    d.emit(combine_parts,
           {d.destination(0, Type::u32), d.source(1, Type::u32), d.source(2, Type::u32),
            d.source(3, Type::u32)},
           f.pack());
}

}  // namespace

InstructionTable simd_instructions() {
    return {
        {"vadd2", decode<Operation::add, 2>, "sums of halves; .sat, .add"},
        {"vadd4", decode<Operation::add, 4>, "sums of bytes; .sat, .add"},
        {"vsub2", decode<Operation::sub, 2>, "differences of halves; .sat, .add"},
        {"vsub4", decode<Operation::sub, 4>, "differences of bytes; .sat, .add"},
        {"vavrg2", decode<Operation::average, 2>, "averages of halves; .sat, .add"},
        {"vavrg4", decode<Operation::average, 4>, "averages of bytes; .sat, .add"},
        {"vabsdiff2", decode<Operation::difference, 2>, "distances of halves; .sat, .add"},
        {"vabsdiff4", decode<Operation::difference, 4>, "distances of bytes; .sat, .add"},
        {"vmin2", decode<Operation::minimum, 2>, "smaller halves; .sat, .add"},
        {"vmin4", decode<Operation::minimum, 4>, "smaller bytes; .sat, .add"},
        {"vmax2", decode<Operation::maximum, 2>, "larger halves; .sat, .add"},
        {"vmax4", decode<Operation::maximum, 4>, "larger bytes; .sat, .add"},
        {"vset2", decode<Operation::compare, 2>, "comparisons of halves; .add"},
        {"vset4", decode<Operation::compare, 4>, "comparisons of bytes; .add"},
    };
}

}  // namespace deep_moe::emulator
