"""Ranks as processes of one machine: on a GPU each, or emulated."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

# Its calls' default arguments hold the group of all ranks if there is one when it is imported, as
# a compiler does later. The group's threads would then outlive the group, and can abort a process
# that ends.
import torch.distributed.nn.functional


def run_on_ranks(
    work: Callable[..., None],
    num_ranks: int,
    device_type: str,
    *args: Any,
    start_method: Literal["spawn", "forkserver", "fork"] | None = None,
) -> None:
    """Run work(device, *args) in a process for each rank, all in one group: rank r on GPU r
    ("cuda") or emulated ("cpu"). If one fails, the others are ended, and the error holds its
    traceback.

    start_method: by default "spawn" for GPUs, and "forkserver" for emulated ranks: these are forks
    of a process that has only imported, so that PyTorch is imported once and not by every rank.
    "fork" starts them from this process, without the threads that its PyTorch computes with."""
    if start_method is None:
        start_method = "spawn" if device_type == "cuda" else "forkserver"
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["deep_moe.trial.calls"])
    with tempfile.TemporaryDirectory(prefix="deep_moe_ranks_") as folder:
        torch.multiprocessing.start_processes(
            _run_rank,
            args=(work, num_ranks, device_type, folder, dict(os.environ), args),
            nprocs=num_ranks,
            start_method=start_method,
        )


def results_of_ranks(
    work: Callable[..., Any], num_ranks: int, device_type: str, *args: Any, **how: Any
) -> list[Any]:
    """What work(device, *args) returns on each rank of `run_on_ranks`. how: its start_method."""
    num_gpus = torch.cuda.device_count()
    if device_type == "cuda" and num_gpus < num_ranks:
        raise ValueError(
            f"device cuda needs a GPU for each of {num_ranks} ranks; there are {num_gpus}"
        )
    with tempfile.TemporaryDirectory(prefix="deep_moe_trial_") as folder:
        files = [Path(folder, f"rank{rank}.pt") for rank in range(num_ranks)]
        run_on_ranks(_save_result, num_ranks, device_type, work, files, *args, **how)
        return [torch.load(file, weights_only=False) for file in files]


def _save_result(
    device: torch.device, work: Callable[..., Any], files: Sequence[Path], *args: Any
) -> None:
    torch.save(work(device, *args), files[dist.get_rank()])


def _run_rank(
    rank: int,
    work: Callable[..., None],
    num_ranks: int,
    device_type: str,
    folder: str,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    # A server of forks keeps the environment in which it was started.
    os.environ.clear()
    os.environ.update(environment)
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    run_in_group(
        work,
        device,
        args,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
    )


def run_in_group(
    work: Callable[..., None], device: torch.device, args: tuple[Any, ...], **group: Any
) -> None:
    """Run work(device, *args) between joining and leaving the group of all ranks. group: further
    arguments of `init_process_group`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
    else:
        dist.init_process_group("gloo", **group)
    try:
        work(device, *args)
    finally:
        dist.destroy_process_group()
