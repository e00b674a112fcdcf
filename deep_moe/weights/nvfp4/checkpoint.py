"""NVFP4 weights in checkpoints: of ModelOpt, whose scales of matrices multiply, and of
compressed-tensors, whose divide. Their names tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from deep_moe.errors import CheckpointError
from deep_moe.formats.nvfp4 import GROUP_SIZE

from ..layers import LayerWeights
from ..stored_form import (
    PACKED_DTYPES,
    Expected,
    Held,
    StoredForm,
    Suffixes,
    Tensors,
    one_scale,
    packed_e2m1,
)
from .format import first_wrong_scale

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName


@dataclass(frozen=True)
class StoredNvfp4(StoredForm):
    """E2M1 [rows, K/2], E4M3 [rows, K/16] and float32 [], by which the products of both are
    multiplied."""

    weights: ClassVar[WeightsName] = "nvfp4"
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "weight": PACKED_DTYPES,
        "scale": (torch.float8_e4m3fn,),
        "global_scale": (torch.float32,),
    }
    values_per_element: ClassVar[int] = 2
    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {"weight": ".weight", "scale": ".weight_scale", "global_scale": ".weight_scale_2"},
    )
    token_scale: ClassVar[str] = ".input_scale"  # not a part of the weights

    @classmethod
    def plain(cls, tensors: Tensors) -> Tensors:
        return {**tensors, "global_scale": one_scale(tensors["global_scale"])}

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        return layer.global_sf is not None and layer.sf.dtype == torch.float8_e4m3fn

    @property
    def scale_block(self) -> tuple[int, int]:
        return 1, GROUP_SIZE

    @property
    def beside(self) -> tuple[str, ...]:
        return (self.token_scale,)

    def check_beside(
        self, suffix: str, name: str, tensor: torch.Tensor, num_rows: int, num_columns: int
    ) -> None:
        """Nothing to compare: the weights are the same whatever scales tokens get."""

    @classmethod
    def token_factor(cls, name: str, scale: torch.Tensor) -> torch.Tensor:
        factor = cls._factor(name, one_scale(scale).float())
        if not bool(factor > 0):
            raise CheckpointError(f"{name} must be a positive number; got {scale.item()}")
        return factor

    def expected(self, num_rows: int, num_columns: int) -> dict[str, Expected]:
        return {
            "weight": packed_e2m1(num_rows, num_columns),
            "scale": Expected(
                self.dtypes["scale"],
                (num_rows, num_columns // GROUP_SIZE),
                f"float8_e4m3fn, one scale per {GROUP_SIZE} values",
            ),
            "global_scale": Expected(
                self.dtypes["global_scale"], (1,), "float32, one scale for the matrix"
            ),
        }

    def held(self, num_rows: int, num_columns: int, num_matrices: int) -> Held:
        return (
            (torch.int8, (num_rows, num_columns // 2)),
            (torch.float8_e4m3fn, (num_rows, num_columns // GROUP_SIZE)),
            (torch.float32, (num_matrices,)),
        )

    def put(self, names: Suffixes, tensors: Tensors, matrix: LayerWeights) -> None:
        _check_scale_bytes(names["scale"], tensors["scale"].view(torch.uint8))
        assert matrix.global_sf is not None
        matrix.weight.copy_(tensors["weight"].view(torch.int8))
        matrix.sf.copy_(tensors["scale"])
        matrix.global_sf.copy_(self._factor(names["global_scale"], tensors["global_scale"]))

    @classmethod
    def _factor(cls, name: str, scale: torch.Tensor) -> torch.Tensor:
        """By which values are multiplied. ModelOpt gives a matrix of zeros the scale 0."""
        if not bool((scale >= 0) & scale.isfinite()):
            raise CheckpointError(f"{name} must be a number of at least 0; got {scale.item()}")
        return scale

    @classmethod
    def stored(cls, matrix: LayerWeights) -> Tensors:
        assert matrix.global_sf is not None
        return {
            "weight": matrix.weight.view(torch.uint8),
            "scale": matrix.sf,
            "global_scale": matrix.global_sf[0],
        }


@dataclass(frozen=True)
class StoredDivided(StoredNvfp4):
    """The same, but divided by float32 [1]. The quotient 1 / that is rounded to float32: a relative
    error of at most 2^-24."""

    spellings: ClassVar[tuple[Suffixes, ...]] = (
        {
            "weight": ".weight_packed",
            "scale": ".weight_scale",
            "global_scale": ".weight_global_scale",
        },
    )
    token_scale: ClassVar[str] = ".input_global_scale"

    @classmethod
    def holds(cls, layer: LayerWeights) -> bool:
        """Weights are saved as the other exporter has them: without another rounding."""
        return False

    @classmethod
    def _factor(cls, name: str, scale: torch.Tensor) -> torch.Tensor:
        factor = scale.double().reciprocal().float()
        if not bool((scale > 0) & scale.isfinite() & factor.isfinite()):
            raise CheckpointError(
                f"{name} must be a positive number whose inverse is one, too; got {scale.item()}"
            )
        return factor


def _check_scale_bytes(name: str, scales: torch.Tensor) -> None:
    """Raise if a scale is NaN or has a sign, even that of -0."""
    wrong = first_wrong_scale(scales)
    if wrong is not None:
        what = "NaN" if wrong.is_nan else "one with a sign"
        raise CheckpointError(
            f"{name} must hold numbers without a sign; got {what} (E4M3 byte {wrong.byte:#04x}) in "
            f"row {wrong.row}, column {wrong.column}"
        )


FORMS = (StoredNvfp4, StoredDivided)
