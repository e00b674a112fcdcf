"""MXFP8 weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from deep_moe.formats.block_scaled import GROUP_SIZE, unpack_ue8m0
from deep_moe.formats.sizes import SCALE_GROUP

from ..layers import LayerWeights
from ..stored_form import (
    BYTE_DTYPES,
    Expected,
    Held,
    StoredForm,
    Suffixes,
    Tensors,
    check_bytes,
    ue8m0_scales,
)

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName


@dataclass(frozen=True)
class StoredMxfp8(StoredForm):
    """E4M3 [rows, K] and UE8M0 [rows, K/32]."""

    weights: ClassVar[WeightsName] = "mxfp8"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.float8_e4m3fn,),
        "scale": BYTE_DTYPES,
    }
    values_per_element: ClassVar[int] = 1
    # In turn: ModelOpt and compressed-tensors, MiniMax-M3, DeepSeek-V4's names.
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale"},
        {"weight": ".weight", "scale": ".weight_scale_inv"},
        {"weight": ".weight", "scale": ".scale"},
    )

    @classmethod
    def is_like(cls, tensors: Tensors) -> bool:
        size = tuple(tensors["weight"].shape)
        groups = (*size[:-1], size[-1] // GROUP_SIZE) if size else ()
        return tuple(tensors["scale"].shape) == groups

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        is_of_rows = layer.sf.dim() == 3 and layer.sf.shape[1] == layer.weight.shape[1]
        is_byte = layer.sf.dtype in (torch.int32, *BYTE_DTYPES)
        return layer.weight.dtype == torch.float8_e4m3fn and is_of_rows and is_byte

    @property
    def scale_block(self) -> tuple[int, int]:
        return SCALE_GROUP

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes["weight"],
                (num_rows, num_columns),
                "float8_e4m3fn, as the layer's first weights are",
            ),
            "scale": ue8m0_scales(num_rows, num_columns),
        }

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        groups = num_columns // GROUP_SIZE
        return (torch.float8_e4m3fn, (num_rows, num_columns)), (torch.uint8, (num_rows, groups))

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        scales = tensors["scale"].view(torch.uint8)
        check_bytes(names["scale"], scales)
        matrix.weight.copy_(tensors["weight"])
        matrix.sf.copy_(scales)

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        sf = matrix.sf
        if sf.dtype == torch.int32:
            sf = unpack_ue8m0(sf)[:, : matrix.weight.shape[1] // GROUP_SIZE]
        return {"weight": matrix.weight, "scale": sf.view(torch.uint8)}


FORMS = (StoredMxfp8,)
