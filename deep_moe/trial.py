"""One call of a layer on all ranks: emulated in this process, or with a process for each."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from .emulated_ranks import EmulatedRanks
from .heuristics import MoEShape
from .mega_moe import fp8_fp4_mega_moe
from .synthetic import Layer, Tokens
from .weights import transform_weights_for_mega_moe


@dataclass(frozen=True)
class RankOutput:
    """What one rank's call gave."""

    y: torch.Tensor  # bfloat16 [tokens, hidden]
    stats: torch.Tensor  # int32 [local experts]: tokens that each of them received


def run_emulated_ranks(
    shape: MoEShape, layer: Layer, tokens: Sequence[Tokens], **call: Any
) -> list[RankOutput]:
    """All ranks in this process. `call`: keyword arguments of `EmulatedRanks.call`."""
    weights = [
        transform_weights_for_mega_moe(*layer.of_rank(rank, shape.num_ranks), arch=call.get("arch"))
        for rank in range(shape.num_ranks)
    ]
    with EmulatedRanks(
        shape.num_ranks,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
    ) as ranks:
        for buffer, own in zip(ranks.buffers, tokens, strict=True):
            fill_inputs(buffer, own)
        outputs = [_empty_output(shape, own, torch.device("cpu")) for own in tokens]
        ranks.call([o.y for o in outputs], weights, [o.stats for o in outputs], **call)
    return outputs


def run_processes(
    shape: MoEShape, layer: Layer, tokens: Sequence[Tokens], *, device: str, **call: Any
) -> list[RankOutput]:
    """One process per rank, as in a deployment: rank r on GPU r ("cuda") or emulated ("cpu").

    call: keyword arguments of `fp8_fp4_mega_moe`. If one rank fails, the others are ended, and the
    error holds its traceback.
    """
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus < shape.num_ranks:
        raise ValueError(
            f"device cuda needs a GPU for each of {shape.num_ranks} ranks; there are {num_gpus}"
        )
    with tempfile.TemporaryDirectory(prefix="deep_moe_trial_") as folder:
        torch.multiprocessing.spawn(
            _run_rank,
            args=(shape, layer, list(tokens), device, call, folder),
            nprocs=shape.num_ranks,
        )
        return [
            RankOutput(**torch.load(_output_file(folder, rank))) for rank in range(shape.num_ranks)
        ]


def fill_inputs(buffer: SymmBuffer, tokens: Tokens) -> None:
    """Copy a rank's tokens into its buffer."""
    n = tokens.num_tokens
    buffer.x[:n].copy_(tokens.x)
    buffer.x_sf[:n].copy_(tokens.x_sf)
    buffer.topk_idx[:n].copy_(tokens.topk_idx)
    buffer.topk_weights[:n].copy_(tokens.topk_weights)


def _run_rank(
    rank: int,
    shape: MoEShape,
    layer: Layer,
    tokens: Sequence[Tokens],
    device_type: str,
    call: Mapping[str, Any],
    folder: str,
) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=shape.num_ranks,
    )
    try:
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
        output = _empty_output(shape, tokens[rank], device)
        fp8_fp4_mega_moe(output.y, *weights, buffer, output.stats, **call)
        buffer.memory.synchronize()
        buffer.raise_if_failed()
        torch.save({"y": output.y.cpu(), "stats": output.stats.cpu()}, _output_file(folder, rank))
        dist.barrier()  # no rank takes its memory away while another still reads it
    finally:
        dist.destroy_process_group()


def _empty_output(shape: MoEShape, tokens: Tokens, device: torch.device) -> RankOutput:
    y = torch.empty(tokens.num_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32, device=device)
    return RankOutput(y, stats)


def _output_file(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.pt")
