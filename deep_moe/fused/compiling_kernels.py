"""Compiles all kernels of a buffer's calls in the background, until the first call.

Another interpreter with its own processes compiles: NVRTC gains little from threads of one process,
and an engine's workers may not have children by multiprocessing. A call that comes before its
kernel is ready compiles the kernel as usual, or waits for the process that does.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from deep_moe.activations import DEFAULT_ACTIVATION, Activation
from deep_moe.errors import DeepMoEError
from deep_moe.heuristics.shape import require_int
from deep_moe.jit import KernelConfig

from . import compile_worker, input_preparation
from .buffer import SymmBuffer
from .call_plan import choose_all, config_chooser
from .checks import require_type
from .compile_worker import CompileWork
from .loaded_kernels import built_kernel, launcher_of
from .options import CallOptions, given_options, with_plain_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from deep_moe.activations import ActivationName

    from .gpu import Gpu

_MAX_RANKS_PER_HOST = 8
_MAX_PROCESSES = 32  # of a host, 160 to 360 MB each; a deployment has some 40 kernels on SM90


class CompilingKernels:
    """Kernels that `compile_ahead` has begun to compile.

    Attributes:
        gpu: the GPU that `wait` loads them on, None for the emulator.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], work: CompileWork, gpu: Gpu | None
    ) -> None:
        self._process = process
        self._work = work
        self._gpu = gpu
        self._said: bytes | None = None

    @property
    def is_done(self) -> bool:
        """Whether compiling has ended, with or without an error."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all kernels are compiled, and load them in this process. After that, no call
        of the buffer compiles, reads, loads or chooses a kernel (`deep_moe.jit.kernel_counts`).

        Args:
            timeout_s: how long to wait, in seconds; None: until all are there.

        Raises:
            DeepMoEError: a kernel cannot be compiled; the text has what the compiler said.
            TimeoutError: it took longer than timeout_s.
        """
        if self._said is None:
            try:
                _, self._said = self._process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"kernels are still compiled after {timeout_s} s") from None
        status = self._process.returncode
        if status != 0:
            said = self._said.decode(errors="replace").strip()
            raise DeepMoEError(f"kernels were not compiled ahead (exit status {status}):\n{said}")
        _load(self._work, self._gpu)


def _load(work: CompileWork, gpu: Gpu | None) -> None:
    """What is loaded already is kept. For the emulator, that a kernel is read is all."""
    configs: list[KernelConfig] = [config for _, _, config in choose_all(work.choose).uses]
    for config in (*configs, *work.preparations):
        if gpu is None:
            built_kernel(config, for_emulator=True)
        else:
            launcher_of(config, gpu)


@with_plain_options
def compile_ahead(
    buffer: SymmBuffer,
    activation: ActivationName | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    num_workers: int | None = None,
    has_token_scale: bool = False,
    masks_ranks: bool = False,
    **options: Unpack[CallOptions],
) -> CompilingKernels:
    """Begin to compile every kernel that calls with a buffer can need, and return at once.

    Without it a call compiles the first time that it brings a number of tokens for which another
    kernel is faster, two or three seconds, or loads it from the cache, some 70 ms, and all ranks
    wait. Kernels that the cache has are left alone. Every rank may call this: no kernel is compiled
    twice on a host. `wait` before the first call also loads them.

    Args:
        buffer: of `get_symm_buffer_for_mega_moe`; on a CPU, what the emulator needs is compiled.
        activation: of the calls.
        activation_clamp: of the calls.
        fast_math: of the calls.
        num_workers: processes; by default one per CPU that this one may use, at most 32, shared
            among as many ranks as the buffer has, up to 8.
        has_token_scale: `prepare_inputs` will be given a token_scale.
        masks_ranks: calls will be given `masked_ranks`.
        {options}

    Of the options arch, num_sms, overrides and accumulate decide which kernels these are.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    require_type("buffer", buffer, SymmBuffer, "a SymmBuffer")
    if num_workers is not None:
        require_int("num_workers", num_workers, "processes")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1; got {num_workers}")
    require_type("has_token_scale", has_token_scale, bool, "a bool")
    if has_token_scale and not buffer.shape.tokens.has_one_scale:
        raise ValueError(
            "has_token_scale must be False for a buffer whose tokens have no float32 scale of "
            "their own; got True"
        )
    require_type("masks_ranks", masks_ranks, bool, "a bool")
    given = given_options("compile_ahead", options)
    given |= {"activation": activation, "fast_math": fast_math}
    if activation_clamp is not None:
        given["activation_clamp"] = activation_clamp
    choose = config_chooser(buffer, given, masks_ranks=masks_ranks)
    choose(buffer.shape.num_max_tokens_per_rank, False)  # raises what a call would
    num_ranks = buffer.shape.num_ranks
    sharers = min(num_ranks, _MAX_RANKS_PER_HOST)
    work = CompileWork(
        choose,
        tuple(
            input_preparation.usual_configs(buffer, choose.arch, has_token_scale=has_token_scale)
        ),
        num_workers or max(1, min(len(os.sched_getaffinity(0)), _MAX_PROCESSES) // sharers),
        buffer.rank % sharers / sharers,
        buffer.gpu is None,
    )
    return CompilingKernels(_start(work), work, buffer.gpu)


def _start(work: CompileWork) -> subprocess.Popen[bytes]:
    # It finds the modules that this one has found.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-m", compile_worker.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    stdin, process.stdin = process.stdin, None  # `communicate` has no more to say
    assert stdin is not None
    # Broken if it has ended: then `wait` says of what.
    with suppress(BrokenPipeError), stdin:
        pickle.dump(work, stdin)
    return process
