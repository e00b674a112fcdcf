"""Fuzz cases of a layer over several domains: what is wrong in a case is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.trial.synthetic import exact_tokens
from deep_moe.trial.two_level_fuzzing import TwoLevelCase

from .fuzz_cases import with_values


def test_rooms_are_those_of_the_fullest_part() -> None:
    """Of two domains of two ranks, whose tokens go through in chunks of two."""
    case = with_values(TwoLevelCase, shape=(2, 4, 8, 3, 256, 96), sizes="fixed")
    case = replace(case, values=case.values | {"chunks": 2})
    calls = [exact_tokens(case.shape, 4) for _ in range(4)]
    # Experts 0 to 3 are of the first domain. Its rank 1 gets these of rank 3.
    ids = torch.tensor([[0, 1, 4], [4, -1, 5], [3, 3, -1], [0, 2, 7]])
    calls = [replace(own, topk_idx=ids if rank == 3 else ids * 0) for rank, own in enumerate(calls)]
    assert case.rooms_needed([[replace(own, topk_idx=ids * 0 - 1) for own in calls]]) == 0
    assert case.rooms_needed([[*calls[:2], replace(calls[2], topk_idx=ids * 0 - 1), calls[3]]]) == 2
    # Here from two domains to the third one.
    for sizes, rooms in (("fixed", 2), ("exact", 4)):
        case = with_values(TwoLevelCase, shape=(3, 3, 9, 2, 128, 128), sizes=sizes)
        case = replace(case, values=case.values | {"chunks": 2})
        own = replace(exact_tokens(case.shape, 4), topk_idx=torch.tensor([[0, 1]] * 4))
        assert case.rooms_needed([[own] * 3]) == rooms


@pytest.mark.parametrize("sizes", ["fixed", "exact"])
def test_room_for_what_comes_is_just_enough(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_values(TwoLevelCase, arch="sm_90a", weights="mxfp4 x mxfp8", room="for what comes")
    own = {"sizes": sizes, "tokens": "few", "slots": "all", "shape": (2, 2, 6, 3, 256, 128)}
    case = replace(case, values=case.values | own)
    assert case.run() == ""
    needed = TwoLevelCase.rooms_needed
    monkeypatch.setattr(TwoLevelCase, "rooms_needed", lambda self, calls: needed(self, calls) - 1)
    assert "ForeignTokensError" in case.run()
