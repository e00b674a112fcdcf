// What the families of integer instructions share: one operation in every lane, for every type.
#pragma once

#include "lanes.h"

namespace deep_moe::emulator {

constexpr int bits_of(size_t bytes) {
    return int(bytes) * 8;
}

template <class T, class F>
Flow unary(Warp& w, const Op& op) {
    return map1<T, T>(w, op, F{});
}
template <class T, class F>
Flow binary(Warp& w, const Op& op) {
    return map2<T, T, T>(w, op, F{});
}

template <class F>
void emit_unary(Decoder& d, Type type, Body body) {
    d.expect_operands(2);
    d.emit(body, {d.destination(0, type), d.source(1, type)});
}

inline void emit_binary(Decoder& d, Type type, Body body) {
    d.expect_operands(3);
    d.emit(body, {d.destination(0, type), d.source(1, type), d.source(2, type)});
}

template <class F>
void decode_binary(Decoder& d) {
    Type type = d.take_type();
    emit_binary(d, type,
                for_integer(d, type, [](auto t) -> Body { return binary<decltype(t), F>; }));
}

template <class F>
void decode_unary(Decoder& d) {
    Type type = d.take_type();
    emit_unary<F>(d, type,
                  for_integer(d, type, [](auto t) -> Body { return unary<decltype(t), F>; }));
}

}  // namespace deep_moe::emulator
