"""One layer on emulated ranks beside its reference: what the kernel tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_moe import jit
from deep_moe.buffer import SymmBuffer
from deep_moe.comparison import Comparison, compare
from deep_moe.emulated_ranks import EmulatedRanks
from deep_moe.formats import dequantize_e4m3_ue8m0, quantize_e4m3_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig
from deep_moe.jit.kernel_args import PrepareInputsArgs
from deep_moe.jit.launch import MemoryRegion, RankLaunch, run_emulated
from deep_moe.mega_moe import EMULATED_NUM_SMS, CallOptions, finish_emulated, prepare_launch
from deep_moe.reference import NUMERICS, reference_mega_moe
from deep_moe.synthetic import Layer, Tokens
from deep_moe.weights import transform_weights_for_mega_moe

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

# Overrides: SM90's tiles that are fitted to each expert's tokens, blocks of 64, 96 or 128 rows.
FITTED = {"block_m": 128, "block_m_step": 32}


class LayerCase:
    """The ranks of one layer with their weights; `call` runs the kernel once on all of them."""

    def __init__(self, shape: MoEShape, layer: Layer, *, arch: str = "sm_100a") -> None:
        self.shape = shape
        self.layer = layer
        self.arch = arch
        self.ranks = EmulatedRanks(
            shape.num_ranks,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
        )
        self.weights = [
            transform_weights_for_mega_moe(*layer.of_rank(rank, shape.num_ranks), arch=arch)
            for rank in range(shape.num_ranks)
        ]

    def call(self, tokens: Sequence[Tokens], **options: Any) -> list[torch.Tensor]:
        """Each rank's y. It is filled with NaN before, so that a row left out is noticed."""
        ys = []
        for buffer, mine in zip(self.ranks.buffers, tokens, strict=True):
            n = mine.num_tokens
            buffer.x[:n].copy_(mine.x)
            buffer.x_sf[:n].copy_(mine.x_sf)
            buffer.topk_idx[:n].copy_(mine.topk_idx)
            buffer.topk_weights[:n].copy_(mine.topk_weights)
            ys.append(self._empty_y(n))
        self.ranks.call(ys, self.weights, arch=self.arch, **options)
        return ys

    def _empty_y(self, num_tokens: int) -> torch.Tensor:
        return torch.full((num_tokens, self.shape.hidden), torch.nan, dtype=torch.bfloat16)

    def expected(
        self, tokens: Sequence[Tokens], *, activation_clamp: float | None = None
    ) -> list[torch.Tensor]:
        return [
            reference_mega_moe(
                mine.x,
                mine.x_sf,
                mine.topk_idx,
                mine.topk_weights,
                self.layer.l1,
                self.layer.l2,
                activation_clamp=activation_clamp,
                numerics=NUMERICS[self.arch],
            )
            for mine in tokens
        ]

    def compare_call(
        self, tokens: Sequence[Tokens], *, activation_clamp: float | None = None, **options: Any
    ) -> list[Comparison]:
        """Call, and each rank's distance to the reference."""
        ys = self.call(tokens, activation_clamp=activation_clamp, **options)
        expected = self.expected(tokens, activation_clamp=activation_clamp)
        return [compare(y, e) for y, e in zip(ys, expected, strict=True)]

    def compare_calls_in_a_row(
        self,
        calls: Sequence[Sequence[Tokens]],
        *,
        num_sms: Sequence[int] = (EMULATED_NUM_SMS,),
        overrides: Mapping[str, int] | None = None,
        schedule: Schedule = "random",
        schedule_seed: int = 0,
    ) -> list[list[Comparison]]:
        """What a model does: on each rank, with no look at the others, `prepare_inputs` and a call
        for each of `calls`, which names every rank's tokens. Their distances to the reference.

        num_sms: of the calls, in turn.
        """
        stats = [
            torch.zeros(self.shape.num_experts_per_rank, dtype=torch.int32)
            for _ in self.ranks.buffers
        ]
        launches: list[RankLaunch] = []
        xs, ys, expected = [], [], []  # kept until all is over: a launch has only addresses
        for call_idx, tokens in enumerate(calls):
            options = CallOptions(
                arch=self.arch,
                num_sms=num_sms[call_idx % len(num_sms)],
                overrides=tuple((overrides or {}).items()),
            )
            # As a model has them; quantized, the same numbers may have other codes and scales.
            xs.append([dequantize_e4m3_ue8m0(mine.x, mine.x_sf).bfloat16() for mine in tokens])
            ys.append([self._empty_y(mine.num_tokens) for mine in tokens])
            expected.append(
                self.expected(
                    [
                        Tokens(*quantize_e4m3_ue8m0(values), mine.topk_idx, mine.topk_weights)
                        for values, mine in zip(xs[-1], tokens, strict=True)
                    ]
                )
            )
            for rank, buffer in enumerate(self.ranks.buffers):
                if tokens[rank].num_tokens:
                    launches.append(
                        preparation_launch(xs[-1][rank], tokens[rank], buffer, self.arch)
                    )
                launches.append(
                    prepare_launch(ys[-1][rank], *self.weights[rank], buffer, stats[rank], options)
                )
        run_emulated(launches, seed=schedule_seed, schedule=schedule, checks=True, clock="virtual")
        for buffer in self.ranks.buffers:
            finish_emulated(buffer, options)
        self._check_what_calls_leave(calls, stats)
        return [
            [compare(y, e) for y, e in zip(*of_ranks, strict=True)]
            for of_ranks in zip(ys, expected, strict=True)
        ]

    def _check_what_calls_leave(
        self, calls: Sequence[Sequence[Tokens]], stats: Sequence[torch.Tensor]
    ) -> None:
        """Clean control words, and what each expert has received."""
        for buffer in self.ranks.buffers:
            layout = buffer.layout
            words = buffer.memory.tensor[
                layout.mark("zeroed_begin") : layout.mark("zeroed_end")
            ].tolist()
            assert not any(words), buffer.rank
        slots = torch.cat([mine.topk_idx.flatten() for tokens in calls for mine in tokens])
        received = torch.bincount(slots[slots >= 0], minlength=self.shape.num_experts)
        assert torch.cat(list(stats)).tolist() == received.tolist()


def preparation_launch(
    x: torch.Tensor, tokens: Tokens, buffer: SymmBuffer, arch: str
) -> RankLaunch:
    """The launch of `prepare_inputs` for one rank, which that function runs by itself."""
    config = PrepareInputsConfig(arch=arch)
    num_chunks = config.num_chunks(x.numel())
    args = PrepareInputsArgs(
        x.data_ptr(),
        tokens.topk_idx.data_ptr(),
        tokens.topk_weights.data_ptr(),
        buffer.x.data_ptr(),
        buffer.x_sf.data_ptr(),
        buffer.topk_idx.data_ptr(),
        buffer.topk_weights.data_ptr(),
        num_chunks,
        tokens.topk_idx.numel(),
    )
    # The call that follows names the memory that is written.
    read = {"x": x, "topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights}
    memory = tuple(
        MemoryRegion.of_tensor(name, tensor, is_writable=False) for name, tensor in read.items()
    )
    kernel = jit.build_prepare_inputs(config)
    num_ctas = config.num_ctas(num_chunks)
    return RankLaunch(buffer.rank, kernel, num_ctas, config.num_threads, 0, args, memory)
