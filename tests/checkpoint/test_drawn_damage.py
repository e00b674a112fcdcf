"""Damage drawn at random, from seeds, to a layer in each form that checkpoints have. The layer is
loaded as it was, bit for bit, or refused with the name of the file, tensor or entry that was
damaged."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deep_moe.checkpoint import load_biases, load_experts, load_token_scale
from deep_moe.errors import CheckpointError
from deep_moe.weights.layers import ExpertWeights

from . import test_bf16, test_exporters
from .test_exporters import CASES, LAYER

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FORMS = [*CASES, "bf16", "bf16, stacked"]
NUM_DRAWS = 6  # of each kind of damage
# Either the values are as they were, or an error has one of these words; without words, the former.
Words = list[str]
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)


def write(folder: Path, form: str) -> int:
    """Returns the layer's number."""
    if form in CASES:
        test_exporters.write(folder, form)
        return LAYER
    test_bf16.write(folder, "stacked_plain" if form.endswith("stacked") else "experts")
    return test_bf16.LAYER


class Checkpoint:
    """One in a folder, and what is drawn for it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.drawn = random.Random(seed)
        self.tensors = load_file(folder / FILE)
        self.name = self.drawn.choice(sorted(self.tensors))

    def save(self) -> None:
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, self.folder / FILE)

    def beside(self) -> Words:
        """Its expert, of which another tensor may be named where two do not go together."""
        return [self.name[: self.name.index("experts.") + 8]]

    def in_shards(self) -> dict[str, str]:
        """Writes the tensors into several files instead; the file of each."""
        count = self.drawn.randint(1, 4)
        file_of = {
            name: f"model-{self.drawn.randint(1, count):05}-of-{count:05}.safetensors"
            for name in self.tensors
        }
        (self.folder / FILE).unlink()
        for number in range(1, count + 1):  # one without a tensor is there, too
            file = f"model-{number:05}-of-{count:05}.safetensors"
            own = {name: t for name, t in self.tensors.items() if file_of[name] == file}
            save_file(own, self.folder / file)
        return file_of

    def write_index(self, weight_map: Any, **more: Any) -> None:
        (self.folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))

    def config(self) -> dict[str, Any]:
        found = json.loads((self.folder / CONFIG).read_text())
        assert isinstance(found, dict)
        return found


# What changes no value.


def other_shards(own: Checkpoint) -> Words:
    weight_map = own.in_shards()
    if own.drawn.random() < 0.5:
        own.write_index(weight_map, metadata={"total_size": own.drawn.choice([0, -1, "much"])})
    return []


def foreign_tensors(own: Checkpoint) -> Words:
    others = ["model.embed_tokens.weight", f"model.layers.{LAYER}1.mlp.experts.0.up_proj.weight"]
    own.tensors |= {name: torch.zeros(own.drawn.randint(0, 9)) for name in others}
    own.save()
    return []


# Of files.


def is_cut(own: Checkpoint) -> Words:
    content = (own.folder / FILE).read_bytes()
    (own.folder / FILE).write_bytes(content[: own.drawn.randrange(len(content))])
    return [FILE]


def header_cut(own: Checkpoint) -> Words:
    content = (own.folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    (own.folder / FILE).write_bytes(content[: own.drawn.randrange(8 + length)])
    return [FILE]


def header_length(own: Checkpoint) -> Words:
    content = (own.folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    other = own.drawn.choice([length + own.drawn.choice([-8, -1, 1, 8]), 0, 2**32, 2**64 - 1])
    (own.folder / FILE).write_bytes(struct.pack("<Q", other) + content[8:])
    return [FILE]


def bytes_behind(own: Checkpoint) -> Words:
    content = (own.folder / FILE).read_bytes()
    (own.folder / FILE).write_bytes(content + bytes(own.drawn.randint(1, 64)))
    return [FILE]


def header_byte(own: Checkpoint) -> Words:
    """Names, types, shapes, places: any of these may become another."""
    content = bytearray((own.folder / FILE).read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    content[8 + own.drawn.randrange(length)] ^= 1 << own.drawn.randrange(7)
    (own.folder / FILE).write_bytes(content)
    return [FILE, "experts.", "tensors of expert"]


# Of tensors.


def missing(own: Checkpoint) -> Words:
    del own.tensors[own.name]
    own.save()
    return [own.name]


def renamed(own: Checkpoint) -> Words:
    place = own.drawn.randrange(len(own.name))
    letter = own.drawn.choice("abc_.019")
    other = own.name[:place] + letter + own.name[place + 1 :]
    own.tensors[other] = own.tensors.pop(own.name)
    own.save()
    return [own.name, other]


def added(own: Checkpoint) -> Words:
    """A tensor beside it, of a name that says that it belongs to the weights."""
    module = own.name.rpartition(".weight")[0] or own.name
    suffix = own.drawn.choice(["_zero_point", ".g_idx", ".weight_scale_3", ".smooth", "_lora_b"])
    own.tensors[module + suffix] = torch.ones(3)
    own.save()
    return [module + suffix]


def converted(own: Checkpoint) -> Words:
    """Of another size, for one of the same might be a type that the format takes, too."""
    tensor = own.tensors[own.name]
    others = [dtype for dtype in DTYPES if dtype.itemsize != tensor.element_size()]
    own.tensors[own.name] = tensor.float().to(own.drawn.choice(others))
    own.save()
    return own.beside()


def read_as_another_type(own: Checkpoint) -> Words:
    tensor = own.tensors[own.name]
    same = [dtype for dtype in DTYPES if dtype.itemsize == tensor.element_size()]
    # Scales of GPTQ and AWQ may be either, so that other values stay unseen.
    other = {torch.float16, torch.bfloat16} if own.name.endswith(".scales") else set()
    unseen = {torch.bool} | other - {tensor.dtype}
    dtype = own.drawn.choice([dtype for dtype in same if dtype not in unseen])
    own.tensors[own.name] = tensor.view(dtype)
    own.save()
    return own.beside()


SHAPES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t[:-1],
    lambda t: t[..., :-1],
    lambda t: t[1:],
    lambda t: t[:0],
    lambda t: t[..., :0],
    lambda t: torch.cat([t, t]),
    lambda t: torch.cat([t, t], -1),
    lambda t: t.mT,
    lambda t: t.flatten(),
    lambda t: t[None],
    lambda t: t[..., None],
    lambda t: t[0],
    lambda t: t.reshape(t.shape[0] * 2, -1),
    lambda t: t.reshape(-1, t.shape[-1] * 2),
]


def reshaped(own: Checkpoint) -> Words:
    tensor = own.tensors[own.name]
    # Unless one of the others goes with its dimensions.
    own.tensors[own.name] = tensor.repeat(2, *[1] * (tensor.dim() - 1))
    for change in own.drawn.sample(SHAPES, len(SHAPES)):
        try:
            changed = change(tensor).clone()
        except (RuntimeError, IndexError):
            continue
        if changed.shape != tensor.shape:
            own.tensors[own.name] = changed
            break
    own.save()
    return own.beside()


def no_number(own: Checkpoint) -> Words:
    """In a tensor of scales."""
    floats = (torch.float32, torch.bfloat16)
    scales = [n for n, t in own.tensors.items() if "scale" in n and t.dtype in floats]
    if scales:
        own.name = own.drawn.choice(sorted(scales))
        tensor = own.tensors[own.name]
        wrong = own.drawn.choice([torch.nan, torch.inf, -torch.inf])
        tensor.view(-1)[own.drawn.randrange(tensor.numel())] = wrong
        own.save()
    return [own.name]


def twice(own: Checkpoint) -> Words:
    save_file({own.name: torch.zeros(3)}, own.folder / "zz.safetensors")
    return [own.name]


# Of an index.


def index_of_lost_file(own: Checkpoint) -> Words:
    weight_map = own.in_shards()
    lost = weight_map[own.name]
    (own.folder / lost).unlink()
    own.write_index(weight_map)
    return [lost]


def index_of_wrong_file(own: Checkpoint) -> Words:
    weight_map = own.in_shards()
    files = sorted(file.name for file in own.folder.glob("*.safetensors"))
    weight_map[own.name] = own.drawn.choice([*files, "other.safetensors", CONFIG, INDEX])
    own.write_index(weight_map)
    return [own.name, weight_map[own.name]]


def index_without_it(own: Checkpoint) -> Words:
    weight_map = own.in_shards()
    del weight_map[own.name]
    own.write_index(weight_map)
    return [own.name]


def index_of_no_files(own: Checkpoint) -> Words:
    weight_map: dict[str, Any] = {**own.in_shards()}
    wrong = [None, 3, [], {}, "", ".", "..", "/etc/passwd", "../" + FILE, "a\0b", "a" * 5000]
    weight_map[own.name] = own.drawn.choice(wrong)
    own.write_index(weight_map)
    return [own.name, INDEX]


def index_of_more(own: Checkpoint) -> Words:
    """A tensor that no file has."""
    weight_map = own.in_shards()
    extra = own.name + own.drawn.choice(["_2", ".bias", "_zero_point"])
    own.write_index({**weight_map, extra: weight_map[own.name]})
    # By a name of global scales the whole layer is another format's, of which others come first.
    return [extra, "weight_scale_2"] if extra.endswith("weight_scale_2") else [extra]


def index_that_is_none(own: Checkpoint) -> Words:
    own.in_shards()
    own.write_index(own.drawn.choice([None, [], {}, "model", 4, [[own.name, FILE]]]))
    return [INDEX, str(own.folder)]


# Of a config.

VALUES: list[Any] = [None, True, -1, 0, 1.5, 2**70, "", "fp8", [], ["re:("], {}, {"a": 1}, [3]]


def number_of_experts(own: Checkpoint) -> Words:
    config = own.config()
    key = "num_experts"
    count = config[key]
    config[key] = own.drawn.choice([*VALUES, count + 1, count - 1, str(count), float(count)])
    (own.folder / CONFIG).write_text(json.dumps(config))
    return [CONFIG]


def config_value(own: Checkpoint) -> Words:
    """Of any depth in the quantization_config."""
    config = own.config()
    part: Any = config.get("quantization_config", config)
    while True:
        key = own.drawn.choice(sorted(part) if isinstance(part, dict) else [*range(len(part))])
        inner = part[key]
        if not (isinstance(inner, (dict, list)) and inner) or own.drawn.random() < 0.3:
            break
        part = inner
    if own.drawn.random() < 0.25:
        del part[key]
    else:
        part[key] = own.drawn.choice(VALUES)
    (own.folder / CONFIG).write_text(json.dumps(config))
    return [CONFIG]


DAMAGES = (
    *(other_shards, foreign_tensors),
    *(is_cut, header_cut, header_length, bytes_behind, header_byte, header_byte),
    *(missing, renamed, added, converted, read_as_another_type, reshaped, no_number, twice),
    *(index_of_lost_file, index_of_wrong_file, index_without_it, index_of_no_files),
    *(index_of_more, index_that_is_none, number_of_experts, config_value, config_value),
)


def same(found: ExpertWeights, expected: ExpertWeights) -> bool:
    pairs = [*zip(found.l1, expected.l1, strict=True), *zip(found.l2, expected.l2, strict=True)]
    return all(
        own.dtype == other.dtype
        and own.shape == other.shape
        and torch.equal(own.view(torch.uint8), other.view(torch.uint8))
        for own, other in pairs
        if own.numel() or other.numel()
    )


def fault(folder: Path, damage: Callable[[Checkpoint], Words], layer: int, seed: int) -> str | None:
    """What is wrong with the answer to one draw."""
    expected = load_experts(folder, layer)
    own = Checkpoint(folder, seed)
    words = damage(own)
    for function in (load_biases, load_token_scale):
        try:
            function(folder, layer)
        except CheckpointError:
            continue
        except Exception as error:
            return f"{function.__name__}: {error!r}"
    try:
        found = load_experts(folder, layer)
    except CheckpointError as error:
        if not words:
            return f"refused: {error}"
        is_named = any(word in str(error) for word in words)
        return None if is_named else f"the error names none of {words}: {error}"
    except Exception as error:
        return repr(error)
    return None if same(found, expected) else f"other values, no error: {own.name}"


@pytest.mark.parametrize("form", FORMS)
def test_it_is_refused_or_harmless(tmp_path: Path, form: str) -> None:
    layer = write(tmp_path, form)
    sound = {file: file.read_bytes() for file in tmp_path.iterdir()}
    faults = []
    for seed in range(NUM_DRAWS * len(DAMAGES)):
        for file in tmp_path.iterdir():
            file.unlink()
        for file, content in sound.items():
            file.write_bytes(content)
        damage = DAMAGES[seed % len(DAMAGES)]
        found = fault(tmp_path, damage, layer, seed + 1000 * FORMS.index(form))
        if found is not None:
            faults.append(f"{seed} {damage.__name__}: {found}")
    assert faults == [], "\n".join(faults)
