#include "dot_kernel.h"

namespace deep_moe::emulator {
namespace {

using Kernel = void (*)(const double* a, const double* b, double* out, int k, int num_columns,
                        int pitch);

// GCC lowers vector code for the target of the function in which it stands, before it inlines:
// hence the body is written once per target, `width` doubles per register and `count` registers per
// row.
#define DEEP_MOE_KERNEL(name, attributes, width, count)                                         \
    attributes void name(const double* a, const double* b, double* out, int k, int num_columns, \
                         int pitch) {                                                           \
        typedef double Vector __attribute__((vector_size(8 * width), aligned(8)));              \
        for (int n = 0; n < num_columns; n += width * count) {                                  \
            Vector sum[row_block][count] = {};                                                  \
            for (int i = 0; i < k; ++i) {                                                       \
                const Vector* row_of_b = reinterpret_cast<const Vector*>(b + i * pitch + n);    \
                _Pragma("GCC unroll 4") for (int row = 0; row < row_block; ++row) {             \
                    _Pragma("GCC unroll 4") for (int j = 0; j < count; ++j) {                   \
                        sum[row][j] += a[row * k + i] * row_of_b[j];                            \
                    }                                                                           \
                }                                                                               \
            }                                                                                   \
            _Pragma("GCC unroll 4") for (int row = 0; row < row_block; ++row) {                 \
                _Pragma("GCC unroll 4") for (int j = 0; j < count; ++j) {                       \
                    reinterpret_cast<Vector*>(out + row * pitch + n)[j] = sum[row][j];          \
                }                                                                               \
            }                                                                                   \
        }                                                                                       \
    }

#if defined(__x86_64__)
DEEP_MOE_KERNEL(multiply_avx512, __attribute__((target("avx512f"))), 8, 2)
DEEP_MOE_KERNEL(multiply_avx2, __attribute__((target("avx2,fma"))), 4, 2)
#endif
DEEP_MOE_KERNEL(multiply_generic, , 2, 2)

#undef DEEP_MOE_KERNEL

Kernel choose_kernel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return multiply_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_avx2;
#endif
    return multiply_generic;
}

}  // namespace

void multiply_row_block(const double* a, const double* b, double* out, int k, int num_columns,
                        int pitch) {
    static const Kernel kernel = choose_kernel();
    kernel(a, b, out, k, num_columns, pitch);
}

}  // namespace deep_moe::emulator
