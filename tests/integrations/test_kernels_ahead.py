"""Engines compile a buffer's kernels while they load, once, and no step begins before."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

import deep_moe
from benchmarks.host_overhead import UndrivenGpu, gpu_path_on_cpu
from deep_moe.activations import Swiglu
from deep_moe.errors import DeepMoEError
from deep_moe.fused.compiling_kernels import CompilingKernels
from deep_moe.integrations import kernels_ahead, served_experts
from deep_moe.integrations.kernels_ahead import KernelsAhead
from deep_moe.targets import target_of

from .test_served_experts import IDS, call, served

VARIABLE = "DEEP_MOE_COMPILE_AHEAD"


class Compiling(CompilingKernels):
    """Without another interpreter. failure: what waiting says."""

    def __init__(self, failure: str | None = None, has_token_scale: bool = False) -> None:
        self.failure = failure
        self.has_token_scale = has_token_scale
        self.num_waits = 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.num_waits += 1
        if self.failure is not None:
            raise DeepMoEError(self.failure)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Compiling]:
    """What was begun."""
    monkeypatch.delenv(VARIABLE, raising=False)
    made: list[Compiling] = []

    def compile_ahead(*_: object, has_token_scale: bool) -> Compiling:
        made.append(Compiling(has_token_scale=has_token_scale))
        return made[-1]

    monkeypatch.setattr(kernels_ahead, "compile_ahead", compile_ahead)
    return made


@pytest.fixture
def buffer() -> Iterator[deep_moe.SymmBuffer]:
    with gpu_path_on_cpu(UndrivenGpu(target_of("sm_90a"))):
        made = deep_moe.get_symm_buffer_for_mega_moe(
            None, 4, 16, 2, 256, 128, device=torch.device("cpu")
        )
    with closing(made):
        yield made


def test_each_kind_of_calls_begins_once(buffer: deep_moe.SymmBuffer, begun: list[Compiling]):
    ahead = KernelsAhead()
    assert ahead.are_compiled
    for activation in (Swiglu(), Swiglu(10.0), Swiglu()):
        for has_token_scale in (False, True, False):
            ahead.begin(buffer, activation, has_token_scale=has_token_scale)
    assert [compiling.has_token_scale for compiling in begun] == [False, True] * 2
    assert not ahead.are_compiled
    ahead.wait()
    assert ahead.are_compiled
    ahead.wait()
    assert [compiling.num_waits for compiling in begun] == [1] * 4


@pytest.mark.parametrize("scale", [None, torch.tensor([0.5])])
def test_a_layer_says_whether_its_tokens_have_one_scale(
    scale: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
):
    told: list[bool] = []

    class Told(KernelsAhead):
        def begin(self, *_: object, has_token_scale: bool) -> None:
            told.append(has_token_scale)

    monkeypatch.setattr(served_experts, "kernels", Told())
    layer = served("sm_100a")
    layer.has_static_scales, layer.local_token_scale = scale is not None, scale
    layer.prepare()
    assert told == [scale is not None]
    served_experts.buffers.close()


def test_a_failure_is_logged_and_the_others_are_waited_for(
    buffer: deep_moe.SymmBuffer, begun: list[Compiling], caplog: pytest.LogCaptureFixture
):
    ahead = KernelsAhead()
    for clamp in (1.0, 2.0, 3.0):
        ahead.begin(buffer, Swiglu(clamp), has_token_scale=False)
    begun[1].failure = "no compiler"
    with caplog.at_level(logging.WARNING):
        ahead.wait()
    assert [compiling.num_waits for compiling in begun] == [1, 1, 1]
    assert "calls compile their own kernels: no compiler" in caplog.text


def test_where_no_process_can_be_started(
    buffer: deep_moe.SymmBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    ahead = KernelsAhead()
    with caplog.at_level(logging.WARNING):
        ahead.begin(buffer, Swiglu(), has_token_scale=False)
    assert "calls compile their own kernels: [Errno 2] No such file" in caplog.text
    assert ahead.are_compiled


def test_a_user_turns_it_off(
    buffer: deep_moe.SymmBuffer, begun: list[Compiling], monkeypatch: pytest.MonkeyPatch
):
    ahead = KernelsAhead()
    monkeypatch.setenv(VARIABLE, "0")
    ahead.begin(buffer, Swiglu(), has_token_scale=False)
    assert begun == []
    monkeypatch.setenv(VARIABLE, "perhaps")
    with pytest.raises(ValueError, match=rf"{VARIABLE} must be 1 .* or 0 .*; got 'perhaps'"):
        ahead.begin(buffer, Swiglu(), has_token_scale=False)
    monkeypatch.setenv(VARIABLE, "1")
    ahead.begin(buffer, Swiglu(), has_token_scale=False)
    assert len(begun) == 1


def test_the_first_step_waits(begun: list[Compiling], monkeypatch: pytest.MonkeyPatch):
    """In the emulator nothing is begun; so something is put there."""
    ahead = KernelsAhead()
    monkeypatch.setattr(served_experts, "kernels", ahead)
    layer = served("sm_100a")
    layer.prepare()
    assert begun == []
    compiling = Compiling()
    ahead._running.append(compiling)
    call(layer, IDS)
    call(layer, IDS)
    assert compiling.num_waits == 1
    served_experts.buffers.close()
