"""What a checkpoint's tensors hold: the formats that weights are read in, by dtype and shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.bf16 import no_scales
from deep_moe.formats.block_scaled import GROUP_SIZE, pack_ue8m0_groups
from deep_moe.formats.scale_blocks import num_blocks
from deep_moe.formats.weight_formats import SIZE_UNIT
from deep_moe.formats.weights import LayerWeights, MegaMoEWeights

BLOCK = 128  # rows and columns that share a scale of FP8, if not 32 columns do

_PACKED_DTYPES = (torch.uint8, torch.int8)
_BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_NAN_BYTE = 255


class Form(ABC):
    """weights: the format's name. values_per_byte: of the weights' tensors."""

    weights: ClassVar[str]
    values_per_byte: ClassVar[int]

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
    def weight(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A matrix of weights, checked against where it goes."""

    @abstractmethod
    def scale(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        """A matrix of scales, checked against where it goes. num_columns: of the weights."""

    def empty_weights(
        self, num_experts: int, intermediate: int, hidden: int, device: torch.device
    ) -> MegaMoEWeights:
        """For both linear layers of some experts."""
        if intermediate % SIZE_UNIT or hidden % SIZE_UNIT or not intermediate or not hidden:
            raise CheckpointError(
                f"hidden and intermediate sizes must be positive multiples of {SIZE_UNIT}; the "
                f"checkpoint has {hidden} and {intermediate}"
            )
        return MegaMoEWeights(
            self.empty(num_experts, 2 * intermediate, hidden, device, 2),
            self.empty(num_experts, hidden, intermediate, device, 1),
        )

    @property
    def rows_of_scale(self) -> int:
        """That share scales."""
        return 1


@dataclass(frozen=True)
class Mxfp4(Form):
    """E2M1 [rows, K/2] and UE8M0 [rows, K/32]."""

    weights: ClassVar[str] = "mxfp4"
    values_per_byte: ClassVar[int] = 2

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

    def weight(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _PACKED_DTYPES:
            raise CheckpointError(
                f"{name} must be uint8 or int8, two E2M1 values per byte; got {tensor.dtype}"
            )
        _check_shape(name, tensor, tuple(like.shape))
        return tensor.view(torch.int8)

    def scale(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        if tensor.dtype not in _BYTE_DTYPES:
            raise CheckpointError(
                f"{name} must be uint8 or float8_e8m0fnu, one UE8M0 scale per {GROUP_SIZE} values; "
                f"got {tensor.dtype}"
            )
        _check_shape(name, tensor, (like.shape[0], num_columns // GROUP_SIZE))
        _check_bytes(name, tensor.view(torch.uint8))
        return pack_ue8m0_groups(tensor.view(torch.uint8))


@dataclass(frozen=True)
class Bf16(Form):
    """BF16 [rows, K], without scales."""

    weights: ClassVar[str] = "bf16"
    values_per_byte: ClassVar[int] = 1

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

    def weight(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.bfloat16:
            raise CheckpointError(
                f"{name} must be bfloat16, as the layer's first weights are; got {tensor.dtype}"
            )
        _check_shape(name, tensor, tuple(like.shape))
        return tensor

    def scale(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        raise CheckpointError(
            f"{name} must not be there: the layer's first weights are bfloat16, without scales"
        )


@dataclass(frozen=True)
class Fp8(Form):
    """E4M3 [rows, K], with scales as they are: float32 [rows/128, K/128], rounded up, as
    `weight_scale_inv` is, or any of that and [rows, K/32] in UE8M0."""

    scale_dtype: torch.dtype
    scale_rows: int
    scale_columns: int

    weights: ClassVar[str] = "fp8"
    values_per_byte: ClassVar[int] = 1

    @classmethod
    def of(cls, name: str, scale: torch.Tensor, num_rows: int, num_columns: int) -> Fp8:
        """By the scales of a matrix."""
        for rows, columns in ((BLOCK, BLOCK), (1, GROUP_SIZE)):
            expected = (-(-num_rows // rows), -(-num_columns // columns))
            if tuple(scale.shape) == expected and scale.dtype in (torch.float32, *_BYTE_DTYPES):
                return cls(scale.dtype, rows, columns)
        raise CheckpointError(
            f"{name} must hold float32, uint8 or float8_e8m0fnu, one scale for {BLOCK} x {BLOCK} "
            f"or for {GROUP_SIZE} values of [{num_rows}, {num_columns}]; got {scale.dtype} "
            f"{list(scale.shape)}"
        )

    @property
    def rows_of_scale(self) -> int:
        return self.scale_rows

    def empty(
        self,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        num_matrices: int,
    ) -> LayerWeights:
        block = (self.scale_rows, self.scale_columns)
        scales = (num_experts, *num_blocks(num_rows, num_columns, block, num_matrices))
        return LayerWeights(
            torch.empty(
                (num_experts, num_rows, num_columns), dtype=torch.float8_e4m3fn, device=device
            ),
            torch.empty(scales, dtype=self.scale_dtype, device=device),
        )

    def weight(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{name} must be float8_e4m3fn, as the layer's first weights are; got "
                f"{tensor.dtype}"
            )
        _check_shape(name, tensor, tuple(like.shape))
        return tensor

    def scale(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        if tensor.dtype != self.scale_dtype:
            raise CheckpointError(
                f"{name} must be {self.scale_dtype}, as the layer's first scales are; got "
                f"{tensor.dtype}"
            )
        _check_shape(name, tensor, tuple(like.shape))
        if tensor.dtype == torch.float32:
            wrong = (~((tensor > 0) & tensor.isfinite())).nonzero()
            if wrong.numel():
                row, column = wrong[0].tolist()
                raise CheckpointError(
                    f"{name} must hold positive numbers; got {tensor[row, column].item()} in row "
                    f"{row}"
                )
        else:
            _check_bytes(name, tensor.view(torch.uint8))
        return tensor


def _check_bytes(name: str, scales: torch.Tensor) -> None:
    nans = (scales.amax(dim=-1) == _NAN_BYTE).nonzero()
    if nans.numel():
        raise CheckpointError(
            f"{name} must hold numbers; got NaN (UE8M0 byte {_NAN_BYTE}) in row {int(nans[0])}"
        )


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{name} must have shape {expected} to go with the other tensors; "
            f"got {tuple(tensor.shape)}"
        )
