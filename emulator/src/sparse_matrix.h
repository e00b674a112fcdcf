// The structured sparse A of mma.sp, wgmma.mma_async.sp and tcgen05.mma.sp: of four elements of a
// row two are kept (of two .tf32 one, of 4-bit elements two of four pairs), and metadata says
// which.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fault.h"
#include "matrix_descriptor.h"
#include "operand_panel.h"

namespace deep_moe::emulator {

// What is kept or left out together.
struct SparseUnit {
    bool is_tf32 = false;       // two bits per half of an element
    uint32_t num_elements = 1;  // 2: pairs of 4-bit elements
    uint32_t group() const { return (is_tf32 ? 2 : 4) * num_elements; }
};

// values: a row of k, the kept ones in the first half; puts them in their places. nibble(i): the
// metadata of the row's group i.
template <class Nibble>
void spread_row(double* values, uint32_t k, SparseUnit unit, uint32_t row, Nibble nibble) {
    double kept[64];
    std::copy_n(values, k / 2, kept);
    std::fill_n(values, k, 0.0);
    const uint32_t group = unit.group(), size = unit.num_elements;
    for (uint32_t i = 0; i < k / group; ++i) {
        const uint32_t bits = nibble(i) & 0xf, low = bits & 3, high = bits >> 2;
        // A .tf32 is two halves, which stay together.
        if (unit.is_tf32 ? high != low + 1 || low % 2 : low == high)
            fail(FaultKind::invalid_operation,
                 "sparse metadata 0x%x of row %u, element %u does not exist", bits, row, i * group);
        double* const out = values + i * group;
        if (unit.is_tf32) {
            out[low / 2] = kept[i];
        } else {
            std::copy_n(kept + 2 * size * i, size, out + size * low);
            std::copy_n(kept + 2 * size * i + size, size, out + size * high);
        }
    }
}

// Metadata in registers. Which thread's register says it of which elements is as CuTe has it
// (mma_traits_sm90_gmma_sparse.hpp, mma_traits_sm120_sparse.hpp).
struct SparseMetadata {
    const uint32_t* words = nullptr;  // one of each lane; null: A is dense
    uint32_t selector = 0;
    bool in_pairs = false;  // of 4-bit elements, which share bytes

    // The largest selector that there is.
    static uint32_t last_selector(Element element, uint32_t k, bool in_pairs = false) {
        const uint32_t row_bytes = in_pairs ? k / 2 : k * container_bytes(element);
        if (container_bytes(element) == 1) return row_bytes == 32 ? 1 : 0;
        return row_bytes == 32 ? 3 : 1;
    }

    // Four bits of row `row`'s units from `first` on: of four (.tf32: two) out of k.
    uint32_t nibble(Element element, uint32_t k, uint32_t row, uint32_t first) const {
        const bool is_low = row >= 8;
        uint32_t thread, bit;
        if (container_bytes(element) == 1) {  // a register has 32 units of one row
            thread = k == 32 ? 2 * selector + is_low : is_low + first / 32 * 2;
            bit = first % 32;
        } else {  // 16 bits of each of two rows, 8 apart
            const uint32_t bits_per_element = element == Element::tf32 ? 2 : 1;
            const uint32_t per_thread = 16 / bits_per_element;
            thread = k == per_thread ? selector : 2 * selector + first / per_thread;
            bit = 16 * is_low + first % per_thread * bits_per_element;
        }
        return words[row % 8 * 4 + thread] >> bit & 0xf;
    }

    // a: 16 rows of k values, the kept ones in the first half of each; puts them in their places.
    void spread(Element element, uint32_t k, double* a) const {
        const SparseUnit unit{element == Element::tf32, in_pairs ? 2u : 1u};
        const uint32_t size = unit.num_elements;
        for (uint32_t row = 0; row < 16; ++row)
            spread_row(a + row * k, k, unit, row, [&](uint32_t i) {
                return nibble(element, k / size, row, i * unit.group() / size);
            });
    }
};

}  // namespace deep_moe::emulator
