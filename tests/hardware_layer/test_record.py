"""What is recorded of a call, and how two recordings are compared. The recordings themselves are
compared in test_recordings.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deep_moe.targets import target_of
from deep_moe.trial.comparison import compare
from deep_moe.trial.reference import reference_mega_moe
from tests.hardware_layer import record
from tests.hardware_layer.agreement import Agreement, agreement
from tests.hardware_layer.cases import CASES, RecordedCase

TWO_RANKS = RecordedCase("a test", tokens=(5, 3), num_topk=3, unused_slots=5)


@pytest.fixture(scope="module")
def arrays() -> record.Arrays:
    return record.by_token(TWO_RANKS, record.run_emulated(TWO_RANKS))


def test_names_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_inputs_are_the_same_everywhere() -> None:
    """And as they were when the first recordings were made."""
    expected = "03554f94cac47659d480a6a92fbeecc6042ee68ebcbccf190b6235cd27083eb8"
    assert TWO_RANKS.digest() == expected


def test_inputs_are_like_those_of_a_layer() -> None:
    """Outputs are neither zero nor saturated, and near the reference."""
    case = RecordedCase("like a layer", tokens=(8,))
    layer, tokens = case.layer(), case.rank_tokens(0)
    (part,) = record.run_emulated(case, hopper_fp8_sums=False)
    y = torch.from_numpy(part.y.view(np.int16)).view(torch.bfloat16)
    expected = reference_mega_moe(
        *layer.operands(tokens),
        numerics=target_of("sm_90a").weights_of().numerics,
    )
    result = compare(y, expected)
    assert result.cosine_distance < 1e-5, result
    assert 0.05 < float(y.float().std()) < 5


def test_every_step_is_recorded_in_the_order_of_tokens(arrays: record.Arrays) -> None:
    for rank, num_tokens in enumerate(TWO_RANKS.tokens):
        used = TWO_RANKS.rank_tokens(rank).topk_idx.numpy() >= 0
        assert not used.all()
        slots = (num_tokens, TWO_RANKS.num_topk)
        assert arrays[f"y{rank}"].shape == (num_tokens, TWO_RANKS.hidden)
        for name in ("l1_output", "l1_scales", "contributions"):
            values = arrays[f"{name}{rank}"]
            assert values.shape[:2] == slots
            assert ((values != 0).any(axis=2) == used).all(), name


def test_a_file_gives_back_what_was_written(arrays: record.Arrays, tmp_path: Path) -> None:
    path = record.write(tmp_path, TWO_RANKS, arrays, {"gpu": "none"})
    again, about = record.read(path)
    assert again.keys() == arrays.keys()
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)
    assert about["gpu"] == "none"
    assert about["case"] == TWO_RANKS.name
    assert about["inputs_sha256"] == TWO_RANKS.digest()


def test_the_command_writes_a_file_per_case(tmp_path: Path) -> None:
    record.main(["--emulated", "--out", str(tmp_path), "--case", "one_token", "--commit", "c0ffee"])
    arrays, about = record.read(tmp_path / "one_token.npz")
    assert about["gpu"] == "emulator"
    assert about["commit"] == "c0ffee"
    assert about["config"]["hidden"] == arrays["y0"].shape[1]


def changed(arrays: record.Arrays, name: str, step: int = 1) -> Agreement:
    """What is found if one value of a used slot or a token is another."""
    other = {key: value.copy() for key, value in arrays.items()}
    index = tuple(np.argwhere((other[name] != 0) & (other[name] % 128 < 100))[0])
    other[name][index] += step
    return agreement(arrays, other, 2)


def test_equal_recordings_agree(arrays: record.Arrays) -> None:
    result = agreement(arrays, arrays, 2)
    assert result == Agreement(8 * 3 * 128, 0, 0, 0, 0, 0)
    assert result.is_good


def test_what_is_explained_and_what_is_not(arrays: record.Arrays) -> None:
    flip = changed(arrays, "l1_output0")
    assert flip.is_good
    assert flip.num_flips == 1
    for name, field in (
        ("l1_scales1", "num_scales"),
        ("contributions0", "num_contributions"),
        ("y1", "num_ys"),
    ):
        result = changed(arrays, name)
        assert getattr(result, field) == 1
        assert not result.is_good
    jump = changed(arrays, "l1_output1", step=2)
    assert jump.num_l1_jumps == 1
    assert not jump.is_good


def test_consequences_of_a_flip_are_left_out(arrays: record.Arrays) -> None:
    other = {key: value.copy() for key, value in arrays.items()}
    token, slot, byte = np.argwhere(other["l1_output0"] != 0)[0]
    other["l1_output0"][token, slot, byte] ^= 1
    other["contributions0"][token, slot] ^= 1
    other["y0"][token] ^= 1
    result = agreement(arrays, other, 2)
    assert result.num_flips == 1
    assert result.is_good
    other["y0"][(token + 1) % TWO_RANKS.tokens[0]] ^= 1
    assert agreement(arrays, other, 2).num_ys == TWO_RANKS.hidden


def test_shorter_sums_are_seen(arrays: record.Arrays) -> None:
    """The comparison is sharp enough for what sets Hopper's FP8 sums apart from exact ones."""
    exact = record.by_token(TWO_RANKS, record.run_emulated(TWO_RANKS, hopper_fp8_sums=False))
    assert not agreement(arrays, exact, 2).is_good
