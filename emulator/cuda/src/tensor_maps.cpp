// cuTensorMapEncode…: the driver's checks, and the image that the emulator reads (tensor_map.h).
#include <cstring>

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
    uint8_t data_type, rank, interleave, swizzle, fills_nan, unused[3];
    uint64_t address, dims[max_rank], strides[max_rank - 1];
    uint16_t box[max_rank];
    uint8_t element_strides[max_rank];
};
static_assert(sizeof(MapImage) <= 128);

[[noreturn]] void refuse(const char* what, long long value, const char* allowed) {
    throw Failure{invalid_value, words("%s must be %s; got %lld", what, allowed, value)};
}

void check(bool holds, const char* what, long long value, const char* allowed) {
    if (!holds) refuse(what, value, allowed);
}

}  // namespace

DRIVER_CALL(cuTensorMapEncodeTiled,
            (void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims,
             const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
             int interleave, int swizzle, int, int fill)) {
    return guarded("cuTensorMapEncodeTiled", [&](StandIn&) {
        if (!map || !dims || !box || !element_strides || (rank > 1 && !strides))
            throw Failure{invalid_value, "a null pointer"};
        check(data_type >= 0 && data_type < 16, "tensorDataType", data_type, "0 to 15");
        check(rank >= 1 && rank <= max_rank, "tensorRank", rank, "1 to 5");
        check(swizzle >= 0 && swizzle <= 6, "swizzle", swizzle, "0 to 6");
        if (interleave) throw Failure{not_supported, "interleaved tensor maps cannot be emulated"};
        const bool is_padded = data_type >= type_u4_align16;
        const uint64_t alignment = is_padded ? 32 : 16, at = reinterpret_cast<uint64_t>(address);
        check(at && at % alignment == 0, "globalAddress", (long long)at,
              is_padded ? "a multiple of 32 bytes" : "a multiple of 16 bytes");
        MapImage image = {};
        image.magic = image_magic;
        image.data_type = uint8_t(data_type);
        image.rank = uint8_t(rank);
        image.swizzle = uint8_t(swizzle);
        image.fills_nan = uint8_t(fill);
        image.address = at;
        for (uint32_t i = 0; i < rank; ++i) {
            check(dims[i] >= 1 && dims[i] <= 1ull << 32, words("globalDim[%u]", i).c_str(),
                  (long long)dims[i], "1 to 2^32");
            check(box[i] >= 1 && box[i] <= 256, words("boxDim[%u]", i).c_str(), box[i], "1 to 256");
            check(element_strides[i] >= 1 && element_strides[i] <= 8,
                  words("elementStrides[%u]", i).c_str(), element_strides[i], "1 to 8");
            image.dims[i] = dims[i];
            image.box[i] = uint16_t(box[i]);
            image.element_strides[i] = uint8_t(element_strides[i]);
            if (!i) continue;
            check(strides[i - 1] % alignment == 0 && strides[i - 1] < 1ull << 40,
                  words("globalStrides[%u]", i - 1).c_str(), (long long)strides[i - 1],
                  is_padded ? "a multiple of 32 bytes below 2^40"
                            : "a multiple of 16 bytes below 2^40");
            image.strides[i - 1] = strides[i - 1];
        }
        const uint64_t grain = is_padded ? 128 : data_type == type_u4_align8 ? 2 : 1;
        check(dims[0] % grain == 0, "globalDim[0]", (long long)dims[0],
              is_padded ? "a multiple of 128" : "a multiple of 2");
        const uint32_t row_bits = box[0] * uint32_t(element_bits[data_type]);
        if (is_padded) {
            check(box[0] == 128, "boxDim[0]", box[0], "128 for padded element types");
            check(swizzle == 0 || swizzle == 3 || swizzle == 4, "swizzle", swizzle,
                  "none, 128B or 128B_ATOM_32B for padded element types");
        } else {
            check(row_bits % 128 == 0, "boxDim[0]", box[0], "a row of a multiple of 16 bytes");
            check(!swizzle || row_bits / 8 <= uint32_t(swizzle_spans[swizzle]), "boxDim[0]", box[0],
                  words("a row of at most %d bytes with this swizzle", swizzle_spans[swizzle])
                      .c_str());
        }
        check(!fill || (data_type >= type_float16 && data_type <= type_tf32_ftz), "oobFill", fill,
              "zeros for this data type");
        std::memset(map, 0, 128);
        std::memcpy(map, &image, sizeof image);
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
