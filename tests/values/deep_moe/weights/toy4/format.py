"""Four E2M1 values in each int16, the first one lowest, [E, N, K/4], and float32 factors [E, N]."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import (
    E2M1_MAGNITUDES,
    pack_e2m1_values,
    ue8m0_to_float,
    unpack_e2m1,
)
from deep_moe.formats.scale_blocks import cut_values, padded_values
from deep_moe.formats.sizes import K_BLOCK
from deep_moe.weights.checks import check_layers
from deep_moe.weights.format import WeightFormat
from deep_moe.weights.layers import LayerTensors, LayerWeights, WeightSizes

VALUES_PER_ELEMENT = 4
ROW = (1, 1 << 12)  # rows and values along K that share a factor: more than any row has here


class Toy4(WeightFormat):
    name = "toy4"
    words = "a pair (packed E2M1 int16, factors of rows float32)"
    bits_per_value = 4
    bytes_per_value = 1 / 2

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1,
            l2,
            values_per_byte=VALUES_PER_ELEMENT,
            check_dtypes=_check_dtypes,
            check_scales=_check_scales,
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        if not bool((layer.sf > 0).all()):
            raise ValueError(f"{name}: factors must be positive")

    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        factors = layer.sf.unflatten(1, (num_matrices, -1))
        missing = (0, -factors.shape[2] % K_BLOCK)
        sf = torch.nn.functional.pad(factors, missing, value=1.0).flatten(1, 2)
        return LayerWeights(padded_values(layer.weight, num_matrices, VALUES_PER_ELEMENT), sf)

    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        sf = layer.sf.unflatten(1, (num_matrices, -1))[:, :, :num_rows].flatten(1, 2)
        num_elements = num_values // VALUES_PER_ELEMENT
        return LayerWeights(cut_values(layer.weight, num_matrices, num_rows, num_elements), sf)

    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        weight, sf = layer
        values = unpack_e2m1(weight.contiguous().view(torch.int8), torch.float64)
        return values * sf.double().unsqueeze(-1)

    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = ROW, num_matrices: int = 1
    ) -> LayerWeights:
        largest = x.abs().amax(dim=-1)
        sf = (largest / E2M1_MAGNITUDES[-1]).where(largest > 0, 1.0).float()
        magnitudes = torch.tensor(E2M1_MAGNITUDES, device=x.device)
        scaled = (x / sf.unsqueeze(-1)).float()
        nearest = torch.bucketize(scaled.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
        return _packed(magnitudes[nearest].copysign(scaled), sf)

    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = ROW,
        num_matrices: int = 1,
    ) -> LayerWeights:
        size = (1, num_rows, num_columns)
        x = torch.randn(size, device=device, generator=generator) * num_columns**-0.5
        return self.quantize(x)

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = ROW,
        num_matrices: int = 1,
    ) -> LayerWeights:
        return _packed(codes, ue8m0_to_float(scale_bytes, torch.float32).squeeze(-1))


def _packed(values: torch.Tensor, sf: torch.Tensor) -> LayerWeights:
    return LayerWeights(pack_e2m1_values(values).view(torch.int16), sf)


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    if layer.weight.dtype != torch.int16 or layer.sf.dtype != torch.float32:
        raise TypeError(
            f"{name} must be int16 and float32; got {layer.weight.dtype} and {layer.sf.dtype}"
        )


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    if tuple(sf.shape) != sizes[:2]:
        raise ValueError(f"{name} must have shape {sizes[:2]}; got {tuple(sf.shape)}")


FORMAT = Toy4()
