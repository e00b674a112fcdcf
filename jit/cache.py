"""A folder of compiled kernels that many processes may use at once.

One entry is one folder, named after its key:

    <cache>/deep_moe_cache.txt             the mark: it says that the folder is such a cache
    <cache>/<key>/kernel.cubin, kernel.ptx, kernel.cu, manifest.json; without a cubin if it was
                                           made for the emulator
    <cache>/locks/<key>.lock
    <cache>/temporary/<key>-<locks>-<random>/
                                           an entry being written, or a damaged one on its way out

A reader takes no lock: an entry appears by one atomic rename and is never changed afterwards. Its
files are compared with the SHA-256 sums in the manifest, and the manifest with a digest of itself
and the key, so that a truncated or altered entry is noticed and compiled again. That finds
accidents and edits by hand. It is no signature: who writes a whole new entry with this code is
believed, so the folder must be writable only by those whose kernels may run.

Writers of one key wait for each other on a file lock, which the operating system drops if its
holder is killed. The lock only saves work: on some network file systems it does not reach other
hosts. There the rename decides. Who comes second takes the entry that is there. A writer that was
killed leaves its temporary folder behind. The next writer of the key removes the folder if it was
made under the same locks (<locks> in its name), or if nobody has changed it for an hour.

Where nothing can be written (a read-only folder, a full disk), a kernel is kept in the memory of
its process, and a warning says so once.

Nothing is deleted but what is the cache's own: what is in it and named as keys are. Links are
removed, never followed; the cache's folder itself may be one. A folder is cleared only if it has
the mark, which the first writer puts there, or if it is a cache from before there were marks: then
it holds nothing else, and each entry's manifest names its own folder.

The folder is the argument, else `DEEP_MOE_CACHE_DIR`, else the user's cache folder as platformdirs
knows it (`~/.cache/deep_moe` on most machines).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_moe.errors import CacheError, MissingPackageError

# Part of every key: raise it when the files of an entry or the manifest's fields change.
SCHEMA_VERSION = 2
_SCHEMA_WITHOUT_DIGEST = 1

FOLDER_VARIABLE = "DEEP_MOE_CACHE_DIR"
MARK = "deep_moe_cache.txt"
_MARK_TEXT = """\
This folder holds kernels that deep_moe has compiled.
`deep-moe cache clear` deletes them, and leaves everything else in this folder alone.
"""
_KEY = re.compile(r"sm_[0-9]+[a-z]?-[0-9a-f]{40}")
_MANIFEST = "manifest.json"
_LOCKS = "locks"
_TEMPORARY = "temporary"
# A kernel compiles in seconds; a lock held for longer than this belongs to a process that hangs.
_LOCK_TIMEOUT_S = 600.0
# A writer needs seconds; nobody writes any more into a folder that has not changed for longer.
_ABANDONED_S = 3600.0
# What `why_not_writable` asks for: some thirty kernels.
_MIN_FREE_BYTES = 64 * 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What a file system says that has no locks, or whose lock server is not there.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class DamagedEntryWarning(UserWarning):
    """A cache entry did not match its manifest and is compiled again."""


class UnwritableCacheWarning(UserWarning):
    """The cache cannot be written: what is compiled lasts as long as the process."""


class _DamagedEntryError(Exception):
    """Why an entry cannot be used."""


class _OtherSchemaError(_DamagedEntryError):
    """Another version of deep_moe wrote the entry."""


class _UnwritableError(CacheError):
    """The operating system refused to write."""

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(
            f"the kernel cache folder {folder} cannot be written ({error}); "
            f"set {FOLDER_VARIABLE} to a folder that can"
        )
        self.has_no_room = error.errno in _NO_ROOM


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as the cache holds it.

    cubin: empty if it was made for the emulator.
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
    """One entry as `KernelCache.entries` sees it.

    manifest: empty unless the entry is intact. problem: None if it is, or if nothing can be said of
    it, because another version of deep_moe wrote it (is_of_other_version), which this one never
    loads.
    """

    key: str
    folder: Path
    num_bytes: int
    manifest: Mapping[str, Any]
    problem: str | None
    is_of_other_version: bool = False


def default_folder() -> Path:
    """Where kernels are cached unless the caller names a folder.

    Raises MissingPackageError where neither the variable nor platformdirs is there.
    """
    if os.environ.get(FOLDER_VARIABLE):
        return Path(os.environ[FOLDER_VARIABLE]).expanduser()
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


# Compiled by this process, and not written: by folder and key.
_in_memory: dict[tuple[Path, str], CompiledKernel] = {}
_warned_of: set[Path] = set()


class KernelCache:
    """The cache in one folder. Making the object touches nothing on disk.

    must_write: what cannot be written is an error, not kept in memory.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, must_write: bool = False
    ) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()
        self.must_write = must_write

    def load(self, key: str) -> CompiledKernel | None:
        """The entry, or None if there is none. A damaged one counts as none, with a warning.

        key: from `make_key`; ValueError for any other text.
        """
        _check_key(key)
        try:
            kernel = self._read(key)
        except _DamagedEntryError as damage:
            warnings.warn(
                f"kernel cache entry {self.folder / key} is damaged ({damage}); compiling again",
                DamagedEntryWarning,
                stacklevel=2,
            )
            return None
        if kernel is not None:
            logger.debug("%s: loaded from %s", key, self.folder)
        return kernel

    def load_or_compile(
        self, key: str, compile_kernel: Callable[[], tuple[Mapping[str, bytes], dict[str, Any]]]
    ) -> CompiledKernel:
        """The entry, made first if need be.

        compile_kernel: returns the entry's files by name and the manifest's other fields. Among
            processes that ask for the same key at once, one runs it and the others wait.
        """
        kernel = self.load(key)
        if kernel is None and not self.must_write:
            kernel = _in_memory.get((self.folder, key))
        if kernel is not None:
            return kernel
        made = None
        try:
            with self._exclusive(key):
                try:
                    kernel = self._read(key)  # another process may have been faster
                except _DamagedEntryError:
                    self._discard(key)
                if kernel is not None:
                    return kernel
                made = compile_kernel()
                return self._write(key, *made)
        except _UnwritableError as error:
            if self.must_write:
                raise
            self._warn_once(error)
            files, manifest = made or compile_kernel()
            kernel = _kernel(self.folder / key, files, _document(key, files, manifest))
            return _in_memory.setdefault((self.folder, key), kernel)

    def _warn_once(self, error: _UnwritableError) -> None:
        if self.folder not in _warned_of:
            _warned_of.add(self.folder)
            warnings.warn(
                f"{error}. Until then every process compiles its kernels anew",
                UnwritableCacheWarning,
                stacklevel=3,
            )

    def why_not_writable(self) -> str | None:
        """What keeps kernels from being written, in words; None if nothing does, as far as can be
        seen without writing."""
        for path in (self.folder, self.folder / _LOCKS, self.folder / _TEMPORARY):
            while not os.path.exists(path) and path != path.parent:  # False too if it is hidden
                path = path.parent
            if not path.is_dir():
                return f"{path} is not a folder"
            if not os.access(path, os.W_OK | os.X_OK):
                return f"{path} cannot be written"
            free = shutil.disk_usage(path).free
            if free < _MIN_FREE_BYTES:
                return f"{free // 2**20} MiB are free in {path}"
        return None

    @property
    def is_marked(self) -> bool:
        """Whether the folder says of itself that it is a cache."""
        try:
            return _read_file(self.folder / MARK) == _MARK_TEXT.encode()
        except (OSError, _DamagedEntryError):
            return False

    def check_is_cache(self) -> None:
        """Raise CacheError unless the folder is a cache, or absent, or empty."""
        names = self._names()
        if not names or self.is_marked:
            return
        foreign = [name for name in names if not self._is_own(name)]
        if foreign:
            named = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise CacheError(
                f"{self.folder} is not a kernel cache: it lacks {MARK} and holds {named}; nothing "
                "in it was touched"
            )

    def entries(self) -> Iterator[EntryReport]:
        """Every entry, each with its files checked against the manifest. What is not named as keys
        are is no entry.

        Raises CacheError if the folder is a file or cannot be read.
        """
        for key in self._keys():
            manifest: Mapping[str, Any] = {}
            problem, is_of_other_version = None, False
            try:
                kernel = self._read(key)
                if kernel is None:
                    continue  # removed meanwhile
                manifest = kernel.manifest
            except _OtherSchemaError:
                is_of_other_version = True
            except _DamagedEntryError as damage:
                problem = str(damage)
            folder = self.folder / key
            yield EntryReport(
                key, folder, _num_bytes(folder), manifest, problem, is_of_other_version
            )

    def remove(self, key: str) -> None:
        """Delete one entry. Raises CacheError if the folder is not a cache."""
        _check_key(key)
        self.check_is_cache()
        try:
            with self._exclusive(key):
                self._discard(key)
        except _UnwritableError as error:
            if not error.has_no_room:
                raise
            self._discard(key)  # a full disk may lack the room for a lock
            self._remove_leftovers(key)

    def clear(self) -> int:
        """Delete every entry and what killed writers left, and return how many entries there were.
        Processes that compile meanwhile are not disturbed: their entries appear afterwards.

        Raises CacheError, with nothing deleted, if the folder is not a cache.
        """
        self.check_is_cache()
        keys = self._keys()
        for key in {*keys, *self._keys_of_leftovers()}:
            self.remove(key)
        if (self.folder / _TEMPORARY).exists():
            self._remove_leftovers(MARK)
        return len(keys)

    def _names(self) -> list[str]:
        """What the folder holds; nothing if it is not there."""
        try:
            return sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CacheError(
                f"{self.folder} is not a kernel cache: it, or a part of its path, is not a folder"
            ) from None
        except OSError as error:
            raise CacheError(
                f"the kernel cache folder {self.folder} cannot be read ({error.strerror})"
            ) from error

    def _keys(self) -> list[str]:
        return [name for name in self._names() if _KEY.fullmatch(name)]

    def _is_own(self, name: str) -> bool:
        """Whether something in a folder without a mark is a cache's from before there were marks.
        Of an entry, its manifest says so."""
        if not _KEY.fullmatch(name):
            # The tuning table is the user's own and stands beside the kernels by default.
            return name in (_LOCKS, _TEMPORARY, "tuning.json")
        folder = self.folder / name
        try:
            manifest = _parse_manifest(_read_file(folder / _MANIFEST))
        except (OSError, _DamagedEntryError):
            return False
        return manifest.get("key") == name and not folder.is_symlink()

    def _read(self, key: str) -> CompiledKernel | None:
        folder = self.folder / key
        try:
            mode = os.lstat(folder).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _DamagedEntryError(f"it cannot be read: {error.strerror}") from None
        if not stat.S_ISDIR(mode):
            raise _DamagedEntryError("it is not a folder")
        try:
            text = _read_file(folder / _MANIFEST)
        except FileNotFoundError:
            raise _DamagedEntryError(f"{_MANIFEST} is missing") from None
        except OSError as error:
            raise _DamagedEntryError(f"{_MANIFEST} cannot be read: {error.strerror}") from None
        manifest = _checked_manifest(text, key)
        contents = {}
        for name, sums in manifest["files"].items():
            try:
                contents[name] = _read_file(folder / name)
            except OSError as error:
                raise _DamagedEntryError(f"{name} cannot be read: {error.strerror}") from None
            if hashlib.sha256(contents[name]).hexdigest() != sums["sha256"]:
                raise _DamagedEntryError(f"{name} does not match its SHA-256 sum")
        return _kernel(folder, contents, manifest)

    def _write(
        self, key: str, files: Mapping[str, bytes], manifest: dict[str, Any]
    ) -> CompiledKernel:
        """Put a complete entry in place, and return it; if another host has been faster, theirs."""
        document = _document(key, files, manifest)
        with self._writable():
            temporary = self._temporary_path(key)
            try:
                temporary.mkdir()
                for name, content in files.items():
                    (temporary / name).write_bytes(content)
                (temporary / _MANIFEST).write_text(json.dumps(document, indent=1) + "\n")
                found = self._put(temporary, key)
            except OSError:
                _delete(temporary)
                raise
        return found or _kernel(self.folder / key, files, document)

    def _put(self, temporary: Path, key: str) -> CompiledKernel | None:
        """Rename a complete entry into place; if an intact one is there, return that."""
        for _ in range(3):
            try:
                temporary.rename(self.folder / key)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            try:
                found = self._read(key)
            except _DamagedEntryError:
                self._discard(key)
                continue
            if found is not None:
                _delete(temporary)
                logger.info("%s: another host has written it meanwhile", key)
                return found
        # The file system says by turns that the entry is there and that it is not.
        _delete(temporary)
        return None

    def _discard(self, key: str) -> None:
        """Take an entry out of sight by one rename, then delete it."""
        entry = self.folder / key
        with self._writable():
            doomed = self._temporary_path(key)
            try:
                entry.rename(doomed)  # of a link, the link itself
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                doomed = entry
            _delete(doomed)

    def _temporary_path(self, what: str) -> Path:
        """A new name for something in writing or on its way out."""
        folder = self._own_folder(_TEMPORARY)
        return folder / f"{what}-{_domain_of_locks(folder)}-{secrets.token_hex(4)}"

    def _own_folder(self, name: str) -> Path:
        """A folder of the cache's own, made if need be. OSError is the caller's to translate."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise CacheError(f"{path} must be a folder, not a link: remove the link")
        return path

    def _mark(self) -> None:
        """Say that the folder is a cache."""
        if self.is_marked:
            return
        temporary = self._temporary_path(MARK)
        try:
            temporary.write_text(_MARK_TEXT)
            with suppress(FileNotFoundError):  # `clear` took it for a leftover: the next one marks
                os.replace(temporary, self.folder / MARK)
        except OSError:
            _delete(temporary)
            raise

    def _remove_leftovers(self, what: str) -> None:
        """Delete what killed writers of a key, or of the mark, left behind. The caller holds the
        key's lock; the mark has none."""
        with self._writable():
            folder = self._own_folder(_TEMPORARY)
            own = f"{what}-{_domain_of_locks(folder)}-"
            for leftover in folder.glob(f"{what}-*"):
                try:
                    age = time.time() - leftover.lstat().st_mtime
                except FileNotFoundError:
                    continue  # its writer has finished
                if leftover.name.startswith(own) or age > _ABANDONED_S:
                    _delete(leftover)

    def _keys_of_leftovers(self) -> set[str]:
        try:
            names = os.listdir(self.folder / _TEMPORARY)
        except OSError:
            return set()
        return {match[0] for name in names if (match := _KEY.match(name))}

    @contextmanager
    def _exclusive(self, key: str) -> Iterator[None]:
        """Hold the key's lock, and start from a clean state."""
        try:
            from filelock import FileLock, Timeout  # 15 ms that a cached kernel does not need
        except ImportError as error:
            raise MissingPackageError(
                "the package that locks cache entries is not installed; run: pip install filelock"
            ) from error

        with self._writable():
            path = self._own_folder(_LOCKS) / f"{key}.lock"
            if path.is_symlink():
                raise CacheError(f"{path} must be a file, not a link: remove the link")
            self._mark()
            lock = FileLock(path)
            try:
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    logger.info("%s: waiting for the process that compiles it", key)
                    lock.acquire(timeout=_LOCK_TIMEOUT_S)
            except Timeout as error:
                raise CacheError(
                    f"waited {_LOCK_TIMEOUT_S:.0f} s for {path}: another process holds it; "
                    f"end that process, or set {FOLDER_VARIABLE} to another folder"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.info("%s: this file system has no locks (%s)", key, error)
        try:
            self._remove_leftovers(key)
            yield
        finally:
            lock.release()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Make a failure to write an error that says which folder, and how to choose another."""
        try:
            yield
        except (FileExistsError, NotADirectoryError) as error:
            raise CacheError(
                f"the kernel cache folder {self.folder} cannot be made ({error}); "
                f"set {FOLDER_VARIABLE} to another folder"
            ) from error
        except OSError as error:
            raise _UnwritableError(self.folder, error) from error


def _domain_of_locks(folder: Path) -> str:
    """Names those who surely see each other's locks: processes of one running kernel that have the
    same mount of the file system."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = platform.node()
    return hashlib.sha256(f"{kernel} {folder.stat().st_dev}".encode()).hexdigest()[:12]


def _delete(path: Path) -> None:
    """A folder, file or link of the cache's own, as far as it can be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _document(key: str, files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as it is written."""
    sums = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    document = {"schema": SCHEMA_VERSION, "key": key, **manifest, "files": sums}
    document["digest"] = _manifest_digest(document)
    return document


def _kernel(
    folder: Path, contents: Mapping[str, bytes], manifest: Mapping[str, Any]
) -> CompiledKernel:
    return CompiledKernel(
        key=folder.name,
        folder=folder,
        cubin=contents.get("kernel.cubin", b""),
        ptx=contents["kernel.ptx"].decode(),
        source=contents["kernel.cu"].decode(),
        manifest=manifest,
    )


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key must be one that make_key gives; got {key!r}")


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of every field but the digest itself; the key is one of them."""
    fields = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _parse_manifest(text: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise _DamagedEntryError(f"{_MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict):
        raise _DamagedEntryError(f"{_MANIFEST} is not a manifest")
    return manifest


def _checked_manifest(text: bytes, key: str) -> dict[str, Any]:
    """The manifest of an entry of this version: every field is as it was written."""
    manifest = _parse_manifest(text)
    schema = manifest.get("schema")
    if schema == _SCHEMA_WITHOUT_DIGEST and "digest" not in manifest:
        raise _OtherSchemaError(f"{_MANIFEST} is of schema {schema}")
    try:
        digest = _manifest_digest(manifest)
    except RecursionError:
        digest = ""
    if manifest.get("digest") != digest:
        raise _DamagedEntryError(f"{_MANIFEST} does not match its digest")
    if schema != SCHEMA_VERSION:
        raise _OtherSchemaError(f"{_MANIFEST} is of schema {schema}")
    if manifest.get("key") != key:
        raise _DamagedEntryError(f"{_MANIFEST} belongs to {manifest.get('key')}")
    return manifest


def _read_file(path: Path) -> bytes:
    """The content of a regular file. A link is not followed, a pipe not waited for."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _DamagedEntryError(f"{path.name} is not a file")
        return file.read()


def _num_bytes(entry: Path) -> int:
    """Of an entry's files, as far as they can be seen. Nothing is followed out of it."""
    if entry.is_symlink():
        return 0
    try:
        paths = list(entry.iterdir())
    except NotADirectoryError:
        paths = [entry]
    except OSError:
        return 0
    num_bytes = 0
    for path in paths:
        with suppress(OSError):
            num_bytes += path.lstat().st_size
    return num_bytes
