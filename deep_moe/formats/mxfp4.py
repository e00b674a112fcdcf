"""MXFP4 weights: packed E2M1 int8 [E, N, K/2] with UE8M0 scales int32 [E, N, K/128], one for every
32 values."""

from __future__ import annotations

import torch

from .block_scaled import (
    GROUP_SIZE,
    WORD_SIZE,
    dequantize_e2m1_ue8m0,
    pack_e2m1_values,
    pack_ue8m0,
    quantize_e2m1_ue8m0,
    random_scale_bytes,
)
from .checks import check_layers, check_no_nan_scale
from .weight_formats import SCALE_GROUP, WeightFormat
from .weights import LayerWeights

# Root mean square of the 8 magnitudes of E2M1, about 2^1.5.
_SIZE_LOG2 = 1.5


class Mxfp4(WeightFormat):
    name = "mxfp4"
    pair = "a pair (packed E2M1 int8, UE8M0 scales int32), as deep_moe.quantize_mxfp4 gives it"
    bits_per_value = 4

    def check(self, l1: LayerWeights, l2: LayerWeights) -> tuple[int, int, int]:
        return check_layers(
            l1,
            l2,
            values_per_byte=2,
            check_dtypes=_check_dtypes,
            check_scales=_check_scales,
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        check_no_nan_scale(name, layer.sf)

    def dequantize(self, weight: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
        return dequantize_e2m1_ue8m0(weight, sf, torch.float64)

    def quantize(self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_GROUP) -> LayerWeights:
        return LayerWeights(*quantize_e2m1_ue8m0(x))

    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = SCALE_GROUP,
    ) -> LayerWeights:
        packed = torch.randint(
            -128,
            128,
            (1, num_rows, num_columns // 2),
            dtype=torch.int8,
            device=device,
            generator=generator,
        )
        sf = random_scale_bytes(
            (1, num_rows, num_columns // GROUP_SIZE),
            num_columns,
            _SIZE_LOG2,
            device,
            generator,
        )
        return LayerWeights(packed, pack_ue8m0(sf))

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_GROUP,
    ) -> LayerWeights:
        return LayerWeights(pack_e2m1_values(codes), pack_ue8m0(scale_bytes))


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    weight, sf = layer
    if weight.dtype != torch.int8:
        raise TypeError(
            f"{name}[0] must be int8, two E2M1 values per byte, as deep_moe.quantize_mxfp4 packs "
            f"them; got {weight.dtype}"
        )
    if sf.dtype != torch.int32:
        raise TypeError(f"{name}[1] must be int32, four UE8M0 bytes per word; got {sf.dtype}")


def _check_scales(name: str, sf: torch.Tensor, sizes: tuple[int, int, int]) -> None:
    num_experts, num_rows, num_values = sizes
    expected = (num_experts, num_rows, num_values // WORD_SIZE)
    if tuple(sf.shape) != expected:
        raise ValueError(
            f"{name} must hold one scale per 32 values, shape {expected}; got {tuple(sf.shape)}"
        )


FORMAT = Mxfp4()
