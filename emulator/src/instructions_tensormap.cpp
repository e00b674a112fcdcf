// tensormap.*: tensor maps that a kernel edits. The image is the emulator's own, see tensor_map.h.
#include <algorithm>
#include <cstring>

#include "instruction_table.h"
#include "lanes.h"
#include "race_detector.h"
#include "tensor_map.h"

namespace deep_moe::emulator {
namespace {

// Offsets in the image.
constexpr uint32_t type_at = 8, rank_at = 9, interleave_at = 10, swizzle_at = 11, fill_at = 12,
                   address_at = 16, dims_at = 24, strides_at = 64, boxes_at = 96, steps_at = 106;
constexpr uint32_t half_image = 64;

enum class Field : uint64_t {
    global_address,
    rank,
    box_dim,
    global_dim,
    global_stride,
    element_stride,
    elemtype,
    interleave_layout,
    swizzle_mode,
    swizzle_atomicity,
    fill_mode
};
constexpr std::string_view field_names[] = {
    "global_address", "rank",     "box_dim",           "global_dim",   "global_stride",
    "element_stride", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity",
    "fill_mode"};

void note(Warp& w, Space space, uint64_t address, Access access, int lane) {
    if (w.machine->races) w.machine->races->access(w, space, address, 2 * half_image, access, lane);
}

template <class T>
void put(std::byte* image, uint32_t offset, uint64_t value) {
    const T narrow = T(value);
    std::memcpy(image + offset, &narrow, sizeof narrow);
}

// Where a 128-byte image lies; each half is checked by itself, so that 64-byte alignment is enough.
// Zeros are a map whose fields are all to be set, which is how Triton makes one.
std::byte* image_at(Warp& w, Space space, uint64_t address, Access access, int lane) {
    std::byte* image = w.resolve(space, address, half_image, access, lane);
    w.resolve(space, address + half_image, half_image, access, lane);
    note(w, space, address, access, lane);
    if (access != Access::read &&
        std::all_of(image, image + 2 * half_image, [](std::byte b) { return b == std::byte{0}; }))
        put<uint64_t>(image, 0, TensorMap::image_magic);
    uint64_t magic;
    std::memcpy(&magic, image, sizeof magic);
    if (magic != TensorMap::image_magic) {
        throw Fault(
            FaultKind::invalid_operation,
            format("there is no tensor map at 0x%llx", static_cast<unsigned long long>(address)),
            lane);
    }
    return image;
}

// PTX numbers the element types otherwise than CUtensorMapDataType does.
uint8_t element_type(uint64_t value, int lane) {
    constexpr uint8_t codes[] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15};
    if (value >= std::size(codes))
        throw Fault(FaultKind::invalid_operation, "tensormap.replace: no such element type", lane);
    return codes[value];
}

// In the image: 0 none, 1 32B, 2 64B, 3 128B, and 128B by larger atoms 4 (32B), 5 (32B, flipped),
// 6 (64B).
void set_swizzle(std::byte* image, bool mode, uint64_t value, int lane) {
    const uint8_t old = uint8_t(image[swizzle_at]);
    if (value > 3)
        throw Fault(FaultKind::invalid_operation, "tensormap.replace: no such swizzle", lane);
    uint8_t swizzle;
    if (mode)
        swizzle = value == 3 && old > 3 ? old : uint8_t(value);
    else if (old >= 3)
        swizzle = uint8_t(3 + value);
    else if (value == 0)
        swizzle = old;
    else
        throw Fault(FaultKind::invalid_operation,
                    "tensormap.replace: larger swizzle atoms need the 128-byte swizzle", lane);
    put<uint8_t>(image, swizzle_at, swizzle);
}

// operands: address, value; aux: space, field, ordinal
Flow replace(Warp& w, const Op& op) {
    const auto field = Field(op.aux >> 8 & 0xff);
    const uint32_t index = uint32_t(op.aux >> 16 & 0xff);
    w.for_each_lane([&](int lane) {
        std::byte* image = image_at(w, Space(op.aux & 0xff), w.address(op.operands[0], lane),
                                    Access::read_write, lane);
        const uint64_t value = op.operands[1].bits == 64 ? w.in<uint64_t>(op.operands[1])[lane]
                                                         : w.in<uint32_t>(op.operands[1])[lane];
        switch (field) {
            case Field::global_address:
                return put<uint64_t>(image, address_at, value);
            case Field::rank:  // one less than the number of dimensions
                return put<uint8_t>(image, rank_at, value + 1);
            case Field::box_dim:
                return put<uint16_t>(image, boxes_at + 2 * index, value);
            case Field::global_dim:
                return put<uint64_t>(image, dims_at + 8 * index, value);
            case Field::global_stride:
                return put<uint64_t>(image, strides_at + 8 * index, value);
            case Field::element_stride:
                return put<uint8_t>(image, steps_at + index, value);
            case Field::elemtype:
                return put<uint8_t>(image, type_at, element_type(value, lane));
            case Field::interleave_layout:
                return put<uint8_t>(image, interleave_at, value);
            case Field::swizzle_mode:
            case Field::swizzle_atomicity:
                return set_swizzle(image, field == Field::swizzle_mode, value, lane);
            case Field::fill_mode:
                return put<uint8_t>(image, fill_at, value);
        }
    });
    w.machine->note_progress();
    return Flow::next;
}

void decode_replace(Decoder& d) {
    if (!d.take("tile")) d.invalid(".tile is missing");
    uint64_t field = 0;
    while (field < std::size(field_names) && !d.take(field_names[field])) ++field;
    if (field == std::size(field_names)) d.invalid("the field is missing");
    const Space space = d.take_space();
    if (!d.take("b1024")) d.invalid(".b1024 is missing");
    const Type type = d.take_type({Type::b32, Type::b64});
    const bool has_index =
        field >= uint64_t(Field::box_dim) && field <= uint64_t(Field::element_stride);
    d.expect_operands(has_index ? 3 : 2);
    const uint64_t index = has_index ? d.immediate(1) : 0;
    if (index > (Field(field) == Field::global_stride ? 3 : 4)) d.invalid("there are 5 dimensions");
    d.emit(replace, {d.address(0), d.source(has_index ? 2 : 1, type)},
           uint64_t(space) | field << 8 | index << 16);
}

// A map from shared to global memory, by a whole warp. operands: destination, source
Flow copy_and_fence(Warp& w, const Op& op) {
    const int lane = w.first_lane();
    const std::byte* from =
        image_at(w, Space::shared, w.address(op.operands[1], lane), Access::read, lane);
    const uint64_t to = w.address(op.operands[0], lane);
    for (uint32_t half = 0; half < 2 * half_image; half += half_image) {
        std::memcpy(w.resolve(Space::global, to + half, half_image, Access::write, lane),
                    from + half, half_image);
    }
    note(w, Space::global, to, Access::write, lane);
    w.machine->note_progress();
    return Flow::next;
}

void decode_copy_and_fence(Decoder& d) {
    d.ignore({"global", "shared::cta", "tensormap::generic", "release", "cta", "cluster", "gpu",
              "sys", "sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    d.expect_operands(3);
    if (d.immediate(2) != 2 * half_image) d.invalid("the size must be 128");
    d.emit(copy_and_fence, {d.address(0), d.address(1)});
}

}  // namespace

InstructionTable tensormap_instructions() {
    return {
        {"tensormap.replace", decode_replace, "changes a field of a tensor map in memory"},
        {"tensormap.cp_fenceproxy", decode_copy_and_fence,
         "copies a tensor map from shared to global memory"},
    };
}

}  // namespace deep_moe::emulator
