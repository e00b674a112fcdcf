// From an operand's bytes to a panel of doubles, as the dot kernel wants it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dot_kernel.h"
#include "matrix_descriptor.h"
#include "numeric.h"

namespace deep_moe::emulator {

inline const DecodeTable& decode_table(Element element) {
    static const DecodeTable e4m3 = make_decode_table(e4m3_format),
                             e5m2 = make_decode_table(e5m2_format),
                             e2m3 = make_decode_table(e2m3_format),
                             e3m2 = make_decode_table(e3m2_format),
                             e2m1 = make_decode_table(e2m1_format);
    switch (element) {
        case Element::e5m2:
            return e5m2;
        case Element::e2m3:
            return e2m3;
        case Element::e3m2:
            return e3m2;
        case Element::e2m1:
            return e2m1;
        default:
            return e4m3;
    }
}

// Bytes that one element takes in an operand's row; 1 also for 4- and 6-bit elements in their
// 16-byte chunks.
inline uint32_t container_bytes(Element element) {
    switch (element) {
        case Element::f16:
        case Element::bf16:
            return 2;
        case Element::tf32:
            return 4;
        default:
            return 1;
    }
}

// Bits of an element in a register of mma.sync, or in a row of wgmma's.
inline uint32_t element_bits(Element element) {
    switch (element) {
        case Element::u4:
        case Element::s4:
            return 4;
        case Element::b1:
            return 1;
        default:
            return 8 * container_bytes(element);
    }
}

// Data bytes of a 16-byte chunk that holds 16 elements.
inline uint32_t chunk_data_bytes(Element element) {
    switch (element) {
        case Element::e2m1:
            return 8;
        case Element::e2m3:
        case Element::e3m2:
            return 12;
        default:
            return 16;
    }
}

// Decodes `num_elements` elements that lie at `bytes`; out[i * step]. `packed`: two E2M1 per byte
// without padding.
inline void decode_row(Element element, bool packed, const uint8_t* bytes, uint32_t num_elements,
                       double* out, uint32_t step) {
    switch (element) {
        case Element::e4m3:
        case Element::e5m2: {
            const DecodeTable& table = decode_table(element);
            for (uint32_t i = 0; i < num_elements; ++i) out[i * step] = table[bytes[i]];
            return;
        }
        case Element::e2m1: {
            const DecodeTable& table = decode_table(element);
            for (uint32_t i = 0; i < num_elements; i += 2) {
                // Low nibble first; in chunks of 16 elements the 8 data bytes are followed by 8 of
                // padding.
                const uint8_t byte = bytes[packed ? i / 2 : i / 16 * 16 + i % 16 / 2];
                out[i * step] = table[byte & 0xf];
                out[(i + 1) * step] = table[byte >> 4];
            }
            return;
        }
        case Element::e2m3:
        case Element::e3m2: {
            const DecodeTable& table = decode_table(element);
            for (uint32_t i = 0; i < num_elements; ++i) {
                const uint8_t* chunk = bytes + i / 16 * 16;
                const uint32_t bit = i % 16 * 6;
                const uint32_t pair = chunk[bit / 8] | uint32_t(chunk[bit / 8 + (bit % 8 > 2)])
                                                           << 8;
                out[i * step] = table[(pair >> (bit % 8)) & 0x3f];
            }
            return;
        }
        case Element::f16:
        case Element::bf16:
            // Runs of numbers, so that the conversion vectorizes whatever the step.
            for (uint32_t first = 0; first < num_elements; first += 16) {
                const uint32_t count = std::min(num_elements - first, 16u);
                uint16_t codes[16] = {};
                float values[16];
                std::memcpy(codes, bytes + 2 * first, 2 * count);
                if (element == Element::f16) {
                    for (uint32_t i = 0; i < 16; ++i) values[i] = f16_to_float(codes[i]);
                } else {
                    for (uint32_t i = 0; i < 16; ++i) values[i] = bf16_to_float(codes[i]);
                }
                for (uint32_t i = 0; i < count; ++i) out[(first + i) * step] = values[i];
            }
            return;
        case Element::tf32:
            for (uint32_t i = 0; i < num_elements; ++i) {
                uint32_t code;
                std::memcpy(&code, bytes + 4 * i, 4);
                out[i * step] = tf32_to_float(code);
            }
            return;
        case Element::u8:
            for (uint32_t i = 0; i < num_elements; ++i) out[i * step] = bytes[i];
            return;
        case Element::s8:
            for (uint32_t i = 0; i < num_elements; ++i) out[i * step] = int8_t(bytes[i]);
            return;
        case Element::u4:
            for (uint32_t i = 0; i < num_elements; ++i)
                out[i * step] = bytes[i / 2] >> i % 2 * 4 & 0xf;
            return;
        case Element::s4:
            for (uint32_t i = 0; i < num_elements; ++i)
                out[i * step] = int8_t(bytes[i / 2] << (i % 2 ? 0 : 4)) >> 4;
            return;
        case Element::b1:
            for (uint32_t i = 0; i < num_elements; ++i) out[i * step] = bytes[i / 8] >> i % 8 & 1;
            return;
    }
}

// An element of 4, 6 or 8 bits in a byte of its own: FP4 in the middle four bits, FP6 in the low
// six.
inline double decode_container(Element element, uint8_t byte) {
    const uint8_t code = element == Element::e2m1                               ? byte >> 2 & 0xf
                         : element == Element::e2m3 || element == Element::e3m2 ? byte & 0x3f
                                                                                : byte;
    return decode_table(element)[code];
}

// Scratch of one multiplication. A is [rows][k], B is [k][pitch] with pitch = n rounded up to 16
// and zeros behind n.
struct Panels {
    std::vector<double> a, b, product;
    std::vector<uint8_t> bytes;
    uint32_t pitch = 0;

    void resize(uint32_t num_rows, uint32_t n, uint32_t k) {
        resize_a(num_rows, k);
        resize_b(n, k);
    }
    void resize_a(uint32_t num_rows, uint32_t k) {
        a.assign(size_t((num_rows + row_block - 1) / row_block * row_block) * k, 0.0);
    }
    void resize_b(uint32_t n, uint32_t k) {
        pitch = (n + panel_columns - 1) / panel_columns * panel_columns;
        b.assign(size_t(k) * pitch, 0.0);
        product.resize(size_t(row_block) * pitch);
    }

    // product[0..3][n] = sum over k of rows row..row+3 of A with B.
    void multiply(uint32_t row, uint32_t k) {
        multiply_row_block(a.data() + size_t(row) * k, b.data(), product.data(), int(k), int(pitch),
                           int(pitch));
    }
};

}  // namespace deep_moe::emulator
