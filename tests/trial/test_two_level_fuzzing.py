"""Fuzz cases of a layer over several domains: what is wrong in a case is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.trial.synthetic import exact_tokens
from deep_moe.trial.two_level_fuzzing import TwoLevelCase

from .fuzz_cases import with_values


@pytest.mark.parametrize(("sizes", "rooms"), [("fixed", 3), ("exact", 7)])
def test_calls_bring_no_more_than_there_is_room_for(sizes: str, rooms: int) -> None:
    """From two domains to the third one, in chunks of up to 7 tokens of 13."""
    case = with_values(TwoLevelCase, shape=(3, 3, 9, 2, 128, 128), sizes=sizes, room="for half")
    case = replace(case, values=case.values | {"chunks": 2})
    assert case.rooms == rooms
    tokens = [exact_tokens(case.shape, 13) for _ in range(3)]
    for own in tokens:
        own.topk_idx[:] = torch.tensor([0, 8])
    case._keep_within(rooms, tokens)
    goes = [
        [int((own.topk_idx[part] // 3 == domain).any(1).sum()) for part in (slice(7), slice(7, 13))]
        for domain, own in ((0, tokens[1]), (0, tokens[2]), (2, tokens[0]), (2, tokens[1]))
    ]
    kept = [[rooms, rooms]] * 2 if sizes == "fixed" else [[7, 6], [0, 1]]
    assert goes == kept * 2
    # What stays in its domain needs no room.
    assert (tokens[0].topk_idx[:, 0] == 0).all()
    assert (tokens[2].topk_idx[:, 1] == 8).all()


@pytest.mark.parametrize("sizes", ["fixed", "exact"])
def test_tokens_without_room_are_seen(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_values(TwoLevelCase, arch="sm_90a", weights="mxfp4 x mxfp8", room="for half")
    own = {"sizes": sizes, "tokens": "many", "slots": "all", "shape": (2, 2, 6, 3, 256, 128)}
    case = replace(case, values=case.values | own)
    assert case.run() == ""
    monkeypatch.setattr(TwoLevelCase, "_keep_within", lambda *_: None)
    assert "ForeignTokensError" in case.run()
