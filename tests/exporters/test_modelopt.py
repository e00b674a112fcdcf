"""ModelOpt quantizes a model and exports it; the loader reads the experts of that folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_moe.checkpoint import load_experts
from deep_moe.checkpoint.forms import form_of
from deep_moe.weights import weight_format
from deep_moe.weights.layers import one_expert

from .models import NUM_EXPERTS, VOCABULARY, experts_of, tiny_model

mtq = pytest.importorskip(
    "modelopt.torch.quantization", reason="make test-exporters installs nvidia-modelopt"
)

# ModelOpt's configs: the format, and how far weights may be from those that were quantized, RMS.
CONFIGS = {
    "NVFP4_DEFAULT_CFG": ("nvfp4", 0.12),
    "NVFP4_EXPERTS_ONLY_CFG": ("nvfp4", 0.12),
    "W4A16_NVFP4_CFG": ("nvfp4", 0.12),
    "MXFP8_DEFAULT_CFG": ("mxfp8", 0.05),
    "FP8_DEFAULT_CFG": ("fp8", 0.04),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("fp8", 0.04),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": ("fp8", 0.04),
}


def export(folder: Path, config: Any) -> Any:
    """The model's experts before that."""
    from modelopt.torch.export import export_hf_checkpoint

    model = tiny_model()
    before = experts_of(model)
    tokens = torch.randint(0, VOCABULARY, (2, 64))
    model = mtq.quantize(model, config, lambda own: own(tokens))
    export_hf_checkpoint(model, export_dir=folder)
    return before


def check_near(folder: Path, weights: str, before: Any, tolerance: float) -> None:
    loaded = load_experts(folder, 0)
    form = form_of(loaded.l1)
    assert form is not None
    assert form.weights == weights
    source = weight_format(weights)
    for layer, expected, num_matrices in zip(loaded, before, (2, 1), strict=True):
        for expert in range(NUM_EXPERTS):
            found = source.dequantize(one_expert(layer, expert), num_matrices)
            distance = (found - expected[expert]).norm() / expected[expert].norm()
            assert distance < tolerance, (expert, float(distance))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_old", [False, True])
def test_a_model(tmp_path: Path, name: str, is_old: bool) -> None:
    """is_old: with hf_quant_config.json alone, as older exports."""
    weights, tolerance = CONFIGS[name]
    before = export(tmp_path, getattr(mtq, name))
    if is_old:
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        del config["quantization_config"]
        file.write_text(json.dumps(config))
        assert (tmp_path / "hf_quant_config.json").exists()
    check_near(tmp_path, weights, before, tolerance)


def test_several_formats_in_one_model(tmp_path: Path) -> None:
    """Of experts and of all else, listed by module."""
    import copy

    config = copy.deepcopy(mtq.NVFP4_EXPERTS_ONLY_CFG)
    fp8 = {"num_bits": (4, 3), "axis": None}
    config["quant_cfg"] += [
        {"quantizer_name": f"*self_attn*{kind}_quantizer", "cfg": fp8, "enable": True}
        for kind in ("weight", "input")
    ]
    before = export(tmp_path, config)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["quant_algo"] == "MIXED_PRECISION"
    check_near(tmp_path, "nvfp4", before, 0.12)
