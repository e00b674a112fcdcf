"""A plugin for pytest: runs tests of GPUs where there is none, up to where they touch one.

    python -m pytest -p tests.dry_gpu -m gpu tests/layer

They see a machine of two H100s. What comes so far has fixtures that work, configs that kernels
are chosen for, calls of helpers and of ranks' functions that fit their signatures, and arguments
that can be sent to ranks. The rest of them type checkers read.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Generator, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from deep_moe import jit
from deep_moe.activations import DEFAULT_ACTIVATION, has_gate
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.synthetic import Tokens
from tests.layer.rank_layer import RankLayer
from tests.layer.rank_pool import RankPool

NAME, CAPABILITY, NUM_GPUS = "NVIDIA H100 80GB HBM3", (9, 0), 2
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
)


class ReachedGpuError(pytest.skip.Exception):
    """The test has come to what only a GPU does. Tests whose fixtures do so are skipped."""


def reach(*_: Any, **__: Any) -> NoReturn:
    raise ReachedGpuError("the GPU is reached")


def send(place: Any, num_ranks: int, work: Callable[..., Any], *args: Any, **_: Any) -> NoReturn:
    """In place of `run_ranks`."""
    inspect.signature(work).bind(None, *args)
    pickle.dumps((place, work, args))
    raise ReachedGpuError("the GPU is reached")


def choose_all(configs: Iterable[Any]) -> None:
    """In place of `compile_all`: which they are, is asked."""
    for config in configs:
        assert config.num_threads > 0


def render(config: jit.KernelConfig, **_: Any) -> None:
    """In place of `jit.build`: the source is made, and not compiled."""
    assert jit.render_kernel(config)


class DryLayer:
    """In place of `RankLayer`, in tests of one GPU: a kernel is chosen for each call, as the call
    would choose it, and no value is computed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        bound = inspect.signature(RankLayer).bind(*args, **options)
        self.shape: MoEShape = bound.arguments["shape"]

    def compare_call(
        self,
        tokens: Tokens,
        *,
        activation: Any = DEFAULT_ACTIVATION,
        num_sms: int = PROPERTIES.multi_processor_count,
        **options: Any,
    ) -> SimpleNamespace:
        assert self.shape.has_gate is has_gate(activation)
        options.update(arch="sm_90a", num_sms=num_sms, activation=activation)
        assert choose_config(self.shape, tokens.num_tokens, **options).num_threads > 0
        return SimpleNamespace(is_exact=True, is_right=True)

    def __getattr__(self, name: str) -> NoReturn:
        """Everything else is on the GPU."""
        getattr(RankLayer, name)
        reach()


_ANSWERS = {
    "is_available": True,
    "device_count": NUM_GPUS,
    "current_device": 0,
    "get_device_capability": CAPABILITY,
    "get_device_name": NAME,
    "get_device_properties": PROPERTIES,
    "mem_get_info": (70 << 30, 80 << 30),
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "is_current_stream_capturing": False,
}


def pytest_configure() -> None:
    # A name that is no longer there is an error.
    replace = pytest.MonkeyPatch().setattr
    for name, answer in _ANSWERS.items():
        replace(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    # The first that each tensor, stream, event and graph of a GPU asks.
    replace(torch.cuda, "_lazy_init", reach)
    replace(torch.multiprocessing, "spawn", reach)
    for name in ("Stream", "Event", "CUDAGraph", "graph", "device", "current_stream", "stream"):
        replace(torch.cuda, name, reach)
    # What else takes long, or starts processes that know of no GPU.
    replace(jit, "build", render)
    replace(RankPool, "_start", reach)
    replace(torch.multiprocessing, "start_processes", reach)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "compile_all"):
            module.compile_all = choose_all
        if hasattr(module, "RankLayer"):
            module.RankLayer = DryLayer


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    if fixturedef.argname == "run_ranks":
        fixturedef.func = lambda **_: send
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """A test that comes to the GPU has passed."""
    try:
        return (yield)
    except ReachedGpuError:
        return True
