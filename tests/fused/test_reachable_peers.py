"""B6: ranks whose GPUs do not reach each other's memory are refused when the buffer is created."""

import pytest
import torch
import torch.distributed as dist

from deep_moe.fused import symm_memory
from deep_moe.fused.symm_memory import GpuIdentity, require_reachable_peers, unreachable_peer


def gpu(name: str, machine: str = "m", has_fabric: bool = False) -> GpuIdentity:
    return GpuIdentity(machine, name, has_fabric)


def test_linked_gpus_reach_each_other() -> None:
    gpus = [gpu("a"), gpu("b"), gpu("c")]
    assert unreachable_peer(gpus, 1, lambda own, peer: own == "b") is None


def test_a_gpu_without_a_link_is_named() -> None:
    text = unreachable_peer([gpu("a"), gpu("b"), gpu("c")], 1, lambda own, peer: peer != "c")
    assert text == "the GPU of rank 1 is not linked to that of rank 2"


def test_a_gpu_that_this_process_does_not_see_is_left_to_the_rendezvous() -> None:
    assert unreachable_peer([gpu("a"), gpu("b")], 0, lambda own, peer: None) is None


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, False), (False, True)])
def test_machines_need_a_fabric(first: bool, second: bool) -> None:
    gpus = [gpu("a", "m", first), gpu("a", "n", second)]
    text = unreachable_peer(gpus, 0, lambda own, peer: True)
    assert text == "rank 0 and rank 1 run on different machines"


def test_a_fabric_joins_machines() -> None:
    gpus = [gpu("a", "m", True), gpu("b", "n", True)]
    assert unreachable_peer(gpus, 0, lambda own, peer: False) is None


def test_all_ranks_hear_of_it(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank sees the missing link."""

    def work(rank: int) -> str:
        monkeypatch.setattr(symm_memory, "gpu_identity", lambda device: gpu(f"gpu {rank}"))
        monkeypatch.setattr(symm_memory, "link_of_gpus", lambda own, peer: rank != 1)
        with pytest.raises(ValueError, match="GPUs are linked by NVLink") as caught:
            require_reachable_peers(dist.group.WORLD, torch.device("cuda", rank))
        return str(caught.value)

    texts = run_ranks(3, work)
    assert set(texts) == {
        "group must be ranks whose GPUs are linked by NVLink; "
        "the GPU of rank 1 is not linked to that of rank 0"
    }
