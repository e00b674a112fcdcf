"""Checkpoints as public families of models have them, through the loader and the layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.activations import Relu2, Swiglu
from deep_moe.checkpoint import load_experts
from deep_moe.errors import CheckpointError
from deep_moe.weights import weight_format
from deep_moe.weights.layers import one_expert
from tests.everyday import parametrize
from tests.pairs import formats

from .families import FAMILIES, HIDDEN, INTERMEDIATE, LAYER, NUM_EXPERTS, Family, table, write

LOADED = [family for family in FAMILIES if family.refusal is None]
DOCS = Path(__file__).parents[2] / "docs" / "weights.md"


def name(family: Any) -> str | None:
    return family.models if isinstance(family, Family) else None


def tolerance(family: Family) -> float:
    """Divisors are rounded to float32, float16 scales to BF16."""
    if "AWQ" in family.stored or "GPTQ" in family.stored:
        return 2.0**-8
    return 2.0**-24 if "NVFP4 of compressed" in family.stored else 0


@pytest.mark.parametrize("family", LOADED, ids=name)
def test_the_loader_gives_the_numbers_that_the_exporter_means(
    tmp_path: Path, family: Family
) -> None:
    parts = write(tmp_path, family)
    loaded = load_experts(tmp_path, LAYER)
    source = weight_format(formats(family.pair)["weights"])
    for expert in range(NUM_EXPERTS):
        shards = ("gate", "up") if family.has_gate else ("up",)
        l1 = torch.cat([parts[expert, part].values for part in shards])
        for layer, expected, num_matrices in (
            (loaded.l1, l1, len(shards)),
            (loaded.l2, parts[expert, "down"].values, 1),
        ):
            found = source.dequantize(one_expert(layer, expert), num_matrices)
            torch.testing.assert_close(found, expected, rtol=tolerance(family), atol=0)


@pytest.mark.parametrize("family", [own for own in FAMILIES if own.refusal is not None], ids=name)
def test_others_are_refused_by_the_reason_of_the_table(tmp_path: Path, family: Family) -> None:
    write(tmp_path, family)
    assert family.refusal is not None
    with pytest.raises(CheckpointError, match=family.refusal):
        load_experts(tmp_path, LAYER)


# Of the error's norm: tokens that are not quantized, those of FP8 (docs/numerics.md).
BOUNDS = {"bf16": 0.01, "mxfp8": 0.08, "fp8_token": 0.08}
EVERYDAY = ("DeepSeek-V4-Flash", "Nemotron-3", "Kimi-K2-Thinking", "Qwen3 GPTQ", "GLM-4.7")


@parametrize(
    "family", LOADED, everyday=[own for own in LOADED if own.models.startswith(EVERYDAY)], ids=name
)
def test_the_layer_computes_with_these_numbers(tmp_path: Path, family: Family) -> None:
    """Against FP64 with the exporter's numbers."""
    parts = write(tmp_path, family)
    pair = formats(family.pair)
    own = {"arch": "sm_90a", "token_format": pair["token_format"]}
    weights = load_experts(tmp_path, LAYER, transformed=True, **own)
    torch.manual_seed(1)
    x = torch.randn(8, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(len(x))])
    factors = torch.full(ids.shape, 0.5)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        NUM_EXPERTS,
        8,
        2,
        HIDDEN,
        INTERMEDIATE,
        **pair,
        device="cpu",
    )
    deep_moe.prepare_inputs(x, ids, factors, buffer, arch="sm_90a")
    y = torch.empty_like(x)
    activation = Swiglu(math.inf) if family.has_gate else Relu2()
    deep_moe.mega_moe(y, weights, buffer, activation=activation, arch="sm_90a")
    expected = torch.zeros(len(x), HIDDEN).double()
    for token, experts in enumerate(ids.tolist()):
        for expert in experts:
            up = parts[expert, "up"].values @ x[token].double()
            if family.has_gate:
                gate = parts[expert, "gate"].values @ x[token].double()
                middle = gate * gate.sigmoid() * up
            else:
                middle = up.relu() ** 2
            expected[token] += 0.5 * (parts[expert, "down"].values @ middle)
    error = (y.double() - expected).norm() / expected.norm()
    assert error < BOUNDS[pair["token_format"]], float(error)


def test_the_table_is_in_the_docs() -> None:
    assert table() in DOCS.read_text()
