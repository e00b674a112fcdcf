// Fragments of the warp-level matrix instructions: which thread holds which element for ldmatrix,
// stmatrix and mma.sync.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "operand_panel.h"
#include "wgmma.h"

namespace deep_moe::emulator {

// Where 16-bit half `h` of register `j` of lane `t` lies: in the 16-byte row whose address lane
// `row_lane` supplies, at `byte`.
struct MatrixRow {
    uint32_t row_lane, byte;
};

inline MatrixRow matrix_row_b16(uint32_t t, uint32_t j, uint32_t h, bool transposed) {
    if (transposed) return {8 * j + 2 * (t % 4) + h, 2 * (t / 4)};
    return {8 * j + t / 4, 2 * (2 * (t % 4) + h)};
}

// The same for byte `e` of register `j` in stmatrix.m16n8.trans.b8.
inline MatrixRow matrix_row_b8(uint32_t t, uint32_t j, uint32_t e) {
    return {8 * j + 2 * (t % 4) + (e & 1), t / 4 + 8 * (e >> 1)};
}

// The same for ldmatrix.m16n16.trans.b8, two registers a matrix of 16 rows.
inline MatrixRow matrix_row_b8_square(uint32_t t, uint32_t j, uint32_t e) {
    return {16 * (j / 2) + 4 * (t % 4) + e, t / 4 + 8 * (j % 2)};
}

// Multiplies the panels, and calls add(index, lane, product) for each of 16 x 8 products: with the
// register and the lane that hold it of C and D.
template <class Add>
void for_each_product(Panels& panels, uint32_t k, Add add) {
    for (uint32_t first_row = 0; first_row < 16; first_row += row_block) {
        panels.multiply(first_row, k);
        for (uint32_t row = first_row; row < first_row + row_block; ++row) {
            for (uint32_t column = 0; column < 8; ++column) {
                const double product = panels.product[(row - first_row) * panels.pitch + column];
                add(column % 2 + 2 * (row / 8), row % 8 * 4 + column / 2, product);
            }
        }
    }
}

// mma.sync.m16n8kK with A row-major and B column-major: D (4 registers, or 2 with F16 results) = A
// * B + C. m8n8kK of integers is its upper half.
struct WarpMma {
    uint32_t m = 16;
    Element a_type = Element::f16, b_type = Element::f16;
    Accumulator d_type = Accumulator::f32;
    uint32_t k = 16;
    bool is_sparse = false;
    bool saturates = false;   // .satfinite of integers
    bool counts_xor = false;  // of bits: of a xor b, else of a and b
    SparseMetadata sparse;

    uint32_t elements_per_register() const { return 32 / element_bits(a_type); }
    uint32_t num_a_registers() const {
        return m * (is_sparse ? k / 2 : k) / elements_per_register() / 32;
    }
    uint32_t num_b_registers() const { return 8 * k / elements_per_register() / 32; }

    void run(const uint32_t* const* a, const uint32_t* const* b, const uint32_t* const* c,
             uint32_t* const* d, Panels& panels) const {
        panels.resize(16, 8, k);
        const uint32_t per_register = elements_per_register();
        for (uint32_t t = 0; t < 32; ++t) {
            double values[32];
            for (uint32_t r = 0; r < num_a_registers(); ++r) {
                decode_row(a_type, false, reinterpret_cast<const uint8_t*>(&a[r][t]), per_register,
                           values, 1);
                for (uint32_t e = 0; e < per_register; ++e) {
                    const FragmentElement at = a_element(t, r, e, per_register);
                    panels.a[at.row * k + at.column] = values[e];
                }
            }
            for (uint32_t r = 0; r < num_b_registers(); ++r) {
                decode_row(b_type, false, reinterpret_cast<const uint8_t*>(&b[r][t]), per_register,
                           values, 1);
                for (uint32_t e = 0; e < per_register; ++e) {
                    const uint32_t row = per_register * (t % 4) + e + 4 * per_register * r;
                    panels.b[row * panels.pitch + t / 4] = values[e];
                }
            }
        }
        if (is_sparse) sparse.spread(a_type, k, panels.a.data());
        if (d_type == Accumulator::s32)
            add_integers(c, d, panels);
        else
            add_floats(c, d, panels);
    }

 private:
    void add_integers(const uint32_t* const* c, uint32_t* const* d, Panels& panels) const {
        // With bits as 1 and -1, a product is k less two for each place where they differ.
        if (counts_xor) {
            for (std::vector<double>* bits : {&panels.a, &panels.b})
                for (double& bit : *bits) bit = 1 - 2 * bit;
        }
        for_each_product(panels, k, [&](uint32_t index, uint32_t lane, double product) {
            if (index >= m / 4) return;
            if (counts_xor) product = (k - product) / 2;
            const int64_t sum = int64_t(product) + int32_t(c[index][lane]);
            d[index][lane] =
                uint32_t(saturates ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
        });
    }

    // An H200 has no FP8 in this instruction: it adds the products of two elements out of four,
    // then of the other two, in .f16 tensor cores, and C at last.
    void add_floats(const uint32_t* const* c, uint32_t* const* d, const Panels& panels) const {
        const bool f16 = d_type == Accumulator::f16, fp8 = is_fp8(a_type);
        static thread_local UnpackedPanel right;
        TensorCoreSum sums(fp8 ? Element::f16 : a_type, fp8 ? Element::f16 : b_type, 25,
                           panels.a.data(), panels.b.data(), 16, k, panels.pitch, right);
        const int min_exponent = f16 ? -14 : -126;
        // Of a sparse A two of four are the kept ones of four elements out of eight.
        const uint32_t half = is_sparse ? 4 : 2;
        const auto is_first = [half](uint32_t i) { return i % (2 * half) < half; };
        auto rounded = [&](double sum) {
            return f16 ? double(f16_to_float(uint16_t(encode(
                             f16_format, sum, Rounding::nearest_even, Overflow::to_infinity))))
                       : double(std::bit_cast<float>(cut_to_f32(sum, 23)));
        };
        for (uint32_t row = 0; row < 16; ++row) {
            double addends[8], first[8] = {}, out[8];
            for (uint32_t column = 0; column < 8; ++column)
                addends[column] = addend(c, row, column);
            if (fp8) {
                sums.row(row, 8, first, min_exponent, out, is_first);
                for (uint32_t column = 0; column < 8; ++column)
                    first[column] = rounded(out[column]);
                sums.row(row, 8, first, min_exponent, out,
                         [&](uint32_t i) { return !is_first(i); });
                for (uint32_t column = 0; column < 8; ++column)
                    out[column] = rounded(out[column]) + addends[column];
            } else {
                sums.row(row, 8, addends, min_exponent, out, [](uint32_t) { return true; });
            }
            for (uint32_t column = 0; column < 8; ++column)
                store(d, row, column, out[column], /*is_sum_of_floats=*/fp8);
        }
    }

    double addend(const uint32_t* const* c, uint32_t row, uint32_t column) const {
        const uint32_t lane = row % 8 * 4 + column / 2, index = column % 2 + 2 * (row / 8);
        if (d_type == Accumulator::f16)
            return f16_to_float(uint16_t(c[index / 2][lane] >> 16 * (index % 2)));
        return double(std::bit_cast<float>(c[index][lane]));
    }

    void store(uint32_t* const* d, uint32_t row, uint32_t column, double sum,
               bool is_sum_of_floats) const {
        const uint32_t lane = row % 8 * 4 + column / 2, index = column % 2 + 2 * (row / 8);
        if (d_type == Accumulator::f16) {
            const uint32_t shift = 16 * (index % 2);
            const uint32_t code =
                uint32_t(encode(f16_format, sum, Rounding::nearest_even, Overflow::to_infinity));
            uint32_t& cell = d[index / 2][lane];
            cell = (cell & ~(0xffffu << shift)) | code << shift;
        } else if (is_sum_of_floats && !std::isnan(sum)) {
            d[index][lane] = std::bit_cast<uint32_t>(float(sum));
        } else {
            d[index][lane] = cut_to_f32(sum, 23);
        }
    }
};

// The same of FP4, FP6 and FP8 with scales for parts of rows, as sm_120 has it: exact products, one
// sum, rounded once. Elements of less than 8 bits lie in bytes (FP4 in the middle four bits), but
// of FP4 alone eight may share a register. A may be sparse, which doubles K.
struct ScaledWarpMma {
    Element a_type = Element::e4m3, b_type = Element::e4m3;
    uint32_t k = 32, num_scales = 0;
    bool scales_are_ue4m3 = false;
    bool is_packed = false;
    SparseMetadata sparse;
    uint32_t num_b_registers() const { return k / (is_packed ? 32 : 16); }
    // One register a lane, of which some lanes' count: of A those of `thread` 0 (lanes 0 and 1 of
    // each four) or 1 (lanes 2 and 3), the first for row t/4 and the second for the row 8 below; of
    // B lane `thread` of each four. `byte`: the first of those that hold a row's scales.
    struct Scales {
        const uint32_t* words = nullptr;
        uint32_t byte = 0, thread = 0;
    } a_scales, b_scales;

    void run(const uint32_t* const* a, const uint32_t* const* b, const uint32_t* const* c,
             uint32_t (*d)[32], Panels& panels) const {
        panels.resize(16, 8, k);
        const uint32_t per_register = is_packed ? 8 : 4;
        for (uint32_t t = 0; t < 32; ++t) {
            for (uint32_t r = 0; r < 4; ++r) {
                for (uint32_t e = 0; e < per_register; ++e) {
                    const FragmentElement at = a_element(t, r, e, per_register);
                    panels.a[at.row * k + at.column] = value(a_type, a[r][t], e);
                }
            }
            for (uint32_t r = 0; r < num_b_registers(); ++r) {
                for (uint32_t e = 0; e < per_register; ++e) {
                    const uint32_t row = per_register * (t % 4) + e + 4 * per_register * r;
                    panels.b[row * panels.pitch + t / 4] =
                        value(b_type, b[r][t], e) * scale(b_column_scales(t / 4), row);
                }
            }
        }
        if (sparse.words) sparse.spread(a_type, k, panels.a.data());
        for (uint32_t row = 0; row < 16 && num_scales; ++row) {
            for (uint32_t i = 0; i < k; ++i) panels.a[row * k + i] *= scale(a_row_scales(row), i);
        }
        for_each_product(panels, k, [&](uint32_t index, uint32_t lane, double product) {
            const double sum = product + double(std::bit_cast<float>(c[index][lane]));
            d[index][lane] = std::isnan(sum) ? 0x7fffffffu : std::bit_cast<uint32_t>(float(sum));
        });
    }

 private:
    double value(Element element, uint32_t word, uint32_t e) const {
        if (is_packed) return decode_table(Element::e2m1)[word >> 4 * e & 0xf];
        return decode_container(element, uint8_t(word >> 8 * e));
    }

    uint32_t a_row_scales(uint32_t row) const {
        return a_scales.words[row % 8 * 4 + 2 * a_scales.thread + row / 8] >> 8 * a_scales.byte;
    }
    uint32_t b_column_scales(uint32_t column) const {
        if (!num_scales) return 0;
        return b_scales.words[column * 4 + b_scales.thread] >> 8 * b_scales.byte;
    }

    double scale(uint32_t scales, uint32_t k_index) const {
        if (!num_scales) return 1;
        const auto code = uint8_t(scales >> 8 * (k_index / (k / num_scales)));
        if (!scales_are_ue4m3) return ue8m0_to_double(code);
        static const DecodeTable ue4m3 = make_decode_table(ue4m3_format);
        return code & 0x80 ? std::numeric_limits<double>::quiet_NaN() : ue4m3[code];
    }
};

}  // namespace deep_moe::emulator
