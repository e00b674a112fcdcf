"""FP8 weights: E4M3 [E, N, K] with scales, for every 32 values along K, for every 128 x 128, for
every row ("per channel") or for every matrix ("per tensor").

Scales per 32 are UE8M0, four in an int32 [E, N, K/128], or one in each element of [E, N, K/32];
those per 128 x 128 are [E, N/128, K/128]. K/128 is rounded up, and so are the blocks of each matrix
of rows, gate and up of Linear1: the last ones cover fewer values. Elements are float8_e8m0fnu,
uint8 with the same bytes, or float32. Where a kernel applies UE8M0 scales, float32 scales that are
powers of two are as exact.

Those of rows are float32 [E, N], those of matrices float32 [E, matrices]: of Linear1 gate and up
have one each.
"""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import (
    E4M3_MAX,
    E4M3_NAN,
    GROUP_SIZE,
    GROUPS_PER_WORD,
    WORD_SIZE,
    pack_ue8m0_groups,
    quantize_e4m3_ue8m0,
    random_scale_bytes,
    ue8m0_to_float,
    unpack_ue8m0,
)
from deep_moe.formats.scale_blocks import (
    cut_values,
    num_blocks,
    over_values,
    padded_values,
    repeated_to,
)
from deep_moe.formats.sizes import SCALE_GROUP, WHOLE_MATRIX, WHOLE_ROW

from ..checks import check_layers, check_no_nan_scale
from ..format import WeightFormat
from ..layers import LayerTensors, LayerWeights, WeightSizes

BLOCK = 128  # rows and values along K that share a scale, if not 32 values do

_SCALE_DTYPES = (torch.int32, torch.uint8, torch.float8_e8m0fnu, torch.float32)
# Root mean square of the numbers of E4M3, about 2^6.6.
_SIZE_LOG2 = 6.6
_SMALLEST_NORMAL = 2.0**-126  # of float32


class Fp8(WeightFormat):
    name = "fp8"
    words = "a pair (E4M3 float8_e4m3fn, scales), as deep_moe.quantize_mxfp8 gives it"
    bits_per_value = 8
    bytes_per_value = 1

    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        return check_layers(
            l1,
            l2,
            values_per_byte=1,
            check_dtypes=_check_dtypes,
            check_scales=_check_scales,
        )

    def check_values(self, name: str, layer: LayerWeights) -> None:
        _check_numbers(name, layer.weight)
        if layer.sf.dtype == torch.float32:
            _check_positive(name, layer.sf)
        else:
            check_no_nan_scale(name, layer.sf)

    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        """Values of zero. Scales per 32 and of rows are those of the last row and group, so that a
        block of 128 x 128 with one scale still has one; those of larger blocks are as many as
        before."""
        weight = padded_values(layer.weight, num_matrices)
        if layer.sf.shape[1] != layer.weight.shape[1]:
            return LayerWeights(weight, layer.sf)
        if layer.sf.ndim == 2:
            rows = repeated_to(
                layer.sf.unsqueeze(2), num_matrices, weight.shape[1] // num_matrices, 1
            )
            return LayerWeights(weight, rows[..., 0])
        sizes = (num_matrices, weight.shape[1] // num_matrices, weight.shape[2] // GROUP_SIZE)
        if layer.sf.dtype == torch.float32:
            return LayerWeights(weight, repeated_to(layer.sf, *sizes))
        groups = scale_bytes_of(layer.sf)[..., : layer.weight.shape[2] // GROUP_SIZE]
        return LayerWeights(weight, repeated_to(groups, *sizes).view(layer.sf.dtype))

    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        """For what targets' inverses give: scales packed per 32, with zeros behind a row's last
        one, or float32 per 128 x 128 or of rows."""
        weight = cut_values(layer.weight, num_matrices, num_rows, num_values)
        if layer.sf.ndim == 2:
            sf = cut_values(layer.sf.unsqueeze(2), num_matrices, num_rows, 1)[..., 0]
            return LayerWeights(weight, sf)
        if layer.sf.dtype == torch.float32:
            return LayerWeights(weight, layer.sf)
        sf = cut_values(layer.sf, num_matrices, num_rows, -(-num_values // WORD_SIZE))
        sf.view(torch.uint8)[..., num_values // GROUP_SIZE :] = 0
        return LayerWeights(weight, sf)

    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        weight, sf = layer
        values = weight.float().double()
        num_rows, num_columns = values.shape
        if sf.ndim == 1:
            scales = sf.double().unsqueeze(1)
            block = WHOLE_ROW if len(sf) == num_rows else WHOLE_MATRIX
        else:
            is_float = sf.dtype == torch.float32
            scales = sf.double() if is_float else ue8m0_to_float(scale_bytes_of(sf))
            block = SCALE_GROUP if len(scales) == num_rows else (BLOCK, BLOCK)
        return values * over_values(scales, block, num_rows, num_columns, num_matrices)

    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_GROUP, num_matrices: int = 1
    ) -> LayerWeights:
        if scale_block == SCALE_GROUP:
            return LayerWeights(*quantize_e4m3_ue8m0(x))
        made = quantize_blocks(x, num_matrices, scale_block)
        return made if scale_block == (BLOCK, BLOCK) else LayerWeights(made.weight, made.sf[..., 0])

    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        codes = torch.randint(
            0,
            256,
            (1, num_rows, num_columns),
            dtype=torch.uint8,
            device=device,
            generator=generator,
        )
        codes.masked_fill_((codes & E4M3_NAN) == E4M3_NAN, 0)
        groups = (1, *num_blocks(num_rows, num_columns, scale_block, num_matrices))
        sf = random_scale_bytes(groups, num_columns, _SIZE_LOG2, device, generator)
        return LayerWeights(codes.view(torch.float8_e4m3fn), _in_usual_form(sf, scale_block))

    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        return LayerWeights(codes.to(torch.float8_e4m3fn), _in_usual_form(scale_bytes, scale_block))


FORMAT = Fp8()


def _in_usual_form(scale_bytes: torch.Tensor, scale_block: tuple[int, int]) -> torch.Tensor:
    """Packed per 32 values, float32 of larger blocks."""
    if scale_block == SCALE_GROUP:
        return pack_ue8m0_groups(scale_bytes)
    scales = ue8m0_to_float(scale_bytes, torch.float32)
    return scales if scale_block == (BLOCK, BLOCK) else scales[..., 0]


def quantize_blocks(
    x: torch.Tensor, num_matrices: int = 1, scale_block: tuple[int, int] = (BLOCK, BLOCK)
) -> LayerWeights:
    """float32 [..., N, K], so many matrices one below the other, as E4M3 with the float32 scale of
    each block with which its largest magnitude becomes 448."""
    *_, num_rows, num_columns = x.shape
    matrices = x.unflatten(-2, (num_matrices, -1))
    rows = min(scale_block[0], num_rows // num_matrices)
    columns = min(scale_block[1], num_columns)
    missing = (0, -num_columns % columns, 0, -matrices.shape[-2] % rows)
    whole = torch.nn.functional.pad(matrices, missing).flatten(-3, -2)
    blocks = whole.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).transpose(-3, -2)
    largest = blocks.abs().amax(dim=(-2, -1))
    scales = (largest / E4M3_MAX).clamp(min=_SMALLEST_NORMAL).where(largest > 0, 1.0)
    codes = x / over_values(scales, scale_block, num_rows, num_columns, num_matrices)
    return LayerWeights(codes.to(torch.float8_e4m3fn), scales)


def scale_bytes_of(sf: torch.Tensor) -> torch.Tensor:
    """UE8M0 scales in any of their forms, an element each."""
    return unpack_ue8m0(sf) if sf.dtype == torch.int32 else sf.view(torch.uint8)


def _check_dtypes(name: str, layer: LayerWeights) -> None:
    weight, sf = layer
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}[0] must be float8_e4m3fn for fp8 weights; got {weight.dtype}")
    if sf.dtype not in _SCALE_DTYPES:
        raise TypeError(
            f"{name}[1] must be float32, float8_e8m0fnu, uint8, or int32 with four UE8M0 bytes in "
            f"each; got {sf.dtype}"
        )


def _check_scales(
    name: str, sf: torch.Tensor, sizes: tuple[int, int, int], num_matrices: int
) -> None:
    num_experts, num_rows, num_values = sizes
    if sf.ndim == 2:
        per_row, per_matrix = (num_experts, num_rows), (num_experts, num_matrices)
        if sf.dtype != torch.float32:
            raise TypeError(
                f"{name} must be float32 where it holds one scale per row or matrix; got {sf.dtype}"
            )
        if tuple(sf.shape) not in (per_row, per_matrix):
            raise ValueError(
                f"{name} must hold one scale per row, shape {per_row}, or per matrix, shape "
                f"{per_matrix}; got {tuple(sf.shape)}"
            )
        return
    if sf.dtype == torch.int32:
        expected = (num_experts, num_rows, -(-num_values // WORD_SIZE))
        if tuple(sf.shape) != expected:
            raise ValueError(
                f"{name} must hold one scale per 32 values, {GROUPS_PER_WORD} in each int32, shape "
                f"{expected}; got {tuple(sf.shape)}"
            )
        return
    per_32 = (num_experts, num_rows, num_values // GROUP_SIZE)
    per_block = (num_experts, *num_blocks(num_rows, num_values, (BLOCK, BLOCK), num_matrices))
    if tuple(sf.shape) not in (per_32, per_block):
        raise ValueError(
            f"{name} must hold one scale per 32 values, shape {per_32}, per 128 x 128, shape "
            f"{per_block}, per row, shape {(num_experts, num_rows)}, or per matrix, shape "
            f"{(num_experts, num_matrices)}; got {tuple(sf.shape)}"
        )


def _check_numbers(name: str, weight: torch.Tensor) -> None:
    """Raise if a value is NaN. Expert by expert, to need little memory; one wait for a GPU."""
    largest = [(own.contiguous().view(torch.uint8) & E4M3_NAN).amax(dim=-1) for own in weight]
    is_nan = torch.stack(largest) == E4M3_NAN
    if bool(is_nan.any()):
        expert_idx, row = is_nan.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, row {row} must hold numbers; got NaN (E4M3 byte 0x7f)"
        )


def _check_positive(name: str, sf: torch.Tensor) -> None:
    wrong = ~((sf > 0) & sf.isfinite())
    if bool(wrong.any()):
        expert_idx, *place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, scale {place} must be a positive number; got "
            f"{sf[expert_idx][tuple(place)].item()}"
        )
