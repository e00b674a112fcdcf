"""Kernels of an engine's buffers, compiled while it loads, so that no step waits for a compiler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from deep_moe.errors import DeepMoEError
from deep_moe.fused.compiling_kernels import CompilingKernels, compile_ahead

from .switch import read_compile_ahead

if TYPE_CHECKING:
    from deep_moe.activations import Activation
    from deep_moe.fused.buffer import SymmBuffer

logger = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """What decides which kernels calls of a buffer need."""

    activation: Activation
    has_token_scale: bool


class KernelsAhead:
    """Of all buffers of this process; one thread at a time."""

    def __init__(self) -> None:
        self._begun: WeakKeyDictionary[SymmBuffer, set[_Kind]] = WeakKeyDictionary()
        self._running: list[CompilingKernels] = []

    def begin(self, buffer: SymmBuffer, activation: Activation, *, has_token_scale: bool) -> None:
        """Once for each kind of calls. In the emulator calls compile what they need."""
        if buffer.gpu is None or not read_compile_ahead():
            return
        begun = self._begun.setdefault(buffer, set())
        kind = _Kind(activation, has_token_scale)
        if kind in begun:
            return
        begun.add(kind)
        try:
            self._running.append(compile_ahead(buffer, activation, has_token_scale=has_token_scale))
        except OSError as error:  # no process to be had
            _warn(error)

    @property
    def are_compiled(self) -> bool:
        return not self._running

    def wait(self) -> None:
        """Until all that was begun is there. What could not be compiled ahead is logged: a call
        that needs it compiles it, and raises what there is to raise."""
        while self._running:
            try:
                self._running.pop().wait()
            except DeepMoEError as error:
                _warn(error)


def _warn(error: Exception) -> None:
    logger.warning("calls compile their own kernels: %s", error)
