"""What a launch takes: kernels by name, arguments by type and size."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from warpcheck import LaunchError, Machine, OutOfBounds

from .device import ptx_of
from .raw_ptx import HEADER

SOURCE = """
struct Pair { u32 first; u64 second; };
KERNEL()(u64* out, int a, float b, double c, Pair pair, u8 d, const u32* in) {
    out[0] = a; out[1] = b * 2; out[2] = c * 2; out[3] = pair.first; out[4] = pair.second;
    out[5] = d; out[6] = in[1];
}
"""
PAIR = (7).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little")


class Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint32), ("second", ctypes.c_uint64)]


def run(*args: Any, kernel: str | None = "kernel") -> np.ndarray:
    out, data = np.zeros(7, np.int64), torch.tensor([3, 5], dtype=torch.int32)
    machine = Machine()
    machine.add_array(out, "out")
    machine.add_array(data, "data", writable=False)
    machine.launch(
        machine.load(ptx_of(SOURCE, "sm_90a"), name="test kernel"),
        kernel,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        args=[out, *args, data],
    )
    machine.run()
    return out


@pytest.mark.parametrize("pair", [PAIR, Pair(7, 1 << 40), bytearray(PAIR)])
def test_arguments_are_numbers_arrays_and_bytes(pair: Any) -> None:
    expected = [-3, 5, 9, 7, 1 << 40, 255, 5]
    assert run(-3, 2.5, 4.5, pair, 255).tolist() == expected
    assert run(np.int64(-3), np.float32(2.5), np.float64(4.5), pair, np.uint8(255)).tolist() == (
        expected
    )
    assert run((-3).to_bytes(4, "little", signed=True), 2.5, 4.5, pair, True)[5] == 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((1.5, 2.5, 4.5, PAIR, 1), "argument 1 of kernel: 1.5 for an integer of 4 bytes"),
        ((1 << 40, 2.5, 4.5, PAIR, 1), "argument 1 of kernel: int too big"),
        ((1, 2.5, 4.5, PAIR, -129), "argument 5 of kernel: int too big"),
        ((1, 2.5, 4.5, PAIR[:8], 1), "argument 4 of kernel: the parameter has 16 bytes, not 8"),
        ((1, 2.5, 4.5, 1, 1), "argument 4 of kernel: a number for 16 bytes"),
        ((1, np.zeros(3), 4.5, PAIR, 1), "argument 2 of kernel: the parameter has 4 bytes, not 8"),
        ((1, 2.5), "kernel takes 7 arguments, not 4"),
    ],
)
def test_what_does_not_fit_a_parameter_is_named(args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        run(*args)


def test_memory_that_is_only_read_cannot_be_written() -> None:
    out = np.zeros(7, np.int64)
    machine = Machine()
    machine.add_array(out, "out", writable=False)
    module = machine.load(ptx_of("KERNEL()(u64* out) { out[0] = 1; }", "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(1, 1, 1), args=[out])
    with pytest.raises(OutOfBounds, match="out"):
        machine.run()


@pytest.mark.parametrize("array", [np.zeros((4, 4))[:, ::2], torch.zeros(4, 4).T])
def test_only_contiguous_arrays_are_memory(array: Any) -> None:
    with pytest.raises(ValueError, match="only contiguous arrays"):
        Machine().add_array(array, "array")


ENTRIES = "".join(
    f".visible .entry {name}() {{ ret; }}\n"
    for name in (
        "_ZN7library4sortILj4EEEvv",
        "_ZN7library4sortILj8EEEvv",
        "_ZN7library3sumEv",
        "go",
    )
)


def test_kernels_are_found_by_their_names() -> None:
    module = Machine().load(HEADER + ENTRIES, name="several")
    assert module.kernels["_ZN7library4sortILj4EEEvv"] == "library::sort"
    for name in ("library::sum", "sum", "_ZN7library3sumEv"):
        assert module.find_kernel(name) == "_ZN7library3sumEv"
    assert module.find_kernel("go") == "go"
    with pytest.raises(LaunchError, match=r"several has 2 kernels 'sort'; it has\n  _ZN7library"):
        module.find_kernel("sort")
    with pytest.raises(LaunchError, match="more than one kernel"):
        module.find_kernel(None)
    for name in ("um", "brary::sum", "library"):
        with pytest.raises(LaunchError, match=f"no kernel '{name}'"):
            module.find_kernel(name)


def test_the_only_kernel_needs_no_name() -> None:
    assert run(1, 2.5, 4.5, PAIR, 1, kernel=None)[0] == 1
