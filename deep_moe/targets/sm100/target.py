"""SM100 and SM103: B200 and B300. One kernel, compiled for each by its own name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import deep_moe.heuristics.sm100 as sm100
from deep_moe.heuristics.links import ChipRates
from deep_moe.heuristics.segments import Layout
from deep_moe.heuristics.shape import MoEShape

from ..target import ConfigFields, Target
from .config import Sm100Config
from .weights import Sm100Weights


@dataclass(frozen=True)
class Sm100(Target):
    """The kernel of `tcgen05`, with block scales and tensor memory.

    registers: per thread of dispatch, of loaders and MMA, and of the epilogue.
    """

    registers: tuple[int, int, int] = sm100.USUAL_REGISTERS

    kernel = "sm100"
    config = Sm100Config
    foreign_headers = ("cute/arch/mma_sm100_desc.hpp",)
    cluster_size = sm100.CLUSTER_SIZE
    smem_capacity = sm100.SMEM_CAPACITY
    # Products as published of another mega kernel, BF16 taken for half of them, E2M1 for twice as
    # many, reads measured by others, links taken for twice Hopper's.
    rates = ChipRates({"e2m1": 4.8e15, "e4m3": 2.4e15, "bf16": 1.2e15}, 7.1e12, 670e9)
    was_run = False
    heeds_uneven = False  # nothing is known of how fast tiles are there
    overridable = sm100.OVERRIDABLE
    tunable = sm100.TUNABLE
    roles = sm100.ROLES
    packs_e2m1 = True

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
        return sm100.choose_fields(
            shape,
            num_tokens,
            num_sms=num_sms,
            smem_capacity=smem_capacity,
            overrides=overrides,
            registers=self.registers,
            decoded_block_bytes=self._decoded_block_bytes(shape.weights, shape.token_format),
        )

    def candidates(self, shape: MoEShape, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return sm100.candidates(shape, chosen)

    def smem_layout(self, fields: ConfigFields) -> Layout:
        pair = str(fields["weights"]), str(fields["token_format"])
        return sm100.smem_layout(fields, self._decoded_block_bytes(*pair))

    def tmem_layout(self, fields: ConfigFields) -> Layout:
        return sm100.tmem_layout(fields)

    def _decoded_block_bytes(self, weights: str, token_format: str) -> int:
        pair = self.weights_of(weights, token_format)
        assert isinstance(pair, Sm100Weights)
        return pair.decoded_block_bytes

    def warp_roles(self, fields: ConfigFields) -> dict[str, range]:
        return sm100.warp_roles(fields)


SM100A = Sm100("sm_100a", ((10, 0),), "B200, GB200", default_num_sms=148)
# For this name the compiler needs more registers than for the other: in the loaders, and in
# dispatch where the pool is a ring, the most of them beside NVFP4 tokens.
SM103A = Sm100("sm_103a", ((10, 3),), "B300, GB300", default_num_sms=148, registers=(64, 56, 192))

TARGETS = (SM100A, SM103A)
