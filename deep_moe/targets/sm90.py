"""SM90: H100 and H200."""

from __future__ import annotations

from collections.abc import Mapping

from deep_moe.heuristics import sm90
from deep_moe.heuristics.segments import Layout
from deep_moe.heuristics.shape import MoEShape

from .sm90_bf16 import Sm90Bf16
from .sm90_fp8 import Sm90Fp8
from .sm90_mxfp4 import Sm90Mxfp4
from .sm90_mxfp4_bf16 import Sm90Mxfp4Bf16
from .target import ConfigFields, Target


class Sm90(Target):
    """The kernel whose warps decode weights for `wgmma`."""

    kernel = "sm90"
    cluster_size = min(sm90.CLUSTER_SIZES)
    smem_capacity = sm90.SMEM_CAPACITY
    was_run = True
    heeds_uneven = True
    overridable = sm90.OVERRIDABLE
    tunable = sm90.TUNABLE
    roles = sm90.ROLES
    weights = (Sm90Mxfp4(), Sm90Fp8(), Sm90Bf16(), Sm90Mxfp4Bf16())

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
            is_uneven=is_uneven,
            num_sms=num_sms,
            smem_capacity=smem_capacity,
            overrides=overrides,
        )

    def candidates(self, shape: MoEShape, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return sm90.candidates(shape, chosen)

    def smem_layout(self, fields: ConfigFields) -> Layout:
        return sm90.smem_layout(fields)

    def tmem_layout(self, fields: ConfigFields) -> None:
        """SM90 has no tensor memory."""

    def warp_roles(self, fields: ConfigFields) -> dict[str, range]:
        return sm90.warp_roles(fields)


SM90A = Sm90("sm_90a", ((9, 0),), "H100, H200", default_num_sms=132)
