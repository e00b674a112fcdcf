"""BF16 weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..layers import LayerWeights
from ..stored_form import Expected, Held, StoredForm, Suffixes, Tensors

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName


@dataclass(frozen=True)
class StoredBf16(StoredForm):
    """BF16 [rows, K], without scales."""

    weights: ClassVar[WeightsName] = "bf16"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {"weight": (torch.bfloat16,)}
    values_per_element: ClassVar[int] = 1
    spellings: ClassVar[tuple[Suffixes, ...]] = ({"weight": ".weight"},)

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.weight.dtype == torch.bfloat16

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        words = "bfloat16, as the layer's first weights are"
        return {"weight": Expected(self.dtypes["weight"], (num_rows, num_columns), words)}

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        return (torch.bfloat16, (num_rows, num_columns)), (torch.float32, (0,))

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        matrix.weight.copy_(tensors["weight"])

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        return {"weight": matrix.weight}


FORMS = (StoredBf16,)
