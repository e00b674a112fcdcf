"""FP8 weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import GROUP_SIZE, unpack_ue8m0
from deep_moe.formats.scale_blocks import num_blocks
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW

from ..layers import LayerWeights
from ..stored_form import (
    BYTE_DTYPES,
    Expected,
    Held,
    StoredForm,
    Suffixes,
    Tensors,
    check_bytes,
    check_positive,
)

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

BLOCK = 128  # rows and columns that share a scale, if not 32 columns do


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of which all are float32 numbers


@dataclass(frozen=True)
class StoredFp8(StoredForm):
    """E4M3 [rows, K], with scales for 128 x 128 values, [rows/128, K/128], rounded up, or for 32,
    [rows, K/32], which stay as they are: floats, or UE8M0."""

    scale_dtype: torch.dtype
    scale_rows: int
    scale_columns: int

    weights: ClassVar[WeightsName] = "fp8"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.float8_e4m3fn,),
        "scale": (*_FLOATS, *BYTE_DTYPES),
    }
    values_per_element: ClassVar[int] = 1
    # In turn: DeepSeek-V3, what is named as MXFP4 is, DeepSeek-V4.
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale_inv"},
        {"weight": ".weight", "scale": ".weight_scale"},
        {"weight": ".weight_packed", "scale": ".weight_scale"},
        {"weight": ".weight", "scale": ".scale"},
    )

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> StoredForm:
        scale, (num_rows, num_columns) = tensors["scale"], tensors["weight"].shape
        for block in ((BLOCK, BLOCK), (1, GROUP_SIZE)):
            if scale.dtype in cls.dtypes["scale"] and tuple(scale.shape) == num_blocks(
                num_rows, num_columns, block
            ):
                return cls(scale.dtype, *block)
        for is_of_row, shapes in (
            (True, ((num_rows,), (num_rows, 1))),
            (False, ((), (1,), (1, 1))),
        ):
            if scale.dtype in _FLOATS and tuple(scale.shape) in shapes:
                return StoredFp8Whole(scale.dtype, is_of_row)
        raise CheckpointError(
            f"{names['scale']} must hold floats, uint8 or float8_e8m0fnu, one scale for "
            f"{BLOCK} x {BLOCK} or for {GROUP_SIZE} values of [{num_rows}, {num_columns}], or "
            f"floats, one for each row or one for all; got {scale.dtype} {list(scale.shape)}"
        )

    @classmethod
    def plain(cls, tensors: Tensors) -> Tensors:
        """ModelOpt has [rows/128, 1, K/128, 1]."""
        scale = tensors["scale"]
        if scale.dim() != 4 or scale.shape[1] != 1 or scale.shape[3] != 1:
            return tensors
        return {**tensors, "scale": scale[:, 0, :, 0]}

    @property
    def rows_of_scale(self) -> int:
        return self.scale_rows

    @property
    def scale_block(self) -> tuple[int, int]:
        return self.scale_rows, self.scale_columns

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.weight.dtype == torch.float8_e4m3fn and layer.sf.dim() == 3

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return _expected(
            self.scale_dtype,
            (num_rows, num_columns),
            num_blocks(num_rows, num_columns, self.scale_block),
        )

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        scales = num_blocks(num_rows, num_columns, self.scale_block, num_matrices)
        dtype = torch.float32 if self.scale_dtype in _FLOATS else self.scale_dtype
        return (torch.float8_e4m3fn, (num_rows, num_columns)), (dtype, scales)

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        scales = tensors["scale"]
        if self.scale_dtype in _FLOATS:
            check_positive(names["scale"], scales)
        else:
            check_bytes(names["scale"], scales.view(torch.uint8))
        matrix.weight.copy_(tensors["weight"])
        matrix.sf.copy_(scales)

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        sf = matrix.sf
        if sf.dtype == torch.int32:
            sf = unpack_ue8m0(sf)[:, : matrix.weight.shape[1] // GROUP_SIZE]
        return {"weight": matrix.weight, "scale": sf}


@dataclass(frozen=True)
class StoredFp8Whole(StoredForm):
    """E4M3 [rows, K], with a scale for each row ("per channel") or one for the matrix ("per
    tensor"), floats."""

    scale_dtype: torch.dtype
    is_of_row: bool

    weights: ClassVar[WeightsName] = StoredFp8.weights
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.float8_e4m3fn,),
        "scale": _FLOATS,
    }
    values_per_element: ClassVar[int] = 1
    spellings: ClassVar[tuple[Suffixes, ...]] = ({"weight": ".weight", "scale": ".weight_scale"},)
    token_format: ClassVar[TokenFormatName | None] = "fp8_token"
    token_scale: ClassVar[str] = ".input_scale"

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> StoredForm:
        return StoredFp8.of(names, tensors)

    @classmethod
    def plain(cls, tensors: Tensors) -> Tensors:
        """[rows, 1] and []."""
        scale = tensors["scale"]
        is_known = scale.dim() == 0 or tuple(scale.shape[1:]) == (1,)
        return {**tensors, "scale": scale.reshape(-1)} if is_known else tensors

    @property
    def scale_block(self) -> tuple[int, int]:
        return WHOLE_ROW if self.is_of_row else WHOLE_MATRIX

    @property
    def beside(self) -> tuple[str, ...]:
        """What tokens are divided by where it is the same for all."""
        return (self.token_scale,)

    def check_beside(
        self, suffix: str, name: str, tensor: torch.Tensor, num_rows: int, num_columns: int
    ) -> None:
        """Nothing to compare."""

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.weight.dtype == torch.float8_e4m3fn and layer.sf.dim() == 2

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        scales = (num_rows,) if self.is_of_row else (1,)
        return _expected(self.scale_dtype, (num_rows, num_columns), scales)

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        scales = num_rows if self.is_of_row else num_matrices
        return (torch.float8_e4m3fn, (num_rows, num_columns)), (torch.float32, (scales,))

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        check_positive(names["scale"], tensors["scale"])
        matrix.weight.copy_(tensors["weight"])
        matrix.sf.copy_(tensors["scale"])

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        sf = matrix.sf
        is_of_row = len(sf) == len(matrix.weight)
        return {"weight": matrix.weight, "scale": sf.unsqueeze(1) if is_of_row else sf[0]}


def _expected(
    scale_dtype: torch.dtype, size: tuple[int, int], scales: tuple[int, ...]
) -> dict[str, Expected]:
    return {
        "weight": Expected(
            StoredFp8.dtypes["weight"], size, "float8_e4m3fn, as the layer's first weights are"
        ),
        "scale": Expected(
            (scale_dtype,), scales, f"{scale_dtype}, as the layer's first scales are"
        ),
    }


FORMS = (StoredFp8, StoredFp8Whole)
