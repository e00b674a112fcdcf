"""Small layers whose results are the same on every processor, to the bit.

    python -m tests.aarch64.layers FILE

runs them here and writes operands and results to FILE. The operands are written, too, for PyTorch
draws other random numbers on another processor.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import run_emulated_ranks, run_processes
from deep_moe.trial.synthetic import random_layer, random_tokens

from ..pairs import formats

NUM_TOKENS = (3, 2)  # per rank
CASES = (
    ("sm_90a", "mxfp4 x bf16"),
    ("sm_90a", "mxfp4"),
    ("sm_100a", "mxfp4"),
    ("sm_100a", "nvfp4 x nvfp4"),
)
IN_PROCESSES = "sm_90a", "mxfp4"  # each rank in a process of its own, too


def shape_of(pair: str) -> MoEShape:
    return MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=256,
        intermediate_hidden=128,
        num_max_tokens_per_rank=4,
        **formats(pair),
    )


def operands_of(pair: str) -> dict[str, Any]:
    shape = shape_of(pair)
    tokens = [random_tokens(shape, n, seed=rank) for rank, n in enumerate(NUM_TOKENS)]
    return {"layer": random_layer(shape, seed=1), "tokens": tokens}


def results_of(arch: str, pair: str, operands: dict[str, Any]) -> list[torch.Tensor]:
    """y of each rank, all in this process."""
    layer, tokens = operands["layer"], operands["tokens"]
    (outputs,) = run_emulated_ranks(shape_of(pair), layer, [tokens], arch=arch, num_sms=2)
    return [output.y for output in outputs]


def results_of_processes(arch: str, pair: str, operands: dict[str, Any]) -> list[torch.Tensor]:
    layer, tokens = operands["layer"], operands["tokens"]
    (outputs,) = run_processes(shape_of(pair), layer, [tokens], device="cpu", arch=arch, num_sms=2)
    return [output.y for output in outputs]


def main(file: Path) -> None:
    torch.set_num_threads(1)
    record = {}
    for arch, pair in CASES:
        operands = operands_of(pair)
        record[arch, pair] = {**operands, "y": results_of(arch, pair, operands)}
    torch.save(record, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
