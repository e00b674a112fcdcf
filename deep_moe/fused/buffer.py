"""The symmetric buffer of one rank, and its creation across a group."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from deep_moe.errors import DeepMoEError, MegaMoEError
from deep_moe.formats.weight_formats import DEFAULT_WEIGHTS
from deep_moe.heuristics.shape import MoEShape
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.jit.status import error_of

from .call_plan import CallCaches
from .checks import refuse_gradients
from .gpu import gpu_of
from .symm_memory import (
    DeviceMemory,
    HostMemory,
    gather_objects,
    private_host_memories,
    shared_host_memory,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.trial.trace import Recorder

_DTYPES = {
    "input_x": torch.float8_e4m3fn,
    "input_x_sf": torch.int32,
    "input_topk_idx": torch.int64,
    "input_topk_weights": torch.float32,
}

# What a buffer has until it is closed.
_GIVEN_BACK = ("x", "x_sf", "topk_idx", "topk_weights", "memory")

# Open buffers by handle, so that an operator, whose arguments are tensors and numbers, finds its
# buffer. Numbers are never used twice.
_open_buffers: weakref.WeakValueDictionary[int, SymmBuffer] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


class _ClosedBufferError(ValueError, AttributeError):
    """A use of a buffer after its `close()`."""


class SymmBuffer:
    """One rank's inputs and work space.

    x: float8_e4m3fn [max tokens, hidden]. x_sf: int32 [max tokens, hidden/128].
    topk_idx: int64 [max tokens, topk]. topk_weights: float32 [max tokens, topk].
    These four are views that the caller fills before a call. nbytes: size of the whole buffer.

    One thread at a time uses a buffer: a second one is refused at once.

    A call that raised MegaMoEError leaves the work space in the middle of things: `reset()` on
    every rank makes it usable again, and until then further calls are refused. Inputs survive.
    """

    def __init__(
        self,
        shape: MoEShape,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None = None,
    ) -> None:
        self.shape = shape
        self.layout = symm_buffer_layout(shape)
        self.group = group
        self.memory = memory
        self.rank = memory.rank
        self.device = memory.device
        self.gpu = gpu_of(memory.device)
        self.nbytes = self.layout.num_bytes
        self.handle = next(_next_handle)
        _open_buffers[self.handle] = self
        self.x = self._view("input_x")
        self.x_sf = self._view("input_x_sf")
        self.topk_idx = self._view("input_topk_idx")
        self.topk_weights = self._view("input_topk_weights")
        self.caches = CallCaches()
        # Who uses the buffer holds its only entry: ranks go through the calls on a buffer one after
        # the other. Taking and giving it back are atomic, and a fifth of a lock's time.
        self.turn = [None]
        self.num_calls = 0
        # While calls are recorded: see deep_moe/trial/trace.py.
        self.recorder: Recorder | None = None
        self._closed = False
        self._failure: str | None = None

    def __repr__(self) -> str:
        shape = self.shape
        state = "open" if self._failure is None else f"failed: {self._failure}"
        if self._closed:
            state = "closed"
        return (
            f"SymmBuffer(rank {self.rank} of {shape.num_ranks} on {self.device}, "
            f"{shape.num_experts} experts, top-{shape.num_topk}, hidden {shape.hidden}, "
            f"intermediate {shape.intermediate_hidden}, {shape.weights} weights, "
            f"up to {shape.num_max_tokens_per_rank} tokens, {self.nbytes / 2**20:.1f} MiB, {state})"
        )

    if not TYPE_CHECKING:  # so that mypy still knows which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            """What a closed buffer no longer has."""
            if name in _GIVEN_BACK:
                raise _ClosedBufferError("sym_buffer must be an open buffer; this one is closed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    @property
    def is_emulated(self) -> bool:
        """Whether calls run in the emulator."""
        return self.gpu is None

    @classmethod
    def of_handle(cls, handle: int) -> SymmBuffer:
        """The open buffer with this handle."""
        buffer = _open_buffers.get(handle)
        if buffer is None:
            raise _ClosedBufferError(
                f"sym_buffer must be an open buffer; handle {handle} is closed"
            )
        return buffer

    def raise_if_unusable(self) -> None:
        """Raise if the buffer is closed or an earlier call failed.

        A call on a GPU runs behind the host's back: its failure shows here, at the next call.
        """
        if not self._closed and self._failure is None and self.memory.status.code == 0:
            return
        self.raise_if_closed()
        if self._failure is not None:
            raise MegaMoEError(
                f"sym_buffer cannot be used after a failed call ({self._failure}); call its "
                "reset() on every rank"
            )
        self.raise_if_failed()

    def raise_if_closed(self) -> None:
        if self._closed:
            raise _ClosedBufferError("sym_buffer must be an open buffer; this one is closed")

    def refuse_second_user(self) -> NoReturn:
        """For who finds `turn` taken."""
        raise DeepMoEError(
            "sym_buffer is in use by another thread; let one thread at a time call, reset or close "
            "it: ranks go through the calls on a buffer one after the other, all in the same order"
        ) from None

    def refuse_gradients(self, y: torch.Tensor) -> None:
        """Raise if a gradient is asked for of y or of what was written to the views. These are made
        anew then, so that later calls do not meet the old history."""
        try:
            refuse_gradients(
                y=y, **{"sym_buffer.topk_weights": self.topk_weights, "sym_buffer.x": self.x}
            )
        except ValueError:
            self.x, self.topk_weights = self.x.detach(), self.topk_weights.detach()
            raise

    def raise_if_failed(self) -> None:
        """Raise what the last kernel reported, if it gave up. Does not wait for a GPU."""
        error = error_of(self.memory.status, self.rank)
        if error is not None:
            self.mark_failed(str(error))
            raise error

    def mark_failed(self, reason: str) -> None:
        """Refuse calls until `reset()`."""
        self._failure = reason

    def reset(self) -> None:
        """Bring the work space into its first state, after a failed call. Every rank of the group
        must call this; it returns when all have."""
        with used([self]):
            self.raise_if_closed()
            self.memory.synchronize()
            self._barrier()  # no rank writes to another any more
            self.memory.tensor[: self.layout.mark("control_bytes")].zero_()
            self.memory.clear_status()
            self.num_calls = 0
            self._failure = None
            self.memory.synchronize()
            self._barrier()

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left. The buffer cannot be used after
        this."""
        with used([self]):
            if self._closed:
                return
            self._closed = True
            self.memory.synchronize()
            _open_buffers.pop(self.handle, None)
            self.caches.clear()
            for name in _GIVEN_BACK:
                delattr(self, name)

    def _barrier(self) -> None:
        if self.group is not None:
            gather_objects(None, self.group)

    def _view(self, name: str) -> torch.Tensor:
        segment = self.layout[name]
        raw = self.memory.tensor[segment.offset : segment.end]
        return raw.view(_DTYPES[name]).view(segment.shape)


@contextmanager
def used(buffers: Iterable[SymmBuffer]) -> Iterator[None]:
    """No other thread uses the buffers meanwhile; an error if one does now."""
    with ExitStack() as stack:
        for buffer in buffers:
            try:
                buffer.turn.pop()
            except IndexError:
                buffer.refuse_second_user()
            stack.callback(buffer.turn.append, None)
        yield


def get_symm_buffer_for_mega_moe(
    group: ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    weights: str = DEFAULT_WEIGHTS,
    device: torch.device | str | int | None = None,
) -> SymmBuffer:
    """Make the buffer for calls with weights of one format. Every rank of `group` must call this.

    group: a torch.distributed process group, or None for a single rank.
    num_experts: of all ranks together. num_max_tokens_per_rank: most tokens of one call.
    weights: their format: "mxfp4", for `fp8_fp4_mega_moe`, or "fp8", for `fp8_mega_moe`.
    device: where the calls run. A CPU runs them in the emulator, with memory that the processes of
        the group share. By default the current GPU for a group with NCCL and, if there is a GPU,
        for None; otherwise the CPU.

    On GPUs, groups that overlap need their buffers in order, the largest group's first: PyTorch
    (seen with 2.11, pytorch/pytorch#196082) counts a process's exchanges of memory, not a group's,
    and waits for ever where the counts of a group's ranks differ.

    Raises ValueError or TypeError on all ranks if an argument is not allowed or differs between
    ranks.
    """
    arguments: dict[str, Any] = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "num_topk": num_topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate_hidden,
        "weights": weights,
    }
    num_ranks = _num_ranks(group)
    device = _buffer_device(group, device)
    if group is not None:
        require_equal({**arguments, "device": device.type}, group)
    shape = MoEShape(num_ranks=num_ranks, **arguments)
    gpu = gpu_of(device)
    if gpu is not None:
        gpu.target.weights_of(weights)
    layout = symm_buffer_layout(shape)
    memory: HostMemory | DeviceMemory
    if device.type == "cuda":
        memory = DeviceMemory(group, layout.num_bytes, layout.mark("control_bytes"), device)
        if group is not None:
            gather_objects(None, group)  # no rank may write to a buffer that is not zeroed yet
    elif group is None:
        (memory,) = private_host_memories(1, layout.num_bytes)
    else:
        memory = shared_host_memory(group, layout.num_bytes)
    return SymmBuffer(shape, memory, group)


def require_equal(arguments: dict[str, Any], group: ProcessGroup) -> None:
    """Raise ValueError on every rank if an argument is not the same on all."""
    difference = describe_difference(dict(enumerate(gather_objects(arguments, group))))
    if difference is not None:
        raise ValueError(difference)


def describe_difference(arguments_of: dict[int, dict[str, Any]]) -> str | None:
    """Words for the first argument that differs between ranks, or None.

    >>> describe_difference({0: {"hidden": 128}, 1: {"hidden": 256}, 2: {"hidden": 128}})
    'hidden must be the same on every rank; got 128 on ranks 0, 2 and 256 on rank 1'
    """
    first, *_ = arguments_of.values()
    for name in first:
        ranks_with: dict[str, list[int]] = {}
        for rank, arguments in arguments_of.items():
            ranks_with.setdefault(repr(arguments.get(name)), []).append(rank)
        if len(ranks_with) > 1:
            got = " and ".join(
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_with.items()
            )
            return f"{name} must be the same on every rank; got {got}"
    return None


def _num_ranks(group: object) -> int:
    if group is None:
        return 1
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed process group that this process belongs to, or "
            f"None; got {group!r}"
        )
    return dist.get_world_size(group)


def _buffer_device(
    group: ProcessGroup | None, device: torch.device | str | int | None
) -> torch.device:
    if device is None:
        if group is None:
            uses_gpu = torch.cuda.is_available()
        else:
            uses_gpu = "nccl" in str(dist.get_backend(group))
        device = "cuda" if uses_gpu else "cpu"
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device; got {chosen}")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
