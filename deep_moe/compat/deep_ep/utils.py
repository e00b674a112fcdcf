"""Events behind a call, by DeepEP's names."""

from __future__ import annotations

from types import TracebackType

import torch


class EventHandle:
    """Where the current stream is. Without a GPU calls return when they are done, and there is
    nothing to wait for."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait until that point."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event, and tensors that live until it is dropped.

    Args:
        event: None behind a call without async_finish. As a context, leaving it waits.
        extra_tensors: tensors that have to live until the event is dropped.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor | None, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the event."""
        if self.event is None:
            raise ValueError("event must be that of a call with async_finish=True; there is none")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
