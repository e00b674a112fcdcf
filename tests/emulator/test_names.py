"""Findings speak of arrays, variables and roles where the caller has named them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from warpcheck import (
    EmulatorError,
    KernelTrap,
    LaunchError,
    Machine,
    NamedArray,
    OutOfBounds,
    RaceDetected,
    Uninitialized,
)

from .device import pack_arguments, ptx_of
from .raw_ptx import entry


def run_named(source: str, array: np.ndarray, threads: int = 128) -> None:
    machine = Machine()
    machine.add_memory(
        0,
        array.ctypes.data,
        array.nbytes,
        "buffer",
        arrays=[NamedArray("tokens", 64, (4, 8), 2), NamedArray("flag", 16, (), 4)],
    )
    machine.launch(
        machine.load(ptx_of(source, "sm_100a"), name="test kernel"),
        "kernel",
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        shared_bytes=1024,
        args=pack_arguments((array,)),
        roles={"loader": [0], "math": range(1, 4)},
        shared_arrays=[NamedArray("scales", 256, (3, 16), 4)],
    )
    machine.run()


@pytest.mark.parametrize(
    ("index", "place"),
    [
        (32 + 8 + 3, r"tokens\[1, 3\] \(byte 86 of 'buffer'\)"),
        (8, r"flag \(byte 16 of 'buffer'\)"),
        (9, r"flag\+2 \(byte 18 of 'buffer'\)"),
        (0, r"data race at byte 0 of 'buffer'"),  # in front of all arrays
        (12, r"data race at byte 24 of 'buffer'"),  # between them
        (64, r"data race at byte 128 of 'buffer'"),  # behind
    ],
)
def test_a_race_names_element_and_roles(index: int, place: str) -> None:
    source = f"KERNEL()(u16* data) {{ if (threadIdx.x % 64 == 0) data[{index}] = threadIdx.x; }}"
    with pytest.raises(RaceDetected, match=place) as caught:
        run_named(source, np.zeros(256, np.uint16))
    text = str(caught.value)
    assert "CTA 0, loader (warp 0), lane 0\n" in text
    assert "CTA 0, math warp 1 (warp 2), lane 0\n" in text


def test_shared_arrays_and_variables_have_names() -> None:
    read = "KERNEL()(u32* data) { __shared__ u32 counts[4]; %s data[0] = %s; }"
    with pytest.raises(Uninitialized, match=r"scales\[1, 2\] \(shared offset 0x"):
        run_named(read % ("", "((u32*)dynamic_shared)[64 + 18]"), np.zeros(64, np.uint32), 1)
    source = read % ("if (data[1]) counts[data[2]] = 1;", "counts[1]")
    with pytest.raises(Uninitialized, match=r"counts\+4 \(shared offset 0x"):
        run_named(source, np.zeros(64, np.uint32), 1)


# Templates of libraries have names of thousands of characters.
@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [
        ("library::sum", ("Lj32E", "Lj7E"), "library::sum<32u, 7u>"),
        ("library::sum", ("Lj32E",) * 30, "library::sum<32u, 32u, 32u"),
        ("library::sum", ("Lj32E",) * 300, "library::sum<...>"),
        ("sum", (), "sum"),
    ],
)
def test_a_mangled_kernel_is_named_as_in_its_source(
    name: str, arguments: tuple[str, ...], shown: str
) -> None:
    nested = "".join(f"{len(part)}{part}" for part in name.split("::"))
    mangled = f"_ZN{nested}I{''.join(arguments)}EEvPvi" if arguments else f"_Z{nested}Pvi"
    text = entry("trap;", 0).replace(".entry kernel(", f".entry {mangled}(")
    machine = Machine()
    machine.launch(machine.load(text), mangled, grid=(1, 1, 1), block=(32, 1, 1))
    with pytest.raises(KernelTrap, match=f"kernel {re.escape(shown)}") as caught:
        machine.run()
    assert "rank 0, CTA 0, warp 0" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_array_must_lie_inside_its_region() -> None:
    array = np.zeros(16, np.uint8)
    with pytest.raises(LaunchError, match="'tail' ends at byte 17 of memory region 'small'"):
        Machine().add_memory(
            0, array.ctypes.data, 16, "small", arrays=[NamedArray("tail", 9, (2,), 4)]
        )


def test_inlined_code_is_shown_with_all_its_places() -> None:
    source = """
__device__ __forceinline__ void write(u32* data) { data[1 << 20] = 1; }
KERNEL()(u32* data) { write(data); }
"""
    with pytest.raises(OutOfBounds, match=r"source /kernel\.cu:\d+, inlined at /kernel\.cu:"):
        run_named(source, np.zeros(64, np.uint32), 1)


def test_long_lists_of_registers_are_cut() -> None:
    names = ", ".join(f"%f{i}" for i in range(64))
    ptx = entry(
        f"""
        .reg .b32 %f<64>;
        wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {{{names}}}, %rd0, %rd1, 1, 1, 1, 0, 0;
        """,
        0,
        ".maxntid 32",
    ).replace("sm_100a", "sm_90a")
    machine = Machine()
    machine.launch(machine.load(ptx), "kernel", grid=(1, 1, 1), block=(32, 1, 1))
    with pytest.raises(EmulatorError, match=r"\{%f0, %f1, \.\.\. \(64 in all\)\}, %rd0"):
        machine.run()
