"""cp.async.bulk.tensor in im2col mode: pixels that a filter visits, of 3 to 5 dimensions, with
corners, offsets and steps, over the edges and on to the next image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deep_moe.emulator.tensor_map import DataType, Im2colMapSpec, OutOfBounds, Swizzle

from ..case import Family, TensorMap
from .bulk import dump, fill, head, wait
from .tensor import coordinates, random_bytes

FAMILY = Family("im2col")


@dataclass(frozen=True)
class Im2colMap(TensorMap):
    """See Im2colMapSpec."""

    lower_corner: tuple[int, ...] = ()
    upper_corner: tuple[int, ...] = ()

    def spec(self, address: int) -> Im2colMapSpec:
        return Im2colMapSpec(
            self.data_type,
            address + self.offset,
            self.dims,
            self.strides,
            self.box,
            self.swizzle,
            self.element_strides,
            oob_fill=self.oob_fill,
            lower_corner=self.lower_corner,
            upper_corner=self.upper_corner,
        )


T = DataType
Places = list[tuple[tuple[int, ...], tuple[int, ...]]]  # coordinates, offsets


def load(name: str, map_: Im2colMap, places: Places, *, prefetch: bool = False) -> None:
    """The pixels at each of `places`, loaded over a pattern; all of shared memory is compared."""
    rank = len(map_.dims)
    num_bytes = map_.box[0] * map_.data_type.bits // 8 * map_.box[1]
    region = -(-num_bytes // 1024) * 1024 + 1024
    body = head(region)
    registers = "{" + ", ".join(f"%h{1 + i}" for i in range(rank - 2)) + "}"
    for index, (place, offsets) in enumerate(places):
        body += fill(region, str(0xA5A5A500 + index)) + f"@!%c1 bra WAIT{index};"
        body += "".join(f"mov.u16 %h{1 + i}, {offset};" for i, offset in enumerate(offsets))
        body += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {num_bytes};"
        if prefetch:
            body += f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.im2col [%m0,"
            body += f" {coordinates(place)}], {registers};"
        body += (
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col"
            f".mbarrier::complete_tx::bytes [%r2], [%m0, {coordinates(place)}], [%r3],"
            f" {registers};"
        )
        body += wait(f"WAIT{index}", index % 2) + dump(region)
        body += f"add.u64 %rd1, %rd1, {region}; bar.sync 0;\n"

    def arrays():
        return [np.zeros((len(places), region), "u1"), random_bytes(name, 1 << 17)]

    FAMILY.add(name, body, arrays, 2, maps=(map_,), block=(128, 1, 1), shared_bytes=region + 16,
               rows=tuple(map(str, places)))  # fmt: skip


# ---- images of 9 x 14, as in PTX's examples

DIMS = {3: (32, 9, 5), 4: (32, 9, 14, 4), 5: (32, 6, 5, 4, 3)}


def strides(dims: tuple[int, ...], size: int) -> tuple[int, ...]:
    found = [dims[0] * size]
    for dim in dims[1:-1]:
        found.append(found[-1] * dim)
    return tuple(found)


CORNERS = {"around": (-1, -1), "within": (0, -2), "before": (-3, -3), "after": (2, 3)}
for rank, dims in DIMS.items():
    for corner, (lower, upper) in CORNERS.items():
        num = rank - 2
        first = (lower,) * num
        last = tuple(dim - 1 + upper for dim in dims[1:-1])
        middle = tuple(min(lower + 2, high) for high in last)
        map_ = Im2colMap(1, T.UINT16, dims, strides(dims, 2), (16, 40), Swizzle.NONE,
                         lower_corner=(lower,) * num, upper_corner=(upper,) * num)  # fmt: skip
        places: Places = [
            ((0, *first, 0), (0,) * num),
            ((8, *middle, 1), (2,) * num),
            ((16, *last, 0), (1, 0, 2)[:num]),
            ((24, *first, dims[-1] - 1), (0, 2, 1)[:num]),
            ((-8, *middle, -1), (1,) * num),
            ((0, *first, dims[-1]), (0,) * num),
        ]
        load(f"{rank}D {corner}", map_, places)
for swizzle, channels in ((Swizzle.B32, 8), (Swizzle.B64, 16), (Swizzle.B128, 32)):
    map_ = Im2colMap(1, T.UINT32, DIMS[4], strides(DIMS[4], 4), (channels, 64), swizzle,
                     lower_corner=(-1, -1), upper_corner=(-1, -1))  # fmt: skip
    load(f"swizzle {swizzle.name}", map_, [((0, -1, -1, 0), (0, 0)), ((0, 7, 12, 2), (2, 1))])
for steps in ((1, 2, 2, 1), (1, 3, 1, 1), (1, 1, 3, 1), (1, 2, 1, 2)):
    map_ = Im2colMap(1, T.UINT16, DIMS[4], strides(DIMS[4], 2), (16, 32), Swizzle.NONE, steps,
                     lower_corner=(-1, -1), upper_corner=(-1, -1))  # fmt: skip
    load(f"steps {steps}", map_, [((0, -1, -1, 0), (1, 1)), ((0, 4, 7, 1), (0, 2))])
map_ = Im2colMap(1, T.FLOAT16, DIMS[4], strides(DIMS[4], 2), (24, 48), oob_fill=OutOfBounds.NAN,
                 lower_corner=(-1, 0), upper_corner=(1, -1))  # fmt: skip
load("NaN around", map_, [((16, -1, 0, 0), (0, 0)), ((0, 9, 12, 3), (255, 3))], prefetch=True)
map_ = Im2colMap(1, T.UINT8, (64, 9, 5), (64, 576), (16, 300), lower_corner=(0,), upper_corner=(0,))
load("300 pixels", map_, [((16, 0, 0), (0,)), ((0, 3, 1), (0,))])
