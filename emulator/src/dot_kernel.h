// The multiply-accumulate loop of every emulated tensor core: D = C + A * B^T over panels of
// doubles.
//
// All products of the element formats are exact in double; the sum of one instruction is exact for
// E4M3, E2M1 and narrower ones and off by at most a few 2^-53 of its largest term otherwise; the
// result is rounded once.
#pragma once

#include <cstdint>

namespace deep_moe::emulator {

constexpr int panel_columns = 16;  // n is padded to this
constexpr int row_block = 4;
constexpr uint32_t tensor_core_nan = 0x7fffffff;

// out[row][n] = sum over k of a[row][k] * b[k][n] for 4 rows and `num_columns` (multiple of 16)
// columns. b and out have `pitch` columns.
void multiply_row_block(const double* a, const double* b, double* out, int k, int num_columns,
                        int pitch);

// cells[i] = product[i] + cells[i] * factor of `count` floats' bits, rounded once.
void add_row_to_f32(const double* product, float factor, uint32_t* cells, int count);

}  // namespace deep_moe::emulator
