"""Nothing that an expert has is ignored: biases, second scales, zero points, orders of columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deep_moe
from deep_moe.checkpoint import ExpertNaming, load_biases, load_experts
from deep_moe.errors import CheckpointError

from .test_formats import HIDDEN, INTERMEDIATE, LAYER, NUM_EXPERTS, PARTS, write
from .test_shared_experts import add_shared

EXPERT = f"model.layers.{LAYER}.mlp.experts.2."
SHARED = f"model.layers.{LAYER}.mlp.shared_experts."


def add(folder: Path, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> None:
    there = load_file(folder / file) if (folder / file).exists() else {}
    save_file({**there, **tensors}, folder / file)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_128"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("up_proj.weight_scale_2", "a second scale, as NVFP4"),
        ("up_proj.weight_global_scale", "a second scale, as NVFP4"),
        ("down_proj.weight_zero_point", "not symmetric around zero"),
        ("gate_proj.weight_g_idx", "columns are not in their order"),
        ("gate_proj.input_scale", "tokens have a scale"),
        ("gate_proj.weight_packed", ""),
        ("gate_proj.weigh", ""),
        ("gate_proj_lora_a.weight", ""),
        ("weight_scale", ""),
        ("norm.weight", ""),
    ],
)
def test_a_tensor_of_an_expert_that_is_not_known(
    tmp_path: Path, kind: str, name: str, why: str
) -> None:
    write(tmp_path, kind)
    add(tmp_path, {EXPERT + name: torch.ones(1)}, "more.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"ignored beside \.weight, .*: {EXPERT}{name}.*{why}"
    ):
        load_experts(tmp_path, LAYER)


@pytest.mark.parametrize(
    "name", ["gate_up_proj_blocks", "02.gate_proj.weight", "\u0662.gate_proj.weight", "scale"]
)
def test_a_tensor_among_the_experts_of_no_number(tmp_path: Path, name: str) -> None:
    write(tmp_path, "mxfp4")
    name = f"model.layers.{LAYER}.mlp.experts.{name}"
    add(tmp_path, {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=name):
        load_experts(tmp_path, LAYER, naming="experts")


def test_other_layers_and_modules_may_have_what_they_like(tmp_path: Path) -> None:
    write(tmp_path, "mxfp4")
    prefix = f"model.layers.{LAYER}"
    others = [f"{prefix}1.mlp.experts.0.gate_proj.weight_scale_2", f"{prefix}.mlp.gate.bias"]
    add(tmp_path, {name: torch.ones(1) for name in [*others, SHARED + "up_proj.g_idx"]})
    load_experts(tmp_path, LAYER)


@pytest.mark.parametrize("name", ["up_proj.bias", "up_proj.weight_scale_2", "gate.weight"])
def test_shared_experts(tmp_path: Path, name: str) -> None:
    write(tmp_path, "mxfp4")
    add_shared(tmp_path, "mxfp4", "experts", 1)
    add(tmp_path, {SHARED + name: torch.ones(INTERMEDIATE)}, "shared.safetensors")
    with pytest.raises(CheckpointError, match=f"would be ignored .* {SHARED}{name}"):
        load_experts(tmp_path, LAYER, num_shared_experts=1)


def test_of_a_naming_of_ones_own(tmp_path: Path) -> None:
    naming = ExpertNaming("g{layer}e{expert}", "u{layer}e{expert}", "d{layer}e{expert}")
    tensors = {
        f"{part}1e{expert}.weight": torch.zeros(size, dtype=torch.bfloat16)
        for part, size in (("g", (32, 64)), ("u", (32, 64)), ("d", (64, 32)))
        for expert in range(2)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    load_experts(tmp_path, 1, naming=naming, num_experts=2)
    add(tmp_path, {"u1e1.factor": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"ignored beside \.weight: u1e1\.factor"):
        load_experts(tmp_path, 1, naming=naming, num_experts=2)


def test_a_layer_by_two_namings(tmp_path: Path) -> None:
    write(tmp_path, "fp8_128", "experts")
    own = load_file(tmp_path / "model.safetensors")
    write(tmp_path, "mxfp4", "numbered")
    save_file(own, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="give naming, one of experts, numbered"):
        load_experts(tmp_path, LAYER)
    assert load_experts(tmp_path, LAYER, naming="numbered").l1.weight.dtype == torch.int8


class TestBiasesOfSeparateExperts:
    @pytest.fixture
    def biases(self, tmp_path: Path) -> dict[str, Any]:
        write(tmp_path, "mxfp4")
        biases = {
            f"model.layers.{LAYER}.mlp.experts.{expert}.{part}_proj.bias": torch.randn(size[0])
            for expert in range(NUM_EXPERTS)
            for part, size in PARTS.items()
        }
        add(tmp_path, biases)
        return biases

    def test_they_are_read_gate_before_up(self, tmp_path: Path, biases: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match=r"\.bias: load biases with load_biases, and say"):
            load_experts(tmp_path, LAYER)
        load_experts(tmp_path, LAYER, biases_apart=True)
        found = load_biases(tmp_path, LAYER, rank_idx=1, num_ranks=2)
        assert found is not None
        prefix = f"model.layers.{LAYER}.mlp.experts.3."
        assert torch.equal(found.l1[1, :INTERMEDIATE], biases[prefix + "gate_proj.bias"])
        assert torch.equal(found.l1[1, INTERMEDIATE:], biases[prefix + "up_proj.bias"])
        assert torch.equal(found.l2[1], biases[prefix + "down_proj.bias"])
        laid_out = deep_moe.transform_biases_for_mega_moe(*found, weights="mxfp4")
        assert laid_out.l2.shape == (2, -(-HIDDEN // 256), 256)

    @pytest.mark.parametrize("function", [load_experts, load_biases])
    def test_all_of_an_expert_or_none(
        self, tmp_path: Path, biases: dict[str, Any], function: Any
    ) -> None:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors[EXPERT + "up_proj.bias"]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"has no tensor {EXPERT}up_proj\.bias"):
            function(tmp_path, LAYER)

    @pytest.mark.parametrize(
        ("bias", "words"),
        [
            (torch.zeros(INTERMEDIATE + 1), "must have 256 rows"),
            (torch.zeros(1, INTERMEDIATE), "must have 256 rows"),
            (torch.zeros(INTERMEDIATE).half(), "must be bfloat16 or float32; got torch.float16"),
        ],
    )
    def test_of_another_form(
        self, tmp_path: Path, biases: dict[str, Any], bias: torch.Tensor, words: str
    ) -> None:
        add(tmp_path, {EXPERT + "gate_proj.bias": bias})
        with pytest.raises(CheckpointError, match=rf"{EXPERT}gate_proj\.bias {words}"):
            load_biases(tmp_path, LAYER)


def test_a_file_with_a_tensor_that_the_index_does_not_have(tmp_path: Path) -> None:
    """What an index does not name would else be ignored."""
    write(tmp_path, "mxfp4")
    names = list(load_file(tmp_path / "model.safetensors"))
    weight_map = dict.fromkeys(names, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    add(tmp_path, {"model.norm.weight": torch.ones(1)})
    load_experts(tmp_path, LAYER)
    add(tmp_path, {EXPERT + "up_proj.bias": torch.ones(INTERMEDIATE)})
    with pytest.raises(CheckpointError, match=rf"{EXPERT}up_proj.bias, which by the index is now"):
        load_experts(tmp_path, LAYER)
