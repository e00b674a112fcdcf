// PTX type names of matrix elements.
#pragma once

#include "instruction_table.h"
#include "matrix_descriptor.h"

namespace deep_moe::emulator {

inline Element take_element(Decoder& d) {
    switch (d.take_type()) {
        case Type::f16:
            return Element::f16;
        case Type::bf16:
            return Element::bf16;
        case Type::tf32:
            return Element::tf32;
        case Type::e4m3:
            return Element::e4m3;
        case Type::e5m2:
            return Element::e5m2;
        case Type::u8:
            return Element::u8;
        case Type::s8:
            return Element::s8;
        case Type::u4:
            return Element::u4;
        case Type::s4:
            return Element::s4;
        case Type::b1:
            return Element::b1;
        default:
            d.unsupported("elements of this type are not supported");
    }
}

}  // namespace deep_moe::emulator
