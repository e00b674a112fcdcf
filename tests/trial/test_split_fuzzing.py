"""Fuzz cases of the split path: every two values meet, and what is wrong in a case is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_moe.trial.calls import RankOutput
from deep_moe.trial.split_fuzzing import SplitCase

from .fuzz_cases import with_values


def one_row(outputs: list[list[RankOutput]]) -> None:
    outputs[1][0].y[-1].mul_(2).add_(1)


def one_count(outputs: list[list[RankOutput]]) -> None:
    outputs[0][1].stats[0] += 1


@pytest.mark.parametrize("spoil", [one_row, one_count])
def test_what_is_wrong_in_either_call_is_told(
    spoil: Callable[[list[list[RankOutput]]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = with_values(
        SplitCase,
        arch="sm_90a",
        weights="fp8 x fp8_128",
        tokens="few",
        values="numbers",
        shape=(2, 4, 3, 512, 96),
    )
    given = SplitCase._outputs

    def spoilt(self: SplitCase, *arguments: Any) -> list[list[RankOutput]]:
        outputs = given(self, *arguments)
        spoil(outputs)
        return outputs

    assert case.run() == ""
    monkeypatch.setattr(SplitCase, "_outputs", spoilt)
    assert f"rank {0 if spoil is one_row else 1}" in case.run()


def test_values_that_dispatch_rounds_are_judged_as_it_rounds_them() -> None:
    case = with_values(SplitCase, weights="mxfp4 x fp8_128_ue8m0", tokens="many", values="numbers")
    own = case.inputs()[0][0]
    received = case.as_received(own)
    scales = received.x_sf.view(torch.uint8).view(len(received.x), -1, 4)
    assert (scales == scales[..., :1]).all()
    assert received.x.shape == own.x.shape
