"""`Target`: everything that is particular to an architecture. `TargetWeights`: the same of one
weight format on it.

Nothing here or in a target's file imports PyTorch before a method needs it: heuristics and the
command line ask targets too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from deep_moe.emulator.tensor_map import DataType
from deep_moe.formats.sizes import SCALE_GROUP
from deep_moe.tokens import TokenFormat, token_format
from deep_moe.weights import (
    DEFAULT_WEIGHTS,
    WEIGHTS,
    check_weights_name,
    default_token_format,
    optional_module,
)

if TYPE_CHECKING:
    import torch

    from deep_moe.emulator.tensor_map import TensorMapSpec
    from deep_moe.errors import RequantizationWarning
    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.links import ChipRates
    from deep_moe.heuristics.segments import Layout
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights.layers import ExpertWeights, KernelLayer, LayerWeights, MegaMoEWeights

    from .config import MegaMoEConfig

    Pair = tuple[torch.Tensor, torch.Tensor]

ConfigFields = Mapping[str, int | float | bool | str]


def token_data_type(tokens: TokenFormat) -> DataType:
    """Of tokens in tensor maps."""
    return DataType.BFLOAT16 if tokens.value_bits == 16 else DataType.UINT8


def kernels_of(weights: str, kernel: str) -> tuple[TargetWeights, ...]:
    """What targets of a kernel do with weights of a format; empty where it does not take them."""
    module = optional_module(weights, kernel)
    return () if module is None else module.KERNELS


class Operands(NamedTuple):
    """How a kernel reaches its tokens and weights: specs of tensor maps and plain addresses, by the
    members of the kernel's arguments (experts/<kernel>/kernel_args.cuh). Of a member that is an
    array it is the last spec; those before copy equal shares of its rows, one more each."""

    tensor_maps: Mapping[str, TensorMapSpec]
    addresses: Mapping[str, int]


class TargetWeights(ABC):
    """Weights of one format beside tokens of one format, on one target.

    weights, token_format: the formats' names. policy: the struct that the kernel has of the pair as
    `Config::Weights`, in deep_moe/weights/<weights>/<kernel>.cuh. fuzz_tiles: overrides of config
    fields that stand for all kinds of main loop; as many for each pair of a target. scale_block:
    rows and values along K of which the kernel applies one scale. larger_scale_blocks: of which
    checkpoints have one, such that each is the scale of all the kernel's in it.
    """

    weights: ClassVar[str]
    token_format: str
    policy: str
    fuzz_tiles: ClassVar[tuple[Mapping[str, int], ...]]
    scale_block: ClassVar[tuple[int, int]] = SCALE_GROUP
    larger_scale_blocks: ClassVar[tuple[tuple[int, int], ...]] = ()

    @property
    def tokens(self) -> TokenFormat:
        """The format of the tokens."""
        return token_format(self.token_format)

    @abstractmethod
    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        """Lay out checked weights for the kernel in `out`; see `transform_weights_for_mega_moe`."""

    def requantize(
        self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights
    ) -> list[RequantizationWarning]:
        """`transform`, with scales changed that the kernel cannot apply: what moved."""
        raise ValueError(
            f"requantize must be False for {self.weights} weights, which keep their exact values; "
            "got True"
        )

    @abstractmethod
    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        """Give back what `transform` was given, after a check of the tensors' forms."""

    @abstractmethod
    def tensors(self, shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of what `transform` fills for one rank, by the names that a call knows
        the tensors by: l1_weights[0], l1_weights[1], l2_weights[0], l2_weights[1]."""

    @abstractmethod
    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        """What the kernel is told of one rank's symmetric buffer and transformed weights."""

    @abstractmethod
    def bias_order(self, num_rows: int, *, is_l1: bool) -> torch.Tensor:
        """Which row of a layer's biases stands in each place: int64 [num_rows], a permutation of
        the rows, a multiple of 256. Of Linear1, gate comes before up."""

    @property
    @abstractmethod
    def numerics(self) -> Numerics:
        """Where the kernel rounds, for the reference."""


@dataclass(frozen=True)
class Target(ABC):
    """An architecture that kernels are compiled for.

    name: as the compiler knows it. capabilities: compute capabilities of the GPUs that run it, of
    which `gpus` names some. default_num_sms: SMs of such a GPU.

    kernel: namespace of the kernel in the header library, and the beginning of its file's name.
    config: what such a kernel is built from.
    foreign_headers: what it includes of other libraries that takes long to parse, so that kernels
    of one process share it (emulator/precompiled_headers.py).
    cluster_size: CTAs of the smallest cluster. smem_capacity: bytes of shared memory that a CTA may
    ask for.
    rates: what such a chip computes and moves.
    was_run: whether the kernel has run on such a GPU, not in the emulator only.
    heeds_uneven: whether the choice of fields depends on `is_uneven`. overridable: the fields that
    callers may set. tunable: those of them whose best value differs from layer to layer. roles:
    what the warps do that have dispatch, loader and epilogue registers. packs_e2m1: whether an
    instruction rounds to E2M1. has_grouped_product: whether `grouped_product` has a kernel for it.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    gpus: str
    default_num_sms: int

    kernel: ClassVar[str]
    config: ClassVar[type[MegaMoEConfig]]
    foreign_headers: ClassVar[tuple[str, ...]] = ()
    cluster_size: ClassVar[int]
    smem_capacity: ClassVar[int]
    rates: ClassVar[ChipRates]
    was_run: ClassVar[bool]
    heeds_uneven: ClassVar[bool]
    overridable: ClassVar[tuple[str, ...]]
    tunable: ClassVar[tuple[str, ...]]
    roles: ClassVar[tuple[str, str, str]]
    packs_e2m1: ClassVar[bool] = False
    has_grouped_product: ClassVar[bool] = False

    @abstractmethod
    def choose_fields(
        self,
        shape: MoEShape,
        num_tokens: int,
        *,
        is_uneven: bool,
        num_sms: int,
        smem_capacity: int,
        overrides: Mapping[str, int],
    ) -> tuple[dict[str, int], dict[str, str]]:
        """All config fields that are not given by the problem, and the reason of each."""

    @abstractmethod
    def candidates(self, shape: MoEShape, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Other values of each tunable field that are worth measuring beside the `chosen` ones."""

    @abstractmethod
    def smem_layout(self, fields: ConfigFields) -> Layout:
        """Shared memory of a CTA, by the fields of its config and the format of its weights."""

    @abstractmethod
    def tmem_layout(self, fields: ConfigFields) -> Layout | None:
        """Tensor memory of a CTA; None where there is none."""

    @abstractmethod
    def warp_roles(self, fields: ConfigFields) -> dict[str, range]:
        """The warps of a CTA by what they do."""

    @cached_property
    def weights(self) -> tuple[TargetWeights, ...]:
        """What the target does with each pair of weights and tokens: `KERNELS` of the file that a
        format's folder has for this kernel."""
        found = (kernels_of(name, self.kernel) for name in WEIGHTS)
        return tuple(pair for kernels in found for pair in kernels)

    def weights_of(
        self, weights: str = DEFAULT_WEIGHTS, token_format: str | None = None
    ) -> TargetWeights:
        """What the target does with such weights beside such tokens, by default
        `default_tokens`, or a ValueError."""
        names = dict.fromkeys(pair.weights for pair in self.weights)
        check_weights_name(weights, names, f" on {self.name}")
        allowed = self.token_formats(weights)
        if token_format is None:
            token_format = self.default_tokens(weights)
        if token_format not in allowed:
            raise ValueError(
                f"token_format must be {' or '.join(allowed)} with {weights} weights on "
                f"{self.name}; got {token_format!r}"
            )
        return next(
            pair
            for pair in self.weights
            if (pair.weights, pair.token_format) == (weights, token_format)
        )

    def token_formats(self, weights: str) -> tuple[str, ...]:
        """Of tokens that there is a kernel for beside weights of a format, the default first."""
        return tuple(pair.token_format for pair in self.weights if pair.weights == weights)

    def default_tokens(self, weights: str) -> TokenFormatName:
        """The format of the tokens beside weights of a format where nothing is said: the first that
        there is a kernel for or, where there is none, what goes with the weights elsewhere.

        Args:
            weights: the format's name.
        """
        known = self.token_formats(weights)
        return cast("TokenFormatName", known[0]) if known else default_token_format(weights)

    @property
    def header(self) -> str:
        """The kernel's file in the header library."""
        return f"deep_moe/kernels/{self.kernel}_mega_moe.cuh"

    def whole_clusters(self, num_sms: int) -> int:
        """The largest number of CTAs up to `num_sms` that makes whole clusters."""
        return num_sms - num_sms % self.cluster_size
