"""Plants bugs into a copy of the headers; the checker or the comparison has to notice each."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deep_moe import mega_moe
from deep_moe.emulator import EmulatorError, RaceDetected
from deep_moe.emulator.machine import SCHEDULES
from deep_moe.heuristics import MoEShape
from deep_moe.jit import headers
from deep_moe.synthetic import exact_layer, exact_tokens

from ..kernels.layer_case import LayerCase
from .catalogue import MUTATIONS, Mutation

SHAPE = MoEShape(
    num_ranks=2,
    num_experts=4,
    num_topk=3,
    hidden=384,
    intermediate_hidden=256,
    num_max_tokens_per_rank=96,
)


@dataclass(frozen=True)
class Setting:
    """What runs on one architecture."""

    num_tokens: tuple[int, int]
    num_sms: int
    overrides: dict[str, int]


# In both, an odd number of Linear2 blocks leaves half of a last pair or block without rows, and few
# stages come round more than once.
SETTINGS = {
    # One warpgroup has several tiles of a block, so that buffers are used more than once.
    "sm_100a": Setting((96, 29), 4, {"block_m": 96, "num_stages": 3}),
    # Blocks of 64 and 96 rows, the last not full.
    "sm_90a": Setting((96, 61), 2, {"block_m": 128, "num_stages": 3}),
}


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


def outcome(arch: str, schedule: str = "random") -> str:
    """Who noticed something in two calls: "race", "misuse", "timeout", "result" or "" (nobody)."""
    setting = SETTINGS[arch]
    tokens = [
        exact_tokens(SHAPE, count, seed=rank + 1, num_unused_slots=1 - rank)
        for rank, count in enumerate(setting.num_tokens)
    ]
    for own in tokens:  # all of them to expert 0, which makes two m-blocks
        own.topk_idx[~(own.topk_idx == 0).any(1), 1] = 0
    ids = torch.cat([own.topk_idx.flatten() for own in tokens])
    received = torch.bincount(ids[ids >= 0], minlength=SHAPE.num_experts).int()
    case = LayerCase(SHAPE, exact_layer(SHAPE), arch=arch)
    for buffer in case.ranks.buffers:  # no call may count on zeros in the pools
        buffer.memory.tensor[buffer.layout["l1_tokens"].offset :] = 0xFF
    try:
        for seed in range(2):
            stats = [torch.zeros(SHAPE.num_experts_per_rank, dtype=torch.int32) for _ in tokens]
            results = case.compare_call(
                tokens,
                stats=stats,
                overrides=setting.overrides,
                num_sms=setting.num_sms,
                schedule=schedule,
                schedule_seed=seed,
            )
            if not all(result.is_exact for result in results):
                return "result"
            if not torch.equal(torch.cat(stats), received):
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


@pytest.mark.parametrize("arch", SETTINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_bug_nobody_complains(arch: str, schedule: str) -> None:
    assert outcome(arch, schedule) == ""


def test_names_are_given_once() -> None:
    names = Counter((mutation.arch, mutation.name) for mutation in MUTATIONS)
    assert max(names.values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTATIONS, ids=lambda m: f"{m.arch}-{m.name}", indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    noticed = outcome(planted.arch, planted.schedule)
    if planted.catcher.startswith("harmless"):
        assert noticed == ""
    else:
        assert noticed in planted.catcher.split("|")
