"""The format in files: int16 [rows, K/4] and float32 [rows]."""

from __future__ import annotations

from typing import ClassVar

import torch

from deep_moe.weights.layers import LayerWeights
from deep_moe.weights.stored_form import Expected, StoredForm, Suffixes, Tensors

from .format import VALUES_PER_ELEMENT


class StoredToy4(StoredForm):
    weights: ClassVar[str] = "toy4"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int16,)
    values_per_byte: ClassVar[int] = VALUES_PER_ELEMENT
    spellings: ClassVar[tuple[Suffixes, ...]] = ({"weight": ".packed", "factor": ".factor"},)

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> StoredForm:
        return cls()

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes, (num_rows, num_columns // VALUES_PER_ELEMENT), "int16, 4 E2M1 values"
            ),
            "factor": Expected((torch.float32,), (num_rows,), "float32, one for each row"),
        }

    def empty(
        self,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        num_matrices: int,
    ) -> LayerWeights:
        size = (num_experts, num_rows)
        return LayerWeights(
            torch.empty((*size, num_columns // VALUES_PER_ELEMENT), dtype=torch.int16),
            torch.empty(size, dtype=torch.float32),
        )

    def put(
        self, names: Suffixes, tensors: Tensors, weight: torch.Tensor, sf: torch.Tensor
    ) -> None:
        weight.copy_(tensors["weight"])
        sf.copy_(tensors["factor"])

    @classmethod
    def stored(cls, weight: torch.Tensor, sf: torch.Tensor) -> Tensors:
        return {"weight": weight, "factor": sf}


FORM = StoredToy4
