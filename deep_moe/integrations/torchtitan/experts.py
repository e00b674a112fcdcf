"""torchtitan's `RoutedExperts` with our layer in place of its dispatcher and its experts.

Parameters, their names and shardings, and checkpoints stay torchtitan's: the module in which the
weights lie is its own, only nobody calls it. So FSDP, expert parallelism and tensor parallelism of
experts shard them as they do without us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine_version import require_version

# The versions whose interfaces this was written for.
OLDEST, TOO_NEW = (0, 3), (0, 4)
require_version("torchtitan", OLDEST, TOO_NEW)

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import (  # noqa: E402
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)

from deep_moe.training.functional import moe  # noqa: E402

__all__ = ["DeepMoERoutedExperts", "routed_experts"]


class DeepMoERoutedExperts(RoutedExperts):  # type: ignore[misc]
    """torchtitan's routed experts, computed by `deep_moe.moe`.

    Ranks are those of torchtitan's expert-parallel mesh. Values are BF16, as torchtitan's own
    experts multiply them; the result has the tokens' dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """Options are those of `deep_moe.moe`."""

        precision: str = "bf16"
        recompute: bool = False
        max_recv_slots: int | None = None
        keep_received: bool = False
        quantize_kept: bool = False

    def __init__(self, config: Config) -> None:
        _refuse_others("inner_experts", config.inner_experts, GroupedExperts)
        _refuse_others(
            "token_dispatcher",
            config.token_dispatcher,
            LocalTokenDispatcher,
            AllToAllTokenDispatcher,
        )
        super().__init__(config)
        self._options: dict[str, Any] = {
            "precision": config.precision,
            "recompute": config.recompute,
            "max_recv_slots": config.max_recv_slots,
            "keep_received": config.keep_received,
            "quantize_kept": config.quantize_kept,
        }

    # torchtitan finds what it shards by the names of these parameters.
    def forward(
        self,
        x_BLD: torch.Tensor,  # noqa: N803
        topk_scores_BLK: torch.Tensor,  # noqa: N803
        topk_expert_ids_BLK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """torchtitan's: x_BLD [batch, length, hidden], scores and ids [batch, length, topk]. The
        counts of tokens [experts] are not needed."""
        experts = self.inner_experts
        gate, up, down = (
            _local(weight).bfloat16().transpose(1, 2)
            for weight in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
        )
        num_batches, _length, hidden = x_BLD.shape
        out = moe(
            x_BLD.reshape(-1, hidden).bfloat16().contiguous(),
            topk_expert_ids_BLK.flatten(0, 1).contiguous(),
            topk_scores_BLK.flatten(0, 1).float().contiguous(),
            gate,
            up,
            down,
            group=self._group(),
            **self._options,
        )
        # The length is left open, as torchtitan leaves it for sharded outputs.
        return out.to(x_BLD.dtype).view(num_batches, -1, hidden)

    def _group(self) -> Any:
        """The process group of the ranks that share the experts; None for one."""
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _refuse_others(name: str, config: Any, *allowed: type) -> None:
    """Subclasses as well: they compute something else."""
    kind = type(config)._owner
    if kind not in allowed:
        names = " or ".join(one.__name__ for one in allowed)
        raise ValueError(f"{name} must be {names} with deep_moe's experts; got {kind.__name__}")


@override(  # type: ignore[untyped-decorator]
    target=RoutedExperts.Config,
    exact=True,
    description="Routed experts by deep_moe, dispatch and combine included.",
)
def routed_experts(cfg: RoutedExperts.Config, **options: Any) -> DeepMoERoutedExperts.Config:
    """Put our layer behind the router of a model's mixture-of-experts layers.

    Args:
        cfg: torchtitan's config of a layer's routed experts.
        options: `precision`, `recompute`, `max_recv_slots`, `keep_received` and `quantize_kept`, as
            of `deep_moe.moe`.

    Raises:
        ValueError: there is no such option. When a layer is built: its experts or its dispatcher
            are of another kind than torchtitan's `GroupedExperts` and its local or all-to-all
            dispatcher; the text names both.
    """
    return derive(cfg, DeepMoERoutedExperts.Config, **options)
