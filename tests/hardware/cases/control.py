"""Branches, calls, exits, register budgets: lanes that part and meet again."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..values import operands

FAMILY = Family("control")
HEAD = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; "
    "mad.lo.u32 %r4, %r2, %r3, %r1;"
    "mad.wide.u32 %rd1, %r4, 4, %p0; mad.wide.u32 %rd2, %r4, 4, %p1; ld.global.u32 %r5, [%rd2];\n"
)


def add(name: str, body: str, **options) -> None:
    FAMILY.add(
        name,
        HEAD + body + "\nst.global.u32 [%rd1], %r10;",
        lambda: [np.zeros(1024, "<u4"), operands(name, ("u32",), 1024)[0]],
        2,
        grid=(1024 // options.get("block", (128, 1, 1))[0], 1, 1),
        **{"block": (128, 1, 1), **options},
    )


add(
    "loops of different lengths",
    "and.b32 %r6, %r5, 31; mov.u32 %r10, %r5; setp.eq.u32 %c1, %r6, 0; @%c1 bra OUT;"
    "LOOP: and.b32 %r7, %r10, 1; setp.eq.u32 %c2, %r7, 0; @%c2 bra EVEN;"
    "mad.lo.u32 %r10, %r10, 3, 1; bra NEXT; EVEN: shr.u32 %r10, %r10, 1; NEXT:"
    "sub.u32 %r6, %r6, 1; setp.ne.u32 %c1, %r6, 0; @%c1 bra LOOP; OUT:",
)
add(
    "branch by table",
    "and.b32 %r6, %r5, 7; mov.u32 %r10, 0; TABLE: .branchtargets T0, T1, T2, T3, T4, T3, T1, T0;"
    "brx.idx %r6, TABLE; T0: add.u32 %r10, %r10, 1; T1: mul.lo.u32 %r10, %r5, 3; bra END;"
    "T2: not.b32 %r10, %r5; bra END; T3: popc.b32 %r10, %r5; T4: xor.b32 %r10, %r10, %r1; END:",
)
add(
    "some threads return early",
    "mov.u32 %r10, 7; st.global.u32 [%rd1], %r10; and.b32 %r6, %r5, 3; setp.eq.u32 %c1, %r6, 1;"
    " @%c1 ret;"
    "setp.eq.u32 %c2, %r6, 2; @%c2 exit; mul.lo.u32 %r10, %r5, 5;",
)
add(
    "calls",
    "{ .param .b32 a; .param .b64 b; .param .b32 r; cvt.u64.u32 %rd5, %r5; st.param.b32 [a], %r1;"
    "st.param.b64 [b], %rd5; call.uni (r), mixed, (a, b); ld.param.b32 %r10, [r]; }"
    "and.b32 %r6, %r5, 1; setp.eq.u32 %c1, %r6, 0; @%c1 bra SKIP;"
    "{ .param .b32 a; .param .b64 b; .param .b32 r; cvt.u64.u32 %rd5, %r10; st.param.b32 [a], %r10;"
    "st.param.b64 [b], %rd5; call (r), mixed, (a, b); ld.param.b32 %r10, [r]; } SKIP:",
    module=".func (.param .b32 r) mixed (.param .b32 a, .param .b64 b) {"
    ".reg .b32 %x<8>; .reg .b64 %y<4>;"
    " .reg .pred %q; ld.param.b32 %x1, [a]; ld.param.b64 %y1, [b]; cvt.u32.u64 %x2, %y1;"
    " and.b32 %x3, %x1, 2; setp.eq.u32 %q, %x3, 0; @%q bra PLAIN; mad.lo.u32 %x2, %x2, 9, %x1; "
    "PLAIN:"
    " xor.b32 %x2, %x2, %x1; st.param.b32 [r], %x2; ret; }",
)
add(
    "guarded instructions",
    "mov.u32 %r10, 0; setp.lt.s32 %c1, %r5, 0; and.b32 %r6, %r5, 4; setp.ne.u32 %c2, %r6, 0;"
    "@%c1 add.u32 %r10, %r10, 3; @!%c1 sub.u32 %r10, %r10, 9; @%c2 mul.lo.u32 %r10, %r10, %r5;"
    "@%c1 st.global.u32 [%rd1], %r10; @%c1 ld.global.u32 %r11, [%rd2]; "
    "@%c1 add.u32 %r10, %r10, %r11;",
)
add(
    "register budgets",
    "shr.u32 %r6, %r1, 7; setp.eq.u32 %c1, %r6, 0; @%c1 bra FEW;"
    "setmaxnreg.inc.sync.aligned.u32 152; mad.lo.u32 %r10, %r5, 3, %r1; bra MEET;"
    "FEW: setmaxnreg.dec.sync.aligned.u32 40; mad.lo.u32 %r10, %r5, 5, %r1; MEET: bar.sync 0;",
    block=(256, 1, 1),
    directives=".maxnreg 96",
)
