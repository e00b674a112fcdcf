"""MXFP4 weights, as in mxfp4.py, for tokens in BF16: what models need that are served with weights
in FP4 and nothing else quantized."""

from __future__ import annotations

from .mxfp4 import Mxfp4


class Mxfp4Bf16(Mxfp4):
    name = "mxfp4_bf16"

    @property
    def in_checkpoints(self) -> str:
        return Mxfp4.name


FORMAT = Mxfp4Bf16()
