"""The unfused layer computes the layer: two processes against the reference."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.problem import reference_sample
from benchmarks.unfused import UnfusedLayer
from deep_moe.activations import Swiglu
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.trial.comparison import compare
from deep_moe.trial.real_size import rank_layer, rank_tokens

SHAPE = MoEShape(2, 6, 3, 256, 128, 30)
COUNTS = (30, 7)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    cpu = torch.device("cpu")
    unfused = UnfusedLayer(SHAPE, rank_layer(SHAPE, rank, 5, cpu), dist.group.WORLD)
    tokens = rank_tokens(SHAPE, COUNTS[rank], rank, 5, cpu)
    y = unfused(*unfused.prepare(tokens), tokens.topk_idx, tokens.topk_weights, Swiglu(10.0))
    on_target = target_of("sm_90a").weights_of()
    rows = torch.arange(COUNTS[rank])
    expected = reference_sample(SHAPE, tokens, rows, 5, on_target, Swiglu(10.0))
    Path(folder, str(rank)).write_text(str(compare(y, expected.y).cosine_distance))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_agree_with_the_reference(tmp_path: Path):
    torch.multiprocessing.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        assert float(Path(tmp_path, str(rank)).read_text()) < 0.005
