"""The formats that weights come in, by name. What one is, its own file says; what a target does
with it, the target's file for it (deep_moe/targets). For a new format, write both, and name it in
`WEIGHT_FORMATS`.

Nothing here imports PyTorch: shapes, configs and the command line ask for names only.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from deep_moe.heuristics.shape import MoEShape

    from .weights import LayerWeights

DEFAULT_WEIGHTS = "mxfp4"
SCALE_GROUP = (1, 32)  # rows and values along K that share a scale


@dataclass(frozen=True)
class TokenFormat:
    """What tokens and Linear1's output are where weights have some format.

    words: for people. value_bytes: of a value. has_scales: whether 32 values share a UE8M0 scale,
    or, if has_float_scales, 128 a float32 scale of any size.
    """

    words: str
    value_bytes: int
    has_scales: bool
    has_float_scales: bool = False

    @property
    def block_k(self) -> int:
        """Values of a k-block: a row of 128 bytes in shared memory, the span of its swizzle."""
        return 128 // self.value_bytes


E4M3_TOKENS = TokenFormat("e4m3", 1, has_scales=True)
FLOAT_SCALED_TOKENS = TokenFormat("e4m3", 1, has_scales=True, has_float_scales=True)
BF16_TOKENS = TokenFormat("bf16", 2, has_scales=False)

# The tokens that go with each. Each has a file of its name, with a `FORMAT` in it. Where weights
# take other tokens than usual, the tokens are named behind them: such weights are laid out in their
# own way, so that whoever lays them out has to know, too.
WEIGHT_FORMATS = {
    "mxfp4": E4M3_TOKENS,
    "fp8": E4M3_TOKENS,
    "bf16": BF16_TOKENS,
    "mxfp4_bf16": BF16_TOKENS,
}

# The scales of the caller's tokens, by name: one for 32 values as weights of most formats ask for,
# or what engines have that serve FP8 checkpoints on Hopper. Which of them go with weights, their
# target says (deep_moe/targets).
DEFAULT_TOKEN_SCALES, FLOAT_TOKEN_SCALES = "ue8m0_per_32", "float32_per_128"
TOKEN_SCALES = (DEFAULT_TOKEN_SCALES, FLOAT_TOKEN_SCALES)


def token_format(weights: str, token_scales: str = DEFAULT_TOKEN_SCALES) -> TokenFormat:
    """The tokens that go with weights of a format.

    >>> token_format("fp8", "float32_per_128").has_float_scales
    True
    """
    return FLOAT_SCALED_TOKENS if token_scales == FLOAT_TOKEN_SCALES else WEIGHT_FORMATS[weights]


# Of formats that there is no kernel for, why.
_WITHOUT_KERNEL = {
    "nvfp4": "its scales, E4M3 per 16 values, are applied by no kernel here",
}


# Of which hidden and intermediate sizes are multiples, and up to multiples of which weights are
# padded with zeros when they are transformed.
SIZE_UNIT, K_BLOCK = 32, 128


class WeightFormat(ABC):
    """Weights of one format as checkpoints have them: of each layer a pair of tensors, values and
    scales, of all local experts. Where there are no scales, their tensor is empty.

    name: what it is chosen by. in_checkpoints: the name that checkpoints' weights go by, where that
    is another. pair: what a layer is, in words. bits_per_value: in the values'
    tensor.
    """

    name: ClassVar[str]
    pair: ClassVar[str]
    bits_per_value: ClassVar[int]

    @property
    def in_checkpoints(self) -> str:
        return self.name

    def pair_of(self, weight: torch.Tensor) -> LayerWeights | None:
        """The pair that a layer's values alone are; None where they have to have scales."""
        return None

    @abstractmethod
    def check(self, l1: LayerWeights, l2: LayerWeights) -> tuple[int, int, int]:
        """(experts, hidden, intermediate) of a layer, or an error that names the tensor. Does not
        look at values."""

    @abstractmethod
    def check_values(self, name: str, layer: LayerWeights) -> None:
        """Raise ValueError if checked weights hold what stands for no number."""

    @abstractmethod
    def padded(self, l1: LayerWeights, l2: LayerWeights) -> tuple[LayerWeights, LayerWeights]:
        """Checked weights with zeros up to multiples of 128, as new tensors."""

    @abstractmethod
    def without_padding(
        self, l1: LayerWeights, l2: LayerWeights, shape: MoEShape
    ) -> tuple[LayerWeights, LayerWeights]:
        """The inverse, to the sizes of `shape`. Copies."""

    # Of the following, num_matrices: one below the other, 2 of Linear1, whose blocks of scales
    # begin anew at the first row of up.

    @abstractmethod
    def dequantize(
        self, weight: torch.Tensor, sf: torch.Tensor, num_matrices: int = 1
    ) -> torch.Tensor:
        """What one expert's weights stand for, float64 [N, K]."""

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
    ) -> LayerWeights:
        """Weights whose values are `codes` [..., N, K], which the format holds, times 2^(byte -
        127), uint8, one for each `scale_block` of them."""


def check_weights_name(
    name: object, known: Iterable[str] = WEIGHT_FORMATS, where: str = ""
) -> None:
    """Raise unless it is one of `known`. where: behind their list in the error."""
    allowed = f"one of {', '.join(known)}{where}"
    if not isinstance(name, str):
        raise TypeError(f"weights must be {allowed}; got {name!r}")
    if name not in known:
        reason = f": {_WITHOUT_KERNEL[name]}" if name in _WITHOUT_KERNEL else ""
        raise ValueError(f"weights must be {allowed}; got {name!r}{reason}")


def weight_format(name: str) -> WeightFormat:
    """The format of this name, or an error that says which there are.

    >>> weight_format("mxfp4").pair
    'a pair (packed E2M1 int8, UE8M0 scales int32), as deep_moe.quantize_mxfp4 gives it'
    """
    check_weights_name(name)
    found = importlib.import_module(f"{__package__}.{name}").FORMAT
    assert isinstance(found, WeightFormat)
    return found
