"""A call in the emulator: the memory that the kernel may touch, the ranks in other processes, and
the checks after the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deep_moe.jit.launch import MemoryRegion, RankLaunch, run_emulated
from deep_moe.targets.config import MegaMoEConfig

from .buffer import SymmBuffer, describe_difference
from .call_plan import is_checked, prepare_call
from .call_tensors import CallTensors
from .checks import BIAS_NAMES, WEIGHT_NAMES, Biases, Pair
from .loaded_kernels import built_kernel
from .options import CALL_TENSORS, MASKED_RANKS, CallArguments
from .rank_buffer import RankBuffer
from .symm_memory import HostMemory


@dataclass(frozen=True)
class MegaMoELaunch(RankLaunch):
    """One rank's part of a Mega MoE call."""

    config: MegaMoEConfig


def prepare_launch(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    tensors: CallTensors,
    options: CallArguments,
    biases: Biases | None = None,
) -> MegaMoELaunch:
    """`prepare_call` for the emulator, which wants to know the kernel's memory."""
    plan, args = prepare_call(y, l1_weights, l2_weights, buffer, tensors, options, biases)
    config = plan.config
    return MegaMoELaunch(
        buffer.rank,
        built_kernel(config, for_emulator=True),
        config.num_sms,
        config.num_threads,
        config.smem_bytes,
        # Of its own: further calls with the buffer may be prepared before this one runs.
        type(args).from_buffer_copy(args),
        _memory_regions(y, l1_weights, l2_weights, buffer, tensors, biases),
        config,
        smem_layout=config.smem_layout,
        warp_roles=config.warp_roles,
    )


# What the emulator takes, measured with both kernels: of a CTA beside its shared memory, and, where
# it looks for races, of every pair of warps.
_CTA_BYTES = 1 << 20
_CHECKED_CTA_BYTES = 3 << 20
_WARP_PAIR_BYTES = 180


def require_memory(
    launches: Sequence[RankLaunch], *, checked: bool, num_processes: int = 1
) -> None:
    """Raise ValueError if the emulator would need more memory than there is.

    num_processes: how many run such launches on this machine at once.
    """
    num_ctas = sum(launch.num_ctas for launch in launches)
    num_warps = sum(launch.num_ctas * launch.num_threads // 32 for launch in launches)
    needed = sum(launch.num_ctas * launch.smem_bytes for launch in launches)
    if checked:
        needed += num_ctas * _CHECKED_CTA_BYTES + num_warps**2 * _WARP_PAIR_BYTES
    else:
        needed += num_ctas * _CTA_BYTES
    available = available_bytes()
    if num_processes * needed > available:
        num_sms = max(launch.num_ctas for launch in launches)
        raise ValueError(
            f"num_sms must be fewer: emulating {num_ctas} CTAs"
            + (" with a look for races" if checked else "")
            + f" takes about {num_processes * needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free; got {num_sms}"
        )


def available_bytes() -> int:
    """Memory that this process may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise RuntimeError("/proc/meminfo must say how much memory is available; it does not")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def finish_emulated(buffer: RankBuffer, *, checked: bool) -> None:
    """Raise what the kernel reported, or that something wrote beside the buffer."""
    memory = buffer.memory
    assert isinstance(memory, HostMemory)
    buffer.raise_if_failed()
    if checked:
        offset = memory.blocks[memory.rank].damaged_guard()
        if offset is not None:
            buffer.mark_failed("a write beside the buffer")
            raise RuntimeError(
                f"rank {buffer.rank}: something wrote beside the symmetric buffer, at byte "
                f"{offset} of {buffer.nbytes}"
            )


def run_rank(
    launch: RankLaunch,
    buffer: RankBuffer,
    agreed: Mapping[str, Any],
    *,
    num_ranks: int,
    seed: int,
    checked: bool,
) -> None:
    """Run this process's rank in the emulator, and the others in their processes meanwhile.

    agreed: what must be the same on every rank, but for those that it says are masked.
    """
    memory = buffer.memory
    assert isinstance(memory, HostMemory)
    require_memory([launch], checked=checked, num_processes=num_ranks)
    buffer.num_calls += 1
    masked = agreed.get(MASKED_RANKS, [])
    if memory.is_shared:
        # Compared with the ranks that have come before. Ranks that come later compare for
        # themselves, and stop this one if they must.
        memory.blocks[memory.rank].publish_call(buffer.num_calls, agreed)
        _raise_if_different(memory, buffer, masked)
    try:
        run_emulated(
            [launch],
            seed=seed,
            checks=checked,
            clock="real" if memory.is_shared else "virtual",
        )
    except BaseException:
        buffer.mark_failed("the emulator stopped")
        raise
    if memory.is_shared:
        _raise_if_different(memory, buffer, masked)
    finish_emulated(buffer, checked=checked)


def call_emulated(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    tensors: CallTensors,
    options: CallArguments,
    biases: Biases | None = None,
) -> None:
    buffer.raise_if_closed()
    memory = buffer.memory
    assert isinstance(memory, HostMemory)
    if buffer.num_ranks > 1 and not memory.is_shared:
        raise ValueError(
            "sym_buffer must be called through its EmulatedRanks: its other ranks live in this "
            "process too"
        )
    launch = prepare_launch(y, l1_weights, l2_weights, buffer, tensors, options, biases)
    config = launch.config
    run_rank(
        launch,
        buffer,
        {
            "num_sms": config.num_sms,
            "arch": config.arch,
            "fast_math": config.fast_math,
            **{name: str(value) for name, value in config.activation.to_dict().items()},
            MASKED_RANKS: masked_ranks_of(tensors),
        },
        num_ranks=buffer.num_ranks,
        seed=options.get("schedule_seed") or 0,
        checked=is_checked(options, buffer),
    )


def masked_ranks_of(tensors: CallTensors) -> list[int]:
    """The ranks that a call leaves out."""
    masked = tensors.get(MASKED_RANKS)
    return [] if masked is None else masked.nonzero().flatten().tolist()


def _raise_if_different(memory: HostMemory, buffer: RankBuffer, masked: Collection[int]) -> None:
    published = {
        rank: block.published_call(buffer.num_calls)
        for rank, block in enumerate(memory.blocks)
        if rank not in masked  # what a dead rank published is of a call before the reset
    }
    difference = describe_difference(
        {rank: call for rank, call in published.items() if call is not None}
    )
    if difference is not None:
        memory.refuse_call(buffer.num_calls)
        buffer.mark_failed(difference)
        raise ValueError(difference)


def _memory_regions(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    buffer: SymmBuffer,
    tensors: CallTensors,
    biases: Biases | None,
) -> tuple[MemoryRegion, ...]:
    """What the kernel may touch: nothing of masked ranks."""
    memory = buffer.memory
    masked = masked_ranks_of(tensors)
    of_tensor = MemoryRegion.of_tensor
    regions = [
        MemoryRegion(
            f"symmetric buffer of rank {rank}", address, buffer.nbytes, True, buffer.layout, rank
        )
        for rank, address in enumerate(memory.addresses)
        if rank not in masked or rank == buffer.rank
    ]
    regions.append(MemoryRegion("wait status", memory.status_address, 64, True))
    regions.append(of_tensor("y", y, is_writable=True))
    weights = zip(WEIGHT_NAMES, (*l1_weights, *l2_weights), strict=True)
    for name, tensor in (*weights, *zip(BIAS_NAMES, biases or (), strict=False)):
        regions.append(of_tensor(name, tensor, is_writable=False))
    if buffer.recorder is not None and buffer.recorder.memory is not None:
        regions.append(of_tensor("trace", buffer.recorder.memory, is_writable=True))
    for name, tensor in tensors.items():
        regions.append(of_tensor(name, tensor, is_writable=CALL_TENSORS[name].is_written))
    return tuple(region for region in regions if region.num_bytes)
