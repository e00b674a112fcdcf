// The structured sparse A of mma.sp and wgmma.mma_async.sp: of four elements of a row two are kept
// (of two .tf32 one), and metadata says which. Which thread's register says it of which elements is
// as CuTe has it (mma_traits_sm90_gmma_sparse.hpp, mma_traits_sm120_sparse.hpp).
#pragma once

#include <cstdint>

#include "fault.h"
#include "matrix_descriptor.h"
#include "operand_panel.h"

namespace deep_moe::emulator {

struct SparseMetadata {
    const uint32_t* words = nullptr;  // one of each lane; null: A is dense
    uint32_t selector = 0;

    // The largest selector that there is.
    static uint32_t last_selector(Element element, uint32_t k) {
        const uint32_t row_bytes = k * container_bytes(element);
        if (container_bytes(element) == 1) return row_bytes == 32 ? 1 : 0;
        return row_bytes == 32 ? 3 : 1;
    }

    // Four bits of row `row`'s elements from `first` on: of four elements (.tf32: two).
    uint32_t nibble(Element element, uint32_t k, uint32_t row, uint32_t first) const {
        const bool is_low = row >= 8;
        uint32_t thread, bit;
        if (container_bytes(element) == 1) {  // a register has 32 elements of one row
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
        const bool is_pair = element == Element::tf32;
        const uint32_t group = is_pair ? 2 : 4, kept = group / 2;
        for (uint32_t row = 0; row < 16; ++row) {
            double* values = a + row * k;
            for (uint32_t first = k; first > 0;) {
                first -= group;
                const uint32_t bits = nibble(element, k, row, first);
                const uint32_t low = bits & 3, high = bits >> 2;
                // A .tf32 is two halves, which stay together.
                if (is_pair ? high != low + 1 || low % 2 : low == high)
                    fail(FaultKind::invalid_operation,
                         "sparse metadata 0x%x of row %u, element %u does not exist", bits, row,
                         first);
                const double one = values[first / 2], two = values[first / 2 + kept - 1];
                for (uint32_t i = 0; i < group; ++i) values[first + i] = 0;
                if (is_pair) {
                    values[first + low / 2] = one;
                } else {
                    values[first + low] = one;
                    values[first + high] = two;
                }
            }
        }
    }
};

}  // namespace deep_moe::emulator
