"""Kernels beside each other: the script's options, and runs of it on emulated ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.in_turn import parse_arguments, run_rank
from deep_moe.jit.headers import find_library
from deep_moe.trial.rank_processes import run_on_ranks
from tests.everyday import parametrize

SMALL = ["--experts", "4", "--topk", "2", "--hidden", "256", "--intermediate", "128"]
BRIEF = ["--rounds", "2", "--calls", "1", "--warm-seconds", "0"]


def copied_headers(folder: Path, file: str, before: str, after: str) -> Path:
    """This checkout's, with a line changed."""
    include = folder / "include"
    shutil.copytree(find_library().path, include)
    path = include / "deep_moe" / file
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    return include


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--kernel must be given, each with a name of its own; got []"),
        (["--kernel", " "], "--kernel must be given"),
        (["--kernel", "a", "--kernel", "a block_m=8"], "each with a name of its own"),
        (["--kernel", "a include=/nowhere"], "a folder that holds deep_moe; got /nowhere"),
        (["--kernel", "a block_m"], "must be FIELD=NUMBER; got 'block_m'"),
        (["--kernel", "a token_format=fp9"], "token_format must be one of mxfp8, "),
        (["--kernel", "a", "--rounds", "0"], "must be at least 1"),
        (["--kernel", "a", "--tokens", "8", "0"], "must be at least 1"),
        (["--kernel", "a", "--model", "other"], "invalid choice"),
    ],
)
def test_impossible_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_kernels_take_turns(tmp_path: Path):
    """On two ranks: this checkout's headers, others with the same results, another tile, another
    pool."""
    same = copied_headers(
        tmp_path, "sync/wait.cuh", "polls_between_checks = 32", "polls_between_checks = 64"
    )
    words = [*SMALL, *BRIEF, "--tokens", "3", "5", "--ranks", "2", "--commit", "abc"]
    words += ["--kernel", "now", "--kernel", f"same include={same}", "--kernel", "wide block_m=64"]
    words += ["--weights", "fp8", "--kernel", "ring pool_tokens=384 token_format=mxfp8"]
    arguments = parse_arguments([*words, "--json", str(tmp_path / "out.json")])
    run_on_ranks(run_rank, arguments.ranks, "cpu", arguments)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["commit"] == "abc"
    assert [result["tokens_per_rank"] for result in report["results"]] == [3, 5]
    for result in report["results"]:
        assert list(result["us"]) == ["now", "same", "wide", "ring"]
        assert all(len(rounds) == 2 for rounds in result["us_of_rounds"].values())
        assert min(result["us"].values()) > 0


@parametrize("is_first", [False, True], everyday=[False])
def test_another_result_ends_the_run(tmp_path: Path, is_first: bool):
    wrong = copied_headers(tmp_path, "combine/combine.cuh", "pairs[j] << 16", "pairs[j] << 15")
    kernels = ["now", f"wrong include={wrong}"]
    words = [*SMALL, *BRIEF, "--tokens", "3"]
    for kernel in kernels[::-1] if is_first else kernels:
        words += ["--kernel", kernel]
    expected = "the result differs from the reference" if is_first else "wrong gives other results"
    with pytest.raises(Exception, match=expected):
        run_on_ranks(run_rank, 1, "cpu", parse_arguments(words))
