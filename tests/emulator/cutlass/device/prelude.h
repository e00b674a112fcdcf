// Included before a file's first line when NVRTC compiles its kernels: what NVRTC's own std lacks.
#pragma once

#include <cuda/std/type_traits>

namespace std {

using cuda::std::is_pointer_v;
using cuda::std::void_t;

}  // namespace std
