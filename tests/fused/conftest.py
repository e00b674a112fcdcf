"""A small layer to call, and a way to run ranks as processes."""

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.heuristics import MoEShape
from deep_moe.targets import EMULATED, TARGETS
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Layer, Tokens, exact_layer, exact_tokens
from tests.pairs import formats

SHAPE = MoEShape(
    num_ranks=1,
    num_experts=4,
    num_topk=2,
    hidden=256,
    intermediate_hidden=128,
    num_max_tokens_per_rank=16,
)


@dataclass
class ExampleCall:
    """A valid call on the CPU, with an exact result."""

    y: torch.Tensor
    l1_weights: tuple[torch.Tensor, torch.Tensor]
    l2_weights: tuple[torch.Tensor, torch.Tensor]
    sym_buffer: SymmBuffer
    tokens: Tokens
    layer: Layer
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **changes: Any) -> None:
        arguments = {
            "y": self.y,
            "l1_weights": self.l1_weights,
            "l2_weights": self.l2_weights,
            "sym_buffer": self.sym_buffer,
            **self.options,
            **changes,
        }
        deep_moe.fp8_fp4_mega_moe(**arguments)

    def expected(self, **options: Any) -> torch.Tensor:
        tokens = self.tokens
        return reference_mega_moe(
            *self.layer.operands(tokens),
            **options,
        )


def fill(buffer: SymmBuffer, tokens: Tokens) -> None:
    num_tokens = tokens.num_tokens
    buffer.x[:num_tokens].copy_(tokens.x)
    buffer.x_sf[:num_tokens].copy_(tokens.x_sf)
    buffer.topk_idx[:num_tokens].copy_(tokens.topk_idx)
    buffer.topk_weights[:num_tokens].copy_(tokens.topk_weights)


@pytest.fixture
def example() -> ExampleCall:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256, 128, device="cpu")
    layer = exact_layer(SHAPE)
    tokens = exact_tokens(SHAPE, 16)
    fill(buffer, tokens)
    l1, l2 = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)
    y = torch.full((16, 256), torch.nan, dtype=torch.bfloat16)
    return ExampleCall(y, l1, l2, buffer, tokens, layer)


class RankFailedError(AssertionError):
    """A rank's process raised something that its test did not expect."""


RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """run_ranks(num_ranks, function) calls function(rank) in one process per rank of a gloo group,
    and returns what each returned. timeout_s: for a rank that hangs; a busy machine needs minutes
    for what takes seconds."""

    def run(num_ranks: int, function: Callable[[int], Any], timeout_s: float = 600) -> list[Any]:
        # Forked, so that functions and fixtures of a test reach their processes.
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
            )
            try:
                queue.put((rank, function(rank), None))
            except BaseException:
                queue.put((rank, None, traceback.format_exc()))
            finally:
                dist.destroy_process_group()

        processes = [context.Process(target=work, args=(rank,)) for rank in range(num_ranks)]
        for process in processes:
            process.start()
        try:
            answers = [queue.get(timeout=timeout_s) for _ in processes]
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
        failures = [f"rank {rank}:\n{text}" for rank, _, text in answers if text is not None]
        if failures:
            raise RankFailedError("\n".join(failures))
        return [value for _, value, _ in sorted(answers, key=lambda answer: answer[0])]

    return run


def arch_with(weights: str, token_format: str | None = None) -> str:
    """A target that has a kernel for the pair; sm_100a if it does."""
    named = sorted(TARGETS.values(), key=lambda target: target is not EMULATED)
    if token_format is None:
        token_format = formats(weights)["token_format"]
    return next(target.name for target in named if token_format in target.token_formats(weights))
