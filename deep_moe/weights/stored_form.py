"""`StoredForm`: weights of one format as files of checkpoints hold them. It says what the tensors
of a matrix are called, of which types and shapes they are, and what they become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import GROUP_SIZE

from .layers import ExpertWeights, LayerWeights

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)  # of UE8M0 scales
PACKED_DTYPES = (torch.uint8, torch.int8)  # of bytes of two values

_NAN_BYTE = 255

Tensors = Mapping[str, torch.Tensor]  # of a matrix: "weight", and what else its format has
Suffixes = Mapping[str, str]  # of their names, by the same keys
# Types and sizes of the tensors of `LayerWeights`.
Held = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Expected(NamedTuple):
    """words: of which types, and why."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    words: str


class StoredForm(ABC):
    """weights: the format's name. dtypes: of the tensors, by key, "weight" for the values.
    values_per_element: of the values' tensor. spellings: suffixes that published models have, with
    the same keys, the first of which are written. token_format: of tokens that must go with such
    weights; None: what goes with the format. token_scale: suffix of the scale by which tokens may
    be quantized; None: there is none that a kernel could take. has_columns_first: tensors have
    columns before rows, which `plain` turns. packs_rows: an element of the values' tensor has those
    of several rows. constants: by which keys a tensor holds one integer alone.
    """

    weights: ClassVar[WeightsName]
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]]
    values_per_element: ClassVar[int]
    spellings: ClassVar[tuple[Suffixes, ...]]
    token_format: ClassVar[TokenFormatName | None] = None
    token_scale: ClassVar[str | None] = None
    has_columns_first: ClassVar[bool] = False
    packs_rows: ClassVar[bool] = False
    constants: ClassVar[Mapping[str, int]] = {}

    @classmethod
    def of(cls, names: Suffixes, tensors: Tensors) -> StoredForm:
        """That of a matrix with plain tensors, by names, types and shapes, where a format has
        several."""
        return cls()

    @classmethod
    def plain(cls, tensors: Tensors) -> Tensors:
        """A matrix's tensors, without dimensions that only some exporters write."""
        return tensors

    @classmethod
    def is_like(cls, tensors: Tensors) -> bool:
        """Whether a matrix's plain tensors, of types that are this form's, are of its shapes, too,
        and so rather of this form than of another with such types."""
        return False

    @classmethod
    @abstractmethod
    def holds(cls, layer: LayerWeights) -> bool:
        """Whether a layer's weights, as `put` makes them, are of this format, by their types."""

    @abstractmethod
    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        """Of a matrix's tensors."""

    @abstractmethod
    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        """What one expert's linear layer has in memory, of so many matrices one below the other."""

    def empty(
        self,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        num_matrices: int,
    ) -> LayerWeights:
        """For one linear layer's weights and scales."""
        held = self.held(num_rows, num_columns, num_matrices)
        return LayerWeights(
            *(torch.empty((num_experts, *size), dtype=dtype, device=device) for dtype, size in held)
        )

    @abstractmethod
    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        """Copy a matrix's checked tensors to where they go, its part of what `empty` made of an
        expert, if they hold numbers."""

    @classmethod
    @abstractmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        """The tensors of a matrix in a checkpoint; the inverse of `put`. By the keys of the first
        spelling, those of `beside` by their suffixes."""

    @property
    def scale_block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None without scales."""
        return None

    @property
    def rows_of_scale(self) -> int:
        """That a matrix must be cut by: rows that share scales, 1 where all of them do."""
        return 1

    @classmethod
    def token_factor(cls, name: str, scale: torch.Tensor) -> torch.Tensor:
        """By which tokens are multiplied that were quantized with a scale of theirs from a
        checkpoint, float32 [1], or CheckpointError. Of forms that have a `token_scale`."""
        check_positive(name, scale)
        return one_scale(scale).float()

    @property
    def beside(self) -> tuple[str, ...]:
        """Suffixes of tensors that may be there, too, and change nothing of what weights are."""
        return ()

    def check_beside(
        self, suffix: str, name: str, tensor: torch.Tensor, num_rows: int, num_columns: int
    ) -> None:
        """Raise CheckpointError if such a tensor of a matrix says something else."""
        raise NotImplementedError(suffix)

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
        self,
        num_experts: int,
        intermediate: int,
        hidden: int,
        device: torch.device,
        num_l1_matrices: int = 2,
    ) -> ExpertWeights:
        """For both linear layers of some experts. num_l1_matrices: 1 of experts without gate."""
        num_l1_rows = num_l1_matrices * intermediate
        return ExpertWeights(
            self.empty(num_experts, num_l1_rows, hidden, device, num_l1_matrices),
            self.empty(num_experts, hidden, intermediate, device, 1),
        )


def ue8m0_scales(num_rows: int, num_columns: int) -> Expected:
    """Of a matrix with so many values."""
    return Expected(
        BYTE_DTYPES,
        (num_rows, num_columns // GROUP_SIZE),
        f"uint8 or float8_e8m0fnu, one UE8M0 scale per {GROUP_SIZE} values",
    )


def packed_e2m1(num_rows: int, num_columns: int) -> Expected:
    """Of a matrix with so many values."""
    return Expected(
        PACKED_DTYPES, (num_rows, num_columns // 2), "uint8 or int8, two E2M1 values per byte"
    )


def one_scale(tensor: torch.Tensor) -> torch.Tensor:
    """A scale of a whole matrix as [1], whether it was [], [1] or [1, 1]."""
    return tensor.reshape(1) if tensor.numel() == 1 else tensor


def check_bytes(name: str, scales: torch.Tensor) -> None:
    """Raise if a UE8M0 scale of a matrix is NaN."""
    nans = (scales.amax(dim=-1) == _NAN_BYTE).nonzero()
    if nans.numel():
        raise CheckpointError(
            f"{name} must hold numbers; got NaN (UE8M0 byte {_NAN_BYTE}) in row {int(nans[0])}"
        )


def check_positive(name: str, scales: torch.Tensor) -> None:
    """Raise if a scale is no positive number."""
    wrong = (~((scales > 0) & scales.isfinite())).nonzero()
    if len(wrong):  # of a tensor without dimensions, too
        place = wrong[0].tolist()
        where = f" in row {place[0]}" if place else ""
        raise CheckpointError(
            f"{name} must hold positive numbers; got {scales[tuple(place)].item()}{where}"
        )
