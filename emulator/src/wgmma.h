// wgmma.mma_async: one warp's 16 rows of D (registers) = A (registers or shared memory) * B (shared
// memory) {+ D}. The four warps of a warpgroup hold rows 16w..16w+15 and do not exchange anything,
// so each runs by itself.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "matrix_descriptor.h"
#include "operand_panel.h"
#include "shared_window.h"

namespace deep_moe::emulator {

enum class WgmmaNumerics : uint8_t {
    exact_then_round,
    // FP8 only: terms are aligned to the largest one, accumulator included, and bits below 2^-13 of
    // it are dropped, as seen on an H200.
    hopper_fp8,
};

struct FragmentElement {
    uint32_t row, column;
};

// Row and column of accumulator register `i` (32-bit results) of lane `t`, inside the warp's 16
// rows.
inline FragmentElement accumulator_element(uint32_t t, uint32_t i) {
    return {t / 4 + 8 * ((i >> 1) & 1), 2 * (t % 4) + (i & 1) + 8 * (i >> 2)};
}

// Row and K index of element `e` of A register `r` of lane `t`; `per_register` elements share a
// register.
inline FragmentElement a_element(uint32_t t, uint32_t r, uint32_t e, uint32_t per_register) {
    return {t / 4 + 8 * (r & 1), per_register * (t % 4) + e + 4 * per_register * (r >> 1)};
}

// Sum of `k` products and `d` as the FP8 datapath of an H200 forms it.
inline float hopper_fp8_sum(const double* a, const double* b, uint32_t b_step, uint32_t k,
                            double d) {
    double largest = std::fabs(d);
    bool finite = std::isfinite(d);
    double plain = d;
    for (uint32_t i = 0; i < k; ++i) {
        const double product = a[i] * b[i * b_step];
        plain += product;
        finite &= std::isfinite(product);
        largest = std::fabs(product) > largest ? std::fabs(product) : largest;
    }
    if (!finite || largest == 0) return float(plain);
    const double quantum = std::ldexp(1.0, std::ilogb(largest) - 13);
    double sum = std::trunc(d / quantum);
    for (uint32_t i = 0; i < k; ++i) sum += std::trunc(a[i] * b[i * b_step] / quantum);
    return float(sum * quantum);
}

struct Wgmma {
    Element a_element_type = Element::e4m3, b_element_type = Element::e4m3;
    Accumulator d_type = Accumulator::f32;
    uint32_t n = 0, k = 0;
    bool a_mn_major = false, b_mn_major = false, negate_a = false, negate_b = false;
    bool accumulate = false;  // scale-d
    WgmmaNumerics numerics = WgmmaNumerics::exact_then_round;

    // `a_registers`: 4 rows of 32 lanes, or null when A comes from shared memory through `a`.
    // `d_registers`: n/2 rows of 32 lanes (n/4 with F16 results, two per register).
    void run(SharedWindow& shared, uint32_t warp_in_group, const uint32_t* const* a_registers,
             const MatrixDescriptor& a, const MatrixDescriptor& b, uint32_t* const* d_registers,
             Panels& panels) const {
        panels.resize(16, n, k);
        if (a_registers) {
            load_a_registers(a_registers, panels.a.data());
        } else {
            // The whole operand has 64 rows; an MN-major one is cut into chunks of rows, so fetch
            // all of it.
            const uint32_t size = container_bytes(a_element_type), row_bytes = k * size;
            const uint32_t first = 16 * warp_in_group;
            panels.bytes.resize(64 * row_bytes);
            gather_operand(shared, a, a_mn_major, 64, row_bytes, size, panels.bytes.data());
            for (uint32_t row = 0; row < 16; ++row) {
                decode_row(a_element_type, false, panels.bytes.data() + (first + row) * row_bytes,
                           k, panels.a.data() + row * k, 1);
            }
        }
        if (negate_a) {
            for (double& value : panels.a) value = -value;
        }
        const uint32_t size = container_bytes(b_element_type), row_bytes = k * size;
        panels.bytes.resize(n * row_bytes);
        gather_operand(shared, b, b_mn_major, n, row_bytes, size, panels.bytes.data());
        for (uint32_t row = 0; row < n; ++row) {
            decode_row(b_element_type, false, panels.bytes.data() + row * row_bytes, k,
                       panels.b.data() + row, panels.pitch);
        }
        if (negate_b) {
            for (double& value : panels.b) value = -value;
        }
        const bool fp8 = a_element_type == Element::e4m3 || a_element_type == Element::e5m2;
        for (uint32_t first_row = 0; first_row < 16; first_row += row_block) {
            panels.multiply(first_row, k);
            for (uint32_t row = first_row; row < first_row + row_block; ++row) {
                for (uint32_t column = 0; column < n; ++column) {
                    store(d_registers, row, column,
                          panels.product[(row - first_row) * panels.pitch + column],
                          fp8 && numerics == WgmmaNumerics::hopper_fp8, panels);
                }
            }
        }
    }

 private:
    void load_a_registers(const uint32_t* const* registers, double* out) const {
        const uint32_t size = container_bytes(a_element_type), per_register = 4 / size;
        for (uint32_t r = 0; r < 4; ++r) {
            for (uint32_t t = 0; t < 32; ++t) {
                double values[4];
                decode_row(a_element_type, false,
                           reinterpret_cast<const uint8_t*>(&registers[r][t]), per_register, values,
                           1);
                for (uint32_t e = 0; e < per_register; ++e) {
                    const FragmentElement at = a_element(t, r, e, per_register);
                    out[at.row * k + at.column] = values[e];
                }
            }
        }
    }

    void store(uint32_t* const* registers, uint32_t row, uint32_t column, double product,
               bool hopper, const Panels& panels) const {
        // Inverse of accumulator_element.
        const uint32_t lane = row % 8 * 4 + column % 8 / 2;
        const uint32_t index = column % 2 + 2 * (row / 8) + 4 * (column / 8);
        if (d_type == Accumulator::f16) {
            uint32_t& cell = registers[index / 2][lane];
            const uint32_t shift = 16 * (index % 2);
            const double d = accumulate ? f16_to_float(uint16_t(cell >> shift)) : 0.0;
            const uint32_t code = float_to_f16(float(product + d));
            cell = (cell & ~(0xffffu << shift)) | code << shift;
            return;
        }
        uint32_t& cell = registers[index][lane];
        if (d_type == Accumulator::s32) {
            cell = uint32_t(int64_t(product) + (accumulate ? int32_t(cell) : 0));
            return;
        }
        const double d = accumulate ? double(std::bit_cast<float>(cell)) : 0.0;
        const float sum = hopper ? hopper_fp8_sum(panels.a.data() + row * k,
                                                  panels.b.data() + column, panels.pitch, k, d)
                                 : float(product + d);
        cell = std::bit_cast<uint32_t>(sum);
    }
};

}  // namespace deep_moe::emulator
