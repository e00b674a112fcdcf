"""NVFP4 weights: packed E2M1 [E, N, K/2] with E4M3 scales [E, N, K/16], one for every 16 values,
and a float32 scale of each matrix, gate and up apart: what a value stands for is the product of the
three."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deep_moe.formats.block_scaled import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NAN,
    nearest_e2m1_codes,
    pack_e2m1_codes,
    pack_e2m1_values,
    ue8m0_to_float,
    unpack_e2m1,
)
from deep_moe.formats.nvfp4 import GROUP_SIZE
from deep_moe.formats.scale_blocks import cut_values, over_values, padded_values

from ..checks import check_global_scales, check_layers
from ..format import WeightFormat
from ..layers import LayerTensors, LayerWeights, WeightSizes

SCALE_BLOCK = (1, GROUP_SIZE)

_SMALLEST_SCALE = 2.0**-9  # of E4M3
_SMALLEST_NORMAL = 2.0**-126  # of float32
# Of exact layers, whose scales of groups are powers of two and make up for it: matrices that take
# each other's are found. Of gate and up, and of Linear2.
_EXACT_GLOBAL_SCALES = {2: (4.0, 0.5), 1: (2.0,)}
_RANDOM_SCALE_BYTES = (0x58, 0x7F)  # 16 to 448, as where the largest scale of a matrix is 448


class Nvfp4(WeightFormat):
    name = "nvfp4"
    words = (
        "three tensors (packed E2M1 int8 or uint8, E4M3 scales per 16 float8_e4m3fn, scales of "
        "matrices float32), as deep_moe.quantize_nvfp4 gives them"
    )
    num_tensors = 3
    bits_per_value = 4
    bytes_per_value = 9 / 16

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1, l2, values_per_byte=2, check_dtypes=_check_dtypes, check_scales=_check_scales
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        _, sf, global_sf = layer
        check_scale_bytes(f"{name}[1]", sf)
        check_global_scales(f"{name}[2]", global_sf)

    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        """Values and scales of zero."""
        weight, sf, global_sf = layer
        return LayerWeights(
            padded_values(weight, num_matrices, per_element=2),
            padded_values(sf, num_matrices, per_element=GROUP_SIZE),
            global_sf.clone(),
        )

    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        weight, sf, global_sf = layer
        return LayerWeights(
            cut_values(weight, num_matrices, num_rows, num_values // 2),
            cut_values(sf, num_matrices, num_rows, num_values // GROUP_SIZE),
            global_sf,
        )

    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        weight, sf, global_sf = layer
        values = unpack_e2m1(weight.view(torch.int8), torch.float64)
        scales = sf.float().double().repeat_interleave(GROUP_SIZE, -1)
        of_rows = global_sf.double().repeat_interleave(values.shape[0] // num_matrices)
        return values * scales * of_rows.unsqueeze(-1)

    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_BLOCK, num_matrices: int = 1
    ) -> LayerWeights:
        matrices = x.float().unflatten(-2, (num_matrices, -1))
        largest = matrices.abs().amax(dim=(-2, -1))
        global_sf = (largest / (E4M3_MAX * E2M1_MAX)).clamp(min=_SMALLEST_NORMAL)
        global_sf = global_sf.where(largest > 0, 1.0)
        groups = matrices.unflatten(-1, (-1, GROUP_SIZE))
        factors = global_sf[..., None, None]
        sf = groups.abs().amax(dim=-1) / (E2M1_MAX * factors)
        sf = sf.clamp(_SMALLEST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
        scaled = groups / (sf.float() * factors).unsqueeze(-1)
        codes = nearest_e2m1_codes(scaled).flatten(-2).flatten(-3, -2)
        return LayerWeights(pack_e2m1_codes(codes), sf.flatten(-3, -2), global_sf)

    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = SCALE_BLOCK,
        num_matrices: int = 1,
    ) -> LayerWeights:
        def draw(low: int, high: int, columns: int) -> torch.Tensor:
            size = (1, num_rows, columns)
            return torch.randint(
                low, high, size, dtype=torch.uint8, device=device, generator=generator
            )

        packed = draw(0, 256, num_columns // 2).view(torch.int8)
        sf = draw(*_RANDOM_SCALE_BYTES, num_columns // GROUP_SIZE).view(torch.float8_e4m3fn)
        # 2^1.5 is the size of E2M1's codes, about, and 180 that of these scales.
        usual = num_columns**-0.5 / (2**1.5 * 180)
        global_sf = torch.linspace(usual, 1.25 * usual, num_matrices, device=device)
        return LayerWeights(packed, sf, global_sf.unsqueeze(0))

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_BLOCK,
        num_matrices: int = 1,
    ) -> LayerWeights:
        *leading, num_rows, num_columns = codes.shape
        scales = ue8m0_to_float(scale_bytes, torch.float32)
        scales = over_values(scales, scale_block, num_rows, num_columns, num_matrices)
        of_matrices = scales.new_tensor(_EXACT_GLOBAL_SCALES[num_matrices])
        of_rows = of_matrices.repeat_interleave(num_rows // num_matrices).unsqueeze(-1)
        sf = (scales[..., ::GROUP_SIZE] / of_rows).to(torch.float8_e4m3fn)
        global_sf = of_matrices.expand(*leading, num_matrices).contiguous()
        return LayerWeights(pack_e2m1_values(codes), sf, global_sf)


FORMAT = Nvfp4()


class WrongScale(NamedTuple):
    """An E4M3 byte that stands for no scale, and where it is in a matrix's scales."""

    row: int
    column: int
    byte: int

    @property
    def is_nan(self) -> bool:
        """Else it has a sign."""
        return self.byte & E4M3_NAN == E4M3_NAN


def first_wrong_scale(scales: torch.Tensor) -> WrongScale | None:
    """Of bytes [N, K/16] the first that is NaN or has a sign, which exporters do not give it."""
    rows = (scales.amax(dim=-1) >= E4M3_NAN).nonzero()
    if not rows.numel():
        return None
    row = int(rows[0])
    column = int((scales[row] >= E4M3_NAN).nonzero()[0])
    return WrongScale(row, column, int(scales[row, column]))


def check_scale_bytes(name: str, sf: torch.Tensor) -> None:
    """Raise if a scale [E, N, K/16] is wrong. Expert by expert, to need little memory; one wait for
    a GPU."""
    largest = torch.stack([own.contiguous().view(torch.uint8).amax() for own in sf])
    experts = (largest >= E4M3_NAN).nonzero()
    if not experts.numel():
        return
    expert_idx = int(experts[0])
    wrong = first_wrong_scale(sf[expert_idx].contiguous().view(torch.uint8))
    assert wrong is not None
    what = "NaN" if wrong.is_nan else "a sign"
    raise ValueError(
        f"{name}: expert {expert_idx}, row {wrong.row} must have scales that are numbers without a "
        f"sign; got {what} (E4M3 byte {wrong.byte:#04x}) in column {wrong.column}"
    )


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    weight, sf, _ = layer
    if weight.dtype not in (torch.int8, torch.uint8):
        raise TypeError(
            f"{name}[0] must be int8 or uint8, two E2M1 values per byte, as "
            f"deep_moe.quantize_nvfp4 packs them; got {weight.dtype}"
        )
    if sf.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"{name}[1] must be float8_e4m3fn, one scale per {GROUP_SIZE} values; got {sf.dtype}"
        )


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    num_experts, num_rows, num_values = sizes
    expected = (num_experts, num_rows, num_values // GROUP_SIZE)
    if tuple(sf.shape) != expected:
        raise ValueError(
            f"{name} must hold one scale per {GROUP_SIZE} values, shape {expected}; got "
            f"{tuple(sf.shape)}"
        )
