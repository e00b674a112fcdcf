// Tensor memory (TMEM) of one CTA: 128 lanes x 512 columns of 32-bit cells, its allocation, and
// which cell each register of tcgen05.ld/st and each byte of tcgen05.cp belongs to.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include "fault.h"
#include "matrix_descriptor.h"
#include "shared_window.h"

namespace deep_moe::emulator {

struct TensorMemory {
    static constexpr uint32_t num_lanes = 128, num_columns = 512;

    TensorMemory() : cells(std::make_unique<uint32_t[]>(num_lanes * num_columns)) {}

    // ---- cells

    uint32_t* row(uint32_t lane) { return cells.get() + lane * num_columns; }

    // Every access names a lane and a run of columns. All columns must be allocated; reads must
    // have been written.
    const uint32_t* read(uint32_t lane, uint32_t column, uint32_t count, bool check_written) {
        check_range(lane, column, count, "read");
        if (check_written) {
            for (uint32_t c = column; c < column + count;) {
                const uint32_t bit = c % 64, run = count - (c - column) < 64 - bit
                                                       ? count - (c - column)
                                                       : 64 - bit;
                const uint64_t mask = (run == 64 ? ~uint64_t(0) : (uint64_t(1) << run) - 1) << bit;
                const uint64_t missing = mask & ~written[lane][c / 64];
                if (missing) {
                    fail(FaultKind::uninitialized,
                         "tensor memory at lane %u, column %u is read but nobody has written it",
                         lane, c / 64 * 64 + uint32_t(std::countr_zero(missing)));
                }
                c += run;
            }
        }
        return row(lane) + column;
    }

    uint32_t* write(uint32_t lane, uint32_t column, uint32_t count) {
        check_range(lane, column, count, "written");
        for (uint32_t c = column; c < column + count;) {
            const uint32_t bit = c % 64,
                           run = count - (c - column) < 64 - bit ? count - (c - column) : 64 - bit;
            written[lane][c / 64] |= (run == 64 ? ~uint64_t(0) : (uint64_t(1) << run) - 1) << bit;
            c += run;
        }
        return row(lane) + column;
    }

    // ---- allocation

    static void check_size(uint32_t count) {
        if (count < 32 || count > num_columns || !std::has_single_bit(count)) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.alloc/dealloc of %u columns: not a power of two in 32..512", count);
        }
    }

    // First column, or nothing while there is no room. Blocks are aligned to their size.
    std::optional<uint32_t> try_allocate(uint32_t count) {
        check_size(count);
        if (relinquished) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.alloc after tcgen05.relinquish_alloc_permit in this CTA");
        }
        if (count > largest_next) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.alloc of %u columns after one of %u: sizes must not grow", count,
                 largest_next);
        }
        for (uint32_t column = 0; column + count <= num_columns; column += count) {
            bool free = true;
            for (uint32_t unit = column / 32; unit < (column + count) / 32; ++unit)
                free &= block_of[unit] == 0;
            if (!free) continue;
            for (uint32_t unit = column / 32; unit < (column + count) / 32; ++unit)
                block_of[unit] = column / 32 + 1;
            largest_next = count;
            forget(column, count);
            return column;
        }
        return std::nullopt;
    }

    void deallocate(uint32_t address, uint32_t count) {
        check_size(count);
        const uint32_t column = address & 0xffff;
        bool exact = (address >> 16) == 0 && column % 32 == 0 && column + count <= num_columns;
        for (uint32_t unit = column / 32; exact && unit < (column + count) / 32; ++unit) {
            exact = block_of[unit] == column / 32 + 1;
        }
        if (exact && column + count < num_columns &&
            block_of[(column + count) / 32] == column / 32 + 1)
            exact = false;
        if (!exact) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.dealloc of %u columns at 0x%08x, which is no allocated block", count,
                 address);
        }
        for (uint32_t unit = column / 32; unit < (column + count) / 32; ++unit) block_of[unit] = 0;
    }

    uint32_t num_allocated() const {
        uint32_t count = 0;
        for (uint32_t block : block_of) count += block ? 32 : 0;
        return count;
    }

    std::unique_ptr<uint32_t[]> cells;
    uint64_t written[num_lanes][num_columns / 64] = {};
    uint32_t block_of[num_columns / 32] =
        {};  // per 32 columns: first unit of the block + 1, 0 if free
    uint32_t largest_next = num_columns;
    bool relinquished = false;

 private:
    void check_range(uint32_t lane, uint32_t column, uint32_t count, const char* what) const {
        if (lane >= num_lanes || column >= num_columns || count > num_columns - column) {
            fail(FaultKind::out_of_bounds,
                 "tensor memory at lane %u, columns %u..%u is %s: there are 128 lanes and 512 "
                 "columns",
                 lane, column, column + count - 1, what);
        }
        for (uint32_t unit = column / 32; unit <= (column + count - 1) / 32; ++unit) {
            if (!block_of[unit]) {
                fail(FaultKind::out_of_bounds,
                     "tensor memory at lane %u, column %u is %s but not allocated", lane,
                     unit * 32 > column ? unit * 32 : column, what);
            }
        }
    }

    void forget(uint32_t column, uint32_t count) {
        for (uint32_t lane = 0; lane < num_lanes; ++lane) {
            for (uint32_t c = column; c < column + count; ++c)
                written[lane][c / 64] &= ~(uint64_t(1) << (c % 64));
        }
    }
};

// ---- tcgen05.ld / tcgen05.st

enum class TmemShape : uint8_t { x32x32b, x16x64b, x16x128b, x16x256b, x16x32bx2 };

// Cells of 32 bits per thread and unit of `.xN`.
inline uint32_t registers_per_repeat(TmemShape shape) {
    switch (shape) {
        case TmemShape::x16x128b:
            return 2;
        case TmemShape::x16x256b:
            return 4;
        default:
            return 1;
    }
}

struct TmemCell {
    uint32_t lane, column;  // relative to the instruction's address
};

// The cell of register `i` of thread `t`. `half_offset` is the immediate of .16x32bx2.
inline TmemCell tmem_cell(TmemShape shape, uint32_t t, uint32_t i, uint32_t half_offset) {
    switch (shape) {
        case TmemShape::x32x32b:
            return {t, i};
        case TmemShape::x16x64b:
            return {t / 4 + 8 * (t & 1), ((t >> 1) & 1) + 2 * i};
        case TmemShape::x16x128b:
            return {t / 4 + 8 * (i & 1), t % 4 + 4 * (i >> 1)};
        case TmemShape::x16x256b:
            return {t / 4 + 8 * ((i >> 1) & 1), 2 * (t % 4) + (i & 1) + 8 * (i >> 2)};
        case TmemShape::x16x32bx2:
            return {t % 16, i + (t / 16) * half_offset};
    }
    return {0, 0};
}

// First lane of an access: in the 32 lanes of the warp's quadrant, which is all that it may touch.
// Hardware takes the quadrant from the warp (kernels that run there leave these bits zero); PTX
// asks for the same quadrant in the address, which `strict` does too.
inline uint32_t tmem_first_lane(TmemShape shape, uint32_t address, uint32_t warp_index,
                                bool strict) {
    const uint32_t lane = address >> 16, quadrant = warp_index % 4;
    if (lane / 32 != quadrant && (strict || lane / 32 != 0)) {
        fail(FaultKind::invalid_operation,
             "tensor memory address 0x%08x is at lane %u, but warp %u may only touch lanes %u..%u",
             address, lane, warp_index, 32 * quadrant, 32 * quadrant + 31);
    }
    const uint32_t grain = shape == TmemShape::x32x32b ? 32 : 16;
    if (lane % grain) {
        fail(FaultKind::invalid_operation,
             "tensor memory address 0x%08x: lane %u is no multiple of %u, as this shape needs",
             address, lane, grain);
    }
    return 32 * quadrant + lane % 32;
}

// ---- tcgen05.cp

enum class CopyShape : uint8_t {
    x32x128b_warpx4,
    x64x128b_02_13,
    x64x128b_01_23,
    x128x128b,
    x128x256b,
    x4x256b
};

// 16 elements of 4 or 6 bits to bytes, as tcgen05.mma wants them in tensor memory: FP4 in the
// middle four bits, FP6 in the low six. PTX shows that in figures only.
inline void decompress(const uint8_t* packed, uint32_t bits, uint8_t* out) {
    for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t at = i * bits;
        uint32_t value = packed[at / 8];
        if (at % 8 + bits > 8) value |= uint32_t(packed[at / 8 + 1]) << 8;
        value = value >> at % 8 & ((1u << bits) - 1);
        out[i] = uint8_t(bits == 4 ? value << 2 : value);
    }
}

// Copies the matrix that `source` describes to the cells at `address`. packed_bits: of the elements
// that become bytes (.b8x16), 0 if none do.
inline void copy_to_tensor_memory(TensorMemory& memory, uint32_t address, SharedWindow& shared,
                                  const MatrixDescriptor& source, CopyShape shape,
                                  uint32_t packed_bits = 0) {
    const uint32_t lane = address >> 16, column = address & 0xffff;
    uint32_t num_rows = 128, num_chunks = 1;
    switch (shape) {
        case CopyShape::x32x128b_warpx4:
            num_rows = 32;
            break;
        case CopyShape::x64x128b_02_13:
        case CopyShape::x64x128b_01_23:
            num_rows = 64;
            break;
        case CopyShape::x128x128b:
            break;
        case CopyShape::x128x256b:
            num_chunks = 2;
            break;
        case CopyShape::x4x256b:
            num_rows = 4, num_chunks = 2;
            break;
    }
    if (shape != CopyShape::x4x256b && lane != 0) {
        fail(FaultKind::invalid_operation,
             "tcgen05.cp to tensor memory address 0x%08x: this shape writes from lane 0 on",
             address);
    }
    for (uint32_t row = 0; row < num_rows; ++row) {
        for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) {
            const uint8_t* bytes =
                shared.read(source.k_major_chunk(row, chunk), packed_bits ? 2 * packed_bits : 16);
            uint8_t decompressed[16];
            if (packed_bits) {
                decompress(bytes, packed_bits, decompressed);
                bytes = decompressed;
            }
            auto put = [&](uint32_t target) {
                std::memcpy(memory.write(target, column + 4 * chunk, 4), bytes, 16);
            };
            switch (shape) {
                case CopyShape::x32x128b_warpx4:
                    for (uint32_t quadrant = 0; quadrant < 4; ++quadrant) put(row + 32 * quadrant);
                    break;
                case CopyShape::x64x128b_02_13:
                    put(row), put(row + 64);
                    break;
                case CopyShape::x64x128b_01_23:
                    put(row % 32 + 64 * (row / 32)), put(row % 32 + 64 * (row / 32) + 32);
                    break;
                case CopyShape::x128x128b:
                case CopyShape::x128x256b:
                    put(row);
                    break;
                case CopyShape::x4x256b:
                    put(lane + 32 * row);
                    break;
            }
        }
    }
}

}  // namespace deep_moe::emulator
