// Elementary functions with the same bits on every host. C libraries differ in their last bits, by
// version and by processor, as some of them fuse products and sums. Here are only sums, products
// and quotients of doubles, each of which IEEE 754 defines and no compiler flag of ours lets fuse.
//
// The error is below 2^-48 of the result, far below the last bit of a float.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace deep_moe::emulator::elementary {

template <size_t N>
inline double polynomial(const std::array<double, N>& coefficients, double x) {
    double sum = coefficients[N - 1];
    for (size_t i = N - 1; i-- > 0;) sum = sum * x + coefficients[i];
    return sum;
}

// scale^(first + i * step) / (first + i * step)!, every second one negative if `alternating`
template <size_t N>
constexpr std::array<double, N> exponential_series(double scale, int first, int step,
                                                   bool alternating) {
    std::array<double, N> series{};
    double term = 1;
    int power = 0;
    for (size_t i = 0; i < N; ++i) {
        for (; power < first + int(i) * step;) term = term * scale / ++power;
        series[i] = alternating && i % 2 ? -term : term;
    }
    return series;
}

// Ties to even. |x| < 2^51, and the host rounds to nearest.
inline double nearest_integer(double x) {
    constexpr double shift = 0x1.8p52;
    return (x + shift) - shift;
}

// 2^x; 0 or infinity where that is beyond 2^-1000 and 2^1000.
inline double exp2(double x) {
    if (std::isnan(x)) return x;
    if (x <= -1000) return 0;
    if (x >= 1000) return std::numeric_limits<double>::infinity();
    static constexpr auto series = exponential_series<14>(std::numbers::ln2, 0, 1, false);
    const double whole = nearest_integer(x);
    const double power = std::bit_cast<double>(uint64_t(int64_t(whole) + 1023) << 52);
    return polynomial(series, x - whole) * power;
}

inline double exp(double x) {
    return exp2(x * std::numbers::log2e);
}

// The logarithm to base 2 of zero or a normal double.
inline double log2(double x) {
    if (std::isnan(x) || x < 0) return std::numeric_limits<double>::quiet_NaN();
    if (x == 0) return -std::numeric_limits<double>::infinity();
    if (std::isinf(x)) return x;
    // 2 / ln(2) * artanh(s) = log2((1 + s) / (1 - s))
    static constexpr auto series = [] {
        std::array<double, 12> terms{};
        for (size_t i = 0; i < terms.size(); ++i) terms[i] = 2 * std::numbers::log2e / (2 * i + 1);
        return terms;
    }();
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    int64_t exponent = int64_t(bits >> 52) - 1023;
    double significand =
        std::bit_cast<double>((bits & ~(uint64_t(0x7ff) << 52)) | uint64_t(1023) << 52);
    if (significand > std::numbers::sqrt2) significand /= 2, ++exponent;
    const double s = (significand - 1) / (significand + 1);
    return double(exponent) + s * polynomial(series, s * s);
}

struct SineAndCosine {
    double sine, cosine;
};

// Of an angle in turns, at most one half of one.
inline SineAndCosine of_turns(double turns) {
    constexpr double full_turn = 2 * std::numbers::pi;
    static constexpr auto sines = exponential_series<10>(full_turn, 1, 2, true);
    static constexpr auto cosines = exponential_series<10>(full_turn, 0, 2, true);
    if (std::isnan(turns)) return {turns, turns};
    const double quarters = nearest_integer(4 * turns), rest = turns - quarters / 4;
    const double sine = rest * polynomial(sines, rest * rest),
                 cosine = polynomial(cosines, rest * rest);
    switch (int(quarters) & 3) {
        case 0:
            return {sine, cosine};
        case 1:
            return {cosine, -sine};
        case 2:
            return {-sine, -cosine};
        default:
            return {-cosine, sine};
    }
}

inline double tanh(double x) {
    if (std::isnan(x)) return x;
    const double twice = 2 * std::fabs(x);
    double result = 1;
    if (twice < 0.8) {
        static constexpr auto series = exponential_series<18>(1, 1, 1, false);
        const double grown = twice * polynomial(series, twice);  // e^twice - 1
        result = grown / (grown + 2);
    } else if (twice < 80) {
        const double power = exp(twice);
        result = (power - 1) / (power + 1);
    }
    return std::copysign(result, x);
}

}  // namespace deep_moe::emulator::elementary
