"""cp.async.bulk.tensor.im2col_no_offs: stores of pixels, also reductions."""

from __future__ import annotations

import numpy as np

from deep_moe.emulator.tensor_map import DataType, Swizzle

from ..case import Family
from .bulk import head
from .im2col import DIMS, Im2colMap, strides
from .tensor import coordinates, random_bytes

FAMILY = Family("im2col_stores")
T = DataType


def store(rank: int, lower: int, upper: int, step: int, operation: str = "") -> None:
    name = f"store{operation} {rank}D from {lower} to {upper} by {step}"
    num, region, dims = rank - 2, 1024, DIMS[rank]
    map_ = Im2colMap(0, T.UINT32, dims, strides(dims, 4), (8, 20), Swizzle.NONE,
                     (1, *((step,) * num), 1), lower_corner=(lower,) * num,
                     upper_corner=(upper,) * num)  # fmt: skip
    last = tuple(dim - 1 + min(upper, 0) for dim in dims[1:-1])
    body = head(region).replace("add.u64 %rd1, %rd1, %p0;", "add.u64 %rd1, %rd1, %p1;")
    first = max(lower, 0)
    places = ((8, *((first,) * num), 0), (24, *last, 1), (0, *((first + 1,) * num), dims[-1] - 1))
    for place in places:
        body += "".join(
            f"ld.global.u32 %r6, [%rd1+{at}]; st.shared.u32 [%r5+{at}], %r6;"
            for at in range(0, region, 512)
        )
        body += (
            "fence.proxy.async.shared::cta; bar.sync 0;"
            f"@%c1 cp{'.reduce' if operation else ''}.async.bulk.tensor.{rank}d.global"
            f".shared::cta{operation}.im2col_no_offs.bulk_group [%m0, {coordinates(place)}],"
            " [%r2]; @%c1 cp.async.bulk.commit_group; @%c1 cp.async.bulk.wait_group 0;"
            f"bar.sync 0; add.u64 %rd1, %rd1, {region};\n"
        )
    FAMILY.add(
        name,
        body,
        lambda: [np.full(1 << 17, 0x5A, "u1"), random_bytes(name, 3 * 1024)],
        2,
        maps=(map_,),
        block=(128, 1, 1),
        shared_bytes=1024 + 16,
    )


for rank in (3, 4):
    store(rank, 0, 0, 1)
store(3, 0, 0, 1, ".add")
store(3, 0, -1, 1)
store(3, 1, 0, 1)
store(3, 0, 0, 2)
store(4, 0, 0, 1, ".add")
