"""A case: a small PTX kernel, what it is given, and which of its arrays are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deep_moe.emulator.tensor_map import DataType, OutOfBounds, Swizzle, TensorMapSpec

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %c<32>; .reg .b16 %h<64>; .reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .b128 %rq<4>;\n"
)
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Bound:
    """How far two floating-point results may be apart; NaN and infinity must agree.

    ulps: units in the last place. absolute: for results where that is the larger one. packed:
    numbers in one element of the output.
    """

    ulps: int = 0
    absolute: float = 0.0
    packed: int = 1


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of array `array` from its byte `offset` on; see TensorMapSpec."""

    array: int
    data_type: DataType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    element_strides: tuple[int, ...] = ()
    oob_fill: OutOfBounds = OutOfBounds.ZEROS
    offset: int = 0

    def spec(self, address: int) -> TensorMapSpec:
        return TensorMapSpec(
            self.data_type,
            address + self.offset,
            self.dims,
            self.strides,
            self.box,
            self.swizzle,
            self.element_strides,
            oob_fill=self.oob_fill,
        )


@dataclass(frozen=True)
class Case:
    """One launch of the kernel `kernel` in `ptx`.

    make_arrays: the arrays before the launch, each a parameter (its address); tensor maps follow as
    parameters. outputs: which arrays are compared afterwards. rows: what the rows of the first
    output are, for messages. bound: None for bit equality. checks: run the emulator with its
    checks; off where the case does on purpose what they report.
    """

    name: str
    ptx: str
    make_arrays: Callable[[], list[np.ndarray]]
    outputs: tuple[int, ...] = (0,)
    maps: tuple[TensorMap, ...] = ()
    grid: Size = (1, 1, 1)
    block: Size = (32, 1, 1)
    shared_bytes: int = 0
    rows: tuple[str, ...] = ()
    bound: Bound | None = None
    checks: bool = True

    @property
    def family(self) -> str:
        return self.name.split("/")[0]

    def digest(self, arrays: Sequence[np.ndarray]) -> str:
        """Of all that the result depends on: a recording with another digest is stale."""
        ptx = " ".join(self.ptx.split())
        text = repr((ptx, self.outputs, self.maps, self.grid, self.block, self.shared_bytes))
        whole = hashlib.sha256(text.encode())
        for array in arrays:
            whole.update(repr((array.dtype.str, array.shape)).encode())
            whole.update(array.tobytes())
        return whole.hexdigest()[:16]


@dataclass
class Family:
    """The cases of one file, in the order in which they are added."""

    name: str
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        name: str,
        body: str,
        make_arrays: Callable[[], list[np.ndarray]],
        num_arrays: int,
        *,
        outputs: tuple[int, ...] = (0,),
        maps: tuple[TensorMap, ...] = (),
        grid: Size = (1, 1, 1),
        block: Size = (32, 1, 1),
        cluster: Size | None = None,
        shared_bytes: int = 0,
        directives: str = "",
        module: str = "",
        rows: tuple[str, ...] = (),
        bound: Bound | None = None,
        checks: bool = True,
    ) -> None:
        """A kernel with `body`, which finds the arrays' addresses in %p0, %p1, ..., those of the
        tensor maps in %m0, ..., and dynamic shared memory at `smem`."""
        parameters = [f".param .u64 q{i}" for i in range(num_arrays)]
        parameters += [f".param .align 64 .b8 t{i}[128]" for i in range(len(maps))]
        lines = [f".reg .b64 %p<{num_arrays + 1}>; .reg .b64 %m<{len(maps) + 1}>;"]
        lines += [f"ld.param.u64 %p{i}, [q{i}];" for i in range(num_arrays)]
        lines += [f"mov.b64 %m{i}, t{i}; cvta.param.u64 %m{i}, %m{i};" for i in range(len(maps))]
        limits = ".reqntid " + ", ".join(map(str, block))
        if cluster:
            limits += " .explicitcluster .reqnctapercluster " + ", ".join(map(str, cluster))
        shared = ".extern .shared .align 1024 .b8 smem[];\n" if shared_bytes else ""
        ptx = (
            f"{HEADER}{shared}{module}\n.visible .entry kernel({', '.join(parameters)})\n"
            f"{limits} {directives}\n{{\n{REGISTERS}" + "\n".join(lines) + f"\n{body}\nret;\n}}\n"
        )
        full = f"{self.name}/{name}"
        if any(case.name == full for case in self.cases):
            raise ValueError(f"two cases are named {full}")
        self.cases.append(
            Case(
                full,
                ptx,
                make_arrays,
                outputs,
                maps,
                grid,
                block,
                shared_bytes,
                rows,
                bound,
                checks,
            )
        )
