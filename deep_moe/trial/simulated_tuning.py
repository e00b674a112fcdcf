"""Times candidates on a chip's clock, for `deep-moe tune --chip`: the chip need not be there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from deep_moe import __version__
from deep_moe.emulator import Chip
from deep_moe.fused.tuning_tables import add_to_table

from .simulated import simulate_call
from .timing import source_commit
from .tuning import Overrides, SizeResult, TuningPlan, candidates, tune_size, tuned_layer


class SimulatedMeasure:
    """Seconds of a call at one number of tokens per rank. The clock tells the same of a kernel
    however often it is asked, so that each kernel is simulated once.

    on_kernel: told before each simulation how many there have been.
    """

    def __init__(
        self, plan: TuningPlan, chip: Chip, num_tokens: int, on_kernel: Callable[[int], None]
    ) -> None:
        self._plan = plan
        self._chip = chip
        self._num_tokens = num_tokens
        self._on_kernel = on_kernel
        self._seconds: dict[tuple[tuple[str, int], ...], float] = {}

    def __call__(self, kernels: Sequence[Overrides]) -> list[float]:
        """One round."""
        return [self._of_kernel(overrides) for overrides in kernels]

    def _of_kernel(self, overrides: Overrides) -> float:
        config = self._plan.config(self._num_tokens, overrides)
        key = tuple(config.tunable.items())
        if key not in self._seconds:
            self._on_kernel(len(self._seconds))
            call = simulate_call(
                self._plan.shape,
                [self._num_tokens] * self._plan.shape.num_ranks,
                self._chip,
                seed=self._plan.seed,
                num_sms=self._plan.num_sms,
                activation=self._plan.activation,
                overrides=overrides,
            )
            self._seconds[key] = call.us / 1e6
        return self._seconds[key]


def tune_simulated(
    plan: TuningPlan,
    chip: Chip,
    device: str,
    *,
    on_kernel: Callable[[int, int, int], None] = lambda num_tokens, done, total: None,
) -> list[dict[str, Any]]:
    """What `tune` does on GPUs: an object per size that there was time to begin, each in the table
    at once.

    Args:
        plan: what to time. `results` is not written.
        chip: whose clock tells the times.
        device: whose entries they are, as CUDA names it.
        on_kernel: told before each simulation: tokens per rank, kernels that are done, kernels that
            the search has at least.
    """
    commit = plan.commit or source_commit() or f"deep_moe {__version__}"
    facts = {
        "gpu": device,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": f"{commit}, simulated on {chip.name}",
    }
    results: list[SizeResult] = []
    for num_tokens in plan.tokens:
        if time.time() >= plan.ends:
            break
        total = 1 + len(candidates(plan, num_tokens))

        def tell(done: int, num_tokens: int = num_tokens, total: int = total) -> None:
            on_kernel(num_tokens, done, max(total, done + 1))

        measure = SimulatedMeasure(plan, chip, num_tokens, tell)
        results.append(tune_size(plan, num_tokens, measure, lambda share: False))
        add_to_table(plan.table, tuned_layer(plan, results[-1], facts))
    return [asdict(result) for result in results]


def gpu_name(chip: Chip) -> str:
    """What CUDA calls the GPU of a chip's file, as far as it is known.

    >>> from deep_moe.emulator import chips
    >>> gpu_name(chips.load("h100")), gpu_name(chips.load("b200"))
    ('NVIDIA H100 80GB HBM3', 'NVIDIA B200')
    """
    return "NVIDIA H100 80GB HBM3" if chip.name == "h100" else f"NVIDIA {chip.name.upper()}"
