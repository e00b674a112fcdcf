"""FP8 weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import GROUP_SIZE, unpack_ue8m0
from deep_moe.formats.scale_blocks import num_blocks

from ..layers import LayerWeights
from ..stored_form import (
    BYTE_DTYPES,
    Expected,
    StoredForm,
    Suffixes,
    Tensors,
    check_bytes,
    check_positive,
)

BLOCK = 128  # rows and columns that share a scale, if not 32 columns do


@dataclass(frozen=True)
class StoredFp8(StoredForm):
    """E4M3 [rows, K], with scales as they are: float32 [rows/128, K/128], rounded up, as
    `weight_scale_inv` is, or any of that and [rows, K/32] in UE8M0."""

    scale_dtype: torch.dtype
    scale_rows: int
    scale_columns: int

    weights: ClassVar[str] = "fp8"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.float8_e4m3fn,),
        "scale": (torch.float32, *BYTE_DTYPES),
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
        raise CheckpointError(
            f"{names['scale']} must hold float32, uint8 or float8_e8m0fnu, one scale for "
            f"{BLOCK} x {BLOCK} or for {GROUP_SIZE} values of [{num_rows}, {num_columns}]; "
            f"got {scale.dtype} {list(scale.shape)}"
        )

    @property
    def rows_of_scale(self) -> int:
        return self.scale_rows

    @property
    def scale_block(self) -> tuple[int, int]:
        return self.scale_rows, self.scale_columns

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.weight.dtype == torch.float8_e4m3fn

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes["weight"],
                (num_rows, num_columns),
                "float8_e4m3fn, as the layer's first weights are",
            ),
            "scale": Expected(
                (self.scale_dtype,),
                num_blocks(num_rows, num_columns, self.scale_block),
                f"{self.scale_dtype}, as the layer's first scales are",
            ),
        }

    def empty(
        self,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        num_matrices: int,
    ) -> LayerWeights:
        scales = num_blocks(num_rows, num_columns, self.scale_block, num_matrices)
        size = (num_experts, num_rows, num_columns)
        return LayerWeights(
            torch.empty(size, dtype=torch.float8_e4m3fn, device=device),
            torch.empty((num_experts, *scales), dtype=self.scale_dtype, device=device),
        )

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        scales = tensors["scale"]
        if scales.dtype == torch.float32:
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


FORMS = (StoredFp8,)
