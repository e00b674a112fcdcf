"""Sizes beyond the hardware or the host: an error that names them, and a machine that goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from warpcheck import LaunchError, Machine, MemoryLimit, NamedArray, OutOfBounds

from .raw_ptx import HEADER, entry, run_body

COUNT = "atom.global.add.u32 %r1, [%p0], 1;"


def launch(machine: Machine, count: np.ndarray, body: str = COUNT, **options) -> None:
    geometry = {"grid": (1, 1, 1), "block": (1, 1, 1), "args": [count]}
    machine.launch(machine.load(entry(body, 1)), "kernel", **{**geometry, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (131072, 32768, 1)}, "4294967296 CTAs; the emulator counts at most 2147483647"),
        ({"grid": (2**32 + 1, 1, 1)}, r"grid\[0\] must be 0 to 4294967295, not 4294967297"),
        ({"grid": (2**31, 1, 1)}, "grid size 2147483648 in dimension 0; at most 2147483647"),
        ({"grid": (1, 65536, 1)}, "grid size 65536 in dimension 1; at most 65535"),
        ({"grid": (1, 1, -1)}, r"grid\[2\] must be 0 to 4294967295, not -1"),
        ({"grid": (0, 1, 1)}, "a size is zero"),
        ({"grid": (1, 1)}, r"grid must be three sizes \(x, y, z\), not \(1, 1\)"),
        ({"grid": (1.5, 1, 1)}, r"grid\[0\] must be a whole number, not 1.5"),
        ({"block": (2**32 + 1, 1, 1)}, r"block\[0\] must be 0 to 4294967295"),
        ({"block": (65536, 65536, 1)}, "block size 65536 in dimension 0; at most 1024"),
        ({"block": (1, 1, 65)}, "block size 65 in dimension 2; at most 64"),
        ({"block": (512, 4, 1)}, "2048 threads per CTA; at most 1024"),
        ({"cluster": (65536, 65536, 1), "grid": (65536, 65535, 1)}, "cluster size 65536"),
        ({"cluster": (16, 2, 1), "grid": (16, 2, 1)}, "32 CTAs per cluster; at most 16"),
        ({"shared_bytes": 2**32 + 16}, "shared_bytes must be 0 to 4294967295, not 4294967312"),
        ({"shared_bytes": 2**32 - 1}, "4294967295 bytes of shared memory per CTA; at most 232448"),
        ({"shared_bytes": -1}, "shared_bytes must be 0 to 4294967295, not -1"),
        ({"registers": 2**32 + 24}, "registers must be 1 to 255, not 4294967320"),
        ({"registers": 0}, "registers must be 1 to 255, not 0"),
        ({"registers": 255, "block": (1024, 1, 1)}, "255 registers per thread, 262144 per CTA"),
        ({"rank": 2**32}, "rank must be 0 to 65535, not 4294967296"),
        ({"rank": -1}, "rank must be 0 to 65535, not -1"),
        ({"roles": {"loader": [-1]}}, "a warp of role 'loader' must be 0 to 4294967295, not -1"),
        ({"shared_arrays": [NamedArray("a", -1, (4,))]}, "a: offset must be 0 to"),
        ({"shared_arrays": [NamedArray("a", 0, (2**64,))]}, "a: a size must be 0 to"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_and_not_queued(options: dict, message: str) -> None:
    count = np.zeros(1, np.uint32)
    machine = Machine()
    machine.add_array(count, "count")
    with pytest.raises(LaunchError, match=message):
        launch(machine, count, **options)
    launch(machine, count)
    machine.run()
    assert count[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4096, -1), "a: num_bytes must be 1 to"),
        ((0, 4096, 0), "a: num_bytes must be 1 to"),
        ((0, 4096, 2**64), "a: num_bytes must be 1 to"),
        ((0, 0, 16), "a: address must be 1 to"),
        ((0, -16, 16), "a: address must be 1 to"),
        ((0, 2**63 - 1, 2**63 - 1), "this process has no memory of 9223372036854775807 bytes"),
        ((0, 4096, 2**63 - 1), "this process has no memory of 9223372036854775807 bytes"),
        ((0, 4096, 16), "this process has no memory of 16 bytes at 0x1000"),
        ((-1, 4096, 16), "rank must be 0 to 65535, not -1"),
        ((2**32, 4096, 16), "rank must be 0 to 65535, not 4294967296"),
    ],
)
def test_memory_that_is_not_there_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Machine().add_memory(*arguments, "a")


def test_a_name_outside_of_its_memory_is_refused() -> None:
    data = np.zeros(64, np.uint8)
    for offset, shape in ((60, (8,)), (2**62, (4,)), (8, (2**32, 2**32))):
        with pytest.raises(LaunchError, match=r"'part' ends at byte [0-9]+ of memory region 'a'"):
            Machine().add_memory(
                0, data.ctypes.data, 64, "a", arrays=[NamedArray("part", offset, shape)]
            )


def test_a_tensor_whose_storage_is_gone_is_refused() -> None:
    tensor = torch.zeros(256, dtype=torch.int32)
    machine = Machine()
    module = machine.load(entry("", 1))
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="tensor: it needs 1024 bytes of storage and has 0"):
        machine.add_array(tensor, "tensor")
    with pytest.raises(LaunchError, match=r"argument 0 of kernel: .* has 0"):
        machine.launch(module, grid=(1, 1, 1), block=(1, 1, 1), args=[tensor])


RECURSION = ".func f();\n.func f() { call f; ret; }\n"


def test_recursion_ends_without_local_memory_too() -> None:
    with pytest.raises(OutOfBounds, match=r"stack overflow: the lane needs .* for [0-9]+ calls"):
        run_body("call f;", module=RECURSION)


@pytest.mark.parametrize(
    ("grid", "local", "message"),
    [
        ((2**31 - 1, 1, 1), 0, "launch of k: a grid of 2147483647 CTAs of 1 warps, .* GiB"),
        ((1000, 1, 1), 500_000, "1000 CTAs .* 500096 of local memory, needs .* GiB"),
    ],
)
def test_a_launch_that_needs_too_much_memory_names_it(
    grid: tuple[int, int, int], local: int, message: str
) -> None:
    text = f"{HEADER}.visible .entry k() {{ .local .b8 z[{local}]; ret; }}"
    machine = Machine(max_memory_bytes=2**30)
    module = machine.load(text)
    with pytest.raises(MemoryLimit, match=message):
        machine.launch(module, grid=grid, block=(32, 1, 1))
    machine.launch(module, grid=(1, 1, 1), block=(32, 1, 1))
    machine.run()


def test_a_module_that_needs_too_much_memory_names_the_variable() -> None:
    machine = Machine(max_memory_bytes=2**30)
    text = entry("mov.u64 %rd1, z;", 0, module=".global .b8 z[4294967296];\n")
    module = machine.load(text, name="m.ptx")
    with pytest.raises(MemoryLimit, match=r"module m.ptx: variable 'z', .* needs 4.00 GiB"):
        machine.launch(module, grid=(1, 1, 1), block=(1, 1, 1))


def test_a_run_that_needs_too_much_memory_says_where() -> None:
    # Copies that never complete, as this schedule has them, while the kernel issues more.
    body = """
    mov.u32 %r1, s;
    L: cp.async.ca.shared.global [%r1], [%p0], 16;
    bra L;
    """
    data = np.zeros(1024, np.uint32)
    machine = Machine(schedule="late_copies", max_memory_bytes=200 * 2**20)
    machine.add_array(data, "data")
    text = entry(body, 1, module=".shared .align 16 .b8 s[16];\n")
    module = machine.load(text)
    address = -data.ctypes.data % 16 + data.ctypes.data
    machine.launch(module, grid=(1, 1, 1), block=(32, 1, 1), args=[address])
    with pytest.raises(MemoryLimit, match=r"run: no more memory: .* may take 0.20") as caught:
        machine.run()
    assert "kernel kernel, rank 0, CTA 0, warp 0" in str(caught.value)
    module = machine.load(entry("", 0))
    machine.launch(module, grid=(1, 1, 1), block=(32, 1, 1))
    machine.run()


def test_a_module_with_a_large_alignment_has_it() -> None:
    out = np.zeros(1, np.uint64)
    run_body(
        "mov.u64 %rd1, z; st.global.u64 [%p0], %rd1;",
        out,
        module=".global .align 65536 .b8 z[4];\n",
        threads=1,
    )
    assert out[0] % 65536 == 0


def test_a_kernel_gets_no_more_memory_than_there_is() -> None:
    out = np.ones(2, np.uint64)
    machine = Machine(max_memory_bytes=2**28)
    machine.add_array(out, "out")
    module = ".extern .func (.param .b64 p) malloc(.param .b64 n);\n"
    body = "{ .param .b64 n; .param .b64 p;" + "".join(
        f"st.param.b64 [n], {size}; call (p), malloc, (n);"
        f"ld.param.b64 %rd1, [p]; st.global.u64 [%p0+{8 * i}], %rd1;"
        for i, size in enumerate((2**29, 2**20))
    )
    loaded = machine.load(entry(body + "}", 1, module=module))
    machine.launch(loaded, grid=(1, 1, 1), block=(1, 1, 1), args=[out])
    machine.run()
    assert out[0] == 0
    assert out[1] != 0
