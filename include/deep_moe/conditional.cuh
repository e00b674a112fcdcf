// One of two types, by a condition that the compiler knows.
//
// <cuda/std/type_traits> has it too. No header of this library includes that one: it would be half
// of the time in which PTX of an SM90 kernel is compiled.
#pragma once

namespace deep_moe {

template <bool condition, class IfTrue, class IfFalse>
struct Conditional {
    using type = IfTrue;
};

template <class IfTrue, class IfFalse>
struct Conditional<false, IfTrue, IfFalse> {
    using type = IfFalse;
};

template <bool condition, class IfTrue, class IfFalse>
using conditional_t = typename Conditional<condition, IfTrue, IfFalse>::type;

}  // namespace deep_moe
