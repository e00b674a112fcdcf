"""One call of a layer on all ranks: emulated in this process, or with a process for each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from .emulated_ranks import EmulatedRanks
from .heuristics import MoEShape
from .mega_moe import fp8_fp4_mega_moe
from .rank_processes import run_on_ranks
from .synthetic import Layer, Tokens
from .trace import RankTrace, record
from .weights import MegaMoEWeights, transform_weights_for_mega_moe


@dataclass(frozen=True)
class RankOutput:
    """What one rank's call gave."""

    y: torch.Tensor  # bfloat16 [tokens, hidden]
    stats: torch.Tensor  # int32 [local experts]: tokens that each of them received


def run_emulated_ranks(
    shape: MoEShape, layer: Layer, tokens: Sequence[Tokens], **call: Any
) -> list[RankOutput]:
    """All ranks in this process. `call`: keyword arguments of `EmulatedRanks.call`."""
    with _emulated_ranks(shape, tokens) as ranks:
        return _call_emulated_ranks(ranks, layer, tokens, call)


def trace_emulated_ranks(
    shape: MoEShape, layer: Layer, tokens: Sequence[Tokens], **call: Any
) -> list[RankTrace]:
    """What `run_emulated_ranks` does, recorded."""
    with _emulated_ranks(shape, tokens) as ranks, record(*ranks.buffers) as recorders:
        _call_emulated_ranks(ranks, layer, tokens, call)
        return [recorder.collect() for recorder in recorders]


def run_processes(
    shape: MoEShape, layer: Layer, tokens: Sequence[Tokens], *, device: str, **call: Any
) -> list[RankOutput]:
    """One process per rank, as in a deployment: rank r on GPU r ("cuda") or emulated ("cpu").

    call: keyword arguments of `fp8_fp4_mega_moe`. If one rank fails, the others are ended, and the
    error holds its traceback.
    """
    return _run_in_processes(_run_rank, shape, layer, tokens, device, call)


def trace_processes(
    shape: MoEShape, layer: Layer, tokens: Sequence[Tokens], *, num_warmup: int, **call: Any
) -> list[RankTrace]:
    """What `run_processes` does on GPUs, recorded after `num_warmup` more calls."""
    trace_rank = partial(_trace_rank, num_warmup=num_warmup)
    return _run_in_processes(trace_rank, shape, layer, tokens, "cuda", call)


def _run_in_processes(
    rank_function: Callable[..., Any],
    shape: MoEShape,
    layer: Layer,
    tokens: Sequence[Tokens],
    device: str,
    call: Mapping[str, Any],
) -> list[Any]:
    """What `rank_function` returns on each rank."""
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus < shape.num_ranks:
        raise ValueError(
            f"device cuda needs a GPU for each of {shape.num_ranks} ranks; there are {num_gpus}"
        )
    with tempfile.TemporaryDirectory(prefix="deep_moe_trial_") as folder:
        run_on_ranks(
            _rank_process,
            shape.num_ranks,
            device,
            rank_function,
            shape,
            layer,
            list(tokens),
            call,
            folder,
        )
        return [
            torch.load(_output_file(folder, rank), weights_only=False)
            for rank in range(shape.num_ranks)
        ]


def fill_inputs(buffer: SymmBuffer, tokens: Tokens) -> None:
    """Copy a rank's tokens into its buffer."""
    n = tokens.num_tokens
    buffer.x[:n].copy_(tokens.x)
    buffer.x_sf[:n].copy_(tokens.x_sf)
    buffer.topk_idx[:n].copy_(tokens.topk_idx)
    buffer.topk_weights[:n].copy_(tokens.topk_weights)


def _emulated_ranks(shape: MoEShape, tokens: Sequence[Tokens]) -> EmulatedRanks:
    """With their inputs."""
    ranks = EmulatedRanks(
        shape.num_ranks,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
    )
    for buffer, own in zip(ranks.buffers, tokens, strict=True):
        fill_inputs(buffer, own)
    return ranks


def _call_emulated_ranks(
    ranks: EmulatedRanks, layer: Layer, tokens: Sequence[Tokens], call: Mapping[str, Any]
) -> list[RankOutput]:
    shape = ranks.shape
    weights = [
        transform_weights_for_mega_moe(*layer.of_rank(rank, shape.num_ranks), arch=call.get("arch"))
        for rank in range(shape.num_ranks)
    ]
    outputs = [_empty_output(shape, own, torch.device("cpu")) for own in tokens]
    ranks.call([o.y for o in outputs], weights, [o.stats for o in outputs], **call)
    return outputs


def _rank_process(
    device: torch.device,
    rank_function: Callable[..., Any],
    shape: MoEShape,
    layer: Layer,
    tokens: Sequence[Tokens],
    call: Mapping[str, Any],
    folder: str,
) -> None:
    """Saves what `rank_function` returns of this rank."""
    rank = dist.get_rank()
    buffer = get_symm_buffer_for_mega_moe(
        dist.group.WORLD,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
    )
    l1, l2 = (
        (pair.weight.to(device), pair.sf.to(device))
        for pair in layer.of_rank(rank, shape.num_ranks)
    )
    weights = transform_weights_for_mega_moe(l1, l2, arch=call.get("arch"))
    fill_inputs(buffer, tokens[rank])
    value = rank_function(buffer, weights, _empty_output(shape, tokens[rank], device), call)
    torch.save(value, _output_file(folder, rank))
    dist.barrier()  # no rank takes its memory away while another still reads it


def _run_rank(
    buffer: SymmBuffer, weights: MegaMoEWeights, output: RankOutput, call: Mapping[str, Any]
) -> RankOutput:
    fp8_fp4_mega_moe(output.y, *weights, buffer, output.stats, **call)
    buffer.memory.synchronize()
    buffer.raise_if_failed()
    return RankOutput(output.y.cpu(), output.stats.cpu())


def _trace_rank(
    buffer: SymmBuffer,
    weights: MegaMoEWeights,
    output: RankOutput,
    call: Mapping[str, Any],
    *,
    num_warmup: int,
) -> RankTrace:
    token = torch.zeros(1, device=buffer.device)
    with record(buffer) as (recorder,):
        for _ in range(num_warmup + 1):
            dist.all_reduce(token)  # so that ranks begin together
            fp8_fp4_mega_moe(output.y, *weights, buffer, output.stats, **call)
        return recorder.collect()


def _empty_output(shape: MoEShape, tokens: Tokens, device: torch.device) -> RankOutput:
    y = torch.empty(tokens.num_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=device)
    return RankOutput(y, stats)


def _output_file(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.pt")
