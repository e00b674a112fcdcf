"""Checkpoints that are damaged, or made to do harm: each is refused with file or tensor, and costs
no more than it is large."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deep_moe.checkpoint import load_experts
from deep_moe.errors import CheckpointError

from .test_formats import LAYER, write

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UP = f"model.layers.{LAYER}.mlp.experts.2.up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an index."""
    write(tmp_path, "fp8_128")
    write_index(tmp_path, FILE)
    return tmp_path


def write_index(folder: Path, file: Any) -> None:
    weight_map = dict.fromkeys(load_file(folder / FILE), file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_experts(folder, LAYER)


@pytest.mark.parametrize("name", [INDEX, CONFIG])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight_map":' + "[" * 100_000, "recursion"),
        ("[" * 100_000, "recursion"),
        ('{"num_experts": 4, "num_experts": 5, "weight_map": {}}', "'num_experts' twice"),
        ('{"num_experts": ' + "9" * 5000 + "}", "limit"),
        (b"\xff\xfe{}", "utf-8"),
        ("", "Expecting value"),
    ],
)
def test_json(folder: Path, name: str, text: str | bytes, words: str) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, f"{name} must hold a JSON object.*{words}")


@pytest.mark.parametrize("name", [INDEX, CONFIG, FILE])
def test_what_is_no_regular_file_is_not_opened(folder: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir, lambda file: file.symlink_to("/dev/zero")):
        file = folder / name
        file.unlink() if not file.is_dir() else file.rmdir()
        make(file)
        refused(folder, f"{name} .* it must be a regular file")
    if name == FILE:  # and among files without an index
        (folder / INDEX).unlink()
        refused(folder, f"{name} .* it must be a regular file")


@pytest.mark.parametrize("value", ["NaN", "1e400", "-4", "true", "4.0", '"4"', "[4]", "0"])
def test_a_number_of_experts_that_is_none(folder: Path, value: str) -> None:
    (folder / CONFIG).write_text(f'{{"num_experts": {value}}}')
    refused(folder, "config.json must give experts as a positive int; got num_experts")


@pytest.mark.parametrize("count", [10**9, 10**18, 10**4000])
def test_more_experts_than_can_be_listed(folder: Path, count: int) -> None:
    (folder / CONFIG).write_text(json.dumps({"num_experts": count}))
    refused(folder, rf"lacks experts 4, 5, 6, .*, 11 and {count - 12} more of the {count}")


@pytest.mark.parametrize("count", ["99999999999", "9" * 200])
def test_more_shards_than_can_be_listed(folder: Path, count: str) -> None:
    (folder / INDEX).unlink()
    tensors = load_file(folder / FILE)
    del tensors[UP + ".weight"]
    save_file(tensors, folder / f"model-00002-of-{count}.safetensors")
    (folder / FILE).unlink()
    refused(folder, rf"lacks expert 2 .*model-00001-of-{count}.safetensors, .* more \(the number")


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/tmp/model.safetensors", "a/../../b", "", ".", 3, None, []]
)
def test_paths_stay_in_the_folder(folder: Path, file: Any) -> None:
    write_index(folder, file)
    refused(folder, f"{INDEX} must name a file in its folder for each tensor; got")


def test_files_of_a_cache_are_links(folder: Path) -> None:
    blob = folder / "blobs"
    blob.mkdir()
    (folder / FILE).rename(blob / "abc")
    (folder / FILE).symlink_to(blob / "abc")
    load_experts(folder, LAYER)


def test_a_tensor_in_two_files(folder: Path) -> None:
    other = {UP + ".weight": torch.zeros(256, 384)}
    save_file(other, folder / "zz.safetensors")
    load_experts(folder, LAYER)  # by the index it is not the checkpoint's
    (folder / INDEX).unlink()
    refused(folder, f"zz.safetensors and .*{FILE} both hold {UP}.weight")
    write_index(folder, FILE)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][UP + ".weight_scale_inv"] = "zz.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, f"{FILE} has {UP}.weight_scale_inv, which by the index is in .*zz.safetensors")


def raw(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        raw({}, size=2**63 - 1),
        raw({}, size=2**64 - 1),
        raw({}, size=99_000_000),
        raw({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"abcdef"),
        raw({"a": entry("U8", [2**62, 8], 0, 4)}, b"abcd"),
        raw({"a": entry("U8", [4], 0, 4)}, b"ab"),
        raw({"a": entry("U8", [4], 0, 4)}, b"abcdef"),
        raw({"a": entry("X9", [4], 0, 4)}, b"abcd"),
    ],
)
def test_files_that_are_no_safetensors(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    refused(folder, f"{FILE} is no safetensors file: ")


@pytest.mark.parametrize("suffix", [".weight", ".weight_scale_inv"])
@pytest.mark.parametrize(
    ("own", "data"),
    [
        (entry("F4", [2, 4], 0, 4), b"abcd"),
        (entry("F6_E2M3", [4, 4], 0, 12), b"abcdabcdabcd"),
        (entry("F8_E4M3FNUZ", [2, 2], 0, 4), b"abcd"),
        (entry("C64", [1], 0, 8), b"abcdabcd"),
        (entry("U8", [], 0, 1), b"a"),
        (entry("F8_E4M3", [2**64 - 1, 0], 0, 0), b""),
        (entry("F8_E4M3", [2**40, 0], 0, 0), b""),
        (entry("F8_E4M3", [1] * 60, 0, 1), b"a"),
        (entry("BOOL", [1, 1], 0, 1), b"\x07"),
    ],
)
def test_tensors_that_are_no_weights(
    folder: Path, suffix: str, own: dict[str, Any], data: bytes
) -> None:
    for module in (UP, UP.replace("experts.2.up", "experts.0.gate")):
        write(folder, "fp8_128")
        tensors = load_file(folder / FILE)
        del tensors[module + suffix]
        save_file(tensors, folder / FILE)
        (folder / "bad.safetensors").write_bytes(raw({module + suffix: own}, data))
        index = dict.fromkeys(tensors, FILE) | {module + suffix: "bad.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
        refused(folder, module + suffix)


def test_stacked_tensors_of_no_experts(tmp_path: Path) -> None:
    prefix = f"model.layers.{LAYER}.mlp.experts."
    for shape in ([], [0], [10**12, 0], [10**12, 0, 0], [0, 64, 64], [2, 3, 64], [2, 64]):
        count = 0 if 0 in shape else 2 * torch.Size(shape).numel()
        header = {
            prefix + "gate_up_proj": entry("BF16", shape, 0, count),
            prefix + "down_proj": entry("BF16", shape, count, 2 * count),
        }
        (tmp_path / FILE).write_bytes(raw(header, b"\0" * 2 * count))
        refused(tmp_path, f"{prefix}|sizes must")


@pytest.mark.parametrize("number", ["00", "9" * 10, "9" * 5000, "-1", "1.5", "\u0664"])
def test_numbers_of_experts_in_names(folder: Path, number: str) -> None:
    (folder / INDEX).unlink()
    name = UP.replace("experts.2", f"experts.{number}") + ".weight"
    save_file({name: torch.zeros(1)}, folder / "more.safetensors")
    refused(folder, "ignored beside")


@pytest.mark.parametrize("layer", [-1, 10**30])
def test_numbers_of_layers(folder: Path, layer: int) -> None:
    words = "layer must be at least 0; got -1" if layer < 0 else f"no experts of layer {layer}"
    with pytest.raises((ValueError, CheckpointError), match=words):
        load_experts(folder, layer)
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match="layer must be an int"):
            load_experts(folder, wrong)  # type: ignore[arg-type]


def test_a_large_first_expert_costs_no_memory_for_others(tmp_path: Path) -> None:
    """All shapes are compared before anything of the layer is allocated."""
    prefix = f"model.layers.{LAYER}.mlp.experts."
    tensors = {
        f"{prefix}0.{part}_proj.weight": torch.zeros(2048, 2048).bfloat16() for part in PARTS
    }
    small = {
        f"{prefix}{expert}.{part}_proj.weight": torch.zeros(1).bfloat16()
        for expert in range(1, 10_000)
        for part in PARTS
    }
    save_file({**tensors, **small}, tmp_path / FILE)  # the layer would take 240 GB
    (tmp_path / CONFIG).write_text('{"num_experts": 10000}')
    refused(tmp_path, rf"{prefix}1\.gate_proj\.weight must have shape \(2048, 2048\)")


PARTS = ("gate", "up", "down")
