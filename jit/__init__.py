"""Run-time compilation and launch of the kernels.

    from deep_moe import jit
    kernel = jit.build(config)            # deep_moe.heuristics.MegaMoEConfig -> CompiledKernel
    kernel.cubin, kernel.ptx, kernel.source, kernel.folder
    kernel.manifest["resources"]          # num_registers, stack_bytes, spill_store_bytes, ...

`build` renders one small translation unit (render.py), compiles it with NVRTC for the config's
architecture, whatever GPU this machine has (nvrtc.py, headers.py), and keeps the result (cache.py).
`build_prepare_inputs`, `build_low_latency`, `build_throughput` and `build_training` do the same for
the other kernels, `compile_cached` for any other source that includes the header library.

Fields of a manifest: `schema`, `key`, `kernel`, `arch`, `compiler`, `options`, `headers` (what each
include folder counted as in the key), `config` (None for other sources), `resources` (None of what
was compiled to PTX only, for the emulator), `compile_seconds`, `created` (UTC), `files` (bytes and
SHA-256 of each), `digest` (of all of these).

KernelCache(folder=None) lists (`entries`), checks and clears a cache; see cache.py, which also says
where the folder is.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .cache import CompiledKernel, DamagedEntryWarning, EntryReport, KernelCache, make_key
from .headers import find_headers
from .nvrtc import COMPILE_OPTIONS, compile_source, compile_to_ptx, compiler_version
from .render import (
    KERNEL_NAME,
    PREPARE_INPUTS_NAME,
    low_latency_name,
    render_kernel,
    render_low_latency,
    render_prepare_inputs,
    render_throughput,
    render_training,
    throughput_name,
    training_name,
)

if TYPE_CHECKING:
    from deep_moe.heuristics.config import MegaMoEConfig
    from deep_moe.heuristics.low_latency import LowLatencyConfig
    from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig
    from deep_moe.heuristics.throughput import ThroughputConfig
    from deep_moe.heuristics.training import TrainingConfig

__all__ = [
    "KERNEL_NAME",
    "PREPARE_INPUTS_NAME",
    "CompiledKernel",
    "DamagedEntryWarning",
    "EntryReport",
    "KernelCache",
    "build",
    "build_low_latency",
    "build_prepare_inputs",
    "build_throughput",
    "build_training",
    "compile_cached",
    "compile_source",
    "compile_to_ptx",
    "find_headers",
    "low_latency_name",
    "render_kernel",
    "render_low_latency",
    "render_prepare_inputs",
    "render_throughput",
    "render_training",
    "throughput_name",
    "training_name",
]


def build(
    config: MegaMoEConfig, *, cache: KernelCache | None = None, for_emulator: bool = False
) -> CompiledKernel:
    """The Mega MoE kernel for `config`, from the cache or compiled now.

    for_emulator: PTX is enough, and ptxas need not run; the kernel may have no cubin.
    Raises CompileError with the compiler's log, MissingPackageError, or CacheError.
    """
    source = render_kernel(config)
    return _build(source, KERNEL_NAME, config.arch, config.to_dict(), cache, for_emulator)


def build_prepare_inputs(
    config: PrepareInputsConfig, *, cache: KernelCache | None = None, for_emulator: bool = False
) -> CompiledKernel:
    """The kernel that prepares inputs; otherwise as `build`."""
    source = render_prepare_inputs(config)
    return _build(
        source, PREPARE_INPUTS_NAME, config.arch, config.kernel_fields(), cache, for_emulator
    )


def build_low_latency(
    config: LowLatencyConfig, *, cache: KernelCache | None = None, for_emulator: bool = False
) -> CompiledKernel:
    """A kernel of the low-latency all-to-all; otherwise as `build`."""
    source, name = render_low_latency(config), low_latency_name(config)
    return _build(source, name, config.arch, config.kernel_fields(), cache, for_emulator)


def build_throughput(
    config: ThroughputConfig, *, cache: KernelCache | None = None, for_emulator: bool = False
) -> CompiledKernel:
    """A kernel of the throughput all-to-all; otherwise as `build`."""
    source, name = render_throughput(config), throughput_name(config)
    return _build(source, name, config.arch, config.kernel_fields(), cache, for_emulator)


def build_training(
    config: TrainingConfig, *, cache: KernelCache | None = None, for_emulator: bool = False
) -> CompiledKernel:
    """A step of the differentiable layer; otherwise as `build`."""
    fields: dict[str, Any] = dict(config.kernel_fields())
    if config.activation is not None:
        fields |= config.activation.to_dict()
    source, name = render_training(config), training_name(config)
    return _build(source, name, config.arch, fields, cache, for_emulator)


def _build(
    source: str,
    kernel: str,
    arch: str,
    fields: Mapping[str, Any],
    cache: KernelCache | None,
    for_emulator: bool,
) -> CompiledKernel:
    config = {**fields, "arch": arch}
    return compile_cached(
        source, arch=arch, kernel=kernel, config=config, cache=cache, for_emulator=for_emulator
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
    headers = find_headers()
    compiler = compiler_version()
    provenance = {
        "kernel": kernel,
        "compiler": compiler,
        "options": list(COMPILE_OPTIONS),
        "headers": list(headers.identities),
    }

    def compile_kernel() -> tuple[dict[str, bytes], dict[str, Any]]:
        arguments: dict[str, Any] = {
            "arch": arch,
            "include_paths": headers.include_paths,
            "kernel": kernel,
            "context": "" if config is None else f"config: {config}",
        }
        files, resources = {"kernel.cu": source.encode()}, None
        started = time.perf_counter()
        if for_emulator:
            ptx = compile_to_ptx(source, **arguments)
        else:
            compilation = compile_source(source, **arguments)
            ptx, resources = compilation.ptx, dataclasses.asdict(compilation.resources)
            files["kernel.cubin"] = compilation.cubin
        files["kernel.ptx"] = ptx.encode()
        manifest = {
            **provenance,
            "arch": arch,
            # JSON has no infinity, and a manifest is for other programs too.
            "config": config and {k: str(v) if v == float("inf") else v for k, v in config.items()},
            "resources": resources,
            "compile_seconds": round(time.perf_counter() - started, 3),
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        return files, manifest

    cache = cache or KernelCache()
    parts = {**provenance, "source": source}
    key = make_key(arch, parts)
    if for_emulator:
        complete = cache.load(key)
        if complete is not None:
            return complete
        key = make_key(arch, {**parts, "results": ["ptx"]})
    return cache.load_or_compile(key, compile_kernel)
