"""Random small layers under random schedules in the emulator, with all checks on.

A case follows from one integer, so that naming it repeats a failure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from deep_moe.emulator.machine import SCHEDULES, Schedule
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.choices import divisors

from .comparison import compare
from .reference import NUMERICS, reference_mega_moe
from .synthetic import exact_layer, exact_tokens
from .trial import run_emulated_ranks

# Few shapes and tiles, so that many cases share a compiled kernel.
_SHAPES = ((1, 4, 2, 256, 256), (2, 4, 3, 256, 128), (2, 6, 2, 384, 256), (3, 6, 2, 128, 128))
# Overrides. Few stages, for a small case never comes round the ring of the default. SM90's are of
# the three kinds of main loop: products in pairs, one by one, and a loop for each size of m-block.
_TILES: dict[str, tuple[dict[str, int], ...]] = {
    "sm_100a": (
        {"block_m": 16, "num_stages": 5},
        {"block_m": 64, "num_stages": 2},
        {"block_m": 96, "num_stages": 3},
    ),
    "sm_90a": (
        {"block_m": 16, "num_stages": 5},
        {"block_m": 168, "num_stages": 3},
        {"block_m": 128, "block_m_step": 32, "num_stages": 2},
    ),
}
ARCHS = tuple(_TILES)
_MAX_TOKENS = 64


@dataclass(frozen=True)
class FuzzCase:
    """One call of all ranks on inputs whose result is exact."""

    number: int
    arch: str
    shape: MoEShape
    num_tokens: tuple[int, ...]
    overrides: dict[str, int]
    schedule: Schedule

    @classmethod
    def of(cls, number: int) -> FuzzCase:
        """The case with this number."""
        choose = random.Random(number)
        arch = choose.choice(ARCHS)
        num_ranks, num_experts, num_topk, hidden, intermediate_hidden = choose.choice(_SHAPES)
        shape = MoEShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            intermediate_hidden=intermediate_hidden,
            num_max_tokens_per_rank=_MAX_TOKENS,
        )
        counts = tuple(choose.choice((0, 1, choose.randint(0, 64))) for _ in range(num_ranks))
        tile = choose.choice(_TILES[arch])
        schedule = choose.choice(SCHEDULES)
        wave = choose.choice(divisors(shape.num_experts_per_rank))
        turn = choose.choice((1, wave))
        overrides = {**tile, "num_experts_per_wave": wave, "num_experts_per_turn": turn}
        return cls(number, arch, shape, counts, overrides, schedule)

    def run(self) -> str:
        """What went wrong, "" if nothing."""
        layer = exact_layer(self.shape, seed=1)
        inputs = [
            exact_tokens(self.shape, count, seed=self.number + rank)
            for rank, count in enumerate(self.num_tokens)
        ]
        try:
            outputs = run_emulated_ranks(
                self.shape,
                layer,
                inputs,
                arch=self.arch,
                num_sms=4,
                overrides=self.overrides,
                schedule=self.schedule,
                schedule_seed=self.number,
            )
        except RuntimeError as error:  # the emulator's findings, and waits that ran out
            return str(error)
        for rank, (own, output) in enumerate(zip(inputs, outputs, strict=True)):
            expected = reference_mega_moe(
                own.x,
                own.x_sf,
                own.topk_idx,
                own.topk_weights,
                layer.l1,
                layer.l2,
                numerics=NUMERICS[self.arch],
            )
            result = compare(output.y, expected)
            if not result.is_exact:
                return f"rank {rank}: {result}"
        return ""
