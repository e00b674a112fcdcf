"""Checkpoints of other forms than MXFP4 by module: FP8, the names of published models, copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deep_moe
from deep_moe.checkpoint import ExpertNaming, load_experts
from deep_moe.checkpoint.namings import NAMINGS
from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import unpack_ue8m0

NUM_EXPERTS, HIDDEN, INTERMEDIATE, LAYER = 4, 384, 256, 1
SEPARATE = {
    name: own
    for name, own in NAMINGS.items()
    if isinstance(own, ExpertNaming) and own.gate is not None
}
# Suffixes of weights and scales, as published models have them.
SUFFIXES = [
    (".weight", ".weight_scale"),
    (".weight", ".weight_scale_inv"),
    (".weight_packed", ".weight_scale"),
    (".weight", ".scale"),
]
PARTS = {
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}


def make(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of one matrix."""
    if kind == "mxfp4":
        packed, sf = deep_moe.quantize_mxfp4(torch.randn(rows, columns))
        return packed, unpack_ue8m0(sf)
    values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    if kind == "fp8_128":
        return values, torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    scales = torch.randint(120, 130, (rows, columns // 32), dtype=torch.uint8)
    return values, scales.view(torch.float8_e8m0fnu) if kind == "mxfp8" else scales


def write(
    folder: Path,
    kind: str,
    naming: str = "experts",
    layer: int = LAYER,
    sizes: dict[str, tuple[int, int]] = PARTS,
    suffixes: tuple[str, str] = (".weight", ".weight_scale_inv"),
) -> dict[str, Any]:
    """One file; its tensors by (expert, part)."""
    torch.manual_seed(0)
    tensors, parts = {}, {}
    for expert in range(NUM_EXPERTS):
        for part, size in sizes.items():
            name = getattr(SEPARATE[naming], part).format(layer=layer, expert=expert)
            weight, scale = parts[expert, part] = make(kind, *size)
            tensors[name + suffixes[0]], tensors[name + suffixes[1]] = weight, scale
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"n_routed_experts": NUM_EXPERTS}))
    return parts


def joined(
    parts: dict[str, Any], experts: list[int], index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What load_experts makes of FP8: of both layers, weights (0) or scales (1)."""
    bits = {key: pair[index].view(torch.uint8) for key, pair in parts.items()}
    l1 = torch.stack([torch.cat([bits[e, "gate"], bits[e, "up"]]) for e in experts])
    return l1, torch.stack([bits[e, "down"] for e in experts])


def check(loaded: Any, parts: dict[str, Any], experts: list[int]) -> None:
    for index in (0, 1):
        for pair, expected in zip(loaded, joined(parts, experts, index), strict=True):
            assert torch.equal(pair[index].view(torch.uint8), expected)


@pytest.mark.parametrize("kind", ["fp8_128", "mxfp8", "fp8_bytes"])
def test_fp8_is_read_as_it_is(tmp_path, kind):
    parts = write(tmp_path, kind)
    loaded = load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2)
    assert loaded.l1.weight.dtype == torch.float8_e4m3fn
    assert loaded.l1.sf.dtype == (torch.float32 if kind == "fp8_128" else torch.uint8)
    check(loaded, parts, [2, 3])


@pytest.mark.parametrize("kind", ["fp8_128", "mxfp8"])
def test_fp8_of_sizes_that_are_no_multiples_of_128(tmp_path, kind):
    """The last blocks of each matrix cover fewer rows and columns."""
    sizes = {"gate": (160, 352), "up": (160, 352), "down": (352, 160)}
    parts = write(tmp_path, kind, sizes=sizes)
    loaded = load_experts(tmp_path, LAYER)
    check(loaded, parts, [*range(NUM_EXPERTS)])
    arch = "sm_90a" if kind == "fp8_128" else "sm_100a"
    made = load_experts(tmp_path, LAYER, arch=arch, transformed=True)
    back = deep_moe.inverse_transform_weights(
        *made, arch, weights="fp8", hidden=352, intermediate_hidden=160
    )
    assert torch.equal(back.l1.weight.view(torch.uint8), loaded.l1.weight.view(torch.uint8))
    assert back.l2.weight.shape == (NUM_EXPERTS, 352, 160)


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize("suffixes", SUFFIXES)
@pytest.mark.parametrize("kind", ["mxfp4", "fp8_128"])
def test_the_names_of_published_models(tmp_path, name, suffixes, kind):
    parts = write(tmp_path, kind, name, suffixes=suffixes)
    loaded = load_experts(tmp_path, LAYER)  # found without being named
    if kind == "fp8_128":
        check(loaded, parts, [*range(NUM_EXPERTS)])
    for naming in (name, NAMINGS[name]):
        again = load_experts(tmp_path, LAYER, naming=naming)
        for pair, other in zip(again, loaded, strict=True):
            assert all(map(torch.equal, pair, other))


def test_layers_for_further_tokens_are_apart(tmp_path):
    """Both are there under one number; only the name says which."""
    plain = write(tmp_path, "fp8_128", "numbered", layer=0)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {name.replace("layers.", "mtp."): t.clone() for name, t in tensors.items()}
    for name, tensor in further.items():
        if name.endswith("_scale_inv"):
            tensor.mul_(2)
    save_file({**tensors, **further}, tmp_path / "model.safetensors")
    check(load_experts(tmp_path, 0), plain, [*range(NUM_EXPERTS)])
    mtp = load_experts(tmp_path, 0, naming="mtp")
    assert torch.equal(mtp.l1.sf, 2 * load_experts(tmp_path, 0).l1.sf)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_128"])
def test_any_experts_in_any_order(tmp_path, kind):
    write(tmp_path, kind)
    whole = load_experts(tmp_path, LAYER)
    some = load_experts(tmp_path, LAYER, experts=[3, 0, 3])
    of_tensor = load_experts(tmp_path, LAYER, experts=torch.tensor([3, 0, 3]))
    assert of_tensor.l1.weight.view(torch.uint8).equal(some.l1.weight.view(torch.uint8))
    for pair, all_of in zip(some, whole, strict=True):
        for tensor, every in zip(pair, all_of, strict=True):
            assert torch.equal(tensor.view(torch.uint8), every[[3, 0, 3]].view(torch.uint8))
    arch = "sm_90a"
    one_by_one = load_experts(tmp_path, LAYER, experts=[3, 0, 3], arch=arch, transformed=True)
    form = "fp8" if kind == "fp8_128" else "mxfp4"
    expected = deep_moe.transform_weights_for_mega_moe(*some, arch, weights=form)
    for pair, other in zip(one_by_one, expected, strict=True):
        for tensor, wanted in zip(pair, other, strict=True):
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": [0, 4]}, "experts must be some of 0 to 3, those of layer 1; got 4"),
        ({"experts": [-1]}, "experts must be some of 0 to 3.* got -1"),
        ({"experts": []}, "experts must be some of 0 to 3.* got none"),
        ({"experts": [True]}, "experts must be some of 0 to 3.* got True"),
        ({"experts": [0], "num_ranks": 2}, "num_ranks must be 1 beside experts.* got 2"),
        ({"naming": "nobody's"}, 'naming must be one of experts, .*; got "nobody\'s"'),
    ],
)
def test_bad_arguments(tmp_path, options, words):
    write(tmp_path, "mxfp4")
    with pytest.raises(ValueError, match=words):
        load_experts(tmp_path, LAYER, **options)


def test_scales_that_a_target_does_not_apply(tmp_path):
    write(tmp_path, "fp8_128")
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj by itself: l1_weights"):
        load_experts(tmp_path, LAYER, experts=[2], arch="sm_100a", transformed=True)
    with pytest.warns(deep_moe.RequantizationWarning):
        load_experts(
            tmp_path, LAYER, experts=[2], arch="sm_100a", requantize=True, transformed=True
        )


NAME = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (".weight", lambda t: t.view(torch.uint8), "must be float8_e4m3fn, as .* torch.uint8"),
        (".weight", lambda t: t[:128].clone(), r"must have shape \(256, 384\) .* got \(128, 384\)"),
        ("_scale", lambda t: t.double(), "must be torch.float32, as .* got torch.float64"),
        ("_scale", lambda t: t[:1].clone(), r"must have shape \(2, 3\) .* got \(1, 3\)"),
        (
            "_scale",
            lambda t: t * torch.tensor([1, 1, torch.nan]),
            "must hold positive numbers; got nan in row 0",
        ),
        (
            "_scale",
            lambda t: t * torch.tensor([[1.0], [0.0]]),
            "must hold positive numbers; got 0.0 in row 1",
        ),
        ("_scale", lambda t: -t, "must hold positive numbers; got -"),
    ],
)
def test_tensors_of_another_form(tmp_path, name, change, words):
    write(tmp_path, "fp8_128")
    name = NAME + (".weight" if name == ".weight" else ".weight_scale_inv")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} {words}"):
        load_experts(tmp_path, LAYER)


def test_scales_for_other_blocks(tmp_path):
    write(tmp_path, "fp8_128")
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = torch.ones(4, 6)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} must hold .* 128 x 128 .* got .*\[4, 6\]"):
        load_experts(tmp_path, LAYER)


def test_a_mxfp8_scale_that_is_nan(tmp_path):
    write(tmp_path, "fp8_bytes")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME + ".weight_scale_inv"][7, 3] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{NAME}.* must hold numbers; got NaN .* in row 7"):
        load_experts(tmp_path, LAYER)
