"""The emulator against an H200: every case's results, bit for bit, against the recorded ones.

`python -m tests.hardware.record --out tests/hardware/recorded`, on a GPU, records anew.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from deep_moe.emulator import supported_instructions

from .coverage import NOT_RECORDED, NOT_RECORDED_FAMILIES, covered, reason_left_out
from .emulated import run
from .instruction_table import instruction_table
from .record import still_valid
from .recording import FOLDER, Recording, describe_difference, keep
from .suite import all_cases, families


@cache
def recording(family: str) -> Recording:
    return Recording.load(FOLDER / f"{family}.npz")


@pytest.mark.parametrize("name", all_cases())
def test_emulator_equals_the_hardware(name):
    case = all_cases()[name]
    recorded = recording(case.family)
    arrays = case.make_arrays()
    assert recorded.digests.get(name) == case.digest(arrays), (
        f"{name} is not recorded, or was recorded with other PTX or operands; record it again"
    )
    outputs = run(case, arrays)
    for output, kept in zip(outputs, recorded.kept[name], strict=True):
        difference = describe_difference(case, output, kept, arrays)
        assert not difference, f"{name}: {difference}"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mbarriers/early bytes", (3, 1)),  # kept whole
        ("integer/every lop3", (7, 3)),  # in the part that is kept
        ("integer/every lop3", (255, 31)),  # under a checksum only
    ],
)
def test_one_wrong_bit_is_a_difference(name, place):
    case = all_cases()[name]
    arrays = case.make_arrays()
    (output,) = run(case, arrays)
    kept = keep(case, output)
    assert describe_difference(case, output, kept, arrays) == ""
    output[place] ^= 1
    assert describe_difference(case, output, kept, arrays)


def test_a_bound_is_the_largest_difference_allowed():
    case = all_cases()["floating/ex2.approx"]
    arrays = case.make_arrays()
    (output,) = run(case, arrays)
    kept = keep(case, output)
    number = int(np.flatnonzero(arrays[1] == 0x3F800000)[0])  # 2^1
    output[0, number] += case.bound.ulps
    assert describe_difference(case, output, kept, arrays) == ""
    output[0, number] += 1
    assert "1 of" in describe_difference(case, output, kept, arrays)


def test_a_changed_operand_makes_a_recording_stale():
    case = all_cases()["integer/masks"]
    arrays = case.make_arrays()
    before = case.digest(arrays)
    arrays[1][5] ^= 1
    assert case.digest(arrays) != before
    assert (
        dataclasses.replace(case, ptx=case.ptx.replace("bmsk", "szext")).digest(case.make_arrays())
        != before
    )


def test_what_is_still_valid_is_not_recorded_again():
    old = recording("bulk")
    assert still_valid("bulk", old) == old.digests
    changed = next(iter(old.digests))
    stale = dataclasses.replace(old, digests={**old.digests, changed: "of other operands"})
    assert still_valid("bulk", stale) == {
        name: digest for name, digest in old.digests.items() if name != changed
    }


def test_every_instruction_has_a_case_or_a_reason():
    names = supported_instructions()
    executed = covered(all_cases().values(), names)
    missing = [name for name in names if name not in executed and not reason_left_out(name)]
    assert not missing, f"no case of tests/hardware executes {missing}, and no reason is given"


def test_reasons_are_of_instructions_without_cases():
    names = supported_instructions()
    executed = covered(all_cases().values(), names)
    assert not [name for name in executed if reason_left_out(name)]
    assert set(NOT_RECORDED) <= set(names)
    assert set(NOT_RECORDED_FAMILIES) <= {name.split(".")[0] for name in names}


def test_the_documented_table_is_the_emulators():
    documented = Path(__file__).parents[2] / "docs/instructions.md"
    assert documented.read_text() == instruction_table()


def test_nothing_is_recorded_without_a_case():
    assert {file.stem for file in FOLDER.glob("*.npz")} == set(families())
    for family in families():
        assert set(recording(family).digests) <= set(all_cases())
