"""MXFP4 weights: packed E2M1 int8 [E, N, K/2] with UE8M0 scales int32 [E, N, K/128], one for every
32 values."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import (
    GROUP_SIZE,
    WORD_SIZE,
    dequantize_e2m1_ue8m0,
    pack_e2m1_values,
    pack_ue8m0_groups,
    quantize_e2m1_ue8m0,
    random_scale_bytes,
)
from deep_moe.formats.scale_blocks import cut_values, padded_values
from deep_moe.formats.sizes import K_BLOCK, SCALE_GROUP

from ..checks import check_layers, check_no_nan_scale
from ..format import WeightFormat
from ..layers import LayerTensors, LayerWeights, WeightSizes

# Root mean square of the 8 magnitudes of E2M1, about 2^1.5.
_SIZE_LOG2 = 1.5
_WORD_OF_ONES = 0x7F7F7F7F


class Mxfp4(WeightFormat):
    name = "mxfp4"
    words = "a pair (packed E2M1 int8, UE8M0 scales int32), as deep_moe.quantize_mxfp4 gives it"
    bits_per_value = 4
    bytes_per_value = 17 / 32

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1,
            l2,
            values_per_byte=2,
            check_dtypes=_check_dtypes,
            check_scales=_check_scales,
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        check_no_nan_scale(name, layer.sf)

    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        """Values of zero. Scales of whole rows are 1, those behind a row's last value are like its
        last one, for SM90 has them as ratios."""
        num_rows = layer.weight.shape[1] // num_matrices
        matrices = layer.sf.unflatten(1, (num_matrices, num_rows))
        missing = (0, 0, 0, -num_rows % K_BLOCK)
        sf = torch.nn.functional.pad(matrices, missing, value=_WORD_OF_ONES).flatten(1, 2)
        scale_bytes = sf.view(torch.uint8)
        num_groups = 2 * layer.weight.shape[2] // GROUP_SIZE
        scale_bytes[..., num_groups:] = scale_bytes[..., num_groups - 1 : num_groups]
        return LayerWeights(padded_values(layer.weight, num_matrices, per_element=2), sf)

    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        """With zeros behind a row's last scale."""
        sf = cut_values(layer.sf, num_matrices, num_rows, -(-num_values // WORD_SIZE))
        sf.view(torch.uint8)[..., num_values // GROUP_SIZE :] = 0
        return LayerWeights(cut_values(layer.weight, num_matrices, num_rows, num_values // 2), sf)

    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        weight, sf = layer
        return dequantize_e2m1_ue8m0(weight, sf, torch.float64)

    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_GROUP, num_matrices: int = 1
    ) -> LayerWeights:
        return LayerWeights(*quantize_e2m1_ue8m0(x))

    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
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
        return LayerWeights(packed, pack_ue8m0_groups(sf))

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        return LayerWeights(pack_e2m1_values(codes), pack_ue8m0_groups(scale_bytes))


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    weight, sf = layer
    if weight.dtype != torch.int8:
        raise TypeError(
            f"{name}[0] must be int8, two E2M1 values per byte, as deep_moe.quantize_mxfp4 packs "
            f"them; got {weight.dtype}"
        )
    if sf.dtype != torch.int32:
        raise TypeError(f"{name}[1] must be int32, four UE8M0 bytes per word; got {sf.dtype}")


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    num_experts, num_rows, num_values = sizes
    expected = (num_experts, num_rows, -(-num_values // WORD_SIZE))
    if tuple(sf.shape) != expected:
        raise ValueError(
            f"{name} must hold one scale per 32 values, shape {expected}; got {tuple(sf.shape)}"
        )


FORMAT = Mxfp4()
