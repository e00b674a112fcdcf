"""Checkpoints in BF16: a tensor for each expert and projection, or all experts in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deep_moe
from deep_moe.checkpoint import (
    ExpertNaming,
    StackedNaming,
    load_experts,
    save_experts,
)
from deep_moe.checkpoint.namings import NAMINGS
from deep_moe.errors import CheckpointError

NUM_EXPERTS, HIDDEN, INTERMEDIATE, LAYER = 4, 384, 256, 1
SEPARATE = ("experts", "mixtral")


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    l1 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    l2 = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator)
    return l1.bfloat16(), l2.bfloat16()


def write(folder: Path, name: str) -> None:
    naming = NAMINGS[name]
    l1, l2 = layer()
    tensors = {}
    if isinstance(naming, StackedNaming):
        tensors[naming.gate_up.format(layer=LAYER)] = l1
        tensors[naming.down.format(layer=LAYER)] = l2
    else:
        for expert in range(NUM_EXPERTS):
            gate, up = l1[expert].chunk(2)
            for part, matrix in (("gate", gate), ("up", up), ("down", l2[expert])):
                own = getattr(naming, part).format(layer=LAYER, expert=expert)
                tensors[own + ".weight"] = matrix.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_experts": NUM_EXPERTS}))


@pytest.mark.parametrize("name", [*SEPARATE, "stacked_plain"])
def test_by_name_and_by_themselves(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    l1, l2 = layer()
    for naming in (None, name):
        found = load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2, naming=naming)
        assert torch.equal(found.l1.weight, l1[2:])
        assert torch.equal(found.l2.weight, l2[2:])
        assert found.l1.sf.shape == found.l2.sf.shape == (2, 0)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_transformed_with_copies(tmp_path: Path, arch: str) -> None:
    write(tmp_path, "experts")
    l1, l2 = layer()
    experts = [3, 0, 3]
    weights = load_experts(tmp_path, LAYER, experts=experts, transformed=True, arch=arch)
    expected = deep_moe.transform_weights_for_mega_moe(
        l1[experts], l2[experts], arch, weights="bf16"
    )
    assert torch.equal(weights.l1.weight, expected.l1.weight)
    assert torch.equal(weights.l2.weight, expected.l2.weight)


def test_saved_and_loaded(tmp_path: Path) -> None:
    l1, l2 = layer()
    pairs = [(own, torch.empty(NUM_EXPERTS, 0)) for own in (l1, l2)]
    save_experts(tmp_path, {0: (pairs[0], pairs[1])})
    found = load_experts(tmp_path, 0)
    assert torch.equal(found.l1.weight, l1)
    assert torch.equal(found.l2.weight, l2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == l1.nbytes + l2.nbytes


def test_refusals(tmp_path: Path) -> None:
    write(tmp_path, "experts")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    naming = NAMINGS["experts"]
    assert isinstance(naming, ExpertNaming)
    down = naming.down.format(layer=LAYER, expert=2) + ".weight"

    save_file({**tensors, down: tensors[down].half()}, file)
    with pytest.raises(CheckpointError, match=f"{down} must be bfloat16, as the layer's first"):
        load_experts(tmp_path, LAYER)

    save_file({**tensors, down: tensors[down][:128].clone()}, file)
    with pytest.raises(CheckpointError, match=f"{down} must have shape"):
        load_experts(tmp_path, LAYER)

    scales = {f"{name}_scale": torch.ones(1) for name in tensors}
    save_file({**tensors, **scales}, file)
    with pytest.raises(CheckpointError, match=r"ignored beside \.weight: .*weight_scale"):
        load_experts(tmp_path, LAYER)

    del tensors[down]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"lacks expert 2 of the 4 .* no tensor {down}"):
        load_experts(tmp_path, LAYER)


def test_floats_of_other_kinds_are_no_weights(tmp_path: Path) -> None:
    write(tmp_path, "experts")
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(
        CheckpointError, match=r"weight must be torch.uint8.* \(mxfp4\) .* got torch.float32"
    ):
        load_experts(tmp_path, LAYER)
