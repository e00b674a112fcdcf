"""Shared experts of checkpoints: where they are, how they are cut, when they are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deep_moe.checkpoint import load_experts
from deep_moe.errors import CheckpointError

from .test_formats import HIDDEN, INTERMEDIATE, LAYER, NUM_EXPERTS, PARTS, SEPARATE, make, write

NAMES = {
    "experts": f"model.layers.{LAYER}.mlp.shared_experts.gate_proj.weight",
    "experts_multimodal": (
        f"model.language_model.layers.{LAYER}.mlp.shared_experts.gate_proj.weight"
    ),
    "experts_language_model": (
        f"language_model.model.layers.{LAYER}.mlp.shared_experts.gate_proj.weight"
    ),
    "mixtral_language_model": (
        f"language_model.model.layers.{LAYER}.block_sparse_moe.shared_experts.w1.weight"
    ),
    "step": f"model.layers.{LAYER}.moe.shared_experts.gate_proj.weight",
    "mixtral": f"model.layers.{LAYER}.block_sparse_moe.shared_experts.w1.weight",
    "numbered": f"layers.{LAYER}.ffn.shared_experts.w1.weight",
    "numbered_model": f"model.layers.{LAYER}.ffn.shared_experts.w1.weight",
    "mtp": f"mtp.{LAYER}.ffn.shared_experts.w1.weight",
    "mtp_model": f"model.mtp.{LAYER}.ffn.shared_experts.w1.weight",
}


def add_shared(folder: Path, kind: str, naming: str, num_shared: int) -> None:
    """All of them in one, as checkpoints have them, in a file of its own."""
    tensors = {}
    for part, (rows, columns) in PARTS.items():
        size = (rows, num_shared * columns) if part == "down" else (num_shared * rows, columns)
        name = getattr(SEPARATE[naming], part).format(layer=LAYER, expert="E")
        name = name.replace("experts.E", "shared_experts")
        tensors[name + ".weight"], tensors[name + ".weight_scale_inv"] = make(kind, *size)
    save_file(tensors, folder / "shared.safetensors")


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_128", "mxfp8"])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_they_stand_behind_each_ranks_own(tmp_path: Path, kind: str, num_shared: int) -> None:
    naming = "numbered"
    write(tmp_path, kind, naming)
    add_shared(tmp_path, kind, naming, num_shared)
    alone = load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2)
    loaded = load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2, num_shared_experts=num_shared)
    for own, both in zip(alone, loaded, strict=True):
        for tensor, whole in zip(own, both, strict=True):
            assert whole.shape[0] == NUM_EXPERTS // 2 + num_shared
            assert torch.equal(whole[: tensor.shape[0]].view(torch.uint8), tensor.view(torch.uint8))
    cut = {
        name.replace("shared_experts", f"experts.{i}"): part.contiguous()
        for name, tensor in load_file(tmp_path / "shared.safetensors").items()
        for i, part in enumerate(tensor.chunk(num_shared, dim=1 if ".w2." in name else 0))
    }
    (tmp_path / "cut").mkdir()
    save_file(cut, tmp_path / "cut" / "model.safetensors")
    expected = load_experts(tmp_path / "cut", LAYER, num_experts=num_shared)
    for own, both in zip(expected, loaded, strict=True):
        for tensor, whole in zip(own, both, strict=True):
            shared = whole[NUM_EXPERTS // 2 :]
            assert torch.equal(shared.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", SEPARATE)
def test_names_of_published_models(tmp_path: Path, name: str) -> None:
    naming = name
    write(tmp_path, "mxfp4", naming)
    add_shared(tmp_path, "mxfp4", naming, 1)
    assert NAMES[name] in load_file(tmp_path / "shared.safetensors")
    loaded = load_experts(tmp_path, LAYER, naming=name, num_shared_experts=1)
    assert loaded.l2.weight.shape == (NUM_EXPERTS + 1, HIDDEN, INTERMEDIATE // 2)


def test_transformed_one_by_one(tmp_path: Path) -> None:
    import deep_moe

    naming = "experts"
    write(tmp_path, "mxfp4", naming)
    add_shared(tmp_path, "mxfp4", naming, 2)
    raw = load_experts(tmp_path, LAYER, num_shared_experts=2)
    whole = deep_moe.transform_weights_for_mega_moe(*raw, arch="sm_90a")
    parts = load_experts(tmp_path, LAYER, num_shared_experts=2, arch="sm_90a", transformed=True)
    for expected, loaded in zip(whole, parts, strict=True):
        for one, other in zip(expected, loaded, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "num_shared", "asked", "words"),
    [
        ("fp8_128", 1, 1, "must be of the format of the layer's routed experts, mxfp4; it is fp8"),
        ("mxfp4", 2, 1, "must have 1 x 256 rows for num_shared_experts 1 .* got 512"),
        ("mxfp4", 0, 1, "lacks the shared experts of layer 1 .* has no tensor"),
    ],
)
def test_refusals(tmp_path: Path, kind: str, num_shared: int, asked: int, words: str) -> None:
    naming = "numbered"
    write(tmp_path, "mxfp4", naming)
    if num_shared:
        add_shared(tmp_path, kind, naming, num_shared)
    with pytest.raises(CheckpointError, match=words):
        load_experts(tmp_path, LAYER, num_shared_experts=asked)


def test_other_scales_and_names(tmp_path: Path) -> None:
    naming = "numbered"
    write(tmp_path, "mxfp8", naming)
    add_shared(tmp_path, "fp8_128", naming, 1)
    with pytest.raises(CheckpointError, match="mxfp8; it is fp8: compute"):
        load_experts(tmp_path, LAYER, num_shared_experts=1)
    for number in (-1, 5):
        with pytest.raises(ValueError, match=f"num_shared_experts must be 0 to 4; got {number}"):
            load_experts(tmp_path, LAYER, num_shared_experts=number)
    odd = replace(SEPARATE[naming], gate="layers.{layer}.ffn.experts.x{expert}.w1")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(r"(\d+\.w1)", r"x\1", name): own for name, own in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"naming must contain 'experts\.\{expert\}'"):
        load_experts(tmp_path, LAYER, naming=odd, num_shared_experts=1)
