"""examples/train.py in small: it learns, and all layers learn alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import train

SIZES = train.Sizes(width=64, num_layers=1, num_experts=4, batch=8)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_every_layer_learns_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    text = train.text()
    assert len(text) > 20_000
    monkeypatch.setattr(train, "text", lambda: text)
    ends = {}
    for kind in train.STYLES:
        losses = train.train(kind, 24, SIZES, torch.device("cpu"), is_quiet=True)
        assert mean(losses[:2]) > 5.0  # 256 letters: ln 256 = 5.5
        ends[kind] = mean(losses[-4:])
        assert ends[kind] < 3.6
    # Formats and orders of sums differ, the model does not.
    assert max(ends.values()) - min(ends.values()) < 0.15, ends


def test_it_draws_a_curve_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "train", lambda *_: [5.0 - i / 10 for i in range(20)])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert train.main(["--steps", "20", "--out", str(tmp_path)]) == 0
    picture = (tmp_path / "loss.svg").read_text()
    for label in train.LABELS.values():
        assert label in picture
