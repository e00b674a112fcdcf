#include "tensor_core_sum.h"

namespace deep_moe::emulator {
namespace {

using Kernel = void (*)(const RowOfProducts& row, double* out);

// Columns that are added together. Without its sign a term has at most 27 bits (25 of a fraction
// and 2 before it), so that eight fit in 32.
constexpr int width = 16;
constexpr uint32_t group = 8;

// `width` columns, of B and of the accumulators alike.
#define DEEP_MOE_KERNEL(name, attributes)                                                      \
    attributes void name(const RowOfProducts& row, double* out) {                              \
        typedef int32_t Vector __attribute__((vector_size(4 * width)));                        \
        typedef int32_t Unaligned __attribute__((vector_size(4 * width), aligned(4)));         \
        alignas(64) int32_t significands[width], exponents[width], largest_of[width];          \
        alignas(64) int64_t sum[width] = {};                                                   \
        for (int n = 0; n < width; ++n) {                                                      \
            const auto code = std::bit_cast<uint64_t>(row.accumulator[n]);                     \
            const auto own = int32_t(code >> 52 & 0x7ff) - 1023;                               \
            const bool is_number = own != -1023 && own != 1024;                                \
            const int32_t exponent = own < row.min_exponent ? row.min_exponent : own;          \
            const int32_t away = 52 - 23 + exponent - own;                                     \
            const uint64_t whole = (code & 0xfffffffffffffull) | 0x10000000000000ull;          \
            const auto magnitude = int32_t(whole >> (away < 63 ? away : 63));                  \
            const auto sign = -int32_t(code >> 63);                                            \
            significands[n] = is_number ? (magnitude ^ sign) - sign : 0;                       \
            exponents[n] = is_number ? exponent : Unpacked::zero_exponent;                     \
        }                                                                                      \
        Vector largest = *reinterpret_cast<const Vector*>(exponents);                          \
        for (uint32_t j = 0; j < row.num_indices; ++j) {                                       \
            const uint32_t i = row.indices[j];                                                 \
            const Vector exponent = row.a_exponents[i] + *reinterpret_cast<const Unaligned*>(  \
                                                             row.b_exponents + i * row.pitch); \
            largest = largest < exponent ? exponent : largest;                                 \
        }                                                                                      \
        for (uint32_t first = 0; first < row.num_indices; first += group) {                    \
            Vector part = {};                                                                  \
            const uint32_t end =                                                               \
                first + group < row.num_indices ? first + group : row.num_indices;             \
            for (uint32_t j = first; j < end; ++j) {                                           \
                const uint32_t i = row.indices[j];                                             \
                const Vector product =                                                         \
                    row.a_significands[i] *                                                    \
                    *reinterpret_cast<const Unaligned*>(row.b_significands + i * row.pitch);   \
                const Vector away =                                                            \
                    (largest - row.a_exponents[i]) -                                           \
                    *reinterpret_cast<const Unaligned*>(row.b_exponents + i * row.pitch);      \
                const Vector down = away < 31 ? away : 31 + Vector{};                          \
                const Vector sign = product >> 31;                                             \
                const Vector magnitude = (((product ^ sign) - sign) << row.lead) >> down;      \
                part += (magnitude ^ sign) - sign;                                             \
            }                                                                                  \
            for (int n = 0; n < width; ++n) sum[n] += part[n];                                 \
        }                                                                                      \
        *reinterpret_cast<Vector*>(largest_of) = largest;                                      \
        const int up = row.fraction_bits > 23 ? row.fraction_bits - 23 : 0;                    \
        const int shorter = row.fraction_bits < 23 ? 23 - row.fraction_bits : 0;               \
        for (int n = 0; n < width; ++n) {                                                      \
            const int32_t sign = significands[n] >> 31;                                        \
            const int64_t whole = int64_t((significands[n] ^ sign) - sign) << up;              \
            const int32_t away = largest_of[n] - exponents[n] + shorter;                       \
            const int64_t magnitude = whole >> (away < 62 ? away : 62);                        \
            const int64_t total = sum[n] + ((magnitude ^ sign) - sign);                        \
            /* Zero where all terms are, whatever the power. */                                \
            const int32_t exponent = largest_of[n] - row.fraction_bits;                        \
            const uint64_t power = uint64_t(exponent < -1022 ? 1 : exponent + 1023) << 52;     \
            out[n] = double(total) * std::bit_cast<double>(power);                             \
        }                                                                                      \
    }

// As in dot_kernel.cpp: one for each target, chosen when it is used first.
#if defined(__x86_64__)
DEEP_MOE_KERNEL(add_avx512, __attribute__((target("avx512f,avx512dq,prefer-vector-width=512"))))
DEEP_MOE_KERNEL(add_avx2, __attribute__((target("avx2"))))
#endif
DEEP_MOE_KERNEL(add_generic, )

#undef DEEP_MOE_KERNEL

Kernel choose_kernel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return add_avx512;
    if (__builtin_cpu_supports("avx2")) return add_avx2;
#endif
    return add_generic;
}

}  // namespace

void add_row_of_products(const RowOfProducts& row, double* out) {
    static const Kernel kernel = choose_kernel();
    for (uint32_t first = 0; first < row.columns; first += width) {
        RowOfProducts part = row;
        part.b_significands += first;
        part.b_exponents += first;
        part.accumulator += first;
        const uint32_t count = row.columns - first;
        if (count >= width) {
            kernel(part, out + first);
            continue;
        }
        // The last columns, with others that are zero.
        std::vector<int32_t> significands(size_t(row.num_indices) * width),
            exponents(significands.size(), Unpacked::zero_exponent), a_significands, a_exponents;
        std::vector<uint32_t> indices;
        for (uint32_t j = 0; j < row.num_indices; ++j) {
            const size_t from = size_t(row.indices[j]) * row.pitch;
            std::copy_n(part.b_significands + from, count, significands.data() + j * width);
            std::copy_n(part.b_exponents + from, count, exponents.data() + j * width);
            a_significands.push_back(row.a_significands[row.indices[j]]);
            a_exponents.push_back(row.a_exponents[row.indices[j]]);
            indices.push_back(j);
        }
        double accumulator[width] = {}, sums[width];
        std::copy_n(part.accumulator, count, accumulator);
        part.a_significands = a_significands.data();
        part.a_exponents = a_exponents.data();
        part.indices = indices.data();
        part.b_significands = significands.data();
        part.b_exponents = exponents.data();
        part.pitch = width;
        part.accumulator = accumulator;
        kernel(part, sums);
        std::copy_n(sums, count, out + first);
    }
}

}  // namespace deep_moe::emulator
