"""Where a symmetric buffer lives: memory that every rank of a group can address.

`HostMemory` is for the emulator: private to this process, or shared by the processes of a group
through memfd. A memfd has no name in any folder, so nothing remains when the last process is gone,
however it ends. Each block has guard bands on both sides, and one page that ranks use to agree on a
call:

    page:    WaitStatus | call number, length | the call's arguments as JSON
    guard    64 KiB of a fixed pattern
    buffer
    guard

`DeviceMemory` is for GPUs: PyTorch's symmetric memory for a group, a plain tensor for one rank. The
ranks first find out whether all of them can reach each other's (peers.py). Between machines of one
NVLink domain PyTorch exchanges fabric handles by itself.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep_moe.errors import DeepMoEError
from deep_moe.jit.kernel_args import WaitStatus
from deep_moe.jit.status import StatusCode

from .peers import explained, gather_objects, machine_id, require_reachable_peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GUARD_BYTES = 64 * 1024
GUARD_BYTE = 0xA5
_PAGE_BYTES = 4096
_CALL_NUMBER = struct.Struct("<Q")
_CALL_LENGTH = struct.Struct("<I")
_CALL_NUMBER_OFFSET = 64
_CALL_LENGTH_OFFSET = 72
_CALL_TEXT_OFFSET = 128
_BUFFER_OFFSET = _PAGE_BYTES + GUARD_BYTES


def _fence() -> Callable[[], None]:
    """What keeps the order of this thread's accesses for other processes."""
    from deep_moe.emulator import library

    return library.load().dm_fence


def _block_bytes(num_bytes: int) -> int:
    return -(-(_BUFFER_OFFSET + num_bytes + GUARD_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


class HostBlock:
    """One rank's block, mapped into this process."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        self._mapping = mapping
        self.num_bytes = num_bytes
        self.tensor = torch.frombuffer(
            mapping, dtype=torch.uint8, offset=_BUFFER_OFFSET, count=num_bytes
        )
        self.status = WaitStatus.from_buffer(mapping)

    @property
    def address(self) -> int:
        """First byte of the buffer."""
        return self.tensor.data_ptr()

    def fill_guards(self) -> None:
        for guard in self._guards():
            guard.fill_(GUARD_BYTE)

    def damaged_guard(self) -> int | None:
        """Offset from the buffer's start of the first overwritten guard byte, or None."""
        for guard in self._guards():
            damage = (guard != GUARD_BYTE).nonzero()
            if damage.numel():
                return guard.data_ptr() + int(damage[0]) - self.address
        return None

    def publish_call(self, number: int, call: Mapping[str, Any]) -> None:
        """Tell the other ranks what this rank is about to run. number: at least 1. It is taken away
        first and written last: who sees it before and after the rest has read what belongs to it.
        Fences keep that order on processors that would not.
        """
        fence = _fence()
        text = json.dumps(call).encode()
        space = _PAGE_BYTES - _CALL_TEXT_OFFSET
        if len(text) > space:
            raise ValueError(f"the call's arguments take {len(text)} bytes; at most {space} fit")
        _CALL_NUMBER.pack_into(self._mapping, _CALL_NUMBER_OFFSET, 0)
        fence()
        self._mapping[_CALL_TEXT_OFFSET : _CALL_TEXT_OFFSET + len(text)] = text
        _CALL_LENGTH.pack_into(self._mapping, _CALL_LENGTH_OFFSET, len(text))
        fence()
        _CALL_NUMBER.pack_into(self._mapping, _CALL_NUMBER_OFFSET, number)
        fence()

    def published_call(self, number: int) -> dict[str, Any] | None:
        """What the block's rank published as call `number`, or None if it has not yet, or has gone
        on to another."""
        fence = _fence()
        if self._published_number() != number:
            return None
        fence()
        (length,) = _CALL_LENGTH.unpack_from(self._mapping, _CALL_LENGTH_OFFSET)
        text = bytes(self._mapping[_CALL_TEXT_OFFSET : _CALL_TEXT_OFFSET + length])
        fence()
        return json.loads(text) if self._published_number() == number else None

    def _published_number(self) -> int:
        return int(_CALL_NUMBER.unpack_from(self._mapping, _CALL_NUMBER_OFFSET)[0])

    def clear_page(self) -> None:
        self._mapping[:_PAGE_BYTES] = bytes(_PAGE_BYTES)

    def _guards(self) -> tuple[torch.Tensor, torch.Tensor]:
        end = _BUFFER_OFFSET + self.num_bytes
        return (
            torch.frombuffer(
                self._mapping, dtype=torch.uint8, offset=_PAGE_BYTES, count=GUARD_BYTES
            ),
            torch.frombuffer(self._mapping, dtype=torch.uint8, offset=end, count=GUARD_BYTES),
        )


class HostMemory:
    """One rank's view of the blocks of all ranks."""

    device = torch.device("cpu")

    def __init__(self, blocks: Sequence[HostBlock], rank: int, *, is_shared: bool) -> None:
        self.blocks = list(blocks)
        self.rank = rank
        self.is_shared = is_shared
        self.status = self.blocks[rank].status

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's buffer."""
        return self.blocks[self.rank].tensor

    @property
    def addresses(self) -> list[int]:
        """Every rank's buffer, as this process sees it."""
        return [block.address for block in self.blocks]

    @property
    def status_address(self) -> int:
        return ctypes.addressof(self.status)

    def clear_status(self) -> None:
        self.blocks[self.rank].clear_page()

    def refuse_call(self, number: int) -> None:
        """Stop the kernels of ranks that already run call `number`."""
        for block in self.blocks:
            if block.published_call(number) is not None and block.status.code == StatusCode.OK:
                block.status.code = StatusCode.REFUSED_BY_PEER

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""


def private_host_memories(num_ranks: int, num_bytes: int) -> list[HostMemory]:
    """Memory of `num_ranks` ranks that all live in this process."""
    try:
        blocks = [
            HostBlock(mmap.mmap(-1, _block_bytes(num_bytes)), num_bytes) for _ in range(num_ranks)
        ]
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"a buffer of {num_bytes} bytes, what the given sizes take, is more than this machine "
            f"has memory for: {error}"
        ) from error
    for block in blocks:
        block.fill_guards()
    return [HostMemory(blocks, rank, is_shared=False) for rank in range(num_ranks)]


def shared_host_memory(group: ProcessGroup, num_bytes: int) -> HostMemory:
    """Memory that the processes of `group` share. Every rank of the group must call this."""
    rank = dist.get_rank(group)
    file = os.memfd_create("deep_moe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, _block_bytes(num_bytes))
        own = HostBlock(mmap.mmap(file, _block_bytes(num_bytes)), num_bytes)
        own.fill_guards()
        offer = (machine_id(), os.getpid(), file)
        offers = gather_objects(offer, group)
        blocks: list[HostBlock] = []
        problem = None
        try:
            for peer, (machine, pid, peer_file) in enumerate(offers):
                if peer == rank:
                    blocks.append(own)
                    continue
                if machine != offer[0]:
                    raise OSError("it runs on another machine or in another process namespace")
                blocks.append(_map_peer(pid, peer_file, num_bytes))
        except OSError as error:
            problem = f"rank {rank} cannot map the memory of rank {len(blocks)}: {error}"
        # Nobody closes its file before all have mapped it, and all fail if one does.
        problems = [text for text in gather_objects(problem, group) if text is not None]
    finally:
        os.close(file)
    if problems:
        raise ValueError(f"group must be ranks that can share memory; {'; '.join(problems)}")
    return HostMemory(blocks, rank, is_shared=True)


def _map_peer(pid: int, file: int, num_bytes: int) -> HostBlock:
    opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return HostBlock(mmap.mmap(opened, _block_bytes(num_bytes)), num_bytes)
    finally:
        os.close(opened)


class DeviceMemory:
    """One rank's buffer on a GPU, and the addresses of its peers'."""

    def __init__(
        self,
        group: ProcessGroup | None,
        num_bytes: int,
        num_control_bytes: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        if group is None or dist.get_world_size(group) == 1:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.addresses = [self.tensor.data_ptr()]
        else:
            import torch.distributed._symmetric_memory as symm_mem

            require_reachable_peers(group, device)
            try:
                self.tensor = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
                self._handle = symm_mem.rendezvous(self.tensor, group)
            except RuntimeError as error:
                raise DeepMoEError(
                    f"rank {self.rank} could not exchange memory with the group's ranks: "
                    f"{explained(error)}"
                ) from error
            # buffer_ptrs are the ranks' allocations; a pool may have put the tensor further in.
            bases = [int(address) for address in self._handle.buffer_ptrs]
            offset = self.tensor.data_ptr() - bases[self.rank]
            offsets = gather_objects(offset, group)
            self.addresses = [base + start for base, start in zip(bases, offsets, strict=True)]
        self.tensor[:num_control_bytes].zero_()
        # Pinned host memory has the same address on the device.
        self._status_tensor = torch.zeros(
            ctypes.sizeof(WaitStatus), dtype=torch.uint8, pin_memory=True
        )
        self.status_address = self._status_tensor.data_ptr()
        self.status = WaitStatus.from_address(self.status_address)
        self.synchronize()

    def clear_status(self) -> None:
        self._status_tensor.zero_()

    def synchronize(self) -> None:
        """Wait for everything that was launched on the device."""
        torch.cuda.synchronize(self.device)
