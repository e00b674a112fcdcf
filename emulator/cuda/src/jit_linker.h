// nvJitLink as programs without machine code need it: what it links is one PTX, which stays PTX.
#pragma once

#include <string_view>

namespace deep_moe::cuda {

// The stand-in's function for one of the library's, whose names may carry a version
// (`__nvJitLinkCreate_13_0`); null if it has none.
void* jit_linker_function(std::string_view name);

}  // namespace deep_moe::cuda
