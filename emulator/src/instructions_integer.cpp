// Integer arithmetic. Decoders hand floating types to instructions_float.cpp.
#include "float_types.h"
#include "integer_lanes.h"

namespace deep_moe::emulator {

namespace {

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return T(a + b);
    }
};
struct Sub {
    template <class T>
    T operator()(T a, T b) const {
        return T(a - b);
    }
};
struct MulLo {
    template <class T>
    T operator()(T a, T b) const {
        return T(Wide<T>(a) * b);
    }
};
struct MulHi {
    template <class T>
    T operator()(T a, T b) const {
        return T((Wide<T>(a) * Wide<T>(b)) >> bits_of(sizeof(T)));
    }
};
struct Div {  // by zero: all ones, as the hardware's sequence leaves it
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) return T(-1);
        if constexpr (std::is_signed_v<T>) {
            if (b == -1) return T(0 - a);
        }
        return T(a / b);
    }
};
struct Rem {  // by zero: as Div
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) return T(-1);
        if constexpr (std::is_signed_v<T>) {
            if (b == -1) return T(0);
        }
        return T(a % b);
    }
};
struct Min {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};
struct Max {
    template <class T>
    T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};
struct Neg {
    template <class T>
    T operator()(T a) const {
        return T(0 - a);
    }
};
struct Abs {
    template <class T>
    T operator()(T a) const {
        return T(a < 0 ? 0 - a : a);
    }
};
// Two 16-bit values in one register.
template <class T, class F>
struct Packed16 {
    uint32_t operator()(uint32_t a, uint32_t b) const {
        uint32_t low = uint16_t(F{}(T(a), T(b))), high = uint16_t(F{}(T(a >> 16), T(b >> 16)));
        return high << 16 | low;
    }
};

// ---- add, sub with carry and saturation ----

// aux bit 0: carry in, bit 1: carry out, bit 2: subtract
template <class T>
Flow add_carry(Warp& w, const Op& op) {
    auto d = w.out<T>(op.operands[0]);
    auto a = w.in<T>(op.operands[1]), b = w.in<T>(op.operands[2]);
    bool use = op.aux & 1, set = op.aux & 2, subtract = op.aux & 4;
    w.for_each_lane([&](int i) {
        uint32_t bit = 1u << i;
        T x = a[i], y = subtract ? T(~b[i]) : b[i];
        // The carry flag of a subtraction is a borrow: 1 when one is needed.
        T in = use ? T((w.carry & bit) ? 1 : 0) : T(0);
        if (subtract) in = T(1 - in);
        unsigned __int128 sum = static_cast<unsigned __int128>(x) + y + in;
        bool out = (sum >> bits_of(sizeof(T))) & 1;
        if (subtract) out = !out;
        if (set) w.carry = out ? w.carry | bit : w.carry & ~bit;
        d.set(i, T(sum));
    });
    return Flow::next;
}

struct AddSat {
    int32_t operator()(int32_t a, int32_t b) const {
        int64_t sum = int64_t(a) + b;
        return int32_t(sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum);
    }
};
struct SubSat {
    int32_t operator()(int32_t a, int32_t b) const {
        int64_t sum = int64_t(a) - b;
        return int32_t(sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum);
    }
};

template <class F, class Sat>
void decode_add_sub(Decoder& d, bool subtract, bool carry_in) {
    bool carry_out = d.take("cc");
    bool saturate = d.take("sat");
    Type type = d.take_type();
    if (carry_in || carry_out) {
        Body body = num_bits(type) == 64 ? add_carry<uint64_t> : add_carry<uint32_t>;
        d.expect_operands(3);
        d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type)},
               uint64_t(carry_in) | uint64_t(carry_out) << 1 | uint64_t(subtract) << 2);
        return;
    }
    if (saturate) {
        if (type != Type::s32) d.unsupported(".sat needs .s32");
        emit_binary(d, type, binary<int32_t, Sat>);
    } else if (type == Type::u16x2 || type == Type::s16x2) {
        emit_binary(d, type, binary<uint32_t, Packed16<uint16_t, F>>);
    } else {
        emit_binary(d, type, for_integer(d, type, [](auto t) -> Body {
                        return binary<std::make_unsigned_t<decltype(t)>, F>;
                    }));
    }
}

void decode_add(Decoder& d) {
    if (has_float_type(d)) return decode_float_add(d);
    decode_add_sub<Add, AddSat>(d, false, false);
}
void decode_addc(Decoder& d) {
    decode_add_sub<Add, AddSat>(d, false, true);
}
void decode_sub(Decoder& d) {
    if (has_float_type(d)) return decode_float_sub(d);
    decode_add_sub<Sub, SubSat>(d, true, false);
}
void decode_subc(Decoder& d) {
    decode_add_sub<Sub, SubSat>(d, true, true);
}

// ---- mul, mad ----

template <class T>
Flow mul_wide(Warp& w, const Op& op) {
    return map2<Wide<T>, T, T>(w, op, [](T a, T b) { return Wide<T>(Wide<T>(a) * Wide<T>(b)); });
}
template <class T>
Flow mad_lo(Warp& w, const Op& op) {
    return map3<T, T, T, T>(w, op, [](T a, T b, T c) { return T(MulLo{}(a, b) + c); });
}
template <class T>
Flow mad_hi(Warp& w, const Op& op) {
    return map3<T, T, T, T>(w, op, [](T a, T b, T c) { return T(MulHi{}(a, b) + c); });
}
template <class T>
Flow mad_wide(Warp& w, const Op& op) {
    return map3<Wide<T>, T, T, Wide<T>>(
        w, op, [](T a, T b, Wide<T> c) { return Wide<T>(Wide<T>(a) * Wide<T>(b) + c); });
}
// aux as in add_carry; bit 3: high half
template <class T>
Flow mad_carry(Warp& w, const Op& op) {
    auto d = w.out<T>(op.operands[0]);
    auto a = w.in<T>(op.operands[1]), b = w.in<T>(op.operands[2]), c = w.in<T>(op.operands[3]);
    using U = std::make_unsigned_t<T>;
    w.for_each_lane([&](int i) {
        uint32_t bit = 1u << i;
        U product = U(op.aux & 8 ? MulHi{}(a[i], b[i]) : MulLo{}(a[i], b[i]));
        unsigned __int128 sum = static_cast<unsigned __int128>(product) + U(c[i]);
        if ((op.aux & 1) && (w.carry & bit)) sum += 1;
        if (op.aux & 2) w.carry = (sum >> bits_of(sizeof(T))) & 1 ? w.carry | bit : w.carry & ~bit;
        d.set(i, T(U(sum)));
    });
    return Flow::next;
}

Type widened(Decoder& d, Type type) {
    switch (type) {
        case Type::u16:
            return Type::u32;
        case Type::s16:
            return Type::s32;
        case Type::u32:
            return Type::u64;
        case Type::s32:
            return Type::s64;
        default:
            d.unsupported(".wide needs a 16-bit or 32-bit type");
    }
}

template <class F>
Body for_narrow(Decoder& d, Type type, F f) {
    switch (type) {
        case Type::u16:
            return f(uint16_t{});
        case Type::s16:
            return f(int16_t{});
        case Type::u32:
            return f(uint32_t{});
        case Type::s32:
            return f(int32_t{});
        default:
            d.unsupported(".wide needs a 16-bit or 32-bit type");
    }
}

void decode_mul(Decoder& d) {
    if (has_float_type(d)) return decode_float_mul(d);
    std::string_view half = d.take_any({"lo", "hi", "wide"});
    Type type = d.take_type();
    if (half == "wide") {
        d.expect_operands(3);
        d.emit(for_narrow(d, type, [](auto t) -> Body { return mul_wide<decltype(t)>; }),
               {d.destination(0, widened(d, type)), d.source(1, type), d.source(2, type)});
    } else if (half == "hi") {
        emit_binary(d, type, for_integer(d, type, [](auto t) -> Body {
                        return binary<decltype(t), MulHi>;
                    }));
    } else {
        emit_binary(d, type, for_integer(d, type, [](auto t) -> Body {
                        return binary<decltype(t), MulLo>;
                    }));
    }
}

void decode_mad_with(Decoder& d, bool carry_in) {
    std::string_view half = d.take_any({"lo", "hi", "wide"});
    bool carry_out = d.take("cc");
    Type type = d.take_type();
    d.expect_operands(4);
    Type result = half == "wide" ? widened(d, type) : type;
    Body body;
    uint64_t aux = 0;
    if (carry_in || carry_out) {
        body = for_integer(d, type, [](auto t) -> Body { return mad_carry<decltype(t)>; });
        aux = uint64_t(carry_in) | uint64_t(carry_out) << 1 | uint64_t(half == "hi") << 3;
    } else if (half == "wide") {
        body = for_narrow(d, type, [](auto t) -> Body { return mad_wide<decltype(t)>; });
    } else if (half == "hi") {
        body = for_integer(d, type, [](auto t) -> Body { return mad_hi<decltype(t)>; });
    } else {
        body = for_integer(d, type, [](auto t) -> Body { return mad_lo<decltype(t)>; });
    }
    d.emit(body,
           {d.destination(0, result), d.source(1, type), d.source(2, type), d.source(3, result)},
           aux);
}

void decode_mad(Decoder& d) {
    if (has_float_type(d)) return decode_float_fma(d);
    decode_mad_with(d, false);
}
void decode_madc(Decoder& d) {
    decode_mad_with(d, true);
}

template <bool is_mad>
void decode_mul24(Decoder& d) {
    bool high = d.take("hi");
    d.take("lo");
    Type type = d.take_type({Type::u32, Type::s32});
    static constexpr auto product = [](uint32_t a, uint32_t b, uint64_t aux) {
        int64_t x = aux & 2 ? int64_t(int32_t(a << 8) >> 8) : int64_t(a & 0xffffff);
        int64_t y = aux & 2 ? int64_t(int32_t(b << 8) >> 8) : int64_t(b & 0xffffff);
        return uint32_t((x * y) >> (aux & 1 ? 16 : 0));
    };
    uint64_t aux = uint64_t(high) | uint64_t(type == Type::s32) << 1;
    if constexpr (is_mad) {
        d.expect_operands(4);
        d.emit(
            [](Warp& w, const Op& op) {
                return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
                    w, op,
                    [&](uint32_t a, uint32_t b, uint32_t c) { return product(a, b, op.aux) + c; });
            },
            {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, type)}, aux);
    } else {
        d.expect_operands(3);
        d.emit(
            [](Warp& w, const Op& op) {
                return map2<uint32_t, uint32_t, uint32_t>(
                    w, op, [&](uint32_t a, uint32_t b) { return product(a, b, op.aux); });
            },
            {d.destination(0, type), d.source(1, type), d.source(2, type)}, aux);
    }
}

void decode_div(Decoder& d) {
    if (has_float_type(d)) return decode_float_div(d);
    decode_binary<Div>(d);
}

template <class F>
void decode_min_max(Decoder& d) {
    bool relu = d.take("relu");
    Type type = d.take_type();
    if (relu) d.unsupported(".relu of integers is not supported");
    if (type == Type::u16x2)
        emit_binary(d, type, binary<uint32_t, Packed16<uint16_t, F>>);
    else if (type == Type::s16x2)
        emit_binary(d, type, binary<uint32_t, Packed16<int16_t, F>>);
    else
        emit_binary(d, type,
                    for_integer(d, type, [](auto t) -> Body { return binary<decltype(t), F>; }));
}

void decode_min(Decoder& d) {
    if (has_float_type(d)) return decode_float_min(d);
    decode_min_max<Min>(d);
}
void decode_max(Decoder& d) {
    if (has_float_type(d)) return decode_float_max(d);
    decode_min_max<Max>(d);
}
void decode_abs(Decoder& d) {
    if (has_float_type(d)) return decode_float_abs(d);
    decode_unary<Abs>(d);
}
void decode_neg(Decoder& d) {
    if (has_float_type(d)) return decode_float_neg(d);
    decode_unary<Neg>(d);
}

template <class T>
Flow sad(Warp& w, const Op& op) {
    using U = std::make_unsigned_t<T>;
    return map3<T, T, T, T>(
        w, op, [](T a, T b, T c) { return T(U(c) + (a < b ? U(b) - U(a) : U(a) - U(b))); });
}

void decode_sad(Decoder& d) {
    Type type = d.take_type();
    d.expect_operands(4);
    d.emit(for_integer(d, type, [](auto t) -> Body { return sad<decltype(t)>; }),
           {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, type)});
}

// aux bit 0: a signed, bit 1: b signed; four 8-bit products
Flow dp4a(Warp& w, const Op& op) {
    return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
        w, op, [&](uint32_t a, uint32_t b, uint32_t c) {
            for (int k = 0; k < 32; k += 8) {
                int32_t x = op.aux & 1 ? int8_t(a >> k) : uint8_t(a >> k);
                int32_t y = op.aux & 2 ? int8_t(b >> k) : uint8_t(b >> k);
                c += uint32_t(x * y);
            }
            return c;
        });
}
// two 16-bit values of a with two bytes of b; aux bit 2: the high two bytes
Flow dp2a(Warp& w, const Op& op) {
    return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
        w, op, [&](uint32_t a, uint32_t b, uint32_t c) {
            for (int k = 0; k < 2; ++k) {
                int32_t x = op.aux & 1 ? int16_t(a >> 16 * k) : uint16_t(a >> 16 * k);
                uint32_t byte = b >> (8 * k + (op.aux & 4 ? 16 : 0));
                int32_t y = op.aux & 2 ? int8_t(byte) : uint8_t(byte);
                c += uint32_t(x * y);
            }
            return c;
        });
}

template <bool two>
void decode_dot(Decoder& d) {
    bool high = two && d.take("hi");
    if (two) d.take("lo");
    Type a = d.take_type({Type::u32, Type::s32}), b = d.take_type({Type::u32, Type::s32});
    d.expect_operands(4);
    d.emit(two ? dp2a : dp4a, {d.destination(0, b), d.source(1, a), d.source(2, b), d.source(3, b)},
           uint64_t(a == Type::s32) | uint64_t(b == Type::s32) << 1 | uint64_t(high) << 2);
}

}  // namespace

InstructionTable integer_instructions() {
    return {
        {"add", decode_add, "sum; .sat, .cc; integers, floats, packed halves, f32x2"},
        {"addc", decode_addc, "sum with carry in"},
        {"sub", decode_sub, "difference"},
        {"subc", decode_subc, "difference with borrow in"},
        {"mul", decode_mul, "product; .lo, .hi, .wide; floats"},
        {"mul24", decode_mul24<false>, "24-bit product"},
        {"mad", decode_mad, "product plus addend; .lo, .hi, .wide, .cc"},
        {"mad24", decode_mul24<true>, "24-bit product plus addend"},
        {"madc", decode_madc, "product plus addend plus carry"},
        {"div", decode_div, "quotient; .approx, .full and IEEE for floats"},
        {"rem", decode_binary<Rem>, "remainder"},
        {"min", decode_min, "smaller value"},
        {"max", decode_max, "larger value"},
        {"abs", decode_abs, "absolute value"},
        {"neg", decode_neg, "negation"},
        {"sad", decode_sad, "sum of absolute differences"},
        {"dp4a", decode_dot<false>, "dot product of four bytes"},
        {"dp2a", decode_dot<true>, "dot product of two 16-bit values and two bytes"},
    };
}

}  // namespace deep_moe::emulator
