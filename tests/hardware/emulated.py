"""Runs a case in the emulator."""

from __future__ import annotations

import numpy as np

from deep_moe.emulator import Machine

from .case import Case


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address as aligned as a GPU's allocator gives."""
    storage = np.zeros(array.nbytes + 256, np.uint8)
    offset = -storage.ctypes.data % 256
    copy = storage[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run(case: Case, arrays: list[np.ndarray], *, seed: int = 0) -> list[np.ndarray]:
    """The outputs, as the emulator with an H200's FP8 sums computes them."""
    memory = [aligned(array) for array in arrays]
    machine = Machine(seed=seed, checks=case.checks, hopper_fp8_sums=True)
    for index, array in enumerate(memory):
        machine.add_memory(0, array.ctypes.data, array.nbytes, f"array {index}")
    module = machine.load(case.ptx, name=case.name)
    args = [array.ctypes.data.to_bytes(8, "little") for array in memory]
    args += [map_.spec(memory[map_.array].ctypes.data).encode_emulated() for map_ in case.maps]
    machine.launch(
        module,
        "kernel",
        grid=case.grid,
        block=case.block,
        shared_bytes=case.shared_bytes,
        args=args,
    )
    machine.run()
    return [memory[index] for index in case.outputs]
