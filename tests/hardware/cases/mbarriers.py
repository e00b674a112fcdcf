"""mbarrier: random sequences of operations, the phase asked for after each; hand-over between
threads and CTAs."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..values import Source

FAMILY = Family("mbarriers")
SEQUENCES, STEPS = 24, 160
OPERATIONS = (
    "mbarrier.init.shared::cta.b64 [%r2], %r11;",
    "mbarrier.arrive.shared::cta.b64 %rd9, [%r2], %r11;",
    "mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r2], %r11;",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], %r11;",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], %r11;",
    "mbarrier.arrive_drop.shared::cta.b64 %rd9, [%r2], %r11;",
    "mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %rd9, [%r2], %r11;",
    "mbarrier.inval.shared::cta.b64 [%r2];",
    "mbarrier.arrive_drop.expect_tx.shared::cta.b64 %rd9, [%r2], %r11;",
    "mbarrier.arrive.shared::cta.b64 %rd9, [%r2];",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2], %r11;",
)
(
    INIT,
    ARRIVE,
    ARRIVE_EXPECT,
    EXPECT,
    COMPLETE,
    DROP,
    NO_COMPLETE,
    INVAL,
    DROP_EXPECT,
    ONE,
    REMOTE,
) = range(11)


def _sequence(source: Source) -> list[tuple[int, int]]:
    """Legal operations, by a model of the barrier: what is expected, pending, and in transit."""
    numbers = iter(source.words(8 * STEPS, 32).astype(np.int64))

    def below(limit: int) -> int:
        return int(next(numbers)) % limit

    steps: list[tuple[int, int]] = []
    expected = pending = transit = 0
    alive = False
    while len(steps) < STEPS:
        if not alive:
            expected = pending = 1 + below(below(2) * 200 + 6)
            transit, alive = 0, True
            steps.append((INIT, expected))
            continue
        choice = 1 + below(11)
        num_bytes = 1 + below(3000)
        if pending == 0:  # waits for bytes only
            choice = COMPLETE
            num_bytes = transit if below(2) else 1 + below(transit)
        elif (
            transit < 0 and pending == 1
        ):  # bytes that have come are expected before the last arrival
            choice, num_bytes = EXPECT, -transit + below(2) * num_bytes
        elif choice == 7 and below(6):
            choice = 1
        count = 1 + below(pending) if pending and below(3) else pending
        if transit < 0 and count == pending:
            count -= 1
        if choice in (DROP, DROP_EXPECT) and (expected <= max(count, 1)):
            choice = ARRIVE
        if choice == NO_COMPLETE:
            count = below(pending) if pending > 1 else 0
            choice = NO_COMPLETE if count else ARRIVE
            count = count or 1
        if choice == ARRIVE:
            pending -= count
            steps.append((choice, count))
        elif choice in (ONE, 11):
            pending -= 1
            steps.append((ONE, 1))
        elif choice == ARRIVE_EXPECT:
            transit += num_bytes
            pending -= 1
            steps.append((choice, num_bytes))
        elif choice == EXPECT:
            transit += num_bytes
            steps.append((choice, num_bytes))
        elif choice == COMPLETE:
            transit -= num_bytes
            steps.append((choice, num_bytes))
        elif choice == DROP:
            pending -= count
            expected -= count
            steps.append((choice, count))
        elif choice == DROP_EXPECT:
            transit += num_bytes
            pending -= 1
            expected -= 1
            steps.append((choice, num_bytes))
        elif choice == INVAL:
            alive = False
            steps.append((choice, 0))
            continue
        else:
            pending -= count
            steps.append((choice, count))
        if pending == 0 and transit == 0:
            pending = expected
    return steps


def _sequences() -> None:
    targets = ", ".join(f"OP{i}" for i in range(len(OPERATIONS)))
    body = f"""
mov.u32 %r1, %ctaid.x; mov.u32 %r2, smem; mul.lo.u32 %r3, %r1, {STEPS};
mad.wide.u32 %rd1, %r3, 8, %p1; mad.wide.u32 %rd2, %r3, 4, %p0; mov.u32 %r4, 0; mov.u64 %rd9, 0;
mov.u32 %r20, %tid.x; setp.ne.u32 %c1, %r20, 0; @%c1 exit;
NEXT: ld.global.v2.u32 {{%r10, %r11}}, [%rd1];
mov.u32 %r12, 0; setp.eq.u32 %c2, %r10, {INVAL};
TARGETS: .branchtargets {targets};
brx.idx %r10, TARGETS;
"""
    for i, text in enumerate(OPERATIONS):
        after = "bra TOKEN;" if "%rd9" in text else "bra ASK;"
        if i == INVAL:
            after = "bra RECORD;"
        body += f"OP{i}: {text} {after}\n"
    body += """
TOKEN: mbarrier.test_wait.shared::cta.b64 %c3, [%r2], %rd9; selp.u32 %r13, 4, 0, %c3;
or.b32 %r12, %r12, %r13;
mbarrier.try_wait.shared::cta.b64 %c3, [%r2], %rd9, 20; selp.u32 %r13, 8, 0, %c3;
or.b32 %r12, %r12, %r13;
ASK:
mbarrier.test_wait.parity.shared::cta.b64 %c3, [%r2], 0; selp.u32 %r13, 1, 0, %c3;
or.b32 %r12, %r12, %r13;
mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %c3, [%r2], 1; selp.u32 %r13, 2, 0, %c3;
or.b32 %r12, %r12, %r13;
mbarrier.try_wait.parity.shared::cta.b64 %c3, [%r2], 0, 20; selp.u32 %r13, 16, 0, %c3;
or.b32 %r12, %r12, %r13;
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %c3, [%r2], 1, 20;
selp.u32 %r13, 32, 0, %c3;
or.b32 %r12, %r12, %r13;
RECORD: st.global.u32 [%rd2], %r12; add.u64 %rd1, %rd1, 8; add.u64 %rd2, %rd2, 4;
add.u32 %r4, %r4, 1;
"""
    body += f"setp.lt.u32 %c4, %r4, {STEPS}; @%c4 bra NEXT;"

    def arrays():
        source = Source("mbarrier sequences")
        steps = np.array([_sequence(source) for _ in range(SEQUENCES)], "<u4")
        return [np.zeros((SEQUENCES, STEPS), "<u4"), steps]

    # Not checked: a sequence may end, and its CTA with it, while bytes are outstanding.
    FAMILY.add("sequences", body, arrays, 2, grid=(SEQUENCES, 1, 1), shared_bytes=64, checks=False)


_sequences()

WAIT = (
    "{{ W{label}: mbarrier.try_wait.parity.shared::cta.b64 %c9, [{barrier}], {parity};"
    " @!%c9 bra W{label}; }}"
)


def wait(barrier: str, parity: str, label: str) -> str:
    return WAIT.format(barrier=barrier, parity=parity, label=label)


def _early_bytes() -> None:
    """Bytes come, and the last arrival, before anybody expects them: is the phase complete then?"""
    ask = (
        "mbarrier.test_wait.parity.shared::cta.b64 %c3, [%r2], {parity}; selp.u32 %r13, 1, 0, %c3;"
        "st.global.u32 [%p0+{at}], %r13;\n"
    )
    body = "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.ne.u32 %c1, %r1, 0; @%c1 exit;\n"
    steps = (
        "mbarrier.init.shared::cta.b64 [%r2], 1;",
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 96;",
        "mbarrier.arrive.shared::cta.b64 _, [%r2];",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 96;",
    )
    for index, step in enumerate(steps):
        body += step + "".join(ask.format(parity=p, at=8 * index + 4 * p) for p in (0, 1))
    FAMILY.add("early bytes", body, lambda: [np.full((len(steps), 2), 9, "<u4")], 1,
               shared_bytes=64, rows=steps)  # fmt: skip


_early_bytes()

# All threads arrive and wait; each phase hands words over.
body = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 4, %r2; "
    "mad.wide.u32 %rd1, %r1, 4, %p0;"
    "setp.eq.u32 %c1, %r1, 0; @%c1 mbarrier.init.shared.b64 [%r2+2048], 128; bar.sync 0;"
    "mul.lo.u32 %r10, %r1, 2654435761;"
)
for step in range(8):
    body += (
        f"st.shared.u32 [%r3+{512 * (step % 2)}], %r10; "
        f"mbarrier.arrive.shared.b64 %rd9, [%r2+2048];"
        f"add.u32 %r11, %r1, {29 * step + 3}; and.b32 %r11, %r11, 127; "
        f"mad.lo.u32 %r12, %r11, 4, %r2;"
        + wait("%r2+2048", str(step % 2), f"A{step}")
        + f"ld.shared.u32 %r13, [%r12+{512 * (step % 2)}]; mad.lo.u32 %r10, %r10, 3, %r13;\n"
    )
FAMILY.add("hand-over", body + "st.global.u32 [%rd1], %r10;", lambda: [np.zeros(128, "<u4")], 1,
           block=(128, 1, 1), shared_bytes=4096)  # fmt: skip

# Between CTAs: each thread of the other CTAs arrives at cluster scope, data by remote stores.
body = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r4, %cluster_ctarank; mov.u32 %r5, %ctaid.x;"
    "mad.lo.u32 %r6, %r5, 64, %r1; mad.wide.u32 %rd1, %r6, 4, %p0;"
    "setp.eq.u32 %c1, %r1, 0; @%c1 mbarrier.init.shared::cta.b64 [%r2+4096], 64;"
    "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; "
    "barrier.cluster.wait.aligned;"
    "add.u32 %r7, %r4, 1; and.b32 %r7, %r7, 3; mapa.shared::cluster.u32 %r8, %r2, %r7;"
    "mad.lo.u32 %r9, %r1, 4, %r8; mad.lo.u32 %r10, %r6, 77, 5; mad.lo.u32 %r15, %r1, 4, %r2;"
)
for step in range(6):
    body += (
        f"st.shared::cluster.u32 [%r9+{256 * step}], %r10;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8+4096];"
        + wait("%r2+4096", str(step % 2), f"B{step}").replace("parity.", "parity.acquire.cluster.")
        + f"ld.shared.u32 %r11, [%r15+{256 * step}]; mad.lo.u32 %r10, %r10, 5, %r11;"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    )
body += "st.global.u32 [%rd1], %r10; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
FAMILY.add("hand-over between CTAs", body, lambda: [np.zeros(512, "<u4")], 1, block=(64, 1, 1),
           grid=(8, 1, 1), cluster=(4, 1, 1), shared_bytes=8192)  # fmt: skip

# Remote transactions: expect_tx and complete_tx on a peer's barrier, arrival with bytes.
body = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r4, %cluster_ctarank; mov.u32 %r5, %ctaid.x;"
    "mad.wide.u32 %rd1, %r5, 4, %p0; setp.ne.u32 %c1, %r1, 0; mov.u32 %r20, 0;"
    "@!%c1 mbarrier.init.shared::cta.b64 [%r2], 2; fence.mbarrier_init.release.cluster;"
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%c1 bra END;"
    "xor.b32 %r7, %r4, 1; mapa.shared::cluster.u32 %r8, %r2, %r7;"
    "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r8], 1000;"
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r8], 24;"
    "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r8], 1024;"
    "mbarrier.arrive.shared::cta.b64 %rd9, [%r2];"
    + wait("%r2", "0", "C0")
    + "mbarrier.test_wait.parity.shared::cta.b64 %c2, [%r2], 1; selp.u32 %r20, 11, 10, %c2;"
    "END: @!%c1 st.global.u32 [%rd1], %r20; barrier.cluster.arrive; barrier.cluster.wait;"
)
FAMILY.add("remote transactions", body, lambda: [np.zeros(2, "<u4")], 1, grid=(2, 1, 1),
           cluster=(2, 1, 1), shared_bytes=64)  # fmt: skip
