"""Every kernel that a deployment can need, compiled before the first call needs it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep_moe.heuristics import MegaMoEConfig


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
    number of tokens. A config may come back: tuning tables hold around measured sizes only.

    choose: the config of one number of tokens; it is asked for each, a tenth of a millisecond on
    SM100, a quarter on SM90, where tiles' costs are averaged.
    """
    found = []
    for config, group in groupby(range(num_max_tokens + 1), key=choose):
        first, *others = group
        found.append((first, others[-1] if others else first, config))
    return found


def all_deployment_configs(
    choose: Callable[[int, bool], MegaMoEConfig], num_max_tokens: int
) -> list[tuple[int, int, MegaMoEConfig]]:
    """The same, with those for calls whose experts received uneven numbers of tokens in the call
    before behind the others.

    choose: the config of one number of tokens, and whether they were uneven.
    """
    configs = deployment_configs(lambda num_tokens: choose(num_tokens, False), num_max_tokens)
    if not configs[0][2].target.heeds_uneven:
        return configs
    known = {config for _, _, config in configs}
    uneven = deployment_configs(lambda num_tokens: choose(num_tokens, True), num_max_tokens)
    return configs + [use for use in uneven if use[2] not in known]


def build_deployment(
    configs: list[tuple[int, int, MegaMoEConfig]],
    *,
    cache_folder: Path | None = None,
    num_workers: int | None = None,
    for_emulator: bool = False,
    on_built: Callable[[DeploymentKernel], None] = lambda kernel: None,
) -> list[DeploymentKernel]:
    """Build the configs in parallel processes, each once, and return the kernels in the given
    order.

    num_workers: processes; by default one per CPU that this process may use. for_emulator: PTX is
    enough. on_built: told of each kernel as it is ready. The first error of any of them is raised;
    a cache that cannot be written is one.
    """
    first_uses = {config: (first, last, config) for first, last, config in reversed(configs)}
    workers = min(num_workers or len(os.sched_getaffinity(0)), len(first_uses))
    build = partial(_build, cache_folder=cache_folder, for_emulator=for_emulator)
    # spawn: a forked child would inherit the threads' locks of whatever the caller has loaded.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {config: pool.submit(build, *use) for config, use in first_uses.items()}
        try:
            for future in as_completed(futures.values()):
                on_built(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [
            replace(futures[config].result(), first_num_tokens=first, last_num_tokens=last)
            for first, last, config in configs
        ]


def is_built(config: MegaMoEConfig, *, for_emulator: bool = False) -> bool:
    """Whether the cache has the kernel."""
    from deep_moe.jit import KernelCache, build

    class MissingError(Exception):
        pass

    class FilledCache(KernelCache):
        def load_or_compile(self, key: str, compile_kernel: Callable[[], Any]) -> Any:
            found = self.load(key)
            if found is None:
                raise MissingError
            return found

    try:
        build(config, cache=FilledCache(), for_emulator=for_emulator)
    except MissingError:
        return False
    return True


def _build(
    first: int,
    last: int,
    config: MegaMoEConfig,
    *,
    cache_folder: Path | None,
    for_emulator: bool,
) -> DeploymentKernel:
    from deep_moe.jit import KernelCache, build

    class NotingCache(KernelCache):
        """Notes whether the compiler had to run."""

        was_cached = True

        def load_or_compile(self, key: str, compile_kernel: Callable[[], Any]) -> Any:
            def compile_and_note() -> Any:
                self.was_cached = False
                return compile_kernel()

            return super().load_or_compile(key, compile_and_note)

    cache = NotingCache(cache_folder, must_write=True)
    kernel = build(config, cache=cache, for_emulator=for_emulator)
    seconds = 0.0 if cache.was_cached else float(kernel.manifest["compile_seconds"])
    return DeploymentKernel(first, last, config, kernel.key, cache.was_cached, seconds)
