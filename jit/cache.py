"""A folder of compiled kernels that many processes may use at once.

One entry is one folder, named after its key:

    <cache>/<key>/kernel.cubin, kernel.ptx, kernel.cu, manifest.json
    <cache>/locks/<key>.lock
    <cache>/temporary/<key>-<random>/      an entry being written, or a damaged one on its way out

A reader takes no lock: an entry appears by one atomic rename and is never changed afterwards. Its
files are compared with the SHA-256 sums in the manifest, so that a truncated or altered entry is
noticed and compiled again. Writers of one key wait for each other on a file lock, which the
operating system drops if its holder is killed; what such a writer left behind is removed by the
next one.

The folder is the argument, else `DEEP_MOE_CACHE_DIR`, else the user's cache folder as platformdirs
knows it (`~/.cache/deep_moe` on most machines).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_moe.errors import CacheError, MissingPackageError

# Part of every key: raise it when the files of an entry or the manifest's fields change.
SCHEMA_VERSION = 1

FOLDER_VARIABLE = "DEEP_MOE_CACHE_DIR"
_MANIFEST = "manifest.json"
_LOCKS = "locks"
_TEMPORARY = "temporary"
# A kernel compiles in seconds; a lock held for longer than this belongs to a process that hangs.
_LOCK_TIMEOUT_S = 600.0


class DamagedEntryWarning(UserWarning):
    """A cache entry did not match its manifest and is compiled again."""


class _DamagedEntryError(Exception):
    """Why an entry cannot be used."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as the cache holds it.

    manifest: what it was made from and what the compiler said about it (see jit/__init__.py).
    """

    key: str
    folder: Path
    cubin: bytes
    ptx: str
    source: str
    manifest: Mapping[str, Any]

    @property
    def arch(self) -> str:
        return self.manifest["arch"]

    @property
    def name(self) -> str:
        """Its extern "C" entry."""
        return self.manifest["kernel"]


@dataclass(frozen=True)
class EntryReport:
    """One entry as `KernelCache.entries` sees it. `problem` is None if its files are intact."""

    key: str
    folder: Path
    num_bytes: int
    manifest: Mapping[str, Any]
    problem: str | None


def default_folder() -> Path:
    """Where kernels are cached unless the caller names a folder.

    Raises MissingPackageError where neither the variable nor platformdirs is there.
    """
    if os.environ.get(FOLDER_VARIABLE):
        return Path(os.environ[FOLDER_VARIABLE])
    try:
        import platformdirs
    except ImportError as error:
        raise MissingPackageError(
            f"{FOLDER_VARIABLE} is not set and the package that knows the user's cache folder is "
            f"not installed; run: pip install platformdirs (or set {FOLDER_VARIABLE})"
        ) from error
    return platformdirs.user_cache_path("deep_moe")


def make_key(arch: str, parts: Mapping[str, Any]) -> str:
    """The name of the entry that stands for `parts`, any JSON values; equal parts, equal name."""
    text = json.dumps({"schema": SCHEMA_VERSION, "arch": arch, **parts}, sort_keys=True)
    return f"{arch}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


class KernelCache:
    """The cache in one folder. Making the object touches nothing on disk."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()

    def load(self, key: str) -> CompiledKernel | None:
        """The entry, or None if there is none. A damaged one counts as none, with a warning."""
        try:
            return self._read(key)
        except _DamagedEntryError as damage:
            warnings.warn(
                f"kernel cache entry {self.folder / key} is damaged ({damage}); compiling again",
                DamagedEntryWarning,
                stacklevel=2,
            )
            return None

    def load_or_compile(
        self, key: str, compile_kernel: Callable[[], tuple[Mapping[str, bytes], dict[str, Any]]]
    ) -> CompiledKernel:
        """The entry, made first if need be.

        compile_kernel: returns the entry's files by name and the manifest's other fields. Among
            processes that ask for the same key at once, one runs it and the others wait.
        """
        kernel = self.load(key)
        if kernel is not None:
            return kernel
        with self._exclusive(key):
            try:
                kernel = self._read(key)  # another process may have been faster
            except _DamagedEntryError:
                self._discard(key)
            if kernel is not None:
                return kernel
            files, manifest = compile_kernel()
            self._write(key, files, manifest)
            kernel = self._read(key)
        if kernel is None:
            raise CacheError(f"{self.folder / key} vanished while it was being written")
        return kernel

    def entries(self) -> Iterator[EntryReport]:
        """Every entry, each with its files checked against the manifest."""
        if not self.folder.is_dir():
            return
        for folder in sorted(self.folder.iterdir()):
            if not folder.is_dir() or folder.name in (_LOCKS, _TEMPORARY):
                continue
            manifest: Mapping[str, Any] = {}
            problem = None
            try:
                kernel = self._read(folder.name)
                if kernel is None:
                    continue  # removed meanwhile
                manifest = kernel.manifest
            except _DamagedEntryError as damage:
                problem = str(damage)
            num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            yield EntryReport(folder.name, folder, num_bytes, manifest, problem)

    def remove(self, key: str) -> None:
        """Delete one entry."""
        with self._exclusive(key):
            self._discard(key)

    def clear(self) -> int:
        """Delete every entry and return how many there were. Processes that compile meanwhile are
        not disturbed: their entries appear afterwards."""
        keys = [entry.key for entry in self.entries()]
        for key in keys:
            self.remove(key)
        return len(keys)

    def _read(self, key: str) -> CompiledKernel | None:
        folder = self.folder / key
        try:
            text = (folder / _MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if folder.is_dir():
                raise _DamagedEntryError(f"{_MANIFEST} is missing") from None
            return None
        except OSError as error:
            raise _DamagedEntryError(f"{_MANIFEST} cannot be read: {error}") from None
        try:
            manifest = json.loads(text)
            sums = {name: entry["sha256"] for name, entry in manifest["files"].items()}
            written_for = manifest["key"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _DamagedEntryError(f"{_MANIFEST} is not a manifest") from None
        if written_for != key:
            raise _DamagedEntryError(f"{_MANIFEST} belongs to {written_for}")
        contents = {}
        for name, expected in sums.items():
            try:
                contents[name] = (folder / name).read_bytes()
            except OSError as error:
                raise _DamagedEntryError(f"{name} cannot be read: {error.strerror}") from None
            if hashlib.sha256(contents[name]).hexdigest() != expected:
                raise _DamagedEntryError(f"{name} does not match its SHA-256 sum")
        missing = {"kernel.cubin", "kernel.ptx", "kernel.cu"} - contents.keys()
        if missing:
            raise _DamagedEntryError(f"{_MANIFEST} does not list {', '.join(sorted(missing))}")
        return CompiledKernel(
            key=key,
            folder=folder,
            cubin=contents["kernel.cubin"],
            ptx=contents["kernel.ptx"].decode(),
            source=contents["kernel.cu"].decode(),
            manifest=manifest,
        )

    def _write(self, key: str, files: Mapping[str, bytes], manifest: dict[str, Any]) -> None:
        """Put a complete entry in place. The caller holds the key's lock."""
        sums = {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        }
        document = {"schema": SCHEMA_VERSION, "key": key, **manifest, "files": sums}
        with self._writable():
            temporary = self._temporary_folder(key)
            for name, content in files.items():
                (temporary / name).write_bytes(content)
            (temporary / _MANIFEST).write_text(json.dumps(document, indent=1) + "\n")
            temporary.chmod(0o755)  # mkdtemp makes it private, a cache may be shared
            temporary.rename(self.folder / key)

    def _discard(self, key: str) -> None:
        """Take an entry out of sight by one rename, then delete it. The caller holds its lock."""
        with self._writable():
            doomed = self._temporary_folder(key)
            with suppress(FileNotFoundError):
                (self.folder / key).rename(doomed / "entry")
            shutil.rmtree(doomed)

    def _temporary_folder(self, key: str) -> Path:
        parent = self.folder / _TEMPORARY
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{key}-", dir=parent))

    def _remove_leftovers(self, key: str) -> None:
        """Delete what a killed writer of this key left behind. The caller holds its lock."""
        for leftover in (self.folder / _TEMPORARY).glob(f"{key}-*"):
            shutil.rmtree(leftover)

    @contextmanager
    def _exclusive(self, key: str) -> Iterator[None]:
        """Hold the key's lock, and start from a clean state."""
        from filelock import FileLock, Timeout  # 15 ms that a cached kernel does not need

        path = self.folder / _LOCKS / f"{key}.lock"
        with self._writable():
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            try:
                lock.acquire(timeout=_LOCK_TIMEOUT_S)
            except Timeout as error:
                raise CacheError(
                    f"waited {_LOCK_TIMEOUT_S:.0f} s for {path}: another process holds it; "
                    f"end that process, or set {FOLDER_VARIABLE} to another folder"
                ) from error
        try:
            with self._writable():
                self._remove_leftovers(key)
            yield
        finally:
            lock.release()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Make a failure to write an error that says which folder, and how to choose another."""
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"the kernel cache folder {self.folder} cannot be written ({error}); "
                f"set {FOLDER_VARIABLE} to a folder that can"
            ) from error
