// Matrix descriptors of wgmma (SM90) and tcgen05 (SM100): where an operand lies in shared memory,
// and the tcgen05 instruction descriptor: shapes and formats of one MMA.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "fault.h"
#include "shared_window.h"

namespace deep_moe::emulator {

// Which address bits are exchanged. The XOR acts on absolute shared-memory addresses.
enum class Swizzle : uint8_t { none, bytes32, bytes64, bytes128, bytes128_atom32, bytes128_atom64 };

inline uint32_t swizzled(Swizzle swizzle, uint32_t address) {
    switch (swizzle) {
        case Swizzle::none:
            return address;
        case Swizzle::bytes32:
            return address ^ ((address >> 3) & 0x10);
        case Swizzle::bytes64:
            return address ^ ((address >> 3) & 0x30);
        case Swizzle::bytes128:
            return address ^ ((address >> 3) & 0x70);
        case Swizzle::bytes128_atom32:
            return address ^ ((address >> 2) & 0x60);
        case Swizzle::bytes128_atom64:
            return address ^ ((address >> 1) & 0x40);
    }
    return address;
}

// Bytes of a row before the next one starts; 0 for none.
inline uint32_t swizzle_span(Swizzle swizzle) {
    switch (swizzle) {
        case Swizzle::none:
            return 0;
        case Swizzle::bytes32:
            return 32;
        case Swizzle::bytes64:
            return 64;
        default:
            return 128;
    }
}

struct MatrixDescriptor {
    uint32_t start = 0;    // bytes, offset in the CTA's shared window
    uint32_t leading = 0;  // LBO, bytes
    uint32_t stride = 0;   // SBO, bytes
    Swizzle swizzle = Swizzle::none;

    // What is wrong with the bits that have one value only, "" if nothing. They say nothing of
    // where the operand lies, so that a run can go on without them.
    static std::string wrong_constants_sm90(uint64_t bits) {
        if (((bits >> 46) & 0x7) == 0) return "";
        return "wgmma " + shown(bits) + ": bits [48:46] must be 0, they are an SM100 constant";
    }
    static std::string wrong_constants_sm100(uint64_t bits) {
        if (((bits >> 46) & 0x7) != 1)
            return "tcgen05 " + shown(bits) + ": bits [48:46] must be 0b001";
        if ((bits >> 53) & 0xff) return "tcgen05 " + shown(bits) + ": bits [60:53] must be 0";
        return "";
    }

    static MatrixDescriptor sm90(uint64_t bits) {
        MatrixDescriptor descriptor = common(bits);
        constexpr Swizzle codes[4] = {Swizzle::none, Swizzle::bytes128, Swizzle::bytes64,
                                      Swizzle::bytes32};
        descriptor.swizzle = codes[bits >> 62];
        descriptor.check_base_offset(bits);
        return descriptor;
    }

    static MatrixDescriptor sm100(uint64_t bits) {
        MatrixDescriptor descriptor = common(bits);
        const auto number = static_cast<unsigned long long>(bits);
        if ((bits >> 52) & 1) {
            fail(FaultKind::unsupported,
                 "tcgen05 matrix descriptor 0x%016llx: absolute leading offset (bit 52)", number);
        }
        switch (bits >> 61) {
            case 0:
                descriptor.swizzle = Swizzle::none;
                break;
            case 1:
                descriptor.swizzle = Swizzle::bytes128_atom32;
                break;
            case 2:
                descriptor.swizzle = Swizzle::bytes128;
                break;
            case 4:
                descriptor.swizzle = Swizzle::bytes64;
                break;
            case 6:
                descriptor.swizzle = Swizzle::bytes32;
                break;
            default:
                fail(FaultKind::invalid_operation,
                     "tcgen05 matrix descriptor 0x%016llx: swizzle code %llu does not exist",
                     number, number >> 61);
        }
        descriptor.check_base_offset(bits);
        return descriptor;
    }

    // Address of 16 bytes of a K-major operand: row `row`, bytes 16*chunk.. of this instruction's
    // K.
    uint32_t k_major_chunk(uint32_t row, uint32_t chunk) const {
        if (swizzle == Swizzle::none)
            return start + (row / 8) * stride + (row % 8) * 16 + chunk * leading;
        return swizzled(
            swizzle, start + (row / 8) * stride + (row % 8) * swizzle_span(swizzle) + chunk * 16);
    }

    // Address of 16 bytes of an MN-major operand: K index `k`, rows (16/element_bytes)*chunk.. .
    uint32_t mn_major_chunk(uint32_t k, uint32_t chunk) const {
        if (swizzle == Swizzle::none)
            return start + chunk * stride + (k % 8) * 16 + (k / 8) * leading;
        const uint32_t span = swizzle_span(swizzle), chunks_per_atom = span / 16;
        // The 32-byte-atom form groups K by 4 instead of 8 (CuTe, mma_traits_sm100.hpp).
        const uint32_t group = swizzle == Swizzle::bytes128_atom32 ? 4 : 8;
        return swizzled(swizzle, start + (chunk / chunks_per_atom) * leading +
                                     (chunk % chunks_per_atom) * 16 + (k % group) * span +
                                     (k / group) * stride);
    }

 private:
    static std::string shown(uint64_t bits) {
        char text[40];
        std::snprintf(text, sizeof text, "matrix descriptor 0x%016llx",
                      static_cast<unsigned long long>(bits));
        return text;
    }

    // It moves the pattern of a swizzle; without one it says nothing.
    void check_base_offset(uint64_t bits) const {
        if (swizzle == Swizzle::none || !((bits >> 49) & 0x7)) return;
        fail(FaultKind::unsupported,
             "matrix descriptor 0x%016llx: base offset (bits [51:49]) other than 0 is not emulated "
             "with a swizzle",
             static_cast<unsigned long long>(bits));
    }

    static MatrixDescriptor common(uint64_t bits) {
        MatrixDescriptor descriptor;
        descriptor.start = uint32_t(bits & 0x3fff) << 4;
        descriptor.leading = uint32_t((bits >> 16) & 0x3fff) << 4;
        descriptor.stride = uint32_t((bits >> 32) & 0x3fff) << 4;
        return descriptor;
    }
};

// Copies an operand, whatever its layout, to `out` as rows of `row_bytes` bytes (a multiple of 16).
// `chunk_bytes` of each 16 hold data, the rest is padding that is not read.
inline void gather_operand(SharedWindow& shared, const MatrixDescriptor& descriptor, bool mn_major,
                           uint32_t num_rows, uint32_t row_bytes, uint32_t element_bytes,
                           uint8_t* out, uint32_t chunk_bytes = 16) {
    if (!mn_major) {
        for (uint32_t row = 0; row < num_rows; ++row) {
            uint8_t* const to = out + row * row_bytes;
            for (uint32_t chunk = 0; chunk < row_bytes / 16; ++chunk) {
                const uint32_t address = descriptor.k_major_chunk(row, chunk);
                // A swizzle leaves pairs of chunks beside each other, in either order: one access.
                if (chunk_bytes == 16 && chunk + 1 < row_bytes / 16 &&
                    (address ^ descriptor.k_major_chunk(row, chunk + 1)) == 16) {
                    const uint8_t* source = shared.read(address & ~16u, 32);
                    const uint32_t first = address & 16;
                    __builtin_memcpy(to + chunk * 16, source + first, 16);
                    __builtin_memcpy(to + chunk * 16 + 16, source + (16 - first), 16);
                    ++chunk;
                    continue;
                }
                __builtin_memcpy(to + chunk * 16, shared.read(address, chunk_bytes), chunk_bytes);
            }
        }
        return;
    }
    const uint32_t rows_per_chunk = 16 / element_bytes, num_k = row_bytes / element_bytes;
    for (uint32_t k = 0; k < num_k; ++k) {
        for (uint32_t chunk = 0; chunk * rows_per_chunk < num_rows; ++chunk) {
            const uint32_t first_row = chunk * rows_per_chunk;
            const uint32_t rows =
                num_rows - first_row < rows_per_chunk ? num_rows - first_row : rows_per_chunk;
            const uint8_t* source =
                shared.read(descriptor.mn_major_chunk(k, chunk), rows * element_bytes);
            for (uint32_t row = 0; row < rows; ++row) {
                __builtin_memcpy(out + (first_row + row) * row_bytes + k * element_bytes,
                                 source + row * element_bytes, element_bytes);
            }
        }
    }
}

enum class MmaKind : uint8_t { f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4 };

inline bool is_block_scaled(MmaKind kind) {
    return kind >= MmaKind::mxf8f6f4;
}

enum class Element : uint8_t { f16, bf16, tf32, e4m3, e5m2, e2m3, e3m2, e2m1, u8, s8, u4, s4, b1 };
enum class Accumulator : uint8_t { f16, f32, s32 };

struct InstructionDescriptor {
    uint32_t m = 0, n = 0, k = 0;
    Element a = Element::e4m3, b = Element::e4m3;
    Accumulator d = Accumulator::f32;
    bool negate_a = false, negate_b = false, a_mn_major = false, b_mn_major = false,
         saturate = false;
    uint32_t sfa_id = 0, sfb_id = 0;
    bool scale_is_ue8m0 = true;
    uint32_t sparsity_selector = 0;
    uint32_t max_shift = 0;  // of the columns of B, .ws

    // Checks the fields against what `kind` and `cta_group` allow. is_weight_stationary: .ws.
    // is_sparse: .sp.
    static InstructionDescriptor decode(uint32_t bits, MmaKind kind, int cta_group,
                                        bool is_weight_stationary = false, bool is_sparse = false) {
        InstructionDescriptor d;
        const bool scaled = is_block_scaled(kind);
        if ((bits >> 2 & 1) != is_sparse)
            illegal_field(bits, is_sparse ? "bit 2 (sparse) must be 1 for tcgen05.mma.sp"
                                          : "bit 2 (sparse) must be 0 for a dense product");
        d.sparsity_selector = bits & 3;
        if (d.sparsity_selector && (!is_sparse || kind > MmaKind::tf32))
            illegal_field(bits, "the sparsity selector (bits [1:0]) must be 0");
        if (d.sparsity_selector > 1)
            fail(FaultKind::unsupported,
                 "tcgen05.mma instruction descriptor 0x%08x: sparsity selector %u", bits,
                 d.sparsity_selector);
        d.a = element(bits, kind, (bits >> 7) & 7, "A");
        d.b = element(bits, kind, (bits >> 10) & 7, "B");
        d.negate_a = (bits >> 13) & 1;
        d.negate_b = (bits >> 14) & 1;
        d.a_mn_major = (bits >> 15) & 1;
        d.b_mn_major = (bits >> 16) & 1;
        d.n = ((bits >> 17) & 0x3f) << 3;
        d.k = kind == MmaKind::tf32   ? 8
              : kind == MmaKind::f16  ? 16
              : kind >= MmaKind::mxf4 ? 64
                                      : 32;
        if (is_sparse) d.k *= 2;
        if (bits & (1u << 6)) illegal_field(bits, "bit 6 must be 0");
        if (scaled) {
            d.m = ((bits >> 27) & 3) << 7;
            d.sfb_id = (bits >> 4) & 3;
            d.sfa_id = (bits >> 29) & 3;
            d.scale_is_ue8m0 = (bits >> 23) & 1;
            if (bits & 0x8) illegal_field(bits, "bit 3 must be 0");
            if ((bits >> 24) & 7) illegal_field(bits, "bits [26:24] must be 0");
            if (bits >> 31)
                fail(FaultKind::unsupported, "tcgen05.mma instruction descriptor 0x%08x: K = 96",
                     bits);
            if (kind != MmaKind::mxf4nvf4 && !d.scale_is_ue8m0) {
                illegal_field(bits, "the scale type (bit 23) must be UE8M0 = 1");
            }
            if (kind != MmaKind::mxf8f6f4 && ((d.sfa_id | d.sfb_id) & 1)) {
                illegal_field(bits, "the scale factor ids must be 0 or 2");
            }
        } else {
            d.m = ((bits >> 24) & 0x1f) << 4;
            d.saturate = (bits >> 3) & 1;
            if (d.saturate && kind != MmaKind::i8)
                illegal_field(bits, "saturate (bit 3) exists for kind::i8 only");
            if (bits & (1u << 23)) illegal_field(bits, "bit 23 must be 0");
            if (bits & (1u << 29)) illegal_field(bits, "bit 29 must be 0");
            if (bits >> 30 && !is_weight_stationary)
                illegal_field(bits, "the maximum shift (bits [31:30]) is of tcgen05.mma.ws");
            d.max_shift = bits >> 30 ? 4u << (bits >> 30) : 0;
            switch ((bits >> 4) & 3) {
                case 0:
                    d.d = Accumulator::f16;
                    break;
                case 1:
                    d.d = Accumulator::f32;
                    break;
                case 2:
                    d.d = Accumulator::s32;
                    break;
                default:
                    illegal_field(bits, "D format 3 does not exist");
            }
            if ((d.d == Accumulator::s32) != (kind == MmaKind::i8))
                illegal_field(bits, "this D format is of another kind");
            if (d.d == Accumulator::f16 && kind == MmaKind::tf32)
                illegal_field(bits, "kind::tf32 has no F16 result");
        }
        const bool packed_or_padded_a = d.a >= Element::e2m3 && d.a <= Element::e2m1;
        const bool packed_or_padded_b = d.b >= Element::e2m3 && d.b <= Element::e2m1;
        if ((d.a_mn_major && packed_or_padded_a) || (d.b_mn_major && packed_or_padded_b)) {
            illegal_field(bits, "operands of less than 8 bits must be K-major");
        }
        if (is_weight_stationary)
            check_weight_stationary_shape(bits, d);
        else
            check_shape(bits, d, scaled, cta_group);
        return d;
    }

 private:
    [[noreturn]] static void illegal_field(uint32_t bits, const char* what) {
        fail(FaultKind::invalid_operation, "tcgen05.mma instruction descriptor 0x%08x: %s", bits,
             what);
    }

    static Element element(uint32_t bits, MmaKind kind, uint32_t code, const char* operand) {
        switch (kind) {
            case MmaKind::f16:
                if (code <= 1) return code ? Element::bf16 : Element::f16;
                break;
            case MmaKind::tf32:
                if (code == 2) return Element::tf32;
                break;
            case MmaKind::i8:
                if (code <= 1) return code ? Element::s8 : Element::u8;
                break;
            case MmaKind::f8f6f4:
            case MmaKind::mxf8f6f4: {
                constexpr Element codes[6] = {Element::e4m3, Element::e5m2, Element::e4m3,
                                              Element::e2m3, Element::e3m2, Element::e2m1};
                if (code <= 5 && code != 2) return codes[code];
                break;
            }
            case MmaKind::mxf4:
            case MmaKind::mxf4nvf4:
                if (code == 1) return Element::e2m1;
                break;
        }
        fail(FaultKind::invalid_operation,
             "tcgen05.mma instruction descriptor 0x%08x: format code %u of %s does not exist in "
             "this kind",
             bits, code, operand);
    }

    static void check_weight_stationary_shape(uint32_t bits, const InstructionDescriptor& d) {
        if ((d.m == 32 || d.m == 64 || d.m == 128) && (d.n == 64 || d.n == 128 || d.n == 256))
            return;
        fail(FaultKind::invalid_operation,
             "tcgen05.mma.ws instruction descriptor 0x%08x: M = %u, N = %u does not exist", bits,
             d.m, d.n);
    }

    static void check_shape(uint32_t bits, const InstructionDescriptor& d, bool scaled,
                            int cta_group) {
        bool m_ok, n_ok;
        if (scaled) {
            m_ok = d.m == (cta_group == 1 ? 128u : 256u);
            n_ok = cta_group == 1 || d.n % 16 == 0;
        } else if (cta_group == 1) {
            m_ok = d.m == 64 || d.m == 128;
            n_ok = d.m == 64 || d.n % 16 == 0;
        } else {
            m_ok = d.m == 128 || d.m == 256;
            n_ok = d.n % 16 == 0;
        }
        if (!m_ok || !n_ok || d.n < 8 || d.n > 256) {
            fail(FaultKind::invalid_operation,
                 "tcgen05.mma instruction descriptor 0x%08x: M = %u, N = %u does not exist for "
                 "cta_group::%d%s",
                 bits, d.m, d.n, cta_group, scaled ? " with block scaling" : "");
        }
    }
};

}  // namespace deep_moe::emulator
