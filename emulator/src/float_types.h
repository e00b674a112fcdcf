// Storage types of half-precision registers, and how floating instructions round and flush.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "instruction_table.h"
#include "numeric.h"

namespace deep_moe::emulator {

struct Half {
    uint16_t bits;
    operator float() const { return f16_to_float(bits); }
    static Half from(float value) { return {float_to_f16(value)}; }
};

struct BFloat {
    uint16_t bits;
    operator float() const { return bf16_to_float(bits); }
    static BFloat from(float value) {  // to nearest even, in integers so that loops vectorize
        uint32_t code = std::bit_cast<uint32_t>(value);
        uint32_t rounded = (code + 0x7fff + ((code >> 16) & 1)) >> 16;
        return {uint16_t((code & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded)};
    }
};

// What the hardware writes for any NaN in .f32.
inline float canonical_nan() {
    return std::bit_cast<float>(0x7fffffffu);
}
// In .f64 an operand's NaN goes on, quiet; `first` before `second`, and a NaN of its own if neither
// is one.
inline double propagated_nan(double first, double second) {
    const double from = std::isnan(first) ? first : second;
    const uint64_t bits = std::isnan(from) ? std::bit_cast<uint64_t>(from) : uint64_t(0xfff) << 52;
    return std::bit_cast<double>(bits | uint64_t(1) << 51);
}

inline float flush(float value) {
    return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value;
}
// The result of an .ftz instruction that rounds. Zero becomes what would be below 2^-126 if
// exponents had no end, also where IEEE rounds it up to that. `scaled(factor)`: the instruction
// again on an exact multiple of its value.
template <class Scaled>
float flush_rounded(float value, Scaled scaled) {
    if (std::fabs(value) == 0x1p-126f && std::fabs(scaled(0x1p64f)) < 0x1p-62f)
        return std::copysign(0.0f, value);
    return flush(value);
}
inline double flush(double value) {
    return std::fabs(value) < 0x1p-1022 ? std::copysign(0.0, value) : value;
}

inline Half flush(Half value) {
    return value.bits & 0x7c00 ? value : Half{uint16_t(value.bits & 0x8000)};
}

// The floating halves of instructions that exist for integers too. Each decodes the whole
// statement.
bool has_float_type(const Decoder& d);
void decode_float_add(Decoder& d);
void decode_float_sub(Decoder& d);
void decode_float_mul(Decoder& d);
void decode_float_fma(Decoder& d);
void decode_float_div(Decoder& d);
void decode_float_min(Decoder& d);
void decode_float_max(Decoder& d);
void decode_float_abs(Decoder& d);
void decode_float_neg(Decoder& d);

}  // namespace deep_moe::emulator
