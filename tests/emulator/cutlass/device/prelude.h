// Included before a file's first line when NVRTC compiles its kernels: what NVRTC's own std lacks.
#pragma once

#include <cuda/std/type_traits>

namespace cute {

template <class... T>
struct tuple;

}  // namespace cute

namespace std {

using cuda::std::is_pointer_v;
using cuda::std::void_t;

// CUTLASS declares these, but not for constant tuples, whose parts it binds to names.
template <class... T>
struct tuple_size;
template <size_t I, class... T>
struct tuple_element;
template <class... T>
struct tuple_size<const cute::tuple<T...>> : tuple_size<cute::tuple<T...>> {};
template <size_t I, class... T>
struct tuple_element<I, const cute::tuple<T...>> {
    using type = const typename tuple_element<I, cute::tuple<T...>>::type;
};

}  // namespace std
