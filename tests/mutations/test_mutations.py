"""Plants bugs into copies of the sources; the checker or the comparison has to notice each."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from deep_moe import jit
from deep_moe.emulator.machine import SCHEDULES
from deep_moe.fused import loaded_kernels
from deep_moe.heuristics import MoEShape
from deep_moe.targets import MegaMoEConfig, choose_config, target_of
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.everyday import parametrize
from tests.pairs import formats

from ..kernels.conftest import Queued, Ranks, small_config
from ..kernels.layer_case import FITTED, LayerCase
from ..prepare_inputs.conftest import Target, routing
from .catalogue import MUTATIONS, RENDERED, Mutation
from .grouped_catalogue import GROUPED_MUTATIONS
from .marks import find_marks
from .planting import (
    INCLUDE,
    ROOT,
    check_edits,
    header_edits,
    noticed_in,
    plant_into_module,
    planted_in_headers,
    text_edit,
    with_edits,
    with_text_edit,
)
from .product_catalogue import PRODUCT_MUTATIONS
from .split_catalogue import SPLIT_MUTATIONS
from .throughput_catalogue import THROUGHPUT_MUTATIONS
from .training_catalogue import TRAINING_MUTATIONS

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


# In all, an odd number of Linear2 blocks leaves half of a last pair or block without rows, and few
# stages come round more than once. Turns are given, so that ranks with different numbers
# of tokens run one kernel: a bug costs one compilation.
ONE_BY_ONE = {"num_turn_m_blocks": 1, "num_lead_m_blocks": 1, "num_unit_m_blocks": 1}
TWO_AHEAD = {"num_turn_m_blocks": 1, "num_lead_m_blocks": 2, "num_unit_m_blocks": 2}
SETTINGS = {
    # One warpgroup has several tiles of a block, so that buffers are used more than once.
    "sm_100a": Setting((96, 29), 4, {**ONE_BY_ONE, "block_m": 96, "num_stages": 3}),
    # Blocks of 64 and 96 rows, the last not full.
    "sm_90a": Setting((96, 61), 2, {**TWO_AHEAD, **FITTED, "num_stages": 3}),
    "sm_90a fp8": Setting((96, 61), 2, {**TWO_AHEAD, "block_m": 88, "num_stages": 3}),
    "sm_90a bf16": Setting((96, 61), 2, {**TWO_AHEAD, **FITTED, "num_stages": 3}),
    "sm_90a mxfp4 x bf16": Setting((96, 61), 2, {**TWO_AHEAD, **FITTED, "num_stages": 3}),
    "sm_90a int4": Setting((96, 61), 2, {**TWO_AHEAD, **FITTED, "num_stages": 3}),
    "sm_90a mxfp8": Setting((96, 61), 2, {**TWO_AHEAD, **FITTED, "num_stages": 3}),
    "sm_90a nvfp4": Setting((96, 61), 2, {**TWO_AHEAD, **FITTED, "num_stages": 3}),
    "sm_100a nvfp4": Setting((96, 29), 4, {**ONE_BY_ONE, "block_m": 96, "num_stages": 3}),
    # More stages than tensor memory has room for decoded blocks.
    "sm_100a int4": Setting((96, 29), 4, {**ONE_BY_ONE, "block_m": 96, "num_stages": 5}),
    "sm_100a bf16": Setting((96, 29), 4, {**ONE_BY_ONE, "block_m": 96, "num_stages": 3}),
}


def name_of(mutation: Mutation) -> str:
    return f"{mutation.arch}-{mutation.name}"


def preparation_outcome() -> str:
    """Who noticed something in `prepare_inputs`."""
    target = Target("cpu", "sm_90a")
    x = torch.randn(13, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

    def run() -> bool:
        target.check(target.buffer(), x, *routing(13, 2))
        return True

    return noticed_in(run)


def outcome_of_test(test: str, arguments: Mapping[str, Any]) -> str:
    """Who noticed something in a test of a piece of the kernel."""
    module_name, _, function_name = test.partition("::")
    path = module_name if "." in module_name else f"kernels.{module_name}"
    function = getattr(importlib.import_module(f"tests.{path}"), function_name)
    fixtures = {
        "make_config": small_config,
        "make_ranks": Ranks,
        "make_queued": Queued,
        "target": Target("cpu", "sm_100a"),
    }
    wanted = fixtures.keys() & inspect.signature(function).parameters.keys()

    def run() -> bool:
        function(**{name: fixtures[name] for name in wanted}, **arguments)
        return True

    return noticed_in(run)


def outcome(
    arch: str,
    schedule: str = "random",
    *,
    in_a_row: bool = False,
    in_clusters: bool = False,
    one_size: int = 0,
    weights: str = "mxfp4",
    token_format: str | None = None,
) -> str:
    """Who noticed something in two calls.

    in_a_row: in four calls that ranks begin without a look at each other. in_clusters: of two CTAs,
    and two of them. one_size: m-blocks all have so many rows. weights: their format.
    token_format: the tokens'.
    """
    setting = SETTINGS[arch if weights == "mxfp4" else f"{arch} {weights}"]
    pair = formats(weights) | ({"token_format": token_format} if token_format else {})
    shape = replace(SHAPE, **pair)
    scale_block = target_of(arch).weights_of(**pair).scale_block
    overrides = dict(setting.overrides)
    num_sms = setting.num_sms
    if arch == "sm_90a":  # else the heuristics' choice would decide which path is tested
        overrides |= {"cluster_size": 2 if in_clusters else 1}
        num_sms *= 2 if in_clusters else 1
    if one_size:
        overrides |= {"block_m": one_size}
        if arch == "sm_90a":
            overrides |= {"block_m_step": one_size}
    tokens = [
        exact_tokens(shape, count, seed=rank + 1, num_unused_slots=1 - rank)
        for rank, count in enumerate(setting.num_tokens)
    ]
    for own in tokens:  # all of them to expert 0, which makes two m-blocks
        own.topk_idx[~(own.topk_idx == 0).any(1), 1] = 0
    ids = torch.cat([own.topk_idx.flatten() for own in tokens])
    received = torch.bincount(ids[ids >= 0], minlength=SHAPE.num_experts).int()
    case = LayerCase(shape, exact_layer(shape, scale_block=scale_block), arch=arch)

    def run_in_a_row() -> bool:
        few = [exact_tokens(shape, 3, seed=3), exact_tokens(shape, 5, seed=4)]
        calls = case.compare_calls_in_a_row(
            [few, tokens, few[::-1], few],
            overrides=overrides,
            num_sms=(num_sms,),
            schedule=schedule,
        )
        return all(result.is_exact for results in calls for result in results)

    def run_twice() -> bool:
        for seed in range(2):
            # No call may count on zeros in the pools, nor on what the call before left there.
            for buffer in case.ranks.buffers:
                buffer.memory.tensor[buffer.layout["l1_tokens"].offset :] = 0xFF
            stats = [torch.zeros(SHAPE.num_experts_per_rank, dtype=torch.int32) for _ in tokens]
            results = case.compare_call(
                tokens,
                stats=stats,
                overrides=overrides,
                num_sms=num_sms,
                schedule=schedule,
                schedule_seed=seed,
            )
            if not all(result.is_exact for result in results):
                return False
            if not torch.equal(torch.cat(stats), received):
                return False
        return True

    return noticed_in(run_in_a_row if in_a_row else run_twice)


def test_every_mark_stands_once_and_is_used() -> None:
    marks = find_marks(INCLUDE)
    used = {
        mark
        for mutation in (
            *MUTATIONS,
            *SPLIT_MUTATIONS,
            *THROUGHPUT_MUTATIONS,
            *GROUPED_MUTATIONS,
            *TRAINING_MUTATIONS,
            *PRODUCT_MUTATIONS,
        )
        for edit in header_edits(mutation)
        for mark in (edit.mark, edit.behind)
        if mark is not None
    }
    assert set(marks) == used
    assert {mark: len(places) for mark, places in marks.items() if len(places) != 1} == {}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    if header_edits(mutation):
        check_edits(mutation)
        return
    edit = text_edit(mutation)
    if edit.file == RENDERED:
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
        text = (ROOT / edit.file).read_text()
    assert with_text_edit(edit, text) != text


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    if header_edits(mutation):
        with planted_in_headers(mutation, tmp_path, monkeypatch):
            yield mutation
        return
    if (edit := text_edit(mutation)).file == RENDERED:
        render = jit.render_kernel

        def render_planted(config: jit.KernelConfig) -> str:
            text = render(config)
            return with_text_edit(edit, text) if isinstance(config, MegaMoEConfig) else text

        monkeypatch.setattr(jit, "render_kernel", render_planted)
    else:
        planted_module = plant_into_module(edit)
        sound = importlib.import_module(planted_module.__name__)
        for name, member in vars(planted_module).items():
            if isinstance(member, FunctionType):
                monkeypatch.setattr(sound, name, member)
    loaded_kernels.built_kernel.cache_clear()
    yield mutation
    loaded_kernels.built_kernel.cache_clear()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@parametrize("schedule", SCHEDULES, everyday=["random", "late_copies"])
def test_without_a_bug_nobody_complains(arch: str, schedule: str) -> None:
    assert outcome(arch, schedule) == ""
    assert outcome(arch, schedule, in_a_row=True) == ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("arch", "weights"),
    [
        ("sm_90a", "fp8"),
        ("sm_90a", "bf16"),
        ("sm_90a", "mxfp4 x bf16"),
        ("sm_90a", "nvfp4"),
        ("sm_100a", "bf16"),
        ("sm_100a", "nvfp4 x nvfp4"),
        ("sm_100a", "nvfp4"),
        ("sm_100a", "int4"),
    ],
)
def test_without_a_bug_nobody_complains_about_other_weights(
    schedule: str, arch: str, weights: str
) -> None:
    assert outcome(arch, schedule, **formats(weights)) == ""


def test_without_a_bug_nobody_complains_about_clusters() -> None:
    assert outcome("sm_90a", in_clusters=True, weights="fp8") == ""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_bug_nobody_complains_about_float_scales(schedule: str) -> None:
    assert outcome("sm_90a", schedule, weights="fp8", token_format="fp8_128") == ""


@parametrize("schedule", SCHEDULES, everyday=["random"])
@pytest.mark.parametrize("weights", ["mxfp4", "int4"])
def test_without_a_bug_nobody_complains_about_few_rows(schedule: str, weights: str) -> None:
    assert outcome("sm_90a", schedule, one_size=8, **formats(weights)) == ""


@pytest.mark.parametrize(("arch", "num_rows"), [("sm_90a", 96), ("sm_100a", 32)])
def test_without_a_bug_nobody_complains_about_blocks_of_one_size(arch: str, num_rows: int) -> None:
    assert outcome(arch, one_size=num_rows) == ""


def test_nobody_complains_about_the_preparation() -> None:
    assert preparation_outcome() == ""


def test_names_are_given_once() -> None:
    names = Counter((mutation.arch, mutation.name) for mutation in MUTATIONS)
    assert max(names.values()) == 1


def concerns_preparation(mutation: Mutation) -> bool:
    files = {"prepare_inputs.cuh", "bf16_chunk.cuh"}
    return any(path.name in files for path in with_edits(header_edits(mutation), INCLUDE))


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    if planted.test:
        noticed = outcome_of_test(planted.test, planted.arguments)
    elif concerns_preparation(planted):
        noticed = preparation_outcome()
    else:
        noticed = outcome(
            planted.arch,
            planted.schedule,
            in_a_row=planted.in_a_row,
            in_clusters=planted.in_clusters,
            one_size=planted.one_size,
            weights=planted.weights,
            token_format=planted.token_format,
        )
    if planted.catcher.startswith("harmless"):
        assert noticed == ""
    else:
        assert noticed in planted.catcher.split("|")
