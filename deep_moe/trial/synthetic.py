"""Layers and tokens to try the kernels on: random ones, ones whose result is exact, and what makes
tokens awkward. They are made on the CPU; real_size.py makes those of real size on a GPU.

In the exact case every sum that the layer forms is a whole multiple of one unit and stays below
2^24 of it, so FP32 holds it whatever the order of the additions, and the kernel must agree with the
reference bit for bit:

- tokens are 0, 1 or 2 and each row of gate or up holds 8 weights up to 2 in size, so |sum| <= 32;
- gate weights are not negative and carry a scale of 32: SiLU of 0 is 0, of 32 and more itself;
- without a gate rows are those of up, and the square of their sum is as large as a product above;
- routing weights are powers of two; down-projection weights are at most 3 in size and used in up to
  5461 columns, so that all of them times 32 * 32 stay below 2^24.

Each group of 32 values has a scale of its own, by chance, and its codes make up for it: a kernel
that takes the scale of another row or group gets other numbers.

Where tensor cores keep 13 bits only, as Hopper's do, rows of gate and up hold 2 weights of 1, which
leaves at most 4 * 4 units after SwiGLU, and rows of the down-projection 128 weights: 6144 units.

Biases are whole numbers, of gate 0 to 2 times 32, of up up to 2 in size, of the down-projection up
to 3 times 32; with Hopper's bits up to 1 in place of 2. Then sums of gate and up are up to 34 and 5
units, and rows of the down-projection hold so many weights less: 4096, and 96.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deep_moe.biases.per_expert import MegaMoEBiases, transform_biases_for_mega_moe
from deep_moe.formats import nvfp4
from deep_moe.formats.block_scaled import (
    E4M3_NAN,
    pack_e2m1_values,
    pack_ue8m0_groups,
    quantize_e4m3_ue8m0,
    ue8m0_to_float,
)
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.formats.scale_blocks import num_blocks, over_values
from deep_moe.formats.sizes import SCALE_GROUP, WHOLE_ROW
from deep_moe.tokens import TokenFormat
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights

if TYPE_CHECKING:
    from deep_moe.heuristics import MoEShape

_UE8M0_OF_ONE = 127
_UE8M0_OF_32 = 132
# Exponents of scales. Codes of 1, 2 and 3 times 1/2 to 2 are E2M1 numbers; 1 and 2 times 1/8 to 8
# are normal E4M3 numbers, also when a token's scales are brought to its largest.
_WEIGHT_SCALES = (-1, 1)
_TOKEN_SCALES = (-3, 3)


@dataclass(frozen=True)
class _ExactBounds:
    """What keeps sums below 2^bits units."""

    num_l1_weights: int  # per row of gate and up
    max_l1_weight: int
    num_l2_weights: int  # per row
    max_l1_bias: int = 0

    @property
    def is_l2_dense(self) -> bool:
        return self.num_l2_weights > 128


_EXACT_BOUNDS_WITH_BIASES = {24: _ExactBounds(8, 2, 4096, 2), 13: _ExactBounds(2, 1, 96, 1)}
_EXACT_BOUNDS = {24: _ExactBounds(8, 2, 5461), 13: _ExactBounds(2, 1, 128)}


@dataclass(frozen=True)
class Layer:
    """Weights of all experts of all ranks, as checkpoints have them, then of the shared ones."""

    l1: LayerWeights
    l2: LayerWeights
    num_shared_experts: int = 0
    l1_bias: torch.Tensor | None = None  # float32 [experts, 2*I]
    l2_bias: torch.Tensor | None = None  # float32 [experts, H]

    @property
    def biases(self) -> dict[str, Any]:
        """As the reference takes them."""
        return {"l1_bias": self.l1_bias, "l2_bias": self.l2_bias}

    def operands(self, tokens: Tokens) -> tuple[Any, Any, Any, Any, Any, Any]:
        """The reference's, for these tokens."""
        return (*(tokens.x, tokens.x_sf, tokens.topk_idx, tokens.topk_weights), self.l1, self.l2)

    def biases_of_rank(
        self, rank: int, shape: MoEShape, arch: str | None = None
    ) -> MegaMoEBiases | None:
        """The part that one rank holds, laid out for `arch` and the shape's weights."""
        if self.l1_bias is None or self.l2_bias is None:
            return None
        l1_bias, l2_bias = (
            self._of_rank(bias, rank, shape.num_ranks) for bias in (self.l1_bias, self.l2_bias)
        )
        return transform_biases_for_mega_moe(
            l1_bias, l2_bias, arch, weights=shape.weights, token_format=shape.token_format
        )

    def of_rank(self, rank: int, num_ranks: int) -> tuple[LayerWeights, LayerWeights]:
        """The part that one rank holds: its own experts, then all shared ones."""
        l1, l2 = (
            LayerWeights(*(self._of_rank(tensor, rank, num_ranks) for tensor in layer))
            for layer in (self.l1, self.l2)
        )
        return l1, l2

    def _of_rank(self, tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
        num_routed = tensor.shape[0] - self.num_shared_experts
        num_local = num_routed // num_ranks
        own = tensor[rank * num_local : (rank + 1) * num_local]
        return torch.cat([own, tensor[num_routed:]]) if self.num_shared_experts else own


class LayerParts(Protocol):
    """What each rank takes of a layer: `Layer`, or real_size.LayerMadeByRanks."""

    def of_rank(self, rank: int, num_ranks: int) -> tuple[LayerWeights, LayerWeights]: ...

    def biases_of_rank(
        self, rank: int, shape: MoEShape, arch: str | None = None
    ) -> MegaMoEBiases | None: ...


@dataclass(frozen=True)
class Tokens:
    """What one rank brings to a call."""

    # float8_e4m3fn or bfloat16 [tokens, hidden], or packed uint8 [tokens, hidden/2].
    x: torch.Tensor
    # int32 or float32 [tokens, hidden/128], or one for all [tokens, 1], of bfloat16 [tokens, 0], of
    # packed values int32 [tokens, 1 + hidden/64].
    x_sf: torch.Tensor
    topk_idx: torch.Tensor  # int64 [tokens, topk]
    topk_weights: torch.Tensor  # float32 [tokens, topk]

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]


# Tokens count their seeds from 0. With the same seed they would begin with the numbers that the
# weights begin with: tokens that equal rows of weights, whose sums are as large as none by chance.
_FIRST_LAYER_SEED = 1 << 31


def random_layer(
    shape: MoEShape, *, seed: int = 0, scale_block: tuple[int, int] = SCALE_GROUP
) -> Layer:
    """Normally distributed weights that keep a token's size through the layer. scale_block: rows
    and values along K that share a scale."""
    weights = weight_format(shape.weights)
    generator = torch.Generator().manual_seed(_FIRST_LAYER_SEED + seed)

    def linear(num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
        experts = [
            weights.quantize(
                torch.randn(num_rows, num_columns, generator=generator) * num_columns**-0.5,
                scale_block,
                num_matrices,
            )
            for _ in range(shape.num_experts + shape.num_shared_experts)
        ]
        return LayerWeights(*map(torch.stack, zip(*experts, strict=True)))

    l1 = linear(shape.num_l1_rows, shape.hidden, shape.num_l1_matrices)
    l2 = linear(shape.hidden, shape.intermediate_hidden, 1)
    if not shape.biases:
        return Layer(l1, l2, shape.num_shared_experts)
    num_experts = shape.num_experts + shape.num_shared_experts
    biases = random_biases(shape, num_experts, generator)
    return Layer(l1, l2, shape.num_shared_experts, *biases)


def random_biases(
    shape: MoEShape, num_experts: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normally distributed biases of so many experts, about as large as what they are added to."""
    l1_bias, l2_bias = (
        torch.randn(num_experts, num_rows, device=generator.device, generator=generator)
        for num_rows in (2 * shape.intermediate_hidden, shape.hidden)
    )
    return l1_bias, l2_bias


def random_tokens(
    shape: MoEShape, num_tokens: int, *, seed: int = 0, num_unused_slots: int = 0
) -> Tokens:
    """Normally distributed tokens, each to different experts chosen at random.

    num_unused_slots: slots of each token that are -1, at random places.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_tokens, shape.hidden, generator=generator)
    x, x_sf = quantize_tokens(values, shape.tokens)
    topk_idx = _random_routing(shape, num_tokens, num_unused_slots, generator)
    weights = torch.rand(num_tokens, shape.num_topk, generator=generator) + 0.1
    return Tokens(x, x_sf, topk_idx, weights / weights.sum(dim=1, keepdim=True))


def exact_layer(
    shape: MoEShape,
    *,
    seed: int = 0,
    sum_bits: int = 24,
    scale_block: tuple[int, int] = SCALE_GROUP,
) -> Layer:
    """Weights of the exact case; see above. sum_bits: 24 or 13. scale_block: rows and values along
    K that share a scale."""
    if sum_bits not in _EXACT_BOUNDS:
        raise ValueError(f"sum_bits must be one of 24, 13; got {sum_bits}")
    bounds = (_EXACT_BOUNDS_WITH_BIASES if shape.biases else _EXACT_BOUNDS)[sum_bits]
    generator = torch.Generator().manual_seed(seed)
    num_experts, hidden = shape.num_experts + shape.num_shared_experts, shape.hidden
    num_rows = shape.num_l1_rows
    num_gate_rows = shape.intermediate_hidden if shape.has_gate else 0

    def places(shape: tuple[int, ...], count: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).topk(count, dim=-1).indices

    l1 = torch.zeros(num_experts, num_rows, hidden)
    used = places(tuple(l1.shape), bounds.num_l1_weights)
    sizes = torch.randint(1, bounds.max_l1_weight + 1, used.shape, generator=generator)
    l1.scatter_(-1, used, sizes.float())
    signs = torch.randint(0, 2, l1.shape, generator=generator) * 2 - 1
    l1[:, num_gate_rows:] *= signs[:, num_gate_rows:]

    l2_shape = (num_experts, hidden, shape.intermediate_hidden)
    l2 = torch.randint(-3, 4, l2_shape, generator=generator).float()
    if bounds.is_l2_dense:
        columns = torch.randperm(shape.intermediate_hidden, generator=generator)
        l2[..., columns[bounds.num_l2_weights :]] = 0
    else:
        used = places(l2_shape, min(bounds.num_l2_weights, shape.intermediate_hidden))
        l2 = torch.zeros(l2_shape).scatter_(-1, used, l2.gather(-1, used))
    l1, l1_sf = _scale_groups(l1, _WEIGHT_SCALES, generator, scale_block, shape.num_l1_matrices)
    l2, l2_sf = _scale_groups(l2, _WEIGHT_SCALES, generator, scale_block)
    if shape.has_gate:
        l1_sf[:, : l1_sf.shape[1] // 2] += _UE8M0_OF_32 - _UE8M0_OF_ONE
    weights = weight_format(shape.weights)
    l1_weights = weights.of_codes(l1, l1_sf, scale_block, num_matrices=shape.num_l1_matrices)
    l2_weights = weights.of_codes(l2, l2_sf, scale_block)
    if not shape.biases:
        return Layer(l1_weights, l2_weights, shape.num_shared_experts)
    most = bounds.max_l1_bias
    gate = 32 * torch.randint(0, most + 1, (num_experts, num_rows // 2), generator=generator)
    up = torch.randint(-most, most + 1, gate.shape, generator=generator)
    l2_bias = 32 * torch.randint(-3, 4, (num_experts, hidden), generator=generator)
    l1_bias = torch.cat([gate, up], dim=1).float()
    return Layer(l1_weights, l2_weights, shape.num_shared_experts, l1_bias, l2_bias.float())


def exact_tokens(
    shape: MoEShape, num_tokens: int, *, seed: int = 0, num_unused_slots: int = 0
) -> Tokens:
    """Tokens of the exact case; see above."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (num_tokens, shape.hidden), generator=generator)
    topk_idx = _random_routing(shape, num_tokens, num_unused_slots, generator)
    exponents = torch.randint(-3, 1, topk_idx.shape, generator=generator)
    weights = torch.exp2(exponents.float())
    if not shape.tokens.has_scales:
        return Tokens(*quantize_tokens(x.float(), shape.tokens), topk_idx, weights)
    if shape.tokens.has_token_scale:
        codes, sf = _scale_groups(x.float(), _WEIGHT_SCALES, generator, (1, nvfp4.GROUP_SIZE))
        exponents = torch.randint(-3, 4, (num_tokens, 1), generator=generator)
        own = torch.exp2(exponents.float())
        scales = (ue8m0_to_float(sf, torch.float32) / own).to(torch.float8_e4m3fn)
        words = nvfp4.pack_scale_bytes(scales.view(torch.uint8))
        x_sf = torch.cat([own.view(torch.int32), words], dim=1)
        return Tokens(pack_e2m1_values(codes).view(torch.uint8), x_sf, topk_idx, weights)
    if shape.tokens.has_float_scales:
        block = WHOLE_ROW if shape.tokens.scales_whole_tokens else (1, 128)
        codes, sf = _scale_groups(x.float(), _TOKEN_SCALES, generator, block)
        scales = ue8m0_to_float(sf, torch.float32)
        return Tokens(codes.to(torch.float8_e4m3fn), scales, topk_idx, weights)
    codes, sf = _scale_groups(x.float(), _TOKEN_SCALES, generator)
    return Tokens(codes.to(torch.float8_e4m3fn), pack_ue8m0_groups(sf), topk_idx, weights)


def quantize_tokens(values: torch.Tensor, form: TokenFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` and `x_sf` of a buffer for float32 [tokens, hidden]."""
    if form.has_token_scale:
        return nvfp4.quantize_nvfp4_tokens(values)
    if form.has_float_scales:
        return quantize_e4m3_float(values, whole_tokens=form.scales_whole_tokens)
    if form.has_scales:
        return quantize_e4m3_ue8m0(values)
    return values.bfloat16(), values.new_empty((values.shape[0], 0), dtype=torch.int32)


def name_twice(tokens: Tokens) -> Tokens:
    """Every other token names the expert of its first slot in its second one too, where neither is
    unused. topk is at least 2."""
    topk_idx = tokens.topk_idx.clone()
    first, second = topk_idx[::2, 0], topk_idx[::2, 1]
    topk_idx[::2, 1] = torch.where((first >= 0) & (second >= 0), first, second)
    return replace(tokens, topk_idx=topk_idx)


def put_nan(tokens: Tokens, num_tokens: int, *, seed: int = 0) -> Tokens:
    """So many tokens, chosen at random, get one value that is NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(tokens.num_tokens, generator=generator)[:num_tokens]
    columns = torch.randint(tokens.x.shape[1], rows.shape, generator=generator)
    x, x_sf = tokens.x.clone(), tokens.x_sf
    if x.dtype == torch.uint8:  # E2M1 has none: the token's scale is
        x_sf = x_sf.clone()
        x_sf[rows, 0] = torch.full(rows.shape, torch.nan).view(torch.int32)
    elif x.dtype == torch.bfloat16:
        x[rows, columns] = torch.nan
    else:
        x.view(torch.uint8)[rows, columns] = E4M3_NAN
    return replace(tokens, x=x, x_sf=x_sf)


def received(shape: MoEShape, tokens: Sequence[Tokens]) -> torch.Tensor:
    """How many tokens each expert of the layer gets of these ranks: int32 [experts]. A token that
    names it twice counts twice."""
    named = torch.cat([own.topk_idx.flatten() for own in tokens])
    valid = named[(named >= 0) & (named < shape.num_experts)]
    return torch.bincount(valid, minlength=shape.num_experts).int()


def _random_routing(
    shape: MoEShape, num_tokens: int, num_unused_slots: int, generator: torch.Generator
) -> torch.Tensor:
    order = torch.rand(num_tokens, shape.num_experts, generator=generator).argsort(dim=1)
    topk_idx = order[:, : shape.num_topk].clone()
    places = torch.rand(topk_idx.shape, generator=generator).argsort(dim=1)
    return topk_idx.scatter_(1, places[:, :num_unused_slots], -1)


def _scale_groups(
    values: torch.Tensor,
    bounds: tuple[int, int],
    generator: torch.Generator,
    scale_block: tuple[int, int] = SCALE_GROUP,
    num_matrices: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and UE8M0 scales per block that stand for `values`; exponents within `bounds`."""
    *leading, num_rows, num_columns = values.shape
    sizes = (*leading, *num_blocks(num_rows, num_columns, scale_block, num_matrices))
    exponents = torch.randint(bounds[0], bounds[1] + 1, sizes, generator=generator)
    factors = torch.exp2(-exponents.float())
    codes = values * over_values(factors, scale_block, num_rows, num_columns, num_matrices)
    return codes, (exponents + _UE8M0_OF_ONE).to(torch.uint8)
