"""BF16 weights [E, N, K] have no scales: the second tensor of a layer's pair is empty, float32 [E,
0]. So the pair is used as with all other formats: experts can be taken out of both tensors, and
calls and operators take as many.
"""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import ue8m0_to_float
from deep_moe.formats.scale_blocks import cut_values, over_values, padded_values
from deep_moe.formats.sizes import SCALE_GROUP

from ..checks import check_layers
from ..format import WeightFormat
from ..layers import LayerTensors, LayerWeights, WeightSizes


class Bf16(WeightFormat):
    name = "bf16"
    words = "a tensor of bfloat16, or a pair (bfloat16, empty float32 [E, 0])"
    bits_per_value = 16
    bytes_per_value = 2

    def layer_of(self, weight: torch.Tensor) -> LayerWeights:
        return LayerWeights(weight, no_scales(weight))

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1, l2, values_per_byte=1, check_dtypes=_check_dtypes, check_scales=_check_scales
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        """Nothing to refuse: NaN and infinity are values of the format."""

    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        return LayerWeights(padded_values(layer.weight, num_matrices), layer.sf)

    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        return LayerWeights(cut_values(layer.weight, num_matrices, num_rows, num_values), layer.sf)

    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        return layer[0].double()

    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_GROUP, num_matrices: int = 1
    ) -> LayerWeights:
        values = x.to(torch.bfloat16)
        return LayerWeights(values, values.new_empty((*x.shape[:-2], 0), dtype=torch.float32))

    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        size = (1, num_rows, num_columns)
        values = torch.randn(size, device=device, generator=generator) * num_columns**-0.5
        return self.quantize(values)

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        scales = ue8m0_to_float(scale_bytes, torch.float32)
        return self.quantize(codes * over_values(scales, scale_block, *codes.shape[-2:]))


FORMAT = Bf16()


def no_scales(weight: torch.Tensor) -> torch.Tensor:
    """What stands for the scales of weights [E, ...] or of one expert's."""
    return weight.new_empty((*weight.shape[:-2], 0), dtype=torch.float32)


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    if layer.weight.dtype != torch.bfloat16:
        raise TypeError(f"{name}[0] must be bfloat16 for bf16 weights; got {layer.weight.dtype}")


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    num_experts, _, _ = sizes
    if tuple(sf.shape) != (num_experts, 0) or sf.dtype != torch.float32:
        raise ValueError(
            f"{name} must be empty, float32 {(num_experts, 0)}, for bf16 weights have no scales; "
            f"got {sf.dtype} {tuple(sf.shape)}"
        )
