"""INT4 weights: two codes in each byte [E, N, K/2], a code for its value, -8 to 7, plus 8, and BF16
scales [E, N, K/32] or [E, N, K/128], rounded up, one for every 32 or 128 values."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import ue8m0_to_float
from deep_moe.formats.scale_blocks import cut_values, padded_values
from deep_moe.formats.sizes import K_BLOCK, SCALE_GROUP

from ..checks import check_layers
from ..format import WeightFormat
from ..layers import LayerTensors, LayerWeights, WeightSizes

GROUP_SIZES = (32, 128)

_OFFSET, _LARGEST = 8, 7
_ZEROS = 0x88  # a byte of two codes for 0
_SMALLEST_NORMAL = 2.0**-126


class Int4(WeightFormat):
    name = "int4"
    words = (
        "a pair (packed INT4 int8 or uint8, BF16 scales per 32 or 128), as "
        "deep_moe.quantize_int4 gives it"
    )
    bits_per_value = 4
    bytes_per_value = 9 / 16

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1, l2, values_per_byte=2, check_dtypes=_check_dtypes, check_scales=_check_scales
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        """Scales may have any sign."""
        wrong = ~layer.sf.isfinite()
        if bool(wrong.any()):
            expert_idx, row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{name}[1]: expert {expert_idx}, row {row} must have scales that are finite; got "
                f"{layer.sf[expert_idx, row, column].item()} in column {column}"
            )

    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        """Values and scales of zero."""
        weight, sf = layer
        size = group_size(2 * weight.shape[2], sf.shape[2])
        whole_groups = torch.nn.functional.pad(sf, (0, -sf.shape[2] % (K_BLOCK // size)))
        flipped = padded_values(weight.view(torch.uint8) ^ _ZEROS, num_matrices, per_element=2)
        return LayerWeights(
            (flipped ^ _ZEROS).view(weight.dtype),
            padded_values(whole_groups, num_matrices, per_element=size),
        )

    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        weight, sf = layer
        size = group_size(2 * weight.shape[2], sf.shape[2])
        return LayerWeights(
            cut_values(weight, num_matrices, num_rows, num_values // 2),
            cut_values(sf, num_matrices, num_rows, -(-num_values // size)),
        )

    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        weight, sf = layer
        codes = weight.contiguous().view(torch.uint8)
        values = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).double() - _OFFSET
        num_columns = values.shape[-1]
        scales = sf.double().repeat_interleave(group_size(num_columns, sf.shape[-1]), -1)
        return values * scales[..., :num_columns]

    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_GROUP, num_matrices: int = 1
    ) -> LayerWeights:
        num_columns = x.shape[-1]
        groups = _in_groups(x.float(), scale_block[1])
        largest = groups.abs().amax(dim=-1)
        sf = (largest / _LARGEST).clamp(min=_SMALLEST_NORMAL).where(largest > 0, 1.0).bfloat16()
        values = (groups / sf.float().unsqueeze(-1)).round().clamp(-_OFFSET, _LARGEST)
        return LayerWeights(_packed(values.flatten(-2)[..., :num_columns]), sf)

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
        size = (1, num_rows, -(-num_columns // scale_block[1]))
        # 4.6 is the root of the mean of the squares of -8 to 7.
        usual = num_columns**-0.5 / 4.6
        sf = (torch.rand(size, device=device, generator=generator) + 0.5) * usual
        return LayerWeights(packed, sf.bfloat16())

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        """Codes of a group up to 3.5 may be halves: twice as large, they are whole numbers."""
        num_columns = codes.shape[-1]
        groups = _in_groups(codes, scale_block[1])
        are_small = groups.abs().amax(dim=-1) <= _LARGEST / 2
        factors = are_small.to(codes.dtype) + 1
        sf = ue8m0_to_float(scale_bytes, torch.float32) / factors
        whole = (groups * factors.unsqueeze(-1)).flatten(-2)[..., :num_columns]
        return LayerWeights(_packed(whole), sf.bfloat16())


FORMAT = Int4()


def group_size(num_values: int, num_scales: int) -> int:
    """Values of a row that share a scale, of rows of so many values and scales."""
    return next(size for size in GROUP_SIZES if -(-num_values // size) == num_scales)


def _in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., K] as [..., groups, size], the last filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers from -8 to 7."""
    codes = (values + _OFFSET).to(torch.uint8)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    weight, sf = layer
    if weight.dtype not in (torch.int8, torch.uint8):
        raise TypeError(
            f"{name}[0] must be int8 or uint8, two INT4 codes per byte, as deep_moe.quantize_int4 "
            f"packs them; got {weight.dtype}"
        )
    if sf.dtype != torch.bfloat16:
        raise TypeError(f"{name}[1] must be bfloat16, scales of groups; got {sf.dtype}")


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    num_experts, num_rows, num_values = sizes
    per_32, per_128 = ((num_experts, num_rows, -(-num_values // size)) for size in GROUP_SIZES)
    if tuple(sf.shape) not in (per_32, per_128):
        raise ValueError(
            f"{name} must hold one scale per 32 values, shape {per_32}, or per 128, shape "
            f"{per_128}; got {tuple(sf.shape)}"
        )
