"""Every kernel that a deployment can need, compiled before the first call needs it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .heuristics import MegaMoEConfig


@dataclass(frozen=True)
class DeploymentKernel:
    """One kernel of a deployment: which calls use it, and what building it came to."""

    first_num_tokens: int
    last_num_tokens: int
    config: MegaMoEConfig
    key: str
    was_cached: bool
    compile_seconds: float


def deployment_configs(
    choose: Callable[[int], MegaMoEConfig], num_max_tokens: int
) -> list[tuple[int, int, MegaMoEConfig]]:
    """The configs that calls of 0 to `num_max_tokens` tokens get, each with its first and last
    number of tokens.

    choose: the config of one number of tokens. Between two calls with one config it must not
        choose another. That holds because the tile grows with the tokens and, for one tile, the
        experts per wave shrink; so halving finds each change in a few steps.
    """

    def changes(first: int, last: int) -> Iterator[int]:
        """Where a new config begins in first + 1 .. last."""
        if choose(first) == choose(last):
            return
        if last - first == 1:
            yield last
            return
        middle = (first + last) // 2
        yield from changes(first, middle)
        yield from changes(middle, last)

    starts = [0, *changes(0, num_max_tokens)]
    ends = [start - 1 for start in starts[1:]] + [num_max_tokens]
    return [(first, last, choose(first)) for first, last in zip(starts, ends, strict=True)]


def build_deployment(
    configs: list[tuple[int, int, MegaMoEConfig]],
    *,
    cache_folder: Path | None = None,
    num_workers: int | None = None,
    on_built: Callable[[DeploymentKernel], None] = lambda kernel: None,
) -> list[DeploymentKernel]:
    """Build the configs in parallel processes and return the kernels in the given order.

    num_workers: processes; by default one per CPU that this process may use. on_built: told of
    each kernel as it is ready. The first error of any of them is raised.
    """
    workers = min(num_workers or len(os.sched_getaffinity(0)), len(configs))
    build = partial(_build, cache_folder=cache_folder)
    # spawn: a forked child would inherit the threads' locks of whatever the caller has loaded.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(build, *config) for config in configs]
        try:
            for future in as_completed(futures):
                on_built(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _build(
    first: int, last: int, config: MegaMoEConfig, *, cache_folder: Path | None
) -> DeploymentKernel:
    from .jit import KernelCache, build

    class NotingCache(KernelCache):
        """Notes whether the compiler had to run."""

        was_cached = True

        def load_or_compile(self, key: str, compile_kernel: Callable[[], Any]) -> Any:
            def compile_and_note() -> Any:
                self.was_cached = False
                return compile_kernel()

            return super().load_or_compile(key, compile_and_note)

    cache = NotingCache(cache_folder)
    kernel = build(config, cache=cache)
    seconds = 0.0 if cache.was_cached else float(kernel.manifest["compile_seconds"])
    return DeploymentKernel(first, last, config, kernel.key, cache.was_cached, seconds)
