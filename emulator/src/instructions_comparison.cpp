// Comparison and selection, of integers and floating numbers.
#include "float_types.h"
#include "lanes.h"

namespace deep_moe::emulator {

namespace {

enum BoolOp : uint64_t { bool_none, bool_and, bool_or, bool_xor };

struct Eq {
    template <class T>
    bool operator()(T a, T b) const {
        return a == b;
    }
};
struct Ne {
    template <class T>
    bool operator()(T a, T b) const {
        return a != b && !(a != a) && !(b != b);
    }
};
struct Lt {
    template <class T>
    bool operator()(T a, T b) const {
        return a < b;
    }
};
struct Le {
    template <class T>
    bool operator()(T a, T b) const {
        return a <= b;
    }
};
struct Gt {
    template <class T>
    bool operator()(T a, T b) const {
        return a > b;
    }
};
struct Ge {
    template <class T>
    bool operator()(T a, T b) const {
        return a >= b;
    }
};
struct Equ {
    template <class T>
    bool operator()(T a, T b) const {
        return !(a < b || a > b);
    }
};
struct Neu {
    template <class T>
    bool operator()(T a, T b) const {
        return !(a == b);
    }
};
struct Ltu {
    template <class T>
    bool operator()(T a, T b) const {
        return !(a >= b);
    }
};
struct Leu {
    template <class T>
    bool operator()(T a, T b) const {
        return !(a > b);
    }
};
struct Gtu {
    template <class T>
    bool operator()(T a, T b) const {
        return !(a <= b);
    }
};
struct Geu {
    template <class T>
    bool operator()(T a, T b) const {
        return !(a < b);
    }
};
struct Num {
    template <class T>
    bool operator()(T a, T b) const {
        return a == a && b == b;
    }
};
struct Nan {
    template <class T>
    bool operator()(T a, T b) const {
        return a != a || b != b;
    }
};

template <class T, bool ftz, class C>
uint32_t compare(Warp& w, const Op& op) {
    auto a = w.in<T>(op.operands[2]), b = w.in<T>(op.operands[3]);
    uint8_t bytes[warp_size];
    for (int i = 0; i < warp_size; ++i) {
        if constexpr (std::is_same_v<T, BFloat>) {
            bytes[i] = C{}(float(a[i]), float(b[i]));
        } else if constexpr (std::is_same_v<T, Half>) {
            bytes[i] = C{}(float(ftz ? flush(a[i]) : a[i]), float(ftz ? flush(b[i]) : b[i]));
        } else if constexpr (ftz) {
            bytes[i] = C{}(flush(a[i]), flush(b[i]));
        } else {
            bytes[i] = C{}(a[i], b[i]);
        }
    }
    return pack_mask(bytes);
}

uint32_t combine(Warp& w, const Op& op, uint32_t bits) {
    if (op.aux == bool_none) return bits;
    uint32_t c = w.predicate(op.operands[4]);
    return op.aux == bool_and ? bits & c : op.aux == bool_or ? bits | c : bits ^ c;
}

// operands: p, q, a, b, c
template <class T, bool ftz, class C>
Flow setp(Warp& w, const Op& op) {
    uint32_t bits = compare<T, ftz, C>(w, op);
    uint32_t q = combine(w, op, ~bits);
    uint32_t p = combine(w, op, bits);
    w.set_predicate(op.operands[0], p);
    w.set_predicate(op.operands[1], q);
    return Flow::next;
}

// set: all ones or 1.0f
template <class T, bool ftz, class C>
Flow set_integer(Warp& w, const Op& op) {
    uint32_t bits = combine(w, op, compare<T, ftz, C>(w, op));
    auto d = w.out<uint32_t>(op.operands[0]);
    w.for_each_lane([&](int i) { d.set(i, (bits >> i) & 1 ? full_mask : 0); });
    return Flow::next;
}
template <class T, bool ftz, class C>
Flow set_float(Warp& w, const Op& op) {
    uint32_t bits = combine(w, op, compare<T, ftz, C>(w, op));
    auto d = w.out<float>(op.operands[0]);
    w.for_each_lane([&](int i) { d.set(i, (bits >> i) & 1 ? 1.0f : 0.0f); });
    return Flow::next;
}

template <class T, bool ftz, class C>
Body compare_body(int kind) {
    return kind == 0   ? Body(setp<T, ftz, C>)
           : kind == 1 ? Body(set_integer<T, ftz, C>)
                       : Body(set_float<T, ftz, C>);
}

template <class T, bool ftz = false>
Body pick_comparison(Decoder& d, std::string_view name, int kind) {
    if (name == "eq") return compare_body<T, ftz, Eq>(kind);
    if (name == "ne") return compare_body<T, ftz, Ne>(kind);
    if (name == "lt" || name == "lo") return compare_body<T, ftz, Lt>(kind);
    if (name == "le" || name == "ls") return compare_body<T, ftz, Le>(kind);
    if (name == "gt" || name == "hi") return compare_body<T, ftz, Gt>(kind);
    if (name == "ge" || name == "hs") return compare_body<T, ftz, Ge>(kind);
    if constexpr (!std::is_integral_v<T>) {
        if (name == "equ") return compare_body<T, ftz, Equ>(kind);
        if (name == "neu") return compare_body<T, ftz, Neu>(kind);
        if (name == "ltu") return compare_body<T, ftz, Ltu>(kind);
        if (name == "leu") return compare_body<T, ftz, Leu>(kind);
        if (name == "gtu") return compare_body<T, ftz, Gtu>(kind);
        if (name == "geu") return compare_body<T, ftz, Geu>(kind);
        if (name == "num") return compare_body<T, ftz, Num>(kind);
        if (name == "nan") return compare_body<T, ftz, Nan>(kind);
    }
    d.invalid("the comparison is not one for this type");
}

Body comparison(Decoder& d, std::string_view name, Type type, bool ftz, int kind) {
    switch (type) {
        case Type::f32:
            return ftz ? pick_comparison<float, true>(d, name, kind)
                       : pick_comparison<float>(d, name, kind);
        case Type::f64:
            return pick_comparison<double>(d, name, kind);
        case Type::f16:
            return ftz ? pick_comparison<Half, true>(d, name, kind)
                       : pick_comparison<Half>(d, name, kind);
        case Type::bf16:
            return pick_comparison<BFloat>(d, name, kind);
        default:
            return for_integer(d, type,
                               [&](auto t) { return pick_comparison<decltype(t)>(d, name, kind); });
    }
}

const std::initializer_list<std::string_view> comparisons = {
    "eq", "ne",  "lt",  "le",  "gt",  "ge",  "lo",  "ls",  "hi",
    "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

// Comparisons of halves and of pairs of halves: one function for all of them.
using FloatComparison = bool (*)(float, float);

template <class C>
bool compare_floats(float a, float b) {
    return C{}(a, b);
}

FloatComparison float_comparison(Decoder& d, std::string_view name) {
    static const std::map<std::string_view, FloatComparison> table = {
        {"eq", compare_floats<Eq>},   {"ne", compare_floats<Ne>},   {"lt", compare_floats<Lt>},
        {"le", compare_floats<Le>},   {"gt", compare_floats<Gt>},   {"ge", compare_floats<Ge>},
        {"equ", compare_floats<Equ>}, {"neu", compare_floats<Neu>}, {"ltu", compare_floats<Ltu>},
        {"leu", compare_floats<Leu>}, {"gtu", compare_floats<Gtu>}, {"geu", compare_floats<Geu>},
        {"num", compare_floats<Num>}, {"nan", compare_floats<Nan>}};
    auto found = table.find(name);
    if (found == table.end()) d.invalid("the comparison is not one for this type");
    return found->second;
}

bool is_half(Type type) {
    return type == Type::f16 || type == Type::bf16 || type == Type::f16x2 || type == Type::bf16x2;
}

// Which of the (one or two) halves of a lane compare true; operands a and b follow the results.
template <class H>
uint32_t compare_halves(Warp& w, const Op& op, int lane) {
    uint32_t a = w.in<uint32_t>(op.operands[2])[lane], b = w.in<uint32_t>(op.operands[3])[lane];
    auto compare = reinterpret_cast<FloatComparison>(op.aux);
    uint32_t low = compare(H{uint16_t(a)}, H{uint16_t(b)});
    uint32_t high = compare(H{uint16_t(a >> 16)}, H{uint16_t(b >> 16)});
    return low | high << 1;
}

// operands: d, value of a true half, a, b
template <class H>
Flow set_halves(Warp& w, const Op& op) {
    auto d = w.out<uint32_t>(op.operands[0]);
    auto yes = w.in<uint32_t>(op.operands[1]);
    w.for_each_lane([&](int lane) {
        uint32_t bits = compare_halves<H>(w, op, lane);
        d.set(lane, (bits & 1 ? yes[lane] & 0xffff : 0) | (bits & 2 ? yes[lane] & 0xffff0000 : 0));
    });
    return Flow::next;
}

// operands: p (low half), q (high half), a, b
template <class H>
Flow setp_halves(Warp& w, const Op& op) {
    uint32_t low = 0, high = 0;
    w.for_each_lane([&](int lane) {
        uint32_t bits = compare_halves<H>(w, op, lane);
        low |= (bits & 1) << lane;
        high |= (bits >> 1) << lane;
    });
    w.set_predicate(op.operands[0], low);
    w.set_predicate(op.operands[1], high);
    return Flow::next;
}

void decode_set_halves(Decoder& d, std::string_view name, Type to, Type from) {
    auto comparison = reinterpret_cast<uint64_t>(float_comparison(d, name));
    bool pair = from == Type::f16x2 || from == Type::bf16x2;
    uint32_t yes = 0;
    switch (to) {
        case Type::f16:
        case Type::f16x2:
            yes = 0x3c003c00;
            break;
        case Type::bf16:
        case Type::bf16x2:
            yes = 0x3f803f80;
            break;
        default:
            yes = full_mask;
            break;
    }
    if (!pair && num_bits(to) == 32) d.unsupported("a 32-bit result of comparing halves");
    d.expect_operands(3);
    bool is_bf16 = from == Type::bf16 || from == Type::bf16x2;
    d.emit(is_bf16 ? set_halves<BFloat> : set_halves<Half>,
           {d.destination(0, to), d.constant(yes), d.source(1, from), d.source(2, from)},
           comparison);
}

BoolOp take_bool_op(Decoder& d) {
    if (d.take("and")) return bool_and;
    if (d.take("or")) return bool_or;
    if (d.take("xor")) return bool_xor;
    return bool_none;
}

void decode_setp(Decoder& d) {
    std::string_view name = d.take_any(comparisons);
    BoolOp combine_with = take_bool_op(d);
    bool ftz = d.take("ftz");
    Type type = d.take_type();
    if (type == Type::f16x2 || type == Type::bf16x2) {
        if (combine_with != bool_none) d.unsupported("combining with a predicate");
        auto comparison = reinterpret_cast<uint64_t>(float_comparison(d, name));
        d.expect_operands(3);
        d.emit(type == Type::f16x2 ? setp_halves<Half> : setp_halves<BFloat>,
               {d.destination(0, Type::pred), d.second(0), d.source(1, type), d.source(2, type)},
               comparison);
        return;
    }
    d.expect_operands(3, 4);
    std::vector<Operand> operands{d.destination(0, Type::pred), d.second(0), d.source(1, type),
                                  d.source(2, type)};
    if (combine_with != bool_none) operands.push_back(d.source(3, Type::pred));
    d.emit(comparison(d, name, type, ftz, 0), operands, combine_with);
}

void decode_set(Decoder& d) {
    std::string_view name = d.take_any(comparisons);
    BoolOp combine_with = take_bool_op(d);
    bool ftz = d.take("ftz");
    Type to = d.take_type(), type = d.take_type();
    if (is_half(type)) {
        if (combine_with != bool_none) d.unsupported("combining with a predicate");
        return decode_set_halves(d, name, to, type);
    }
    if (to != Type::u32 && to != Type::s32 && to != Type::f32)
        d.unsupported(std::string("a result of type .") + name_of(to));
    d.expect_operands(3, 4);
    Operand none;
    std::vector<Operand> operands{d.destination(0, to), none, d.source(1, type), d.source(2, type)};
    if (combine_with != bool_none) operands.push_back(d.source(3, Type::pred));
    d.emit(comparison(d, name, type, ftz, to == Type::f32 ? 2 : 1), operands, combine_with);
}

template <class T>
Flow selp(Warp& w, const Op& op) {
    auto d = w.out<T>(op.operands[0]);
    auto a = w.in<T>(op.operands[1]), b = w.in<T>(op.operands[2]);
    uint32_t p = w.predicate(op.operands[3]);
    if (w.exec == full_mask) {
#pragma GCC ivdep
        for (int i = 0; i < warp_size; ++i) d.set(i, (p >> i) & 1 ? a[i] : b[i]);
    } else {
        w.for_each_lane([&](int i) { d.set(i, (p >> i) & 1 ? a[i] : b[i]); });
    }
    return Flow::next;
}

void decode_selp(Decoder& d) {
    Type type = d.take_type();
    d.expect_operands(4);
    d.emit(for_bits(d, type, [](auto t) -> Body { return selp<decltype(t)>; }),
           {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, Type::pred)});
}

// aux bit 0: c is a float, bit 1: flush it
template <class T>
Flow slct(Warp& w, const Op& op) {
    return map3<T, T, T, uint32_t>(w, op, [&](T a, T b, uint32_t c) {
        if (!(op.aux & 1)) return int32_t(c) >= 0 ? a : b;
        float f = std::bit_cast<float>(c);
        if (op.aux & 2) f = flush(f);
        return f >= 0.0f ? a : b;
    });
}

void decode_slct(Decoder& d) {
    bool ftz = d.take("ftz");
    Type type = d.take_type(), condition = d.take_type({Type::s32, Type::f32});
    d.expect_operands(4);
    d.emit(for_bits(d, type, [](auto t) -> Body { return slct<decltype(t)>; }),
           {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, condition)},
           uint64_t(condition == Type::f32) | uint64_t(ftz) << 1);
}

}  // namespace

InstructionTable comparison_instructions() {
    return {
        {"setp", decode_setp, "comparison into predicates"},
        {"set", decode_set, "comparison into a register"},
        {"selp", decode_selp, "selection by predicate"},
        {"slct", decode_slct, "selection by sign"},
    };
}

}  // namespace deep_moe::emulator
