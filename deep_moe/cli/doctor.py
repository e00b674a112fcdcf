"""`deep-moe doctor`: what is installed and works, what is missing, and how to mend it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import typer

from .options import JsonOption
from .output import new_table, print_json, stdout

# What the fused kernel exists for: architecture by compute capability.
SUPPORTED_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
DIGEST_LENGTH = 64  # of SHA-256 in hexadecimal
SMALLEST_KERNEL = 'extern "C" __global__ void mega_moe_kernel() {}'


@dataclass(frozen=True)
class Finding:
    """The answer of one check. `remedy` is the command that mends it, empty if nothing is to do."""

    name: str
    state: str  # "ok", "missing" (something does not work), "absent" (optional and not here)
    detail: str
    remedy: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Check the installation; exit 1 if something that every use needs is missing."""
    findings = [_guarded(check) for check in CHECKS]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "missing": "red", "absent": "yellow"}
        table = new_table("deep-moe doctor", "what", "state", "found", whole=("what", "state"))
        for finding in findings:
            colour = colours[finding.state]
            table.add_row(finding.name, f"[{colour}]{finding.state}[/]", finding.detail)
        stdout().print(table)
        for finding in findings:
            if finding.remedy:
                stdout().print(f"{finding.name}: {finding.remedy}", markup=False, soft_wrap=True)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _guarded(check: Callable[[], Finding]) -> Finding:
    """The check's answer; what it raises is an answer too, and the errors carry their remedy."""
    try:
        return check()
    except (RuntimeError, ImportError, OSError) as error:
        return Finding(check.__name__.lstrip("_").replace("_", " "), "missing", str(error))


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "missing", str(error), "pip install 'torch>=2.9'")
    return Finding("torch", "ok", torch.__version__)


def _headers() -> Finding:
    from deep_moe.jit.headers import find_headers

    # Long words of an identity are digests, whose beginning tells them apart.
    identities = [
        " ".join(word[:12] if len(word) == DIGEST_LENGTH else word for word in identity.split())
        for identity in find_headers().identities
    ]
    return Finding("headers", "ok", "; ".join(identities))


def _compiler() -> Finding:
    """Compiles the smallest kernel: finding the library is not the same as its working."""
    from deep_moe.jit.nvrtc import compile_source, compiler_version

    compile_source(SMALLEST_KERNEL, arch="sm_100a")
    return Finding("compiler", "ok", f"{compiler_version()} compiles for sm_100a")


def _kernel_cache() -> Finding:
    from deep_moe.jit.cache import KernelCache

    entries = list(KernelCache().entries())
    damaged = sum(entry.problem is not None for entry in entries)
    detail = f"{KernelCache().folder}: {len(entries)} kernels, {damaged} damaged"
    if damaged:
        return Finding("kernel cache", "absent", detail, "deep-moe cache clear")
    return Finding("kernel cache", "ok", detail)


def _emulator() -> Finding:
    from deep_moe.emulator import library

    library.load()
    return Finding("emulator", "ok", "its library loads")


def _host_compiler() -> Finding:
    """Only a source checkout needs one: wheels carry the emulator's library."""
    path = shutil.which("g++")
    if path is None:
        return Finding("host compiler", "absent", "no g++", "apt-get install g++")
    return Finding("host compiler", "ok", path)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "absent", "no CUDA device; calls run in the emulator")
    names = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        kernel = SUPPORTED_CAPABILITIES.get(capability, "no fused kernel")
        names.append(f"{torch.cuda.get_device_name(index)} ({kernel})")
    return Finding("GPU", "ok", "; ".join(names))


CHECKS = (
    _python,
    _torch,
    _headers,
    _compiler,
    _kernel_cache,
    _emulator,
    _host_compiler,
    _gpu,
)
