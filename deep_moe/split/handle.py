"""What a dispatch gives to its combine, and the state of both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from deep_moe.fused.checks import require_type

if TYPE_CHECKING:
    import torch

    from .kernels import Launch

HandleT = TypeVar("HandleT")


class Progress(Enum):
    """Of a call: a dispatch and its combine."""

    SENT = "its dispatch has been sent and not received"
    RECEIVED = "its dispatch has been received"
    RETURNING = "its combine has been sent and not received"
    DONE = "its combine has been received"


@dataclass
class Call:
    """One dispatch and what follows from it. number: of the layer's dispatches, from 0.
    generation: how often the layer had been reset. pending: the kernel that receives what has been
    sent, if that is one of its own. has_buffer: its experts write into the combine buffer.
    num_combines: begun so far. is_fetched: the last of them left rows where the experts wrote
    them."""

    number: int
    generation: int
    progress: Progress
    pending: Launch | None = None
    has_buffer: bool = False
    num_combines: int = 0
    is_fetched: bool = False


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What `combine` needs of its dispatch. Nothing in it is for the caller."""

    layer: object
    call: Call
    num_tokens: int
    call_idx: torch.Tensor
    recv_count: torch.Tensor
    src_slots: torch.Tensor  # int32 [local experts, N], token * num_topk + slot on the source rank
    layout_range: torch.Tensor
    sent_rows: torch.Tensor  # int32 [ranks], rows that each has of this rank's tokens

    def __repr__(self) -> str:
        return f"DispatchHandle(call {self.call.number}: {self.call.progress.value})"


class Dispatched(NamedTuple):
    """What a rank's experts are given.

    N = ranks * num_max_tokens_per_rank. An expert's rows lie by source rank, then by the tokens'
    order there; what lies behind its last one is not written.

    Attributes:
        recv_x: [local experts, N, hidden], float8_e4m3fn or bfloat16.
        scales: [local experts, N, hidden/128], float32, or int32 with four UE8M0 bytes each, the
            lowest group in the lowest byte; for "fp8_128_ue8m0" [.., hidden/512], for "bf16" None.
        recv_count: int32 [local experts], rows of each.
        src_info: int32 [local experts, N], a row's token on its source rank.
        layout_range: int64 [local experts, ranks], rows from a rank in the low half, the first of
            them in the high half.
        handle: for `combine`.
    """

    recv_x: torch.Tensor
    scales: torch.Tensor | None
    recv_count: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor
    handle: DispatchHandle


def own_handle(handle: Any, kind: type[HandleT], layer: object) -> HandleT:
    """TypeError or ValueError unless it is of this kind, and of a dispatch of this layer."""
    require_type("handle", handle, kind, "what a dispatch returned")
    if handle.layer is not layer:
        raise ValueError(
            f"handle must be of a dispatch of this layer, {layer!r}; got one of {handle.layer!r}"
        )
    assert isinstance(handle, kind)
    return handle
