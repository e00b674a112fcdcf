"""Plants bugs into copies of the sources; the checker or the comparison has to notice each."""

from __future__ import annotations

import importlib
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from deep_moe import input_preparation, jit, mega_moe
from deep_moe.emulator import EmulatorError, RaceDetected
from deep_moe.emulator.machine import SCHEDULES
from deep_moe.heuristics import MoEShape, choose_config
from deep_moe.jit import headers
from deep_moe.jit.nvrtc import Compilation, Resources
from deep_moe.synthetic import exact_layer, exact_tokens

from ..kernels.layer_case import FITTED, LayerCase
from ..prepare_inputs.conftest import Target, routing
from .catalogue import MUTATIONS, PREPARATION, RENDERED, Mutation

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
    "sm_90a": Setting((96, 61), 2, {**FITTED, "num_stages": 3}),
}


def name_of(mutation: Mutation) -> str:
    return f"{mutation.arch}-{mutation.name}"


def mutated(mutation: Mutation, text: str) -> str:
    assert text.count(mutation.pattern) == 1, f"{mutation.file}: pattern no longer matches once"
    return text.replace(mutation.pattern, mutation.replacement)


def plant_into_header(mutation: Mutation, folder: Path) -> headers.HeaderFolder:
    """A copy of the headers with the bug in it."""
    include = folder / "include"
    shutil.copytree(headers.find_library().path, include)
    path = include / "deep_moe" / mutation.file
    path.write_text(mutated(mutation, path.read_text()))
    return headers.HeaderFolder(include, f"mutation {headers.tree_digest(include)}")


def plant_into_module(mutation: Mutation) -> ModuleType:
    """The module of the host's side, made anew with the bug in it."""
    name = f"deep_moe.{mutation.file.removesuffix('.py').replace('/', '.')}"
    path = importlib.import_module(name).__file__
    assert path is not None
    module = ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    exec(compile(mutated(mutation, Path(path).read_text()), path, "exec"), module.__dict__)
    return module


def compile_without_cubin(source: str, **options: Any) -> Compilation:
    """What the emulator needs of a kernel that will never see a GPU, in half of the time."""
    of_any_number = Resources(0, 0, 0, 0, 0)  # 0 registers: as many as the compiler may use
    return Compilation(b"", jit.compile_to_ptx(source, **options), "", of_any_number, 0.0)


def preparation_outcome() -> str:
    """The same of `prepare_inputs`."""
    target = Target("cpu", "sm_90a")
    x = torch.randn(13, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    try:
        target.check(target.buffer(), x, *routing(13, 2))
    except AssertionError:
        return "result"
    except RaceDetected:
        return "race"
    except EmulatorError:
        return "misuse"
    return ""


def outcome(
    arch: str, schedule: str = "random", *, in_a_row: bool = False, one_size: int = 0
) -> str:
    """Who noticed something in two calls: "race", "misuse", "timeout", "result" or "" (nobody).

    in_a_row: in four calls that ranks begin without a look at each other. one_size: m-blocks all
    have so many rows.
    """
    setting = SETTINGS[arch]
    overrides = dict(setting.overrides)
    if one_size:
        overrides |= {"block_m": one_size, "block_m_step": one_size}
    tokens = [
        exact_tokens(SHAPE, count, seed=rank + 1, num_unused_slots=1 - rank)
        for rank, count in enumerate(setting.num_tokens)
    ]
    for own in tokens:  # all of them to expert 0, which makes two m-blocks
        own.topk_idx[~(own.topk_idx == 0).any(1), 1] = 0
    ids = torch.cat([own.topk_idx.flatten() for own in tokens])
    received = torch.bincount(ids[ids >= 0], minlength=SHAPE.num_experts).int()
    case = LayerCase(SHAPE, exact_layer(SHAPE), arch=arch)
    try:
        if in_a_row:
            few = [exact_tokens(SHAPE, 3, seed=3), exact_tokens(SHAPE, 5, seed=4)]
            calls = case.compare_calls_in_a_row(
                [few, tokens, few[::-1], few],
                overrides=overrides,
                num_sms=(setting.num_sms,),
                schedule=schedule,
            )
            if not all(result.is_exact for results in calls for result in results):
                return "result"
            return ""
        for seed in range(2):
            # No call may count on zeros in the pools, nor on what the call before left there.
            for buffer in case.ranks.buffers:
                buffer.memory.tensor[buffer.layout["l1_tokens"].offset :] = 0xFF
            stats = [torch.zeros(SHAPE.num_experts_per_rank, dtype=torch.int32) for _ in tokens]
            results = case.compare_call(
                tokens,
                stats=stats,
                overrides=overrides,
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


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_pattern_stands_there_once(mutation: Mutation) -> None:
    root = Path(__file__).parents[2]
    if mutation.file.startswith("jit/"):
        text = (root / mutation.file).read_text()
    elif mutation.file == RENDERED:
        setting = SETTINGS[mutation.arch]
        text = jit.render_kernel(
            choose_config(
                SHAPE,
                max(setting.num_tokens),
                arch=mutation.arch,
                num_sms=setting.num_sms,
                overrides=setting.overrides,
            )
        )
    else:
        text = (root / "include" / "deep_moe" / mutation.file).read_text()
    mutated(mutation, text)


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    if mutation.file == RENDERED:
        render = jit.render_kernel
        monkeypatch.setattr(jit, "render_kernel", lambda config: mutated(mutation, render(config)))
        monkeypatch.setattr(jit, "compile_source", compile_without_cubin)
    elif mutation.file.startswith("jit/"):
        for name, member in vars(plant_into_module(mutation)).items():
            if isinstance(member, FunctionType) and hasattr(mega_moe, name):
                monkeypatch.setattr(mega_moe, name, member)
    else:
        folder = plant_into_header(mutation, tmp_path)
        monkeypatch.setattr(headers, "find_library", lambda: folder)
        monkeypatch.setattr(jit, "compile_source", compile_without_cubin)
    kernels = (mega_moe._kernel, input_preparation._kernel)
    for kernel in kernels:
        kernel.cache_clear()
    yield mutation
    for kernel in kernels:
        kernel.cache_clear()


@pytest.mark.parametrize("arch", SETTINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_bug_nobody_complains(arch: str, schedule: str) -> None:
    assert outcome(arch, schedule) == ""
    assert outcome(arch, schedule, in_a_row=True) == ""


@pytest.mark.parametrize("num_rows", [8, 96])
def test_without_a_bug_nobody_complains_about_blocks_of_one_size(num_rows: int) -> None:
    assert outcome("sm_90a", one_size=num_rows) == ""


def test_nobody_complains_about_the_preparation() -> None:
    assert preparation_outcome() == ""


def test_names_are_given_once() -> None:
    names = Counter((mutation.arch, mutation.name) for mutation in MUTATIONS)
    assert max(names.values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    noticed = (
        preparation_outcome()
        if planted.file == PREPARATION
        else outcome(
            planted.arch,
            planted.schedule,
            in_a_row=planted.in_a_row,
            one_size=planted.one_size,
        )
    )
    if planted.catcher.startswith("harmless"):
        assert noticed == ""
    else:
        assert noticed in planted.catcher.split("|")
