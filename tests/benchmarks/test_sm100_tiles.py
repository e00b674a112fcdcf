"""The record of SM100's tiles on the clock, and the cost that chooses among them."""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.sm100_tiles import RECORD, costs, main, parse_point, shape_of, table, times
from deep_moe.heuristics.sm100 import choose_tile, tiles_of

ROOT = Path(__file__).parents[2]
RESULTS = json.loads(RECORD.read_text())["results"]
POINTS = times(RESULTS)
# Times that differ by less are not told apart: a draw of the chip's uncertain numbers moves them by
# as much.
CLEAR = 1.02


def test_the_record_has_points_of_both_models_and_of_all_usual_tiles():
    assert {model for model, _ in POINTS} == {"flash", "pro"}
    assert {tile for by_tile in POINTS.values() for tile in by_tile} >= {32, 64, 96, 128, 192, 240}


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_costs_order_the_tiles_as_the_clock_does(point: tuple[str, int]):
    by_tile = POINTS[point]
    expected = costs(*point, by_tile)
    for tile, us in by_tile.items():
        for other, other_us in by_tile.items():
            if us * CLEAR < other_us:
                assert expected[tile] < expected[other], (tile, other)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_chosen_tile_takes_no_longer_than_the_others(point: tuple[str, int]):
    model, tokens = point
    shape = shape_of(model, tokens)
    expected = shape.expected_tokens_per_local_expert(tokens)
    chosen = choose_tile(Fraction(expected), tiles_of(shape, has_decoded_weights=False)).block_m
    by_tile = POINTS[point]
    assert chosen in by_tile, f"the record lacks {model}:{tokens}:{chosen}"
    assert by_tile[chosen] <= CLEAR * min(by_tile.values())


def test_the_page_has_the_table_of_the_record():
    assert table(RESULTS) in (ROOT / "docs/blackwell.md").read_text()


def test_a_record_is_printed_beside_its_costs(capsys: pytest.CaptureFixture[str]):
    main([])
    assert capsys.readouterr().out.strip() == table(RESULTS)


def test_points_that_cannot_be_read_are_refused():
    assert parse_point("pro:512:96,128") == ("pro", 512, [96, 128])
    with pytest.raises(argparse.ArgumentTypeError, match="MODEL:TOKENS:TILE"):
        parse_point("pro:512")
