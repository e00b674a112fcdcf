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
#include "tensor_core_sum.h"

namespace deep_moe::emulator {

// Of FP8 operands; all others are added as an H200 does it.
enum class WgmmaNumerics : uint8_t { exact_then_round, hopper_fp8 };

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
        const bool fp8 = is_fp8(a_element_type);
        if (d_type == Accumulator::s32 || (fp8 && numerics == WgmmaNumerics::exact_then_round))
            add_exactly(d_registers, panels);
        else
            add_as_the_hardware(d_registers, fp8, panels);
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

    // The inverse of accumulator_element, for one row of the warp's.
    struct Cell {
        uint32_t& word;
        uint32_t shift;  // of an F16 result in it
    };
    Cell cell(uint32_t* const* registers, uint32_t row, uint32_t column) const {
        const uint32_t lane = row % 8 * 4 + column % 8 / 2;
        const uint32_t index = column % 2 + 2 * (row / 8) + 4 * (column / 8);
        if (d_type == Accumulator::f16) return {registers[index / 2][lane], 16 * (index % 2)};
        return {registers[index][lane], 0};
    }

    double addend(const Cell& at) const {
        if (!accumulate) return 0.0;
        if (d_type == Accumulator::f16) return f16_to_float(uint16_t(at.word >> at.shift));
        if (d_type == Accumulator::s32) return int32_t(at.word);
        return double(std::bit_cast<float>(at.word));
    }

    void store_f16(const Cell& at, double sum) const {
        const uint32_t code =
            uint32_t(encode(f16_format, sum, Rounding::nearest_even, Overflow::to_infinity));
        at.word = (at.word & ~(0xffffu << at.shift)) | code << at.shift;
    }

    void add_exactly(uint32_t* const* registers, Panels& panels) const {
        for (uint32_t first_row = 0; first_row < 16; first_row += row_block) {
            panels.multiply(first_row, k);
            for (uint32_t row = first_row; row < first_row + row_block; ++row) {
                for (uint32_t column = 0; column < n; ++column) {
                    const Cell at = cell(registers, row, column);
                    const double sum =
                        panels.product[(row - first_row) * panels.pitch + column] + addend(at);
                    if (d_type == Accumulator::s32)
                        at.word = uint32_t(int64_t(sum));
                    else if (d_type == Accumulator::f16)
                        store_f16(at, sum);
                    else
                        at.word = std::bit_cast<uint32_t>(float(sum));
                }
            }
        }
    }

    void add_as_the_hardware(uint32_t* const* registers, bool fp8, const Panels& panels) const {
        TensorCoreSum sums(a_element_type, b_element_type, fp8 ? 13 : 25, panels.a.data(),
                           panels.b.data(), 16, k, panels.pitch);
        const bool f16 = d_type == Accumulator::f16;
        double addends[256], out[256];
        for (uint32_t row = 0; row < 16; ++row) {
            for (uint32_t column = 0; column < n; ++column)
                addends[column] = addend(cell(registers, row, column));
            sums.row(row, n, addends, f16 ? -14 : -126, out, [](uint32_t) { return true; });
            for (uint32_t column = 0; column < n; ++column) {
                const Cell at = cell(registers, row, column);
                if (f16)
                    store_f16(at, out[column]);
                else
                    at.word = cut_to_f32(out[column], fp8 ? 13 : 23);
            }
        }
    }
};

}  // namespace deep_moe::emulator
