"""Which parts of a layer a checkpoint lacked, by expert."""

from __future__ import annotations

import re

import pytest

from deep_moe.errors import CheckpointError
from deep_moe.integrations.completeness import LoadedParts, in_words, missing_parts

TENSORS = ("w13_weight", "w2_weight")
IDS = range(4, 8)  # of four local experts


def loaded(*leave_out: tuple[str, str, int]) -> LoadedParts:
    parts = LoadedParts()
    for tensor, shards in (("w13_weight", ("w1", "w3")), ("w2_weight", ("w2",))):
        for shard in shards:
            parts.add(tensor, shard, [i for i in range(4) if (tensor, shard, i) not in leave_out])
    return parts


def test_all_parts_are_enough():
    loaded().require_all("layer", TENSORS, IDS)


def test_missing_experts_are_named_by_their_global_ids():
    parts = loaded(("w13_weight", "w3", 2))
    words = "layer: the checkpoint has no w3 for w13_weight of experts 6, as it was"
    with pytest.raises(CheckpointError, match=f"^{re.escape(words)}$"):
        parts.require_all("layer", TENSORS, IDS, ", as it was")


def test_experts_that_lack_the_same_are_named_together():
    left_out = [("w13_weight", "w1", 0), ("w13_weight", "w3", 0), ("w2_weight", "w2", 0)]
    parts = loaded(*left_out, ("w2_weight", "w2", 1), ("w2_weight", "w2", 3))
    words = "no w1, w3 for w13_weight, w2 for w2_weight of experts 4; no w2 for w2_weight of "
    with pytest.raises(CheckpointError, match=f"{words}experts 5, 7$"):
        parts.require_all("layer", TENSORS, IDS)


def test_of_many_experts_some_are_named():
    missing = dict.fromkeys(range(12), missing_parts((), ["w2_weight"]))
    assert in_words(missing) == "w2 for w2_weight of experts 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def test_after_a_complaint_it_begins_anew():
    parts = loaded(("w13_weight", "w3", 2))
    with pytest.raises(CheckpointError):
        parts.require_all("layer", TENSORS, IDS)
    assert parts.begun(TENSORS) == []


def test_a_tensor_that_no_part_was_loaded_of_is_not_begun():
    parts = LoadedParts()
    parts.add("w2_weight", "w2", [3])
    assert parts.begun(TENSORS) == ["w2_weight"]
