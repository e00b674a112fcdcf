"""Blocks of rows between domains by NCCL EP (the package nccl-extensions): a transport that the
layers over several domains take by name.

Every rank of the cross group is an expert of NCCL EP's low-latency dispatch, and every row goes to
one expert. That dispatch does not promise an order, so a row travels with its place, as its scales,
which NCCL EP does not touch. A way is made for blocks of one size, at their first exchange, which
no CUDA graph can capture; later ones can be captured.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Of rows to or from each rank of a cross group, None where nothing is exchanged.
Blocks: TypeAlias = Sequence[torch.Tensor | None]

_ALIGNMENT = 16  # bytes of a row and of its scales

# NCCL EP's kernels end by a trap, after which the process's GPU is lost. So they wait longer than
# the ranks, whose error names the domain that did not come.
_LONGER_S = 60.0


def load_nccl_ep() -> Any:
    """The package; ImportError that says what is missing."""
    try:
        importlib.import_module("nccl.ep.interop.torch")
        return importlib.import_module("nccl.ep")
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            "transport='nccl_ep' needs NCCL EP: nccl-extensions with its extra cu12 or cu13, GPUs "
            f"and nvcc at run time; importing it failed: {error}"
        ) from error


class NcclEpExchange:
    """One rank's end of a cross group. timeout_s: how long ranks wait for other domains. num_sms:
    most SMs of its kernels; 0: as many as NCCL EP takes by itself."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, timeout_s: float, num_sms: int
    ) -> None:
        self.ep = load_nccl_ep()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._timeout_s = timeout_s
        self._num_sms = num_sms
        # Which takes the current GPU.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._communicator = self.ep.interop.torch.get_nccl_comm_from_group(group)
        self._ways: dict[tuple[int, int], _Way] = {}

    def exchange(self, received: Blocks, sent: Blocks, stream: int) -> None:
        """A block of rows, uint8 [rows, bytes], to and from each rank of the group. All blocks of
        a call have one size; there may be none for the own rank."""
        others = [
            block
            for side in (received, sent)
            for rank, block in enumerate(side)
            if rank != self.rank
        ]
        sizes = {(0, 0) if block is None else tuple(block.shape) for block in others}
        if len(sizes) != 1:
            raise ValueError(
                "transport='nccl_ep' needs blocks of one size from and to all other domains, with "
                f"no domain masked; got {sorted(sizes)}"
            )
        own, kept = sent[self.rank], received[self.rank]
        if own is not None and kept is not None:
            kept.copy_(own)
        ((num_rows, row_bytes),) = sizes
        if num_rows == 0:
            return
        way = self._ways.get((num_rows, row_bytes))
        if way is None:
            # Tensors that are made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                way = _Way(self, num_rows, row_bytes, self._device)
            self._ways[num_rows, row_bytes] = way
        way.exchange(received, sent, stream)

    def close(self) -> None:
        """Give back what exchanges have made."""
        while self._ways:
            _, way = self._ways.popitem()
            way.close()

    def make_group(self, most_rows: int, row_bytes: int) -> Any:
        """Of NCCL EP; all ranks at once. most_rows: of one rank. row_bytes: with its place's."""
        config = self.ep.GroupConfig(
            algorithm=self.ep.Algorithm.LOW_LATENCY,
            num_experts=self.size,
            max_dispatch_tokens_per_rank=most_rows,
            max_token_bytes=row_bytes,
            num_topk=1,
            max_num_sms=self._num_sms,
            timeout_ns=round((self._timeout_s + _LONGER_S) * 1e9),
        )
        return self.ep.Group.create(self._communicator, config)


class _Way:
    """Memory and NCCL EP's objects for blocks of one size.

    A place is source rank * num_rows + row: where a row lies in `_sorted`.
    """

    def __init__(
        self, exchange: NcclEpExchange, num_rows: int, row_bytes: int, device: torch.device
    ) -> None:
        self._ep, self._rank, size = exchange.ep, exchange.rank, exchange.size
        self._num_rows, self._row_bytes = num_rows, row_bytes
        self._peers = [rank for rank in range(size) if rank != self._rank]
        num_sent = len(self._peers) * num_rows
        most = size * num_sent  # what NCCL EP has room for, though no rank sends to itself
        width = row_bytes + -row_bytes % _ALIGNMENT

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._sent = zeros(num_sent, width)
        self._places = zeros(num_sent, _ALIGNMENT)
        own = torch.arange(num_rows) + self._rank * num_rows
        self._places.view(torch.int64)[:, 0].copy_(own.repeat(len(self._peers)))
        experts = zeros(num_sent, 1, dtype=torch.int64)
        experts[:, 0].copy_(torch.tensor(self._peers).repeat_interleave(num_rows))
        self._received = zeros(1, most, width)
        self._received_places = zeros(1, most, _ALIGNMENT)
        self._counts = zeros(1, dtype=torch.int32)
        self._sorted = zeros(size * num_rows, width)
        ep = self._ep
        self._experts = ep.Tensor(experts)
        self._inputs = ep.DispatchInputs(
            tokens=ep.Tensor(self._sent.view(torch.bfloat16)), scales=ep.Tensor(self._places)
        )
        self._outputs = ep.DispatchOutputs(
            tokens=ep.Tensor(self._received.view(torch.bfloat16)),
            scales=ep.Tensor(self._received_places),
        )
        self._layout = ep.LayoutInfo(expert_counters=ep.Tensor(self._counts))
        self._config = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)
        self._group = exchange.make_group(num_sent, width + _ALIGNMENT)
        self._handle: Any = None

    def exchange(self, received: Blocks, sent: Blocks, stream: int) -> None:
        """On the current stream, whose number is `stream`."""
        for i, peer in enumerate(self._peers):
            block = sent[peer]
            assert block is not None, "blocks of one size"
            self._sent.unflatten(0, (-1, self._num_rows))[i, :, : self._row_bytes].copy_(block)
        if self._handle is None:
            layout = self._ep.Layout.EXPERT_MAJOR
            self._handle = self._group.create_handle(layout, self._experts, stream=stream)
        else:
            self._handle.update(self._experts, stream=stream)
        self._handle.dispatch(
            self._inputs,
            self._outputs,
            layout_info=self._layout,
            config=self._config,
            stream=stream,
        )
        # As many rows as were sent, the first of what there is room for.
        came = slice(len(self._peers) * self._num_rows)
        places = self._received_places[0, came].view(torch.int64)[:, 0]
        self._sorted.index_copy_(0, places, self._received[0, came])
        for peer in self._peers:
            block = received[peer]
            assert block is not None, "blocks of one size"
            rows = self._sorted.unflatten(0, (-1, self._num_rows))[peer]
            block.copy_(rows[:, : self._row_bytes])

    def close(self) -> None:
        if self._handle is not None:
            self._handle.destroy()
        self._group.destroy()
