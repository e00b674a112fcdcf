"""`WeightFormat`: weights of one format as checkpoints have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from deep_moe.formats.sizes import SCALE_GROUP

if TYPE_CHECKING:
    import torch

    from deep_moe.heuristics.shape import MoEShape

    from .layers import LayerTensors, LayerWeights, WeightSizes


class WeightFormat(ABC):
    """Weights of one format as checkpoints have them: of each layer the tensors of `LayerWeights`,
    of all local experts. Where there are no scales, their tensor is empty.

    name: what it is chosen by, and of its folder. words: what a layer is, in words. num_tensors: of
    a layer, 3 where matrices have scales of their own beside those of groups. bits_per_value:
    in the values' tensor. bytes_per_value: with its share of the scales, where they are many.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    num_tensors: ClassVar[int] = 2
    bits_per_value: ClassVar[int]
    bytes_per_value: ClassVar[float]

    def layer_of(self, weight: torch.Tensor) -> LayerWeights | None:
        """The layer that values alone are; None where they have to have scales."""
        return None

    @abstractmethod
    def check(self, l1: LayerWeights, l2: LayerWeights) -> WeightSizes:
        """Sizes of a layer, or an error that names the tensor. Does not look at values."""

    @abstractmethod
    def check_values(self, name: str, layer: LayerWeights) -> None:
        """Raise ValueError if checked weights hold what stands for no number."""

    def padded(
        self, l1: LayerWeights, l2: LayerWeights, shape: MoEShape
    ) -> tuple[LayerWeights, LayerWeights]:
        """Checked weights of `shape` with zeros up to multiples of 128, as new tensors."""
        return self.padded_layer(l1, shape.num_l1_matrices), self.padded_layer(l2, 1)

    def without_padding(
        self, l1: LayerWeights, l2: LayerWeights, shape: MoEShape
    ) -> tuple[LayerWeights, LayerWeights]:
        """The inverse. Copies."""
        hidden, intermediate = shape.hidden, shape.intermediate_hidden
        return (
            self.cut_layer(l1, shape.num_l1_matrices, intermediate, hidden),
            self.cut_layer(l2, 1, hidden, intermediate),
        )

    # Of the following, num_matrices: one below the other, 2 of Linear1 with a gate, whose blocks of
    # scales begin anew at the first row of up.

    @abstractmethod
    def padded_layer(self, layer: LayerWeights, num_matrices: int) -> LayerWeights:
        """Checked weights of one linear layer with zeros up to multiples of 128 of each matrix's
        sizes, as new tensors."""

    @abstractmethod
    def cut_layer(
        self, layer: LayerWeights, num_matrices: int, num_rows: int, num_values: int
    ) -> LayerWeights:
        """The inverse, to matrices of num_rows rows of num_values values. Copies."""

    @abstractmethod
    def dequantize(self, layer: LayerTensors, num_matrices: int = 1) -> torch.Tensor:
        """What one expert's weights stand for, tensors without the dimension of experts: float64
        [N, K]."""

    @abstractmethod
    def quantize(
        self, x: torch.Tensor, scale_block: tuple[int, int] = SCALE_GROUP, num_matrices: int = 1
    ) -> LayerWeights:
        """The nearest weights to float32 `x` [..., N, K]. scale_block: one that the format has."""

    @abstractmethod
    def random(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device,
        generator: torch.Generator,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        """One expert's weights [1, N, K] of any values, so large that a sum of K products is about
        as large as what they are multiplied by."""

    @abstractmethod
    def of_codes(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        scale_block: tuple[int, int] = SCALE_GROUP,
        num_matrices: int = 1,
    ) -> LayerWeights:
        """Weights whose values are `codes` [..., N, K], which the format holds, times 2^(byte -
        127), uint8, one for each `scale_block` of them."""
