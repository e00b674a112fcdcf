"""Where tables are found, how measurements get into them, and that ranks may differ in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from deep_moe import EmulatedRanks, transform_weights_for_mega_moe
from deep_moe.activations import Swiglu
from deep_moe.fused.config_chooser import ConfigChooser
from deep_moe.fused.emulated_call import finish_emulated, prepare_launch
from deep_moe.fused.options import CallOptions
from deep_moe.fused.tuning_tables import add_to_table, find_tuning, read_tuning, user_table_path
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.choices import load_key
from deep_moe.heuristics.tuning import TunedEntry, TunedLayer, TunedLayerKey, read_table
from deep_moe.jit.launch import run_emulated
from deep_moe.targets import choose_config, target_of
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens

KEY = TunedLayerKey("Some GPU", "sm_90a", 132, 4, 256, 6, 4096, 2048)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "table.json"
    monkeypatch.setenv("DEEP_MOE_TUNING_TABLE", str(path))
    return path


def test_the_table_lies_beside_the_kernels_unless_the_variable_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DEEP_MOE_TUNING_TABLE", raising=False)
    assert user_table_path() == tmp_path / "tuning.json"
    monkeypatch.setenv("DEEP_MOE_TUNING_TABLE", "/elsewhere/mine.json")
    assert user_table_path() == Path("/elsewhere/mine.json")


def test_without_files_there_are_no_tables(table: Path):
    assert read_tuning("Some GPU").tables == ()


def test_measurements_are_added_to_the_users_table(table: Path):
    add_to_table(table, TunedLayer(KEY, (8,), ()))
    add_to_table(table, TunedLayer(KEY, (64,), ()))
    (own,) = read_tuning("Some GPU").tables
    assert own.source == f"user's table {table}"
    assert own.layers == (TunedLayer(KEY, (8, 64), ()),)
    assert [path.name for path in table.parent.iterdir()] == ["table.json"]


def test_a_damaged_table_is_an_error_that_names_it_and_is_not_overwritten(table: Path):
    table.parent.mkdir()
    table.write_text("{")
    with pytest.raises(ValueError, match=r"tuning table, user's table .*table\.json: not JSON"):
        read_tuning("Some GPU")
    with pytest.raises(ValueError, match="not JSON"):
        add_to_table(table, TunedLayer(KEY, (8,), ()))
    assert table.read_text() == "{"


def test_what_could_not_be_read_again_is_not_written(table: Path):
    entry = TunedEntry(8, (("block_m", 8),), (("block_m", 16),), 1.0, 2.0, "2026-11-21", "x" * 999)
    with pytest.raises(ValueError, match="commit must be a string of at most 200"):
        add_to_table(table, TunedLayer(KEY, (8,), (entry,)))
    assert not table.exists()


def test_numbers_of_tokens_with_other_measurements_have_other_keys(table: Path):
    """Of which the formula need not tell any difference."""
    add_to_table(table, TunedLayer(KEY, (1024, 2048), ()))
    find_tuning.cache_clear()
    try:
        shape = MoEShape(4, 256, 6, 4096, 2048, 4096)
        choose = ConfigChooser(shape, "sm_90a", 132, Swiglu(), True, False, (), False, "Some GPU")
        tuning = find_tuning("Some GPU")
        of_one_formula = [
            (first, second)
            for first, second in pairwise(range(4097))
            if load_key(shape, first) == load_key(shape, second)
        ]
        num_told_apart = 0
        for first, second in of_one_formula:
            is_same = tuning.measurement(KEY, first) is tuning.measurement(KEY, second)
            assert (choose.key(first) == choose.key(second)) is is_same
            num_told_apart += not is_same
        assert num_told_apart
    finally:
        find_tuning.cache_clear()


def test_a_process_reads_its_tables_once(table: Path):
    find_tuning.cache_clear()
    try:
        before = find_tuning("Some GPU")
        add_to_table(table, TunedLayer(KEY, (8,), ()))
        assert find_tuning("Some GPU") is before
        assert read_table(table) is not None
    finally:
        find_tuning.cache_clear()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ranks_with_different_kernels_work_together(arch: str):
    """A table may change the kernel of one rank and not of another: each chooses by its own tokens,
    and machines may have tables of their own. So no tunable field may have to be equal on all."""
    shape = MoEShape(2, 8, 3, 256, 256, 40)
    counts = (40, 23)
    layer = exact_layer(shape, sum_bits=target_of(arch).weights_of().numerics.sum_bits)
    tokens = [exact_tokens(shape, count, seed=count) for count in counts]
    ys = [torch.full((count, 256), torch.nan, dtype=torch.bfloat16) for count in counts]
    weights = [
        transform_weights_for_mega_moe(*layer.of_rank(rank, 2), arch=arch) for rank in range(2)
    ]
    formula = choose_config(shape, 40, arch=arch, num_sms=4)
    others = {name: values[-1] for name, values in formula.candidates.items()}
    of_ranks = (formula.tunable, others)
    with EmulatedRanks(2, 8, 40, 3, 256, 256) as ranks:
        launches = []
        for rank, overrides in enumerate(of_ranks):
            fill_inputs(ranks.buffers[rank], tokens[rank])
            options = CallOptions(arch=arch, overrides=overrides)
            launch = prepare_launch(ys[rank], *weights[rank], ranks.buffers[rank], {}, options)
            launches.append(launch)
        first, second = (launch.config.tunable for launch in launches)
        assert all(first[name] != second[name] for name in first)
        run_emulated(launches, seed=1, checks=True, clock="virtual")
        for buffer in ranks.buffers:
            finish_emulated(buffer, checked=True)
    for y, own in zip(ys, tokens, strict=True):
        expected = reference_mega_moe(
            *layer.operands(own),
            numerics=target_of(arch).weights_of().numerics,
        )
        assert torch.equal(y, expected)
