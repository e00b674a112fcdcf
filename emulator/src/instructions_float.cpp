// Floating-point arithmetic. Approximate functions are nearly exact (elementary.h); the hardware's
// are a few units in the last place away.
#include <cfenv>

#include "elementary.h"
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
constexpr uint64_t flush_bit = 1, saturate_bit = 2, nan_bit = 4, xorsign_bit = 8, relu_bit = 16,
                   magnitudes_bit = 32;
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

// `result`, or what the hardware makes of it when it is NaN.
template <class F>
float with_nan(float result, float, float) {
    return result != result ? canonical_nan() : result;
}
template <class F>
double with_nan(double result, double a, double b) {
    if (result == result) return result;
    return std::is_same_v<F, Div> ? propagated_nan(a, b) : propagated_nan(b, a);
}
float with_nan_of_three(float result, float, float, float) {
    return result != result ? canonical_nan() : result;
}
double with_nan_of_three(double result, double a, double b, double c) {
    if (result == result) return result;
    return std::isnan(b) ? propagated_nan(b, b) : propagated_nan(c, a);
}

template <class T, class F>
Flow plain2(Warp& w, const Op& op) {
    return map2<T, T, T>(w, op, [](T a, T b) { return with_nan<F>(F{}(a, b), a, b); });
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

// `f` of prepared operands, flushed: its first operand scales the result, if the last one that is
// added, if any, is scaled too. Sums of two need no second look, for small ones are exact.
template <class F>
float flushed2(F f, float a, float b, uint64_t aux) {
    volatile float x = prepared(a, aux), y = prepared(b, aux);
    volatile float r = f(float(x), float(y));
    if (!(aux & flush_bit)) return r;
    if constexpr (std::is_same_v<F, Add> || std::is_same_v<F, Sub>) return flush(float(r));
    return flush_rounded(r, [&](float factor) {
        volatile float scaled = x * factor;
        volatile float again = f(float(scaled), float(y));
        return float(again);
    });
}
float flushed_fma(float a, float b, float c, uint64_t aux) {
    volatile float x = prepared(a, aux), y = prepared(b, aux), z = prepared(c, aux);
    volatile float r = std::fma(float(x), float(y), float(z));
    if (!(aux & flush_bit)) return r;
    return flush_rounded(r, [&](float factor) {
        volatile float scaled = x * factor, added = z * factor;
        volatile float again = std::fma(float(scaled), float(y), float(added));
        return float(again);
    });
}

// Any rounding, flushing, saturation.
template <class T, class F>
Flow rounded2(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map2<T, T, T>(w, op, [&](T a, T b) {
        if constexpr (std::is_same_v<T, float>) {
            return finished(with_nan<F>(flushed2(F{}, a, b, op.aux), a, b), op.aux);
        } else {
            volatile T x = a, y = b;
            volatile T r = F{}(T(x), T(y));
            return finished(with_nan<F>(T(r), a, b), op.aux);
        }
    });
}

template <class T>
WITH_FMA Flow plain_fma(Warp& w, const Op& op) {
    return map3<T, T, T, T>(
        w, op, [](T a, T b, T c) { return with_nan_of_three(std::fma(a, b, c), a, b, c); });
}
template <class T>
Flow rounded_fma(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map3<T, T, T, T>(w, op, [&](T a, T b, T c) {
        if constexpr (std::is_same_v<T, float>) {
            return finished(with_nan_of_three(flushed_fma(a, b, c, op.aux), a, b, c), op.aux);
        } else {
            volatile T x = a, y = b, z = c;
            volatile T r = std::fma(T(x), T(y), T(z));
            return finished(with_nan_of_three(T(r), a, b, c), op.aux);
        }
    });
}

// Mixed precision: some inputs are halves and widened first, which is exact.
template <class H, class F>
Flow widened2(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map2<float, H, float>(w, op, [&](H a, float b) {
        volatile float x = float(a), y = b;
        volatile float r = F{}(float(x), float(y));
        return finished(float(r), op.aux);
    });
}
template <class H>
Flow widened_fma(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map3<float, H, H, float>(w, op, [&](H a, H b, float c) {
        volatile float x = float(a), y = float(b), z = c;
        volatile float r = std::fma(float(x), float(y), float(z));
        return finished(float(r), op.aux);
    });
}

// ---- halves: computed wider, rounded once

Half prepared(Half v, uint64_t aux) {
    return aux & flush_bit ? flush(v) : v;
}
BFloat prepared(BFloat v, uint64_t) {
    return v;
}
template <class H>
H half_result_double(double v, uint64_t aux) {
    if (aux & saturate_bit) v = saturated(v);
    if (aux & relu_bit) v = std::isnan(v) ? v : v > 0 ? v : 0;
    // Flushed is what would be too small if exponents had no end: not what rounds up to 2^-14.
    if ((aux & flush_bit) && std::fabs(v) < 0x1p-14 - 0x1p-26) v = std::copysign(0.0, v);
    return {uint16_t(encode(std::is_same_v<H, Half> ? f16_format : bf16_format, v,
                            Rounding::nearest_even, Overflow::to_infinity))};
}
template <class H>
H half_result(float v, uint64_t aux) {
    if (aux) return half_result_double<H>(v, aux);
    return H::from(v);
}
// a + b with an odd last bit where it is not exact, so that a second rounding is right.
double sum_to_odd(double a, double b) {
    const double sum = a + b;
    if (!std::isfinite(sum)) return sum;
    const double part = sum - a, error = (a - (sum - part)) + (b - part);
    if (error == 0 || (std::bit_cast<uint64_t>(sum) & 1)) return sum;
    return std::nextafter(sum, error > 0 ? HUGE_VAL : -HUGE_VAL);
}
template <class H>
struct Pair {
    H low, high;
};

template <class H, class F>
Flow half2(Warp& w, const Op& op) {
    return map2<H, H, H>(w, op, [&](H a, H b) {
        return half_result<H>(F{}(float(prepared(a, op.aux)), float(prepared(b, op.aux))), op.aux);
    });
}
template <class H, class F>
Flow pair2(Warp& w, const Op& op) {
    using P = Pair<H>;
    auto one = [&](H a, H b) {
        return half_result<H>(F{}(float(prepared(a, op.aux)), float(prepared(b, op.aux))), op.aux);
    };
    return map2<P, P, P>(w, op,
                         [&](P a, P b) { return P{one(a.low, b.low), one(a.high, b.high)}; });
}
template <class H>
H half_fma(H a, H b, H c, uint64_t aux) {
    const double product = double(float(prepared(a, aux))) * double(float(prepared(b, aux)));
    return half_result_double<H>(sum_to_odd(product, double(float(prepared(c, aux)))), aux);
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
        return P{flushed2(F{}, a.low, b.low, op.aux), flushed2(F{}, a.high, b.high, op.aux)};
    });
}
Flow two_fma(Warp& w, const Op& op) {
    HostRounding mode((op.aux >> rounding_shift) & 3);
    using P = Two;
    return map3<P, P, P, P>(w, op, [&](P a, P b, P c) {
        return P{flushed_fma(a.low, b.low, c.low, op.aux),
                 flushed_fma(a.high, b.high, c.high, op.aux)};
    });
}

// ---- minimum, maximum

template <bool is_max>
struct MinMax {
    uint64_t aux;
    template <class T>
    T operator()(T a, T b) const {
        if (std::isnan(a) || std::isnan(b)) {
            if ((aux & nan_bit) || (std::isnan(a) && std::isnan(b))) {
                if constexpr (std::is_same_v<T, double>)
                    return propagated_nan(b, a);
                else
                    return canonical_nan();
            }
            const T number = std::isnan(a) ? b : a;
            if (!(aux & xorsign_bit)) return number;
            return std::signbit(a) != std::signbit(b) ? -std::fabs(number) : std::fabs(number);
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
        if (op.aux & magnitudes_bit) a = std::fabs(a), b = std::fabs(b), c = std::fabs(c);
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
        a = prepared(a, op.aux), b = prepared(b, op.aux);
        return half_of<H>(MinMax<is_max>{op.aux}(float(a), float(b)), op.aux);
    });
}
template <class H, bool is_max>
Flow pair_min_max(Warp& w, const Op& op) {
    using P = Pair<H>;
    return map2<P, P, P>(w, op, [&](P a, P b) {
        auto one = [&](H x, H y) {
            x = prepared(x, op.aux), y = prepared(y, op.aux);
            return half_of<H>(MinMax<is_max>{op.aux}(float(x), float(y)), op.aux);
        };
        return P{one(a.low, b.low), one(a.high, b.high)};
    });
}

// ---- sign operations on bits

// NaN comes out as from a sum: canonical, in .f64 quiet with its sign.
template <class T, T infinity, bool absolute>
T changed_sign(T a) {
    constexpr T sign = T(1) << (sizeof(T) * 8 - 1);
    if ((a & T(~sign)) > infinity) return sizeof(T) == 8 ? T(a | T(uint64_t(1) << 51)) : T(~sign);
    return absolute ? T(a & T(~sign)) : T(a ^ sign);
}
template <class T, T infinity, bool absolute>
Flow sign_bits(Warp& w, const Op& op) {
    return map1<T, T>(w, op, changed_sign<T, infinity, absolute>);
}
template <uint16_t infinity, bool absolute>
Flow sign_bits_of_two(Warp& w, const Op& op) {
    constexpr auto one = changed_sign<uint16_t, infinity, absolute>;
    return map1<uint32_t, uint32_t>(w, op, [](uint32_t a) {
        return uint32_t(one(uint16_t(a >> 16))) << 16 | one(uint16_t(a));
    });
}
// abs and neg with .ftz
template <bool absolute>
Flow sign_flushed(Warp& w, const Op& op) {
    return map1<uint32_t, float>(w, op, [](float a) {
        return changed_sign<uint32_t, 0x7f800000, absolute>(std::bit_cast<uint32_t>(flush(a)));
    });
}
template <bool absolute>
uint16_t flushed_half(Half a) {
    return changed_sign<uint16_t, 0x7c00, absolute>(flush(a).bits);
}
template <bool absolute>
Flow sign_flushed_half(Warp& w, const Op& op) {
    return map1<uint16_t, Half>(w, op, flushed_half<absolute>);
}
template <bool absolute>
Flow sign_flushed_two(Warp& w, const Op& op) {
    return map1<uint32_t, Pair<Half>>(w, op, [](Pair<Half> a) {
        return uint32_t(flushed_half<absolute>(a.high)) << 16 | flushed_half<absolute>(a.low);
    });
}

// ---- functions of one value

// The hardware looks sines up by the number of turns, which it forms with one product.
double turns(float a) {
    const double exact = double(a) * double(0x1.45f306p-3f);
    float cut = float(exact);
    if (std::fabs(double(cut)) > std::fabs(exact)) cut = std::nextafter(cut, 0.0f);
    return std::isfinite(cut) ? std::remainder(double(cut), 1.0) : double(NAN);
}

float approximate(uint64_t which, float a) {
    switch (which) {
        case 0:
            return 1.0f / a;
        case 1:
            return std::sqrt(a);
        case 2:
            return float(1.0 / std::sqrt(double(a)));
        case 3:
            return float(elementary::exp2(a));
        case 4:
            return float(elementary::log2(a));
        case 5:
            return float(elementary::of_turns(turns(a)).sine);
        case 6:
            return float(elementary::of_turns(turns(a)).cosine);
        default:
            return float(elementary::tanh(a));
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
            if (which == 0) return with_nan<Div>(flushed2(Div{}, 1.0f, a, op.aux), a, a);
            volatile float x = prepared(a, op.aux);
            volatile float r = std::sqrt(float(x));
            return with_nan<Div>(float(r), a, a);
        });
    }
    return map1<float, float>(w, op, [&](float a) {
        const float r = approximate(which, prepared(a, op.aux));
        return prepared(with_nan<Div>(r, a, a), op.aux);
    });
}
double upper_half(double v) {
    return std::bit_cast<double>(std::bit_cast<uint64_t>(v) & ~uint64_t(0xffffffff));
}
Flow function64(Warp& w, const Op& op) {
    uint64_t which = op.aux >> function_shift;
    HostRounding mode((op.aux >> rounding_shift) & 3);
    return map1<double, double>(w, op, [&](double a) {
        // The .ftz forms look at the upper half of their operand and write that of the result.
        const bool upper = op.aux & flush_bit;
        volatile double x = upper ? flush(upper_half(a)) : a;
        volatile double r = which == 0   ? 1.0 / x
                            : which == 1 ? std::sqrt(double(x))
                                         : 1.0 / std::sqrt(double(x));
        if (!upper) return with_nan<Div>(double(r), a, a);
        if (std::isnan(double(r))) return std::bit_cast<double>(uint64_t(0x7fffffff) << 32);
        return upper_half(flush(double(r)));
    });
}
template <class H>
H approximate_half(H a, uint64_t aux) {
    const float r = approximate(aux >> function_shift, float(a));
    return H::from(aux & flush_bit ? flush(r) : r);
}
template <class H>
Flow function_half(Warp& w, const Op& op) {
    return map1<H, H>(w, op, [&](H a) { return approximate_half(a, op.aux); });
}
template <class H>
Flow function_pair(Warp& w, const Op& op) {
    using P = Pair<H>;
    return map1<P, P>(w, op, [&](P a) {
        return P{approximate_half(a.low, op.aux), approximate_half(a.high, op.aux)};
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

// Of an instruction, by type; null where there is none.
struct FloatBodies {
    Body f32 = nullptr, f64 = nullptr, f16 = nullptr, bf16 = nullptr, f16x2 = nullptr,
         bf16x2 = nullptr, f32x2 = nullptr;
};

Body body_of(Decoder& d, Type type, const FloatBodies& bodies) {
    const std::pair<Type, Body> of_types[] = {
        {Type::f32, bodies.f32},     {Type::f64, bodies.f64},     {Type::f16, bodies.f16},
        {Type::bf16, bodies.bf16},   {Type::f16x2, bodies.f16x2}, {Type::bf16x2, bodies.bf16x2},
        {Type::f32x2, bodies.f32x2},
    };
    for (auto [known, body] : of_types)
        if (known == type && body) return body;
    d.unsupported(std::string("type .") + name_of(type) + " is not supported here");
}

// The type of the inputs but the last, in `add.f32.bf16` and the like; else `type`.
Type take_narrow_inputs(Decoder& d, Type type) {
    Type narrow;
    if (!d.peek_type(narrow)) return type;
    if (type != Type::f32) d.invalid("a second type needs .f32 as the first");
    return d.take_type({Type::f16, Type::bf16});
}

template <class F>
void decode_arithmetic(Decoder& d) {
    uint64_t aux = take_flags(d);
    Type type = d.take_type();
    if (const Type narrow = take_narrow_inputs(d, type); narrow != type) {
        if constexpr (std::is_same_v<F, Add> || std::is_same_v<F, Sub>) {
            d.expect_operands(3);
            d.emit(narrow == Type::f16 ? widened2<Half, F> : widened2<BFloat, F>,
                   {d.destination(0, type), d.source(1, narrow), d.source(2, type)}, aux);
            return;
        }
        d.invalid("only add, sub and fma have inputs of two types");
    }
    const Body body = body_of(d, type,
                              {
                                  .f32 = aux ? rounded2<float, F> : plain2<float, F>,
                                  .f64 = aux ? rounded2<double, F> : plain2<double, F>,
                                  .f16 = half2<Half, F>,
                                  .bf16 = half2<BFloat, F>,
                                  .f16x2 = pair2<Half, F>,
                                  .bf16x2 = pair2<BFloat, F>,
                                  .f32x2 = two2<F>,
                              });
    d.expect_operands(3);
    d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type)}, aux);
}

template <bool is_max>
void decode_min_max(Decoder& d) {
    uint64_t aux = take_flags(d);
    Type type = d.take_type();
    bool three = d.num_operands() == 4;
    if (three && d.take("abs")) aux |= magnitudes_bit;
    const Body body = body_of(d, type,
                              {
                                  .f32 = three ? min_max3<float, is_max> : min_max<float, is_max>,
                                  .f64 = min_max<double, is_max>,
                                  .f16 = half_min_max<Half, is_max>,
                                  .bf16 = half_min_max<BFloat, is_max>,
                                  .f16x2 = pair_min_max<Half, is_max>,
                                  .bf16x2 = pair_min_max<BFloat, is_max>,
                              });
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
    const Body body = body_of(
        d, type,
        {
            .f32 = ftz ? sign_flushed<absolute> : sign_bits<uint32_t, 0x7f800000, absolute>,
            .f64 = sign_bits<uint64_t, uint64_t(0x7ff) << 52, absolute>,
            .f16 = ftz ? sign_flushed_half<absolute> : sign_bits<uint16_t, 0x7c00, absolute>,
            .bf16 = sign_bits<uint16_t, 0x7f80, absolute>,
            .f16x2 = ftz ? sign_flushed_two<absolute> : sign_bits_of_two<0x7c00, absolute>,
            .bf16x2 = sign_bits_of_two<0x7f80, absolute>,
        });
    d.expect_operands(2);
    d.emit(body, {d.destination(0, type), d.source(1, type)});
}

template <int which>
void decode_function(Decoder& d) {
    d.ignore({"approx"});
    uint64_t aux = take_flags(d) | uint64_t(which) << function_shift;
    Type type = d.take_type();
    const Body body = body_of(d, type,
                              {
                                  .f32 = function32,
                                  .f64 = which > 2 ? nullptr : function64,
                                  .f16 = function_half<Half>,
                                  .bf16 = function_half<BFloat>,
                                  .f16x2 = function_pair<Half>,
                                  .bf16x2 = function_pair<BFloat>,
                              });
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
                p = kind == FP_NORMAL || kind == FP_ZERO;
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
    if (const Type narrow = take_narrow_inputs(d, type); narrow != type) {
        d.expect_operands(4);
        d.emit(
            narrow == Type::f16 ? widened_fma<Half> : widened_fma<BFloat>,
            {d.destination(0, type), d.source(1, narrow), d.source(2, narrow), d.source(3, type)},
            aux);
        return;
    }
    const Body body = body_of(d, type,
                              {
                                  .f32 = aux ? rounded_fma<float> : plain_fma<float>,
                                  .f64 = aux ? rounded_fma<double> : plain_fma<double>,
                                  .f16 = half3<Half>,
                                  .bf16 = half3<BFloat>,
                                  .f16x2 = pair3<Half>,
                                  .bf16x2 = pair3<BFloat>,
                                  .f32x2 = two_fma,
                              });
    d.expect_operands(4);
    d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type), d.source(3, type)},
           aux);
}

// A product with the reciprocal, which is zero where it would be subnormal.
Flow divide_approximately(Warp& w, const Op& op) {
    return map2<float, float, float>(w, op, [&](float a, float b) {
        a = prepared(a, op.aux), b = prepared(b, op.aux);
        const float scale = std::fabs(b) < 0x1p-126f ? 0x1p24f : 1.0f;
        const float r = a * scale * flush(1.0f / (b * scale));
        return prepared(with_nan<Div>(r, a, b), op.aux);
    });
}

void decode_float_div(Decoder& d) {
    if (d.take("approx")) {
        const uint64_t aux = take_flags(d);
        const Type type = d.take_type({Type::f32});
        d.expect_operands(3);
        d.emit(divide_approximately, {d.destination(0, type), d.source(1, type), d.source(2, type)},
               aux);
        return;
    }
    d.take("full");
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
        {"fma", decode_float_fma,
         "fused multiply-add; f32, f64, halves, packed halves, f32x2, f32 with halves"},
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
