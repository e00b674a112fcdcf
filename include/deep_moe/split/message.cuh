// A token on its way to one of its experts, if each expert is sent its own copy: 16 bytes of
// control, the values, the scales, one behind the other.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/split/token_format.cuh"

namespace deep_moe {

// The first bytes of a message.
struct MessageControl {
    uint32_t token_idx;  // on the source rank
    uint32_t slot_idx;   // the first one of the token that names the expert
    uint32_t origin;     // with Config::relays_tokens: what src_info tells
    uint32_t unused[1];
};
static_assert(sizeof(MessageControl) == 16, "values behind it are loaded by 16 bytes");

// T, as const as `Byte` is.
template <class Byte, class T>
struct AsConst {
    using type = T;
};

template <class Byte, class T>
struct AsConst<const Byte, T> {
    using type = const T;
};

// `Byte`: const or not.
template <class Config, class Byte>
class Message {
    using Format = TokenFormat<Config>;
    static constexpr uint32_t scales_offset = sizeof(MessageControl) + Format::row_bytes;
    static_assert(scales_offset + Format::num_scale_words * sizeof(uint32_t) <=
                      Config::Symm::messages_dim4,
                  "the layout has room for the format's messages");

 public:
    __device__ explicit Message(Byte* bytes) : bytes_(bytes) {}

    __device__ auto* control() const { return at<MessageControl>(0); }
    __device__ auto* values() const { return at<uint4>(sizeof(MessageControl)); }
    __device__ auto* scales() const { return at<uint32_t>(scales_offset); }

 private:
    template <class T>
    __device__ auto* at(uint32_t offset) const {
        return reinterpret_cast<typename AsConst<Byte, T>::type*>(bytes_ + offset);
    }

    Byte* bytes_;
};

}  // namespace deep_moe
