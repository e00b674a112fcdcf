"""Every kernel that a deployment can need, compiled before the first call needs it."""

from __future__ import annotations

import multiprocessing
import os
from bisect import bisect_right
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep_moe.targets import MegaMoEConfig


@dataclass(frozen=True)
class DeploymentKernel:
    """One kernel of a deployment: which calls use it, and what building it came to."""

    first_num_tokens: int
    last_num_tokens: int
    config: MegaMoEConfig
    key: str
    was_cached: bool
    compile_seconds: float


# First and last number of tokens of calls that get the config.
Use = tuple[int, int, "MegaMoEConfig"]


def _as_they_are(num_tokens: int) -> Hashable:
    return num_tokens


def deployment_configs(
    choose: Callable[[int], MegaMoEConfig],
    num_max_tokens: int,
    key: Callable[[int], Hashable] = _as_they_are,
) -> list[Use]:
    """The configs that calls of 0 to `num_max_tokens` tokens get, each with its first and last
    number of tokens. A config may come back: tuning tables hold around measured sizes only.

    choose: the config of one number of tokens, a tenth of a millisecond. key: numbers of tokens
    with equal keys have equal configs, so that it is asked once for each key.
    """
    chosen: dict[Hashable, MegaMoEConfig] = {}

    def config_of(num_tokens: int) -> MegaMoEConfig:
        own_key = key(num_tokens)
        if own_key not in chosen:
            chosen[own_key] = choose(num_tokens)
        return chosen[own_key]

    found = []
    for config, group in groupby(range(num_max_tokens + 1), key=config_of):
        first, *others = group
        found.append((first, others[-1] if others else first, config))
    return found


class ChosenConfigs:
    """The configs of calls with up to `num_max_tokens` tokens, chosen once.

    choose: the config of one number of tokens, and whether the experts received uneven numbers of
    tokens in the call before. key: as of `deployment_configs`.
    """

    def __init__(
        self,
        choose: Callable[[int, bool], MegaMoEConfig],
        num_max_tokens: int,
        key: Callable[[int], Hashable] = _as_they_are,
    ) -> None:
        keys = [key(num_tokens) for num_tokens in range(num_max_tokens + 1)]

        def uses(is_uneven: bool) -> list[Use]:
            return deployment_configs(
                lambda num_tokens: choose(num_tokens, is_uneven), num_max_tokens, keys.__getitem__
            )

        even = uses(is_uneven=False)
        self._uses = {
            False: even,
            True: uses(is_uneven=True) if even[0][2].target.heeds_uneven else even,
        }
        self._firsts = {
            is_uneven: [first for first, _, _ in own] for is_uneven, own in self._uses.items()
        }

    def __call__(self, expected_tokens: int, is_uneven: bool) -> MegaMoEConfig:
        place = bisect_right(self._firsts[is_uneven], expected_tokens) - 1
        return self._uses[is_uneven][place][2]

    @property
    def uses(self) -> list[Use]:
        """Of even numbers of tokens, then those of uneven ones whose configs are others."""
        known = {config for _, _, config in self._uses[False]}
        return self._uses[False] + [use for use in self._uses[True] if use[2] not in known]


def build_deployment(
    configs: list[Use],
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
