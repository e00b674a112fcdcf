// Tensor maps: the 128-byte image that the launch layer writes for the emulator, and the two copies
// that it describes: load (global to shared memory) and store, of a tile or, in im2col mode, of
// pixels in the order in which a convolution's filter visits them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fault.h"
#include "matrix_descriptor.h"
#include "numeric.h"
#include "shared_window.h"

namespace deep_moe::emulator {

// Global memory as the copies see it: host pointer to `num_bytes` bytes after the bounds check.
struct GlobalMemory {
    virtual const uint8_t* read(uint64_t address, uint64_t num_bytes) = 0;
    virtual uint8_t* write(uint64_t address, uint64_t num_bytes) = 0;

 protected:
    ~GlobalMemory() = default;
};

struct TensorMap {
    static constexpr uint64_t image_magic = 0x313050414D544D44ull;  // "DMTMAP01"
    static constexpr int max_rank = 5;
    static constexpr uint8_t type_f32_ftz = 10, type_tf32 = 11, type_tf32_ftz = 12,
                             type_u4_align8 = 13, type_u4_align16 = 14, type_u6_align16 = 15;

    uint8_t data_type = 0;
    int rank = 0;
    Swizzle swizzle = Swizzle::none;
    bool nan_fill = false;
    uint64_t address = 0;
    uint64_t dims[max_rank] = {};     // elements
    uint64_t strides[max_rank] = {};  // bytes; [0] is not used
    uint32_t box[max_rank] = {};      // elements
    uint32_t element_strides[max_rank] = {};
    // Dimensions are channels, then W, H and D as far as there are, then images. A box has box[0]
    // channels of box[1] pixels. The filter's base moves in W, H and D from the lower corner to the
    // last element plus the upper corner, W first, then on to the next image.
    bool is_im2col = false;
    static constexpr uint32_t max_pixels = 1024;
    int32_t lower_corner[max_rank - 2] = {}, upper_corner[max_rank - 2] = {};  // W, H, D

    // Reads and checks an image. is_sm90: for a kernel of that architecture, for which drivers
    // refuse the swizzles of larger atoms.
    static TensorMap decode(const uint8_t* image, bool is_sm90 = false) {
        auto u64 = [&](int offset) {
            uint64_t value;
            std::memcpy(&value, image + offset, 8);
            return value;
        };
        auto u16 = [&](int offset) {
            uint16_t value;
            std::memcpy(&value, image + offset, 2);
            return value;
        };
        if (u64(0) != image_magic) {
            fail(FaultKind::invalid_operation,
                 "the operand is no tensor map of the emulator (it starts with 0x%016llx, not with "
                 "\"DMTMAP01\"): TensorMapSpec(...).encode_emulated() makes one",
                 static_cast<unsigned long long>(u64(0)));
        }
        TensorMap map;
        map.data_type = image[8];
        map.rank = image[9];
        if (image[10] != 0) fail(FaultKind::unsupported, "tensor map: interleave %u", image[10]);
        constexpr Swizzle swizzles[] = {
            Swizzle::none,           Swizzle::bytes32,         Swizzle::bytes64,
            Swizzle::bytes128,       Swizzle::bytes128_atom32, Swizzle::none,
            Swizzle::bytes128_atom64};
        if (image[11] > 6)
            fail(FaultKind::invalid_operation, "tensor map: swizzle %u does not exist", image[11]);
        if (is_sm90 && image[11] > 3) {
            constexpr const char* names[] = {"128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B",
                                             "128B_ATOM_64B"};
            fail(FaultKind::invalid_operation,
                 "tensor map: swizzle %s does not exist on sm_90 (the driver refuses the map)",
                 names[image[11] - 4]);
        }
        if (image[11] == 5)
            fail(FaultKind::unsupported, "tensor map: swizzle 128B_ATOM_32B_FLIP_8B");
        map.swizzle = swizzles[image[11]];
        map.nan_fill = image[12] != 0;
        map.is_im2col = image[13] != 0;
        map.address = u64(16);
        if (map.data_type > type_u6_align16) {
            fail(FaultKind::invalid_operation, "tensor map: data type %u does not exist",
                 map.data_type);
        }
        if (map.rank < 1 || map.rank > max_rank) {
            fail(FaultKind::invalid_operation, "tensor map: rank %d is not 1..5", map.rank);
        }
        if (is_sm90 && map.is_packed()) {
            fail(FaultKind::invalid_operation,
                 "tensor map: data type %s does not exist on sm_90 (the driver refuses the map)",
                 map.type_name());
        }
        for (int i = 0; i < map.rank; ++i) {
            map.dims[i] = u64(24 + 8 * i);
            if (i > 0) map.strides[i] = u64(64 + 8 * (i - 1));
            map.box[i] = u16(96 + 2 * i);
            map.element_strides[i] = i == 0 ? 1 : image[106 + i];
        }
        for (int i = 0; i < max_rank - 2; ++i) {
            map.lower_corner[i] = int16_t(u16(112 + 2 * i));
            map.upper_corner[i] = int16_t(u16(118 + 2 * i));
        }
        map.check();
        return map;
    }

    bool is_packed() const { return data_type >= type_u4_align8; }
    bool is_padded() const { return data_type >= type_u4_align16; }
    uint32_t element_bits() const {
        constexpr uint8_t bits[16] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
        return bits[data_type];
    }
    // tile::gather4 and tile::scatter4: coordinates 1 to 4 are rows, and a box has one of them.
    bool picks_rows = false;
    static constexpr int num_picked_rows = 4;
    // Of im2col loads, between the filter's base and the element that is read: W, H, D.
    uint32_t offsets[max_rank - 2] = {};
    // How many coordinates an instruction has.
    int num_coordinates() const { return picks_rows ? 1 + num_picked_rows : rank; }

    // Elements of box dimension `i` that are copied.
    uint32_t box_count(int i) const {
        if (picks_rows && i == 1) return num_picked_rows;
        return (box[i] + element_strides[i] - 1) / element_strides[i];
    }
    uint32_t num_box_rows() const {
        if (is_im2col) return box[1];
        uint32_t rows = 1;
        for (int i = 1; i < rank; ++i) rows *= box_count(i);
        return rows;
    }
    // Bytes of one box row in global memory, which are also the ones that complete_tx counts.
    uint32_t row_bytes() const { return box[0] * element_bits() / 8; }
    uint32_t row_pitch() const {
        if (swizzle != Swizzle::none) return swizzle_span(swizzle);
        return is_padded() ? box[0] : row_bytes();
    }
    // Always the whole box, also where it hangs over an edge.
    uint32_t transaction_bytes() const { return row_bytes() * num_box_rows(); }

    const char* type_name() const {
        constexpr const char* names[16] = {
            "UINT8",        "UINT16",       "UINT32",        "INT32",
            "UINT64",       "INT64",        "FLOAT16",       "FLOAT32",
            "FLOAT64",      "BFLOAT16",     "FLOAT32_FTZ",   "TFLOAT32",
            "TFLOAT32_FTZ", "16U4_ALIGN8B", "16U4_ALIGN16B", "16U6_ALIGN16B"};
        return names[data_type];
    }

    // Where a box may start in dimension 0, of a prefetch too; an H200 ends the kernel with an
    // illegal instruction otherwise, wherever the box lies. The packed types, which it does not
    // have, go by PTX.
    void check_start(const int32_t* coordinates) const {
        const int32_t x = coordinates[0];
        if (is_padded() && x % 128 != 0) {
            fail(FaultKind::invalid_operation,
                 "tensor copy of padded 4- or 6-bit elements: coordinate 0 is %d, not a multiple "
                 "of 128",
                 x);
        }
        if (is_packed()) {
            if (x % 2 == 0) return;
            fail(FaultKind::invalid_operation,
                 "tensor copy of 4-bit elements: coordinate 0 is %d, which is odd", x);
        }
        const int32_t grain = int32_t(128 / element_bits());
        if (x % grain != 0) {
            fail(FaultKind::invalid_operation,
                 "tensor copy: coordinate 0 is %d, not a multiple of 16 bytes, which are %d "
                 "elements "
                 "of %s",
                 x, grain, type_name());
        }
    }

    void check_load(const int32_t* coordinates, uint32_t shared_address) const {
        check_shared_address(shared_address);
        check_start(coordinates);
        check_base(coordinates);
    }

    // Unlike a load, a store may not begin before the tensor, in any dimension.
    void check_store(const int32_t* coordinates, uint32_t shared_address) const {
        check_shared_address(shared_address);
        check_start(coordinates);
        check_base(coordinates);
        if (is_padded())
            fail(FaultKind::invalid_operation,
                 "tensor store with data type %u, which can only be loaded", data_type);
        // An H200 takes a map whose filter's base stays in the image.
        for (int i = 0; is_im2col && i < num_spatial(); ++i) {
            if (lower_corner[i] < 0 || upper_corner[i] > 0) {
                fail(FaultKind::invalid_operation,
                     "im2col store: the bounding box %d..%lld of dimension %d reaches beyond the "
                     "image",
                     lower_corner[i], static_cast<long long>(last_base(i)), 1 + i);
            }
        }
        for (int i = 0; i < num_coordinates(); ++i) {
            if (coordinates[i] < 0) {
                fail(FaultKind::invalid_operation, "tensor store: coordinate %d is negative (%d)",
                     i, coordinates[i]);
            }
        }
    }

    // One box from global memory to `shared` at `shared_address`, zeros (or NaN) outside of the
    // tensor.
    void load_tile(const int32_t* coordinates, uint32_t shared_address, GlobalMemory& global,
                   SharedWindow& shared) const {
        check_load(coordinates, shared_address);
        uint8_t row[256 * 8];
        const uint32_t bytes = row_bytes(), pitch = row_pitch();
        for_each_box_row(coordinates, [&](uint32_t index, bool inside, uint64_t row_address) {
            fetch_row(coordinates[0], inside, row_address, bytes, row, global);
            const uint32_t base = shared_address + index * pitch;
            // 16 bytes of shared memory take `step` bytes of the row.
            const uint32_t step = is_padded() ? 2 * element_bits() : 16;
            for (uint32_t offset = 0, chunk = 0; offset < bytes; offset += step, ++chunk) {
                std::memcpy(shared.write(swizzled(swizzle, base + 16 * chunk), step), row + offset,
                            step);
            }
        });
    }

    // `each(address, bytes)` of the part of each row of the box that lies inside of the tensor.
    template <class Each>
    void for_each_run(const int32_t* coordinates, Each each) const {
        const int64_t first = int64_t(coordinates[0]) * element_bits() / 8;
        const int64_t end = int64_t(dims[0] * element_bits() / 8);
        const int64_t low = first < 0 ? 0 : first,
                      high = std::min(first + int64_t(row_bytes()), end);
        if (low >= high) return;
        for_each_box_row(coordinates, [&](uint32_t, bool inside, uint64_t row_address) {
            if (inside) each(row_address + uint64_t(low), uint64_t(high - low));
        });
    }

    // Gives the box's part inside of the tensor to `put(global_address, bytes, num_bytes)`, row by
    // row. Dimension 0 is clipped to 16 bytes only, as measured on an H200.
    template <class Put>
    void read_tile_for_store(const int32_t* coordinates, uint32_t shared_address,
                             SharedWindow& shared, Put put) const {
        check_store(coordinates, shared_address);
        uint8_t row[256 * 8];
        const uint32_t bytes = row_bytes(), pitch = row_pitch();
        const uint64_t tensor_row_bytes = (dims[0] * element_bits() + 127) / 128 * 16;
        const uint64_t first = uint64_t(coordinates[0]) * element_bits() / 8;
        const uint64_t kept = first >= tensor_row_bytes          ? 0
                              : tensor_row_bytes - first < bytes ? tensor_row_bytes - first
                                                                 : bytes;
        for_each_box_row(coordinates, [&](uint32_t index, bool inside, uint64_t row_address) {
            if (!inside || kept == 0) return;
            const uint32_t base = shared_address + index * pitch;
            for (uint32_t offset = 0; offset < kept; offset += 16) {
                const uint32_t num = kept - offset < 16 ? uint32_t(kept - offset) : 16;
                std::memcpy(row + offset, shared.read(swizzled(swizzle, base + offset), num), num);
            }
            put(row_address + first, row, kept);
        });
    }

    int num_spatial() const { return rank - 2; }
    // Last place of the filter's base in spatial dimension `i` (of W, H, D).
    int64_t last_base(int i) const { return int64_t(dims[1 + i]) - 1 + upper_corner[i]; }

 private:
    void check_base(const int32_t* coordinates) const {
        for (int i = 0; is_im2col && i < num_spatial(); ++i) {
            const int32_t base = coordinates[1 + i];
            if (base >= lower_corner[i] && base <= last_base(i)) continue;
            fail(FaultKind::invalid_operation,
                 "im2col copy: coordinate %d is %d, outside of the bounding box %d..%lld", 1 + i,
                 base, lower_corner[i], static_cast<long long>(last_base(i)));
        }
    }

    void check_im2col() const {
        if (rank < 3)
            fail(FaultKind::invalid_operation, "im2col tensor map: rank %d is not 3..5", rank);
        for (int i = 0; i < num_spatial(); ++i) {
            if (lower_corner[i] <= last_base(i)) continue;
            fail(FaultKind::invalid_operation,
                 "im2col tensor map: the bounding box of dimension %d is empty (%d..%lld)", 1 + i,
                 lower_corner[i], static_cast<long long>(last_base(i)));
        }
    }

    void check() const {
        if (is_im2col) check_im2col();
        const uint32_t grain = is_padded() ? 32 : 16;
        if (address % grain) {
            fail(FaultKind::misaligned, "tensor map: global address 0x%llx is not a multiple of %u",
                 static_cast<unsigned long long>(address), grain);
        }
        for (int i = 0; i < rank; ++i) {
            if (dims[i] < 1 || dims[i] > (uint64_t(1) << 32)) {
                fail(FaultKind::invalid_operation,
                     "tensor map: dimension %d has %llu elements, not 1..2^32", i,
                     static_cast<unsigned long long>(dims[i]));
            }
            if (i > 0 && (strides[i] % grain || strides[i] >= (uint64_t(1) << 40))) {
                fail(FaultKind::invalid_operation,
                     "tensor map: stride %d is %llu bytes, not a multiple of %u below 2^40", i,
                     static_cast<unsigned long long>(strides[i]), grain);
            }
            const uint32_t largest = !is_im2col ? 256 : i == 0 ? 256 : i == 1 ? max_pixels : 0;
            if (largest && (box[i] < 1 || box[i] > largest)) {
                fail(FaultKind::invalid_operation, "tensor map: box dimension %d is %u, not 1..%u",
                     i, box[i], largest);
            }
            if (element_strides[i] < 1 || element_strides[i] > 8) {
                fail(FaultKind::invalid_operation, "tensor map: element stride %d is %u, not 1..8",
                     i, element_strides[i]);
            }
        }
        const uint64_t box_bytes = uint64_t(row_pitch()) * num_box_rows();
        if (box_bytes > max_shared_bytes) {
            fail(FaultKind::invalid_operation,
                 "tensor map: a box takes %llu bytes of shared memory, of which there are %u",
                 static_cast<unsigned long long>(box_bytes), max_shared_bytes);
        }
        if (is_padded()) {
            if (box[0] != 128) {
                fail(FaultKind::invalid_operation,
                     "tensor map: box dimension 0 is %u; data type %u needs exactly 128", box[0],
                     data_type);
            }
            if (dims[0] % 128)
                fail(FaultKind::invalid_operation,
                     "tensor map: dimension 0 is no multiple of 128, as data type %u needs",
                     data_type);
            if (swizzle == Swizzle::bytes32 || swizzle == Swizzle::bytes64) {
                fail(FaultKind::invalid_operation,
                     "tensor map: data type %u allows only no swizzle or a 128-byte one",
                     data_type);
            }
        } else {
            if (box[0] * element_bits() % 128) {
                fail(FaultKind::invalid_operation,
                     "tensor map: a box row of %u bytes is no multiple of 16", row_bytes());
            }
            if (swizzle != Swizzle::none && row_bytes() > swizzle_span(swizzle)) {
                fail(FaultKind::invalid_operation,
                     "tensor map: a box row of %u bytes is longer than the swizzle span of %u",
                     row_bytes(), swizzle_span(swizzle));
            }
            if (data_type == type_u4_align8 && dims[0] % 2) {
                fail(FaultKind::invalid_operation,
                     "tensor map: dimension 0 is odd, data type 13 needs an even one");
            }
        }
        if (nan_fill && !(data_type >= 6 && data_type <= 12)) {
            fail(FaultKind::invalid_operation, "tensor map: NaN fill with the integer data type %u",
                 data_type);
        }
    }

    void check_shared_address(uint32_t shared_address) const {
        if (shared_address % 128) {
            fail(FaultKind::misaligned, "tensor copy: shared address 0x%x is not a multiple of 128",
                 shared_address);
        }
    }

    // Rows in the order in which they lie in shared memory: `each(index, inside dims 1.., address
    // of element 0)`.
    template <class Each>
    void for_each_box_row(const int32_t* coordinates, Each each) const {
        if (is_im2col) return for_each_pixel(coordinates, each);
        uint32_t position[max_rank] = {};
        const uint32_t num_rows = num_box_rows();
        for (uint32_t index = 0; index < num_rows; ++index) {
            bool inside = true;
            uint64_t row_address = address;
            for (int i = 1; i < rank; ++i) {
                const int64_t at = picks_rows ? coordinates[1 + position[i]]
                                              : int64_t(coordinates[i]) +
                                                    int64_t(position[i]) * element_strides[i];
                if (at < 0 || uint64_t(at) >= dims[i]) inside = false;
                row_address += uint64_t(at) * strides[i];
            }
            each(index, inside, row_address);
            for (int i = 1; i < rank; ++i) {
                if (++position[i] < box_count(i)) break;
                position[i] = 0;
            }
        }
    }

    template <class Each>
    void for_each_pixel(const int32_t* coordinates, Each each) const {
        int64_t base[max_rank];
        for (int i = 1; i < rank; ++i) base[i] = coordinates[i];
        for (uint32_t index = 0; index < box[1]; ++index) {
            bool inside = true;
            uint64_t row_address = address;
            for (int i = 1; i < rank; ++i) {
                const int64_t at = base[i] + (i <= num_spatial() ? offsets[i - 1] : 0);
                if (at < 0 || uint64_t(at) >= dims[i]) inside = false;
                row_address += uint64_t(at) * strides[i];
            }
            each(index, inside, row_address);
            for (int i = 1; i < rank; ++i) {
                base[i] += element_strides[i];
                if (i > num_spatial() || base[i] <= last_base(i - 1)) break;
                base[i] = lower_corner[i - 1];
            }
        }
    }

    void fetch_row(int32_t x, bool inside, uint64_t row_address, uint32_t bytes, uint8_t* row,
                   GlobalMemory& global) const {
        fill(row, bytes);
        if (!inside) return;
        const int64_t first = int64_t(x) * element_bits() / 8;  // of the box, may be negative
        const int64_t end = int64_t(dims[0] * element_bits() / 8);
        const int64_t low = first < 0 ? 0 : first;
        const int64_t high = first + bytes < end ? first + bytes : end;
        if (low >= high) return;
        std::memcpy(row + (low - first),
                    global.read(row_address + uint64_t(low), uint64_t(high - low)),
                    size_t(high - low));
        if (data_type == type_tf32 || data_type == type_tf32_ftz)
            round_to_tf32(row + (low - first), size_t(high - low));
    }

    // Only loads round, and the FTZ types keep subnormal numbers, this one and FLOAT32_FTZ.
    static void round_to_tf32(uint8_t* elements, size_t num_bytes) {
        for (size_t offset = 0; offset < num_bytes; offset += 4) {
            float value;
            std::memcpy(&value, elements + offset, 4);
            const uint32_t rounded = float_to_tf32(value, Rounding::nearest_even);
            std::memcpy(elements + offset, &rounded, 4);
        }
    }

    // The NaN is a pattern of 16 bits for all types.
    void fill(uint8_t* row, uint32_t bytes) const {
        constexpr uint16_t nan = 0x7ff7;
        std::memset(row, 0, bytes);
        if (!nan_fill) return;
        for (uint32_t offset = 0; offset < bytes; offset += 2) std::memcpy(row + offset, &nan, 2);
    }
};

}  // namespace deep_moe::emulator
