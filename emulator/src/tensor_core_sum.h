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

    // A subnormal keeps its format's smallest exponent. All formats' numbers are normal doubles.
    static Unpacked from(double value, int bits, int min_exponent) {
        constexpr int double_bits = 52;
        const auto code = std::bit_cast<uint64_t>(value);
        const int own = int(code >> double_bits & 0x7ff) - 1023;
        if (own == -1023 || own == 1024) return {};
        const int exponent = std::max(own, min_exponent);
        const uint64_t whole = (code & ((uint64_t(1) << double_bits) - 1)) | uint64_t(1)
                                                                                 << double_bits;
        const auto magnitude = int32_t(whole >> std::min(double_bits - bits + exponent - own, 63));
        return {code >> 63 ? -magnitude : magnitude, exponent};
    }
};

struct UnpackedPanel {
    std::vector<int32_t> significands, exponents;
    bool all_finite = true;

    void set(const FloatFormat& format, const double* values, size_t num) {
        significands.resize(num);
        exponents.resize(num);
        bool finite = true;
        for (size_t i = 0; i < num; ++i) {
            const auto part = Unpacked::from(values[i], format.mantissa_bits, 1 - format.bias);
            significands[i] = part.significand;
            exponents[i] = part.exponent;
            finite &= std::isfinite(values[i]);
        }
        all_finite = finite;
    }
};

// One row of A times `columns` columns of B over some K indices, and what it is added to.
struct RowOfProducts {
    const int32_t *a_significands, *a_exponents;  // by K index
    const uint32_t* indices;
    uint32_t num_indices;
    const int32_t *b_significands, *b_exponents;  // [k][pitch]
    uint32_t pitch, columns;
    int fraction_bits, lead;  // by how many bits a product is shifted up at first
    const double* accumulator;
    int min_exponent;  // of the accumulator's format
};
// out[column]: the sum, where all of its terms are finite.
void add_row_of_products(const RowOfProducts& row, double* out);

class TensorCoreSum {
 public:
    // a: [rows][k], b: [k][pitch], both panels of exact values. unpacked_b: where B is unpacked to;
    // it is there already if `has_b`.
    TensorCoreSum(Element a_type, Element b_type, int fraction_bits, const double* a,
                  const double* b, uint32_t rows, uint32_t k, uint32_t pitch,
                  UnpackedPanel& unpacked_b, bool has_b = false)
        : a_(a), b_(b), k_(k), pitch_(pitch), fraction_bits_(fraction_bits), right_(unpacked_b) {
        const FloatFormat &a_format = format_of(a_type), &b_format = format_of(b_type);
        lead_ = fraction_bits - a_format.mantissa_bits - b_format.mantissa_bits;
        left_.set(a_format, a, size_t(rows) * k);
        if (!has_b) unpacked_b.set(b_format, b, size_t(k) * pitch);
        all_finite_ = left_.all_finite && right_.all_finite;
    }

    // out[column] = accumulator[column] + the products of the row and the column, over the K
    // indices that `takes` says yes to; before it is cut to the result's length.
    // min_exponent: of the accumulator's format.
    template <class Takes>
    void row(uint32_t row, uint32_t columns, const double* accumulator, int min_exponent,
             double* out, Takes takes) {
        const int32_t* exponents = left_.exponents.data() + size_t(row) * k_;
        indices_.clear();
        for (uint32_t i = 0; i < k_; ++i)
            if (takes(i) && exponents[i] != Unpacked::zero_exponent) indices_.push_back(i);
        addends_.assign(accumulator, accumulator + columns);  // which may be `out`
        add_row_of_products(
            {left_.significands.data() + size_t(row) * k_, exponents, indices_.data(),
             uint32_t(indices_.size()), right_.significands.data(), right_.exponents.data(), pitch_,
             columns, fraction_bits_, lead_, addends_.data(), min_exponent},
            out);
        bool any = !all_finite_;
        for (uint32_t n = 0; n < columns; ++n) any |= !std::isfinite(addends_[n]);
        for (uint32_t n = 0; any && n < columns; ++n) {
            if (!finite(row, n, addends_[n], takes)) out[n] = special(row, n, addends_[n], takes);
        }
    }

 private:
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
    UnpackedPanel left_;
    const UnpackedPanel& right_;
    std::vector<uint32_t> indices_;
    std::vector<double> addends_;
};

// A sum as an .f32 code: cut to `mantissa_bits`, infinite when it is too large.
inline uint32_t cut_to_f32(double sum, int mantissa_bits) {
    const auto code = std::bit_cast<uint64_t>(sum);
    const uint64_t exponent = code >> 52 & 0x7ff;
    if (exponent - (1023 - 126) < 254) {  // a normal .f32
        const auto cut = uint32_t((code & ~(0xfff0000000000000ull)) >> (52 - mantissa_bits))
                         << (23 - mantissa_bits);
        return uint32_t(code >> 63) << 31 | uint32_t(exponent - (1023 - 127)) << 23 | cut;
    }
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
