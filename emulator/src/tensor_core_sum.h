// How an H200's tensor cores add the products of one instruction, bit for bit (tests/hardware).
//
// All products and the accumulator are aligned to the largest exponent among them, where a product
// counts with the sum of its factors' exponents; what lies more than `fraction_bits` below it is
// cut off each term. The sum of what is left is exact, and cut to the result's length; only .f16
// results are rounded to nearest. wgmma of FP8 keeps 13 fraction bits, everything else 25.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "matrix_descriptor.h"
#include "numeric.h"

namespace deep_moe::emulator {

inline bool is_fp8(Element element) {
    return element == Element::e4m3 || element == Element::e5m2;
}

inline const FloatFormat& format_of(Element element) {
    switch (element) {
        case Element::f16:
            return f16_format;
        case Element::bf16:
            return bf16_format;
        case Element::tf32:
            return tf32_format;
        case Element::e5m2:
            return e5m2_format;
        default:
            return e4m3_format;
    }
}

// A number as `significand` * 2^(exponent - bits); the exponent of zero is below all others.
struct Unpacked {
    static constexpr int32_t zero_exponent = -20000;
    int32_t significand = 0, exponent = zero_exponent;

    // A subnormal keeps its format's smallest exponent.
    static Unpacked from(double value, int bits, int min_exponent) {
        if (value == 0 || !std::isfinite(value)) return {};
        const int exponent = std::max(std::ilogb(value), min_exponent);
        return {int32_t(std::ldexp(value, bits - exponent)), exponent};
    }
};

class TensorCoreSum {
 public:
    // a: [rows][k], b: [k][pitch], both panels of exact values.
    TensorCoreSum(Element a_type, Element b_type, int fraction_bits, const double* a,
                  const double* b, uint32_t rows, uint32_t k, uint32_t pitch)
        : a_(a), b_(b), k_(k), pitch_(pitch), fraction_bits_(fraction_bits) {
        const FloatFormat &a_format = format_of(a_type), &b_format = format_of(b_type);
        lead_ = fraction_bits - a_format.mantissa_bits - b_format.mantissa_bits;
        unpack(a_format, a, size_t(rows) * k, a_significands_, a_exponents_);
        unpack(b_format, b, size_t(k) * pitch, b_significands_, b_exponents_);
    }

    // out[column] = accumulator[column] + the products of the row and the column, over the K
    // indices that `takes` says yes to; before it is cut to the result's length.
    // min_exponent: of the accumulator's format.
    template <class Takes>
    void row(uint32_t row, uint32_t columns, const double* accumulator, int min_exponent,
             double* out, Takes takes) {
        largest_.assign(columns, Unpacked::zero_exponent);
        sum_.assign(columns, 0);
        addends_.resize(columns);
        for (uint32_t n = 0; n < columns; ++n) {
            addends_[n] = Unpacked::from(accumulator[n], 23, min_exponent);
            largest_[n] = addends_[n].exponent;
        }
        const size_t first_a = size_t(row) * k_;
        int32_t* largest = largest_.data();
        int64_t* sum = sum_.data();
        for (uint32_t i = 0; i < k_; ++i) {
            const int32_t a_exponent = a_exponents_[first_a + i];
            if (!takes(i) || a_exponent == Unpacked::zero_exponent) continue;
            const int32_t* b_exponents = b_exponents_.data() + size_t(i) * pitch_;
            for (uint32_t n = 0; n < columns; ++n)
                largest[n] = std::max(largest[n], a_exponent + b_exponents[n]);
        }
        for (uint32_t i = 0; i < k_; ++i) {
            const int32_t a_exponent = a_exponents_[first_a + i];
            if (!takes(i) || a_exponent == Unpacked::zero_exponent) continue;
            const int32_t a = a_significands_[first_a + i];
            const int32_t* b = b_significands_.data() + size_t(i) * pitch_;
            const int32_t* b_exponents = b_exponents_.data() + size_t(i) * pitch_;
            for (uint32_t n = 0; n < columns; ++n) {
                const int32_t product = a * b[n];
                const int32_t down = std::min(largest[n] - a_exponent - b_exponents[n], 31);
                const int32_t magnitude = (std::abs(product) << lead_) >> down;
                sum[n] += product < 0 ? -magnitude : magnitude;
            }
        }
        for (uint32_t n = 0; n < columns; ++n) {
            if (!finite(row, n, accumulator[n], takes)) {
                out[n] = special(row, n, accumulator[n], takes);
                continue;
            }
            const int32_t down =
                largest_[n] - addends_[n].exponent + std::max(23 - fraction_bits_, 0);
            const int64_t whole = int64_t(std::abs(addends_[n].significand))
                                  << std::max(fraction_bits_ - 23, 0);
            const int64_t magnitude = whole >> std::min(down, 62);
            sum_[n] += addends_[n].significand < 0 ? -magnitude : magnitude;
            out[n] = sum_[n] ? std::ldexp(double(sum_[n]), largest_[n] - fraction_bits_) : 0.0;
        }
    }

 private:
    void unpack(const FloatFormat& format, const double* values, size_t num,
                std::vector<int32_t>& significands, std::vector<int32_t>& exponents) {
        significands.resize(num);
        exponents.resize(num);
        for (size_t i = 0; i < num; ++i) {
            const auto part = Unpacked::from(values[i], format.mantissa_bits, 1 - format.bias);
            significands[i] = part.significand;
            exponents[i] = part.exponent;
            all_finite_ &= std::isfinite(values[i]);
        }
    }

    template <class Takes>
    bool finite(uint32_t row, uint32_t column, double accumulator, Takes takes) const {
        if (!std::isfinite(accumulator)) return false;
        if (all_finite_) return true;
        for (uint32_t i = 0; i < k_; ++i) {
            if (takes(i) &&
                !std::isfinite(a_[size_t(row) * k_ + i] * b_[size_t(i) * pitch_ + column]))
                return false;
        }
        return true;
    }

    template <class Takes>
    double special(uint32_t row, uint32_t column, double sum, Takes takes) const {
        for (uint32_t i = 0; i < k_; ++i) {
            if (takes(i)) sum += a_[size_t(row) * k_ + i] * b_[size_t(i) * pitch_ + column];
        }
        return sum;
    }

    const double *a_, *b_;
    uint32_t k_, pitch_;
    int fraction_bits_, lead_ = 0;
    bool all_finite_ = true;
    std::vector<int32_t> a_significands_, a_exponents_, b_significands_, b_exponents_, largest_;
    std::vector<Unpacked> addends_;
    std::vector<int64_t> sum_;
};

// A sum as an .f32 code: cut to `mantissa_bits`, infinite when it is too large.
inline uint32_t cut_to_f32(double sum, int mantissa_bits) {
    if (std::isnan(sum)) return 0x7fffffff;
    if (std::isinf(sum) || std::fabs(sum) >= 0x1p128)
        return std::signbit(sum) ? 0xff800000 : 0x7f800000;
    uint64_t bits = std::bit_cast<uint64_t>(sum);
    bits &= ~((uint64_t(1) << (52 - mantissa_bits)) - 1);
    const double cut = std::bit_cast<double>(bits);
    float nearest = float(cut);  // inexact only if it is subnormal
    if (std::fabs(double(nearest)) > std::fabs(cut)) nearest = std::nextafter(nearest, 0.0f);
    return std::bit_cast<uint32_t>(nearest);
}

}  // namespace deep_moe::emulator
