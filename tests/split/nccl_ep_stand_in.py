"""A stand-in for NCCL EP on CPUs: of its documented Python interface what the transport between
domains uses, over gloo. It holds callers to the documented rules, and gives rows in an order that
nobody can rely on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist


class Algorithm(IntEnum):
    LOW_LATENCY = 0


class Layout(IntEnum):
    EXPERT_MAJOR = 1


class DispatchQuantizationRecipe(IntEnum):
    NONE = 0
    FWD = 1


class Tensor:
    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.is_contiguous()
        self.buffer = buffer

    @property
    def row_bytes(self) -> int:
        return self.buffer.shape[-1] * self.buffer.element_size()


@dataclass
class GroupConfig:
    num_experts: int
    max_dispatch_tokens_per_rank: int
    max_token_bytes: int
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_topk: int = 0
    max_num_sms: int = 0
    timeout_ns: int = 0


@dataclass
class DispatchInputs:
    tokens: Tensor
    scales: Tensor


@dataclass
class DispatchOutputs:
    tokens: Tensor
    scales: Tensor


@dataclass
class LayoutInfo:
    expert_counters: Tensor


@dataclass
class DispatchConfig:
    quantization_recipe: DispatchQuantizationRecipe


class Handle:
    def __init__(self, group: Group, experts: Tensor) -> None:
        self._group = group
        group.num_handles += 1
        self.update(experts, stream=0)

    def update(self, topk_idx: Tensor, *, stream: int) -> None:
        self._experts: torch.Tensor | None = topk_idx.buffer.clone()

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo,
        config: DispatchConfig,
        stream: int,
    ) -> None:
        assert self._experts is not None, "update() goes before each dispatch"
        experts, self._experts = self._experts[:, 0], None
        group, limits = self._group.group, self._group.config
        size = dist.get_world_size(group)
        assert limits.num_experts == size, "one expert on each rank is all that is stood in for"
        assert config.quantization_recipe == DispatchQuantizationRecipe.FWD
        assert inputs.tokens.buffer.dtype == torch.bfloat16
        assert inputs.tokens.buffer.shape[0] <= limits.max_dispatch_tokens_per_rank
        pairs = ((inputs.tokens, outputs.tokens), (inputs.scales, outputs.scales))
        assert sum(given.row_bytes for given, _ in pairs) <= limits.max_token_bytes
        order = torch.randperm(len(experts))
        order = order[experts[order].argsort(stable=True)]
        sent = [int((experts == rank).sum()) for rank in range(size)]
        counts = torch.zeros(size, dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor(sent), group=group)
        num_received = int(counts.sum())
        mixed = torch.randperm(num_received, generator=torch.Generator().manual_seed(num_received))
        for given, taken in pairs:
            assert given.row_bytes % 16 == 0
            assert taken.row_bytes == given.row_bytes
            room = (1, size * limits.max_dispatch_tokens_per_rank)
            assert tuple(taken.buffer.shape[:2]) == room
            rows = given.buffer.view(torch.uint8)[order]
            came = torch.empty((num_received, given.row_bytes), dtype=torch.uint8)
            dist.all_to_all_single(came, rows, counts.tolist(), sent, group=group)
            taken.buffer.view(torch.uint8)[0, :num_received] = came[mixed]
        layout_info.expert_counters.buffer.fill_(num_received)

    def destroy(self) -> None:
        self._group.num_handles -= 1


class Group:
    num_open: ClassVar[int] = 0

    def __init__(self, group: Any, config: GroupConfig) -> None:
        self.group, self.config = group, config
        self.num_handles = 0
        Group.num_open += 1

    @classmethod
    def create(cls, comm: Any, config: GroupConfig) -> Group:
        return cls(comm, config)

    def create_handle(self, layout: Layout, topk_idx: Tensor, *, stream: int) -> Handle:
        assert layout == Layout.EXPERT_MAJOR
        return Handle(self, topk_idx)

    def destroy(self) -> None:
        assert self.num_handles == 0, "handles go before their group"
        Group.num_open -= 1


def install() -> None:
    """As the package nccl-extensions, in this process."""
    names = ("nccl", "nccl.ep", "nccl.ep.interop", "nccl.ep.interop.torch")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        folder, _, last = name.rpartition(".")
        if folder:
            setattr(modules[folder], last, module)
    for thing in (
        *(Algorithm, DispatchConfig, DispatchInputs, DispatchOutputs, DispatchQuantizationRecipe),
        *(Group, GroupConfig, Layout, LayoutInfo, Tensor),
    ):
        setattr(modules["nccl.ep"], thing.__name__, thing)
    modules["nccl.ep.interop.torch"].get_nccl_comm_from_group = lambda group: group  # type: ignore[attr-defined]
    sys.modules.update(modules)
