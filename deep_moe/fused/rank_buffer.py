"""One rank's symmetric buffer, whatever it holds: its use by one thread at a time, its failure, and
its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from deep_moe.errors import DeepMoEError, MegaMoEError
from deep_moe.jit.status import error_of
from deep_moe.tensor_memory import Extent, OccupiedMemory

from .gpu import gpu_of
from .peers import gather_objects
from .symm_memory import DeviceMemory, HostMemory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.heuristics.segments import Layout


class ClosedBufferError(ValueError, AttributeError):
    """A use of a buffer after its `close()`."""


class RankBuffer:
    """name: what callers know it by, for errors. layout: with a mark `control_bytes`, the end of
    what `reset()` zeroes."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        memory: HostMemory | DeviceMemory,
        group: ProcessGroup | None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.memory = memory
        self.group = group
        self.rank = memory.rank
        self.device = memory.device
        self.gpu = gpu_of(memory.device)
        self.nbytes = layout.num_bytes
        # Who uses the buffer holds its only entry: ranks go through the calls on a buffer one after
        # the other. Taking and giving it back are atomic, and a fifth of a lock's time.
        self.turn = [None]
        self.num_calls = 0
        self._closed = False
        self.failure: str | None = None  # why calls are refused until `reset()`

    @property
    def is_emulated(self) -> bool:
        """Whether calls run in the emulator."""
        return self.gpu is None

    @cached_property
    def occupied(self) -> OccupiedMemory:
        """Every rank's buffer, where this rank sees it."""
        return OccupiedMemory(
            Extent(f"{self.name} of rank {rank}", address, address + self.nbytes)
            for rank, address in enumerate(self.memory.addresses)
        )

    @property
    def state(self) -> str:
        # open, closed, or why it failed
        if self._closed:
            return "closed"
        return "open" if self.failure is None else f"failed: {self.failure}"

    def closed_error(self) -> ClosedBufferError:
        return ClosedBufferError(f"{self.name} must be an open buffer; this one is closed")

    def raise_if_unusable(self) -> None:
        """Raise if the buffer is closed or an earlier call failed.

        A call on a GPU runs behind the host's back: its failure shows here, at the next call.
        """
        if not self._closed and self.failure is None and self.memory.status.code == 0:
            return
        self.raise_if_closed()
        if self.failure is not None:
            raise MegaMoEError(
                f"{self.name} cannot be used after a failed call ({self.failure}); call its "
                "reset() on every rank"
            )
        self.raise_if_failed()

    def raise_if_closed(self) -> None:
        if self._closed:
            raise self.closed_error()

    def refuse_second_user(self) -> NoReturn:
        """For who finds `turn` taken."""
        raise DeepMoEError(
            f"{self.name} is in use by another thread; let one thread at a time call, reset or "
            "close it: ranks go through the calls on a buffer one after the other, all in the same "
            "order"
        ) from None

    def raise_if_failed(self) -> None:
        """Raise what the last kernel reported, if it gave up. Does not wait for a GPU."""
        error = error_of(self.memory.status, self.rank)
        if error is not None:
            self.mark_failed(str(error))
            raise error

    def mark_failed(self, reason: str) -> None:
        """Refuse calls until `reset()`."""
        self.failure = reason

    def reset(self, group: ProcessGroup | None = None) -> None:
        """Bring the work space into its first state, after a failed call. Every rank of the group
        must call this; it returns when all have.

        Args:
            group: if ranks are dead, a group of all others, which are those that call; it has to
                have been made before. Later calls must mask the dead ones.
        """
        if group is None:
            group = self.group
        with used([self]):
            self.raise_if_closed()
            self.memory.synchronize()
            _barrier(group)  # no rank writes to another any more
            self.memory.tensor[: self.layout.mark("control_bytes")].zero_()
            self.memory.clear_status()
            self.num_calls = 0
            self.failure = None
            self.memory.synchronize()
            _barrier(group)

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left. The buffer cannot be used after
        this."""
        with used([self]):
            if self._closed:
                return
            self._closed = True
            self.memory.synchronize()
            self._give_back()

    def _give_back(self) -> None:
        """Drop what refers to the memory."""
        del self.memory


def _barrier(group: ProcessGroup | None) -> None:
    if group is not None:
        gather_objects(None, group)


@contextmanager
def used(buffers: Iterable[RankBuffer]) -> Iterator[None]:
    """No other thread uses the buffers meanwhile; an error if one does now."""
    with ExitStack() as stack:
        for buffer in buffers:
            try:
                buffer.turn.pop()
            except IndexError:
                buffer.refuse_second_user()
            stack.callback(buffer.turn.append, None)
        yield
