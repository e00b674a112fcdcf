// For asserting that code takes the elements of a segment for what the layout declares them to be.
#pragma once

namespace deep_moe {

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

template <class Type, class... Elements>
inline constexpr bool all_are = (is_same<Type, Elements> && ...);

}  // namespace deep_moe
