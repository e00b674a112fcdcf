// How the scales of such tokens lie in memory, where the tokens are here when a kernel starts.
// Indexed by the block of 128 values, they give what kernels know: a UE8M0 byte for every 32
// values, the lowest ones' in the lowest byte; or, for kernels that multiply by them, the float.
#pragma once

namespace deep_moe {

// There are none.
struct NoTokenScales {};

}  // namespace deep_moe
