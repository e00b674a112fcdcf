"""Run-time compilation and launch of the kernels.

    from deep_moe import jit
    kernel = jit.build(config)            # a MegaMoEConfig or another kernel's -> CompiledKernel
    kernel.cubin, kernel.ptx, kernel.source, kernel.folder
    kernel.manifest["resources"]          # num_registers, stack_bytes, spill_store_bytes, ...

`build` renders one small translation unit (render.py), compiles it with NVRTC for the config's
architecture, whatever GPU this machine has (nvrtc.py, headers.py), and keeps the result (cache.py).
`compile_cached` does the same for any other source that includes the header library.

Fields of a manifest: `schema`, `key`, `kernel`, `arch`, `compiler`, `options`, `headers` (what each
include folder counted as in the key), `config` (None for other sources), `resources` (None of what
was compiled to PTX only, for the emulator), `compile_seconds`, `created` (UTC), `files` (bytes and
SHA-256 of each), `digest` (of all of these).

KernelCache(folder=None) lists (`entries`), checks and clears a cache; see cache.py, which also says
where the folder is. `prune` deletes what no call takes any more.

`kernel_counts()` says how many kernels this process has compiled, read and loaded.

The logger `deep_moe.jit` says at INFO what is compiled and what is waited for, at DEBUG what is
loaded.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Iterable
from typing import Any

from deep_moe.emulator.nvrtc import options_with
from deep_moe.targets import target_of

from .cache import CompiledKernel, DamagedEntryWarning, EntryReport, KernelCache, make_key
from .counts import KernelCounts, count, kernel_counts
from .headers import find_headers
from .nvrtc import compile_source, compile_to_ptx, compiler_version
from .render import KernelConfig, render_kernel

__all__ = [
    "CompiledKernel",
    "DamagedEntryWarning",
    "EntryReport",
    "KernelCache",
    "KernelConfig",
    "KernelCounts",
    "build",
    "compile_cached",
    "compile_source",
    "compile_to_ptx",
    "find_headers",
    "kernel_counts",
    "outdated",
    "prune",
    "render_kernel",
]


logger = logging.getLogger(__name__)


def build(
    config: KernelConfig, *, cache: KernelCache | None = None, for_emulator: bool = False
) -> CompiledKernel:
    """The kernel for `config`, from the cache or compiled now.

    for_emulator: PTX is enough, and ptxas need not run; the kernel may have no cubin.
    Raises CompileError with the compiler's log, MissingPackageError, or CacheError.
    """
    target_of(config.arch)  # or an error that says which there are
    fields = {**config.kernel_fields(), "arch": config.arch}
    if config.activation is not None:
        fields |= config.activation.to_dict()
    return compile_cached(
        render_kernel(config),
        arch=config.arch,
        kernel=config.kernel_name,
        config=fields,
        cache=cache,
        for_emulator=for_emulator,
    )


def compile_cached(
    source: str,
    *,
    arch: str,
    kernel: str,
    config: dict[str, Any] | None = None,
    cache: KernelCache | None = None,
    for_emulator: bool = False,
) -> CompiledKernel:
    """`source` compiled for `arch`, from the cache or compiled now.

    kernel: the extern "C" entry whose resources are reported. config: recorded in the manifest and
    shown if the source does not compile. for_emulator: PTX is enough. What is in the cache with a
    cubin is taken; what is compiled has none, and no resources in its manifest.
    """
    provenance = {"kernel": kernel, **_made_with()}

    is_compiled = False

    def compile_kernel() -> tuple[dict[str, bytes], dict[str, Any]]:
        nonlocal is_compiled
        arguments: dict[str, Any] = {
            "arch": arch,
            "include_paths": find_headers().include_paths,
            "kernel": kernel,
            "context": "" if config is None else f"config: {config}",
        }
        files, resources = {"kernel.cu": source.encode()}, None
        what = "PTX" if for_emulator else "cubin"
        logger.info("%s: compiling %s for %s to %s", key, kernel, arch, what)
        started = time.perf_counter()
        if for_emulator:
            ptx = compile_to_ptx(source, **arguments)
        else:
            compilation = compile_source(source, **arguments)
            ptx, resources = compilation.ptx, dataclasses.asdict(compilation.resources)
            files["kernel.cubin"] = compilation.cubin
        files["kernel.ptx"] = ptx.encode()
        seconds = round(time.perf_counter() - started, 3)
        is_compiled = True
        logger.info("%s: compiled in %.1f s", key, seconds)
        manifest = {
            **provenance,
            "arch": arch,
            # JSON has no infinity, and a manifest is for other programs too.
            "config": config and {k: str(v) if v == float("inf") else v for k, v in config.items()},
            "resources": resources,
            "compile_seconds": seconds,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        return files, manifest

    cache = cache or KernelCache()
    # The key has all that the result follows from.
    parts = {**provenance, "source": source}
    key = make_key(arch, parts)
    if for_emulator:
        complete = cache.load(key)
        if complete is not None:
            count(read=1)
            return complete
        key = make_key(arch, {**parts, "results": ["ptx"]})
    found = cache.load_or_compile(key, compile_kernel)
    count(compiled=is_compiled, read=not is_compiled)
    return found


def outdated(entries: Iterable[EntryReport]) -> set[str]:
    """The keys of those that no call of this installation takes: made with other headers, options
    or another compiler than kernels are now, damaged, or of another version of deep_moe."""
    made_with = _made_with()
    return {
        entry.key
        for entry in entries
        if entry.problem
        or entry.is_of_other_version
        or any(entry.manifest.get(name) != value for name, value in made_with.items())
    }


def prune(cache: KernelCache) -> list[EntryReport]:
    """Delete the outdated entries and return them. Raises CacheError, with nothing deleted, if the
    folder is not a cache."""
    cache.check_is_cache()
    entries = list(cache.entries())
    keys = outdated(entries)
    for key in keys:
        cache.remove(key)
    return [entry for entry in entries if entry.key in keys]


def _made_with() -> dict[str, Any]:
    """What every kernel follows from beside its source and architecture, as keys and manifests have
    it."""
    return {
        "compiler": compiler_version(),
        "options": options_with(),
        "headers": list(find_headers().identities),
    }
