"""MXFP4 weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from deep_moe.formats.block_scaled import GROUP_SIZE, pack_ue8m0_groups, unpack_ue8m0
from deep_moe.formats.sizes import SCALE_GROUP

from ..layers import LayerWeights
from ..stored_form import (
    BYTE_DTYPES,
    PACKED_DTYPES,
    Expected,
    Held,
    StoredForm,
    Suffixes,
    Tensors,
    check_bytes,
    packed_e2m1,
    ue8m0_scales,
)

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName


@dataclass(frozen=True)
class StoredMxfp4(StoredForm):
    """E2M1 [rows, K/2] and UE8M0 [rows, K/32]."""

    weights: ClassVar[WeightsName] = "mxfp4"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": PACKED_DTYPES,
        "scale": BYTE_DTYPES,
    }
    values_per_element: ClassVar[int] = 2
    # In turn: what save_experts writes, compressed-tensors, DeepSeek-V4, DeepSeek-V3's names.
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale"},
        {"weight": ".weight_packed", "scale": ".weight_scale"},
        {"weight": ".weight", "scale": ".scale"},
        {"weight": ".weight", "scale": ".weight_scale_inv"},
    )

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return (layer.weight.dtype, layer.sf.dtype) == (torch.int8, torch.int32)

    @property
    def scale_block(self) -> tuple[int, int]:
        return SCALE_GROUP

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": packed_e2m1(num_rows, num_columns),
            "scale": ue8m0_scales(num_rows, num_columns),
        }

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        words = -(-num_columns // 128)
        return (torch.int8, (num_rows, num_columns // 2)), (torch.int32, (num_rows, words))

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        scales = tensors["scale"].contiguous().view(torch.uint8)
        check_bytes(names["scale"], scales)
        matrix.weight.copy_(tensors["weight"].view(torch.int8))
        matrix.sf.copy_(pack_ue8m0_groups(scales))

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        num_groups = 2 * matrix.weight.shape[1] // GROUP_SIZE
        return {
            "weight": matrix.weight.view(torch.uint8),
            "scale": unpack_ue8m0(matrix.sf)[:, :num_groups],
        }


FORMS = (StoredMxfp4,)
