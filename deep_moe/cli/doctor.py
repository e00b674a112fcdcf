"""`deep-moe doctor`: what is installed and works, what is missing, and how to mend it."""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import typer

from .options import JsonOption
from .output import coloured, new_table, print_json, stdout
from .packages import REQUIREMENTS, remedy

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
            state = coloured(finding.state, colours[finding.state])
            table.add_row(finding.name, state, finding.detail)
        stdout().print(table)
        for finding in findings:
            if finding.remedy:
                stdout().print(f"{finding.name}: {finding.remedy}", soft_wrap=True)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _guarded(check: Callable[[], Finding]) -> Finding:
    """The check's answer; what it raises, whatever that is, is an answer too, and our own errors
    carry their remedy."""
    try:
        return check()
    except Exception as error:
        text = (isinstance(error, ImportError) and remedy(error)) or str(error) or repr(error)
        return Finding(check.__name__.lstrip("_").replace("_", " "), "missing", text)


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "missing", str(error), "pip install 'torch>=2.9'")
    return Finding("torch", "ok", torch.__version__)


def _packages() -> Finding:
    """Imports them: what is found need not be whole."""
    problems, names = [], []
    for module, requirement in REQUIREMENTS.items():
        try:
            importlib.import_module(module)
        except Exception as error:
            problems.append(f"{module}: {error}")
            names.append(f"'{requirement}'")
    if problems:
        return Finding("packages", "missing", "; ".join(problems), f"pip install {' '.join(names)}")
    return Finding("packages", "ok", f"all {len(REQUIREMENTS)} can be imported")


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
    from deep_moe.targets import TARGETS

    for arch in TARGETS:
        compile_source(SMALLEST_KERNEL, arch=arch)
    return Finding("compiler", "ok", f"{compiler_version()} compiles for {', '.join(TARGETS)}")


def _kernel_cache() -> Finding:
    from deep_moe.jit.cache import FOLDER_VARIABLE, KernelCache

    cache = KernelCache()
    entries = list(cache.entries())
    damaged = sum(entry.problem is not None for entry in entries)
    detail = f"{cache.folder}: {len(entries)} kernels, {damaged} damaged"
    problem = cache.why_not_writable()
    if problem is not None:
        remedy = (
            f"{problem}: every process compiles anew what is not there; "
            f"set {FOLDER_VARIABLE} to a folder that can be written"
        )
        return Finding("kernel cache", "absent", f"{detail}, and it cannot be written", remedy)
    if damaged:
        remedy = "nothing needs to be done: what is damaged is compiled again when it is needed"
        return Finding("kernel cache", "absent", detail, remedy)
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

    from deep_moe.targets import target_of_capability

    if not torch.cuda.is_available():
        return Finding("GPU", "absent", "no CUDA device; calls run in the emulator")
    names = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        target = target_of_capability(capability)
        kernel = "no fused kernel" if target is None else target.name
        names.append(f"{torch.cuda.get_device_name(index)} ({kernel})")
    return Finding("GPU", "ok", "; ".join(names))


def _driver() -> Finding:
    """Whether kernels as the compiler makes them can be loaded. A driver takes those of its own
    major version of CUDA, whatever the minor one, and of older ones."""
    from deep_moe.jit.driver import MIN_DRIVER_OF_CUDA, driver_cuda_version

    supported = driver_cuda_version()
    if supported is None:
        return Finding("driver", "absent", "no NVIDIA driver; calls run in the emulator")
    from deep_moe.emulator.nvrtc import nvrtc_version

    major, minor = nvrtc_version()
    release = MIN_DRIVER_OF_CUDA.get(major)
    needed = f"one for CUDA {major}" + (f", {release} or newer" if release else "")
    detail = (
        f"for CUDA {supported[0]}.{supported[1]}; kernels of NVRTC {major}.{minor} need {needed}"
    )
    if supported[0] < major:
        return Finding("driver", "missing", detail, f"update the NVIDIA driver: {needed}")
    return Finding("driver", "ok", detail)


def _shared_memory() -> Finding:
    """What ranks on this machine could share, before any of them is started."""
    import torch

    from deep_moe.fused.peers import fabric_of, link_of_gpus, own_problem

    name, num_gpus = "shared memory", torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        return Finding(name, "absent", "no CUDA device")
    problem = own_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        return Finding(name, "missing", problem)
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(num_gpus)]
    apart = [
        f"{i} and {j}"
        for i in range(num_gpus)
        for j in range(i + 1, num_gpus)
        if link_of_gpus(uuids[i], uuids[j]) is False
    ]
    here = f"no link between GPUs {', '.join(apart)}" if apart else f"{num_gpus} GPUs, all linked"
    fabric = fabric_of(uuids[0])
    beyond = fabric.problem or f"NVLink domain {fabric.domain}"
    return Finding(name, "absent" if apart else "ok", f"{here}; with other machines: {beyond}")


CHECKS = (
    _python,
    _torch,
    _packages,
    _headers,
    _compiler,
    _kernel_cache,
    _emulator,
    _host_compiler,
    _driver,
    _gpu,
    _shared_memory,
)
