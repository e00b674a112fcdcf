"""Kernels that are compiled ahead are those that calls take, and what goes wrong is said."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe
from benchmarks.host_overhead import Layers, UndrivenGpu, gpu_path_on_cpu
from deep_moe import jit
from deep_moe.activations import Swiglu
from deep_moe.errors import DeepMoEError
from deep_moe.fused import (
    call_plan,
    compile_worker,
    compiling_kernels,
    config_chooser,
    input_preparation,
    loaded_kernels,
)
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.call_plan import prepare_call
from deep_moe.fused.compile_worker import CompileWork, compile_missing
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig
from deep_moe.jit.cache import KernelCache
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.targets import MegaMoEConfig, target_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path / "cache"))
    return KernelCache()


def small_buffer(most: int = 24) -> deep_moe.SymmBuffer:
    return deep_moe.get_symm_buffer_for_mega_moe(None, 4, most, 2, 256, 128)


def keys(cache: KernelCache) -> set[str]:
    return {entry.key for entry in cache.entries()}


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[CompileWork]:
    """What other interpreters would be told; none is started."""
    told: list[CompileWork] = []
    monkeypatch.setattr(compiling_kernels, "_start", told.append)
    monkeypatch.setattr(jit, "build", lambda *_, **__: None)
    return told


@pytest.mark.parametrize("masks_ranks", [False, True])
def test_kernels_are_for_calls_with_masked_ranks_or_without(
    works: list[CompileWork], masks_ranks: bool
) -> None:
    deep_moe.compile_ahead(small_buffer(), masks_ranks=masks_ranks)
    (work,) = works
    assert work.choose(24).masks_ranks == masks_ranks


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_calls_find_all_kernels_in_the_cache(
    arch: str, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
):
    options: dict[str, Any] = {"arch": arch, "accumulate": True}
    with closing(small_buffer()) as buffer:
        loaded_kernels.built_kernel.cache_clear()  # of kernels in other folders
        compiling = deep_moe.compile_ahead(buffer, "swiglu", 10.0, num_workers=2, **options)
        compiling.wait(300)
        assert compiling.is_done
        before = keys(cache)
        assert len(before) >= 2
        l1, l2 = (
            deep_moe.quantize_mxfp4(torch.randn(4, rows, k)) for rows, k in ((256, 256), (256, 128))
        )
        weights = deep_moe.transform_weights_for_mega_moe(l1, l2, arch=arch)
        monkeypatch.setattr(jit, "compile_to_ptx", None)  # what would be called

        def call(num_tokens: int) -> None:
            y = torch.zeros(num_tokens, 256, dtype=torch.bfloat16)
            ids, slots = torch.full((num_tokens, 2), -1), torch.zeros(num_tokens, 2)
            deep_moe.prepare_inputs(y, ids, slots, buffer, arch=arch)
            deep_moe.fp8_fp4_mega_moe(y, *weights, buffer, activation_clamp=10.0, **options)

        counts = jit.kernel_counts()
        for num_tokens in (0, 1, 9, 24):
            for flag in (0, RECEIVED_UNEVENLY):
                buffer.memory.status.received = 2 * num_tokens | flag
                call(num_tokens)
        assert jit.kernel_counts() == counts  # nothing is compiled or read
        assert keys(cache) == before
        loaded_kernels.built_kernel.cache_clear()
        buffer.memory.status.received = 0
        call(9)
        assert jit.kernel_counts() == counts._replace(read=counts.read + 2)
        assert keys(cache) == before

        deep_moe.compile_ahead(buffer, "swiglu", 10.0, **options).wait(300)
        assert keys(cache) == before


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_they_are_what_calls_on_a_gpu_ask_for(
    arch: str, works: list[CompileWork], monkeypatch: pytest.MonkeyPatch
):
    """However many tokens it has, and whatever its experts received, and how evenly."""
    most, num_topk = 96, 2
    gpu = UndrivenGpu(target_of(arch))
    asked: set[MegaMoEConfig] = set()
    monkeypatch.setattr(loaded_kernels, "_launchers", BoundedCache(1024))
    monkeypatch.setattr(loaded_kernels, "built_kernel", asked.add)
    compiled: set[MegaMoEConfig] = set()

    def build(configs: list[tuple[int, int, MegaMoEConfig]], **_: object) -> None:
        compiled.update(config for _, _, config in configs)

    monkeypatch.setattr(compile_worker, "is_built", lambda *_, **__: False)
    monkeypatch.setattr(compile_worker, "build_deployment", build)
    with gpu_path_on_cpu(gpu):
        layers = Layers(MoEShape(1, 4, num_topk, 256, 128, most), 1, torch.device("cpu"))
        deep_moe.compile_ahead(layers.buffer)
        (work,) = works
        assert not work.for_emulator
        assert compile_missing(work) == len(compiled)
        status, (l1, l2) = layers.buffer.memory.status, layers.weights[0]
        for num_tokens in range(0, most + 1, 3):
            for received in range(0, num_topk * most + 1, 16):
                for flag in (0, RECEIVED_UNEVENLY):
                    status.received = received | flag
                    prepare_call(layers.ys[0][:num_tokens], l1, l2, layers.buffer, {}, {})
    assert len(asked) > 1
    assert asked <= compiled


@pytest.mark.parametrize("has_token_scale", [False, True])
def test_inputs_with_one_scale_for_all_tokens_have_kernels_of_their_own(
    has_token_scale: bool, works: list[CompileWork], monkeypatch: pytest.MonkeyPatch
):
    asked: set[PrepareInputsConfig] = set()
    monkeypatch.setattr(input_preparation, "_launch", lambda plan, *_: asked.add(plan.config))
    formats: dict[str, Any] = {"weights": "fp8", "token_format": "fp8_token"}
    scale = torch.ones(1) if has_token_scale else None
    with closing(
        deep_moe.get_symm_buffer_for_mega_moe(None, 4, 24, 2, 256, 128, **formats)
    ) as buffer:
        deep_moe.compile_ahead(buffer, arch="sm_90a", has_token_scale=has_token_scale)
        x = torch.zeros(2, 256, dtype=torch.bfloat16)
        for ids in (torch.int64, torch.int32):
            for weights in (torch.float32, torch.bfloat16):
                routing = torch.full((2, 2), -1, dtype=ids), torch.zeros(2, 2, dtype=weights)
                deep_moe.prepare_inputs(x, *routing, buffer, token_scale=scale, arch="sm_90a")
    (work,) = works
    assert asked == set(work.preparations)


class CountingGpu(UndrivenGpu):
    """Counts what is loaded."""

    num_loads = 0

    def load(self, kernel: Any, **options: Any) -> Any:
        type(self).num_loads += 1
        return super().load(kernel, **options)


class Ended:
    """A process that has compiled everything."""

    returncode = 0

    def communicate(self, timeout: float | None = None) -> tuple[None, bytes]:
        return None, b""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_call_behind_it_loads_compiles_or_chooses_anything(
    arch: str, monkeypatch: pytest.MonkeyPatch
):
    """However many tokens it has, and whatever its experts received, and how evenly."""
    most, num_topk = 48, 2
    monkeypatch.setattr(CountingGpu, "num_loads", 0)
    monkeypatch.setattr(loaded_kernels, "_launchers", BoundedCache(1024))
    monkeypatch.setattr(call_plan, "_chosen", BoundedCache(64))
    monkeypatch.setattr(compiling_kernels, "_start", lambda work: Ended())
    monkeypatch.setattr(jit, "build", lambda config, **_: config)  # from the cache
    for cached in (loaded_kernels.built_kernel, call_plan._choose_one):
        cached.cache_clear()
    with gpu_path_on_cpu(CountingGpu(target_of(arch))):
        layers = Layers(MoEShape(1, 4, num_topk, 256, 128, most), 1, torch.device("cpu"))
        deep_moe.compile_ahead(layers.buffer, Swiglu(7.0)).wait()
        num_loaded = CountingGpu.num_loads
        assert num_loaded > 4  # those that prepare inputs among them

        def forbidden(*_: Any, **__: Any) -> None:
            raise AssertionError("chosen or compiled in a call")

        monkeypatch.setattr(config_chooser, "choose_config", forbidden)
        monkeypatch.setattr(jit, "build", forbidden)
        status, (l1, l2) = layers.buffer.memory.status, layers.weights[0]
        options: Any = {"activation": Swiglu(7.0)}
        for num_tokens in range(most + 1):
            for received in range(0, num_topk * most + 1, 8):
                for flag in (0, RECEIVED_UNEVENLY):
                    status.received = received | flag
                    y = layers.ys[0][:num_tokens]
                    prepare_call(y, l1, l2, layers.buffer, {}, options)
        status.received = 0
        for ids in (torch.int32, torch.int64):
            for weights in (torch.float32, torch.bfloat16):
                for num_tokens in (0, 1, most):
                    x = torch.zeros(num_tokens, 256, dtype=torch.bfloat16)
                    slots = torch.zeros(num_tokens, num_topk)
                    deep_moe.prepare_inputs(x, slots.to(ids), slots.to(weights), layers.buffer)
    assert CountingGpu.num_loads == num_loaded
    loaded_kernels.built_kernel.cache_clear()


@pytest.mark.parametrize(("num_cpus", "num_workers"), [(2, 1), (10, 2), (192, 8)])
def test_ranks_share_the_processors_and_begin_with_different_kernels(
    num_cpus: int, num_workers: int, works: list[CompileWork], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_cpus))
    ranks = deep_moe.EmulatedRanks(4, 8, 16, 2, 256, 128)
    for buffer in ranks.buffers:
        deep_moe.compile_ahead(buffer)
    assert [work.begin for work in works] == [0, 0.25, 0.5, 0.75]
    assert {work.num_workers for work in works} == {num_workers}
    deep_moe.compile_ahead(ranks.buffers[1], num_workers=3)
    assert works[-1].num_workers == 3


def test_every_kernel_comes_wherever_a_rank_begins(
    works: list[CompileWork], monkeypatch: pytest.MonkeyPatch
):
    orders: list[list[MegaMoEConfig]] = []
    monkeypatch.setattr(compile_worker, "is_built", lambda *_, **__: False)
    monkeypatch.setattr(
        compile_worker,
        "build_deployment",
        lambda configs, **_: orders.append([config for _, _, config in configs]),
    )
    with closing(small_buffer(96)) as buffer:
        deep_moe.compile_ahead(buffer, arch="sm_90a")
    for begin in (0, 0.5):
        compile_missing(works[0]._replace(begin=begin))
    first, second = orders
    assert first != second
    assert set(first) == set(second)


def test_what_goes_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Here the cache is a file. Calls would say the same."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(file))
    with closing(small_buffer()) as buffer:
        compiling = deep_moe.compile_ahead(buffer, num_workers=1)
        with pytest.raises(DeepMoEError, match=r"not compiled ahead \(exit status 1\)"):
            compiling.wait(300)
        with pytest.raises(DeepMoEError, match="CacheError"):
            compiling.wait()


def test_a_limit_of_waiting(cache: KernelCache):
    with closing(small_buffer()) as buffer:
        compiling = deep_moe.compile_ahead(buffer, num_workers=1)
        with pytest.raises(TimeoutError, match="still compiled after 0"):
            compiling.wait(0)
        compiling.wait(300)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1; got 0"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be an int, processes; got 1.5"),
        ({"arch": "sm_80"}, ValueError, "sm_80"),
        ({"activation": "relu"}, ValueError, "relu"),
        ({"activation_clamp": -1.0}, ValueError, "activation_clamp"),
        ({"overrides": {"block_m": 7}}, ValueError, "block_m"),
        ({"has_token_scale": 1}, TypeError, "has_token_scale must be a bool; got int"),
        ({"has_token_scale": True}, ValueError, "has_token_scale must be False for a buffer"),
        ({"stages": 3}, TypeError, "compile_ahead.. got an unexpected keyword argument 'stages'"),
    ],
)
def test_arguments(
    arguments: dict[str, Any], error: type[Exception], words: str, works: list[CompileWork]
):
    with closing(small_buffer()) as buffer, pytest.raises(error, match=words):
        deep_moe.compile_ahead(buffer, **arguments)
    assert works == []


def test_what_is_no_buffer():
    with pytest.raises(TypeError, match="buffer must be a SymmBuffer; got str"):
        deep_moe.compile_ahead("buffer")  # type: ignore[arg-type]
