"""The formats of weights as checkpoints hold them: an object for each, which says what the tensors
of a matrix are called, of which types and shapes they are, and what they become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import GROUP_SIZE, pack_ue8m0_groups, unpack_ue8m0
from deep_moe.formats.scale_blocks import num_blocks
from deep_moe.formats.sizes import SIZE_UNIT
from deep_moe.weights.bf16.format import no_scales
from deep_moe.weights.layers import ExpertWeights, LayerWeights

BLOCK = 128  # rows and columns that share a scale of FP8, if not 32 columns do

_BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_NAN_BYTE = 255

Tensors = Mapping[str, torch.Tensor]  # of a matrix: "weight", and what else its format has
Suffixes = Mapping[str, str]  # of their names, by the same keys

# Tensors that change what weights mean or how they are multiplied, by a part of their names: why
# they are not ignored by the formats that do not have them among their own.
FOREIGN = {
    "scale_2": "a second scale, as NVFP4 has it",
    "global_scale": "a second scale, as NVFP4 has it",
    "zero_point": "weights are not symmetric around zero",
    "zeros": "weights are not symmetric around zero",
    "g_idx": "columns are not in their order",
    "input_scale": "tokens have a scale of their own; kernels here find it",
}


class Expected(NamedTuple):
    """words: of which types, and why."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    words: str


class Form(ABC):
    """weights: the format's name. dtypes: of the weights' tensors. values_per_byte: of the same.
    spellings: suffixes that published models have, the first of which are written."""

    weights: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    values_per_byte: ClassVar[int]
    spellings: ClassVar[tuple[Suffixes, ...]]

    @classmethod
    @abstractmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> Form:
        """That of a matrix with weights of one of `dtypes`, by types and shapes."""

    @abstractmethod
    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        """Of a matrix's tensors."""

    @abstractmethod
    def empty(
        self,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        num_matrices: int,
    ) -> LayerWeights:
        """For one linear layer's weights and scales, of so many matrices one below the other."""

    @abstractmethod
    def put(
        self, names: Suffixes, tensors: Tensors, weight: torch.Tensor, sf: torch.Tensor
    ) -> None:
        """Copy a matrix's checked tensors to where they go, if they hold numbers."""

    @classmethod
    @abstractmethod
    def stored(cls, weight: torch.Tensor, sf: torch.Tensor) -> Tensors:
        """The tensors of a matrix in a checkpoint; the inverse of `put`."""

    @property
    def rows_of_scale(self) -> int:
        """That share scales."""
        return 1

    def check(self, names: Suffixes, tensors: Tensors, num_rows: int, num_columns: int) -> None:
        """Raise unless a matrix's tensors have the types and shapes of this one."""
        for key, (dtypes, shape, words) in self.expected(num_rows, num_columns).items():
            name, tensor = names[key], tensors[key]
            if tensor.dtype not in dtypes:
                raise CheckpointError(f"{name} must be {words}; got {tensor.dtype}")
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{name} must have shape {shape} to go with the other tensors; "
                    f"got {tuple(tensor.shape)}"
                )

    def empty_weights(
        self, num_experts: int, intermediate: int, hidden: int, device: torch.device
    ) -> ExpertWeights:
        """For both linear layers of some experts."""
        return ExpertWeights(
            self.empty(num_experts, 2 * intermediate, hidden, device, 2),
            self.empty(num_experts, hidden, intermediate, device, 1),
        )


@dataclass(frozen=True)
class Mxfp4(Form):
    """E2M1 [rows, K/2] and UE8M0 [rows, K/32]."""

    weights: ClassVar[str] = "mxfp4"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.int8)
    values_per_byte: ClassVar[int] = 2
    # In turn: what save_experts writes, compressed-tensors, DeepSeek-V4, DeepSeek-V3's names.
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale"},
        {"weight": ".weight_packed", "scale": ".weight_scale"},
        {"weight": ".weight", "scale": ".scale"},
        {"weight": ".weight", "scale": ".weight_scale_inv"},
    )

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> Form:
        return cls()

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes, (num_rows, num_columns // 2), "uint8 or int8, two E2M1 values per byte"
            ),
            "scale": Expected(
                _BYTE_DTYPES,
                (num_rows, num_columns // GROUP_SIZE),
                f"uint8 or float8_e8m0fnu, one UE8M0 scale per {GROUP_SIZE} values",
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
        size = (num_experts, num_rows)
        return LayerWeights(
            torch.empty((*size, num_columns // 2), dtype=torch.int8, device=device),
            torch.empty((*size, -(-num_columns // 128)), dtype=torch.int32, device=device),
        )

    def put(
        self, names: Suffixes, tensors: Tensors, weight: torch.Tensor, sf: torch.Tensor
    ) -> None:
        scales = tensors["scale"].contiguous().view(torch.uint8)
        _check_bytes(names["scale"], scales)
        weight.copy_(tensors["weight"].view(torch.int8))
        sf.copy_(pack_ue8m0_groups(scales))

    @classmethod
    def stored(cls, weight: torch.Tensor, sf: torch.Tensor) -> Tensors:
        num_groups = 2 * weight.shape[1] // GROUP_SIZE
        return {"weight": weight.view(torch.uint8), "scale": unpack_ue8m0(sf)[:, :num_groups]}


@dataclass(frozen=True)
class Fp8(Form):
    """E4M3 [rows, K], with scales as they are: float32 [rows/128, K/128], rounded up, as
    `weight_scale_inv` is, or any of that and [rows, K/32] in UE8M0."""

    scale_dtype: torch.dtype
    scale_rows: int
    scale_columns: int

    weights: ClassVar[str] = "fp8"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn,)
    values_per_byte: ClassVar[int] = 1
    # In turn: DeepSeek-V3, what is named as MXFP4 is, DeepSeek-V4.
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale_inv"},
        {"weight": ".weight", "scale": ".weight_scale"},
        {"weight": ".weight_packed", "scale": ".weight_scale"},
        {"weight": ".weight", "scale": ".scale"},
    )

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> Form:
        scale, (num_rows, num_columns) = tensors["scale"], tensors["weight"].shape
        for block in ((BLOCK, BLOCK), (1, GROUP_SIZE)):
            is_known = scale.dtype in (torch.float32, *_BYTE_DTYPES)
            if is_known and tuple(scale.shape) == num_blocks(num_rows, num_columns, block):
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
    def _block(self) -> tuple[int, int]:
        return self.scale_rows, self.scale_columns

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": Expected(
                self.dtypes,
                (num_rows, num_columns),
                "float8_e4m3fn, as the layer's first weights are",
            ),
            "scale": Expected(
                (self.scale_dtype,),
                num_blocks(num_rows, num_columns, self._block),
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
        scales = num_blocks(num_rows, num_columns, self._block, num_matrices)
        size = (num_experts, num_rows, num_columns)
        return LayerWeights(
            torch.empty(size, dtype=torch.float8_e4m3fn, device=device),
            torch.empty((num_experts, *scales), dtype=self.scale_dtype, device=device),
        )

    def put(
        self, names: Suffixes, tensors: Tensors, weight: torch.Tensor, sf: torch.Tensor
    ) -> None:
        scales = tensors["scale"]
        if scales.dtype == torch.float32:
            wrong = (~((scales > 0) & scales.isfinite())).nonzero()
            if wrong.numel():
                row, column = wrong[0].tolist()
                raise CheckpointError(
                    f"{names['scale']} must hold positive numbers; got "
                    f"{scales[row, column].item()} in row {row}"
                )
        else:
            _check_bytes(names["scale"], scales.view(torch.uint8))
        weight.copy_(tensors["weight"])
        sf.copy_(scales)

    @classmethod
    def stored(cls, weight: torch.Tensor, sf: torch.Tensor) -> Tensors:
        if sf.dtype == torch.int32:
            sf = unpack_ue8m0(sf)[:, : weight.shape[1] // GROUP_SIZE]
        return {"weight": weight, "scale": sf}


@dataclass(frozen=True)
class Bf16(Form):
    """BF16 [rows, K], without scales."""

    weights: ClassVar[str] = "bf16"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    values_per_byte: ClassVar[int] = 1
    spellings: ClassVar[tuple[Suffixes, ...]] = ({"weight": ".weight"},)

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> Form:
        return cls()

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        words = "bfloat16, as the layer's first weights are"
        return {"weight": Expected(self.dtypes, (num_rows, num_columns), words)}

    def empty(
        self,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        num_matrices: int,
    ) -> LayerWeights:
        size = (num_experts, num_rows, num_columns)
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        return LayerWeights(weight, no_scales(weight))

    def put(
        self, names: Suffixes, tensors: Tensors, weight: torch.Tensor, sf: torch.Tensor
    ) -> None:
        weight.copy_(tensors["weight"])

    @classmethod
    def stored(cls, weight: torch.Tensor, sf: torch.Tensor) -> Tensors:
        return {"weight": weight}


FORMS: tuple[type[Form], ...] = (Mxfp4, Fp8, Bf16)


def form_with(dtype: torch.dtype) -> type[Form] | None:
    """The format whose weights are of this type."""
    return next((form for form in FORMS if dtype in form.dtypes), None)


def check_sizes(intermediate: int, hidden: int) -> None:
    if intermediate % SIZE_UNIT or hidden % SIZE_UNIT or not intermediate or not hidden:
        raise CheckpointError(
            f"hidden and intermediate sizes must be positive multiples of {SIZE_UNIT}; the "
            f"checkpoint has {hidden} and {intermediate}"
        )


def _check_bytes(name: str, scales: torch.Tensor) -> None:
    nans = (scales.amax(dim=-1) == _NAN_BYTE).nonzero()
    if nans.numel():
        raise CheckpointError(
            f"{name} must hold numbers; got NaN (UE8M0 byte {_NAN_BYTE}) in row {int(nans[0])}"
        )
