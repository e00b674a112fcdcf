"""The kernel cache: hits, keys, damage, and many processes at once (B19)."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from deep_moe.errors import CacheError, MissingPackageError
from deep_moe.jit.cache import DamagedEntryWarning, KernelCache, default_folder, make_key

FILES = {
    "kernel.cubin": b"\x7fELF cubin",
    "kernel.ptx": b".version 9.0\n",
    "kernel.cu": b"__global__ void kernel() {}\n",
}
KEY = make_key("sm_100a", {"source": "kernel"})


class CountingCompiler:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return FILES, {"arch": "sm_100a", "kernel": "kernel"}


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


def truncate_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:40])


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def swap_key(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(KEY, "sm_100a-other"))


def forget_file(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["kernel.ptx"]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (truncate, "kernel.cubin does not match"),
        (alter, "kernel.ptx does not match"),
        (remove_file, "kernel.cu cannot be read"),
        (truncate_manifest, "not a manifest"),
        (remove_manifest, "manifest.json is missing"),
        (swap_key, "belongs to sm_100a-other"),
        (forget_file, "does not list kernel.ptx"),
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
    other = make_key("sm_100a", {"source": "other"})
    for key in (KEY, other):
        cache.load_or_compile(key, CountingCompiler())
    assert {entry.key for entry in cache.entries()} == {KEY, other}
    assert all(entry.num_bytes > sum(map(len, FILES.values())) for entry in cache.entries())
    assert cache.clear() == 2
    assert list(cache.entries()) == []
    assert cache.load(KEY) is None


def test_an_absent_cache_has_no_entries(cache: KernelCache) -> None:
    assert list(cache.entries()) == []
    assert cache.clear() == 0
    assert not cache.folder.exists()


def test_the_folder_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"


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
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
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
    half_written = cache.folder / "temporary" / f"{KEY}-abc"
    half_written.mkdir(parents=True)
    (half_written / "kernel.cubin").write_bytes(b"half")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert cache.load(KEY) is None
    kernel = cache.load_or_compile(KEY, CountingCompiler())
    assert kernel.cubin == FILES["kernel.cubin"]
    assert list((cache.folder / "temporary").iterdir()) == []
