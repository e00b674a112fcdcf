"""Saving loses nothing: layers are added, nothing is overwritten unasked, and it is all or nothing,
wherever a save is killed or fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deep_moe
from deep_moe.checkpoint import experts, load_experts, save_experts, saving
from deep_moe.checkpoint.files import INDEX_NAME
from deep_moe.checkpoint.namings import NAMINGS
from deep_moe.errors import CheckpointError

from .test_formats import make

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 4, 128, 64


def layer(seed: int) -> Any:
    torch.manual_seed(seed)
    l1 = deep_moe.quantize_mxfp4(torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN))
    return l1, deep_moe.quantize_mxfp4(torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE))


def holds(folder: Path, number: int, expected: Any) -> bool:
    loaded = load_experts(folder, number)
    return all(
        torch.equal(own, other)
        for pair, expected_pair in zip(loaded, expected, strict=True)
        for own, other in zip(pair, expected_pair, strict=True)
    )


def state(folder: Path, old: Any, new: Any) -> str:
    try:
        return "new" if holds(folder, 0, new) else "old" if holds(folder, 0, old) else "?"
    except CheckpointError:
        return "none"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_layer_by_layer(tmp_path: Path) -> None:
    for number in (3, 0, 12):
        save_experts(tmp_path, {number: layer(number)}, experts_per_file=2)
    assert all(holds(tmp_path, number, layer(number)) for number in (0, 3, 12))
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    tensors = [t for file in tmp_path.glob("*.safetensors") for t in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    assert len(index["weight_map"]) == len(tensors) == 3 * NUM_EXPERTS * 6


def test_a_layer_is_replaced_only_when_asked(tmp_path: Path) -> None:
    save_experts(tmp_path, {0: layer(0), 1: layer(1)})
    before = contents(tmp_path)
    with pytest.raises(
        ValueError, match=r"overwrite must be True to replace layer 1, .*experts\.0"
    ):
        save_experts(tmp_path, {2: layer(2), 1: layer(5)})
    assert contents(tmp_path) == before
    save_experts(tmp_path, {1: layer(5)}, overwrite=True, experts_per_file=3)
    assert holds(tmp_path, 0, layer(0))
    assert holds(tmp_path, 1, layer(5))
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert files == set(index["weight_map"].values())  # the replaced one is gone
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for name in files for tensor in load_file(tmp_path / name).values()
    )


def test_what_is_replaced_may_have_had_other_suffixes(tmp_path: Path) -> None:
    save_experts(tmp_path, {0: layer(0)})
    floats = [torch.randn(size).bfloat16() for size in ((4, 128, 128), (4, 128, 64))]
    pairs = [(weight, torch.empty(4, 0)) for weight in floats]
    save_experts(tmp_path, {0: (pairs[0], pairs[1])}, overwrite=True)
    assert torch.equal(load_experts(tmp_path, 0).l1.weight, floats[0])


@pytest.mark.parametrize("has_index", [True, False])
def test_another_checkpoint_is_left_alone_unless_asked(tmp_path: Path, has_index: bool) -> None:
    name = "model-00001-of-00001.safetensors"
    others = {"model.norm.weight": torch.ones(3), "lm_head.weight": torch.ones(2)}
    save_file(others, tmp_path / name)
    (tmp_path / "config.json").write_text('{"num_experts": 4, "hidden_size": 7}')
    if has_index:
        index = {"metadata": {"by": "them"}, "weight_map": dict.fromkeys(others, name)}
        (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"overwrite must be True to save into {tmp_path}, "):
        save_experts(tmp_path, {0: layer(0)})
    assert contents(tmp_path) == before
    save_experts(tmp_path, {0: layer(0)}, overwrite=True)
    after = contents(tmp_path)
    for kept in ("config.json", name):
        assert after[kept] == before[kept]
    index = json.loads(after[INDEX_NAME])
    assert {own: index["weight_map"][own] for own in others} == dict.fromkeys(others, name)
    assert not has_index or index["metadata"]["by"] == "them"
    assert holds(tmp_path, 0, layer(0))


def test_a_file_that_holds_what_no_index_named_stays(tmp_path: Path) -> None:
    save_experts(tmp_path, {0: layer(0)})
    file = tmp_path / "model-00001-of-00001.safetensors"
    save_file({**load_file(file), "mine": torch.ones(1)}, file)
    save_experts(tmp_path, {0: layer(1)}, overwrite=True)
    assert "mine" in load_file(file)
    assert holds(tmp_path, 0, layer(1))


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, what: Any) -> None:
    """Call `what` before the step of a save that comes after `after` others."""
    left = [after]

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def step(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                what()
            return real(*args, **options)

        monkeypatch.setattr(module, name, step)

    counted(experts, "save_file")
    counted(saving.os, "fsync")
    for name in ("rename", "replace", "unlink"):
        counted(Path, name)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_room() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("is_first", [True, False])
def test_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    old, new = layer(0), layer(1)
    seen = []
    for after in range(100):
        folder = tmp_path / str(after)
        if not is_first:
            save_experts(folder, {0: old}, experts_per_file=2)
        child = os.fork()
        if child == 0:
            interrupt(monkeypatch, after, kill)
            save_experts(folder, {0: new}, experts_per_file=2, overwrite=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seen.append(state(folder, old, new))
        save_experts(folder, {0: new}, experts_per_file=2, overwrite=True)  # and it can go on
        assert holds(folder, 0, new)
        assert not [file for file in folder.iterdir() if file.name.endswith(".save_experts")]
        if status == 0:
            break
    before = "none" if is_first else "old"
    assert seen == [before] * seen.count(before) + ["new"] * seen.count("new")
    assert seen.count(before) > 5


def test_an_error_at_any_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the step that makes the new one the checkpoint."""
    old, new = layer(0), layer(1)
    for after in range(100):
        folder = tmp_path / str(after)
        save_experts(folder, {0: old}, experts_per_file=2)
        before = contents(folder)
        with monkeypatch.context() as patched:
            interrupt(patched, after, no_room)
            with contextlib.suppress(OSError):
                save_experts(folder, {0: new}, experts_per_file=2, overwrite=True)
                break
        if not holds(folder, 0, new):
            assert contents(folder) == before
    assert after > 10


def test_a_first_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "save_file", lambda *_: no_room())
    name = "model-00001-of-00002.safetensors cannot be written: .* No space left"
    with pytest.raises(OSError, match=name):
        save_experts(tmp_path, {0: layer(0)}, experts_per_file=2)
    assert not contents(tmp_path)


def test_savers_wait_for_each_other(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=save_experts, args=(tmp_path, {number: layer(0)}))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(holds(tmp_path, number, layer(0)) for number in range(6))
    assert not (tmp_path / ".save_experts.lock").exists()


@pytest.mark.parametrize("kind", ["fp8_128", "mxfp8", "fp8_bytes"])
def test_fp8(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    pairs = []
    for rows, columns in ((2 * 256, 384), (384, 256)):
        parts = [make(kind, rows, columns) for _ in range(NUM_EXPERTS)]
        pairs.append(tuple(torch.stack(own) for own in zip(*parts, strict=True)))
    save_experts(tmp_path, {0: tuple(pairs)})  # type: ignore[dict-item]
    for own, other in zip(load_experts(tmp_path, 0), pairs, strict=True):
        for tensor, expected in zip(own, other, strict=True):
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_fp8_with_scales_in_words(tmp_path: Path) -> None:
    l1, l2 = (deep_moe.quantize_mxfp8(torch.randn(2, *size)) for size in ((320, 352), (352, 160)))
    save_experts(tmp_path, {0: (l1, l2)})
    loaded = load_experts(tmp_path, 0)
    expected = deep_moe.dequantize_mxfp8(*l2)
    scales = torch.exp2(loaded.l2.sf.float() - 127).repeat_interleave(32, -1)
    assert torch.equal(loaded.l2.weight.float() * scales, expected)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({}, "layers must have at least one layer"),
        ({-1: layer(0)}, "layers must be at least 0; got -1"),
        ({0: [(t.half(), t) for t, _ in layer(0)]}, "layers must have weights in mxfp4, fp8, bf16"),
        ({0: (layer(0)[0], layer(0)[0])}, r"layers\[0\] must have 2\*I rows in l1 for a naming"),
    ],
)
def test_refusals(tmp_path: Path, layers: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        save_experts(tmp_path / "new", layers)
    assert not (tmp_path / "new").exists()


def test_experts_without_a_gate(tmp_path: Path) -> None:
    """What is saved under names without a gate is loaded again, and laid out."""
    l1, l2 = (deep_moe.quantize_mxfp8(torch.randn(2, *size)) for size in ((160, 256), (256, 160)))
    save_experts(tmp_path, {0: (l1, l2)}, naming=NAMINGS["nemotron"])
    loaded = load_experts(tmp_path, 0, naming=NAMINGS["nemotron"])
    assert torch.equal(loaded.l1.weight, l1[0])
    weights = load_experts(
        tmp_path, 0, naming=NAMINGS["nemotron"], transformed=True, arch="sm_100a"
    )
    expected = deep_moe.transform_weights_for_mega_moe(l1, l2, "sm_100a", weights="fp8")
    assert not weights.has_gate
    assert all(map(torch.equal, weights.tensors, expected.tensors))
    with pytest.raises(ValueError, match=r"layers\[0\] must have 2\*I rows in l1 for a naming"):
        save_experts(tmp_path / "other", {0: (l1, l2)})
