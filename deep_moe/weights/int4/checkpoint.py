"""INT4 weights in checkpoints: of compressed-tensors, whose codes are values + 8, of the method
"w4afp8", whose are two's complement, and of GPTQ and AWQ, which store columns before rows. Their
names, types and shapes tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from deep_moe.errors import CheckpointError

from ..layers import LayerWeights
from ..stored_form import Expected, Held, StoredForm, Suffixes, Tensors

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName

GROUP_SIZES = (32, 128)  # values along K that share a scale

_SHAPE = ".weight_shape"
_ORDER = ".g_idx"

_CODES = 8  # of four bits in an int32
# Which of eight rows each four bits of an int32 of AWQ hold, from the lowest.
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class StoredInt4(StoredForm):
    """int32 [rows, K/8], eight codes in each, the first in its lowest bits, and BF16 [rows, K/g].
    A value is (code - 8) times its scale."""

    group_size: int

    weights: ClassVar[WeightsName] = "int4"
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

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        groups = -(-num_columns // self.group_size)
        return (torch.uint8, (num_rows, num_columns // 2)), (torch.bfloat16, (num_rows, groups))

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


@dataclass(frozen=True)
class StoredGptq(StoredInt4):
    """int32 [K/8, rows], eight codes of a row in each, and scales [K/g, rows]. Zero points [K/g,
    rows/8] must be those of codes of values + 8, of which GPTQ's first version stores 7. Scales are
    rounded to BF16, as engines round them beside BF16 tokens."""

    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int32,),
        "scale": (torch.float16, torch.bfloat16),
        "zeros": (torch.int32,),
    }
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".qweight", "scale": ".scales", "zeros": ".qzeros"},
    )
    has_columns_first: ClassVar[bool] = True
    zero: ClassVar[int] = 7  # as it is stored
    constants: ClassVar[Mapping[str, int]] = {"zeros": 0x7777_7777}

    @classmethod
    def plain(cls, tensors: Tensors) -> Tensors:
        """Rows before columns."""
        if any(tensor.dim() != 2 for tensor in tensors.values()):
            return tensors
        return {key: tensor.t() for key, tensor in tensors.items()}

    @classmethod
    def is_like(cls, tensors: Tensors) -> bool:
        return tensors["weight"].shape[:1] == tensors["scale"].shape[:1]

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        """Weights are saved as compressed-tensors has them."""
        return False

    @property
    def beside(self) -> tuple[str, ...]:
        return (_ORDER,)

    def check_beside(
        self, suffix: str, name: str, tensor: torch.Tensor, num_rows: int, num_columns: int
    ) -> None:
        """Columns must be in their order."""
        groups = torch.arange(num_columns, dtype=tensor.dtype) // self.group_size
        if not torch.equal(tensor, groups):
            raise CheckpointError(
                f"{name} must count the groups of {self.group_size} columns up; another order of "
                "columns (desc_act) is not taken"
            )

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        groups = -(-num_columns // self.group_size)
        words = f"float16 or bfloat16, one scale per {self.group_size} values"
        return {
            **super().expected(num_rows, num_columns),
            "scale": Expected(self.dtypes["scale"], (num_rows, groups), words),
            "zeros": Expected(
                self.dtypes["zeros"], (num_rows // _CODES, groups), "int32, eight zero points each"
            ),
        }

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        wrong = tensors["zeros"][tensors["zeros"] != self.constants["zeros"]]
        if wrong.numel():
            found = {int(wrong[0]) >> 4 * place & 15 for place in range(_CODES)} - {self.zero}
            raise CheckpointError(
                f"{names['zeros']} must hold zero points of {self.zero} alone, those of symmetric "
                f"codes; got {', '.join(map(str, sorted(found)))}"
            )
        super().put(names, {**tensors, "scale": tensors["scale"].bfloat16()}, matrix)


@dataclass(frozen=True)
class StoredAwq(StoredGptq):
    """int32 [K, rows/8], the codes of eight rows in each, those of even rows first. Zero points are
    stored as they are."""

    packs_rows: ClassVar[bool] = True
    zero: ClassVar[int] = 8
    constants: ClassVar[Mapping[str, int]] = {"zeros": 0x8888_8888 - (1 << 32)}

    @classmethod
    def plain(cls, tensors: Tensors) -> Tensors:
        """Rows before columns, eight codes of a row in each int32."""
        plain = super().plain(tensors)
        weight = tensors["weight"]
        is_awq = weight.dtype in cls.dtypes["weight"] and not weight.shape[0] % _CODES
        if plain is tensors or not is_awq:
            return plain  # what is wrong is named when types and shapes are checked
        shifts = torch.tensor(_AWQ_ROWS, device=weight.device).argsort() * 4
        codes = (weight.unsqueeze(2) >> shifts & 15).flatten(1)  # [K, rows]
        places = torch.arange(_CODES, device=weight.device) * 4
        words = (codes.t().unflatten(1, (-1, _CODES)).long() << places).sum(dim=2)
        return {**plain, "weight": words.int()}

    @property
    def beside(self) -> tuple[str, ...]:
        return ()


FORMS = (StoredInt4, StoredTwosComplement, StoredGptq, StoredAwq)
