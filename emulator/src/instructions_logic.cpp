// Bitwise logic, shifts and bit fields.
#include "integer_lanes.h"

namespace deep_moe::emulator {

namespace {

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

}  // namespace

InstructionTable logic_instructions() {
    return {
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
    };
}

}  // namespace deep_moe::emulator
