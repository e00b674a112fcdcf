"""examples/train.py in small: it learns, and all layers learn alike."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from examples import train
from examples.train_text import NUM_BYTES, tales

SIZES = train.Sizes(width=64, num_layers=1, num_experts=4, batch=8)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_text_is_the_same_in_every_run() -> None:
    text = tales()
    assert len(text) == NUM_BYTES
    assert text.isascii()
    # Of this size zlib leaves a fifth: there is something to learn, and something to remember.
    assert 0.1 < len(zlib.compress(text)) / NUM_BYTES < 0.3
    assert hashlib.sha256(text).hexdigest().startswith("3d9baf2c3a80a156")


def test_every_layer_learns_alike() -> None:
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


def test_the_axes_of_the_picture_have_numbers() -> None:
    """A loss falls by less than the powers of ten that times are drawn over."""
    losses = {"bf16": [5.5 - step / 35 for step in range(100)]}
    picture = train.picture(losses)
    numbers = [float(text) for text in re.findall(r">([0-9.]+)</text>", picture)]
    assert {3, 4, 5} <= set(numbers)
    assert {16, 32, 64} <= set(numbers)


def test_the_example_runs_as_a_file(tmp_path: Path) -> None:
    path = Path(train.__file__)
    run = subprocess.run(
        [sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "--steps" in run.stdout
    assert train.OUT.relative_to(train.ROOT).parts[0] == "build"
