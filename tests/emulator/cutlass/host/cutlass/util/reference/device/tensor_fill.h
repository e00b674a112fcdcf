// As much of CUTLASS's fills on the device as the examples use, on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace cutlass::reference::device {

// Whole numbers, which is what the examples ask for by `bits` = 0.
template <class Element>
void BlockFillRandomUniform(Element* values, size_t count, uint64_t seed, Element max, Element min,
                            int /*bits*/) {
    std::mt19937_64 engine(seed);
    std::uniform_int_distribution<int> number{int(float(min)), int(float(max))};
    for (size_t i = 0; i < count; ++i) values[i] = Element(float(number(engine)));
}

}  // namespace cutlass::reference::device
