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

// out[row][n] = sum over k of a[row][k] * b[k][n] for 4 rows and `num_columns` (multiple of 16)
// columns. b and out have `pitch` columns.
void multiply_row_block(const double* a, const double* b, double* out, int k, int num_columns,
                        int pitch);

}  // namespace deep_moe::emulator
