// tcgen05.mma: D (tensor memory) = A (shared or tensor memory) * B (shared memory) {+ D}, with or
// without block scales, for one CTA or a pair.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "matrix_descriptor.h"
#include "operand_panel.h"
#include "shared_window.h"
#include "tensor_memory.h"

namespace deep_moe::emulator {

struct MmaCta {
    SharedWindow* shared;
    TensorMemory* tensor_memory;
};

struct Mma {
    MmaKind kind = MmaKind::mxf8f6f4;
    int cta_group = 1;
    bool is_weight_stationary = false;  // .ws
    InstructionDescriptor shape;
    bool a_in_tensor_memory = false;
    MatrixDescriptor a;
    uint32_t a_address = 0;
    MatrixDescriptor b;
    uint32_t d_address = 0;
    bool accumulate = false;  // enable-input-d
    uint32_t sfa_address = 0, sfb_address = 0;
    uint32_t num_scale_blocks = 1;    // scales per row and instruction: 1 (K = 32 each), 2 or 4
    uint32_t disabled_lanes[8] = {};  // rows of D that are left alone, 128 bits per CTA
    int scale_d_shift = 0;            // D is multiplied with 2^-shift first

    // `ctas[0]` is the one with the even cluster rank.
    void run(const MmaCta* ctas, bool check_written, Panels& panels) const {
        const uint32_t n = shape.n, k = shape.k, rows = shape.m / uint32_t(cta_group);
        check_addresses();
        panels.resize(rows, n, k);
        const uint32_t rows_of_b = n / uint32_t(cta_group);
        for (int cta = 0; cta < cta_group; ++cta) {
            load_rows(*ctas[cta].shared, b, shape.b, shape.b_mn_major, shape.negate_b, rows_of_b,
                      panels.bytes, panels.b.data() + uint32_t(cta) * rows_of_b, 1, panels.pitch);
        }
        for (int cta = 0; cta < cta_group; ++cta) {
            if (is_block_scaled(kind)) {
                // Each CTA holds the scales of all of B; the other CTA's scales must not leak into
                // its product.
                if (cta > 0) {
                    for (int source = 0; source < cta_group; ++source) {
                        load_rows(*ctas[source].shared, b, shape.b, shape.b_mn_major,
                                  shape.negate_b, rows_of_b, panels.bytes,
                                  panels.b.data() + uint32_t(source) * rows_of_b, 1, panels.pitch);
                    }
                }
                scale_rows(*ctas[cta].tensor_memory, sfb_address, shape.sfb_id, n, "B",
                           panels.b.data(), 1, panels.pitch, check_written);
            }
            if (a_in_tensor_memory) {
                load_a_from_tensor_memory(*ctas[cta].tensor_memory, rows, panels, check_written);
            } else {
                load_rows(*ctas[cta].shared, a, shape.a, shape.a_mn_major, shape.negate_a, rows,
                          panels.bytes, panels.a.data(), k, 1);
            }
            if (is_block_scaled(kind)) {
                scale_rows(*ctas[cta].tensor_memory, sfa_address, shape.sfa_id, rows, "A",
                           panels.a.data(), k, 1, check_written);
            }
            for (uint32_t row = 0; row < rows; row += row_block) {
                panels.multiply(row, k);
                for (uint32_t i = 0; i < row_block; ++i) {
                    store_row(*ctas[cta].tensor_memory, cta, row + i, rows,
                              panels.product.data() + i * panels.pitch, check_written);
                }
            }
        }
    }

 private:
    bool is_packed() const { return kind >= MmaKind::mxf4; }

    // 64 rows of a single CTA, of the accumulator and of A alike, take 16 lanes of each quadrant.
    bool has_half_quadrants(uint32_t rows) const {
        return cta_group == 1 && rows == 64 && !is_weight_stationary;
    }
    uint32_t lane_of(uint32_t row, uint32_t rows) const {
        return has_half_quadrants(rows) ? row % 16 + 32 * (row / 16) : row;
    }

    void check_addresses() const {
        if (d_address >> 16) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.mma: the accumulator address 0x%08x must have lane 0", d_address);
        }
        if (is_block_scaled(kind)) {
            for (uint32_t address : {sfa_address, sfb_address}) {
                if ((address & 0x3fffffff) >> 16) {
                    fail(FaultKind::invalid_operation,
                         "tcgen05.mma: the scale factor address 0x%08x must have lane 0", address);
                }
            }
            const uint32_t last = num_scale_blocks == 1 ? 3 : num_scale_blocks == 2 ? 2 : 0;
            if (shape.sfa_id > last || shape.sfb_id > last) {
                fail(FaultKind::invalid_operation,
                     "tcgen05.mma: scale factor ids %u and %u with %u scales per row", shape.sfa_id,
                     shape.sfb_id, num_scale_blocks);
            }
        }
    }

    // Element (row, k) goes to out[row * row_step + k * k_step].
    void load_rows(SharedWindow& shared, const MatrixDescriptor& descriptor, Element element,
                   bool mn_major, bool negate, uint32_t num_rows, std::vector<uint8_t>& bytes,
                   double* out, uint32_t row_step, uint32_t k_step) const {
        const uint32_t row_bytes = is_packed() ? shape.k / 2 : shape.k * container_bytes(element);
        bytes.resize(size_t(num_rows) * row_bytes);
        gather_operand(shared, descriptor, mn_major, num_rows, row_bytes, container_bytes(element),
                       bytes.data(), is_packed() ? 16 : chunk_data_bytes(element));
        for (uint32_t row = 0; row < num_rows; ++row) {
            double* target = out + size_t(row) * row_step;
            decode_row(element, is_packed(), bytes.data() + size_t(row) * row_bytes, shape.k,
                       target, k_step);
            if (negate) {
                for (uint32_t i = 0; i < shape.k; ++i) target[i * k_step] = -target[i * k_step];
            }
        }
    }

    void load_a_from_tensor_memory(TensorMemory& memory, uint32_t rows, Panels& panels,
                                   bool check_written) const {
        // With few rows of .ws, PTX tells where they lie in a figure only.
        if (rows != TensorMemory::num_lanes && !has_half_quadrants(rows)) {
            fail(FaultKind::unsupported, "tcgen05.mma with A in tensor memory and %u rows per CTA",
                 rows);
        }
        if (!is_packed() && chunk_data_bytes(shape.a) != 16) {
            fail(FaultKind::unsupported, "tcgen05.mma with 4- or 6-bit A in tensor memory");
        }
        if (a_address >> 16) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.mma: the address of A, 0x%08x, must have lane 0", a_address);
        }
        const uint32_t row_bytes = is_packed() ? shape.k / 2 : shape.k * container_bytes(shape.a);
        for (uint32_t row = 0; row < rows; ++row) {
            const uint32_t* cells =
                memory.read(lane_of(row, rows), a_address & 0xffff, row_bytes / 4, check_written);
            double* target = panels.a.data() + size_t(row) * shape.k;
            decode_row(shape.a, is_packed(), reinterpret_cast<const uint8_t*>(cells), shape.k,
                       target, 1);
            if (shape.negate_a) {
                for (uint32_t i = 0; i < shape.k; ++i) target[i] = -target[i];
            }
        }
    }

    // Multiplies rows with their scales. The four lane quadrants must hold the same bytes: which
    // one the hardware reads is not documented.
    void scale_rows(TensorMemory& memory, uint32_t address, uint32_t id, uint32_t num_rows,
                    const char* operand, double* rows, uint32_t row_step, uint32_t k_step,
                    bool check_written) const {
        static const DecodeTable ue8m0 = [] {
            DecodeTable table{};
            for (int code = 0; code < 256; ++code) table[code] = ue8m0_to_double(uint8_t(code));
            return table;
        }();
        // UE4M3 has 7 bits. What hardware makes of the eighth is not documented: here no number.
        static const DecodeTable ue4m3 = [] {
            DecodeTable table = make_decode_table(ue4m3_format);
            for (int code = 0x80; code < 0x100; ++code)
                table[code] = std::numeric_limits<double>::quiet_NaN();
            return table;
        }();
        const DecodeTable& table = shape.scale_is_ue8m0 ? ue8m0 : ue4m3;
        const uint32_t first_column = address & 0xffff, block = shape.k / num_scale_blocks;
        const uint32_t mask =
            (num_scale_blocks == 4 ? 0xffffffffu : (1u << 8 * num_scale_blocks) - 1) << 8 * id;
        for (uint32_t row = 0; row < num_rows; ++row) {
            const uint32_t lane = row % 32, column = first_column + row / 32;
            const uint32_t cell = *memory.read(lane, column, 1, check_written);
            for (uint32_t quadrant = 1; quadrant < 4; ++quadrant) {
                const uint32_t copy = *memory.read(lane + 32 * quadrant, column, 1, check_written);
                if ((copy ^ cell) & mask) {
                    fail(FaultKind::invalid_operation,
                         "tcgen05.mma: the scale factors of %s row %u differ between the lane "
                         "quadrants: 0x%08x at lane %u, "
                         "0x%08x at lane %u, column %u",
                         operand, row, cell, lane, copy, lane + 32 * quadrant, column);
                }
            }
            double* values = rows + size_t(row) * row_step;
            for (uint32_t i = 0; i < num_scale_blocks; ++i) {
                const double scale = table[(cell >> 8 * (id + i)) & 0xff];
                for (uint32_t j = i * block; j < (i + 1) * block; ++j) values[j * k_step] *= scale;
            }
        }
    }

    void store_row(TensorMemory& memory, int cta, uint32_t row, uint32_t rows,
                   const double* product, bool check_written) const {
        const uint32_t column = d_address & 0xffff;
        if (cta_group == 2 && rows == 64) {
            store_cells(memory, cta, row, column, shape.n / 2, product, check_written);
            store_cells(memory, cta, row + 64, column, shape.n / 2, product + shape.n / 2,
                        check_written);
        } else if (is_weight_stationary) {
            // The columns of few rows lie beside each other in lanes (CuTe, mma_traits_sm100.hpp).
            const uint32_t parts = TensorMemory::num_lanes / rows, count = shape.n / parts;
            for (uint32_t i = 0; i < parts; ++i)
                store_cells(memory, cta, row + i * rows, column, count, product + i * count,
                            check_written);
        } else {
            store_cells(memory, cta, lane_of(row, rows), column, shape.n, product, check_written);
        }
    }

    void store_cells(TensorMemory& memory, int cta, uint32_t lane, uint32_t column, uint32_t count,
                     const double* product, bool check_written) const {
        if ((disabled_lanes[4 * cta + int(lane / 32)] >> (lane % 32)) & 1) return;
        if (accumulate) memory.read(lane, column, count, check_written);
        uint32_t* cells = memory.write(lane, column, count);
        switch (shape.d) {
            case Accumulator::f32:
                if (accumulate) {
                    const float factor = std::ldexp(1.0f, -scale_d_shift);
                    for (uint32_t i = 0; i < count; ++i) {
                        const double sum =
                            product[i] + double(std::bit_cast<float>(cells[i]) * factor);
                        cells[i] = std::bit_cast<uint32_t>(float(sum));
                    }
                } else {
                    for (uint32_t i = 0; i < count; ++i)
                        cells[i] = std::bit_cast<uint32_t>(float(product[i]));
                }
                return;
            case Accumulator::f16:
                for (uint32_t i = 0; i < count; ++i) {
                    const double d =
                        accumulate ? std::ldexp(f16_to_float(uint16_t(cells[i])), -scale_d_shift)
                                   : 0.0;
                    cells[i] = encode(f16_format, product[i] + d, Rounding::nearest_even,
                                      Overflow::to_infinity);
                }
                return;
            case Accumulator::s32:
                for (uint32_t i = 0; i < count; ++i) {
                    const int64_t sum = int64_t(product[i]) + (accumulate ? int32_t(cells[i]) : 0);
                    const int64_t clamped = sum > INT32_MAX   ? INT32_MAX
                                            : sum < INT32_MIN ? INT32_MIN
                                                              : sum;
                    cells[i] = uint32_t(shape.saturate ? clamped : sum);
                }
                return;
        }
    }
};

}  // namespace deep_moe::emulator
