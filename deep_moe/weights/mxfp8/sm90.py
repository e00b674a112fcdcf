"""MXFP8 weights on SM90, which the kernel decodes to BF16 beside BF16 tokens."""

from __future__ import annotations

from deep_moe.targets.sm90.decoded import Sm90DecodedWeights, bf16_decoded_kind


class Sm90Mxfp8Bf16(Sm90DecodedWeights):
    weights = "mxfp8"
    policy = "Mxfp8Bf16Weights"
    kind = bf16_decoded_kind(16896)


KERNELS = (Sm90Mxfp8Bf16(),)
