"""INT4 weights in checkpoints: of compressed-tensors, whose codes are values + 8, and of the method
"w4afp8", whose are two's complement. Their names and types tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from deep_moe.errors import CheckpointError

from ..layers import LayerWeights
from ..stored_form import Expected, StoredForm, Suffixes, Tensors

GROUP_SIZES = (32, 128)  # values along K that share a scale

_SHAPE = ".weight_shape"


@dataclass(frozen=True)
class StoredInt4(StoredForm):
    """int32 [rows, K/8], eight codes in each, the first in its lowest bits, and BF16 [rows, K/g].
    A value is (code - 8) times its scale."""

    group_size: int

    weights: ClassVar[str] = "int4"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int32,),
        "scale": (torch.bfloat16,),
    }
    values_per_element: ClassVar[int] = 8
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight_packed", "scale": ".weight_scale"},
    )
    words: ClassVar[str] = "int32, eight codes of values + 8 in each"
    xor: ClassVar[int] = 0  # of a byte, to make codes of values + 8

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> StoredForm:
        scale, (num_rows, columns) = tensors["scale"], tensors["weight"].shape
        num_columns = columns * cls.values_per_element
        for group_size in GROUP_SIZES:
            if tuple(scale.shape) == (num_rows, -(-num_columns // group_size)):
                return cls(group_size)
        raise CheckpointError(
            f"{names['scale']} must hold one scale per {' or '.join(map(str, GROUP_SIZES))} values "
            f"of [{num_rows}, {num_columns}]; got {list(scale.shape)}"
        )

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.sf.dtype == torch.bfloat16

    @property
    def scale_block(self) -> tuple[int, int]:
        return 1, self.group_size

    @property
    def beside(self) -> tuple[str, ...]:
        return (_SHAPE,)

    def check_beside(
        self, suffix: str, name: str, tensor: torch.Tensor, num_rows: int, num_columns: int
    ) -> None:
        if tensor.tolist() != [num_rows, num_columns]:
            raise CheckpointError(
                f"{name} must be [{num_rows}, {num_columns}] to go with the other tensors; got "
                f"{tensor.tolist()!s:.100}"
            )

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes["weight"],
                (num_rows, num_columns // self.values_per_element),
                self.words,
            ),
            "scale": Expected(
                self.dtypes["scale"],
                (num_rows, -(-num_columns // self.group_size)),
                f"bfloat16, one scale per {self.group_size} values",
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
        size, groups = (num_experts, num_rows), -(-num_columns // self.group_size)
        return LayerWeights(
            torch.empty((*size, num_columns // 2), dtype=torch.uint8, device=device),
            torch.empty((*size, groups), dtype=torch.bfloat16, device=device),
        )

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        scales = tensors["scale"]
        wrong = (~scales.isfinite()).nonzero()
        if wrong.numel():
            row, column = wrong[0].tolist()
            raise CheckpointError(
                f"{names['scale']} must hold numbers; got {scales[row, column].item()} in row {row}"
            )
        packed = tensors["weight"].contiguous().view(torch.uint8)
        matrix.weight.copy_(packed ^ self.xor if self.xor else packed)
        matrix.sf.copy_(scales)

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        num_rows, num_bytes = matrix.weight.shape
        return {
            "weight": matrix.weight.contiguous().view(torch.int32),
            "scale": matrix.sf,
            _SHAPE: torch.tensor([num_rows, 2 * num_bytes]),
        }


@dataclass(frozen=True)
class StoredTwosComplement(StoredInt4):
    """int8 [rows, K/2], two values in each, the first in its lower bits."""

    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int8, torch.uint8),
        "scale": (torch.bfloat16,),
    }
    values_per_element: ClassVar[int] = 2
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale_inv"},
    )
    words: ClassVar[str] = "int8, two values of two's complement in each"
    xor: ClassVar[int] = 0x88

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        """Weights are saved as the other exporter has them."""
        return False

    @property
    def beside(self) -> tuple[str, ...]:
        """What tokens are divided by where they are quantized to FP8: they are not here."""
        return (".input_scale",)

    def check_beside(
        self, suffix: str, name: str, tensor: torch.Tensor, num_rows: int, num_columns: int
    ) -> None:
        """Nothing to compare."""


FORMS = (StoredInt4, StoredTwosComplement)
