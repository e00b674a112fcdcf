#include "dot_kernel.h"

#include <bit>
#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace deep_moe::emulator {
namespace {

using Kernel = void (*)(const double* a, const double* b, double* out, int k, int num_columns,
                        int pitch);

// GCC lowers vector code for the target of the function in which it stands, before it inlines:
// hence the bodies are written once per target, `width` doubles per register and `count` registers
// per row. ADD_PRODUCT(sum, factor, vector) may fuse: products are exact, so that it changes no
// bit.
#define DEEP_MOE_KERNEL(name, attributes, width, count, ADD_PRODUCT)                              \
    attributes void name(const double* a, const double* b, double* out, int k, int num_columns,   \
                         int pitch) {                                                             \
        typedef double Vector __attribute__((vector_size(8 * width), aligned(8)));                \
        for (int n = 0; n < num_columns; n += width * count) {                                    \
            Vector sum[row_block][count] = {};                                                    \
            const double *of_a = a, *of_b = b + n;                                                \
            for (int i = 0; i < k; ++i, ++of_a, of_b += pitch) {                                  \
                const Vector* row_of_b = reinterpret_cast<const Vector*>(of_b);                   \
                _Pragma("GCC unroll 4") for (int row = 0; row < row_block; ++row) {               \
                    _Pragma("GCC unroll 4") for (int j = 0; j < count; ++j) {                     \
                        sum[row][j] =                                                             \
                            ADD_PRODUCT(sum[row][j], of_a[size_t(row) * size_t(k)], row_of_b[j]); \
                    }                                                                             \
                }                                                                                 \
            }                                                                                     \
            _Pragma("GCC unroll 4") for (int row = 0; row < row_block; ++row) {                   \
                _Pragma("GCC unroll 4") for (int j = 0; j < count; ++j) {                         \
                    reinterpret_cast<Vector*>(out + row * pitch + n)[j] = sum[row][j];            \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
    }

#define DEEP_MOE_ADD_ROW(name, attributes)                                                         \
    attributes void name(const double* product, float factor, uint32_t* cells, int count) {        \
        for (int i = 0; i < count; ++i) {                                                          \
            const float sum = float(product[i] + double(std::bit_cast<float>(cells[i]) * factor)); \
            cells[i] = sum != sum ? tensor_core_nan : std::bit_cast<uint32_t>(sum);                \
        }                                                                                          \
    }

#define AVX512_ADD_PRODUCT(sum, factor, vector) _mm512_fmadd_pd(_mm512_set1_pd(factor), vector, sum)
#define AVX2_ADD_PRODUCT(sum, factor, vector) _mm256_fmadd_pd(_mm256_set1_pd(factor), vector, sum)
#define NEON_ADD_PRODUCT(sum, factor, vector) vfmaq_n_f64(sum, vector, factor)
#define PLAIN_ADD_PRODUCT(sum, factor, vector) sum + factor* vector

#if defined(__x86_64__)
DEEP_MOE_KERNEL(multiply_avx512, __attribute__((target("avx512f"))), 8, 2, AVX512_ADD_PRODUCT)
DEEP_MOE_KERNEL(multiply_avx2, __attribute__((target("avx2,fma"))), 4, 2, AVX2_ADD_PRODUCT)
DEEP_MOE_ADD_ROW(add_row_avx512, __attribute__((target("avx512f"))))
DEEP_MOE_ADD_ROW(add_row_avx2, __attribute__((target("avx2"))))
#endif
#if defined(__aarch64__)
DEEP_MOE_KERNEL(multiply_generic, , 2, 2, NEON_ADD_PRODUCT)
#else
DEEP_MOE_KERNEL(multiply_generic, , 2, 2, PLAIN_ADD_PRODUCT)
#endif
DEEP_MOE_ADD_ROW(add_row_generic, )

#undef DEEP_MOE_KERNEL
#undef DEEP_MOE_ADD_ROW

struct Kernels {
    Kernel multiply;
    void (*add_row)(const double* product, float factor, uint32_t* cells, int count);
};

const Kernels& kernels() {
    static const Kernels chosen = []() -> Kernels {
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f")) return {multiply_avx512, add_row_avx512};
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
            return {multiply_avx2, add_row_avx2};
#endif
        return {multiply_generic, add_row_generic};
    }();
    return chosen;
}

}  // namespace

void multiply_row_block(const double* a, const double* b, double* out, int k, int num_columns,
                        int pitch) {
    kernels().multiply(a, b, out, k, num_columns, pitch);
}

void add_row_to_f32(const double* product, float factor, uint32_t* cells, int count) {
    kernels().add_row(product, factor, cells, count);
}

}  // namespace deep_moe::emulator
