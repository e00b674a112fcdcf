"""compressed-tensors compresses modules; the loader reads what it wrote, and gives the numbers that
it gives back itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deep_moe.checkpoint import load_experts, save_experts
from deep_moe.checkpoint.forms import form_of
from deep_moe.weights import weight_format
from deep_moe.weights.layers import one_expert

pytest.importorskip("compressed_tensors", reason="make test-exporters installs it")

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 128
PARTS = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}

FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
# The format, what it is called, and arguments of weights.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nvfp4": (
        "nvfp4",
        "nvfp4-pack-quantized",
        FLOAT4 | {"strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4",
        "mxfp4-pack-quantized",
        FLOAT4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "int4 32": ("int4", "pack-quantized", INT4 | {"group_size": 32}),
    "int4 128": ("int4", "pack-quantized", INT4 | {"group_size": 128}),
    "mxfp8": (
        "mxfp8",
        "mxfp8-quantized",
        FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "rows": ("fp8", "float-quantized", FLOAT8 | {"strategy": "channel"}),
    "matrices": ("fp8", "float-quantized", FLOAT8 | {"strategy": "tensor"}),
    "blocks": (
        "fp8",
        "float-quantized",
        FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
    ),
}


def scales_for(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """By compressed-tensors' own rules."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    if args.strategy in ("group", "tensor_group"):
        groups = weight.unflatten(1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy == "block":
        blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    more = {}
    if args.strategy == "tensor_group":
        more["global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, _ = calculate_qparams(low, high, args, **more)
    made = {"weight_scale": scale}
    if more:
        made["weight_global_scale"] = more["global_scale"].reshape(1)
    return made


def written(folder: Path, case: str, *, is_static: bool) -> dict[str, torch.Tensor]:
    """A checkpoint; its modules' weights as compressed-tensors reads them, by name."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    _, name, own = CASES[case]
    args = QuantizationArgs(**own)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)
    torch.manual_seed(0)
    tensors, values = {}, {}
    for expert in range(NUM_EXPERTS):
        for part, size in PARTS.items():
            module = f"model.layers.0.mlp.experts.{expert}.{part}"
            weight = (torch.randn(size) * 0.05).bfloat16()
            state = {"weight": weight, **scales_for(weight, args)}
            state = compressor.compress(state, scheme)
            values[module] = compressor.decompress(dict(state), scheme)["weight"]
            tensors |= {f"{module}.{key}": own.contiguous() for key, own in state.items()}
            if is_static:
                tensors[f"{module}.input_global_scale"] = torch.rand(1)
    save_file(tensors, folder / "model.safetensors")
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=name, ignore=["re:.*lm_head"]
    )
    document = {"num_experts": NUM_EXPERTS, "quantization_config": config.to_dict()}
    (folder / "config.json").write_text(json.dumps(document, default=str))
    return values


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_the_same(tmp_path: Path, case: str) -> None:
    weights = CASES[case][0]
    values = written(tmp_path, case, is_static=case == "nvfp4")
    loaded = load_experts(tmp_path, 0)
    form = form_of(loaded.l1)
    assert form is not None
    assert form.weights == weights
    save_experts(tmp_path / "again", {0: (loaded.l1, loaded.l2)})
    source = weight_format(weights)
    for found in (loaded, load_experts(tmp_path / "again", 0)):
        for expert in range(NUM_EXPERTS):
            name = f"model.layers.0.mlp.experts.{expert}."
            l1 = torch.cat([values[name + "gate_proj"], values[name + "up_proj"]])
            for layer, expected, num_matrices in (
                (found.l1, l1, 2),
                (found.l2, values[name + "down_proj"], 1),
            ):
                own = source.dequantize(one_expert(layer, expert), num_matrices)
                # They are rounded to the type that they are given back in.
                bits = {torch.bfloat16: 8, torch.float32: 23}[expected.dtype]
                torch.testing.assert_close(own, expected.double(), rtol=2.0**-bits, atol=0)
