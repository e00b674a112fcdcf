// Floating-point arithmetic. Approximate functions are computed as exactly as the host does; the
// hardware's are a few units in the last place away.
#include <cfenv>

#include "float_types.h"
#include "lanes.h"

#if defined(__x86_64__)
// fma() is a library call without this.
#define WITH_FMA __attribute__((target_clones("arch=haswell", "default")))
#else
#define WITH_FMA
#endif

namespace deep_moe::emulator {

namespace {

// aux
constexpr uint64_t flush_bit = 1, saturate_bit = 2, nan_bit = 4, xorsign_bit = 8, relu_bit = 16;
constexpr int rounding_shift = 8;
enum Direction : uint64_t { nearest = 0, toward_zero = 1, downward = 2, upward = 3 };

// Sets the host's rounding mode for as long as it lives.
class HostRounding {
 public:
    explicit HostRounding(uint64_t direction) {
        static constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
        std::fesetround(modes[direction]);
    }
    ~HostRounding() { std::fesetround(FE_TONEAREST); }
};

float saturated(float v) {
    return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f;
}
double saturated(double v) {
    return v > 0.0 ? (v < 1.0 ? v : 1.0) : 0.0;
}

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Sub {
    template <class T>
    T operator()(T a, T b) const {
        return a - b;
    }
};
struct Mul {
    template <class T>
    T operator()(T a, T b) const {
        return a * b;
    }
};
struct Div {
    template <class T>
    T operator()(T a, T b) const {
        return a / b;
    }
};

template <class T, class F>
Flow plain2(Warp& w, const Op& op) {
    return map2<T, T, T>(w, op, F{});
}

template <class T>
T prepared(T v, uint64_t aux) {
    if constexpr (std::is_same_v<T, float>) return aux & flush_bit ? flush(v) : v;
    return v;
}
template <class T>
T finished(T v, uint64_t aux) {
    v = prepared(v, aux);
    return aux & saturate_bit ? saturated(v) : v;
}

// Any rounding, flushing, saturation.
template <class T, class F>
Flow rounded2(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map2<T, T, T>(w, op, [&](T a, T b) {
        volatile T x = prepared(a, op.aux), y = prepared(b, op.aux);
        volatile T r = F{}(T(x), T(y));
        return finished(T(r), op.aux);
    });
}

template <class T>
WITH_FMA Flow plain_fma(Warp& w, const Op& op) {
    return map3<T, T, T, T>(w, op, [](T a, T b, T c) { return std::fma(a, b, c); });
}
template <class T>
Flow rounded_fma(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map3<T, T, T, T>(w, op, [&](T a, T b, T c) {
        volatile T x = prepared(a, op.aux), y = prepared(b, op.aux), z = prepared(c, op.aux);
        volatile T r = std::fma(T(x), T(y), T(z));
        return finished(T(r), op.aux);
    });
}

// ---- halves: computed wider, rounded once

template <class H>
H half_result(float v, uint64_t aux) {
    if (aux & saturate_bit) v = saturated(v);
    if (aux & relu_bit) v = std::isnan(v) ? v : v > 0 ? v : 0;
    return H::from(v);
}
template <class H>
H half_result_double(double v, uint64_t aux) {
    if (aux & saturate_bit) v = saturated(v);
    if (aux & relu_bit) v = std::isnan(v) ? v : v > 0 ? v : 0;
    uint16_t bits = uint16_t(encode(std::is_same_v<H, Half> ? f16_format : bf16_format, v,
                                    Rounding::nearest_even, Overflow::to_infinity));
    return {bits};
}
template <class H>
struct Pair {
    H low, high;
};

template <class H, class F>
Flow half2(Warp& w, const Op& op) {
    return map2<H, H, H>(w, op,
                         [&](H a, H b) { return half_result<H>(F{}(float(a), float(b)), op.aux); });
}
template <class H, class F>
Flow pair2(Warp& w, const Op& op) {
    using P = Pair<H>;
    return map2<P, P, P>(w, op, [&](P a, P b) {
        return P{half_result<H>(F{}(float(a.low), float(b.low)), op.aux),
                 half_result<H>(F{}(float(a.high), float(b.high)), op.aux)};
    });
}
template <class H>
H half_fma(H a, H b, H c, uint64_t aux) {
    return half_result_double<H>(double(float(a)) * double(float(b)) + double(float(c)), aux);
}
template <class H>
Flow half3(Warp& w, const Op& op) {
    return map3<H, H, H, H>(w, op, [&](H a, H b, H c) { return half_fma(a, b, c, op.aux); });
}
template <class H>
Flow pair3(Warp& w, const Op& op) {
    using P = Pair<H>;
    return map3<P, P, P, P>(w, op, [&](P a, P b, P c) {
        return P{half_fma(a.low, b.low, c.low, op.aux), half_fma(a.high, b.high, c.high, op.aux)};
    });
}

// ---- f32x2

struct alignas(8) Two {
    float low, high;
};

template <class F>
Flow two2(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    using P = Two;
    return map2<P, P, P>(w, op, [&](P a, P b) {
        auto one = [&](float x, float y) {
            volatile float p = prepared(x, op.aux), q = prepared(y, op.aux);
            volatile float r = F{}(float(p), float(q));
            return prepared(float(r), op.aux);
        };
        return P{one(a.low, b.low), one(a.high, b.high)};
    });
}
Flow two_fma(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    using P = Two;
    return map3<P, P, P, P>(w, op, [&](P a, P b, P c) {
        auto one = [&](float x, float y, float z) {
            volatile float p = prepared(x, op.aux), q = prepared(y, op.aux),
                           s = prepared(z, op.aux);
            volatile float r = std::fma(float(p), float(q), float(s));
            return prepared(float(r), op.aux);
        };
        return P{one(a.low, b.low, c.low), one(a.high, b.high, c.high)};
    });
}

// ---- minimum, maximum

template <bool is_max>
struct MinMax {
    uint64_t aux;
    template <class T>
    T operator()(T a, T b) const {
        T canonical = T(std::bit_cast<float>(0x7fffffffu));
        if (std::isnan(a) || std::isnan(b)) {
            if ((aux & nan_bit) || (std::isnan(a) && std::isnan(b))) return canonical;
            return std::isnan(a) ? b : a;
        }
        T x = a, y = b;
        if (aux & xorsign_bit) x = std::fabs(x), y = std::fabs(y);
        T r;
        if (x == y)
            r = std::signbit(x) == is_max ? y : x;  // -0 < +0
        else
            r = (x < y) != is_max ? x : y;
        if (aux & xorsign_bit)
            r = std::signbit(a) != std::signbit(b) ? -std::fabs(r) : std::fabs(r);
        return r;
    }
};

template <class T, bool is_max>
Flow min_max(Warp& w, const Op& op) {
    return map2<T, T, T>(w, op, [&](T a, T b) {
        return MinMax<is_max>{op.aux}(prepared(a, op.aux), prepared(b, op.aux));
    });
}
template <class T, bool is_max>
Flow min_max3(Warp& w, const Op& op) {
    return map3<T, T, T, T>(w, op, [&](T a, T b, T c) {
        MinMax<is_max> f{op.aux};
        return f(f(prepared(a, op.aux), prepared(b, op.aux)), prepared(c, op.aux));
    });
}
template <class H>
H half_of(float v, uint64_t) {
    return std::isnan(v) ? H{0x7fff} : H::from(v);
}
template <class H, bool is_max>
Flow half_min_max(Warp& w, const Op& op) {
    return map2<H, H, H>(w, op, [&](H a, H b) {
        return half_of<H>(MinMax<is_max>{op.aux}(float(a), float(b)), op.aux);
    });
}
template <class H, bool is_max>
Flow pair_min_max(Warp& w, const Op& op) {
    using P = Pair<H>;
    return map2<P, P, P>(w, op, [&](P a, P b) {
        MinMax<is_max> f{op.aux};
        return P{half_of<H>(f(float(a.low), float(b.low)), op.aux),
                 half_of<H>(f(float(a.high), float(b.high)), op.aux)};
    });
}

// ---- sign operations on bits

template <class T, uint64_t keep, uint64_t flip>
Flow sign_bits(Warp& w, const Op& op) {
    return map1<T, T>(w, op, [](T a) { return T((a & T(keep)) ^ T(flip)); });
}
// abs and neg with .ftz
template <bool absolute>
Flow sign_flushed(Warp& w, const Op& op) {
    return map1<float, float>(w, op, [](float a) {
        a = flush(a);
        return absolute ? std::fabs(a) : -a;
    });
}

// ---- functions of one value

float approximate(uint64_t which, float a) {
    switch (which) {
        case 0:
            return 1.0f / a;
        case 1:
            return std::sqrt(a);
        case 2:
            return float(1.0 / std::sqrt(double(a)));
        case 3:
            return float(std::exp2(double(a)));
        case 4:
            return float(std::log2(double(a)));
        case 5:
            return float(std::sin(double(a)));
        case 6:
            return float(std::cos(double(a)));
        default:
            return float(std::tanh(double(a)));
    }
}
constexpr std::string_view function_names[] = {"rcp", "sqrt", "rsqrt", "ex2",
                                               "lg2", "sin",  "cos",   "tanh"};

constexpr int function_shift = 16;

Flow function32(Warp& w, const Op& op) {
    uint64_t which = op.aux >> function_shift, direction = (op.aux >> rounding_shift) & 3;
    if (direction) {
        HostRounding mode(direction);
        return map1<float, float>(w, op, [&](float a) {
            volatile float x = prepared(a, op.aux);
            volatile float r = which == 0 ? 1.0f / x : std::sqrt(float(x));
            return prepared(float(r), op.aux);
        });
    }
    return map1<float, float>(
        w, op, [&](float a) { return prepared(approximate(which, prepared(a, op.aux)), op.aux); });
}
Flow function64(Warp& w, const Op& op) {
    uint64_t which = op.aux >> function_shift;
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map1<double, double>(w, op, [&](double a) {
        volatile double x = a;
        volatile double r = which == 0   ? 1.0 / x
                            : which == 1 ? std::sqrt(double(x))
                                         : 1.0 / std::sqrt(double(x));
        return double(r);
    });
}
template <class H>
Flow function_half(Warp& w, const Op& op) {
    return map1<H, H>(
        w, op, [&](H a) { return H::from(approximate(op.aux >> function_shift, float(a))); });
}
template <class H>
Flow function_pair(Warp& w, const Op& op) {
    using P = Pair<H>;
    return map1<P, P>(w, op, [&](P a) {
        uint64_t which = op.aux >> function_shift;
        return P{H::from(approximate(which, float(a.low))),
                 H::from(approximate(which, float(a.high)))};
    });
}

// ---- decoding

uint64_t take_rounding(Decoder& d) {
    std::string_view name = d.take_any({"rn", "rz", "rm", "rp"});
    Direction direction = name == "rz"   ? toward_zero
                          : name == "rm" ? downward
                          : name == "rp" ? upward
                                         : nearest;
    return uint64_t(direction) << rounding_shift;
}

uint64_t take_flags(Decoder& d) {
    uint64_t aux = take_rounding(d);
    if (d.take("ftz")) aux |= flush_bit;
    if (d.take("sat")) aux |= saturate_bit;
    if (d.take("relu")) aux |= relu_bit;
    if (d.take("NaN")) aux |= nan_bit;
    if (d.take("xorsign")) {
        if (!d.take("abs")) d.invalid(".xorsign needs .abs");
        aux |= xorsign_bit;
    }
    return aux;
}

[[noreturn]] void bad_type(Decoder& d, Type type) {
    d.unsupported(std::string("type .") + name_of(type) + " is not supported here");
}

template <class F>
void decode_arithmetic(Decoder& d) {
    uint64_t aux = take_flags(d);
    Type type = d.take_type();
    Type second = type;
    d.peek_type(second);
    if (second != type) d.unsupported("mixed precision");
    Body body = nullptr;
    switch (type) {
        case Type::f32:
            body = aux ? rounded2<float, F> : plain2<float, F>;
            break;
        case Type::f64:
            body = aux ? rounded2<double, F> : plain2<double, F>;
            break;
        case Type::f16:
            body = half2<Half, F>;
            break;
        case Type::bf16:
            body = half2<BFloat, F>;
            break;
        case Type::f16x2:
            body = pair2<Half, F>;
            break;
        case Type::bf16x2:
            body = pair2<BFloat, F>;
            break;
        case Type::f32x2:
            body = two2<F>;
            break;
        default:
            bad_type(d, type);
    }
    d.expect_operands(3);
    d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type)}, aux);
}

template <bool is_max>
void decode_min_max(Decoder& d) {
    uint64_t aux = take_flags(d);
    Type type = d.take_type();
    Body body = nullptr;
    bool three = d.num_operands() == 4;
    switch (type) {
        case Type::f32:
            body = three ? min_max3<float, is_max> : min_max<float, is_max>;
            break;
        case Type::f64:
            body = min_max<double, is_max>;
            break;
        case Type::f16:
            body = half_min_max<Half, is_max>;
            break;
        case Type::bf16:
            body = half_min_max<BFloat, is_max>;
            break;
        case Type::f16x2:
            body = pair_min_max<Half, is_max>;
            break;
        case Type::bf16x2:
            body = pair_min_max<BFloat, is_max>;
            break;
        default:
            bad_type(d, type);
    }
    if (three && type != Type::f32) d.unsupported("three inputs need .f32");
    d.expect_operands(3, 4);
    std::vector<Operand> operands{d.destination(0, type), d.source(1, type), d.source(2, type)};
    if (three) operands.push_back(d.source(3, type));
    d.emit(body, operands, aux);
}

template <bool absolute>
void decode_sign(Decoder& d) {
    bool ftz = d.take("ftz");
    Type type = d.take_type();
    constexpr uint64_t all = ~0ull;
    Body body = nullptr;
    switch (type) {
        case Type::f32:
            body = ftz        ? Body(sign_flushed<absolute>)
                   : absolute ? Body(sign_bits<uint32_t, 0x7fffffff, 0>)
                              : Body(sign_bits<uint32_t, all, 0x80000000>);
            break;
        case Type::f64:
            body = absolute ? Body(sign_bits<uint64_t, (all >> 1), 0>)
                            : Body(sign_bits<uint64_t, all, 1ull << 63>);
            break;
        case Type::f16:
        case Type::bf16:
            body = absolute ? Body(sign_bits<uint16_t, 0x7fff, 0>)
                            : Body(sign_bits<uint16_t, all, 0x8000>);
            break;
        case Type::f16x2:
        case Type::bf16x2:
            body = absolute ? Body(sign_bits<uint32_t, 0x7fff7fff, 0>)
                            : Body(sign_bits<uint32_t, all, 0x80008000>);
            break;
        default:
            bad_type(d, type);
    }
    d.expect_operands(2);
    d.emit(body, {d.destination(0, type), d.source(1, type)});
}

template <int which>
void decode_function(Decoder& d) {
    d.ignore({"approx"});
    uint64_t aux = take_flags(d) | uint64_t(which) << function_shift;
    Type type = d.take_type();
    Body body = nullptr;
    switch (type) {
        case Type::f32:
            body = function32;
            break;
        case Type::f64:
            if (which > 2) bad_type(d, type);
            body = function64;
            break;
        case Type::f16:
            body = function_half<Half>;
            break;
        case Type::bf16:
            body = function_half<BFloat>;
            break;
        case Type::f16x2:
            body = function_pair<Half>;
            break;
        case Type::bf16x2:
            body = function_pair<BFloat>;
            break;
        default:
            bad_type(d, type);
    }
    d.expect_operands(2);
    d.emit(body, {d.destination(0, type), d.source(1, type)}, aux);
}

template <class T>
Flow copysign_bits(Warp& w, const Op& op) {
    return map2<T, T, T>(w, op, [](T a, T b) {
        constexpr T sign = T(1) << (sizeof(T) * 8 - 1);
        return T((b & ~sign) | (a & sign));
    });
}

void decode_copysign(Decoder& d) {
    Type type = d.take_type({Type::f32, Type::f64});
    d.expect_operands(3);
    d.emit(type == Type::f64 ? copysign_bits<uint64_t> : copysign_bits<uint32_t>,
           {d.destination(0, type), d.source(1, type), d.source(2, type)});
}

template <class T>
Flow test_property(Warp& w, const Op& op) {
    auto a = w.in<T>(op.operands[1]);
    uint32_t bits = 0;
    w.for_each_lane([&](int lane) {
        int kind = std::fpclassify(a[lane]);
        bool p = false;
        switch (op.aux) {
            case 0:
                p = kind != FP_NAN && kind != FP_INFINITE;
                break;
            case 1:
                p = kind == FP_INFINITE;
                break;
            case 2:
                p = kind != FP_NAN;
                break;
            case 3:
                p = kind == FP_NAN;
                break;
            case 4:
                p = kind == FP_NORMAL;
                break;
            case 5:
                p = kind == FP_SUBNORMAL;
                break;
        }
        bits |= uint32_t(p) << lane;
    });
    w.set_predicate(op.operands[0], bits);
    return Flow::next;
}

void decode_testp(Decoder& d) {
    constexpr std::string_view names[] = {"finite",     "infinite", "number",
                                          "notanumber", "normal",   "subnormal"};
    uint64_t aux = 0;
    while (aux < 6 && !d.take(names[aux])) ++aux;
    if (aux == 6) d.invalid("the instruction names no property");
    Type type = d.take_type({Type::f32, Type::f64});
    d.expect_operands(2);
    d.emit(type == Type::f64 ? test_property<double> : test_property<float>,
           {d.destination(0, Type::pred), d.source(1, type)}, aux);
}

}  // namespace

bool has_float_type(const Decoder& d) {
    Type type;
    if (!d.peek_type(type)) return false;
    return is_float(type) || type == Type::f16x2 || type == Type::bf16x2 || type == Type::f32x2;
}

void decode_float_add(Decoder& d) {
    decode_arithmetic<Add>(d);
}
void decode_float_sub(Decoder& d) {
    decode_arithmetic<Sub>(d);
}
void decode_float_mul(Decoder& d) {
    decode_arithmetic<Mul>(d);
}

void decode_float_fma(Decoder& d) {
    uint64_t aux = take_flags(d);
    Type type = d.take_type();
    Body body = nullptr;
    switch (type) {
        case Type::f32:
            body = aux ? rounded_fma<float> : plain_fma<float>;
            break;
        case Type::f64:
            body = aux ? rounded_fma<double> : plain_fma<double>;
            break;
        case Type::f16:
            body = half3<Half>;
            break;
        case Type::bf16:
            body = half3<BFloat>;
            break;
        case Type::f16x2:
            body = pair3<Half>;
            break;
        case Type::bf16x2:
            body = pair3<BFloat>;
            break;
        case Type::f32x2:
            body = two_fma;
            break;
        default:
            bad_type(d, type);
    }
    d.expect_operands(4);
    d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, type)},
           aux);
}

void decode_float_div(Decoder& d) {
    d.ignore({"approx", "full"});
    decode_arithmetic<Div>(d);
}

void decode_float_min(Decoder& d) {
    decode_min_max<false>(d);
}
void decode_float_max(Decoder& d) {
    decode_min_max<true>(d);
}
void decode_float_abs(Decoder& d) {
    decode_sign<true>(d);
}
void decode_float_neg(Decoder& d) {
    decode_sign<false>(d);
}

InstructionTable float_instructions() {
    return {
        {"fma", decode_float_fma, "fused multiply-add; f32, f64, halves, packed halves, f32x2"},
        {"rcp", decode_function<0>, "reciprocal"},
        {"sqrt", decode_function<1>, "square root"},
        {"rsqrt", decode_function<2>, "reciprocal square root"},
        {"ex2", decode_function<3>, "power of two"},
        {"lg2", decode_function<4>, "binary logarithm"},
        {"sin", decode_function<5>, "sine"},
        {"cos", decode_function<6>, "cosine"},
        {"tanh", decode_function<7>, "hyperbolic tangent"},
        {"copysign", decode_copysign, "sign of one value, magnitude of the other"},
        {"testp", decode_testp, "class of a floating-point value"},
    };
}

}  // namespace deep_moe::emulator
