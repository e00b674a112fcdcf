"""MXFP8 weights on SM100: those of `fp8` under the name that checkpoints give them."""

from __future__ import annotations

from ..fp8.sm100 import Sm100Fp8


class Sm100Mxfp8(Sm100Fp8):
    weights = "mxfp8"
    larger_scale_blocks = ()  # checkpoints in this format have a scale for each 32 values


KERNELS = (Sm100Mxfp8(),)
