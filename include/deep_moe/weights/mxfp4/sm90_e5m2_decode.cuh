// From packed FP4 weights in shared memory to the register operand of wgmma.
//
// A weight block is 256 rows x 128 k as the host shuffled it: for each of the two math warpgroups
// 8192 bytes of nibbles and 512 bytes of shifts. A thread owns 4 rows and a quarter of the block's
// k, so that one 32-element scale group, and with it one shift, is all it needs per row.
//
// FP4 becomes E5M2 by a byte permute: the 8 magnitudes of a row's group are 8 bytes, and the
// group's scale is in them already, since a shift by one exponent adds 4 to each E5M2 code but that
// of zero.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/wgmma.cuh"

namespace deep_moe::sm90 {

constexpr uint32_t weight_shift_offset = 8192;  // behind the nibbles of both halves

// Shifts of a thread's 4 rows, a byte each: row r of half h in byte 2*h + r.
__device__ __forceinline__ uint32_t load_weight_shifts(uint32_t part,
                                                       uint32_t warpgroup_thread_idx) {
    return ptx::ld_shared_u32(part + weight_shift_offset + warpgroup_thread_idx * sizeof(uint32_t));
}

// The E5M2 codes of {0, .5, 1, 1.5} and {2, 3, 4, 6}, times 2^(shift - 13).
struct DecodeTable {
    uint32_t low;
    uint32_t high;
};

template <uint32_t byte_idx>
__device__ __forceinline__ DecodeTable decode_table(uint32_t shifts) {
    const uint32_t shift = ptx::prmt(shifts, 0, 0x4440 + byte_idx);
    return {shift * 0x04040400u + 0x0a080400u, shift * 0x04040404u + 0x12100e0cu};
}

// 8 weights of a row: magnitudes in bits 0..2 of each nibble, which select from the table; the sign
// of weight v in the bit that the result needs (bit 7 + 8*v for the first four, bit 3 + 8*(v-4),
// one nibble lower, for the others).
__device__ __forceinline__ void decode_word(uint32_t word, const DecodeTable& table,
                                            uint32_t& first, uint32_t& second) {
    const uint32_t selectors = word & 0x77777777u;
    first = ptx::prmt(table.low, table.high, selectors) | (word & 0x80808080u);
    //~ upper_nibbles
    second = ptx::prmt(table.low, table.high, selectors >> 16) | ((word << 4) & 0x80808080u);
}

// Of a thread's two rows in a row half.
struct DecodeTables {
    DecodeTable rows[2];
};

// What main_loop.cuh has to know of decoding: the register operands of its products, and what
// multiplies them.
struct E5m2Decoder {
    static constexpr uint32_t mmas_per_row_half = 4;
    static constexpr uint32_t mmas_per_unit = 2;  // whose weights a thread loads with 16 bytes
    static constexpr uint32_t part_bytes = weight_shift_offset + 512;  // of one warpgroup
    using Shifts = uint32_t;
    using Tables = DecodeTables;
    using Fragment = uint32_t[4];

    static __device__ __forceinline__ Shifts load_shifts(uint32_t part, uint32_t thread_idx) {
        return load_weight_shifts(part, thread_idx);
    }

    template <uint32_t row_half>
    static __device__ __forceinline__ Tables tables(const Shifts& shifts) {
        return {{decode_table<2 * row_half>(shifts), decode_table<2 * row_half + 1>(shifts)}};
    }

    // Of a row half's i-th product, which the compiler has to know. `packed`: its unit.
    __device__ __forceinline__ void decode(const uint4& packed, uint32_t i, const Tables& tables,
                                           Fragment& fragment) const {
        const bool is_first = i % mmas_per_unit == 0;
        decode_word(is_first ? packed.x : packed.z, tables.rows[0], fragment[0], fragment[2]);
        decode_word(is_first ? packed.y : packed.w, tables.rows[1], fragment[1], fragment[3]);
    }

    template <uint32_t num_accumulators>
    static __device__ __forceinline__ void multiply(float (&accumulators)[num_accumulators],
                                                    const Fragment& fragment, uint64_t tokens) {
        ptx::wgmma_m64k32_f32_e5m2_e4m3(accumulators, fragment, tokens);
    }
};

}  // namespace deep_moe::sm90
