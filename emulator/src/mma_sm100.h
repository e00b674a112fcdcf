// tcgen05.mma: D (tensor memory) = A (shared or tensor memory) * B (shared memory) {+ D}, with or
// without block scales, for one CTA or a pair. A may be sparse, with metadata in tensor memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "matrix_descriptor.h"
#include "operand_panel.h"
#include "shared_window.h"
#include "sparse_matrix.h"
#include "tensor_memory.h"

namespace deep_moe::emulator {

struct MmaCta {
    SharedWindow* shared;
    TensorMemory* tensor_memory;
};

// The zero-column mask descriptor of .ws: runs of columns of B that count as zero alternate with
// runs that are used, anew in each part of the columns (128 / M parts). By PTX's examples, which
// say the opposite of its table of which span is which.
struct ZeroColumns {
    uint64_t bits = 0;

    uint32_t shift() const { return bits >> 56 & 0x3f; }  // column n of D is of column n + shift

    bool contains(uint32_t column, uint32_t m, uint32_t n) const {
        if (!(bits >> 39 & 1)) return false;
        const uint32_t part_columns = n * m / 128, part = column / part_columns;
        const uint32_t used = (bits >> 48 & 0xff) + 1, zeros = (bits >> 40 & 0xff) + 1;
        const bool zeros_first = bits >> (32 + part) & 1;
        const uint32_t skipped = bits >> 8 * part & 0xff;
        const uint32_t at = (column % part_columns + skipped) % (used + zeros);
        return zeros_first ? at < zeros : at >= used;
    }

    void check(uint32_t m, uint32_t max_shift) const {
        const auto number = static_cast<unsigned long long>(bits);
        if (bits >> 62 || (bits >> 36 & 7))
            fail(FaultKind::invalid_operation,
                 "zero-column mask 0x%016llx: bits [63:62] and [38:36] must be 0", number);
        if (shift() > max_shift || shift() > (m == 32 ? 16u : 32u))
            fail(FaultKind::invalid_operation,
                 "zero-column mask 0x%016llx: a shift of %u columns with M = %u, where the "
                 "instruction descriptor allows %u",
                 number, shift(), m, max_shift);
        if (!(bits >> 39 & 1)) return;
        for (uint32_t part = 0; part < 128 / m; ++part) {
            const bool zeros_first = bits >> (32 + part) & 1;
            const uint32_t first_run = (bits >> (zeros_first ? 40 : 48) & 0xff) + 1;
            // PTX does not say whether the skipped columns may be more than the first run.
            if ((bits >> 8 * part & 0xff) >= first_run)
                fail(FaultKind::unsupported,
                     "zero-column mask 0x%016llx: start count %u skips the first run of %u columns",
                     number, part, first_run);
        }
    }
};

struct Mma {
    MmaKind kind = MmaKind::mxf8f6f4;
    int cta_group = 1;
    bool is_weight_stationary = false;  // .ws
    bool is_sparse = false;             // .sp
    uint32_t metadata_address = 0;
    ZeroColumns zero_columns;
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
            load_rows(*ctas[cta].shared, b, shape.b, shape.b_mn_major, shape.negate_b, rows_of_b, k,
                      panels.bytes, panels.b.data() + uint32_t(cta) * rows_of_b, 1, panels.pitch,
                      zero_columns.shift());
        }
        if (zero_columns.bits) leave_out_columns(panels);
        for (int cta = 0; cta < cta_group; ++cta) {
            if (is_block_scaled(kind)) {
                // Each CTA holds the scales of all of B; the other CTA's scales must not leak into
                // its product.
                if (cta > 0) {
                    for (int source = 0; source < cta_group; ++source) {
                        load_rows(*ctas[source].shared, b, shape.b, shape.b_mn_major,
                                  shape.negate_b, rows_of_b, k, panels.bytes,
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
                          kept_k(), panels.bytes, panels.a.data(), k, 1);
            }
            if (is_sparse)
                spread_rows(*ctas[cta].tensor_memory, rows, panels.a.data(), check_written);
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

    // Columns of the metadata: of 16 and 32-bit elements the selector picks one of two.
    uint32_t num_metadata_columns() const { return kind <= MmaKind::tf32 ? 1 : 2; }
    uint32_t metadata_column() const {
        return (metadata_address & 0xffff) + shape.sparsity_selector;
    }

 private:
    bool is_packed() const { return kind >= MmaKind::mxf4; }
    uint32_t kept_k() const { return is_sparse ? shape.k / 2 : shape.k; }

    void leave_out_columns(Panels& panels) const {
        for (uint32_t column = 0; column < shape.n; ++column) {
            if (!zero_columns.contains(column, shape.m, shape.n)) continue;
            for (uint32_t i = 0; i < shape.k; ++i) panels.b[size_t(i) * panels.pitch + column] = 0;
        }
    }

    // Puts the kept values of A where the metadata says. Where that lies is as CuTe has it
    // (tmem_e_frg in mma_traits_sm100.hpp): 64 bits of a row beside each other in the row's lane;
    // of 16 and 32-bit elements, 32 bits of a row, whose halves lie 8 lanes apart, each beside the
    // half of the row 8 below or above. Where 64 rows take half of the lanes, so does the metadata.
    void spread_rows(TensorMemory& memory, uint32_t rows, double* values,
                     bool check_written) const {
        if (rows != TensorMemory::num_lanes && !has_half_quadrants(rows))
            fail(FaultKind::unsupported, "tcgen05.mma.sp with %u rows per CTA", rows);
        const uint32_t first = metadata_column(), count = num_metadata_columns();
        const SparseUnit unit{kind == MmaKind::tf32, is_packed() ? 2u : 1u};
        for (uint32_t row = 0; row < rows; ++row) {
            uint64_t bits = 0;
            if (count == 2) {
                const uint32_t* cells = memory.read(lane_of(row, rows), first, 2, check_written);
                bits = cells[0] | uint64_t(cells[1]) << 32;
            } else {
                for (uint32_t half = 0; half < 2; ++half) {
                    const uint32_t at = row / 16 * 16 + row % 8 + 8 * half;
                    const uint32_t cell = *memory.read(lane_of(at, rows), first, 1, check_written);
                    bits |= uint64_t(cell >> 16 * (row / 8 % 2) & 0xffff) << 16 * half;
                }
            }
            spread_row(values + size_t(row) * shape.k, shape.k, unit, row,
                       [&](uint32_t i) { return uint32_t(bits >> 4 * i); });
        }
    }

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
        if (is_sparse && metadata_address >> 16) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.mma.sp: the metadata's address 0x%08x must have lane 0",
                 metadata_address);
        }
        if (zero_columns.bits) zero_columns.check(shape.m, shape.max_shift);
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

    // Element (row, k) goes to out[row * row_step + k * k_step]; the operand's first rows are left
    // out.
    void load_rows(SharedWindow& shared, const MatrixDescriptor& descriptor, Element element,
                   bool mn_major, bool negate, uint32_t num_rows, uint32_t k,
                   std::vector<uint8_t>& bytes, double* out, uint32_t row_step, uint32_t k_step,
                   uint32_t first_row = 0) const {
        const uint32_t row_bytes = is_packed() ? k / 2 : k * container_bytes(element);
        bytes.resize(size_t(first_row + num_rows) * row_bytes);
        gather_operand(shared, descriptor, mn_major, first_row + num_rows, row_bytes,
                       container_bytes(element), bytes.data(),
                       is_packed() ? 16 : chunk_data_bytes(element));
        for (uint32_t row = 0; row < num_rows; ++row) {
            double* target = out + size_t(row) * row_step;
            decode_row(element, is_packed(), bytes.data() + size_t(first_row + row) * row_bytes, k,
                       target, k_step);
            if (negate) {
                for (uint32_t i = 0; i < k; ++i) target[i * k_step] = -target[i * k_step];
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
        if (a_address >> 16) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.mma: the address of A, 0x%08x, must have lane 0", a_address);
        }
        const uint32_t k = kept_k();
        const uint32_t row_bytes = is_packed() ? k / 2 : k * container_bytes(shape.a);
        const bool in_containers = !is_packed() && chunk_data_bytes(shape.a) != 16;
        for (uint32_t row = 0; row < rows; ++row) {
            const uint32_t* cells =
                memory.read(lane_of(row, rows), a_address & 0xffff, row_bytes / 4, check_written);
            const auto* bytes = reinterpret_cast<const uint8_t*>(cells);
            double* target = panels.a.data() + size_t(row) * shape.k;
            if (in_containers) {
                for (uint32_t i = 0; i < k; ++i) target[i] = decode_container(shape.a, bytes[i]);
            } else {
                decode_row(shape.a, is_packed(), bytes, k, target, 1);
            }
            if (shape.negate_a) {
                for (uint32_t i = 0; i < k; ++i) target[i] = -target[i];
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
                if (!accumulate) std::fill_n(cells, count, 0u);
                add_row_to_f32(product, std::ldexp(1.0f, -scale_d_shift), cells, int(count));
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
