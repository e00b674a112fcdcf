"""One rank's part of a layer on the rank's device, beside its reference: what the tests of real
hardware share. On a CPU the same runs in the emulator, one process for each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

import deep_moe
from deep_moe.formats.numerics import FP32_SUM_BITS, Numerics
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.targets.target import TargetWeights
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Layer, Tokens, exact_layer, random_layer
from deep_moe.weights.layers import LayerWeights
from tests.layer.rank_pool import Rank


def this_gpu() -> Rank:
    """The current GPU as the only rank."""
    return Rank(0, 1, None, torch.device("cuda", torch.cuda.current_device()))


@lru_cache(maxsize=4)
def make_layer(
    shape: MoEShape, exact: bool, sum_bits: int, scale_block: tuple[int, int], seed: int = 0
) -> Layer:
    """All ranks' weights, the same in every process."""
    if exact:
        return exact_layer(shape, seed=seed, sum_bits=sum_bits, scale_block=scale_block)
    return random_layer(shape, seed=seed, scale_block=scale_block)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare NaN and the sign of zero too."""
    return tensor.view(torch.uint8)


class RankLayer:
    """A rank's buffer and weights. `call` runs the kernel once; all ranks must."""

    def __init__(
        self,
        rank: Rank,
        shape: MoEShape,
        *,
        exact: bool,
        seed: int = 0,
        buffer: SymmBuffer | None = None,
    ) -> None:
        """seed: of the weights. buffer: of the same shape, to share it with another layer."""
        self.rank = rank
        self.shape = shape
        self.exact = exact
        self.buffer = make_buffer(rank, shape) if buffer is None else buffer
        scale_block = self.target_weights.scale_block
        layer = make_layer(shape, exact, self.numerics.sum_bits, scale_block, seed)
        on_device: dict[str, Any] = {
            name: LayerWeights(*(t.to(rank.device) for t in getattr(layer, name)))
            for name in ("l1", "l2")
        }
        for name, bias in layer.biases.items():
            on_device[name] = bias if bias is None else bias.to(rank.device)
        self.layer = replace(
            layer,
            **on_device,
        )
        self.weights = deep_moe.transform_weights_for_mega_moe(
            *self.layer.of_rank(rank.idx, shape.num_ranks),
            arch=rank.arch,
            weights=shape.weights,
            token_format=shape.token_format,
        )
        biases = layer.biases_of_rank(rank.idx, shape, rank.arch)
        self.biases = (
            {}
            if biases is None
            else {
                "l1_bias": biases.l1.to(rank.device),
                "l2_bias": biases.l2.to(rank.device),
            }
        )
        # What an emulated call takes beyond a GPU's: 2 CTAs and no look-out for races are fast.
        self.options: dict[str, Any] = (
            {} if rank.is_gpu else {"arch": rank.arch, "num_sms": 2, "checked": False}
        )

    @property
    def target_weights(self) -> TargetWeights:
        return target_of(self.rank.arch).weights_of(self.shape.weights, self.shape.token_format)

    @property
    def numerics(self) -> Numerics:
        return self.target_weights.numerics

    def new_y(self, num_tokens: int) -> torch.Tensor:
        """An output full of NaN, so that a row left out is noticed."""
        return torch.full(
            (num_tokens, self.shape.hidden),
            torch.nan,
            dtype=torch.bfloat16,
            device=self.rank.device,
        )

    def launch(self, y: torch.Tensor, **options: Any) -> None:
        """With the inputs that the buffer holds; does not wait for a GPU."""
        deep_moe.mega_moe(
            y, self.weights, self.buffer, **{**self.options, **self.biases, **options}
        )

    def finish(self) -> None:
        """Wait for the device, and raise what the kernel reported."""
        self.rank.synchronize()
        self.buffer.raise_if_failed()

    def call(self, tokens: Tokens, **options: Any) -> torch.Tensor:
        """y."""
        fill_inputs(self.buffer, tokens)
        y = self.new_y(tokens.num_tokens)
        self.launch(y, **options)
        self.finish()
        return y

    def expected(self, tokens: Tokens, **activation: Any) -> torch.Tensor:
        device = self.rank.device
        return reference_mega_moe(
            tokens.x.to(device),
            tokens.x_sf.to(device),
            tokens.topk_idx.to(device),
            tokens.topk_weights.to(device),
            self.layer.l1,
            self.layer.l2,
            num_shared_experts=self.shape.num_shared_experts,
            **self.layer.biases,
            numerics=self.numerics,
            **activation,
        )

    def compare(self, y: torch.Tensor, tokens: Tokens, **activation: Any) -> Comparison:
        """Bit for bit where the layer is exact, otherwise within what rounding explains.
        activation: of the call, `activation` and `activation_clamp`."""
        if self.exact:
            return compare(y, self.expected(tokens, **activation))
        device = self.rank.device
        bounds = reference_bounds(
            tokens.x.to(device),
            tokens.x_sf.to(device),
            tokens.topk_idx.to(device),
            tokens.topk_weights.to(device),
            self.layer.l1,
            self.layer.l2,
            num_shared_experts=self.shape.num_shared_experts,
            **self.layer.biases,
            numerics=self.numerics,
            sum_bits=self.sum_bits,
            **activation,
        )
        return compare(y, bounds)

    def compare_call(self, tokens: Tokens, **options: Any) -> Comparison:
        y = self.call(tokens, **options)
        names = {"activation", "activation_clamp"} & options.keys()
        return self.compare(y, tokens, **{name: options[name] for name in names})

    @property
    def sum_bits(self) -> int:
        """The emulator's sums are exact."""
        return self.numerics.sum_bits if self.rank.is_gpu else FP32_SUM_BITS


def make_buffer(rank: Rank, shape: MoEShape) -> SymmBuffer:
    return deep_moe.get_symm_buffer_for_mega_moe(
        rank.group,
        **shape.buffer_arguments,
        device=rank.device,
    )
