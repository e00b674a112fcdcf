"""The kernel cache: hits, keys, damage, and many processes at once (B19)."""

import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest

from deep_moe.errors import CacheError, MissingPackageError
from deep_moe.jit import cache as cache_module
from deep_moe.jit.cache import (
    MARK,
    DamagedEntryWarning,
    KernelCache,
    UnwritableCacheWarning,
    default_folder,
    make_key,
)

FILES = {
    "kernel.cubin": b"\x7fELF cubin",
    "kernel.ptx": b".version 9.0\n",
    "kernel.cu": b"__global__ void kernel() {}\n",
}
KEY = make_key("sm_100a", {"source": "kernel"})
OTHER_KEY = make_key("sm_100a", {"source": "other"})


class CountingCompiler:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        resources = {"num_registers": 32}
        return FILES, {"arch": "sm_100a", "kernel": "kernel", "resources": resources}


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


def test_first_load_compiles_and_second_reads(cache: KernelCache) -> None:
    compiler = CountingCompiler()
    first = cache.load_or_compile(KEY, compiler)
    second = cache.load_or_compile(KEY, compiler)
    assert compiler.num_calls == 1
    assert first == second
    assert second.cubin == FILES["kernel.cubin"]
    assert second.ptx == FILES["kernel.ptx"].decode()
    assert second.arch == "sm_100a"
    assert second.manifest["files"]["kernel.ptx"]["bytes"] == len(FILES["kernel.ptx"])


def test_a_hit_takes_no_lock(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.load_or_compile(KEY, CountingCompiler())
    monkeypatch.setitem(sys.modules, "filelock", None)
    assert cache.load_or_compile(KEY, CountingCompiler()).key == KEY


@pytest.mark.parametrize(
    "parts",
    [
        {"source": "other", "compiler": "13.0", "options": ["-a"], "headers": ["h1"]},
        {"source": "text", "compiler": "13.1", "options": ["-a"], "headers": ["h1"]},
        {"source": "text", "compiler": "13.0", "options": ["-b"], "headers": ["h1"]},
        {"source": "text", "compiler": "13.0", "options": ["-a"], "headers": ["h2"]},
    ],
)
def test_every_part_is_in_the_key(parts: dict) -> None:
    base = {"source": "text", "compiler": "13.0", "options": ["-a"], "headers": ["h1"]}
    assert make_key("sm_100a", parts) != make_key("sm_100a", base)


def test_arch_and_schema_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key("sm_100a", {"source": "text"})
    assert make_key("sm_90a", {"source": "text"}).split("-")[1] != key.split("-")[1]
    monkeypatch.setattr("deep_moe.jit.cache.SCHEMA_VERSION", 999)
    assert make_key("sm_100a", {"source": "text"}) != key


def truncate(folder: Path) -> None:
    (folder / "kernel.cubin").write_bytes(FILES["kernel.cubin"][:-1])


def alter(folder: Path) -> None:
    (folder / "kernel.ptx").write_bytes(FILES["kernel.ptx"].replace(b"9", b"8"))


def remove_file(folder: Path) -> None:
    (folder / "kernel.cu").unlink()


def edit(field: str, value: object):
    """Another value in the manifest, or none."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        if value is None:
            del manifest[field]
        else:
            manifest[field] = value
        path.write_text(json.dumps(manifest))

    return change


def alter_with_its_sum(folder: Path) -> None:
    content = b"\x7fELF other"
    (folder / "kernel.cubin").write_bytes(content)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["kernel.cubin"]["sha256"] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(manifest))


def nest_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 200_000)


def nest_a_field(folder: Path) -> None:
    path = folder / "manifest.json"
    depth = 900  # the parser takes it
    nested = '{"a":' * depth + "1" + "}" * depth
    path.write_text(path.read_text().replace("{", f'{{"nested": {nested},', 1))


def manifest_of_another_entry(folder: Path) -> None:
    other = KernelCache(folder.parent).load_or_compile(OTHER_KEY, CountingCompiler())
    (folder / "manifest.json").write_bytes((other.folder / "manifest.json").read_bytes())
    shutil.rmtree(other.folder)


def list_as_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1]")


def pipe_as_file(folder: Path) -> None:
    (folder / "kernel.cubin").unlink()
    os.mkfifo(folder / "kernel.cubin")


def link_as_file(folder: Path) -> None:
    (folder / "kernel.cubin").rename(folder / "elsewhere")
    (folder / "kernel.cubin").symlink_to("elsewhere")


def file_as_entry(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


def pipe_as_entry(folder: Path) -> None:
    shutil.rmtree(folder)
    os.mkfifo(folder)


def link_as_entry(folder: Path) -> None:
    outside = folder.parent.parent / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)


def dangling_link_as_entry(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent.parent / "nowhere")


def truncate_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:40])


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def forget_file(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["kernel.ptx"]
    path.write_text(json.dumps(manifest))


NOT_AS_WRITTEN = "manifest.json does not match its digest"


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (truncate, "kernel.cubin does not match"),
        (alter, "kernel.ptx does not match"),
        (remove_file, "kernel.cu cannot be read"),
        (pipe_as_file, "kernel.cubin is not a file"),
        (link_as_file, "kernel.cubin cannot be read"),
        (alter_with_its_sum, NOT_AS_WRITTEN),
        (truncate_manifest, "not JSON"),
        (nest_manifest, "not JSON"),
        (nest_a_field, NOT_AS_WRITTEN),
        (list_as_manifest, "not a manifest"),
        (remove_manifest, "manifest.json is missing"),
        (manifest_of_another_entry, "belongs to sm_100a-"),
        (edit("key", "sm_100a-other"), NOT_AS_WRITTEN),
        (edit("kernel", "other"), NOT_AS_WRITTEN),
        (edit("resources", None), NOT_AS_WRITTEN),
        (edit("resources", {}), NOT_AS_WRITTEN),
        (edit("resources", {"num_registers": "many"}), NOT_AS_WRITTEN),
        (edit("schema", 999), NOT_AS_WRITTEN),
        (edit("files", []), NOT_AS_WRITTEN),
        (edit("digest", None), NOT_AS_WRITTEN),
        (edit("digest", 1), NOT_AS_WRITTEN),
        (forget_file, NOT_AS_WRITTEN),
        (file_as_entry, "not a folder"),
        (pipe_as_entry, "not a folder"),
        (link_as_entry, "not a folder"),
        (dangling_link_as_entry, "not a folder"),
    ],
)
def test_a_damaged_entry_is_reported_and_compiled_again(
    cache: KernelCache, damage, reported: str
) -> None:
    compiler = CountingCompiler()
    folder = cache.load_or_compile(KEY, compiler).folder
    damage(folder)
    (report,) = cache.entries()
    assert reported in report.problem
    with pytest.warns(DamagedEntryWarning, match=reported):
        kernel = cache.load_or_compile(KEY, compiler)
    assert compiler.num_calls == 2
    assert kernel.cubin == FILES["kernel.cubin"]
    (report,) = cache.entries()
    assert report.problem is None
    assert list((cache.folder / "temporary").iterdir()) == []


def test_a_linked_entry_is_replaced_and_what_it_led_to_is_left(cache: KernelCache) -> None:
    link_as_entry(cache.load_or_compile(KEY, CountingCompiler()).folder)
    with pytest.warns(DamagedEntryWarning):
        folder = cache.load_or_compile(KEY, CountingCompiler()).folder
    assert not folder.is_symlink()
    assert (cache.folder.parent / "outside" / "kernel.cubin").read_bytes() == FILES["kernel.cubin"]


def test_a_key_that_make_key_does_not_give_is_refused(cache: KernelCache) -> None:
    for key in ("../outside", "Documents", "sm_100a-first", KEY.upper(), KEY + "0", ""):
        with pytest.raises(ValueError, match="key must be one that make_key gives"):
            cache.load_or_compile(key, CountingCompiler())
        with pytest.raises(ValueError, match="key must be one that make_key gives"):
            cache.remove(key)
    assert not cache.folder.exists()


def test_an_entry_of_an_earlier_version_is_no_damage(cache: KernelCache) -> None:
    folder = cache.load_or_compile(KEY, CountingCompiler()).folder
    edit("digest", None)(folder)
    edit("schema", 1)(folder)
    (report,) = cache.entries()
    assert (report.problem, report.is_of_other_version) == (None, True)


def test_a_folder_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file" / "cache")
    with pytest.raises(CacheError, match="DEEP_MOE_CACHE_DIR"):
        cache.load_or_compile(KEY, CountingCompiler())


def test_a_compiler_error_leaves_nothing_behind(cache: KernelCache) -> None:
    def fail():
        raise OSError("from the compiler, not from the cache")

    with pytest.raises(OSError, match="from the compiler"):
        cache.load_or_compile(KEY, fail)
    assert list(cache.entries()) == []
    assert cache.load_or_compile(KEY, CountingCompiler()).key == KEY


def test_clear_removes_entries_and_counts_them(cache: KernelCache) -> None:
    for key in (KEY, OTHER_KEY):
        cache.load_or_compile(key, CountingCompiler())
    assert {entry.key for entry in cache.entries()} == {KEY, OTHER_KEY}
    assert all(entry.num_bytes > sum(map(len, FILES.values())) for entry in cache.entries())
    assert cache.clear() == 2
    assert list(cache.entries()) == []
    assert cache.load(KEY) is None


def test_an_absent_cache_has_no_entries(cache: KernelCache) -> None:
    assert list(cache.entries()) == []
    assert cache.clear() == 0
    assert not cache.folder.exists()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that is somebody's, also a folder in it that is named as an entry is."""
    home = tmp_path / "home"
    for name in ("Documents/thesis.txt", ".ssh/id", f"{KEY}/photo", "locks/door", "temporary/a"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(name)
    return home


def test_a_folder_that_is_not_a_cache_is_refused_by_name(foreign: Path) -> None:
    before = tree(foreign)
    cache = KernelCache(foreign)
    for remove in (cache.clear, lambda: cache.remove(KEY)):
        with pytest.raises(CacheError, match=rf"{foreign} is not a kernel cache.*\.ssh, Documents"):
            remove()
    assert tree(foreign) == before


def test_a_folder_with_nothing_but_an_entry_s_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    (tmp_path / KEY / "photo").write_text("photo")
    with pytest.raises(CacheError, match=rf"is not a kernel cache.*{KEY}"):
        KernelCache(tmp_path).clear()
    assert tree(tmp_path) == {f"{KEY}/photo": b"photo"}


def test_what_is_foreign_stays_in_a_cache_too(foreign: Path) -> None:
    shutil.rmtree(foreign / KEY)
    before = tree(foreign)
    cache = KernelCache(foreign)
    cache.load_or_compile(KEY, CountingCompiler())
    (foreign / "tuning.json").write_text("{}")
    assert [entry.key for entry in cache.entries()] == [KEY]
    assert cache.clear() == 1
    after = tree(foreign)
    assert before.items() <= after.items()
    assert "tuning.json" in after
    assert not any(name.startswith(KEY) for name in after)


def test_the_mark_must_say_what_it_is(foreign: Path) -> None:
    (foreign / MARK).write_text("my own notes")
    with pytest.raises(CacheError, match="is not a kernel cache"):
        KernelCache(foreign).clear()


def test_an_empty_folder_may_be_cleared(tmp_path: Path) -> None:
    assert KernelCache(tmp_path).clear() == 0


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for ask in (KernelCache(path).clear, lambda path=path: list(KernelCache(path).entries())):
            with pytest.raises(CacheError, match=r"file.* is not a kernel cache.*not a folder"):
                ask()


def test_a_cache_from_before_there_were_marks_may_be_cleared(cache: KernelCache) -> None:
    cache.load_or_compile(KEY, CountingCompiler())
    (cache.folder / "tuning.json").write_text("{}")
    (cache.folder / MARK).unlink()
    assert cache.clear() == 1
    assert list(cache.entries()) == []
    assert (cache.folder / "tuning.json").exists()


def test_without_a_mark_a_linked_entry_is_refused(cache: KernelCache) -> None:
    link_as_entry(cache.load_or_compile(KEY, CountingCompiler()).folder)
    (cache.folder / MARK).unlink()
    with pytest.raises(CacheError, match="is not a kernel cache"):
        cache.clear()


def test_clear_removes_a_link_and_not_what_it_leads_to(cache: KernelCache) -> None:
    link_as_entry(cache.load_or_compile(KEY, CountingCompiler()).folder)
    assert cache.clear() == 1
    assert not (cache.folder / KEY).is_symlink()
    assert set(tree(cache.folder.parent / "outside")) == {*FILES, "manifest.json"}


def test_the_cache_s_own_folder_may_be_a_link(cache: KernelCache, tmp_path: Path) -> None:
    cache.folder.parent.mkdir(exist_ok=True)
    (tmp_path / "real").mkdir()
    cache.folder.symlink_to(tmp_path / "real")
    cache.load_or_compile(KEY, CountingCompiler())
    assert KernelCache(tmp_path / "real").clear() == 1
    assert cache.folder.is_symlink()


@pytest.mark.parametrize("name", ["locks", "temporary"])
def test_a_link_in_place_of_the_cache_s_own_folders_is_refused(
    cache: KernelCache, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{KEY}-mine").write_text("mine")
    cache.folder.mkdir()
    (cache.folder / name).symlink_to(outside)
    with pytest.raises(CacheError, match=f"{name} must be a folder, not a link"):
        cache.load_or_compile(KEY, CountingCompiler())
    assert set(tree(outside)) == {f"{KEY}-mine"}


def test_a_lock_that_is_a_link_is_refused(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (cache.folder / "locks").mkdir(parents=True)
    (cache.folder / "locks" / f"{KEY}.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CacheError, match="must be a file, not a link"):
        cache.load_or_compile(KEY, CountingCompiler())
    assert (tmp_path / "precious").read_text() == "text"


def test_leftovers_of_any_kind_are_removed(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    temporary = cache.folder / "temporary"
    temporary.mkdir(parents=True)
    own = cache_module._domain_of_locks(temporary)
    (temporary / f"{KEY}-{own}-file").write_text("")
    (temporary / f"{KEY}-{own}-link").symlink_to(tmp_path / "precious")
    cache.load_or_compile(KEY, CountingCompiler())
    assert list(temporary.iterdir()) == []
    assert (tmp_path / "precious").is_dir()


def make_leftover(cache: KernelCache, name: str, *, age_s: float = 0) -> Path:
    leftover = cache.folder / "temporary" / name
    leftover.mkdir(parents=True)
    (leftover / "kernel.cubin").write_bytes(b"half")
    then = time.time() - age_s
    os.utime(leftover, (then, then))
    return leftover


def test_what_another_host_writes_is_left_alone(cache: KernelCache) -> None:
    """Its locks may not be seen here. What has not changed for an hour is nobody's."""
    cache.load_or_compile(OTHER_KEY, CountingCompiler())
    in_work = make_leftover(cache, f"{KEY}-ffffffffffff-1")
    abandoned = make_leftover(cache, f"{KEY}-ffffffffffff-2", age_s=7200)
    cache.load_or_compile(KEY, CountingCompiler())
    assert cache.clear() == 2
    assert (in_work.exists(), abandoned.exists()) == (True, False)


def test_clear_removes_what_killed_writers_left(cache: KernelCache) -> None:
    """Of keys without an entry, and of the mark."""
    cache.load_or_compile(OTHER_KEY, CountingCompiler())
    own = cache_module._domain_of_locks(cache.folder)
    make_leftover(cache, f"{KEY}-{own}-1")
    make_leftover(cache, f"{KEY}-from-earlier-versions", age_s=7200)
    (cache.folder / "temporary" / f"{MARK}-{own}-1").write_text("half")
    assert cache.clear() == 1
    assert list((cache.folder / "temporary").iterdir()) == []


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where locks do not reach another host."""
    import filelock

    monkeypatch.setattr(filelock.FileLock, "acquire", lambda self, timeout=None: None)


def as_it_is(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "compiler_of_result"),
    [(as_it_is, "theirs"), (truncate, "ours"), (file_as_entry, "ours"), (link_as_entry, "ours")],
)
def test_the_second_of_two_writers_takes_what_is_intact(
    cache: KernelCache, without_locks: None, change, compiler_of_result: str
) -> None:
    """Another host has written the entry while this one compiled."""

    def compile_as(name: str):
        return FILES, {"arch": "sm_100a", "kernel": "kernel", "by": name}

    def compile_second():
        KernelCache(cache.folder).load_or_compile(KEY, lambda: compile_as("theirs"))
        change(cache.folder / KEY)
        return compile_as("ours")

    kernel = cache.load_or_compile(KEY, compile_second)
    assert kernel.manifest["by"] == compiler_of_result
    assert KernelCache(cache.folder).load(KEY) == kernel
    assert list((cache.folder / "temporary").iterdir()) == []


def test_an_entry_that_a_network_file_system_hides_is_kept_in_memory(
    cache: KernelCache, without_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename fails because of an entry that the next look does not show."""
    KernelCache(cache.folder).load_or_compile(KEY, CountingCompiler())
    monkeypatch.setattr(KernelCache, "_read", lambda self, key: None)
    kernel = cache.load_or_compile(KEY, CountingCompiler())
    assert kernel.cubin == FILES["kernel.cubin"]
    assert list((cache.folder / "temporary").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_without(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import filelock

    def refuse_lock(self, timeout=None):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse_lock)
    cache.load_or_compile(KEY, CountingCompiler())
    assert KernelCache(cache.folder).load(KEY) is not None


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, method: str, *, name: str = "") -> None:
    """Let the operating system refuse a method of paths, or of those whose name ends in `name`."""
    real = getattr(Path, method)

    def refusing(path: Path, *args, **kwargs):
        if path.name.endswith(name):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, method, refusing)


@pytest.fixture(autouse=True)
def forget_memory():
    yield
    cache_module._in_memory.clear()
    cache_module._warned_of.clear()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_what_cannot_be_written_is_kept_in_memory_with_one_warning(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    cache.load_or_compile(OTHER_KEY, CountingCompiler())
    refuse(monkeypatch, number, "mkdir")
    compiler = CountingCompiler()
    with pytest.warns(UnwritableCacheWarning, match=os.strerror(number)):
        first = cache.load_or_compile(KEY, compiler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = KernelCache(cache.folder).load_or_compile(KEY, compiler)
        cache.load_or_compile(make_key("sm_90a", {}), compiler)
    assert compiler.num_calls == 2
    assert again is first
    assert first.cubin == FILES["kernel.cubin"]
    assert first.name == "kernel"
    assert KernelCache(cache.folder).load(KEY) is None
    assert KernelCache(cache.folder).load(OTHER_KEY) is not None


def test_who_must_write_is_refused(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EROFS, "mkdir")
    compiler = CountingCompiler()
    with pytest.warns(UnwritableCacheWarning):
        cache.load_or_compile(KEY, compiler)
    with pytest.raises(CacheError, match="DEEP_MOE_CACHE_DIR"):
        KernelCache(cache.folder, must_write=True).load_or_compile(KEY, compiler)
    assert compiler.num_calls == 1


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("write_bytes", "kernel.cubin"),
        ("write_bytes", "kernel.cu"),
        ("write_text", "manifest.json"),
    ],
)
def test_a_full_disk_leaves_no_half_written_entry(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, method: str, name: str
) -> None:
    compiler = CountingCompiler()
    refuse(monkeypatch, errno.ENOSPC, method, name=name)
    with pytest.warns(UnwritableCacheWarning, match="No space left"):
        kernel = cache.load_or_compile(KEY, compiler)
    assert compiler.num_calls == 1
    assert kernel.cubin == FILES["kernel.cubin"]
    assert list(cache.entries()) == []
    assert list((cache.folder / "temporary").iterdir()) == []


def test_clear_needs_no_room(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a lock nor for another name."""
    cache.load_or_compile(KEY, CountingCompiler())
    own = cache_module._domain_of_locks(cache.folder)
    make_leftover(cache, f"{OTHER_KEY}-{own}-1")

    def refuse_lock(self, timeout=None):
        raise OSError(errno.ENOSPC, "No space left on device")

    import filelock

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse_lock)
    refuse(monkeypatch, errno.ENOSPC, "rename")
    assert cache.clear() == 1
    assert not (cache.folder / KEY).exists()
    assert list((cache.folder / "temporary").iterdir()) == []


def test_what_keeps_a_cache_from_being_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KernelCache(tmp_path / "to" / "be" / "made").why_not_writable() is None
    (tmp_path / "file").touch()
    assert "file is not a folder" in str(KernelCache(tmp_path / "file").why_not_writable())
    cache = KernelCache(tmp_path / "cache")
    cache.load_or_compile(KEY, CountingCompiler())
    locks = cache.folder / "locks"
    monkeypatch.setattr("os.access", lambda path, mode: path != locks)
    assert cache.why_not_writable() == f"{locks} cannot be written"
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert cache.why_not_writable() == f"5 MiB are free in {cache.folder}"


def test_loads_and_waits_are_logged(cache: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    import filelock

    caplog.set_level(logging.DEBUG, logger="deep_moe")
    cache.load_or_compile(KEY, CountingCompiler())
    assert caplog.messages == []
    cache.load_or_compile(KEY, CountingCompiler())
    assert caplog.messages == [f"{KEY}: loaded from {cache.folder}"]
    caplog.clear()
    lock = filelock.FileLock(cache.folder / "locks" / f"{OTHER_KEY}.lock")
    lock.acquire()
    waits = threading.Thread(target=cache.load_or_compile, args=(OTHER_KEY, CountingCompiler()))
    waits.start()
    while not caplog.messages and waits.is_alive():
        time.sleep(0.001)
    lock.release()
    waits.join()
    assert caplog.messages == [f"{OTHER_KEY}: waiting for the process that compiles it"]


def test_a_folder_that_cannot_be_read_is_named(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(CacheError, match=rf"{cache.folder} cannot be read \(Permission denied\)"):
        list(cache.entries())


def test_a_missing_filelock_is_named(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(MissingPackageError, match="pip install filelock"):
        cache.load_or_compile(KEY, CountingCompiler())


def test_the_folder_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"


def test_a_tilde_in_the_variable_is_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where no shell sees the variable, nobody else expands the tilde."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", "~/kernels")
    assert default_folder() == tmp_path / "kernels"


def test_without_the_variable_the_folder_is_the_user_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("DEEP_MOE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "deep_moe"


def test_a_missing_platformdirs_is_named_with_both_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DEEP_MOE_CACHE_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(MissingPackageError, match=r"pip install platformdirs .*DEEP_MOE_CACHE_DIR"):
        default_folder()


# A process that loads KEY and says so in a line; its compiler leaves a mark, then takes its time.
WORKER = """
    import sys, time
    from deep_moe.jit.cache import KernelCache
    folder, key, marks, seconds = sys.argv[1:]

    def compile_kernel():
        with open(marks, "a") as file:
            file.write("compiled\\n")
        time.sleep(float(seconds))
        files = {"kernel.cubin": b"c" * 1000, "kernel.ptx": b"p" * 1000, "kernel.cu": b"s" * 1000}
        return files, {"arch": "sm_100a"}

    kernel = KernelCache(folder).load_or_compile(key, compile_kernel)
    assert kernel.cubin == b"c" * 1000 and kernel.ptx == "p" * 1000
    print("loaded", flush=True)
"""


def start_worker(cache: KernelCache, marks: Path, seconds: float) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), cache.folder, KEY, marks, str(seconds)],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_sixteen_processes_compile_once(cache: KernelCache, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    workers = [start_worker(cache, marks, 1.0) for _ in range(16)]
    outputs = [worker.communicate()[0] for worker in workers]
    assert outputs == ["loaded\n"] * 16
    assert [worker.returncode for worker in workers] == [0] * 16
    assert marks.read_text() == "compiled\n"


def test_a_writer_killed_half_way_leaves_no_damage(cache: KernelCache, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    victim = start_worker(cache, marks, 600)
    while not marks.exists():
        assert victim.poll() is None
        time.sleep(0.01)
    # As if it had also been killed between two files of its entry.
    make_leftover(cache, f"{KEY}-{cache_module._domain_of_locks(cache.folder)}-abc")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert cache.load(KEY) is None
    kernel = cache.load_or_compile(KEY, CountingCompiler())
    assert kernel.cubin == FILES["kernel.cubin"]
    assert list((cache.folder / "temporary").iterdir()) == []
