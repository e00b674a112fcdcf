"""FP8 weights, on whatever target: laid out as they are, or rounded to scales that it applies."""

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

    @abstractmethod
    def _lay_out(
        self,
        l1: LayerWeights,
        l2: LayerWeights,
        out: MegaMoEWeights,
        l1_moved: Moved | None,
        l2_moved: Moved | None,
    ) -> None:
        """Expert by expert, for their scales may have to be made anew. moved: where to count how
        far weights move; None: they may not."""
