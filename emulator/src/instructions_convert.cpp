// cvt: between integers, floats of all widths, and the packed 8-, 6- and 4-bit formats.
#include <algorithm>
#include <limits>

#include "float_types.h"
#include "lanes.h"

namespace deep_moe::emulator {

namespace {

// aux
constexpr uint64_t flush_bit = 1, saturate_bit = 2, relu_bit = 4, finite_bit = 8;
constexpr int rounding_shift = 8;  // Rounding
constexpr int integral_shift =
    12;  // 0: no; 1..4: round to an integral value, nearest, zero, down, up

Rounding rounding_of(uint64_t aux) {
    return Rounding((aux >> rounding_shift) & 7);
}
Overflow overflow_of(uint64_t aux) {
    return aux & finite_bit ? Overflow::saturate : Overflow::to_infinity;
}

template <class T>
T round_integral(T v, uint64_t mode) {
    switch (mode) {
        case 1:
            return std::nearbyint(v);
        case 2:
            return std::trunc(v);
        case 3:
            return std::floor(v);
        case 4:
            return std::ceil(v);
        default:
            return v;
    }
}

// Rounds an exact value to T in the given direction.
template <class T>
T directed(long double exact, Rounding rounding) {
    T nearest = T(exact);
    if (std::isnan(nearest)) return nearest;
    constexpr T infinity = std::numeric_limits<T>::infinity();
    long double back = nearest;
    switch (rounding) {
        case Rounding::toward_zero:
            return std::fabs(back) > std::fabs(exact) ? std::nextafter(nearest, T(0)) : nearest;
        case Rounding::down:
            return back > exact ? std::nextafter(nearest, -infinity) : nearest;
        case Rounding::up:
            return back < exact ? std::nextafter(nearest, infinity) : nearest;
        default:
            return nearest;
    }
}

// A NaN of a shorter format with the same sign and payload in 64 bits.
uint64_t nan_to_64(uint64_t bits, int mantissa_bits, int sign_bit) {
    const uint64_t payload = bits & ((uint64_t(1) << mantissa_bits) - 1);
    return (bits >> sign_bit) << 63 | uint64_t(0x7ff) << 52 | payload << (52 - mantissa_bits);
}

// An integer as a double whose last bit says whether anything was cut off, so that a second
// rounding is right.
template <class S>
double with_sticky_bit(S a) {
    const double value = double(a);
    if (sizeof(S) < 8 || std::fabs(value) < 0x1p52) return value;
    return double((a >> 12) | S((a & 0xfff) != 0)) * 4096.0;
}

// The hardware's NaN. Conversions from and to .f64 keep sign and payload and quiet it, those from
// .f32 and .f16 to shorter types have one result, and a mere copy changes nothing.
template <class D, class S>
D converted_nan(S a, uint64_t aux) {
    constexpr bool wide = std::is_same_v<S, double> || std::is_same_v<D, double>;
    const bool flushed = std::is_same_v<S, float> && (aux & flush_bit);
    if constexpr (std::is_same_v<S, BFloat> && std::is_same_v<D, float>) {
        return std::bit_cast<float>(uint32_t(a.bits) << 16);
    } else if constexpr (!wide) {
        if constexpr (std::is_same_v<S, D>) {
            if (!flushed && (aux >> integral_shift) == 0) return a;
        }
        if constexpr (std::is_same_v<D, float>)
            return canonical_nan();
        else
            return {0x7fff};
    } else {
        // As if .f64 were the longest: the top of the payload fits into all of them.
        uint64_t bits;
        if constexpr (std::is_same_v<S, double>)
            bits = std::bit_cast<uint64_t>(a);
        else if constexpr (std::is_same_v<S, float>)
            bits = nan_to_64(flushed ? 0x7fffffff : std::bit_cast<uint32_t>(a), 23, 31);
        else
            bits = nan_to_64(a.bits, std::is_same_v<S, Half> ? 10 : 7, 15);
        if constexpr (std::is_same_v<S, D>) {
            if ((aux >> integral_shift) == 0) return a;
        }
        bits |= uint64_t(1) << 51;
        if constexpr (std::is_same_v<D, double>)
            return std::bit_cast<double>(bits);
        else if constexpr (std::is_same_v<D, float>)
            return std::bit_cast<float>(uint32_t(bits >> 32 & 0x80000000) | 0x7f800000 |
                                        uint32_t(bits >> 29 & 0x7fffff));
        else if constexpr (std::is_same_v<D, Half>)
            return {uint16_t((bits >> 48 & 0x8000) | 0x7c00 | (bits >> 42 & 0x3ff))};
        else
            return {uint16_t((bits >> 48 & 0x8000) | 0x7f80 | (bits >> 45 & 0x7f))};
    }
}

// ---- scalars. A wide value of the source, converted to the destination.

template <class D, class S>
D convert_value(S a, uint64_t aux) {
    constexpr bool from_integer = std::is_integral_v<S>, to_integer = std::is_integral_v<D>;
    if constexpr (from_integer && to_integer) {
        if (aux & saturate_bit) {
            __int128 wide = a, low = std::numeric_limits<D>::min(),
                     high = std::numeric_limits<D>::max();
            return D(wide < low ? low : wide > high ? high : wide);
        }
        return D(a);
    } else if constexpr (from_integer) {
        if constexpr (std::is_same_v<D, Half> || std::is_same_v<D, BFloat>) {
            const FloatFormat& format = std::is_same_v<D, Half> ? f16_format : bf16_format;
            double value = with_sticky_bit(a);
            if (aux & saturate_bit) value = std::clamp(value, 0.0, 1.0);
            return {uint16_t(encode(format, value, rounding_of(aux), overflow_of(aux)))};
        } else {
            D value = directed<D>(static_cast<long double>(a), rounding_of(aux));
            if (aux & saturate_bit) value = value > 0 ? (value < 1 ? value : D(1)) : D(0);
            return value;
        }
    } else {
        double value = std::is_same_v<S, double> ? double(a) : double(float(a));
        if (std::is_same_v<S, float> && (aux & flush_bit)) value = flush(float(value));
        if constexpr (to_integer) {
            if (std::isnan(value)) {
                constexpr bool top_bit = sizeof(D) == 8 || std::is_same_v<S, double>;
                return top_bit ? D(uint64_t(1) << (sizeof(D) * 8 - 1)) : D(0);
            }
            value = round_integral(value, (aux >> integral_shift) & 7);
            constexpr D low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
            if (value <= double(low)) return low;
            if (value >= double(high)) return high;
            return D(value);
        } else {
            value = round_integral(value, (aux >> integral_shift) & 7);
            if (aux & saturate_bit) value = value > 0 ? (value < 1 ? value : 1) : 0;
            if (aux & relu_bit) value = std::isnan(value) ? value : value > 0 ? value : 0;
            if (std::isnan(value)) return converted_nan<D>(a, aux);
            if constexpr (std::is_same_v<D, double>) {
                return value;
            } else if constexpr (std::is_same_v<D, float>) {
                const auto rounded = [&](float factor) {
                    return std::is_same_v<S, double>
                               ? directed<float>(value * factor, rounding_of(aux))
                               : float(value * factor);
                };
                const float result = rounded(1);
                return aux & flush_bit ? flush_rounded(result, rounded) : result;
            } else {
                const FloatFormat& format = std::is_same_v<D, Half> ? f16_format : bf16_format;
                return {uint16_t(encode(format, value, rounding_of(aux), overflow_of(aux)))};
            }
        }
    }
}

template <class D, class S>
Flow convert(Warp& w, const Op& op) {
    return map1<D, S>(w, op, [&](S a) { return convert_value<D, S>(a, op.aux); });
}

// The frequent plain ones, as loops that vectorize.
template <class D, class S>
Flow convert_plain(Warp& w, const Op& op) {
    return map1<D, S>(w, op, [](S a) { return D(a); });
}
Flow float_to_bf16_nearest(Warp& w, const Op& op) {
    return map1<BFloat, float>(w, op, [](float a) { return BFloat::from(a); });
}

template <class F>
Body for_scalar(Decoder& d, Type type, F f) {
    switch (type) {
        case Type::u8:
        case Type::b8:
            return f(uint8_t{});
        case Type::s8:
            return f(int8_t{});
        case Type::f16:
            return f(Half{});
        case Type::bf16:
            return f(BFloat{});
        case Type::f32:
            return f(float{});
        case Type::f64:
            return f(double{});
        default:
            return for_integer(d, type, f);
    }
}

Body scalar_conversion(Decoder& d, Type to, Type from, uint64_t aux) {
    if (to == Type::bf16 && from == Type::f32 && aux == 0) return float_to_bf16_nearest;
    return for_scalar(d, to, [&](auto t) {
        using D = decltype(t);
        return for_scalar(d, from, [&](auto s) -> Body {
            using S = decltype(s);
            if constexpr ((std::is_integral_v<D> && std::is_integral_v<S>) ||
                          (std::is_same_v<D, float> && std::is_integral_v<S> && sizeof(S) <= 4)) {
                if (aux == 0) return convert_plain<D, S>;
            }
            return convert<D, S>;
        });
    });
}

// ---- packed formats

// Of the elements of two or four.
const FloatFormat* small_format(Type type) {
    switch (type) {
        case Type::e4m3x2:
        case Type::e4m3x4:
            return &e4m3_format;
        case Type::e5m2x2:
        case Type::e5m2x4:
            return &e5m2_format;
        case Type::e2m1x2:
        case Type::e2m1x4:
            return &e2m1_format;
        case Type::e2m3x2:
        case Type::e2m3x4:
            return &e2m3_format;
        case Type::e3m2x2:
        case Type::e3m2x4:
            return &e3m2_format;
        case Type::f16x2:
            return &f16_format;
        case Type::bf16x2:
            return &bf16_format;
        default:
            return nullptr;
    }
}

bool has_four(Type type) {
    return type >= Type::e4m3x4 && type <= Type::e3m2x4;
}

uint32_t encode_small(Type type, float v, uint64_t aux) {
    if (aux & relu_bit) v = std::isnan(v) ? v : v > 0 ? v : 0;
    switch (type) {
        case Type::ue8m0x2:
            return float_to_ue8m0(v, rounding_of(aux), overflow_of(aux));
        case Type::f16x2:
        case Type::bf16x2:
            if (std::isnan(v)) return 0x7fff;
            break;
        default:
            break;
    }
    bool saturates = type != Type::f16x2 && type != Type::bf16x2 && (aux & finite_bit);
    return encode(*small_format(type), v, rounding_of(aux),
                  saturates || (aux & finite_bit) ? Overflow::saturate : Overflow::to_infinity);
}

float decode_small(Type type, uint32_t code) {
    if (type == Type::ue8m0x2) return ue8m0_to_float(uint8_t(code));
    return float(decode(*small_format(type), code));
}

int element_bits(Type type) {
    return type == Type::f16x2 || type == Type::bf16x2 ? 16 : type == Type::e2m1x2 ? 4 : 8;
}

// aux bits 32..: destination type, 40..: source type. The first source is the high half.
Type to_type(uint64_t aux) {
    return Type((aux >> 32) & 0xff);
}
Type from_type(uint64_t aux) {
    return Type((aux >> 40) & 0xff);
}

Flow pack_two_floats(Warp& w, const Op& op) {
    Type to = to_type(op.aux);
    int bits = element_bits(to);
    return map2<uint32_t, float, float>(w, op, [&](float a, float b) {
        return encode_small(to, a, op.aux) << bits | encode_small(to, b, op.aux);
    });
}

Flow float_to_bf16x2_nearest(Warp& w, const Op& op) {
    return map2<uint32_t, float, float>(w, op, [](float a, float b) {
        return uint32_t(BFloat::from(a).bits) << 16 | BFloat::from(b).bits;
    });
}

Flow repack_two(Warp& w, const Op& op) {
    Type to = to_type(op.aux), from = from_type(op.aux);
    int to_bits = element_bits(to), from_bits = element_bits(from);
    uint32_t mask = (1u << from_bits) - 1;
    return map1<uint32_t, uint32_t>(w, op, [&](uint32_t a) {
        float low = decode_small(from, a & mask),
              high = decode_small(from, (a >> from_bits) & mask);
        return encode_small(to, high, op.aux) << to_bits | encode_small(to, low, op.aux);
    });
}

Flow to_tf32(Warp& w, const Op& op) {
    return map1<uint32_t, float>(w, op, [&](float a) {
        // Ties away are rounded before anything looks for NaN: one of small payload is an infinity.
        if (rounding_of(op.aux) == Rounding::nearest_away && std::isnan(a)) {
            const uint32_t code = (std::bit_cast<uint32_t>(a) + 0x1000) & ~0x1fffu;
            if ((code & 0x7fffffff) == 0x7f800000) a = std::bit_cast<float>(code);
        }
        if (op.aux & relu_bit) a = std::isnan(a) ? a : a > 0 ? a : 0;
        return float_to_tf32(a, rounding_of(op.aux), overflow_of(op.aux));
    });
}

// ---- stochastic rounding

// `value` with `random`, a number of `bits` bits, added to what is cut off: away from zero if that
// carries. PTX does not say where the number stands below bits that are more than it has: here it
// is on top of them.
uint32_t encode_stochastic(const FloatFormat& format, float value, uint32_t random, int bits,
                           uint64_t aux) {
    if (aux & relu_bit) value = std::isnan(value) ? value : value > 0 ? value : 0;
    if (!std::isfinite(value))
        return encode(format, value, Rounding::nearest_even, overflow_of(aux));
    const uint32_t inward = encode(format, value, Rounding::toward_zero, overflow_of(aux));
    const uint32_t magnitude = inward & ~format.sign();
    const double low = decode(format, magnitude), cut = std::fabs(double(value)) - low;
    if (magnitude == format.max_finite) {
        // One unit more than the largest number is infinite, where there is such a number.
        const double unit = low - decode(format, magnitude - 1);
        const bool carries = cut + std::ldexp(unit * random, -bits) >= unit;
        return carries && format.has_infinity && overflow_of(aux) == Overflow::to_infinity
                   ? inward + 1
                   : inward;
    }
    const double unit = decode(format, magnitude + 1) - low;
    return cut + std::ldexp(unit * random, -bits) >= unit ? inward + 1 : inward;
}

// operands: two floats and the random bits. The first is the high half and has their high half.
Flow round_two_stochastically(Warp& w, const Op& op) {
    const FloatFormat& format = *small_format(to_type(op.aux));
    const int bits = to_type(op.aux) == Type::f16x2 ? 13 : 16;
    const uint32_t mask = (1u << bits) - 1;
    return map3<uint32_t, float, float, uint32_t>(w, op, [&](float a, float b, uint32_t random) {
        return encode_stochastic(format, a, random >> 16 & mask, bits, op.aux) << 16 |
               encode_stochastic(format, b, random & mask, bits, op.aux);
    });
}

// operands: d, four floats a, b, e, f from the high end of d, the random bits.
Flow round_four_stochastically(Warp& w, const Op& op) {
    const FloatFormat& format = *small_format(to_type(op.aux));
    const bool is_fp4 = to_type(op.aux) == Type::e2m1x4;
    const auto out = w.out<uint32_t>(op.operands[0]);
    w.for_each_lane([&](int lane) {
        const uint32_t random = w.in<uint32_t>(op.operands[5])[lane];
        uint32_t packed = 0;
        for (int i = 0; i < 4; ++i) {
            // Of a half of the random bits two elements have all, of FP4 a byte of both halves.
            const bool is_high = i < 2;
            const uint32_t own = is_fp4 ? (random >> (is_high ? 24 : 16) & 0xff) << 8 |
                                              (random >> (is_high ? 8 : 0) & 0xff)
                                        : random >> (is_high ? 16 : 0) & 0xffff;
            packed =
                packed << (is_fp4 ? 4 : 8) |
                encode_stochastic(format, w.in<float>(op.operands[1 + i])[lane], own, 16, op.aux);
        }
        out.set(lane, packed);
    });
    return Flow::next;
}

void decode_stochastic(Decoder& d) {
    uint64_t aux = 0;
    if (d.take("relu")) aux |= relu_bit;
    if (d.take("satfinite")) aux |= finite_bit;
    const Type to = d.take_type();
    d.take_type({Type::f32});
    aux |= uint64_t(to) << 32;
    if (to == Type::f16x2 || to == Type::bf16x2) {
        d.expect_operands(4);
        d.emit(round_two_stochastically,
               {d.destination(0, to), d.source(1, Type::f32), d.source(2, Type::f32),
                d.source(3, Type::b32)},
               aux);
        return;
    }
    if (!has_four(to)) d.unsupported(std::string("stochastic rounding to .") + name_of(to));
    if (!(aux & finite_bit)) d.invalid("this type needs .satfinite");
    d.expect_operands(3);
    std::vector<Operand> operands{d.destination(0, to)};
    const std::vector<Operand> values = d.sources(1, Type::f32);
    if (values.size() != 4) d.invalid("the source must have four values");
    operands.insert(operands.end(), values.begin(), values.end());
    operands.push_back(d.source(2, Type::b32));
    d.emit(round_four_stochastically, std::move(operands), aux);
}

// .scaled::n2::ue8m0: each of two numbers times a power of two, their scales in a .b16's bytes.
Flow scale_two(Warp& w, const Op& op) {
    const Type to = to_type(op.aux), from = from_type(op.aux);
    const int to_bits = element_bits(to), from_bits = element_bits(from);
    const uint32_t mask = (1u << from_bits) - 1;
    return map2<uint32_t, uint32_t, uint32_t>(w, op, [&](uint32_t a, uint32_t scales) {
        const auto scaled = [&](int i) {
            return encode_small(to,
                                float(decode_small(from, a >> from_bits * i & mask) *
                                      ue8m0_to_double(uint8_t(scales >> 8 * i))),
                                op.aux);
        };
        return scaled(1) << to_bits | scaled(0);
    });
}

// ---- decoding

bool is_packed(Type type) {
    return (small_format(type) && !has_four(type)) || type == Type::ue8m0x2;
}

void decode_cvt(Decoder& d) {
    if (d.take("rs")) return decode_stochastic(d);
    uint64_t aux = 0;
    std::string_view rounding =
        d.take_any({"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"});
    auto set = [&](Rounding r) { aux |= uint64_t(r) << rounding_shift; };
    if (rounding == "rz") set(Rounding::toward_zero);
    if (rounding == "rm") set(Rounding::down);
    if (rounding == "rp") set(Rounding::up);
    if (rounding == "rna") set(Rounding::nearest_away);
    constexpr std::string_view integral[] = {"", "rni", "rzi", "rmi", "rpi"};
    for (uint64_t k = 1; k < 5; ++k)
        if (rounding == integral[k]) aux |= k << integral_shift;
    if (d.take("ftz")) aux |= flush_bit;
    if (d.take("sat")) aux |= saturate_bit;
    if (d.take("relu")) aux |= relu_bit;
    if (d.take("satfinite")) aux |= finite_bit;
    const bool scales = d.take("scaled::n2::ue8m0");
    Type to = d.take_type(), from = d.take_type();
    if (scales) {
        const uint64_t types = uint64_t(to) << 32 | uint64_t(from) << 40;
        if (rounding != "rn" || to != Type::bf16x2 || !is_packed(from) || from == Type::ue8m0x2 ||
            element_bits(from) == 16)
            d.unsupported("this conversion with scales");
        d.expect_operands(3);
        d.emit(scale_two, {d.destination(0, to), d.source(1, from), d.source(2, Type::b16)},
               aux | types);
        return;
    }
    if (is_packed(to) || is_packed(from)) {
        uint64_t types = uint64_t(to) << 32 | uint64_t(from) << 40;
        if (from == Type::f32) {
            d.expect_operands(3);
            Body body = to == Type::bf16x2 && aux == 0 ? float_to_bf16x2_nearest : pack_two_floats;
            d.emit(body, {d.destination(0, to), d.source(1, from), d.source(2, from)}, aux | types);
            return;
        }
        if (!is_packed(to) || !is_packed(from))
            d.unsupported(std::string("conversion from .") + name_of(from) + " to ." + name_of(to));
        d.expect_operands(2);
        d.emit(repack_two, {d.destination(0, to), d.source(1, from)}, aux | types);
        return;
    }
    if (to == Type::tf32) {
        if (from != Type::f32) d.unsupported("conversion to .tf32 from another type than .f32");
        d.expect_operands(2);
        d.emit(to_tf32, {d.destination(0, to), d.source(1, from)}, aux);
        return;
    }
    d.expect_operands(2);
    d.emit(scalar_conversion(d, to, from, aux), {d.destination(0, to), d.source(1, from)}, aux);
}

// aux: bits of a result element, bit 8: signed. operands: d, a, b, c (the rest of d; 0 if not
// given)
Flow pack_saturated(Warp& w, const Op& op) {
    int bits = int(op.aux & 0xff);
    bool is_signed_result = op.aux & 0x100;
    int64_t low = is_signed_result ? -(1ll << (bits - 1)) : 0;
    int64_t high = is_signed_result ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
    return map3<uint32_t, int32_t, int32_t, uint32_t>(w, op, [&](int32_t a, int32_t b, uint32_t c) {
        uint32_t mask = (1u << bits) - 1;
        uint32_t x = uint32_t(std::clamp<int64_t>(a, low, high)) & mask;
        uint32_t y = uint32_t(std::clamp<int64_t>(b, low, high)) & mask;
        uint64_t rest = bits < 16 ? uint64_t(c) << (2 * bits) : 0;
        return uint32_t(rest) | x << bits | y;
    });
}

void decode_cvt_pack(Decoder& d) {
    if (!d.take("sat")) d.invalid("cvt.pack needs .sat");
    Type to = d.take_type();
    d.take_type({Type::s32});
    bool has_c = d.take("b32");
    d.expect_operands(has_c ? 4 : 3);
    d.emit(pack_saturated,
           {d.destination(0, Type::b32), d.source(1, Type::s32), d.source(2, Type::s32),
            has_c ? d.source(3, Type::b32) : d.constant(0)},
           uint64_t(num_bits(to)) | (is_signed(to) ? 0x100 : 0));
}

}  // namespace

InstructionTable convert_instructions() {
    return {
        {"cvt", decode_cvt, "conversion between all scalar and packed types; .rs too"},
        {"cvt.pack", decode_cvt_pack, "two saturated integers in one register"},
    };
}

}  // namespace deep_moe::emulator
