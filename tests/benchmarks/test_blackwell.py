"""The study of SM100 on the clock: draws, the rival's choices, the table."""

from __future__ import annotations

import importlib.util
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import blackwell, sm100_rival
from benchmarks.blackwell import NOMINAL, draw, main, table, weights_of
from benchmarks.sm100_rival import (
    FORMATS,
    RivalBuffer,
    RivalConfig,
    compile_rival,
    run_rival,
    simulate_rival,
)
from deep_moe.emulator import Machine, chips
from deep_moe.formats.numerics import mxfp8_numerics, nvfp4_numerics
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.presets import preset_shape
from deep_moe.trial.real_size import rank_tokens
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens
from deep_moe.weights import WeightsName, weight_format
from tests.benchmarks.rival_weights import rival_weights

ROOT = Path(__file__).parents[2]
B200 = chips.load("b200")


def test_a_draw_changes_what_is_uncertain_by_as_much_as_its_file_says():
    drawn = [draw(B200, number) for number in range(200)]
    assert draw(B200, 3).parameters == drawn[3].parameters
    assert draw(B200, NOMINAL) is B200
    assert {chip.value("num_sms") for chip in drawn} == {148}
    for name in ("l2_far_latency_cycles", "tma_latency_cycles"):
        parameter = B200.parameters[name]
        ratios = [chip.value(name) / parameter.value for chip in drawn]
        assert statistics.median(ratios) == pytest.approx(1, abs=0.05)
        assert statistics.stdev(ratios) == pytest.approx(parameter.uncertainty, rel=0.25)
    assert all(chip.value("mma_clock_mhz") <= chip.value("max_clock_mhz") for chip in drawn)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    ("model", "tokens", "block_m"),
    [
        ("flash", 1, 16),
        ("flash", 512, 128),
        ("flash", 8192, 240),
        ("pro", 512, 128),
        ("pro", 1024, 192),
    ],
)
def test_the_rivals_tile_holds_an_experts_tokens(
    weights: WeightsName, model: str, tokens: int, block_m: int
):
    shape = preset_shape(f"deepseek-v4-{model}", num_ranks=8, num_max_tokens_per_rank=tokens)
    token_format = FORMATS[weights].token_format
    shape = replace(shape, weights=weights, token_format=token_format)
    config = RivalConfig(shape, tokens, 148)
    assert config.block_m == block_m
    assert all(block_m // 2 % rows == 0 for rows in config.store_blocks)
    assert config.num_stages >= 4
    assert config.smem_bytes <= 227 * 1024
    assert (config.num_ring_tokens == config.num_pool_tokens) == (tokens >= 6144)
    buffer = RivalBuffer(config)
    assert all(at % 16 == 0 for at in buffer.offsets.values())


@pytest.mark.parametrize("weights", FORMATS)
def test_the_rivals_results_are_the_references(weights: WeightsName):
    token_format = FORMATS[weights].token_format
    shape = MoEShape(2, 4, 2, 512, 512, 24, weights=weights, token_format=token_format)
    layer = exact_layer(shape)
    tokens = [exact_tokens(shape, 24, seed=rank) for rank in range(2)]
    ys = run_rival(
        Machine(checks=False),
        RivalConfig(shape, 24, 4),
        rival_headers(),
        tokens,
        [rival_weights(*layer.of_rank(rank, 2)) for rank in range(2)],
        clamp=2.0**40,
    )
    made = {"mxfp4": mxfp8_numerics, "nvfp4": nvfp4_numerics}[weights]
    # Routing weights come before Linear1's output is quantized.
    numerics = replace(made(weight_format(weights).dequantize), weighs_results=False)
    for own, y in zip(tokens, ys, strict=True):
        expected = reference_mega_moe(
            *layer.operands(own), activation_clamp=2.0**40, numerics=numerics
        )
        assert torch.equal(torch.from_numpy(y.view(np.int16)), expected.view(torch.int16))


def test_a_table_has_intervals_over_the_draws_of_both():
    results = [
        {"kernel": kernel, "model": "flash", "ranks": 8, "tokens": 512, "draw": number, "us": us}
        for kernel, factor in (("rival", 2.0), ("ours", 1.0))
        for number, us in ((NOMINAL, 100 * factor), (0, 90 * factor), (1, 110 * factor))
    ]
    results.append(results[0] | {"kernel": "ours", "tokens": 1, "us": 50.0})
    small, row = table(results).splitlines()[2:]
    assert row == (
        "| flash | 8 | 512 | 146.5 | 200.0 | 182.0 to 218.0 | 100.0 | 91.0 to 109.0 "
        "| 2.00 | 2.00 to 2.00 | 2 |"
    )
    assert small == "| flash | 8 | 1 | 56.5 |  |  | 50.0 |  |  |  | 0 |"


def test_headers_that_are_not_there_are_refused(tmp_path: Path):
    config = RivalConfig(MoEShape(2, 8, 2, 512, 512, 8), 5, 4)
    with pytest.raises(ValueError, match="headers must be deep_gemm/include"):
        compile_rival(config, tmp_path)


def rival_headers() -> Path:
    found = importlib.util.find_spec("deep_gemm")
    if found is None or found.origin is None:
        pytest.skip("sgl-deep-gemm is not installed")
    return Path(found.origin).parent / "include"


def test_the_rival_takes_as_long_with_mirrored_peers(monkeypatch: pytest.MonkeyPatch):
    headers = rival_headers()
    shape = MoEShape(4, 16, 2, 512, 512, 64)

    def turned_tokens(shape: MoEShape, count: int, rank: int, *more: Any) -> Tokens:
        tokens = rank_tokens(shape, count, 0, *more)
        turned = tokens.topk_idx + rank * shape.num_experts_per_rank
        return replace(tokens, topk_idx=turned % shape.num_experts)

    monkeypatch.setattr(sm100_rival, "rank_tokens", turned_tokens)
    times = [
        simulate_rival(shape, 64, B200, headers, mirrored=mirrored, num_sms=4)
        for mirrored in (False, True)
    ]
    assert [len(launches) for launches in times] == [4, 1]
    (first,) = (launch for launch in times[0] if launch.rank == 0)
    assert times[1][0].ns == pytest.approx(first.ns, rel=0.05)
    assert times[1][0].link_bytes == first.link_bytes


def test_a_call_of_72_ranks_has_experts_that_they_share_evenly(monkeypatch: pytest.MonkeyPatch):
    seen: list[MoEShape] = []

    def simulate_call(shape: MoEShape, *_: Any, **__: Any) -> SimpleNamespace:
        seen.append(shape)
        launch = SimpleNamespace(ns=1e3, clock_mhz=1.0, hbm_bytes=0)
        return SimpleNamespace(launches=[launch])

    monkeypatch.setattr(blackwell, "simulate_call", simulate_call)
    for num_ranks in (8, 72):
        assert blackwell.simulate("ours", "flash", num_ranks, 512, B200, None)["us"] == 1
    assert [(shape.num_ranks, shape.num_experts) for shape in seen] == [(8, 256), (72, 288)]


@pytest.mark.parametrize(
    ("chip", "record_name"),
    [
        ("b200", "2026-11-28"),
        ("b200", "later-2026-11-28"),
        ("b200", "nvfp4-2026-11-28"),
        ("b200", "2026-11-27"),
        ("b300", "2026-11-27"),
        ("gb200", "2026-11-27"),
    ],
)
def test_the_page_has_the_table_of_the_record(chip: str, record_name: str):
    path = ROOT / f"benchmarks/results/simulated/{chip}-{record_name}.json"
    record = json.loads(path.read_text())
    page = (ROOT / "docs/blackwell.md").read_text()
    assert record["chip"] == chip
    assert table(record["results"], chip, weights_of(record)) in page


def test_a_record_of_other_weights_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"chip": "b200", "results": []}))
    with pytest.raises(SystemExit):
        main(["--json", str(path), "--models", "flash", "--weights", "nvfp4"])
    assert "('b200', 'nvfp4'); got one of ('b200', 'mxfp4')" in capsys.readouterr().err
