// INT4 weights on SM90: blocks that the math warps decode to BF16 beside BF16 tokens.
#pragma once

#include "deep_moe/experts/sm90/bf16_decoder.cuh"
#include "deep_moe/weights/int4/sm90_bf16_decode.cuh"

namespace deep_moe::sm90 {

using Int4Bf16Weights = Bf16DecodedWeights<Int4Decoder>;

}  // namespace deep_moe::sm90
