"""The names as models have them, written out here: which part is gate, which up, which down, and
which way round a grid of scales is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deep_moe.checkpoint import ExpertNaming, load_experts, save_experts
from deep_moe.checkpoint.namings import NAMINGS

from .test_formats import check, make, write

# Layer 3's expert 1: gate, up, down.
NAMES = {
    "experts": [f"model.layers.3.mlp.experts.1.{part}_proj" for part in ("gate", "up", "down")],
    "experts_multimodal": [
        f"model.language_model.layers.3.mlp.experts.1.{part}_proj"
        for part in ("gate", "up", "down")
    ],
    "experts_language_model": [
        f"language_model.model.layers.3.mlp.experts.1.{part}_proj"
        for part in ("gate", "up", "down")
    ],
    "mixtral_language_model": [
        f"language_model.model.layers.3.block_sparse_moe.experts.1.{part}"
        for part in ("w1", "w3", "w2")
    ],
    "nemotron": [f"backbone.layers.3.mixer.experts.1.{part}_proj" for part in ("up", "down")],
    "step": [f"model.layers.3.moe.experts.1.{part}_proj" for part in ("gate", "up", "down")],
    "mixtral": [f"model.layers.3.block_sparse_moe.experts.1.{part}" for part in ("w1", "w3", "w2")],
    "numbered": [f"layers.3.ffn.experts.1.{part}" for part in ("w1", "w3", "w2")],
    "numbered_model": [f"model.layers.3.ffn.experts.1.{part}" for part in ("w1", "w3", "w2")],
    "mtp": [f"mtp.3.ffn.experts.1.{part}" for part in ("w1", "w3", "w2")],
    "mtp_model": [f"model.mtp.3.ffn.experts.1.{part}" for part in ("w1", "w3", "w2")],
}
STACKED = "model.layers.3.mlp.experts."


def test_all_are_here() -> None:
    assert {*NAMES, "stacked", "stacked_plain"} == set(NAMINGS)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gate_up_and_down(tmp_path: Path, name: str, shared: bool) -> None:
    sizes = [(64, 128)] * (len(NAMES[name]) - 1) + [(128, 64)]
    parts = [torch.randn(size).bfloat16() for size in sizes]
    tensors = {}
    for number in range(2):
        for own, tensor in zip(NAMES[name], parts, strict=True):
            tensors[own.replace("experts.1", f"experts.{number}") + ".weight"] = tensor + number
    for own, tensor in zip(NAMES[name], parts, strict=True):
        tensors[own.replace("experts.1", "shared_experts") + ".weight"] = tensor + 2
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_experts(tmp_path, 3, num_experts=2, num_shared_experts=int(shared), naming=name)
    *l1, down = parts  # gate and up, or up alone
    for local, number in enumerate([0, 1, 2] if shared else [0, 1]):
        assert torch.equal(loaded.l1.weight[local], torch.cat(l1) + number)
        assert torch.equal(loaded.l2.weight[local], down + number)


@pytest.mark.parametrize("name", ["experts", "mixtral", "numbered"])
def test_what_is_saved_has_these_names(tmp_path: Path, name: str) -> None:
    l1, l2 = torch.randn(2, 128, 64).bfloat16(), torch.randn(2, 64, 64).bfloat16()
    naming = NAMINGS[name]
    assert isinstance(naming, ExpertNaming)
    save_experts(tmp_path, {3: ((l1, torch.empty(2, 0)), (l2, torch.empty(2, 0)))}, naming=naming)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    with_numbers = {own.replace("experts.1", f"experts.{e}") for own in NAMES[name] for e in (0, 1)}
    assert set(index["weight_map"]) == {own + ".weight" for own in with_numbers}


def test_stacked_gate_before_up(tmp_path: Path) -> None:
    gate, up, down = torch.randn(3, 2, 64, 64).bfloat16()  # all of one size
    tensors = {STACKED + "gate_up_proj": torch.cat([gate, up], dim=1), STACKED + "down_proj": down}
    save_file({name: own.contiguous() for name, own in tensors.items()}, tmp_path / "a.safetensors")
    loaded = load_experts(tmp_path, 3)
    assert torch.equal(loaded.l1.weight, tensors[STACKED + "gate_up_proj"])
    assert torch.equal(loaded.l2.weight, down)


def test_stacked_gate_and_up_in_turn(tmp_path: Path) -> None:
    """Of values and of scales, here in a square grid."""
    gate, up, down = torch.randint(0, 256, (3, 2, 64, 32), dtype=torch.uint8)
    scales = torch.arange(2 * 128 * 2, dtype=torch.int32).remainder(250).view(2, 128, 2).byte()
    tensors = {
        "gate_up_proj_blocks": torch.stack([gate, up], dim=2).flatten(1, 2),
        "gate_up_proj_scales": scales,
        "down_proj_blocks": down.contiguous(),
        "down_proj_scales": torch.full((2, 64, 2), 127, dtype=torch.uint8),
    }
    save_file({STACKED + name: own for name, own in tensors.items()}, tmp_path / "a.safetensors")
    loaded = load_experts(tmp_path, 3)
    assert torch.equal(loaded.l1.weight.view(torch.uint8), torch.cat([gate, up], dim=1))
    found = loaded.l1.sf.view(torch.uint8)[..., :2]
    assert torch.equal(found, torch.cat([scales[:, 0::2], scales[:, 1::2]], dim=1))


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [("fp8_128", 256, 256), ("mxfp8", 32, 1024), ("fp8_bytes", 32, 1024)],
)
def test_a_square_grid_of_scales(tmp_path: Path, kind: str, rows: int, columns: int) -> None:
    """As many of rows as of columns: the shape does not tell which way round they are."""
    sizes = {"gate": (rows, columns), "up": (rows, columns), "down": (columns, rows)}
    parts = write(tmp_path, kind, sizes=sizes)
    scales = parts[0, "gate"][1]
    assert scales.shape[0] == scales.shape[1]
    loaded = load_experts(tmp_path, 1)
    check(loaded, parts, [0, 1, 2, 3])
    save_experts(tmp_path / "again", {1: loaded})
    check(load_experts(tmp_path / "again", 1), parts, [0, 1, 2, 3])


def test_a_square_grid_of_mxfp4_scales(tmp_path: Path) -> None:
    weight, scales = make("mxfp4", 32, 1024)
    scales = torch.arange(32 * 32, dtype=torch.int32).remainder(200).byte().view(32, 32)
    down, down_scales = make("mxfp4", 1024, 32)
    tensors = {}
    for part, (own, sf) in {
        "gate": (weight, scales),
        "up": (weight.clone(), scales.T.contiguous()),
        "down": (down, down_scales[:, :1].contiguous()),
    }.items():
        name = f"model.layers.3.mlp.experts.0.{part}_proj"
        tensors |= {f"{name}.weight": own, f"{name}.weight_scale": sf}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_experts(tmp_path, 3, num_experts=1)
    found = loaded.l1.sf[0].view(torch.uint8)
    assert torch.equal(found, torch.cat([scales, scales.T]))
