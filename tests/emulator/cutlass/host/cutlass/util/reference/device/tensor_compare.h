// As much of CUTLASS's comparisons on the device as the examples use, on the host.
#pragma once

#include <cstddef>
#include <cstring>

namespace cutlass::reference::device {

template <class Element>
bool BlockCompareEqual(const Element* a, const Element* b, size_t count) {
    return std::memcmp(a, b, count * sizeof(Element)) == 0;
}

}  // namespace cutlass::reference::device
