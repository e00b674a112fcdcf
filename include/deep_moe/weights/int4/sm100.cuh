// INT4 weights on SM100, which are decoded to BF16 beside BF16 tokens.
#pragma once

#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/weights/int4/sm100_bf16_decode.cuh"

namespace deep_moe::sm100 {

using Int4Bf16Weights = Bf16DecodedWeights<Int4RowDecoder>;

}  // namespace deep_moe::sm100
