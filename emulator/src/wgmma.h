// wgmma.mma_async: one warp's 16 rows of D (registers) = A (registers or shared memory) * B (shared
// memory) {+ D}. The four warps of a warpgroup hold rows 16w..16w+15 and do not exchange anything,
// so each runs by itself.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "matrix_descriptor.h"
#include "operand_panel.h"
#include "shared_window.h"
#include "sparse_matrix.h"
#include "tensor_core_sum.h"

namespace deep_moe::emulator {

// Of FP8 operands; all others are added as an H200 does it.
enum class WgmmaNumerics : uint8_t { exact_then_round, hopper_fp8 };

struct FragmentElement {
    uint32_t row, column;
};

// Row and K index of element `e` of A register `r` of lane `t`; `per_register` elements share a
// register.
inline FragmentElement a_element(uint32_t t, uint32_t r, uint32_t e, uint32_t per_register) {
    return {t / 4 + 8 * (r & 1), per_register * (t % 4) + e + 4 * per_register * (r >> 1)};
}

// Scratch of wgmmas. The four warps of a warpgroup multiply with the same operands B: the last ones
// are kept as they were decoded.
struct WgmmaPanels {
    struct Right {
        std::vector<uint8_t> bytes;
        uint64_t form = 0;  // what they were decoded as
        Panels panels;
        bool is_unpacked = false;
        UnpackedPanel unpacked;
    };
    std::array<Right, 8> rights;
    Panels left;
    std::vector<uint8_t> bytes;
    Right& right(uint32_t start) { return rights[(start >> 5 ^ start >> 10) % rights.size()]; }
};

struct Wgmma {
    Element a_element_type = Element::e4m3, b_element_type = Element::e4m3;
    Accumulator d_type = Accumulator::f32;
    uint32_t n = 0, k = 0;
    bool a_mn_major = false, b_mn_major = false, negate_a = false, negate_b = false;
    bool accumulate = false;  // scale-d
    bool saturates = false;   // .satfinite of integers
    SparseMetadata sparse;
    uint32_t kept_k() const { return sparse.words ? k / 2 : k; }  // columns of A as it is given
    WgmmaNumerics numerics = WgmmaNumerics::exact_then_round;

    // `a_registers`: 4 rows of 32 lanes, or null when A comes from shared memory through `a`.
    // `d_registers`: n/2 rows of 32 lanes (n/4 with F16 results, two per register).
    void run(SharedWindow& shared, uint32_t warp_in_group, const uint32_t* const* a_registers,
             const MatrixDescriptor& a, const MatrixDescriptor& b, uint32_t* const* d_registers,
             WgmmaPanels& panels) const {
        std::vector<double>& left = panels.left.a;
        panels.left.resize_a(16, k);
        if (a_registers) {
            load_a_registers(a_registers, left.data());
        } else {
            // The whole operand has 64 rows; an MN-major one is cut into chunks of rows, so fetch
            // all of it.
            const uint32_t size = container_bytes(a_element_type);
            const uint32_t row_bytes = kept_k() * element_bits(a_element_type) / 8;
            const uint32_t first = 16 * warp_in_group;
            panels.bytes.resize(64 * row_bytes);
            gather_operand(shared, a, a_mn_major, 64, row_bytes, size, panels.bytes.data());
            for (uint32_t row = 0; row < 16; ++row) {
                decode_row(a_element_type, false, panels.bytes.data() + (first + row) * row_bytes,
                           kept_k(), left.data() + row * k, 1);
            }
        }
        if (sparse.words) sparse.spread(a_element_type, k, left.data());
        if (negate_a) {
            for (double& value : left) value = -value;
        }
        const uint32_t size = container_bytes(b_element_type);
        const uint32_t row_bytes = k * element_bits(b_element_type) / 8;
        panels.bytes.resize(n * row_bytes);
        gather_operand(shared, b, b_mn_major, n, row_bytes, size, panels.bytes.data());
        const uint64_t form = 1 | uint64_t(b_element_type) << 8 | uint64_t(negate_b) << 16 |
                              uint64_t(n) << 24 | uint64_t(k) << 40;
        WgmmaPanels::Right& right = panels.right(b.start);
        if (right.form != form || right.bytes != panels.bytes) {
            right.bytes = panels.bytes;
            right.form = form;
            right.is_unpacked = false;
            right.panels.resize_b(n, k);
            for (uint32_t row = 0; row < n; ++row) {
                decode_row(b_element_type, false, panels.bytes.data() + row * row_bytes, k,
                           right.panels.b.data() + row, right.panels.pitch);
            }
            if (negate_b) {
                for (double& value : right.panels.b) value = -value;
            }
        }
        const bool fp8 = is_fp8(a_element_type);
        if (d_type == Accumulator::s32 || (fp8 && numerics == WgmmaNumerics::exact_then_round))
            add_exactly(d_registers, left.data(), right.panels);
        else
            add_as_the_hardware(d_registers, fp8, left.data(), right);
    }

 private:
    void load_a_registers(const uint32_t* const* registers, double* out) const {
        const uint32_t per_register = 32 / element_bits(a_element_type);
        for (uint32_t r = 0; r < 4; ++r) {
            for (uint32_t t = 0; t < 32; ++t) {
                double values[32];
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

    // Where an element of one row of the warp's lies in its lanes' results, as PTX lays them out.
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

    void add_exactly(uint32_t* const* registers, const double* left, Panels& panels) const {
        for (uint32_t first_row = 0; first_row < 16; first_row += row_block) {
            multiply_row_block(left + first_row * k, panels.b.data(), panels.product.data(), int(k),
                               int(panels.pitch), int(panels.pitch));
            for (uint32_t row = first_row; row < first_row + row_block; ++row) {
                for (uint32_t column = 0; column < n; ++column) {
                    const Cell at = cell(registers, row, column);
                    const double sum =
                        panels.product[(row - first_row) * panels.pitch + column] + addend(at);
                    if (d_type == Accumulator::s32)
                        at.word = uint32_t(int64_t(
                            saturates ? std::clamp<double>(sum, INT32_MIN, INT32_MAX) : sum));
                    else if (d_type == Accumulator::f16)
                        store_f16(at, sum);
                    else
                        at.word = std::bit_cast<uint32_t>(float(sum));
                }
            }
        }
    }

    void add_as_the_hardware(uint32_t* const* registers, bool fp8, const double* left,
                             WgmmaPanels::Right& right) const {
        TensorCoreSum sums(a_element_type, b_element_type, fp8 ? 13 : 25, left,
                           right.panels.b.data(), 16, k, right.panels.pitch, right.unpacked,
                           right.is_unpacked);
        right.is_unpacked = true;
        const bool f16 = d_type == Accumulator::f16;
        double addends[256] = {}, out[256];
        for (uint32_t row = 0; row < 16; ++row) {
            if (accumulate && f16) {
                for (uint32_t column = 0; column < n; ++column)
                    addends[column] = addend(cell(registers, row, column));
            } else if (accumulate) {
                for_each_f32(registers, row, [&](const uint32_t& word, uint32_t column) {
                    addends[column] = double(std::bit_cast<float>(word));
                });
            }
            sums.row(row, n, addends, f16 ? -14 : -126, out, [](uint32_t) { return true; });
            if (f16) {
                for (uint32_t column = 0; column < n; ++column)
                    store_f16(cell(registers, row, column), out[column]);
            } else {
                for_each_f32(registers, row, [&](uint32_t& word, uint32_t column) {
                    word = cut_to_f32(out[column], fp8 ? 13 : 23);
                });
            }
        }
    }

    // f(word, column) for all results of a row, as `cell` finds them.
    template <class F>
    void for_each_f32(uint32_t* const* registers, uint32_t row, F f) const {
        for (uint32_t first = 0; first < n; first += 8) {
            for (uint32_t odd = 0; odd < 2; ++odd) {
                uint32_t* words = registers[odd + 2 * (row / 8) + first / 2] + row % 8 * 4;
                for (uint32_t i = 0; i < 4; ++i) f(words[i], first + 2 * i + odd);
            }
        }
    }
};

}  // namespace deep_moe::emulator
