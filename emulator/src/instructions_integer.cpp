// Integer arithmetic, logic, shifts, comparison and selection.
#include "float_types.h"
#include "lanes.h"

namespace deep_moe::emulator {

namespace {

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

constexpr int bits_of(size_t bytes) {
    return int(bytes) * 8;
}

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
struct And {
    template <class T>
    T operator()(T a, T b) const {
        return T(a & b);
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b) const {
        return T(a | b);
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b) const {
        return T(a ^ b);
    }
};
struct Not {
    template <class T>
    T operator()(T a) const {
        return T(~a);
    }
};
struct CNot {
    template <class T>
    T operator()(T a) const {
        return T(a == 0);
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
struct Shl {
    template <class T>
    T operator()(T a, uint32_t n) const {
        return n >= unsigned(bits_of(sizeof(T))) ? T(0) : T(a << n);
    }
};
struct Shr {
    template <class T>
    T operator()(T a, uint32_t n) const {
        if (n >= unsigned(bits_of(sizeof(T)))) return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
        return T(a >> n);
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

template <class T, class F>
Flow unary(Warp& w, const Op& op) {
    return map1<T, T>(w, op, F{});
}
template <class T, class F>
Flow binary(Warp& w, const Op& op) {
    return map2<T, T, T>(w, op, F{});
}

template <class F>
void emit_unary(Decoder& d, Type type, Body body) {
    d.expect_operands(2);
    d.emit(body, {d.destination(0, type), d.source(1, type)});
}

void emit_binary(Decoder& d, Type type, Body body) {
    d.expect_operands(3);
    d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type)});
}

template <class F>
void decode_binary(Decoder& d) {
    Type type = d.take_type();
    emit_binary(d, type,
                for_integer(d, type, [](auto t) -> Body { return binary<decltype(t), F>; }));
}

template <class F>
void decode_unary(Decoder& d) {
    Type type = d.take_type();
    emit_unary<F>(d, type,
                  for_integer(d, type, [](auto t) -> Body { return unary<decltype(t), F>; }));
}

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

// ---- logic ----

enum Logic : uint64_t { logic_and, logic_or, logic_xor, logic_not };

Flow predicate_logic(Warp& w, const Op& op) {
    uint32_t a = w.predicate(op.operands[1]);
    uint32_t b = op.num_operands > 2 ? w.predicate(op.operands[2]) : 0;
    uint32_t result = 0;
    switch (op.aux) {
        case logic_and:
            result = a & b;
            break;
        case logic_or:
            result = a | b;
            break;
        case logic_xor:
            result = a ^ b;
            break;
        case logic_not:
            result = ~a;
            break;
    }
    w.set_predicate(op.operands[0], result);
    return Flow::next;
}

template <class F, Logic logic>
void decode_logic(Decoder& d) {
    Type type = d.take_type();
    if constexpr (logic == logic_not) {
        d.expect_operands(2);
        if (type == Type::pred)
            d.emit(predicate_logic, {d.destination(0, type), d.source(1, type)}, logic);
        else
            d.emit(for_bits(d, type, [](auto t) -> Body { return unary<decltype(t), F>; }),
                   {d.destination(0, type), d.source(1, type)});
    } else {
        d.expect_operands(3);
        Body body = predicate_logic;
        if (type != Type::pred)
            body = for_bits(d, type, [](auto t) -> Body { return binary<decltype(t), F>; });
        d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type)}, logic);
    }
}

void decode_cnot(Decoder& d) {
    Type type = d.take_type();
    emit_unary<CNot>(d, type,
                     for_bits(d, type, [](auto t) -> Body { return unary<decltype(t), CNot>; }));
}

template <class T, class F>
Flow shift(Warp& w, const Op& op) {
    return map2<T, T, uint32_t>(w, op, F{});
}

template <class F>
void decode_shift(Decoder& d) {
    Type type = d.take_type();
    d.expect_operands(3);
    d.emit(for_integer(d, type, [](auto t) -> Body { return shift<decltype(t), F>; }),
           {d.destination(0, type), d.source(1, type), d.source(2, Type::u32)});
}

// aux bit 0: right, bit 1: clamp
Flow funnel_shift(Warp& w, const Op& op) {
    return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
        w, op, [&](uint32_t a, uint32_t b, uint32_t c) {
            uint32_t n = op.aux & 2 ? (c < 32 ? c : 32) : c & 31;
            uint64_t both = uint64_t(b) << 32 | a;
            return uint32_t(op.aux & 1 ? both >> n : (both << n) >> 32);
        });
}

void decode_funnel_shift(Decoder& d) {
    bool right = d.take_any({"l", "r"}) == "r";
    bool clamp = d.take_any({"wrap", "clamp"}) == "clamp";
    Type type = d.take_type({Type::b32});
    d.expect_operands(4);
    d.emit(funnel_shift,
           {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, Type::u32)},
           uint64_t(right) | uint64_t(clamp) << 1);
}

Flow lop3(Warp& w, const Op& op) {
    uint32_t table = uint32_t(op.aux);
    uint32_t minterm[8];
    for (int k = 0; k < 8; ++k) minterm[k] = (table >> k) & 1 ? full_mask : 0;
    return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
        w, op, [&](uint32_t a, uint32_t b, uint32_t c) {
            return (minterm[0] & ~a & ~b & ~c) | (minterm[1] & ~a & ~b & c) |
                   (minterm[2] & ~a & b & ~c) | (minterm[3] & ~a & b & c) |
                   (minterm[4] & a & ~b & ~c) | (minterm[5] & a & ~b & c) |
                   (minterm[6] & a & b & ~c) | (minterm[7] & a & b & c);
        });
}

void decode_lop3(Decoder& d) {
    if (d.has("and") || d.has("or")) d.unsupported("the predicate form of lop3 is not supported");
    Type type = d.take_type({Type::b32});
    d.expect_operands(5);
    d.emit(lop3, {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, type)},
           d.immediate(4));
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k) {
        uint32_t s = selector >> (4 * k);
        uint32_t byte = uint32_t(bytes >> (8 * (s & 7))) & 0xff;
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * k);
    }
    return result;
}

Flow prmt(Warp& w, const Op& op) {
    return map3<uint32_t, uint32_t, uint32_t, uint32_t>(
        w, op, [&](uint32_t a, uint32_t b, uint32_t c) {
            static constexpr uint16_t modes[7][4] = {
                {0, 0, 0, 0},                      // plain
                {0x3210, 0x4321, 0x5432, 0x6543},  // f4e
                {0x5670, 0x6701, 0x7012, 0x0123},  // b4e
                {0x0000, 0x1111, 0x2222, 0x3333},  // rc8
                {0x3210, 0x3211, 0x3222, 0x3333},  // ecl
                {0x0000, 0x1110, 0x2210, 0x3210},  // ecr
                {0x1010, 0x3232, 0x1010, 0x3232},  // rc16
            };
            return permute(a, b, op.aux ? modes[op.aux][c & 3] : c);
        });
}

void decode_prmt(Decoder& d) {
    Type type = d.take_type({Type::b32});
    std::string_view mode = d.take_any({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
    uint64_t aux = 0;
    for (std::string_view name : {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) {
        if (name == mode) break;
        ++aux;
    }
    d.expect_operands(4);
    d.emit(prmt, {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, type)},
           aux);
}

// ---- bit fields ----

template <class T>
Flow popc(Warp& w, const Op& op) {
    return map1<uint32_t, T>(w, op, [](T a) { return uint32_t(std::popcount(a)); });
}
template <class T>
Flow clz(Warp& w, const Op& op) {
    return map1<uint32_t, T>(w, op, [](T a) { return uint32_t(std::countl_zero(a)); });
}
template <class T>
Flow brev(Warp& w, const Op& op) {
    return map1<T, T>(w, op, [](T a) {
        T r = 0;
        for (int i = 0; i < bits_of(sizeof(T)); ++i)
            r |= T((a >> i) & 1) << (bits_of(sizeof(T)) - 1 - i);
        return r;
    });
}
// aux 1: shift amount instead of position
template <class T>
Flow bfind(Warp& w, const Op& op) {
    return map1<uint32_t, T>(w, op, [&](T a) {
        using U = std::make_unsigned_t<T>;
        U u = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
        if (u == 0) return full_mask;
        uint32_t zeros = uint32_t(std::countl_zero(u));
        return op.aux ? zeros : uint32_t(bits_of(sizeof(T))) - 1 - zeros;
    });
}
// Positions and lengths of bit fields: the instruction for 32 bits looks at the low byte, the
// sequence for 64 bits at the whole register.
template <class T>
int field_amount(uint32_t n) {
    return int(sizeof(T) == 8 ? (n < 255 ? n : 255) : n & 0xff);
}
template <class T>
Flow bfe(Warp& w, const Op& op) {
    return map3<T, T, uint32_t, uint32_t>(w, op, [](T a, uint32_t b, uint32_t c) {
        constexpr int width = bits_of(sizeof(T));
        using U = std::make_unsigned_t<T>;
        int position = field_amount<T>(b), length = field_amount<T>(c);
        bool sign = false;
        if (std::is_signed_v<T> && length) {
            int at = position + length - 1;
            sign = (U(a) >> (at < width ? at : width - 1)) & 1;
        }
        U result = position < width ? U(a) >> position : U(0);
        int known = position < width ? width - position : 0;
        if (known > length) known = length;
        U mask = known >= width ? ~U(0) : (U(1) << known) - 1;
        result &= mask;
        if (sign) result |= ~mask;
        return T(result);
    });
}
template <class T>
Flow bfi(Warp& w, const Op& op) {
    auto d = w.out<T>(op.operands[0]);
    auto a = w.in<T>(op.operands[1]), b = w.in<T>(op.operands[2]);
    auto c = w.in<uint32_t>(op.operands[3]), e = w.in<uint32_t>(op.operands[4]);
    w.for_each_lane([&](int i) {
        constexpr int width = bits_of(sizeof(T));
        int position = field_amount<T>(c[i]), length = field_amount<T>(e[i]);
        T mask = length >= width ? ~T(0) : (T(1) << length) - 1;
        T placed = position < width ? mask << position : T(0);
        d.set(i, position < width ? T((b[i] & ~placed) | ((a[i] << position) & placed)) : b[i]);
    });
    return Flow::next;
}
Flow fns(Warp& w, const Op& op) {
    return map3<uint32_t, uint32_t, uint32_t, int32_t>(
        w, op, [](uint32_t mask, uint32_t base, int32_t offset) {
            if (offset == 0) return (mask >> (base & 31)) & 1 ? base : full_mask;
            int step = offset > 0 ? 1 : -1, left = std::abs(offset);
            for (int i = int(base & 31); i >= 0 && i < 32; i += step)
                if ((mask >> i) & 1 && --left == 0) return uint32_t(i);
            return full_mask;
        });
}
// aux bit 0: clamp
Flow bmsk(Warp& w, const Op& op) {
    return map2<uint32_t, uint32_t, uint32_t>(w, op, [&](uint32_t a, uint32_t b) {
        if (!(op.aux & 1)) a &= 31, b &= 31;
        if (a >= 32) return 0u;
        uint64_t mask = b >= 32 ? 0xffffffffull : (1ull << b) - 1;
        return uint32_t(mask << a);
    });
}
// aux bit 0: clamp, bit 1: signed
Flow szext(Warp& w, const Op& op) {
    return map2<uint32_t, uint32_t, uint32_t>(w, op, [&](uint32_t a, uint32_t n) {
        if (!(op.aux & 1)) n &= 31;
        if (n >= 32) return a;
        if (n == 0) return 0u;
        uint32_t mask = (1u << n) - 1;
        bool sign = op.aux & 2 && (a >> (n - 1)) & 1;
        return sign ? a | ~mask : a & mask;
    });
}

void decode_popc(Decoder& d) {
    Type type = d.take_type({Type::b32, Type::b64});
    d.expect_operands(2);
    d.emit(type == Type::b64 ? popc<uint64_t> : popc<uint32_t>,
           {d.destination(0, Type::u32), d.source(1, type)});
}
void decode_clz(Decoder& d) {
    Type type = d.take_type({Type::b32, Type::b64});
    d.expect_operands(2);
    d.emit(type == Type::b64 ? clz<uint64_t> : clz<uint32_t>,
           {d.destination(0, Type::u32), d.source(1, type)});
}
void decode_brev(Decoder& d) {
    Type type = d.take_type({Type::b32, Type::b64});
    d.expect_operands(2);
    d.emit(type == Type::b64 ? brev<uint64_t> : brev<uint32_t>,
           {d.destination(0, type), d.source(1, type)});
}
void decode_bfind(Decoder& d) {
    bool shift_amount = d.take("shiftamt");
    Type type = d.take_type();
    d.expect_operands(2);
    d.emit(for_integer(d, type, [](auto t) -> Body { return bfind<decltype(t)>; }),
           {d.destination(0, Type::u32), d.source(1, type)}, shift_amount);
}
void decode_bfe(Decoder& d) {
    Type type = d.take_type();
    d.expect_operands(4);
    d.emit(for_integer(d, type, [](auto t) -> Body { return bfe<decltype(t)>; }),
           {d.destination(0, type), d.source(1, type), d.source(2, Type::u32),
            d.source(3, Type::u32)});
}
void decode_bfi(Decoder& d) {
    Type type = d.take_type({Type::b32, Type::b64});
    d.expect_operands(5);
    d.emit(type == Type::b64 ? bfi<uint64_t> : bfi<uint32_t>,
           {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, Type::u32),
            d.source(4, Type::u32)});
}
void decode_fns(Decoder& d) {
    Type type = d.take_type({Type::b32});
    d.expect_operands(4);
    d.emit(fns,
           {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, Type::s32)});
}
void decode_bmsk(Decoder& d) {
    bool clamp = d.take_any({"clamp", "wrap"}) == "clamp";
    Type type = d.take_type({Type::b32});
    d.expect_operands(3);
    d.emit(bmsk, {d.destination(0, type), d.source(1, type), d.source(2, type)}, clamp);
}
void decode_szext(Decoder& d) {
    bool clamp = d.take_any({"clamp", "wrap"}) == "clamp";
    Type type = d.take_type({Type::u32, Type::s32});
    d.expect_operands(3);
    d.emit(szext, {d.destination(0, type), d.source(1, type), d.source(2, Type::u32)},
           uint64_t(clamp) | uint64_t(type == Type::s32) << 1);
}

// ---- comparison ----

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
        {"and", decode_logic<And, logic_and>, "bitwise and; predicates"},
        {"or", decode_logic<Or, logic_or>, "bitwise or; predicates"},
        {"xor", decode_logic<Xor, logic_xor>, "bitwise exclusive or; predicates"},
        {"not", decode_logic<Not, logic_not>, "bitwise complement; predicates"},
        {"cnot", decode_cnot, "1 where zero"},
        {"shl", decode_shift<Shl>, "shift left"},
        {"shr", decode_shift<Shr>, "shift right"},
        {"shf", decode_funnel_shift, "funnel shift"},
        {"lop3", decode_lop3, "any logic function of three inputs"},
        {"prmt", decode_prmt, "byte permutation"},
        {"popc", decode_popc, "number of set bits"},
        {"clz", decode_clz, "leading zeros"},
        {"brev", decode_brev, "bit reversal"},
        {"bfind", decode_bfind, "most significant bit"},
        {"bfe", decode_bfe, "bit field extract"},
        {"bfi", decode_bfi, "bit field insert"},
        {"fns", decode_fns, "n-th set bit"},
        {"bmsk", decode_bmsk, "bit field mask"},
        {"szext", decode_szext, "sign or zero extension from a bit position"},
        {"setp", decode_setp, "comparison into predicates"},
        {"set", decode_set, "comparison into a register"},
        {"selp", decode_selp, "selection by predicate"},
        {"slct", decode_slct, "selection by sign"},
    };
}

}  // namespace deep_moe::emulator
