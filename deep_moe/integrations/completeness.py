"""Whether a checkpoint had all experts of a layer. Engines count a tensor as loaded once the part
of any expert is loaded, or do not count at all. For the other experts they serve whatever the
memory held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from deep_moe.errors import CheckpointError

_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # gate and up, down
ALL_SHARDS = tuple(shard for shards in _SHARDS.values() for shard in shards)
_MOST_NAMED = 8  # experts, in one error

Part = tuple[str, str]  # tensor, shard


def layer_of(tensor: str) -> str:
    """w13 or w2, by the name of one of its tensors."""
    return tensor.partition("_")[0]


def shards_of(tensor: str) -> tuple[str, ...]:
    """Of a layer's tensor by its name."""
    return _SHARDS[layer_of(tensor)]


def missing_parts(parts: Collection[Part], tensors: Iterable[str]) -> tuple[Part, ...]:
    """Of one expert's `tensors`, those that are not among `parts`."""
    every = ((tensor, shard) for tensor in tensors for shard in shards_of(tensor))
    return tuple(part for part in every if part not in parts)


def in_words(missing: Mapping[int, tuple[Part, ...]]) -> str:
    """Experts' missing parts, by the experts' ids: those of equal parts together."""
    experts: dict[tuple[Part, ...], list[int]] = {}
    for expert, parts in sorted(missing.items()):
        experts.setdefault(parts, []).append(expert)
    return "; no ".join(f"{_names(parts)} of {_ids(of)}" for parts, of in experts.items())


class LoadedParts:
    """Parts of a layer's tensors that were loaded, of each local expert. Threads may add some at
    the same time."""

    def __init__(self) -> None:
        self._parts: dict[int, set[Part]] = {}

    def add(self, tensor: str, shard: str, experts: Iterable[int]) -> None:
        for expert in experts:
            self._parts.setdefault(expert, set()).add((tensor, shard))

    def begun(self, tensors: Iterable[str]) -> list[str]:
        """Those of `tensors` that any part was loaded of. Of the others a loader of another kind
        may have made some."""
        begun = {tensor for parts in self._parts.values() for tensor, _ in parts}
        return [tensor for tensor in tensors if tensor in begun]

    def require_all(
        self, layer: str, tensors: Collection[str], expert_ids: Sequence[int], note: str = ""
    ) -> None:
        """Raise CheckpointError unless every part of `tensors` is there; then begin anew.

        expert_ids: by local expert, for the error; note: what else it says of them.
        """
        loaded, self._parts = self._parts, {}
        missing = {
            expert: parts
            for i, expert in enumerate(expert_ids)
            if (parts := missing_parts(loaded.get(i, ()), tensors))
        }
        if missing:
            raise CheckpointError(f"{layer}: the checkpoint has no {in_words(missing)}{note}")


def _names(parts: tuple[Part, ...]) -> str:
    shards: dict[str, list[str]] = {}
    for tensor, shard in parts:
        shards.setdefault(tensor, []).append(shard)
    return ", ".join(f"{', '.join(of)} for {tensor}" for tensor, of in shards.items())


def _ids(experts: list[int]) -> str:
    ids = ", ".join(map(str, experts[:_MOST_NAMED]))
    more = len(experts) - _MOST_NAMED
    return f"experts {ids}" + (f" and {more} more" if more > 0 else "")
