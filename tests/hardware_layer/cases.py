"""Layers and tokens that are run on a GPU once, and in the emulator ever after.

Their inputs must be the same on every machine and with every version of every library. So they are
made of the digest of a name and of arithmetic that rounds nowhere, not of a random generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deep_moe.formats.block_scaled import quantize_e2m1_ue8m0, quantize_e4m3_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Layer, Tokens
from deep_moe.weights.layers import LayerWeights


@dataclass(frozen=True)
class RecordedCase:
    """One call. tokens: of each rank. unused_slots: one in so many slots is -1, 0 for none.
    max_spread: group scales of a token differ by up to 2^this more than chance makes them.
    block_sizes: log2 of how much larger each 128 intermediate values are than usual."""

    name: str
    tokens: tuple[int, ...]
    num_experts: int = 4
    num_topk: int = 2
    hidden: int = 256
    intermediate_hidden: int = 128
    unused_slots: int = 0
    max_spread: int = 0
    block_sizes: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> MoEShape:
        return MoEShape(
            num_ranks=len(self.tokens),
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            intermediate_hidden=self.intermediate_hidden,
            num_max_tokens_per_rank=max(self.tokens),
        )

    def layer(self) -> Layer:
        """Weights of all ranks."""
        hidden, intermediate = self.hidden, self.intermediate_hidden
        gate_up = self._weights("l1", 2 * intermediate, hidden)
        down = self._weights("l2", hidden, intermediate)
        for block, size in enumerate(self.block_sizes):
            values = slice(128 * block, 128 * (block + 1))
            gate_up[:, intermediate:][:, values] *= np.float32(2.0**size)
            down[:, :, values] *= np.float32(2.0**-size)
        return Layer(self._quantized(gate_up), self._quantized(down))

    def rank_tokens(self, rank: int) -> Tokens:
        num_tokens, shape = self.tokens[rank], self.shape
        label = f"tokens of rank {rank}"
        x = self._normal(f"{label}: values", (num_tokens, shape.hidden))
        if self.max_spread:
            groups = (num_tokens, shape.hidden // 32)
            exponents = self._bytes(f"{label}: sizes", groups).astype(np.int32) % (
                self.max_spread + 1
            )
            x = np.ldexp(x, np.repeat(-exponents, 32, axis=1))
        order = self._bytes(f"{label}: experts", (num_tokens, shape.num_experts, 4))
        chosen = order.view("<u4")[..., 0].argsort(axis=1, kind="stable")[:, : shape.num_topk]
        topk_idx = chosen.astype(np.int64)
        if self.unused_slots:
            dice = self._bytes(f"{label}: unused slots", topk_idx.shape)
            topk_idx[dice % self.unused_slots == 0] = -1
        weights = self._bytes(f"{label}: weights", topk_idx.shape).astype(np.float32) + 1
        return Tokens(
            *quantize_e4m3_ue8m0(torch.from_numpy(x)),
            torch.from_numpy(topk_idx),
            torch.from_numpy(weights / 256),
        )

    def digest(self) -> str:
        """Of all inputs."""
        layer = self.layer()
        tokens = [self.rank_tokens(rank) for rank in range(len(self.tokens))]
        tensors = [*layer.l1, *layer.l2]
        for own in tokens:
            tensors += [own.x, own.x_sf, own.topk_idx, own.topk_weights]
        sums = hashlib.sha256()
        for tensor in tensors:
            if tensor.numel():
                sums.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return sums.hexdigest()

    def _weights(self, label: str, num_rows: int, num_columns: int) -> np.ndarray:
        """[experts, rows, columns], so that outputs are about as large as inputs."""
        size_log2 = round(math.log2(num_columns) / 2)
        values = self._normal(label, (self.num_experts, num_rows, num_columns))
        return np.ldexp(values, -size_log2)

    def _quantized(self, values: np.ndarray) -> LayerWeights:
        weight, sf = quantize_e2m1_ue8m0(torch.from_numpy(values).flatten(0, 1))
        return LayerWeights(*(part.unflatten(0, values.shape[:2]) for part in (weight, sf)))

    def _normal(self, label: str, shape: tuple[int, ...]) -> np.ndarray:
        """Float32 of about normal distribution and size 1: sums of four bytes, over 128."""
        dice = self._bytes(label, (*shape, 4)).astype(np.int32).sum(axis=-1) - 510
        return dice.astype(np.float32) / 128

    def _bytes(self, label: str, shape: tuple[int, ...]) -> np.ndarray:
        name = f"{self.name}: {label}".encode()
        digest = hashlib.shake_256(name).digest(math.prod(shape))
        return np.frombuffer(digest, np.uint8).reshape(shape)


CASES = (
    RecordedCase("small", tokens=(24,)),
    RecordedCase("one_token", tokens=(1,), hidden=512),
    RecordedCase("unused_slots", tokens=(20,), num_topk=3, unused_slots=4, hidden=384),
    RecordedCase("odd_blocks", tokens=(12,), hidden=5 * 128, intermediate_hidden=3 * 128),
    # The longest sums of real layers.
    RecordedCase("long_linear1", tokens=(3,), num_experts=2, hidden=7168),
    RecordedCase("long_linear2", tokens=(5,), num_experts=2, intermediate_hidden=3072),
    RecordedCase("wide_tile", tokens=(130,), num_experts=1, num_topk=1),
    RecordedCase("spread_scales", tokens=(16,), hidden=512, max_spread=12),
    RecordedCase(
        "different_blocks", tokens=(14,), intermediate_hidden=512, block_sizes=(-9, 11, 0, -3)
    ),
    RecordedCase("clamp", tokens=(16,), options={"activation_clamp": 0.5}),
    RecordedCase("precise_silu", tokens=(16,), options={"fast_math": False}),
    RecordedCase("two_ranks", tokens=(17, 9), num_topk=3, unused_slots=6),
    RecordedCase("idle_rank", tokens=(0, 12), hidden=384),
)
