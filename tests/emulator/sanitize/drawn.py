"""Runs the emulator under AddressSanitizer and UndefinedBehaviorSanitizer on drawn PTX.

    python -m tests.emulator.sanitize.drawn --seconds 600

What it finds is repeated by `--seed N --first-case N --cases 1`; the text is in `case.ptx`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from warpcheck import library

from ..families import FAMILIES, kernel
from ..raw_ptx import entry

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
FLAGS = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
ENVIRONMENT = {
    # Its stacks for use after return are not aligned as vectors of 64 bytes need it.
    "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0:hard_rss_limit_mb=4000",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

FOUR, EIGHT = ("{" + ", ".join(f"%r{i}" for i in range(n)) + "}" for n in (4, 8))
PRODUCTS = (
    f"m16n8k64.row.col.s32.s4.u4.s32 {FOUR}, {FOUR}, {{%r4, %r5}}, {FOUR}",
    f"m16n8k256.row.col.s32.b1.b1.s32.xor.popc {FOUR}, {FOUR}, {{%r4, %r5}}, {FOUR}",
    "m8n8k16.row.col.s32.s8.s8.s32 {%r0, %r1}, {%r2}, {%r3}, {%r0, %r1}",
    f"m8n8k4.row.col.f32.f16.f16.f32 {EIGHT}, {{%r8, %r9}}, {{%r10, %r11}}, {EIGHT}",
)
SPARSE_PRODUCTS = (
    f"m16n8k128.row.col.s32.s4.s4.s32 {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r9, 0",
    f"kind::f8f6f4.m16n8k64.row.col.f32.e2m1.e3m2.f32 {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r9, 0",
    "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k128.row.col.f32.e2m1.e2m1.f32.ue4m3"
    f" {FOUR}, {FOUR}, {FOUR}, {FOUR}, %r9, 0, %r1, {{0, 0}}, %r2, {{0, 1}}",
)

# What the families do not have: products of registers, im2col, calls, recursion, variables, tables,
# the driver's functions.
FURTHER = [
    entry(
        "".join(f"mov.u32 %r{i}, {0x4E4E4E4E ^ i};" for i in range(12))
        + "".join(f"mma.sync.aligned.{form};" for form in PRODUCTS)
        + "mov.u32 %r9, 0xe4e4e4e4;"
        + "".join(f"mma.sp::ordered_metadata.sync.aligned.{form};" for form in SPARSE_PRODUCTS)
        + "mov.b16 %h0, 300; cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2 %r1, %h0, %h0;"
        "cvt.pack.sat.s4.s32.b32 %r2, %r3, %r4, %r5;",
        0,
    ),
    entry(
        "mov.u32 %r1, s; mov.b16 %h1, 1; mbarrier.init.shared.b64 [%r1], 1;"
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%r1+128], [%p1, {%r2, %r3, %r4}], [%r1], {%h1};"
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group"
        " [%p1, {%r2, %r3, %r4, %r5}], [%r1+128];",
        2,
        module=".shared .align 1024 .b8 s[4096];\n",
    ),
    entry(
        "{ .param .b32 a; .param .b32 r; mov.u32 %r1, 5; st.param.b32 [a], %r1;"
        " call (r), f, (a); ld.param.b32 %r2, [r]; st.global.u32 [%p0], %r2; }",
        1,
        module=".func (.param .b32 r) f(.param .b32 a) { .reg .b32 %q<4>; .reg .pred %c<2>;"
        " .local .b32 l[4]; ld.param.b32 %q1, [a]; mov.u32 %q2, l; st.local.b32 [%q2+8], %q1;"
        " setp.eq.u32 %c1, %q1, 0; @%c1 bra D; sub.u32 %q1, %q1, 1;"
        " { .param .b32 b; .param .b32 s; st.param.b32 [b], %q1; call (s), f, (b);"
        " ld.param.b32 %q3, [s]; } add.u32 %q1, %q1, %q3; D: st.param.b32 [r], %q1; ret; }\n",
    ),
    entry(
        "mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 1; T: .branchtargets A, B; brx.idx %r1, T;"
        " A: bra B; B: alloca.u64 %rd1, 64; stacksave.u64 %rd2; st.local.u32 [%rd1], %r1;"
        " stackrestore.u64 %rd2; shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;"
        " vote.sync.ballot.b32 %r3, %c1, -1; bar.sync 0; bar.red.popc.u32 %r4, 1, %c1;",
        0,
    ),
    entry(
        "{ .param .b64 n; .param .b64 p; mov.b64 %rd1, 64; st.param.b64 [n], %rd1;"
        " call (p), malloc, (n); ld.param.b64 %rd2, [p]; st.u32 [%rd2], 1;"
        " st.param.b64 [n], %rd2; call free, (n); }"
        "{ .param .b64 f; .param .b64 v; .param .b32 r; .local .align 8 .b8 l[8];"
        " mov.u64 %rd3, t; st.param.b64 [f], %rd3; mov.u32 %r1, l; st.local.u32 [%r1], 3;"
        " cvt.u64.u32 %rd4, %r1; cvta.local.u64 %rd5, %rd4; st.param.b64 [v], %rd5;"
        " call (r), vprintf, (f, v); }",
        0,
        module=".extern .func (.param .b64 p) malloc(.param .b64 n);\n"
        ".extern .func free(.param .b64 n);\n"
        ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);\n"
        ".global .align 1 .b8 t[8] = {37, 52, 100, 32, 0, 0, 0, 0};\n"
        ".global .u64 u[2] = {t, generic(t)+4};\n.const .align 4 .b8 k[4] = {1, 2, 3, 4};\n",
    ),
]


def build() -> Path:
    """The driver, with the emulator's sources, built with sanitizers."""
    folder = REPOSITORY / "build" / "sanitize"
    sources = [*library.SOURCES.glob("*.cpp"), HERE / "driver.cpp"]
    units = library.compile_units(sources, folder / "units", FLAGS)
    digest = hashlib.sha256(" ".join(unit.name for unit in sorted(units)).encode()).hexdigest()
    driver = folder / f"driver-{digest[:16]}"
    if not driver.exists():
        library.link(units, driver, FLAGS)
    return driver


def write_corpus(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [kernel(family, at, at // 2) for family in FAMILIES.values() for at in (128, 512)]
    texts += FURTHER
    texts += [path.read_text() for path in (HERE.parent / "triton").glob("*.ptx")]
    for text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        (folder / f"{digest}.ptx").write_text(text)


def run(
    folder: Path, seed: int, seconds: int, first_case: int = 0, num_cases: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Draws cases for so long. The text of the last one is `folder`'s case.ptx."""
    write_corpus(folder / "corpus")
    arguments = [folder / "corpus", folder / "case.ptx", seed, first_case, seconds]
    arguments += [] if num_cases is None else [num_cases]
    return subprocess.run(
        [str(build()), *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + 120,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-case", type=int, default=0)
    parser.add_argument("--cases", type=int)
    options = parser.parse_args()
    folder = REPOSITORY / "build" / "sanitize"
    result = run(folder, options.seed, options.seconds, options.first_case, options.cases)
    print(result.stdout[-200:], result.stderr[-6000:].replace("\r", "\n"), sep="\n")
    if result.returncode:
        print(f"status {result.returncode}; the text: {folder / 'case.ptx'}", file=sys.stderr)
    return int(result.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
