"""cp.async.bulk.tensor: boxes of tensors of 1 to 5 dimensions, every element type and swizzle,
inside and over the edges; stores and reductions."""

from __future__ import annotations

import numpy as np

from deep_moe.emulator.tensor_map import DataType, OutOfBounds, Swizzle

from ..case import Family, TensorMap
from ..values import Source, operands
from .bulk import CLUSTER_SYNC, dump, fill, head, wait

FAMILY = Family("tensor")
T = DataType


def random_bytes(name: str, num: int) -> np.ndarray:
    return Source(name).words(num, 8)


def coordinates(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, at)) + "}"


def load(
    name: str,
    map_: TensorMap,
    places: list[tuple[int, ...]],
    region: int,
    *,
    offset: int = 0,
    make=None,
    space: str = "shared::cluster",
    hint: str = "",
) -> None:
    """The box at each of `places`, loaded over a pattern; all of shared memory is compared."""
    rank = len(map_.dims)
    body = head(region)
    spec = map_.spec(0)
    size = spec.data_type.bits
    count = 1
    for box, step in zip(spec.box, (1, *spec.element_strides[1:]), strict=True):
        count *= -(-box // step)
    for index, place in enumerate(places):
        body += fill(region, str(0xA5A5A500 + index)) + f"@!%c1 bra WAIT{index};"
        body += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {count * size // 8};"
        body += (
            f"cp.async.bulk.tensor.{rank}d.{space}.global{hint}.mbarrier::complete_tx::bytes"
            f" [%r2+{offset}], [%m0, {coordinates(place)}], [%r3];"
        )
        body += wait(f"WAIT{index}", index % 2) + dump(region)
        body += f"add.u64 %rd1, %rd1, {region}; bar.sync 0;\n"

    def arrays():
        data = make() if make else random_bytes(name, 1 << 16)
        return [np.zeros((len(places), region), "u1"), data]

    FAMILY.add(name, body, arrays, 2, maps=(map_,), block=(128, 1, 1), shared_bytes=region + 16,
               rows=tuple(map(str, places)))  # fmt: skip


# ---- two dimensions: every element type with every swizzle

SPANS = {Swizzle.NONE: 64, Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128}
TYPES = (
    T.UINT8,
    T.UINT16,
    T.UINT32,
    T.INT32,
    T.UINT64,
    T.INT64,
    T.FLOAT16,
    T.FLOAT32,
    T.FLOAT64,
    T.BFLOAT16,
)
for swizzle, row_bytes in SPANS.items():
    for data_type in TYPES:
        size = data_type.bits // 8
        width, height = 200 // size + 3, 21
        box = (row_bytes // size, 16)
        map_ = TensorMap(1, data_type, (width, height), (256,), box, swizzle)
        # The innermost coordinate: whole 16 bytes, or the hardware refuses the copy.
        x = 16 // size
        edge = width // x * x
        places = [
            (0, 0), (x, 3), (2 * x, 8), (edge - box[0] // 2, 2), (edge, 20), (-x, -3), (-2 * x, 5),
            (-box[0], 0), (edge + x, 0), (0, -16), (x, height), (3 * x, 14),
        ]  # fmt: skip
        load(f"{data_type.name} swizzle {swizzle.name}", map_, places, 2048)

# Rows shorter than the span; destinations that are not aligned to the pattern; the other spellings.
for swizzle, span in ((Swizzle.B32, 32), (Swizzle.B64, 64), (Swizzle.B128, 128)):
    for row_bytes in (16, 32, 64):
        if row_bytes < span:
            map_ = TensorMap(1, T.UINT8, (240, 30), (256,), (row_bytes, 12), swizzle)
            load(
                f"rows of {row_bytes} bytes, swizzle {swizzle.name}",
                map_,
                [(0, 0), (32, 5), (224, 25)],
                2048,
            )
    for offset in (128, 384, 896):
        map_ = TensorMap(1, T.UINT16, (120, 30), (256,), (span // 2, 8), swizzle)
        load(
            f"destination at {offset}, swizzle {swizzle.name}",
            map_,
            [(0, 0), (16, 27)],
            3072,
            offset=offset,
        )
load("destination .shared::cta", TensorMap(1, T.UINT32, (60, 30), (256,), (32, 8)),
     [(0, 0), (40, 28)], 1024, space="shared::cta")  # fmt: skip
load(
    "spelled .tile", TensorMap(1, T.UINT32, (60, 30), (256,), (32, 8)), [(4, 4)], 1024, hint=".tile"
)

# ---- other ranks, element strides, fill

load("1D", TensorMap(1, T.FLOAT32, (1000,), (), (128,)), [(0,), (900,), (-4,), (1000,), (36,)], 512)
load("1D, 256 elements", TensorMap(1, T.UINT8, (5000,), (), (256,)), [(0,), (4896,), (-96,)], 512)
for rank in (3, 4, 5):
    dims = (20, 7, 5, 4, 3)[:rank]
    strides = (64, 512, 2560, 10240)[: rank - 1]
    box = (8, 4, 3, 2, 2)[:rank]
    inside = (8, 1, 1, 1, 0)[:rank]
    places = [(0,) * rank, inside, (16, *(d - 2 for d in dims[1:])), (-8, *(-1 for _ in dims[1:])),
              (16, 5, 4, 3, 2)[:rank], (-8, 2, -1, 2, -1)[:rank]]  # fmt: skip
    load(f"{rank}D", TensorMap(1, T.UINT16, dims, strides, box), places, 2048)
    wide = TensorMap(1, T.UINT32, dims, tuple(2 * s for s in strides), box, Swizzle.B64)
    load(f"{rank}D, swizzle B64", wide, places, 4096, make=lambda: random_bytes("wide", 1 << 17))
for steps in ((1, 2), (1, 3)):
    map_ = TensorMap(1, T.UINT16, (100, 40), (256,), (32, 16), Swizzle.NONE, steps)
    load(f"rows by {steps[1]}", map_, [(0, 0), (88, 30), (-8, -4)], 1024)
map_ = TensorMap(1, T.UINT16, (40, 9, 8), (128, 1280), (16, 8, 6), Swizzle.B32, (1, 2, 3))
load("3D, elements by 1, 2, 3", map_, [(0, 0, 0), (24, 3, 4), (-8, -1, -3)], 1024)
for data_type in (T.FLOAT16, T.BFLOAT16, T.FLOAT32, T.FLOAT64):
    size = data_type.bits // 8
    map_ = TensorMap(1, data_type, (50, 20), (512,), (64 // size, 8), oob_fill=OutOfBounds.NAN)
    load(f"NaN around {data_type.name}", map_, [(0, 0), (48, 17), (-8, -2), (0, 20)], 512)


def _floats() -> np.ndarray:
    return np.resize(operands("tensor floats", ("f32",), 4096)[0], 1 << 14).view("u1")


# Types that change the elements on their way.
for data_type in (T.FLOAT32_FTZ, T.TFLOAT32, T.TFLOAT32_FTZ):
    map_ = TensorMap(1, data_type, (64, 60), (256,), (32, 32))
    load(f"{data_type.name}", map_, [(0, 0), (32, 20), (40, 50)], 4096, make=_floats)
    map_ = TensorMap(1, data_type, (50, 20), (256,), (16, 8), oob_fill=OutOfBounds.NAN)
    load(f"NaN around {data_type.name}", map_, [(48, 17)], 512, make=_floats)


def _ties() -> np.ndarray:
    """Floats half-way between two TF32 numbers, with even and odd ones below."""
    codes = Source("tensor ties").words(1 << 12) & 0xFFFFE000 | 0x1000
    return codes.astype("<u4").view("u1")


for data_type in (T.TFLOAT32, T.TFLOAT32_FTZ):
    map_ = TensorMap(1, data_type, (64, 60), (256,), (32, 32))
    load(f"{data_type.name} ties", map_, [(0, 0), (32, 20)], 4096, make=_ties)

# ---- multicast: each CTA of a cluster brings a quarter to all

REGION = 4096
map_ = TensorMap(1, T.UINT16, (120, 60), (256,), (64, 8), Swizzle.B128)
body = head(REGION) + fill(REGION) + "mov.u32 %r10, %cluster_ctarank;"
body += f"@%c1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {REGION};" + CLUSTER_SYNC
body += (
    "@!%c1 bra WAIT; mov.u16 %h1, 15; mad.lo.u32 %r11, %r10, 1024, %r2; mul.lo.u32 %r12, %r10, 9;"
    "mul.lo.u32 %r13, %r10, 24; "
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r11], [%m0, {%r13, %r12}], [%r3], %h1;"
)
body += wait("WAIT", 0) + dump(REGION) + CLUSTER_SYNC
FAMILY.add("multicast", body,
           lambda: [np.zeros((4, REGION), "u1"), random_bytes("tensor multicast", 1 << 14)], 2,
           maps=(map_,), block=(128, 1, 1), grid=(4, 1, 1), cluster=(4, 1, 1),
           shared_bytes=REGION + 16)  # fmt: skip


# ---- stores and reductions: array 0 is the tensor


def store(
    name: str,
    map_: TensorMap,
    places: list[tuple[int, ...]],
    region: int,
    make,
    *,
    operation: str = "",
) -> None:
    """Boxes of shared memory (array 1, one after another) to `places`, in order."""
    rank = len(map_.dims)
    body = head(region).replace("add.u64 %rd1, %rd1, %p0;", "add.u64 %rd1, %rd1, %p1;")
    body += "prefetch.tensormap [%m0];"
    for place in places:
        body += "".join(
            f"ld.global.u32 %r6, [%rd1+{at}]; st.shared.u32 [%r5+{at}], %r6;"
            for at in range(0, region, 512)
        )
        stem = "cp.reduce" if operation else "cp"
        body += (
            "fence.proxy.async.shared::cta; bar.sync 0;"
            f"@%c1 {stem}.async.bulk.tensor.{rank}d.global.shared::cta{operation}.bulk_group"
            f" [%m0, {coordinates(place)}], [%r2];"
            "@%c1 cp.async.bulk.commit_group; @%c1 cp.async.bulk.wait_group 0; bar.sync 0;"
            f"add.u64 %rd1, %rd1, {region};\n"
        )
    FAMILY.add(name, body, make, 2, maps=(map_,), block=(128, 1, 1), shared_bytes=region + 16)


def store_arrays(name: str, num_places: int, region: int):
    return lambda: [np.full(1 << 14, 0x5A, "u1"), random_bytes(name, num_places * region)]


for swizzle, row_bytes in SPANS.items():
    for data_type in (T.UINT8, T.BFLOAT16, T.FLOAT32, T.INT64):
        size = data_type.bits // 8
        width, height = 208 // size, 50
        map_ = TensorMap(0, data_type, (width, height), (256,), (row_bytes // size, 16), swizzle)
        step = 16 // size
        places = [(0, 0), (step, 18), (width - row_bytes // size // 2, 36), (3 * step, 44)]
        name = f"store {data_type.name} swizzle {swizzle.name}"
        store(name, map_, places, 2048, store_arrays(name, len(places), 2048))
# A last dimension that is no multiple of 16 bytes, and coordinates that are none.
map_ = TensorMap(0, T.UINT8, (100, 50), (256,), (64, 16))
store(
    "store over a ragged edge",
    map_,
    [(64, 0), (16, 20), (96, 40)],
    1024,
    store_arrays("ragged", 3, 1024),
)
map_ = TensorMap(0, T.FLOAT16, (101, 50), (256,), (32, 16))
store(
    "store over an odd edge", map_, [(8, 0), (40, 20), (88, 30)], 1024, store_arrays("odd", 3, 1024)
)
for rank in (1, 3, 4, 5):
    dims = (24, 7, 5, 4, 3)[:rank]
    strides = (64, 512, 2560, 10240)[: rank - 1]
    box = (8, 4, 3, 2, 2)[:rank]
    places = [(0,) * rank, (8, 1, 1, 1, 0)[:rank], tuple(max(d - 2, 0) & ~7 if not i else d - 2
              for i, d in enumerate(dims))]  # fmt: skip
    name = f"store {rank}D"
    map_ = TensorMap(0, T.UINT16, dims, strides, box)
    store(
        name,
        map_,
        places,
        1024,
        lambda name=name: [np.full(1 << 15, 0x5A, "u1"), random_bytes(name, 3 * 1024)],
    )
map_ = TensorMap(0, T.UINT16, (64, 40), (256,), (32, 16), Swizzle.NONE, (1, 2))
store("store rows by 2", map_, [(0, 0), (32, 30)], 1024, store_arrays("by 2", 2, 1024))

map_ = TensorMap(0, T.FLOAT16, (101, 50), (256,), (32, 16))
store("store beyond the last row", map_, [(0, 50), (32, 1000)], 1024,
      store_arrays("below", 2, 1024))  # fmt: skip
store("store beyond the last column", map_, [(104, 0), (2048, 20)], 1024,
      store_arrays("right", 2, 1024))  # fmt: skip
for data_type in (T.FLOAT32_FTZ, T.TFLOAT32, T.TFLOAT32_FTZ):
    map_ = TensorMap(0, data_type, (64, 48), (256,), (32, 32))
    store(f"store {data_type.name}", map_, [(0, 0), (40, 20)], 4096,
          lambda: [np.full(1 << 14, 0x5A, "u1"), _floats()])  # fmt: skip

KINDS = {
    T.UINT32: "u32", T.INT32: "u32", T.UINT64: "u64", T.INT64: "u64",
    T.FLOAT16: "f16", T.BFLOAT16: "bf16", T.FLOAT32: "f32", T.FLOAT64: "f64",
}  # fmt: skip
REDUCTIONS = [
    *(("add", t) for t in (
        T.UINT32, T.INT32, T.UINT64, T.FLOAT16, T.BFLOAT16, T.FLOAT32, T.FLOAT64
    )),
    *((op, t) for op in ("min", "max") for t in (
        T.UINT32, T.INT32, T.UINT64, T.INT64, T.FLOAT16, T.BFLOAT16
    )),
    ("inc", T.UINT32), ("dec", T.UINT32),
    *((op, t) for op in ("and", "or", "xor") for t in (T.UINT32, T.INT32, T.UINT64)),
]  # fmt: skip
for operation, data_type in REDUCTIONS:
    size = data_type.bits // 8
    map_ = TensorMap(0, data_type, (128 // size, 48), (128,), (64 // size, 32), Swizzle.B64)

    def reduction_arrays(operation=operation, data_type=data_type):
        kind = KINDS[data_type]
        bits = data_type.bits
        a, b = operands(f"tensor {operation} {data_type.name}", (kind, kind), 6144 * 8 // bits)
        return [a.view("u1"), b.view("u1")]

    store(f"{operation} {data_type.name}", map_, [(0, 0), (64 // size, 10), (16 // size, 30)], 2048,
          reduction_arrays, operation=f".{operation}")  # fmt: skip

# Sums of FP32 in its other types; elements beyond the box stay.
for data_type in (T.FLOAT32_FTZ, T.TFLOAT32, T.TFLOAT32_FTZ):
    map_ = TensorMap(0, data_type, (52, 50), (256,), (16, 16))
    seed = f"probe add {data_type.name}"
    store(f"add {data_type.name}", map_, [(0, 0)], 1024,
          lambda seed=seed: [a.view("u1") for a in operands(seed, ("f32", "f32"), 1 << 12)],
          operation=".add")  # fmt: skip

# ---- prefetches, which change nothing

SMALL = 1024
map_ = TensorMap(1, T.UINT32, (60, 30), (256,), (32, 8))
body = head(SMALL) + fill(SMALL) + "@!%c1 bra WAIT;"
body += (
    "mov.b64 %rd5, t0; prefetch.param.tensormap [%rd5]; prefetch.tensormap [%m0];"
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%m0, {20, 10}];"
    f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {SMALL};"
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%m0, "
    "{20, 10}], [%r3];"
)
body += wait("WAIT", 0) + dump(SMALL)
FAMILY.add("prefetches", body,
           lambda: [np.zeros(SMALL, "u1"), random_bytes("prefetches", 1 << 13)], 2,
           maps=(map_,), block=(128, 1, 1), shared_bytes=SMALL + 16)  # fmt: skip

# ---- a map that the kernel edits: one field, then whole


def edit(name: str, edits: str, *, box_bytes: int) -> None:
    """A map, changed in shared memory and copied to array 2, from which boxes are loaded."""
    region, places = 1024, [(0, 0), (32, 5), (-8, -2)]
    map_ = TensorMap(1, T.FLOAT16, (50, 20), (256,), (32, 8))
    body = head(region)
    body += (
        f"setp.lt.u32 %c2, %r1, 32; add.u32 %r20, %r2, {region + 128};"
        "mad.wide.u32 %rd5, %r1, 4, %m0;"
        f"@%c2 ld.u32 %r6, [%rd5]; @%c2 st.shared.u32 [%r5+{region + 128}], %r6; bar.sync 0;"
        f"@!%c1 bra EDITED;\n{edits}\nEDITED: bar.sync 0; @!%c2 bra COPIED;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%p2], [%r20], 128; COPIED: bar.sync 0;\n"
    )
    for index, place in enumerate(places):
        body += fill(region, str(0xA5A5A500 + index)) + f"@!%c1 bra WAIT{index};"
        body += (
            "fence.proxy.tensormap::generic.acquire.gpu [%p2], 128;"
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {box_bytes};"
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [%r2], [%p2, {coordinates(place)}], [%r3];"
        )
        body += wait(f"WAIT{index}", index % 2) + dump(region)
        body += f"add.u64 %rd1, %rd1, {region}; bar.sync 0;\n"

    def arrays():
        return [
            np.zeros((len(places), region), "u1"),
            random_bytes("edited", 1 << 14),
            np.zeros(128, "u1"),
        ]

    FAMILY.add(name, body, arrays, 3, maps=(map_,), block=(128, 1, 1), shared_bytes=region + 256,
               rows=tuple(map(str, places)))  # fmt: skip


def replace(field: str, kind: str, value: str) -> str:
    return f"tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [%r20], {value};"


ADDRESS = "add.u64 %rd4, %p1, 4096;" + replace("global_address", "b64", "%rd4")
EDITS = {
    "global_address": (ADDRESS, 512),
    "global_dim 0": (replace("global_dim", "b32", "0, 40"), 512),
    "global_dim 1": (replace("global_dim", "b32", "1, 9"), 512),
    "global_stride": (replace("global_stride", "b64", "0, 512"), 512),
    "box_dim": (replace("box_dim", "b32", "1, 4"), 256),
    "element_stride": (replace("element_stride", "b32", "1, 2"), 256),
    "elemtype": (replace("elemtype", "b32", "2"), 1024),
    "swizzle_mode": (replace("swizzle_mode", "b32", "2"), 512),
    "fill_mode": (replace("fill_mode", "b32", "1"), 512),
}
for name, (edits, box_bytes) in EDITS.items():
    edit(f"edited {name}", edits, box_bytes=box_bytes)
ALL = ("global_address", "global_dim 1", "global_stride", "swizzle_mode", "fill_mode")
edit("edited, several fields", "".join(EDITS[name][0] for name in ALL), box_bytes=512)
