"""Several ranks of a layer of the split path in one process, run together by one emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from deep_moe.fused.closing import Closing
from deep_moe.fused.emulated_ranks import run_ranks
from deep_moe.fused.rank_buffer import used
from deep_moe.fused.symm_memory import private_host_memories
from deep_moe.jit.launch import RankLaunch

from .kernels import Launch
from .split_layer import SplitLayer

if TYPE_CHECKING:
    from deep_moe.emulator.machine import Schedule

LayerT = TypeVar("LayerT", bound=SplitLayer)
Result = TypeVar("Result")


class EmulatedLayers(Closing, Generic[LayerT]):
    """layers: each rank's own."""

    layers: list[LayerT]

    def _make(self, layer: type[LayerT], shape: Any, options: dict[str, Any]) -> None:
        """A layer of each rank of the shape, with the same options."""
        self.shape = shape
        memories = private_host_memories(shape.num_ranks, shape.buffer_layout.num_bytes)
        self.layers = [layer.of_memory(shape, memory, **options) for memory in memories]

    def run(
        self,
        launches: Sequence[Sequence[Launch]],
        *,
        ranks: Sequence[int] | None = None,
        schedule: Schedule = "random",
    ) -> None:
        """Run prepared kernels: of each rank one after the other, of different ranks at once."""
        taking_part = self._taking_part(ranks)
        buffers = [layer.buffer for layer in self.layers]
        settings = self.layers[0].settings
        with used(buffers):
            emulated = [
                launch
                for rank, queue in zip(taking_part, launches, strict=True)
                for launch in self._emulated(rank, queue)
            ]
            run_ranks(
                buffers,
                emulated,
                taking_part,
                seed=settings.schedule_seed,
                schedule=schedule,
                checked=settings.checked,
            )

    def _run_all(
        self,
        prepare: Callable[[LayerT, int], tuple[Launch, Result]],
        ranks: Sequence[int] | None,
        schedule: Schedule,
    ) -> list[Result]:
        """What the ranks that take part prepare, the i-th of them as prepare(layer, i)."""
        taking_part = self._taking_part(ranks)
        prepared = [prepare(self.layers[rank], i) for i, rank in enumerate(taking_part)]
        self.run([[launch] for launch, _ in prepared], ranks=taking_part, schedule=schedule)
        return [result for _, result in prepared]

    def _emulated(self, rank: int, queue: Sequence[Launch]) -> list[RankLaunch]:
        """One rank's. What one of its kernels writes and another one reads is one region."""
        layer = self.layers[rank]
        emulated = [launch.emulated(rank, layer.memory_regions(launch)) for launch in queue]
        regions = {region.address: region for launch in emulated for region in launch.memory}
        for launch in emulated:
            for region in launch.memory:
                if region.is_writable:
                    regions[region.address] = region
        memory = tuple(regions.values())
        return [replace(launch, memory=memory) for launch in emulated]

    def reset(self) -> None:
        """Make all layers usable again after a failed call."""
        for layer in self.layers:
            layer.reset()

    def close(self) -> None:
        """Give the memory back."""
        for layer in self.layers:
            layer.close()

    def _taking_part(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.layers)) if ranks is None else ranks
