// What bulk copies that reduce, red.async and multimem instructions make of two elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "float_types.h"
#include "instruction_table.h"

namespace deep_moe::emulator {

enum class Reduction : uint8_t {
    none,
    add,
    add_flushed,  // of a tensor of an FTZ type
    min,
    max,
    inc,
    dec,
    bit_and,
    bit_or,
    bit_xor
};

template <class T>
T reduce_integer(Reduction operation, T old, T value) {
    switch (operation) {
        case Reduction::add:
            return T(old + value);
        case Reduction::min:
            return std::min(old, value);
        case Reduction::max:
            return std::max(old, value);
        case Reduction::inc:
            return old >= value ? T(0) : T(old + 1);
        case Reduction::dec:
            return old == 0 || old > value ? value : T(old - 1);
        case Reduction::bit_and:
            return T(old & value);
        case Reduction::bit_or:
            return T(old | value);
        case Reduction::bit_xor:
            return T(old ^ value);
        case Reduction::none:
        case Reduction::add_flushed:
            break;
    }
    return value;
}

// As the atomic units of an H200 do it: numbers win over NaN, -0 is less than 0.
inline float smaller(float a, float b) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
    return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
inline float reduce_float(Reduction operation, float old, float value) {
    switch (operation) {
        case Reduction::min:
            return smaller(old, value);
        case Reduction::max:
            return -smaller(-old, -value);
        case Reduction::add_flushed:
            old = flush(old), value = flush(value);
            return std::isnan(old + value) ? canonical_nan() : flush(old + value);
        default:
            return std::isnan(old + value) ? canonical_nan() : old + value;
    }
}
inline double reduce_double(Reduction operation, double old, double value) {
    if (operation != Reduction::add)
        fail(FaultKind::unsupported, "a bulk reduction of .f64 other than .add");
    return std::isnan(value) ? value : std::isnan(old) ? old : old + value;
}

template <class T, class F>
void for_each_element(uint8_t* target, const uint8_t* source, uint64_t num_bytes, F f) {
    for (uint64_t i = 0; i + sizeof(T) <= num_bytes; i += sizeof(T)) {
        T old, value;
        std::memcpy(&old, target + i, sizeof(T));
        std::memcpy(&value, source + i, sizeof(T));
        old = f(old, value);
        std::memcpy(target + i, &old, sizeof(T));
    }
}

// The engine runs one operation at a time, so that the elements change atomically for everybody in
// this process.
inline void combine(Reduction operation, Type type, uint8_t* target, const uint8_t* source,
                    uint64_t num_bytes) {
    auto integers = [&]<class T>(T) {
        for_each_element<T>(target, source, num_bytes,
                            [&](T a, T b) { return reduce_integer<T>(operation, a, b); });
    };
    switch (type) {
        case Type::none:
            // They may overlap within a CTA, and a copy of no bytes has no source.
            if (num_bytes) std::memmove(target, source, num_bytes);
            return;
        case Type::u32:
        case Type::b32:
            return integers(uint32_t{});
        case Type::s32:
            return integers(int32_t{});
        case Type::u64:
        case Type::b64:
            return integers(uint64_t{});
        case Type::s64:
            return integers(int64_t{});
        case Type::f32:
            return for_each_element<float>(target, source, num_bytes, [&](float a, float b) {
                return reduce_float(operation, a, b);
            });
        case Type::f64:
            return for_each_element<double>(target, source, num_bytes, [&](double a, double b) {
                return reduce_double(operation, a, b);
            });
        case Type::f16:
            return for_each_element<uint16_t>(
                target, source, num_bytes, [&](uint16_t a, uint16_t b) {
                    return float_to_f16(reduce_float(operation, f16_to_float(a), f16_to_float(b)));
                });
        case Type::bf16:
            return for_each_element<uint16_t>(
                target, source, num_bytes, [&](uint16_t a, uint16_t b) {
                    return float_to_bf16(
                        reduce_float(operation, bf16_to_float(a), bf16_to_float(b)));
                });
        case Type::e4m3:
        case Type::e5m2: {
            const FloatFormat& format = type == Type::e4m3 ? e4m3_format : e5m2_format;
            return for_each_element<uint8_t>(target, source, num_bytes, [&](uint8_t a, uint8_t b) {
                const float one = float(decode(format, a)), two = float(decode(format, b));
                return uint8_t(encode(format, reduce_float(operation, one, two),
                                      Rounding::nearest_even, Overflow::saturate));
            });
        }
        default:
            fail(FaultKind::unsupported, "bulk reduction of .%s", name_of(type));
    }
}

inline constexpr std::pair<const char*, Reduction> reductions[] = {
    {"add", Reduction::add},   {"min", Reduction::min},    {"max", Reduction::max},
    {"inc", Reduction::inc},   {"dec", Reduction::dec},    {"and", Reduction::bit_and},
    {"or", Reduction::bit_or}, {"xor", Reduction::bit_xor}};

inline const char* reduction_name(Reduction reduction) {
    return std::find_if(std::begin(reductions), std::end(reductions),
                        [&](const auto& entry) { return entry.second == reduction; })
        ->first;
}

inline Reduction take_reduction(Decoder& d) {
    for (auto [name, reduction] : reductions) {
        if (d.take(name)) return reduction;
    }
    d.invalid("the reduction is missing");
}

}  // namespace deep_moe::emulator
