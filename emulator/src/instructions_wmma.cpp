// wmma.*: matrix instructions whose fragments have no documented layout. Here, a thread holds a run
// of consecutive elements of the row-major matrix; where a fragment has more elements than the
// matrix, the threads' runs repeat.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "instruction_table.h"
#include "lanes.h"
#include "numeric.h"
#include "race_detector.h"
#include "tensor_core_sum.h"

namespace deep_moe::emulator {
namespace {

struct WmmaShape {
    uint32_t m = 0, n = 0, k = 0;
};

enum class Part : uint8_t { a, b, c };

struct Fragment {
    WmmaShape shape;
    Part part = Part::a;
    Type type = Type::f16;

    uint32_t rows() const { return part == Part::b ? shape.k : shape.m; }
    uint32_t columns() const { return part == Part::a ? shape.k : shape.n; }
    uint32_t element_bits() const { return type == Type::tf32 ? 32 : uint32_t(num_bits(type)); }
    uint32_t elements() const {
        // Operands of type f16 take 8 registers whatever the shape.
        if (type == Type::f16 && part != Part::c) return 16;
        return rows() * columns() / warp_size;
    }
    uint32_t registers() const {
        return type == Type::f64 ? elements() : elements() * element_bits() / 32;
    }
    // Index in the row-major matrix of element `e` of thread `t`.
    uint32_t index(uint32_t t, uint32_t e) const {
        return (t * elements() + e) % (rows() * columns());
    }
};

uint64_t pack(const Fragment& f) {
    return uint64_t(f.shape.m) | uint64_t(f.shape.n) << 8 | uint64_t(f.shape.k) << 16 |
           uint64_t(f.part) << 24 | uint64_t(f.type) << 32;
}
Fragment unpack(uint64_t aux) {
    return {{uint32_t(aux & 0xff), uint32_t(aux >> 8 & 0xff), uint32_t(aux >> 16 & 0xff)},
            Part(aux >> 24 & 0xff),
            Type(aux >> 32 & 0xff)};
}

// Element `e` of thread `t` in its registers, as raw bits.
uint64_t raw(const Warp& w, const Fragment& f, const Operand* registers, uint32_t t, uint32_t e) {
    if (f.type == Type::f64) return w.in<uint64_t>(registers[e])[int(t)];
    const uint32_t bits = f.element_bits(), at = e * bits;
    const uint32_t word = w.in<uint32_t>(registers[at / 32])[int(t)];
    return bits == 32 ? word : word >> at % 32 & ((1u << bits) - 1);
}

void set_raw(Warp& w, const Fragment& f, const Operand* registers, uint32_t t, uint32_t e,
             uint64_t value) {
    if (f.type == Type::f64) return w.out<uint64_t>(registers[e]).set(int(t), value);
    const uint32_t bits = f.element_bits(), at = e * bits;
    uint32_t* word = reinterpret_cast<uint32_t*>(w.out<uint32_t>(registers[at / 32]).data) + t;
    if (bits == 32) {
        *word = uint32_t(value);
    } else {
        const uint32_t mask = ((1u << bits) - 1) << at % 32;
        *word = (*word & ~mask) | (uint32_t(value) << at % 32 & mask);
    }
}

double value_of(Type type, uint64_t bits) {
    switch (type) {
        case Type::f16:
            return f16_to_float(uint16_t(bits));
        case Type::bf16:
            return bf16_to_float(uint16_t(bits));
        case Type::tf32:
            return tf32_to_float(uint32_t(bits));
        case Type::f32:
            return std::bit_cast<float>(uint32_t(bits));
        case Type::f64:
            return std::bit_cast<double>(bits);
        case Type::s8:
            return int8_t(bits);
        case Type::u8:
            return uint8_t(bits);
        default:
            return int32_t(bits);
    }
}

uint64_t bits_of(Type type, double value, bool saturates) {
    switch (type) {
        case Type::f16:
            return encode(f16_format, value, Rounding::nearest_even, Overflow::to_infinity);
        case Type::f32:
            return cut_to_f32(value, 23);
        case Type::f64:
            return std::bit_cast<uint64_t>(value);
        default:
            if (saturates) value = std::min(std::max(value, -0x1p31), 0x1p31 - 1);
            return uint32_t(int64_t(value));
    }
}

// ---- wmma.load, wmma.store

constexpr int column_major_bit = 40, space_shift = 48;

// operands: address, stride, registers
template <bool loads>
Flow transfer(Warp& w, const Op& op) {
    const Fragment f = unpack(op.aux);
    const bool column_major = op.aux >> column_major_bit & 1;
    const auto space = Space(op.aux >> space_shift & 0xff);
    const uint32_t bytes = f.element_bits() / 8, stride = w.uniform<uint32_t>(op.operands[1]);
    const int leader = w.first_lane();
    const uint64_t base = w.address(op.operands[0], leader);
    for (uint32_t t = 0; t < warp_size; ++t) {
        for (uint32_t e = 0; e < f.elements(); ++e) {
            // Of elements that several threads hold, the first one stores.
            if (!loads && t * f.elements() + e >= f.rows() * f.columns()) continue;
            const uint32_t index = f.index(t, e), row = index / f.columns(),
                           column = index % f.columns();
            const uint64_t offset =
                column_major ? uint64_t(column) * stride + row : uint64_t(row) * stride + column;
            const uint64_t address = base + offset * bytes;
            std::byte* at =
                w.resolve(space, address, bytes, loads ? Access::read : Access::write, int(t));
            if (w.machine->races)
                w.machine->races->access(w, space, address, bytes,
                                         loads ? Access::read : Access::write, int(t));
            uint64_t value = 0;
            if (loads) {
                std::memcpy(&value, at, bytes);
                set_raw(w, f, op.operands + 2, t, e, value);
            } else {
                value = raw(w, f, op.operands + 2, t, e);
                std::memcpy(at, &value, bytes);
            }
        }
    }
    if (!loads) w.machine->note_progress();
    return Flow::next;
}

WmmaShape take_shape(Decoder& d) {
    WmmaShape s;
    std::string text;
    if (!d.take_prefix("m", text) || std::sscanf(text.c_str(), "m%un%uk%u", &s.m, &s.n, &s.k) != 3)
        d.invalid("the shape is missing");
    return s;
}

void check(Decoder& d, const Fragment& f) {
    const WmmaShape s = f.shape;
    const bool big = s.m * s.n == 256 && s.k == 16 && s.m >= 8 && s.n >= 8;
    const bool good = f.type == Type::f64    ? s.m == 8 && s.n == 8 && s.k == 4
                      : f.type == Type::tf32 ? s.m == 16 && s.n == 16 && s.k == 8
                      : f.part == Part::c    ? big || (s.m == 16 && s.n == 16 && s.k == 8)
                                             : big;
    if (!good) d.unsupported("this shape and type");
}

void decode_transfer(Decoder& d, bool loads) {
    d.ignore({"sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    const std::string_view part = loads ? d.take_any({"a", "b", "c"}) : d.take_any({"d"});
    if (part.empty()) d.invalid("the matrix is not named");
    const bool column_major = d.take_any({"row", "col"}) == "col";
    Fragment f;
    f.part = part == "a" ? Part::a : part == "b" ? Part::b : Part::c;
    f.shape = take_shape(d);
    const Space space = d.take_space();
    f.type = d.take_type(
        {Type::f16, Type::bf16, Type::tf32, Type::f32, Type::f64, Type::s8, Type::u8, Type::s32});
    check(d, f);
    d.expect_operands(2, 3);
    const Type word = f.type == Type::f64 ? Type::b64 : Type::b32;
    const std::vector<Operand> registers = loads ? d.destinations(0, word) : d.sources(1, word);
    if (registers.size() != f.registers())
        d.invalid("the number of registers does not match the shape");
    const uint32_t rows = f.rows(), columns = f.columns();
    std::vector<Operand> operands{
        d.address(loads ? 1 : 0),
        d.num_operands() == 3 ? d.source(2, Type::u32) : d.constant(column_major ? rows : columns)};
    operands.insert(operands.end(), registers.begin(), registers.end());
    d.emit(loads ? transfer<true> : transfer<false>, std::move(operands),
           pack(f) | uint64_t(column_major) << column_major_bit | uint64_t(space) << space_shift);
}

void decode_load(Decoder& d) {
    decode_transfer(d, true);
}
void decode_store(Decoder& d) {
    decode_transfer(d, false);
}

// ---- wmma.mma

constexpr int c_type_shift = 40, d_type_shift = 48, saturate_bit = 63, b_type_shift = 56;

Element element_of(Type type) {
    return type == Type::f16 ? Element::f16 : type == Type::bf16 ? Element::bf16 : Element::tf32;
}

// sums[m][n] += a[m][k] * b[k][n]
void add_products(Type type, Type addend, const WmmaShape& s, const double* a, const double* b,
                  double* sums) {
    if (type == Type::f64 || type == Type::s8 || type == Type::u8) {  // integers: exact
        for (uint32_t row = 0; row < s.m; ++row)
            for (uint32_t column = 0; column < s.n; ++column)
                for (uint32_t i = 0; i < s.k; ++i)
                    sums[row * s.n + column] =
                        std::fma(a[row * s.k + i], b[i * s.n + column], sums[row * s.n + column]);
        return;
    }
    UnpackedPanel right;
    TensorCoreSum unit(element_of(type), element_of(type), 25, a, b, s.m, s.k, s.n, right);
    for (uint32_t row = 0; row < s.m; ++row)
        unit.row(row, s.n, sums + row * s.n, addend == Type::f16 ? -14 : -126, sums + row * s.n,
                 [](uint32_t) { return true; });
}

// operands: d, a, b, c. The sums are those of mma.sync.
Flow multiply(Warp& w, const Op& op) {
    const Fragment a = unpack(op.aux);
    Fragment b = a, c = a, d = a;
    b.part = Part::b, b.type = Type(op.aux >> b_type_shift & 0x7f);
    c.part = Part::c, c.type = Type(op.aux >> c_type_shift & 0xff);
    d.part = Part::c, d.type = Type(op.aux >> d_type_shift & 0xff);
    const bool saturates = op.aux >> saturate_bit & 1;
    const Operand *ds = op.operands, *as = ds + d.registers(), *bs = as + a.registers(),
                  *cs = bs + b.registers();
    double left[32 * 16], right[16 * 32], sums[32 * 32];
    auto gather = [&](const Fragment& f, const Operand* registers, double* values) {
        for (uint32_t t = 0; t < warp_size; ++t)
            for (uint32_t e = 0; e < f.elements(); ++e)
                values[f.index(t, e)] = value_of(f.type, raw(w, f, registers, t, e));
    };
    gather(a, as, left);
    gather(b, bs, right);
    gather(c, cs, sums);
    add_products(a.type, c.type, a.shape, left, right, sums);
    for (uint32_t t = 0; t < warp_size; ++t)
        for (uint32_t e = 0; e < d.elements(); ++e)
            set_raw(w, d, ds, t, e, bits_of(d.type, sums[d.index(t, e)], saturates));
    return Flow::next;
}

void decode_multiply(Decoder& d) {
    d.ignore({"sync", "aligned", "rn"});
    d.op.meeting = Meeting::whole_warp;
    // The fragments were put in order when they were loaded.
    while (!d.take_any({"row", "col"}).empty()) {
    }
    Fragment a;
    a.shape = take_shape(d);
    const bool saturates = d.take("satfinite");
    const Type first = d.take_type();
    Type result = first, addend = first, b_type = Type::f16;
    Type second;
    const bool has_second = d.peek_type(second);
    if (has_second) second = d.take_type();
    if (d.peek_type(addend)) {  // d, a, b, c
        a.type = second;
        b_type = d.take_type();
        addend = d.take_type();
    } else {  // d, c: the operands are f16
        a.type = Type::f16;
        addend = has_second ? second : first;
    }
    const Fragment b{a.shape, Part::b, b_type}, c{a.shape, Part::c, addend},
        out{a.shape, Part::c, result};
    for (const Fragment& f : {a, b, c, out}) check(d, f);
    d.expect_operands(4);
    const Type word = a.type == Type::f64 ? Type::b64 : Type::b32;
    std::vector<Operand> operands = d.destinations(0, word);
    if (operands.size() != out.registers())
        d.invalid("the number of registers does not match the shape");
    const Fragment* parts[] = {&a, &b, &c};
    for (size_t i = 0; i < 3; ++i) {
        const std::vector<Operand> registers = d.sources(i + 1, word);
        if (registers.size() != parts[i]->registers())
            d.invalid("the number of registers does not match the shape");
        operands.insert(operands.end(), registers.begin(), registers.end());
    }
    d.emit(multiply, std::move(operands),
           pack(a) | uint64_t(b_type) << b_type_shift | uint64_t(addend) << c_type_shift |
               uint64_t(result) << d_type_shift | uint64_t(saturates) << saturate_bit);
}

}  // namespace

InstructionTable wmma_instructions() {
    return {
        {"wmma.load", decode_load, "fragment of a matrix: f16, bf16, tf32, f64, s8, u8"},
        {"wmma.store", decode_store, "fragment to memory"},
        {"wmma.mma", decode_multiply, "m16n16k16, m32n8k16, m8n32k16, m16n16k8, m8n8k4"},
    };
}

}  // namespace deep_moe::emulator
