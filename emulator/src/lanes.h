// Helpers that most bodies are made of: one function applied to all executing lanes, and the choice
// of a body by type.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "instruction_table.h"
#include "machine.h"

namespace deep_moe::emulator {

// operands[0] = f(operands[1], ...) in every executing lane. The full-warp loops vectorize.
template <class D, class A, class F>
inline Flow map1(Warp& w, const Op& op, F f) {
    auto d = w.out<D>(op.operands[0]);
    auto a = w.in<A>(op.operands[1]);
    if (w.exec == full_mask) {
#pragma GCC ivdep
        for (int i = 0; i < warp_size; ++i) d.set(i, f(a[i]));
    } else {
        w.for_each_lane([&](int i) { d.set(i, f(a[i])); });
    }
    return Flow::next;
}

template <class D, class A, class B, class F>
inline Flow map2(Warp& w, const Op& op, F f) {
    auto d = w.out<D>(op.operands[0]);
    auto a = w.in<A>(op.operands[1]);
    auto b = w.in<B>(op.operands[2]);
    if (w.exec == full_mask) {
#pragma GCC ivdep
        for (int i = 0; i < warp_size; ++i) d.set(i, f(a[i], b[i]));
    } else {
        w.for_each_lane([&](int i) { d.set(i, f(a[i], b[i])); });
    }
    return Flow::next;
}

template <class D, class A, class B, class C, class F>
inline Flow map3(Warp& w, const Op& op, F f) {
    auto d = w.out<D>(op.operands[0]);
    auto a = w.in<A>(op.operands[1]);
    auto b = w.in<B>(op.operands[2]);
    auto c = w.in<C>(op.operands[3]);
    if (w.exec == full_mask) {
#pragma GCC ivdep
        for (int i = 0; i < warp_size; ++i) d.set(i, f(a[i], b[i], c[i]));
    } else {
        w.for_each_lane([&](int i) { d.set(i, f(a[i], b[i], c[i])); });
    }
    return Flow::next;
}

// 32 bytes of 0 or 1 as a bit mask.
inline uint32_t pack_mask(const uint8_t bytes[warp_size]) {
    uint32_t mask = 0;
    for (int i = 0; i < 4; ++i) {
        uint64_t eight;
        std::memcpy(&eight, bytes + 8 * i, 8);
        mask |= uint32_t((eight * 0x0102040810204080ull) >> 56) << (8 * i);
    }
    return mask;
}

// f is a generic lambda that takes a value of the chosen type (only its type matters) and returns a
// body.
template <class F>
Body for_integer(Decoder& d, Type type, F f) {
    switch (type) {
        case Type::u16:
        case Type::b16:
            return f(uint16_t{});
        case Type::u32:
        case Type::b32:
            return f(uint32_t{});
        case Type::u64:
        case Type::b64:
            return f(uint64_t{});
        case Type::s16:
            return f(int16_t{});
        case Type::s32:
            return f(int32_t{});
        case Type::s64:
            return f(int64_t{});
        default:
            d.unsupported(std::string("type .") + name_of(type) + " is not supported here");
    }
}

template <class F>
Body for_bits(Decoder& d, Type type, F f) {
    switch (num_bits(type)) {
        case 16:
            return f(uint16_t{});
        case 32:
            return f(uint32_t{});
        case 64:
            return f(uint64_t{});
        default:
            d.unsupported(std::string("type .") + name_of(type) + " is not supported here");
    }
}

}  // namespace deep_moe::emulator
