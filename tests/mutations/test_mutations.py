"""Plants bugs into a copy of the headers; the checker or the comparison has to notice each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_moe import mega_moe
from deep_moe.emulator import EmulatorError, RaceDetected
from deep_moe.heuristics import MoEShape
from deep_moe.jit import headers
from deep_moe.synthetic import exact_layer, exact_tokens

from ..kernels.layer_case import LayerCase
from .catalogue import MUTATIONS, Mutation

SHAPE = MoEShape(
    num_ranks=2,
    num_experts=4,
    num_topk=3,
    hidden=256,
    intermediate_hidden=256,
    num_max_tokens_per_rank=96,
)
# One warpgroup has several tiles of a block, so that buffers are used more than once.
BLOCK_M = 96


def plant(mutation: Mutation | None, folder: Path) -> headers.HeaderFolder:
    """A copy of the headers with the bug in it."""
    include = folder / "include"
    shutil.copytree(headers.find_library().path, include)
    if mutation is not None:
        path = include / "deep_moe" / mutation.file
        text = path.read_text()
        assert text.count(mutation.pattern) == 1, f"{mutation.file}: pattern no longer matches once"
        path.write_text(text.replace(mutation.pattern, mutation.replacement))
    return headers.HeaderFolder(include, f"mutation {headers.tree_digest(include)}")


def outcome(schedule: str = "random") -> str:
    """Who noticed something in two calls: "race", "misuse", "timeout", "result" or "" (nobody)."""
    tokens = [
        exact_tokens(SHAPE, 96, seed=1, num_unused_slots=1),
        exact_tokens(SHAPE, 29, seed=2),
    ]
    case = LayerCase(SHAPE, exact_layer(SHAPE))
    try:
        for seed in range(2):
            results = case.compare_call(
                tokens,
                overrides={"block_m": BLOCK_M},
                num_sms=4,
                schedule=schedule,
                schedule_seed=seed,
            )
            if not all(result.is_exact for result in results):
                return "result"
    except RaceDetected:
        return "race"
    except EmulatorError:
        return "misuse"
    except RuntimeError as error:
        if "waited" not in str(error):
            raise
        return "timeout"
    return ""


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    folder = plant(request.param, tmp_path)
    monkeypatch.setattr(headers, "find_library", lambda: folder)
    mega_moe._kernel.cache_clear()
    yield request.param
    mega_moe._kernel.cache_clear()


def test_without_a_bug_nobody_complains() -> None:
    for schedule in ("random", "late_copies"):
        assert outcome(schedule) == ""


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTATIONS, ids=lambda m: m.name, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    noticed = outcome(planted.schedule)
    if planted.catcher.startswith("harmless"):
        assert noticed == ""
    else:
        assert noticed in planted.catcher.split("|")
