// CUTLASS 2's GEMMs are named by the adapter for CUTLASS 3's, and not used.
#pragma once

#include "cutlass/epilogue/threadblock/epilogue_base_streamk.h"

namespace cutlass::gemm::device {

template <class GemmKernel>
class GemmUniversalBase;

}  // namespace cutlass::gemm::device
