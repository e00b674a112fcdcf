"""Layers as ModelOpt, compressed-tensors and others write them, byte by byte (written.py): every
weight is the number that the exporter means, and nothing that changes it is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deep_moe.checkpoint import load_experts, load_token_scale, save_experts
from deep_moe.checkpoint.forms import form_of
from deep_moe.errors import CheckpointError
from deep_moe.weights import weight_format
from deep_moe.weights.layers import ExpertWeights, one_expert

from .written import (
    Written,
    columns_first,
    compressed,
    fp8_blocks,
    fp8_whole,
    int4,
    modelopt,
    mxfp4,
    mxfp8,
    nvfp4,
    quark,
)

NUM_EXPERTS, HIDDEN, INTERMEDIATE, LAYER = 3, 256, 128, 2
PARTS = {
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
NAME = f"model.layers.{LAYER}.mlp.experts.{{expert}}.{{part}}_proj"

FLOAT8 = {"num_bits": 8, "type": "float"}


def per_row(rows: int, columns: int, dtype: torch.dtype = torch.float32, dims: int = 2) -> Written:
    if dims == 1:
        return fp8_whole(rows, columns, (rows,), modelopt("FP8_PER_CHANNEL_PER_TOKEN"), dtype)
    return fp8_whole(rows, columns, (rows, 1), compressed(**FLOAT8, strategy="channel"), dtype)


def quark_mxfp4(rows: int, columns: int) -> Written:
    args = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return quark(mxfp4(rows, columns), **args)


def quark_fp8(rows: int, columns: int) -> Written:
    written = fp8_whole(rows, columns, (), {})
    return quark(written, dtype="fp8_e4m3", qscheme="per_tensor", group_size=None)


# Formats, and who writes them.
CASES: dict[str, tuple[str, Callable[[int, int], Written]]] = {
    "nvfp4 modelopt": ("nvfp4", partial(nvfp4, is_divided=False)),
    "nvfp4 modelopt, static": ("nvfp4", partial(nvfp4, is_divided=False, is_static=True)),
    "nvfp4 compressed-tensors": ("nvfp4", partial(nvfp4, is_divided=True)),
    "nvfp4 compressed-tensors, static": (
        "nvfp4",
        partial(nvfp4, is_divided=True, is_static=True),
    ),
    "int4 32": ("int4", partial(int4, group_size=32, is_twos_complement=False)),
    "int4 128": ("int4", partial(int4, group_size=128, is_twos_complement=False)),
    "w4afp8": ("int4", partial(int4, group_size=128, is_twos_complement=True)),
    "mxfp8 modelopt": ("mxfp8", partial(mxfp8, suffix=".weight_scale", config=modelopt("MXFP8"))),
    "mxfp8 compressed-tensors": (
        "mxfp8",
        partial(mxfp8, suffix=".weight_scale", config=compressed(**FLOAT8, group_size=32)),
    ),
    "mxfp8": (
        "mxfp8",
        partial(mxfp8, suffix=".weight_scale_inv", config={"quant_method": "mxfp8"}),
    ),
    "fp8 per row": ("fp8", per_row),
    "fp8 per row, bf16": ("fp8", partial(per_row, dtype=torch.bfloat16)),
    "fp8 per row modelopt": ("fp8", partial(per_row, dims=1)),
    "fp8 per matrix": (
        "fp8",
        partial(fp8_whole, shape=(1,), config=compressed(**FLOAT8, strategy="tensor")),
    ),
    "fp8 per matrix modelopt": ("fp8", partial(fp8_whole, shape=(), config=modelopt("FP8"))),
    "fp8 blocks modelopt": ("fp8", partial(fp8_blocks, is_modelopt=True)),
    "fp8 blocks compressed-tensors": ("fp8", partial(fp8_blocks, is_modelopt=False)),
    "gptq": ("int4", partial(columns_first, is_awq=False, has_order=True)),
    "gptq without order": ("int4", partial(columns_first, is_awq=False)),
    "awq": ("int4", partial(columns_first, is_awq=True)),
    "mxfp4 compressed-tensors": ("mxfp4", partial(mxfp4, suffix=".weight_packed")),
    "mxfp4 quark": ("mxfp4", quark_mxfp4),
    "fp8 per matrix quark": ("fp8", quark_fp8),
}
with_all = pytest.mark.parametrize("case", CASES)

Parts = dict[tuple[int, str], Written]


def write(folder: Path, case: str, naming: str = NAME) -> Parts:
    """A layer, in one file; its matrices."""
    torch.manual_seed(0)
    parts = {
        (expert, part): CASES[case][1](*size)
        for expert in range(NUM_EXPERTS)
        for part, size in PARTS.items()
    }
    tensors = {
        naming.format(expert=expert, part=part) + suffix: tensor.contiguous()
        for (expert, part), written in parts.items()
        for suffix, tensor in written.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"num_experts": NUM_EXPERTS, "quantization_config": parts[0, "up"].config}
    (folder / "config.json").write_text(json.dumps(config))
    return parts


def change(folder: Path, name: str, by: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """One tensor; None: take it away."""
    tensors = load_file(folder / "model.safetensors")
    if by is None:
        del tensors[name]
    else:
        tensors[name] = by(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def check(loaded: ExpertWeights, parts: Parts, experts: list[int], weights: str) -> None:
    """Scales of matrices are rounded once where they were divisors, and those of GPTQ and AWQ from
    float16 to BF16."""
    source = weight_format(weights)
    for local, expert in enumerate(experts):
        l1 = torch.cat([parts[expert, "gate"].values, parts[expert, "up"].values])
        for layer, expected, num_matrices in (
            (loaded.l1, l1, 2),
            (loaded.l2, parts[expert, "down"].values, 1),
        ):
            found = source.dequantize(one_expert(layer, local), num_matrices)
            tensors = parts[expert, "up"].tensors
            tolerance = 2.0**-24 if ".weight_global_scale" in tensors else 0
            tolerance = 2.0**-8 if ".qweight" in tensors else tolerance
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@with_all
def test_values(tmp_path: Path, case: str) -> None:
    parts = write(tmp_path, case)
    weights = CASES[case][0]
    loaded = load_experts(tmp_path, LAYER, experts=[2, 0])
    check(loaded, parts, [2, 0], weights)
    form = form_of(loaded.l1)
    assert form is not None
    assert form.weights == weights


@with_all
def test_saved_again(tmp_path: Path, case: str) -> None:
    """In a spelling of the format, which need not be the one that it was in."""
    parts = write(tmp_path, case)
    loaded = load_experts(tmp_path, LAYER)
    save_experts(tmp_path / "again", {LAYER: (loaded.l1, loaded.l2)})
    again = load_experts(tmp_path / "again", LAYER)
    check(again, parts, [0, 1, 2], CASES[case][0])
    for layer, other in zip(loaded, again, strict=True):
        for tensor, same in zip(layer, other, strict=True):
            assert tensor.dtype == same.dtype
            assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8))


@with_all
def test_without_a_config_names_and_types_tell(tmp_path: Path, case: str) -> None:
    parts = write(tmp_path, case)
    (tmp_path / "config.json").unlink()
    loaded = load_experts(tmp_path, LAYER, num_experts=NUM_EXPERTS)
    check(loaded, parts, [0, 1, 2], CASES[case][0])


@with_all
def test_shared_experts(tmp_path: Path, case: str) -> None:
    """Two in one, cut. Scales of a whole matrix belong to both."""
    write(tmp_path, case)
    tensors, values = {}, {}
    for part, (rows, columns) in PARTS.items():
        size = (rows, 2 * columns) if part == "down" else (2 * rows, columns)
        written = CASES[case][1](*size)
        name = NAME.replace("experts.{expert}", "shared_experts").format(part=part)
        tensors |= {name + suffix: own.contiguous() for suffix, own in written.tensors.items()}
        values[part] = written.values.chunk(2, dim=1 if part == "down" else 0)
    save_file(tensors, tmp_path / "shared.safetensors")
    loaded = load_experts(tmp_path, LAYER, experts=[1], num_shared_experts=2)
    source = weight_format(CASES[case][0])
    for i in range(2):
        l1 = source.dequantize(one_expert(loaded.l1, 1 + i), 2)
        expected = torch.cat([values["gate"][i], values["up"][i]])
        tolerance = 2.0**-8 if case.startswith(("gptq", "awq")) else 2.0**-24
        torch.testing.assert_close(l1, expected, rtol=tolerance, atol=0)
        l2 = source.dequantize(one_expert(loaded.l2, 1 + i), 1)
        torch.testing.assert_close(l2, values["down"][i], rtol=tolerance, atol=0)


@with_all
def test_each_tensor_is_needed(tmp_path: Path, case: str) -> None:
    parts = write(tmp_path, case)
    optional = (".input_scale", ".input_global_scale", ".weight_shape", ".g_idx")
    for suffix in parts[1, "up"].tensors:
        name = NAME.format(expert=1, part="up") + suffix
        write(tmp_path, case)
        change(tmp_path, name, None)
        if suffix in optional:
            load_experts(tmp_path, LAYER)
        else:
            with pytest.raises(CheckpointError, match=f"lacks expert 1 .*has no tensor {name}"):
                load_experts(tmp_path, LAYER)


def poisoned(byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """With one byte of a one-byte type, in row 5, column 3."""

    def by(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8)[5, 3] = byte
        return tensor

    return by


@pytest.mark.parametrize(
    ("case", "suffix", "by", "words"),
    [
        ("nvfp4 modelopt", ".weight_scale", poisoned(0x7F), "NaN .* 0x7f.* row 5, column 3"),
        ("nvfp4 modelopt", ".weight_scale", poisoned(0xFF), "NaN .* 0xff.* row 5, column 3"),
        ("nvfp4 modelopt", ".weight_scale", poisoned(0x80), "sign .* 0x80.* row 5, column 3"),
        ("nvfp4 compressed-tensors", ".weight_scale", poisoned(0xB8), "sign .* 0xb8"),
        ("nvfp4 modelopt", ".weight_scale_2", torch.neg, "must be a number of at least 0; got -"),
        ("nvfp4 modelopt", ".weight_scale_2", lambda t: t / 0, "at least 0; got inf"),
        ("nvfp4 modelopt", ".weight_scale_2", lambda t: t.repeat(2), r"shape \(1,\) .*\(2,\)"),
        ("nvfp4 modelopt", ".weight_scale_2", torch.Tensor.half, "must be float32"),
        ("nvfp4 modelopt", ".weight_scale", lambda t: t[:, ::2].clone(), r"shape \(128, 16\)"),
        ("nvfp4 compressed-tensors", ".weight_global_scale", lambda t: t * 0, "positive number"),
        ("nvfp4 compressed-tensors", ".weight_global_scale", torch.neg, "positive number"),
        ("int4 32", ".weight_scale", lambda t: t.repeat(1, 2), r"shape \(128, 8\)"),
        (
            "int4 32",
            ".weight_scale",
            lambda t: t * torch.nan,
            "must hold numbers; got nan in row 0",
        ),
        ("int4 32", ".weight_scale", torch.Tensor.float, "must be bfloat16"),
        ("int4 32", ".weight_shape", lambda t: t + 1, r"must be \[128, 256\] .*got \[129, 257\]"),
        ("int4 32", ".weight_shape", lambda t: t[:1], r"must be \[128, 256\] .*got \[128\]"),
        ("w4afp8", ".weight_scale_inv", lambda t: t * torch.inf, "must hold numbers; got"),
        ("mxfp8", ".weight_scale_inv", poisoned(0xFF), "must hold numbers; got NaN .* in row 5"),
        ("fp8 per row", ".weight_scale", torch.neg, "must hold positive numbers; got -.* in row 0"),
        ("fp8 per row", ".weight_scale", lambda t: t[:1].clone(), r"shape \(128,\) .*got \(1,\)"),
        ("fp8 per matrix", ".weight_scale", lambda t: t * 0, "must hold positive numbers; got 0.0"),
        ("gptq", ".qzeros", lambda t: t + 1, "zero points of 7 alone, .* got 8"),
        ("gptq", ".g_idx", lambda t: t.flip(0), r"columns .* \(desc_act\) is not taken"),
        ("gptq", ".scales", lambda t: t * torch.inf, "must hold numbers; got inf in row 0"),
        ("gptq", ".scales", lambda t: t.repeat(2, 1), r"must have shape \(128, 2\)"),
        ("awq", ".qzeros", lambda t: t * 0, "zero points of 8 alone, .* got 0"),
        ("awq", ".qzeros", lambda t: t[:1].clone(), r"must have shape \(16, 2\)"),
    ],
)
def test_what_stands_for_no_number(
    tmp_path: Path, case: str, suffix: str, by: Any, words: str
) -> None:
    write(tmp_path, case)
    name = NAME.format(expert=1, part="up") + suffix
    change(tmp_path, name, by)
    with pytest.raises(CheckpointError, match=f"{name} .*{words}"):
        load_experts(tmp_path, LAYER)


@pytest.mark.parametrize(
    ("case", "suffix", "dtype", "value"),
    [
        ("nvfp4 modelopt", ".weight_scale", torch.uint8, 0x7F),
        ("nvfp4 compressed-tensors", ".weight_scale", torch.uint8, 0xB8),
        ("int4 32", ".weight_scale", torch.bfloat16, torch.nan),
        ("w4afp8", ".weight_scale_inv", torch.bfloat16, torch.inf),
        ("mxfp8", ".weight_scale_inv", torch.uint8, 0xFF),
        ("fp8 per row", ".weight_scale", torch.float32, -1),
        ("gptq", ".qzeros", torch.int32, 0x6777_7777),
        ("gptq", ".g_idx", torch.int32, 0),
        ("gptq", ".scales", torch.float16, torch.nan),
        ("awq", ".qzeros", torch.int32, 0x7888_8888),
    ],
)
def test_one_wrong_value_in_the_last_place(
    tmp_path: Path, case: str, suffix: str, dtype: torch.dtype, value: float
) -> None:
    def by(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(dtype).view(-1)[-1] = value
        return tensor

    write(tmp_path, case)
    name = NAME.format(expert=1, part="up") + suffix
    change(tmp_path, name, by)
    with pytest.raises(CheckpointError, match=name):
        load_experts(tmp_path, LAYER)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("nvfp4")])
def test_scales_of_zero_and_values_of_minus_zero(tmp_path: Path, case: str) -> None:
    """As older exporters write blocks of zeros."""
    parts = write(tmp_path, case)
    suffix = ".weight" if ".weight" in parts[0, "up"].tensors else ".weight_packed"
    name = NAME.format(expert=1, part="up")
    change(tmp_path, name + suffix, lambda t: torch.full_like(t, 0x88))
    change(tmp_path, name + ".weight_scale", lambda t: torch.zeros_like(t))
    loaded = load_experts(tmp_path, LAYER)
    l1 = weight_format("nvfp4").dequantize(one_expert(loaded.l1, 1), 2)
    assert torch.equal(l1[INTERMEDIATE:], torch.zeros(INTERMEDIATE, HIDDEN).double())


@pytest.mark.parametrize(
    ("case", "suffix", "why"),
    [
        ("int4 32", ".weight_zero_point", "not symmetric"),
        ("int4 32", ".weight_g_idx", "not in their order"),
        ("int4 32", ".input_scale", "tokens have a scale"),
        ("nvfp4 modelopt", ".pre_quant_scale", "tokens are multiplied by it"),
        ("nvfp4 modelopt", ".svdquant_lora_a", "low rank"),
        ("nvfp4 modelopt", ".weight_global_scale", "a second scale"),
        ("fp8 per matrix", ".weight_scale_2", "a second scale"),
    ],
)
def test_what_would_be_ignored(tmp_path: Path, case: str, suffix: str, why: str) -> None:
    write(tmp_path, case)
    name = NAME.format(expert=1, part="up") + suffix
    save_file({name: torch.ones(1)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=f"would be ignored .*{name}.*{why}"):
        load_experts(tmp_path, LAYER)


@pytest.mark.parametrize(
    ("case", "config", "words"),
    [
        ("nvfp4 modelopt", "nvfp4 compressed-tensors", "must have .weight_global_scale beside it"),
        ("nvfp4 compressed-tensors", "nvfp4 modelopt", "must have .weight_scale_2 beside it"),
        ("int4 32", "int4 128", "must have a scale for 128 values, .* it has one for 32 values"),
        ("w4afp8", "int4 32", "must have a scale for 32 values, .* it has one for 128 values"),
        ("fp8 per matrix", "fp8 per row", "must have a scale for each row, .* the whole matrix"),
        ("fp8 per row", "mxfp8 modelopt", "must have a scale for 32 values, .* for each row"),
        ("mxfp8", "nvfp4 modelopt", "must be nvfp4"),
    ],
)
def test_a_config_of_another(tmp_path: Path, case: str, config: str, words: str) -> None:
    """The other way to scale is told by names and config, never by the values."""
    write(tmp_path, case)
    other = CASES[config][1](32, 128).config
    document = {"num_experts": NUM_EXPERTS, "quantization_config": other}
    (tmp_path / "config.json").write_text(json.dumps(document))
    name = NAME.format(expert=0, part="gate")
    with pytest.raises(CheckpointError, match=f"{name}.* {words}"):
        load_experts(tmp_path, LAYER)


STATIC = {
    "nvfp4 modelopt, static": (".input_scale", lambda scale: scale),
    "nvfp4 compressed-tensors, static": (".input_global_scale", lambda scale: 1 / scale),
    "fp8 per matrix modelopt": (".input_scale", lambda scale: scale),
    "fp8 per matrix quark": (".input_scale", lambda scale: scale),
}


@pytest.mark.parametrize("case", STATIC)
def test_the_static_scale_of_tokens_is_the_largest_of_gate_and_up(
    tmp_path: Path, case: str
) -> None:
    suffix, factor = STATIC[case]
    parts = write(tmp_path, case)
    scales = [
        factor(parts[expert, part].tensors[suffix].reshape(()))
        for expert in range(NUM_EXPERTS)
        for part in ("gate", "up")
    ]
    change(tmp_path, NAME.format(expert=2, part="down") + suffix, torch.zeros_like)
    found = load_token_scale(tmp_path, LAYER)
    assert found is not None
    assert found.shape == (1,)
    torch.testing.assert_close(found[0], torch.stack(scales).amax(), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("case", sorted(set(CASES) - set(STATIC)))
def test_others_have_none_that_a_kernel_takes(tmp_path: Path, case: str) -> None:
    write(tmp_path, case)
    assert load_token_scale(tmp_path, LAYER) is None


@pytest.mark.parametrize("case", STATIC)
def test_a_static_scale_that_is_missing_or_wrong(tmp_path: Path, case: str) -> None:
    name = NAME.format(expert=1, part="up") + STATIC[case][0]
    for number in (0.0, -1.0, torch.nan, torch.inf):
        write(tmp_path, case)
        change(tmp_path, name, partial(torch.full_like, fill_value=number))
        with pytest.raises(CheckpointError, match=name):
            load_token_scale(tmp_path, LAYER)
    for by in (torch.Tensor.bfloat16, lambda scale: scale.expand(2).clone()):
        write(tmp_path, case)
        change(tmp_path, name, by)
        with pytest.raises(CheckpointError, match=f"{name} must be one float32; got"):
            load_token_scale(tmp_path, LAYER)
    write(tmp_path, case)
    change(tmp_path, name, None)
    with pytest.raises(CheckpointError, match=f"has no tensor {name}"):
        load_token_scale(tmp_path, LAYER)
