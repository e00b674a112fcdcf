"""The words of the command line and what they are parsed to."""

import pytest
import typer

from deep_moe.cli.layer_options import LayerOptions
from deep_moe.cli.options import parse_overrides, parse_tokens


def test_one_number_of_tokens_holds_for_every_rank():
    assert parse_tokens("16", 3) == [16, 16, 16]


def test_each_rank_may_have_its_own_number_of_tokens():
    assert parse_tokens("5,0,17", 3) == [5, 0, 17]


@pytest.mark.parametrize("text", ["", "a", "1,2", "1,2,3,4", "1,-2,3", "1.5"])
def test_other_token_lists_are_refused_by_name(text):
    with pytest.raises(typer.BadParameter, match="--tokens must be one number, or 3 separated"):
        parse_tokens(text, 3)


def test_overrides_are_numbers_by_field_name():
    assert parse_overrides(["block_m=64", " num_stages = 3"]) == {"block_m": 64, "num_stages": 3}
    assert parse_overrides(None) == {}


@pytest.mark.parametrize("text", ["block_m", "block_m=", "block_m=x", "=3", "block_m=1.5"])
def test_other_overrides_are_refused_by_name(text):
    with pytest.raises(typer.BadParameter, match="--override must be FIELD=NUMBER"):
        parse_overrides([text])


def test_a_model_gives_sizes_and_single_options_change_them():
    shape = LayerOptions(model="deepseek-v3", topk=4).shape(8, 5)
    assert (shape.num_experts, shape.hidden, shape.intermediate_hidden) == (256, 7168, 2048)
    assert (shape.num_topk, shape.num_ranks, shape.num_max_tokens_per_rank) == (4, 8, 5)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(typer.BadParameter, match=r"one of .*deepseek-v3.*; got 'gpt'"):
        LayerOptions(model="gpt").shape(1, 1)
