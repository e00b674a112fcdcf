// Images of modules: PTX, and the PTX inside fat binaries.
#pragma once

#include <string>

namespace deep_moe::cuda {

// The PTX of an image that a GPU of this compute capability takes; `size` 0 if it is not known.
// Throws ImageError with what to compile instead.
std::string ptx_of_image(const void* image, size_t size, int major, int minor);

struct ImageError {
    int result;
    std::string text;
};

}  // namespace deep_moe::cuda
