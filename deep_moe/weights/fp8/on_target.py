"""FP8 weights on any target: laid out as they are, or rounded to scales that the target applies."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from deep_moe.targets.target import TargetWeights

if TYPE_CHECKING:
    from deep_moe.errors import RequantizationWarning

    from ..layers import LayerWeights, MegaMoEWeights
    from .requantizing import Moved


class Fp8OnTarget(TargetWeights):
    """scale_words: the scales that the kernel applies, for warnings."""

    weights = "fp8"
    scale_words: ClassVar[str]

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        self._lay_out(l1, l2, out, None, None)

    def requantize(
        self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights
    ) -> list[RequantizationWarning]:
        from .requantizing import Moved

        moved = {"l1_weights": Moved(), "l2_weights": Moved()}
        self._lay_out(l1, l2, out, *moved.values())
        return [own.warning(name, self.scale_words) for name, own in moved.items() if own]

    def _lay_out(
        self,
        l1: LayerWeights,
        l2: LayerWeights,
        out: MegaMoEWeights,
        l1_moved: Moved | None,
        l2_moved: Moved | None,
    ) -> None:
        """Expert by expert, for their scales may have to be made anew."""
        for expert_idx in range(l1.weight.shape[0]):
            self.lay_out_expert(
                self.with_own_scales("l1_weights", l1, expert_idx, l1_moved),
                self.with_own_scales("l2_weights", l2, expert_idx, l2_moved),
                out.expert(expert_idx),
            )

    @abstractmethod
    def with_own_scales(
        self, name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None
    ) -> LayerWeights:
        """One expert's weights with the scales that the kernel applies (requantizing.py). moved:
        where to count how far weights move; None: they may not."""

    @abstractmethod
    def lay_out_expert(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        """What `with_own_scales` gives of both layers of an expert, into its part of the result."""
