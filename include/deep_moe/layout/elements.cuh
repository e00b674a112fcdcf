// Asserts that code uses a segment's elements with the type that the layout declares.
#pragma once

namespace deep_moe {

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

template <class Type, class... Elements>
inline constexpr bool all_are = (is_same<Type, Elements> && ...);

}  // namespace deep_moe
