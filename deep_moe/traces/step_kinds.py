"""What the name of a step says: the phase that it is part of, and what a wait waits for.

Names are those of include/deep_moe/trace/tracer.cuh and split/phase_span.cuh. Steps with other
names are shown, too, as work that belongs to no phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("dispatch", "Linear1", "Linear2", "combine")


@dataclass(frozen=True)
class StepKind:
    """Of a step.

    Attributes:
        phase: one of PHASES, or "".
        awaited: what a wait waits for; "" for work.
    """

    phase: str = ""
    awaited: str = ""


_DISPATCH, _LINEAR1, _LINEAR2, _COMBINE = (StepKind(phase) for phase in PHASES)
_BLOCKS = "the loaders of this CTA (in an epilogue: its MMA warp)"

KINDS: Mapping[str, StepKind] = {
    "count tokens": _DISPATCH,
    "gather CTAs before counts are published": StepKind(awaited="the other CTAs of the rank"),
    "publish counts": _DISPATCH,
    "wait for token counts": StepKind(awaited="the counts of all ranks"),
    "pull": _DISPATCH,
    "wait for this CTA's blocks": StepKind(awaited="the warps that compute this CTA's blocks"),
    "gather CTAs before combine": StepKind(awaited="the other CTAs of the rank"),
    "clean up": StepKind(),
    "rank barrier before combine": StepKind(awaited="all ranks"),
    "rank barrier after clean-up": StepKind(awaited="all ranks"),
    "wait for Linear1 tokens": StepKind(awaited="the pull of this m-block's tokens"),
    "wait for Linear2 tokens": StepKind(awaited="Linear1 of this m-block"),
    "load Linear1": _LINEAR1,
    "load Linear2": _LINEAR2,
    "wait for a block": StepKind(awaited=_BLOCKS),
    "Linear1 main loop": _LINEAR1,
    "Linear2 main loop": _LINEAR2,
    "Linear1 epilogue": _LINEAR1,
    "Linear2 epilogue": _LINEAR2,
    "wait for combine": StepKind(awaited="the results of all ranks"),
    "combine": _COMBINE,
    "wait to be told of a block": StepKind(awaited="the weight loader, which takes the blocks"),
    # The all-to-all of the split path
    "quant_and_put": _DISPATCH,
    "count_put": _DISPATCH,
    "wait": StepKind(awaited="the tokens and counts of all ranks"),
    "postprocess": _DISPATCH,
    "copy_and_put": _COMBINE,
    "recv_wait": StepKind(awaited="the results of all ranks"),
    "topk_reduce": _COMBINE,
    # Waits of any kernel on a simulated clock, see `LaunchTime.spent_ns`
    "memory": StepKind(awaited="the results of loads"),
    "tensor": StepKind(awaited="products"),
    "mbarrier": StepKind(awaited="the phase of an mbarrier"),
    "barrier": StepKind(awaited="the other warps of the CTA or cluster"),
    "fence": StepKind(awaited="the warp's own stores"),
    "sleep": StepKind(awaited="the time that it asked for"),
    "other": StepKind(awaited="something else"),
}


def kind_of(step: str) -> StepKind:
    """What is known of a step.

    Args:
        step: its name.

    >>> kind_of("Linear1 epilogue"), kind_of("my step")
    (StepKind(phase='Linear1', awaited=''), StepKind(phase='', awaited=''))
    """
    return KINDS.get(step, StepKind())
