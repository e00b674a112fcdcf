"""SM90: H100 and H200."""

from __future__ import annotations

from collections.abc import Mapping

from deep_moe.heuristics import sm90
from deep_moe.heuristics.links import ChipRates
from deep_moe.heuristics.segments import Layout
from deep_moe.heuristics.shape import MoEShape
from deep_moe.heuristics.sm90_tiles import WeightKind

from ..target import ConfigFields, Target
from .config import Sm90Config
from .weights import Sm90Weights


class Sm90(Target):
    """The kernel whose warps decode weights for `wgmma`."""

    kernel = "sm90"
    config = Sm90Config
    cluster_size = min(sm90.CLUSTER_SIZES)
    smem_capacity = sm90.SMEM_CAPACITY
    # An H100's calls of 8192 tokens, weights that it streams, and stores of 128 bytes and more to
    # three peers (NV18; benchmarks/LOG.md).
    rates = ChipRates({"e4m3": 1.15e15, "bf16": 0.62e15}, 3.0e12, 335e9)
    was_run = True
    heeds_uneven = True
    overridable = sm90.OVERRIDABLE
    tunable = sm90.TUNABLE
    roles = sm90.ROLES
    has_grouped_product = True

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
        return sm90.choose_fields(
            shape,
            num_tokens,
            self._kind(shape.weights, shape.token_format),
            is_uneven=is_uneven,
            num_sms=num_sms,
            smem_capacity=smem_capacity,
            overrides=overrides,
        )

    def candidates(self, shape: MoEShape, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return sm90.candidates(shape, chosen, self._kind(shape.weights, shape.token_format))

    def smem_layout(self, fields: ConfigFields) -> Layout:
        kind = self._kind(str(fields["weights"]), str(fields["token_format"]))
        return sm90.smem_layout(fields, kind)

    def tmem_layout(self, fields: ConfigFields) -> None:
        """SM90 has no tensor memory."""

    def _kind(self, weights: str, token_format: str) -> WeightKind:
        pair = self.weights_of(weights, token_format)
        assert isinstance(pair, Sm90Weights)
        return pair.kind

    def warp_roles(self, fields: ConfigFields) -> dict[str, range]:
        return sm90.warp_roles(fields)


SM90A = Sm90("sm_90a", ((9, 0),), "H100, H200", default_num_sms=132)

TARGETS = (SM90A,)
