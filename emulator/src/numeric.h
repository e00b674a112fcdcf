// Bit-exact conversions between the tensor cores' element formats and host floating point.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace deep_moe::emulator {

enum class Rounding : uint8_t {
    nearest_even,
    nearest_away,  // ties away from zero (cvt.rna)
    toward_zero,
    down,
    up,
};

enum class Overflow : uint8_t { to_infinity, saturate };

// A binary floating-point format of up to 32 bits.
struct FloatFormat {
    int exponent_bits;
    int mantissa_bits;
    int bias;
    uint32_t max_finite;  // code without sign
    bool has_infinity;    // max_finite + 1 is infinity
    uint32_t
        nan;  // code that a conversion writes for NaN (for formats without NaN: the largest value)
    bool has_nan;  // codes above infinity (or max_finite) are NaN
    bool is_signed = true;

    constexpr int num_bits() const { return exponent_bits + mantissa_bits + (is_signed ? 1 : 0); }
    constexpr uint32_t sign() const {
        return is_signed ? 1u << (exponent_bits + mantissa_bits) : 0;
    }
};

inline constexpr FloatFormat e4m3_format{4, 3, 7, 0x7e, false, 0x7f, true};
inline constexpr FloatFormat e5m2_format{5, 2, 15, 0x7b, true, 0x7f, true};
inline constexpr FloatFormat e2m3_format{2, 3, 1, 0x1f, false, 0x1f, false};
inline constexpr FloatFormat e3m2_format{3, 2, 3, 0x1f, false, 0x1f, false};
inline constexpr FloatFormat e2m1_format{2, 1, 1, 0x7, false, 0x7, false};
inline constexpr FloatFormat ue4m3_format{4, 3, 7, 0x7e, false, 0x7f, true, false};
inline constexpr FloatFormat f16_format{5, 10, 15, 0x7bff, true, 0x7fff, true};
inline constexpr FloatFormat bf16_format{8, 7, 127, 0x7f7f, true, 0x7fff, true};
// 19 bits; the 32-bit register keeps them on top, see float_to_tf32.
inline constexpr FloatFormat tf32_format{8, 10, 127, 0x3fbff, true, 0x3ffff, true};

inline double decode(const FloatFormat& format, uint32_t code) {
    const uint32_t magnitude =
        code & (format.is_signed ? format.sign() - 1 : (1u << format.num_bits()) - 1);
    const double sign = (code & format.sign()) ? -1.0 : 1.0;
    if (magnitude > format.max_finite) {
        if (format.has_infinity && magnitude == format.max_finite + 1) {
            return sign * std::numeric_limits<double>::infinity();
        }
        return std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
    }
    const int exponent = magnitude >> format.mantissa_bits;
    const uint32_t fraction = magnitude & ((1u << format.mantissa_bits) - 1);
    const uint32_t significand = exponent ? fraction | (1u << format.mantissa_bits) : fraction;
    const int scale = (exponent ? exponent : 1) - format.bias - format.mantissa_bits;
    // 2^scale is a normal double for every format here.
    return sign * significand * std::bit_cast<double>(uint64_t(scale + 1023) << 52);
}

// `value` rounded once to `format`.
inline uint32_t encode(const FloatFormat& format, double value, Rounding rounding,
                       Overflow overflow) {
    const uint64_t bits = std::bit_cast<uint64_t>(value);
    const bool negative = bits >> 63;
    const uint32_t sign = negative ? format.sign() : 0;
    if (std::isnan(value)) return format.nan;
    if (std::isinf(value)) {
        return sign |
               (overflow == Overflow::saturate || !format.has_infinity ? format.max_finite
                                                                       : format.max_finite + 1);
    }
    if (value == 0) return sign;
    int exponent = int((bits >> 52) & 0x7ff);
    uint64_t significand = bits & ((uint64_t(1) << 52) - 1);
    if (exponent) {
        significand |= uint64_t(1) << 52;
    } else {
        exponent = 1;  // a subnormal double is far below every format's smallest value
    }
    exponent -= 1023;  // |value| = significand * 2^(exponent - 52)
    const int min_exponent = 1 - format.bias;
    const int kept_exponent = exponent < min_exponent ? min_exponent : exponent;
    const int shift = 52 - format.mantissa_bits + (kept_exponent - exponent);
    uint64_t quotient = 0;
    bool above_half = false, half = false, inexact = true;
    if (shift <= 63) {
        quotient = significand >> shift;
        const uint64_t rest = significand & ((uint64_t(1) << shift) - 1), middle = uint64_t(1)
                                                                                   << (shift - 1);
        above_half = rest > middle;
        half = rest == middle;
        inexact = rest != 0;
    }
    bool increment = false;
    switch (rounding) {
        case Rounding::nearest_even:
            increment = above_half || (half && (quotient & 1));
            break;
        case Rounding::nearest_away:
            increment = above_half || half;
            break;
        case Rounding::toward_zero:
            break;
        case Rounding::down:
            increment = inexact && negative;
            break;
        case Rounding::up:
            increment = inexact && !negative;
            break;
    }
    // A carry out of the significand moves into the exponent field by itself.
    const uint64_t code = (uint64_t(kept_exponent - min_exponent) << format.mantissa_bits) +
                          quotient + (increment ? 1 : 0);
    if (code > format.max_finite) {
        const bool rounds_inward = rounding == Rounding::toward_zero ||
                                   (rounding == Rounding::down && !negative) ||
                                   (rounding == Rounding::up && negative);
        if (overflow == Overflow::saturate || rounds_inward || !format.has_infinity)
            return sign | format.max_finite;
        return sign | (format.max_finite + 1);
    }
    return sign | uint32_t(code);
}

inline float bf16_to_float(uint16_t code) {
    return std::bit_cast<float>(uint32_t(code) << 16);
}
// As `decode`, without branches so that loops vectorize: the fields in an .f32's places are the
// number times 2^-112, subnormal ones too.
inline float f16_to_float(uint16_t code) {
    const uint32_t magnitude = code & 0x7fffu, sign = uint32_t(code & 0x8000u) << 16;
    const auto finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude == 0x7c00u ? 0x7f800000u : 0x7fc00000u;
    return std::bit_cast<float>((magnitude >= 0x7c00u ? special : finite) | sign);
}
inline uint16_t float_to_bf16(float value, Rounding rounding = Rounding::nearest_even,
                              Overflow overflow = Overflow::to_infinity) {
    return uint16_t(encode(bf16_format, value, rounding, overflow));
}
inline uint16_t float_to_f16(float value, Rounding rounding = Rounding::nearest_even,
                             Overflow overflow = Overflow::to_infinity) {
    return uint16_t(encode(f16_format, value, rounding, overflow));
}
inline uint32_t float_to_tf32(float value, Rounding rounding,
                              Overflow overflow = Overflow::to_infinity) {
    return encode(tf32_format, value, rounding, overflow) << 13;
}
// The tensor cores read a tf32 operand by ignoring the low 13 bits of its register.
inline float tf32_to_float(uint32_t code) {
    return std::bit_cast<float>(code & 0xffffe000u);
}

// 2^(code - 127); 0 is 2^-127, a subnormal float.
inline double ue8m0_to_double(uint8_t code) {
    if (code == 0xff) return std::numeric_limits<double>::quiet_NaN();
    return std::bit_cast<double>(uint64_t(int(code) - 127 + 1023) << 52);
}
inline float ue8m0_to_float(uint8_t code) {
    return float(ue8m0_to_double(code));
}

// The sign is dropped. Rounding up adds one to the exponent byte unless the value is a power of two
// or at most 2^-127.
inline uint8_t float_to_ue8m0(float value, Rounding rounding, Overflow overflow) {
    const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
    if (bits > 0x7f800000u) return 0xff;
    if (bits == 0x7f800000u) return overflow == Overflow::saturate ? 0xfe : 0xff;
    uint32_t code = bits >> 23;
    const bool at_most_smallest = bits <= 0x00400000u;  // 2^-127 is this subnormal float
    if (rounding == Rounding::up && (bits & 0x7fffffu) && !at_most_smallest) ++code;
    if (code == 0xff && overflow == Overflow::saturate) code = 0xfe;
    return uint8_t(code);
}
// All 8-bit codes of a format as doubles (formats below 8 bits: the unused top bits are ignored).
using DecodeTable = std::array<double, 256>;
inline DecodeTable make_decode_table(const FloatFormat& format) {
    DecodeTable table{};
    for (int code = 0; code < 256; ++code)
        table[code] = decode(format, code & ((1u << format.num_bits()) - 1));
    return table;
}

}  // namespace deep_moe::emulator
