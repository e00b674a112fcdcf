"""Calls of `GroupedExperts`: rows for the experts of one rank, in both layouts, and what has to
come of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import deep_moe
from deep_moe.formats.block_scaled import pack_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.formats.mx import quantize_mxfp8
from deep_moe.formats.numerics import FP32_SUM_BITS, Numerics
from deep_moe.heuristics import MoEShape
from deep_moe.split.grouped_experts import GroupedExperts
from deep_moe.targets import target_of
from deep_moe.tokens import token_format as token_format_of

from .bounds import Bounds, reference_bounds
from .reference import reference_mega_moe
from .synthetic import Layer, exact_layer, exact_tokens, random_layer

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName

COUNTS = (37, 0, 5, 66)
UNTOUCHED = -7.0


def shape_of(counts: tuple[int, ...], weights: WeightsName = "mxfp4", **more: Any) -> MoEShape:
    """The experts as a layer of one rank, whose tokens have one slot."""
    return MoEShape(
        num_ranks=1,
        num_experts=len(counts),
        num_topk=1,
        weights=weights,
        **{
            "hidden": 384,
            "intermediate_hidden": 256,
            "num_max_tokens_per_rank": max(sum(counts), 1),
            **more,
        },
    )


@dataclass(frozen=True)
class Case:
    """Rows of all experts, one expert's behind the other's, and their weights."""

    shape: MoEShape
    counts: tuple[int, ...]
    arch: str
    layer: Layer
    x: torch.Tensor
    x_sf: torch.Tensor  # for the reference: UE8M0 per 32, or float32 per 128 of any size
    scales: torch.Tensor | None  # as the format has them

    @property
    def expert_of_row(self) -> torch.Tensor:
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))

    @property
    def numerics(self) -> Numerics:
        shape = self.shape
        return target_of(self.arch).weights_of(shape.weights, shape.token_format).numerics

    def bounds(self, *, on_gpu: bool = False, **more: Any) -> Bounds:
        numerics = self.numerics
        return reference_bounds(
            self.x,
            self.x_sf,
            self.expert_of_row.unsqueeze(1),
            torch.ones(len(self.x), 1),
            self.layer.l1,
            self.layer.l2,
            numerics=numerics,
            sum_bits=numerics.sum_bits if on_gpu else FP32_SUM_BITS,
            **self.layer.biases,
            **more,
        )

    def exact(self, **more: Any) -> torch.Tensor:
        """Of an exact case."""
        return reference_mega_moe(
            self.x,
            self.x_sf,
            self.expert_of_row.unsqueeze(1),
            torch.ones(len(self.x), 1),
            self.layer.l1,
            self.layer.l2,
            numerics=self.numerics,
            **self.layer.biases,
            **more,
        )

    def experts(self, **options: Any) -> GroupedExperts:
        shape = self.shape
        return GroupedExperts(
            shape.num_max_tokens_per_rank,
            shape.hidden,
            shape.intermediate_hidden,
            shape.num_experts,
            weights=shape.weights,
            biases=shape.biases,
            **{
                "arch": self.arch,
                "device": "cpu",
                "token_format": shape.token_format,
                **options,
            },
        )

    def weights(self) -> dict[str, Any]:
        transformed = deep_moe.transform_weights_for_mega_moe(
            self.layer.l1,
            self.layer.l2,
            arch=self.arch,
            weights=self.shape.weights,
            token_format=self.shape.token_format,
        )
        given: dict[str, Any] = {"weights": transformed}
        biases = self.layer.biases_of_rank(0, self.shape, self.arch)
        if biases is not None:
            given |= {"l1_bias": biases[0], "l2_bias": biases[1]}
        return given

    def padded(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x and scales as [experts, num_rows, ..]; what no expert has is not a number."""

        def spread(rows: torch.Tensor) -> torch.Tensor:
            size = (len(self.counts), num_rows, rows.shape[1])
            out = torch.empty(size, dtype=rows.dtype)
            out.view(torch.uint8).fill_(0x7F)
            for part, own in zip(out, rows.split(self.counts), strict=True):
                part[: len(own)] = own
            return out

        return spread(self.x), None if self.scales is None else spread(self.scales)

    def behind_each_other(
        self, alignment: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """x and scales as [rows, ..], each expert's at a multiple of `alignment`, and where."""
        begins, end = [], alignment
        for count in self.counts:
            begins.append(end)
            end += -(-count // alignment) * alignment

        def spread(rows: torch.Tensor) -> torch.Tensor:
            out = torch.empty(end, rows.shape[1], dtype=rows.dtype)
            out.view(torch.uint8).fill_(0x7F)
            for begin, own in zip(begins, rows.split(self.counts), strict=True):
                out[begin : begin + len(own)] = own
            return out

        scales = None if self.scales is None else spread(self.scales)
        return spread(self.x), scales, torch.tensor(begins, dtype=torch.int32)


def random_case(
    arch: str,
    counts: tuple[int, ...] = COUNTS,
    weights: WeightsName = "mxfp4",
    token_format: str | None = None,
    **more: Any,
) -> Case:
    token_format = token_format or target_of(arch).default_tokens(weights)
    in_products = token_format_of(token_format).in_products
    shape = shape_of(counts, weights, token_format=in_products, **more)
    scale_block = target_of(arch).weights_of(weights, in_products).scale_block
    layer = random_layer(shape, scale_block=scale_block)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(sum(counts), shape.hidden, generator=generator)
    if token_format == "bf16":
        x = values.bfloat16()
        return Case(shape, counts, arch, layer, x, torch.empty(len(x), 0, dtype=torch.int32), None)
    if token_format_of(token_format).has_token_scale:
        x, x_sf = deep_moe.quantize_nvfp4_tokens(values)
        return Case(shape, counts, arch, layer, x, x_sf, x_sf)
    if token_format == "mxfp8":
        x, x_sf = quantize_mxfp8(values)
        return Case(shape, counts, arch, layer, x, x_sf, x_sf)
    if token_format_of(token_format).has_float_scales:
        is_token = token_format == "fp8_token"
        x, floats = quantize_e4m3_float(values.bfloat16(), whole_tokens=is_token)
        return Case(shape, counts, arch, layer, x, floats, floats)
    x, floats = quantize_e4m3_float(values.bfloat16(), powers_of_two=True)
    scale_bytes = (floats.log2().int() + 127).to(torch.uint8)
    scales = pack_ue8m0(scale_bytes) if token_format == "fp8_128_ue8m0" else floats
    return Case(
        shape, counts, arch, layer, x, pack_ue8m0(scale_bytes.repeat_interleave(4, 1)), scales
    )


def exact_case(
    arch: str, counts: tuple[int, ...] = COUNTS, weights: WeightsName = "mxfp4", **more: Any
) -> Case:
    shape = shape_of(counts, weights, **more)
    scale_block = target_of(arch).weights_of(weights, shape.token_format).scale_block
    tokens = exact_tokens(shape, sum(counts), seed=1)
    scales = tokens.x_sf if shape.tokens.has_scales else None
    layer = exact_layer(shape, seed=1, scale_block=scale_block)
    return Case(shape, counts, arch, layer, tokens.x, tokens.x_sf, scales)


def run_padded(
    case: Case, num_rows: int = 80, own: GroupedExperts | None = None, **options: Any
) -> torch.Tensor:
    """y of each row that an expert has. own: what computes them. AssertionError unless the other
    rows stay as they were."""
    x, scales = case.padded(num_rows)
    count = torch.tensor(case.counts, dtype=torch.int32)
    out = torch.full((*x.shape[:-1], case.shape.hidden), UNTOUCHED, dtype=torch.bfloat16)
    experts = own or case.experts(**options)
    if experts(x, scales, expert_count=count, out=out, **case.weights()) is not out:
        raise AssertionError("y is not in out")
    for part, number in zip(out, case.counts, strict=True):
        _require_untouched(part[number:])
    return torch.cat([part[:number] for part, number in zip(out, case.counts, strict=True)])


def run_behind_each_other(
    case: Case, alignment: int = 8, own: GroupedExperts | None = None, **options: Any
) -> torch.Tensor:
    """The same of the other layout."""
    x, scales, begin = case.behind_each_other(alignment)
    count = torch.tensor(case.counts, dtype=torch.int32)
    out = torch.full((*x.shape[:-1], case.shape.hidden), UNTOUCHED, dtype=torch.bfloat16)
    experts = own or case.experts(**options)
    experts(x, scales, expert_count=count, expert_begin=begin, out=out, **case.weights())
    rows = [
        slice(first, first + number)
        for first, number in zip(begin.tolist(), case.counts, strict=True)
    ]
    y = torch.cat([out[part] for part in rows])
    for part in rows:
        out[part] = UNTOUCHED
    _require_untouched(out)
    return y


def _require_untouched(rows: torch.Tensor) -> None:
    if not (rows == UNTOUCHED).all():
        raise AssertionError("a row of no expert was written")
