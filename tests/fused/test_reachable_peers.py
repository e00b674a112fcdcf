"""B6: ranks whose GPUs do not reach each other's memory are refused when the buffer is created."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from deep_moe.errors import DeepMoEError
from deep_moe.fused import peers, symm_memory
from deep_moe.fused.buffer import get_symm_buffer_for_mega_moe
from deep_moe.fused.peers import (
    Fabric,
    GpuIdentity,
    cause_of,
    fabric_of,
    own_problem,
    require_reachable_peers,
    unreachable_peer,
)

DOMAIN = Fabric("rack.1", None)
DEVICE = torch.device("cuda", 0)


def gpu(name: str, machine: str = "m", fabric: Fabric | None = None) -> GpuIdentity:
    return GpuIdentity(machine, name, fabric or Fabric())


def test_linked_gpus_reach_each_other() -> None:
    gpus = [gpu("a"), gpu("b"), gpu("c")]
    assert unreachable_peer(gpus, 1, lambda own, peer: own == "b") is None


def test_a_gpu_without_a_link_is_named() -> None:
    text = unreachable_peer([gpu("a"), gpu("b"), gpu("c")], 1, lambda own, peer: peer != "c")
    assert text == "the GPU of rank 1 is not linked to that of rank 2"


def test_a_gpu_that_this_process_does_not_see_is_left_to_the_rendezvous() -> None:
    assert unreachable_peer([gpu("a"), gpu("b")], 0, lambda own, peer: None) is None


def test_ranks_of_one_gpu_are_refused() -> None:
    text = unreachable_peer([gpu("a"), gpu("b"), gpu("a")], 2, lambda own, peer: True)
    assert text is not None
    assert text.startswith("rank 2 and rank 0 use the same GPU: call torch.cuda.set_device")


def test_ranks_of_one_gpu_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's switch, as the GPU tests do on machines of fewer GPUs than ranks."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    gpus = [gpu("a"), gpu("b"), gpu("a")]
    assert unreachable_peer(gpus, 2, lambda own, peer: own != peer) is None
    text = unreachable_peer(gpus, 2, lambda own, peer: peer != "b")
    assert text == "the GPU of rank 2 is not linked to that of rank 1"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, DOMAIN, "of rank 0: its GPU shares no memory with other machines"),
        (DOMAIN, None, "of rank 1: its GPU shares no memory with other machines"),
        (DOMAIN, Fabric("rack.1", "no IMEX channel"), "of rank 1: no IMEX channel"),
        (DOMAIN, Fabric("rack.2", None), "in different NVLink domains (rack.1 and rack.2)"),
    ],
)
def test_machines_need_a_fabric(first: Fabric, second: Fabric, words: str) -> None:
    gpus = [gpu("a", "m", first), gpu("b", "n", second)]
    text = unreachable_peer(gpus, 0, lambda own, peer: True)
    assert text is not None
    assert text.startswith("rank 0 and rank 1 run on different machines, or in containers")
    assert words in text


def test_a_fabric_joins_machines() -> None:
    gpus = [gpu("a", "m", DOMAIN), gpu("b", "n", DOMAIN)]
    assert unreachable_peer(gpus, 0, lambda own, peer: False) is None


class Nvml:
    """Stands in for libnvidia-ml."""

    def __init__(self, *, state: int = 3, status: int = 0, clique: int = 7, known: bool = True):
        self.state, self.status, self.clique, self.known = state, status, clique, known

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802
        assert uuid == b"GPU-00-11"
        return 0 if self.known else 6

    def nvmlDeviceGetGpuFabricInfo(self, device: Any, info: Any) -> int:  # noqa: N802
        """In the form of nvml.h: 16 bytes, two words, one byte."""
        words = bytes(range(16)) + self.status.to_bytes(4, "little")
        words += self.clique.to_bytes(4, "little") + bytes([self.state])
        ctypes.memmove(ctypes.addressof(info._obj), words, len(words))
        return 0


def test_a_domain_is_the_cluster_and_the_clique(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "channel0").touch()
    monkeypatch.setattr(peers, "IMEX_CHANNELS", tmp_path)
    expected = Fabric("000102030405060708090a0b0c0d0e0f.7", None)
    assert fabric_of("00-11", Nvml()) == expected
    assert fabric_of("GPU-00-11", Nvml()) == expected


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (Nvml(state=0), "has not joined an NVLink fabric (state not supported)"),
        (Nvml(state=2), "(state in progress): start nvidia-fabricmanager"),
        (Nvml(status=15), "(state completed, error 15)"),
        (Nvml(known=False), "NVML does not tell its GPU's fabric (error 6)"),
        (Nvml(), "no IMEX channel can be opened there: start nvidia-imex"),
    ],
)
def test_why_a_gpu_has_no_fabric(nvml: Nvml, words: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "IMEX_CHANNELS", tmp_path)
    problem = fabric_of("00-11", nvml).problem
    assert problem is not None
    assert words in problem


def fail(text: str) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise RuntimeError(text)

    return call


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("CUDA error: an illegal memory access was encountered\nmore", "an earlier kernel of this"),
        ("Error 802: system not yet initialized", "start nvidia-fabricmanager"),
    ],
)
def test_an_earlier_fault_is_told_apart(text: str, words: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", fail(text))
    problem = own_problem(DEVICE)
    assert problem is not None
    assert problem.startswith(text.split("\n")[0])
    assert words in problem


def test_only_memory_that_kernels_can_address_will_do(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for backend in ("CUDA", None):
        monkeypatch.setattr(symm_mem, "get_backend", lambda device, name=backend: name)
        assert own_problem(DEVICE) is None
    monkeypatch.setattr(symm_mem, "get_backend", lambda device: "NVSHMEM")
    problem = own_problem(DEVICE)
    assert problem is not None
    assert "NVSHMEM" in problem
    assert "unset TORCH_SYMMMEM" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pidfd_getfd: Operation not permitted", "--cap-add=SYS_PTRACE"),
        ("pidfd_getfd: Operation not permitted", "without expandable_segments"),
        ("failed to send fd: No such file or directory", "must share /tmp"),
        ("CUDA driver error: invalid resource handle", "different NVLink domains"),
        ("detected allocations from overlapping devices from different ranks", "set_device"),
        ("CUDA driver error: operation not permitted", "start nvidia-imex"),
        ("CUDA driver error: out of memory", "fewer tokens per rank"),
    ],
)
def test_what_pytorchs_errors_mean(text: str, words: str) -> None:
    cause = cause_of(text)
    assert cause is not None
    assert words in cause


def test_other_errors_have_no_made_up_cause() -> None:
    assert cause_of("something else") is None


def test_all_ranks_hear_of_it(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank sees the missing link."""

    def work(rank: int) -> str:
        monkeypatch.setattr(peers, "own_problem", lambda device: None)
        monkeypatch.setattr(peers, "gpu_identity", lambda device: gpu(f"gpu {rank}"))
        monkeypatch.setattr(peers, "link_of_gpus", lambda own, peer: rank != 1)
        with pytest.raises(ValueError, match="GPUs are linked by NVLink") as caught:
            require_reachable_peers(dist.group.WORLD, torch.device("cuda", rank))
        return str(caught.value)

    texts = run_ranks(3, work)
    assert set(texts) == {
        "group must be ranks whose GPUs are linked by NVLink; "
        "the GPU of rank 1 is not linked to that of rank 0"
    }


def test_a_rank_with_a_problem_names_itself_to_all(run_ranks, monkeypatch) -> None:
    """The exchange of memory after it names the rank, too, and is not reached by the others."""

    def work(rank: int) -> str:
        monkeypatch.setattr(peers, "own_problem", lambda device: "broken" if rank == 1 else None)
        monkeypatch.setattr(peers, "gpu_identity", lambda device: gpu(f"gpu {rank}"))
        with pytest.raises(ValueError, match="rank 1: broken") as caught:
            require_reachable_peers(dist.group.WORLD, torch.device("cuda", rank))
        monkeypatch.setattr(symm_memory, "require_reachable_peers", lambda group, device: None)
        monkeypatch.setattr(symm_mem, "empty", fail("pidfd_getfd: Operation not permitted"))
        with pytest.raises(DeepMoEError, match=rf"rank {rank} could not .*SYS_PTRACE"):
            symm_memory.DeviceMemory(dist.group.WORLD, 64, 16, torch.device("cuda", rank))
        return str(caught.value)

    assert len(set(run_ranks(2, work))) == 1


def test_a_destroyed_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="was destroyed: make buffers anew"):
        get_symm_buffer_for_mega_moe(group, 4, 4, 2, 256, 128, device="cpu")
