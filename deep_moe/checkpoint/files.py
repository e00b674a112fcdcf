"""The files of a checkpoint: the file of each tensor, and reading it.

A checkpoint is untrusted input. So an error names file and tensor, and no file costs more memory or
time than its own size: paths stay in the folder, pipes and devices are not opened, and no loop runs
up to a number that only a name or a config holds.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from os.path import lexists
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deep_moe.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"(.*?)(\d+)-of-(\d+)\.safetensors")

_MAX_JSON_BYTES = 256 << 20  # the index of a model with 10^6 tensors has some 100 MiB
_MAX_NAMED = 8  # experts or files that an error lists
_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Files:
    """Tensors of a checkpoint by name. Files are opened when first needed.

    path: a .safetensors file, or a folder with an index or with such files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guarded: tuple[str, ...] = ()
        self.file_of = _file_of_tensors(path)
        self._open_files: dict[Path, tuple[Any, set[str]]] = {}  # with their names
        self._stack = ExitStack()
        self._last: tuple[str, int | None, torch.Tensor] | None = None

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def missing(self, names: list[str], more: int = 0) -> str:
        """Words for tensors that there are none of, `more` of which are not in the list, and for
        shards that the others' numbering speaks of, in a folder without an index."""
        lost = _lost_shards({file.name for file in self.file_of.values()})
        files = f"; there is no file {lost}" if lost else ""
        return f"has no tensor {listed(names, more)}{files}"

    def label(self, name: str) -> str:
        """A tensor's name for an error, with its file."""
        return f"{self.file_of[name]}: {name}" if name in self else name

    def header(self, name: str, entry: int | None = None) -> torch.Tensor:
        """Type and shape, a tensor on "meta", from the header. entry: of the first dimension."""
        with self._reading(name) as part:
            dtype, shape = str(part.get_dtype()), list(part.get_shape())
            if dtype not in _DTYPES:
                allowed = ", ".join(_DTYPES)
                raise CheckpointError(f"{self.label(name)} must be of {allowed}; got {dtype}")
            if entry is not None and (not shape or entry >= shape.pop(0)):
                raise CheckpointError(f"{self.label(name)} has no entry of an expert {entry}")
            return torch.empty(shape, dtype=_DTYPES[dtype], device="meta")

    def read(self, name: str, entry: int | None = None) -> torch.Tensor:
        """A whole tensor, or an entry of its first dimension."""
        if self._last is not None and self._last[:2] == (name, entry):
            return self._last[2]
        with self._reading(name) as part:
            tensor: torch.Tensor
            if entry is not None:
                tensor = part[entry : entry + 1][0]
            elif part.get_shape():
                tensor = part[:]
            else:  # a single number has no slices
                tensor = self._handle(self.file_of[name], name)[0].get_tensor(name)
        self._last = (name, entry, tensor)
        return tensor

    @contextmanager
    def _reading(self, name: str) -> Iterator[Any]:
        if name not in self.file_of:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        handle, names = self._handle(self.file_of[name], name)
        if name not in names:
            raise CheckpointError(
                f"{self.file_of[name]} has no tensor {name}, although the index says so"
            )
        try:
            yield handle.get_slice(name)
        except (SafetensorError, OSError, RuntimeError, TypeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.label(name)} cannot be read: {error}") from error

    def _handle(self, file: Path, name: str) -> tuple[Any, set[str]]:
        if file not in self._open_files:
            if not lexists(file):
                raise CheckpointError(f"{file} is missing; the index says that it holds {name}")
            handle = self._stack.enter_context(opened(file))
            self._open_files[file] = handle, set(handle.keys())
            self._check_guarded(file)
        return self._open_files[file]

    def guard(self, beginnings: tuple[str, ...]) -> None:
        """Raise if a file that is open, or will be, holds tensors whose names begin so and that the
        index does not give it."""
        self._guarded = beginnings
        for file in self._open_files:
            self._check_guarded(file)

    def _check_guarded(self, file: Path) -> None:
        for name in self._open_files[file][1]:
            if name.startswith(self._guarded) and self.file_of.get(name) != file:
                where = f"in {self.file_of[name]}" if name in self else "nowhere"
                raise CheckpointError(f"{file} has {name}, which by the index is {where}")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a small file holds."""
    try:
        _check_regular(file)
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"it has {file.stat().st_size} bytes, more than {_MAX_JSON_BYTES}")
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{file} must hold a JSON object: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} must hold a JSON object; got {type(document).__name__}")
    return document


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder. Its weight_map names files in that folder."""
    file = folder / INDEX_NAME
    index = read_json(file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{file} must hold a JSON object with a weight_map of files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_in_folder(shard):
            raise CheckpointError(
                f"{file} must name a file in its folder for each tensor; got {str(shard)[:100]!r} "
                f"for {name}"
            )
    return index


def listed(names: Iterable[Any], more: int = 0) -> str:
    """The first of some names, and how many others there are, `more` not counted."""
    names = list(names)
    more += max(len(names) - _MAX_NAMED, 0)
    return ", ".join(map(str, names[:_MAX_NAMED])) + (f" and {more} more" if more else "")


def first_missing(there: Iterable[int], count: int, start: int = 0) -> list[int]:
    """The first of the `count` numbers from `start` on that are not there: as many as are listed.

    >>> first_missing({0, 2}, 10**18)[:3]
    [1, 3, 4]
    """
    known, missing = set(there), []
    for number in range(start, start + count):
        if number not in known:
            missing.append(number)
            if len(missing) == _MAX_NAMED:
                break
    return missing


def _file_of_tensors(path: Path) -> dict[str, Path]:
    """File of each tensor name: from the index, or from the headers if there is none."""
    if lexists(path / INDEX_NAME):
        weight_map = read_index(path)["weight_map"]
        return {name: path / file for name, file in weight_map.items()}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} must be a .safetensors file or a folder with such files")
    file_of: dict[str, Path] = {}
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                if name in file_of:
                    raise CheckpointError(f"{file} and {file_of[name]} both hold {name}")
                file_of[name] = file
    return file_of


def opened(file: Path) -> Any:
    """A safetensors file, for `with`."""
    try:
        _check_regular(file)
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error


def _check_regular(file: Path) -> None:
    """Links are followed: folders of a download's cache consist of them."""
    if not file.is_file():
        raise ValueError("it must be a regular file, or a link to one")


def _stays_in_folder(file: str) -> bool:
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of JSON, where the last of two equal names would win."""
    document = dict(pairs)
    if len(document) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it says {name!r} twice")
    return document


def _lost_shards(names: set[str]) -> str:
    found: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        match = _SHARD_NAME.fullmatch(name)
        if match is not None:
            stem, number, count = match.groups()
            found.setdefault((stem, len(number), count), set()).add(int(number))
    lost, more = [], 0
    for (stem, width, count), numbers in sorted(found.items()):
        missing = first_missing(numbers, int(count), start=1)
        lost += [f"{stem}{number:0{width}d}-of-{count}.safetensors" for number in missing]
        more += max(int(count) - len(numbers) - len(missing), 0)
    return listed(lost, more)
