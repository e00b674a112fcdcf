// As much of CUTLASS's reference on the device as the examples use, on the host.
#pragma once

#include "cutlass/gemm_coord.h"
#include "cutlass/tensor_ref.h"

namespace cutlass::reference::device {

template <class ElementA, class LayoutA, class ElementB, class LayoutB, class ElementC,
          class LayoutC, class Scalar, class Accumulator>
struct Gemm {
    void operator()(gemm::GemmCoord size, Scalar alpha, TensorRef<ElementA, LayoutA> a,
                    TensorRef<ElementB, LayoutB> b, Scalar beta, TensorRef<ElementC, LayoutC> c,
                    TensorRef<ElementC, LayoutC> d) const {
        for (int row = 0; row < size.m(); ++row) {
            for (int column = 0; column < size.n(); ++column) {
                Accumulator sum = 0;
                for (int k = 0; k < size.k(); ++k)
                    sum += Accumulator(a.at({row, k})) * Accumulator(b.at({k, column}));
                d.at({row, column}) =
                    ElementC(alpha * Scalar(sum) + beta * Scalar(c.at({row, column})));
            }
        }
    }
};

}  // namespace cutlass::reference::device
