"""Kernels written in PTX: one for lane-wise instructions, one for whole bodies."""

from __future__ import annotations

import numpy as np
from warpcheck import Machine

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def entry(body: str, num_pointers: int, directives: str = "", module: str = "") -> str:
    """A kernel `kernel` whose parameters are the pointers %p0, %p1, ..."""
    parameters = ", ".join(f".param .u64 q{i}" for i in range(num_pointers))
    loads = "".join(f"ld.param.u64 %p{i}, [q{i}];\n" for i in range(num_pointers))
    return (
        f"{HEADER}{module}.visible .entry kernel({parameters}) {directives} {{\n"
        f".reg .b64 %p<{num_pointers + 1}>; .reg .b32 %r<64>; .reg .b64 %rd<32>; "
        f".reg .b16 %h<16>; .reg .pred %c<16>;\n{loads}{body}\nret;\n}}\n"
    )


def run_body(
    body: str,
    *arrays: np.ndarray,
    ctas: int = 1,
    threads: int = 32,
    cluster: int = 1,
    shared_bytes: int = 0,
    seed: int = 0,
    directives: str = "",
    module: str = "",
    strict_tcgen05: bool = False,
) -> Machine:
    machine = Machine(seed=seed, strict_tcgen05=strict_tcgen05)
    for index, array in enumerate(arrays):
        machine.add_memory(0, array.ctypes.data, array.nbytes, f"array {index}")
    loaded = machine.load(entry(body, len(arrays), directives, module), name="test.ptx")
    machine.launch(
        loaded,
        "kernel",
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
        shared_bytes=shared_bytes,
        args=[array.ctypes.data.to_bytes(8, "little") for array in arrays],
    )
    machine.run()
    return machine


def run_lanes(instruction: str, out_dtype: type, *inputs: np.ndarray) -> np.ndarray:
    """`instruction` for every element: $d is the result, $a, $b, $c the inputs' elements.

    A predicate result is selected with `selp` by the instruction text itself; text may hold
    several instructions.
    """
    num = len(inputs[0])
    out = np.zeros(num, out_dtype)
    lines = ["mov.u32 %r0, %tid.x;"]
    names = {}

    def register(name: str, num_bytes: int) -> str:
        names[name] = f"%{name}"
        return f".reg .b{max(16, 8 * num_bytes)} %{name};"

    lines.append(register("d", out.itemsize))
    for index, (name, values) in enumerate(zip("abc", inputs, strict=False)):
        size = values.itemsize
        lines.append(register(name, size))
        lines.append(f"mad.wide.u32 %rd{index}, %r0, {size}, %p{index + 1};")
        lines.append(f"ld.global.b{8 * size} %{name}, [%rd{index}];")
    for name in names:
        instruction = instruction.replace(f"${name}", f"%{name}")
    lines.append(instruction)
    lines.append(f"mad.wide.u32 %rd9, %r0, {out.itemsize}, %p0;")
    lines.append(f"st.global.b{8 * out.itemsize} [%rd9], %d;")
    arrays = [np.ascontiguousarray(values) for values in inputs]
    run_body("\n".join(lines), out, *arrays, threads=num)
    return out
