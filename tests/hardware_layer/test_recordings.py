"""The emulator beside an H200: the same inputs, bit for bit, at every step that the two share.

The recordings were made by `python -m tests.hardware_layer.record` on hardware; each names the
commit, the config and the machine. The emulator drops the low bits of FP8 sums as an H200 does
(`hopper_fp8_sums`); where it may still differ, and by how much, is said in agreement.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hardware_layer import record
from tests.hardware_layer.agreement import agreement
from tests.hardware_layer.cases import CASES, RecordedCase

RECORDINGS = Path(__file__).parent / "recordings"

pytestmark = pytest.mark.skipif(
    not any(RECORDINGS.glob("*.npz")), reason="nothing has been recorded on a GPU yet"
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emulator_agrees_with_the_hardware(case: RecordedCase) -> None:
    recorded, about = record.read(RECORDINGS / f"{case.name}.npz")
    assert about["case"] == case.name
    assert about["gpu"] != "emulator"
    assert about["inputs_sha256"] == case.digest(), "the inputs are not those of the recording"
    emulated = record.by_token(case, record.run_emulated(case))
    result = agreement(recorded, emulated, case.shape.num_ranks)
    assert result.is_good, (result, about["commit"], about["headers"])


def test_there_is_no_other_recording() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.npz")} == {case.name for case in CASES}
