"""Integer arithmetic, logic, shifts, bit fields, comparison and selection."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..lanes import lane_case
from ..values import NUM, Source, operands

FAMILY = Family("integer")
TYPES = {16: ("u16", "s16"), 32: ("u32", "s32"), 64: ("u64", "s64")}


def lanes(name, texts, out_bits, *kinds, **options):
    lane_case(FAMILY, name, texts, out_bits, kinds, **options)


for bits, types in TYPES.items():
    kind, b = f"u{bits}", f"b{bits}"
    two = (kind, kind)
    lanes(f"arithmetic {bits}", [
        f"{op}.{t} $d, $a, $b;"
        for t in types
        for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max")
    ], bits, *two)  # fmt: skip
    lanes(
        f"quotient {bits}",
        [f"{op}.{t} $d, $a, $b;" for t in types for op in ("div", "rem")],
        bits,
        *two,
    )
    lanes(f"sign {bits}", [f"{op}.s{bits} $d, $a;" for op in ("abs", "neg")], bits, kind)
    lanes(f"logic {bits}", [f"{op}.{b} $d, $a, $b;" for op in ("and", "or", "xor")], bits, *two)
    lanes(f"complement {bits}", [f"{op}.{b} $d, $a;" for op in ("not", "cnot")], bits, kind)
    lanes(
        f"shift {bits}",
        [f"shl.{b} $d, $a, $b;", *(f"shr.{t} $d, $a, $b;" for t in (b, *types))],
        bits,
        kind,
        "amount",
    )
    lanes(
        f"product and sum {bits}",
        [f"mad.{half}.{t} $d, $a, $b, $c;" for t in types for half in ("lo", "hi")]
        + [f"sad.{t} $d, $a, $b, $c;" for t in types],
        bits,
        *two,
        kind,
    )
    if bits < 64:
        wide = f"u{2 * bits}"
        lanes(f"wide product {bits}", [f"mul.wide.{t} $d, $a, $b;" for t in types], 2 * bits, *two)
        lanes(
            f"wide product and sum {bits}",
            [f"mad.wide.{t} $d, $a, $b, $c;" for t in types],
            2 * bits,
            *two,
            wide,
        )
    if bits > 16:
        r = ("%r1", "%r2", "%r3") if bits == 32 else ("%rd1", "%rd2", "%rd3")
        mix = f"xor.{b} $d, {r[0]}, {r[1]}; shl.{b} {r[0]}, {r[0]}, 1; add.u{bits} $d, $d, {r[0]};"
        lanes(f"carry {bits}", [
            f"{op}.cc.u{bits} {r[0]}, $a, $b; {op}c.cc.u{bits} {r[1]}, $c, $a;"
            f" {op}c.u{bits} {r[2]}, $b, $c; {mix} xor.{b} $d, $d, {r[2]};"
            for op in ("add", "sub")
        ] + [
            f"mad.lo.cc.{t} {r[0]}, $a, $b, $c; madc.hi.cc.{t} {r[1]}, $a, $b, $c;"
            f" madc.lo.{t} {r[2]}, $b, $c, $a; {mix} xor.{b} $d, $d, {r[2]};"
            for t in types
        ] + [
            f"mad.hi.cc.{t} {r[0]}, $a, $b, $c; addc.u{bits} {r[1]}, $c, 0; {mix}" for t in types
        ], bits, kind, kind, kind)  # fmt: skip
        lanes(f"bit field {bits}", [f"bfe.{t} $d, $a, $b, $c;" for t in types], bits,
              kind, "amount", "amount")  # fmt: skip
        lanes(f"bit field insert {bits}", [f"bfi.{b} $d, $a, $b, $c, $e;"], bits,
              kind, kind, "amount", "amount")  # fmt: skip
        lanes(f"bit count {bits}", [
            *(f"{op}.{b} $d, $a;" for op in ("popc", "clz")),
            *(f"bfind.{t} $d, $a;" for t in types),
            *(f"bfind.shiftamt.{t} $d, $a;" for t in types),
        ], 32, kind)  # fmt: skip
        lanes(f"bit reversal {bits}", [f"brev.{b} $d, $a;"], bits, kind)

lanes("saturated sum", [f"{op}.sat.s32 $d, $a, $b;" for op in ("add", "sub")], 32, "u32", "u32")
lanes("pairs of 16 bits", [
    f"{op}.{t} $d, $a, $b;" for t in ("u16x2", "s16x2") for op in ("add", "min", "max")
], 32, "u32", "u32")  # fmt: skip
lanes("24-bit product", [
    f"mul24.{half}.{t} $d, $a, $b;" for t in TYPES[32] for half in ("lo", "hi")
], 32, "u32", "u32")  # fmt: skip
lanes("24-bit product and sum", [
    f"mad24.{half}.{t} $d, $a, $b, $c;" for t in TYPES[32] for half in ("lo", "hi")
], 32, "u32", "u32", "u32")  # fmt: skip
lanes("dot product", [
    f"{op}.{s}.{t} $d, $a, $b, $c;"
    for op in ("dp4a", "dp2a.lo", "dp2a.hi")
    for s in TYPES[32]
    for t in TYPES[32]
], 32, "u32", "u32", "u32")  # fmt: skip
lanes("funnel shift", [
    f"shf.{side}.{mode}.b32 $d, $a, $b, $c;" for side in "lr" for mode in ("wrap", "clamp")
], 32, "u32", "u32", "amount")  # fmt: skip
lanes("bytes", [
    "prmt.b32 $d, $a, $b, $c;",
    *(f"prmt.b32.{mode} $d, $a, $b, $c;" for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")),
], 32, "u32", "u32", "u32")  # fmt: skip
lanes("masks", [f"bmsk.{mode}.b32 $d, $a, $b;" for mode in ("wrap", "clamp")], 32,
      "amount", "amount")  # fmt: skip
lanes("extension from a bit", [
    f"szext.{mode}.{t} $d, $a, $b;" for mode in ("wrap", "clamp") for t in TYPES[32]
], 32, "u32", "amount")  # fmt: skip
lanes("predicates", [
    "setp.lt.u32 %c0, $a, $b; setp.eq.u32 %c1, $c, 0; setp.gt.s32 %c2, $a, $c;"
    f"{op}.pred %c3, %c0, %c1; {op}.pred %c4, %c3, !%c2; not.pred %c5, %c4;"
    "selp.u32 %r1, 1, 0, %c3; selp.u32 %r2, 2, 0, %c4; selp.u32 %r3, 4, 0, %c5;"
    "or.b32 $d, %r1, %r2; or.b32 $d, $d, %r3;"
    for op in ("and", "or", "xor")
], 32, "u32", "u32", "u32")  # fmt: skip


def _nth_bit_operands():
    source = Source("nth bit")
    mask = operands("nth bit", ("u32",))[0]
    offset = source.below(70, NUM) - 35
    return [mask, source.below(32, NUM).astype("<u4"), offset.astype("<i4").view("<u4")]


lanes("n-th bit", ["fns.b32 $d, $a, $b, $c;"], 32, "u32", "u32", "u32",
      make_inputs=_nth_bit_operands)  # fmt: skip


def _all_logic_functions() -> None:
    body = ["mov.u32 %r1, %tid.x;"]
    for i in range(3):
        body.append(f"mad.wide.u32 %rd{i}, %r1, 4, %p{i + 1}; ld.global.u32 %r{i + 2}, [%rd{i}];")
    body.append("mad.wide.u32 %rd4, %r1, 4, %p0;")
    for table in range(256):
        body.append(
            f"lop3.b32 %r8, %r2, %r3, %r4, {table}; st.global.u32 [%rd4+{128 * table}], %r8;"
        )

    def arrays():
        source = Source("lop3")
        return [np.zeros((256, 32), "<u4"), *(source.words(32) for _ in range(3))]

    FAMILY.add("every lop3", "\n".join(body), arrays, 4,
               rows=tuple(f"lop3 {table}" for table in range(256)))  # fmt: skip


_all_logic_functions()

# ---- comparison: one bit of the result per comparison

SIGNED = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED = (*SIGNED, "lo", "ls", "hi", "hs")
FLOATING = (*SIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def all_comparisons(t: str, names: tuple[str, ...], ftz: str = "") -> str:
    text = ["mov.u32 $d, 0;"]
    for i, name in enumerate(names):
        text.append(f"setp.{name}{ftz}.{t} %c1, $a, $b; selp.u32 %r1, {1 << i}, 0, %c1;")
        text.append("or.b32 $d, $d, %r1;")
    return " ".join(text)


for t in ("u16", "u32", "u64"):
    signed = "s" + t[1:]
    lanes(f"comparison {t[1:]}", [
        all_comparisons(t, UNSIGNED),
        all_comparisons(signed, SIGNED),
        all_comparisons("b" + t[1:], ("eq", "ne")),
        f"setp.lt.and.{t} %c1|%c2, $a, $b, !%c5; selp.u32 $d, 1, 0, %c1; @%c2 add.u32 $d, $d, 2;",
        f"setp.ge.or.{signed} %c1|%c2, $a, $b, %c5; selp.u32 $d, 1, 0, %c1;"
        "@%c2 add.u32 $d, $d, 2;",
        f"setp.ne.xor.{t} %c1|%c2, $a, $b, %c5; selp.u32 $d, 1, 0, %c1; @%c2 add.u32 $d, $d, 2;",
        f"set.le.u32.{t} $d, $a, $b;",
        f"set.gt.f32.{signed} $d, $a, $b;",
        f"set.lt.and.s32.{t} $d, $a, $b, %c5;",
    ], 32, t, t, prologue="setp.lt.u32 %c5, %r60, 100;")  # fmt: skip
for t, ftz in (
    ("f32", ""),
    ("f32", ".ftz"),
    ("f64", ""),
    ("f16", ""),
    ("f16", ".ftz"),
    ("bf16", ""),
):
    texts = [all_comparisons(t, FLOATING, ftz)]
    if t in ("f32", "f64"):
        texts += [
            f"setp.lt.and{ftz}.{t} %c1|%c2, $a, $b, !%c5; selp.u32 $d, 1, 0, %c1;"
            "@%c2 add.u32 $d, $d, 2;",
            f"set.neu{ftz}.u32.{t} $d, $a, $b;",
            f"set.leu.or{ftz}.f32.{t} $d, $a, $b, %c5;",
        ]
    lanes(f"comparison {t}{ftz}", texts, 32, t, t, prologue="setp.lt.u32 %c5, %r60, 100;")
for t in ("f16x2", "bf16x2"):
    texts = [
        f"setp.{name}.{t} %c1|%c2, $a, $b; selp.u32 %r1, 1, 0, %c1; selp.u32 %r2, 2, 0, %c2;"
        "or.b32 $d, %r1, %r2;"
        for name in FLOATING
    ]
    lanes(f"comparison {t}", texts, 32, t, t)
    lanes(f"comparison into {t}", [f"set.{n}.{t}.{t} $d, $a, $b;" for n in FLOATING], 32, t, t)
for t in ("f16", "bf16"):
    lanes(f"comparison into {t}", [f"set.{n}.{t}.{t} $d, $a, $b;" for n in FLOATING], 16, t, t)

for bits in (16, 32, 64):
    kind = f"u{bits}"
    text = [f"setp.lt.{kind} %c1, $b, $a; selp.b{bits} $d, $a, $b, %c1;"]
    lanes(f"selection {bits}", text, bits, kind, kind)
    lanes(
        f"selection by sign {bits}", [f"slct.b{bits}.s32 $d, $a, $b, $c;"], bits, kind, kind, "u32"
    )
    lanes(f"selection by float {bits}", [
        f"slct.b{bits}.f32 $d, $a, $b, $c;", f"slct.ftz.b{bits}.f32 $d, $a, $b, $c;"
    ], bits, kind, kind, "f32")  # fmt: skip
