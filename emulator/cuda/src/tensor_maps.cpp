// cuTensorMapEncode…: the driver's checks, and the image that the emulator reads (tensor_map.h).
#include <cstddef>
#include <cstring>
#include <vector>

#include "entry_points.h"

using namespace deep_moe::cuda;

namespace {

constexpr uint64_t image_magic = 0x313050414D544D44ull;
constexpr int max_rank = 5;
constexpr int element_bits[16] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
constexpr int type_float16 = 6, type_tf32_ftz = 12, type_u4_align8 = 13, type_u4_align16 = 14;
constexpr int swizzle_spans[7] = {0, 32, 64, 128, 128, 128, 128};

struct MapImage {
    uint64_t magic;
    uint8_t data_type, rank, interleave, swizzle, fills_nan, is_im2col, unused[2];
    uint64_t address, dims[max_rank], strides[max_rank - 1];
    uint16_t box[max_rank];
    uint8_t element_strides[max_rank];
    int16_t lower_corner[max_rank - 2], upper_corner[max_rank - 2];
};
static_assert(offsetof(MapImage, lower_corner) == 112 && sizeof(MapImage) <= 128);

[[noreturn]] void refuse(const char* what, long long value, const char* allowed) {
    throw Failure{invalid_value, words("%s must be %s; got %lld", what, allowed, value)};
}

void check(bool holds, const char* what, long long value, const char* allowed) {
    if (!holds) refuse(what, value, allowed);
}

struct Parameters {
    int data_type;
    uint32_t rank;
    void* address;
    const uint64_t *dims, *strides;
    const uint32_t* element_strides;
    int interleave, swizzle, fill;
};

// What both modes have in common. box: as many sizes as have names, with the largest each may be.
struct BoxSize {
    std::string name;
    uint32_t size, largest;
};

MapImage checked_image(const void* map, const Parameters& p, const std::vector<BoxSize>& box) {
    if (!map || !p.dims || !p.element_strides || (p.rank > 1 && !p.strides))
        throw Failure{invalid_value, "a null pointer"};
    check(p.data_type >= 0 && p.data_type < 16, "tensorDataType", p.data_type, "0 to 15");
    check(p.swizzle >= 0 && p.swizzle <= 6, "swizzle", p.swizzle, "0 to 6");
    if (p.interleave) throw Failure{not_supported, "interleaved tensor maps cannot be emulated"};
    const bool is_padded = p.data_type >= type_u4_align16;
    const uint64_t alignment = is_padded ? 32 : 16, at = reinterpret_cast<uint64_t>(p.address);
    check(at && at % alignment == 0, "globalAddress", (long long)at,
          is_padded ? "a multiple of 32 bytes" : "a multiple of 16 bytes");
    MapImage image = {};
    image.magic = image_magic;
    image.data_type = uint8_t(p.data_type);
    image.rank = uint8_t(p.rank);
    image.swizzle = uint8_t(p.swizzle);
    image.fills_nan = uint8_t(p.fill);
    image.address = at;
    for (uint32_t i = 0; i < p.rank; ++i) {
        check(p.dims[i] >= 1 && p.dims[i] <= 1ull << 32, words("globalDim[%u]", i).c_str(),
              (long long)p.dims[i], "1 to 2^32");
        check(p.element_strides[i] >= 1 && p.element_strides[i] <= 8,
              words("elementStrides[%u]", i).c_str(), p.element_strides[i], "1 to 8");
        image.dims[i] = p.dims[i];
        image.element_strides[i] = uint8_t(p.element_strides[i]);
        if (!i) continue;
        check(
            p.strides[i - 1] % alignment == 0 && p.strides[i - 1] < 1ull << 40,
            words("globalStrides[%u]", i - 1).c_str(), (long long)p.strides[i - 1],
            is_padded ? "a multiple of 32 bytes below 2^40" : "a multiple of 16 bytes below 2^40");
        image.strides[i - 1] = p.strides[i - 1];
    }
    for (size_t i = 0; i < box.size(); ++i) {
        check(box[i].size >= 1 && box[i].size <= box[i].largest, box[i].name.c_str(), box[i].size,
              words("1 to %u", box[i].largest).c_str());
        image.box[i] = uint16_t(box[i].size);
    }
    const uint64_t grain = is_padded ? 128 : p.data_type == type_u4_align8 ? 2 : 1;
    check(p.dims[0] % grain == 0, "globalDim[0]", (long long)p.dims[0],
          is_padded ? "a multiple of 128" : "a multiple of 2");
    const uint32_t row_bits = box[0].size * uint32_t(element_bits[p.data_type]);
    if (is_padded) {
        check(box[0].size == 128, box[0].name.c_str(), box[0].size, "128 for padded element types");
        check(p.swizzle == 0 || p.swizzle == 3 || p.swizzle == 4, "swizzle", p.swizzle,
              "none, 128B or 128B_ATOM_32B for padded element types");
    } else {
        check(row_bits % 128 == 0, box[0].name.c_str(), box[0].size,
              "a row of a multiple of 16 bytes");
        check(
            !p.swizzle || row_bits / 8 <= uint32_t(swizzle_spans[p.swizzle]), box[0].name.c_str(),
            box[0].size,
            words("a row of at most %d bytes with this swizzle", swizzle_spans[p.swizzle]).c_str());
    }
    check(!p.fill || (p.data_type >= type_float16 && p.data_type <= type_tf32_ftz), "oobFill",
          p.fill, "zeros for this data type");
    return image;
}

void write(void* map, const MapImage& image) {
    std::memset(map, 0, 128);
    std::memcpy(map, &image, sizeof image);
}

}  // namespace

DRIVER_CALL(cuTensorMapEncodeTiled,
            (void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims,
             const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
             int interleave, int swizzle, int, int fill)) {
    return guarded("cuTensorMapEncodeTiled", [&](StandIn&) {
        if (!box) throw Failure{invalid_value, "a null pointer"};
        check(rank >= 1 && rank <= max_rank, "tensorRank", rank, "1 to 5");
        std::vector<BoxSize> sizes;
        for (uint32_t i = 0; i < rank; ++i) sizes.push_back({words("boxDim[%u]", i), box[i], 256});
        write(map, checked_image(map,
                                 {data_type, rank, address, dims, strides, element_strides,
                                  interleave, swizzle, fill},
                                 sizes));
    });
}

DRIVER_CALL(cuTensorMapEncodeIm2col,
            (void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims,
             const uint64_t* strides, const int* lower_corner, const int* upper_corner,
             uint32_t channels, uint32_t pixels, const uint32_t* element_strides, int interleave,
             int swizzle, int, int fill)) {
    return guarded("cuTensorMapEncodeIm2col", [&](StandIn&) {
        if (!lower_corner || !upper_corner) throw Failure{invalid_value, "a null pointer"};
        check(rank >= 3 && rank <= max_rank, "tensorRank", rank, "3 to 5");
        MapImage image = checked_image(
            map,
            {data_type, rank, address, dims, strides, element_strides, interleave, swizzle, fill},
            {{"channelsPerPixel", channels, 256}, {"pixelsPerColumn", pixels, 1024}});
        image.is_im2col = 1;
        const int end = rank == 3 ? 1 << 15 : rank == 4 ? 1 << 7 : 1 << 4;
        for (uint32_t i = 0; i + 2 < rank; ++i) {
            const auto corner = [&](const char* name, int value) {
                check(value >= -end && value < end, words("%s[%u]", name, i).c_str(), value,
                      words("%d to %d", -end, end - 1).c_str());
                return int16_t(value);
            };
            image.lower_corner[i] = corner("pixelBoxLowerCorner", lower_corner[i]);
            image.upper_corner[i] = corner("pixelBoxUpperCorner", upper_corner[i]);
            check(lower_corner[i] <= (long long)dims[1 + i] - 1 + upper_corner[i],
                  words("pixelBoxUpperCorner[%u]", i).c_str(), upper_corner[i],
                  "behind the lower corner");
        }
        write(map, image);
    });
}

DRIVER_CALL(cuTensorMapReplaceAddress, (void* map, void* address)) {
    return guarded("cuTensorMapReplaceAddress", [&](StandIn&) {
        MapImage image;
        if (!map) throw Failure{invalid_value, ""};
        std::memcpy(&image, map, sizeof image);
        if (image.magic != image_magic) throw Failure{invalid_value, "it is no tensor map"};
        image.address = reinterpret_cast<uint64_t>(address);
        std::memcpy(map, &image, sizeof image);
    });
}
