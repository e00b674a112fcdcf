"""A weight format that is not part of deep_moe, from a folder of its own through everything: made,
saved, loaded, laid out, called, compared with the reference, fuzzed, run from the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_moe.axes import VALUES_VARIABLE

SAVE_AND_LOAD = """
import sys

import torch

import deep_moe
from deep_moe.checkpoint import load_experts, save_experts
from deep_moe.weights import weight_format

quantize = weight_format("toy4").quantize
torch.manual_seed(0)
layer = quantize(torch.randn(4, 2 * 96, 256)), quantize(torch.randn(4, 256, 96))
save_experts(sys.argv[1], {0: layer})
loaded = load_experts(sys.argv[1], 0)
weights = deep_moe.transform_weights_for_mega_moe(*loaded, "sm_90a", weights="toy4")
again = deep_moe.inverse_transform_weights(
    *weights, "sm_90a", weights="toy4", hidden=256, intermediate_hidden=96
)
for experts in (loaded, again):
    for own, expected in zip(experts, layer, strict=True):
        assert all(map(torch.equal, own, expected))
rows = load_experts(sys.argv[1], 0, arch="sm_90a", transformed=True)
assert all(map(torch.equal, rows.tensors, weights.tensors))
print(weights.words)
"""


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "values"
    shutil.copytree(Path(__file__).parents[1] / "values", folder)
    return folder


def run(values: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, VALUES_VARIABLE: str(values)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def deep_moe(values: Path, *arguments: str) -> str:
    return run(values, "-m", "deep_moe", *arguments)


@pytest.fixture(scope="module")
def checkpoint(values: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    words = run(values, "-c", SAVE_AND_LOAD, str(folder))
    assert words == "toy4 weights beside bf16 tokens, laid out for sm90\n"
    return folder


@pytest.mark.parametrize("path", ["fused", "split"])
def test_a_checkpoint_of_it_runs_as_the_reference_says(
    values: Path, checkpoint: Path, path: str
) -> None:
    printed = deep_moe(
        *(values, "run", "--checkpoint", str(checkpoint), "--layer", "0", "--weights", "toy4"),
        *("--arch", "sm_90a", "--tokens", "5", "--path", path, "--json"),
    )
    report = json.loads(printed)
    assert report["passed"]
    assert report["shape"]["weights"] == "toy4"
    assert report["shape"]["token_format"] == "bf16"


def test_fuzz_cases_of_it_agree_bit_for_bit(values: Path) -> None:
    printed = deep_moe(
        *(values, "fuzz", "--weights", "toy4", "--path", "fused", "--count", "4"),
        *("--workers", "1", "--json"),
    )
    report = json.loads(printed)
    assert report["failures"] == []
    assert report["covered"]["weights"] == {"toy4 x bf16": 4}


def test_without_the_folder_nobody_knows_it(tmp_path: Path) -> None:
    (tmp_path / "deep_moe").mkdir()
    with pytest.raises(AssertionError, match=r"--weights must be one of mxfp4, .*; got 'toy4'"):
        deep_moe(tmp_path, "run", "--weights", "toy4")
