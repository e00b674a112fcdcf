"""Runs small kernels, made of pieces of the device library, for several ranks in the emulator.

A test kernel is a few lines of CUDA C++ that include what is under test. In front of them stands
the same `Config` that the real kernel would get. Its parameter is the real `KernelArgs`; what it
wants to tell the test it writes to `args.y`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deep_moe import jit
from deep_moe.activations import Activation
from deep_moe.emulator.precompiled_headers import HEADER_STOP
from deep_moe.heuristics import MoEShape
from deep_moe.jit.cpp_structs import CppStruct, struct
from deep_moe.jit.kernel_args import TensorMap, WaitStatus
from deep_moe.targets import MegaMoEConfig, choose_config

if TYPE_CHECKING:
    from deep_moe.emulator import Machine
    from deep_moe.emulator.machine import Module, Schedule
    from deep_moe.emulator.tensor_map import TensorMapSpec

DTYPES = {
    "u8": np.uint8,
    "u32": np.uint32,
    "i32": np.int32,
    "i64": np.int64,
    "u64": np.uint64,
    "f32": np.float32,
    "bf16": np.uint16,
}
ARCHS = ("sm_100a", "sm_90a")
SECOND = 1_000_000_000


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


def small_config(
    num_tokens: int = 8,
    *,
    arch: str = "sm_100a",
    num_sms: int = 2,
    overrides: dict[str, int] | None = None,
    activation: str | Activation = "swiglu",
    fast_math: bool = True,
    **shape: Any,
) -> MegaMoEConfig:
    """A config as the heuristics make it, for a shape that is small unless said otherwise."""
    sizes = {
        "num_ranks": 1,
        "num_experts": 4,
        "num_topk": 2,
        "hidden": 256,
        "intermediate_hidden": 128,
        "num_max_tokens_per_rank": num_tokens,
        **shape,
    }
    return choose_config(
        MoEShape(**sizes),
        num_tokens,
        arch=arch,
        num_sms=num_sms,
        activation=activation,
        fast_math=fast_math,
        overrides=overrides,
    )


def foreign_headers(config: MegaMoEConfig) -> str:
    """The beginning of a rendered kernel that others of a process share, if it has one."""
    begin, stop, _ = jit.render_kernel(config).partition(HEADER_STOP)
    return begin + stop if stop else ""


def config_struct(config: MegaMoEConfig) -> str:
    """The `struct Config` of a rendered kernel, behind the headers of its policies."""
    rendered = jit.render_kernel(config)
    first = rendered.index("#include <deep_moe/activations/")
    return rendered[first : rendered.index("// The host has read")]


def aligned_bytes(num_bytes: int) -> np.ndarray:
    """Zeros that start on a multiple of 1024, as TMA sources must."""
    memory = np.zeros(num_bytes + 1024, np.uint8)
    start = -memory.ctypes.data % 1024
    return memory[start : start + num_bytes]


@dataclass(frozen=True)
class Queued:
    """A kernel in a rank's queue. y_offset: where its output begins, in bytes."""

    source: str
    num_threads: int
    shared_bytes: int = 0
    num_tokens: int = 0
    y_offset: int = 0
    timeout_ns: int = 100 * SECOND


class Ranks:
    """Symmetric buffers, outputs and statuses of all ranks, in this process."""

    def __init__(self, config: MegaMoEConfig, *, output_bytes: int, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.layout = config.symm_buffer_layout
        ranks = range(config.num_ranks)
        self.buffers = [aligned_bytes(self.layout.num_bytes) for _ in ranks]
        self.outputs = [aligned_bytes(output_bytes) for _ in ranks]
        self.stats = [np.zeros(config.num_experts_per_rank, np.int32) for _ in ranks]
        self.statuses = [WaitStatus() for _ in ranks]
        self.args_type = struct("deep_moe/layout/kernel_args.cuh", "KernelArgs")
        self.tensor_maps: dict[str, TensorMapSpec] = {}  # by their names in args_type

    def segment(self, rank: int, name: str) -> np.ndarray:
        """A segment of a rank's buffer, in its declared dtype and shape."""
        segment = self.layout[name]
        flat = self.buffers[rank][segment.offset : segment.end].view(DTYPES[segment.dtype])
        return flat.reshape(segment.shape)

    def output(self, rank: int, dtype: Any, *shape: int) -> np.ndarray:
        """The start of what a rank's kernel wrote to args.y."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.outputs[rank][:num_bytes].view(dtype).reshape(shape)

    def zeroed_control(self, rank: int) -> np.ndarray:
        """The control words that a call must leave zero."""
        return self.buffers[rank][self.layout.mark("zeroed_begin") : self.layout.mark("zeroed_end")]

    def args(self, rank: int, *, num_tokens: int = 0, timeout_ns: int = 100 * SECOND) -> CppStruct:
        args = self.args_type()
        for name, spec in self.tensor_maps.items():
            setattr(args, name, TensorMap.from_buffer_copy(spec.encode_emulated()))
        for i, buffer in enumerate(self.buffers):
            args.rank_buffers[i] = buffer.ctypes.data
        args.y = self.outputs[rank].ctypes.data
        args.cumulative_local_expert_recv_stats = self.stats[rank].ctypes.data
        args.status = ctypes.addressof(self.statuses[rank])
        args.wait_timeout_ns = timeout_ns
        args.rank_idx = rank
        args.num_tokens = num_tokens
        return args

    def run(
        self,
        source: str,
        *,
        arch: str = "sm_90a",
        num_threads: int = 32,
        shared_bytes: int = 0,
        num_tokens: Sequence[int] | None = None,
        only: Sequence[int] | None = None,
        timeout_ns: int = 100 * SECOND,
        cluster_size: int = 1,
        schedule: Schedule = "random",
    ) -> None:
        """Run `kernel` of `source` on all ranks, or on those in `only`, to completion."""
        ranks = range(self.config.num_ranks) if only is None else only
        machine = self._machine(ranks, schedule)
        module = self._load(machine, source, arch)
        for rank in ranks:
            args = self.args(
                rank,
                num_tokens=0 if num_tokens is None else num_tokens[rank],
                timeout_ns=timeout_ns,
            )
            machine.launch(
                module,
                "kernel",
                grid=(self.config.num_sms, 1, 1),
                block=(num_threads, 1, 1),
                cluster=(cluster_size, 1, 1),
                shared_bytes=shared_bytes,
                args=bytes(args),
                rank=rank,
            )
        machine.run()

    def run_queues(
        self,
        queues: Sequence[Sequence[Queued]],
        *,
        schedule: Schedule = "random",
        arch: str = "sm_90a",
    ) -> None:
        """Run each rank's kernels after each other, as in a stream. No rank waits for another."""
        machine = self._machine(range(self.config.num_ranks), schedule)
        sources = {queued.source for queue in queues for queued in queue}
        modules = {source: self._load(machine, source, arch) for source in sorted(sources)}
        for rank, queue in enumerate(queues):
            for queued in queue:
                args = self.args(rank, num_tokens=queued.num_tokens, timeout_ns=queued.timeout_ns)
                args.y += queued.y_offset
                machine.launch(
                    modules[queued.source],
                    "kernel",
                    grid=(self.config.num_sms, 1, 1),
                    block=(queued.num_threads, 1, 1),
                    shared_bytes=queued.shared_bytes,
                    args=bytes(args),
                    rank=rank,
                    in_order=True,
                )
        machine.run()

    def _machine(self, ranks: Sequence[int], schedule: Schedule = "random") -> Machine:
        from deep_moe.emulator import Machine

        machine = Machine(seed=self.seed, schedule=schedule, checks=True, clock="virtual")
        for rank in ranks:
            for peer, buffer in enumerate(self.buffers):
                machine.add_memory(rank, buffer.ctypes.data, buffer.nbytes, f"buffer {peer}")
            for name, memory in (("output", self.outputs[rank]), ("stats", self.stats[rank])):
                machine.add_memory(rank, memory.ctypes.data, memory.nbytes, name)
            status = self.statuses[rank]
            machine.add_memory(rank, ctypes.addressof(status), ctypes.sizeof(status), "status")
        return machine

    def _load(self, machine: Machine, source: str, arch: str) -> Module:
        """The compiled kernel, with `Config` between its includes and the rest."""
        includes, _, rest = source.partition("\n\n")
        headers = foreign_headers(self.config) + includes
        text = "\n\n".join((headers, config_struct(self.config), rest))
        compiled = jit.compile_cached(text, arch=arch, kernel="kernel", for_emulator=True)
        return machine.load(compiled.ptx, name="kernel.ptx")


@pytest.fixture
def make_config() -> Any:
    return small_config


@pytest.fixture
def make_ranks() -> type[Ranks]:
    return Ranks


@pytest.fixture
def make_queued() -> type[Queued]:
    return Queued
