"""Whether a checkpoint had all experts: vLLM itself counts a tensor as loaded once any expert's
part of it is, and serves what the memory held for the others."""

from __future__ import annotations

from collections.abc import Iterable

from deep_moe.errors import CheckpointError

_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # gate and up, down
ALL_SHARDS = tuple(shard for shards in _SHARDS.values() for shard in shards)


def shards_of(tensor: str) -> tuple[str, ...]:
    """Of a layer's tensor by its name."""
    return _SHARDS[tensor.partition("_")[0]]


class LoadedParts:
    """Parts of a layer's tensors that were loaded: by tensor, shard and local expert."""

    def __init__(self) -> None:
        self._parts: set[tuple[str, str, int]] = set()

    def add(self, tensor: str, shard: str, experts: Iterable[int]) -> None:
        self._parts.update((tensor, shard, expert) for expert in experts)

    def require_all(self, layer: str, tensors: Iterable[str], first: int, num_experts: int) -> None:
        """Raise CheckpointError unless every part of `tensors` is there; then begin anew.

        Of a tensor that was not loaded part by part at all, there is nothing to say: a loader of
        another kind made it, or vLLM itself misses it. first: the id of this rank's first expert,
        for the error.
        """
        parts, self._parts = self._parts, set()
        begun = {tensor for tensor, _, _ in parts}
        for tensor in tensors:
            if tensor not in begun:
                continue
            for shard in shards_of(tensor):
                missing = [i for i in range(num_experts) if (tensor, shard, i) not in parts]
                if missing:
                    ids = ", ".join(str(first + i) for i in missing[:8])
                    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
                    raise CheckpointError(
                        f"{layer}: the checkpoint has no {shard} for {tensor} of experts "
                        f"{ids}{more}, as vLLM places them"
                    )
