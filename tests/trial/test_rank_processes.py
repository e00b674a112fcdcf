"""Processes of a trial end as they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deep_moe.trial import rank_processes


def use_compiler_and_group(_device: torch.device) -> None:
    torch.compiler.disable(lambda: dist.all_reduce(torch.ones(4)))()


def num_group_threads_after(rank: int, folder: str) -> None:
    group = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": 2}
    rank_processes.run_in_group(use_compiler_and_group, torch.device("cpu"), (), **group)
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    Path(folder, f"rank{rank}").write_text(str(sum("gloo" in name for name in names)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads here")
def test_threads_of_the_group_end_with_the_group(tmp_path: Path) -> None:
    """Those that outlive the group end with the interpreter, which can abort the process."""
    torch.multiprocessing.spawn(num_group_threads_after, args=(str(tmp_path),), nprocs=2)
    assert [Path(tmp_path, f"rank{rank}").read_text() for rank in range(2)] == ["0", "0"]
