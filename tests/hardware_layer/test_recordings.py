"""The emulator beside an H200: the same inputs, bit for bit, at every step that the two share.

The recordings were made by `python -m tests.hardware_layer.record` on hardware; each names the
commit, the config and the machine. The emulator drops the low bits of FP8 sums as an H200 does
(`hopper_fp8_sums`); where it may still differ, and by how much, is said in agreement.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deep_moe.targets import target_of
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.comparison import compare
from tests.everyday import parametrize
from tests.hardware_layer import record
from tests.hardware_layer.agreement import agreement
from tests.hardware_layer.cases import CASES, RecordedCase

SM90 = target_of("sm_90a").weights_of().numerics
RECORDINGS = Path(__file__).parent / "recordings"
EVERYDAY = ("long_linear1", "wide_tile", "different_blocks", "clamp", "two_ranks")

pytestmark = pytest.mark.skipif(
    not any(RECORDINGS.glob("*.npz")), reason="nothing has been recorded on a GPU yet"
)


@parametrize(
    "case",
    CASES,
    everyday=[case for case in CASES if case.name in EVERYDAY],
    ids=lambda case: case.name,
)
def test_the_emulator_agrees_with_the_hardware(case: RecordedCase) -> None:
    recorded, about = record.read(RECORDINGS / f"{case.name}.npz")
    assert about["case"] == case.name
    assert about["gpu"] != "emulator"
    assert about["inputs_sha256"] == case.digest(), "the inputs are not those of the recording"
    emulated = record.by_token(case, record.run_emulated(case))
    result = agreement(recorded, emulated, case.shape.num_ranks)
    assert result.is_good, (result, about["commit"], about["headers"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_hardware_made_is_within_the_bounds_of_its_sums(case: RecordedCase) -> None:
    recorded, _ = record.read(RECORDINGS / f"{case.name}.npz")
    layer = case.layer()
    for rank in range(case.shape.num_ranks):
        tokens = case.rank_tokens(rank)
        y = torch.from_numpy(recorded[f"y{rank}"].view(np.int16)).view(torch.bfloat16)
        bounds = reference_bounds(
            *layer.operands(tokens),
            numerics=SM90,
            sum_bits=SM90.sum_bits,
            activation_clamp=case.options.get("activation_clamp"),
        )
        result = compare(y, bounds)
        assert result.is_right, result


def test_there_is_no_other_recording() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.npz")} == {case.name for case in CASES}
