"""Changing a checkpoint's folder, all or nothing.

Readers find tensors by the index. A save writes its files beside the old ones, replaces the index
in one step, and then removes what was replaced. So a save that is killed, or runs out of space,
leaves the old checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deep_moe.errors import CheckpointError

from .config import CONFIG_NAME, count_of_config
from .files import INDEX_NAME, Files, opened, read_index, read_json

_WRITER = "deep_moe.save_experts"  # in the metadata of an index that is its own
_LOCK_NAME, _PARTIAL = ".save_experts.lock", ".save_experts"  # the latter behind a file's name
_SHARD_NAME = re.compile(r"model-(?:(\d{1,9})-)?\d+-of-\d+\.safetensors")


class Saving:
    """A folder that one process at a time changes, from `with` to `commit`.

    overwrite: whether tensors that are there may be replaced, and another checkpoint's index be
    extended. num_experts: of each layer.
    """

    def __init__(self, folder: Path, num_experts: int, *, overwrite: bool) -> None:
        self.folder = folder
        self._num_experts = num_experts
        self._overwrite = overwrite
        self._is_done = False
        self._files: list[str] = []  # written, in the index once that is done
        self._new: dict[str, str] = {}  # file of each tensor in them
        self._num_bytes = 0
        self._index: dict[str, Any] = {}
        self._metadata: dict[str, Any] = {}
        self._kept: dict[str, str] = {}  # of what is there

    def __enter__(self) -> Saving:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / _LOCK_NAME)
        try:
            for stale in self.folder.glob("*" + _PARTIAL):  # of a save that was killed
                stale.unlink()
            self._read()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if not self._is_done:
                named = (
                    set(read_index(self.folder)["weight_map"].values())
                    if os.path.lexists(self.folder / INDEX_NAME)
                    else set()
                )
                for name in self._files:
                    (self.folder / (name + _PARTIAL)).unlink(missing_ok=True)
                    if name not in named:
                        (self.folder / name).unlink(missing_ok=True)
                if self._is_new and not named:
                    (self.folder / INDEX_NAME).unlink(missing_ok=True)
        finally:
            self._unlock()

    def drop(self, names: Iterable[str], what: str) -> None:
        """Take the tensors out of the checkpoint that are among `names`. ValueError, if there are
        some and they may not be overwritten."""
        there = [name for name in names if name in self._kept]
        if there and not self._overwrite:
            raise ValueError(
                f"overwrite must be True to replace {what}, which {self.folder} has: {there[0]}"
            )
        for name in there:
            del self._kept[name]

    @property
    def names(self) -> list[str]:
        """Of the tensors that stay."""
        return list(self._kept)

    def write(
        self,
        num_files: int,
        tensors: Mapping[str, torch.Tensor],
        save: Callable[[dict[str, torch.Tensor], Path], None],
    ) -> None:
        """Another one of the `num_files` files of this save."""
        name = f"{self._stem}{len(self._files) + 1:05d}-of-{num_files:05d}.safetensors"
        self._files.append(name)
        partial = self.folder / (name + _PARTIAL)
        try:
            save(dict(tensors), partial)
            _to_disk(partial)
        except Exception as error:
            raise OSError(f"{self.folder / name} cannot be written: {error}") from error
        self._new |= dict.fromkeys(tensors, name)
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def commit(self) -> None:
        """Make what was written part of the checkpoint."""
        for name in self._files:
            (self.folder / (name + _PARTIAL)).rename(self.folder / name)
        config = self.folder / CONFIG_NAME
        if count_of_config(config) is None:
            document = read_json(config) if config.is_file() else {}
            _replace(config, document | {"num_experts": self._num_experts})
        metadata = {k: v for k, v in self._metadata.items() if k != "total_size"}
        metadata |= {"writer": _WRITER, **self._total_size()}
        weight_map = dict(sorted((self._kept | self._new).items()))
        _replace(
            self.folder / INDEX_NAME, self._index | {"metadata": metadata, "weight_map": weight_map}
        )
        self._is_done = True
        for name in set(self._old.values()) - set(weight_map.values()):
            self._delete(name)

    def _read(self) -> None:
        """What is there."""
        config = self.folder / CONFIG_NAME
        count = count_of_config(config)
        if count not in (None, self._num_experts):
            raise ValueError(
                f"layers must have the {count} experts of {config}; got {self._num_experts}"
            )
        shards = [file.name for file in self.folder.glob("*.safetensors")]
        self._is_new = not os.path.lexists(self.folder / INDEX_NAME)
        if not self._is_new:
            self._index = read_index(self.folder)
        elif shards:
            with Files(self.folder) as files:
                weight_map = {name: file.name for name, file in files.file_of.items()}
            self._index = {"weight_map": weight_map}
        else:
            self._index = {"metadata": {"writer": _WRITER, "total_size": 0}, "weight_map": {}}
        metadata = self._index.get("metadata")
        self._metadata = metadata if isinstance(metadata, dict) else {}
        self._old: dict[str, str] = self._index["weight_map"]
        self._kept = dict(self._old)
        if self._metadata.get("writer") != _WRITER and not self._overwrite:
            raise ValueError(
                f"overwrite must be True to save into {self.folder}, which has another checkpoint"
            )
        numbers = [int(match[1] or 1) for match in map(_SHARD_NAME.fullmatch, shards) if match]
        number = max(numbers, default=0) + 1
        self._stem = "model-" if number == 1 else f"model-{number}-"
        if not shards and self._is_new:  # until the commit, what is written belongs to nothing
            _replace(self.folder / INDEX_NAME, self._index)

    def _total_size(self) -> dict[str, int]:
        """Of all tensors, if it is known."""
        total = self._metadata.get("total_size")
        if not isinstance(total, int):
            return {}
        dropped = self._old.keys() - self._kept.keys()
        try:
            with Files(self.folder) as files:
                return {
                    "total_size": total
                    + self._num_bytes
                    - sum(files.header(name).nbytes for name in dropped)
                }
        except CheckpointError:  # what is replaced is damaged
            return {}

    def _delete(self, name: str) -> None:
        """A file that the index has no more, unless it holds what the index never had."""
        known = {tensor for tensor, file in self._old.items() if file == name}
        try:
            with opened(self.folder / name) as file:
                is_known = set(file.keys()) <= known
        except CheckpointError:
            return
        if is_known:
            (self.folder / name).unlink()

    def _unlock(self) -> None:
        (self.folder / _LOCK_NAME).unlink(missing_ok=True)
        os.close(self._lock)


def _locked(file: Path) -> int:
    """A descriptor that holds the lock, once nobody else does. It ends with the process."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it


def _replace(file: Path, document: Mapping[str, Any]) -> None:
    """Write JSON in one step."""
    partial = file.with_name(file.name + _PARTIAL)
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n")
        _to_disk(partial)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
