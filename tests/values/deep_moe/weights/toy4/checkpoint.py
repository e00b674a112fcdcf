"""The format in files: int16 [rows, K/4] and float32 [rows]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from deep_moe.weights.layers import LayerWeights
from deep_moe.weights.stored_form import Expected, Held, StoredForm, Suffixes, Tensors

from .format import VALUES_PER_ELEMENT


class StoredToy4(StoredForm):
    weights: ClassVar[str] = "toy4"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int16,),
        "factor": (torch.float32,),
    }
    values_per_element: ClassVar[int] = VALUES_PER_ELEMENT
    spellings: ClassVar[tuple[Suffixes, ...]] = ({"weight": ".packed", "factor": ".factor"},)

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> StoredForm:
        return cls()

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.weight.dtype == torch.int16

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes["weight"],
                (num_rows, num_columns // VALUES_PER_ELEMENT),
                "int16, 4 E2M1 values",
            ),
            "factor": Expected(self.dtypes["factor"], (num_rows,), "float32, one for each row"),
        }

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        size = (num_rows, num_columns // VALUES_PER_ELEMENT)
        return (torch.int16, size), (torch.float32, (num_rows,))

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        matrix.weight.copy_(tensors["weight"])
        matrix.sf.copy_(tensors["factor"])

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        return {"weight": matrix.weight, "factor": matrix.sf}


FORMS = (StoredToy4,)
