"""The interpreter that `compile_ahead` starts: without torch, without CUDA, told by its input."""

from __future__ import annotations

import os
import pickle
import sys
from typing import NamedTuple

from deep_moe import jit
from deep_moe.fused.config_chooser import ConfigChooser
from deep_moe.fused.deployment import ChosenConfigs, build_deployment, is_built
from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig

NICENESS = 10  # an engine loads its weights meanwhile


class CompileWork(NamedTuple):
    """preparations: the kernels that prepare inputs. begin: which share of the kernels comes last,
    because the ranks beside this one begin with them. for_emulator: PTX is enough."""

    choose: ConfigChooser
    preparations: tuple[PrepareInputsConfig, ...]
    num_workers: int
    begin: float
    for_emulator: bool


def compile_missing(work: CompileWork) -> int:
    """Compile what the cache lacks, and return how many kernels of layers that were."""
    for preparation in work.preparations:
        jit.build(preparation, for_emulator=work.for_emulator)
    most = work.choose.shape.num_max_tokens_per_rank
    configs = ChosenConfigs(work.choose, most, work.choose.key).uses
    begin = int(work.begin * len(configs))
    missing = [
        use
        for use in configs[begin:] + configs[:begin]
        if not is_built(use[2], for_emulator=work.for_emulator)
    ]
    if missing:
        build_deployment(missing, num_workers=work.num_workers, for_emulator=work.for_emulator)
    return len({config for _, _, config in missing})


if __name__ == "__main__":
    os.nice(NICENESS)
    compile_missing(pickle.load(sys.stdin.buffer))
